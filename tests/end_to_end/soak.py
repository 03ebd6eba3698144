"""Runs a job of many short steps, kills ranks now and then, and prints the resources of its processes as JSON. Run it
by hand.

    python -m tests.end_to_end.soak FOLDER --quickstart FILES [--mode M] [--steps N] [--kill-every K] [--seed S]
        [key=value ...]

FILES is the output folder of tools/make_quickstart.py. FOLDER/held.jsonl gets a line every few seconds. The final
output has medians over the tenth of the steps in the middle and over the last tenth. A quantity that grows with the
steps is larger in the last tenth.
"""

import argparse
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, TextIO

from torch.distributed import TCPStore

from tests.support.jobs import REPOSITORY, read_records, sample_ids

APART = "placement={actor: '0', 'rollout, reward': '1'}"
TOGETHER = "placement={'actor, rollout, reward': '0-1'}"
MODES = {
    "sequential": (TOGETHER, "actor.offload=true", "rollout.offload=true"),
    "pipelined": (APART, "schedule={mode: pipelined, max_staleness: 0, chunks: 2}"),
    "asynchronous": (APART, "schedule={mode: asynchronous, max_staleness: 2}"),
    "partial": (APART, "schedule={mode: asynchronous, max_staleness: 2, partial_rollouts: true}"),
}
EVERY_S = 5.0
Held = dict[str, float]


def command(folder: Path, files: Path, mode: str, steps: int, restarts: int, more: Sequence[str]) -> list[str]:
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", f"--max-restarts={restarts}"]
    return [
        *(sys.executable, *torchrun, "launch/train.py", "--config", "configs/quickstart.yaml"),
        f"model.path={folder}/model",
        f"data.train.path={files}/train.jsonl",
        "data.train.max_rows=512",
        "data.eval=null",
        "actor.parallel.tp=1",
        "actor.optimizer={decay: constant, lr: 1e-6}",
        "loss.kl.coef=0",
        "batch={prompts_per_step: 2, samples_per_prompt: 2, mini_batches: 1}",
        "rollout.sampling.max_response_tokens=2",
        "checkpoint={save_interval: 100, save_hf: false}",
        "logging={progress: false, samples: 0, sample_ids: true}",
        f"output_dir={folder}/run",
        f"steps={steps}",
        *MODES[mode],
        *more,
    ]


def ranks_of(agent: int) -> dict[int, int]:
    """Returns rank -> process id, of torchrun's children with a rank."""
    found = {}
    for task in Path(f"/proc/{agent}/task").iterdir():
        for child in (task / "children").read_text().split():
            if (rank := environment_of(int(child)).get("RANK")) is not None:
                found[int(rank)] = int(child)
    return found


def environment_of(process: int) -> dict[str, str]:
    try:
        entries = Path(f"/proc/{process}/environ").read_bytes().decode().split("\0")
    except (FileNotFoundError, ProcessLookupError):
        return {}
    return dict(entry.split("=", 1) for entry in entries if "=" in entry)


def held_by(process: int) -> Held:
    status = dict(line.split(":", 1) for line in Path(f"/proc/{process}/status").read_text().splitlines())
    if "RssAnon" not in status:
        raise ProcessLookupError(f"process {process} has ended")
    return {
        "megabytes": int(status["RssAnon"].split()[0]) / 1024,
        "files": len(os.listdir(f"/proc/{process}/fd")),
        "threads": int(status["Threads"]),
    }


def steps_done(metrics: Path) -> int:
    """Returns the number of finished steps. Reads only the end of the file."""
    if not metrics.exists():
        return 0
    with metrics.open("rb") as file:
        file.seek(max(0, metrics.stat().st_size - 2**16))
        lines = file.read().splitlines()
    complete = [line for line in lines if line.startswith(b"{") and line.endswith(b"}")]
    return int(json.loads(complete[-1])["step"]) + 1 if complete else 0


def make_model(folder: Path, files: Path) -> None:
    """Makes a model of one small layer, so that the step consists mostly of other work."""
    sizes = {"vocab": 300, "layers": 1, "hidden": 32, "heads": 2, "kv-heads": 2, "head-dim": 16, "intermediate": 32}
    arguments = [f"--{name}={value}" for name, value in sizes.items()]
    maker = [sys.executable, "tools/make_tiny_model.py", f"--output={folder}/model", f"--corpus={files}/train.jsonl"]
    subprocess.run([*maker, *arguments], cwd=REPOSITORY, check=True)


