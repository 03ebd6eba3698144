"""What the ranks of an engine tell each other while they deliver weights, as tensors over gloo."""

import torch
import torch.distributed as dist


def gather_bytes(data: bytes, group: dist.ProcessGroup | None) -> list[bytes]:
    """Every rank's `data`, by rank of `group` (gloo; None: this rank alone). Collective over: `group`."""
    if group is None:
        return [data]
    size = torch.tensor([len(data)])
    sizes = [torch.zeros_like(size) for _ in range(dist.get_world_size(group))]
    dist.all_gather(sizes, size, group=group)
    longest = max(int(other) for other in sizes)
    mine = torch.zeros(longest, dtype=torch.uint8)
    mine[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else 0
    everyone = [torch.empty_like(mine) for _ in sizes]
    dist.all_gather(everyone, mine, group=group)
    return [bytes(other[: int(length)].numpy()) for other, length in zip(everyone, sizes, strict=True)]


def from_first(value: bytes, group: dist.ProcessGroup | None) -> bytes:
    """`value` as the first rank of `group` has it; the others' is ignored. Collective over: `group`."""
    if group is None:
        return value
    return gather_bytes(value if dist.get_rank(group) == 0 else b"", group)[0]
