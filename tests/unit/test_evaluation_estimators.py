"""pass@k and best@k against what they mean: the mean over all subsets of k samples."""

from itertools import combinations
from statistics import fmean

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rltrain.observability.evaluations import best_at_k, pass_at_k, sizes_up_to

rewards = st.lists(st.floats(-5, 5, width=32), min_size=1, max_size=7)


@settings(max_examples=30)
@given(st.lists(st.booleans(), min_size=1, max_size=7), st.data())
def test_pass_at_k_is_the_share_of_subsets_with_a_sample_that_passed(passed: list[bool], data: st.DataObject):
    k = data.draw(st.integers(1, len(passed)))
    of_subsets = [any(subset) for subset in combinations(passed, k)]
    assert pass_at_k(len(passed), sum(passed), k) == pytest.approx(fmean(of_subsets))


@settings(max_examples=30)
@given(rewards, st.data())
def test_best_at_k_is_the_mean_over_subsets_of_their_largest_reward(drawn: list[float], data: st.DataObject):
    k = data.draw(st.integers(1, len(drawn)))
    assert best_at_k(drawn, k) == pytest.approx(fmean(max(subset) for subset in combinations(drawn, k)), abs=1e-9)


@settings(max_examples=30)
@given(st.lists(st.booleans(), min_size=1, max_size=40), st.data())
def test_of_passes_both_are_the_same_and_one_sample_is_the_mean(passed: list[bool], data: st.DataObject):
    k = data.draw(st.integers(1, len(passed)))
    assert pass_at_k(len(passed), sum(passed), k) == pytest.approx(best_at_k([float(one) for one in passed], k))
    assert best_at_k([float(one) for one in passed], 1) == pytest.approx(fmean(passed))


def test_many_samples_are_no_matter():
    assert pass_at_k(1024, 1, 512) == pytest.approx(0.5)
    assert pass_at_k(4096, 0, 64) == 0.0
    assert best_at_k([0.0] * 1023 + [1.0], 512) == pytest.approx(0.5)


@pytest.mark.parametrize(("num_samples", "sizes"), [(1, [1]), (2, [1, 2]), (6, [1, 2, 4, 6]), (8, [1, 2, 4, 8])])
def test_powers_of_two_are_reported_and_all_samples(num_samples: int, sizes: list[int]):
    assert sizes_up_to(num_samples) == sizes


@pytest.mark.parametrize("impossible", [(4, 5, 1), (4, -1, 1), (4, 2, 0), (4, 2, 5)])
def test_what_cannot_be_is_an_error(impossible: tuple[int, int, int]):
    with pytest.raises(ValueError, match="samples"):
        pass_at_k(*impossible)
