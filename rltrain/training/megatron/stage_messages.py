"""Messages between the stages of a pipeline: hidden states to the stage behind, their gradients to the one before."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from megatron.core.model_parallel_config import ModelParallelConfig
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from torch import Tensor


class PairOfStages(P2PCommunicator):
    """Between two interleaved stages, of which each is both the one before and the one behind the other.

    Nothing but their order tells two messages apart that go from one rank to the other in one exchange: NCCL knows no
    tags, and gloo's are not used. Megatron issues what goes to, and comes from, the stage before first, on both ranks;
    so the gradient that one sends there would be taken for the hidden state that the other awaits from there.
    """

    def _communicate(
        self,
        *,
        tensor_send_next: Tensor | None,
        tensor_send_prev: Tensor | None,
        recv_prev: bool,
        recv_next: bool,
        tensor_shape: Sequence[int],
        wait_on_reqs: bool = True,
    ) -> tuple[Tensor | None, Tensor | None, None]:
        """As Megatron's, of shapes that are known, and done when it returns: hidden states first, then gradients, on
        either side. Collective over: the pipeline-parallel group."""
        other = self.next_rank
        hidden, gradient = (
            torch.empty(
                tuple(tensor_shape),
                requires_grad=True,
                device=torch.cuda.current_device(),
                dtype=self.config.pipeline_dtype,
            )
            if awaited
            else None
            for awaited in (recv_prev, recv_next)
        )
        messages = [
            dist.P2POp(operation, tensor, other, self.pp_group)
            for operation, tensor in (
                (dist.isend, tensor_send_next),
                (dist.irecv, hidden),
                (dist.isend, tensor_send_prev),
                (dist.irecv, gradient),
            )
            if tensor is not None
        ]
        for request in dist.batch_isend_irecv(messages) if messages else ():
            request.wait()
        return hidden, gradient, None


def stage_messages(group: dist.ProcessGroup, config: ModelParallelConfig) -> P2PCommunicator:
    """What a pipeline over `group` exchanges tensors by."""
    is_pair = group.size() == 2 and (config.virtual_pipeline_model_parallel_size or 1) > 1
    return (PairOfStages if is_pair else P2PCommunicator)(group, config)
