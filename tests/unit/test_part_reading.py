"""A part's tensors can be read where they lie: on the device or on the host."""

import pytest
import torch

from rltrain.offload.host_memory import HostRegion
from rltrain.offload.memory_parts import MemoryPart, PartOnHost

BUFFER = torch.arange(24.0)
"""What two views of one storage show."""


class Held:
    """Tensors and the part that they make up."""

    def __init__(self) -> None:
        self.matrix = BUFFER.clone().view(6, 4)
        self.tail = self.matrix.view(-1)[10:]
        self.steps = torch.tensor(3.0, dtype=torch.float64)
        self.part = MemoryPart(lambda: [self.steps, self.matrix, self.tail])

    def check(self) -> None:
        assert torch.equal(self.part.read(self.matrix), BUFFER)
        assert torch.equal(self.part.read(self.tail), BUFFER[10:])
        assert torch.equal(self.part.read(self.matrix, 5, 7), BUFFER[5:12])
        assert torch.equal(self.part.read(self.tail, 2), BUFFER[12:])
        assert self.part.read(self.matrix, 3, 0).shape == (0,)
        assert self.part.read(self.steps).tolist() == [3.0]
        kept = torch.zeros(7)
        assert self.part.read(self.matrix, 5, 7, into=kept) is kept and torch.equal(kept, BUFFER[5:12])


@pytest.fixture
def held() -> Held:
    return Held()


def leave(part: MemoryPart) -> None:
    part.save()
    part.leave()


def test_on_the_device(held: Held) -> None:
    held.check()


def test_on_the_host(held: Held) -> None:
    leave(held.part)
    assert held.matrix.untyped_storage().nbytes() == 0
    held.check()


def test_on_the_host_in_several_slabs(held: Held, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HostRegion, "_slab_bytes", lambda self, missing: 12)
    leave(held.part)
    held.check()


def test_on_its_way_back_from_the_host(held: Held) -> None:
    leave(held.part)
    held.part.allocate()
    held.part.fill()
    held.matrix.zero_()  # as where the copies have not arrived
    held.check()


def test_after_a_change_on_the_device(held: Held) -> None:
    leave(held.part)
    held.part.allocate()
    held.part.fill()
    held.part.changed()
    held.matrix.neg_()
    assert torch.equal(held.part.read(held.tail), -BUFFER[10:])


@pytest.mark.parametrize("away", [False, True])
def test_what_is_read_is_a_copy(held: Held, away: bool) -> None:
    if away:
        leave(held.part)
    held.part.read(held.matrix).zero_()
    held.check()


def test_a_dropped_part_cannot_be_read(held: Held) -> None:
    held.part.leave(drop=True)
    with pytest.raises(RuntimeError, match="dropped"):
        held.part.read(held.matrix)


def test_a_foreign_tensor_is_refused(held: Held) -> None:
    leave(held.part)
    with pytest.raises(RuntimeError, match="none of the part's storages"):
        held.part.read(torch.zeros(3))


def test_what_lies_on_the_host_for_good_never_moves(held: Held) -> None:
    hosted = torch.arange(5.0)
    part = PartOnHost(lambda: [held.matrix, hosted], [hosted])
    assert (part.device_bytes, part.host_bytes) == (BUFFER.nbytes, hosted.nbytes)
    leave(part)
    assert part.device_bytes == 0 and part.host_bytes == 128 + hosted.nbytes  # in whole multiples of 64
    assert torch.equal(part.read(hosted, 1, 3), hosted[1:4]) and torch.equal(part.read(held.matrix), BUFFER)
    kept = torch.zeros(4)
    assert part.read(hosted, 1, into=kept) is kept and torch.equal(kept, hosted[1:])
