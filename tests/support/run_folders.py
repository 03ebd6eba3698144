"""Makes run folders with every kind of file read by the report."""

import json
import math
import random
from pathlib import Path
from typing import Any

HOSTED = {0: ("rollout", "reward"), 1: ("rollout",), 2: ("actor", "critic"), 3: ("actor", "reference")}
SYNC_S = 0.12
START_US = 1_795_000_000_000_000.0

HOSTILE = (
    "</script><script>window.hacked = 1</script><img src=x onerror='window.hacked = 2'> &amp; \u2028 é\n"
    + "endless" * 90
)
"""Text from a model or data file that is dangerous if a browser takes it for markup."""


class RankLog:
    """The trace file of one rank, written event by event. `now` is its time in seconds."""

    def __init__(self, folder: Path, rank: int, roles: tuple[str, ...]) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.path, self.rank, self.now, self.lines = folder / f"rank{rank}.json", rank, 0.0, list[str]()
        self.event("M", "thread_name", args={"name": "MainThread"})
        self.event("M", "process_name", args={"name": f"rank {rank}: {', '.join(roles)}"})

    def event(self, phase: str, name: str, at_s: float | None = None, **fields: Any) -> None:
        ts = START_US + 1e6 * (self.now if at_s is None else at_s)
        self.lines.append(json.dumps({"ph": phase, "ts": ts, "pid": self.rank, "tid": 7, "name": name, **fields}))

    def span(self, name: str, category: str, seconds: float, **arguments: Any) -> None:
        self.event("B", name, cat=category, args=arguments)
        self.now += seconds
        self.event("E", name, cat=category)

    def wait_until(self, time_s: float, name: str, **arguments: Any) -> None:
        self.span(name, "wait", max(time_s - self.now, 1e-4), **arguments)

    def write(self, closed: bool = True) -> None:
        self.path.write_text("[\n" + ",\n".join(self.lines) + ("\n]\n" if closed else ",\n"))


def write_metrics(folder: Path, num_steps: int, seed: int = 0) -> None:
    noise = random.Random(seed)
    lines = []
    for step in range(num_steps):
        done = step / num_steps
        record = {
            "step": step,
            "time_s": round(3.1 * (step + 1), 3),
            "train/loss": noise.gauss(0.02, 0.02) * (1.2 - done),
            "train/pg_loss": noise.gauss(0.0, 0.02) * (1.2 - done),
            "train/reference_kl": 0.08 * done + abs(noise.gauss(0, 0.004)),
            "train/ppo_kl": abs(noise.gauss(2e-4, 1e-4)),
            "train/entropy": 1.4 * math.exp(-2 * done) + noise.gauss(0, 0.02),
            "train/grad_norm": None if step == 7 else 1.5 * math.exp(-done) + abs(noise.gauss(0, 0.2)),
            "train/lr": 1e-6 * min(1, (step + 1) / 10),
            "train/staleness_mean": min(step, 1) * 0.8 + 0.1 * noise.random(),
            "train/staleness_max": min(step, 1),
            "train/train_rollout_logprob_abs_diff": abs(noise.gauss(1e-3, 2e-4)),
            "critic/loss": 0.3 * math.exp(-3 * done) + 0.02 * noise.random(),
            "critic/explained_variance": 0.8 * done,
            "rollout/reward_mean": 0.15 + 0.8 / (1 + math.exp(-10 * (done - 0.4))) + noise.gauss(0, 0.03),
            "rollout/response_length_mean": 26 + 9 * done + noise.gauss(0, 0.6),
            "rollout/response_length_max": 36,
            "rollout/truncated_ratio": 0.02 * noise.random(),
            "rollout/reward_errors": 0,
            "perf/step_time_s": 3.1 + noise.gauss(0, 0.1),
            "perf/generate_s": 1.6 + noise.gauss(0, 0.1),
            "perf/update_s": 0.9 + noise.gauss(0, 0.05),
            "perf/weight_sync_s": SYNC_S,
            "perf/weight_sync_wait_s": 0.9 + 0.1 * noise.random(),
            "perf/generate_wait_s": 0.2 + 0.1 * noise.random(),
            "perf/update_wait_s": 0.0,
            "perf/weight_sync_bytes": 3.1e9,
            "perf/weight_sync_wire_s": 0.08,
            "perf/weight_sync_gb_per_s": 24 + noise.gauss(0, 1),
            "perf/rollout_tokens_per_s": 45_000 * (1 + 0.1 * noise.random()),
            "memory/actor_resident_bytes": 61e9,
            "memory/rollout_resident_bytes": 48e9 + 1e9 * noise.random(),
            "memory/actor_residue_bytes": 3e8,
            "custom/my_metric": noise.random(),
            "unprefixed": step % 5,
        }
        if step % 10 == 0 or step == num_steps - 1:
            record["eval/score"] = 0.12 + 0.8 * done
        lines.append(json.dumps(record))
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")


