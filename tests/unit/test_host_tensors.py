"""Weights that wait on the host: pinned without rounding, and once per node where its ranks have equal ones."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from rltrain.offload import host_memory
from rltrain.offload.host_memory import ALIGNMENT_BYTES, HostTensors, equals_on_node
from rltrain.roles.reference import ReferenceRole
from rltrain.runtime.job_store import JobStore
from rltrain.runtime.world import World
from tests.unit.shared_store import on_ranks, open_store

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
LIKE = {
    "norm.weight": torch.empty(5, dtype=torch.bfloat16),
    "bias": torch.empty(3, dtype=torch.float32),
    "empty": torch.empty(0, 4),
    "mlp.weight": torch.empty(7, 33, dtype=torch.bfloat16),
}
BYTES = sum(tensor.nbytes for tensor in LIKE.values())


class Cudart:
    """What the runtime is asked to pin; as it does, it refuses memory that is pinned already."""

    def __init__(self, status: int = 0) -> None:
        self.pinned: list[tuple[int, int]] = []
        self.status = status

    def cudaHostRegister(self, pointer: int, num_bytes: int, flags: int) -> int:  # noqa: N802 - CUDA's name
        assert flags == 1 and num_bytes > 0
        assert not any(first < pointer + num_bytes and pointer < first + size for first, size in self.pinned)
        self.pinned.append((pointer, num_bytes))
        return self.status


def fill(tensors: dict[str, Tensor], value: float) -> None:
    for number, tensor in enumerate(tensors.values()):
        tensor.fill_(value + number)


def test_tensors_lie_end_to_end_and_are_pinned_in_one_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    cudart = Cudart()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cudart)
    host = HostTensors(LIKE, CUDA)
    assert {name: (t.shape, t.dtype) for name, t in host.tensors.items()} == {
        name: (t.shape, t.dtype) for name, t in LIKE.items()
    }
    fill(host.tensors, 3)
    assert [float(t.float().mean()) for t in host.tensors.values() if t.numel()] == [3, 4, 6], "none overlaps another"
    [(first, num_bytes)] = cudart.pinned
    assert BYTES <= num_bytes < BYTES + ALIGNMENT_BYTES * len(LIKE), "no rounding to a power of two"
    for tensor in host.tensors.values():
        assert tensor.data_ptr() % ALIGNMENT_BYTES == 0 or not tensor.numel()
        assert first <= tensor.data_ptr() <= first + num_bytes - tensor.nbytes or not tensor.numel()


def test_nothing_is_pinned_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "cudart", lambda: pytest.fail("there is no CUDA"))
    assert HostTensors(LIKE, CPU).is_own


def test_memory_that_cannot_be_pinned_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "cudart", lambda: Cudart(status=2))
    with pytest.raises(RuntimeError, match=r"could not pin \d+ bytes .* returned 2\)"):
        HostTensors(LIKE, CUDA)


def test_another_process_has_the_same_memory() -> None:
    """Here it is this process once more; tests/unit/test_shared_memory.py has real ones."""
    own = HostTensors(LIKE, CPU)
    fill(own.tensors, 1)
    other = HostTensors.of_another(own.place, LIKE, CPU)
    assert not other.is_own
    assert all(torch.equal(other.tensors[name], own.tensors[name]) for name in LIKE)
    own.tensors["bias"][1] = 9
    assert other.tensors["bias"].tolist() == [2, 9, 2]
    with pytest.raises(ValueError, match="shared memory of"):
        HostTensors.of_another(own.place, {"bias": LIKE["bias"]}, CPU)
    with pytest.raises(OSError, match="it is a process of elsewhere"):
        HostTensors.of_another(("elsewhere", *own.place[1:]), LIKE, CPU)


def test_ranks_with_an_equal_share_on_the_node() -> None:
    ranks, parts = (1, 2, 3, 4, 5, 6, 7), (0, 1, 0, 1, 0, 1, 0)
    equals = {rank: equals_on_node(ranks, parts, rank, ranks_per_node=4) for rank in ranks}
    assert equals == {1: (1, 3), 2: (2,), 3: (1, 3), 4: (4, 6), 5: (5, 7), 6: (4, 6), 7: (5, 7)}


def weights_over(rank: int, store: dist.Store, log: list[int]) -> dict[str, Any]:
    """What a rank of four, two to a node and all with equal weights, comes to have."""
    world = World(rank, 4, rank % 2, 2, CPU, store, timeout_s=10)

    def load(layout: Any, tensors: dict[str, Tensor]) -> None:
        log.append(rank)
        fill(tensors, 2)

    made = ReferenceRole.__new__(ReferenceRole)
    made.job = SimpleNamespace(
        world=world,
        job_store=JobStore(world),
        model_site=lambda role: SimpleNamespace(load_weights=load),
        resumed=None,
    )
    actor = SimpleNamespace(
        parameters={name: torch.zeros_like(tensor) for name, tensor in LIKE.items()},
        layout=SimpleNamespace(ranks=(0, 1, 2, 3), parts=(0, 0, 0, 0)),
        parts={"weights": None},
    )
    overlay = made._weights_over(actor, made._host_weights(actor))
    return {
        "bytes": overlay.host_bytes,
        "values": [float(host.float().sum()) for _, host in overlay._pairs],
    }


@pytest.mark.parametrize("reachable", [True, False])
def test_a_node_reads_and_keeps_equal_weights_once(reachable: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not reachable:
        machines = iter(f"machine {number}" for number in range(99))
        monkeypatch.setattr(host_memory, "this_machine", lambda: next(machines))
    read: list[int] = []
    with open_store() as store:
        ranks = on_ranks(store, lambda rank, own: weights_over(rank, own, read), 4)
    assert sorted(read) == ([0, 2] if reachable else [0, 1, 2, 3])
    assert len({tuple(rank["values"]) for rank in ranks}) == 1
    assert [rank["bytes"] for rank in ranks] == [BYTES, 0 if reachable else BYTES] * 2
