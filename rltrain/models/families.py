"""The tables of all families, except for those with gated delta nets."""

from dataclasses import replace

from rltrain.models.table import CHECKPOINT_LAYER, Layer, Part, Row, Split, Table, in_layer

# Dense families. Other families share many of their rows.

INPUT_NORM = in_layer(
    ("input_layernorm.weight", "hidden"),
    megatron="input_layernorm.weight",
    megatron_te="self_attention.linear_qkv.layer_norm_weight",
)
QKV = in_layer(
    ("self_attn.q_proj.weight", "queries", "hidden"),
    ("self_attn.k_proj.weight", "keys", "hidden"),
    ("self_attn.v_proj.weight", "keys", "hidden"),
    megatron="self_attention.linear_qkv.weight",
    engine="self_attn.qkv_proj.weight",
    split="qkv",
    quantizable=True,
)
ATTENTION_OUTPUT = in_layer(
    ("self_attn.o_proj.weight", "hidden", "queries"),
    megatron="self_attention.linear_proj.weight",
    split="columns",
    quantizable=True,
)
POST_ATTENTION_NORM = in_layer(
    ("post_attention_layernorm.weight", "hidden"),
    megatron="pre_mlp_layernorm.weight",
    megatron_te="mlp.linear_fc1.layer_norm_weight",
)
MLP = (
    in_layer(
        ("mlp.gate_proj.weight", "ffn", "hidden"),
        ("mlp.up_proj.weight", "ffn", "hidden"),
        megatron="mlp.linear_fc1.weight",
        engine="mlp.gate_up_proj.weight",
        split="rows",
        quantizable=True,
    ),
    in_layer(
        ("mlp.down_proj.weight", "hidden", "ffn"),
        megatron="mlp.linear_fc2.weight",
        split="columns",
        quantizable=True,
    ),
)
QKV_BIAS = in_layer(
    ("self_attn.q_proj.bias", "queries"),
    ("self_attn.k_proj.bias", "keys"),
    ("self_attn.v_proj.bias", "keys"),
    megatron="self_attention.linear_qkv.bias",
    engine="self_attn.qkv_proj.bias",
    split="qkv",
)
MLP_BIASES = (
    in_layer(
        ("mlp.gate_proj.bias", "ffn"),
        ("mlp.up_proj.bias", "ffn"),
        megatron="mlp.linear_fc1.bias",
        engine="mlp.gate_up_proj.bias",
        split="rows",
    ),
    in_layer(("mlp.down_proj.bias", "hidden"), megatron="mlp.linear_fc2.bias"),
)
OUTPUT_BIAS = in_layer(("self_attn.o_proj.bias", "hidden"), megatron="self_attention.linear_proj.bias")
QK_NORMS = (
    in_layer(("self_attn.q_norm.weight", "head"), megatron="self_attention.q_layernorm.weight"),
    in_layer(("self_attn.k_norm.weight", "head"), megatron="self_attention.k_layernorm.weight"),
)
# Every tensor-parallel rank holds the whole norm and uses the elements of its heads. Several ranks can use the same.
PROJECTION_NORMS = (
    in_layer(("self_attn.q_norm.weight", "queries"), megatron="self_attention.q_layernorm.weight"),
    in_layer(("self_attn.k_norm.weight", "keys"), megatron="self_attention.k_layernorm.weight"),
)

# The head of transformers' models for sequence classification. Every tensor-parallel rank holds all of it. One row is
# small compared with a shard of the layers. Split by columns it would need a sum over ranks in every forward pass.
VALUE_HEAD = Row(
    parts=(Part("score.weight", ("labels", "hidden")),),
    megatron="output_layer.weight",
    engine="score.weight",
)

LLAMA_LAYER = Layer((INPUT_NORM, QKV, ATTENTION_OUTPUT, POST_ATTENTION_NORM, *MLP))

