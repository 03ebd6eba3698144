"""Scaled rotary embeddings equal those of transformers; what no frequencies follow from is refused."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from rltrain.endpoint.served_engine import longest_context
from rltrain.errors import CheckpointError, ConfigError
from rltrain.models import DynamicScaling, YarnScaling, read_architecture
from rltrain.models.attention import inverse_frequencies
from tests.distributed.family_checkpoints import tiny_config
from tests.distributed.tiny_checkpoints import LLAMA3_ROPE, SHAPE
from tests.marks import slow_but

FAMILIES = (
    "llama", "qwen2", "qwen3", "qwen2_moe", "qwen3_moe", "mixtral", "deepseek_v3", "moonlight", "glm4_moe_lite", "glm4",
    "nemotron", "minimax_m2", "qwen3_next", "gpt_oss",
)  # fmt: skip
"""Among them are some with latent attention, with neighbours that are rotated together, and with heads in part."""
YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64}
WHOLE_YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
MSCALES = {"mscale": 1.0, "mscale_all_dim": 0.5}
SCALINGS: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 3.0},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
    "llama3": LLAMA3_ROPE,
    "yarn": YARN,
    "yarn of all positions": {"rope_type": "yarn", "factor": 4.0},
    "yarn by mscales": {**YARN, **MSCALES, "beta_fast": 16, "beta_slow": 2, "truncate": False},
    "yarn by mscale_all_dim alone": {**YARN, "mscale_all_dim": 0.5},
    "yarn by its attention_factor": {**YARN, **MSCALES, "attention_factor": 1.7},
    "yarn that turns nothing fast": {**YARN, "original_max_position_embeddings": 2, "rope_theta": 1e6},
    "yarn that stretches nothing": {**YARN, "factor": 1.0, "original_max_position_embeddings": 10**6},
}


def write_config(folder: Path, rope: dict[str, Any], **changes: Any) -> Path:
    """A config.json as transformers 4 wrote it, of a model with heads of 8 elements."""
    sizes = {**SHAPE, "hidden_size": 32, "head_dim": 8, "model_type": "qwen2", "rms_norm_eps": 1e-6}
    values = {**sizes, "rope_theta": 1e4, "rope_scaling": rope, **changes}
    (folder / "config.json").write_text(json.dumps(values))
    return folder


def of_transformers(config: Any) -> tuple[torch.Tensor, float, float]:
    """Its inverse frequencies, what it multiplies rotated elements by, and scores."""
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    rotary = type(model.model.rotary_emb)(config)
    scores = next(module.scaling for module in model.modules() if hasattr(module, "scaling"))
    return rotary.inv_freq, rotary.attention_scaling, scores


@pytest.mark.parametrize("family", slow_but(FAMILIES, "llama", "deepseek_v3", "nemotron"))
def test_frequencies_and_magnitudes_are_those_of_transformers(family: str, tmp_path: Path) -> None:
    widths = {"head_dim": 24} if family == "mixtral" else {}  # of which transformers scales no other
    for name, scaling in SCALINGS.items():
        rope = {"rope_theta": 1000.0, **scaling}
        config = tiny_config(family, SHAPE, rope_parameters=rope, num_hidden_layers=4, **widths)
        config.save_pretrained(tmp_path)
        architecture = read_architecture(tmp_path)
        frequencies, magnitude, scores = of_transformers(config)
        torch.testing.assert_close(inverse_frequencies(architecture), frequencies, rtol=1e-6, atol=0, msg=name)
        assert architecture.rotation_magnitude == pytest.approx(magnitude, rel=1e-12), name
        assert architecture.score_scale == pytest.approx(scores, rel=1e-12), name


@pytest.mark.parametrize("type_key", ["rope_type", "type"])
def test_both_places_and_both_names_of_the_kind_are_read(type_key: str, tmp_path: Path) -> None:
    rope = {type_key: "yarn", "factor": 4, "original_max_position_embeddings": 64}
    old = read_architecture(write_config(tmp_path, rope))
    new = read_architecture(write_config(tmp_path, {}, rope_theta=None, rope_parameters={**rope, "rope_theta": 1e4}))
    assert old == new
    assert old.rope_scaling == YarnScaling(4.0, 32.0, 1.0, 0.0, 0.0, 64)
    both = write_config(tmp_path, {**rope, "rope_theta": 1e4}, rope_parameters={**rope, "rope_theta": 1e4})
    assert read_architecture(both) == new


@pytest.mark.parametrize(
    ("rope", "expected"),
    [
        ({"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}, 1024),
        ({"type": "yarn", "factor": 4.0}, 1024),
        ({"type": "yarn", "factor": 1.5, "original_max_position_embeddings": 64}, 256),
        ({"type": "linear", "factor": 4.0}, 256),
        ({"type": "dynamic", "factor": 4.0}, 256),
    ],
)
def test_positions_are_those_that_a_scaling_serves(rope: dict[str, Any], expected: int, tmp_path: Path) -> None:
    assert read_architecture(write_config(tmp_path, rope)).max_positions == expected


def test_served_contexts_have_these_positions(tmp_path: Path) -> None:
    assert longest_context(write_config(tmp_path, WHOLE_YARN), 256) == 256
    assert longest_context(write_config(tmp_path, {**WHOLE_YARN, "factor": 400.0}), 25_600) == 25_600
    dynamic = write_config(tmp_path, {"type": "dynamic", "factor": 4.0})
    assert longest_context(dynamic, None) == 256
    with pytest.raises(ConfigError, match=r"--max-context-tokens: got 257, .* has 256 positions .*dynamic RoPE"):
        longest_context(dynamic, 257)


def test_dynamic_scaling_changes_no_frequency_of_those_positions(tmp_path: Path) -> None:
    scaled = read_architecture(write_config(tmp_path, {"type": "dynamic", "factor": 4.0}))
    plain = read_architecture(write_config(tmp_path, {}))
    assert scaled.rope_scaling == DynamicScaling(4.0)
    assert torch.equal(inverse_frequencies(scaled), inverse_frequencies(plain))


WHOLE_LLAMA3 = {key: value for key, value in LLAMA3_ROPE.items() if key != "rope_theta"}


@pytest.mark.parametrize(
    ("rope", "key"),
    [
        *(({"type": kind, "factor": factor}, "factor")
          for kind in ("linear", "dynamic", "yarn")
          for factor in (0, 0.0, -2.0, 0.5, math.nan, math.inf, 10**400, "4", True, None)),
        *(({"type": kind}, "factor") for kind in ("linear", "dynamic", "yarn", "llama3")),
        *(({"type": kind, "factor": 2.0}, "type") for kind in ("ntk", "longrope", "su", "", None, 3, [1])),
        *(({**WHOLE_YARN, key: value}, key)
          for key in ("beta_fast", "beta_slow", "attention_factor")
          for value in (0, -1.0, math.nan, "1", False)),
        *(({**WHOLE_YARN, key: value}, key)
          for key in ("mscale", "mscale_all_dim") for value in (-1.0, math.nan, "1")),
        ({**WHOLE_YARN, "beta_fast": 0.5}, "beta_fast"),
        ({**WHOLE_YARN, "truncate": 1}, "truncate"),
        *(({**WHOLE_YARN, "original_max_position_embeddings": value}, "original_max_position_embeddings")
          for value in (0, -4, 64.5, math.nan, "64")),
        *(({**WHOLE_YARN, "rope_theta": value}, "rope_theta") for value in (0, 1, -1e4, math.nan, "1e4")),
        ({**WHOLE_LLAMA3, "high_freq_factor": 1.0}, "high_freq_factor"),
        ({**WHOLE_LLAMA3, "low_freq_factor": -1.0}, "low_freq_factor"),
        ({"type": "linear", "factor": 2.0, "mscale_all_dim": 1.0}, "mscale_all_dim"),
    ],
    ids=str,
)  # fmt: skip
def test_a_value_that_no_frequency_follows_from_is_refused_by_its_key(
    rope: dict[str, Any], key: str, tmp_path: Path
) -> None:
    key = "rope_type" if key == "type" and "rope_type" in rope else key
    with pytest.raises(CheckpointError) as refusal:
        read_architecture(write_config(tmp_path, rope))
    assert f"rope_scaling.{key} is " in str(refusal.value) and "expected" in str(refusal.value)


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({"rope_scaling": [1]}, ["rope_scaling is [1]", "an object or null"]),
        ({"rope_theta": math.nan}, ["rope_theta is NaN", "a finite number"]),
        (
            {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
            ["rope_scaling", "null beside rope_parameters", "move the scaling there"],
        ),
        (
            {"original_max_position_embeddings": 32},
            ["rope_scaling.original_max_position_embeddings is 64", "expected 32"],
        ),
        ({"model_type": "phi3", "rope_scaling": {"type": "linear"}}, ['"linear"', '"default" or "longrope"']),
    ],
)
def test_contradictions_are_refused(changes: dict[str, Any], parts: list[str], tmp_path: Path) -> None:
    with pytest.raises(CheckpointError) as refusal:
        read_architecture(write_config(tmp_path, WHOLE_YARN, **changes))
    for part in parts:
        assert part in str(refusal.value)
