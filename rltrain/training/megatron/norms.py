"""Norms with Megatron's constructors: of the hidden state, of single heads, of all heads at once, of latents."""

from collections.abc import Callable, Iterable
from typing import Any, cast

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    reduce_from_tensor_model_parallel_region,
)
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from rltrain.models import Architecture
from rltrain.models.attention import fused_kernels_for
from rltrain.models.families import LATENT_NORM_EPS
from rltrain.training.megatron.platform import RmsNorm, takes_fused
from rltrain.training.recipes import with_recipe

Addition = Callable[[tuple[Tensor, Tensor | None], Tensor, float], Tensor]
"""Adds (outputs, a bias) of a module to the residual stream, with a dropout."""


def parameter_device(config: TransformerConfig) -> str | int:
    """Returns the device of new parameters in Megatron."""
    return "cpu" if config.use_cpu_initialization else torch.cuda.current_device()


class RMSNorm(torch.nn.RMSNorm):
    """torch's RMSNorm with Megatron's constructor. Megatron's own wrapper rejects sequence parallelism.

    With `layernorm_zero_centered_gamma` it multiplies by 1 + weight.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float, **unused: Any) -> None:
        super().__init__(hidden_size, eps=eps, device=parameter_device(config), dtype=config.params_dtype)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        self.offset = 1.0 if config.layernorm_zero_centered_gamma else 0.0
        self.is_made_again = False
        """Whether backward makes outputs again for the products after the norm."""
        self.prepared: tuple[Tensor, Tensor] | None = None
        """A sum whose norm was computed with it, and this norm, until the next call."""

    def gain(self) -> Tensor:
        """Returns the factor of the norm: the weight itself, or 1 + weight in fp32."""
        if not self.offset:
            return self.weight
        return self.weight.to(torch.promote_types(self.weight.dtype, torch.float32)) + self.offset

    def forward(self, x: Tensor) -> Tensor:
        prepared, self.prepared = self.prepared, None
        normed = prepared[1] if prepared is not None and prepared[0] is x else self.normed(x)
        return with_recipe(normed, self.normed, x) if self.is_made_again else normed

    def normed(self, x: Tensor) -> Tensor:
        """Returns the norm in the weights' type, rounded once, even for wider `x`."""
        assert self.eps is not None
        kernels = fused_kernels_for(x)
        if kernels is not None:
            by_kernel: Tensor = kernels.rms_norm(x, self.weight, self.eps, self.offset)
            return by_kernel
        weight = self.gain()
        if not takes_fused(x):
            wide = x.to(torch.promote_types(x.dtype, weight.dtype))
            normed = torch.nn.functional.rms_norm(wide, self.normalized_shape, weight.to(wide.dtype), self.eps)
            return normed.to(self.weight.dtype)
        fused: Tensor = RmsNorm.apply(x, weight.to(x.dtype), self.eps)
        return fused.to(self.weight.dtype)


class NormedSum:
    """Replaces Megatron's addition to the residual stream: it computes the following norm in the same kernel.

    The norm's module returns the result when it is called with the sum. Without such a kernel `plain` adds.
    """

    def __init__(self, plain: Callable[[bool, bool], Addition], norm: RMSNorm) -> None:
        self.plain, self.norm = plain, norm

    def __call__(self, training: bool, fused: bool) -> Addition:
        """Returns the function for Megatron's layers. There is no dropout."""
        plain = self.plain(training, fused)

        def add(added: tuple[Tensor, Tensor | None], residual: Tensor, dropout: float) -> Tensor:
            x, bias = added
            kernels = fused_kernels_for(residual)
            if kernels is None or bias is not None:
                return plain(added, residual, dropout)
            assert self.norm.eps is not None
            total, normed = kernels.added_norm(residual, x, self.norm.weight, self.norm.eps, self.norm.offset)
            self.norm.prepared = total, normed
            return cast(Tensor, total)

        return add


