"""A policy loss that is a function of the user's."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from rltrain.algorithms.correction import is_asked_for
from rltrain.algorithms.losses import of_response, token_weights
from rltrain.algorithms.own_function import OwnFunction
from rltrain.algorithms.policy_losses.surrogate import ResponseTokens, Surrogate
from rltrain.algorithms.rectangles import Rectangle
from rltrain.config import schema

PACKED = ("logprobs", "old_logprobs", "advantages")
OF_PACKED = (*PACKED, "mask", "ratio", "rollout_logprobs", "lengths")
PADDED = ("log_probs", "old_log_probs", "advantages")
OF_PADDED = (*PADDED, "loss_mask", "rollout_logprobs", "config")
"""SkyRL's names."""


def own_policy_loss(settings: schema.Loss) -> Callable[[ResponseTokens, schema.Loss], Surrogate]:
    """That of settings.function, by its parameters' names. ConfigError where there is none that can be called.

    (logprobs, old_logprobs, advantages, ...) gives [tokens] the loss of each, which is weighed and averaged as any
    other. (log_probs, old_log_probs, advantages, ...) is SkyRL's form: rows of samples, advantages with the factors of
    loss.normalization in them, and the answer is their sum, perhaps with a dict of metrics, which is left.
    """
    function = OwnFunction.of(settings.function or "", "loss.function")
    is_padded = function.takes(PADDED)
    function.require_known((PACKED, PADDED), OF_PADDED if is_padded else OF_PACKED)
    if is_padded and is_asked_for(settings.correction):
        raise function.error(
            f"gives a sum, whose tokens loss.correction cannot weigh; expected no loss.correction, or a function of "
            f"({', '.join(PACKED)}) that gives the loss of each token"
        )
    made = _of_rows if is_padded else _of_tokens

    def surrogate(tokens: ResponseTokens, loss: schema.Loss) -> Surrogate:
        return made(function, tokens, loss)

    return surrogate


def _of_tokens(function: OwnFunction, tokens: ResponseTokens, settings: schema.Loss) -> Surrogate:
    experience = tokens.experience
    answer = function.call(
        {
            "logprobs": tokens.logprobs,
            "old_logprobs": tokens.old_logprobs,
            "advantages": tokens.advantages,
            "mask": tokens.mask,
            "ratio": tokens.ratio,
            "rollout_logprobs": of_response(experience, "rollout_logprobs"),
            "lengths": experience.lengths,
        }
    )
    if not isinstance(answer, Tensor) or answer.shape != tokens.logprobs.shape:
        raise function.error(f"returned {_form(answer)}; expected the loss of each of {len(tokens.logprobs)} tokens")
    return Surrogate(answer)


def _of_rows(function: OwnFunction, tokens: ResponseTokens, settings: schema.Loss) -> Surrogate:
    experience = tokens.experience
    nothing = torch.zeros_like(tokens.logprobs)
    if not experience.num_samples:
        return Surrogate(nothing, total=tokens.logprobs.sum() * 0)
    rows = Rectangle.of(experience)
    factors = token_weights(experience, settings.normalization).factor
    bounds = {"eps_clip_low": settings.clip_low, "eps_clip_high": settings.clip_high}
    answer = function.call(
        {
            "log_probs": rows.padded(tokens.logprobs),
            "old_log_probs": rows.padded(tokens.old_logprobs),
            "advantages": rows.padded(tokens.advantages * factors),
            "loss_mask": rows.padded(tokens.mask.to(factors.dtype)),
            "rollout_logprobs": rows.padded(of_response(experience, "rollout_logprobs")),
            "config": SimpleNamespace(**bounds, clip_ratio_c=settings.dual_clip or 3.0),
        }
    )
    total = answer[0] if isinstance(answer, tuple) and answer else answer
    if not isinstance(total, Tensor) or total.dim():
        raise function.error(f"returned {_form(total)}; expected a tensor with one number, alone or before a dict")
    return Surrogate(nothing, total=total)


def _form(answer: Any) -> str:
    return f"a tensor of shape {tuple(answer.shape)}" if isinstance(answer, Tensor) else f"{answer!r:.60}"
