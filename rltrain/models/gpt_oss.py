"""gpt-oss: attention with sinks, and experts whose matrices files hold as [inputs, outputs], of all experts of a layer
in one tensor, with the outputs of gates and of what they gate in turn. Attention, routers and experts have biases.

Every side keeps an expert's matrices as files have them: transposed they would be in no box of a file's tensor.
"""

from dataclasses import replace

from rltrain.models.dense import ATTENTION_OUTPUT, INPUT_NORM, LLAMA, QKV
from rltrain.models.moe import SPARSE_MLP_NORM
from rltrain.models.table import Layer, Row, Split, in_layer

SINKS = in_layer(
    ("self_attn.sinks", "heads"),
    megatron="self_attention.core_attention.softmax_offset",
    split="rows",
)
ROUTER = (
    in_layer(("mlp.router.weight", "experts", "hidden"), megatron="mlp.router.weight"),
    in_layer(("mlp.router.bias", "experts"), megatron="mlp.router.bias"),
)


def _of_expert(split: Split, tensor: str, *dimensions: str, megatron: str) -> Row:
    """`megatron` is a parameter of an expert."""
    linear, _, parameter = megatron.partition(".")
    return in_layer(
        (f"mlp.experts.{tensor}", *dimensions),
        megatron=f"mlp.experts.local_experts.{{expert}}.{megatron}",
        megatron_te=f"mlp.experts.{linear}.{parameter}{{expert}}",
        split=split,
    )


EXPERTS = (
    _of_expert("columns", "gate_up_proj", "hidden", "expert_gate_up", megatron="linear_fc1.kernel"),
    _of_expert("rows", "gate_up_proj_bias", "expert_gate_up", megatron="linear_fc1.bias"),
    _of_expert("rows", "down_proj", "expert_ffn", "hidden", megatron="linear_fc2.kernel"),
    _of_expert("replicated", "down_proj_bias", "hidden", megatron="linear_fc2.bias"),
)
SPARSE = (INPUT_NORM, QKV, SINKS, ATTENTION_OUTPUT, SPARSE_MLP_NORM, *ROUTER)

GPT_OSS = replace(LLAMA, dense=Layer(()), sparse=Layer(SPARSE, EXPERTS, stacked=True))
"""No layer is without experts."""
