"""How far packing and the wire overlap on GPUs, under this process's CUDA_DEVICE_MAX_CONNECTIONS."""

import os
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from weight_sync_case import Case
from weight_sync_timing import milliseconds, time_rounds

from rltrain.models.table import Array, ElementType
from rltrain.reshard.copy_table import CopyTable
from rltrain.reshard.native import SLICE
from rltrain.reshard.plan import RankPlan

ROUNDS = 16


class Overlap:
    """Packs what the plan sends (on one rank, what it copies) in rounds, and exchanges buffers of that size.

    A round's exchange gives every rank an equal share; on one rank NCCL copies it to the rank itself. Collective over:
    all ranks, as the rest of this class.
    """

    def __init__(self, case: Case, plan: RankPlan, source: dict[str, Tensor]) -> None:
        self.case = case
        slices = pack_slices(plan, case)
        elements = slices["rows"] * slices["cols"]
        num_bytes = max(int(elements.sum()) * case.dtype.itemsize, 1)
        self.staging = torch.zeros(num_bytes, dtype=torch.uint8, device=case.device)
        self.table = CopyTable(slices, case.device)
        self.table.bind([*(source[name] for name, _ in plan.source_parameters), self.staging])
        steps = np.searchsorted(elements.cumsum(), np.linspace(0, elements.sum(), ROUNDS + 1)[1:-1])
        self.bounds = [0, *steps.tolist(), len(slices)]
        share = self._smallest(num_bytes) // ROUNDS // dist.get_world_size() * dist.get_world_size()
        self.outgoing, self.incoming = (torch.zeros(share, dtype=torch.uint8, device=case.device) for _ in range(2))
        self.packing, self.moving = (torch.cuda.Stream(case.device) for _ in range(2))

    def measure(self, iterations: int, warm_up: int) -> dict[str, Any]:
        """Milliseconds of both alone and together, and `hidden`, how much of the shorter one does not show."""
        cases: dict[str, Callable[[], None]] = {"pack": self.pack, "wire": self.wire, "both": self.both}
        found = time_rounds(cases, iterations, warm_up, self.case.cpu_group, self.case.device)["kept"]
        times = {name: values["median"] for name, values in milliseconds(found).items()}
        shorter = min(times["pack"], times["wire"])
        return {
            "CUDA_DEVICE_MAX_CONNECTIONS": os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS"),
            "milliseconds": times,
            "hidden": round((times["pack"] + times["wire"] - times["both"]) / shorter, 3) if shorter else None,
            "bytes_packed": len(self.staging),
            "bytes_exchanged": len(self.outgoing) * ROUNDS,
        }

    def pack(self) -> None:
        with torch.cuda.stream(self.packing):
            for number in range(ROUNDS):
                self.table.launch(self.bounds[number], self.bounds[number + 1])

    def wire(self) -> None:
        with torch.cuda.stream(self.moving):
            for _ in range(ROUNDS):
                self._exchange()

    def both(self) -> None:
        """Issued as a reshard does: round k + 1 is packed while round k is on the wire."""
        for number in range(ROUNDS):
            with torch.cuda.stream(self.packing):
                self.table.launch(self.bounds[number], self.bounds[number + 1])
                packed = torch.cuda.Event()
                packed.record(self.packing)
            with torch.cuda.stream(self.moving):
                self.moving.wait_event(packed)
                self._exchange()

    def _exchange(self) -> None:
        work = dist.all_to_all_single(
            self.incoming, self.outgoing, group=self.case.groups[self.case.union], async_op=True
        )
        work.wait()  # makes the stream wait, not the host

    def _smallest(self, value: int) -> int:
        result = torch.tensor([value])
        dist.all_reduce(result, dist.ReduceOp.MIN, group=self.case.cpu_group)
        return int(result)


def pack_slices(plan: RankPlan, case: Case) -> Array:
    """Slices [SLICE] from the source parameters to one buffer after them, in the order of the plan."""
    boxes = plan.direct.sends if len(case.union) > 1 else plan.copies
    place = "" if len(case.union) > 1 else "source_"
    slices = np.zeros(len(boxes), dtype=SLICE)
    slices["src_base"], slices["dst_base"] = boxes[f"{place}parameter"], len(plan.source_parameters)
    slices["src_offset"], slices["src_stride"] = boxes[f"{place}offset"], boxes[f"{place}stride"]
    slices["rows"], slices["cols"], slices["dst_stride"] = boxes["rows"], boxes["cols"], boxes["cols"]
    sizes = boxes["rows"] * boxes["cols"]
    slices["dst_offset"] = sizes.cumsum() - sizes
    slices["amax_base"] = -1
    slices["src_type"] = slices["dst_type"] = ElementType[case.dtype_name.upper()]
    return slices
