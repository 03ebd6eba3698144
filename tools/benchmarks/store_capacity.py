"""What a real TCPStore carries over loopback."""

import argparse
import multiprocessing
import resource
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
import torch.distributed as dist

SECONDS = 4.0
BEAT = "x" * 450
"""As long as a heartbeat."""
NUM_CLIENTS = 64

ASKS: dict[str, Callable[[dist.Store, int], object]] = {
    "set": lambda store, number: store.set(f"beat/{number}", BEAT),
    "check": lambda store, number: store.check(["absent"]),
    "add": lambda store, number: store.add("counter", 0),
}


def measure_capacity(told: Callable[[str], None]) -> dict[str, float]:
    """Calls per second by kind, from NUM_CLIENTS connections of another process, and the processor's seconds of the
    server per call."""
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    found: dict[str, float] = {}
    for name in ASKS:
        before = _own_processor_s()
        calls, seconds = _in_a_process(_ask, server.port, name)
        found[name] = calls / seconds
        server_s = (_own_processor_s() - before) / calls
        found[f"{name}, server's seconds per call"] = server_s
        told(f"store: {name}: {calls / seconds:.0f} calls/s, {server_s * 1e6:.1f} us of the server's processor each")
    return found


def _ask(port: int, name: str) -> tuple[int, float]:
    clients = [_client(port) for _ in range(NUM_CLIENTS)]
    calls = [0] * NUM_CLIENTS
    end = time.perf_counter() + SECONDS

    def run(number: int) -> None:
        while time.perf_counter() < end:
            ASKS[name](clients[number], number)
            calls[number] += 1
        clients[number].check(["absent"])  # what was set has come

    begin = time.perf_counter()
    with ThreadPoolExecutor(NUM_CLIENTS) as pool:
        list(pool.map(run, range(NUM_CLIENTS)))
    return sum(calls), time.perf_counter() - begin


def _client(port: int) -> dist.TCPStore:
    return dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)


def _in_a_process(body: Callable[..., tuple[int, float]], *arguments: Any) -> tuple[int, float]:
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(body, arguments)


def _own_processor_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def main() -> None:
    argparse.ArgumentParser(description=__doc__).parse_args()
    torch.set_num_threads(1)
    measure_capacity(print)


if __name__ == "__main__":
    main()
