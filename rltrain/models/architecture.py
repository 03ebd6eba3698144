"""The shape of a model, read from the config.json of a Hugging Face checkpoint."""

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, cast

from rltrain.models.config_file import ConfigReader

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "qwen3_moe", "mixtral", "deepseek_v3")
CONFIG_FILE = "config.json"
GENERATION_CONFIG_FILE = "generation_config.json"
Head = Literal["vocabulary", "value"]
"""What stands on top of a model: a logit per token of the vocabulary, or one value."""

QWEN3_HEAD_DIM = 128  # what transformers assumes where the key is absent

# Features that change the computation and that neither the trainer nor the engine has: key -> values that mean "off".
UNSUPPORTED = {
    "mlp_bias": (False, None),
    "use_sliding_window": (False, None),
    "hidden_act": ("silu", None),
    "quantization_config": (None,),
    "pretraining_tp": (1, None),
    "moe_layer_freq": (1, None),
    "rope_interleave": (True, None),
    "scoring_func": ("sigmoid", None),
    "topk_method": ("noaux_tc", None),
}
ATTENTION_BIAS_FAMILIES = ("llama",)
"""Families of which some models have biases in all projections of attention."""


@dataclass(frozen=True)
class RopeScaling:
    """Llama-3's stretching of rotary frequencies."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_positions: int


@dataclass(frozen=True)
class YarnScaling:
    """YaRN's stretching of rotary frequencies, as DeepSeek uses it. `mscale` is 0 where the checkpoint names none."""

    factor: float
    beta_fast: float
    beta_slow: float
    mscale: float
    mscale_all_dim: float
    original_max_positions: int


@dataclass(frozen=True)
class MoE:
    """Layers whose MLP is a router and experts, of which every token visits `top_k`.

    `ffn_hidden_size` is that of one expert. `shared_ffn_hidden_size` is that of the experts that every token visits,
    taken together; 0 where there are none. `dense_layers` have the MLP of a dense model instead.

    An expert's weight is its share of `score`, among the chosen ones where `normalized`, times `scaling`. With
    "sigmoid" experts are chosen by score plus a bias that the checkpoint holds, out of the best `top_groups` of
    `num_groups` groups of consecutive experts.
    """

    num_experts: int
    top_k: int
    ffn_hidden_size: int
    shared_ffn_hidden_size: int = 0
    dense_layers: tuple[int, ...] = ()
    score: Literal["softmax", "sigmoid"] = "softmax"
    normalized: bool = True
    scaling: float = 1.0
    num_groups: int = 1
    top_groups: int = 1


@dataclass(frozen=True)
class MLA:
    """Multi-head latent attention: queries, and keys with values, are made from latents of `q_rank` and `kv_rank`.
    With `q_rank` None queries are made from the hidden state.

    A head's query and key have `plain_head_dim` elements without positions and `rope_head_dim` rotated ones; the
    rotated part of the key is one for all heads. A head's value has `value_head_dim` elements.
    """

    q_rank: int | None
    kv_rank: int
    plain_head_dim: int
    rope_head_dim: int
    value_head_dim: int


@dataclass(frozen=True)
class Architecture:
    """Everything that layouts, the trainer and the engine need to know about a model's shape.

    `head_dim` is that of queries; `head` is what the model ends in. `moe` and `mla` are None in models that have no
    experts or no latent attention. `output_bias` tells of a bias on what attention adds to the hidden state.
    """

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
    rope_scaling: RopeScaling | YarnScaling | None
    max_positions: int
    eos_token_ids: tuple[int, ...]
    moe: MoE | None = None
    mla: MLA | None = None
    head: Head = "vocabulary"
    output_bias: bool = False

    def value_model(self) -> "Architecture":
        """The same decoder with a value head. Its embeddings are tied to nothing: no head resembles them."""
        return replace(self, head="value", tied_embeddings=False)

    @property
    def query_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim

    @property
    def num_experts(self) -> int:
        return self.moe.num_experts if self.moe else 0

    @property
    def is_split_by_tokens(self) -> bool:
        """Whether tensor-parallel ranks always have different tokens where the model is not cut (sequence parallel)."""
        return self.moe is not None or self.mla is not None

    @property
    def sparse_layers(self) -> tuple[bool, ...]:
        """[layers]: which have experts."""
        if self.moe is None:
            return (False,) * self.num_layers
        return tuple(layer not in self.moe.dense_layers for layer in range(self.num_layers))

    @property
    def expert_number_bytes(self) -> int:
        """Of the smallest signed integer that numbers a layer's experts."""
        return 1 if self.num_experts <= 128 else 2

    @property
    def routing_bytes(self) -> int:
        """Of the numbers of the experts that a token visits, in all layers; 0 without experts."""
        return sum(self.sparse_layers) * self.moe.top_k * self.expert_number_bytes if self.moe else 0


