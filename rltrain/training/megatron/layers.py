"""The modules a model is made of: Megatron's own with torch kernels ("local"), or Transformer Engine's; value heads."""

import os
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.extensions.transformer_engine import HAVE_TE
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes as set_parallel_attributes
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.attention import SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.moe.shared_experts import SharedExpertMLP
from megatron.core.transformer.multi_latent_attention import MLASelfAttentionSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec, build_module
from megatron.core.transformer.transformer_block import TransformerBlock, TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules
from torch import Tensor

from rltrain.config import schema
from rltrain.errors import ConfigError
from rltrain.models import NUM_LABELS, Architecture
from rltrain.training.megatron.attention import GroupedSelfAttention, PackedAttention
from rltrain.training.megatron.fused import RmsNorm, SwiGluActivation, takes_fused
from rltrain.training.megatron.fused_attention import FusedSelfAttention
from rltrain.training.megatron.latent_attention import LATENT_NORM_EPS, ExplicitLatentAttention, LatentSelfAttention
from rltrain.training.megatron.linear import ColumnProduct, RowProduct

LOCAL_MLP = MLPSubmodules(linear_fc1=ColumnProduct, linear_fc2=RowProduct, activation_func=SwiGluActivation)
# Experts have another number of tokens each time, for which oneDNN would make code each time.
LOCAL_EXPERT = MLPSubmodules(
    linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear, activation_func=SwiGluActivation
)

SINGLE_PARAMETER = "NVTE_GROUPED_LINEAR_SINGLE_PARAM"
"""Of Transformer Engine: its grouped products then have one parameter for all experts."""


class RMSNorm(torch.nn.RMSNorm):
    """torch's RMSNorm as Megatron builds norms; Megatron's own wrapper refuses sequence parallelism."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float, **unused: Any) -> None:
        super().__init__(hidden_size, eps=eps, device=parameter_device(config), dtype=config.params_dtype)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        if not takes_fused(x) or x.dtype != self.weight.dtype:
            return super().forward(x)
        assert self.eps is not None
        normed: Tensor = RmsNorm.apply(x, self.weight, self.eps)
        return normed


class LatentNorm(RMSNorm):
    """The norm of a latent that queries, or keys and values, are made from."""

    def __init__(self, config: TransformerConfig, hidden_size: int, **unused: Any) -> None:
        super().__init__(config, hidden_size, LATENT_NORM_EPS)


class FixedBiasRouter(TopKRouter):
    """Megatron's router, where the bias by which experts are chosen stays as it was loaded: nothing counts tokens."""

    def _apply_expert_bias(self, *unused: Any, **also_unused: Any) -> None:
        pass


class ValueHead(torch.nn.Module):
    """One value per token, in fp32, in the place of the vocabulary projection.

    Every tensor-parallel rank has the whole weight [1, hidden]. With sequence parallelism each makes the values of its
    own tokens, which are gathered: `weight.sequence_parallel` tells Megatron to sum the gradients of all ranks' tokens.
    """

    def __init__(self, config: TransformerConfig, tp_group: dist.ProcessGroup) -> None:
        super().__init__()
        self.tp_group, self.sequence_parallel = tp_group, config.sequence_parallel
        self.weight = torch.nn.Parameter(
            torch.zeros(NUM_LABELS, config.hidden_size, device=parameter_device(config), dtype=config.params_dtype)
        )
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, hidden_states: Tensor, **unused: Any) -> tuple[Tensor, None]:
        """[tokens (of this rank), 1, hidden] -> ([tokens, 1], no bias), as Megatron calls an output layer.

        Collective over: the tensor-parallel group, with sequence parallelism.
        """
        values = torch.nn.functional.linear(hidden_states.float(), self.weight.float()).squeeze(-1)
        if self.sequence_parallel:
            # All ranks go on with the same loss, so each takes the gradient of its own tokens, not a sum over ranks.
            values = gather_from_sequence_parallel_region(
                values, tensor_parallel_output_grad=False, group=self.tp_group
            )
        return values, None


def parameter_device(config: TransformerConfig) -> str | int:
    """Where Megatron makes parameters."""
    return "cpu" if config.use_cpu_initialization else torch.cuda.current_device()


def uses_transformer_engine(model: schema.Model, device: torch.device) -> bool:
    """Whether model.transformer_impl means Transformer Engine here; ConfigError if it is asked for and cannot be had.

    It has no fused attention over packed sequences in float32, which therefore takes the local layers.
    """
    obstacle = _obstacle_to_transformer_engine(model, device)
    if model.transformer_impl == "transformer_engine" and obstacle is not None:
        problem, remedy = obstacle
        raise ConfigError(
            f"model.transformer_impl is transformer_engine, but {problem}; set it to auto or local, or {remedy}"
        )
    return obstacle is None and model.transformer_impl != "local"


def check_names_of_experts(architecture: Architecture) -> None:
    """ConfigError where Transformer Engine would keep a layer's experts in one parameter, under another name."""
    if architecture.moe and os.environ.get(SINGLE_PARAMETER, "0") not in ("", "0"):
        raise ConfigError(
            f"the environment variable {SINGLE_PARAMETER} is {os.environ[SINGLE_PARAMETER]}: Transformer Engine would "
            "keep all experts of a layer in one parameter, where weight syncs and checkpoints expect one for each; "
            "unset it, or set model.transformer_impl to local"
        )


