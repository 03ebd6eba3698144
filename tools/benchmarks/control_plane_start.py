"""How long the control plane of 64 to 4,096 ranks takes to start, over real sockets, and what it asks afterwards.

    python tools/benchmarks/control_plane_start.py [--ranks 64 256 1024 4096] [--resolver-s 0] [--output FILE]

A real TCPStore is the server, in a process of its own, as a torchrun agent has it. The ranks are threads of four other
processes; each does with the real classes what a rank does from its first connection until its trainer runs, all of
them at once (`starting_ranks.py`). Left out: importing, reading the config, deriving the order (`control_plane.py`
times these), loading models, NCCL. Everything shares this machine's processors, so seconds are upper bounds; the work
of other programs meanwhile is given in processors. Calls per rank are counted on 64 ranks over a store that counts.

After the start all ranks beat and look for STEADY_S seconds, and then engines look for weight syncs: given is the share
of one processor that the server spends on it.

torch asks for the name of whoever connects, on the server in its only thread: `--resolver-s` answers that without a
resolver after so many seconds (0: at once); without it this machine's resolver does. The last line is one JSON object.
"""

import argparse
import json
import multiprocessing
import os
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch.distributed as dist
from counted_store import SharedStore
from starting_ranks import PHASES, StartingJob, StartingRank, memory_mb, rendezvous, share_a_process, start_all
from steady_ranks import STEADY, steady

NUM_PROCESSES = 4
COUNTED_RANKS = 64
SETTLES_S, STEADY_S = 4.0, 10.0
RESOLVER = Path(__file__).with_name("resolver.c")
spawned = multiprocessing.get_context("spawn")


def measure(num_ranks: int, folder: Path, library: Path | None, resolver_s: float) -> dict[str, Any]:
    """What one start of so many ranks took."""
    with answering_names(library, resolver_s):
        port, server = _start(_serve)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    parts = [range(part, num_ranks, NUM_PROCESSES) for part in range(NUM_PROCESSES)]
    with answering_names(library, 0.0):
        hosts = [_start(_host, num_ranks, ranks, folder) for ranks in parts]
    pids = [process.pid for _, (process, _) in hosts]
    connections = [connection for _, (_, connection) in hosts]
    server_process, _ = server
    before, used, begin = _processor_s(server_process.pid), _all_s(pids), time.monotonic()
    machine = _machine_s()
    for connection in connections:
        connection.send("start")
    through = np.concatenate([np.array(connection.recv()) for connection in connections]) - begin  # [ranks, phases]
    seconds = float(through.max())
    found: dict[str, Any] = {
        "seconds": seconds,
        "phases": {
            name: {"last rank": float(through[:, number].max()), "middle rank": float(np.median(through[:, number]))}
            for number, name in enumerate(PHASES)
        },
        "server's processor, s": _processor_s(server_process.pid) - before,
        "ranks' processors, s": _all_s(pids) - used,
    }
    found["others' processors"] = (
        (_machine_s() - machine) - found["server's processor, s"] - found["ranks' processors, s"]
    ) / (time.monotonic() - begin)
    found["MB per rank"] = float(sum(connection.recv() for connection in connections)) / num_ranks
    found["MB of the server"] = memory_mb(server_process.pid)
    found["descriptors of the server"] = _num_descriptors(server_process.pid)
    for name in STEADY:
        for seconds in (SETTLES_S, STEADY_S):
            before, begin = _processor_s(server_process.pid), time.monotonic()
            for connection in connections:
                connection.send((name, seconds))
            done = [connection.recv() for connection in connections]
            wall = time.monotonic() - begin
            found[name] = {
                "rounds of a rank per second": sum(done) / wall,
                "share of a processor": (_processor_s(server_process.pid) - before) / wall,
            }
    for process, connection in (*(host for _, host in hosts), server):
        connection.send("end")
        process.join()
    return found


def _start(body: Any, *arguments: Any) -> tuple[Any, tuple[Any, Connection]]:
    """A process that runs `body(connection, ...)`: the first thing that it sends, and the process."""
    here, there = spawned.Pipe()
    process = spawned.Process(target=body, args=(there, *arguments), daemon=True)
    process.start()
    return here.recv(), (process, here)


def _serve(connection: Connection) -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    connection.send(store.port)
    connection.recv()
    os._exit(0)


def _host(connection: Connection, num_ranks: int, ranks: range, folder: Path) -> None:
    share_a_process()
    job = StartingJob(num_ranks, folder)
    job.derive()
    hosted = [StartingRank(job, rank, lambda rank: rendezvous(rank, num_ranks)) for rank in ranks]
    before = memory_mb()
    connection.send("derived")
    connection.recv()
    start_all(hosted)
    connection.send([rank.through for rank in hosted])
    connection.send(memory_mb() - before)
    while (asked := connection.recv()) != "end":
        name, seconds = asked
        connection.send(steady(name, seconds, job, hosted))
    os._exit(0)


def counted_calls(folder: Path) -> dict[str, float]:
    """Per rank and phase."""
    job, shared = StartingJob(COUNTED_RANKS, folder), SharedStore()
    job.derive()
    ranks = [StartingRank(job, rank, shared.client) for rank in range(COUNTED_RANKS)]
    start_all(ranks)
    in_all = sum(traffic.num_operations for traffic in shared.take().values())
    return {"calls per rank": in_all / COUNTED_RANKS, "connections per rank": shared.num_connections[COUNTED_RANKS - 1]}


@contextmanager
def answering_names(library: Path | None, seconds: float) -> Iterator[None]:
    """Processes that start inside ask `library` for names, where there is one."""
    if library is not None:
        os.environ |= {"LD_PRELOAD": str(library), "RESOLVER_US": str(round(seconds * 1e6))}
    try:
        yield
    finally:
        os.environ.pop("LD_PRELOAD", None)


def compiled(folder: Path) -> Path:
    library = folder / "resolver.so"
    subprocess.run(["gcc", "-O1", "-shared", "-fPIC", "-o", str(library), str(RESOLVER), "-ldl"], check=True)
    return library


def _processor_s(pid: int | None) -> float:
    """To the nanosecond, of the threads that it has."""
    return sum(int(path.read_text().split()[0]) for path in Path(f"/proc/{pid}/task").glob("*/schedstat")) / 1e9


def _all_s(pids: list[int | None]) -> float:
    """Of these processes, with threads that have ended."""
    fields = [Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split() for pid in pids]
    return sum(int(one[11]) + int(one[12]) for one in fields) / os.sysconf("SC_CLK_TCK")


def _machine_s() -> float:
    """Seconds in which processors were not idle."""
    values = [int(value) for value in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
    return (sum(values) - values[3] - values[4]) / os.sysconf("SC_CLK_TCK")


def _num_descriptors(pid: int | None) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[64, 256, 1024, 4096])
    parser.add_argument("--resolver-s", type=float, help="how long a name takes on the server, without a resolver")
    parser.add_argument("--output", type=Path, help="file for the JSON object")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        library = compiled(folder) if arguments.resolver_s is not None else None
        found: dict[str, Any] = {"counted": counted_calls(folder / "counted"), "ranks": {}}
        print(found["counted"], flush=True)
        for size in sorted(arguments.ranks):
            found["ranks"][size] = measure(size, folder / str(size), library, arguments.resolver_s or 0.0)
            print(f"{size} ranks:", json.dumps(found["ranks"][size], indent=1), flush=True)
    text = json.dumps(found)
    if arguments.output:
        arguments.output.write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    main()
