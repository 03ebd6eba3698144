"""Seconds of a generate task whose environments step while engines decode, beside those in which they take turns.

    python tools/benchmarks/environments.py [--steps 6] [--rounds 2] [--seconds 0.2] [key=value ...]

An untrained model ends its turns at random; the environment sleeps for every step, about as long as the engine decodes
one turn of all samples, unless --seconds says how long. Both ways run as whole jobs of two ranks, one after the other,
in rounds. Prints the medians, the ratio of every round, and one JSON object last.

What nothing overlaps is the last step of the environments: of T turns a T-th part of what they take. So with four turns
less is to be had than with eight.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[2]
WARM_UP_STEPS = 1
TURNS = 8
TURN_TOKENS = 8
SHARE_OF_DECODING = 0.7
"""Of what an environment takes, on average. The slowest of all takes nearly twice that, for which all wait in turn."""
COMMON = [
    "placement={'actor, rollout, reward': 0, env: 1}",
    "actor.parallel={tp: 1}",
    "actor.optimizer.lr=1e-9",
    "loss={kl: {coef: 0}, old_logprobs: rollout}",
    "data.eval=null",
    "checkpoint.save_hf=false",
    "checkpoint.save_every_s=0",
    "logging={progress: false}",
    "batch={prompts_per_step: 32, samples_per_prompt: 8, mini_batches: 1}",
    "rollout={max_running_requests: 32, max_context_tokens: 128, sampling: {max_response_tokens: 112}}",
    "reward={function: exact_match}",
]


def generate_seconds(
    start: Path, output: Path, overlap: bool, seconds: float, steps: int, more: Sequence[str]
) -> float:
    """The median of a job's generate tasks. RuntimeError with its output where it fails."""
    environment = (
        "env={function: 'tools.benchmarks.slow_environment:SlowEnvironment', num_workers: 1, "
        f"max_turn_tokens: {TURN_TOKENS}, overlap: {str(overlap).lower()}, "
        f"options: {{seconds: {seconds}, turns: {TURNS}}}}}"
    )
    paths = [f"model.path={start}/model", f"data.train.path={start}/train.jsonl", f"output_dir={output}"]
    settings = [*COMMON, environment, *paths, f"steps={steps + WARM_UP_STEPS}", *more]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command = [*torchrun, "launch/train.py", "--config", "configs/quickstart.yaml", *settings]
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=REPOSITORY, env=environ, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(done.stdout[-2000:] + done.stderr[-4000:])
    records = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    names = ("perf/generate_s", "perf/generate_wait_s")
    took = [sum(record[name] for name in names) for record in records if names[0] in record]
    return statistics.median(took[WARM_UP_STEPS:])


def measure(seconds: float | None, steps: int, rounds: int, more: Sequence[str]) -> dict[str, Any]:
    """The medians of both ways and their ratio, and the ratio of every round."""
    took: dict[bool, list[float]] = {False: [], True: []}
    with tempfile.TemporaryDirectory() as folder:
        start = Path(folder, "start")
        make = [sys.executable, "tools/make_quickstart.py", "--output", str(start), "--seed", "0"]
        subprocess.run(make, cwd=REPOSITORY, check=True, capture_output=True)
        if seconds is None:
            decoding = generate_seconds(start, Path(folder, "decoding"), False, 0.0, steps, more)
            seconds = SHARE_OF_DECODING * decoding / TURNS
        for number in range(rounds):
            for overlap in took:
                output = Path(folder, f"{overlap}{number}")
                took[overlap].append(generate_seconds(start, output, overlap, seconds, steps, more))
    in_turn, overlapped = (statistics.median(took[overlap]) for overlap in (False, True))
    of_rounds = [round(one / other, 3) for one, other in zip(took[False], took[True], strict=True)]
    return {
        "env_step_s": seconds,
        "in_turn_s": in_turn,
        "overlapped_s": overlapped,
        "speedup": in_turn / overlapped,
        "of_rounds": of_rounds,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=2, help="of both ways")
    parser.add_argument("--seconds", type=float, help="of an environment's step")
    parser.add_argument("overrides", nargs="*", help="key=value of the config")
    options = parser.parse_args()
    found = measure(options.seconds, options.steps, options.rounds, options.overrides)
    for name, value in found.items():
        print(f"{name:14} {value if isinstance(value, list) else format(value, '.3f')}")
    print(json.dumps(found))


if __name__ == "__main__":
    main()
