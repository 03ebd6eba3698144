"""The saved state of unfinished rollouts, and generation after a resume."""

import json
import tempfile
from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from rltrain.checkpoint.run_files import RUN_FILE, Contents, read_contents, write_files
from rltrain.checkpoint.run_folder import Resumed
from rltrain.config.schema import Config
from rltrain.data.experience import Experience
from rltrain.data.images import Context
from rltrain.data.prompt_order import PromptOrder
from rltrain.errors import CheckpointError
from rltrain.roles import rollout as rollout_module
from rltrain.roles.resuming import remaining_order
from rltrain.roles.rollout import RolloutRole
from rltrain.rollout.generation_loop import GenerationLoop
from rltrain.rollout.rollout_state import Consumed, EngineStart, RolloutState, share_out
from rltrain.rollout.sample import RecordedRouting, Sample, SampleGroup, Status
from rltrain.runtime.grid import Grid
from rltrain.schedule.iterations import build_order
from rltrain.schedule.shape import RunShape
from tests.support.generation_loops import NUM_SAMPLES, Chunk, Setting, lengths_in_waves, positions
from tests.support.schedule_configs import make_config, place
from tests.support.scripted_engine import ScriptedEngine
from tests.support.shared_store import Jobs, ShortPatience, open_store
from tests.unit.test_groups import ScriptedFilter

integers = st.integers(0, 2**63 - 1)
prompts = st.lists(st.integers(0, 200_000), min_size=1, max_size=5).map(tuple)


@st.composite
def samples(draw: st.DrawFn, number: int, prompt: tuple[int, ...], status: Status) -> Sample:
    """Tokens of the model and other tokens are mixed."""
    length = draw(st.integers(status != Status.PENDING, 5))

    def per_token(values: st.SearchStrategy[Any]) -> tuple[Any, ...]:
        return tuple(draw(st.lists(values, min_size=length, max_size=length)))

    turns = tuple(sorted(draw(st.sets(st.integers(1, length)) if length else st.just(set()))))
    return Sample(
        number,
        prompt,
        draw(integers),
        per_token(st.integers(0, 200_000)),
        per_token(st.floats(-1e3, 0)),
        per_token(st.integers(0, 9)),
        per_token(st.booleans()),
        status,
        turns,
        tuple(draw(st.lists(st.floats(-10, 10), max_size=len(turns)))),
        draw(st.none() | st.integers(0, 99)),
        draw(st.booleans()),
        routing=routing_of(number, draw(st.integers(0, len(prompt) + length))),
    )


def routing_of(number: int, num_tokens: int) -> RecordedRouting | None:
    """Returns a routing in two layers with three experts each."""
    experts = np.arange(number, number + num_tokens * 6).reshape(-1, 2, 3) % 128
    return RecordedRouting(experts.astype(np.int8)) if num_tokens else None


@st.composite
def groups(draw: st.DrawFn, position: int) -> SampleGroup:
    prompt, row = draw(prompts), draw(st.integers(0, 99))
    statuses = draw(st.lists(st.sampled_from(Status), min_size=1, max_size=3))
    return SampleGroup(
        position, row, tuple(draw(samples(position * 3 + i, prompt, status)) for i, status in enumerate(statuses))
    )


