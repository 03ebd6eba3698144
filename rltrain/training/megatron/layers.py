"""The modules of a model: layer specs of Megatron or Transformer Engine, heads, delta nets and residual streams."""

from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.common.embeddings.language_model_embedding import LanguageModelEmbedding
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes as set_parallel_attributes
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from megatron.core.tensor_parallel.random import checkpoint
from megatron.core.transformer.attention import SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.moe.experts import SequentialMLP, TEGroupedMLP
from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
from megatron.core.transformer.moe.shared_experts import SharedExpertMLP
from megatron.core.transformer.multi_latent_attention import MLASelfAttentionSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec, build_module
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules
from torch import Tensor

from rltrain.config.models import RecomputedModule
from rltrain.models import NUM_LABELS, Architecture, DeltaNet, LayerKind
from rltrain.models.architecture import MLA
from rltrain.models.delta_rule import PackedStates, convolve, gated_delta_rule, gated_norm, gates, packed_states
from rltrain.models.experts import is_expert
from rltrain.training.megatron.attention import (
    ExplicitLatentAttention,
    FusedSelfAttention,
    GroupedSelfAttention,
    LatentSelfAttention,
    OwnRotary,
    PackedAttention,
    PackedSequences,
    TreeSequences,
)
from rltrain.training.megatron.context_parallel import (
    SlicedSequences,
    SpreadHeads,
    attends_trees,
    with_context_parallelism,
)
from rltrain.training.megatron.experts import BiasedRouter, ClampedSwiGlu, Down, GateUp, SampleRouter, SparseLayer
from rltrain.training.megatron.norms import (
    Addition,
    LatentNorm,
    ProjectionNorm,
    RMSNorm,
    hidden_norm,
    parameter_device,
)
from rltrain.training.megatron.platform import ColumnProduct, GatedActivation, RowProduct
from rltrain.training.megatron.versions import dense_mlp
from rltrain.training.packing import WholeSequences, back_from_heads, spread_over_heads
from rltrain.training.sliced_attention import SlicedRows, UnsharedTokens

# Gated delta nets over packed sequences, in plain torch.
#
# megatron-core's own module needs the kernels of flash-linear-attention and takes no packed sequences. Parameters have
# its names and shapes. The norm's weight is different: it is the factor itself, as in checkpoints.
#
# Everything between the projections is recomputed in backward. It would be many times the activations of attention,
# since every head has an fp32 state for every chunk.

PACKED = "delta net"
"""Key of the values computed once for all layers."""


@dataclass
class DeltaSubmodules:
    """The input and output projections of a delta net."""

    in_proj: Any
    out_proj: Any


class DepthwiseConvolution(torch.nn.Module):
    """The weight of a depthwise convolution, [channels, kernel]."""

    def __init__(self, config: TransformerConfig, channels: int, kernel: int) -> None:
        super().__init__()
        self.weight = _parameter(config, channels, kernel)


class HeadNorm(torch.nn.Module):
    """The weight of the norm of all heads, [value_dim]. Every tensor-parallel rank has it."""

    def __init__(self, config: TransformerConfig, value_dim: int) -> None:
        super().__init__()
        self.weight = _parameter(config, value_dim)


