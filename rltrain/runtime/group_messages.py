"""Bytes and JSON that the ranks of a process group tell each other, as tensors: nothing is unpickled.

Each function is collective over its `group`; with None a rank is alone. `device` is where the group's backend wants its
tensors: the host for gloo, the rank's GPU for NCCL.
"""

import json
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor


def broadcast_bytes(
    data: bytes, group: dist.ProcessGroup | None, *, source: int = 0, device: torch.device | str = "cpu"
) -> bytes:
    """Returns the bytes of rank `source` of the group on every rank; those of the others are ignored."""
    if group is None or group.size() == 1:
        return data
    size = torch.tensor([len(data)], device=device)
    dist.broadcast(size, group=group, group_src=source)
    if not size:
        return b""
    sent = _as_tensor(data) if group.rank() == source else torch.empty(int(size), dtype=torch.uint8)
    sent = sent.to(device)
    dist.broadcast(sent, group=group, group_src=source)
    return sent.cpu().numpy().tobytes()


def broadcast_json(
    value: Any, group: dist.ProcessGroup | None, *, source: int = 0, device: torch.device | str = "cpu"
) -> Any:
    """Returns the JSON value of rank `source` of the group on every rank; numbers arrive with all their digits."""
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
    """Returns the tensors of every rank, by rank of the group. They may differ in their first dimension alone."""
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
