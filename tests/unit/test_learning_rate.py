import math

import pytest

from rltrain.config import schema
from rltrain.training.trainable import learning_rate


def rates(total_updates: int, **settings: object) -> list[float]:
    optimizer = schema.Optimizer(**{"lr": 1.0, **settings})
    return [learning_rate(optimizer, update, total_updates) for update in range(total_updates)]


def test_warm_up_rises_linearly_and_reaches_the_rate() -> None:
    assert rates(6, warmup_steps=4) == pytest.approx([0.25, 0.5, 0.75, 1.0, 1.0, 1.0])


def test_linear_decay_would_reach_the_minimum_one_step_after_the_last() -> None:
    assert rates(5, decay="linear", min_lr=0.5) == pytest.approx([1.0, 0.9, 0.8, 0.7, 0.6])


def test_cosine_decay_passes_half_way_between_the_rates_at_half_time() -> None:
    values = rates(8, decay="cosine", min_lr=0.2)
    assert values[0] == 1.0
    assert values[4] == pytest.approx(0.6)
    assert values[7] == pytest.approx(0.2 + 0.8 * (1 + math.cos(math.pi * 7 / 8)) / 2)


@pytest.mark.parametrize("decay", ["linear", "cosine"])
def test_decay_follows_warm_up_and_never_passes_the_minimum(decay: str) -> None:
    values = rates(20, warmup_steps=5, decay=decay, min_lr=0.1)
    assert values[4] == values[5] == 1.0
    assert all(later <= earlier for earlier, later in zip(values[5:], values[6:], strict=False))
    optimizer = schema.Optimizer(lr=1.0, decay=decay, min_lr=0.1, warmup_steps=5)
    assert learning_rate(optimizer, 1000, 20) == pytest.approx(0.1)


def test_warm_up_longer_than_the_run() -> None:
    assert rates(3, warmup_steps=10, decay="linear") == pytest.approx([0.1, 0.2, 0.3])
