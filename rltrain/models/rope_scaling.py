"""How a model stretches its rotary frequencies, and how config.json says so."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from rltrain.models.config_file import LARGEST_WHOLE_FLOAT, ConfigReader
from rltrain.models.delta_net import DELTA_FAMILIES


@dataclass(frozen=True)
class RopeScaling:
    """Llama-3's stretching of rotary frequencies."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_positions: int


@dataclass(frozen=True)
class YarnScaling:
    """YaRN's stretching of rotary frequencies, as DeepSeek uses it. `mscale` is 0 where the checkpoint names none.
    With `truncate` the frequencies between which it interpolates are whole ones of the model's."""

    factor: float
    beta_fast: float
    beta_slow: float
    mscale: float
    mscale_all_dim: float
    original_max_positions: int
    truncate: bool = True


@dataclass(frozen=True)
class LinearScaling:
    """All frequencies over `factor`."""

    factor: float


@dataclass(frozen=True)
class LongRopeScaling:
    """LongRoPE (arXiv:2402.13753) up to the length of its short factors: each frequency over one of `divisors`, and
    what is rotated times `magnitude`."""

    divisors: tuple[float, ...]
    magnitude: float


Scaling = RopeScaling | YarnScaling | LinearScaling | LongRopeScaling


class Rope(NamedTuple):
    """Of a model: its base, its scaling, how many elements of a head are rotated (None: all), the base of layers that
    slide where they have their own, and the positions that are left where the scaling leaves fewer (None: all)."""

    theta: float
    scaling: Scaling | None
    rotated: int | None = None
    sliding_theta: float | None = None
    max_positions: int | None = None


PARTIAL_FAMILIES = {"phi3": 1.0, "glm4": 0.5, "glm4_moe": 0.5, "nemotron": 0.5, "minimax_m2": 1.0}
PARTIAL_FAMILIES |= dict.fromkeys(DELTA_FAMILIES, 0.25)
"""Families of which a head may be rotated in part, with what transformers assumes where the key is absent."""
PARTIAL = "partial_rotary_factor"
ROTARY_DIM = "rotary_dim"
"""What MiniMax-M2 counts instead: elements, not their share."""
LAYER_TYPES = {"full": "full_attention", "sliding": "sliding_attention"}
SLIDING_THETA = {"gemma3_text": 10_000.0}
"""Families whose sliding layers have a base of their own, with the one of transformers where config.json has none."""
THETA = {"gemma3_text": 1_000_000.0, "minimax_m2": 5_000_000.0, "hy_v3": 11_158_840.0, "gpt_oss": 150_000.0}
"""What transformers assumes of some families, where config.json has none; of the others:"""
DEFAULT_THETA = 10_000.0
YARN_FAMILIES = ("deepseek_v3", "kimi_k2", "glm4_moe_lite", "gpt_oss")
LONG_NAMES = ("longrope", "su", "yarn")
"""What configs of Phi-3 have called LongRoPE."""


def read_rope(config: ConfigReader, head_dim: int) -> Rope:
    """transformers 5 keeps everything in rope_parameters, 4 in rope_theta, rope_scaling and keys beside them."""
    family = config.values["model_type"]
    if family in SLIDING_THETA:
        return _by_kind_of_layer(config, family)
    key = "rope_parameters" if config.values.get("rope_parameters") is not None else "rope_scaling"
    nested = _object(config, key)
    rope = config.inside(key, nested)
    if family == "gpt_oss" and not nested:
        raise config.error(key, "an object")  # transformers assumes one then
    theta = rope.take("rope_theta", float, config.take("rope_theta", float, THETA.get(family, DEFAULT_THETA)))
    rotated = _read_rotated(config, rope, head_dim)
    type_key, kind = _kind(nested)
    if family == "phi3" and kind in LONG_NAMES:
        return _read_long(config, rope, theta, rotated, head_dim)
    return Rope(theta, _read_scaling(rope, type_key, kind, family), rotated)


def _read_scaling(rope: ConfigReader, type_key: str, kind: str, family: str) -> Scaling | None:
    if kind == "default":
        return None
    if kind == "yarn" and family in YARN_FAMILIES:
        return _read_yarn(rope, may_truncate_not=family == "gpt_oss")
    if kind != "llama3":
        raise rope.error(type_key, '"default" or "llama3"')
    return RopeScaling(
        factor=rope.take("factor", float),
        low_freq_factor=rope.take("low_freq_factor", float),
        high_freq_factor=rope.take("high_freq_factor", float),
        original_max_positions=rope.count("original_max_position_embeddings"),
    )


