"""The architecture of a model, read from config.json. A key that changes the computation is either used or refused."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from rltrain.errors import listed, one_of
from rltrain.models.config_file import ConfigReader
from rltrain.models.delta_net import DeltaNet, read_delta_net
from rltrain.models.experts import ExpertLayers, read_moe
from rltrain.models.registry import FAMILIES, MLP_BIAS, REFUSED_FAMILIES, SOFTCAPS, TOWERS, Activation, Family, Told
from rltrain.models.rope_scaling import Scaling, YarnScaling, read_mrope, read_rope
from rltrain.models.table import (
    DECODER_PREFIX,
    CanonicalTensors,
    LayerKind,
    names_in_files,
    stored_names,
)
from rltrain.models.vision import MRope, Vision
from rltrain.models.vision_tables import read_vision
from rltrain.models.windows import WINDOW_SWITCH, Windows, read_windows
from rltrain.runtime.json_text import read_json

# End-of-text tokens, from the files of a checkpoint.

GENERATION_CONFIG_FILE = "generation_config.json"


def read_eos(path: Path, config: ConfigReader, vocab_size: int) -> tuple[int, ...]:
    """Returns the ids of the end-of-text tokens. Like transformers it prefers generation_config.json over config.json.
    Raises CheckpointError if an id is outside the vocabulary of `vocab_size`."""
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
    """Raises CheckpointError if the pad token is outside the vocabulary, because transformers treats its embedding
    specially. The value -1 in some configs means no pad token."""
    if (token := config.values.get("pad_token_id")) is not None:
        config.token("pad_token_id", token, vocab_size, least=-1)


# Multi-head latent attention.


@dataclass(frozen=True)
class MLA:
    """The shape of multi-head latent attention. Queries come from a latent of size `q_rank`, or from the hidden state
    if that is None. Keys and values come from a latent of size `kv_rank`.

    A head's query and key have `plain_head_dim` elements without positions and `rope_head_dim` rotated ones. All heads
    share the rotated part of the key. A head's value has `value_head_dim` elements.
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


# Keys of config.json that change the computation.

# Unsupported features, except in families that list the key in `has`. Maps a key to the values that turn it off.
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
    """Raises CheckpointError if a key has an unsupported value for the family `name`."""
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


# The architecture of a Hugging Face checkpoint.

CONFIG_FILE = "config.json"
Head = Literal["vocabulary", "value"]
"""The output of a model: logits of the vocabulary, or one value."""


@dataclass(frozen=True)
class AdapterTargets:
    """The matrices with low-rank adapters, by the last part of their names. None selects all. With `vision` those of
    the vision tower count too."""

    rank: int
    targets: tuple[str, ...] | None
    vision: bool = False


@dataclass(frozen=True)
class Unlisted:
    """A model of a family without a table, described by transformers. Only backend fsdp supports it.

    `prefix` begins the names of all tensors outside the head. `classifier` is transformers' class with a score instead
    of the vocabulary's head. It is empty if there is none.
    """

    tensors: CanonicalTensors
    prefix: str
    classifier: str


