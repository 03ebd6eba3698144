"""Experience of given lengths, with tokens alone or with random numbers in all other fields."""

from collections.abc import Sequence

import torch
from torch import Tensor

from rltrain.data.experience import Experience


def plain_experience(
    lengths: Sequence[int], tokens: Tensor, response_mask: Tensor | None = None, **fields: Tensor
) -> Experience:
    """Returns samples of these lengths, each in its own group. Without a mask all tokens belong to responses."""
    numbers = torch.arange(len(lengths))
    mask = torch.ones(len(tokens), dtype=torch.bool) if response_mask is None else response_mask
    ids = {"sample_ids": numbers, "group_ids": numbers, "prompt_ids": numbers}
    return Experience(**ids, lengths=torch.tensor(lengths), tokens=tokens, response_mask=mask, **fields)


def packed_experience(shape: Sequence[tuple[int, int]], seed: int = 0) -> Experience:
    """Returns samples of `shape` (prompt tokens, response tokens), two to a group. Policy versions are 0 to 5.

    Token fields have numbers everywhere, also at ignored positions.
    """
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.tensor([prompt + response for prompt, response in shape], dtype=torch.int64)
    mask = [inside for prompt, response in shape for inside in [False] * prompt + [True] * response]
    num_samples, num_tokens = len(shape), len(mask)
    return Experience(
        sample_ids=torch.arange(num_samples) + 100,
        group_ids=torch.arange(num_samples) // 2,
        prompt_ids=torch.arange(num_samples) // 2,
        lengths=lengths,
        truncated=torch.zeros(num_samples, dtype=torch.bool),
        tokens=torch.zeros(num_tokens, dtype=torch.int64),
        response_mask=torch.tensor(mask, dtype=torch.bool),
        policy_version=torch.randint(0, 6, (num_tokens,), generator=generator, dtype=torch.int32),
        rollout_logprobs=-torch.rand(num_tokens, generator=generator),
        actor_logprobs=-torch.rand(num_tokens, generator=generator),
        turns=torch.ones(num_samples, dtype=torch.int32),
        turn_rewards=torch.zeros(num_tokens),
        rewards=torch.randn(num_samples, generator=generator),
        values=torch.randn(num_tokens, generator=generator),
        returns=torch.randn(num_tokens, generator=generator),
    )
