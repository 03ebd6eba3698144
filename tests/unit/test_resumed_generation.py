"""A run that is cut between two steps goes on in another job, on any number of engines, as if it had not been."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import chain

import pytest
import torch.distributed as dist

from rltrain.rollout.generation_loop import GenerationLoop
from rltrain.rollout.rollout_state import EngineStart, RolloutState, share_out
from rltrain.rollout.sample import SampleGroup
from tests.unit.shared_store import Jobs, open_store
from tests.unit.test_generation_loop import NUM_SAMPLES, Chunk, Setting, lengths_in_waves, positions

NUM_STEPS = 6


@pytest.fixture(scope="module")
def jobs() -> Iterator[Jobs]:
    with open_store() as store:
        yield Jobs(store, num_ranks=3)


def draw_step(setting: Setting, loop: GenerationLoop, step: int) -> list[Chunk]:
    return [loop.run(step, chunk) for chunk in range(setting.num_chunks)]


def draw_until(setting: Setting, jobs: Jobs, cut: int) -> tuple[list[list[Chunk]], list[RolloutState]]:
    """By engine: the chunks of the steps before `cut`, and what it leaves there. Engines then go on for a step, as they
    do in a job that saves: what that takes of the stream, others of them may not have left yet."""

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
    """By engine, the chunks of the steps from `cut` on; their tokens are drawn by version 1."""

    def engine(rank: int, own: dist.Store) -> list[Chunk]:
        loop = setting.loop(rank, own, starts[rank])
        loop.groups.engine.policy_version = 1
        return [chunk for step in range(cut, NUM_STEPS) for chunk in draw_step(setting, loop, step)]

    return jobs.run(engine, setting.num_engines)


def groups_drawn(by_engine: list[list[Chunk]]) -> list[SampleGroup]:
    return [group for chunks in by_engine for _, drawn in chunks for group in drawn]


def assert_complete(setting: Setting, before: list[list[Chunk]], after: list[list[Chunk]]) -> None:
    """Every position is in one chunk, every group at one engine, and every token of it was drawn once."""
    finished = [entry for chunks in (before[0], after[0]) for entries, _ in chunks for entry in entries]
    groups = groups_drawn(before) + groups_drawn(after)
    expected = [*range(NUM_STEPS * setting.per_step)]
    assert sorted(positions(finished)) == sorted(positions(groups)) == expected
    for group in groups:
        assert [sample.id for sample in group.samples] == [group.position * NUM_SAMPLES + s for s in range(NUM_SAMPLES)]
        for sample in group.samples:
            assert list(sample.tokens) == [1000 * sample.id + t for t in range(setting.length_of(sample.id))]


def as_carried(state: list[RolloutState]) -> dict[int, list[int]]:
    """Policy versions of the tokens that unfinished groups have, by sample."""
    return {
        sample.id: list(sample.policy_versions)
        for engine in state
        for group in engine.begun
        for sample in group.samples
    }


@pytest.mark.parametrize("cut", range(NUM_STEPS + 1))
@pytest.mark.parametrize("partial", [False, True])
def test_one_engine_goes_on_as_if_it_had_not_stopped(jobs, cut, partial):
    """Chunk by chunk, with partial rollouts too: what is unfinished comes first and in its old order."""
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
    """Its ticket is entered anew."""
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
    assert chunks[0] == [1, 2], "group 0 was not waited for"
