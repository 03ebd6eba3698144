"""The shape of a model, read from config.json. A key that changes the computation is used or refused."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from rltrain.errors import listed, one_of
from rltrain.models.config_file import ConfigReader
from rltrain.models.delta_net import (
    DECODER_PREFIX,
    DELTA_FAMILIES,
    DeltaNet,
    language_model,
    names_of_files,
    read_delta_net,
)
from rltrain.models.experts import READ_MOE, ExpertLayers, read_moe
from rltrain.models.rope_scaling import LAYER_TYPES, Scaling, YarnScaling, read_rope
from rltrain.models.table import CanonicalTensors, LayerKind, stored_names
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


# Families that are asked for and that nothing here trains, serves or converts, each with the reason.

INDEXED = "a token attends to those that an indexer of each layer chooses, which is learned by a loss of its own"
REFUSED_FAMILIES = {
    "gemma3": "its checkpoints hold a picture encoder beside the language model; those of gemma3_text hold that alone",
    "nemotron_h": "most layers are Mamba's, by whose rule nothing here keeps the state of a sample",
    **dict.fromkeys(("glm_moe_dsa", "deepseek_v32"), INDEXED),
    "mimo_v2_flash": "heads are of two sizes by layer, of which layouts know one",
}


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


# Layers of which a token attends to the last ones before it alone, and how config.json names them.


@dataclass(frozen=True)
class Windows:
    """A token of the layers that are marked in `layers` [layers] attends to `size` tokens, itself the last of them."""

    size: int
    layers: tuple[bool, ...]

    def of(self, layer: int) -> int | None:
        """The window of a layer; None where it has none."""
        return self.size if self.layers[layer] else None


MISTRAL_WINDOW = 4096  # what transformers assumes where the key is absent
BY_LAYER_WINDOW = {"gemma2": 4096, "gemma3_text": 4096, "gpt_oss": 128}
"""As much, of families whose layers differ."""
SWITCHED_FAMILIES = ("qwen2", "qwen3", "qwen2_moe", "qwen3_moe")
WINDOW_SWITCH = "use_sliding_window"
"""The key that turns on windows of those families."""
SWITCHED_WINDOW, FIRST_SWITCHED = 4096, 28
"""Of those families, what transformers assumes where sliding_window and max_window_layers are absent."""
PATTERN = {"gemma2": 2, "gemma3_text": 6, "gpt_oss": 2}  # of so many layers the last one attends to everything


def read_windows(config: ConfigReader, num_layers: int, max_positions: int) -> Windows | None:
    """None where no layer slides, or where a window holds all positions."""
    family = config.values["model_type"]
    if family in DELTA_FAMILIES:
        return None
    if family not in READ:
        if config.values.get("layer_types") and not config.are_all("layer_types", (LAYER_TYPES["full"],)):
            raise config.error("layer_types", "full_attention in every layer")
        return None
    windows = READ[family](config, num_layers)
    return windows if windows and windows.size < max_positions and any(windows.layers) else None


def _in_every_layer(absent: int | None) -> Callable[[ConfigReader, int], Windows | None]:
    """Of families whose layers all have a window, or none has; `absent` is what holds where the key is not there."""

    def read(config: ConfigReader, num_layers: int) -> Windows | None:
        size = config.count("sliding_window") if config.values.get("sliding_window") is not None else None
        size = absent if "sliding_window" not in config.values else size
        return None if size is None else Windows(size, (True,) * num_layers)

    return read


def _by_layer_types(config: ConfigReader, num_layers: int) -> Windows | None:
    family = config.values["model_type"]
    if config.values.get("sliding_window", BY_LAYER_WINDOW[family]) is None:
        return None
    layers = _named_layers(config, num_layers)
    if layers is None:
        pattern = config.count("sliding_window_pattern", default=PATTERN[family])
        layers = tuple((layer + 1) % pattern != 0 for layer in range(num_layers))
    return Windows(config.count("sliding_window", default=BY_LAYER_WINDOW[family]), layers)


def _switched(config: ConfigReader, num_layers: int) -> Windows | None:
    """Returns the windows of Qwen's families as transformers has them. layer_types names the layers, but in qwen3_moe,
    which has windows in all. Without it qwen2 and qwen3 have them from max_window_layers on, and qwen2_moe in every
    other layer before."""
    family, layers = config.values["model_type"], range(num_layers)
    size = None
    if config.take(WINDOW_SWITCH, bool, default=False):
        if config.values.get("sliding_window", SWITCHED_WINDOW) is None:
            raise config.error("sliding_window", f"an integer where {WINDOW_SWITCH} is true")
        size = config.count("sliding_window", default=SWITCHED_WINDOW)
    bound = config.take("max_window_layers", int, default=FIRST_SWITCHED)
    slides = tuple(layer >= bound for layer in layers)
    if family == "qwen2_moe":
        slides = tuple(layer < bound and layer % 2 == 0 for layer in layers)
    elif family == "qwen3_moe":
        slides = (True,) * num_layers
    named = _named_layers(config, num_layers)
    if named is not None and any(named) and size is None:
        raise config.error("layer_types", f"full_attention in every layer where {WINDOW_SWITCH} is not true")
    if named is not None and size is not None and family == "qwen3_moe" and named != slides:
        raise config.error("layer_types", "sliding_attention in every layer, as transformers has them in this family")
    return None if size is None else Windows(size, slides if named is None else named)


def _named_layers(config: ConfigReader, num_layers: int) -> tuple[bool, ...] | None:
    """Returns [layers] which slide by layer_types; None without it."""
    kinds = config.values.get("layer_types")
    if kinds is None:
        return None
    if not config.are_all("layer_types", LAYER_TYPES.values(), num_layers):
        raise config.error("layer_types", f"one of {listed(LAYER_TYPES.values())} for each of {num_layers} layers")
    return tuple(kind == LAYER_TYPES["sliding"] for kind in kinds)


READ = {
    **dict.fromkeys(SWITCHED_FAMILIES, _switched),
    "phi3": _in_every_layer(None),
    "mistral": _in_every_layer(MISTRAL_WINDOW),
    "mixtral": _in_every_layer(None),
    "gemma2": _by_layer_types,
    "gemma3_text": _by_layer_types,
    "gpt_oss": _by_layer_types,
}


# Keys of config.json that change the computation, and families in which that is not supported.

MLP_BIAS = "mlp_bias"
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
ATTENTION_BIAS = {"llama": False, "glm4": True, "glm4_moe": False, "seed_oss": True, "mimo": True, "gpt_oss": True}
ATTENTION_BIAS |= {"qwen3": False, "qwen3_moe": False}
"""Families of which some models have biases in the projections to heads: whether, where attention_bias is absent."""
OUTPUT_BIAS = {
    **dict.fromkeys(("llama", "qwen3", "qwen3_moe"), ("attention_bias", bool, False)),
    "seed_oss": ("attention_out_bias", bool, False),
    "gpt_oss": ("attention_bias", bool, True),
}
"""Families of which some have one on what attention adds to the hidden state too: the key that says so, its type, and
what holds where it is absent."""
BFLOAT16_HINT = "; its files in MXFP4 are not read, those in bfloat16 are (unsloth/gpt-oss-20b-BF16)"
GELU_TANH = "gelu_pytorch_tanh"
HIDDEN_ACT = {
    "gemma": ("hidden_act", GELU_TANH, "gelu"),
    "gemma2": ("hidden_activation", GELU_TANH),
    "gemma3_text": ("hidden_activation", GELU_TANH),
    "nemotron": ("hidden_act", "relu2"),
}
"""Key and values of the activation of families that have another one than hidden_act silu: Gemma's own files say gelu
and mean that by tanh, as transformers takes it."""
SOFTCAPS = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}
"""Of Gemma 2's scores and logits, with what transformers assumes where the key is absent."""
SUPPORTED = {MLP_BIAS: ("llama",), WINDOW_SWITCH: SWITCHED_FAMILIES, **dict.fromkeys(SOFTCAPS, ("gemma2",))}
"""Families that have some of UNSUPPORTED all the same, by key."""


