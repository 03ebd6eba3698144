"""Megatron on CPUs: layers with few passes over memory, and adaptations of megatron-core to machines without a CUDA
device.

With CUDA no adaptation takes effect. Only sums of gradients are torch's there, if APEX is missing.
"""

import functools
import importlib.util
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import megatron.core.distributed.param_and_grad_buffer
import megatron.core.models.common.embeddings.yarn_rotary_pos_embedding
import megatron.core.optimizer.clip_grads
import megatron.core.optimizer.grad_scaler
import megatron.core.optimizer.optimizer
import megatron.core.pipeline_parallel.schedules
import megatron.core.tensor_parallel.layers
import megatron.core.tensor_parallel.mappings
import megatron.core.tensor_parallel.random
import megatron.core.transformer.moe.moe_utils
import megatron.core.transformer.moe.token_dispatcher
import megatron.core.transformer.multi_latent_attention
import megatron.core.utils
import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.models.common.language_module.language_module import LanguageModule
from megatron.core.optimizer import distrib_optimizer
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel.mappings import copy_to_tensor_model_parallel_region
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.autograd.function import once_differentiable

from rltrain.models.attention import fused_kernels_for
from rltrain.models.products import add_product, adds_products
from rltrain.training.recipes import MadeAgain, with_recipe

# Autograd functions with few passes over memory, for CPUs.
#
# On CPUs torch makes a pass, and in backward several, for each operation of a formula. Each function here computes a
# whole formula, and is differentiable once.

Gradients = tuple[Tensor | None, ...]


def takes_fused(x: Tensor) -> bool:
    """Returns whether these functions are faster than torch's.

    On GPUs torch has better kernels, and in half precision it rounds differently.
    """
    return x.device.type == "cpu" and x.dtype in (torch.float32, torch.float64)


class RmsNorm(torch.autograd.Function):
    """Computes x [..., n] / sqrt(mean x^2 + eps) * weight [n] (Zhang and Sennrich 2019, "Root Mean Square Layer
    Normalization")."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        scale = _inverse_rms(x, eps)
        normed = x * scale
        ctx.save_for_backward(normed, scale, weight)
        return normed * weight

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> Gradients:
        normed, scale, weight = ctx.saved_tensors
        of_weight = gradients[0] * normed
        along = (of_weight @ weight)[..., None] / len(weight)
        of_input = (gradients[0] * weight).addcmul_(normed, along, value=-1).mul_(scale)
        return of_input, of_weight.flatten(0, -2).sum(0), None


class SwiGlu(torch.autograd.Function):
    """Computes silu(gate) * up for gate and up side by side: [..., 2 n] to [..., n] (Shazeer 2020, "GLU Variants
    Improve Transformer")."""

    @staticmethod
    def forward(ctx: Any, gate_up: Tensor) -> Tensor:
        ctx.save_for_backward(gate_up)
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate).mul_(up)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        (gate_up,) = ctx.saved_tensors
        gate, up = gate_up.chunk(2, dim=-1)
        result = torch.empty_like(gate_up)
        of_gate, of_up = result.chunk(2, dim=-1)
        activated = F.silu(gate)
        torch.mul(gradients[0], activated, out=of_up)
        of_activated = torch.mul(gradients[0], up, out=activated)
        torch.ops.aten.silu_backward.grad_input(of_activated, gate, grad_input=of_gate)
        return result


class GatedActivation(torch.nn.Module):
    """The gated activation of an MLP, with the constructor expected by Megatron.

    GELU is the tanh approximation (Hendrycks and Gimpel 2016, arXiv:1606.08415, section 2), as in Megatron's fused
    version.
    """

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        activate = config.activation_func
        self.is_gelu = activate is F.gelu
        self.activate = partial(F.gelu, approximate="tanh") if self.is_gelu else activate
        self.is_made_again = False
        """Whether backward makes outputs again for the product after the activation."""

    def forward(self, gate_up: Tensor) -> Tensor:
        made = self.activated(gate_up)
        return with_recipe(made, self.activated, gate_up) if self.is_made_again else made

    def activated(self, gate_up: Tensor) -> Tensor:
        kernels, is_silu = fused_kernels_for(gate_up), self.activate is F.silu
        if kernels is not None and (is_silu or self.is_gelu):
            by_kernel: Tensor = kernels.gated(gate_up, self.is_gelu)
            return by_kernel
        if is_silu and takes_fused(gate_up):
            activated: Tensor = SwiGlu.apply(gate_up)
            return activated
        gate, up = gate_up.chunk(2, dim=-1)
        product: Tensor = self.activate(gate) * up
        return product

    def sharded_state_dict(self, *unused: Any, **also_unused: Any) -> dict[str, Any]:
        """Returns an empty dict. Megatron's checkpoints call it for every module of an MLP."""
        return {}


