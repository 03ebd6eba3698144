"""Scaling of rotary frequencies, and its description in config.json."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from rltrain.models.config_file import LARGEST_WHOLE_FLOAT, ConfigReader
from rltrain.models.registry import FAMILIES, Family
from rltrain.models.vision import MRope
from rltrain.models.windows import LAYER_TYPES


@dataclass(frozen=True)
class RopeScaling:
    """The scaling of rotary frequencies in Llama 3."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_positions: int
    magnitude: ClassVar[float] = 1.0


@dataclass(frozen=True)
class YarnScaling:
    """The scaling of rotary frequencies by YaRN (arXiv:2309.00071). `mscale` and `mscale_all_dim` are 0 if the
    checkpoint has none. With `truncate` the bounds of the interpolated range are rounded to whole frequency indices."""

    factor: float
    beta_fast: float
    beta_slow: float
    mscale: float
    mscale_all_dim: float
    original_max_positions: int
    truncate: bool = True
    attention_factor: float | None = None

    @property
    def magnitude(self) -> float:
        """The factor on the rotated elements of queries and keys."""
        if self.attention_factor is not None:
            return self.attention_factor
        if not (self.mscale and self.mscale_all_dim):
            return _yarn_magnitude(self.factor, 1.0)
        return _yarn_magnitude(self.factor, self.mscale) / self.magnitude_of_all

    @property
    def magnitude_of_all(self) -> float:
        """In latent attention, the factor on all elements of queries and keys."""
        return _yarn_magnitude(self.factor, self.mscale_all_dim)


@dataclass(frozen=True)
class LinearScaling:
    """The division of all frequencies by `factor`."""

    factor: float
    magnitude: ClassVar[float] = 1.0


@dataclass(frozen=True)
class DynamicScaling:
    """Dynamic NTK scaling. It does not change the frequencies up to max_position_embeddings, and the model gets no more
    positions. Beyond them, `transformers` would change the frequencies of all tokens in a batch by its longest sample.
    """

    factor: float
    magnitude: ClassVar[float] = 1.0


@dataclass(frozen=True)
class LongRopeScaling:
    """LongRoPE (arXiv:2402.13753) up to the length of its short factors. Each frequency is divided by one of
    `divisors`. Rotated elements are multiplied by `magnitude`."""

    divisors: tuple[float, ...]
    magnitude: float


Scaling = RopeScaling | YarnScaling | LinearScaling | DynamicScaling | LongRopeScaling


class Rope(NamedTuple):
    """A model's rotary embeddings: base, scaling, and number of positions. `rotated` is the number of rotated elements
    of a head (None: all). `sliding_theta` is the base of sliding layers, if they have another."""

    theta: float
    scaling: Scaling | None
    max_positions: int
    rotated: int | None = None
    sliding_theta: float | None = None


SECTIONS, INTERLEAVED = "mrope_section", "mrope_interleaved"
PARTIAL = "partial_rotary_factor"
ROTARY_DIM = "rotary_dim"
"""MiniMax-M2's key. It counts rotated elements instead of giving their fraction."""
LONG_NAMES = {"longrope": "longrope", "su": "longrope", "yarn": "longrope"}
"""Names of LongRoPE in configs of Phi-3."""
NEW, OLD = "rope_parameters", "rope_scaling"
ORIGINAL, LONGEST = "original_max_position_embeddings", "max_position_embeddings"


