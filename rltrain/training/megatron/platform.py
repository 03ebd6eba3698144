"""Adaptations of megatron-core to machines without a CUDA device. With CUDA none of them takes effect."""

import functools
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import megatron.core.distributed.param_and_grad_buffer
import megatron.core.models.common.embeddings.yarn_rotary_pos_embedding
import megatron.core.optimizer.clip_grads
import megatron.core.optimizer.grad_scaler
import megatron.core.optimizer.optimizer
import megatron.core.pipeline_parallel.schedules
import megatron.core.tensor_parallel.mappings
import megatron.core.tensor_parallel.random
import megatron.core.transformer.moe.moe_utils
import megatron.core.transformer.moe.token_dispatcher
import megatron.core.transformer.multi_latent_attention
import megatron.core.utils
import torch
from megatron.core.models.common.language_module.language_module import LanguageModule
from megatron.core.optimizer import distrib_optimizer

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
