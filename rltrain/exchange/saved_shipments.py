"""Experience that crosses a checkpoint: shipments as the tensors of a file, and who sends them on."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from rltrain.data.experience import Experience
from rltrain.exchange.shipment import Shipment, joined

Key = tuple[str, str, int, int]
"""Source role, transfer, step and chunk."""

GROUP_TOKENS = "group_tokens"


def as_tensors(shipments: Mapping[Key, Shipment]) -> dict[str, Tensor]:
    """Every field under "source/transfer/step/chunk/field"."""
    return {
        "/".join([*map(str, key), name]): values
        for key, shipment in shipments.items()
        for name, values in {**shipment.experience.columns(), GROUP_TOKENS: shipment.group_tokens}.items()
    }


def read_parts(saved: Sequence[Mapping[str, Tensor]]) -> dict[Key, list[Shipment]]:
    """What each of the ranks that saved had of every shipment, in the ranks' order."""
    parts: dict[Key, list[Shipment]] = {}
    for tensors in saved:
        columns: dict[Key, dict[str, Tensor]] = {}
        for path, values in tensors.items():
            source, transfer, step, chunk, name = path.split("/")
            columns.setdefault((source, transfer, int(step), int(chunk)), {})[name] = values
        for key, of_shipment in columns.items():
            group_tokens = of_shipment.pop(GROUP_TOKENS)
            of_nobody = torch.zeros_like(group_tokens)  # until they are shared out
            parts.setdefault(key, []).append(Shipment(Experience(**of_shipment), group_tokens, of_nobody))
    return parts


def share(parts: Sequence[Shipment], replica: int, num_replicas: int) -> Shipment:
    """What replica `replica` sends on: part i is that of replica i mod num_replicas. It may hold no samples."""
    holders = torch.zeros_like(parts[0].group_tokens)
    for number, part in enumerate(parts):
        holders[part.experience.group_ids] = number % num_replicas
    mine = parts[replica::num_replicas]
    if not mine:
        return replace(parts[0].without_samples(), holders=holders)
    return replace(joined(mine), holders=holders)