def refuse_unsupported(config: ConfigReader, family: str) -> None:
    """Raises CheckpointError where a key has a value that the family is not supported with."""
    for key, off in UNSUPPORTED.items():
        if config.values.get(key) not in off and family not in SUPPORTED.get(key, ()):
            hint = BFLOAT16_HINT if (family, key) == ("gpt_oss", "quantization_config") else ""
            raise config.error(key, f"{off[0]!r}: nothing else is supported for {family}{hint}")
    key, *values = HIDDEN_ACT.get(family, ("hidden_act", "silu"))
    if config.values.get(key) not in (*values, None):
        raise config.error(key, f"{values[0]}: nothing else is supported for {family}")
    if config.take("attention_bias", bool, default=False) and family not in ATTENTION_BIAS:
        raise config.error("attention_bias", f"False: nothing else is supported for {family}")


# The shape of a model, read from the config.json of a Hugging Face checkpoint.

FAMILIES = (
    "llama", "mistral", "qwen2", "qwen3", "phi3", "glm4", "gemma", "gemma2", "gemma3_text", "seed_oss", "mimo",
    "nemotron",
    "qwen2_moe", "qwen3_moe", "mixtral", "deepseek_v3", "kimi_k2", "glm4_moe", "glm4_moe_lite", "minimax_m2",
    "hy_v3", "gpt_oss", *DELTA_FAMILIES,
)  # fmt: skip
CONFIG_FILE = "config.json"
Head = Literal["vocabulary", "value"]
"""What stands on top of a model: a logit per token of the vocabulary, or one value."""
Activation = Literal["silu", "gelu_tanh", "clamped_swish", "relu_squared"]
"""Of the gate of an MLP; GELU by its approximation with tanh, gpt-oss's as models.clamped_swiglu has it. The square of
ReLU is of MLPs that have no gate."""

