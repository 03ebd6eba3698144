"""Every family of models in one row: its tensors, how its config.json reads, and what cannot be done with it.

A family whose shape another has takes one row. What has no column is told by the row's functions and tables.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from rltrain.models.config_file import ConfigReader
from rltrain.models.delta_net import QWEN3_5, QWEN3_NEXT
from rltrain.models.experts import (
    ExpertLayers,
    read_deepseek_v3,
    read_gpt_oss,
    read_hy_v3,
    read_minimax_m2,
    read_mixtral,
    read_qwen2_moe,
    read_qwen3_5_moe,
    read_qwen3_moe,
)
from rltrain.models.families import (
    DEEPSEEK_V3,
    GEMMA2,
    GLM4,
    GLM4_MOE,
    GPT_OSS,
    HY_V3,
    LLAMA,
    MINIMAX_M2,
    MIXTRAL,
    NEMOTRON,
    PHI3,
    QWEN2_MOE,
    QWEN3_MOE,
)
from rltrain.models.prediction import DEEPSEEK_PREDICTION, MIMO_PREDICTION, QWEN3_NEXT_PREDICTION, PredictionNames
from rltrain.models.table import Table
from rltrain.models.windows import WINDOW_SWITCH, ReadWindows, by_layer_types, in_every_layer, switched

Activation = Literal["silu", "gelu_tanh", "clamped_swish", "relu_squared"]
"""Of the gate of an MLP; GELU by its approximation with tanh, gpt-oss's as models.clamped_swiglu has it. The square of
ReLU is of MLPs that have no gate."""
Told = tuple[str, bool]
"""A key of config.json that says whether there is something, and what holds where it is absent."""

MLP_BIAS = "mlp_bias"
SOFTCAPS = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}
"""Of Gemma 2's scores and logits, with what transformers assumes where the key is absent."""


@dataclass(frozen=True)
class Family:
    """What models of one family have in common. Where a key of config.json may be absent, a column has what
    transformers assumes then."""

    table: Table
    """Its tensors, in every format."""
    head_dim: int | None = None
    """Of heads whose width is their own, and not a part of the hidden size."""
    ties_embeddings: bool = False
    qk_norm: bool = False
    """Queries and keys are normed, whatever config.json says."""
    qkv_bias: bool | Told = False
    """Queries, keys and values have a bias."""
    attention_bias: bool | None = None
    """Whether they have one where attention_bias is absent; None: that key may not ask for any."""
    output_bias: bool | Told = False
    """What attention adds to the hidden state has a bias."""
    norm_eps: str = "rms_norm_eps"
    """The key of config.json."""
    ffn_key: str | None = None
    """The key that tells the width of an MLP where intermediate_size is absent: no layer is without experts."""
    activation: tuple[str, ...] = ("hidden_act", "silu")
    """Its key and values: Gemma's own files say gelu and mean that by tanh, as transformers takes it."""
    has: tuple[str, ...] = ()
    """Keys that ask for what other families are not supported with."""
    quantized_hint: str = ""
    """What the refusal of quantised files says besides."""
    latent: bool = False
    """Attention is latent."""
    windows: ReadWindows | None = None
    experts: Callable[[ConfigReader, int], ExpertLayers] | None = None
    """What reads them from config.json, given the number of layers."""
    chooses_by_bias: bool = False
    """Routers have a bias that no gradient moves."""
    delta: bool = False
    """Most layers are gated delta nets in attention's place."""
    nested: str | None = None
    """The key under which config.json has the language model, beside that of what encodes pictures."""
    prediction: PredictionNames | None = None
    """The layer that predicts a further token and is trained; None: its files have none, or it is left as it is."""
    theta: float = 10_000.0
    """The base of rotary frequencies."""
    sliding_theta: float | None = None
    """That of layers that slide, where they have one of their own."""
    partial_rotary: float | None = None
    """The part of a head that is rotated; None: all of it, whatever config.json says."""
    rope_kinds: tuple[str, ...] = ("default", "linear", "dynamic", "yarn", "llama3")
    """Scalings of rotary frequencies that are supported."""
    assumes_scaling: bool = False
    """transformers assumes a scaling where config.json has none."""
    original_positions: int | None = None
    """What transformers' config class has beside the scaling, where config.json has nothing."""
    query_scalar: float | None = None
    """Scores are divided by the root of query_pre_attn_scalar, and not by that of the width of heads."""
    scales_embeddings: bool = False
    """Embeddings are multiplied by the root of the hidden size."""
    shape: Mapping[str, Any] = field(default_factory=dict)
    """Further values of its Architecture."""
    carried: tuple[str, ...] = ()
    """What begins the names of tensors that its files hold beside the language model, whatever config.json counts."""
    built_as: str | None = None
    """The family of which transformers has the same model, where it does not have this one."""
    sglang: bool = False
    """SGLang is given weights of it."""
    tells_samples: bool = True
    """Attention in transformers is told which tokens are of one sample, without which backend fsdp cannot pack them."""


