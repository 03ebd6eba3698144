"""Prompt groups on one engine: finished as a whole, in the order of their samples, and never lost on the way."""

from collections.abc import Callable

from hypothesis import given
from hypothesis import strategies as st

from rltrain.rollout.engine import SamplingParams
from rltrain.rollout.groups import PromptGroups
from rltrain.rollout.sample import Sample, SampleGroup
from tests.unit.scripted_engine import ScriptedEngine

SAMPLING = SamplingParams(temperature=1.0, top_p=1.0, top_k=0, max_response_tokens=99, stop_token_ids=())


def prompt_groups(length_of: Callable[[int], int], num_samples: int = 2, num_slots: int = 4) -> PromptGroups:
    """Prompts of position + 1 tokens, of row 100 + position."""

    def group_at(position: int) -> SampleGroup:
        ids = range(position * num_samples, (position + 1) * num_samples)
        prompt = tuple(range(position + 1))
        return SampleGroup(position, 100 + position, tuple(Sample(number, prompt, seed=number) for number in ids))

    return PromptGroups(ScriptedEngine(length_of, num_slots), SAMPLING, group_at, num_samples)


def test_a_group_is_finished_when_its_last_sample_is():
    groups = prompt_groups(lambda number: [3, 1, 2, 2][number])
    groups.start([0, 1])
    assert groups.step() == []
    assert [group.position for group in groups.step()] == [1]
    assert len(groups.begun) == 1
    (group,) = groups.step()
    assert [sample.id for sample in group.samples] == [0, 1], "not in the order of finishing"
    assert [sample.tokens for sample in group.samples] == [(0, 1, 2), (1000,)]
    assert (group.position, group.row, group.prompt) == (0, 100, (0,))
    assert len(groups.begun) == 0


def test_token_counts_are_those_of_all_samples():
    groups = prompt_groups(lambda number: number)
    groups.start([2])
    (group,) = [group for _ in range(5) for group in groups.step()]
    assert group.num_response_tokens == 4 + 5
    assert group.num_tokens == 2 * 3 + 4 + 5, "the prompt counts with every sample"


def test_room_is_for_whole_groups():
    groups = prompt_groups(lambda number: 9, num_samples=2, num_slots=5)
    assert groups.num_wanted == 2
    groups.start([0])
    assert groups.num_wanted == 1
    groups.start([1])
    assert groups.num_wanted == 0


def test_a_group_larger_than_the_engine_is_taken_when_nothing_else_runs():
    groups = prompt_groups(lambda number: 1, num_samples=4, num_slots=3)
    assert groups.num_wanted == 1
    groups.start([0])
    assert groups.num_wanted == 0
    assert [len(groups.step()) for _ in range(2)] == [0, 1]
    assert groups.num_wanted == 1


@given(st.lists(st.integers(1, 6), min_size=8, max_size=8), st.sets(st.integers(0, 20), max_size=6))
def test_suspending_at_any_step_changes_no_response(lengths, suspensions):
    def draw(suspended_at: set[int]) -> dict[int, SampleGroup]:
        groups = prompt_groups(lambda number: lengths[number], num_slots=3)
        groups.start([0, 1])
        drawn = []
        for step in range(60):
            if step == 4:
                groups.start([2, 3])
            if step in suspended_at:
                groups.suspend()
                assert groups.engine.num_unfinished == 0
                groups.start(())
            drawn += groups.step()
        assert len(groups.begun) == 0
        return {group.position: group for group in drawn}

    assert draw(suspensions) == draw(set())


def test_suspended_groups_come_before_new_ones():
    groups = prompt_groups(lambda number: 3)
    groups.start([0])
    groups.step()
    groups.suspend()
    groups.start([1])
    assert [sample.id for sample in groups.engine.unfinished] == [0, 1, 2, 3]
    assert [len(sample.tokens) for sample in groups.engine.unfinished] == [1, 1, 0, 0]


def test_suspending_twice_in_a_row_keeps_everything():
    groups = prompt_groups(lambda number: 2)
    groups.start([0])
    groups.suspend()
    groups.suspend()
    groups.start(())
    assert [group.position for _ in range(2) for group in groups.step()] == [0]