class PackedDeltaNet(MegatronModule):
    """The gated delta net of one layer.

    Each tensor-parallel rank has some key heads with their value heads. Context-parallel ranks divide these heads, each
    for all tokens.
    """

    def __init__(
        self,
        config: TransformerConfig,
        submodules: DeltaSubmodules,
        *,
        delta: DeltaNet,
        pg_collection: ProcessGroupCollection,
        **unused: Any,
    ) -> None:
        super().__init__(config)
        self.tp_group, self.cp_group = pg_collection.tp, pg_collection.cp
        self.delta = delta.shared_by(self.tp_group.size())
        linear: dict[str, Any] = {
            "config": config,
            "bias": False,
            "skip_bias_add": False,
            "is_expert": False,
            "tp_group": self.tp_group,
        }
        self.in_proj = build_module(
            submodules.in_proj,
            config.hidden_size,
            sum(_sizes(delta)),
            init_method=config.init_method,
            gather_output=False,
            **linear,
        )
        self.conv1d = DepthwiseConvolution(config, self.delta.channels, delta.kernel)
        self.A_log, self.dt_bias = (_parameter(config, self.delta.num_heads) for _ in range(2))
        self.gated_norm = HeadNorm(config, delta.value_dim)
        self.out_proj = build_module(
            submodules.out_proj,
            delta.values,
            config.hidden_size,
            init_method=config.output_layer_init_method,
            input_is_parallel=True,
            **linear,
        )
        for shard in (self.conv1d.weight, self.A_log, self.dt_bias):
            set_parallel_attributes(shard, is_parallel=True, dim=0, stride=1)

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None,
        *,
        packed_seq_params: PackedSequences | TreeSequences | SlicedSequences | SpreadHeads,
        **unused: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Maps [tokens (of this rank), 1, hidden] to the same shape, and None as the bias.

        Collective over: the tensor-parallel group, like Megatron's linear layers, and in backward for the norm; the
        context-parallel group, for exchanging tokens and heads.
        """
        projected, _ = self.in_proj(hidden_states)
        if isinstance(packed_seq_params, PackedSequences):
            heads = self._core(projected[:, 0], packed_seq_params, packed_seq_params.derived)
        elif isinstance(packed_seq_params, TreeSequences):
            heads = self._core_of_tree(projected[:, 0], packed_seq_params, packed_seq_params.derived)
        else:
            whole, num_ranks = packed_seq_params.of_all, self.cp_group.size()
            kinds = [kind.unflatten(-1, (num_ranks, -1)) for kind in projected[:, 0].split(_sizes(self.delta), -1)]
            of_heads = spread_over_heads(torch.cat(kinds, dim=-1), whole, self.cp_group)
            rows = packed_seq_params.whole if isinstance(packed_seq_params, SpreadHeads) else packed_seq_params
            if isinstance(rows, SlicedRows) and rows.unshared is not None:
                heads = self._core_of_tree(of_heads, rows, whole.derived)
            else:
                heads = self._core(of_heads, whole, whole.derived)
            heads = back_from_heads(heads, whole, self.cp_group).flatten(1)
        output: tuple[Tensor, Tensor | None] = self.out_proj(heads[:, None])
        return output

    def _core_of_tree(self, projected: Tensor, rows: SlicedRows, derived: dict[str, Any]) -> Tensor:
        """Computes `_core` for each of the samples that share the rows, because a state depends on all tokens before.
        It maps and returns rows."""
        unshared = rows.unshared
        assert unshared is not None, "the samples must share rows"
        return unshared.gathered(self._core(unshared.spread(projected), unshared, derived))

    def _core(
        self,
        projected: Tensor,
        sequences: PackedSequences | WholeSequences | UnsharedTokens,
        derived: dict[str, Any],
    ) -> Tensor:
        """Maps [tokens of whole sequences, this rank's rows of in_proj] to [tokens, this rank's values]."""
        if PACKED not in derived:
            derived[PACKED] = packed_states(sequences.lengths, self.delta.kernel, projected.device)

        def made(projected: Tensor) -> Tensor:
            return self._heads(projected, derived[PACKED])

        if self.training:
            repeated: Tensor = checkpoint(made, False, projected)
            return repeated
        return made(projected)

    def _heads(self, projected: Tensor, packed: PackedStates) -> Tensor:
        num_ranks, rank = self.cp_group.size(), self.cp_group.rank()
        delta = self.delta.shared_by(num_ranks)
        sections = self.conv1d.weight.split([self.delta.keys, self.delta.keys, self.delta.values])
        convolution = torch.cat([section.chunk(num_ranks)[rank] for section in sections])
        log_rate, bias = (weight.chunk(num_ranks)[rank] for weight in (self.A_log, self.dt_bias))
        *mixed, gate, weights, decays = projected.split(_sizes(delta), dim=-1)
        convolved, _ = convolve(torch.cat(mixed, dim=-1), convolution, packed)
        queries, keys, values = convolved.split([delta.keys, delta.keys, delta.values], dim=-1)
        queries, keys = (part.unflatten(-1, (-1, delta.key_dim)) for part in (queries, keys))
        values = values.unflatten(-1, (-1, delta.value_dim))
        heads, _ = gated_delta_rule(queries, keys, values, *gates(weights, decays, log_rate, bias), packed)
        # Every rank uses the same weight for its own heads. The weight's gradient is the sum over all heads.
        weight = copy_to_tensor_model_parallel_region(self.gated_norm.weight, group=self.tp_group)
        return gated_norm(heads, gate.reshape(heads.shape), weight, self.config.layernorm_epsilon).flatten(1)


def _sizes(delta: DeltaNet) -> list[int]:
    """Returns the sizes of the projected queries, keys, values, gates, weights and decays."""
    return [delta.keys, delta.keys, delta.values, delta.values, delta.num_heads, delta.num_heads]


def _parameter(config: TransformerConfig, *shape: int) -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.zeros(*shape, device=parameter_device(config), dtype=config.params_dtype))


# An fp32 residual stream, in models with weights in half precision.
#
# Megatron's fp32_residual_connection makes the embedding fp32, but its first addition rounds the residual stream. These
# additions keep it in fp32.


def residual_addition(training: bool, fused: bool) -> Addition:
    """Returns a replacement for Megatron's get_bias_dropout_add. The sum has the wider of the two types. There is no
    dropout."""
    return _add_to_residual


def _add_to_residual(added: tuple[Tensor, Tensor | None], residual: Tensor, dropout: float) -> Tensor:
    x, bias = added
    total = residual + x
    return total if bias is None else total + bias


class RoundedInput(torch.nn.Module):
    """A replacement for a norm that only rounds to the weights' type. The fused norm and product after it need that
    type."""

    def __init__(self, config: Any, **unused: Any) -> None:
        super().__init__()
        self.dtype = config.params_dtype

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden.to(self.dtype)


def widen_residual_stream(block: TransformerBlockSubmodules) -> None:
    """Makes the layers of a block keep the type of the residual stream."""
    for layer in block.layer_specs or ():
        modules = layer.submodules
        modules.self_attn_bda = modules.mlp_bda = residual_addition
        for norm in ("input_layernorm", "pre_mlp_layernorm"):
            if getattr(modules, norm) is IdentityOp:
                setattr(modules, norm, RoundedInput)


# Modules of a model: Megatron's own with torch kernels ("local") or Transformer Engine's, and value heads.

LOCAL_MLP = MLPSubmodules(linear_fc1=ColumnProduct, linear_fc2=RowProduct, activation_func=GatedActivation)
# Plain products for experts: their number of tokens varies, and oneDNN would compile code for every new number.
LOCAL_EXPERT = MLPSubmodules(
    linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear, activation_func=GatedActivation
)
LOCAL_INTERLEAVED_EXPERT = MLPSubmodules(linear_fc1=GateUp, linear_fc2=Down, activation_func=ClampedSwiGlu)

Submodules = TypeVar("Submodules", SelfAttentionSubmodules, MLPSubmodules)


class ValueHead(torch.nn.Module):
    """A head with one fp32 value per token instead of the vocabulary projection.

    Every tensor-parallel rank has the whole weight [1, hidden]. With sequence parallelism each rank computes the values
    of its own tokens, and they are gathered. Through `weight.sequence_parallel` Megatron sums the gradients of all
    ranks' tokens.
    """

    def __init__(self, config: TransformerConfig, tp_group: dist.ProcessGroup) -> None:
        super().__init__()
        self.tp_group, self.sequence_parallel = tp_group, config.sequence_parallel
        self.weight = torch.nn.Parameter(
            torch.zeros(NUM_LABELS, config.hidden_size, device=parameter_device(config), dtype=config.params_dtype)
        )
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, hidden_states: Tensor, **unused: Any) -> tuple[Tensor, None]:
        """Maps [tokens (of this rank), 1, hidden] to ([tokens, 1], no bias), like Megatron's output layer.

        Collective over: the tensor-parallel group, with sequence parallelism.
        """
        values = torch.nn.functional.linear(hidden_states.float(), self.weight.float()).squeeze(-1)
        if self.sequence_parallel:
            # All ranks compute the same loss, so each takes the gradient of its own tokens, without a sum.
            values = gather_from_sequence_parallel_region(
                values, tensor_parallel_output_grad=False, group=self.tp_group
            )
        return values, None


class DeferredHead(ColumnParallelLinear):
    """The vocabulary projection of Megatron, which returns the projection's inputs. The loss computes logits in
    tiles."""

    def forward(self, input_: Tensor, *unused: Any, **also_unused: Any) -> tuple[Tensor, None]:
        """Maps [tokens (of this rank), 1, hidden] to ([tokens, 1, hidden], no bias), equal on all tensor-parallel
        ranks.

        In backward the ranks' gradients, each from its own columns, are summed. Collective over: the tensor-parallel
        group, with sequence parallelism, and in backward.
        """
        if self.config.sequence_parallel:
            return gather_from_sequence_parallel_region(input_, group=self.tp_group), None
        return copy_to_tensor_model_parallel_region(input_, group=self.tp_group), None


def block_spec(
    architecture: Architecture, config: TransformerConfig, layers: range, transformer_engine: bool
) -> TransformerBlockSubmodules:
    """Returns the modules of one pipeline stage's layers and of the final norm."""
    kinds = architecture.layer_kinds[layers.start : layers.stop]
    return _block_of(architecture, config, layers, kinds, transformer_engine)


