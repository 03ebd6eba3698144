"""Where values stand: at the token whose choice they judge beforehand."""

import torch

from rltrain.algorithms.losses import before_tokens

LENGTHS = torch.tensor([3, 1, 2])


def test_a_token_gets_the_score_at_the_token_before_and_a_first_token_none() -> None:
    scores = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0, 6.0])
    assert before_tokens(scores, LENGTHS).tolist() == [0, 1, 2, 0, 0, 5]
    assert before_tokens(torch.zeros(0), LENGTHS[:0]).tolist() == []


def test_a_gradient_reaches_every_score_but_a_samples_last() -> None:
    scores = torch.zeros(6, requires_grad=True)
    (before_tokens(scores, LENGTHS) * torch.arange(1.0, 7)).sum().backward()
    assert scores.grad is not None
    assert scores.grad.tolist() == [2, 3, 0, 0, 6, 0]
