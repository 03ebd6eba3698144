"""Policy losses and corrections on a GPU: the numbers of a CPU, and the same bits in every call."""

import pytest
import torch

from rltrain.algorithms.policy_loss import POLICY_LOSSES, policy_loss
from rltrain.config import schema
from rltrain.data.experience import Experience
from tests.support.packed_experience import packed_experience

pytestmark = pytest.mark.gpu

SHAPE = [(7, 900), (3, 0), (1, 1), (20, 3000)] * 4


def loss_and_gradient(experience: Experience, loss: schema.Loss, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    moved = Experience(**{name: column.to(device) for name, column in experience.columns().items()})
    logprobs = (moved.actor_logprobs - 0.1 * moved.rollout_logprobs).requires_grad_()
    output = policy_loss(loss, 3000)(moved, logprobs, torch.zeros_like(logprobs))
    (gradient,) = torch.autograd.grad(output.loss / output.divisor, logprobs)
    return output.loss.detach().cpu(), gradient.cpu()


@pytest.mark.parametrize("policy", POLICY_LOSSES)
@pytest.mark.parametrize("level", ["token", "geometric"])
def test_a_gpu_gives_a_cpu_s_numbers_and_gives_them_again(policy: str, level: schema.CorrectionLevel) -> None:
    """Sums over sequences of thousands of tokens decide clips and weights on every tensor-parallel rank."""
    experience = packed_experience(SHAPE)
    experience = experience.with_fields(advantages=experience.values)
    correction = schema.Correction(method="mis", level=level, low=0.5, high=1.6, reject_above=10.0)
    loss = schema.Loss(policy=policy, normalization="sequence_mean", correction=correction)
    expected = loss_and_gradient(experience, loss, "cpu")
    first, second = (loss_and_gradient(experience, loss, "cuda") for _ in range(2))
    torch.testing.assert_close(first, expected, rtol=1e-4, atol=1e-7)
    assert all(map(torch.equal, first, second))
