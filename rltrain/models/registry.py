"""All model families, one row each: tensors, the reading of config.json, and limitations.

A family of known shape is one row. Functions and tables in the row cover the rest.
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
    read_qwen3_vl_moe,
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
from rltrain.models.table import NESTED_PREFIX, TOWER_PREFIX, NamesInFiles, Table
from rltrain.models.vision import MRope, Tower
from rltrain.models.vision_tables import QWEN2_5_VL_TOWER, QWEN3_VL_TOWER
from rltrain.models.windows import WINDOW_SWITCH, ReadWindows, by_layer_types, in_every_layer, switched

Activation = Literal["silu", "gelu_tanh", "clamped_swish", "relu_squared"]
"""The activation of an MLP's gate. GELU is the tanh approximation. clamped_swish is gpt-oss's
(models.products.clamped_swiglu). relu_squared belongs to MLPs without gates."""
Told = tuple[str, bool]
"""A key of config.json for a feature, and its value if the key is absent."""

MROPE_KINDS = ("default", "mrope", "linear", "yarn", "llama3")
"""Scalings of rotary embeddings with three positions. "mrope" means none."""
MLP_BIAS = "mlp_bias"
SOFTCAPS = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}
"""Keys of Gemma 2's soft caps on scores and logits, with the defaults of transformers."""


@dataclass(frozen=True)
class InSGLang:
    """What SGLang does with a family.

    Weights go one of two ways. "direct" writes them in place into SGLang's fused parameters. "names" gives SGLang's own
    loader whole tensors of the checkpoint by their names.
    """

    way: Literal["direct", "names"] = "names"
    windows: bool = False
    """True if its attention heeds windows."""
    needs_gpu: bool = False
    """True if its class computes only on GPUs."""
    fp8: bool = True
    """False if its loader drops the scales of FP8 blocks."""
    config: Mapping[str, Any] = field(default_factory=dict)
    """Keys of config.json that SGLang reads and transformers leaves out, with the values of this family. None follows
    from the model."""


FIRST_DENSE, PARTIAL_ROTARY = "first_k_dense_replace", "partial_rotary_factor"
FULL_ATTENTION_INTERVAL = "full_attention_interval"
DIRECT, BY_NAMES = InSGLang("direct"), InSGLang()


@dataclass(frozen=True)
class Family:
    """The properties of one family. For absent keys of config.json, a field has the default of transformers."""

    table: Table
    """Its tensors, in every format."""
    head_dim: int | None = None
    """The default head size, if it is not hidden_size / num_heads."""
    ties_embeddings: bool = False
    qk_norm: bool = False
    """True if queries and keys have norms, regardless of config.json."""
    qkv_bias: bool | Told = False
    """A bias of queries, keys and values."""
    attention_bias: bool | None = None
    """The default of the key attention_bias. None refuses a true value."""
    output_bias: bool | Told = False
    """A bias on the output of attention."""
    norm_eps: str = "rms_norm_eps"
    """The key of the norms' epsilon."""
    ffn_key: str | None = None
    """The key of an MLP's width if intermediate_size is absent, for families with experts in all layers."""
    activation: tuple[str, ...] = ("hidden_act", "silu")
    """The key of the activation and its allowed values. Gemma's files say gelu but mean the tanh approximation, as in
    transformers."""
    has: tuple[str, ...] = ()
    """Keys of features that other families do not support."""
    quantized_hint: str = ""
    """Additional text of the error about quantised files."""
    latent: bool = False
    """True for multi-head latent attention."""
    windows: ReadWindows | None = None
    experts: Callable[[ConfigReader, int], ExpertLayers] | None = None
    """Reads the experts from config.json and the number of layers."""
    chooses_by_bias: bool = False
    """True if routers have a bias without a gradient."""
    delta: bool = False
    """True if most layers have gated delta nets instead of attention."""
    nested: str | None = None
    """The key of the language model in config.json, for checkpoints with a vision tower."""
    nested_optional: bool = False
    """True if the keys of the language model can also be outside `nested`."""
    files: NamesInFiles | None = None
    """The names in published files, if they differ between files. Otherwise None."""
    turns_experts: bool = False
    """True if published files have the matrices of stacked experts transposed."""
    tower: Tower | None = None
    """The kind of its vision tower."""
    mrope: MRope | None = None
    """The default of rotary embeddings with three positions of a token."""
    prediction: PredictionNames | None = None
    """The trainable layer for multi-token prediction. None if the files have none or it is not trained."""
    theta: float = 10_000.0
    """The base of rotary frequencies."""
    sliding_theta: float | None = None
    """The rotary base of sliding layers, if they have another."""
    partial_rotary: float | None = None
    """The fraction of a head that is rotated. None means all of it, regardless of config.json."""
    rope_kinds: tuple[str, ...] = ("default", "linear", "dynamic", "yarn", "llama3")
    """Supported scalings of rotary frequencies."""
    assumes_scaling: bool = False
    """True if transformers assumes a scaling by default."""
    original_positions: int | None = None
    """The default of original_max_position_embeddings outside the scaling."""
    query_scalar: float | None = None
    """The default of query_pre_attn_scalar. Its root divides the scores instead of the root of the head size."""
    scales_embeddings: bool = False
    """True if embeddings are multiplied by the root of the hidden size."""
    shape: Mapping[str, Any] = field(default_factory=dict)
    """Further fields of its Architecture."""
    carried: tuple[str, ...] = ()
    """Prefixes of tensors in the files outside the language model. config.json does not count them."""
    built_as: str | None = None
    """The family with the same model in transformers, if transformers lacks this one."""
    sglang: InSGLang | None = None
    """None if SGLang does not serve the family."""
    tells_samples: bool = True
    """True if attention in transformers can separate packed samples. Backend fsdp needs this for packing."""