@dataclass(frozen=True)
class Architecture:
    """The shape of a model, for layouts, the trainer and the engine. Some fields:

    - `head_dim`: elements of a query's head. `head`: the output of the model.
    - `moe`, `mla`: None without experts or without latent attention.
    - `output_bias`: a bias on the output of attention. `mlp_bias`: biases in MLPs.
    - `rotary_dim`: the number of rotated elements at the start of a head (None: all). Each element of their first half
      rotates with its counterpart in the second half, or with its neighbour if `rotates_pairs`.
    - `sliding_rope_theta`: the rotary base of layers with `windows`, if they have another.
    - `attention_scale`: the factor on scores, by default 1 / sqrt(head_dim).
    - `qk_norm`: norms of queries and keys per head, or over all heads of a token if `norms_projections`.
    - `norm_offset`: norms multiply by this plus their weight. `norm_bias`: norms are LayerNorms with a bias.
    - `post_norms`: additional norms after attention and after the MLP.
    - `embedding_scale`: the factor on embeddings.
    - `attention_softcap`, `logits_softcap`: c in c * tanh(x / c) for scores and logits.
    - `attention_sinks`: each head has a learned score with a share of attention but no value.
    - `delta`: gated delta nets in some layers. `gated_attention`: sigmoid gates on the output of attention in the
      others.
    - `decoder_prefix`: the beginning of the names of the decoder's tensors.
    - `stacked_experts`: one tensor has all experts of a layer.
    - `predicts`: includes the layer for multi-token prediction (models.prediction). Otherwise such tensors stay
      unchanged in the files and do not belong to the model.
    - `adapters`: the tensors are only the low-rank adapters of such a model.
    - `vision`: its vision tower, with model.vision. Otherwise the tower's tensors stay unchanged in the files, outside
      the model.
    - `mrope`: rotary embeddings with three positions of a token.
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
    vision: Vision | None = None
    mrope: MRope | None = None

    def value_model(self) -> "Architecture":
        """Returns the same decoder with a value head. Its embeddings are not tied."""
        return replace(self, head="value", tied_embeddings=False, predicts=False)

    def predicting(self) -> "Architecture":
        """Returns the architecture with the layer for multi-token prediction. The family must be in
        models.prediction."""
        return replace(self, predicts=True)

    def adapted(self, rank: int, targets: tuple[str, ...] | None, *, vision: bool = False) -> "Architecture":
        """Returns the low-rank adapters of this model (models.lora). `targets` None means all matrices. With `vision`
        they include those of the vision tower."""
        return replace(self, adapters=AdapterTargets(rank, targets, vision))

    @property
    def classifier(self) -> str:
        """The name of transformers' class with a score instead of the vocabulary's head. Empty if there is none."""
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
        """True if MLPs have gates."""
        return self.activation != "relu_squared"

    @property
    def mlp_matrices(self) -> int:
        """Number of matrices of an MLP: up, down and, if there is one, the gate."""
        return 3 if self.gates_mlps else 2

    @property
    def rotated_size(self) -> int:
        """Number of rotated elements of a head."""
        return self.mla.rope_head_dim if self.mla else self.rotary_dim or self.head_dim

    @property
    def rotation_magnitude(self) -> float:
        """The factor on the rotated elements of queries and keys. It is 1 without YaRN and LongRoPE."""
        return self.rope_scaling.magnitude if self.rope_scaling else 1.0

    @property
    def score_scale(self) -> float:
        """The factor on scores, by default 1 / sqrt(head_dim). In latent attention with YaRN it includes the factor on
        all elements of heads."""
        if self.attention_scale is not None:
            return self.attention_scale
        of_all = self.rope_scaling.magnitude_of_all if self.mla and isinstance(self.rope_scaling, YarnScaling) else 1.0
        return self.head_dim**-0.5 * of_all**2

    def window_of(self, layer: int) -> int | None:
        """Returns the number of tokens attended to in a layer, including the token itself. None means no limit."""
        return self.windows.of(layer) if self.windows else None

    @property
    def num_experts(self) -> int:
        return self.moe.num_experts if self.moe else 0

    @property
    def is_split_by_tokens(self) -> bool:
        """True if tensor-parallel ranks always hold different tokens between split modules (sequence parallelism)."""
        return self.moe is not None or self.mla is not None

    @property
    def sparse_layers(self) -> tuple[bool, ...]:
        """True for each layer with experts, [layers]."""
        if self.moe is None:
            return (False,) * self.num_layers
        return tuple(layer not in self.moe.dense_layers for layer in range(self.num_layers))

    @property
    def layer_kinds(self) -> tuple[LayerKind, ...]:
        """The kind of each layer, [layers]."""
        delta = self.delta.layers if self.delta else (False,) * self.num_layers
        return tuple(map(LayerKind, self.sparse_layers, delta))

    @property
    def predicting_kind(self) -> LayerKind:
        """The kind of the multi-token prediction layer: the same MLP or experts as the last layer, with attention."""
        return LayerKind(sparse=self.sparse_layers[-1])

    @property
    def num_attention_layers(self) -> int:
        """Number of layers with keys and values."""
        return self.num_layers - (self.delta.num_layers if self.delta else 0)

    @property
    def expert_number_bytes(self) -> int:
        """Bytes of the smallest signed integer for an expert's number."""
        return 1 if self.num_experts <= 128 else 2

    @property
    def routing_bytes(self) -> int:
        """Bytes per token for the numbers of its experts in all layers. 0 without experts."""
        return sum(self.sparse_layers) * self.moe.top_k * self.expert_number_bytes if self.moe else 0


