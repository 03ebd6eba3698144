"""Checkpoints in the memory of nodes: saving, copying, resuming."""

import json
import logging
import re
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from rltrain.checkpoint.memory_files import SPANS_SUFFIX, Address, FileServer, fetch, spans_there
from rltrain.checkpoint.node_memory import KEPT, OWNER_FILE, Key, NodeFolder, NodeMemory, offered, origins, sources
from rltrain.checkpoint.run_files import (
    RUN_FILE,
    Contents,
    find_damage,
    read_contents,
    read_manifest,
    record_of,
    write_files,
)
from rltrain.checkpoint.run_folder import CheckpointFolder, Resumed, name_of
from rltrain.checkpoint.run_writer import FilesWriter
from rltrain.config.loader import load_config
from rltrain.config.schema import Config, MemoryCheckpoints, Timeouts
from rltrain.errors import CheckpointError
from rltrain.observability.run_logs import ID_FILE
from rltrain.roles.checkpointing import MemoryCheckpointing
from rltrain.roles.resuming import HeldCheckpoints, find_checkpoint
from rltrain.runtime.job_store import JobStore
from rltrain.runtime.machine import launcher, process_here, this_process
from rltrain.runtime.placement import placement_of
from rltrain.runtime.world import LOOPBACK, World
from rltrain.trainer import where_to_begin
from tests.support.model_shards import tiny_architecture
from tests.support.shared_store import Jobs, at_the_same_time, open_store

NODES, LIMIT_S = 2, 20.0


@pytest.fixture(scope="module")
def jobs() -> Iterator[Jobs]:
    with open_store() as store:
        yield Jobs(store, NODES)


class Node:
    """A node with one rank. Rank 0 is the leader of the job."""

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
    """A file blocks the folder of one node."""
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


CONFIG = """\
steps: 10
placement: {'actor, reference': 0, 'rollout, reward': 1}
model: {path: models/tiny}
data: {train: {path: train.jsonl}}
checkpoint: {save_interval: 4, memory: {interval: 1}}
"""
NUM_NODES, RUN_ID = 3, "0123"
FILES = [f"ranks/rank_{node:05d}.safetensors" for node in range(NUM_NODES)]


