"""The expected shard of each rank, computed by formula from whole tensors: the oracle for layouts and reshards.

Nothing here uses rltrain's layouts, plans or family tables.
"""

from dataclasses import dataclass, replace

import numpy as np

from rltrain.models import MLA, Architecture, DeltaNet, ExpertLayers, Windows

Tensors = dict[str, np.ndarray]

PADDING = -7.0


MOE = {
    "qwen3_moe": ExpertLayers(num_experts=4, top_k=2, ffn_hidden_size=8, dense_layers=(1,)),
    "mixtral": ExpertLayers(num_experts=4, top_k=2, ffn_hidden_size=24),
    "deepseek_v3": ExpertLayers(
        num_experts=8, top_k=2, ffn_hidden_size=8, shared_ffn_hidden_size=16, dense_layers=(0,), score="sigmoid"
    ),
    "qwen2_moe": ExpertLayers(
        num_experts=4, top_k=2, ffn_hidden_size=8, shared_ffn_hidden_size=16, dense_layers=(1,), shared_gate=True
    ),
}
MOE["glm4_moe"] = MOE["glm4_moe_lite"] = MOE["deepseek_v3"]
MOE["hy_v3"] = MOE["deepseek_v3"]
MOE["qwen3_next"] = MOE["qwen2_moe"]
MOE["qwen3_5_moe_text"] = replace(MOE["qwen2_moe"], dense_layers=())
MOE["gpt_oss"] = ExpertLayers(num_experts=4, top_k=2, ffn_hidden_size=8, interleaved=True)
MOE["minimax_m2"] = ExpertLayers(num_experts=8, top_k=2, ffn_hidden_size=24, score="sigmoid")
POST_NORMS = {
    "gemma3_text": ("post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm"),
    "gemma2": ("post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm"),
    "glm4": ("post_self_attn_layernorm", "post_attention_layernorm", "post_mlp_layernorm"),
}
"""Families with norms after attention and MLP: names of the norms after attention, before the MLP, and after it."""
BIASED = ("qwen2", "qwen2_moe", "glm4", "glm4_moe", "seed_oss", "gpt_oss")
DELTA = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")
"""Families with gated delta nets. Here every second layer has full attention."""
NORMED_HEADS = ("qwen3", "qwen3_moe", "gemma3_text", "glm4_moe", "minimax_m2", "hy_v3", *DELTA)
OF_MIXTRAL = ("mixtral", "minimax_m2")
"""Families with Mixtral's names of experts."""
LATENT = MLA(q_rank=8, kv_rank=6, plain_head_dim=3, rope_head_dim=2, value_head_dim=5)


def tiny_architecture(family: str = "qwen3", **changes: object) -> Architecture:
    latent = family in ("deepseek_v3", "glm4_moe_lite")
    values: dict[str, object] = {
        "family": family,
        "num_layers": 2,
        "hidden_size": 12,
        "num_heads": 4,
        "num_kv_heads": 4 if latent else 2,
        "head_dim": 5 if latent else 4,
        "ffn_hidden_size": 24,
        "vocab_size": 21,
        "tied_embeddings": False,
        "qkv_bias": family in BIASED,
        "qk_norm": family in NORMED_HEADS,
        "norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "rope_scaling": None,
        "max_positions": 64,
        "eos_token_ids": (),
        "moe": MOE.get(family),
        "mla": LATENT if latent else None,
        "post_norms": family in POST_NORMS,
        "norms_projections": family == "minimax_m2",
        "output_bias": family == "gpt_oss",
        "attention_sinks": family == "gpt_oss",
    }
    num_layers = int(changes.get("num_layers", values["num_layers"]))  # type: ignore[call-overload]
    if family in DELTA:
        layers = tuple(layer % 2 == 0 for layer in range(num_layers))
        values["delta"] = DeltaNet(layers, num_key_heads=4, num_heads=8, key_dim=3, value_dim=5, kernel=4)
        values |= {"gated_attention": True, "norm_offset": 1.0}
    if family == "nemotron":
        values |= {"activation": "relu_squared", "norm_offset": 1.0, "norm_bias": True}
    if family == "gemma3_text":
        values["windows"] = Windows(3, tuple(bool((layer + 1) % 4) for layer in range(num_layers)))
    return Architecture(**{**values, **changes})  # type: ignore[arg-type]


