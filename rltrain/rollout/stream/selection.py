"""Which of the groups that an engine has finished count for a step: those that a filter keeps, while it may drop."""

import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Protocol

import torch.distributed as dist

from rltrain.rollout.sample import SampleGroup
from rltrain.runtime.job_store import poll_s

STEPS_COUNTED = 2
"""What was dropped in steps before this one and the last is not kept: they are over on all engines."""


@dataclass(frozen=True)
class Verdict:
    """What a filter makes of a group that is finished."""

    position: int
    dropped_for: str | None
    """The reason; None: it counts."""
    record: str = ""
    """What is to be known of a group that counts until it is handed over: its rewards, say."""


class GroupFilter(Protocol):
    """On an engine's first rank, which tells the others."""

    def verdicts(self, groups: Mapping[int, SampleGroup], step: int) -> Iterable[Verdict]:
        """Of those of `groups`, by position, that it knows by now; of each once. Never blocks."""
        ...

    def drop(self, group: SampleGroup, step: int, reason: str) -> None:
        """The group was dropped in this step."""
        ...

    def spare(self, group: SampleGroup, step: int, reason: str) -> None:
        """It would have been, but no more may be dropped in this step."""
        ...


class DropCount:
    """How many groups all engines have dropped in this job: of those that they finish in one step at most `limit`.
    `num_engines` look how many.
    """

    def __init__(self, store: dist.Store, limit: int, num_engines: int = 1) -> None:
        self.store = dist.PrefixStore("dropped", store)
        self.limit = limit
        self.poll_s = poll_s(num_engines)
        self._counted: list[int] = []
        """Steps in which this engine has asked, whose counts are still there."""
        self._known = 0
        self._last_look = 0.0

    def take(self, step: int) -> bool:
        """Whether one more may be dropped in this step; then it is counted."""
        if step not in self._counted:
            for over in [earlier for earlier in self._counted if earlier <= step - STEPS_COUNTED]:
                self._counted.remove(over)
                self.store.delete_key(f"step {over}")
            self._counted.append(step)
        if self.store.add(f"step {step}", 1) > self.limit:
            return False
        self._known = self.store.add("all", 1)
        return True

    @property
    def total(self) -> int:
        """Known at once where this rank dropped the last one; looked for every `poll_s` at most where another
        did."""
        now = time.monotonic()
        if now - self._last_look >= self.poll_s:
            self._last_look = now
            self._known = self.store.add("all", 0)
        return self._known


@dataclass
class Selection:
    """The groups of one engine that are finished and not yet decided on, and what is known of those that count.

    All ranks of the engine have the same groups; verdicts come from the first, where alone `filter` is set, before the
    first decode step.
    """

    drops: DropCount
    filter: GroupFilter | None = None
    undecided: dict[int, SampleGroup] = field(default_factory=dict)
    """By position, as they were finished."""
    records: dict[int, str] = field(default_factory=dict)
    """On the first rank: of groups that count and have not been handed over."""
    untold: list[int] = field(default_factory=list)
    """Positions that were dropped here and that no entry of the completion log tells of."""
    told: dict[int, tuple[int, ...]] = field(default_factory=dict)
    """By the position of a group that counts and has not been handed over: those of which its entry tells."""

    def decide(self, step: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """On the first rank: positions (that count, that are dropped) of what is known by now."""
        assert self.filter is not None, "whoever scores groups sets the filter before the first decode step"
        kept, dropped = [], []
        for verdict in self.filter.verdicts(self.undecided, step) if self.undecided else ():
            group, reason = self.undecided[verdict.position], verdict.dropped_for
            if reason is not None and self.drops.take(step):
                self.filter.drop(group, step, reason)
                dropped.append(verdict.position)
                continue
            if reason is not None:
                self.filter.spare(group, step, reason)
            self.records[verdict.position] = verdict.record
            kept.append(verdict.position)
        return tuple(kept), tuple(dropped)

    def apply(self, kept: Sequence[int], dropped: Collection[int]) -> list[SampleGroup]:
        """The groups that count from now on."""
        for position in dropped:
            del self.undecided[position]
        self.untold += dropped
        return [self.undecided.pop(position) for position in kept]

    def tell(self, position: int) -> tuple[int, ...]:
        """What was dropped since the last entry of the completion log, for that of the group at `position`."""
        self.told[position], self.untold = tuple(self.untold), []
        return self.told[position]

    def hand_over(self, positions: Iterable[int]) -> None:
        """All engines have read the entries of these groups."""
        for position in positions:
            self.told.pop(position, None)

    @property
    def unseen(self) -> tuple[int, ...]:
        """Positions that were dropped here and that other engines do not count as dropped yet."""
        return (*chain.from_iterable(self.told.values()), *self.untold)
