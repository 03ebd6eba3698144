"""Checkpoints in the memory of nodes of one rank each, processes of this machine: `checkpoints.py --cases memory`.

A round saves a training state that the nodes share out (weights of all, masters and moments of the rank's own share) in
memory and on the disk, loses the last node's memory, and goes on from either. Files on the disk are not in the page
cache then, as far as this user may have them leave it.
"""

import json
import os
import shutil
import statistics
import time
from dataclasses import asdict, dataclass
from datetime import timedelta
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from trained_state import CONFIG_YAML, KINDS, trained_model

from rltrain.checkpoint.memory_files import SPANS_SUFFIX, FetchedFile, spans_there
from rltrain.checkpoint.node_memory import NodeFolder
from rltrain.checkpoint.run_files import Contents, FileRecord, write_files
from rltrain.checkpoint.run_folder import CheckpointFolder, Resumed, name_of
from rltrain.checkpoint.run_writer import FilesWriter
from rltrain.checkpoint.saved_state import MASTER, Counts, Destination, SavedState, contents, flat_name
from rltrain.config.loader import load_config
from rltrain.config.schema import Config
from rltrain.models import read_architecture
from rltrain.observability.run_logs import ID_FILE
from rltrain.reshard.layout import Layout
from rltrain.reshard.megatron_layout import megatron_layout
from rltrain.roles.checkpointing import MemoryCheckpointing
from rltrain.roles.resuming import HeldCheckpoints, find_checkpoint
from rltrain.runtime.grid import Grid
from rltrain.runtime.job_store import JobStore
from rltrain.runtime.world import LOOPBACK, World
from rltrain.training.shards import answered_for, within

TIMEOUT_S = 600.0
STEP, RUN_ID = 1, "benchmark"


@dataclass(frozen=True)
class Setting:
    """What all nodes know. `folder` is on a disk; `memory` has a folder for every node."""

    folder: Path
    memory: Path
    num_nodes: int
    rounds: int
    port: int


@dataclass(frozen=True)
class Took:
    """Of one node in one round, in seconds and bytes."""

    boundary_s: float
    """That a step waits, beside the copies to the host, which are there already."""
    counts_s: float
    """Until the checkpoint counts on this node, and on the disk."""
    disk_counts_s: float
    from_memory_s: float
    """From the start of a job to its state, in memory and from the disk."""
    from_disk_s: float
    held_bytes: int
    """Of the checkpoint on this node, which its own files and the copies are."""
    fetched_bytes: int
    lacked_bytes: int
    """Of all files that this node did not have."""