VARIANTS = {
    "llama_attention_bias": tiny_architecture("llama", qkv_bias=True, output_bias=True, num_layers=4),
    "mistral": tiny_architecture("mistral", num_layers=4),
    "moonlight": tiny_architecture("deepseek_v3", mla=replace(LATENT, q_rank=None), num_layers=4),
}
"""Architectures that share a family or a table with another one."""


def attention_shapes(a: Architecture) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of projections and norms, without biases."""
    hidden = a.hidden_size
    if a.mla is None:
        heads = {"q": a.num_heads, "k": a.num_kv_heads, "v": a.num_kv_heads}
        shapes: dict[str, tuple[int, ...]] = {
            f"self_attn.{name}_proj": (count * a.head_dim, hidden) for name, count in heads.items()
        }
        if a.gated_attention:
            shapes["self_attn.q_proj"] = (2 * a.num_heads * a.head_dim, hidden)
        shapes["self_attn.o_proj"] = (hidden, a.num_heads * a.head_dim)
        if a.qk_norm:
            whole = a.norms_projections
            shapes["self_attn.q_norm"] = (a.head_dim * a.num_heads if whole else a.head_dim,)
            shapes["self_attn.k_norm"] = (a.head_dim * a.num_kv_heads if whole else a.head_dim,)
        return shapes
    m = a.mla
    shapes = {
        "self_attn.kv_a_proj_with_mqa": (m.kv_rank + m.rope_head_dim, hidden),
        "self_attn.kv_a_layernorm": (m.kv_rank,),
        "self_attn.kv_b_proj": (a.num_heads * (m.plain_head_dim + m.value_head_dim), m.kv_rank),
        "self_attn.o_proj": (hidden, a.num_heads * m.value_head_dim),
    }
    queries = a.num_heads * (m.plain_head_dim + m.rope_head_dim)
    if m.q_rank is None:
        return shapes | {"self_attn.q_proj": (queries, hidden)}
    return shapes | {
        "self_attn.q_a_proj": (m.q_rank, hidden),
        "self_attn.q_a_layernorm": (m.q_rank,),
        "self_attn.q_b_proj": (queries, m.q_rank),
    }


def delta_shapes(a: Architecture) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of a gated delta net's tensors, by the end of their names."""
    d, hidden = a.delta, a.hidden_size
    assert d
    queries, values = d.num_key_heads * d.key_dim, d.num_heads * d.value_dim
    rows = {"qkv": 2 * queries + values, "z": values, "b": d.num_heads, "a": d.num_heads}
    if a.family == "qwen3_next":
        rows = {"qkvz": 2 * queries + 2 * values, "ba": 2 * d.num_heads}
    return {f"linear_attn.in_proj_{name}.weight": (count, hidden) for name, count in rows.items()} | {
        "linear_attn.conv1d.weight": (2 * queries + values, 1, d.kernel),
        "linear_attn.A_log": (d.num_heads,),
        "linear_attn.dt_bias": (d.num_heads,),
        "linear_attn.norm.weight": (d.value_dim,),
        "linear_attn.out_proj.weight": (hidden, values),
    }


def layer_shapes(a: Architecture, sparse: bool, delta: bool) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of a layer's tensors in the checkpoint, without the layer's prefix."""
    hidden = a.hidden_size
    interleaved = sparse and a.family == "gpt_oss"
    shapes = ({} if delta else attention_shapes(a)) | ({} if interleaved else mlp_shapes(a, sparse))
    shapes["input_layernorm"] = shapes["post_attention_layernorm"] = (hidden,)
    if a.activation == "relu_squared":
        del shapes["mlp.gate_proj"]
    shapes |= dict.fromkeys(POST_NORMS.get(a.family, ()), (hidden,))
    for fused, names in FUSED.get(a.family, {}).items():
        parts = [shapes.pop(f"{fused.partition('.')[0]}.{name}") for name in names]
        shapes[fused] = (sum(rows for rows, _ in parts), hidden)
    shapes = {f"{name}.weight": shape for name, shape in shapes.items()}
    if a.qkv_bias:
        biases = {f"self_attn.{p}_proj.bias": shapes[f"self_attn.{p}_proj.weight"][:1] for p in "qkv"}
        shapes |= biases
    if a.norm_bias:
        shapes |= {f"{name}_layernorm.bias": (hidden,) for name in ("input", "post_attention")}
    if a.output_bias:
        shapes["self_attn.o_proj.bias"] = (hidden,)
    if a.attention_sinks:
        shapes["self_attn.sinks"] = (a.num_heads,)
    if interleaved:
        shapes |= interleaved_shapes(a)
    if delta:
        shapes |= delta_shapes(a)
    if sparse and a.family in BIASED_ROUTERS:
        assert a.moe
        shapes[router_bias(a)] = (a.moe.num_experts,)
    return shapes


def interleaved_shapes(a: Architecture) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of gpt-oss's router and experts. One tensor has the matrices of all experts."""
    assert a.moe
    count, units, hidden = a.moe.num_experts, a.moe.ffn_hidden_size, a.hidden_size
    return {
        "mlp.router.weight": (count, hidden),
        "mlp.router.bias": (count,),
        "mlp.experts.gate_up_proj": (count, hidden, 2 * units),
        "mlp.experts.gate_up_proj_bias": (count, 2 * units),
        "mlp.experts.down_proj": (count, units, hidden),
        "mlp.experts.down_proj_bias": (count, hidden),
    }


