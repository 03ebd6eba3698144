"""Measures a large file's cost to the processes of a node: loading, memory, and reading a row.

python tools/benchmarks/rows.py --model MODEL --folder FOLDER --rows 1000000 --processes 4
"""

import argparse
import json
import multiprocessing
import random
import time
from collections.abc import Iterator
from datetime import timedelta
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from rltrain.config import schema
from rltrain.data.prompt_order import PromptOrder
from rltrain.data.prompts import load_prompts
from rltrain.data.row_index import IndexFolder
from rltrain.data.tokenizer import PromptEncoder, load_tokenizer
from rltrain.runtime.job_store import JobStore
from rltrain.runtime.world import World

WRITTEN_ROWS, DRAWN_ROWS = 100_000, 5_000
LIMIT = timedelta(seconds=7200)


def write_rows(path: Path, num_rows: int) -> None:
    """Writes short sums, as lines of about 50 bytes."""
    with path.open("w") as file:
        for first in range(0, num_rows, WRITTEN_ROWS):
            file.writelines(_lines(first, min(first + WRITTEN_ROWS, num_rows)))


def _lines(first: int, end: int) -> Iterator[str]:
    for number in range(first, end):
        a, b = number % 977, number % 1009
        yield f'{{"prompt": "Q{number}: {a}+{b}=", "label": "{a + b}"}}\n'


def memory_mb() -> dict[str, float]:
    """Returns this process's resident memory, and its share of memory in common with others."""
    found = {}
    for line in Path("/proc/self/smaps_rollup").read_text().splitlines():
        name, _, value = line.partition(":")
        if name in ("Rss", "Pss"):
            found[f"{name.upper()}, MB"] = int(value.split()[0]) / 1024
    return found


def measure(rank: int, port: int, asked: argparse.Namespace, barrier: Barrier, results: Any) -> None:
    """Measures as one of the ranks of a node."""
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=LIMIT)
    file = schema.PromptFile(path=str(rows_path(asked)))
    data = schema.Data(train=file)
    encoder = PromptEncoder(load_tokenizer(Path(asked.model)), data)
    found: dict[str, float] = {}
    indexes = None
    if not asked.held:
        world = World(rank, asked.processes, rank, asked.processes, torch.device("cpu"), store, timeout_s=60)
        job_store = JobStore(world)
        job_store.heartbeat.start()
        indexes = IndexFolder(Path(asked.folder, "row_index"), job_store)
    barrier.wait()
    before, began, worked = memory_mb(), time.monotonic(), time.process_time()
    dataset = load_prompts(file, data, encoder, needs="label", config_key="data.train", indexes=indexes)
    order = PromptOrder(len(dataset), seed=0, shuffle=True)
    for epoch in (0, 1):
        dataset[order.row(epoch * len(dataset))]
    found["load, s"], found["load, processor s"] = time.monotonic() - began, time.process_time() - worked
    barrier.wait()
    now = memory_mb()
    found |= {name: now[name] - before[name] for name in now}
    barrier.wait()
    drawn = random.Random(rank).sample(range(len(dataset)), DRAWN_ROWS)
    worked = time.process_time()
    for row in drawn:
        dataset[row]
    found["draw a row, processor us"] = (time.process_time() - worked) / DRAWN_ROWS * 1e6
    results.put(found)
    barrier.wait()


def rows_path(asked: argparse.Namespace) -> Path:
    return Path(asked.folder, f"rows_{asked.rows}.jsonl")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True, help="folder of a checkpoint with a tokenizer")
    parser.add_argument("--folder", required=True, help="folder for the rows and their index; a second run reuses them")
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--processes", type=int, default=4)
    parser.add_argument("--held", action="store_true", help="every process checks and holds all rows, without an index")
    asked = parser.parse_args()
    if not rows_path(asked).is_file():
        write_rows(rows_path(asked), asked.rows)
    context = multiprocessing.get_context("spawn")
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=LIMIT)
    barrier, results = context.Barrier(asked.processes), context.Queue()
    arguments = (store.port, asked, barrier, results)
    processes = [context.Process(target=measure, args=(rank, *arguments)) for rank in range(asked.processes)]
    for process in processes:
        process.start()
    of_ranks = [results.get() for _ in processes]
    for process in processes:
        process.join()
    print(json.dumps({name: [round(of_rank[name], 1) for of_rank in of_ranks] for name in of_ranks[0]}, indent=1))


if __name__ == "__main__":
    main()
