"""What training holds on the device beside the weights, in the parts that come and go on their own."""

from collections.abc import Iterator, Sequence

from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer
from torch import Tensor

from rltrain.offload.memory_parts import MemoryPart, PartOnHost
from rltrain.training.megatron.model import LanguageModel
from rltrain.training.megatron.optimizer import members
from rltrain.training.megatron.stepping import stepping


def training_parts(
    model: LanguageModel, chunks: Sequence[DistributedDataParallel], optimizer: MegatronOptimizer
) -> dict[str, MemoryPart]:
    """master_weights, optimizer and gradients, none of which shares memory with another or with the weights.

    With fp32 weights the optimizer works on these themselves, and master_weights is empty. What an optimizer with
    cpu_offload has on the host belongs to the parts and stays there.
    """
    owned = [own for member in members(optimizer) if (own := stepping(member))]
    return {
        "master_weights": PartOnHost(
            lambda: _master_weights(model, optimizer), [master for own in owned for master in own.host_masters()]
        ),
        "optimizer": PartOnHost(lambda: _states(optimizer), [state for own in owned for state in own.host_states()]),
        # Beside the buffers Megatron keeps fp32 gradients of the master weights until it makes the next ones.
        "gradients": MemoryPart(lambda: _gradients(chunks), forget=lambda: optimizer.zero_grad(set_to_none=True)),
    }


def _master_weights(model: LanguageModel, optimizer: MegatronOptimizer) -> list[Tensor]:
    """What the optimizer works on, but for views of the weights, and for keys whose masters are on the host."""
    weights = {_storage(parameter) for parameter in model.parameters()}
    found = []
    for member in members(optimizer):
        own = stepping(member)
        keys = (key for group in member.param_groups for key in group["params"])
        found += [key for key in keys if _storage(key) not in weights and not (own and own.has_host_master(key))]
    return found


def _states(optimizer: MegatronOptimizer) -> Iterator[Tensor]:
    """Moments and step counts; none before the first step."""
    for _, state in optimizer.state.items():
        yield from (value for value in state.values() if isinstance(value, Tensor))


def _gradients(chunks: Sequence[DistributedDataParallel]) -> list[Tensor]:
    return [buffer.grad_data for chunk in chunks for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers)]


def _storage(tensor: Tensor) -> int:
    """Tells storages apart, also those that are empty at the moment."""
    return tensor.untyped_storage()._cdata