class Watched:
    """A job observed from outside its processes."""

    def __init__(self, given: argparse.Namespace) -> None:
        self.folder: Path = given.folder
        self.chance = random.Random(given.seed)
        self.kill_every: int = given.kill_every
        self.kills: list[int] = []
        restarts = given.steps // self.kill_every + 1 if self.kill_every else 0
        make_model(self.folder, given.quickstart)
        self.log = (self.folder / "log").open("w")
        arguments = command(self.folder, given.quickstart, given.mode, given.steps, restarts, given.overrides)
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        self.agent = subprocess.Popen(
            arguments, cwd=REPOSITORY, env=environment, stdout=self.log, stderr=subprocess.STDOUT
        )

    def observations(self) -> Iterator[Held]:
        while self.agent.poll() is None:
            time.sleep(EVERY_S)
            steps = steps_done(self.folder / "run/metrics.jsonl")
            try:
                yield self._look(steps)
                self._kill_if_due(steps)
            except (FileNotFoundError, ProcessLookupError):  # a rank or torchrun has ended
                continue

    def _look(self, steps: int) -> Held:
        ranks = ranks_of(self.agent.pid)
        shared = sum(file.stat().st_size for file in Path("/dev/shm").iterdir() if file.is_file())
        observed: Held = {"step": steps, "at_s": time.monotonic(), "shared_megabytes": shared / 2**20}
        for rank, process in sorted(ranks.items()):
            observed |= {f"rank{rank}_{name}": value for name, value in held_by(process).items()}
        observed |= {f"agent_{name}": value for name, value in held_by(self.agent.pid).items()}
        if ranks:
            observed["store_keys"] = self._store_keys(environment_of(ranks[min(ranks)]))
        return observed

    def _store_keys(self, environment: dict[str, str]) -> float:
        address, port = environment["MASTER_ADDR"], int(environment["MASTER_PORT"])
        return TCPStore(address, port, is_master=False, timeout=timedelta(seconds=20)).num_keys()

    def _kill_if_due(self, steps: int) -> None:
        if self.kill_every and steps >= (len(self.kills) + 1) * self.kill_every:
            ranks = ranks_of(self.agent.pid)
            if ranks:
                os.kill(ranks[self.chance.choice(sorted(ranks))], signal.SIGKILL)
                self.kills.append(steps)


def growth(observed: Sequence[Held], steps: int) -> dict[str, tuple[float, float]]:
    """Returns quantity -> medians in the tenth of the steps in the middle and in the last tenth."""
    middle = [one for one in observed if 0.5 <= one["step"] / steps < 0.6]
    last = [one for one in observed if one["step"] / steps >= 0.9]
    seen = [{name for one in observations for name in one} for observations in (middle, last)]
    names = sorted(seen[0] & seen[1] - {"step", "at_s"})
    return {name: (_median(middle, name), _median(last, name)) for name in names}


def _median(observed: Sequence[Held], name: str) -> float:
    """Returns the median over the observations with this quantity."""
    return statistics.median(one[name] for one in observed if name in one)


def watch(given: argparse.Namespace, log: TextIO) -> dict[str, Any]:
    begin = time.monotonic()
    job, observed = Watched(given), []
    for one in job.observations():
        observed.append(one)
        print(json.dumps(one), file=log, flush=True)
    if job.agent.returncode:
        raise SystemExit(f"the job failed: see {given.folder}/log")
    records, ids = read_records(given.folder / "run"), sample_ids(given.folder / "run")
    numbers = [number for step in sorted(ids) for number in ids[step]]
    return {
        "mode": given.mode,
        "seconds": round(time.monotonic() - begin),
        "killed_at": job.kills,
        "steps_once": [record["step"] for record in records if "train/loss" in record] == [*range(given.steps)],
        "samples_once": len(numbers) == len(set(numbers)) and len(ids) == given.steps,
        "middle_and_last": growth(observed, given.steps),
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--quickstart", type=Path, required=True)
    parser.add_argument("--mode", choices=MODES, default="sequential")
    parser.add_argument("--steps", type=int, default=20_000)
    parser.add_argument("--kill-every", type=int, default=0, help="steps after which a rank is killed; 0: never")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("overrides", nargs="*", default=[])
    given = parser.parse_intermixed_args()
    given.folder.mkdir(parents=True)
    with (given.folder / "held.jsonl").open("w") as log:
        print(json.dumps(watch(given, log)), flush=True)


if __name__ == "__main__":
    main()