HEAD_DIM = {"gpt_oss": 64, **dict.fromkeys(("qwen3", "seed_oss", "minimax_m2", "hy_v3"), 128)}
HEAD_DIM |= dict.fromkeys(("gemma", "gemma2", "gemma3_text", *DELTA_FAMILIES), 256)
"""Of families whose heads have a width of their own, what transformers assumes where the key is absent."""
GEMMA_FAMILIES = ("gemma", "gemma2", "gemma3_text")
TIED_UNLESS_TOLD = GEMMA_FAMILIES
QK_NORM_FAMILIES = ("qwen3", "qwen3_moe", "gemma3_text", "minimax_m2", "hy_v3", *DELTA_FAMILIES)
LATENT_FAMILIES = ("deepseek_v3", "kimi_k2", "glm4_moe_lite")
QKV_BIAS_FAMILIES = ("qwen2", "mimo")
"""Families whose queries, keys and values all have a bias, whatever config.json says."""

GEMMA_QUERY_SCALAR = 256  # what transformers assumes where the key is absent


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
    family = str(reader.values.get("model_type"))
    if family in REFUSED_FAMILIES:
        raise reader.error("model_type", f"one of {listed(FAMILIES)}: {REFUSED_FAMILIES[family]}")
    if family not in FAMILIES:
        raise reader.error("model_type", one_of(family, FAMILIES))
    reader = language_model(reader)
    refuse_unsupported(reader, family)
    attention_bias = reader.take("attention_bias", bool, default=ATTENTION_BIAS.get(family, False))
    num_heads, hidden_size = reader.count("num_attention_heads"), reader.count("hidden_size")
    num_kv_heads = reader.count("num_key_value_heads", default=num_heads)
    if num_heads % num_kv_heads:
        raise reader.error("num_key_value_heads", f"a divisor of num_attention_heads = {num_heads}")
    num_layers, vocab_size = reader.count("num_hidden_layers"), reader.count("vocab_size")
    check_padding(reader, vocab_size)
    mla = read_mla(reader) if family in LATENT_FAMILIES else None
    head_dim = HEAD_DIM.get(family, hidden_size // num_heads)
    head_dim = mla.plain_head_dim + mla.rope_head_dim if mla else reader.count("head_dim", default=head_dim)
    rope = read_rope(reader, head_dim)
    architecture = Architecture(
        family=family,
        num_layers=num_layers,
        hidden_size=hidden_size,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        ffn_hidden_size=reader.count("intermediate_size", default=_ffn_hidden_size(reader, family)),
        vocab_size=vocab_size,
        tied_embeddings=reader.take("tie_word_embeddings", bool, default=family in TIED_UNLESS_TOLD),
        qkv_bias=family in QKV_BIAS_FAMILIES or attention_bias or _has_qkv_bias(reader, family),
        qk_norm=family in QK_NORM_FAMILIES or reader.take("use_qk_norm", bool, default=False),
        norm_eps=reader.take("norm_eps" if family == "nemotron" else "rms_norm_eps", float),
        rope_theta=rope.theta,
        rope_scaling=rope.scaling,
        max_positions=rope.max_positions,
        eos_token_ids=read_eos(path, reader, vocab_size),
        moe=read_moe(reader, num_layers) if family in READ_MOE else None,
        mla=mla,
        output_bias=family in OUTPUT_BIAS and reader.take(*OUTPUT_BIAS[family]),
        mlp_bias=family in SUPPORTED[MLP_BIAS] and reader.take(MLP_BIAS, bool, default=False),
        rotary_dim=rope.rotated,
        windows=read_windows(reader, num_layers, rope.max_positions),
        sliding_rope_theta=rope.sliding_theta,
        post_norms=family == "glm4",
        rotates_pairs=family == "glm4",
        norms_projections=family == "minimax_m2",
        attention_sinks=family == "gpt_oss",
        activation="clamped_swish" if family == "gpt_oss" else "silu",
    )
    if family in DELTA_FAMILIES:
        return _with_delta_nets(architecture, reader, path)
    if family == "nemotron":
        return replace(architecture, activation="relu_squared", norm_offset=1.0, norm_bias=True)
    return _gemma(architecture, reader) if family in GEMMA_FAMILIES else architecture


def _ffn_hidden_size(config: ConfigReader, family: str) -> int | None:
    """Of families without a layer that has no experts, whose configs need not say it."""
    return config.count("moe_intermediate_size") if family.startswith("qwen3_5_moe") else None


def _with_delta_nets(architecture: Architecture, config: ConfigReader, path: Path) -> Architecture:
    prefix, stacked = names_of_files(architecture.family, stored_names(path))
    return replace(
        architecture,
        norm_offset=1.0,
        delta=read_delta_net(config, architecture.num_layers),
        gated_attention=True,
        decoder_prefix=prefix,
        stacked_experts=stacked,
    )


def is_unlisted(path: Path) -> bool:
    """Whether `path`/config.json names a family without a table."""
    try:
        family = read_json(path / CONFIG_FILE)["model_type"]
    except (OSError, ValueError, KeyError, TypeError):
        return False
    return family not in FAMILIES


def _has_qkv_bias(config: ConfigReader, family: str) -> bool:
    return family == "qwen2_moe" and config.take("qkv_bias", bool, default=True)


def _gemma(architecture: Architecture, config: ConfigReader) -> Architecture:
    """With what Gemma has in all sizes, and Gemma 2 and 3 besides."""
    scaled = replace(
        architecture, activation="gelu_tanh", norm_offset=1.0, embedding_scale=architecture.hidden_size**0.5
    )
    if architecture.family == "gemma":
        return scaled
    scalar = config.take("query_pre_attn_scalar", float, float(GEMMA_QUERY_SCALAR))
    if not scalar > 0:
        raise config.error("query_pre_attn_scalar", "a number above 0")
    normed = replace(scaled, attention_scale=scalar**-0.5, post_norms=True)
    if architecture.family == "gemma3_text":
        return normed
    of_scores, of_logits = (_softcap(config, key) for key in SOFTCAPS)
    return replace(normed, attention_softcap=of_scores, logits_softcap=of_logits)


def _softcap(config: ConfigReader, key: str) -> float | None:
    if key in config.values and config.values[key] is None:
        return None
    cap = config.take(key, float, SOFTCAPS[key])
    if cap <= 0:
        raise config.error(key, "a number above 0, or null")
    return cap