def _obstacle_to_transformer_engine(model: schema.Model, device: torch.device) -> tuple[str, str] | None:
    """(what is in its way, what would help)."""
    if model.dtype == "float32":
        return (
            "model.dtype is float32, for which it has no attention over packed sequences",
            "set model.dtype to bfloat16",
        )
    if not HAVE_TE:
        return "transformer_engine.pytorch cannot be imported", "install transformer-engine for your CUDA version"
    return ("this machine has no GPU", "run it on one that has") if device.type != "cuda" else None


def block_spec(
    architecture: Architecture, config: TransformerConfig, layers: range, transformer_engine: bool
) -> TransformerBlockSubmodules:
    """The modules of one pipeline stage's layers and of the final norm."""
    sparse = architecture.sparse_layers[layers.start : layers.stop]
    if not transformer_engine:
        return TransformerBlockSubmodules(
            layer_specs=[_local_layer(architecture, experts) for experts in sparse], layer_norm=RMSNorm
        )
    from megatron.core.extensions.transformer_engine import TENorm

    return TransformerBlockSubmodules(
        layer_specs=[_transformer_engine_layer(architecture, config, experts) for experts in sparse],
        layer_norm=TENorm,
    )


def add_final_norm(block: TransformerBlock) -> None:
    """Make the last stage of a pipeline of what was built as any other."""
    block.post_process = True
    block.final_layernorm = build_module(
        block.submodules.layer_norm,
        config=block.config,
        hidden_size=block.config.hidden_size,
        eps=block.config.layernorm_epsilon,
    )


def _transformer_engine_layer(architecture: Architecture, config: TransformerConfig, experts: bool) -> ModuleSpec:
    layer = get_gpt_layer_with_transformer_engine_spec(
        num_experts=config.num_moe_experts if experts else None,
        moe_grouped_gemm=True,
        qk_layernorm=config.qk_layernorm,
        multi_latent_attention=architecture.mla is not None,
    )
    attention = layer.submodules.self_attention
    attention.module = GroupedSelfAttention if architecture.mla is None else ExplicitLatentAttention
    if architecture.output_bias:
        attention.submodules.linear_proj = _with_bias(attention.submodules.linear_proj)
    if experts:
        layer.submodules.mlp.submodules.router = FixedBiasRouter
    return layer


def _local_layer(architecture: Architecture, experts: bool) -> ModuleSpec:
    return ModuleSpec(
        module=TransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=RMSNorm,
            self_attention=_local_latent_attention() if architecture.mla else _local_attention(architecture),
            self_attn_bda=get_bias_dropout_add,
            pre_mlp_layernorm=RMSNorm,
            mlp=_local_experts() if experts else ModuleSpec(module=MLP, submodules=LOCAL_MLP),
            mlp_bda=get_bias_dropout_add,
        ),
    )


def _local_attention(architecture: Architecture) -> ModuleSpec:
    head_norm = RMSNorm if architecture.qk_norm else IdentityOp
    return ModuleSpec(
        module=FusedSelfAttention,
        params={"attn_mask_type": AttnMaskType.causal},
        submodules=SelfAttentionSubmodules(
            linear_qkv=ColumnProduct,
            core_attention=PackedAttention,
            linear_proj=_with_bias(RowProduct) if architecture.output_bias else RowProduct,
            q_layernorm=head_norm,
            k_layernorm=head_norm,
        ),
    )


def _local_latent_attention() -> ModuleSpec:
    return ModuleSpec(
        module=LatentSelfAttention,
        params={"attn_mask_type": AttnMaskType.causal},
        submodules=MLASelfAttentionSubmodules(
            linear_q_proj=ColumnParallelLinear,
            linear_q_down_proj=ColumnParallelLinear,
            linear_q_up_proj=ColumnParallelLinear,
            linear_kv_down_proj=ColumnParallelLinear,
            linear_kv_up_proj=ColumnParallelLinear,
            core_attention=PackedAttention,
            linear_proj=RowParallelLinear,
            q_layernorm=LatentNorm,
            kv_layernorm=LatentNorm,
        ),
    )


def _local_experts() -> ModuleSpec:
    return ModuleSpec(
        module=MoELayer,
        submodules=MoESubmodules(
            experts=ModuleSpec(module=SequentialMLP, submodules=LOCAL_EXPERT),
            shared_experts=ModuleSpec(module=SharedExpertMLP, submodules=LOCAL_MLP),
            router=FixedBiasRouter,
        ),
    )


def _with_bias(linear: Any) -> type[torch.nn.Module]:
    """`linear` with a bias, for attention's output: Megatron's config gives biases to MLPs too, or to neither."""

    class Biased(linear):
        def __init__(self, *arguments: Any, **settings: Any) -> None:
            super().__init__(*arguments, **(settings | {"bias": True}))

    return Biased


def mark_parallel_weights(model: torch.nn.Module) -> None:
    """Tell gradient norms which weights are shards. Megatron does so while it initialises weights, which is skipped."""
    axes = {ColumnParallelLinear: 0, VocabParallelEmbedding: 0, RowParallelLinear: 1}
    for module in model.modules():
        weight = getattr(module, "weight", None)
        axis = next((axis for kind, axis in axes.items() if isinstance(module, kind)), None)
        if axis is not None and weight is not None and not hasattr(weight, "tensor_model_parallel"):
            set_parallel_attributes(weight, is_parallel=True, dim=axis, stride=1)