@st.composite
def cuts(draw: st.DrawFn) -> list[RolloutState]:
    """Draws the states of a run's engines. Each position is handed over, at one engine, or free."""
    below = draw(st.integers(0, 20))
    fates = draw(st.lists(st.sampled_from(["handed over", "dropped", "free", 0, 1, 2, "dropped by 1"]), max_size=8))
    dropped = [below + i for i, fate in enumerate(fates) if fate == "dropped"]
    consumed = Consumed(below).after((below + i for i, fate in enumerate(fates) if fate == "handed over"), dropped)
    handed_over = [position for position in range(below + len(fates)) if position in consumed.without(dropped)]
    steps = range(len(handed_over) // 2)
    ahead = {step: tuple(handed_over[2 * step : 2 * step + 2]) for step in steps[-draw(st.integers(1, 3)) :]}
    held = [[draw(groups(below + i)) for i, fate in enumerate(fates) if fate == engine] for engine in range(3)]
    unseen = tuple(below + i for i, fate in enumerate(fates) if fate == "dropped by 1")
    return [
        RolloutState(
            consumed,
            ahead,
            tuple(group for group in of_engine if not group.is_finished),
            tuple(group for group in of_engine if group.is_finished),
            {
                group.position: draw(st.text(max_size=3))
                for group in of_engine
                if group.is_finished and draw(st.booleans())
            },
            unseen if engine == 1 else (),
        )
        for engine, of_engine in enumerate(held)
    ]


@given(st.sets(st.integers(0, 30)), st.data())
def test_positions_that_are_open_are_numbered(taken, data):
    consumed = Consumed().after(taken)
    still_open = [position for position in range(60) if position not in taken]
    for number, position in enumerate(still_open[:25]):
        assert consumed.open_position(number) == position
        assert consumed.num_open_before(position) == number
    again = data.draw(st.sets(st.sampled_from(sorted(taken)))) if taken else set()
    assert consumed.without(again) == Consumed().after(taken - again)


def positions_held(state: RolloutState) -> list[int]:
    return [group.position for group in state.begun + state.drawn]


@given(st.lists(st.lists(st.integers(0, 12), max_size=4), max_size=5))
def test_what_was_handed_over_is_a_set_of_positions(chunks):
    consumed, expected = Consumed(), set()
    for chunk in chunks:
        consumed, expected = consumed.after(chunk), expected.union(chunk)
        assert len(consumed) == len(expected)
        assert {position for position in range(20) if position in consumed} == expected
        assert consumed.below not in consumed and all(p > consumed.below for p in consumed.beyond)


@given(cuts())
def test_a_file_holds_all_of_it(saved):
    for state in saved:
        contents = state.contents()
        assert all(
            values.dtype in (torch.int64, torch.float64, torch.bool, torch.uint8, torch.int8)
            for values in contents.tensors.values()
        )
        assert RolloutState.from_contents(contents) == state


@pytest.mark.parametrize("dtype", [np.int8, np.int16])
def test_a_file_holds_it_on_the_disk_too(tmp_path: Path, dtype: type[np.signedinteger]):
    sample = Sample(7, (5,), seed=2**63 - 1).drawn((1,), (-0.1,), (4,)).routed(np.full((1, 3, 2), 99, dtype))
    group = SampleGroup(7, 3, (sample,))
    for name, state in {
        "empty": RolloutState(),
        "full": RolloutState(Consumed(4, frozenset({6})), {2: (3, 6)}, (group,)),
    }.items():
        write_files(tmp_path, {name: state.contents()})
        assert RolloutState.from_contents(read_contents(tmp_path / name)) == state


@given(cuts(), st.integers(1, 4))
def test_every_position_goes_to_one_engine_whatever_their_number(saved, num_engines):
    starts = share_out(saved, num_engines)
    (next_position,) = {start.next_position for start in starts}
    (consumed,) = {start.state.consumed for start in starts}
    unseen = [position for state in saved for position in state.unseen]
    assert consumed == saved[0].consumed.after((), unseen)
    assert consumed.num_handed_over == saved[0].consumed.num_handed_over
    given_out = Counter(p for start in starts for p in (*positions_held(start.state), *start.returned))
    assert given_out == Counter(position for position in range(next_position) if position not in consumed)
    assert not any(position >= next_position for position in consumed.beyond)
    before = {
        p: group for state in saved for p, group in zip(positions_held(state), state.begun + state.drawn, strict=True)
    }
    after = {
        p: group
        for start in starts
        for p, group in zip(positions_held(start.state), start.state.begun + start.state.drawn, strict=True)
    }
    assert after == before, "every group is whole, and no begun group is begun again"
    records = {p: record for start in starts for p, record in start.state.records.items()}
    assert records == {p: record for state in saved for p, record in state.records.items()}
    assert all(start.state.records.keys() <= {*positions_held(start.state)} for start in starts)
    assert all(start.returned == tuple(sorted(start.returned)) for start in starts), "earlier positions come first"


@given(cuts(), st.integers(1, 4))
def test_saving_what_was_dealt_out_changes_nothing(saved, num_engines):
    starts = share_out(saved, num_engines)
    again = share_out([start.state for start in starts], num_engines)
    assert [start.state for start in again] == [start.state for start in starts]


@given(cuts(), st.integers(1, 4), st.integers(0, 12))
def test_a_run_that_draws_steps_again_finds_open_what_they_took(saved, num_engines, step):
    """Positions for later steps are open too. Dropped positions stay dropped."""
    starts = share_out([state.trained_before(step) for state in saved], num_engines)
    again = {position for of, positions in saved[0].ahead.items() if of >= step for position in positions}
    consumed = share_out(saved, 1)[0].state.consumed
    assert all(start.state == RolloutState(consumed.without(again)) for start in starts)
    returned = [position for start in starts for position in start.returned]
    expected = [position for position in range(starts[0].next_position) if position not in starts[0].state.consumed]
    assert sorted(returned) == expected


def test_where_all_has_been_handed_over_the_stream_goes_on_from_there():
    assert share_out([RolloutState(Consumed(12))] * 2, 3) == [EngineStart.at(12)] * 3


def test_files_of_different_checkpoints_are_refused():
    with pytest.raises(CheckpointError, match="disagree"):
        share_out([RolloutState(Consumed(4)), RolloutState(Consumed(8))], 2)
    with pytest.raises(CheckpointError, match="0 engines"):
        share_out([], 2)
    group = SampleGroup(5, 0, (Sample(5, (1,), 0).drawn((1,), (-0.5,), (0,), Status.STOPPED),))
    state = RolloutState(Consumed(4), drawn=(group,))
    with pytest.raises(CheckpointError, match=r"the groups at positions \[5\] more than once"):
        share_out([state, state], 2)
    with pytest.raises(CheckpointError, match=r"the groups at positions \[5\] more than once"):
        share_out([replace(state, consumed=Consumed(6))], 1)


def test_another_format_is_refused():
    contents = RolloutState().contents()
    with pytest.raises(CheckpointError, match="format 'rollout 2'; expected 'rollout 7'"):
        RolloutState.from_contents(Contents(contents.tensors, {"format": "rollout 2"}))


NUM_STEPS = 6


@pytest.fixture(scope="module")
def jobs() -> Iterator[Jobs]:
    with open_store() as store:
        yield Jobs(store, num_ranks=3)


def draw_step(setting: Setting, loop: GenerationLoop, step: int) -> list[Chunk]:
    return [loop.run(step, chunk) for chunk in range(setting.num_chunks)]


def draw_until(setting: Setting, jobs: Jobs, cut: int) -> tuple[list[list[Chunk]], list[RolloutState]]:
    """Returns by engine the chunks of the steps before `cut`, and its state there. Engines then continue for a step, as
    in a job that saves. This step may take positions of the stream that other engines have not reached."""

    def engine(rank: int, own: dist.Store) -> tuple[list[Chunk], RolloutState]:
        loop = setting.loop(rank, own)
        chunks = [chunk for step in range(cut) for chunk in draw_step(setting, loop, step)]
        state = RolloutState.from_contents(loop.state().contents())
        if cut < NUM_STEPS:
            draw_step(setting, loop, cut)
        return chunks, state

    chunks, state = zip(*jobs.run(engine, setting.num_engines), strict=True)
    return [*chunks], [*state]


def draw_from(setting: Setting, jobs: Jobs, cut: int, starts: list[EngineStart]) -> list[list[Chunk]]:
    """Returns by engine the chunks of the steps from `cut` on. Version 1 generates their tokens."""

    def engine(rank: int, own: dist.Store) -> list[Chunk]:
        loop = setting.loop(rank, own, starts[rank])
        loop.groups.engine.policy_version = 1
        return [chunk for step in range(cut, NUM_STEPS) for chunk in draw_step(setting, loop, step)]

    return jobs.run(engine, setting.num_engines)


def groups_drawn(by_engine: list[list[Chunk]]) -> list[SampleGroup]:
    return [group for chunks in by_engine for _, drawn in chunks for group in drawn]


def assert_complete(setting: Setting, before: list[list[Chunk]], after: list[list[Chunk]]) -> None:
    """Every position is in one chunk, every group at one engine, and every token was generated once."""
    finished = [entry for chunks in (before[0], after[0]) for entries, _ in chunks for entry in entries]
    groups = groups_drawn(before) + groups_drawn(after)
    expected = [*range(NUM_STEPS * setting.per_step)]
    assert sorted(positions(finished)) == sorted(positions(groups)) == expected
    for group in groups:
        assert [sample.id for sample in group.samples] == [group.position * NUM_SAMPLES + s for s in range(NUM_SAMPLES)]
        for sample in group.samples:
            assert list(sample.tokens) == [1000 * sample.id + t for t in range(setting.length_of(sample.id))]


def as_carried(state: list[RolloutState]) -> dict[int, list[int]]:
    """Returns the policy versions of the tokens of unfinished groups, by sample."""
    return {
        sample.id: list(sample.policy_versions)
        for engine in state
        for group in engine.begun
        for sample in group.samples
    }


@pytest.mark.parametrize("cut", range(NUM_STEPS + 1))
@pytest.mark.parametrize("partial", [False, True])
def test_one_engine_goes_on_as_if_it_had_not_stopped(jobs, cut, partial):
    """The chunks are equal, also with partial rollouts. Unfinished samples come first, in their old order."""
    ahead = 3 if partial else 0
    setting = Setting(per_step=4, num_steps=NUM_STEPS, ahead=ahead, num_chunks=2, partial=partial, shared=False)
    expected, _ = draw_until(setting, jobs, NUM_STEPS)
    before, state = draw_until(setting, jobs, cut)
    after = draw_from(setting, jobs, cut, share_out(state, 1))
    shown = [[(finished, positions(drawn)) for finished, drawn in chunks] for chunks in (*before, *after, *expected)]
    assert shown[0] + shown[1] == shown[2]
    assert_complete(setting, before, after)


@pytest.mark.parametrize("cut", [1, 4])
def test_engines_with_a_fixed_deal_draw_what_they_would_have_drawn(jobs, cut):
    setting = Setting(num_steps=NUM_STEPS, num_engines=3, shared=False)
    expected, _ = draw_until(setting, jobs, NUM_STEPS)
    before, state = draw_until(setting, jobs, cut)
    assert all(start == EngineStart(RolloutState(state[0].consumed), cut * 6) for start in share_out(state, 3))
    after = draw_from(setting, jobs, cut, share_out(state, 3))
    for engine in range(3):
        assert [positions(drawn) for _, drawn in before[engine] + after[engine]] == [
            positions(drawn) for _, drawn in expected[engine]
        ]


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("partial", [True, False])
@pytest.mark.parametrize(("engines_before", "engines_after"), [(1, 3), (2, 2), (3, 1), (3, 2)])
def test_on_any_number_of_engines_nothing_is_lost_or_drawn_twice(jobs, shared, partial, engines_before, engines_after):
    cut = 3
    setting = Setting(
        per_step=4,
        num_steps=NUM_STEPS,
        ahead=4,
        num_chunks=2,
        num_engines=engines_before,
        shared=shared,
        partial=partial,
        step_s=lambda engine: 1e-4 * (1 + engine),
    )
    before, state = draw_until(setting, jobs, cut)
    other = replace(setting, num_engines=engines_after)
    after = draw_from(other, jobs, cut, share_out(state, engines_after))
    assert_complete(setting, before, after)
    continued = as_carried(state)
    versions = {s.id: list(s.policy_versions) for group in groups_drawn(after) for s in group.samples}
    for sample, known in continued.items():
        assert versions[sample] == known + [1] * (lengths_in_waves(sample) - len(known))


def test_a_group_that_was_done_too_early_is_handed_over_without_being_drawn_again(jobs):
    """Its ticket is entered again."""
    setting = Setting(per_step=2, num_steps=2, ahead=2, length_of=lambda number: 60 if number < 2 else 2, num_slots=8)
    loop = setting.loop(0, *jobs.start(1))
    loop.run(0, 0)
    state = loop.state()
    assert positions(state.drawn) == [2, 3]
    resumed = setting.loop(0, *jobs.start(1), share_out([state], 1)[0])
    finished, drawn = resumed.run(1, 0)
    assert positions(finished) == positions(drawn) == [2, 3]
    assert resumed.groups.engine.started == [], "there was nothing left to decode"


def test_saving_does_not_disturb_the_run_that_goes_on_itself(jobs):
    setting = Setting(
        per_step=2, num_steps=4, ahead=1, partial=True, length_of=lambda number: 50 if number < 2 else 3, num_slots=8
    )
    loop = setting.loop(0, *jobs.start(1))
    chunks = []
    for step in range(4):
        chunks.append(positions(loop.run(step, 0)[0]))
        loop.state()
    assert sorted(chain(*chunks)) == [*range(8)]
    assert chunks[0] == [1, 2], "the step did not wait for group 0"


STEPS, PER_STEP, SAMPLES_PER_PROMPT = 5, 4, 2
BATCH = {"prompts_per_step": PER_STEP, "samples_per_prompt": SAMPLES_PER_PROMPT}
AHEAD = {"mode": "asynchronous", "max_staleness": 1, "partial_rollouts": True}


def response_length(sample: int) -> int:
    """Returns a length from a distribution with a long tail."""
    return 30 if sample % 11 == 0 else 1 + sample * 5 % 7


@pytest.fixture(scope="module")
def scripted() -> Iterator[None]:
    """Replaces the engines by engines without a model."""

    def build(*_: Any) -> SimpleNamespace:
        return SimpleNamespace(engine=ScriptedEngine(response_length), parts={}, metrics=dict)

    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(rollout_module, "build_engine", build)
        monkeypatch.setattr(RolloutRole, "site", lambda self: None)
        yield


def config_of(**sections: Any) -> Config:
    return make_config(**{"steps": STEPS, "batch": BATCH, "schedule": {"partial_rollouts": True}, **sections})


def rollout_of(config: Config, rank: int, num_engines: int, store: dist.Store, resumed: Resumed | None) -> RolloutRole:
    """Returns one of `num_engines` engines of one rank each."""
    rows = SimpleNamespace(context=lambda row: Context((row, row + 1)))
    order = PromptOrder(100, seed=0, shuffle=True)
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
        architecture=SimpleNamespace(eos_token_ids=(1,), vision=None),
        decoder=None,
        images=None,
        operations=SimpleNamespace(add=lambda *counted, backward: None),
        resumed=resumed,
        first_step=resumed.step if resumed else 0,
    )
    return RolloutRole(job)


