"""The rollout role saves what it is in the middle of, and one that is built from that goes on with it."""

import json
import tempfile
from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from rltrain.checkpoint.run_files import RUN_FILE, write_files
from rltrain.checkpoint.run_folder import Resumed
from rltrain.config.schema import Config
from rltrain.data.experience import Experience
from rltrain.data.prompt_order import PromptOrder
from rltrain.errors import CheckpointError
from rltrain.roles import drawing
from rltrain.roles.resuming import remaining_order
from rltrain.roles.rollout import RolloutRole
from rltrain.rollout.rollout_state import Consumed, RolloutState
from rltrain.runtime.grid import Grid
from rltrain.schedule.iterations import build_order
from rltrain.schedule.shape import RunShape
from tests.unit.schedule_configs import make_config, place
from tests.unit.scripted_engine import ScriptedEngine
from tests.unit.shared_store import Jobs, ShortPatience, open_store
from tests.unit.test_dynamic_sampling import ScriptedFilter

STEPS, PER_STEP, NUM_SAMPLES = 5, 4, 2
BATCH = {"prompts_per_step": PER_STEP, "samples_per_prompt": NUM_SAMPLES}
AHEAD = {"mode": "asynchronous", "max_staleness": 1, "partial_rollouts": True}


def response_length(sample: int) -> int:
    """Long-tailed."""
    return 30 if sample % 11 == 0 else 1 + sample * 5 % 7


@pytest.fixture(autouse=True, scope="module")
def scripted() -> Iterator[None]:
    """Engines without a model."""

    def build(*_: Any) -> SimpleNamespace:
        return SimpleNamespace(engine=ScriptedEngine(response_length), parts={}, metrics=dict)

    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(drawing, "build_engine", build)
        monkeypatch.setattr(RolloutRole, "site", lambda self: None)
        yield


@pytest.fixture(scope="module")
def jobs() -> Iterator[Jobs]:
    with open_store() as store:
        yield Jobs(store, num_ranks=3)


def config_of(**sections: Any) -> Config:
    return make_config(**{"steps": STEPS, "batch": BATCH, "schedule": {"partial_rollouts": True}, **sections})


def rollout_of(config: Config, rank: int, num_engines: int, store: dist.Store, resumed: Resumed | None) -> RolloutRole:
    """One of `num_engines` engines of one rank each."""
    rows, order = SimpleNamespace(prompt_tokens=lambda row: (row, row + 1)), PromptOrder(100, seed=0, shuffle=True)
    prompts = SimpleNamespace(
        train=rows,
        order=order,
        training=(rows, order),
        report_rows=lambda prompts_per_step: None,
        encoder=SimpleNamespace(end_tokens=frozenset({1})),
    )
    job: Any = SimpleNamespace(
        config=config,
        shape=RunShape.of(config),
        world=SimpleNamespace(rank=rank, store=store),
        placement=SimpleNamespace(roles=("rollout",)),
        grids={"rollout": Grid(tuple(range(num_engines)))},
        leader_of=lambda role: 0,
        rows=SimpleNamespace(prompts=prompts, first_step=resumed.data_from if resumed else 0),
        waiter=ShortPatience(),
        heartbeat=SimpleNamespace(advance=lambda: None),
        architecture=SimpleNamespace(eos_token_ids=(1,)),
        operations=SimpleNamespace(add=lambda *counted, backward: None),
        resumed=resumed,
        first_step=resumed.step if resumed else 0,
    )
    return RolloutRole(job)


def draw(rollout: RolloutRole, step: int, chunk: int = 0) -> list[int]:
    """Ids of the chunk's samples that this engine drew."""
    rollout.generate(step, chunk)
    ids: list[int] = rollout.shipments.pop(("samples", step, chunk)).experience.sample_ids.tolist()
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


@dataclass(frozen=True)
class JobPlan:
    """One of several jobs of a run: what its config says, and the step before which it is cut."""

    config: Config
    num_engines: int
    cut: int


@st.composite
def schedules(draw: st.DrawFn) -> dict[str, Any]:
    mode, partial = draw(st.sampled_from(["sequential", "pipelined", "asynchronous"])), draw(st.booleans())
    schedule = {"mode": mode, "partial_rollouts": partial, "oversampling": draw(st.sampled_from([0.25, 1.5]))}
    if mode != "sequential":
        schedule["chunks"] = draw(st.sampled_from([1, 2]))
    if mode == "asynchronous":
        schedule |= {"max_staleness": draw(st.integers(1, 2)), "in_flight_sync": draw(st.booleans())}
    return schedule | {"on_stale": "mask"}


@st.composite
def job_plans(draw: st.DrawFn) -> list[JobPlan]:
    """The last job comes to the end of the run. Some have the schedule of the job before."""
    cuts = sorted(draw(st.sets(st.integers(1, STEPS - 1), min_size=1, max_size=2)))
    plans: list[JobPlan] = []
    for cut in (*cuts, STEPS):
        batch = BATCH | draw(st.sampled_from([{}, {"dynamic_sampling": {"max_drawn": 3}}]))
        schedule = draw(schedules() if not plans else schedules() | st.just(plans[-1].config.schedule.model_dump()))
        plans.append(JobPlan(config_of(batch=batch, schedule=schedule), draw(st.integers(1, 3)), cut))
    return plans


