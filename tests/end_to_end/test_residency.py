"""What roles that share ranks take away from each other's device, and that training does not notice."""

import json
import sys
from itertools import pairwise
from pathlib import Path

import pytest

from tests.end_to_end.jobs import REPOSITORY, run

SMALL = (
    "steps=3",
    "batch={prompts_per_step: 4, samples_per_prompt: 4, mini_batches: 2}",
    "loss.old_logprobs=actor",
    "rollout.sampling.max_response_tokens=16",
    "actor.parallel.tp=1",
    "data.eval=null",
    "checkpoint.save_hf=false",
    "logging={progress: false, samples: 0}",
    # An untrained model answers no question, but its answers differ in length.
    "reward={function: 'tools.benchmarks.slow_reward:slow', options: {seconds: 0.0}, num_workers: 1}",
)

PPO = ("algorithm=ppo", "loss.kl.coef=0", "critic.critic_only_steps=0", "critic.optimizer.lr=1e-3")

# name -> (number of ranks, roles that ever share a rank with another one's memory, overrides)
PLACEMENTS = {
    "colocated, the reference in the actor's modules": (
        2,
        {"actor", "reference", "rollout"},
        ("placement={'actor, reference, rollout, reward': 0-1}",),
    ),
    "overlapping": (
        3,
        {"actor", "reference", "rollout"},
        ("placement={actor: 0-1, reference: 1-2, rollout: 0-2, reward: 2}",),
    ),
    "hybrid": (
        4,
        {"actor", "critic", "rollout"},
        (*PPO, "placement={actor: 0-3, critic: 0-1, rollout: 2-3, reward: 0}", "critic.parallel={tp: 2}"),
    ),
    "hybrid, bfloat16": (
        4,
        {"actor", "critic", "rollout"},
        (*PPO, "placement={actor: 0-3, critic: 0-1, rollout: 2-3, reward: 0}", "model.dtype=bfloat16"),
    ),
    "pipelined": (
        2,
        {"actor", "critic"},
        (
            *PPO,
            "placement={'actor, critic': 0, 'rollout, reward': 1}",
            "schedule={mode: pipelined, chunks: 2}",
            "batch.mini_batches=1",
        ),
    ),
    "asynchronous": (
        2,
        {"actor", "critic"},
        (
            *PPO,
            "placement={'actor, critic': 0, 'rollout, reward': 1}",
            "schedule={mode: asynchronous, max_staleness: 1, in_flight_sync: false}",
        ),
    ),
}

EVERY_ROLE = ("actor", "critic", "reference", "rollout")


def offload(choice: str) -> list[str]:
    return [f"{role}.offload={choice}" for role in EVERY_ROLE]


SETTINGS = {
    "false": offload("false"),
    "true": offload("true"),
    "auto": [*offload("auto"), "residency.prefetch=false"],
    "release": [*offload("true"), "residency.communicators=release"],
}

Records = list[dict[str, float]]


def train_each(jobs: dict[str, list[str]], folder: Path, num_ranks: int) -> dict[str, Records]:
    """The metrics of each job, in order. The processes go from one to the next."""
    overrides = [[*of_job, f"output_dir={folder / name}"] for name, of_job in jobs.items()]
    (folder / "jobs.json").write_text(json.dumps(overrides))
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_ranks}"]
    arguments = ["tests/end_to_end/consecutive_jobs.py", "configs/quickstart.yaml", str(folder / "jobs.json")]
    done = run([*torchrun, *arguments], timeout_s=240)
    assert done.returncode == 0, f"{done.stdout[-4000:]}\n{done.stderr[-8000:]}"
    return {name: read_metrics(folder / name) for name in jobs}


def read_metrics(output_dir: Path) -> Records:
    return [json.loads(line) for line in (output_dir / "metrics.jsonl").read_text().splitlines()]


def learnt(records: Records) -> Records:
    """What was generated and learnt, without times."""
    return [{k: v for k, v in step.items() if k.split("/")[0] in ("train", "critic", "rollout")} for step in records]


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_training_is_identical_whoever_leaves_the_device(placement, quickstart_files, tmp_path):
    num_ranks, sharing, overrides = PLACEMENTS[placement]
    paths = [f"model.path={quickstart_files}/model", f"data.train.path={quickstart_files}/train.jsonl"]
    jobs = {name: [*paths, *SMALL, *overrides, *settings] for name, settings in SETTINGS.items()}
    records = train_each(jobs, tmp_path, num_ranks)
    for name in SETTINGS:
        print(name, [(s["train/grad_norm"], s.get("critic/loss"), {k:v for k,v in s.items() if k.startswith("memory")}) for s in records[name]])
    for one, other in pairwise(SETTINGS):
        assert learnt(records[one]) == learnt(records[other])
