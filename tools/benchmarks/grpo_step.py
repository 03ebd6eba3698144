"""Samples per second of whole GRPO steps: rltrain, and TRL's GRPOTrainer on the same work, side by side.

    python tools/benchmarks/grpo_step.py --trl-python PYTHON --start runs/quickstart/start --model MODEL

A step draws 32 prompts x 16 samples of at most 40 tokens, scores them and makes four optimizer steps, without a
reference; one process and one thread each. PYTHON has TRL; MODEL is a checkpoint that answers as the quickstart's after
its warm-up (tests/warmed_up). The two take turns, and the first steps of each run are not counted. The last line is one
JSON object: samples per second, medians over all steps, and where rltrain's seconds go.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from weight_sync_timing import describe_machine

REPOSITORY = Path(__file__).resolve().parents[2]
SAMPLES_PER_STEP = 32 * 16
UNCOUNTED = 3
TASKS = ("generate", "weight_sync", "score", "advantages", "update")


def environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}


def run(command: list[str]) -> str:
    """Its output. SystemExit where it fails."""
    done = subprocess.run(command, cwd=REPOSITORY, env=environment(), capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
    return done.stdout


def rltrain_steps(model: str, start: str, num_steps: int) -> list[dict[str, float]]:
    """The metrics of every counted step."""
    with tempfile.TemporaryDirectory() as folder:
        overrides = {
            "placement": "{'actor, rollout, reward': 0}",
            "actor.parallel.tp": 1,
            "model.path": model,
            "data.train.path": f"{start}/train.jsonl",
            "data.eval": "null",
            "loss.kl.coef": 0,
            "steps": num_steps,
            "output_dir": folder,
            "checkpoint.save_hf": "false",
            "checkpoint.save_every_s": "0",
            "reward.num_workers": 1,
        }
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=1"]
        settings = [f"{key}={value}" for key, value in overrides.items()]
        run([*torchrun, "launch/train.py", "--config", "configs/quickstart.yaml", *settings])
        lines = (Path(folder) / "metrics.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    return [record for record in records if "perf/update_s" in record][UNCOUNTED:]


def trl_steps(python: str, model: str, start: str, num_steps: int) -> list[float]:
    script = str(REPOSITORY / "tools/benchmarks/grpo_step_trl.py")
    printed = run([python, script, model, f"{start}/train.jsonl", str(num_steps)])
    seconds: list[float] = json.loads(printed.splitlines()[-1])
    return seconds[UNCOUNTED:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trl-python", required=True)
    parser.add_argument("--start", default="runs/quickstart/start")
    parser.add_argument("--model", default="tests/warmed_up")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    ours: list[dict[str, float]] = []
    theirs: list[float] = []
    for repeat in range(arguments.repeats):
        ours += rltrain_steps(arguments.model, arguments.start, arguments.steps + UNCOUNTED)
        theirs += trl_steps(arguments.trl_python, arguments.model, arguments.start, arguments.steps + UNCOUNTED)
        print(f"repeat {repeat}: rltrain {len(ours)} steps, TRL {len(theirs)}", file=sys.stderr)
    rates = {"rltrain": [record["perf/step_time_s"] for record in ours], "trl": theirs}
    result = {name: SAMPLES_PER_STEP / statistics.median(times) for name, times in rates.items()}
    for name, rate in result.items():
        print(f"{name:8} {rate:8.0f} samples/s")
    for task in TASKS:
        print(f"  {task:12} {statistics.median(record[f'perf/{task}_s'] for record in ours):.3f} s")
    print(
        json.dumps(
            {**result, "ratio": result["rltrain"] / result["trl"], "machine": describe_machine(torch.device("cpu"))}
        )
    )


if __name__ == "__main__":
    main()