def predicting_layer_spec(
    architecture: Architecture, config: TransformerConfig, transformer_engine: bool
) -> ModuleSpec:
    """Returns the spec of the decoder layer inside the multi-token prediction layer."""
    last, kinds = range(architecture.num_layers - 1, architecture.num_layers), (architecture.predicting_kind,)
    specs = _block_of(architecture, config, last, kinds, transformer_engine).layer_specs
    assert specs, "one layer"
    return specs[0]


def _block_of(
    architecture: Architecture,
    config: TransformerConfig,
    layers: range,
    kinds: tuple[LayerKind, ...],
    transformer_engine: bool,
) -> TransformerBlockSubmodules:
    if transformer_engine:
        from megatron.core.extensions.transformer_engine import TENorm

        specs, norm = [_transformer_engine_layer(architecture, config, kind.sparse) for kind in kinds], TENorm
    else:
        numbered = zip(layers, kinds, strict=True)
        specs, norm = [_local_layer(architecture, number, kind) for number, kind in numbered], hidden_norm(architecture)
    block = TransformerBlockSubmodules(layer_specs=specs, layer_norm=norm)
    if not transformer_engine:
        with_context_parallelism(block, config)
    if config.fp32_residual_connection:
        widen_residual_stream(block)
    return block


def word_embedding(
    config: TransformerConfig, vocab_size: int, max_positions: int, collection: ProcessGroupCollection
) -> LanguageModelEmbedding:
    """Returns an embedding of `vocab_size` tokens with padding, split over the tensor-parallel group."""
    return LanguageModelEmbedding(
        config=config,
        vocab_size=vocab_size,
        max_sequence_length=max_positions,
        position_embedding_type="rope",
        tp_group=collection.tp,
    )


