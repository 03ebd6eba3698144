"""Bytes and JSON between the ranks of a process group, sent as tensors. Nothing is unpickled.

Collective over: the ranks of `group`, for each function. With None a rank is alone. `device` is the device of tensors
for the group's backend: the host for gloo, the rank's GPU for NCCL.
"""

import json
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

FIRST_BYTES, SIZE_BYTES = 1024, 8


def broadcast_bytes(
    data: bytes, group: dist.ProcessGroup | None, *, source: int = 0, device: torch.device | str = "cpu"
) -> bytes:
    """Returns the bytes of rank `source` of the group on every rank. The bytes of other ranks are ignored.

    Up to FIRST_BYTES take one message, more take two.
    """
    if group is None or group.size() == 1:
        return data
    is_source = group.rank() == source
    first = torch.zeros(SIZE_BYTES + FIRST_BYTES, dtype=torch.uint8)
    if is_source:
        begin = len(data).to_bytes(SIZE_BYTES, "little") + data[:FIRST_BYTES]
        first[: len(begin)] = _as_tensor(begin)
    told = _broadcast(first, group, source, device)
    size = int.from_bytes(told[:SIZE_BYTES], "little")
    if size <= FIRST_BYTES:
        return told[SIZE_BYTES : SIZE_BYTES + size]
    rest = _as_tensor(data[FIRST_BYTES:]) if is_source else torch.empty(size - FIRST_BYTES, dtype=torch.uint8)
    return told[SIZE_BYTES:] + _broadcast(rest, group, source, device)


def _broadcast(data: Tensor, group: dist.ProcessGroup, source: int, device: torch.device | str) -> bytes:
    sent = data.to(device)
    dist.broadcast(sent, group=group, group_src=source)
    return sent.cpu().numpy().tobytes()


def broadcast_json(
    value: Any, group: dist.ProcessGroup | None, *, source: int = 0, device: torch.device | str = "cpu"
) -> Any:
    """Returns the JSON value of rank `source` of the group on every rank. Numbers keep all their digits."""
    if group is None or group.size() == 1:
        return value
    text = json.dumps(value).encode() if group.rank() == source else b""
    return json.loads(broadcast_bytes(text, group, source=source, device=device))


def gather_bytes(data: bytes, group: dist.ProcessGroup | None, device: torch.device | str = "cpu") -> list[bytes]:
    """Returns the bytes of every rank, by rank of the group."""
    if group is None or group.size() == 1:
        return [data]
    return [rows.cpu().numpy().tobytes() for rows in gather_rows(_as_tensor(data).to(device), group)]


def gather_rows(rows: Tensor, group: dist.ProcessGroup) -> list[Tensor]:
    """Returns the tensors of every rank, by rank of the group. They may differ in their first dimension only."""
    size = torch.tensor([len(rows)], device=rows.device)
    sizes = [torch.zeros_like(size) for _ in range(group.size())]
    dist.all_gather(sizes, size, group=group)
    padded = rows.new_zeros(max(map(int, sizes)), *rows.shape[1:])
    padded[: len(rows)] = rows
    of_ranks = [torch.empty_like(padded) for _ in sizes]
    if len(padded):
        dist.all_gather(of_ranks, padded, group=group)
    return [one[: int(length)] for one, length in zip(of_ranks, sizes, strict=True)]


def _as_tensor(data: bytes) -> Tensor:
    return torch.from_numpy(np.frombuffer(bytearray(data), dtype=np.uint8))
