"""The shape of a model, read from the config.json of a Hugging Face checkpoint."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, cast

from rltrain.errors import CheckpointError

Value = TypeVar("Value", int, float, bool)

FAMILIES = ("llama", "qwen2", "qwen3")
CONFIG_FILE = "config.json"
GENERATION_CONFIG_FILE = "generation_config.json"
EXPECTED = {bool: "true or false", int: "an integer", float: "a number"}
QWEN3_HEAD_DIM = 128  # what transformers assumes where the key is absent

# Features that change the computation and that neither the trainer nor the engine has: key -> values that mean "off".
UNSUPPORTED = {
    "attention_bias": (False, None),
    "mlp_bias": (False, None),
    "use_sliding_window": (False, None),
    "hidden_act": ("silu", None),
    "quantization_config": (None,),
    "pretraining_tp": (1, None),
}


@dataclass(frozen=True)
class RopeScaling:
    """Llama-3's stretching of rotary frequencies."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_positions: int


@dataclass(frozen=True)
class Architecture:
    """Everything that layouts, the trainer and the engine need to know about a model's shape."""

    family: str
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn_hidden_size: int
    vocab_size: int
    tied_embeddings: bool
    qkv_bias: bool
    qk_norm: bool
    norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling | None
    max_positions: int
    eos_token_ids: tuple[int, ...]

    @property
    def query_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim


def read_architecture(path: Path) -> Architecture:
    """Read `path`/config.json, as written by transformers 4 or 5.

    Raises CheckpointError where the file is missing or the model needs something that is not supported.
    """
    reader = _Reader(path / CONFIG_FILE)
    family = reader.values.get("model_type")
    if family not in FAMILIES:
        raise reader.error("model_type", f"one of {', '.join(FAMILIES)}")
    for key, off in UNSUPPORTED.items():
        if reader.values.get(key) not in off:
            raise reader.error(key, f"{off[0]!r}: nothing else is supported for {family}")
    if set(reader.values.get("layer_types") or ()) - {"full_attention"}:
        raise reader.error("layer_types", "full_attention in every layer")
    num_heads, hidden_size = reader.count("num_attention_heads"), reader.count("hidden_size")
    num_kv_heads = reader.count("num_key_value_heads", default=num_heads)
    if num_heads % num_kv_heads:
        raise reader.error("num_key_value_heads", f"a divisor of num_attention_heads = {num_heads}")
    theta, scaling = _read_rope(reader)
    return Architecture(
        family=family,
        num_layers=reader.count("num_hidden_layers"),
        hidden_size=hidden_size,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=reader.count("head_dim", default=QWEN3_HEAD_DIM if family == "qwen3" else hidden_size // num_heads),
        ffn_hidden_size=reader.count("intermediate_size"),
        vocab_size=reader.count("vocab_size"),
        tied_embeddings=reader.take("tie_word_embeddings", bool, default=False),
        qkv_bias=family == "qwen2",
        qk_norm=family == "qwen3",
        norm_eps=reader.take("rms_norm_eps", float),
        rope_theta=theta,
        rope_scaling=scaling,
        max_positions=reader.count("max_position_embeddings"),
        eos_token_ids=_read_eos(path, reader),
    )


class _Reader:
    """Typed access to one JSON object; every complaint names the file, the key, the value and what was expected."""

    def __init__(self, file: Path, values: Mapping[str, Any] | None = None, prefix: str = "") -> None:
        self.file, self.prefix = file, prefix
        self.values = _read_json(file) if values is None else values

    def error(self, key: str, expected: str) -> CheckpointError:
        found = json.dumps(self.values[key]) if key in self.values else "absent"
        return CheckpointError(
            f"{self.file}: {self.prefix}{key} is {found}; expected {expected} (config key model.path)"
        )

    def take(self, key: str, kind: type[Value], default: Value | None = None) -> Value:
        value: object = self.values.get(key)
        if value is None and default is not None:
            return default
        if kind is float and type(value) is int:
            value = float(value)
        if not isinstance(value, kind) or type(value) is not kind:  # True is an int to isinstance
            raise self.error(key, EXPECTED[kind])
        return value

    def count(self, key: str, default: int | None = None) -> int:
        value = self.take(key, int, default)
        if value < 1:
            raise self.error(key, "at least 1")
        return value


def _read_json(file: Path) -> Mapping[str, Any]:
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(
            f"{file} does not exist; expected the folder of a Hugging Face checkpoint (config key model.path)"
        ) from None
    except (OSError, ValueError) as problem:
        raise CheckpointError(f"{file} cannot be read as JSON: {problem} (config key model.path)") from None
    if not isinstance(values, dict):
        raise CheckpointError(f"{file} holds {type(values).__name__}; expected a JSON object (config key model.path)")
    return values


def _read_rope(config: _Reader) -> tuple[float, RopeScaling | None]:
    """(theta, scaling): transformers 5 keeps both in rope_parameters, 4 in rope_theta and rope_scaling."""
    key = "rope_parameters" if config.values.get("rope_parameters") is not None else "rope_scaling"
    nested = config.values.get(key) or {}
    if not isinstance(nested, dict):
        raise config.error(key, "an object or null")
    rope = _Reader(config.file, nested, prefix=f"{key}.")
    theta = rope.take("rope_theta", float, config.take("rope_theta", float, 10000.0))
    for holder in (config, rope):
        if holder.values.get("partial_rotary_factor") not in (None, 1):
            raise holder.error("partial_rotary_factor", "1")
    type_key = "rope_type" if "rope_type" in nested else "type"
    kind = nested.get(type_key, "default")
    if kind == "default":
        return theta, None
    if kind != "llama3":
        raise rope.error(type_key, '"default" or "llama3"')
    return theta, RopeScaling(
        factor=rope.take("factor", float),
        low_freq_factor=rope.take("low_freq_factor", float),
        high_freq_factor=rope.take("high_freq_factor", float),
        original_max_positions=rope.count("original_max_position_embeddings"),
    )


def _read_eos(path: Path, config: _Reader) -> tuple[int, ...]:
    """generation_config.json is what ends a generation in transformers; config.json only where that says nothing."""
    readers = [config]
    if (path / GENERATION_CONFIG_FILE).exists():
        readers.insert(0, _Reader(path / GENERATION_CONFIG_FILE))
    for reader in readers:
        value = reader.values.get("eos_token_id")
        if value is None:
            continue
        ids = value if isinstance(value, list) else [value]
        if not all(type(token) is int for token in ids):
            raise reader.error("eos_token_id", "an integer or a list of integers")
        return tuple(cast(list[int], ids))
    return ()
