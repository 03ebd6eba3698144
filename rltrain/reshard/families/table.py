"""One table of parameters per model family: what the checkpoint, Megatron and the engine call each, how it splits."""

from dataclasses import dataclass, replace
from typing import Literal

from rltrain.reshard.families.architecture import Architecture
from rltrain.reshard.layout import CanonicalTensors

Split = Literal["vocab", "qkv", "gate_up", "columns", "replicated"]
"""How tensor parallelism cuts a parameter: rows of the padded vocabulary; rows by attention head; rows of each part
alike; columns, which are the layer's input; or not at all."""


@dataclass(frozen=True)
class Part:
    """One tensor of the checkpoint: its name and its dimensions, by their names in `sizes`."""

    name: str
    dimensions: tuple[str, ...]


@dataclass(frozen=True)
class Row:
    """One parameter: its parts in the checkpoint, its name in Megatron and in the engine, and its split.

    Names hold "{layer}" where they repeat per layer. `megatron_te` is set where Transformer Engine names it otherwise.
    """

    parts: tuple[Part, ...]
    megatron: str
    engine: str
    split: Split
    megatron_te: str | None = None


@dataclass(frozen=True)
class Table:
    """A family's parameters. `head` is a parameter of its own only where embeddings are not tied."""

    embedding: Row
    layer: tuple[Row, ...]
    final_norm: Row
    head: Row


_HF = "model.layers.{layer}."
_MEGATRON = "decoder.layers.{layer}."


def _projection(name: str, rows: str, columns: str = "hidden") -> Part:
    return Part(f"{_HF}{name}.weight", (rows, columns))


def _norm(name: str, megatron: str, size: str = "hidden", megatron_te: str | None = None) -> Row:
    return Row(
        parts=(Part(f"{_HF}{name}.weight", (size,)),),
        megatron=f"{_MEGATRON}{megatron}.weight",
        megatron_te=megatron_te and f"{_MEGATRON}{megatron_te}",
        engine=f"{_HF}{name}.weight",
        split="replicated",
    )


_QKV = Row(
    parts=(
        _projection("self_attn.q_proj", "queries"),
        _projection("self_attn.k_proj", "keys"),
        _projection("self_attn.v_proj", "keys"),
    ),
    megatron=f"{_MEGATRON}self_attention.linear_qkv.weight",
    engine=f"{_HF}self_attn.qkv_proj.weight",
    split="qkv",
)

_QKV_BIAS = Row(
    parts=(
        Part(f"{_HF}self_attn.q_proj.bias", ("queries",)),
        Part(f"{_HF}self_attn.k_proj.bias", ("keys",)),
        Part(f"{_HF}self_attn.v_proj.bias", ("keys",)),
    ),
    megatron=f"{_MEGATRON}self_attention.linear_qkv.bias",
    engine=f"{_HF}self_attn.qkv_proj.bias",
    split="qkv",
)

_QK_NORMS = (
    _norm("self_attn.q_norm", "self_attention.q_layernorm", size="head"),
    _norm("self_attn.k_norm", "self_attention.k_layernorm", size="head"),
)

LLAMA = Table(
    embedding=Row(
        parts=(Part("model.embed_tokens.weight", ("vocab", "hidden")),),
        megatron="embedding.word_embeddings.weight",
        engine="model.embed_tokens.weight",
        split="vocab",
    ),
    layer=(
        _norm("input_layernorm", "input_layernorm", megatron_te="self_attention.linear_qkv.layer_norm_weight"),
        _QKV,
        Row(
            parts=(_projection("self_attn.o_proj", "hidden", "queries"),),
            megatron=f"{_MEGATRON}self_attention.linear_proj.weight",
            engine=f"{_HF}self_attn.o_proj.weight",
            split="columns",
        ),
        _norm("post_attention_layernorm", "pre_mlp_layernorm", megatron_te="mlp.linear_fc1.layer_norm_weight"),
        Row(
            parts=(_projection("mlp.gate_proj", "ffn"), _projection("mlp.up_proj", "ffn")),
            megatron=f"{_MEGATRON}mlp.linear_fc1.weight",
            engine=f"{_HF}mlp.gate_up_proj.weight",
            split="gate_up",
        ),
        Row(
            parts=(_projection("mlp.down_proj", "hidden", "ffn"),),
            megatron=f"{_MEGATRON}mlp.linear_fc2.weight",
            engine=f"{_HF}mlp.down_proj.weight",
            split="columns",
        ),
    ),
    final_norm=Row(
        parts=(Part("model.norm.weight", ("hidden",)),),
        megatron="decoder.final_layernorm.weight",
        engine="model.norm.weight",
        split="replicated",
    ),
    head=Row(
        parts=(Part("lm_head.weight", ("vocab", "hidden")),),
        megatron="output_layer.weight",
        engine="lm_head.weight",
        split="vocab",
    ),
)
QWEN2 = replace(LLAMA, layer=(*LLAMA.layer, _QKV_BIAS))
QWEN3 = replace(LLAMA, layer=(*LLAMA.layer, *_QK_NORMS))

TABLES = {"llama": LLAMA, "qwen2": QWEN2, "qwen3": QWEN3}


def table_of(architecture: Architecture) -> Table:
    return TABLES[architecture.family]


def sizes(architecture: Architecture) -> dict[str, int]:
    """What the named dimensions of `Part` measure, in elements."""
    return {
        "vocab": architecture.vocab_size,
        "hidden": architecture.hidden_size,
        "queries": architecture.query_size,
        "keys": architecture.kv_size,
        "head": architecture.head_dim,
        "ffn": architecture.ffn_hidden_size,
    }


def canonical_tensors(architecture: Architecture) -> CanonicalTensors:
    """The checkpoint's tensors in their fixed order: embedding, layer by layer, final norm, head unless it is tied."""
    table, size = table_of(architecture), sizes(architecture)
    layer_parts = [part for row in table.layer for part in row.parts]
    tail = table.final_norm.parts if architecture.tied_embeddings else (*table.final_norm.parts, *table.head.parts)
    named = [(part.name, part) for part in table.embedding.parts]
    named += [(part.name.format(layer=i), part) for i in range(architecture.num_layers) for part in layer_parts]
    named += [(part.name, part) for part in tail]
    return CanonicalTensors(
        names=tuple(name for name, _ in named),
        shapes=tuple(tuple(size[dimension] for dimension in part.dimensions) for _, part in named),
    )