LLAMA = Table(
    embedding=Row(
        parts=(Part("model.embed_tokens.weight", ("vocab", "hidden")),),
        megatron="embedding.word_embeddings.weight",
        engine="model.embed_tokens.weight",
        split="vocab",
    ),
    dense=LLAMA_LAYER,
    final_norm=(
        Row(
            parts=(Part("model.norm.weight", ("hidden",)),),
            megatron="decoder.final_layernorm.weight",
            engine="model.norm.weight",
        ),
    ),
    head=Row(
        parts=(Part("lm_head.weight", ("vocab", "hidden")),),
        megatron="output_layer.weight",
        engine="lm_head.weight",
        split="vocab",
    ),
)

GATE_UP_IN_ONE = in_layer(
    ("mlp.gate_up_proj.weight", "ffn+ffn", "hidden"),
    megatron="mlp.linear_fc1.weight",
    split="rows",
    quantizable=True,
)

# Phi-3's files combine several tensors into the sections of one.
PHI3 = replace(
    LLAMA,
    dense=Layer(
        (
            INPUT_NORM,
            in_layer(
                ("self_attn.qkv_proj.weight", "queries+keys+keys", "hidden"),
                megatron="self_attention.linear_qkv.weight",
                split="qkv",
                quantizable=True,
            ),
            ATTENTION_OUTPUT,
            POST_ATTENTION_NORM,
            GATE_UP_IN_ONE,
            MLP[1],
        )
    ),
)

# Norms before and after attention and the MLP. Megatron-Bridge uses these names for the norms after them.
GEMMA2 = replace(
    LLAMA,
    dense=Layer(
        (
            INPUT_NORM,
            QKV,
            ATTENTION_OUTPUT,
            in_layer(
                ("post_attention_layernorm.weight", "hidden"),
                megatron="self_attention.linear_proj.post_layernorm.weight",
            ),
            in_layer(
                ("pre_feedforward_layernorm.weight", "hidden"),
                megatron="pre_mlp_layernorm.weight",
                megatron_te="mlp.linear_fc1.layer_norm_weight",
            ),
            *MLP,
            in_layer(("post_feedforward_layernorm.weight", "hidden"), megatron="mlp.linear_fc2.post_layernorm.weight"),
        )
    ),
)

GLM4 = replace(
    LLAMA,
    dense=Layer(
        (
            INPUT_NORM,
            QKV,
            ATTENTION_OUTPUT,
            in_layer(
                ("post_self_attn_layernorm.weight", "hidden"),
                megatron="self_attention.linear_proj.post_layernorm.weight",
            ),
            POST_ATTENTION_NORM,
            GATE_UP_IN_ONE,
            MLP[1],
            in_layer(("post_mlp_layernorm.weight", "hidden"), megatron="mlp.linear_fc2.post_layernorm.weight"),
        )
    ),
)

# Norms have biases, and MLPs have no gates.
NEMOTRON = replace(
    LLAMA,
    dense=Layer(
        (
            INPUT_NORM,
            in_layer(
                ("input_layernorm.bias", "hidden"),
                megatron="input_layernorm.bias",
                megatron_te="self_attention.linear_qkv.layer_norm_bias",
            ),
            QKV,
            ATTENTION_OUTPUT,
            POST_ATTENTION_NORM,
            in_layer(
                ("post_attention_layernorm.bias", "hidden"),
                megatron="pre_mlp_layernorm.bias",
                megatron_te="mlp.linear_fc1.layer_norm_bias",
            ),
            in_layer(
                ("mlp.up_proj.weight", "ffn", "hidden"),
                megatron="mlp.linear_fc1.weight",
                split="rows",
                quantizable=True,
            ),
            MLP[1],
        )
    ),
    final_norm=(
        *LLAMA.final_norm,
        Row(
            parts=(Part("model.norm.bias", ("hidden",)),),
            megatron="decoder.final_layernorm.bias",
            engine="model.norm.bias",
        ),
    ),
)


# Mixture-of-experts families with the attention of dense ones.

# Transformer Engine fuses the norm with the first layer of an MLP, but not with a router.
SPARSE_MLP_NORM = replace(POST_ATTENTION_NORM, megatron_te=None)

ROUTER = in_layer(("mlp.gate.weight", "experts", "hidden"), megatron="mlp.router.weight")


