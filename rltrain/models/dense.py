"""Families of dense models; other families share many of their rows."""

from dataclasses import replace

from rltrain.models.table import Layer, Part, Row, Table, in_layer

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
# Every tensor-parallel rank has them whole and takes the elements of its own heads, of which others may have some too.
PROJECTION_NORMS = (
    in_layer(("self_attn.q_norm.weight", "queries"), megatron="self_attention.q_layernorm.weight"),
    in_layer(("self_attn.k_norm.weight", "keys"), megatron="self_attention.k_layernorm.weight"),
)

# As in transformers' models for sequence classification. Every tensor-parallel rank holds all of it: one row is nothing
# beside a shard of the layers, and cut by columns it would cost every forward pass a sum over the ranks.
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
MISTRAL = QWEN2 = QWEN3 = LLAMA

GATE_UP_IN_ONE = in_layer(
    ("mlp.gate_up_proj.weight", "ffn+ffn", "hidden"),
    megatron="mlp.linear_fc1.weight",
    split="rows",
    quantizable=True,
)

# Phi-3's files hold what others keep in several tensors as the sections of one.
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

# Norms before and behind attention and the MLP; Megatron-Bridge calls the latter so.
GEMMA2 = GEMMA3 = replace(
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

# Norms have biases, and MLPs no gates.
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