def read_rope(config: ConfigReader, head_dim: int) -> Rope:
    """Returns the rotary embeddings. Raises CheckpointError if a value is invalid or the scaling is not supported."""
    family, rope = _family(config), _parameters(config)
    if family.sliding_theta is not None:
        return _by_kind_of_layer(config, rope, family.theta, family.sliding_theta)
    if family.assumes_scaling and not rope.values:
        raise config.error(OLD, "an object")
    theta = _theta(rope, _theta(config, family.theta))
    rotated = _read_rotated(config, rope, head_dim)
    scaling = _read_scaling(config, rope, (rotated or head_dim) // 2)
    return Rope(theta, scaling, _max_positions(config, rope, scaling), rotated)


def read_mrope(config: ConfigReader, rotated: int) -> MRope:
    """Returns the three positions of rotary embeddings with `rotated` elements of a head. Raises CheckpointError."""
    assumed, rope = _family(config).mrope, _parameters(config)
    assert assumed is not None, "the family has images"
    sections = rope.values.get(SECTIONS)
    if sections is None:
        sections = list(assumed.sections)
        rope = rope.inside("", {**rope.values, SECTIONS: sections})
    counts = rope.are_all(SECTIONS, range(rotated // 2 + 1), len(assumed.sections))
    if not counts or sum(sections) != rotated // 2:
        raise rope.error(SECTIONS, f"three numbers with the sum {rotated // 2}, half the rotated elements of a head")
    frames, rows, columns = sections
    if rope.take(INTERLEAVED, bool, assumed.interleaved) != assumed.interleaved:
        raise rope.error(INTERLEAVED, f"{assumed.interleaved}, as in transformers")
    return MRope((frames, rows, columns), assumed.interleaved)


def _family(config: ConfigReader) -> Family:
    return FAMILIES[config.values["model_type"]]


def _parameters(config: ConfigReader) -> ConfigReader:
    """Returns a reader of rope_parameters (transformers 5: all values) or of rope_scaling (transformers 4: only the
    scaling). Different values in both are refused, because transformers 5 would use rope_scaling and lose the base in
    rope_parameters."""
    new, old = _object(config, NEW), _object(config, OLD)
    if new and old and new != old:
        raise config.error(OLD, f"null if {NEW} is set; move the scaling there")
    return config.inside(NEW, new) if new else config.inside(OLD, old)


def _theta(holder: ConfigReader, default: float) -> float:
    theta = holder.take("rope_theta", float, default)
    if theta <= 1:
        raise holder.error("rope_theta", "a number above 1")
    return theta


def _read_scaling(config: ConfigReader, rope: ConfigReader, num_frequencies: int) -> Scaling | None:
    """Returns the scaling of an object in config.json."""
    kinds = _family(config).rope_kinds
    type_key = "rope_type" if "rope_type" in rope.values else "type"
    kind = rope.values.get(type_key, "default")
    if "longrope" in kinds and isinstance(kind, str):
        kind = LONG_NAMES.get(kind, kind)
    if kind not in kinds:
        names = [f'"{name}"' for name in kinds]
        raise rope.error(type_key, f"{', '.join(names[:-1])} or {names[-1]}")
    if kind in ("default", "mrope"):
        return None
    if kind == "longrope":
        return _read_long(config, rope, num_frequencies)
    if kind != "yarn" and rope.values.get("mscale_all_dim"):
        raise rope.error("mscale_all_dim", f'null, since the scaling is "{kind}" and only "yarn" uses it')
    return READ[kind](config, rope)


def _read_linear(config: ConfigReader, rope: ConfigReader) -> LinearScaling:
    return LinearScaling(_factor(rope))


def _read_dynamic(config: ConfigReader, rope: ConfigReader) -> DynamicScaling:
    return DynamicScaling(_factor(rope))


def _read_llama3(config: ConfigReader, rope: ConfigReader) -> RopeScaling:
    factor, low, high = _factor(rope), _positive(rope, "low_freq_factor"), _positive(rope, "high_freq_factor")
    if high <= low:
        raise rope.error("high_freq_factor", f"more than low_freq_factor = {low}")
    return RopeScaling(factor, low, high, _original(config, rope))


def _read_yarn(config: ConfigReader, rope: ConfigReader) -> YarnScaling:
    fast, slow = _positive(rope, "beta_fast", 32.0), _positive(rope, "beta_slow", 1.0)
    if fast < slow:
        raise rope.error("beta_fast", f"at least beta_slow = {slow}")
    return YarnScaling(
        factor=_factor(rope),
        beta_fast=fast,
        beta_slow=slow,
        mscale=_not_negative(rope, "mscale"),
        mscale_all_dim=_not_negative(rope, "mscale_all_dim"),
        original_max_positions=_original(config, rope),
        truncate=rope.take("truncate", bool, True),
        attention_factor=_attention_factor(rope),
    )


READ: Mapping[str, Callable[[ConfigReader, ConfigReader], Scaling]] = {
    "linear": _read_linear,
    "dynamic": _read_dynamic,
    "llama3": _read_llama3,
    "yarn": _read_yarn,
}


def _read_long(config: ConfigReader, rope: ConfigReader, num_frequencies: int) -> LongRopeScaling:
    divisors = rope.values.get("short_factor")
    if not isinstance(divisors, list) or len(divisors) != num_frequencies or not all(map(_is_divisor, divisors)):
        raise rope.error(
            "short_factor",
            f"a list of {num_frequencies} numbers above 0, half the number of rotated elements of a head",
        )
    original = _original(config, rope)
    if original == 1:
        raise (rope if ORIGINAL in rope.values else config).error(ORIGINAL, "at least 2")
    factor = rope.take("factor", float, config.count(LONGEST) / original)
    magnitude = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    given = _attention_factor(rope)
    return LongRopeScaling(tuple(map(float, divisors)), magnitude if given is None else given)


def _max_positions(config: ConfigReader, rope: ConfigReader, scaling: Scaling | None) -> int:
    """Returns the number of positions of a model. With YaRN it is the scaled number, because config.json can have the
    original one. With LongRoPE it is the limit of the short factors. Beyond it, transformers applies the long factors
    to all tokens, so cached keys would be wrong."""
    longest = config.count(LONGEST)
    if isinstance(scaling, LongRopeScaling):
        return min(_original(config, rope), longest)
    if isinstance(scaling, YarnScaling):
        return max(int(scaling.original_max_positions * scaling.factor), longest)
    return longest


def _original(config: ConfigReader, rope: ConfigReader) -> int:
    """Returns the number of positions before scaling. Like transformers it prefers the value outside the object, then
    the object's, then all positions."""
    beside = _family(config).original_positions
    if config.values.get(ORIGINAL) is not None:
        beside = config.count(ORIGINAL)
    original = rope.count(ORIGINAL, default=beside or config.count(LONGEST))
    if beside not in (None, original):
        raise rope.error(ORIGINAL, f"{beside}, the value of {ORIGINAL} outside this object")
    return original


def _factor(rope: ConfigReader) -> float:
    factor = rope.take("factor", float)
    if factor < 1:
        raise rope.error("factor", "a number of at least 1")
    return factor


def _positive(rope: ConfigReader, key: str, default: float | None = None) -> float:
    value = rope.take(key, float, default)
    if value <= 0:
        raise rope.error(key, "a number above 0")
    return value


def _not_negative(rope: ConfigReader, key: str) -> float:
    value = rope.take(key, float, 0.0)
    if value < 0:
        raise rope.error(key, "a number of at least 0")
    return value


def _attention_factor(rope: ConfigReader) -> float | None:
    key = "attention_factor"
    return None if rope.values.get(key) is None else _positive(rope, key)


def _is_divisor(value: object) -> bool:
    return isinstance(value, int | float) and type(value) is not bool and 0 < value <= LARGEST_WHOLE_FLOAT


def _read_rotated(config: ConfigReader, rope: ConfigReader, head_dim: int) -> int | None:
    assumed = _family(config).partial_rotary
    holder = rope if rope.values.get(PARTIAL) is not None else config
    given = holder.values.get(PARTIAL)
    if assumed is None:
        if given not in (None, 1):
            raise holder.error(PARTIAL, "1")
        return None
    factor = holder.take(PARTIAL, float, assumed)
    rotated = int(head_dim * factor)
    if given is None and config.values.get(ROTARY_DIM) is not None:
        holder, rotated = config, config.count(ROTARY_DIM)
    if not 0 < rotated <= head_dim or rotated % 2:
        key = PARTIAL if given is not None else ROTARY_DIM
        raise holder.error(key, f"an even number of rotated elements, at most all {head_dim} elements of a head")
    return None if rotated == head_dim else rotated


def _by_kind_of_layer(config: ConfigReader, rope: ConfigReader, assumed: float, assumed_sliding: float) -> Rope:
    """Returns the rotary embeddings of models with another base in sliding layers. rope_parameters has an object per
    kind of layer. transformers 4 has rope_local_base_freq next to rope_theta and rope_scaling."""
    if config.values.get(NEW):
        whole, sliding = (rope.inside(kind, _object(rope, kind)) for kind in LAYER_TYPES.values())
        theta = _theta(whole, assumed)
        sliding_theta = _theta(sliding, assumed_sliding)
        type_key = "rope_type" if "rope_type" in sliding.values else "type"
        if sliding.values.get(type_key, "default") != "default":
            raise sliding.error(type_key, '"default"')
    else:
        whole, theta = rope, _theta(config, assumed)
        sliding_theta = config.take("rope_local_base_freq", float, assumed_sliding)
    scaling = _read_scaling(config, whole, 0)
    return Rope(theta, scaling, config.count(LONGEST), sliding_theta=sliding_theta)


def _yarn_magnitude(factor: float, mscale: float) -> float:
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


def _object(config: ConfigReader, key: str) -> Mapping[str, Any]:
    nested = config.values.get(key) or {}
    if not isinstance(nested, dict):
        raise config.error(key, "an object or null")
    return nested
