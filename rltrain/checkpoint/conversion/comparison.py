"""Comparing two checkpoints tensor by tensor, whatever their formats."""

from dataclasses import fields

import torch
from torch import Tensor

from rltrain.checkpoint.conversion.accounting import row_blocks
from rltrain.checkpoint.conversion.element_type import CHOICES, type_name
from rltrain.checkpoint.conversion.processes import Processes
from rltrain.checkpoint.conversion.progress import ConversionProgress
from rltrain.checkpoint.conversion.sources import Source, num_bytes

BITS = {4: torch.int32, 2: torch.int16}
"""By the bytes of an element: the type to compare it as, for which not-a-numbers equal themselves."""


def first_difference(a: Source, b: Source, processes: Processes, *, dtype: str | None = None) -> str | None:
    """What differs first, in words: the architecture, a tensor's type, then its values, tensor by tensor; or None.

    Values are compared bit for bit. With `dtype` types may differ, and values are compared as rounded to it.
    Collective over: all processes, which share out the tensors.
    """
    if difference := _architectures(a, b) or (None if dtype else _types(a, b)):
        return difference
    mine = b""
    with ConversionProgress(processes, "verify", num_bytes(a)) as bar:
        for tensor in range(processes.rank, len(a.tensors.names), processes.count):
            if difference := _values(a, b, tensor, CHOICES[dtype] if dtype else None, bar):
                mine = b"%d %b" % (tensor, difference.encode())
                break
    found = [share.decode().split(" ", 1) for share in processes.gather(mine) if share]
    return min(((int(tensor), difference) for tensor, difference in found), default=(0, None))[1]


def _architectures(a: Source, b: Source) -> str | None:
    for field in fields(a.architecture):
        ours, theirs = getattr(a.architecture, field.name), getattr(b.architecture, field.name)
        if ours != theirs:
            return f"{field.name} is {ours} in {a.path} and {theirs} in {b.path}"
    return None


def _types(a: Source, b: Source) -> str | None:
    for name, ours, theirs in zip(a.tensors.names, a.dtypes, b.dtypes, strict=True):
        if ours != theirs:
            return (
                f"{name} is {type_name(ours)} in {a.path} and {type_name(theirs)} in {b.path}; --dtype compares the "
                "values as rounded to one type"
            )
    return None


def _values(a: Source, b: Source, tensor: int, dtype: torch.dtype | None, bar: ConversionProgress) -> str | None:
    for box in row_blocks(a, tensor):
        ours, theirs = (source.read(box).to(dtype or source.dtypes[tensor]) for source in (a, b))
        differing = _bits(ours) != _bits(theirs)
        if differing.any():
            first = int(differing.flatten().to(torch.uint8).argmax())
            row, column = divmod(first, box.cols)
            is_vector = len(a.tensors.shapes[tensor]) == 1
            place = [column] if is_vector else [box.row + row, column]
            return (
                f"{a.tensors.names[tensor]}{place} is {ours[row, column].item()!r} in {a.path} and "
                f"{theirs[row, column].item()!r} in {b.path}"
            )
        bar.advance(ours.numel() * a.dtypes[tensor].itemsize)
    return None


def _bits(values: Tensor) -> Tensor:
    return values.contiguous().view(BITS[values.element_size()])