def _transformer_engine_layer(architecture: Architecture, config: TransformerConfig, experts: bool) -> ModuleSpec:
    """Returns a layer of Transformer Engine's modules. Norms are fused with the matrix after them."""
    from megatron.core.extensions import transformer_engine as engine

    latent = architecture.mla is not None
    core = attends_trees(engine.TEDotProductAttention, config)
    attention = _fused_latent_attention(engine, core) if latent else _fused_attention(engine, core, config.qk_layernorm)
    if architecture.output_bias:
        attention.submodules.linear_proj = _with_bias(attention.submodules.linear_proj)
    dense = MLPSubmodules(linear_fc1=engine.TELayerNormColumnParallelLinear, linear_fc2=engine.TERowParallelLinear)
    return ModuleSpec(
        module=SparseLayer if experts else TransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=engine.TENorm if latent else IdentityOp,
            self_attention=attention,
            self_attn_bda=get_bias_dropout_add,
            pre_mlp_layernorm=engine.TENorm if experts else IdentityOp,
            mlp=_fused_experts(engine) if experts else dense_mlp(dense),
            mlp_bda=get_bias_dropout_add,
        ),
    )


def _fused_attention(engine: ModuleType, core: type[torch.nn.Module], norms_heads: bool) -> ModuleSpec:
    head_norm = engine.TENorm if norms_heads else IdentityOp
    return ModuleSpec(
        module=GroupedSelfAttention,
        params={"attn_mask_type": AttnMaskType.causal},
        submodules=SelfAttentionSubmodules(
            linear_qkv=engine.TELayerNormColumnParallelLinear,
            core_attention=core,
            linear_proj=engine.TERowParallelLinear,
            q_layernorm=head_norm,
            k_layernorm=head_norm,
        ),
    )


