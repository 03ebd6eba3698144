"""What each rank must hold, written out by formula on whole tensors: the oracle for layouts and reshards.

Nothing here uses rltrain's layouts, plans or family tables.
"""

from dataclasses import dataclass

import numpy as np

from rltrain.reshard.families import Architecture

Tensors = dict[str, np.ndarray]

PADDING = -7.0


def tiny_architecture(family: str = "qwen3", **changes: object) -> Architecture:
    values: dict[str, object] = {
        "family": family,
        "num_layers": 2,
        "hidden_size": 12,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 4,
        "ffn_hidden_size": 24,
        "vocab_size": 21,
        "tied_embeddings": False,
        "qkv_bias": family == "qwen2",
        "qk_norm": family == "qwen3",
        "norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "rope_scaling": None,
        "max_positions": 64,
        "eos_token_ids": (),
    }
    return Architecture(**{**values, **changes})  # type: ignore[arg-type]


def full_tensors(a: Architecture) -> Tensors:
    """A checkpoint in which every element differs from every other (up to 2**24 of them)."""
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (a.vocab_size, a.hidden_size)}
    for i in range(a.num_layers):
        layer = f"model.layers.{i}"
        for projection, heads in (("q", a.num_heads), ("k", a.num_kv_heads), ("v", a.num_kv_heads)):
            shapes[f"{layer}.self_attn.{projection}_proj.weight"] = (heads * a.head_dim, a.hidden_size)
            if a.qkv_bias:
                shapes[f"{layer}.self_attn.{projection}_proj.bias"] = (heads * a.head_dim,)
        shapes[f"{layer}.self_attn.o_proj.weight"] = (a.hidden_size, a.num_heads * a.head_dim)
        if a.qk_norm:
            shapes[f"{layer}.self_attn.q_norm.weight"] = shapes[f"{layer}.self_attn.k_norm.weight"] = (a.head_dim,)
        shapes[f"{layer}.mlp.gate_proj.weight"] = (a.ffn_hidden_size, a.hidden_size)
        shapes[f"{layer}.mlp.up_proj.weight"] = (a.ffn_hidden_size, a.hidden_size)
        shapes[f"{layer}.mlp.down_proj.weight"] = (a.hidden_size, a.ffn_hidden_size)
        shapes[f"{layer}.input_layernorm.weight"] = (a.hidden_size,)
        shapes[f"{layer}.post_attention_layernorm.weight"] = (a.hidden_size,)
    shapes["model.norm.weight"] = (a.hidden_size,)
    if not a.tied_embeddings:
        shapes["lm_head.weight"] = (a.vocab_size, a.hidden_size)
    tensors, start = {}, 1
    for name, shape in shapes.items():
        size = int(np.prod(shape))
        tensors[name] = np.arange(start, start + size, dtype=np.float32).reshape(shape)
        start += size
    assert start < 2**24, "float32 counts no further"
    return tensors


def padded(tensor: np.ndarray, rows: int) -> np.ndarray:
    filler = np.full((rows - len(tensor), *tensor.shape[1:]), PADDING, dtype=tensor.dtype)
    return np.concatenate([tensor, filler])


def heads_of(tensor: np.ndarray, head_dim: int) -> np.ndarray:
    return tensor.reshape(-1, head_dim, *tensor.shape[1:])


