"""Samples that are drawn greedily among others that are not, by the embedded engine."""

from dataclasses import replace
from pathlib import Path

import pytest

from rltrain.data.experience import SIBLINGS_APART
from rltrain.rollout.engine import GreedyPlaces, SamplingParams
from rltrain.rollout.sample import Sample
from tests.rollout_models import load_engine, ragged_requests, write_checkpoint

PLACES = GreedyPlaces(count=1, of=3)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("greedy") / "model", "llama")


def test_the_last_places_of_each_group_whichever_trajectory() -> None:
    ids = [*range(6), SIBLINGS_APART + 4, SIBLINGS_APART + 5]
    held = [PLACES.hold(Sample(number, (1,), 0)) for number in ids]
    assert held == [False, False, True, False, False, True, False, True]
    assert not any(SamplingParams(1.0, 1.0, 0, 4, ()).is_greedy(Sample(number, (1,), 0)) for number in ids)


def test_they_are_what_a_greedy_engine_draws_and_the_others_what_they_were(checkpoint: Path) -> None:
    """With fewer slots than samples, a suspension in the middle, and tokens that end some early."""
    requests, sampled = ragged_requests(), SamplingParams(1.3, 0.9, 0, 24, (3, 4))
    whole, _ = load_engine(checkpoint)
    drawn, greedy = (whole.generate(requests, replace(sampled, temperature=heat)) for heat in (1.3, 0.0))
    engine, _ = load_engine(checkpoint, max_running_requests=4)
    mixed = replace(sampled, greedy=PLACES)
    engine.submit(requests, mixed)
    done = [sample for _ in range(7) for sample in engine.step()]
    suspended = engine.suspend()
    assert suspended
    done += engine.generate(suspended, mixed)
    found = {sample.id: sample.tokens for sample in done}
    of_both = zip(drawn, greedy, strict=True)
    assert found == {one.id: other.tokens if PLACES.hold(one) else one.tokens for one, other in of_both}
    assert all(one.tokens != other.tokens for one, other in zip(drawn, greedy, strict=True))