def _fused_latent_attention(engine: ModuleType, core: type[torch.nn.Module]) -> ModuleSpec:
    return ModuleSpec(
        module=ExplicitLatentAttention,
        params={"attn_mask_type": AttnMaskType.causal},
        submodules=MLASelfAttentionSubmodules(
            linear_q_proj=engine.TEColumnParallelLinear,
            linear_q_down_proj=engine.TELinear,
            linear_q_up_proj=engine.TELayerNormColumnParallelLinear,
            linear_kv_down_proj=engine.TELinear,
            linear_kv_up_proj=engine.TELayerNormColumnParallelLinear,
            core_attention=core,
            linear_proj=engine.TERowParallelLinear,
            q_layernorm=IdentityOp,
            kv_layernorm=IdentityOp,
        ),
    )


def _fused_experts(engine: ModuleType) -> ModuleSpec:
    expert = MLPSubmodules(
        linear_fc1=engine.TEColumnParallelGroupedLinear, linear_fc2=engine.TERowParallelGroupedLinear
    )
    shared = MLPSubmodules(linear_fc1=engine.TEColumnParallelLinear, linear_fc2=engine.TERowParallelLinear)
    return ModuleSpec(
        module=MoELayer,
        submodules=MoESubmodules(
            experts=ModuleSpec(module=TEGroupedMLP, submodules=expert),
            shared_experts=ModuleSpec(module=SharedExpertMLP, submodules=shared),
            router=SampleRouter,
        ),
    )


def _local_layer(architecture: Architecture, number: int, kind: LayerKind) -> ModuleSpec:
    attention = (
        _local_latent_attention(architecture.mla) if architecture.mla else _local_attention(architecture, number)
    )
    if kind.delta:
        projections = DeltaSubmodules(in_proj=ColumnProduct, out_proj=RowProduct)
        attention = ModuleSpec(module=PackedDeltaNet, params={"delta": architecture.delta}, submodules=projections)
    norm, mlp = hidden_norm(architecture), _with_post_norm_of(architecture, _local_mlp(architecture), "linear_fc2")
    return ModuleSpec(
        module=SparseLayer if kind.sparse else TransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=norm,
            self_attention=attention,
            self_attn_bda=get_bias_dropout_add,
            pre_mlp_layernorm=norm,
            mlp=_local_experts(architecture) if kind.sparse else dense_mlp(mlp),
            mlp_bda=get_bias_dropout_add,
        ),
    )


def _local_attention(architecture: Architecture, number: int) -> ModuleSpec:
    of_queries, of_keys = _head_norms(architecture)
    window = architecture.window_of(number)
    base = int(window is not None and architecture.sliding_rope_theta is not None)
    rotary = OwnRotary(architecture.rotated_size, base, architecture.rotation_magnitude, architecture.rotates_pairs)
    submodules = SelfAttentionSubmodules(
        linear_qkv=ColumnProduct,
        core_attention=ModuleSpec(
            module=PackedAttention,
            params={
                "window": window,
                "softcap": architecture.attention_softcap,
                "sinks": architecture.attention_sinks,
            },
        ),
        linear_proj=_with_bias(RowProduct) if architecture.output_bias else RowProduct,
        q_layernorm=of_queries,
        k_layernorm=of_keys,
    )
    return ModuleSpec(
        module=FusedSelfAttention,
        params={"attn_mask_type": AttnMaskType.causal, "rotary": rotary},
        submodules=_with_post_norm_of(architecture, submodules, "linear_proj"),
    )


def _head_norms(architecture: Architecture) -> tuple[Any, Any]:
    """Returns the norms of queries and of keys."""
    if not architecture.norms_projections:
        return (RMSNorm, RMSNorm) if architecture.qk_norm else (IdentityOp, IdentityOp)
    counts = architecture.num_heads, architecture.num_kv_heads
    of_queries, of_keys = (ModuleSpec(module=ProjectionNorm, params={"num_heads": count}) for count in counts)
    return of_queries, of_keys


def _local_latent_attention(shape: MLA) -> ModuleSpec:
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
            q_layernorm=IdentityOp if shape.q_rank is None else LatentNorm,
            kv_layernorm=LatentNorm,
        ),
    )


def _local_mlp(architecture: Architecture) -> MLPSubmodules:
    if not architecture.mlp_bias:
        return LOCAL_MLP
    return replace(LOCAL_MLP, linear_fc1=_with_bias(ColumnProduct), linear_fc2=_with_bias(RowProduct))


