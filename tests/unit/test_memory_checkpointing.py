"""A checkpoint counts in the nodes' memory once all ranks have written their files, and copied those of the others."""

import re
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from rltrain.checkpoint.memory_files import Address, FileServer, fetch
from rltrain.checkpoint.node_memory import KEPT, NodeFolder, NodeMemory
from rltrain.checkpoint.run_files import Contents, find_damage, read_manifest, record_of
from rltrain.checkpoint.run_writer import FilesWriter
from rltrain.roles.checkpointing import MemoryCheckpointing
from rltrain.runtime.job_store import JobStore
from rltrain.runtime.world import LOOPBACK, World
from tests.unit.shared_store import Jobs, at_the_same_time, open_store

NODES, LIMIT_S = 2, 20.0


@pytest.fixture(scope="module")
def jobs() -> Iterator[Jobs]:
    with open_store() as store:
        yield Jobs(store, NODES)


class Node:
    """A node of one rank, of which rank 0 is the job's leader."""

    def __init__(self, rank: int, store: dist.Store, folder: Path, addresses: list[Address]) -> None:
        self.folder = NodeFolder(str(folder), "0123")
        self.folder.make()
        self.events: list[str] = []
        world = World(rank, NODES, 0, 1, torch.device("cpu"), store, LIMIT_S)
        self.rank, self.writer = rank, FilesWriter(asynchronous=True)
        memory = NodeMemory(self.folder, addresses)
        self.part = MemoryCheckpointing(JobStore(world), range(NODES), memory, lambda: self.events.append("reported"))

    def save(self, step: int) -> None:
        files = {f"ranks/rank_{self.rank:05d}.safetensors": Contents({"x": torch.full((999,), step + self.rank)}, {})}
        self.writer.start(files, self.part.begin(step, {"step": step} if self.rank == 0 else None))
        self.writer.join()

    def steps(self) -> list[int]:
        return [found.step for found in self.folder.checkpoints.candidates()]


@pytest.fixture
def nodes(jobs: Jobs, tmp_path: Path) -> Iterator[list[Node]]:
    folders = [tmp_path / f"node{rank}" for rank in range(NODES)]
    for folder in folders:
        folder.mkdir()
    servers = [FileServer(folder, LOOPBACK) for folder in folders]
    addresses = [server.address for server in servers]
    stores = [dist.PrefixStore(str(tmp_path), store.underlying_store) for store in jobs.start(NODES)]
    made = [Node(rank, store, folders[rank], addresses) for rank, store in enumerate(stores)]
    yield made
    at_the_same_time(stores, lambda rank, store: made[rank].part.close())
    for server in servers:
        server.close()


def wait_for(happened: Callable[[], bool], leader: Node) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not happened():
        leader.part.look()
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_it_counts_on_both_nodes_once_all_have_written_and_copied(nodes: list[Node]) -> None:
    first, second = nodes
    first.save(1)
    first.part.look()
    assert not first.events and not first.steps()
    second.save(1)
    wait_for(lambda: first.steps() == second.steps() == [1], first)
    assert first.events == ["reported"]
    for node in nodes:
        manifest = read_manifest(node.folder.at(1))
        assert len(manifest) == NODES + 1 and find_damage(node.folder.at(1), manifest, manifest, lambda: None) is None
    metrics = first.part.take_metrics()
    assert (
        metrics["perf/memory_checkpoint_bytes"]
        == 2 * (first.folder.at(1) / "ranks/rank_00000.safetensors").stat().st_size
    )
    assert metrics["perf/memory_checkpoint_s"] > 0 and not first.part.take_metrics()


def test_only_the_newest_stay(nodes: list[Node]) -> None:
    for step in range(1, KEPT + 3):
        for node in nodes:
            node.save(step)
        wait_for(lambda step=step: all(node.steps()[:1] == [step] for node in nodes), nodes[0])
    wait_for(lambda: all(node.steps() == [KEPT + 2, KEPT + 1] for node in nodes), nodes[0])


@pytest.mark.parametrize("free, is_said", [(10**9, False), (1000, True)])
def test_who_will_find_no_room_says_so_once(nodes: list[Node], caplog, monkeypatch, free: int, is_said: bool) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=free))
    for step in (1, 2):
        for node in nodes:
            node.save(step)
        wait_for(lambda step=step: all(node.steps()[:1] == [step] for node in nodes), nodes[0])
    said = [text for text in caplog.messages if text.startswith("checkpoint.memory.folder: ")]
    assert len(said) == NODES * is_said and all("1e-06 GB free" in text for text in said)


def test_what_cannot_be_written_is_given_up_on_all_nodes_and_the_next_one_counts(nodes: list[Node], caplog) -> None:
    """A file is where one of them would make its folder."""
    partial = nodes[1].folder.checkpoints.partial(1)
    partial.touch()
    for node in nodes:
        node.save(1)
    wait_for(lambda: "of step 1 in memory is given up: rank 1: " in caplog.text, nodes[0])
    wait_for(lambda: not nodes[0].folder.checkpoints.partial(1).exists(), nodes[0])
    partial.unlink()
    for node in nodes:
        node.save(2)
    wait_for(lambda: all(node.steps() == [2] for node in nodes), nodes[0])


def test_a_rank_that_comes_late_finds_old_steps_given_up(nodes: list[Node]) -> None:
    leader, late = nodes
    for step in (1, 2, 3):
        leader.save(step)
    for step in (1, 2, 3):
        late.save(step)
    wait_for(lambda: all(node.steps() == [3, 2] for node in nodes), leader)
    wait_for(lambda: not any(node.folder.checkpoints.partial(1).exists() for node in nodes), leader)


def test_the_run_s_end_gives_the_memory_back_whatever_is_under_way(jobs: Jobs, nodes: list[Node]) -> None:
    for node in nodes:
        node.save(1)
    wait_for(lambda: all(node.steps() == [1] for node in nodes), nodes[0])
    nodes[0].save(2)
    at_the_same_time([None] * NODES, lambda rank, _: nodes[rank].part.close())  # type: ignore[list-item]
    assert not any(node.folder.path.exists() for node in nodes)


@pytest.mark.parametrize(
    "token, name, problem",
    [
        (None, "a/file", None),
        ("another", "a/file", "does not have it"),
        (None, "a/missing", "does not have it"),
        (None, "../secret", "does not have it"),
        (None, "a/other", "got 5 bytes with checksum .*; expected 3, "),
    ],
)
def test_files_are_for_who_knows_the_token_and_of_one_folder(tmp_path: Path, token, name, problem) -> None:
    (tmp_path / "root" / "a").mkdir(parents=True)
    (tmp_path / "root" / "a" / "file").write_bytes(b"abc")
    (tmp_path / "root" / "a" / "other").write_bytes(b"abcde")
    (tmp_path / "secret").write_bytes(b"abc")
    server = FileServer(tmp_path / "root", LOOPBACK)
    address = server.address._replace(token=token or server.address.token)
    got = fetch(address, name, tmp_path / "copy" / "file", record_of(b"abc"), threading.Event())
    server.close()
    if problem is None:
        assert got is None and (tmp_path / "copy" / "file").read_bytes() == b"abc"
    else:
        assert got is not None and re.search(problem, got), got
        assert not (tmp_path / "copy" / "file").exists()
