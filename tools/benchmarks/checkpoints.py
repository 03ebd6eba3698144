"""Saving, loading, exporting and converting checkpoints beside `cp` of the same bytes, in one process.

    python tools/benchmarks/checkpoints.py [--gb 1] [--rounds 5] [--folder DIR] [--cases save,load,...]
    python tools/benchmarks/checkpoints.py --cases memory [--nodes 2,4,8] [--memory DIR] [--gb 1] [--folder DIR]

    save             a rank's file of a run's checkpoint: float32 weights and AdamW's moments, from memory to the disk
    load             the checksums of such a file are compared, then its values go into tensors that are there
    export           a bfloat16 model from Megatron's layout in memory to a Hugging Face folder
    hf-to-megatron   what the command of that name does, without the start of Python
    megatron-to-hf   the same
    run-to-hf        the same, from the file of `save` to bfloat16; its bytes are those of the run's file
    memory           only where it is named: see memory_checkpoints.py; without `cp`

Every case and `cp` of the bytes that it reads (`save` and `export`: that it writes) take turns, so that both have the
same machine; medians over the rounds are compared. What a case makes durable, `cp`'s files are made durable too, by
fsync; `load` writes nothing. All source files are in the page cache. On a disk that is slower than memory cases that
write show the disk; in a folder in memory (--folder /dev/shm) fsync costs nothing and all show the work itself.
"cpu_s" are processor-seconds, which say more than seconds where other programs run, and "busiest_cpu_s" those of one
thread, of that which writes files or that which makes what is in them: seconds are no fewer, nor many more where both
have a processor to themselves. "checksum_seconds" are those of reading the bytes once for their checksum, and
"bound_of_cp" the ratio that is left to whoever does that and then, in the same thread, what `cp` does. The last line is
one JSON object.
"""

import argparse
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from convert import make_checkpoint
from memory_checkpoints import measure_nodes
from torch import Tensor
from trained_state import CONFIG_YAML, KINDS, trained_model

from rltrain.checkpoint.conversion import convert_to_hf, convert_to_megatron, writers_grid
from rltrain.checkpoint.conversion_sources import HfSource, MegatronSource, Processes, RunSource
from rltrain.checkpoint.hf_reader import load_parameters
from rltrain.checkpoint.hf_writer import save_checkpoint
from rltrain.checkpoint.run_files import checksum, find_damage, read_manifest, write_files
from rltrain.checkpoint.run_folder import CheckpointFolder, checkpoint_at
from rltrain.checkpoint.saved_state import Counts, Destination, SavedState, contents, flat_name
from rltrain.config.loader import load_config
from rltrain.models import read_architecture
from rltrain.reshard.layout import Layout
from rltrain.reshard.megatron_layout import megatron_layout
from rltrain.runtime.grid import Grid

FILE = "actor/rank_00000.safetensors"
SUFFIXES = (".safetensors", ".distcp")


@dataclass(frozen=True)
class Case:
    """`run` makes `made`, or nothing; `cp` copies the files `like`. `durable`: both wait for the disk. `checked` of the
    bytes get a checksum."""

    run: Callable[[], None]
    like: Sequence[Path]
    made: Path | None
    durable: bool = True
    checked: bool = False


class Took(NamedTuple):
    seconds: float
    cpu_s: float
    busiest_cpu_s: float
    """Of this thread, or of all others, which run one after the other."""


def parameters_of(layout: Layout, dtype: torch.dtype) -> dict[str, Tensor]:
    return {name: torch.zeros(shape, dtype=dtype) for name, shape in layout.on(0).parameters}