class TurnedHeads(torch.autograd.Function):
    """Normalizes and rotates queries and keys of heads [tokens, groups, heads of a group, head_dim] for attention.

    The last head of a group is the values. Queries and keys are normalized if `weight` [heads of a group, head_dim] is
    given.

    A rotation treats elements i and i + size / 2 of the first `size` elements of a head as a point in the plane (Su et
    al. 2021, "RoFormer"). `cos` and `sin` have the shape of the heads. The sines of the first half are negative.

    All arithmetic includes the values and the elements after `size`, because contiguous memory is faster. They have
    weight and cosine 1 and sine 0.
    """

    @staticmethod
    def forward(
        ctx: Any, heads: Tensor, weight: Tensor | None, cos: Tensor, sin: Tensor, eps: float, size: int
    ) -> Tensor:
        ctx.size = size
        if weight is None:
            ctx.save_for_backward(cos, sin)
            return _rotated(heads, cos, sin, size)
        scale = _inverse_rms(heads, eps)
        scale[:, :, -1] = 1
        normed = heads * scale
        ctx.save_for_backward(cos, sin, normed, scale, weight)
        return _rotated(normed * weight, cos, sin, size)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> Gradients:
        cos, sin, *of_norm = ctx.saved_tensors
        of_straight = _rotated(gradients[0], cos, sin, ctx.size, forwards=False)
        if not of_norm:
            return of_straight, None, None, None, None, None
        normed, scale, weight = of_norm
        of_weight = of_straight * normed
        along = _mean(of_weight * weight)
        along[:, :, -1] = 0
        of_heads = of_straight.mul_(weight).addcmul_(normed, along, value=-1).mul_(scale)
        return of_heads, of_weight.flatten(0, 1).sum(0), None, None, None, None


