"""Tests of the times and contents of checkpoints, and of the comparison of a run's inputs with its checkpoint."""

import json
import logging
import re
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from rltrain.checkpoint.run_files import RUN_FILE, Contents, random_states, read_manifest, write_files
from rltrain.checkpoint.run_folder import Resumed, name_of
from rltrain.checkpoint.run_writer import FilesWriter, Target
from rltrain.config.schema import Config
from rltrain.data.demonstrations import Demonstrations
from rltrain.data.prompt_order import PromptOrder
from rltrain.data.prompts import load_prompts
from rltrain.data.tokenizer import PromptEncoder
from rltrain.errors import CheckpointError
from rltrain.rewards.locating import source_file
from rltrain.roles.checkpointing import MAX_INCOMPLETE, Checkpointing, RunControl
from rltrain.roles.inputs import Inputs, data_changes, identity, other_changes
from rltrain.roles.resuming import remaining_order, restore, with_present_inputs
from rltrain.rollout.rollout_state import FixedRows
from rltrain.runtime.heartbeat import TaskClock
from rltrain.runtime.job_store import JobStore
from rltrain.runtime.placement import resolve_placement
from rltrain.runtime.stopping import StopRequest
from rltrain.runtime.world import World
from rltrain.schedule.iterations import build_order
from tests.support.schedule_configs import make_config, place
from tests.support.shared_store import Jobs, ShortPatience, open_store
from tests.unit.test_prompts import CHAT_TEMPLATE, byte_tokenizer, jsonl

NUM_RANKS = 4
PLACEMENT = {"actor, reference": 1, "rollout, reward": 3}
CPU = torch.device("cpu")
EACH_STEP = {"save_interval": 1, "keep": 0}
LIMIT_S = 20.0


class Waiter(ShortPatience):
    """A waiter with a record of the ranks of each wait."""

    def __init__(self) -> None:
        self.awaited: list[Sequence[int]] = []

    def until(self, arrived: Any, what: str, ranks: Sequence[int], serve: Any = None) -> None:
        self.awaited.append(ranks)
        super().until(arrived, what, ranks, serve)


class Nothing:
    """A stand-in for transfers and a reporter with nothing to save."""

    def save(self, position: int) -> Mapping[str, Any]:
        return {}

    def unfinished(self, step: int) -> Mapping[str, Any]:
        return {}

    def collect(self) -> None:
        """Collects nothing."""


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
    sections = {"data": {"train": {"path": "train.jsonl"}}, "checkpoint": settings, "placement": PLACEMENT | roles}
    config = make_config(steps=9, output_dir=str(output), **sections)
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
        assert not (leader.folder.path / name_of(step)).exists(), "another rank has not written yet"
        other.at_boundary(step, 0)
        for rank in (idle, first_idle, other, leader):
            rank.finish()
        files = [name for name in read_manifest(leader.folder.path / name_of(step)) if name.startswith("ranks/")]
        assert files == ["ranks/rank_00001.safetensors", "ranks/rank_00003.safetensors"]


def test_checkpoints_wait_for_an_evaluation_beside_training_and_training_does_not(jobs: Jobs, tmp_path: Path) -> None:
    """Training waits only after MAX_INCOMPLETE incomplete checkpoints, before the disk fills up."""
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
    assert copied[:1] == [part.folder.partial(2)]
    part.finish()
    timer.join()
    assert copied == [part.folder.partial(2), part.folder.partial(4)]


class TimedRank:
    """A rank with its own clock, in a job with a checkpoint every 600 s."""

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
    """Returns the job's leader and the other rank with a role."""
    stores = jobs.start(NUM_RANKS)
    return [TimedRank(tmp_path, rank, stores[rank], monkeypatch) for rank in (1, 3)]


def steps_saved(ranks: Sequence[TimedRank]) -> list[int]:
    for rank in reversed(ranks):
        rank.part.finish()
    return [found.step for found in reversed(ranks[0].part.folder.candidates())]


def test_all_ranks_save_where_the_first_one_to_come_finds_that_it_is_time(timed: list[TimedRank]) -> None:
    """The ranks also save after the last step, since the run has saved before."""
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
    """Only ranks 1 and 3 saved. Every other rank keeps its own states."""
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
    world, resumed = SimpleNamespace(rank=rank, device=CPU), Resumed(tmp_path, 7, continues=False)
    job = SimpleNamespace(resumed=resumed, world=world, leader=1)
    restore(job, Nothing(), SimpleNamespace(adopt=adopted.append))  # type: ignore[arg-type]
    assert torch.rand(()).item() == expected[rank]
    assert adopted == ([{7: {"of 1": 1.0}}, {7: {"of 3": 1.0}}] if rank == 1 else [])


NUM_ROWS = 1000


