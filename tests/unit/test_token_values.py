"""Where values stand: at the token whose choice they judge beforehand."""

import torch

from rltrain.data.experience import Experience
from rltrain.training.megatron.forward import token_values
from rltrain.training.packing import MicroBatch, pack


def micro_batch(*lengths: int) -> MicroBatch:
    num_tokens, num_samples = sum(lengths), len(lengths)
    experience = Experience(
        sample_ids=torch.arange(num_samples),
        group_ids=torch.arange(num_samples),
        prompt_ids=torch.arange(num_samples),
        lengths=torch.tensor(lengths),
        truncated=torch.zeros(num_samples, dtype=torch.bool),
        tokens=torch.arange(num_tokens),
        response_mask=torch.ones(num_tokens, dtype=torch.bool),
        policy_version=torch.zeros(num_tokens, dtype=torch.int32),
        rollout_logprobs=torch.zeros(num_tokens),
    )
    (batch,) = pack(experience, num_tokens, device=torch.device("cpu"))
    return batch


def test_a_token_gets_the_output_at_the_token_before_and_a_first_token_none() -> None:
    outputs = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0, 6.0])
    assert token_values(micro_batch(3, 1, 2), outputs).tolist() == [0, 1, 2, 0, 0, 5]


def test_a_gradient_reaches_every_output_but_a_samples_last() -> None:
    outputs = torch.zeros(6, requires_grad=True)
    (token_values(micro_batch(3, 1, 2), outputs) * torch.arange(1.0, 7)).sum().backward()
    assert outputs.grad is not None
    assert outputs.grad.tolist() == [2, 3, 0, 0, 6, 0]
