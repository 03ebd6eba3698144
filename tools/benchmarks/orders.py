"""Measures steps per second of the schedule's modes on one machine, and the bound of their orders of tasks.

    python tools/benchmarks/orders.py [--case slow_rewards] [--steps 20] [--modes sequential,pipelined] [key=value ...]

An untrained model ends its responses at random, so their lengths have a long tail. Actor, rollout and reward have one
rank each. In the case slow_rewards the reward function sleeps for every sample. quickstart has that task's batch
without delays. In uneven_steps the longest of a few responses decides the length of a step's generation, and every
fifth prompt's rewards take long. Every mode is a whole job with the same seed, timed by its trace. The bound is the
order's time if only the tasks took time. Prints one JSON object last.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPOSITORY))

from rltrain.cli.report_run import (  # noqa: E402
    TimelineSpan,
    own_seconds,  # noqa: E402
    read_run,
)
from rltrain.config.loader import load_config  # noqa: E402
from rltrain.runtime.placement import resolve_placement  # noqa: E402
from rltrain.schedule.iterations import build_order  # noqa: E402
from rltrain.schedule.order import WEIGHT_SYNC, Entry, Order  # noqa: E402
from rltrain.schedule.replay import timetable  # noqa: E402

NUM_RANKS = 3
WARM_UP_STEPS = 4
MODES = {
    "sequential": ["schedule.mode=sequential"],
    "pipelined": ["schedule.mode=pipelined"],
    "asynchronous-1": ["schedule.mode=asynchronous", "schedule.max_staleness=1"],
    "asynchronous-4": ["schedule.mode=asynchronous", "schedule.max_staleness=4"],
}
COMMON = [
    "placement={actor: 0, rollout: 1, reward: 2}",
    "actor.parallel={tp: 1}",
    "actor.optimizer.lr=1e-9",
    "loss.kl.coef=0",
    "data.eval=null",
    "checkpoint.save_hf=false",
    "checkpoint.save_every_s=0",
    "logging={progress: false, trace: true}",
    "rollout.sampling.max_response_tokens=108",
    "rollout.max_context_tokens=124",
]
CASES = {
    "slow_rewards": [
        "batch={prompts_per_step: 32, samples_per_prompt: 8, mini_batches: 1}",
        "reward={function: 'tools.benchmarks.slow_reward:slow', options: {seconds: 0.005}, num_workers: 4}",
    ],
    "quickstart": [
        "batch={prompts_per_step: 32, samples_per_prompt: 16, mini_batches: 1}",
        "rollout.sampling.max_response_tokens=40",
        "reward={function: exact_match, options: {after: ','}}",
    ],
    "uneven_steps": [
        "batch={prompts_per_step: 2, samples_per_prompt: 4, mini_batches: 1}",
        "reward={function: 'tools.benchmarks.slow_reward:uneven', num_workers: 8}",
        "reward.options={seconds: 0.15, share: 0.2}",
    ],
}


def run_mode(start: Path, output: Path, overrides: list[str]) -> None:
    """Runs one job. Raises RuntimeError with its output if it fails."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={NUM_RANKS}"]
    command += ["launch/train.py", "--config", "configs/quickstart.yaml", *settings(start, output, overrides)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")


def settings(start: Path, output: Path, overrides: list[str]) -> list[str]:
    paths = [f"model.path={start}/model", f"data.train.path={start}/train.jsonl", f"output_dir={output}"]
    return [*COMMON, *paths, *overrides]


def measure(start: Path, output: Path, overrides: list[str]) -> dict[str, float]:
    """Returns seconds per step after the first ones: measured, and the bound of the order."""
    config = load_config(REPOSITORY / "configs/quickstart.yaml", settings(start, output, overrides))
    placement = resolve_placement(config.placement, NUM_RANKS, NUM_RANKS)
    order = build_order(config, placement)
    spans = task_spans(output)
    first, last = (update(order, step) for step in (WARM_UP_STEPS - 1, config.steps - 1))
    num_steps = config.steps - WARM_UP_STEPS
    ended = {entry: max(span.end_us for span in spans[key_of(entry)].values()) / 1e6 for entry in (first, last)}
    possible = timetable(order, placement, lambda entry, rank: spans[key_of(entry)][rank].own_s)
    step_s = (ended[last] - ended[first]) / num_steps
    bound_s = (possible[last].end - possible[first].end) / num_steps
    return {
        "step_s": step_s,
        "bound_s": bound_s,
        "share_of_bound": bound_s / step_s,
        **sync_waits(spans),
        "decode_step_max_s": max(longest_decode_steps(output)),
        **{f"{name}_s": seconds for name, seconds in mean_seconds(spans).items()},
    }


Key = tuple[str, int, int]


def key_of(entry: Entry) -> Key:
    return (entry.name, entry.step, entry.chunk)


def update(order: Order, step: int) -> Entry:
    return next(entry for entry in order if entry.name == "update" and entry.step == step)


class TimedSpan(NamedTuple):
    """A timed task. `own_s` excludes its waits and the tasks inside it."""

    end_us: float
    own_s: float
    wait_s: float


def task_spans(output: Path) -> dict[Key, dict[int, TimedSpan]]:
    """Returns the timed tasks by (name, step, chunk), and by rank."""
    spans: dict[Key, dict[int, TimedSpan]] = defaultdict(dict)
    for rank in read_run(output).ranks:
        timed = list(own_seconds(rank.spans, lambda span: span.category in ("task", "wait")))
        waits = [(span, own_s) for span, own_s in timed if span.category == "wait"]
        for task, own_s in timed:
            if task.category == "task":
                wait_s = sum(seconds for span, seconds in waits if is_directly_inside(span, task))
                key = (task.name, task.arguments["step"], task.arguments["chunk"])
                spans[key][rank.rank] = TimedSpan(task.end_us, own_s, wait_s)
    return spans


def is_directly_inside(span: TimelineSpan, other: TimelineSpan) -> bool:
    return span.depth == other.depth + 1 and other.start_us <= span.start_us and span.end_us <= other.end_us


def sync_waits(spans: dict[Key, dict[int, TimedSpan]]) -> dict[str, float]:
    """Returns the waits of a training rank for engines to join a sync, without the transfer."""
    syncs = [by_rank for (name, step, _), by_rank in spans.items() if name == WEIGHT_SYNC and step >= WARM_UP_STEPS]
    waits = [by_rank[0].wait_s for by_rank in syncs]
    return {"sync_wait_s": statistics.median(waits), "sync_wait_max_s": max(waits)} if waits else {}


def longest_decode_steps(output: Path) -> list[float]:
    records = [record for record in read_run(output).records if record["step"] >= WARM_UP_STEPS]
    return [record["perf/decode_step_max_s"] for record in records if "perf/decode_step_max_s" in record]


def mean_seconds(spans: dict[Key, dict[int, TimedSpan]]) -> dict[str, float]:
    """Returns the mean seconds per step of each task after the first steps, over its chunks on the fastest rank."""
    totals: dict[str, float] = defaultdict(float)
    steps: dict[str, set[int]] = defaultdict(set)
    for (name, step, _), by_rank in spans.items():
        if step >= WARM_UP_STEPS:
            totals[name] += min(span.own_s for span in by_rank.values())
            steps[name].add(step)
    return {name: total / len(steps[name]) for name, total in sorted(totals.items())}


def compare(modes: list[str], overrides: list[str], folder: Path) -> dict[str, dict[str, float]]:
    """Returns the measurements of each mode, with the speed-up over the first mode."""
    start = folder / "start"
    make = [sys.executable, "tools/make_quickstart.py", "--output", str(start), "--seed", "0"]
    subprocess.run(make, cwd=REPOSITORY, check=True, capture_output=True)
    results = {}
    for mode in modes:
        chosen = [*MODES[mode], *overrides]
        run_mode(start, folder / mode, chosen)
        results[mode] = measure(start, folder / mode, chosen)
        results[mode]["speedup"] = results[modes[0]]["step_s"] / results[mode]["step_s"]
        row = "  ".join(f"{name} {value:.3f}" for name, value in results[mode].items())
        print(f"{mode:16}{row}", flush=True)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--modes", default=",".join(MODES))
    parser.add_argument("--case", choices=CASES, default="slow_rewards")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("overrides", nargs="*")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        overrides = [f"steps={arguments.steps}", *CASES[arguments.case], *arguments.overrides]
        modes = compare(arguments.modes.split(","), overrides, Path(folder))
    print(json.dumps({"benchmark": "orders", "case": arguments.case, "steps": arguments.steps, "modes": modes}))


if __name__ == "__main__":
    main()
