"""What roles that share ranks take away from each other's device, and that training does not notice."""

import json
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.support.jobs import run

SMALL = (
    "batch={prompts_per_step: 4, samples_per_prompt: 4, mini_batches: 2}",
    "loss.old_logprobs=actor",
    "rollout.sampling.max_response_tokens=16",
    "actor.parallel.tp=1",
    "data.eval=null",
    "data.train.max_rows=1024",
    "checkpoint.save_hf=false",
    "logging={progress: false, samples: 0}",
    # An untrained model answers no question, but its answers differ in length.
    "reward={function: 'tools.benchmarks.slow_reward:slow', options: {seconds: 0.0}, num_workers: 1}",
)
PPO = ("algorithm=ppo", "loss.kl.coef=0", "critic.optimizer.lr=1e-3")


class Case(NamedTuple):
    num_ranks: int
    overrides: tuple[str, ...]
    sharing: set[str]
    """Roles that have to share ranks with another one's memory."""
    steps: int = 2
    """The second mini-batch of the last one meets weights that states made which had left the device."""


CASES = {
    "colocated": Case(
        2,
        ("placement={'actor, reference, rollout, reward': 0-1}",),
        sharing={"actor", "reference", "rollout"},
    ),
    "overlapping": Case(
        3,
        ("placement={actor: 0-1, reference: 1-2, rollout: 0-2, reward: 2}",),
        sharing={"actor", "reference", "rollout"},
    ),
    "hybrid": Case(
        4,
        (*PPO, "placement={actor: 0-3, critic: 0-1, rollout: 2-3, reward: 0}", "critic.parallel={tp: 2}"),
        sharing={"actor", "critic", "rollout"},
    ),
    "pipelined": Case(
        2,
        (
            *PPO,
            "placement={'actor, critic': 0, 'rollout, reward': 1}",
            "schedule={mode: pipelined, chunks: 2}",
            "batch.mini_batches=1",  # gradients stay from chunk to chunk
        ),
        sharing={"actor", "critic"},
        steps=3,
    ),
    "asynchronous": Case(
        2,
        (
            *PPO,
            "placement={'actor, critic': 0, 'rollout, reward': 1}",
            # In flight, it would be a matter of time which token is the first of the new weights.
            "schedule={mode: asynchronous, max_staleness: 1, in_flight_sync: false}",
            "model.dtype=bfloat16",
        ),
        sharing={"actor", "critic"},
    ),
}

pytestmark = pytest.mark.slow  # tests/distributed/test_offload.py is quicker

ROLES = ("actor", "critic", "reference", "rollout")
LEAVING = [f"{role}.offload=true" for role in ROLES]
SETTINGS = {
    "false": [f"{role}.offload=false" for role in ROLES],
    "true": LEAVING,
    "without communicators": [*LEAVING, "residency.communicators=release"],
}
BUDGET = ("rollout.max_context_tokens=64", "rollout.kv_cache_gb=0.0001")  # six blocks of 32 tokens
IN_BUDGET = {
    "in a budget": [*SETTINGS["false"], *BUDGET],
    "in a budget, without prefetch": [*LEAVING, *BUDGET, "residency.prefetch=false"],
}

Records = list[dict[str, float]]


def train_each(jobs: dict[str, list[str]], folder: Path, num_ranks: int) -> dict[str, Records]:
    """The metrics of each job. The processes go from one to the next."""
    overrides = [[*of_job, f"output_dir={folder / name}"] for name, of_job in jobs.items()]
    (folder / "jobs.json").write_text(json.dumps(overrides))
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_ranks}"]
    arguments = ["tests/support/consecutive_jobs.py", "configs/quickstart.yaml", str(folder / "jobs.json")]
    done = run([*torchrun, *arguments], timeout_s=240)
    assert done.returncode == 0, f"{done.stdout[-4000:]}\n{done.stderr[-8000:]}"
    assert "cannot share" not in done.stderr, "ranks with equal weights keep one copy of the reference's"
    return {name: read_metrics(folder / name) for name in jobs}


def read_metrics(output_dir: Path) -> Records:
    return [json.loads(line) for line in (output_dir / "metrics.jsonl").read_text().splitlines()]


def learnt(records: Records) -> Records:
    """What was generated and learnt, without times."""
    return [{k: v for k, v in step.items() if k.split("/")[0] in ("train", "critic", "rollout")} for step in records]


def left(records: Records) -> set[str]:
    """The roles of which something left its device."""
    return {role for role in ROLES for step in records if f"memory/{role}_residue_bytes" in step}


@pytest.mark.parametrize("name", CASES)
def test_training_is_identical_whoever_leaves_the_device(name, quickstart_files, tmp_path):
    case = CASES[name]
    files = [f"model.path={quickstart_files}/model", f"data.train.path={quickstart_files}/train.jsonl"]
    common = [*files, f"steps={case.steps}", *SMALL, *case.overrides]
    jobs = {setting: [*common, *choices] for setting, choices in (SETTINGS | IN_BUDGET).items()}
    records = train_each(jobs, tmp_path, case.num_ranks)

    steps = learnt(records["false"])
    assert len(steps) == case.steps
    assert all(step["train/grad_norm"] > 0 and step["rollout/reward_std"] > 0 for step in steps)
    assert all(("critic/loss" in step) == ("critic" in case.sharing) for step in steps)
    for setting in SETTINGS:
        assert learnt(records[setting]) == steps, f"offload {setting} changes what is learnt"
    within, leaving = (learnt(records[setting]) for setting in IN_BUDGET)
    assert within == leaving
    assert all(step["rollout/kv_cache_peak"] > 0.5 and step["train/grad_norm"] > 0 for step in within)

    assert left(records["true"]) == case.sharing | {"rollout"}
    assert left(records["false"]) == set()
    assert {step[name] for step in records["false"] for name in ("memory/offload_s", "memory/host_bytes")} == {0}
    for step in records["true"]:
        assert {step[f"memory/{role}_residue_bytes"] for role in left([step])} == {0}
        assert step["memory/offload_s"] > 0 and step["memory/onload_s"] > 0
    assert records["true"][-1]["memory/host_bytes"] > records["false"][-1]["memory/host_bytes"]
