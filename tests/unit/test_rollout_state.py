"""The rollout role saves what it is in the middle of, and one that is built from that goes on with it."""

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from rltrain.checkpoint.run.files import write_files
from rltrain.checkpoint.run.folder import Resumed
from rltrain.cluster.grid import Grid
from rltrain.config.schema import Config
from rltrain.data.order import PromptOrder
from rltrain.errors import CheckpointError
from rltrain.roles import drawing
from rltrain.roles.rollout import Rollout
from rltrain.rollout.stream.rollout_state import Consumed, RolloutState
from rltrain.schedule.shape import RunShape
from tests.unit.schedule_configs import make_config
from tests.unit.scripted_engine import ScriptedEngine
from tests.unit.shared_store import Jobs, ShortPatience, open_store

STEPS, PER_STEP, NUM_SAMPLES = 5, 4, 2
BATCH = {"prompts_per_step": PER_STEP, "samples_per_prompt": NUM_SAMPLES}
AHEAD = {"mode": "asynchronous", "max_staleness": 1, "partial_rollouts": True}


def response_length(sample: int) -> int:
    """Long-tailed."""
    return 30 if sample % 11 == 0 else 1 + sample * 5 % 7


@pytest.fixture(autouse=True)
def scripted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines without a model."""

    def build(*_: Any) -> SimpleNamespace:
        return SimpleNamespace(engine=ScriptedEngine(response_length), parts={}, metrics=dict)

    monkeypatch.setattr(drawing, "build_engine", build)
    monkeypatch.setattr(Rollout, "site", lambda self: None)


@pytest.fixture(scope="module")
def jobs() -> Iterator[Jobs]:
    with open_store() as store:
        yield Jobs(store, num_ranks=2)


def config_of(**sections: Any) -> Config:
    return make_config(**{"steps": STEPS, "batch": BATCH, "schedule": {"partial_rollouts": True}, **sections})


def rollout_of(config: Config, rank: int, num_engines: int, store: dist.Store, resumed: Resumed | None) -> Rollout:
    """One of `num_engines` engines of one rank each."""
    rows, order = SimpleNamespace(prompt_tokens=lambda row: (row, row + 1)), PromptOrder(100, seed=0, shuffle=True)
    prompts = SimpleNamespace(
        train=rows, order=order, training=(rows, order), report_rows=lambda prompts_per_step: None
    )
    job: Any = SimpleNamespace(
        config=config,
        shape=RunShape.of(config),
        world=SimpleNamespace(rank=rank, store=store),
        placement=SimpleNamespace(roles=("rollout",)),
        grids={"rollout": Grid(tuple(range(num_engines)))},
        leader_of=lambda role: 0,
        prompts=prompts,
        waiter=ShortPatience(),
        heartbeat=SimpleNamespace(advance=lambda: None),
        architecture=SimpleNamespace(eos_token_ids=(1,)),
        operations=SimpleNamespace(add=lambda *counted, backward: None),
        resumed=resumed,
        first_step=resumed.step if resumed else 0,
    )
    return Rollout(job)


def draw(rollout: Rollout, step: int) -> list[int]:
    """Ids of the step's samples that this engine drew."""
    rollout.generate(step, 0)
    ids: list[int] = rollout.shipments.pop(("samples", step, 0)).experience.sample_ids.tolist()
    return ids


def draw_steps(jobs: Jobs, config: Config, steps: range, num_engines: int, folder: Path, **job: Any) -> list[int]:
    """The samples that all engines drew for `steps`; what they are left with is saved in `folder`."""

    def engine(rank: int, store: dist.Store) -> list[int]:
        rollout = rollout_of(config, rank, num_engines, store, job.get("resumed"))
        ids = [sample for step in steps for sample in draw(rollout, step)]
        write_files(folder / "rollout", rollout.save_state())
        return ids

    return sorted(sample for ids in jobs.run(engine, num_engines) for sample in ids)


@pytest.mark.parametrize(("engines_before", "engines_after"), [(1, 1), (1, 2), (2, 1)])
@pytest.mark.parametrize("cut", [1, 3])
def test_every_sample_is_drawn_in_one_of_the_two_jobs(jobs, tmp_path, cut, engines_before, engines_after):
    config = config_of()
    before = draw_steps(jobs, config, range(cut), engines_before, tmp_path / "first")
    resumed = Resumed(tmp_path / "first", cut)
    after = draw_steps(jobs, config, range(cut, STEPS), engines_after, tmp_path / "second", resumed=resumed)
    assert len(before) == cut * PER_STEP * NUM_SAMPLES
    assert sorted(before + after) == [*range(STEPS * PER_STEP * NUM_SAMPLES)]


def test_a_run_that_does_not_continue_what_was_saved_draws_its_steps_anew(jobs, tmp_path):
    config = config_of()
    draw_steps(jobs, config, range(2), 1, tmp_path / "first")
    resumed = Resumed(tmp_path / "first", 2, continues=False)
    after = draw_steps(jobs, config, range(2, STEPS), 1, tmp_path / "second", resumed=resumed)
    assert after == [*range(2 * PER_STEP * NUM_SAMPLES, STEPS * PER_STEP * NUM_SAMPLES)]


def test_prompts_that_were_dropped_are_of_no_step(jobs, tmp_path):
    """Two steps of four were handed over; a run whose steps take fixed prompts cannot go on behind those."""
    state = RolloutState(Consumed(10, num_dropped=2))
    write_files(tmp_path / "rollout", {"engine_00000.safetensors": state.contents()})
    (store,) = jobs.start(1)
    selecting = config_of(batch=BATCH | {"dynamic_sampling": {}}, schedule={})
    rollout = rollout_of(selecting, 0, 1, store, Resumed(tmp_path, 2))
    assert rollout.first_generated == 2
    assert rollout.training.selection is not None and rollout.training.selection.drops.total == 2
    with pytest.raises(CheckpointError, match=r"had dropped 2 prompts.* Set batch\.dynamic_sampling as it was"):
        rollout_of(config_of(schedule={}), 0, 1, store, Resumed(tmp_path, 2))


@pytest.fixture
def a_step_ahead(jobs: Jobs, tmp_path: Path) -> Resumed:
    """Saved after two steps of training, with generation one step ahead of it."""
    draw_steps(jobs, config_of(schedule=AHEAD), range(3), 1, tmp_path)
    return Resumed(tmp_path, 2)


def test_generation_goes_on_ahead_of_training(jobs, a_step_ahead):
    (store,) = jobs.start(1)
    assert rollout_of(config_of(schedule=AHEAD), 0, 1, store, a_step_ahead).first_generated == 3


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"batch": BATCH | {"prompts_per_step": 5}}, "handed over 12 prompts by step 2; expected .*prompts_per_step 5"),
        ({"schedule": AHEAD | {"max_staleness": 0}}, "at most 0 steps ahead"),
        ({"batch": BATCH | {"samples_per_prompt": 3}}, "prompts of 2 samples each; expected 3"),
        (
            {"rollout": {"sampling": {"max_response_tokens": 2}}},
            "unfinished response of .* tokens; expected fewer than 2",
        ),
    ],
)
def test_a_config_that_cannot_go_on_with_it_is_refused(jobs, a_step_ahead, changed, message):
    (store,) = jobs.start(1)
    with pytest.raises(CheckpointError, match=message):
        rollout_of(config_of(**{"schedule": AHEAD, **changed}), 0, 1, store, a_step_ahead)
