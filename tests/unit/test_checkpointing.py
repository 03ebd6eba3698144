"""The ranks that have something to save complete a checkpoint; those without a role are not waited for."""

import json
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from rltrain.checkpoint.run.files import Contents, read_manifest, write_files
from rltrain.checkpoint.run.folder import Resumed, name_of
from rltrain.checkpoint.run.random_states import random_states
from rltrain.checkpoint.run.writer import Target
from rltrain.checkpointing import MAX_INCOMPLETE, Checkpointing
from rltrain.cluster.placement import resolve_placement
from rltrain.config.schema import Config
from rltrain.liveness.task_clock import TaskClock
from rltrain.resuming import restore
from rltrain.schedule.steps import build_order
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
        stop=None,
        leader=placement.ranks("actor")[0],
        resumed=None,
        memory=None,
        inputs={},
        data_from=0,
    )
    nothing: Any = Nothing()
    return Checkpointing(job, build_order(config, placement), {}, nothing, nothing)  # type: ignore[arg-type]


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

    monkeypatch.setattr("rltrain.checkpoint.run.writer.copy_files", slow)
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