def expert_rows(block: str, gate: str, up: str, down: str) -> tuple[Row, Row]:
    """Returns the rows of an expert's matrices. The arguments are the checkpoint's names of the block of experts and of
    the three matrices."""
    expert = f"{block}.experts.{{expert}}"
    return (
        in_layer(
            (f"{expert}.{gate}.weight", "expert_ffn", "hidden"),
            (f"{expert}.{up}.weight", "expert_ffn", "hidden"),
            megatron="mlp.experts.local_experts.{expert}.linear_fc1.weight",
            megatron_te="mlp.experts.linear_fc1.weight{expert}",
            engine=f"{block}.experts.w13_weight",
            split="rows",
            quantizable=True,
        ),
        in_layer(
            (f"{expert}.{down}.weight", "hidden", "expert_ffn"),
            megatron="mlp.experts.local_experts.{expert}.linear_fc2.weight",
            megatron_te="mlp.experts.linear_fc2.weight{expert}",
            engine=f"{block}.experts.w2_weight",
            split="columns",
            quantizable=True,
        ),
    )


EXPERTS = expert_rows("mlp", "gate_proj", "up_proj", "down_proj")

STACKED_EXPERTS = (
    replace(
        EXPERTS[0],
        parts=in_layer(("mlp.experts.gate_up_proj", "expert_ffn+expert_ffn", "hidden"), megatron="").parts,
    ),
    replace(EXPERTS[1], parts=in_layer(("mlp.experts.down_proj", "hidden", "expert_ffn"), megatron="").parts),
)
"""Expert rows of files with one tensor for all experts of a layer."""


def stacking_experts(table: Table) -> Table:
    """Returns the table with `STACKED_EXPERTS`."""
    sparse, sparse_delta = (
        layer and replace(layer, experts=STACKED_EXPERTS, stacked=True) for layer in (table.sparse, table.sparse_delta)
    )
    return replace(table, sparse=sparse, sparse_delta=sparse_delta)


ROUTER_BIAS = in_layer(
    ("mlp.gate.e_score_correction_bias", "experts"),
    megatron="mlp.router.expert_bias",
    float32=True,
)


def shared_experts(block: str, engine: str | None = None) -> tuple[Row, Row]:
    """Returns the rows of the shared experts, visited by every token. `block` is their name in the checkpoint. `engine`
    is their name in the engine, if it differs."""
    engine = engine or block
    return (
        in_layer(
            (f"{block}.gate_proj.weight", "shared_ffn", "hidden"),
            (f"{block}.up_proj.weight", "shared_ffn", "hidden"),
            megatron="mlp.shared_experts.linear_fc1.weight",
            engine=f"{engine}.gate_up_proj.weight",
            split="rows",
            quantizable=True,
        ),
        in_layer(
            (f"{block}.down_proj.weight", "hidden", "shared_ffn"),
            megatron="mlp.shared_experts.linear_fc2.weight",
            engine=f"{engine}.down_proj.weight",
            split="columns",
            quantizable=True,
        ),
    )


SHARED_GATE = in_layer(("mlp.shared_expert_gate.weight", "one", "hidden"), megatron="mlp.shared_experts.gate_weight")

SPARSE = (INPUT_NORM, QKV, ATTENTION_OUTPUT, SPARSE_MLP_NORM, ROUTER)
QWEN3_MOE = replace(LLAMA, sparse=Layer(SPARSE, EXPERTS))
QWEN2_MOE = replace(LLAMA, sparse=Layer((*SPARSE, *shared_experts("mlp.shared_expert"), SHARED_GATE), EXPERTS))
GLM4_MOE = replace(LLAMA, sparse=Layer((*SPARSE, ROUTER_BIAS, *shared_experts("mlp.shared_experts")), EXPERTS))

