"""Measures seconds and memory of one rank's plan for a weight sync of a large model, and predicts the sync's duration.

    python tools/benchmarks/plan.py [--case NAME ...] [--network-gb-per-s 50] [--node-gb-per-s 450]

Layouts need only shapes, so no weights, GPUs or other ranks are involved. Every case runs in its own process, to
separate the peaks of memory. `plan_s` is the processor time of a rank from the two configs to its own plan. It is that
of the slowest among the first and last ranks of both sides. The prediction is the time of the busiest sender or
receiver between nodes at the given bandwidths per rank. The bound is max(W / (T * rx), W / (N * tx)) for W bytes from N
training ranks to T inference ranks. The last line is one JSON object.
"""

import argparse
import json
import multiprocessing
import resource
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from model_shapes import deepseek_v3, qwen3_8b, qwen3_30b_a3b, qwen3_32b

from rltrain.models import Architecture
from rltrain.planning.sync_time import Links, predict
from rltrain.reshard.layout import Layout
from rltrain.reshard.megatron_layout import megatron_layout
from rltrain.reshard.plan import Planner
from rltrain.rollout.layout import engine_layout
from rltrain.runtime.grid import Grid

RANKS_PER_NODE = 8


@dataclass(frozen=True)
class Case:
    model: Callable[[], Architecture]
    source: Callable[[Architecture], Layout]
    destination: Callable[[Architecture], Layout]


def training(num_ranks: int, **sizes: Any) -> Callable[[Architecture], Layout]:
    return lambda architecture: megatron_layout(
        architecture,
        Grid(tuple(range(num_ranks)), **sizes),
        dtype="bfloat16",
        transformer_engine=True,
    )


def inference(first: int, num_ranks: int, tp: int, expert_parallel: int = 1) -> Callable[[Architecture], Layout]:
    grid = Grid(tuple(range(first, first + num_ranks)), tp=tp, ep=expert_parallel, etp=tp // expert_parallel)
    return lambda architecture: engine_layout(architecture, grid, dtype="bfloat16")


CASES = {
    "deepseek-v3, 512 ranks tp4 pp8 ep16 etp4 -> 256 ranks tp32": Case(
        deepseek_v3, training(512, tp=4, pp=8, ep=16, etp=4), inference(512, 256, tp=32)
    ),
    "deepseek-v3, 512 ranks tp4 pp8 ep16 etp1 -> 256 ranks tp32": Case(
        deepseek_v3, training(512, tp=4, pp=8, ep=16, etp=1), inference(512, 256, tp=32)
    ),
    "deepseek-v3, 512 ranks tp4 pp8 ep16 etp1 -> 256 ranks tp32 ep32": Case(
        deepseek_v3, training(512, tp=4, pp=8, ep=16, etp=1), inference(512, 256, tp=32, expert_parallel=32)
    ),
    "qwen3-30b-a3b, 64 ranks tp4 pp2 ep8 -> the same ranks tp8": Case(
        qwen3_30b_a3b, training(64, tp=4, pp=2, ep=8, etp=1), inference(0, 64, tp=8)
    ),
    "qwen3-30b-a3b, 32 ranks tp4 pp2 ep4 -> 32 ranks tp8": Case(
        qwen3_30b_a3b, training(32, tp=4, pp=2, ep=4, etp=1), inference(32, 32, tp=8)
    ),
    "qwen3-32b, 64 ranks tp8 pp4 -> the same ranks tp4": Case(
        qwen3_32b, training(64, tp=8, pp=4), inference(0, 64, tp=4)
    ),
    "qwen3-8b, 8 ranks tp4 -> 8 ranks tp1": Case(qwen3_8b, training(8, tp=4), inference(8, 8, tp=1)),
}


def measure(name: str, links: Links, results: "multiprocessing.SimpleQueue[dict]") -> None:
    case = CASES[name]
    before = peak_bytes()
    architecture = case.model()
    slowest, slices, planner = 0.0, 0, None
    start = time.process_time()
    source, destination = case.source(architecture), case.destination(architecture)
    planner = Planner(source, destination, RANKS_PER_NODE)
    setup = time.process_time() - start
    for rank in sorted({source.ranks[0], source.ranks[-1], destination.ranks[0], destination.ranks[-1]}):
        start = time.process_time()
        made = planner.plan(rank)
        slowest = max(slowest, time.process_time() - start)
        stages = (made.direct, made.fan_out)
        slices = max(slices, len(made.copies) + sum(len(s.sends) + len(s.receives) for s in stages))
    peak = peak_bytes()
    predicted = predict(planner, links)
    results.put(
        {
            "case": name,
            "plan_s": round(setup + slowest, 3),
            "peak_mb": round((peak - before) / 2**20),
            "most_slices_on_a_rank": slices,
            "traffic_gb": {field: round(n / 1e9, 3) for field, n in asdict(planner.traffic).items()},
            "predicted_network_s": round(predicted.network, 3),
            "bound_network_s": round(predicted.network_bound, 3),
            "predicted_node_s": round(predicted.node, 3),
            "busiest_sender_gb": round(predicted.busiest_sender_bytes / 1e9, 3),
            "busiest_receiver_gb": round(predicted.busiest_receiver_bytes / 1e9, 3),
        }
    )


def peak_bytes() -> int:
    """Returns the peak memory of this process so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", action="append", choices=list(CASES), help="default: all")
    parser.add_argument("--network-gb-per-s", type=float, default=50.0, help="one rank's link to other nodes")
    parser.add_argument("--node-gb-per-s", type=float, default=450.0, help="one rank's link within its node")
    options = parser.parse_args()
    links = Links(network=options.network_gb_per_s * 1e9, node=options.node_gb_per_s * 1e9)
    processes = multiprocessing.get_context("spawn")
    measured = []
    for name in options.case or CASES:
        results = processes.SimpleQueue()
        process = processes.Process(target=measure, args=(name, links, results))
        process.start()
        process.join()
        if process.exitcode:
            raise SystemExit(f"{name}: ended with status {process.exitcode}")
        measured.append(results.get())
        print(f"{name}: {measured[-1]['plan_s']} s, {measured[-1]['peak_mb']} MB", flush=True)
    bandwidths = {"network": options.network_gb_per_s, "node": options.node_gb_per_s}
    result = {"benchmark": "plan", "ranks_per_node": RANKS_PER_NODE, "links_gb_per_s": bandwidths, "cases": measured}
    print(json.dumps(result))


if __name__ == "__main__":
    main()
