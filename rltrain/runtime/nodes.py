"""Compares the nodes of a job at its start, and refuses nodes that cannot work together."""

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

# Facts about the nodes of a job, reported by the first rank of each, and their differences.


class NodeBoard:
    """Values from the first rank of every node for rank 0, and rank 0's result for all ranks.

    `topic` separates the values of one question from those of others.
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
        """Returns the value of `node` under `key`. Raises StallError if it is missing after the world's `timeout_s`."""
        return self._get(f"{key}/{node}", f"node {node}")

    def of_all(self, key: str = "said") -> list[Any]:
        """Returns the values of all nodes, by node."""
        return [self.heard(node, key) for node in range(self.world.num_nodes)]

    def settle(self, verdict: Any) -> None:
        """Publishes rank 0's result. All ranks read it with `settled`."""
        self._store.set("settled", json.dumps(verdict))

    def settled(self) -> Any:
        return self._get("settled", "rank 0")

    def _get(self, key: str, whom: str) -> Any:
        try:
            self._store.wait([key], timedelta(seconds=self.world.timeout_s))
        except dist.DistStoreError as error:
            raise StallError(
                f"rank {self.world.rank} has waited {self.world.timeout_s:g} s for the report of {whom} on {self.topic}"
            ) from error
        return json.loads(self._store.get(key))


@dataclass(frozen=True)
class Spoken:
    """A node's facts: values that must be equal on all nodes, and its own problems."""

    compared: Mapping[str, str]
    problems: Sequence[str] = ()


@dataclass(frozen=True)
class NodeDifference:
    """A difference between nodes: each value, with its nodes."""

    what: str
    values: Mapping[str, Sequence[int]]


@dataclass(frozen=True)
class Compared:
    hosts: Sequence[str]
    """Host names by node."""
    differences: Sequence[NodeDifference]
    problems: Mapping[str, Sequence[int]]
    """Problem -> the nodes that have it."""

    def name(self, nodes: Iterable[int]) -> str:
        """Returns text such as "nodes 0, 2-3 (a1, a3, a4)"."""
        numbers = sorted(nodes)
        hosts = listed((self.hosts[number] for number in numbers), LISTED)
        return f"node{'s' * (len(numbers) > 1)} {format_ranks(numbers)} ({hosts})"

    def sentences(self) -> list[str]:
        """Returns one sentence for each difference and problem. Empty if there are none."""
        told = []
        for one in self.differences:
            values = "; ".join(f"{value} on {self.name(nodes)}" for value, nodes in one.values.items())
            told.append(f"{one.what} differs: {values}")
        return [*told, *(f"{problem}, on {self.name(nodes)}" for problem, nodes in self.problems.items())]


LISTED = 8
"""Number of hosts named in a message."""
ABSENT = "nothing"


def compare_nodes(board: NodeBoard, mine: Spoken | None) -> Compared | None:
    """Returns the comparison of all nodes on rank 0, and None elsewhere. `mine` is None except on a node's first rank.

    Nodes send rank 0 only their differences from the first node. Collective over: the first ranks of all nodes.
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
    """Returns the differences. `unlike` has each node's values that differ from the first node's, by node."""
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


# The facts about a node at the start of a job, for `refuse_unlike_nodes`.

PACKAGE = Path(__file__).resolve().parents[1]
COMPARED_PACKAGES = ("torch", "megatron-core", "transformers", "numpy")
SLURM_NODE = "SLURM_NODEID"


def of_program(config: Config, world: World) -> Spoken:
    """Returns code, versions, config and number of ranks."""
    return Spoken(
        {
            "number of ranks (torchrun's --nproc-per-node)": str(world.ranks_per_node),
            f"code of {PACKAGE.name}": digest_of_code(PACKAGE),
            **versions(),
            **{f"config key {key}": value for key, value in flattened(config.model_dump(mode="json"))},
        }
    )


def of_machine(config: Config, world: World, model_paths: Mapping[str, str]) -> Spoken:
    """Returns the state of folders and memory. `model_paths`: config key -> path of a checkpoint to be read on this
    node."""
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
    """Returns the versions of software that decides numbers and messages. Missing packages are left out."""
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
    """Returns a hash over the names and bytes of every Python file in `folder`."""
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        digest.update(f"{path.relative_to(folder)}\0".encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


def flattened(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yields (dotted key, value as JSON)."""
    for name, value in values.items():
        if isinstance(value, dict) and value:
            yield from flattened(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", json.dumps(value, sort_keys=True)


# Refuses unsuitable nodes with one message that names them, before anything is built.

VISIBLE_WITHIN_S = 10.0
"""Seconds until a new file is visible. Network file systems cache the absence of a file."""


def refuse_other_programs(config: Config, world: World) -> None:
    """Compares the programs of all nodes.

    Raises ConfigError if a node has other code, versions, config or numbers of ranks. Raises PlacementError if its
    index differs between Slurm's list and torchrun. Collective over: all ranks.
    """
    if world.num_nodes > 1:
        refuse_unlike_nodes(world, "programs", lambda: of_program(config, world))
        refuse_other_order(world)


def refuse_machines(config: Config, world: World, model_paths: Mapping[str, str]) -> None:
    """Raises ConfigError if a node lacks a checkpoint of the other nodes, or cannot write to a folder of the job.
    Collective over: all ranks."""
    refuse_unlike_nodes(world, "machines", lambda: of_machine(config, world, model_paths))


def refuse_unlike_nodes(world: World, topic: str, say: Callable[[], Spoken]) -> None:
    """Raises ConfigError, the same on every rank, if required values differ between nodes, or if a node has a problem.

    The first rank of every node calls `say`. Collective over: all ranks.
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
    """Raises PlacementError, the same on every rank, if Slurm and torchrun number the nodes differently.

    If the nodes do not have Slurm's numbers 0 to n - 1, Slurm did not start them one by one. Then nothing is checked.
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
                f"node {node} of torchrun is {host}, which is node {number} of Slurm's list, so `node:` in a placement "
                "would mean another machine; start torchrun with --node-rank $SLURM_NODEID and --master-addr, like "
                "launch/slurm, and without --rdzv-backend c10d"
            )


def refuse_folders_apart(world: World, locks: Mapping[str, tuple[str, str]]) -> None:
    """Raises ConfigError if a node cannot see the files written by the job's leader. Collective over: all ranks.

    `locks`: config key -> the lock file in its folder, and the content of that file.
    """
    if world.num_nodes > 1:
        refuse_unlike_nodes(world, "shared folders", lambda: Spoken({}, [*_unseen(locks)]))


def _unseen(locks: Mapping[str, tuple[str, str]]) -> list[str]:
    deadline = time.monotonic() + VISIBLE_WITHIN_S
    return [
        f"{key}: {Path(path).parent} is not the same folder on all nodes; expected one that all nodes share"
        for key, (path, text) in locks.items()
        if not comes_to_be(partial(_holds, Path(path), text), deadline)
    ]


def _holds(path: Path, text: str) -> bool:
    return path.is_file() and path.read_text(encoding="utf-8") == text


def comes_to_be(is_there: Callable[[], bool], deadline: float) -> bool:
    """Returns whether `is_there` becomes true before the deadline, after a change by another node."""
    while not is_there():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True
