"""What nodes say of themselves, and refusing those that cannot do a job together."""

import hashlib
import importlib.metadata
import json
import os
import platform
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from rltrain.config.schema import Config
from rltrain.errors import ConfigError, PlacementError, StallError, listed
from rltrain.runtime.machine import problems_of_disks, problems_of_shared_memory
from rltrain.runtime.placement import format_ranks
from rltrain.runtime.world import World
from rltrain.tasks.roles import served_roles

# What the nodes of a job say of themselves, by the first rank of each, and how they differ.


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
class NodeDifference:
    """A thing that nodes have unlike each other: what each value is, and on which nodes."""

    what: str
    values: Mapping[str, Sequence[int]]


@dataclass(frozen=True)
class Compared:
    hosts: Sequence[str]
    """By node."""
    differences: Sequence[NodeDifference]
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


def _differences(first: Mapping[str, str], unlike: Sequence[Mapping[str, str]]) -> list[NodeDifference]:
    """`unlike` is by node."""
    return [
        NodeDifference(
            key, _grouped([(here.get(key, first.get(key, ABSENT)), node) for node, here in enumerate(unlike)])
        )
        for key in sorted({key for here in unlike for key in here})
    ]


def _grouped(pairs: Iterable[tuple[str, int]]) -> dict[str, list[int]]:
    groups: dict[str, list[int]] = {}
    for value, node in pairs:
        groups.setdefault(value, []).append(node)
    return groups


# What a node says of itself at the start of a job, for `refuse_unlike_nodes`.

PACKAGE = Path(__file__).resolve().parents[1]
COMPARED_PACKAGES = ("torch", "megatron-core", "transformers", "numpy")
SLURM_NODE = "SLURM_NODEID"


def of_program(config: Config, world: World) -> Spoken:
    """Code, versions, config, and the number of ranks."""
    return Spoken(
        {
            "number of ranks (torchrun's --nproc-per-node)": str(world.ranks_per_node),
            f"code of {PACKAGE.name}": digest_of_code(PACKAGE),
            **versions(),
            **{f"config key {key}": value for key, value in flattened(config.model_dump(mode="json"))},
        }
    )


def of_machine(config: Config, world: World, model_paths: Mapping[str, str]) -> Spoken:
    """Folders and memory. `model_paths`: config key -> where a checkpoint is to be read, on this node."""
    there = {f"{key}: {path}": "there" if Path(path).exists() else "missing" for key, path in model_paths.items()}
    folders = {"output_dir": config.output_dir}
    if config.checkpoint.saves:
        folders["checkpoint.dir"] = config.checkpoint_dir
    if config.checkpoint.memory:
        folders["checkpoint.memory.folder"] = os.path.expandvars(config.checkpoint.memory.folder)
    problems = [*problems_of_disks(folders)]
    engines = {config.served(role).engine for role in served_roles() if role in config.placed_roles}
    if (world.device.type == "cuda" and world.ranks_per_node > 1) or "sglang" in engines:
        problems += problems_of_shared_memory()
    return Spoken(there, problems)


def versions() -> dict[str, str]:
    """Of what decides numbers and messages. Empty for what is not installed."""
    found = {"version of Python": platform.python_version()}
    for name in COMPARED_PACKAGES:
        try:
            found[f"version of {name}"] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    if torch.cuda.is_available():
        found["version of CUDA"] = str(torch.version.cuda)
        found["version of NCCL"] = ".".join(map(str, torch.cuda.nccl.version()))
    return found


@cache
def digest_of_code(folder: Path) -> str:
    """Of every Python file in `folder`, its name and bytes."""
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        digest.update(f"{path.relative_to(folder)}\0".encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


def flattened(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """(dotted key, value as JSON)."""
    for name, value in values.items():
        if isinstance(value, dict) and value:
            yield from flattened(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", json.dumps(value, sort_keys=True)


# Refusing nodes that cannot do a job together: one message, which names them, before anything is built.

VISIBLE_WITHIN_S = 10.0
"""Network file systems remember for some seconds that a file was not there."""


def refuse_other_programs(config: Config, world: World) -> None:
    """UserError where a node has other code, versions, config or numbers of ranks, or another place in Slurm's list
    than in torchrun's. Collective over: all ranks."""
    if world.num_nodes > 1:
        refuse_unlike_nodes(world, "programs", lambda: of_program(config, world))
        refuse_other_order(world)


def refuse_machines(config: Config, world: World, model_paths: Mapping[str, str]) -> None:
    """ConfigError where a node lacks a checkpoint that others have, or cannot write where it has to. Collective over:
    all ranks."""
    refuse_unlike_nodes(world, "machines", lambda: of_machine(config, world, model_paths))


def refuse_unlike_nodes(world: World, topic: str, say: Callable[[], Spoken]) -> None:
    """ConfigError, the same on every rank, where nodes differ in what has to be the same, or any has a problem.

    `say` is called by the first rank of every node. Collective over: all ranks.
    """
    board = NodeBoard(world, topic)
    compared = compare_nodes(board, say() if board.speaks else None)
    if compared is not None:
        board.settle(compared.sentences())
    if faults := board.settled():
        raise ConfigError(
            "\n  ".join(["nodes of this job cannot work together:", *faults] if world.num_nodes > 1 else faults)
        )


def refuse_other_order(world: World) -> None:
    """PlacementError, the same on every rank, where Slurm and torchrun number nodes differently.

    Nodes that do not all have a number of their own from Slurm were started in another way, which says nothing.
    Collective over: all ranks.
    """
    board = NodeBoard(world, "order of nodes")
    if board.speaks:
        number = os.environ.get(SLURM_NODE, "")
        board.say([int(number) if number.isdecimal() else None, os.uname().nodename])
    if world.rank == 0:
        said = board.of_all()
        numbers = [number for number, _ in said]
        board.settle(said if sorted(map(str, numbers)) == sorted(map(str, range(len(said)))) else [])
    said = board.settled()
    for node, (number, host) in enumerate(said):
        if number != node:
            raise PlacementError(
                f"node {node} of torchrun is {host}, which is node {number} of Slurm's list, so that `node:` in a "
                "placement would name another machine than the list does; start torchrun with --node-rank "
                "$SLURM_NODEID and --master-addr, as launch/slurm does, and without --rdzv-backend c10d"
            )


def refuse_folders_apart(world: World, locks: Mapping[str, tuple[str, str]]) -> None:
    """ConfigError where a node does not see what the job's leader has written. Collective over: all ranks.

    `locks`: config key -> the lock file in the folder that it names, and what is in it.
    """
    if world.num_nodes > 1:
        refuse_unlike_nodes(world, "shared folders", lambda: Spoken({}, [*_unseen(locks)]))


def _unseen(locks: Mapping[str, tuple[str, str]]) -> list[str]:
    deadline = time.monotonic() + VISIBLE_WITHIN_S
    return [
        f"{key}: {Path(path).parent} is not the folder that other nodes have by this name; expected one that all share"
        for key, (path, text) in locks.items()
        if not comes_to_be(partial(_holds, Path(path), text), deadline)
    ]


def _holds(path: Path, text: str) -> bool:
    return path.is_file() and path.read_text(encoding="utf-8") == text


def comes_to_be(is_there: Callable[[], bool], deadline: float) -> bool:
    """Returns whether something that another node did is seen here before the deadline."""
    while not is_there():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True
