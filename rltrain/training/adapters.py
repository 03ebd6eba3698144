"""How low-rank adapters begin, whatever the backend: the same numbers in every layout."""

import hashlib
from collections.abc import Collection, Mapping
from pathlib import Path

import torch
from torch import Tensor

from rltrain.checkpoint.hf_reader import within, write_piece
from rltrain.checkpoint.peft_files import load_adapters
from rltrain.config.models import Lora
from rltrain.models.lora import A, B, target_of
from rltrain.reshard.layout import Layout


def begin_adapters(layout: Layout, rank: int, parameters: Mapping[str, Tensor], settings: Lora, seed: int) -> None:
    """Fill `parameters`, those of `rank` in the adapters' `layout`, as model.lora says. CheckpointError where its files
    are not of such adapters."""
    if settings.path is None:
        draw_adapters(layout, rank, parameters, settings.targets, seed)
    else:
        load_adapters(Path(settings.path), layout, rank, parameters, settings)


@torch.no_grad()
def draw_adapters(
    layout: Layout, rank: int, parameters: Mapping[str, Tensor], targets: Collection[str] | None, seed: int
) -> None:
    """Fill `parameters`, those of `rank` in the adapters' `layout` but a head's: B with zeros, and A as He et al. 2015,
    "Delving deep into rectifiers", section 2.2, with the negative slope sqrt(5) that PEFT takes: uniform up to
    1 / sqrt(inputs).

    Each A has a generator of its own. Those of matrices that are not among `targets` are zero.
    """
    mine = layout.on(rank)
    flats = [parameters[name].detach().view(-1) for name, _ in mine.parameters]
    heads = {piece["parameter"] for piece in mine.pieces if not layout.tensors.names[piece["tensor"]].endswith((A, B))}
    for number, flat in enumerate(flats):
        if number not in heads:
            flat.zero_()
    drawn: dict[int, Tensor] = {}
    for piece in mine.pieces:
        number = int(piece["tensor"])
        name = layout.tensors.names[number]
        if not name.endswith(A) or (targets is not None and target_of(name) not in targets):
            continue
        if number not in drawn:
            drawn = {number: _drawn(name, layout.tensors.shapes[number], seed)}
        write_piece(flats, piece, drawn[number][within(piece)])


def _drawn(name: str, shape: tuple[int, ...], seed: int) -> Tensor:
    digest = hashlib.sha256(f"{seed} {name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    bound = shape[1] ** -0.5
    return torch.empty(shape).uniform_(-bound, bound, generator=generator)
