"""Bytes and seconds of weights for servers as files of what changed, beside a whole checkpoint, by the share of that.

    python tools/benchmarks/delta_files.py --params 100m

One process writes to a folder and reads from it, with as many threads as torch has. Of all elements the share, drawn
anew and evenly, has its lowest bit turned. What is read is applied and compared with the whole before times are told:
medians of seconds, "compare" and "write" of a rank that has all weights, "check" and "apply" of a server in torch. The
last line is one JSON object.
"""

import argparse
import json
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor
from weight_sync_case import architecture_of_size, parse_count
from weight_sync_timing import describe_machine

from rltrain.checkpoint.safetensors_file import SafetensorsFile, TensorEntry
from rltrain.models import canonical_tensors
from rltrain.reshard.changes import changes_on
from rltrain.rollout.delta_form import form
from rltrain.rollout.servers.disk_weights import encoded, write_changes

SHARES = (0.001, 0.01, 0.03, 0.1, 1.0)
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
T = TypeVar("T")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--params", default="100m", help="about how many parameters, such as 100m or 1.5b")
    parser.add_argument("--dtype", choices=[*DTYPES], default="bfloat16")
    parser.add_argument("--iterations", type=int, default=5)
    parser.add_argument("--folder", type=Path, help="where files are written; default: the system's for temporary ones")
    return parser.parse_args()


class Times:
    """Seconds of what is done again and again, by name."""

    def __init__(self) -> None:
        self.of: dict[str, list[float]] = {}

    def taken(self, name: str, act: Callable[[], T]) -> T:
        start = time.perf_counter()
        done = act()
        self.of.setdefault(name, []).append(time.perf_counter() - start)
        return done

    def medians(self) -> dict[str, float]:
        return {f"{name}_s": round(statistics.median(seconds), 4) for name, seconds in self.of.items()}


def changed(tensors: dict[str, Tensor], share: float) -> dict[str, Tensor]:
    made = {name: tensor.clone() for name, tensor in tensors.items()}
    for tensor in made.values():
        bits = tensor.view(torch.int16 if tensor.itemsize == 2 else torch.int32)
        bits[torch.rand(tensor.shape) < share] ^= 1
    return made


def write_whole(path: Path, tensors: dict[str, Tensor]) -> None:
    entries = [TensorEntry(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()]
    with SafetensorsFile(path, entries, {}) as opened:
        for entry in opened.entries:
            opened.append(entry.name, tensors[entry.name])


def apply(delta: form.Delta, held: dict[str, Tensor]) -> None:
    for one in delta.tensors():
        held[one.name].view(-1)[one.elements] = one.values


def measure(tensors: dict[str, Tensor], share: float, folder: Path, times: Times) -> int:
    """Bytes of a delta."""
    folder.mkdir()
    new, held = changed(tensors, share), {name: tensor.clone() for name, tensor in tensors.items()}
    kept = {name: tensor.clone() for name, tensor in tensors.items()}
    found = times.taken("compare", lambda: encoded(changes_on(torch.device("cpu")), new, kept))
    record = times.taken("write", lambda: write_changes(folder / "changes.delta", found))
    (folder / form.MANIFEST).write_text(form.manifest_text("old", "new", {"changes.delta": record}))
    times.taken("write_whole", lambda: write_whole(folder / "whole", new))
    delta = form.Delta(folder)
    times.taken("check", lambda: delta.check("old"))
    times.taken("apply", lambda: apply(delta, held))
    assert all(torch.equal(held[name].view(torch.uint8), new[name].view(torch.uint8)) for name in new)
    shutil.rmtree(folder)
    return record[0]


def main() -> None:
    arguments = parse_arguments()
    torch.manual_seed(0)
    shapes = canonical_tensors(architecture_of_size(parse_count(arguments.params), stages=1))
    pairs = zip(shapes.names, shapes.shapes, strict=True)
    tensors = {name: torch.randn(shape).to(DTYPES[arguments.dtype]) for name, shape in pairs}
    whole = sum(tensor.nbytes for tensor in tensors.values())
    threads = torch.get_num_threads()
    print(f"{whole / 1e6:.1f} MB of {arguments.dtype}, {threads} threads")
    machine = describe_machine(torch.device("cpu"))
    results: dict[str, Any] = {**machine, "threads": threads, "whole_bytes": whole, "shares": {}}
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        for share in SHARES:
            times = Times()
            for _ in range(arguments.iterations):
                num_bytes = measure(tensors, share, Path(folder) / "delta", times)
            results["shares"][str(share)] = {"bytes": num_bytes, **times.medians()}
            print(f"{100 * share:g}% changed: {num_bytes / 1e6:.2f} MB, {times.medians()}", flush=True)
    print(json.dumps(results))


if __name__ == "__main__":
    main()
