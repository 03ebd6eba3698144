"""What is said of a task, once: whose it is, what it takes and leaves, needs in memory, and reports."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Literal

from rltrain.tasks.metrics import Metric

Key = tuple[str, str]
"""(role, part of its memory)."""


def parts_of(role: str, *names: str) -> frozenset[Key]:
    return frozenset((role, name) for name in names)


@dataclass(frozen=True)
class Needs:
    """The parts that a task reads, those that it reads and writes, and those that it only writes, whole.

    `keeps` it reads where they lie, on the device or on the host.
    """

    reads: frozenset[Key] = frozenset()
    updates: frozenset[Key] = frozenset()
    rewrites: frozenset[Key] = frozenset()
    keeps: frozenset[Key] = frozenset()

    @property
    def parts(self) -> frozenset[Key]:
        """Those that it needs on the device."""
        return self.reads | self.updates | self.rewrites

    @property
    def writes(self) -> frozenset[Key]:
        return self.updates | self.rewrites

    def of(self, roles: Collection[str]) -> "Needs":
        """Those of `roles` alone."""
        return Needs(*(frozenset(key for key in keys if key[0] in roles) for keys in self._fields))

    def with_keys(self, others: Mapping[Key, Key]) -> "Needs":
        """With other parts in the place of some."""
        return Needs(*(frozenset(others.get(key, key) for key in keys) for keys in self._fields))

    @property
    def _fields(self) -> tuple[frozenset[Key], ...]:
        return self.reads, self.updates, self.rewrites, self.keeps


@dataclass(frozen=True)
class Task:
    """A method of a role's class: `name(step, chunk)`.

    `takes` and `leaves` are transfers by name. One that `informs` a role says something of samples, and leaves that for
    it: for the actor of scored samples, for the reward of samples as they were drawn. In one that does, in one with
    `forward`, and in those that make gradients, the role's model, where it has one, computes on samples. `kind` is what
    the report calls such work; without one it is the task's name.
    """

    name: str
    needs: Needs = Needs()
    takes: tuple[str, ...] = ()
    leaves: tuple[str, ...] = ()
    informs: Literal["actor", "reward", None] = None
    forward: bool = False
    reports: tuple[Metric, ...] = ()
    kind: str = ""
    joined_by: tuple[str, ...] = ()
    """Roles that take part in it where they are placed."""


@dataclass(frozen=True)
class RoleTasks:
    """A role as the order, the exchange and the plan of memory know it."""

    name: str
    tasks: tuple[Task, ...] = ()
    model: Literal["trained", "evaluated", "served", None] = None
    """Trained: with an optimizer, in mini-batches, saved in checkpoints of the run. Evaluated: it learns nothing, and
    has weights of its own or the actor's. Served: by an engine."""
    head: Literal["vocabulary", "value"] = "vocabulary"
    """Of an own model."""
    reads_text: bool = False
    """Whether its model has a tokenizer of its own, which reads what was drawn as text: then it need not have the
    policy's vocabulary, nor room for its longest sample."""
    needed_by_algorithm: bool = True
    """Otherwise it may be placed by whoever wants what it says of the samples."""
    beside_steps: bool = False
    """Whether nothing that it works on is part of a step's samples."""
    on_device_if_offloaded: bool = False
    """Without a model it has something on the device where `<role>.offload` says that this is to leave."""
