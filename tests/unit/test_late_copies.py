"""Copies of a training state that are made while training goes on: what they are, and who waits for whom."""

import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from rltrain.checkpoint.run_files import Contents, read_contents
from rltrain.checkpoint.run_writer import FilesWriter, Target, Written
from rltrain.offload.memory_parts import MemoryPart
from rltrain.training.trainable import LateCopies, LateTensors
from tests.stand_ins.cuda_streams import Device, Operators


class SlowPart(MemoryPart):
    """Reading it begins when it is let."""

    def __init__(self, tensors: list[Tensor]) -> None:
        super().__init__(lambda: tensors)
        self.reading, self.let = threading.Event(), threading.Event()

    def read(self, tensor: Tensor, first: int = 0, count: int | None = None, *, into: Tensor | None = None) -> Tensor:
        self.reading.set()
        assert self.let.wait(60)
        return super().read(tensor, first, count, into=into)


@pytest.fixture
def late() -> LateCopies:
    return LateCopies(torch.device("cpu"))


def state_of(late: LateCopies, part: MemoryPart, values: list[Tensor]) -> LateTensors:
    late.begin()
    return LateTensors({str(i): late.add(part, one, 0, one.numel(), None) for i, one in enumerate(values)}, late)


def test_what_is_taken_is_copied_and_stays_what_it_was(late: LateCopies) -> None:
    values = [torch.full((4,), 1.0), torch.full((3,), 2.0)]
    saved = state_of(late, MemoryPart(lambda: values), values)
    assert list(saved) == ["0", "1"] and len(saved) == 2
    late.settle()
    for one in values:
        one.zero_()
    assert saved["0"].tolist() == [1.0] * 4 and saved["1"].tolist() == [2.0] * 3


def test_who_would_change_the_state_waits_for_the_writer(late: LateCopies, tmp_path: Path) -> None:
    values = [torch.full((4,), 1.0), torch.full((3,), 2.0)]
    part, reports, writer = SlowPart(values), list[Written](), FilesWriter(asynchronous=True)
    writer.start({"actor/file": Contents(state_of(late, part, values), {})}, Target(tmp_path, reports.append))
    assert part.reading.wait(60)
    timer = threading.Timer(0.05, part.let.set)
    timer.start()
    late.settle()
    assert part.let.is_set(), "settle came back before what is under way was copied"
    for one in values:
        one.zero_()
    writer.join()
    timer.join()
    assert reports[0].problem is None
    assert read_contents(tmp_path / "actor/file").tensors["0"].tolist() == [1.0] * 4
    assert late.take_waited_s() > 0 and late.take_waited_s() == 0.0


@pytest.mark.parametrize("move", [MemoryPart.save, lambda part: part.leave(drop=True)], ids=["to the host", "dropped"])
def test_copies_are_made_before_a_part_moves(late: LateCopies, move: Callable[[MemoryPart], None]) -> None:
    values = [torch.full((4,), 1.0)]
    part = MemoryPart(lambda: values)
    part.settle = late.settle
    saved = state_of(late, part, values)
    move(part)
    assert saved["0"].tolist() == [1.0] * 4


def test_what_was_dropped_is_refused_at_once(late: LateCopies) -> None:
    values = [torch.ones(2)]
    part = MemoryPart(lambda: values)
    part.leave(drop=True)
    with pytest.raises(RuntimeError, match="dropped cannot be read"):
        late.add(part, values[0], 0, 2, None)


def test_a_failed_copy_fails_the_file(late: LateCopies, tmp_path: Path) -> None:
    values = [torch.ones(2)]
    late.begin()
    tensors = LateTensors({"a": late.add(MemoryPart(lambda: values), values[0], 0, 2, torch.empty(3))}, late)
    reports: list[Written] = []
    FilesWriter(asynchronous=False).start({"actor/file": Contents(tensors, {})}, Target(tmp_path, reports.append))
    assert reports[0].problem is not None and "size of tensor" in reports[0].problem


def test_copies_from_a_device_wait_for_the_update_before_and_for_nothing_later(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device()
    device.install(monkeypatch)
    state, activations = torch.zeros(8), torch.zeros(8)
    late, operators = LateCopies(torch.device("cuda")), Operators(device)
    operators.holds([state, activations])
    with operators:
        state.add_(1)
        issued = device.default.clock[device.default.name]
        saved = state_of(late, MemoryPart(lambda: [state]), [state])
        activations.add_(1)
        late.settle()
        assert device.streams[-1].clock[device.default.name] == issued
        state.add_(1)
    assert saved["0"].tolist() == [1.0] * 8