def mlp_shapes(a: Architecture, sparse: bool) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of the MLP, or of the router and all experts, without ".weight"."""
    hidden, shapes, mlps = a.hidden_size, {}, {"mlp": a.ffn_hidden_size}
    if sparse:
        assert a.moe
        block = moe_block(a)
        shapes[router(a)] = (a.moe.num_experts, hidden)
        mlps = {f"{block}.experts.{e}": a.moe.ffn_hidden_size for e in range(a.moe.num_experts)}
        if a.moe.shared_ffn_hidden_size:
            mlps[shared_block(a)] = a.moe.shared_ffn_hidden_size
        if a.moe.shared_gate:
            shapes["mlp.shared_expert_gate"] = (1, hidden)
    gate, up, down = mlp_names(a, sparse)
    for mlp, size in mlps.items():
        shapes[f"{mlp}.{gate}"] = shapes[f"{mlp}.{up}"] = (size, hidden)
        shapes[f"{mlp}.{down}"] = (hidden, size)
    return shapes


BIASED_ROUTERS = ("deepseek_v3", "glm4_moe", "glm4_moe_lite", "minimax_m2", "hy_v3")


IN_ENGINE = {
    "mlp.router.gate.weight": "mlp.gate.weight",
    "mlp.expert_bias": "mlp.gate.e_score_correction_bias",
    "mlp.shared_mlp.gate_up_proj.weight": "mlp.shared_experts.gate_up_proj.weight",
    "mlp.shared_mlp.down_proj.weight": "mlp.shared_experts.down_proj.weight",
}
"""Names in Hy3's files -> different names in the engine."""


def router(a: Architecture) -> str:
    return "mlp.router.gate" if a.family == "hy_v3" else f"{moe_block(a)}.gate"


def router_bias(a: Architecture) -> str:
    if a.family == "hy_v3":
        return "mlp.expert_bias"
    return f"{moe_block(a)}.{'' if a.family in OF_MIXTRAL else 'gate.'}e_score_correction_bias"


def shared_block(a: Architecture) -> str:
    if a.family == "hy_v3":
        return "mlp.shared_mlp"
    return "mlp.shared_expert" if a.family in ("qwen2_moe", "qwen3_next", "qwen3_5_moe_text") else "mlp.shared_experts"


def moe_block(a: Architecture) -> str:
    return "block_sparse_moe" if a.family in OF_MIXTRAL else "mlp"


def mlp_names(a: Architecture, sparse: bool) -> tuple[str, str, str]:
    return ("w1", "w3", "w2") if a.family in OF_MIXTRAL and sparse else ("gate_proj", "up_proj", "down_proj")


def is_sparse(a: Architecture, layer: int) -> bool:
    return a.moe is not None and layer not in a.moe.dense_layers


def is_delta(a: Architecture, layer: int) -> bool:
    return a.delta is not None and a.delta.layers[layer]


def full_tensors(a: Architecture) -> Tensors:
    """Returns a checkpoint in which all elements differ (up to 2**24 of them)."""
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (a.vocab_size, a.hidden_size)}
    for i in range(a.num_layers):
        of_layer = layer_shapes(a, is_sparse(a, i), is_delta(a, i))
        shapes |= {f"model.layers.{i}.{name}": shape for name, shape in of_layer.items()}
    shapes["model.norm.weight"] = (a.hidden_size,)
    if a.norm_bias:
        shapes["model.norm.bias"] = (a.hidden_size,)
    if a.head == "value":
        shapes["score.weight"] = (1, a.hidden_size)
    elif not a.tied_embeddings:
        shapes["lm_head.weight"] = (a.vocab_size, a.hidden_size)
    tensors, start = {}, 1
    for name, shape in shapes.items():
        size = int(np.prod(shape))
        tensors[name] = np.arange(start, start + size, dtype=np.float32).reshape(shape)
        start += size
    assert start < 2**24, "float32 has no larger consecutive integers"
    return tensors