def numbered(folder: Path, count: int = NUM_ROWS, name: str = "train", **of_first: Any) -> Path:
    rows = [{"prompt": f"add {number}", "label": str(number), "level": number % 7} for number in range(count)]
    rows[0] |= of_first
    return jsonl(folder, *rows, name=f"{name}.jsonl")


def config_of(path: Path, *others: Path, reward: str = "exact_match", **data: Any) -> Config:
    train: dict[str, Any] = {"path": str(path)}
    if others:
        train = {"sources": [{"path": str(one), "weight": 1.0 + n} for n, one in enumerate((path, *others))]}
    return make_config(data={"train": train, **data}, reward={"function": reward})


def inputs_of(config: Config, template: str | None = None) -> Inputs:
    """Returns the inputs in the form of run.json."""
    tokenizer = byte_tokenizer() if template is None else byte_tokenizer(chat_template=template)
    encoder = PromptEncoder(tokenizer, config.data)
    dataset = load_prompts(config.data.train, config.data, encoder, needs="label", config_key="data.train")
    found: Inputs = json.loads(json.dumps(identity(config, dataset)))
    return found


def test_the_content_decides_and_not_where_it_stands(tmp_path: Path) -> None:
    before = inputs_of(config_of(numbered(tmp_path)))
    (tmp_path / "moved").mkdir()
    moved = inputs_of(config_of(Path(shutil.copy(tmp_path / "train.jsonl", tmp_path / "moved/other.jsonl"))))
    assert moved["paths"] != before["paths"]
    assert [*data_changes(before, moved), *other_changes(before, moved)] == []


Change = Callable[[Path], Config]
CHANGES: Mapping[str, tuple[Change, str]] = {
    "grown": (
        lambda folder: config_of(numbered(folder, NUM_ROWS + 1)),
        r"was .*train\.jsonl \(1,000 usable rows\), and is .*train\.jsonl \(1,001 usable rows\)$",
    ),
    "of other content": (
        lambda folder: config_of(numbered(folder, prompt="another")),
        r"is .* \(1,000 usable rows\) with other content$",
    ),
    "with another label": (lambda folder: config_of(numbered(folder, label="x")), "with other content"),
    "of which fewer are usable": (lambda folder: config_of(folder / "train.jsonl", max_prompt_tokens=6), "100 usable"),
    "in another order": (
        lambda folder: config_of(folder / "train.jsonl", curriculum={"key": "level", "steps": 2}),
        r'data\.curriculum: was null, and is {"key": "level"',
    ),
    "by solved rate": (
        lambda folder: config_of(folder / "train.jsonl", solved_rate={}),
        r"data\.solved_rate: was null",
    ),
    "with a second source": (
        lambda folder: config_of(folder / "train.jsonl", numbered(folder, 5, "more")),
        r"is .*train\.jsonl \(1,000 usable rows\) and .*more\.jsonl \(5 usable rows\)",
    ),
}


@pytest.mark.parametrize("name", CHANGES)
def test_rows_that_are_others_are_told_in_a_line(tmp_path: Path, name: str) -> None:
    before = inputs_of(config_of(numbered(tmp_path)))
    change, message = CHANGES[name]
    now = inputs_of(change(tmp_path))
    (first, *_) = data_changes(before, now)
    assert re.search(message, first), first
    assert [*other_changes(before, now)] == []


def test_so_are_the_weights_of_sources(tmp_path: Path) -> None:
    path, more = numbered(tmp_path), numbered(tmp_path, 5, "more")
    before, now = inputs_of(config_of(path, more)), inputs_of(config_of(path, more))
    now["order"]["weights"] = [1.0, 3.0]
    expected = "the weights in data.train.sources: was [1.0, 2.0], and is [1.0, 3.0]"
    assert [*data_changes(before, now)] == [expected]


def test_so_are_a_reward_function_and_a_chat_template(tmp_path: Path) -> None:
    own, path = tmp_path / "own.py", numbered(tmp_path)
    own.write_text("def score(prompt, response, label): return 0.0\n")
    before = inputs_of(config_of(path, reward=f"{own}:score"), CHAT_TEMPLATE)
    assert not [*other_changes(before, inputs_of(config_of(path, reward=f"{own}:score"), CHAT_TEMPLATE))]
    own.write_text("def score(prompt, response, label): return 1.0\n")
    edited = inputs_of(config_of(path, reward=f"{own}:score"), CHAT_TEMPLATE + " ")
    of_reward, of_template = other_changes(before, edited)
    assert of_reward.count(f"{own}:score (file ") == 2 and of_template.startswith("the chat template was ")
    (told,) = other_changes(edited, inputs_of(config_of(path), CHAT_TEMPLATE + " "))
    assert told.endswith(", and is exact_match")
    assert not [*data_changes(before, edited)]


