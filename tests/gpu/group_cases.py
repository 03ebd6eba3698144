"""The process of test_reopened_groups. A communicator still held by a graph would block it forever."""

import torch
import torch.distributed as dist

from rltrain.rollout.embedded.decoder import CudaGraphs, Recordings
from rltrain.runtime.process_groups import ProcessGroups

RANKS = (0,)
NUM_GENERATIONS = 3


def main() -> None:
    """Records, replays and forgets steps that reduce over a group, then reopens the group."""
    torch.cuda.set_device(0)
    dist.init_process_group("cpu:gloo,cuda:nccl", store=dist.HashStore(), rank=0, world_size=1)
    groups = ProcessGroups([RANKS], backend="nccl", timeout_s=60, reopenable=[RANKS])
    recordings, values = Recordings(CudaGraphs()), torch.ones(4, device="cuda")
    for generation in range(NUM_GENERATIONS):
        groups.open({RANKS: generation})
        for _ in range(3):
            recordings.run(generation, lambda: _step(values, groups[RANKS]))
        torch.cuda.synchronize()
        recordings.forget()
        groups.close([RANKS])
    assert values.tolist() == [1.0 + 3 * NUM_GENERATIONS] * 4
    dist.destroy_process_group()


def _step(values: torch.Tensor, group: dist.ProcessGroup) -> None:
    dist.all_reduce(values, group=group)
    values.add_(1)


if __name__ == "__main__":
    main()