SWITCHED = Family(LLAMA, windows=switched, has=(WINDOW_SWITCH,), sglang=DIRECT)
GPT_OSS_BFLOAT16 = "; MXFP4 files are not supported, use bfloat16 files (unsloth/gpt-oss-20b-BF16)"
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
    sglang=InSGLang(windows=True, needs_gpu=True, config={"hidden_act": GELU_TANH}),
)
DEEPSEEK = Family(
    DEEPSEEK_V3,
    latent=True,
    experts=read_deepseek_v3,
    chooses_by_bias=True,
    sglang=InSGLang(needs_gpu=True, config={"moe_layer_freq": 1, "topk_method": "noaux_tc", "scoring_func": "sigmoid"}),
)
DELTA = Family(
    QWEN3_5,
    head_dim=256,
    qk_norm=True,
    delta=True,
    prediction=QWEN3_NEXT_PREDICTION,
    partial_rotary=0.25,
    shape={"norm_offset": 1.0, "gated_attention": True},
    carried=("mtp.",),
    files=NamesInFiles(),
    sglang=InSGLang(needs_gpu=True, config={FULL_ATTENTION_INTERVAL: None}),
)
DELTA_MOE = replace(DELTA, experts=read_qwen3_5_moe, ffn_key="moe_intermediate_size")
WITH_TOWER: dict[str, Any] = {
    "nested": "text_config",
    "table": replace(QWEN3_5, vision=QWEN3_VL_TOWER),
    "mrope": MRope((11, 11, 10), interleaved=True),
    "carried": ("mtp.", "model.visual."),
}
QWEN3_VL = Family(
    replace(LLAMA, vision=QWEN3_VL_TOWER),
    head_dim=128,
    qk_norm=True,
    attention_bias=False,
    output_bias=("attention_bias", False),
    nested="text_config",
    files=NamesInFiles(NESTED_PREFIX),
    tower="qwen3_vl",
    mrope=MRope((24, 20, 20), interleaved=True),
    theta=500_000.0,
    rope_kinds=MROPE_KINDS,
    carried=("model.visual.",),
    built_as="qwen3",
    sglang=DIRECT,
)