@given(st.sets(st.integers(0, 31), min_size=1), st.integers(1, 8))
def test_every_rank_has_one_copy_on_the_next_node(hosting: set[int], per_node: int) -> None:
    found = origins(hosting, per_node)
    copied = [rank for ranks in found.values() for rank in ranks]
    nodes = sorted({rank // per_node for rank in hosting})
    assert found.keys() == hosting
    assert sorted(copied) == (sorted(hosting) if len(nodes) > 1 else [])
    after = dict(pairwise([*nodes, nodes[0]]))
    assert all(after[rank // per_node] == keeper // per_node for keeper in found for rank in found[keeper])
    counts = {node: [len(found[rank]) for rank in hosting if rank // per_node == node] for node in nodes}
    assert all(max(of_node) - min(of_node) <= 1 for of_node in counts.values()), "copies are not balanced between ranks"


@given(st.integers(2, 6), st.data())
def test_nodes_are_whole_unless_two_that_follow_each_other_are_lost(num_nodes: int, data: st.DataObject) -> None:
    """Each node holds its own file and the file of the previous node."""
    lost = data.draw(st.sets(st.integers(0, num_nodes - 1)))
    held = [set() if node in lost else {f"{node}", f"{(node - 1) % num_nodes}"} for node in range(num_nodes)]
    found, missing = sources(map(str, range(num_nodes)), held)
    assert {*missing} == {f"{node}" for node in lost if (node + 1) % num_nodes in lost}
    assert found.keys() | {*missing} == {*map(str, range(num_nodes))}
    assert all(name in held[node] for name, node in found.items())


def test_the_newest_is_tried_first_and_those_of_other_attempts_apart() -> None:
    first, second, third = Key(3, "a"), Key(3, "b"), Key(7, "a")
    assert offered([{second}, {first, third}, {first}]) == [third, first, second]


@pytest.fixture(scope="module")
def node_jobs() -> Iterator[Jobs]:
    with open_store() as store:
        yield Jobs(store, NUM_NODES)


@pytest.fixture
def config(tmp_path: Path) -> Config:
    (tmp_path / "config.yaml").write_text(CONFIG)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / ID_FILE).write_text(f"{RUN_ID}\n")
    return load_config(tmp_path / "config.yaml", [f"output_dir={tmp_path}/run"])


def in_(folder: Path) -> MemoryCheckpoints:
    return MemoryCheckpoints(folder=str(folder / "memory"))


def contents(node: int, value: float) -> Contents:
    return Contents({"x": torch.full((9,), value + node)}, {})


@pytest.fixture
def save(tmp_path: Path) -> Callable[..., None]:
    """Returns a function for saving in the memory of all nodes. Each node gets its own file and the previous node's."""

    def in_memory(step: int, run_id: str = RUN_ID, value: float = 0.0) -> None:
        folders = [NodeFolder(str(tmp_path / f"node{node}"), run_id) for node in range(NUM_NODES)]
        run = json.dumps({"step": step})
        records = {RUN_FILE: record_of(run.encode())}
        for node in range(NUM_NODES):
            for at in (node, (node + 1) % NUM_NODES):
                partial = folders[at].checkpoints.begin(step)
                records |= write_files(partial, {FILES[node]: contents(node, value)})
        manifest = json.dumps({name: record._asdict() for name, record in sorted(records.items())})
        for folder in folders:
            assert folder.complete(step, manifest, run) is None

    return in_memory


@pytest.fixture
def find(node_jobs: Jobs, config: Config, tmp_path: Path) -> Callable[..., list[Resumed | None]]:
    def on_all(nodes: Sequence[int] = range(NUM_NODES)) -> list[Resumed | None]:
        """Resumes on the present nodes, in the order of the new job's ranks."""

        def body(rank: int, store: dist.Store) -> Resumed | None:
            world = World(rank, len(nodes), 0, 1, torch.device("cpu"), store, 10, Timeouts(no_progress_s=5))
            job_store = JobStore(world, guarded=True)
            held = HeldCheckpoints(config, str(tmp_path / f"node{nodes[rank]}"), job_store)
            found = find_checkpoint(config, job_store, held)
            held.begin(found, leader=0)
            return found

        return node_jobs.run(body, len(nodes))

    return on_all


def at(tmp_path: Path, node: int, step: int) -> Path:
    return tmp_path / f"node{node}" / f"rltrain_{RUN_ID}" / name_of(step)


def harm(path: Path) -> None:
    data = path.read_bytes()
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))


def on_disk(config: Config, step: int) -> Path:
    folder = CheckpointFolder(Path(config.checkpoint_dir))
    run = {"config": config.model_dump(mode="json"), "architectures": {}}
    folder.complete(step, write_files(folder.begin(step), {FILES[0]: contents(0, 0.0)}), run, keep=0)
    return folder.path / name_of(step)


def reads(found: Sequence[Resumed | None], value: float = 0.0) -> bool:
    """Returns whether every node reads the saved values. A node fetches the files it lacks."""
    for resumed in found:
        assert resumed is not None
        files = resumed.files("ranks")
        names = [file.name for file in files]
        if names != [Path(name).name for name in FILES] or resumed.run != {"step": resumed.step}:
            return False
        if any(
            not read_contents(file).tensors["x"].equal(contents(number, value).tensors["x"])
            for number, file in enumerate(files)
        ):
            return False
    return True


def fetched(tmp_path: Path, node: int) -> dict[str, int]:
    """Returns the bytes fetched from other nodes, by file."""
    lists = (tmp_path / f"node{node}").rglob(f"*{SPANS_SUFFIX}")
    return {path.name.partition(".")[0]: sum(span.end - span.begin for span in spans_there(path)) for path in lists}


@pytest.mark.parametrize("lost", [[], [0], [2]])
def test_a_lost_node_gets_it_all_from_the_others(find, save, config, tmp_path, lost) -> None:
    on_disk(config, 4)
    for step in (5, 6):
        save(step)
    for node in lost:
        shutil.rmtree(tmp_path / f"node{node}")
    found = find()
    assert found == [Resumed(at(tmp_path, node, 6), 6, in_memory=True) for node in range(NUM_NODES)]
    assert reads(found)
    for node in range(NUM_NODES):
        assert [*(tmp_path / f"node{node}" / f"rltrain_{RUN_ID}").glob("step_*")] == [at(tmp_path, node, 6)]
        assert len(fetched(tmp_path, node)) == (NUM_NODES if node in lost else NUM_NODES - 2)


@pytest.mark.parametrize("nodes", [(2, 0, 1), (2, 1), (0, 2)])
def test_nodes_may_be_numbered_otherwise_and_be_fewer(find, save, tmp_path, nodes) -> None:
    save(6)
    found = find(nodes)
    assert found == [Resumed(at(tmp_path, node, 6), 6, in_memory=True) for node in nodes]
    assert reads(found)


def test_a_damaged_file_comes_from_its_copy(find, save, tmp_path, caplog) -> None:
    save(6)
    harm(at(tmp_path, 1, 6) / FILES[1])
    with caplog.at_level(logging.WARNING):
        found = find()
    assert {resumed.step for resumed in found} == {6} and reads(found)
    assert fetched(tmp_path, 1).keys() == {"rank_00001", "rank_00002"}
    assert f"{at(tmp_path, 1, 6) / FILES[1]} is damaged" in caplog.text


def test_where_a_file_and_its_copy_are_damaged_it_is_the_step_before_and_then_the_disk(
    find, save, config, tmp_path, caplog
) -> None:
    on_disk(config, 4)
    for step in (5, 6):
        save(step)
        for node in (1, 2):
            harm(at(tmp_path, node, step) / FILES[1])
    with caplog.at_level(logging.WARNING):
        assert find() == [Resumed(Path(config.checkpoint_dir, name_of(4)), 4)] * NUM_NODES
    for step in (5, 6):
        assert (
            f"the checkpoint of step {step} in memory cannot be used: no node has an intact {FILES[1]}" in caplog.text
        )
    assert not any(at(tmp_path, node, step).exists() for node in range(NUM_NODES) for step in (5, 6))


def test_two_neighbours_lost_leave_the_disk(find, save, config, tmp_path) -> None:
    on_disk(config, 4)
    save(6)
    for node in (0, 1):
        shutil.rmtree(tmp_path / f"node{node}")
    assert {found.step for found in find()} == {4}


@pytest.mark.parametrize("disk, in_memory", [(4, True), (8, False)])
def test_the_newer_one_is_taken_and_of_two_of_a_step_that_in_memory(find, save, config, disk, in_memory) -> None:
    save(4)
    on_disk(config, disk)
    assert {(found.step, found.in_memory) for found in find()} == {(disk, in_memory)}


def test_what_another_run_left_is_not_taken(find, save, config, caplog) -> None:
    save(6, run_id="4567")
    on_disk(config, 4)
    with caplog.at_level(logging.WARNING):
        assert {found.step for found in find()} == {4}
    assert "no node holds a checkpoint of the run in its memory" in caplog.text


@pytest.mark.parametrize("wanted, other", [(0.0, 1.0), (1.0, 0.0)])
def test_nodes_with_different_checkpoints_of_one_step_are_not_mixed(find, save, tmp_path, wanted, other) -> None:
    """A node returns after an absence during which the others continued from an older step."""
    save(6, value=other)
    shutil.move(tmp_path / "node2", tmp_path / "away")
    for node in (0, 1):
        shutil.rmtree(tmp_path / f"node{node}")
    save(6, value=wanted)
    shutil.rmtree(tmp_path / "node2")
    shutil.move(tmp_path / "away", tmp_path / "node2")
    found = find()
    assert {resumed.step for resumed in found} == {6} and reads(found, value=wanted)


def test_what_jobs_that_have_ended_left_is_removed(find, save, tmp_path, caplog) -> None:
    """Checkpoints of a job stay if it may still run: on another machine, or in a container with hidden processes."""
    ended = subprocess.Popen(["true"])
    ended.wait()
    owners = {
        "ended": process_here(ended.pid),
        "running": this_process(),
        "elsewhere": f"other-host pid:[1] {ended.pid}",
        "unreadable": "",
        RUN_ID: process_here(ended.pid),
    }
    save(6)
    folders = {run_id: tmp_path / "node1" / f"rltrain_{run_id}" for run_id in (*owners, "unsaid")}
    for folder in folders.values():
        folder.mkdir(exist_ok=True)
    for run_id, owner in owners.items():
        (folders[run_id] / OWNER_FILE).write_text(owner)
    with caplog.at_level(logging.WARNING):
        found = find()
    assert {resumed.step for resumed in found} == {6} and reads(found), "a restarted job needs its own checkpoints"
    assert [run_id for run_id, folder in folders.items() if not folder.exists()] == ["ended"]
    assert f"removed {folders['ended']}, checkpoints in memory of a job that has ended" in caplog.text
    assert (folders[RUN_ID] / OWNER_FILE).read_text() == process_here(launcher())


@pytest.mark.parametrize("held, free, fits", [(0, 3_000, True), (0, 2_999, False), (1 << 20, 0, True)])
def test_a_folder_without_room_for_three_checkpoints_is_refused(
    tmp_path, monkeypatch, caplog, held: int, free: int, fits: bool
) -> None:
    """Existing checkpoints of the run count as free space, since new ones replace them."""
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=free))
    folder = NodeFolder(str(tmp_path), RUN_ID)
    folder.at(1).mkdir(parents=True)
    (folder.at(1) / "file").write_bytes(bytes(held))
    if fits:
        folder.refuse_without_room(1_000, restarted=False)
        return
    expected = r"checkpoint\.memory\.folder: .* has room for 3e-06 GB; expected 3e-06 GB or more"
    with pytest.raises(CheckpointError, match=expected):
        folder.refuse_without_room(1_000, restarted=False)
    with caplog.at_level(logging.WARNING):
        folder.refuse_without_room(1_000, restarted=True)
    assert re.search(expected, caplog.text), "a running job continues"


def test_a_job_asks_for_room_before_it_does_anything(node_jobs: Jobs, config: Config, tmp_path, monkeypatch) -> None:
    config = config.model_copy(update={"checkpoint": config.checkpoint.model_copy(update={"memory": in_(tmp_path)})})
    placement, architectures = placement_of(config, 2, 1), dict.fromkeys(("actor", "rollout"), tiny_architecture())
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=1_000))

    def body(rank: int, store: dist.Store) -> str | None:
        world = World(rank, 2, 0, 1, torch.device("cpu"), store, 10, Timeouts(no_progress_s=5))
        try:
            where_to_begin(config, placement, architectures, {}, 0, JobStore(world, guarded=True))
        except CheckpointError as error:
            return str(error)
        return None

    told, _ = node_jobs.run(body, 2)
    assert told is not None and "has room for 1e-06 GB; expected" in told
    assert not (tmp_path / "run" / "checkpoints").exists()
