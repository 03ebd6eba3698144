"""Mixture-of-experts families with the attention of dense ones."""

from dataclasses import replace

from rltrain.models.dense import (
    ATTENTION_OUTPUT,
    INPUT_NORM,
    LLAMA,
    POST_ATTENTION_NORM,
    QKV,
)
from rltrain.models.table import Layer, Row, Table, in_layer

# Transformer Engine fuses the norm with an MLP's first layer, but not with a router.
SPARSE_MLP_NORM = replace(POST_ATTENTION_NORM, megatron_te=None)

ROUTER = in_layer(("mlp.gate.weight", "experts", "hidden"), megatron="mlp.router.weight")


def expert_rows(block: str, gate: str, up: str, down: str) -> tuple[Row, Row]:
    """An expert's matrices, given what the checkpoint calls the block of experts and the three of each."""
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
"""Of files that hold those of all experts of a layer in one tensor."""


def stacking_experts(table: Table) -> Table:
    """A table whose files hold experts so."""
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
    """The matrices of the experts that every token visits, given what the checkpoint calls their block, and the engine
    where it has another name."""
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

# The experts of GLM-4.5, under names of its own in files.
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