def megatron_qkv(a: Architecture, q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
    """Per KV group: its query heads, its key head, its value head."""
    grouped = heads_of(q, a.head_dim).reshape(a.num_kv_heads, -1, a.head_dim, *q.shape[1:])
    per_group = [
        np.concatenate([*grouped[g], heads_of(k, a.head_dim)[g], heads_of(v, a.head_dim)[g]])
        for g in range(a.num_kv_heads)
    ]
    return np.concatenate(per_group)


@dataclass(frozen=True)
class Place:
    tp: int = 1
    tp_rank: int = 0
    pp: int = 1
    pp_rank: int = 0


def megatron_shard(a: Architecture, full: Tensors, place: Place, vocab_multiple: int = 16) -> Tensors:
    tp, rank = place.tp, place.tp_rank
    vocab = -(-a.vocab_size // (vocab_multiple * tp)) * vocab_multiple * tp
    per_stage = a.num_layers // place.pp
    shard: Tensors = {}
    if place.pp_rank == 0:
        embedding = full["model.embed_tokens.weight"]
        shard["embedding.word_embeddings.weight"] = np.split(padded(embedding, vocab), tp)[rank]
    for local in range(per_stage):
        hf, mcore = f"model.layers.{place.pp_rank * per_stage + local}", f"decoder.layers.{local}"
        for kind in ("weight", "bias") if a.qkv_bias else ("weight",):
            fused = megatron_qkv(a, *(full[f"{hf}.self_attn.{p}_proj.{kind}"] for p in "qkv"))
            shard[f"{mcore}.self_attention.linear_qkv.{kind}"] = np.split(fused, tp)[rank]
        gate, up = (np.split(full[f"{hf}.mlp.{p}_proj.weight"], tp)[rank] for p in ("gate", "up"))
        shard[f"{mcore}.mlp.linear_fc1.weight"] = np.concatenate([gate, up])
        shard[f"{mcore}.mlp.linear_fc2.weight"] = np.split(full[f"{hf}.mlp.down_proj.weight"], tp, axis=1)[rank]
        output = full[f"{hf}.self_attn.o_proj.weight"]
        shard[f"{mcore}.self_attention.linear_proj.weight"] = np.split(output, tp, axis=1)[rank]
        shard[f"{mcore}.input_layernorm.weight"] = full[f"{hf}.input_layernorm.weight"]
        shard[f"{mcore}.pre_mlp_layernorm.weight"] = full[f"{hf}.post_attention_layernorm.weight"]
        if a.qk_norm:
            shard[f"{mcore}.self_attention.q_layernorm.weight"] = full[f"{hf}.self_attn.q_norm.weight"]
            shard[f"{mcore}.self_attention.k_layernorm.weight"] = full[f"{hf}.self_attn.k_norm.weight"]
    if place.pp_rank == place.pp - 1:
        shard["decoder.final_layernorm.weight"] = full["model.norm.weight"]
        if not a.tied_embeddings:
            shard["output_layer.weight"] = np.split(padded(full["lm_head.weight"], vocab), tp)[rank]
        elif place.pp > 1:
            embedding = full["model.embed_tokens.weight"]
            shard["output_layer.weight"] = np.split(padded(embedding, vocab), tp)[rank]
    return shard


def engine_heads(tensor: np.ndarray, head_dim: int, tp: int, rank: int) -> np.ndarray:
    """The rank's share of a projection's heads; ranks beyond the number of heads repeat them."""
    heads = heads_of(tensor, head_dim)
    repeated = np.repeat(heads, max(1, tp // len(heads)), axis=0)
    return np.concatenate(np.split(repeated, tp)[rank])


def engine_shard(a: Architecture, full: Tensors, place: Place) -> Tensors:
    tp, rank = place.tp, place.tp_rank
    vocab = -(-a.vocab_size // 64) * 64
    vocab = -(-vocab // tp) * tp
    shard: Tensors = {"model.norm.weight": full["model.norm.weight"]}
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        if name in full:
            shard[name] = np.split(padded(full[name], vocab), tp)[rank]
    for i in range(a.num_layers):
        layer = f"model.layers.{i}"
        for kind in ("weight", "bias") if a.qkv_bias else ("weight",):
            parts = [engine_heads(full[f"{layer}.self_attn.{p}_proj.{kind}"], a.head_dim, tp, rank) for p in "qkv"]
            shard[f"{layer}.self_attn.qkv_proj.{kind}"] = np.concatenate(parts)
        gate, up = (np.split(full[f"{layer}.mlp.{p}_proj.weight"], tp)[rank] for p in ("gate", "up"))
        shard[f"{layer}.mlp.gate_up_proj.weight"] = np.concatenate([gate, up])
        for name in ("self_attn.o_proj", "mlp.down_proj"):
            shard[f"{layer}.{name}.weight"] = np.split(full[f"{layer}.{name}.weight"], tp, axis=1)[rank]
        norms = ["input_layernorm", "post_attention_layernorm"]
        norms += ["self_attn.q_norm", "self_attn.k_norm"] if a.qk_norm else []
        for name in norms:
            shard[f"{layer}.{name}.weight"] = full[f"{layer}.{name}.weight"]
    return shard
