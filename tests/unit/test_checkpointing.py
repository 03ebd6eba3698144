"""The ranks that have something to save complete a checkpoint; those without a role are not waited for."""

import json
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from rltrain.checkpoint.run_files import Contents, random_states, read_manifest, write_files
from rltrain.checkpoint.run_folder import Resumed, name_of
from rltrain.checkpoint.run_writer import FilesWriter, Target
from rltrain.config.schema import Config
from rltrain.roles.checkpointing import MAX_INCOMPLETE, Checkpointing, RunControl
from rltrain.roles.resuming import restore
from rltrain.runtime.heartbeat import TaskClock
from rltrain.runtime.job_store import JobStore
from rltrain.runtime.placement import resolve_placement
from rltrain.runtime.stopping import StopRequest
from rltrain.runtime.world import World
from rltrain.schedule.iterations import build_order
from tests.unit.shared_store import Jobs, ShortPatience, open_store

NUM_RANKS = 4
PLACEMENT = {"actor, reference": 1, "rollout, reward": 3}
CPU = torch.device("cpu")
EACH_STEP = {"save_interval": 1, "keep": 0}
LIMIT_S = 20.0


class Waiter(ShortPatience):
    """Notes whom it waits for."""

    def __init__(self) -> None:
        self.awaited: list[Sequence[int]] = []

    def until(self, arrived: Any, what: str, ranks: Sequence[int], serve: Any = None) -> None:
        self.awaited.append(ranks)
        super().until(arrived, what, ranks, serve)


class Nothing:
    """Transfers and a reporter that have nothing to save."""

    def save(self, position: int) -> Mapping[str, Any]:
        return {}

    def unfinished(self, step: int) -> Mapping[str, Any]:
        return {}

    def collect(self) -> None:
        """Nothing to collect."""


NOBODY_STOPS: Any = SimpleNamespace(
    verdict=lambda boundary, is_time: None, saves_at=lambda boundary: False, saved_by_time=tuple
)


@pytest.fixture(scope="module")
def jobs() -> Iterator[Jobs]:
    with open_store() as store:
        yield Jobs(store, NUM_RANKS)


def checkpointing(
    output: Path, rank: int, store: dist.Store, settings: Mapping[str, Any] = EACH_STEP, **roles: int
) -> Checkpointing:
    config = Config.model_validate(
        {
            "steps": 9,
            "output_dir": str(output),
            "placement": PLACEMENT | roles,
            "model": {"path": "model"},
            "data": {"train": {"path": "train.jsonl"}},
            "checkpoint": settings,
        }
    )
    placement = resolve_placement(config.placement, NUM_RANKS, NUM_RANKS)
    job = SimpleNamespace(
        config=config,
        world=SimpleNamespace(rank=rank, size=NUM_RANKS, store=store, background=store, device=CPU),
        placement=placement,
        waiter=Waiter(),
        heartbeat=SimpleNamespace(task_clock=TaskClock()),
        architectures={},
        leader=placement.ranks("actor")[0],
        resumed=None,
        rows=SimpleNamespace(first_step=0),
    )
    nothing: Any = Nothing()
    control = RunControl({}, NOBODY_STOPS, memory=None)
    return Checkpointing(job, build_order(config, placement), {}, nothing, nothing, control)  # type: ignore[arg-type]


def test_a_checkpoint_is_complete_once_all_that_host_a_role_have_written(jobs: Jobs, tmp_path: Path) -> None:
    stores = jobs.start(NUM_RANKS)
    idle, leader, first_idle, other = (checkpointing(tmp_path, rank, store) for rank, store in enumerate(stores))
    for step in (1, 2):
        leader.at_boundary(step, 0)
        leader.writer.join()
        leader.look()
        assert not (leader.folder.path / name_of(step)).exists(), "another rank has yet to write"
        other.at_boundary(step, 0)
        for rank in (idle, first_idle, other, leader):
            rank.finish()
        files = [name for name in read_manifest(leader.folder.path / name_of(step)) if name.startswith("ranks/")]
        assert files == ["ranks/rank_00001.safetensors", "ranks/rank_00003.safetensors"]


