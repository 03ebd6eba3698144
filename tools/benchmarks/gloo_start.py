"""What gloo groups ask of a job's store and of the network to start, lazily as in a job, and all at once.

    python tools/benchmarks/gloo_start.py [--lazy 64 128 256 512] [--eager 16 32 64 128]

All ranks of a group are threads of this process and talk over real sockets of loopback; the store is one that counts
(`counted_store.py`), in the same process. A lazy group (`TORCH_GLOO_LAZY_INIT`, which a job sets) connects two ranks
when one first sends to the other; an eager one connects all pairs when it is made, which more than 128 ranks of one
process cannot for want of descriptors. Given for each step: seconds until all ranks are through, store calls and bytes
of a rank in the mean, and sockets of a rank after it. The last line is one JSON object.
"""

import argparse
import json
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from counted_store import SharedStore

LAZY, EAGER = (64, 128, 256, 512), (16, 32, 64, 128)
TIMEOUT = timedelta(seconds=300)
STACK_BYTES = 256 * 1024
VALUES = 1024

STEPS: dict[str, Callable[[Any], Any]] = {
    "first barrier": lambda group: group.barrier().wait(),
    "second barrier": lambda group: group.barrier().wait(),
    "first all_reduce": lambda group: group.allreduce([torch.ones(VALUES)]).wait(),
    "monitored_barrier": lambda group: group.monitored_barrier(TIMEOUT, False),
}
"""Done in turn on all ranks at once, after `make`."""


def measure_gloo(
    told: Callable[[str], None], lazy: tuple[int, ...] = LAZY, eager: tuple[int, ...] = EAGER
) -> dict[str, dict[str, dict[str, float]]]:
    """By "lazy 64" and the like, by step, what it costs."""
    found = {}
    for is_lazy, sizes in ((True, lazy), (False, eager)):
        for num_ranks in sizes:
            name = f"{'lazy' if is_lazy else 'eager'} {num_ranks}"
            found[name] = _start_group(num_ranks, is_lazy)
            for step, cost in found[name].items():
                told(f"gloo: {name}: {step}: " + ", ".join(f"{key} {value:.4g}" for key, value in cost.items()))
    return found


def _start_group(num_ranks: int, is_lazy: bool) -> dict[str, dict[str, float]]:
    shared = SharedStore()
    groups: list[Any] = [None] * num_ranks
    files = _open_files()

    def make(rank: int) -> None:
        options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1", lazy_init=is_lazy)]
        options._timeout = TIMEOUT
        store = dist.PrefixStore("group", shared.client(rank))
        groups[rank] = dist.ProcessGroupGloo(store, rank, num_ranks, options)

    found = {}
    threading.stack_size(STACK_BYTES)
    try:
        with ThreadPoolExecutor(num_ranks) as pool:
            found["make"] = _cost(pool, make, shared, num_ranks, files)
            for name, step in STEPS.items():
                found[name] = _cost(pool, _on(groups, step), shared, num_ranks, files)
    finally:
        threading.stack_size(0)
    return found


def _on(groups: list[Any], step: Callable[[Any], Any]) -> Callable[[int], None]:
    """`step` of the group of a rank."""

    def body(rank: int) -> None:
        step(groups[rank])

    return body


def _cost(
    pool: ThreadPoolExecutor, body: Callable[[int], None], shared: SharedStore, num_ranks: int, files: int
) -> dict[str, float]:
    begin = time.perf_counter()
    list(pool.map(body, range(num_ranks)))
    seconds = time.perf_counter() - begin
    traffic = shared.take().values()
    return {
        "seconds": seconds,
        "calls per rank": sum(one.num_operations for one in traffic) / num_ranks,
        "most calls of a rank": max((one.num_operations for one in traffic), default=0),
        "bytes per rank": sum(one.num_bytes for one in traffic) / num_ranks,
        "sockets per rank": (_open_files() - files) / num_ranks,
    }


def _open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lazy", type=int, nargs="*", default=LAZY)
    parser.add_argument("--eager", type=int, nargs="*", default=EAGER)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    found = measure_gloo(lambda line: print(line, flush=True), tuple(arguments.lazy), tuple(arguments.eager))
    print(json.dumps(found))


if __name__ == "__main__":
    main()
