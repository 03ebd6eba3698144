"""Checksums of boxes of tensors. They are sums over elements, so boxes may be cut in any way (csrc/reshard.h)."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from rltrain.models.table import ITEM_BYTES, Array, ElementType, IntArray
from rltrain.reshard import copy_table
from rltrain.reshard.copy_table import DTYPES
from rltrain.reshard.native import SLICE, Bases, check_side

_TYPES = {dtype: kind for kind, dtype in DTYPES.items()}
_TYPE_OF_SIZE = {
    ITEM_BYTES[kind]: kind for kind in (ElementType.FLOAT8_E4M3, ElementType.BFLOAT16, ElementType.FLOAT32)
}

BOX = np.dtype(
    [
        ("base", np.int64),
        ("offset", np.int64),
        ("stride", np.int64),
        ("rows", np.int64),
        ("cols", np.int64),
        ("place", np.int64),
        ("width", np.int64),
        ("entry", np.int64),
        ("exact", np.bool_),
    ]
)
"""A box of tensor number `base`. Its element (i, j), i < rows and j < cols, is at offset + i * stride + j. In the
checksum it counts as element place + i * width + j. The sum is added to `entry`. Unless `exact`, all NaNs are alike."""


def checksums(boxes: Array, tensors: Sequence[Tensor], num_entries: int) -> IntArray:
    """Returns the checksums of `boxes` [BOX] in contiguous `tensors`, int64 [num_entries]. All tensors must be on one
    device.

    The result is the same on every device, with and without native code. Raises ValueError if a box leaves its tensor.
    """
    if not len(boxes):
        return np.zeros(num_entries, dtype=np.int64)
    device = tensors[0].device
    flats = [tensor.detach().view(-1) for tensor in tensors]
    slices = _slices(boxes, np.array([_TYPES[flat.dtype] for flat in flats], dtype=np.uint8))
    sizes = np.array([flat.nbytes for flat in flats], dtype=np.int64)
    bases = Bases(np.array([_TYPES[flat.dtype] for flat in flats], dtype=np.int64), sizes)
    check_side(slices, "src", slices["src_type"], slices["rows"], slices["cols"], bases)
    sums = torch.zeros(num_entries, dtype=torch.int64, device=device)
    copies = copy_table.backend_class(device)(slices, device)
    copies.bind([*flats, sums])
    copies.checksum(0, len(slices))
    found: IntArray = sums.cpu().numpy()
    return found


def checksum_of(tensor: Tensor) -> int:
    """Returns the checksum of a contiguous tensor's bits. Its type may be any with 1, 2 or 4 bytes."""
    flat = tensor.detach().view(-1).view(DTYPES[_TYPE_OF_SIZE[tensor.dtype.itemsize]])
    box = np.zeros(1, dtype=BOX)
    box["rows"], box["cols"], box["exact"] = 1, len(flat), True
    return int(checksums(box, [flat], 1)[0])


def _slices(boxes: Array, types: Array) -> Array:
    """Returns slices [SLICE] in the form of rs_cpu_checksum and its CUDA twin. The sums are the base after the bases of
    `types`."""
    slices = np.zeros(len(boxes), dtype=SLICE)
    slices["src_base"], slices["src_offset"], slices["src_stride"] = boxes["base"], boxes["offset"], boxes["stride"]
    slices["rows"], slices["cols"] = boxes["rows"], boxes["cols"]
    slices["dst_offset"], slices["dst_stride"] = boxes["place"], boxes["width"]
    slices["src_type"] = slices["dst_type"] = types[boxes["base"]]
    slices["amax_base"], slices["amax_offset"] = len(types), boxes["entry"]
    slices["row_phase"] = ~boxes["exact"]
    return slices