def read_architecture(path: Path, config_key: str = "model.path") -> Architecture:
    """Read `path`/config.json, as written by transformers 4 or 5; the head is the vocabulary's.

    `config_key` is the key that names the folder, for messages. Raises CheckpointError where the file is missing or the
    model needs something that is not supported.
    """
    reader = ConfigReader(path / CONFIG_FILE, config_key=config_key)
    family = reader.values.get("model_type")
    if family not in FAMILIES:
        raise reader.error("model_type", f"one of {', '.join(FAMILIES)}")
    for key, off in UNSUPPORTED.items():
        if reader.values.get(key) not in off:
            raise reader.error(key, f"{off[0]!r}: nothing else is supported for {family}")
    attention_bias = reader.take("attention_bias", bool, default=False)
    if attention_bias and family not in ATTENTION_BIAS_FAMILIES:
        raise reader.error("attention_bias", f"False: nothing else is supported for {family}")
    _refuse_sliding_window(reader, family)
    if set(reader.values.get("layer_types") or ()) - {"full_attention"}:
        raise reader.error("layer_types", "full_attention in every layer")
    num_heads, hidden_size = reader.count("num_attention_heads"), reader.count("hidden_size")
    num_kv_heads = reader.count("num_key_value_heads", default=num_heads)
    if num_heads % num_kv_heads:
        raise reader.error("num_key_value_heads", f"a divisor of num_attention_heads = {num_heads}")
    theta, scaling = _read_rope(reader)
    num_layers = reader.count("num_hidden_layers")
    mla = _read_mla(reader) if family == "deepseek_v3" else None
    head_dim = QWEN3_HEAD_DIM if family == "qwen3" else hidden_size // num_heads
    return Architecture(
        family=family,
        num_layers=num_layers,
        hidden_size=hidden_size,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=mla.plain_head_dim + mla.rope_head_dim if mla else reader.count("head_dim", default=head_dim),
        ffn_hidden_size=reader.count("intermediate_size"),
        vocab_size=reader.count("vocab_size"),
        tied_embeddings=reader.take("tie_word_embeddings", bool, default=False),
        qkv_bias=family == "qwen2" or attention_bias,
        qk_norm=family in ("qwen3", "qwen3_moe"),
        norm_eps=reader.take("rms_norm_eps", float),
        rope_theta=theta,
        rope_scaling=scaling,
        max_positions=reader.count("max_position_embeddings"),
        eos_token_ids=_read_eos(path, reader),
        moe=READ_MOE[family](reader, num_layers) if family in READ_MOE else None,
        mla=mla,
        output_bias=attention_bias,
    )


def _refuse_sliding_window(config: ConfigReader, family: str) -> None:
    """transformers lets Mistral's attention slide where the key is absent, Mixtral's only where there is a number."""
    if family not in ("mistral", "mixtral") or config.values.get("sliding_window", 0) is None:
        return
    if family == "mistral" or "sliding_window" in config.values:
        raise config.error("sliding_window", "null")


def _read_qwen3_moe(config: ConfigReader, num_layers: int) -> MoE:
    step = config.count("decoder_sparse_step", default=1)
    listed = config.values.get("mlp_only_layers") or []
    if not isinstance(listed, list) or not all(type(layer) is int for layer in listed):
        raise config.error("mlp_only_layers", "a list of layer numbers")
    # transformers 5 writes num_local_experts, 4 wrote num_experts.
    experts_key = "num_local_experts" if "num_local_experts" in config.values else "num_experts"
    return MoE(
        num_experts=config.count(experts_key),
        top_k=config.count("num_experts_per_tok"),
        ffn_hidden_size=config.count("moe_intermediate_size"),
        dense_layers=tuple(layer for layer in range(num_layers) if layer in listed or (layer + 1) % step),
        normalized=config.take("norm_topk_prob", bool, default=False),
    )


