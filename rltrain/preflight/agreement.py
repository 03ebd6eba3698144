"""Refusing nodes that cannot do a job together: one message, which names them, before anything is built."""

import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from rltrain.cluster.nodes import NodeBoard, Spoken, compare_nodes
from rltrain.cluster.world import World
from rltrain.config.schema import Config
from rltrain.errors import ConfigError, PlacementError
from rltrain.preflight.statements import of_machine, of_program, slurm_node

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
        board.say([slurm_node(), os.uname().nodename])
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
        if not _comes_to_hold(Path(path), text, deadline)
    ]


def _comes_to_hold(path: Path, text: str, deadline: float) -> bool:
    while not (path.is_file() and path.read_text(encoding="utf-8") == text):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True
