"""What families of models have that some ways of cutting, training or serving them lack."""

from collections.abc import Iterator

from rltrain.config.schema import Config
from rltrain.models import Architecture, DynamicScaling, YarnScaling
from rltrain.models.checkpoint_model import local_mechanisms
from rltrain.runtime.grid import Grid

SERVED_BY_SGLANG = ("llama", "mistral", "qwen2", "qwen3", "qwen3_moe", "mixtral")
"""Families that SGLang is given weights of."""
UNTOLD_FAMILIES = ("nemotron",)
"""Whose attention in transformers is not told which tokens are of one sample, so that backend fsdp cannot pack them."""


def trained_mechanism_problems(config: Config, key: str, grid: Grid, architecture: Architecture) -> Iterator[str]:
    """Of a model that is trained or evaluated, whose parallel sizes stand under `key`."""
    mechanisms = local_mechanisms(architecture)
    if mechanisms and config.model.transformer_impl == "transformer_engine":
        yield (
            f"model.transformer_impl: got transformer_engine, but a model of {architecture.family} has "
            f"{' and '.join(mechanisms)}, which are trained by Megatron's own layers alone; expected auto or local"
        )
    if grid.cp > 1 and not grid.is_sharded and architecture.windows is not None:
        yield (
            f"{key}.cp: got {grid.cp}; expected 1: a model of {architecture.family} has layers with a window of "
            f"{architecture.windows.size} tokens, and ranks that share out sequences attend to all that came before"
        )
    if grid.cp > 1 and not grid.is_sharded and architecture.attention_softcap is not None:
        yield f"{key}.cp: got {grid.cp}; expected 1: a model of {architecture.family} bends its scores (soft caps)"
    if grid.cp > 1 and not grid.is_sharded and architecture.attention_sinks:
        yield f"{key}.cp: got {grid.cp}; expected 1: a model of {architecture.family} has attention sinks"
    if architecture.delta is not None:
        yield from _delta_problems(key, grid, architecture)
    bends_logits = architecture.head == "vocabulary" and architecture.logits_softcap is not None
    if bends_logits and config.model.logits_chunk_tokens is not None:
        yield (
            f"model.logits_chunk_tokens: got {config.model.logits_chunk_tokens}; expected null: a model of "
            f"{architecture.family} bends its logits (final_logit_softcapping), which are made whole for it"
        )


def _delta_problems(key: str, grid: Grid, architecture: Architecture) -> Iterator[str]:
    """Of gated delta nets that are trained or evaluated."""
    assert architecture.delta is not None
    yield from _delta_head_problems(key, grid, architecture)
    num_key_heads = architecture.delta.num_key_heads
    if num_key_heads % grid.tp == 0 and num_key_heads % (grid.tp * grid.cp):
        yield (
            f"{key}.cp: got {grid.cp} with tp {grid.tp}; expected a divisor of {num_key_heads // grid.tp}: ranks that "
            f"share out sequences have all tokens of some of the {num_key_heads} key heads of gated delta nets"
        )
    if grid.is_sharded and grid.cp > 1:
        yield (
            f"{key}.cp: got {grid.cp} with backend fsdp; expected 1, or megatron: a model of {architecture.family} has "
            "gated delta nets, whose states go on from token to token"
        )


def _delta_head_problems(key: str, grid: Grid, architecture: Architecture) -> Iterator[str]:
    delta = architecture.delta
    if delta is not None and delta.num_key_heads % grid.tp:
        yield (
            f"{key}.tp: got {grid.tp}, which does not divide the {delta.num_key_heads} key heads of the model's gated "
            "delta nets"
        )


def served_mechanism_problems(config: Config, role: str, grid: Grid, architecture: Architecture) -> Iterator[str]:
    """Of the model of an engine of `role`."""
    yield from _delta_head_problems(config.parallel_of(role)[1], grid, architecture)
    if config.served(role).engine != "sglang" or architecture.mla is not None:
        return
    path, key = config.checkpoint_of(role)
    if lacks := _lacking_in_sglang(architecture):
        yield (
            f"{role}.engine: got sglang, but the model in {path} ({key}) has {lacks}, which rltrain has served by its "
            "own alone; expected embedded"
        )


def _lacking_in_sglang(architecture: Architecture) -> str | None:
    """What a model has that SGLang (0.5.23) lacks, computes otherwise, or nobody has compared."""
    scaling = architecture.rope_scaling
    found = {
        "sliding windows": architecture.windows is not None,
        f"model_type {architecture.family}": architecture.family not in SERVED_BY_SGLANG,
        "biases in MLPs (mlp_bias)": architecture.mlp_bias,
        "dynamic RoPE scaling, by which it scales short texts too": isinstance(scaling, DynamicScaling),
        "an attention_factor of YaRN": isinstance(scaling, YarnScaling) and scaling.attention_factor is not None,
    }
    return next((what for what, is_there in found.items() if is_there), None)
