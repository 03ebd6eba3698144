"""Declarations of tasks: the transfers they take and leave, their needs in memory and their metrics."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Literal

from rltrain.tasks.metrics import Metric

Key = tuple[str, str]
"""(role, memory part of the role)."""


def parts_of(role: str, *names: str) -> frozenset[Key]:
    return frozenset((role, name) for name in names)


@dataclass(frozen=True)
class Needs:
    """The memory parts of a task.

    `reads` are only read, `updates` are read and written, and `rewrites` are overwritten completely. All three are
    needed on the device. `keeps` are read wherever they are, on the device or on the host.
    """

    reads: frozenset[Key] = frozenset()
    updates: frozenset[Key] = frozenset()
    rewrites: frozenset[Key] = frozenset()
    keeps: frozenset[Key] = frozenset()

    @property
    def parts(self) -> frozenset[Key]:
        """The parts needed on the device."""
        return self.reads | self.updates | self.rewrites

    @property
    def writes(self) -> frozenset[Key]:
        return self.updates | self.rewrites

    def of(self, roles: Collection[str]) -> "Needs":
        """Returns the needs restricted to parts of `roles`."""
        return Needs(*(frozenset(key for key in keys if key[0] in roles) for keys in self._fields))

    def with_keys(self, others: Mapping[Key, Key]) -> "Needs":
        """Returns the needs with some parts replaced by others."""
        return Needs(*(frozenset(others.get(key, key) for key in keys) for keys in self._fields))

    @property
    def _fields(self) -> tuple[frozenset[Key], ...]:
        return self.reads, self.updates, self.rewrites, self.keeps


@dataclass(frozen=True)
class Task:
    """A method of a role's class, `name(step, chunk)`.

    `takes` and `leaves` are names of transfers. A task that `informs` a role evaluates samples and leaves the result
    for it. For the actor it evaluates scored samples, for the reward unscored ones.

    The role's model, if it has one, computes on samples in a task with `informs`, with `forward` or with gradients.
    `kind` names this work in the report of a run. It defaults to the name of the task.
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
    """Roles that take part in the task if they are placed."""


@dataclass(frozen=True)
class RoleTasks:
    """The declaration of a role, read by the order, the exchange and the plan of memory."""

    name: str
    tasks: tuple[Task, ...] = ()
    model: Literal["trained", "evaluated", "served", None] = None
    """The kind of model.

    - trained: has an optimizer, trains in mini-batches and is saved in checkpoints of the run.
    - evaluated: never learns, and has separate weights or the actor's.
    - served: runs in an engine.
    """
    head: Literal["vocabulary", "value"] = "vocabulary"
    """Output head of a separate model."""
    reads_text: bool = False
    """Whether the model reads responses as text with a separate tokenizer. It then needs neither the policy's
    vocabulary nor room for the policy's longest sample."""
    needed_by_algorithm: bool = True
    """Whether the role is used only by algorithms that need it. If not, users may add it to any algorithm."""
    beside_steps: bool = False
    """Whether its work is independent of the samples of a step."""
    on_device_if_offloaded: bool = False
    """Whether a role without a model has memory on the device if `<role>.offload` is set."""