class RunCheckpoint:
    """The state of one rank that trains all of a model, and a complete checkpoint of it in `folder`."""

    def __init__(self, folder: Path, gigabytes: float) -> None:
        trained_model(folder / "trained", gigabytes)
        layout = megatron_layout(read_architecture(folder / "trained"), Grid((0,)))
        mine, generator = layout.on(0), torch.Generator().manual_seed(0)
        names = [name for name, _ in mine.parameters]
        self.flats = {
            flat_name(kind, name): torch.randn(int(np.prod(shape)), generator=generator)
            for kind in KINDS
            for name, shape in mine.parameters
        }
        self.contents = contents(layout.tensors, names, mine.pieces, self.flats, Counts(1, 1))
        self.destinations = [
            Destination(kind, mine.pieces, [torch.zeros(int(np.prod(shape))) for _, shape in mine.parameters])
            for kind in KINDS
        ]
        self.tensors, self.checkpoints, self.beside = layout.tensors, folder / "checkpoints", folder / "saved"
        (folder / "run.yaml").write_text(CONFIG_YAML)
        config = load_config(folder / "run.yaml", [f"model.path={folder / 'trained'}", "model.dtype=bfloat16"])
        checkpoints = CheckpointFolder(self.checkpoints)
        records = write_files(checkpoints.begin(1), {FILE: self.contents})
        checkpoints.complete(1, records, {"config": config.model_dump(mode="json")}, keep=0)
        self.file = checkpoint_at(self.checkpoints).folder / FILE
        checksum(self.file)  # into the page cache

    def save(self) -> None:
        write_files(self.beside, {FILE: self.contents})

    def load(self) -> None:
        found = checkpoint_at(self.checkpoints)
        manifest = read_manifest(found.folder)
        if damage := find_damage(found.folder, manifest, manifest, lambda: None):
            sys.exit(damage)
        SavedState(found.files("actor"), self.tensors).read(self.destinations)

    def check(self) -> None:
        for destination in self.destinations:
            for flat, name in zip(destination.flats, json.loads(self.contents.metadata["parameters"]), strict=True):
                assert flat is not None
                if not torch.equal(flat, self.flats[flat_name(destination.kind, name)]):
                    sys.exit(f"{destination.kind} of {name} is not what was saved")


def cases_of(folder: Path, gigabytes: float, wanted: Sequence[str]) -> dict[str, Case]:
    """What is measured, by name; makes what it reads."""
    cases: dict[str, Case] = {}
    if {"save", "load", "run-to-hf"}.intersection(wanted):
        run = RunCheckpoint(folder, gigabytes)
        source, back = partial(RunSource, run.checkpoints, "--input"), folder / "from_run"
        cases |= {
            "save": Case(run.save, [run.file], run.beside, checked=True),
            "load": Case(run.load, [run.file], None, durable=False, checked=True),
            "run-to-hf": Case(lambda: convert_to_hf(source(), back, Processes()), [run.file], back, checked=True),
        }
    if {"export", "hf-to-megatron", "megatron-to-hf"}.intersection(wanted):
        cases |= model_cases(folder, gigabytes)
    return {name: cases[name] for name in wanted}


def model_cases(folder: Path, gigabytes: float) -> dict[str, Case]:
    original, megatron, hf, exported = (folder / name for name in ("original", "megatron", "hf", "exported"))
    make_checkpoint(original, gigabytes)
    architecture = read_architecture(original)
    layout = megatron_layout(architecture, Grid((0,)), dtype="bfloat16")
    parameters = parameters_of(layout, torch.bfloat16)
    load_parameters(original, layout, 0, parameters)

    def to_megatron(output: Path) -> None:
        source = HfSource(original, "--input")
        writers = writers_grid(source.architecture, 1, tp=None, pp=None, ep=None)
        convert_to_megatron(source, output, Processes(), writers=writers)

    def to_hf() -> None:
        convert_to_hf(MegatronSource(folder / "made", "--input"), hf, Processes())

    def export() -> None:
        save_checkpoint(exported, parameters, layout, architecture, group=None, rank=0, like=original)

    to_megatron(folder / "made")
    return {
        "export": Case(export, files_in(original), exported),
        "hf-to-megatron": Case(lambda: to_megatron(megatron), files_in(original), megatron, checked=True),
        "megatron-to-hf": Case(to_hf, files_in(folder / "made"), hf),
    }


def files_in(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.suffix in SUFFIXES)


def copy(files: Sequence[Path], target: Path, *, durable: bool) -> None:
    """By `cp`."""
    target.mkdir()
    subprocess.run(["cp", *map(str, files), str(target)], check=True)
    for path in [*target.iterdir(), target] if durable else ():
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)


