"""Whether nodes see what others write to a folder, and how fast it is."""

import os
import time
import uuid
from dataclasses import dataclass
from pathlib import Path

from rltrain.runtime.nodes import NodeBoard
from rltrain.runtime.world import World

BLOCK_BYTES = 1 << 20
VISIBLE_WITHIN_S = 10.0
"""Network file systems remember for some seconds that a file was not there."""


@dataclass(frozen=True)
class Storage:
    """A folder as one node has it."""

    write_gb_s: float = 0.0
    """Until the file is durable."""
    read_gb_s: float = 0.0
    """Of the next node's file, which only the file system's own server may have in memory."""
    unseen: tuple[int, ...] = ()
    """Nodes whose files do not come to be seen here."""
    failure: str = ""


def try_storage(world: World, folder: Path, num_bytes: int) -> list[Storage] | None:
    """By node, on rank 0; None on the others. Every node writes a file and reads the others'; all are removed.

    Collective over: the first ranks of all nodes.
    """
    if world.local_rank:
        return None
    board = NodeBoard(world, f"storage{folder}")
    if world.rank == 0:
        board.say(uuid.uuid4().hex, "job")
    job, nodes = board.heard(0, "job"), range(world.num_nodes)
    files = [folder / f".rltrain-doctor-{job}-{node}" for node in nodes]
    write_gb_s, failure = _write(files[world.node], num_bytes)
    board.say(not failure, "written")
    written = board.of_all("written")
    deadline = time.monotonic() + VISIBLE_WITHIN_S
    expected = [node for node in nodes if node != world.node and written[node]]
    unseen = tuple(node for node in expected if not _comes_to_be_seen(files[node], num_bytes, deadline))
    next_node = (world.node + 1) % world.num_nodes
    read_gb_s = _read(files[next_node], num_bytes) if written[next_node] and next_node not in unseen else 0.0
    board.say([write_gb_s, read_gb_s, unseen, failure])
    said = board.of_all()  # before the files are removed: all have looked
    files[world.node].unlink(missing_ok=True)
    if world.rank != 0:
        return None
    return [Storage(write, read, tuple(missed), failed) for write, read, missed, failed in said]


def _write(path: Path, num_bytes: int) -> tuple[float, str]:
    """(GB/s, why it failed)."""
    block, start = os.urandom(BLOCK_BYTES), time.perf_counter()
    try:
        with path.open("wb") as file:
            for _ in range(num_bytes // BLOCK_BYTES):
                file.write(block)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        return 0.0, f"cannot be written: {error.strerror}"
    return num_bytes / (time.perf_counter() - start) / 1e9, ""


def _comes_to_be_seen(path: Path, num_bytes: int, deadline: float) -> bool:
    while not (path.exists() and path.stat().st_size >= num_bytes // BLOCK_BYTES * BLOCK_BYTES):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True


def _read(path: Path, num_bytes: int) -> float:
    start = time.perf_counter()
    with path.open("rb") as file:
        while file.read(BLOCK_BYTES):
            pass
    return num_bytes / (time.perf_counter() - start) / 1e9
