"""The order of tasks: one list, derived from the config, the same on every rank.

A rank executes the entries of the roles it hosts, in this order, and skips the rest. An experience transfer has two
ends, a post by the source role and a later wait by the destination role; a task over several roles is one entry that
all of their ranks join.
"""

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from rltrain.cluster.placement import Placement
from rltrain.config.schema import Config
from rltrain.errors import ConfigError


@dataclass(frozen=True)
class Entry:
    """One position of the order.

    `kind` task: the method `name` of every role in `roles`. post, wait: the two ends of the transfer called `name`
    from `roles[0]` to `roles[1]`. `final` entries run even when training has ended early.
    """

    kind: Literal["task", "post", "wait"]
    name: str
    roles: tuple[str, ...]
    step: int
    final: bool = False

    @property
    def actors(self) -> tuple[str, ...]:
        """The roles whose ranks execute this entry."""
        return {"task": self.roles, "post": self.roles[:1], "wait": self.roles[1:]}[self.kind]

    @property
    def transfer(self) -> tuple[str, str, str, int]:
        """What a post and its wait have in common."""
        return (self.name, *self.roles[:2], self.step)  # type: ignore[return-value]

    def __str__(self) -> str:
        arrow = " -> ".join(self.roles) if self.kind != "task" else "+".join(self.roles)
        return f"{self.kind + ' ' if self.kind != 'task' else ''}{self.name}[{self.step}] ({arrow})"


class Order(list[Entry]):
    """Builds the list; every wait is appended right before its first consumer."""

    def task(self, name: str, *roles: str, step: int, final: bool = False) -> None:
        self.append(Entry("task", name, roles, step, final))

    def post(self, name: str, source: str, destination: str, step: int) -> None:
        self.append(Entry("post", name, (source, destination), step))

    def wait(self, name: str, source: str, destination: str, step: int) -> None:
        self.append(Entry("wait", name, (source, destination), step))

    def digest(self) -> str:
        """Equal on two ranks exactly when their orders are."""
        return hashlib.sha256("\n".join(map(str, self)).encode()).hexdigest()[:16]


def build_order(config: Config, roles: Iterable[str]) -> Order:
    """The whole run of `config`, for the roles that its placement names."""
    order, roles = Order(), tuple(roles)
    for step in range(config.steps + 1):
        _evaluate(order, config, roles, step)
        if step < config.steps:
            {"grpo": _grpo_step, "sft": _sft_step}[config.algorithm](order, config, roles, step)
    if config.checkpoint.save_hf:
        order.task("save_hf", "actor", step=config.steps, final=True)
    return order


def _grpo_step(order: Order, config: Config, roles: tuple[str, ...], step: int) -> None:
    order.task("generate", "rollout", step=step)
    order.post("samples", "rollout", "reward", step)
    order.wait("samples", "rollout", "reward", step)
    order.task("score", "reward", step=step)
    order.post("scored", "reward", "actor", step)
    if "reference" in roles:
        order.post("scored", "reward", "reference", step)
        order.wait("scored", "reward", "reference", step)
        order.task("reference_logprobs", "reference", step=step)
        order.post("reference_logprobs", "reference", "actor", step)
    order.wait("scored", "reward", "actor", step)
    if config.loss.old_logprobs == "actor":
        order.task("actor_logprobs", "actor", step=step)
    if "reference" in roles:
        order.wait("reference_logprobs", "reference", "actor", step)
    order.task("advantages", "actor", step=step)
    order.task("update", "actor", step=step)


def _sft_step(order: Order, config: Config, roles: tuple[str, ...], step: int) -> None:
    order.task("demonstrate", "actor", step=step)
    order.task("update", "actor", step=step)


def _evaluate(order: Order, config: Config, roles: tuple[str, ...], step: int) -> None:
    """Weights of this step to the rollout where they are about to be used, and the held-out evaluation where due."""
    due = is_evaluation_step(config, step)
    if due or (config.algorithm != "sft" and step < config.steps):
        order.task("weight_sync", "actor", "rollout", step=step)
    if due:
        order.task("generate_evaluation", "rollout", step=step)
        order.post("evaluation_samples", "rollout", "reward", step)
        order.wait("evaluation_samples", "rollout", "reward", step)
        order.task("score_evaluation", "reward", step=step)
        if config.evaluation.stop_at is not None:
            order.task("decide_to_stop", *roles, step=step)