def _read_rotated(config: ConfigReader, rope: ConfigReader, head_dim: int) -> int | None:
    family = config.values["model_type"]
    holder = rope if rope.values.get(PARTIAL) is not None else config
    given = holder.values.get(PARTIAL)
    if family not in PARTIAL_FAMILIES:
        if given not in (None, 1):
            raise holder.error(PARTIAL, "1")
        return None
    factor = holder.take(PARTIAL, float, PARTIAL_FAMILIES[family])
    rotated = int(head_dim * factor)
    if given is None and config.values.get(ROTARY_DIM) is not None:
        holder, rotated = config, config.count(ROTARY_DIM)
    if not 0 < rotated <= head_dim or rotated % 2:
        key = PARTIAL if given is not None else ROTARY_DIM
        raise holder.error(key, f"a part of the {head_dim} elements of a head that is an even number of them")
    return None if rotated == head_dim else rotated


def _read_long(config: ConfigReader, rope: ConfigReader, theta: float, rotated: int | None, head_dim: int) -> Rope:
    """transformers turns to the long factors, for all tokens, once a text is longer than the original positions: no
    token of a sample that grows would keep its keys. So there are no more positions than the short ones serve."""
    key, holder = "original_max_position_embeddings", rope
    if key not in rope.values:
        holder = config
    original, longest = holder.count(key), config.count("max_position_embeddings")
    if original == 1:
        raise holder.error(key, "at least 2")
    divisors = rope.values.get("short_factor")
    count = (rotated or head_dim) // 2
    if not isinstance(divisors, list) or len(divisors) != count or not all(map(_is_number, divisors)):
        raise rope.error("short_factor", f"a list of {count} numbers, half as many as elements of a head are rotated")
    factor = rope.take("factor", float, longest / original)
    magnitude = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    scaling = LongRopeScaling(
        divisors=tuple(map(float, divisors)), magnitude=rope.take("attention_factor", float, magnitude)
    )
    return Rope(theta, scaling, rotated, max_positions=min(original, longest))


def _by_kind_of_layer(config: ConfigReader, family: str) -> Rope:
    """Of models whose sliding layers have another base: rope_parameters has an object for each kind of layer, or, by
    transformers 4, rope_local_base_freq stands beside rope_theta and rope_scaling."""
    nested = _object(config, "rope_parameters")
    if not nested:
        old = _object(config, "rope_scaling")
        whole = config.inside("rope_scaling", old)
        theta = config.take("rope_theta", float, THETA[family])
        sliding_theta = config.take("rope_local_base_freq", float, SLIDING_THETA[family])
        return Rope(theta, _linear(whole), sliding_theta=sliding_theta)
    outer = config.inside("rope_parameters", nested)
    whole, sliding = (outer.inside(kind, _object(outer, kind)) for kind in LAYER_TYPES.values())
    type_key, kind = _kind(sliding.values)
    if kind != "default":
        raise sliding.error(type_key, '"default"')
    return Rope(
        whole.take("rope_theta", float, THETA[family]),
        _linear(whole),
        sliding_theta=sliding.take("rope_theta", float, SLIDING_THETA[family]),
    )


def _linear(rope: ConfigReader) -> LinearScaling | None:
    type_key, kind = _kind(rope.values)
    if kind == "default":
        return None
    if kind != "linear":
        raise rope.error(type_key, '"default" or "linear"')
    return LinearScaling(rope.take("factor", float))


def _read_yarn(rope: ConfigReader, *, may_truncate_not: bool) -> YarnScaling:
    for key, off in (("attention_factor", None), *(() if may_truncate_not else (("truncate", True),))):
        if rope.values.get(key) not in (off, None):
            raise rope.error(key, f"{json.dumps(off)}: nothing else is supported")
    if rope.values.get("mscale_all_dim") and not rope.values.get("mscale"):
        raise rope.error("mscale", "a number above 0 beside mscale_all_dim")
    return YarnScaling(
        factor=rope.take("factor", float),
        beta_fast=rope.take("beta_fast", float, 32.0),
        beta_slow=rope.take("beta_slow", float, 1.0),
        mscale=rope.take("mscale", float, 0.0),
        mscale_all_dim=rope.take("mscale_all_dim", float, 0.0),
        original_max_positions=rope.count("original_max_position_embeddings"),
        truncate=rope.take("truncate", bool, True),
    )


def _is_number(value: object) -> bool:
    return type(value) is float or (type(value) is int and abs(value) <= LARGEST_WHOLE_FLOAT)


def _kind(rope: Mapping[str, Any]) -> tuple[str, str]:
    """(the key that names the kind of scaling, the kind)."""
    type_key = "rope_type" if "rope_type" in rope else "type"
    return type_key, rope.get(type_key, "default")


def _object(config: ConfigReader, key: str) -> Mapping[str, Any]:
    nested = config.values.get(key) or {}
    if not isinstance(nested, dict):
        raise config.error(key, "an object or null")
    return nested
