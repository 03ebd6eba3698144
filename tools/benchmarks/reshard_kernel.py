"""Measures GB/s of packing the slices of real layers into a contiguous bucket, against the memory's speed and torch.

    python tools/benchmarks/reshard_kernel.py --device cpu [--threads 1 2] [--repeats 9] [--gigabytes 1]
    python tools/benchmarks/reshard_kernel.py --device cuda

The slices are those of one rank for 8 tensor-parallel ranks. They come from Qwen3-8B's layers, and from Qwen3-30B-A3B's
experts. Of the latter's 1,800 slices half are column windows of 96 columns. Each case is one launch on one bucket.

GB/s count (bytes read + bytes written) / 2, the payload of a copy. So a cast can be compared with the same bound: one
contiguous copy of as many bytes, with non-temporal stores on the CPU and from device to device on CUDA. `of_bound` is
the ratio to it. `of_torch` is the ratio to the faster of `_foreach_copy_` and a loop of `copy_` over narrowed tensors.
FP8 has no counterpart in torch. `amax` is the pass before it and only reads. So does `checksum`, used by
weight_sync.verify. With RLTRAIN_NATIVE=off it shows the speed of torch operations.

Each repeat times all rivals of a case in turn, so other load on the machine affects all alike. Medians are reported.
The last line is one JSON object.
"""

import argparse
import ctypes
import json
import platform
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from rltrain.models.table import Array, ElementType
from rltrain.reshard import native
from rltrain.reshard.checksums import BOX, checksums
from rltrain.reshard.copy_table import CopyTable
from rltrain.reshard.native import BLOCK, SLICE

RANKS = 8

DTYPES = {
    ElementType.FLOAT32: torch.float32,
    ElementType.BFLOAT16: torch.bfloat16,
    ElementType.FLOAT8_E4M3: torch.float8_e4m3fn,
}

Rival = Callable[[], None]


@dataclass(frozen=True)
class Matrix:
    """A matrix divided among ranks by rows, or into windows of columns."""

    rows: int
    cols: int
    windows: bool = False


# One layer. Query, key and value rows of a key-value head are adjacent, as are gate and up rows of a rank.
QWEN3_8B = (
    *(Matrix(heads * 128, 4096) for heads in (32, 8, 8)),
    Matrix(4096, 32 * 128, windows=True),
    Matrix(2 * 12288, 4096),
    Matrix(4096, 12288, windows=True),
)
# One expert.
QWEN3_30B_A3B = (Matrix(2 * 768, 2048), Matrix(2048, 768, windows=True))


@dataclass(frozen=True)
class Case:
    name: str
    matrices: tuple[Matrix, ...]
    source: ElementType
    destination: ElementType


CASES = tuple(
    Case(f"{model} {source.name.lower()} -> {destination.name.lower()}", matrices, source, destination)
    for model, matrices in (("Qwen3-8B layers", QWEN3_8B), ("Qwen3-30B-A3B experts", QWEN3_30B_A3B))
    for source, destination in (
        (ElementType.BFLOAT16, ElementType.BFLOAT16),
        (ElementType.FLOAT32, ElementType.BFLOAT16),
        (ElementType.BFLOAT16, ElementType.FLOAT8_E4M3),
        (ElementType.FLOAT32, ElementType.FLOAT8_E4M3),
    )
)


def shards(matrices: tuple[Matrix, ...], max_elements: int) -> Iterator[tuple[int, Matrix, int, int]]:
    """Yields (first element, matrix, rank, first row or column) for every rank's part of each matrix. Repeats the
    matrices up to `max_elements`."""
    begin = 0
    while True:
        for matrix in matrices:
            if begin + matrix.rows * matrix.cols > max_elements:
                return
            for rank in range(RANKS):
                yield begin, matrix, rank, rank * (matrix.cols if matrix.windows else matrix.rows) // RANKS
            begin += matrix.rows * matrix.cols


