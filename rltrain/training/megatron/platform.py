"""What megatron-core needs to run where there is no CUDA device. Nothing here takes effect where there is one."""

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
    """Megatron allocates parameters' gradients, receive buffers and collectives' outputs on the current CUDA device."""
    torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment, return-value]


def cuda_literals_mean_the_cpu() -> None:
    """Schedules, optimizers, loss scales and gradient norms make small tensors with a literal device="cuda"."""
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
    """Optimizers recognise parameters and gradients by the names of CUDA tensor types when set up and when clipping."""
    for owner, name in (
        (distrib_optimizer.DistributedOptimizer, "__init__"),
        (megatron.core.optimizer.optimizer.Float16OptimizerWithFloat16Params, "__init__"),
        (megatron.core.optimizer.optimizer, "clip_grad_by_total_norm_fp32"),
    ):
        setattr(owner, name, _within(_cuda_type_names, getattr(owner, name)))


def tied_embeddings_stay_on_the_cpu() -> None:
    """The first and last pipeline stage's copies of a tied embedding are moved by Tensor.cuda()."""
    name = "setup_embeddings_and_output_layer"
    setattr(LanguageModule, name, _within(_cuda_is_identity, getattr(LanguageModule, name)))


def recomputation_keeps_no_cuda_random_state() -> None:
    """Activation recomputation saves and restores the CUDA generator's state beside the CPU's."""
    megatron.core.tensor_parallel.random._get_cuda_rng_state = lambda *args, **kwargs: torch.empty(0)
    megatron.core.tensor_parallel.random._set_cuda_rng_state = lambda *args, **kwargs: None


def experts_get_tokens_without_streams() -> None:
    """Counts of the tokens for each expert are copied to the host on a CUDA stream of their own."""
    stream = types.SimpleNamespace(record_event=lambda: types.SimpleNamespace(synchronize=lambda: None))
    cuda = types.SimpleNamespace(Stream=lambda: stream, current_stream=lambda: stream, stream=nullcontext)
    megatron.core.transformer.moe.token_dispatcher.torch = _torch_with(cuda=cuda)


def uneven_shares_are_exchanged() -> None:
    """Ranks that an expert is cut over get all tokens of each other, unequally many; gloo takes equal shares alone."""
    stand_in = types.ModuleType("torch.distributed")
    stand_in.__dict__.update(
        torch.distributed.__dict__, all_gather=_all_gather_uneven, reduce_scatter=_reduce_scatter_uneven
    )
    megatron.core.tensor_parallel.mappings.torch = _torch_with(distributed=stand_in)


def counts_of_tokens_are_numbers() -> None:
    """They become arrays, as all-to-all takes them, only on their way to the host from a CUDA device."""
    megatron.core.transformer.moe.token_dispatcher.maybe_move_tensor_to_cpu = _as_numbers


def routers_use_torch() -> None:
    """They take Megatron's wrapper of Transformer Engine's matrix product, which can be imported without it, for it."""
    megatron.core.transformer.moe.moe_utils.te_general_gemm = None


def latent_attention_knows_no_transformer_engine() -> None:
    """It, too, takes Megatron's wrappers for Transformer Engine: it asks whether a layer is one of its."""
    megatron.core.transformer.multi_latent_attention.HAVE_TE = False


def slices_of_angles_are_cut_on_the_cpu() -> None:
    """YaRN's angles are made once with the model, and cut among the ranks of context parallelism by indices that are
    pinned and sent to a CUDA device."""
    megatron.core.models.common.embeddings.yarn_rotary_pos_embedding.get_pos_emb_on_this_cp_rank = _slices_of_rank


def gradient_buckets_have_no_stream() -> None:
    """Since 0.19 the buckets of gradients ask for the current CUDA stream, for events that CUDA graphs leave."""
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
    """Make megatron-core usable on this machine; call before building models. Repeated calls change nothing.

    Without CUDA every patch of PATCHES is applied; with CUDA, none.
    """
    if torch.cuda.is_available():
        return
    for patch in PATCHES:
        if patch not in _applied:
            patch()
            _applied.add(patch)


def _torch_with(**replaced: Any) -> types.ModuleType:
    """What stands for torch in a module of Megatron: all of it, but for some names."""
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
    """A method of torch.Tensor, replaced for the duration."""
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
