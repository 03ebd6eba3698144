"""The weights of an actor that are made when they are asked for, merged with low-rank adapters or brought from the
host, resharded into another role's: some layers at a time, so that never more of them are there than those."""

from collections.abc import Mapping, Sequence
from itertools import chain

import numpy as np
from torch import Tensor

from rltrain.config.schema import WeightDelta
from rltrain.reshard.execute.report import SyncReport, total
from rltrain.reshard.fp8.blocks import QuantizedLayouts
from rltrain.reshard.layout import Layout
from rltrain.reshard.tensor_groups import MADE_BYTES, holding, tensor_groups
from rltrain.roles.role import Job
from rltrain.roles.role_resharding import RoleResharding, Tensors
from rltrain.rollout.layout import EnginePart


class MergedResharding:
    """As RoleResharding, of `groups` one after the other, which have each tensor of `destination` once; `blocks` are of
    those that quantise.

    Building and running it are collective over: the union of both roles' ranks.
    """

    def __init__(
        self,
        job: Job,
        role: str,
        destination: Layout,
        groups: Sequence[tuple[Layout, Layout, QuantizedLayouts | None]],
        delta: WeightDelta | None = None,
    ) -> None:
        self.destination, self._rank = destination, job.world.rank
        self._groups = [RoleResharding(job, role, *group, delta) for group in groups]

    def run(self, source: Tensors, destination: Tensors, *, lost: bool = False) -> tuple[SyncReport | None, float]:
        """Fill `destination`. What is read of `source` is read group by group, and forgotten after its group."""
        reports, verify_s = [], 0.0
        for group in self._groups:
            report, seconds = group.run(self._held(group.source, source), destination, lost=lost)
            reports += [report] if report else []
            verify_s += seconds
        return total(reports) if reports else None, verify_s

    def _held(self, layout: Layout, source: Tensors) -> Mapping[str, Tensor] | None:
        if source is None:
            return None
        # The rest is what a reshard that quantises computes itself.
        return {name: source[name] for name, _ in layout.on(self._rank).parameters if name in source}


def merged_into_part(
    job: Job, role: str, part: EnginePart, delta: WeightDelta | None = None, max_bytes: int = MADE_BYTES
) -> MergedResharding:
    """From the actor's layout to a part of what engines of `role` hold."""
    source, found = job.training_layout("actor"), []
    for tensors in tensor_groups(source.tensors, source.types, max_bytes):
        held = _held_by_any(part.plain, tensors)
        if held.any():
            some = EnginePart(holding(part.plain, held), part.quantized & held)
            layouts = some.filled_from(holding(source, held))
            found.append((layouts.source, layouts.destination, layouts if some.quantized.any() else None))
    return MergedResharding(job, role, part.filled_from(source).destination, found, delta)


def merged_into_model(job: Job, role: str, max_bytes: int = MADE_BYTES) -> MergedResharding:
    """From the actor's layout to that of `role`, whose model is the training backend's."""
    source, destination = job.training_layout("actor"), job.training_layout(role)
    groups = tensor_groups(source.tensors, source.types, max_bytes)
    found = [(holding(source, tensors), holding(destination, tensors), None) for tensors in groups]
    return MergedResharding(job, role, destination, found)


def _held_by_any(layout: Layout, tensors: np.ndarray) -> np.ndarray:
    held = np.zeros_like(tensors)
    numbers = set(chain.from_iterable(layout.part(share).pieces["tensor"].tolist() for share in set(layout.parts)))
    held[sorted(numbers)] = True
    return held & tensors