class ScoringByScript(ScriptedFilter):
    """Scores groups as role reward does, by a script."""

    def hand_over(self, step: int, chunk: int, experience: Experience, records: Any) -> Experience:
        assert all(record == f"of {group.position}" for group, record in records)
        return experience


def draw_job(jobs: Jobs, plan: JobPlan, dull: Collection[int], folder: Path, resumed: Resumed | None) -> Any:
    """By engine: positions that it drew, by step; positions that it dropped; and what it leaves. A checkpoint of what
    all leave is in `folder`."""
    shape, placement = RunShape.of(plan.config), place(plan.config.placement)

    def engine(rank: int, store: dist.Store) -> Any:
        rollout = rollout_of(plan.config, rank, plan.num_engines, store, resumed)
        scoring, drawn = ScoringByScript(lambda position: position in dull), {}
        if shape.selects_groups:
            rollout.select_groups_by(scoring)
        for step in range(rollout.first_generated, min(plan.cut + shape.lead, STEPS)):
            rollout.engine.policy_version = step
            ids = [number for chunk in range(shape.num_chunks) for number in draw(rollout, step, chunk)]
            drawn[step] = [number // NUM_SAMPLES for number in ids if number % NUM_SAMPLES == 0]
        files = rollout.save_state()
        write_files(folder / "rollout", files)
        (state,) = map(RolloutState.from_contents, files.values())
        return drawn, [position for _, position in scoring.dropped], state

    by_engine = jobs.run(engine, plan.num_engines)
    order = build_order(plan.config, placement)
    crossing = [list(entry.transfer) for entry in order.crossing(order.boundary(plan.cut)).values()]
    (folder / RUN_FILE).write_text(json.dumps({"config": plan.config.model_dump(mode="json"), "crossing": crossing}))
    return by_engine


@settings(max_examples=12, deadline=None, phases=[Phase.reuse, Phase.generate])
@given(job_plans(), st.sets(st.integers(0, 40), max_size=12))
def test_every_group_is_trained_on_or_dropped_once_whatever_changes_between_jobs(jobs, plans, dull):
    """Of experience that crosses a cut, a job that goes on with it trains on it, and others draw its groups again."""
    trained: dict[int, list[int]] = {}
    dropped: list[int] = []
    resumed = None
    with tempfile.TemporaryDirectory() as folder:
        for number, plan in enumerate(plans):
            if resumed is not None:
                continues = remaining_order(plan.config, place(plan.config.placement), resumed)[1]
                resumed = replace(resumed, continues=continues)
                trained = {step: of for step, of in trained.items() if continues or step < resumed.step}
            by_engine = draw_job(jobs, plan, dull, Path(folder, str(number)), resumed)
            dropped += [position for _, of_engine, _ in by_engine for position in of_engine]
            for drawn, _, _ in by_engine:
                for step, positions in drawn.items():
                    trained[step] = [*trained.get(step, ()), *positions]
            resumed = Resumed(Path(folder, str(number)), plan.cut)
    assert {step: len(of) for step, of in trained.items()} == dict.fromkeys(range(STEPS), PER_STEP)
    held = [group.position for _, _, state in by_engine for group in (*state.begun, *state.drawn)]
    found = Counter([*chain(*trained.values()), *dropped, *held])
    assert found == Counter(range(len(found))), "each once, and none is left out"
    assert dropped or found == Counter(range(STEPS * PER_STEP))


def test_under_another_schedule_a_step_takes_what_the_steps_before_have_left(jobs, tmp_path):
    """Group 5 was waiting behind long ones while 6, 7 and 8 were trained on."""
    before = draw_steps(jobs, config_of(), range(2), 1, tmp_path / "first")
    trained_on = {sample // NUM_SAMPLES for sample in before}
    assert trained_on == {0, 1, 2, 3, 4, 6, 7, 8}
    resumed = Resumed(tmp_path / "first", 2, continues=False)
    (store,) = jobs.start(1)
    rollout = rollout_of(config_of(schedule={}), 0, 1, store, resumed)
    taken = [{sample // NUM_SAMPLES for sample in draw(rollout, step)} for step in (2, 3)]
    assert taken == [{5, 9, 10, 11}, {12, 13, 14, 15}]


def test_prompts_that_were_dropped_are_of_no_step(jobs, tmp_path):
    """Two steps of four were handed over."""
    state = RolloutState(Consumed(10, num_dropped=2))
    write_files(tmp_path / "rollout", {"engine_00000.safetensors": state.contents()})
    (store,) = jobs.start(1)
    for batch in (BATCH | {"dynamic_sampling": {}}, BATCH):
        rollout = rollout_of(config_of(batch=batch, schedule={}), 0, 1, store, Resumed(tmp_path, 2))
        assert rollout.first_generated == 2
        assert rollout.training.rules.max_position(2, 0) == 14


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