def make_slices(case: Case, max_elements: int) -> Array:
    """Returns slices from base 0 into base 1, one rank's shards after another's. Entries for amax are in base 2."""
    parts = list(shards(case.matrices, max_elements))
    slices = np.zeros(len(parts), SLICE)
    slices["dst_base"], slices["amax_base"] = 1, -1
    slices["src_type"], slices["dst_type"] = case.source, case.destination
    for entry, (begin, matrix, _, at) in zip(slices, parts, strict=True):
        entry["src_offset"] = begin + (at if matrix.windows else at * matrix.cols)
        entry["rows"], entry["cols"] = matrix.rows, matrix.cols
        entry["cols" if matrix.windows else "rows"] //= RANKS
        entry["src_stride"], entry["dst_stride"] = matrix.cols, entry["cols"]
        entry["col_phase" if matrix.windows else "row_phase"] = at % BLOCK
    slices = slices[np.argsort([rank for _, _, rank, _ in parts], kind="stable")]
    sizes = slices["rows"] * slices["cols"]
    slices["dst_offset"] = np.cumsum(sizes) - sizes
    if case.destination == ElementType.FLOAT8_E4M3:
        # Every slice has its own entries. Sharing them within a block would not change the speed.
        rows, cols = ((slices[f"{axis}_phase"] + slices[f"{axis}s"] + BLOCK - 1) // BLOCK for axis in ("row", "col"))
        slices["amax_base"], slices["amax_stride"] = 2, cols
        slices["amax_offset"] = np.cumsum(rows * cols) - rows * cols
    return slices


class Bench:
    """One case: its memory and the ways to pack it."""

    def __init__(self, case: Case, num_bytes: int, device: torch.device) -> None:
        source, destination = DTYPES[case.source], DTYPES[case.destination]
        self.case, self.device = case, device
        self.slices = make_slices(case, num_bytes // source.itemsize)
        elements = int((self.slices["rows"] * self.slices["cols"]).sum())
        self.read_bytes, self.written_bytes = elements * source.itemsize, elements * destination.itemsize
        self.source = torch.empty(elements, dtype=source, device=device).normal_()
        self.bucket = torch.zeros(elements, dtype=destination, device=device)
        blocks = int(((self.slices["rows"] // BLOCK + 2) * (self.slices["cols"] // BLOCK + 2)).sum())
        self.table = CopyTable(self.slices, device)
        self.table.bind([self.source, self.bucket, torch.zeros(blocks, device=device)])
        # The bound reads the same source. It writes the same bucket if nothing is cast.
        self.traffic = self.read_bytes + self.written_bytes
        scratch_bytes = 0 if source == destination else self.traffic // 2
        self.scratch = torch.zeros(scratch_bytes, dtype=torch.uint8, device=device)

    def rivals(self) -> dict[str, Rival]:
        ours: dict[str, Rival] = {"ours": lambda: self.table.launch(0, len(self.slices)), "checksum": self.checksum}
        if self.case.destination == ElementType.FLOAT8_E4M3:
            return {"bound": self.bound, **ours, "amax": lambda: self.table.amax(0, len(self.slices))}
        sources, destinations = self.views(self.source, "src"), self.views(self.bucket, "dst")

        def loop() -> None:
            for source, destination in zip(sources, destinations, strict=True):
                destination.copy_(source)

        return {
            "bound": self.bound,
            **ours,
            "foreach_copy": lambda: torch._foreach_copy_(destinations, sources),
            "copy_loop": loop,
        }

    def checksum(self) -> None:
        boxes = np.zeros(len(self.slices), BOX)
        boxes["offset"], boxes["stride"] = self.slices["src_offset"], self.slices["src_stride"]
        boxes["place"], boxes["width"] = self.slices["src_offset"], self.slices["src_stride"]
        boxes["rows"], boxes["cols"], boxes["exact"] = self.slices["rows"], self.slices["cols"], True
        checksums(boxes, [self.source], 1)

    def bound(self) -> None:
        source = self.source.view(torch.uint8)[: self.traffic // 2]
        destination = self.scratch if len(self.scratch) else self.bucket.view(torch.uint8)
        if self.device.type == "cuda":
            destination.copy_(source)
            return
        address, size = ctypes.c_void_p, ctypes.c_int64
        memcpy = native.cpu_library().rs_cpu_memcpy
        memcpy.argtypes = (address, address, size, ctypes.c_int, ctypes.c_int)
        memcpy(destination.data_ptr(), source.data_ptr(), len(source), torch.get_num_threads(), 1)

    def views(self, tensor: Tensor, side: str) -> list[Tensor]:
        offsets, strides = self.slices[f"{side}_offset"].tolist(), self.slices[f"{side}_stride"].tolist()
        shapes = zip(self.slices["rows"].tolist(), self.slices["cols"].tolist(), strict=True)
        return [
            tensor.as_strided(shape, (stride, 1), offset)
            for shape, stride, offset in zip(shapes, strides, offsets, strict=True)
        ]

    def seconds(self, rival: Rival) -> float:
        if self.device.type == "cuda":
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            rival()
            end.record()
            end.synchronize()
            return float(start.elapsed_time(end)) / 1e3
        begin = time.perf_counter()
        rival()
        return time.perf_counter() - begin


def measure(case: Case, num_bytes: int, device: torch.device, repeats: int) -> dict[str, object]:
    bench = Bench(case, num_bytes, device)
    rivals = bench.rivals()
    samples: dict[str, list[float]] = {name: [] for name in rivals}
    for repeat in range(repeats + 2):
        for name, rival in rivals.items():
            seconds = bench.seconds(rival)
            if repeat > 1:  # the first rounds warm up
                samples[name].append(seconds)
    median = {name: statistics.median(times) for name, times in samples.items()}
    # These passes write almost nothing.
    moved = {name: bench.read_bytes if name in ("amax", "checksum") else bench.traffic / 2 for name in median}
    torch_seconds = [median[name] for name in ("foreach_copy", "copy_loop") if name in median]
    return {
        "case": case.name,
        "threads": torch.get_num_threads() if device.type == "cpu" else None,
        "read_bytes": bench.read_bytes,
        "written_bytes": bench.written_bytes,
        "num_slices": len(bench.slices),
        "num_windows": int((bench.slices["src_stride"] != bench.slices["cols"]).sum()),
        "gb_per_s": {name: round(moved[name] / seconds / 1e9, 2) for name, seconds in median.items()},
        "of_bound": round(median["bound"] / median["ours"], 3),
        "of_torch": round(min(torch_seconds) / median["ours"], 3) if torch_seconds else None,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2], help="on the CPU, one after the other")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--gigabytes", type=float, default=1.0, help="read per case")
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    results = []
    for threads in arguments.threads if device.type == "cpu" else [1]:
        torch.set_num_threads(threads)
        for case in CASES:
            torch.manual_seed(0)
            results.append(measure(case, int(arguments.gigabytes * 1e9), device, arguments.repeats))
            shown = {name: value for name, value in results[-1].items() if not name.endswith("_bytes")}
            print(json.dumps(shown), flush=True)
    summary = {
        "device": torch.cuda.get_device_name() if device.type == "cuda" else platform.processor() or platform.machine(),
        "backend": native.backend(device.type),
        "repeats": arguments.repeats,
        "torch": torch.__version__,
        "cases": results,
    }
    print(json.dumps(summary))


if __name__ == "__main__":
    main()
