"""Shapes of well-known models for benchmarks and tests without weights, from the config.json files in rltrain."""

from dataclasses import replace
from functools import cache

from rltrain.models import Architecture, read_architecture
from rltrain.planning.options import SHIPPED


@cache
def _shipped(name: str) -> Architecture:
    return read_architecture(SHIPPED / name)


def qwen3_8b() -> Architecture:
    return _shipped("Qwen3-8B")


def qwen3_32b() -> Architecture:
    return replace(qwen3_8b(), num_layers=64, hidden_size=5120, num_heads=64, ffn_hidden_size=25600)


def qwen3_30b_a3b() -> Architecture:
    return _shipped("Qwen3-30B-A3B")


def deepseek_v3() -> Architecture:
    """Returns the shape of DeepSeek-V3: 671B parameters, without the layer for multi-token prediction."""
    return _shipped("DeepSeek-V3")
