"""Copies of the residency are ordered with all that uses the memory: tests/stand_ins/cuda_streams.py.

What runs is Residency with CudaMemory; torch's operators say what they touch, on which stream.
"""

from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rltrain.offload.device_memory import CudaMemory
from rltrain.offload.memory_parts import MemoryPart, OverlayPart, PausedRegion, ResizedStorages, SizedStorages
from rltrain.offload.offload import Offloader
from rltrain.schedule.order import Order
from tests.stand_ins.cuda_streams import Device, Operators, RaceError, Stream
from tests.unit.test_residency import NEEDS, PARTS, Entry

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
ROLES = ("actor", "critic", "reference", "rollout")
TASKS = sorted(NEEDS)


class Saver:
    """In the place of torch_memory_saver: pages go at once."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self.regions: dict[str, PausedRegion] = {}

    def pause(self, tag: str) -> None:
        for storage in self.regions[tag]._inside.values():
            self.device.freed(storage._cdata, f"memory of {tag}", at_once=True)

    def resume(self, tag: str) -> None:
        for storage in self.regions[tag]._inside.values():
            self.device.allocated(storage._cdata, storage.nbytes())

    @contextmanager
    def region(self, tag: str) -> Any:
        yield


def tell_of_storages(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """The device hears of storages that are made empty and large again."""

    def free(self: ResizedStorages, storages: SizedStorages) -> None:
        for storage, size in storages:
            device.freed(storage._cdata, f"a storage of {size} bytes")
            storage.resize_(0)

    def allocate(self: ResizedStorages, storages: SizedStorages) -> None:
        for storage, size in storages:
            storage.resize_(size)
            device.allocated(storage._cdata, size)

    monkeypatch.setattr(ResizedStorages, "free", free)
    monkeypatch.setattr(ResizedStorages, "allocate", allocate)


def take_turns(names: list[str], stops: int | None, *, saver: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tasks by these names, each of which reads and writes on the default stream what is declared of it; from position
    `stops` on none but the final one."""
    device = Device()
    device.install(monkeypatch)
    tell_of_storages(device, monkeypatch)
    order = [Entry(name, step) for step, name in enumerate(names)]
    order.append(Entry("save_hf", len(order), final=True))
    pages = Saver(device)
    residency = Offloader(
        Order.of(order),
        dict.fromkeys(ROLES, "auto"),
        CudaMemory(CUDA),
        guests=("reference",),
        memory_saver=pages if saver else None,
    )
    with Operators(device) as operators:
        tensors = {
            (role, part): [torch.ones(40), torch.ones(3, 5)]
            for role in ROLES
            for part in PARTS[role]
            if role != "reference"
        }
        for kept in tensors.values():
            operators.holds(kept)
        parts = {key: MemoryPart(lambda kept=kept: kept) for key, kept in tensors.items()}
        beneath = "actor", "weights"
        on_host = [torch.zeros_like(tensor) for tensor in tensors[beneath]]
        parts["reference", "weights"] = OverlayPart(parts[beneath], tensors[beneath], on_host)
        tensors["reference", "weights"] = tensors[beneath]
        for role in ROLES:
            residency.admit(role, {part: parts[role, part] for part in PARTS[role]})
            if saver:
                pages.regions |= {f"{role}.{part}": parts[role, part].memory for part in PARTS[role]}
        for position, entry in enumerate(order):
            if stops is not None and position > stops and not entry.final:
                continue
            residency.enter(position)
            needs = NEEDS[entry.name]
            for key in sorted(needs.parts):
                for tensor in tensors[key]:
                    tensor.sum() if key in needs.reads else tensor.add_(1)
            for key in sorted(needs.keeps):
                parts[key].read(tensors[key][0])


@settings(max_examples=30)
@given(
    st.lists(st.sampled_from(TASKS), min_size=1, max_size=8).filter(lambda names: names[0] != "checkpoint"),
    st.sampled_from([None, 1, 3]),
    st.booleans(),
)
def test_nothing_races_in_any_order_of_tasks(names: list[str], stops: int | None, saver: bool) -> None:
    with pytest.MonkeyPatch.context() as monkeypatch:
        take_turns(names, stops, saver=saver, monkeypatch=monkeypatch)


STEPS = ["weight_sync", "generate", "reference_logprobs", "update"] * 2
LEFT_OUT = {
    "copying what a task still writes": mock.patch.object(Stream, "wait_stream", lambda *_: None),
    "freeing what is still copied": mock.patch.object(CudaMemory, "finish_copies", lambda _: None),
    "copying on a stream that is not awaited": mock.patch.object(Stream, "synchronize", lambda _: None),
}


@pytest.mark.parametrize("saver", [False, True])
@pytest.mark.parametrize("fault", LEFT_OUT)
def test_a_wait_that_is_left_out_is_found(fault: str, saver: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    with LEFT_OUT[fault], pytest.raises(RaceError, match="nothing orders|is freed while"):
        take_turns(STEPS, None, saver=saver, monkeypatch=monkeypatch)
