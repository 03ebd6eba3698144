"""The shape of a model, read from config.json. A key that changes the computation is used or refused."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from rltrain.errors import listed, one_of
from rltrain.models.config_file import ConfigReader
from rltrain.models.delta_net import DECODER_PREFIX, DeltaNet, names_of_files, read_delta_net
from rltrain.models.experts import ExpertLayers, read_moe
from rltrain.models.registry import FAMILIES, MLP_BIAS, REFUSED_FAMILIES, SOFTCAPS, Activation, Family, Told
from rltrain.models.rope_scaling import Scaling, YarnScaling, read_rope
from rltrain.models.table import CanonicalTensors, LayerKind, stored_names
from rltrain.models.windows import WINDOW_SWITCH, Windows, read_windows
from rltrain.runtime.json_text import read_json

# The tokens that end a text, by the files of a checkpoint.

GENERATION_CONFIG_FILE = "generation_config.json"


def read_eos(path: Path, config: ConfigReader, vocab_size: int) -> tuple[int, ...]:
    """generation_config.json is what ends a generation in transformers; config.json only where that says nothing. Both
    name tokens of a vocabulary of `vocab_size`, or CheckpointError is raised."""
    readers = [config]
    if (path / GENERATION_CONFIG_FILE).exists():
        readers.insert(0, ConfigReader(path / GENERATION_CONFIG_FILE, config_key=config.config_key))
    told = [_read_ids(reader, vocab_size) for reader in readers]
    return next((ids for ids in told if ids is not None), ())


def _read_ids(reader: ConfigReader, vocab_size: int) -> tuple[int, ...] | None:
    value = reader.values.get("eos_token_id")
    if value is None:
        return None
    ids = value if isinstance(value, list) else [value]
    return tuple(reader.token("eos_token_id", token, vocab_size) for token in ids)


def check_padding(config: ConfigReader, vocab_size: int) -> None:
    """CheckpointError where the pad token, for whose embedding transformers makes an exception, is none of the
    vocabulary. Some configs say -1 where there is none."""
    if (token := config.values.get("pad_token_id")) is not None:
        config.token("pad_token_id", token, vocab_size, least=-1)


# Multi-head latent attention: its shape, and how config.json describes it.


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


def read_mla(config: ConfigReader) -> MLA:
    return MLA(
        q_rank=None if config.values.get("q_lora_rank") is None else config.count("q_lora_rank"),
        kv_rank=config.count("kv_lora_rank"),
        plain_head_dim=config.count("qk_nope_head_dim"),
        rope_head_dim=config.count("qk_rope_head_dim"),
        value_head_dim=config.count("v_head_dim"),
    )


# Keys of config.json that change the computation, and families in which that is not supported.

# Features that change the computation and that neither the trainer nor the engine has: key -> values that mean "off".
UNSUPPORTED = {
    MLP_BIAS: (False, None),
    WINDOW_SWITCH: (False, None),
    "use_bidirectional_attention": (False, None),
    "attn_logit_softcapping": (None,),
    "final_logit_softcapping": (None,),
    "quantization_config": (None,),
    "pretraining_tp": (1, None),
    "moe_layer_freq": (1, None),
    "rope_interleave": (True, None),
    "scoring_func": ("sigmoid", None),
    "topk_method": ("noaux_tc", None),
    "shared_intermediate_size": (0, None),
    "use_routing_bias": (True, None),
    "qk_norm_type": ("per_layer", None),
    "swiglu_limit": (7.0, None),
}


def refuse_unsupported(config: ConfigReader, name: str) -> None:
    """Raises CheckpointError where a key has a value that the family of this name is not supported with."""
    family = FAMILIES[name]
    for key, off in UNSUPPORTED.items():
        if config.values.get(key) not in off and key not in family.has:
            hint = family.quantized_hint if key == "quantization_config" else ""
            raise config.error(key, f"{off[0]!r}: nothing else is supported for {name}{hint}")
    key, *values = family.activation
    if config.values.get(key) not in (*values, None):
        raise config.error(key, f"{values[0]}: nothing else is supported for {name}")
    if config.take("attention_bias", bool, default=False) and family.attention_bias is None:
        raise config.error("attention_bias", f"False: nothing else is supported for {name}")


# The shape of a model, read from the config.json of a Hugging Face checkpoint.

CONFIG_FILE = "config.json"
Head = Literal["vocabulary", "value"]
"""What stands on top of a model: a logit per token of the vocabulary, or one value."""


@dataclass(frozen=True)
class AdapterTargets:
    """Of which matrices there are low-rank adapters, by the last part of their names; None: of all."""

    rank: int
    targets: tuple[str, ...] | None


@dataclass(frozen=True)
class Unlisted:
    """A model of a family without a table: what transformers' own has, for backend fsdp alone.

    `prefix` begins the names of what is no head's; `classifier` is the class that has a score in the vocabulary's
    place, empty where there is none.
    """

    tensors: CanonicalTensors
    prefix: str
    classifier: str


@dataclass(frozen=True)
class Architecture:
    """Everything that layouts, the trainer and the engine need to know about a model's shape.

    `head_dim` is that of queries; `head` is what the model ends in. `moe` and `mla` are None in models that have no
    experts or no latent attention. `output_bias` tells of a bias on what attention adds to the hidden state, `mlp_bias`
    of biases in MLPs. With `adapters` the tensors are those of low-rank adapters of such a model, and no others.

    Of a head the first `rotary_dim` elements are rotated (None: all), each with the one that is half of them further
    on, or with its neighbour where the model `rotates_pairs`; in layers with `windows` by `sliding_rope_theta` where
    that is set. Scores are multiplied by `attention_scale`, or 1 / sqrt(head_dim). With `qk_norm` queries and keys are
    normed head by head, or, where the model `norms_projections`, all heads of a token at once. Norms multiply by
    `norm_offset` plus their weight; with `post_norms` there is one behind attention and one behind the MLP too.
    With `norm_bias` they take the mean off first, and add a bias (LayerNorm).
    Embeddings are multiplied by `embedding_scale`. Scores x become c * tanh(x / c) with c = `attention_softcap`, where
    that is set, and logits by `logits_softcap`. With `attention_sinks` every head has one more score, a parameter,
    which takes its share of attention and gives nothing. Layers that `delta` names are gated delta nets; what attention
    of the others puts out is multiplied by the sigmoid of gates where the model has `gated_attention`. The names of the
    decoder's tensors begin with `decoder_prefix`; with `stacked_experts` one tensor is of all experts of a layer. A
    model that `predicts` has a layer that predicts a further token (models.prediction) among its tensors; those of
    others that are left as their files have them are none of its.
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
    rope_scaling: Scaling | None
    max_positions: int
    eos_token_ids: tuple[int, ...]
    moe: ExpertLayers | None = None
    mla: MLA | None = None
    head: Head = "vocabulary"
    output_bias: bool = False
    mlp_bias: bool = False
    rotary_dim: int | None = None
    windows: Windows | None = None
    sliding_rope_theta: float | None = None
    attention_scale: float | None = None
    activation: Activation = "silu"
    norm_offset: float = 0.0
    norm_bias: bool = False
    post_norms: bool = False
    embedding_scale: float = 1.0
    rotates_pairs: bool = False
    norms_projections: bool = False
    attention_softcap: float | None = None
    logits_softcap: float | None = None
    attention_sinks: bool = False
    delta: DeltaNet | None = None
    gated_attention: bool = False
    decoder_prefix: str = DECODER_PREFIX
    stacked_experts: bool = False
    predicts: bool = False
    adapters: AdapterTargets | None = None
    unlisted: Unlisted | None = None

    def value_model(self) -> "Architecture":
        """The same decoder with a value head. Its embeddings are tied to nothing: no head resembles them."""
        return replace(self, head="value", tied_embeddings=False, predicts=False)

    def predicting(self) -> "Architecture":
        """The same with the layer that predicts a further token, of a family of models.prediction."""
        return replace(self, predicts=True)

    def adapted(self, rank: int, targets: tuple[str, ...] | None) -> "Architecture":
        """The low-rank adapters of such a model, as models.lora has them; `targets` None: of all matrices."""
        return replace(self, adapters=AdapterTargets(rank, targets))

    @property
    def classifier(self) -> str:
        """transformers' class of the same decoder with a score in the vocabulary's place; empty where it has none."""
        if self.unlisted:
            return self.unlisted.classifier
        words = self.family.split("_")
        family = "".join(f"_{word}" if word[0].isdigit() else word.capitalize() for word in words)
        return f"{family}ForSequenceClassification"

    @property
    def query_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim

    @property
    def gates_mlps(self) -> bool:
        """Whether what an MLP makes is multiplied by a gate."""
        return self.activation != "relu_squared"

    @property
    def mlp_matrices(self) -> int:
        """In an MLP: up and down, and the gate."""
        return 3 if self.gates_mlps else 2

    @property
    def rotated_size(self) -> int:
        """Elements of a head that are rotated."""
        return self.mla.rope_head_dim if self.mla else self.rotary_dim or self.head_dim

    @property
    def rotation_magnitude(self) -> float:
        """Returns the factor on the rotated elements of queries and keys. It is 1 without YaRN and LongRoPE."""
        return self.rope_scaling.magnitude if self.rope_scaling else 1.0

    @property
    def score_scale(self) -> float:
        """What attention multiplies scores by: 1 / sqrt(head_dim) or what the model has instead. With YaRN, latent
        attention multiplies all elements of heads, not the rotated ones alone."""
        if self.attention_scale is not None:
            return self.attention_scale
        of_all = self.rope_scaling.magnitude_of_all if self.mla and isinstance(self.rope_scaling, YarnScaling) else 1.0
        return self.head_dim**-0.5 * of_all**2

    def window_of(self, layer: int) -> int | None:
        """Tokens that those of a layer attend to at most; None where to all before them."""
        return self.windows.of(layer) if self.windows else None

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
    def layer_kinds(self) -> tuple[LayerKind, ...]:
        """[layers]"""
        delta = self.delta.layers if self.delta else (False,) * self.num_layers
        return tuple(map(LayerKind, self.sparse_layers, delta))

    @property
    def predicting_kind(self) -> LayerKind:
        """Of the layer that predicts a further token: as the last one, with attention."""
        return LayerKind(sparse=self.sparse_layers[-1])

    @property
    def num_attention_layers(self) -> int:
        """Of which every token's keys and values are kept."""
        return self.num_layers - (self.delta.num_layers if self.delta else 0)

    @property
    def expert_number_bytes(self) -> int:
        """Of the smallest signed integer that numbers a layer's experts."""
        return 1 if self.num_experts <= 128 else 2

    @property
    def routing_bytes(self) -> int:
        """Of the numbers of the experts that a token visits, in all layers; 0 without experts."""
        return sum(self.sparse_layers) * self.moe.top_k * self.expert_number_bytes if self.moe else 0


