"""The ranks of test_group_messages."""

from typing import Any

import torch
import torch.distributed as dist

from rltrain.runtime.group_messages import broadcast_bytes, broadcast_json, gather_bytes, gather_rows


def tell(sizes: list[int], values: list[Any], source: int) -> dict[str, Any]:
    """Returns the received messages of these sizes, the JSON values, and all ranks' bytes and rows."""
    group, rank = dist.group.WORLD, dist.get_rank()
    assert group is not None
    mine = [bytes([rank]) * size for size in sizes]
    rows = torch.full((rank, 2), rank, dtype=torch.int64)
    return {
        "bytes": [[*broadcast_bytes(data, group, source=source)] for data in mine],
        "values": [broadcast_json(value if rank == source else None, group, source=source) for value in values],
        "gathered": [[*data] for data in gather_bytes(bytes([rank]) * rank, group)],
        "rows": [one.tolist() for one in gather_rows(rows, group)],
        "nothing": [one.tolist() for one in gather_rows(rows[:0], group)],
    }