SWITCHED = Family(LLAMA, windows=switched, has=(WINDOW_SWITCH,), sglang=True)
GPT_OSS_BFLOAT16 = "; its files in MXFP4 are not read, those in bfloat16 are (unsloth/gpt-oss-20b-BF16)"
GELU_TANH = "gelu_pytorch_tanh"
GEMMA = Family(
    LLAMA,
    head_dim=256,
    ties_embeddings=True,
    activation=("hidden_act", GELU_TANH, "gelu"),
    scales_embeddings=True,
    shape={"activation": "gelu_tanh", "norm_offset": 1.0},
)
GEMMA_2 = replace(
    GEMMA,
    table=GEMMA2,
    activation=("hidden_activation", GELU_TANH),
    has=tuple(SOFTCAPS),
    windows=by_layer_types(4096, 2),
    query_scalar=256.0,
    shape={**GEMMA.shape, "post_norms": True},
)
DEEPSEEK = Family(DEEPSEEK_V3, latent=True, experts=read_deepseek_v3, chooses_by_bias=True)
DELTA = Family(
    QWEN3_5,
    head_dim=256,
    qk_norm=True,
    delta=True,
    prediction=QWEN3_NEXT_PREDICTION,
    partial_rotary=0.25,
    shape={"norm_offset": 1.0, "gated_attention": True},
    carried=("mtp.",),
)
NESTED: dict[str, Any] = {"nested": "text_config", "carried": ("mtp.", "model.visual.")}
DELTA_MOE = replace(DELTA, experts=read_qwen3_5_moe, ffn_key="moe_intermediate_size")

