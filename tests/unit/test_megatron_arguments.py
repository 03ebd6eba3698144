"""Megatron-LM's arguments against an architecture."""

from dataclasses import replace
from typing import Any

import pytest

from rltrain.checkpoint.megatron_arguments import compare_arguments, megatron_arguments
from rltrain.models import Architecture
from tests.megatron_checkpoints import ARCHITECTURES


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_written_arguments_are_those_of_the_architecture(name: str) -> None:
    assert compare_arguments(ARCHITECTURES[name], megatron_arguments(ARCHITECTURES[name], dtype="bfloat16")) == []


@pytest.mark.parametrize(
    ("name", "changes", "expected"),
    [
        ("qwen3", {"vocab_size": 22}, ("vocab_size", 21, 22)),
        ("qwen3", {"rope_theta": 5e5}, ("rotary_base", 10000.0, 5e5)),
        ("qwen3", {"tied_embeddings": True}, ("untie_embeddings_and_output_weights", True, False)),
        ("qwen3", {"num_kv_heads": 1}, ("num_query_groups", 2, 1)),
        ("qwen3", {"norm_eps": 1e-5}, ("norm_epsilon", 1e-6, 1e-5)),
    ],
)
def test_what_differs_is_told_with_both_values(name: str, changes: dict[str, Any], expected: tuple[Any, ...]) -> None:
    written = megatron_arguments(ARCHITECTURES[name], dtype="float32")
    assert compare_arguments(replace(ARCHITECTURES[name], **changes), written) == [expected]


def test_other_numbers_of_experts_are_told() -> None:
    architecture = ARCHITECTURES["mixtral"]
    assert architecture.moe is not None
    other = replace(architecture, moe=replace(architecture.moe, num_experts=8))
    differing = compare_arguments(other, megatron_arguments(architecture, dtype="float32"))
    assert differing == [("num_experts", 4, 8)]


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("mixtral", {"moe_layer_freq": 1}),
        ("qwen3", {"rotary_base": 10000, "num_experts": None, "vocab_size": None}),
        ("qwen3", {"disable_bias_linear": True, "add_bias_linear": True}),
    ],
)
def test_other_ways_to_say_the_same_are_understood(name: str, said: dict[str, Any]) -> None:
    architecture: Architecture = ARCHITECTURES[name]
    assert compare_arguments(architecture, megatron_arguments(architecture, dtype="float32") | said) == []