def draw(rollout: RolloutRole, step: int, chunk: int = 0) -> list[int]:
    """Returns the ids of this engine's samples in the chunk."""
    rollout.generate(step, chunk)
    ids: list[int] = rollout.shipments.pop(("samples", step, chunk)).experience.sample_ids.tolist()
    return ids


def draw_steps(jobs: Jobs, config: Config, steps: range, num_engines: int, folder: Path, **job: Any) -> list[int]:
    """Returns the samples of all engines for `steps`. Their remaining state is saved in `folder`."""

    def engine(rank: int, store: dist.Store) -> list[int]:
        rollout = rollout_of(config, rank, num_engines, store, job.get("resumed"))
        ids = [sample for step in steps for sample in draw(rollout, step)]
        write_files(folder / "rollout", rollout.save_state())
        return ids

    return sorted(sample for ids in jobs.run(engine, num_engines) for sample in ids)


@pytest.mark.usefixtures("scripted")
@pytest.mark.parametrize(("engines_before", "engines_after"), [(1, 1), (1, 2), (2, 1)])
@pytest.mark.parametrize("cut", [1, 3])
def test_every_sample_is_drawn_in_one_of_the_two_jobs(jobs, tmp_path, cut, engines_before, engines_after):
    config = config_of()
    before = draw_steps(jobs, config, range(cut), engines_before, tmp_path / "first")
    resumed = Resumed(tmp_path / "first", cut)
    after = draw_steps(jobs, config, range(cut, STEPS), engines_after, tmp_path / "second", resumed=resumed)
    assert len(before) == cut * PER_STEP * SAMPLES_PER_PROMPT
    assert sorted(before + after) == [*range(STEPS * PER_STEP * SAMPLES_PER_PROMPT)]