# The experts of GLM-4.5, with other names in files.
HY_V3 = replace(
    LLAMA,
    sparse=Layer(
        (
            *SPARSE[:-1],
            in_layer(
                ("mlp.router.gate.weight", "experts", "hidden"), megatron="mlp.router.weight", engine="mlp.gate.weight"
            ),
            in_layer(
                ("mlp.expert_bias", "experts"),
                megatron="mlp.router.expert_bias",
                engine="mlp.gate.e_score_correction_bias",
                float32=True,
            ),
            *shared_experts("mlp.shared_mlp", engine="mlp.shared_experts"),
        ),
        EXPERTS,
    ),
)

MIXTRAL_ROUTER = in_layer(("block_sparse_moe.gate.weight", "experts", "hidden"), megatron="mlp.router.weight")

MIXTRAL_SPARSE = (INPUT_NORM, QKV, ATTENTION_OUTPUT, SPARSE_MLP_NORM, MIXTRAL_ROUTER)
MIXTRAL_EXPERTS = expert_rows("block_sparse_moe", "w1", "w3", "w2")
MIXTRAL = replace(LLAMA, sparse=Layer(MIXTRAL_SPARSE, MIXTRAL_EXPERTS))

MINIMAX_ROUTER_BIAS = in_layer(
    ("block_sparse_moe.e_score_correction_bias", "experts"),
    megatron="mlp.router.expert_bias",
    float32=True,
)
MINIMAX_M2 = replace(LLAMA, sparse=Layer((*MIXTRAL_SPARSE, MINIMAX_ROUTER_BIAS), MIXTRAL_EXPERTS))


# DeepSeek-V3 has latent attention, shared experts and a router with a bias. Moonlight is the same, except that its
# queries come directly from the hidden state. Layers for multi-token prediction are in models/prediction.py.
#
# The engine's names are those of SGLang with separate shared experts (--disable-shared-experts-fusion).

LATENT_NORM_EPS = 1e-6
"""The epsilon of DeepSeek's latent norms. As in transformers, config.json does not change it."""
FUSED_LATENTS = "self_attn.fused_qkv_a_proj_with_mqa.weight"

# Megatron's own layers split the projections to the latents and gather the results. Transformer Engine's layers do not
# split them.
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


# gpt-oss has attention with sinks. Its files hold expert matrices as [inputs, outputs], with all experts of a layer in
# one tensor. The outputs of gates and up projections are interleaved. Attention, routers and experts have biases.
#
# Every side keeps these matrices in the layout of the files. Transposed, they would not be boxes of the file's tensor.

SINKS = in_layer(
    ("self_attn.sinks", "heads"),
    megatron="self_attention.core_attention.softmax_offset",
    split="rows",
)
GPT_OSS_ROUTER = (
    in_layer(("mlp.router.weight", "experts", "hidden"), megatron="mlp.router.weight"),
    in_layer(("mlp.router.bias", "experts"), megatron="mlp.router.bias"),
)


def _of_expert(split: Split, tensor: str, *dimensions: str, megatron: str) -> Row:
    """Returns a row of an expert. `megatron` is the name of a parameter within the expert."""
    linear, _, parameter = megatron.partition(".")
    return in_layer(
        (f"mlp.experts.{tensor}", *dimensions),
        megatron=f"mlp.experts.local_experts.{{expert}}.{megatron}",
        megatron_te=f"mlp.experts.{linear}.{parameter}{{expert}}",
        split=split,
    )


GPT_OSS_EXPERTS = (
    _of_expert("columns", "gate_up_proj", "hidden", "expert_gate_up", megatron="linear_fc1.kernel"),
    _of_expert("rows", "gate_up_proj_bias", "expert_gate_up", megatron="linear_fc1.bias"),
    _of_expert("rows", "down_proj", "expert_ffn", "hidden", megatron="linear_fc2.kernel"),
    _of_expert("replicated", "down_proj_bias", "hidden", megatron="linear_fc2.bias"),
)
GPT_OSS_SPARSE = (INPUT_NORM, QKV, SINKS, ATTENTION_OUTPUT, SPARSE_MLP_NORM, *GPT_OSS_ROUTER)

GPT_OSS = replace(LLAMA, dense=Layer(()), sparse=Layer(GPT_OSS_SPARSE, GPT_OSS_EXPERTS, stacked=True))
"""All layers have experts."""