def write_traces(folder: Path, num_steps: int, seed: int = 0) -> None:
    """Writes traces of four ranks: rollouts decode for step k+1 while the actor trains on step k, and both wait."""
    noise = random.Random(seed)
    logs = {rank: RankLog(folder / "trace", rank, roles) for rank, roles in HOSTED.items()}
    updated = [0.0] * 2
    for step in range(num_steps):
        drawn = [max(logs[rank].now, updated[step]) + SYNC_S + 1.6 + noise.gauss(0, 0.15) for rank in (0, 1)]
        for rank in (0, 1):
            log = logs[rank]
            log.event("B", "weight_sync", cat="task", args={"role": "actor+rollout", "step": step})
            log.wait_until(updated[step], "the others", task="weight_sync")
            log.now += SYNC_S
            log.event("E", "weight_sync", cat="task")
            log.event("B", "generate", cat="task", args={"role": "rollout", "step": step})
            log.now = drawn[rank]
            log.wait_until(max(drawn), "the last groups", task="generate")
            log.event("E", "generate", cat="task")
            log.span("samples", "post", 0.004, role="rollout", step=step)
        logs[0].wait_until(logs[1].now, "samples", role="reward", step=step)
        logs[0].span("score", "task", 0.25, role="reward", step=step)
        for rank in (2, 3):
            log = logs[rank]
            log.wait_until(logs[0].now, "scored", role="actor", step=step)
            if rank == 2:
                log.span("onload critic", "onload", 0.05, bytes=4_000_000_000)
                log.span("values", "task", 0.2, role="critic", step=step)
                log.span("offload critic", "offload", 0.05)
                log.span("update_critic", "task", 0.4, role="critic", step=step)
            else:
                log.span("reference_logprobs", "task", 0.3, role="reference", step=step)
            log.span("actor_logprobs", "task", 0.25, role="actor", step=step)
            log.event("B", "update", cat="task", args={"role": "actor", "step": step})
            log.span("forward_backward", "part", 0.6)
            log.span("optimizer", "part", 0.2)
            log.event("E", "update", cat="task")
            log.event("C", "running sequences", args={"value": step % 7})
        updated.append(max(logs[2].now, logs[3].now))
    for log in logs.values():
        log.write()


def write_samples(folder: Path, num_steps: int, per_step: int = 4, seed: int = 0) -> None:
    noise = random.Random(seed)
    lines = []
    for step in range(num_steps):
        for i in range(per_step):
            first, second = noise.randrange(100, 1000), noise.randrange(100, 1000)
            hostile = HOSTILE if step == num_steps - 1 and i == 0 else ""
            sample = {
                "step": step,
                "prompt": f"{first}+{second}=",
                "response": f"{hostile}7+5=12,4+8+1=13,3+2+1=6,{first + second}",
                "label": str(first + second),
                "reward": float(noise.random() < step / num_steps),
                "length": 26,
                "policy_version_min": max(step - 1, 0),
                "policy_version_max": step,
            }
            lines.append(json.dumps(sample))
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "samples.jsonl").write_text("\n".join(lines) + "\n")


def write_run(folder: Path, num_steps: int = 40) -> Path:
    write_metrics(folder, num_steps)
    write_traces(folder, num_steps)
    write_samples(folder, num_steps)
    return folder