@dataclass(frozen=True)
class JobPlan:
    """One of several jobs of a run: its config, and the step before which it is cut."""

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
    """Draws jobs. The last one reaches the end of the run. Some have the schedule of the previous job."""
    cuts = sorted(draw(st.sets(st.integers(1, STEPS - 1), min_size=1, max_size=2)))
    plans: list[JobPlan] = []
    for cut in (*cuts, STEPS):
        batch = BATCH | draw(st.sampled_from([{}, {"dynamic_sampling": {"max_drawn": 3}}]))
        schedule = draw(schedules() if not plans else schedules() | st.just(plans[-1].config.schedule.model_dump()))
        plans.append(JobPlan(config_of(batch=batch, schedule=schedule), draw(st.integers(1, 3)), cut))
    return plans


class ScoringByScript(ScriptedFilter):
    """A stand-in for role reward. It scores groups by a script."""

    verdicts = ScriptedFilter.__call__

    def hand_over(self, step: int, chunk: int, experience: Experience, records: Any) -> Experience:
        assert all(record == f"of {group.position}" for group, record in records)
        return experience


def draw_job(jobs: Jobs, plan: JobPlan, dull: Collection[int], folder: Path, resumed: Resumed | None) -> Any:
    """Returns by engine its positions by step, its dropped positions, and its final state. `folder` gets a checkpoint
    of all final states."""
    shape, placement = RunShape.of(plan.config), place(plan.config.placement)

    def engine(rank: int, store: dist.Store) -> Any:
        rollout = rollout_of(plan.config, rank, plan.num_engines, store, resumed)
        scoring, drawn = ScoringByScript(lambda position: position in dull), {}
        if shape.selects_groups:
            rollout.select_groups_by(scoring)
        for step in range(rollout.first_generated, min(plan.cut + shape.lead, STEPS)):
            rollout.engine.policy_version = step
            ids = [number for chunk in range(shape.num_chunks) for number in draw(rollout, step, chunk)]
            drawn[step] = [number // SAMPLES_PER_PROMPT for number in ids if number % SAMPLES_PER_PROMPT == 0]
        files = rollout.save_state()
        write_files(folder / "rollout", files)
        (state,) = map(RolloutState.from_contents, files.values())
        return drawn, [position for _, position in scoring.dropped], state

    by_engine = jobs.run(engine, plan.num_engines)
    order = build_order(plan.config, placement)
    crossing = [list(entry.transfer) for entry in order.crossing(order.boundary(plan.cut)).values()]
    (folder / RUN_FILE).write_text(json.dumps({"config": plan.config.model_dump(mode="json"), "crossing": crossing}))
    return by_engine


@pytest.mark.usefixtures("scripted")
@settings(max_examples=12, deadline=None, phases=[Phase.reuse, Phase.generate])
@given(job_plans(), st.sets(st.integers(0, 40), max_size=12))
def test_every_group_is_trained_on_or_dropped_once_whatever_changes_between_jobs(jobs, plans, dull):
    """After a cut, a job with the same schedule trains on crossing experience. Other jobs generate its groups again."""
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
    assert found == Counter(range(len(found))), "each position comes exactly once"
    assert dropped or found == Counter(range(STEPS * PER_STEP))


@pytest.mark.usefixtures("scripted")
def test_under_another_schedule_a_step_takes_what_the_steps_before_have_left(jobs, tmp_path):
    """Group 5 waited for long groups while 6, 7 and 8 were trained on."""
    before = draw_steps(jobs, config_of(), range(2), 1, tmp_path / "first")
    trained_on = {sample // SAMPLES_PER_PROMPT for sample in before}
    assert trained_on == {0, 1, 2, 3, 4, 6, 7, 8}
    resumed = Resumed(tmp_path / "first", 2, continues=False)
    (store,) = jobs.start(1)
    rollout = rollout_of(config_of(schedule={}), 0, 1, store, resumed)
    taken = [{sample // SAMPLES_PER_PROMPT for sample in draw(rollout, step)} for step in (2, 3)]
    assert taken == [{5, 9, 10, 11}, {12, 13, 14, 15}]


@pytest.mark.usefixtures("scripted")
def test_prompts_that_were_dropped_are_of_no_step(jobs, tmp_path):
    """Two steps of four groups were handed over."""
    state = RolloutState(Consumed(10, num_dropped=2))
    write_files(tmp_path / "rollout", {"engine_00000.safetensors": state.contents()})
    (store,) = jobs.start(1)
    for batch in (BATCH | {"dynamic_sampling": {}}, BATCH):
        rollout = rollout_of(config_of(batch=batch, schedule={}), 0, 1, store, Resumed(tmp_path, 2))
        assert rollout.first_generated == 2
        assert rollout.training.rules.max_position(2, 0) == 14


@pytest.fixture
def a_step_ahead(jobs: Jobs, tmp_path: Path) -> Resumed:
    """Returns a checkpoint after two steps of training, with generation one step ahead."""
    draw_steps(jobs, config_of(schedule=AHEAD), range(3), 1, tmp_path)
    return Resumed(tmp_path, 2)


@pytest.mark.usefixtures("scripted")
def test_generation_goes_on_ahead_of_training(jobs, a_step_ahead):
    (store,) = jobs.start(1)
    assert rollout_of(config_of(schedule=AHEAD), 0, 1, store, a_step_ahead).first_generated == 3


@pytest.mark.usefixtures("scripted")
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
