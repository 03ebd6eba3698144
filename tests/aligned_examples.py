"""Slices whose addresses, strides and lengths allow vectors, and windows of every width."""

import dataclasses

import numpy as np
import torch

from rltrain.models.table import ElementType
from rltrain.reshard.native import SLICE, quantises
from tests.slice_examples import Example, make_sources

WIDTHS = (*range(1, 36), 40, 48, 64, 80, 96, 112, 128, 144, 160, 192, 256, 288, 384, 512, 528, 1040)
HEIGHTS = (1, 2, 3, 7, 33)


def aligned(example: Example, multiple: int) -> Example:
    """`example` with offsets, strides and columns cut to multiples of this many elements, phases of columns too."""
    slices = example.slices.copy()
    for name in ("cols", "src_offset", "src_stride", "dst_stride", "col_phase"):
        slices[name] -= slices[name] % multiple
    used = dict.fromkeys(ElementType, 0)
    for entry in slices:
        destination = ElementType(entry["dst_type"])
        entry["dst_offset"] = used[destination]
        extent = int(entry["rows"] * np.maximum(entry["dst_stride"], entry["cols"]))
        used[destination] += -(-extent // multiple) * multiple
    return dataclasses.replace(example, slices=slices, destination_elements=tuple(used.values()))


def windows(source: ElementType, destination: ElementType, gap: int) -> Example:
    """Windows of every width and height, all from offset 0, with `gap` elements between the rows of both sides."""
    slices = np.zeros(len(WIDTHS) * len(HEIGHTS), SLICE)
    slices["cols"], slices["rows"] = np.repeat(WIDTHS, len(HEIGHTS)), np.tile(HEIGHTS, len(WIDTHS))
    slices["src_stride"] = slices["dst_stride"] = slices["cols"] + gap
    slices["src_base"], slices["src_type"] = source, source
    slices["dst_base"], slices["dst_type"] = 4 + destination, destination
    slices["amax_base"] = np.where(quantises(slices), 8, -1)
    # Widths of 16 n elements begin at multiples of 16 elements.
    ends = np.cumsum(-(-(slices["rows"] * slices["dst_stride"]) // 16) * 16)
    slices["dst_offset"][1:] = ends[:-1]
    entries = -(-slices["cols"] // 128)
    slices["amax_stride"] = entries
    slices["amax_offset"][1:] = np.cumsum(entries)[:-1]
    elements = tuple(int(ends[-1]) if kind == destination else 0 for kind in ElementType)
    # Special values would make NaN of whole blocks.
    sources = make_sources(7, specials=destination != ElementType.FLOAT8_E4M3 or source == destination)
    times = int((slices["rows"] * slices["src_stride"]).max()) // sources[0].numel() + 1
    repeated = tuple(tensor.view(torch.uint8).repeat(times).view(tensor.dtype) for tensor in sources)
    return Example(slices, repeated, elements, int(entries.sum()))