FAMILIES = {
    "llama": Family(LLAMA, attention_bias=False, output_bias=("attention_bias", False), has=(MLP_BIAS,), sglang=True),
    "mistral": Family(LLAMA, windows=in_every_layer(4096), sglang=True),
    "qwen2": replace(SWITCHED, qkv_bias=True),
    "qwen3": replace(SWITCHED, head_dim=128, qk_norm=True, attention_bias=False, output_bias=("attention_bias", False)),
    "phi3": Family(
        PHI3,
        windows=in_every_layer(None),
        partial_rotary=1.0,
        rope_kinds=("default", "longrope"),
        original_positions=4096,
    ),
    "glm4": Family(GLM4, attention_bias=True, partial_rotary=0.5, shape={"post_norms": True, "rotates_pairs": True}),
    "gemma": GEMMA,
    "gemma2": GEMMA_2,
    "gemma3_text": replace(
        GEMMA_2,
        qk_norm=True,
        has=(),
        windows=by_layer_types(4096, 6),
        theta=1_000_000.0,
        sliding_theta=10_000.0,
        rope_kinds=("default", "linear"),
    ),
    "seed_oss": Family(LLAMA, head_dim=128, attention_bias=True, output_bias=("attention_out_bias", False)),
    "mimo": Family(LLAMA, qkv_bias=True, attention_bias=True, prediction=MIMO_PREDICTION, built_as="qwen2"),
    "nemotron": Family(
        NEMOTRON,
        norm_eps="norm_eps",
        activation=("hidden_act", "relu2"),
        partial_rotary=0.5,
        shape={"activation": "relu_squared", "norm_offset": 1.0, "norm_bias": True},
        tells_samples=False,
    ),
    "qwen2_moe": replace(SWITCHED, table=QWEN2_MOE, qkv_bias=("qkv_bias", True), experts=read_qwen2_moe, sglang=False),
    "qwen3_moe": replace(
        SWITCHED,
        table=QWEN3_MOE,
        qk_norm=True,
        attention_bias=False,
        output_bias=("attention_bias", False),
        experts=read_qwen3_moe,
    ),
    "mixtral": Family(MIXTRAL, windows=in_every_layer(None), experts=read_mixtral, sglang=True),
    "deepseek_v3": replace(DEEPSEEK, prediction=DEEPSEEK_PREDICTION),
    "kimi_k2": DEEPSEEK,
    "glm4_moe": Family(
        GLM4_MOE,
        attention_bias=False,
        experts=read_deepseek_v3,
        chooses_by_bias=True,
        prediction=DEEPSEEK_PREDICTION,
        partial_rotary=0.5,
    ),
    "glm4_moe_lite": replace(DEEPSEEK, prediction=DEEPSEEK_PREDICTION),
    "minimax_m2": Family(
        MINIMAX_M2,
        head_dim=128,
        qk_norm=True,
        experts=read_minimax_m2,
        chooses_by_bias=True,
        theta=5_000_000.0,
        partial_rotary=1.0,
        shape={"norms_projections": True},
    ),
    "hy_v3": Family(HY_V3, head_dim=128, qk_norm=True, experts=read_hy_v3, chooses_by_bias=True, theta=11_158_840.0),
    "gpt_oss": Family(
        GPT_OSS,
        head_dim=64,
        attention_bias=True,
        output_bias=("attention_bias", True),
        quantized_hint=GPT_OSS_BFLOAT16,
        windows=by_layer_types(128, 2),
        experts=read_gpt_oss,
        theta=150_000.0,
        assumes_scaling=True,
        shape={"attention_sinks": True, "activation": "clamped_swish"},
    ),
    "qwen3_next": replace(DELTA, table=QWEN3_NEXT, experts=read_qwen2_moe),
    "qwen3_5": replace(DELTA, **NESTED),
    "qwen3_5_text": DELTA,
    "qwen3_5_moe": replace(DELTA_MOE, **NESTED),
    "qwen3_5_moe_text": DELTA_MOE,
}
PREDICTIONS = {name: family.prediction for name, family in FAMILIES.items() if family.prediction}
SERVED_BY_SGLANG = tuple(name for name, family in FAMILIES.items() if family.sglang)
UNTOLD_FAMILIES = tuple(name for name, family in FAMILIES.items() if not family.tells_samples)
BIASED_ROUTERS = tuple(name for name, family in FAMILIES.items() if family.chooses_by_bias)

# Families that are asked for and that nothing here trains, serves or converts, each with the reason.

INDEXED = "a token attends to those that an indexer of each layer chooses, which is learned by a loss of its own"
REFUSED_FAMILIES = {
    "gemma3": "its checkpoints hold a picture encoder beside the language model; those of gemma3_text hold that alone",
    "nemotron_h": "most layers are Mamba's, by whose rule nothing here keeps the state of a sample",
    **dict.fromkeys(("glm_moe_dsa", "deepseek_v32"), INDEXED),
    "mimo_v2_flash": "heads are of two sizes by layer, of which layouts know one",
}
