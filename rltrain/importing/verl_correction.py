"""verl's rollout correction: weights and masks for what the engine drew by other weights or other arithmetic."""

import math
from typing import Any

from rltrain.importing.conversions import NOTHING, real, truth
from rltrain.importing.translation import SourceKeys, Translation, UntranslatableError

PREFIX = "algorithm.rollout_correction."
LEVELS = {"token": "token", "seq_sum": "sequence", "seq_mean": "geometric", "seq_max": "every_token"}
"""Of masks by ratios: verl's k1, and what bounds every token's own ratio."""
PER_TOKEN = ("token", "seq_max")
HALVINGS = 60


def set_correction(keys: SourceKeys, out: Translation) -> None:
    bypass = truth(keys.get(PREFIX + "bypass_mode", False))
    kind = str(keys.get(PREFIX + "loss_type", "ppo_clip"))
    if bypass:
        out.set("loss.old_logprobs", "rollout", PREFIX + "bypass_mode")
        if kind not in ("ppo_clip", "reinforce"):
            raise UntranslatableError("losses of bypass_mode are ppo_clip and reinforce")
        if kind == "reinforce":
            out.set("loss.policy", "reinforce", PREFIX + "loss_type")
            out.settings.pop("loss.dual_clip", None)
    _set_weights(keys, out, bypass and kind == "ppo_clip")
    given, bounds = keys.get(PREFIX + "rollout_rs"), keys.get(PREFIX + "rollout_rs_threshold")
    if given not in NOTHING:
        _set_masks(str(given), bounds, out)


def _set_weights(keys: SourceKeys, out: Translation, by_ratio: bool) -> None:
    """`by_ratio`: the policy's own ratio compares with the engine, and no weights are applied."""
    level, threshold = keys.get(PREFIX + "rollout_is"), keys.get(PREFIX + "rollout_is_threshold", 2.0)
    normalised = truth(keys.get(PREFIX + "rollout_is_batch_normalize", False))
    if level in NOTHING:
        return
    if by_ratio:
        out.leave(PREFIX + "rollout_is", level, "of metrics alone: with bypass_mode ppo_clip applies no weights")
        return
    low, _, high = str(threshold).rpartition("_")
    out.set("loss.correction.level", str(level), PREFIX + "rollout_is")
    out.set("loss.correction.high", real(high), PREFIX + "rollout_is_threshold")
    if low:
        out.set("loss.correction.method", "icepop", PREFIX + "rollout_is_threshold")
        out.set("loss.correction.low", real(low), PREFIX + "rollout_is_threshold")
    if normalised and truth(keys.get(PREFIX + "bypass_mode", False)):
        out.set("loss.correction.normalize", "mini_batch", PREFIX + "rollout_is_batch_normalize")
        out.notes.append(
            f"{PREFIX}rollout_is_batch_normalize: with bypass_mode the mean is of a micro-batch of all ranks there, "
            "and of the mini-batch here"
        )
    elif normalised:
        out.set("loss.correction.normalize", "step", PREFIX + "rollout_is_batch_normalize")


def _set_masks(named: str, thresholds: Any, out: Translation) -> None:
    options = [option.strip() for option in named.split(",")]
    values = [value.strip() for value in str(thresholds).split(",")]
    values = values * len(options) if len(values) == 1 else values
    masks = []
    for option, value in zip(options, values, strict=True):
        level, _, kind = option.rpartition("_")
        if level == "seq_mean" and kind in ("k2", "k3"):
            out.set("loss.correction.reject_above", real(value), PREFIX + "rollout_rs_threshold")
            out.set("loss.correction.reject_by", kind, PREFIX + "rollout_rs")
        elif level in PER_TOKEN or (level in LEVELS and kind == "k1"):
            masks.append({"level": LEVELS[level], **_bounds(kind, value)})
        else:
            out.differs(PREFIX + "rollout_rs", option, "a sum of k2 or k3 over a sequence bounds nothing here")
    if masks:
        out.set("loss.correction.masks", masks, PREFIX + "rollout_rs, rollout_rs_threshold")


def _bounds(kind: str, threshold: str) -> dict[str, float]:
    """Of the ratio actor / engine: verl's r, of which k1 is -log r. With k1 its thresholds are of the inverse."""
    if kind == "k1":
        first, _, last = threshold.rpartition("_")
        highest = real(last)
        lowest = real(first) if first else 1 / highest
        return {"low": 1 / highest, "high": 1 / lowest}
    most = real(threshold)
    if kind == "k2":
        return {"low": math.exp(-math.sqrt(2 * most)), "high": math.exp(math.sqrt(2 * most))}
    return {"low": math.exp(_root(most, -1.0)), "high": math.exp(_root(most, 1.0))}


def _root(most: float, sign: float) -> float:
    """log r of this sign with r - 1 - log r = `most`, by halving: the estimate grows with the distance from 0."""
    near, far = 0.0, sign * (most + 2 + math.sqrt(2 * most))
    for _ in range(HALVINGS):
        middle = (near + far) / 2
        near, far = (middle, far) if math.expm1(middle) - middle < most else (near, middle)
    return near