def _read_mixtral(config: ConfigReader, num_layers: int) -> MoE:
    return MoE(
        num_experts=config.count("num_local_experts"),
        top_k=config.count("num_experts_per_tok"),
        ffn_hidden_size=config.count("intermediate_size"),
    )


def _read_deepseek_v3(config: ConfigReader, num_layers: int) -> MoE:
    num_dense = config.take("first_k_dense_replace", int)
    if not 0 <= num_dense <= num_layers:
        raise config.error("first_k_dense_replace", f"from 0 to num_hidden_layers = {num_layers}")
    expert_size = config.count("moe_intermediate_size")
    top_k, num_experts = config.count("num_experts_per_tok"), config.count("n_routed_experts")
    num_groups, top_groups = config.count("n_group", default=1), config.count("topk_group", default=1)
    if num_experts % num_groups:
        raise config.error("n_group", f"a divisor of n_routed_experts = {num_experts}")
    # Groups are ranked by their two best experts; megatron-core ranks them by their top_k / top_groups best.
    if top_groups < num_groups and top_k != 2 * top_groups:
        raise config.error("topk_group", f"half of num_experts_per_tok = {top_k}, or n_group = {num_groups}")
    if not config.take("norm_topk_prob", bool, default=True) or top_k == 1:
        raise config.error("norm_topk_prob", "true, with num_experts_per_tok of at least 2")
    return MoE(
        num_experts=num_experts,
        top_k=top_k,
        ffn_hidden_size=expert_size,
        shared_ffn_hidden_size=config.count("n_shared_experts") * expert_size,
        dense_layers=tuple(range(num_dense)),
        score="sigmoid",
        scaling=config.take("routed_scaling_factor", float, default=1.0),
        num_groups=num_groups,
        top_groups=top_groups,
    )


READ_MOE = {"qwen3_moe": _read_qwen3_moe, "mixtral": _read_mixtral, "deepseek_v3": _read_deepseek_v3}


def _read_mla(config: ConfigReader) -> MLA:
    return MLA(
        q_rank=None if config.values.get("q_lora_rank") is None else config.count("q_lora_rank"),
        kv_rank=config.count("kv_lora_rank"),
        plain_head_dim=config.count("qk_nope_head_dim"),
        rope_head_dim=config.count("qk_rope_head_dim"),
        value_head_dim=config.count("v_head_dim"),
    )


def _read_rope(config: ConfigReader) -> tuple[float, RopeScaling | YarnScaling | None]:
    """(theta, scaling): transformers 5 keeps both in rope_parameters, 4 in rope_theta and rope_scaling."""
    key = "rope_parameters" if config.values.get("rope_parameters") is not None else "rope_scaling"
    nested = config.values.get(key) or {}
    if not isinstance(nested, dict):
        raise config.error(key, "an object or null")
    rope = config.inside(key, nested)
    theta = rope.take("rope_theta", float, config.take("rope_theta", float, 10000.0))
    for holder in (config, rope):
        if holder.values.get("partial_rotary_factor") not in (None, 1):
            raise holder.error("partial_rotary_factor", "1")
    type_key = "rope_type" if "rope_type" in nested else "type"
    kind = nested.get(type_key, "default")
    if kind == "default":
        return theta, None
    if kind == "yarn" and config.values["model_type"] == "deepseek_v3":
        return theta, _read_yarn(rope)
    if kind != "llama3":
        raise rope.error(type_key, '"default" or "llama3"')
    return theta, RopeScaling(
        factor=rope.take("factor", float),
        low_freq_factor=rope.take("low_freq_factor", float),
        high_freq_factor=rope.take("high_freq_factor", float),
        original_max_positions=rope.count("original_max_position_embeddings"),
    )


def _read_yarn(rope: ConfigReader) -> YarnScaling:
    for key, off in (("attention_factor", None), ("truncate", True)):
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
    )


def _read_eos(path: Path, config: ConfigReader) -> tuple[int, ...]:
    """generation_config.json is what ends a generation in transformers; config.json only where that says nothing."""
    readers = [config]
    if (path / GENERATION_CONFIG_FILE).exists():
        readers.insert(0, ConfigReader(path / GENERATION_CONFIG_FILE, config_key=config.config_key))
    for reader in readers:
        value = reader.values.get("eos_token_id")
        if value is None:
            continue
        ids = value if isinstance(value, list) else [value]
        if not all(type(token) is int for token in ids):
            raise reader.error("eos_token_id", "an integer or a list of integers")
        return tuple(cast(list[int], ids))
    return ()
