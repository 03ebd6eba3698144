"""The weights of an actor that are made when they are asked for, merged with low-rank adapters or brought from the
host, resharded into another role's: some layers at a time, so that never more of them are there than those."""

from collections.abc import Iterable, Mapping, Sequence
from itertools import chain

import numpy as np
from torch import Tensor

from rltrain.config.schema import WeightDelta
from rltrain.models import canonical_tensors
from rltrain.models.families import ROUTER_BIAS
from rltrain.models.lora import matrix_of
from rltrain.reshard.delta_turns import Turn
from rltrain.reshard.execute import SyncReport, total
from rltrain.reshard.fp8_blocks import QuantizedLayouts
from rltrain.reshard.layout import MADE_BYTES, BoolArray, Layout, holding, tensor_groups
from rltrain.roles.role import Job
from rltrain.roles.role_resharding import RoleResharding, Tensors
from rltrain.rollout.layout import EnginePart

Group = tuple[Layout, Layout, QuantizedLayouts | None]
"""Source, destination, and of those that quantise the blocks."""


class MergedResharding:
    """As RoleResharding, of `groups` one after the other, and of `frozen` ones, to which adapters add nothing; all
    together have each tensor of `destination` once.

    Building and running it are collective over: the union of both roles' ranks.
    """

    def __init__(
        self,
        job: Job,
        role: str,
        destination: Layout,
        groups: Sequence[Group],
        frozen: Sequence[Group],
        delta: WeightDelta | None = None,
    ) -> None:
        self.destination, self._rank = destination, job.world.rank
        self._groups = [RoleResharding(job, role, *group, delta) for group in groups]
        self._frozen = [RoleResharding(job, role, *group) for group in frozen]
        self.is_frozen = not groups
        """Whether nothing of `destination` ever changes."""

    def run(
        self, source: Tensors, destination: Tensors, turn: Turn = Turn.PLAIN, *, compares: bool = False
    ) -> tuple[SyncReport | None, float]:
        """Fill `destination`. What is read of `source` is read group by group, and forgotten after its group. In a turn
        of CHANGES what is frozen is neither sent nor read, unless to be compared."""
        reports, verify_s = [], 0.0
        for group in self._groups:
            report, seconds = group.run(self._held(group.source, source), destination, turn, compares=compares)
            reports += [report] if report else []
            verify_s += seconds
        for group in self._frozen:
            held = self._held(group.source, source)
            if turn is not Turn.CHANGES:
                report, seconds = group.run(held, destination, compares=compares)
                reports += [report] if report else []
                verify_s += seconds
            elif compares or group.config.verify:
                verify_s += group.verify(held, destination)
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
    source = job.training_layout("actor")

    def held_of(groups: Iterable[BoolArray]) -> list[Group]:
        found: list[Group] = []
        for held in (_held_by_any(part.plain, tensors) for tensors in groups):
            if held.any():
                some = EnginePart(holding(part.plain, held), part.quantized & held)
                layouts = some.filled_from(holding(source, held))
                found.append((layouts.source, layouts.destination, layouts if some.quantized.any() else None))
        return found

    groups, frozen = (held_of(found) for found in _groups_of(job, source, max_bytes))
    return MergedResharding(job, role, part.filled_from(source).destination, groups, frozen, delta)


def merged_into_model(job: Job, role: str, max_bytes: int = MADE_BYTES) -> MergedResharding:
    """From the actor's layout to that of `role`, whose model is the training backend's."""
    source, destination = job.training_layout("actor"), job.training_layout(role)
    groups, frozen = (
        [(holding(source, tensors), holding(destination, tensors), None) for tensors in found]
        for found in _groups_of(job, source, max_bytes)
    )
    return MergedResharding(job, role, destination, groups, frozen)


def _groups_of(job: Job, source: Layout, max_bytes: int) -> tuple[list[BoolArray], list[BoolArray]]:
    """[tensors] of some layers each that training changes, and those that it leaves as they are: without adapters
    none. Biases of routers follow loads, and are with the former."""
    lora, groups = job.config.model.lora, [*tensor_groups(source.tensors, source.types, max_bytes)]
    if lora is None:
        return groups, []
    adapters = canonical_tensors(job.architecture.adapted(lora.rank, lora.targets)).names
    bias = ROUTER_BIAS.parts[0].name.rpartition(".")[2]
    changing = {*map(matrix_of, adapters), *(name for name in source.tensors.names if name.endswith(bias))}
    adapted = np.isin(source.tensors.names, sorted(changing))
    groups = [group & adapted for group in groups]
    return [group for group in groups if group.any()], [~adapted] if not adapted.all() else []


def _held_by_any(layout: Layout, tensors: np.ndarray) -> np.ndarray:
    held = np.zeros_like(tensors)
    numbers = set(chain.from_iterable(layout.part(share).pieces["tensor"].tolist() for share in set(layout.parts)))
    held[sorted(numbers)] = True
    return held & tensors