def read_config(path: Path, config_key: str = "model.path") -> Architecture:
    """Read `path`/config.json, as written by transformers 4 or 5; the head is the vocabulary's.

    `config_key` is the key that names the folder, for messages. Raises CheckpointError where the file is missing or the
    model needs something that is not supported.
    """
    reader = ConfigReader(path / CONFIG_FILE, config_key=config_key)
    name = str(reader.values.get("model_type"))
    if name in REFUSED_FAMILIES:
        raise reader.error("model_type", f"one of {listed(FAMILIES)}: {REFUSED_FAMILIES[name]}")
    if name not in FAMILIES:
        raise reader.error("model_type", one_of(name, FAMILIES))
    family, reader = FAMILIES[name], language_model(reader)
    refuse_unsupported(reader, name)
    attention_bias = reader.take("attention_bias", bool, default=family.attention_bias or False)
    num_heads, hidden_size = reader.count("num_attention_heads"), reader.count("hidden_size")
    num_kv_heads = reader.count("num_key_value_heads", default=num_heads)
    if num_heads % num_kv_heads:
        raise reader.error("num_key_value_heads", f"a divisor of num_attention_heads = {num_heads}")
    num_layers, vocab_size = reader.count("num_hidden_layers"), reader.count("vocab_size")
    check_padding(reader, vocab_size)
    mla = read_mla(reader) if family.latent else None
    head_dim = family.head_dim or hidden_size // num_heads
    head_dim = mla.plain_head_dim + mla.rope_head_dim if mla else reader.count("head_dim", default=head_dim)
    rope = read_rope(reader, head_dim)
    architecture = Architecture(
        family=name,
        num_layers=num_layers,
        hidden_size=hidden_size,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        ffn_hidden_size=reader.count(
            "intermediate_size", default=reader.count(family.ffn_key) if family.ffn_key else None
        ),
        vocab_size=vocab_size,
        tied_embeddings=reader.take("tie_word_embeddings", bool, default=family.ties_embeddings),
        qkv_bias=attention_bias or _has(family.qkv_bias, reader),
        qk_norm=family.qk_norm or reader.take("use_qk_norm", bool, default=False),
        norm_eps=reader.take(family.norm_eps, float),
        rope_theta=rope.theta,
        rope_scaling=rope.scaling,
        max_positions=rope.max_positions,
        eos_token_ids=read_eos(path, reader, vocab_size),
        moe=read_moe(family.experts, reader, num_layers) if family.experts else None,
        mla=mla,
        output_bias=_has(family.output_bias, reader),
        mlp_bias=MLP_BIAS in family.has and reader.take(MLP_BIAS, bool, default=False),
        rotary_dim=rope.rotated,
        windows=None if family.delta else read_windows(family.windows, reader, num_layers, rope.max_positions),
        sliding_rope_theta=rope.sliding_theta,
        embedding_scale=hidden_size**0.5 if family.scales_embeddings else 1.0,
        attention_scale=_attention_scale(reader, family),
        attention_softcap=_softcap(reader, family, "attn_logit_softcapping"),
        logits_softcap=_softcap(reader, family, "final_logit_softcapping"),
        **family.shape,
    )
    return _with_delta_nets(architecture, reader, path) if family.delta else architecture