def read_config(path: Path, config_key: str = "model.path", *, sees: bool = False) -> Architecture:
    """Returns the architecture in `path`/config.json, as written by transformers 4 or 5, with the vocabulary's head.

    With `sees` it includes the vision tower. `config_key` names the folder in messages. Raises CheckpointError if the
    file is missing, the model needs an unsupported feature, or it should see and has no supported tower.
    """
    whole = ConfigReader(path / CONFIG_FILE, config_key=config_key)
    architecture = _read_language_model(path, whole)
    return _with_vision(architecture, whole, path) if sees else architecture


def _read_language_model(path: Path, whole: ConfigReader) -> Architecture:
    name = str(whole.values.get("model_type"))
    if name in REFUSED_FAMILIES:
        raise whole.error("model_type", f"one of {listed(FAMILIES)}: {REFUSED_FAMILIES[name]}")
    if name not in FAMILIES:
        raise whole.error("model_type", one_of(name, FAMILIES))
    family, reader = FAMILIES[name], language_model(whole)
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
    return _with_names_in_files(architecture, family, reader, path) if family.files else architecture


def language_model(config: ConfigReader) -> ConfigReader:
    """Returns a reader of the language model's part of config.json, with the model_type of the whole file."""
    name = config.values.get("model_type")
    family = FAMILIES.get(str(name))
    if family is None or family.nested is None:
        return config
    nested = config.values.get(family.nested)
    if nested is None and family.nested_optional:
        return config
    if not isinstance(nested, dict):
        raise config.error(family.nested, "an object")
    whole: Mapping[str, Any] = {"tie_word_embeddings": False, **nested, "model_type": name}
    tied = config.values.get("tie_word_embeddings")
    if family.nested_optional:
        tied = tied or None  # transformers ties the embeddings if either key is true
    return config.inside(family.nested, whole if tied is None else {**whole, "tie_word_embeddings": tied})


def is_unlisted(path: Path) -> bool:
    """Returns whether `path`/config.json names a family without a table."""
    try:
        name = read_json(path / CONFIG_FILE)["model_type"]
    except (OSError, ValueError, KeyError, TypeError):
        return False
    return str(name) not in FAMILIES


def _has(told: bool | Told, config: ConfigReader) -> bool:
    return told if isinstance(told, bool) else config.take(told[0], bool, told[1])


def _with_names_in_files(architecture: Architecture, family: Family, config: ConfigReader, path: Path) -> Architecture:
    assert family.files is not None, "only for families with different files"
    names = names_in_files(stored_names(path), family.files)
    delta = read_delta_net(config, architecture.num_layers) if family.delta else None
    return replace(
        architecture,
        delta=delta,
        decoder_prefix=names.decoder,
        stacked_experts=names.stacked,
    )


def _with_vision(architecture: Architecture, whole: ConfigReader, path: Path) -> Architecture:
    family = FAMILIES[architecture.family]
    if family.tower is None or family.files is None:
        raise whole.error("model_type", f"one of {listed(TOWERS)}, since model.vision is set")
    prefix = names_in_files(stored_names(path), family.files).tower
    vision = read_vision(whole, family.tower, prefix, architecture.hidden_size, architecture.vocab_size)
    if len(vision.deepstack) > architecture.num_layers:
        raise whole.error("vision_config", f"at most {architecture.num_layers} deepstack_visual_indexes, one a layer")
    mrope = read_mrope(language_model(whole), architecture.rotated_size)
    return replace(architecture, vision=vision, mrope=mrope)


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