def norm_with_sums(layers: Iterable[Any], last: torch.nn.Module | None) -> None:
    """Lets every layer compute sums of the residual stream together with the norm after them.

    `last` is the norm after the last layer. A layer that is recomputed normalizes its input again, so there the sum
    before is apart.
    """
    following: Any = last
    for layer in reversed(list(layers)):
        config = layer.config
        is_separate = config.recompute_granularity == "full" or layer.recompute_input_layernorm
        if type(following) is RMSNorm and not is_separate:
            layer.mlp_bda = NormedSum(layer.mlp_bda, following)
        if type(layer.pre_mlp_layernorm) is RMSNorm and not layer.recompute_pre_mlp_layernorm:
            layer.self_attn_bda = NormedSum(layer.self_attn_bda, layer.pre_mlp_layernorm)
        following = layer.input_layernorm


class LayerNorm(torch.nn.LayerNorm):
    """torch's LayerNorm with Megatron's constructor, like RMSNorm above."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float, **unused: Any) -> None:
        super().__init__(hidden_size, eps=eps, device=parameter_device(config), dtype=config.params_dtype)
        self.is_made_again = False
        self.offset = 1.0 if config.layernorm_zero_centered_gamma else 0.0
        for parameter in self.parameters():
            parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        return with_recipe(self.normed(x), self.normed, x) if self.is_made_again else self.normed(x)

    def normed(self, x: Tensor) -> Tensor:
        """Returns the norm in the weights' type, rounded once, even for wider `x`."""
        wide = torch.promote_types(torch.promote_types(x.dtype, self.weight.dtype), torch.float32)
        gain, bias = self.weight.to(wide) + self.offset, self.bias.to(wide)
        normed = torch.nn.functional.layer_norm(x.to(wide), self.normalized_shape, gain, bias, self.eps)
        return normed.to(self.weight.dtype)


def hidden_norm(architecture: Architecture) -> type[LayerNorm | RMSNorm]:
    """Returns the class of the norms of the hidden state."""
    return LayerNorm if architecture.norm_bias else RMSNorm


class LatentNorm(RMSNorm):
    """The norm of a latent of queries, or of keys and values."""

    def __init__(self, config: TransformerConfig, hidden_size: int, **unused: Any) -> None:
        super().__init__(config, hidden_size, LATENT_NORM_EPS)


class ProjectionNorm(RMSNorm):
    """The norm of all `num_heads` heads of a token's queries, or of its keys, at once.

    Every tensor-parallel rank has the whole weight and some heads. Other ranks may have the same heads. Megatron sums
    the gradients of head norms over the ranks.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float, num_heads: int, **unused: Any) -> None:
        super().__init__(config, num_heads * hidden_size, eps)
        self.num_heads = num_heads
        self.tp_group: dist.ProcessGroup | None = None
        """Set by the attention layer before the first call."""

    def forward(self, heads: Tensor) -> Tensor:
        """Normalizes [..., this rank's heads, head_dim], rounding once. Collective over: the tensor-parallel group."""
        assert self.tp_group is not None and self.eps is not None
        count, head_dim, num_ranks = heads.size(-2), heads.size(-1), self.tp_group.size()
        wide = heads.to(torch.promote_types(heads.dtype, torch.float32))
        squares = wide.square().sum((-2, -1), keepdim=True) * (self.num_heads / (count * num_ranks))
        if num_ranks > 1:
            summed = reduce_from_tensor_model_parallel_region(squares, group=self.tp_group)
            # All ranks' heads depend on the sum, so its gradient is summed over the ranks.
            squares = copy_to_tensor_model_parallel_region(summed, group=self.tp_group)
        first = self.tp_group.rank() * self.num_heads // num_ranks
        gain = self.gain().view(self.num_heads, head_dim)[first : first + count]
        normed = wide * torch.rsqrt(squares / (self.num_heads * head_dim) + self.eps)
        return (normed * gain.to(wide.dtype)).to(self.weight.dtype)
