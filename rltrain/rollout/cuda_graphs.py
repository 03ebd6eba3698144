"""Steps of an engine as CUDA graphs, where there are any."""

from collections.abc import Callable

import torch
import torch.distributed as dist

from rltrain.rollout.embedded.recording import Record


def recorder(device: torch.device, group: dist.ProcessGroup | None) -> Record | None:
    """CUDA graphs; None on CPU, which launches nothing, and where gloo would take the host into every step."""
    if device.type != "cuda" or (group is not None and dist.get_backend(group) != "nccl"):
        return None
    return CudaGraphs()


class CudaGraphs:
    """Records CUDA graphs, which share the memory of their intermediate results: they never run at one time."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, step: Callable[[], None]) -> Callable[[], None]:
        graph = torch.cuda.CUDAGraph()
        # Other threads of this process may go on using the device meanwhile.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            step()
        return graph.replay
