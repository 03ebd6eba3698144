"""The checksum of csrc/reshard.h by torch operations."""

import torch
from torch import Tensor

MAX_ELEMENTS = 2**18
"""Elements looked at at a time: few enough for the caches of a CPU. Each takes some tens of bytes meanwhile."""

RUN, PRESENT = 1024, 0xFFA5C3E7
"""RS_RUN and RS_PRESENT."""

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}

_INFINITY = {torch.float32: 0x7F800000, torch.bfloat16: 0x7F80, torch.float16: 0x7C00, torch.float8_e4m3fn: 0x7E}
"""The bits of the largest magnitude that is not a NaN."""

_LOW_HALF = 0xFFFFFFFF
_FIRST_FACTOR, _SECOND_FACTOR = -0x61C8864680B583EB, -0x4B47D0C5A0A8B1AD


def bits_of(values: Tensor, *, exact: bool) -> Tensor:
    """int64, not negative: the bits of `values`; unless `exact`, every NaN has the same ones."""
    num_bits = 8 * values.dtype.itemsize
    bits = values.view(_BITS[values.dtype.itemsize]).to(torch.int64) & ((1 << num_bits) - 1)
    if not exact:
        unsigned = (1 << (num_bits - 1)) - 1
        bits = bits.masked_fill((bits & unsigned) > _INFINITY[values.dtype], _INFINITY[values.dtype] + 1)
    return bits


def keyed_sum(bits: Tensor, place: int, width: int) -> Tensor:
    """int64, no dimensions: of `bits` [rows, cols], which begin at element `place` of a tensor `width` wide."""
    rows, cols = (torch.arange(size, device=bits.device) for size in bits.shape)
    places = place + rows[:, None] * width + cols
    first, last = place // RUN, (place + (len(rows) - 1) * width + len(cols) - 1) // RUN
    run_keys = _run_keys(torch.arange(first, last + 1, device=bits.device))
    place_keys = _place_keys(torch.arange(RUN, device=bits.device))
    return (run_keys[(places // RUN) - first] * (place_keys[places % RUN] * (bits ^ PRESENT))).sum()


def _run_keys(runs: Tensor) -> Tensor:
    """rs_run_key; products and sums wrap around."""
    mixed = (runs + 1) * _FIRST_FACTOR
    mixed = (mixed ^ ((mixed >> 32) & _LOW_HALF)) * _SECOND_FACTOR
    return (mixed ^ ((mixed >> 32) & _LOW_HALF)) | 1


def _place_keys(places: Tensor) -> Tensor:
    """rs_place_key."""
    mixed = (places + 0x9E3779B9) & _LOW_HALF
    mixed = ((mixed ^ (mixed >> 16)) * 0x7FEB352D) & _LOW_HALF
    mixed = ((mixed ^ (mixed >> 15)) * 0x846CA68B) & _LOW_HALF
    return mixed ^ (mixed >> 16)