def _rotated(heads: Tensor, cos: Tensor, sin: Tensor, size: int, *, forwards: bool = True) -> Tensor:
    first, second, rest = heads.split([size // 2, size // 2, heads.size(-1) - size], dim=-1)
    swapped = torch.cat([second, first, rest], dim=-1)
    return (heads * cos).addcmul_(swapped, sin, value=1 if forwards else -1)


def _inverse_rms(x: Tensor, eps: float) -> Tensor:
    """Returns 1 / sqrt(mean x^2 + eps), [..., 1]."""
    return _mean(x * x).add_(eps).rsqrt_()


def _mean(x: Tensor) -> Tensor:
    """Returns the mean over the last dimension, kept with size 1. A product is faster here than a sum."""
    size = x.size(-1)
    return x @ x.new_full((size, 1), 1 / size)


# Megatron's parallel linear layers on CPUs, with matrix products by oneDNN.
#
# In float32 torch uses MKL. On processors not made by Intel, MKL uses half the width of the vector units. There oneDNN,
# part of torch as well, takes less than half of MKL's time. oneDNN compiles code for every new number of rows, at the
# cost of a small product. So micro-batches are padded to multiples of `rows_multiple`.

LEAST_ROWS = 64
"""With fewer rows a call of oneDNN costs more than it saves."""


def _has_onednn() -> bool:
    return torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")


HAS_ONEDNN = _has_onednn()


def takes_onednn(rows: Tensor) -> bool:
    """Returns whether `rows_product` uses oneDNN for these rows [n, inner]."""
    return _serves(rows.device, rows.dtype) and len(rows) >= LEAST_ROWS


def rows_multiple(device: torch.device, dtype: torch.dtype) -> int:
    """Returns the best multiple for padding the number of rows."""
    return LEAST_ROWS if _serves(device, dtype) else 1


def rows_product(rows: Tensor, matrix: Tensor) -> Tensor:
    """Returns rows @ matrix.T [n, m] of rows [n, inner] and matrix [m, inner], without a gradient."""
    if not takes_onednn(rows):
        return rows @ matrix.t()
    product: Tensor = torch.ops.mkldnn._linear_pointwise(rows, matrix, None, "none", [], "")
    return product


def columns_product(left: Tensor, right: Tensor) -> Tensor:
    """Returns left.T @ right [n, m] of left [rows, n] and right [rows, m], without a gradient.

    oneDNN is faster if the columns of the narrower one are its rows.
    """
    if not takes_onednn(left):
        return left.t() @ right
    if left.size(1) <= right.size(1):
        return rows_product(left.t(), right.t())
    return rows_product(right.t(), left.t()).t()


def _serves(device: torch.device, dtype: torch.dtype) -> bool:
    return HAS_ONEDNN and dtype == torch.float32 and device.type == "cpu"


class Product(torch.autograd.Function):
    """Computes inputs [..., inner] @ weight [outer, inner].T. For a frozen weight the inputs are not kept."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(inputs if ctx.needs_input_grad[1] else None, weight)
        ctx.shape = inputs.shape
        return rows_product(inputs.flatten(0, -2), weight).view(*inputs.shape[:-1], -1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None]:
        inputs, weight = ctx.saved_tensors
        of_rows = gradients[0].flatten(0, -2)
        of_inputs = rows_product(of_rows, weight.t()).view(ctx.shape) if ctx.needs_input_grad[0] else None
        return of_inputs, columns_product(of_rows, inputs.flatten(0, -2)) if ctx.needs_input_grad[1] else None


class _Product:
    """A mixin of parallel linear layers with oneDNN's product. Everything else is Megatron's.

    With sequence parallelism the product is Megatron's too, since it overlaps with communication. Inputs that backward
    can make again are not kept.
    """

    def forward(self, input_: Tensor, *arguments: Any, **settings: Any) -> Any:
        base: Any = super()
        with MadeAgain(input_):
            return base.forward(input_, *arguments, **settings)

    def _forward_impl(
        self,
        input: Tensor,
        weight: Tensor,
        *,
        bias: Tensor | None,
        sequence_parallel: bool,
        allreduce_dgrad: bool,
        tp_group: dist.ProcessGroup | None,
        **settings: Any,
    ) -> Any:
        if sequence_parallel or not takes_onednn(input.flatten(0, -2)):
            settings |= {"sequence_parallel": sequence_parallel, "allreduce_dgrad": allreduce_dgrad}
            base: Any = super()
            return base._forward_impl(input=input, weight=weight, bias=bias, tp_group=tp_group, **settings)
        if allreduce_dgrad:
            input = copy_to_tensor_model_parallel_region(input, group=tp_group)
        outputs = Product.apply(input, weight)
        return outputs if bias is None else outputs + bias


class ColumnProduct(_Product, ColumnParallelLinear):
    pass


class RowProduct(_Product, RowParallelLinear):
    pass


# Gradients of weights on GPUs. Megatron adds a product directly to an fp32 gradient by an extension of APEX. torch has
# such a product too.

EXTENSION = "fused_weight_gradient_mlp_cuda"


def accumulates_in_products(device: torch.device) -> bool:
    """Returns whether Megatron's layers add products directly to gradients on `device`.

    Without APEX's extension they get torch's product, if it works on the device.
    """
    if device.type != "cuda":
        return False
    if importlib.util.find_spec(EXTENSION) is None:
        if not adds_products(device, torch.bfloat16):
            return False
        add_products_by_torch()
    return True


def add_products_by_torch() -> None:
    """Gives Megatron's linear layers torch's product in the place of APEX's extension."""
    stand_in = types.SimpleNamespace(wgrad_gemm_accum_fp32=add_to_gradient, wgrad_gemm_accum_fp16=add_to_gradient)
    layers = megatron.core.tensor_parallel.layers
    setattr(layers, EXTENSION, stand_in)
    layers._grad_accum_fusion_available = True


def add_to_gradient(inputs: Tensor, of_outputs: Tensor, gradient: Tensor) -> None:
    """Adds of_outputs.T [n, rows] @ inputs [rows, m] to `gradient` [n, m], which may have a wider type."""
    add_product(gradient, of_outputs.t(), inputs)


# Adaptations of megatron-core.

Patch = Callable[[], None]


def current_device_is_the_cpu() -> None:
    """Allocates on the CPU: Megatron puts gradients, receive buffers and outputs of collectives on the current CUDA
    device."""
    torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment, return-value]


def cuda_literals_mean_the_cpu() -> None:
    """Replaces the literal device="cuda" of small tensors in schedules, optimizers, loss scales and gradient norms."""
    stand_in = _torch_with(**{name: _on_cpu(getattr(torch, name)) for name in ("tensor", "zeros")})
    for module in (
        megatron.core.optimizer.clip_grads,
        megatron.core.optimizer.grad_scaler,
        megatron.core.optimizer.optimizer,
        megatron.core.pipeline_parallel.schedules,
        megatron.core.utils,
    ):
        module.torch = stand_in


def tensor_types_are_cuda_types() -> None:
    """Pretends CUDA tensor types: optimizers recognize parameters and gradients by their names, at setup and in
    clipping."""
    for owner, name in (
        (distrib_optimizer.DistributedOptimizer, "__init__"),
        (megatron.core.optimizer.optimizer.Float16OptimizerWithFloat16Params, "__init__"),
        (megatron.core.optimizer.optimizer, "clip_grad_by_total_norm_fp32"),
    ):
        setattr(owner, name, _within(_cuda_type_names, getattr(owner, name)))


def tied_embeddings_stay_on_the_cpu() -> None:
    """Makes Tensor.cuda() do nothing for the tied embedding's copies on the first and last pipeline stage."""
    name = "setup_embeddings_and_output_layer"
    setattr(LanguageModule, name, _within(_cuda_is_identity, getattr(LanguageModule, name)))


def recomputation_keeps_no_cuda_random_state() -> None:
    """Skips the CUDA generator's state in activation recomputation. Only the CPU's is saved and restored."""
    megatron.core.tensor_parallel.random._get_cuda_rng_state = lambda *args, **kwargs: torch.empty(0)
    megatron.core.tensor_parallel.random._set_cuda_rng_state = lambda *args, **kwargs: None


def experts_get_tokens_without_streams() -> None:
    """Replaces the CUDA stream for copying the experts' token counts to the host."""
    stream = types.SimpleNamespace(record_event=lambda: types.SimpleNamespace(synchronize=lambda: None))
    cuda = types.SimpleNamespace(Stream=lambda: stream, current_stream=lambda: stream, stream=nullcontext)
    megatron.core.transformer.moe.token_dispatcher.torch = _torch_with(cuda=cuda)


def uneven_shares_are_exchanged() -> None:
    """Exchanges unequal numbers of tokens between the ranks of a split expert. gloo only takes equal ones."""
    stand_in = types.ModuleType("torch.distributed")
    stand_in.__dict__.update(
        torch.distributed.__dict__, all_gather=_all_gather_uneven, reduce_scatter=_reduce_scatter_uneven
    )
    megatron.core.tensor_parallel.mappings.torch = _torch_with(distributed=stand_in)


def counts_of_tokens_are_numbers() -> None:
    """Converts token counts to arrays for all-to-all. Megatron only does so when copying them from a CUDA device."""
    megatron.core.transformer.moe.token_dispatcher.maybe_move_tensor_to_cpu = _as_numbers


def routers_use_torch() -> None:
    """Hides Transformer Engine's matrix product from routers. Megatron's wrapper can be imported without it and seems
    usable."""
    megatron.core.transformer.moe.moe_utils.te_general_gemm = None


def latent_attention_knows_no_transformer_engine() -> None:
    """Hides Transformer Engine from latent attention. Megatron's wrappers can be imported without it."""
    megatron.core.transformer.multi_latent_attention.HAVE_TE = False


def slices_of_angles_are_cut_on_the_cpu() -> None:
    """Slices YaRN's angles for context parallelism on the CPU. Megatron sends pinned indices to a CUDA device."""
    megatron.core.models.common.embeddings.yarn_rotary_pos_embedding.get_pos_emb_on_this_cp_rank = _slices_of_rank


def gradient_buckets_have_no_stream() -> None:
    """Hides the current CUDA stream from gradient buckets. Since 0.19 they ask for it because of CUDA graphs."""
    cuda = types.SimpleNamespace(**{**vars(torch.cuda), "current_stream": lambda: None})
    megatron.core.distributed.param_and_grad_buffer.torch = _torch_with(cuda=cuda)


PATCHES: tuple[Patch, ...] = (
    current_device_is_the_cpu,
    cuda_literals_mean_the_cpu,
    tensor_types_are_cuda_types,
    tied_embeddings_stay_on_the_cpu,
    recomputation_keeps_no_cuda_random_state,
    experts_get_tokens_without_streams,
    uneven_shares_are_exchanged,
    counts_of_tokens_are_numbers,
    routers_use_torch,
    latent_attention_knows_no_transformer_engine,
    slices_of_angles_are_cut_on_the_cpu,
    gradient_buckets_have_no_stream,
)

_applied: set[Patch] = set()


def adapt_to_platform() -> None:
    """Makes megatron-core usable on this machine. Call it before building models. Repeated calls change nothing.

    Without CUDA every patch of PATCHES is applied, with CUDA none.
    """
    if torch.cuda.is_available():
        return
    for patch in PATCHES:
        if patch not in _applied:
            patch()
            _applied.add(patch)


def _torch_with(**replaced: Any) -> types.ModuleType:
    """Returns a copy of the torch module with some names replaced, for a module of Megatron."""
    stand_in = types.ModuleType("torch")
    stand_in.__dict__.update(torch.__dict__, **replaced)
    return stand_in


def _all_gather_uneven(
    outputs: Sequence[torch.Tensor], share: torch.Tensor, group: torch.distributed.ProcessGroup
) -> None:
    longest = max(len(output) for output in outputs)
    padded = [share.new_empty(longest, *share.shape[1:]) for _ in outputs]
    padded[group.rank()][: len(share)] = share
    torch.distributed.all_gather(padded, padded[group.rank()].clone(), group=group)
    for output, received in zip(outputs, padded, strict=True):
        output.copy_(received[: len(output)])


def _reduce_scatter_uneven(
    output: torch.Tensor, shares: Sequence[torch.Tensor], group: torch.distributed.ProcessGroup
) -> None:
    total = torch.cat(list(shares))
    torch.distributed.all_reduce(total, group=group)
    output.copy_(total.split([len(share) for share in shares])[group.rank()])


def _slices_of_rank(angles: torch.Tensor, dim: int, group: torch.distributed.ProcessGroup) -> torch.Tensor:
    slices = angles.chunk(2 * group.size(), dim)
    return torch.cat([slices[group.rank()], slices[-1 - group.rank()]], dim)


def _as_numbers(counts: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    return counts.numpy() if as_numpy and torch.is_tensor(counts) else counts


def _on_cpu(factory: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(factory)
    def make(*args: Any, **kwargs: Any) -> torch.Tensor:
        if kwargs.get("device") == "cuda":
            kwargs["device"] = "cpu"
        return factory(*args, **kwargs)

    return make


def _within(context: Callable[[], Any], function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        with context():
            return function(*args, **kwargs)

    return wrapped


@contextmanager
def _replaced(name: str, method: Callable[..., Any]) -> Iterator[None]:
    """Replaces a method of torch.Tensor within the context."""
    original = getattr(torch.Tensor, name)
    setattr(torch.Tensor, name, method)
    try:
        yield
    finally:
        setattr(torch.Tensor, name, original)


def _cuda_type_names() -> Any:
    original = torch.Tensor.type

    def type_name(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        result = original(tensor, *args, **kwargs)
        return result.replace("torch.", "torch.cuda.", 1) if isinstance(result, str) else result

    return _replaced("type", type_name)


def _cuda_is_identity() -> Any:
    return _replaced("cuda", lambda tensor, *args, **kwargs: tensor)