FAMILIES = {
    "llama": Family(LLAMA, attention_bias=False, output_bias=("attention_bias", False), has=(MLP_BIAS,), sglang=DIRECT),
    "mistral": Family(LLAMA, windows=in_every_layer(4096), sglang=DIRECT),
    "qwen2": replace(SWITCHED, qkv_bias=True),
    "qwen3": replace(SWITCHED, head_dim=128, qk_norm=True, attention_bias=False, output_bias=("attention_bias", False)),
    "phi3": Family(
        PHI3,
        windows=in_every_layer(None),
        partial_rotary=1.0,
        rope_kinds=("default", "longrope"),
        original_positions=4096,
        sglang=InSGLang(fp8=False, config={PARTIAL_ROTARY: None}),
    ),
    "glm4": Family(
        GLM4,
        attention_bias=True,
        partial_rotary=0.5,
        shape={"post_norms": True, "rotates_pairs": True},
        sglang=BY_NAMES,
    ),
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
        sglang=InSGLang(windows=True),
    ),
    "seed_oss": Family(
        LLAMA, head_dim=128, attention_bias=True, output_bias=("attention_out_bias", False), sglang=BY_NAMES
    ),
    "mimo": Family(
        LLAMA,
        qkv_bias=True,
        attention_bias=True,
        prediction=MIMO_PREDICTION,
        built_as="qwen2",
        sglang=BY_NAMES,
    ),
    "nemotron": Family(
        NEMOTRON,
        norm_eps="norm_eps",
        activation=("hidden_act", "relu2"),
        partial_rotary=0.5,
        shape={"activation": "relu_squared", "norm_offset": 1.0, "norm_bias": True},
        tells_samples=False,
    ),
    "qwen2_moe": replace(
        SWITCHED,
        table=QWEN2_MOE,
        qkv_bias=("qkv_bias", True),
        experts=read_qwen2_moe,
        sglang=InSGLang(needs_gpu=True),
    ),
    "qwen3_moe": replace(
        SWITCHED,
        table=QWEN3_MOE,
        qk_norm=True,
        attention_bias=False,
        output_bias=("attention_bias", False),
        experts=read_qwen3_moe,
    ),
    "mixtral": Family(MIXTRAL, windows=in_every_layer(None), experts=read_mixtral, sglang=DIRECT),
    "deepseek_v3": replace(DEEPSEEK, prediction=DEEPSEEK_PREDICTION),
    "kimi_k2": DEEPSEEK,
    "glm4_moe": Family(
        GLM4_MOE,
        attention_bias=False,
        experts=read_deepseek_v3,
        chooses_by_bias=True,
        prediction=DEEPSEEK_PREDICTION,
        partial_rotary=0.5,
        sglang=BY_NAMES,
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
        sglang=InSGLang(
            needs_gpu=True, config={"scoring_func": "sigmoid", "use_routing_bias": True, "use_qk_norm": True}
        ),
    ),
    "hy_v3": Family(
        HY_V3,
        head_dim=128,
        qk_norm=True,
        experts=read_hy_v3,
        chooses_by_bias=True,
        theta=11_158_840.0,
        sglang=InSGLang(config={"route_norm": True, "qk_norm": True, FIRST_DENSE: None}),
    ),
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
        sglang=InSGLang(windows=True, needs_gpu=True),
    ),
    "qwen3_next": replace(DELTA, table=QWEN3_NEXT, experts=read_qwen2_moe),
    "qwen3_5": replace(DELTA, tower="qwen3_5", files=NamesInFiles(NESTED_PREFIX), **WITH_TOWER),
    "qwen3_5_text": DELTA,
    "qwen3_5_moe": replace(
        DELTA_MOE, tower="qwen3_5_moe", files=NamesInFiles(NESTED_PREFIX, stacked=True), **WITH_TOWER
    ),
    "qwen3_5_moe_text": DELTA_MOE,
    "qwen2_5_vl": replace(
        SWITCHED,
        table=replace(LLAMA, vision=QWEN2_5_VL_TOWER),
        qkv_bias=True,
        nested="text_config",
        nested_optional=True,
        files=NamesInFiles(tower=TOWER_PREFIX),
        tower="qwen2_5_vl",
        mrope=MRope((16, 24, 24), interleaved=False),
        theta=1_000_000.0,
        rope_kinds=MROPE_KINDS,
        carried=("visual.", "model.visual."),
        built_as="qwen2",
    ),
    "qwen3_vl": QWEN3_VL,
    "qwen3_vl_moe": replace(
        QWEN3_VL,
        table=replace(QWEN3_MOE, vision=QWEN3_VL_TOWER),
        head_dim=None,
        ffn_key="moe_intermediate_size",
        files=NamesInFiles(NESTED_PREFIX, stacked=True),
        turns_experts=True,
        tower="qwen3_vl_moe",
        experts=read_qwen3_vl_moe,
        built_as="qwen3_moe",
    ),
}
PREDICTIONS = {name: family.prediction for name, family in FAMILIES.items() if family.prediction}
TOWERS = tuple(name for name, family in FAMILIES.items() if family.tower)
"""Families with a vision tower."""
TURNED = tuple(name for name, family in FAMILIES.items() if family.turns_experts)
SERVED_BY_SGLANG = tuple(name for name, family in FAMILIES.items() if family.sglang)
BY_NAMES_IN_SGLANG = tuple(name for name, family in FAMILIES.items() if family.sglang and family.sglang.way == "names")
UNTOLD_FAMILIES = tuple(name for name, family in FAMILIES.items() if not family.tells_samples)
BIASED_ROUTERS = tuple(name for name, family in FAMILIES.items() if family.chooses_by_bias)

# Known families without support, each with the reason.

INDEXED = "an indexer of each layer selects the attended tokens, and it needs a separate training loss"
REFUSED_FAMILIES = {
    "gemma3": "its checkpoints contain an image encoder; checkpoints of gemma3_text have only the language model",
    "nemotron_h": "most layers are Mamba layers, and rltrain cannot keep their state",
    **dict.fromkeys(("glm_moe_dsa", "deepseek_v32"), INDEXED),
    "mimo_v2_flash": "its layers have heads of two sizes, but layouts support only one size",
}