@pytest.mark.parametrize(
    ("name", "is_found"),
    [
        ("tests.support.user_rewards:anything", True),
        ("tests.support.user_rewards.anything", True),
        ("rltrain.rewards:anything", False),
        ("exact_match", False),
        ("http://127.0.0.1:8000/score", False),
        ("nowhere.py:score", False),
    ],
)
def test_the_file_of_a_function_is_found_without_running_it(name: str, is_found: bool) -> None:
    path = source_file(name)
    assert (path is not None and path.name == "user_rewards.py") == is_found


def saved(folder: Path, config: Config, inputs: Inputs, **more: Any) -> Resumed:
    """Returns a checkpoint after two steps."""
    order = build_order(config, place(config.placement))
    crossing = [list(entry.transfer) for entry in order.crossing(order.boundary(2)).values()]
    run = {"config": config.model_dump(mode="json"), "crossing": crossing, "inputs": inputs, **more}
    (folder / RUN_FILE).write_text(json.dumps(run))
    return Resumed(folder, 2)


def test_a_run_takes_other_rows_from_the_first_one_on(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = config_of(numbered(tmp_path))
    checkpoint = saved(tmp_path, config, inputs_of(config), data_from=1)
    same = with_present_inputs(config, checkpoint, inputs_of(config))
    assert (same.data_from, same.has_new_data, caplog.text) == (1, False, "")
    assert remaining_order(config, place(config.placement), same)[1]
    other = config_of(numbered(tmp_path, 7, "other"))
    with caplog.at_level(logging.WARNING):
        changed = with_present_inputs(other, checkpoint, inputs_of(other))
    (record,) = caplog.records
    assert record.getMessage().endswith("other.jsonl (7 usable rows): step 2 takes the first of these rows")
    assert (changed.data_from, changed.has_new_data) == (2, True)
    assert not remaining_order(other, place(other.placement), changed)[1], "prompts drawn ahead come from the old rows"


def test_a_run_may_refuse_other_inputs(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = config_of(numbered(tmp_path), on_change="refuse")
    checkpoint = saved(tmp_path, config, inputs_of(config))
    assert with_present_inputs(config, checkpoint, inputs_of(config)) == checkpoint
    other = config_of(numbered(tmp_path, 7, "other"), on_change="refuse", reward="math")
    message = r"data\.on_change: refuse, and .*other\.jsonl.*; the reward was exact_match"
    with pytest.raises(CheckpointError, match=message):
        with_present_inputs(other, checkpoint, inputs_of(other))
    assert not caplog.text
    said = with_present_inputs(config_of(tmp_path / "train.jsonl", reward="math"), checkpoint, inputs_of(other))
    assert said.has_new_data


def test_other_settings_of_learning_are_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = config_of(numbered(tmp_path))
    checkpoint = saved(tmp_path, config, inputs_of(config))
    changes = {"actor": {"optimizer": {"lr": 3e-5}}, "logging": {"samples": 3}, "loss": {"kl": {"coef": 0.5}}}
    other = Config.model_validate({**config.model_dump(mode="json"), **changes})
    with caplog.at_level(logging.WARNING):
        assert not with_present_inputs(other, checkpoint, inputs_of(other)).has_new_data
    was = config.actor.optimizer.lr, config.loss.kl.coef
    assert [record.getMessage() for record in caplog.records] == [
        f"actor.optimizer.lr was {was[0]}, and is 3e-05",
        f"loss.kl.coef was {was[1]}, and is 0.5",
    ]


def test_a_checkpoint_that_records_no_inputs_goes_on(tmp_path: Path) -> None:
    config = config_of(numbered(tmp_path), on_change="refuse")
    checkpoint = saved(tmp_path, config, inputs_of(config))
    run = {name: value for name, value in checkpoint.run.items() if name != "inputs"}
    (tmp_path / RUN_FILE).write_text(json.dumps(run))
    assert not with_present_inputs(config, checkpoint, inputs_of(config)).has_new_data


def test_streams_begin_with_the_step_that_takes_the_first_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    order = PromptOrder(NUM_ROWS, seed=0, shuffle=True)
    assert [FixedRows(order, first=12).row(12 + number) for number in range(3)] == [order.row(n) for n in range(3)]
    rows = [{"prompt": f"p{number}", "response": f"r{number}"} for number in range(9)]
    sections = {"data": {"train": {"path": str(jsonl(tmp_path, *rows))}}, "batch": {"prompts_per_step": 2}}
    config = make_config(algorithm="sft", placement={"actor": 0}, **sections)
    monkeypatch.setattr("rltrain.data.tokenizer.load_tokenizer", lambda path: byte_tokenizer())
    data = Demonstrations(config)
    first = data.for_step(0).prompt_ids.tolist()
    data.first_step = 3
    assert data.for_step(3).prompt_ids.tolist() == first
