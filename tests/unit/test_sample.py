"""A sample as a conversation: whose each token is, where turns ended, and what is left of them where it is cut."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rltrain.rollout.engine import SamplingParams, check_samples, response_limit
from rltrain.rollout.sample import Sample, Status

SAMPLING = SamplingParams(1.0, 1.0, 0, 20, ())


def drawn(sample: Sample, count: int, status: Status = Status.PENDING) -> Sample:
    return sample.drawn((1,) * count, (-1.0,) * count, (5,) * count, status)


@given(st.lists(st.tuples(st.integers(1, 4), st.integers(0, 3)), max_size=5), st.integers(0, 3), st.data())
@settings(max_examples=25)
def test_turns_end_where_the_model_stopped(turns: list[tuple[int, int]], count: int, data: st.DataObject) -> None:
    sample, ends, whose = Sample(0, (9,), 0), [], []
    for num_drawn, num_observed in turns:
        sample = drawn(drawn(sample, num_drawn - 1), 1, Status.STOPPED)
        whose += [True] * num_drawn + [False] * num_observed
        ends.append(len(whose) - num_observed)
        assert sample.is_finished and sample.turns[-1] == len(sample.tokens)
        sample = sample.observed((2,) * num_observed)
    sample = drawn(sample, count)
    assert not sample.is_finished
    assert (sample.turns, sample.loss_mask) == (tuple(ends), (*whose, *[True] * count))
    assert sample.tokens == tuple(1 if mine else 2 for mine in sample.loss_mask)
    assert sample.policy_versions == tuple(5 * mine for mine in sample.loss_mask)
    assert sample.logprobs == tuple(-1.0 * mine for mine in sample.loss_mask)
    assert sample.turn_tokens == (1,) * count
    length = data.draw(st.integers(0, len(sample.tokens)))
    cut = sample.first(length)
    assert (cut.tokens, cut.turns) == (sample.tokens[:length], tuple(end for end in ends if end < length))


def test_a_turn_may_have_a_limit_of_its_own() -> None:
    sample = Sample(0, (9, 9), 0, turn_limit=4)
    assert response_limit(sample, SAMPLING, 100) == 4
    answered = drawn(sample, 4, Status.TRUNCATED).observed((2, 2), turn_limit=30)
    assert response_limit(answered, SAMPLING, 100) == 20
    assert response_limit(answered.observed(()), SAMPLING, 10) == 8, "the limit was that turn's alone"
    with pytest.raises(ValueError, match="fewer than the 4"):
        check_samples([drawn(sample, 4)], SAMPLING, unfinished=(), running=None, max_context_tokens=100)


def test_rewards_belong_to_turns_that_have_ended() -> None:
    with pytest.raises(ValueError, match="1 turn_rewards for 0 turns"):
        Sample(0, (9,), 0, turn_rewards=(1.0,))
