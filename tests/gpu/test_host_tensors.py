"""Offloaded weights in ordinary host memory, pinned in place."""

import pytest
import torch

from rltrain.offload.host_memory import HostTensors

pytestmark = pytest.mark.gpu

DEVICE = torch.device("cuda", 0)
LIKE = {"a": torch.empty(1000, 1000, dtype=torch.bfloat16), "b": torch.empty(3), "c": torch.empty(2**20)}


def test_both_processes_copies_are_pinned_and_do_not_wait() -> None:
    own = HostTensors(LIKE, DEVICE)
    for number, tensor in enumerate(own.tensors.values()):
        tensor.fill_(number + 1)
    other = HostTensors.of_another(own.place, LIKE, DEVICE)
    for held in (own, other):
        assert all(tensor.is_pinned() for tensor in held.tensors.values())
        copies = {name: tensor.to(DEVICE, non_blocking=True) for name, tensor in held.tensors.items()}
        torch.cuda.synchronize()
        assert [float(copy.float().mean()) for copy in copies.values()] == [1, 2, 3]