def read_checksums(files: Sequence[Path]) -> None:
    for path in files:
        checksum(path)


def timed(run: Callable[[], None]) -> Took:
    before, before_here, begin = cpu_seconds(), time.thread_time(), time.perf_counter()
    run()
    seconds, here = time.perf_counter() - begin, time.thread_time() - before_here
    cpu_s = cpu_seconds() - before
    return Took(seconds, cpu_s, max(here, cpu_s - here))


def cpu_seconds() -> float:
    usages = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def measure(name: str, case: Case, folder: Path, rounds: int) -> dict[str, Any]:
    num_bytes, copied = sum(path.stat().st_size for path in case.like), folder / "copied"
    found: dict[str, list[Took]] = {"case": [], "cp": [], "checksum": []}
    for number in range(rounds + 1):  # of which the first is a warm-up
        turns: dict[str, Callable[[], None]] = {
            "cp": partial(copy, case.like, copied, durable=case.durable),
            "case": case.run,
        }
        if case.checked:
            turns["checksum"] = partial(read_checksums, case.like)
        for turn, run in turns.items():
            took = timed(run)
            if number:
                found[turn].append(took)
            for made in (copied, case.made):
                if made is not None:
                    shutil.rmtree(made, ignore_errors=True)
    return result_of(name, num_bytes, found)


def result_of(name: str, num_bytes: int, found: Mapping[str, Sequence[Took]]) -> dict[str, Any]:
    seconds, cpu_s, busiest_cpu_s = (
        {turn: statistics.median(getattr(one, what) for one in took) for turn, took in found.items() if took}
        for what in Took._fields
    )
    result = {
        "case": name,
        "gb": round(num_bytes / 1e9, 3),
        "seconds": round(seconds["case"], 3),
        "cp_seconds": round(seconds["cp"], 3),
        "gb_per_s": round(num_bytes / seconds["case"] / 1e9, 3),
        "of_cp": round(seconds["cp"] / seconds["case"], 3),
        "cpu_s": round(cpu_s["case"], 3),
        "busiest_cpu_s": round(busiest_cpu_s["case"], 3),
        "cp_cpu_s": round(cpu_s["cp"], 3),
    }
    if "checksum" in seconds:
        result["checksum_seconds"] = round(seconds["checksum"], 3)
        result["bound_of_cp"] = round(seconds["cp"] / (seconds["cp"] + seconds["checksum"]), 3)
    return result


def memory_results(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    results = []
    for num_nodes in map(int, arguments.nodes.split(",")):
        with (
            tempfile.TemporaryDirectory(dir=arguments.folder) as disk,
            tempfile.TemporaryDirectory(dir=arguments.memory) as memory,
        ):
            results.append(measure_nodes(Path(disk), Path(memory), num_nodes, arguments.gb, arguments.rounds))
        show(results[-1])
    return results


def show(result: Mapping[str, Any]) -> None:
    print("  ".join(f"{key} {value}" for key, value in result.items()), flush=True)


def main() -> None:
    names = ("save", "load", "export", "hf-to-megatron", "megatron-to-hf", "run-to-hf")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gb", type=float, default=1.0, help="of each checkpoint, in 10^9 bytes (default 1)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", type=Path, help="where to work: some five times --gb (default: a new one)")
    parser.add_argument("--nodes", default="2,4,8", help="of `memory`, separated by commas (default 2,4,8)")
    parser.add_argument("--memory", type=Path, default=Path("/dev/shm"), help="where nodes have folders (/dev/shm)")
    parser.add_argument("--cases", default=",".join(names), help="of these, separated by commas (default: all)")
    arguments = parser.parse_args()
    wanted, results = arguments.cases.split(","), []
    if "memory" in wanted:
        wanted.remove("memory")
        results += memory_results(arguments)
    with tempfile.TemporaryDirectory(dir=arguments.folder) as name:
        folder = Path(name)
        for case_name, case in cases_of(folder, arguments.gb, wanted).items():
            results.append(measure(case_name, case, folder, arguments.rounds))
            show(results[-1])
    print(json.dumps({"benchmark": "checkpoints", "threads": torch.get_num_threads(), "cases": results}))


if __name__ == "__main__":
    main()