GATE_UP = {"mlp.gate_up_proj": ("gate_proj", "up_proj")}
FUSED: dict[str, dict[str, tuple[str, ...]]] = {
    "phi3": {"self_attn.qkv_proj": ("q_proj", "k_proj", "v_proj"), **GATE_UP},
    "glm4": GATE_UP,
}
"""Projections stacked in one tensor of a family's files."""


def in_sections(a: Architecture, full: Tensors) -> Tensors:
    """Returns `full` with one tensor per projection."""
    if a.family not in FUSED:
        return full
    rows = {"q_proj": a.query_size, "k_proj": a.kv_size, "v_proj": a.kv_size}
    rows |= dict.fromkeys(("gate_proj", "up_proj"), a.ffn_hidden_size)
    apart = dict(full)
    for layer in range(a.num_layers):
        for fused, names in FUSED[a.family].items():
            whole, first = apart.pop(f"model.layers.{layer}.{fused}.weight"), 0
            for name in names:
                block = f"model.layers.{layer}.{fused.partition('.')[0]}"
                apart[f"{block}.{name}.weight"] = whole[first : first + rows[name]]
                first += rows[name]
            assert first == len(whole)
    return apart


def padded(tensor: np.ndarray, rows: int) -> np.ndarray:
    filler = np.full((rows - len(tensor), *tensor.shape[1:]), PADDING, dtype=tensor.dtype)
    return np.concatenate([tensor, filler])


def heads_of(tensor: np.ndarray, head_dim: int) -> np.ndarray:
    return tensor.reshape(-1, head_dim, *tensor.shape[1:])


