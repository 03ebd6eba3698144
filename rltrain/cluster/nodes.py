"""What the nodes of a job say of themselves, by the first rank of each, and how they differ."""

import json
import platform
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from rltrain.cluster.placement import format_ranks
from rltrain.cluster.world import World
from rltrain.errors import StallError, listed


class NodeBoard:
    """Values that the first rank of every node leaves for rank 0, and what that makes of them for all ranks.

    `topic` keeps the values of one question apart from those of others.
    """

    def __init__(self, world: World, topic: str) -> None:
        self.world, self.topic = world, topic
        self._store = dist.PrefixStore(f"nodes/{topic}", world.store)

    @property
    def speaks(self) -> bool:
        """Whether this rank is the first of its node."""
        return self.world.local_rank == 0

    def say(self, value: Any, key: str = "said") -> None:
        self._store.set(f"{key}/{self.world.node}", json.dumps(value))

    def heard(self, node: int, key: str = "said") -> Any:
        """What `node` has said under `key`; StallError where it says nothing within `timeout_s` of the world."""
        return self._get(f"{key}/{node}", f"node {node}")

    def of_all(self, key: str = "said") -> list[Any]:
        """By node."""
        return [self.heard(node, key) for node in range(self.world.num_nodes)]

    def settle(self, verdict: Any) -> None:
        """By rank 0, for `settled` of all."""
        self._store.set("settled", json.dumps(verdict))

    def settled(self) -> Any:
        return self._get("settled", "rank 0")

    def _get(self, key: str, whom: str) -> Any:
        try:
            self._store.wait([key], timedelta(seconds=self.world.timeout_s))
        except dist.DistStoreError as error:
            raise StallError(
                f"rank {self.world.rank} has waited {self.world.timeout_s:g} s for what {whom} says of {self.topic}"
            ) from error
        return json.loads(self._store.get(key))


@dataclass(frozen=True)
class Spoken:
    """What a node says: what has to be the same on all, and what is wrong on it alone."""

    compared: Mapping[str, str]
    problems: Sequence[str] = ()


@dataclass(frozen=True)
class Difference:
    """A thing that nodes have unlike each other: what each value is, and on which nodes."""

    what: str
    values: Mapping[str, Sequence[int]]


@dataclass(frozen=True)
class Compared:
    hosts: Sequence[str]
    """By node."""
    differences: Sequence[Difference]
    problems: Mapping[str, Sequence[int]]
    """What is wrong -> the nodes that say so."""

    def name(self, nodes: Iterable[int]) -> str:
        """Such as "nodes 0, 2-3 (a1, a3, a4)"."""
        numbers = sorted(nodes)
        hosts = listed((self.hosts[number] for number in numbers), LISTED)
        return f"node{'s' * (len(numbers) > 1)} {format_ranks(numbers)} ({hosts})"

    def sentences(self) -> list[str]:
        """One for each difference and problem; none where all is well."""
        told = []
        for one in self.differences:
            values = "; ".join(f"{value} on {self.name(nodes)}" for value, nodes in one.values.items())
            told.append(f"{one.what} differs: {values}")
        return [*told, *(f"{problem}, on {self.name(nodes)}" for problem, nodes in self.problems.items())]


LISTED = 8
"""Hosts that a message names."""
ABSENT = "nothing"


def compare_nodes(board: NodeBoard, mine: Spoken | None) -> Compared | None:
    """What the nodes say, on rank 0; None on the others. `mine` is None on ranks that are not the first of a node.

    Only what differs from the first node travels to rank 0. Collective over: the first ranks of all nodes.
    """
    if mine is None:
        return None
    if board.world.node == 0:
        board.say(dict(mine.compared), "first")
    first: Mapping[str, str] = board.heard(0, "first")
    keys = sorted(first.keys() | mine.compared.keys())
    unlike = {key: value for key in keys if (value := mine.compared.get(key, ABSENT)) != first.get(key, ABSENT)}
    board.say({"host": platform.node(), "unlike": unlike, "problems": list(mine.problems)})
    if board.world.rank != 0:
        return None
    said = board.of_all()
    return Compared(
        hosts=[one["host"] for one in said],
        differences=_differences(first, [one["unlike"] for one in said]),
        problems=_grouped([(problem, node) for node, one in enumerate(said) for problem in one["problems"]]),
    )


def _differences(first: Mapping[str, str], unlike: Sequence[Mapping[str, str]]) -> list[Difference]:
    """`unlike` is by node."""
    return [
        Difference(key, _grouped([(here.get(key, first.get(key, ABSENT)), node) for node, here in enumerate(unlike)]))
        for key in sorted({key for here in unlike for key in here})
    ]


def _grouped(pairs: Iterable[tuple[str, int]]) -> dict[str, list[int]]:
    groups: dict[str, list[int]] = {}
    for value, node in pairs:
        groups.setdefault(value, []).append(node)
    return groups
