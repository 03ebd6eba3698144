"""The value loss against plain Python, and explained variance against statistics over the whole mini-batch."""

import math
import statistics

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rltrain.algorithms.losses import LossOutput, clipped_value_loss, summarize, value_loss
from rltrain.data.experience import Experience
from tests.unit.packed_experience import packed_experience


def means(outputs: list[LossOutput]) -> dict[str, float]:
    divisor = sum(output.divisor.item() for output in outputs)
    loss = sum(output.loss.item() for output in outputs) / divisor
    names = outputs[0].token_sums
    return {"loss": loss} | {name: sum(o.token_sums[name].item() for o in outputs) / divisor for name in names}


def plain(experience: Experience, values: torch.Tensor, clip: float | None) -> dict[str, float]:
    mask = experience.response_mask
    rows = zip(values[mask].tolist(), experience.values[mask].tolist(), experience.returns[mask].tolist(), strict=True)
    losses, clipped, residuals, returns, current = [], [], [], [], []
    for value, old, target in rows:
        near = value if clip is None else min(max(value, old - clip), old + clip)
        losses.append(max((value - target) ** 2, (near - target) ** 2) / 2)
        clipped.append((near - target) ** 2 > (value - target) ** 2)
        residuals.append(target - value)
        returns.append(target)
        current.append(value)
    return {
        "loss": statistics.fmean(losses),
        "value_mean": statistics.fmean(current),
        "value_clipfrac": statistics.fmean(clipped),
        "return_mean": statistics.fmean(returns),
        "explained_variance": 1 - statistics.pvariance(residuals) / statistics.pvariance(returns),
    }


@settings(max_examples=25)
@given(
    shape=st.lists(st.tuples(st.integers(1, 3), st.integers(0, 9)), max_size=5),
    cut=st.integers(0, 6),
    clip=st.sampled_from([None, 0.05, 0.5]),
    seed=st.integers(0, 99),
)
def test_loss_and_metrics_over_any_split_equal_plain_python(
    shape: list[tuple[int, int]], cut: int, clip: float | None, seed: int
) -> None:
    experience = packed_experience([(1, 3), *shape], seed)
    change = torch.randn(experience.num_tokens, generator=torch.Generator().manual_seed(seed))
    values = (experience.values + 0.3 * change).masked_fill(~experience.response_mask, math.nan)
    positions = torch.arange(experience.num_tokens)
    edge = int(experience.offsets()[min(cut, experience.num_samples)])
    samples = torch.arange(experience.num_samples)
    outputs = [
        value_loss(clip)(experience.select(samples[:cut]), values[positions < edge]),
        value_loss(clip)(experience.select(samples[cut:]), values[positions >= edge]),
    ]
    assert summarize(means(outputs)) == pytest.approx(plain(experience, values, clip), rel=1e-4, abs=1e-5)


@pytest.mark.parametrize(
    ("value", "old", "target", "loss", "binds", "gradient"),
    [
        (0.5, 0.5, 1.0, 0.125, False, -0.5),  # on the old value
        (0.9, 0.5, 1.0, 0.045, True, 0.0),  # too fast towards the return: held back
        (0.1, 0.5, 1.0, 0.405, False, -0.9),  # away from the return: the plain loss pulls it back
        (0.6, 0.5, 1.0, 0.08, False, -0.4),  # within the clip
    ],
)
def test_clip_binds_only_where_a_value_moved_far_towards_its_return(
    value: float, old: float, target: float, loss: float, binds: bool, gradient: float
) -> None:
    moved = torch.tensor([value], requires_grad=True)
    per_token, clip_binds = clipped_value_loss(moved, torch.tensor([target]), torch.tensor([old]), 0.2)
    per_token.sum().backward()
    assert per_token.item() == pytest.approx(loss)
    assert clip_binds.item() is binds
    assert moved.grad is not None and moved.grad.item() == pytest.approx(gradient)


def test_a_value_within_the_clip_is_never_held_back() -> None:
    """Not by rounding either: the difference of a value and the old one often has no exact float."""
    generator = torch.Generator().manual_seed(0)
    values, old_values, returns = (torch.randn(10_000, generator=generator) for _ in range(3))
    per_token, clip_binds = clipped_value_loss(values, returns, old_values, 0.5)
    within = (values - old_values).abs() < 0.499
    assert within.sum() > 1000 and not clip_binds[within].any()
    assert torch.equal(per_token[within], (values - returns)[within].square() / 2)


def test_gradient_is_of_response_tokens_alone_and_metrics_carry_none() -> None:
    experience = packed_experience([(2, 3), (1, 2)])
    values = torch.linspace(-1, 1, experience.num_tokens).requires_grad_()
    output = value_loss(None)(experience, values)
    output.loss.backward()
    expected = (values.detach() - experience.returns).masked_fill(~experience.response_mask, 0)
    torch.testing.assert_close(values.grad, expected)
    assert not any(value.requires_grad for value in output.token_sums.values())


@pytest.mark.parametrize("target", [0.0, 0.3, -7.1])
def test_equal_returns_leave_no_variance_to_explain(target: float) -> None:
    experience = packed_experience([(1, 7)])
    experience = experience.with_fields(returns=torch.full((8,), target))
    metrics = summarize(means([value_loss(0.2)(experience, torch.linspace(-1, 1, 8))]))
    assert math.isnan(metrics["explained_variance"])
    assert metrics["return_mean"] == pytest.approx(target)


def test_a_missing_field_is_named() -> None:
    columns = packed_experience([(1, 2)]).columns()
    del columns["returns"]
    with pytest.raises(ValueError, match="no returns in"):
        value_loss(None)(Experience(**columns), torch.zeros(3))