def megatron_qkv(a: Architecture, q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
    """Returns the fused rows, per KV group: its query heads, their gates, its key head, its value head."""
    grouped = heads_of(q, a.head_dim).reshape(a.num_kv_heads, -1, a.head_dim, *q.shape[1:])
    if a.gated_attention:
        grouped = np.concatenate([grouped[:, ::2], grouped[:, 1::2]], axis=1)
    per_group = [
        np.concatenate([*grouped[g], heads_of(k, a.head_dim)[g], heads_of(v, a.head_dim)[g]])
        for g in range(a.num_kv_heads)
    ]
    return np.concatenate(per_group)


def delta_shard(a: Architecture, full: Tensors, net: str, tp: int, rank: int) -> Tensors:
    """Returns a rank's share of a gated delta net, by the ends of its parameters' names.

    The share has some key heads with their queries, keys, values, gates, weights and decays, one kind below the other.
    """
    d, hidden = a.delta, a.hidden_size
    assert d
    shared, own = d.num_heads // d.num_key_heads, slice(*(d.num_key_heads * (rank + i) // tp for i in range(2)))
    widths = [d.key_dim, d.key_dim, shared * d.value_dim, shared * d.value_dim]
    if a.family == "qwen3_next":
        qkvz = full[f"{net}.in_proj_qkvz.weight"].reshape(d.num_key_heads, -1, hidden)
        ba = full[f"{net}.in_proj_ba.weight"].reshape(d.num_key_heads, -1, hidden)
        kinds = [*np.split(qkvz, np.cumsum(widths)[:-1], axis=1), *np.split(ba, 2, axis=1)]
    else:
        qkv = full[f"{net}.in_proj_qkv.weight"]
        ends = [d.num_key_heads * d.key_dim, 2 * d.num_key_heads * d.key_dim]
        rest = [full[f"{net}.in_proj_{name}.weight"] for name in "zba"]
        kinds = [rows.reshape(d.num_key_heads, -1, hidden) for rows in (*np.split(qkv, ends), *rest)]
    mixed = np.split(full[f"{net}.conv1d.weight"][:, 0], np.cumsum([d.num_key_heads * d.key_dim] * 2))
    return {
        "in_proj.weight": np.concatenate([kind[own].reshape(-1, hidden) for kind in kinds]),
        "conv1d.weight": np.concatenate([np.split(rows, tp)[rank] for rows in mixed]),
        "A_log": np.split(full[f"{net}.A_log"], tp)[rank],
        "dt_bias": np.split(full[f"{net}.dt_bias"], tp)[rank],
        "norm.weight": full[f"{net}.norm.weight"],
        "out_proj.weight": np.split(full[f"{net}.out_proj.weight"], tp, axis=1)[rank],
    }


@dataclass(frozen=True)
class Place:
    """The place of a Megatron rank, or with `tp`, `ep` and `etp` of an engine's rank.

    `ep_rank` holds its own whole experts, each cut over `etp` ranks (None: as tp). `layers_per_stage` goes by depth:
    [0, pp) of the first chunks, and so on.
    """

    tp: int = 1
    tp_rank: int = 0
    pp: int = 1
    pp_rank: int = 0
    ep: int = 1
    ep_rank: int = 0
    etp: int | None = None
    etp_rank: int | None = None
    vpp: int = 1
    layers_per_stage: tuple[int, ...] | None = None
    transformer_engine: bool = False

    @property
    def expert_tp(self) -> tuple[int, int]:
        """(Number of ranks that share an expert, place among them)."""
        if self.etp is None:
            return self.tp, self.tp_rank
        assert self.etp_rank is not None
        return self.etp, self.etp_rank


def gate_up(full: Tensors, mlp: str, names: tuple[str, str, str], tp: int, rank: int) -> np.ndarray:
    return np.concatenate([np.split(full[f"{mlp}.{name}.weight"], tp)[rank] for name in names[:2]])


def down(full: Tensors, mlp: str, names: tuple[str, str, str], tp: int, rank: int) -> np.ndarray:
    return np.split(full[f"{mlp}.{names[2]}.weight"], tp, axis=1)[rank]


def local_experts(a: Architecture, place: Place) -> range:
    assert a.moe
    count = a.moe.num_experts // place.ep
    return range(place.ep_rank * count, (place.ep_rank + 1) * count)


def megatron_shard(a: Architecture, full: Tensors, place: Place, vocab_multiple: int = 16) -> Tensors:
    tp, rank, full = place.tp, place.tp_rank, in_sections(a, full)
    vocab = -(-a.vocab_size // (vocab_multiple * tp)) * vocab_multiple * tp
    num_chunks = place.pp * place.vpp
    counts = place.layers_per_stage or (a.num_layers // num_chunks,) * num_chunks
    shard: Tensors = {}
    for virtual in range(place.vpp):
        chunk = virtual * place.pp + place.pp_rank
        prefix = f"{virtual}." if place.vpp > 1 else ""
        if chunk == 0:
            embedding = full["model.embed_tokens.weight"]
            shard[f"{prefix}embedding.word_embeddings.weight"] = np.split(padded(embedding, vocab), tp)[rank]
        for local in range(counts[chunk]):
            layer = megatron_layer(a, full, sum(counts[:chunk]) + local, place)
            shard |= {f"{prefix}decoder.layers.{local}.{name}": tensor for name, tensor in layer.items()}
        if chunk == num_chunks - 1:
            shard[f"{prefix}decoder.final_layernorm.weight"] = full["model.norm.weight"]
            if a.norm_bias:
                shard[f"{prefix}decoder.final_layernorm.bias"] = full["model.norm.bias"]
            if a.head == "value":
                shard[f"{prefix}output_layer.weight"] = full["score.weight"]
            elif not a.tied_embeddings:
                shard[f"{prefix}output_layer.weight"] = np.split(padded(full["lm_head.weight"], vocab), tp)[rank]
            elif place.pp > 1:
                embedding = full["model.embed_tokens.weight"]
                shard[f"{prefix}output_layer.weight"] = np.split(padded(embedding, vocab), tp)[rank]
    return shard


def megatron_layer(a: Architecture, full: Tensors, number: int, place: Place) -> Tensors:
    """Returns the rank's share of one layer, without the layer's prefix."""
    tp, rank, te = place.tp, place.tp_rank, place.transformer_engine
    hf = f"model.layers.{number}"
    sparse = is_sparse(a, number)
    shard = megatron_norms(a, full, hf, fused_input=te and a.mla is None, fused_mlp=te and not sparse)
    shard |= megatron_delta(a, full, hf, place) if is_delta(a, number) else megatron_attention(a, full, hf, place)
    if te and is_delta(a, number):
        norm = shard.pop("self_attention.linear_qkv.layer_norm_weight")
        shard["self_attention.in_proj.layer_norm_weight"] = norm
    names = mlp_names(a, sparse)
    if a.activation == "relu_squared":
        shard["mlp.linear_fc1.weight"] = np.split(full[f"{hf}.mlp.up_proj.weight"], tp)[rank]
    elif not sparse:
        shard["mlp.linear_fc1.weight"] = gate_up(full, f"{hf}.mlp", names, tp, rank)
    if not sparse:
        shard["mlp.linear_fc2.weight"] = down(full, f"{hf}.mlp", names, tp, rank)
        return shard
    if a.family == "gpt_oss":
        return shard | megatron_interleaved_experts(full, hf, place)
    return shard | megatron_experts(a, full, hf, place)


def megatron_delta(a: Architecture, full: Tensors, hf: str, place: Place) -> Tensors:
    of_net = delta_shard(a, full, f"{hf}.linear_attn", place.tp, place.tp_rank)
    of_net["gated_norm.weight"] = of_net.pop("norm.weight")
    return {f"self_attention.{name}": tensor for name, tensor in of_net.items()}


def megatron_attention(a: Architecture, full: Tensors, hf: str, place: Place) -> Tensors:
    """Returns the attention tensors of a layer, without the norm before it."""
    tp, rank = place.tp, place.tp_rank
    shard = {"self_attention.linear_proj.weight": np.split(full[f"{hf}.self_attn.o_proj.weight"], tp, axis=1)[rank]}
    if a.mla:
        shard |= megatron_latent_attention(a.mla, full, f"{hf}.self_attn", place)
    else:
        for kind in ("weight", "bias") if a.qkv_bias else ("weight",):
            fused = megatron_qkv(a, *(full[f"{hf}.self_attn.{p}_proj.{kind}"] for p in "qkv"))
            shard[f"self_attention.linear_qkv.{kind}"] = np.split(fused, tp)[rank]
    if a.output_bias:
        shard["self_attention.linear_proj.bias"] = full[f"{hf}.self_attn.o_proj.bias"]
    if a.attention_sinks:
        sinks = np.split(full[f"{hf}.self_attn.sinks"], tp)[rank]
        shard["self_attention.core_attention.softmax_offset"] = sinks
    if a.qk_norm:
        shard["self_attention.q_layernorm.weight"] = full[f"{hf}.self_attn.q_norm.weight"]
        shard["self_attention.k_layernorm.weight"] = full[f"{hf}.self_attn.k_norm.weight"]
    return shard


def megatron_norms(a: Architecture, full: Tensors, hf: str, *, fused_input: bool, fused_mlp: bool) -> Tensors:
    input_norm = "self_attention.linear_qkv.layer_norm_weight" if fused_input else "input_layernorm.weight"
    mlp_norm = "mlp.linear_fc1.layer_norm_weight" if fused_mlp else "pre_mlp_layernorm.weight"
    behind_attention, before_mlp, behind_mlp = POST_NORMS.get(a.family, ("", "post_attention_layernorm", ""))
    norms = {input_norm: full[f"{hf}.input_layernorm.weight"], mlp_norm: full[f"{hf}.{before_mlp}.weight"]}
    if a.norm_bias:
        of_norms = ((input_norm, "input_layernorm"), (mlp_norm, before_mlp))
        norms |= {name.removesuffix("weight") + "bias": full[f"{hf}.{norm}.bias"] for name, norm in of_norms}
    if a.post_norms:
        norms["self_attention.linear_proj.post_layernorm.weight"] = full[f"{hf}.{behind_attention}.weight"]
        norms["mlp.linear_fc2.post_layernorm.weight"] = full[f"{hf}.{behind_mlp}.weight"]
    return norms


def megatron_experts(a: Architecture, full: Tensors, hf: str, place: Place) -> Tensors:
    """Returns the router, the shared experts and the rank's own experts."""
    tp, rank, te, names = place.tp, place.tp_rank, place.transformer_engine, mlp_names(a, sparse=True)
    block = f"{hf}.{moe_block(a)}"
    shard = {"mlp.router.weight": full[f"{hf}.{router(a)}.weight"]}
    if a.family in BIASED_ROUTERS:
        shard["mlp.router.expert_bias"] = full[f"{hf}.{router_bias(a)}"]
    assert a.moe
    if a.moe.shared_ffn_hidden_size:
        shared = f"{hf}.{shared_block(a)}"
        shard["mlp.shared_experts.linear_fc1.weight"] = gate_up(full, shared, names, tp, rank)
        shard["mlp.shared_experts.linear_fc2.weight"] = down(full, shared, names, tp, rank)
    if a.moe.shared_gate:
        shard["mlp.shared_experts.gate_weight"] = full[f"{hf}.mlp.shared_expert_gate.weight"]
    for local, expert in enumerate(local_experts(a, place)):
        for layer, cut in (("linear_fc1", gate_up), ("linear_fc2", down)):
            own = f"experts.{layer}.weight{local}" if te else f"experts.local_experts.{local}.{layer}.weight"
            shard[f"mlp.{own}"] = cut(full, f"{block}.experts.{expert}", names, *place.expert_tp)
    return shard


def interleaved_experts(full: Tensors, experts: str, place: Place) -> Tensors:
    """Returns the rank's share of gpt-oss's expert tensors, shape [experts of the rank, ...].

    Gates stay with their values, and units are divided among the ranks. Biases of summed outputs are on every rank.
    """
    tp, rank = place.expert_tp
    cuts = {"gate_up_proj": 2, "gate_up_proj_bias": 1, "down_proj": 1}
    found = {name: np.split(full[f"{experts}.{name}"], tp, axis=axis)[rank] for name, axis in cuts.items()}
    found["down_proj_bias"] = full[f"{experts}.down_proj_bias"]
    return {name: np.split(values, place.ep)[place.ep_rank] for name, values in found.items()}


def megatron_interleaved_experts(full: Tensors, hf: str, place: Place) -> Tensors:
    names = {
        "gate_up_proj": "linear_fc1.kernel",
        "gate_up_proj_bias": "linear_fc1.bias",
        "down_proj": "linear_fc2.kernel",
        "down_proj_bias": "linear_fc2.bias",
    }
    shard = {f"mlp.router.{name}": full[f"{hf}.mlp.router.{name}"] for name in ("weight", "bias")}
    for tensor, values in interleaved_experts(full, f"{hf}.mlp.experts", place).items():
        for local, own in enumerate(values):
            name = f"local_experts.{local}.{names[tensor]}"
            shard[f"mlp.experts.{f'{names[tensor]}{local}' if place.transformer_engine else name}"] = own
    return shard


def megatron_latent_attention(mla: MLA, full: Tensors, attention: str, place: Place) -> Tensors:
    tp, rank, te = place.tp, place.tp_rank, place.transformer_engine
    shard: Tensors = {}
    latents = {"q": "q_a_proj", "kv": "kv_a_proj_with_mqa"}
    if mla.q_rank is None:
        del latents["q"]
        shard["self_attention.linear_q_proj.weight"] = np.split(full[f"{attention}.q_proj.weight"], tp)[rank]
    for latent, hf_down in latents.items():
        whole = full[f"{attention}.{hf_down}.weight"]
        up, norm = f"self_attention.linear_{latent}_up_proj", f"self_attention.{latent}_layernorm.weight"
        shard[f"self_attention.linear_{latent}_down_proj.weight"] = whole if te else np.split(whole, tp)[rank]
        shard[f"{up}.layer_norm_weight" if te else norm] = full[f"{attention}.{latent}_a_layernorm.weight"]
        shard[f"{up}.weight"] = np.split(full[f"{attention}.{latent}_b_proj.weight"], tp)[rank]
    return shard


def engine_heads(tensor: np.ndarray, head_dim: int, tp: int, rank: int) -> np.ndarray:
    """Returns the rank's share of a projection's heads. Ranks beyond the number of heads repeat them."""
    heads = heads_of(tensor, head_dim)
    repeated = np.repeat(heads, max(1, tp // len(heads)), axis=0)
    return np.concatenate(np.split(repeated, tp)[rank])


def engine_shard(a: Architecture, full: Tensors, place: Place) -> Tensors:
    tp, rank, full = place.tp, place.tp_rank, in_sections(a, full)
    vocab = -(-a.vocab_size // 64) * 64
    vocab = -(-vocab // tp) * tp
    shard: Tensors = {name: tensor for name, tensor in full.items() if name.startswith("model.norm.")}
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        if name in full:
            shard[name] = np.split(padded(full[name], vocab), tp)[rank]
    for i in range(a.num_layers):
        layer = engine_layer(a, {n.removeprefix(f"model.layers.{i}."): t for n, t in full.items()}, i, place)
        shard |= {f"model.layers.{i}.{name}": tensor for name, tensor in layer.items()}
    return shard


def engine_layer(a: Architecture, full: Tensors, number: int, place: Place) -> Tensors:
    """Returns the rank's share of one layer. `full` and the result lack the layer's prefix."""
    sparse = is_sparse(a, number)
    whole = ["input_layernorm.weight", "post_attention_layernorm.weight"]
    whole += [f"{norm}.weight" for norm in POST_NORMS.get(a.family, ())]
    if a.norm_bias:
        whole += ["input_layernorm.bias", "post_attention_layernorm.bias"]
    shard = {name: full[name] for name in whole}
    if is_delta(a, number):
        of_net = delta_shard(a, full, "linear_attn", place.tp, place.tp_rank)
        shard |= {f"linear_attn.{name}": tensor for name, tensor in of_net.items()}
    else:
        shard |= engine_attention(a, full, place)
    if sparse and a.family == "gpt_oss":
        return shard | engine_interleaved_experts(full, place)
    return shard | (engine_experts(a, full, place) if sparse else engine_mlp(full, "mlp", place))


def engine_attention(a: Architecture, full: Tensors, place: Place) -> Tensors:
    """Returns the attention tensors of a layer, without the norm before it."""
    tp, rank = place.tp, place.tp_rank
    whole = ["self_attn.q_norm.weight", "self_attn.k_norm.weight"] if a.qk_norm else []
    shard: Tensors = {}
    whole += ["self_attn.o_proj.bias"] if a.output_bias else []
    if a.mla:
        whole.append("self_attn.kv_a_layernorm.weight")
        if a.mla.q_rank is None:
            whole.append("self_attn.kv_a_proj_with_mqa.weight")
            queries = "self_attn.q_proj.weight"
        else:
            whole.append("self_attn.q_a_layernorm.weight")
            queries = "self_attn.q_b_proj.weight"
            shard["self_attn.fused_qkv_a_proj_with_mqa.weight"] = np.concatenate(
                [full["self_attn.q_a_proj.weight"], full["self_attn.kv_a_proj_with_mqa.weight"]]
            )
        for name in (queries, "self_attn.kv_b_proj.weight"):
            shard[name] = np.split(full[name], tp)[rank]
    else:
        widths = {"q": a.head_dim * (2 if a.gated_attention else 1), "k": a.head_dim, "v": a.head_dim}
        for kind in ("weight", "bias") if a.qkv_bias else ("weight",):
            parts = [engine_heads(full[f"self_attn.{p}_proj.{kind}"], widths[p], tp, rank) for p in "qkv"]
            shard[f"self_attn.qkv_proj.{kind}"] = np.concatenate(parts)
    shard["self_attn.o_proj.weight"] = np.split(full["self_attn.o_proj.weight"], tp, axis=1)[rank]
    if a.attention_sinks:
        shard["self_attn.sinks"] = np.split(full["self_attn.sinks"], tp)[rank]
    return shard | {name: full[name] for name in whole}


def engine_interleaved_experts(full: Tensors, place: Place) -> Tensors:
    experts = interleaved_experts(full, "mlp.experts", place)
    shard = {f"mlp.experts.{name}": values for name, values in experts.items()}
    return shard | {name: full[name] for name in ("mlp.router.weight", "mlp.router.bias")}


def engine_mlp(full: Tensors, mlp: str, place: Place) -> Tensors:
    names = ("gate_proj", "up_proj", "down_proj")
    inner = {f"{mlp}.up_proj.weight": np.split(full[f"{mlp}.up_proj.weight"], place.tp)[place.tp_rank]}
    if f"{mlp}.gate_proj.weight" in full:
        inner = {f"{mlp}.gate_up_proj.weight": gate_up(full, mlp, names, place.tp, place.tp_rank)}
    return inner | {
        f"{mlp}.down_proj.weight": down(full, mlp, names, place.tp, place.tp_rank),
    }


def engine_experts(a: Architecture, full: Tensors, place: Place) -> Tensors:
    """Returns the router, the shared experts and the rank's own experts."""
    assert a.moe
    block, names = moe_block(a), mlp_names(a, sparse=True)
    whole = [f"{router(a)}.weight"]
    whole += [router_bias(a)] if a.family in BIASED_ROUTERS else []
    whole += ["mlp.shared_expert_gate.weight"] if a.moe.shared_gate else []
    shard = {name: full[name] for name in whole}
    if a.moe.shared_ffn_hidden_size:
        shard |= engine_mlp(full, shared_block(a), place)
    experts = [f"{block}.experts.{e}" for e in local_experts(a, place)]
    for stack, cut in (("w13", gate_up), ("w2", down)):
        shard[f"{block}.experts.{stack}_weight"] = np.stack([cut(full, e, names, *place.expert_tp) for e in experts])
    return {IN_ENGINE.get(name, name): tensor for name, tensor in shard.items()}