class Node:
    """One process, with its share of the state."""

    def __init__(self, setting: Setting, rank: int) -> None:
        self.setting, self.rank, self.size = setting, rank, setting.num_nodes
        self.layout: Layout = megatron_layout(
            read_architecture(setting.folder / "trained"), Grid(tuple(range(self.size)))
        )
        store = dist.TCPStore(LOOPBACK, setting.port, is_master=False, timeout=timedelta(seconds=TIMEOUT_S))
        self.store: dist.Store = store
        self.num_jobs = 0
        self.folder = NodeFolder(str(setting.memory / f"node{rank}"), RUN_ID)
        on, generator = self.layout.on(rank), torch.Generator().manual_seed(rank)
        sizes = np.array([int(np.prod(shape)) for _, shape in on.parameters], dtype=np.int64)
        self.limits = sizes * rank // self.size, sizes * (rank + 1) // self.size
        self.names = [name for name, _ in on.parameters]
        self.flats = {
            flat_name(kind, name): torch.randn(int(stop - start), generator=generator)
            for kind in KINDS
            for name, start, stop in zip(self.names, *self.limits, strict=True)
        }
        self.destinations = [Destination(MASTER, on.pieces, [torch.zeros(int(size)) for size in sizes])]
        self.destinations += [
            Destination(kind, within(on.pieces, *self.limits), [torch.zeros_like(flat) for flat in self.share(kind)])
            for kind in KINDS
        ]

    def share(self, kind: str) -> list[Tensor]:
        return [self.flats[flat_name(kind, name)] for name in self.names]

    @property
    def file(self) -> dict[str, Contents]:
        pieces = within(answered_for(self.layout, self.rank), *self.limits)
        saved = contents(self.layout.tensors, self.names, pieces, self.flats, Counts(1, 1))
        return {f"actor/rank_{self.rank:05d}.safetensors": saved}

    def config(self, *overrides: str) -> Config:
        folder = self.setting.folder
        return load_config(
            folder / "run.yaml",
            [f"model.path={folder / 'trained'}", f"output_dir={folder}", "checkpoint.save_interval=1", *overrides],
        )

    def job(self) -> JobStore:
        """A new one, of all nodes."""
        self.num_jobs += 1
        store = dist.PrefixStore(f"job{self.num_jobs}", self.store)
        return JobStore(World(self.rank, self.size, 0, 1, torch.device("cpu"), store, TIMEOUT_S))

    def round(self) -> Took:
        job_store = self.job()
        held = HeldCheckpoints(self.config(), str(self.folder.base), job_store)
        memory = held.begin(None, leader=0)
        part = MemoryCheckpointing(job_store, range(self.size), memory, lambda: None)
        writer = FilesWriter(asynchronous=True)
        files = self.file
        self.meet(job_store, "saves")
        begin = time.perf_counter()
        writer.start(files, part.begin(STEP, {"step": STEP} if self.rank == 0 else None))
        boundary_s = time.perf_counter() - begin
        while not self.folder.at(STEP).exists():
            part.look()
            time.sleep(0.005)
        counts_s = time.perf_counter() - begin
        held_bytes = sum(path.stat().st_size for path in self.folder.at(STEP).rglob("*.safetensors"))
        self.meet(job_store, "counts")
        disk_counts_s = self.save_on_disk(job_store)
        if self.rank == self.size - 1:
            shutil.rmtree(self.folder.base)
        self.meet(job_store, "lost")
        from_memory_s, found = self.go_on(in_memory=True)
        fetched, lacked = self.fetched(), sum(file.source.num_bytes for file in found)
        from_disk_s, _ = self.go_on(in_memory=False)
        self.meet(job_store, "ends")
        part.close()
        return Took(boundary_s, counts_s, disk_counts_s, from_memory_s, from_disk_s, held_bytes, fetched, lacked)

    def meet(self, job_store: JobStore, what: str) -> None:
        job_store.meet(f"benchmark/{what}", self.size, waiting_for=what)

    def save_on_disk(self, job_store: JobStore) -> float:
        folder, files = CheckpointFolder(Path(self.config().checkpoint_dir)), self.file
        self.meet(job_store, "saves on the disk")
        begin = time.perf_counter()
        job_store.put(f"disk/{self.rank}", write_files(folder.begin(STEP), files))
        if self.rank == 0:
            shutil.rmtree(folder.path / name_of(STEP), ignore_errors=True)
            reports = [job_store.get(f"disk/{rank}", waiting_for="files") for rank in range(self.size)]
            records = {name: FileRecord(*record) for report in reports for name, record in report.items()}
            folder.complete(STEP, records, {"step": STEP}, keep=0)
        self.meet(job_store, "disk")
        seconds = time.perf_counter() - begin
        if self.rank == 0:
            drop_cached(folder.path)
        return seconds

    def go_on(self, *, in_memory: bool) -> tuple[float, list[FetchedFile]]:
        """As a job that is started again: seconds until this rank's state is what it was, and the files that it has
        not."""
        job_store = self.job()
        self.meet(job_store, "starts")
        begin = time.perf_counter()
        held = HeldCheckpoints(self.config(), str(self.folder.base), job_store) if in_memory else None
        found = find_checkpoint(self.config(), job_store, held)
        assert isinstance(found, Resumed) and found.in_memory == in_memory, found
        SavedState(found.files("actor"), self.layout.tensors).read(self.destinations)
        seconds = time.perf_counter() - begin
        for destination in self.destinations[1:]:
            for flat, expected in zip(destination.flats, self.share(destination.kind), strict=True):
                assert flat is not None and torch.equal(flat, expected), f"{destination.kind} is not what was saved"
                flat.zero_()
        return seconds, [file for file in found.files("actor") if isinstance(file, FetchedFile)]

    def fetched(self) -> int:
        lists = self.folder.path.rglob(f"*{SPANS_SUFFIX}")
        return sum(span.end - span.begin for path in lists for span in spans_there(path))


def drop_cached(folder: Path) -> None:
    for path in folder.rglob("*.safetensors"):
        descriptor = os.open(path, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def run_node(setting: Setting, rank: int) -> None:
    """The whole of a process."""
    torch.set_num_threads(1)
    node = Node(setting, rank)
    took = [node.round() for _ in range(setting.rounds)]
    (setting.folder / f"took_{rank}.json").write_text(json.dumps([asdict(one) for one in took]))


def measure_nodes(folder: Path, memory: Path, num_nodes: int, gigabytes: float, rounds: int) -> dict[str, Any]:
    """Of a state of so many gigabytes; seconds are the slowest node's, medians over the rounds."""
    trained_model(folder / "trained", gigabytes)
    (folder / "run.yaml").write_text(CONFIG_YAML)
    (folder / ID_FILE).write_text(RUN_ID)
    store = dist.TCPStore(LOOPBACK, 0, is_master=True, timeout=timedelta(seconds=TIMEOUT_S), wait_for_workers=False)
    setting = Setting(folder, memory, num_nodes, rounds, store.port)
    context = get_context("spawn")
    processes = [context.Process(target=run_node, args=(setting, rank)) for rank in range(num_nodes)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    if any(process.exitcode for process in processes):
        raise SystemExit("a node failed")
    by_node = [json.loads((folder / f"took_{rank}.json").read_text()) for rank in range(num_nodes)]
    result: dict[str, Any] = {"case": "memory", "nodes": num_nodes}
    for key in by_node[0][0]:
        slowest = [max(took[number][key] for took in by_node) for number in range(rounds)]
        found = statistics.median(slowest)
        if key.endswith("_bytes"):
            result[f"{key.removesuffix('_bytes')}_gb"] = round(found / 1e9, 3)
        else:
            result[key] = round(found, 4)
    others = [took[-1] for took in by_node[:-1]]
    result["fetched_by_others_gb"] = round(max(took["fetched_bytes"] for took in others) / 1e9, 3)
    result["lacked_by_others_gb"] = round(max(took["lacked_bytes"] for took in others) / 1e9, 3)
    return result
