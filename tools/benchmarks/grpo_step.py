"""Measures samples per second of whole GRPO steps: rltrain, and TRL's GRPOTrainer on the same work, side by side.

    python tools/benchmarks/grpo_step.py --trl-python PYTHON --start runs/quickstart/start [--model tests/warmed_up]

PYTHON has TRL. A step generates 32 prompts x 16 samples of at most 40 tokens, scores them and makes four optimizer
steps, without a reference, in one process with one thread. rltrain is measured with and without shared prefixes. The
programs take turns, and the first steps of each run do not count. The last line is one JSON object with the median
samples per second, and where the seconds of rltrain go.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[2]
PROMPTS, SAMPLES, MINI_BATCHES = 32, 16, 4
MAX_RESPONSE_TOKENS = 40
UNCOUNTED = 3
TASKS = ("generate", "weight_sync", "score", "advantages", "update")
OURS = {"shared": "auto", "alone": "false"}
"""The values of actor.share_prefixes by the names of their results."""


def run(command: list[str]) -> str:
    """Returns the output of a command. Raises SystemExit if it fails."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    done = subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
    return done.stdout


def steps_of_rltrain(model: str, start: str, num_steps: int, share_prefixes: str) -> list[dict[str, float]]:
    """Returns the metrics of every counted step."""
    with tempfile.TemporaryDirectory() as folder:
        overrides = {
            "placement": "{'actor, rollout, reward': 0}",
            "actor.parallel.tp": 1,
            "actor.share_prefixes": share_prefixes,
            "model.path": model,
            "data.train.path": f"{start}/train.jsonl",
            "data.eval": "null",
            "rollout.max_running_requests": PROMPTS * SAMPLES,  # TRL generates all samples at once too
            "loss.kl.coef": 0,
            "steps": num_steps + UNCOUNTED,
            "output_dir": folder,
            "checkpoint.save_hf": "false",
            "checkpoint.save_every_s": "0",
            "reward.num_workers": 1,
        }
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=1"]
        settings = [f"{key}={value}" for key, value in overrides.items()]
        run([*torchrun, "launch/train.py", "--config", "configs/quickstart.yaml", *settings])
        records = [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]
    return [record for record in records if "perf/update_s" in record][UNCOUNTED:]


def seconds_of_trl(python: str, model: str, start: str, num_steps: int) -> list[float]:
    """Returns the seconds of every counted step, from generation to the last optimizer step."""
    script = [python, str(Path(__file__).resolve()), "--start", start, "--model", model]
    printed = run([*script, "--steps", str(num_steps + UNCOUNTED), "--run-trl"])
    seconds: list[float] = json.loads(printed.splitlines()[-1])
    return seconds[UNCOUNTED:]


def run_trl(model: str, start: str, num_steps: int) -> list[float]:
    """Trains with TRL's GRPOTrainer by the quickstart's settings. Returns the seconds of each step."""
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    class StepTimes(TrainerCallback):
        def __init__(self) -> None:
            self.seconds: list[float] = []

        def on_step_begin(self, args: Any, state: Any, control: Any, **further: Any) -> None:
            if state.global_step % MINI_BATCHES == 0:
                self.begin = time.perf_counter()

        def on_step_end(self, args: Any, state: Any, control: Any, **further: Any) -> None:
            if state.global_step % MINI_BATCHES == 0:
                self.seconds.append(time.perf_counter() - self.begin)

    def exact_match(prompts: list[str], completions: list[str], label: list[str], **columns: Any) -> list[float]:
        return [float(text.rpartition(",")[2] == right) for text, right in zip(completions, label, strict=True)]

    torch.set_num_threads(1)
    lines = Path(start, "train.jsonl").read_text().splitlines()[: PROMPTS * (num_steps + 2)]
    times = StepTimes()
    config = GRPOConfig(
        output_dir=tempfile.mkdtemp(),
        use_cpu=True,
        bf16=False,
        per_device_train_batch_size=PROMPTS * SAMPLES // MINI_BATCHES,
        gradient_accumulation_steps=1,
        steps_per_generation=MINI_BATCHES,
        num_generations=SAMPLES,
        max_completion_length=MAX_RESPONSE_TOKENS,
        max_steps=num_steps * MINI_BATCHES,
        learning_rate=3e-4,
        beta=0.0,
        temperature=1.0,
        epsilon=0.2,
        epsilon_high=0.28,
        adam_beta2=0.99,
        max_grad_norm=1.0,
        gradient_checkpointing=False,
        dataloader_num_workers=0,
        logging_strategy="no",
        save_strategy="no",
        report_to=[],
        seed=0,
    )
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32),
        processing_class=AutoTokenizer.from_pretrained(model),
        reward_funcs=exact_match,
        train_dataset=Dataset.from_list([json.loads(line) for line in lines]),
        args=config,
        callbacks=[times],
    )
    trainer.train()
    return times.seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trl-python")
    parser.add_argument("--start", default="runs/quickstart/start")
    parser.add_argument("--model", default="tests/warmed_up")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--run-trl", action="store_true", help="only runs TRL, in this Python")
    arguments = parser.parse_args()
    if arguments.run_trl:
        print(json.dumps(run_trl(arguments.model, arguments.start, arguments.steps)))
        return
    where = arguments.model, arguments.start, arguments.steps
    ours: dict[str, list[dict[str, float]]] = {name: [] for name in OURS}
    seconds: dict[str, list[float]] = {"trl": []} if arguments.trl_python else {}
    for repeat in range(arguments.repeats):
        for name, share_prefixes in OURS.items():
            ours[name] += steps_of_rltrain(*where, share_prefixes)
        if arguments.trl_python:
            seconds["trl"] += seconds_of_trl(arguments.trl_python, *where)
        print(f"repeat {repeat} of {arguments.repeats} is done", file=sys.stderr)
    seconds |= {name: [record["perf/step_time_s"] for record in records] for name, records in ours.items()}
    rates = {name: PROMPTS * SAMPLES / statistics.median(of_steps) for name, of_steps in seconds.items()}
    tasks = {
        name: {task: statistics.median(record[f"perf/{task}_s"] for record in records) for task in TASKS}
        for name, records in ours.items()
    }
    for name, rate in rates.items():
        parts = ", ".join(f"{task} {of_task:.3f} s" for task, of_task in tasks.get(name, {}).items())
        print(f"{name:8} {rate:8.0f} samples/s  {rate / rates[[*rates][0]]:.2f}  {parts}")
    print(json.dumps({"samples_per_s": rates, "task_s": tasks, "machine": platform.processor() or platform.machine()}))


if __name__ == "__main__":
    main()