def _local_experts(architecture: Architecture) -> ModuleSpec:
    interleaved = architecture.moe is not None and architecture.moe.interleaved
    expert = LOCAL_INTERLEAVED_EXPERT if interleaved else LOCAL_EXPERT
    return ModuleSpec(
        module=MoELayer,
        submodules=MoESubmodules(
            experts=ModuleSpec(module=SequentialMLP, submodules=expert),
            shared_experts=ModuleSpec(module=SharedExpertMLP, submodules=LOCAL_MLP),
            router=BiasedRouter if interleaved else SampleRouter,
        ),
    )


def _with_bias(linear: Any) -> type[torch.nn.Module]:
    """Returns `linear` with a bias. Megatron's config can only set it for attention's output and MLPs together."""

    class Biased(linear):
        def __init__(self, *arguments: Any, **settings: Any) -> None:
            super().__init__(*arguments, **(settings | {"bias": True}))

    return Biased


def _with_post_norm_of(architecture: Architecture, submodules: Submodules, name: str) -> Submodules:
    """Returns `submodules` with a norm after the module `name`, if the architecture has post-norms."""
    if not architecture.post_norms:
        return submodules
    return replace(submodules, **{name: _with_post_norm(getattr(submodules, name))})


def _with_post_norm(linear: Any) -> type[torch.nn.Module]:
    """Returns `linear`, an output projection to the hidden state, with a norm of its outputs."""

    class Normed(linear):
        def __init__(self, *arguments: Any, config: TransformerConfig, **settings: Any) -> None:
            super().__init__(*arguments, config=config, **settings)
            self.post_layernorm = RMSNorm(config, config.hidden_size, config.layernorm_epsilon)
            self.register_forward_hook(_normed)  # a hook, so other hooks can run before it

    return Normed


def _normed(linear: Any, _: Any, output: tuple[Tensor, Tensor | None]) -> tuple[Tensor, Tensor | None]:
    return linear.post_layernorm(output[0]), output[1]


def make_again(layers: Iterable[Any], modules: Collection[RecomputedModule]) -> None:
    """Lets backward make the outputs of these modules again in Megatron's own layers. Modules that are not cheap are
    ignored.

    The norm before experts is not among them, because routers and the dispatch keep its outputs.
    """
    for layer in layers:
        attention, mlp = layer.self_attention, layer.mlp
        is_dense = isinstance(mlp, MLP)
        if "layernorm" in modules:
            layer.input_layernorm.is_made_again = True
            layer.pre_mlp_layernorm.is_made_again = is_dense
        if "rotation" in modules and isinstance(attention, FusedSelfAttention):
            attention.is_made_again = True
        if "activation" in modules and is_dense and isinstance(mlp.activation_func, GatedActivation):
            mlp.activation_func.is_made_again = True


def scale_embedding(embedding: torch.nn.Module, scale: float, dtype: torch.dtype) -> None:
    """Multiplies the embeddings by `scale`, rounded to `dtype`, at the start of the residual stream."""
    rounded = float(torch.tensor(scale, dtype=dtype))
    embedding.register_forward_hook(lambda module, inputs, embedded: embedded * rounded)


def mark_parallel_weights(model: torch.nn.Module) -> None:
    """Marks sharded weights for gradient norms, and experts' weights for data parallelism.

    Megatron marks shards during weight initialization, and that is skipped here. It marks experts only if ep is above
    1. But with etp below tp an expert's weights are shared by other ranks than the remaining weights, and need the mark
    too. Transformer Engine marks every weight of a product as a shard, even weights held whole by all tensor-parallel
    ranks.
    """
    axes = {ColumnParallelLinear: 0, VocabParallelEmbedding: 0, RowParallelLinear: 1}
    for module in model.modules():
        weight = getattr(module, "weight", None)
        axis = next((axis for kind, axis in axes.items() if isinstance(module, kind)), None)
        if axis is not None and weight is not None and not hasattr(weight, "tensor_model_parallel"):
            set_parallel_attributes(weight, is_parallel=True, dim=axis, stride=1)
        if weight is not None and getattr(module, "parallel_mode", "column") is None:
            weight.tensor_model_parallel = False
    for name, parameter in model.named_parameters():
        if is_expert(name):
            parameter.allreduce = False  # type: ignore[attr-defined]
            # No two ranks of an expert's model-parallel group hold the same elements, even without a split.
            parameter.tensor_model_parallel = True  # type: ignore[attr-defined]
