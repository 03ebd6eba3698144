"""DeepSeek-V3: latent attention, shared experts, a router with a bias; Moonlight: the same, but its queries are made
from the hidden state. DeepSeek-V3's layer that predicts further tokens ahead (multi-token prediction) is left
out: it is neither trained nor served, and a checkpoint written here lacks it.

The engine's names are those of SGLang with shared experts kept apart from the others
(--disable-shared-experts-fusion).
"""

from dataclasses import replace

from rltrain.models.dense import INPUT_NORM, LLAMA, MLP, POST_ATTENTION_NORM
from rltrain.models.moe import EXPERTS, ROUTER, ROUTER_BIAS, SPARSE_MLP_NORM, shared_experts
from rltrain.models.table import CHECKPOINT_LAYER, Layer, Row, Table, in_layer

LATENT_NORM_EPS = 1e-6
"""DeepSeek's norms of latents have this whatever config.json says of the others, and so have those of transformers."""
FUSED_LATENTS = "self_attn.fused_qkv_a_proj_with_mqa.weight"

# Megatron's own layers split the projections to the latents, and gather what comes out; Transformer Engine's do not.
KV_LATENT = in_layer(
    ("self_attn.kv_a_proj_with_mqa.weight", "kv_rank_and_rope", "hidden"),
    megatron="self_attention.linear_kv_down_proj.weight",
    split_local="rows",
    quantizable=True,
)
LATENTS = (
    in_layer(
        ("self_attn.q_a_proj.weight", "q_rank", "hidden"),
        megatron="self_attention.linear_q_down_proj.weight",
        engine=FUSED_LATENTS,
        split_local="rows",
        quantizable=True,
    ),
    replace(KV_LATENT, engine=CHECKPOINT_LAYER + FUSED_LATENTS),
    in_layer(
        ("self_attn.q_a_layernorm.weight", "q_rank"),
        megatron="self_attention.q_layernorm.weight",
        megatron_te="self_attention.linear_q_up_proj.layer_norm_weight",
    ),
    in_layer(
        ("self_attn.q_b_proj.weight", "queries", "q_rank"),
        megatron="self_attention.linear_q_up_proj.weight",
        split="rows",
        quantizable=True,
    ),
)
KV_LATENT_AND_QUERIES = (
    KV_LATENT,
    in_layer(
        ("self_attn.q_proj.weight", "queries", "hidden"),
        megatron="self_attention.linear_q_proj.weight",
        split="rows",
        quantizable=True,
    ),
)
FROM_LATENTS = (
    in_layer(
        ("self_attn.kv_a_layernorm.weight", "kv_rank"),
        megatron="self_attention.kv_layernorm.weight",
        megatron_te="self_attention.linear_kv_up_proj.layer_norm_weight",
    ),
    in_layer(
        ("self_attn.kv_b_proj.weight", "keys_and_values", "kv_rank"),
        megatron="self_attention.linear_kv_up_proj.weight",
        split="rows",
        quantizable=True,
    ),
    in_layer(
        ("self_attn.o_proj.weight", "hidden", "values"),
        megatron="self_attention.linear_proj.weight",
        split="columns",
        quantizable=True,
    ),
)


def _family(queries_and_latents: tuple[Row, ...]) -> Table:
    attention = (replace(INPUT_NORM, megatron_te=None), *queries_and_latents, *FROM_LATENTS)
    return replace(
        LLAMA,
        dense=Layer((*attention, POST_ATTENTION_NORM, *MLP)),
        sparse=Layer(
            (*attention, SPARSE_MLP_NORM, ROUTER, ROUTER_BIAS, *shared_experts("mlp.shared_experts")), EXPERTS
        ),
    )


DEEPSEEK_V3 = _family(LATENTS)
MOONLIGHT = _family(KV_LATENT_AND_QUERIES)