def language_model(config: ConfigReader) -> ConfigReader:
    """A reader of what config.json says of the language model, under the model_type that it has as a whole."""
    name = config.values.get("model_type")
    family = FAMILIES.get(str(name))
    if family is None or family.nested is None:
        return config
    nested = config.values.get(family.nested)
    if not isinstance(nested, dict):
        raise config.error(family.nested, "an object")
    whole: Mapping[str, Any] = {"tie_word_embeddings": False, **nested, "model_type": name}
    tied = config.values.get("tie_word_embeddings")
    return config.inside(family.nested, whole if tied is None else {**whole, "tie_word_embeddings": tied})


def is_unlisted(path: Path) -> bool:
    """Whether `path`/config.json names a family without a table."""
    try:
        name = read_json(path / CONFIG_FILE)["model_type"]
    except (OSError, ValueError, KeyError, TypeError):
        return False
    return str(name) not in FAMILIES


def _has(told: bool | Told, config: ConfigReader) -> bool:
    return told if isinstance(told, bool) else config.take(told[0], bool, told[1])


def _with_delta_nets(architecture: Architecture, config: ConfigReader, path: Path) -> Architecture:
    nested = FAMILIES[architecture.family].nested is not None
    prefix, stacked = names_of_files(nested, nested and architecture.moe is not None, stored_names(path))
    delta = read_delta_net(config, architecture.num_layers)
    return replace(architecture, delta=delta, decoder_prefix=prefix, stacked_experts=stacked)


def _attention_scale(config: ConfigReader, family: Family) -> float | None:
    if family.query_scalar is None:
        return None
    scalar = config.take("query_pre_attn_scalar", float, family.query_scalar)
    if not scalar > 0:
        raise config.error("query_pre_attn_scalar", "a number above 0")
    return scalar**-0.5


def _softcap(config: ConfigReader, family: Family, key: str) -> float | None:
    if key not in family.has or (key in config.values and config.values[key] is None):
        return None
    cap = config.take(key, float, SOFTCAPS[key])
    if cap <= 0:
        raise config.error(key, "a number above 0, or null")
    return cap
