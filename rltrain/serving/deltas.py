"""What changed of a checkpoint, put into an engine's parameters in place."""

from collections.abc import Mapping

import torch
from torch import Tensor

from rltrain.checkpoint.hf_reader import held_piece, within
from rltrain.errors import CheckpointError
from rltrain.models.table import Array
from rltrain.reshard.checksums import checksum_of
from rltrain.reshard.layout import Layout
from rltrain.rollout.layout import form


def check_delta(delta: form.Delta, held: str | None, layout: Layout) -> None:
    """CheckpointError where it cannot be applied to version `held` of what lies as in `layout`."""
    try:
        described = delta.check(held)
    except form.DeltaRefused as refused:
        raise CheckpointError(f"model_path: {refused}") from None
    tensors = layout.tensors
    for name, tensor in described.items():
        expected = tensors.shapes[tensors.numbers[name]] if name in tensors.numbers else None
        if tensor.shape != expected:
            raise CheckpointError(
                f"model_path: {delta.folder} has tensor {name} of shape {list(tensor.shape)}; the model that is served "
                f"has {'none of that name' if expected is None else list(expected)}"
            )


def apply_delta(delta: form.Delta, layout: Layout, parameters: Mapping[str, Tensor]) -> None:
    """All of one that was checked. Raises CheckpointError where a tensor is then not what it was where the delta was
    made: the parameters are then of no version."""
    mine = layout.on(layout.ranks[0])
    flats = [parameters[name].detach().view(-1) for name, _ in mine.parameters]
    try:
        for changed in delta.tensors():
            number = layout.tensors.numbers[changed.name]
            pieces = mine.pieces[mine.pieces["tensor"] == number]
            width = int(layout.tensors.matrix_shapes[number][1])
            for piece in pieces:
                _put(flats[piece["parameter"]], piece, width, changed)
            _compare(flats, pieces, width, changed)
    except form.DeltaRefused as refused:
        raise CheckpointError(f"model_path: {refused}, after some of it was applied") from None


def _put(flat: Tensor, piece: Array, width: int, changed: form.Changed) -> None:
    """What lies in a `piece` [PIECE] of the tensor, as a matrix `width` wide."""
    rows = changed.elements // width - int(piece["row"])
    columns = changed.elements % width - int(piece["col"])
    inside = (rows >= 0) & (rows < int(piece["rows"])) & (columns >= 0) & (columns < int(piece["cols"]))
    places = int(piece["offset"]) + rows[inside] * int(piece["stride"]) + columns[inside]
    flat[places.to(flat.device)] = changed.values[inside].to(flat.device, flat.dtype)


def _compare(flats: list[Tensor], pieces: Array, width: int, changed: form.Changed) -> None:
    """By checksums, where parameters have every bit of the tensor's type."""
    held_type = flats[pieces[0]["parameter"]].dtype
    if torch.promote_types(held_type, changed.dtype) != held_type:
        return
    held = torch.empty(changed.numel, dtype=changed.dtype, device=flats[0].device)
    for piece in pieces:
        held.view(-1, width)[within(piece)] = held_piece(flats, piece).to(changed.dtype)
    if checksum_of(held) != changed.checksum:
        raise CheckpointError(
            f"model_path: {changed.name} is not what was sent once it is applied; expected weights that nobody else "
            "changes"
        )