def test_checkpoints_wait_for_an_evaluation_beside_training_and_training_does_not(jobs: Jobs, tmp_path: Path) -> None:
    """But for so many that the disk would fill up."""
    stores = jobs.start(NUM_RANKS)
    leader, late, other = (checkpointing(tmp_path, rank, stores[rank], evaluation=2) for rank in (1, 2, 3))
    for step in range(1, MAX_INCOMPLETE + 1):
        other.at_boundary(step, 0)
        leader.at_boundary(step, 0)
    assert leader.folder.candidates() == []
    late.at_boundary(1, 0)
    late.writer.join()
    leader.at_boundary(MAX_INCOMPLETE + 1, 0)
    assert [found.step for found in leader.folder.candidates()] == [1]
    other.at_boundary(MAX_INCOMPLETE + 1, 0)
    for step in range(2, MAX_INCOMPLETE + 2):
        late.at_boundary(step, 0)
    for rank in (other, late, leader):
        rank.finish()
    assert len(leader.folder.candidates()) == MAX_INCOMPLETE + 1


def test_a_save_in_memory_alone_does_not_wait_for_the_disk_and_one_on_the_disk_does(
    jobs: Jobs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    let, copied = threading.Event(), list[Path]()

    def slow(folder: Path, *_: Any) -> Mapping[str, Any]:
        assert let.wait(LIMIT_S)
        copied.append(folder)
        return {}

    monkeypatch.setattr("rltrain.checkpoint.run_writer.copy_files", slow)
    settings = {"save_interval": 2, "memory": {"interval": 1, "folder": str(tmp_path)}}
    part = checkpointing(tmp_path, 3, jobs.start(NUM_RANKS)[3], settings)
    saved: list[int] = []
    memory: Any = SimpleNamespace(
        look=lambda: None,
        begin=lambda step, run: Target(tmp_path / "memory" / str(step), lambda written: saved.append(step)),
    )
    part.memory = memory
    for step in (1, 2, 3):
        part.at_boundary(step, 0)
    part.writer.release()
    assert saved == [1, 2, 3] and not copied
    timer = threading.Timer(0.05, let.set)
    timer.start()
    part.at_boundary(4, 0)
    assert copied == [part.folder.partial(2)]
    part.finish()
    timer.join()
    assert copied == [part.folder.partial(2), part.folder.partial(4)]


class TimedRank:
    """A rank of a job that saves every 600 s, with a clock of its own."""

    def __init__(self, output: Path, rank: int, store: dist.Store, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.monkeypatch = 100.0 * rank, monkeypatch
        self._set_clock()
        self.part = checkpointing(output, rank, store, {"keep": 0})
        observer = JobStore(World(rank, NUM_RANKS, rank, NUM_RANKS, CPU, store, timeout_s=10)).observer
        limits: Any = {"saves": True, "within_s": 60, "last_resort": lambda: ""}
        self.part.stop = StopRequest(rank, store, observer, **limits)

    def come_to(self, step: int, after_s: float) -> None:
        self.part.writer.join()
        self.now += after_s
        self._set_clock()
        self.part.at_boundary(step, 0)

    def _set_clock(self) -> None:
        clock = SimpleNamespace(monotonic=lambda: self.now, perf_counter=time.perf_counter)
        self.monkeypatch.setattr("rltrain.roles.checkpointing.time", clock)


@pytest.fixture
def timed(jobs: Jobs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[TimedRank]:
    """The job's leader, and the other rank that hosts a role."""
    stores = jobs.start(NUM_RANKS)
    return [TimedRank(tmp_path, rank, stores[rank], monkeypatch) for rank in (1, 3)]


def steps_saved(ranks: Sequence[TimedRank]) -> list[int]:
    for rank in reversed(ranks):
        rank.part.finish()
    return [found.step for found in reversed(ranks[0].part.folder.candidates())]


def test_all_ranks_save_where_the_first_one_to_come_finds_that_it_is_time(timed: list[TimedRank]) -> None:
    """And after the last step, since the run has saved before."""
    leader, other = timed
    for step, first, of_first_s, of_second_s in (
        (1, other, 599, 700),
        (2, leader, 1, 2),
        (3, other, 599, 1),
        (4, leader, 700, 1),
        (9, leader, 1, 1),
    ):
        first.come_to(step, of_first_s)
        (other if first is leader else leader).come_to(step, of_second_s)
    assert steps_saved(timed) == [2, 4, 9]


def test_a_job_that_ends_before_it_is_time_saves_nothing(timed: list[TimedRank]) -> None:
    for step in range(1, 10):
        for rank in timed:
            rank.come_to(step, 50)
    assert steps_saved(timed) == []


@pytest.mark.parametrize("in_memory", [False, True])
def test_a_job_that_has_gone_on_from_a_checkpoint_on_the_disk_saves_after_its_last_step(
    timed: list[TimedRank], in_memory: bool
) -> None:
    for rank in timed:
        rank.part.job.resumed = SimpleNamespace(logs={}, in_memory=in_memory)  # type: ignore[misc, assignment]
        rank.come_to(9, 50)
    assert steps_saved(timed) == ([] if in_memory else [9])


def test_no_checkpoint_by_time_is_begun_while_one_is_written(
    timed: list[TimedRank], monkeypatch: pytest.MonkeyPatch
) -> None:
    leader, other = timed
    leader.come_to(1, 600)
    other.come_to(1, 0)
    monkeypatch.setattr(FilesWriter, "is_busy", True)
    leader.come_to(2, 600)
    other.come_to(2, 600)
    assert steps_saved(timed) == [1]


def test_no_weight_sync_is_joined_before_a_checkpoint_by_time_that_stands_before_it(timed: list[TimedRank]) -> None:
    leader, other = timed
    leader.come_to(1, 600)
    boundary = other.part.order.boundary(1)
    assert not other.part.may_join(boundary - 1, boundary)
    assert other.part.may_join(boundary, boundary + 1), "the rank has saved"
    assert other.part.may_join(boundary - 2, boundary - 1), "the sync comes before the checkpoint"


def test_who_waits_for_files_names_the_ranks_that_have_not_written_them(jobs: Jobs, tmp_path: Path) -> None:
    stores = jobs.start(NUM_RANKS)
    leader, other = (checkpointing(tmp_path, rank, stores[rank]) for rank in (1, 3))
    leader.at_boundary(1, 0)
    leader.writer.join()
    wait = leader.job.waiter.until

    def until(arrived: Any, what: str, ranks: Sequence[int], serve: Any = None) -> None:
        other.at_boundary(1, 0)
        wait(arrived, what, ranks, serve)

    leader.job.waiter.until = until  # type: ignore[method-assign]
    leader.finish()
    assert leader.job.waiter.awaited == [[3]]  # type: ignore[attr-defined]


@pytest.mark.parametrize("rank", range(5))
def test_a_rank_gets_its_own_random_states_back(tmp_path: Path, rank: int) -> None:
    """Not those of the rank that wrote as many files before."""
    expected = {}
    for saved in (1, 3):
        torch.manual_seed(saved)
        tensors, states = random_states(CPU)
        texts = {"random": states, "metrics": json.dumps({"7": {f"of {saved}": 1.0}})}
        write_files(tmp_path, {f"ranks/rank_{saved:05d}.safetensors": Contents(tensors, texts)})
        expected[saved] = torch.rand(()).item()
    torch.manual_seed(100)
    expected.setdefault(rank, torch.rand(()).item())
    torch.manual_seed(100)
    adopted: list[Any] = []
    job = SimpleNamespace(
        resumed=Resumed(tmp_path, 7, continues=False),
        world=SimpleNamespace(rank=rank, device=CPU),
        leader=1,
    )
    restore(job, Nothing(), SimpleNamespace(adopt=adopted.append))  # type: ignore[arg-type]
    assert torch.rand(()).item() == expected[rank]
    assert adopted == ([{7: {"of 1": 1.0}}, {7: {"of 3": 1.0}}] if rank == 1 else [])
