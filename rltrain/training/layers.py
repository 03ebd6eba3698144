"""The modules a model is made of: Megatron's own with torch kernels ("local"), or Transformer Engine's; value heads."""

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
from megatron.core.transformer.spec_utils import ModuleSpec, build_module
from megatron.core.transformer.transformer_block import TransformerBlock, TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules
from torch import Tensor

from rltrain.errors import ConfigError
from rltrain.reshard.families import NUM_LABELS
from rltrain.training.attention import GroupedSelfAttention, PackedAttention


class RMSNorm(torch.nn.RMSNorm):
    """torch's RMSNorm as Megatron builds norms; Megatron's own wrapper refuses sequence parallelism."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float, **unused: Any) -> None:
        super().__init__(hidden_size, eps=eps, device=parameter_device(config), dtype=config.params_dtype)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]


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


def uses_transformer_engine(transformer_impl: str, device: torch.device) -> bool:
    """Whether model.transformer_impl means Transformer Engine here; ConfigError if it is asked for and missing."""
    available = HAVE_TE and device.type == "cuda"
    if transformer_impl == "transformer_engine" and not available:
        raise ConfigError(
            "model.transformer_impl is transformer_engine, but "
            + ("this machine has no GPU" if HAVE_TE else "transformer_engine.pytorch cannot be imported")
            + "; set it to auto or local, or install transformer-engine for your CUDA version"
        )
    return available and transformer_impl != "local"


def block_spec(config: TransformerConfig, num_layers: int, transformer_engine: bool) -> TransformerBlockSubmodules:
    """The modules of one pipeline stage's layers and of the final norm."""
    if not transformer_engine:
        return TransformerBlockSubmodules(layer_specs=[_local_layer(config)] * num_layers, layer_norm=RMSNorm)
    from megatron.core.extensions.transformer_engine import TENorm

    layer = get_gpt_layer_with_transformer_engine_spec(qk_layernorm=config.qk_layernorm)
    layer.submodules.self_attention.module = GroupedSelfAttention
    return TransformerBlockSubmodules(layer_specs=[layer] * num_layers, layer_norm=TENorm)


def add_final_norm(block: TransformerBlock) -> None:
    """Make the last stage of a pipeline of what was built as any other."""
    block.post_process = True
    block.final_layernorm = build_module(
        block.submodules.layer_norm,
        config=block.config,
        hidden_size=block.config.hidden_size,
        eps=block.config.layernorm_epsilon,
    )


def _local_layer(config: TransformerConfig) -> ModuleSpec:
    head_norm = RMSNorm if config.qk_layernorm else IdentityOp
    attention = ModuleSpec(
        module=GroupedSelfAttention,
        params={"attn_mask_type": AttnMaskType.causal},
        submodules=SelfAttentionSubmodules(
            linear_qkv=ColumnParallelLinear,
            core_attention=PackedAttention,
            linear_proj=RowParallelLinear,
            q_layernorm=head_norm,
            k_layernorm=head_norm,
        ),
    )
    mlp = ModuleSpec(
        module=MLP, submodules=MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
    )
    return ModuleSpec(
        module=TransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=RMSNorm,
            self_attention=attention,
            self_attn_bda=get_bias_dropout_add,
            pre_mlp_layernorm=RMSNorm,
            mlp=mlp,
            mlp_bda=get_bias_dropout_add,
        ),
    )


def mark_parallel_weights(model: torch.nn.Module) -> None:
    """Tell gradient norms which weights are shards. Megatron does so while it initialises weights, which is skipped."""
    axes = {ColumnParallelLinear: 0, VocabParallelEmbedding: 0, RowParallelLinear: 1}
    for module in model.modules():
        weight = getattr(module, "weight", None)
        if type(module) in axes and weight is not None and not hasattr(weight, "tensor_model_parallel"):
            set_parallel_attributes(weight, is_parallel=True, dim=axes[type(module)], stride=1)
