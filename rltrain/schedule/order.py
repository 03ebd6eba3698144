"""The order of tasks: one list, the same on every rank.

A rank executes the entries of the roles it hosts, in this order, and skips the rest. An experience transfer has two
ends, a post by the source role and a later wait by the destination role; a task over several roles is one entry that
all of their ranks join.
"""

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from rltrain.cluster.placement import Placement

WEIGHT_SYNC = "weight_sync"
CHECKPOINT = "checkpoint"
SAME_WEIGHTS = ("generate_evaluation", "score_evaluation", "decide_to_stop")

Transfer = tuple[str, str, str, int, int]
"""Name, source role, destination role, step and chunk: what a post and its wait have in common."""


@dataclass(frozen=True)
class Entry:
    """One position of the order.

    `kind` task: the method `name` of every role in `roles`. post, wait: the two ends of the transfer called `name`
    from `roles[0]` to `roles[1]`. `chunk` is the part of the step that it works on, where the step is cut into parts.
    `final` entries run even when training has ended early.
    """

    kind: Literal["task", "post", "wait"]
    name: str
    roles: tuple[str, ...]
    step: int
    chunk: int = 0
    final: bool = False

    @property
    def actors(self) -> tuple[str, ...]:
        """The roles whose ranks execute this entry."""
        return {"task": self.roles, "post": self.roles[:1], "wait": self.roles[1:]}[self.kind]

    @property
    def transfer(self) -> Transfer:
        return (self.name, self.roles[0], self.roles[1], self.step, self.chunk)

    def __str__(self) -> str:
        arrow = " -> ".join(self.roles) if self.kind != "task" else "+".join(self.roles)
        part = f"{self.step}.{self.chunk}" if self.chunk else str(self.step)
        return f"{self.kind + ' ' if self.kind != 'task' else ''}{self.name}[{part}] ({arrow})"


class Order(list[Entry]):
    """Builds the list; every wait is appended right before its first consumer.

    `boundaries` are, by training step, the positions before which everything belongs to the steps before it: where a
    run can be cut. `saves` are the steps at whose boundaries a checkpoint is due.
    """

    def __init__(self, entries: Iterable[Entry] = ()) -> None:
        super().__init__(entries)
        self.boundaries: dict[int, int] = {}
        self.saves: set[int] = set()

    def task(self, name: str, *roles: str, step: int, chunk: int = 0, final: bool = False) -> None:
        self.append(Entry("task", name, roles, step, chunk, final))

    def post(self, name: str, source: str, destination: str, step: int, chunk: int = 0) -> None:
        self.append(Entry("post", name, (source, destination), step, chunk))

    def wait(self, name: str, source: str, destination: str, step: int, chunk: int = 0) -> None:
        self.append(Entry("wait", name, (source, destination), step, chunk))

    def from_step(self, step: int) -> "Order":
        """What is left of the run at the boundary of `step`, all experience that crosses it being posted first."""
        cut = self.boundaries[step]
        crossing = self.crossing(cut)
        rest = Order([*crossing, *self[cut:]])
        rest.saves = {save for save in self.saves if save > step}
        moved = len(crossing) - cut
        rest.boundaries = {later: position + moved for later, position in self.boundaries.items() if later >= step}
        return rest

    def crossing(self, position: int) -> list[Entry]:
        """The posts before `position` whose waits are not."""
        awaited = {entry.transfer for entry in self[position:] if entry.kind == "wait"}
        return [entry for entry in self[:position] if entry.kind == "post" and entry.transfer in awaited]

    def digest(self) -> str:
        """Equal on two ranks exactly when their orders are."""
        return hashlib.sha256("\n".join(map(str, self)).encode()).hexdigest()[:16]

    def syncs(self) -> list[tuple[int, int]]:
        """Of every weight sync its position, and the first one from which an engine may join it: after the last task
        before it that must find the weights which the order gives it."""
        found, earliest = [], 0
        for position, entry in enumerate(self):
            if entry.name in SAME_WEIGHTS or (entry.name == CHECKPOINT and entry.step in self.saves):
                earliest = position + 1
            elif entry.name == WEIGHT_SYNC:
                found.append((position, earliest))
        return found


def program(order: Order, placement: Placement, rank: int) -> list[Entry]:
    """The entries that `rank` executes."""
    hosted = set(placement.hosts(rank))
    return [entry for entry in order if hosted.intersection(entry.actors)]
