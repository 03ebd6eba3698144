"""Keys of config.json that change the computation, and families in which that is not supported."""

from rltrain.models.config_file import ConfigReader
from rltrain.models.windows import SWITCHED_FAMILIES, WINDOW_SWITCH

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