def is_evaluation_step(config: Config, step: int) -> bool:
    """Before the first step, after the last one, and every `evaluation.interval` steps between."""
    if config.data.eval is None:
        return False
    interval = config.evaluation.interval
    return step in (0, config.steps) or (interval > 0 and step % interval == 0)


def program(order: Order, placement: Placement, rank: int) -> list[Entry]:
    """The entries that `rank` executes."""
    hosted = set(placement.hosts(rank))
    return [entry for entry in order if hosted.intersection(entry.actors)]


def check(order: Order, placement: Placement) -> None:
    """Replay all ranks' programs; ConfigError with rank and entry if they would wait for each other forever.

    A task needs all ranks of its roles, a wait needs the posts of all ranks of its source, and a post first needs the
    waits of those earlier posts of its rank whose wait stands before it in the order (their send buffers are retired).
    Ranks that host the same roles execute the same program, so one of each kind is replayed.
    """
    _check_transfers(order)
    kinds = {placement.hosts(rank): rank for role in placement.roles for rank in placement.ranks(role)}
    programs = {rank: program(order, placement, rank) for rank in kinds.values()}
    members = {role: {rank for hosted, rank in kinds.items() if role in hosted} for role in placement.roles}
    replay = _Replay(order, members)
    cursor = dict.fromkeys(programs, 0)
    moved = True
    while moved:
        moved = False
        for rank, entries in programs.items():
            while cursor[rank] < len(entries) and replay.may_pass(rank, entries[cursor[rank]]):
                cursor[rank] += 1
                moved = True
    stuck = {rank: entries[cursor[rank]] for rank, entries in programs.items() if cursor[rank] < len(entries)}
    if stuck:
        where = ", ".join(f"rank {rank} at {entry}" for rank, entry in sorted(stuck.items()))
        raise ConfigError(f"the order of tasks cannot finish: {where} would wait for each other forever")


class _Replay:
    """Who has arrived at which entry, and what a rank may therefore pass."""

    def __init__(self, order: Order, members: dict[str, set[int]]) -> None:
        self.members = members
        self.position = {entry: i for i, entry in enumerate(order)}
        self.wait_of = {e.transfer: e for e in order if e.kind == "wait"}
        self.post_of = {e.transfer: e for e in order if e.kind == "post"}
        self.arrived: dict[Entry, set[int]] = {entry: set() for entry in order}
        self.done: dict[Entry, set[int]] = {entry: set() for entry in order}
        self.outbox: dict[int, list[Entry]] = {}

    def may_pass(self, rank: int, entry: Entry) -> bool:
        self.arrived[entry].add(rank)
        passes = {"task": self._task, "post": self._post, "wait": self._wait}[entry.kind](rank, entry)
        if passes:
            self.done[entry].add(rank)
        return passes

    def _task(self, rank: int, entry: Entry) -> bool:
        return all(self.arrived[entry] >= self.members[role] for role in entry.roles)

    def _wait(self, rank: int, entry: Entry) -> bool:
        return self.done[self.post_of[entry.transfer]] >= self.members[entry.roles[0]]

    def _post(self, rank: int, entry: Entry) -> bool:
        outbox = self.outbox.setdefault(rank, [])
        due = [e for e in outbox if self.position[self.wait_of[e.transfer]] < self.position[entry]]
        if not all(self.done[self.wait_of[e.transfer]] >= self.members[e.roles[1]] for e in due):
            return False
        self.outbox[rank] = [e for e in outbox if e not in due] + [entry]
        return True


def _check_transfers(order: Order) -> None:
    if len(set(order)) != len(order):
        raise ConfigError("the order of tasks names an entry twice")
    posted = set()
    for entry in order:
        if entry.kind == "post":
            posted.add(entry.transfer)
        elif entry.kind == "wait":
            if entry.transfer not in posted:
                raise ConfigError(f"the order of tasks waits before the post: {entry}")
            posted.remove(entry.transfer)
    if posted:
        raise ConfigError(f"the order of tasks never waits for {sorted(posted)}")
