"""A whole job in which a rank hangs or is killed ends soon, with one message that says where."""

import re
import sys
import time
from pathlib import Path

import pytest

from tests.support.jobs import REPOSITORY, run

NUM_RANKS, STEP = 4, 1
NO_PROGRESS_S = 10.0
SOON_S = 60.0

# task of a PPO step -> (the rank that fails in it, the role that it does it for)
VICTIMS = {
    "generate": (3, "rollout"),
    "update": (0, "actor"),
    "weight_sync": (2, "rollout"),
}
"""While others wait for samples, in a collective of training, in a sync."""


@pytest.fixture
def arguments(quickstart_files: Path, data_overrides: list[str], tmp_path: Path) -> list[str]:
    return [
        "--config",
        str(REPOSITORY / "configs/quickstart_ppo.yaml"),
        f"model.path={quickstart_files}/model",
        f"output_dir={tmp_path}",
        *data_overrides,
        "placement={'actor,critic,reference': 0-1, 'rollout,reward': 2-3}",
        "critic.critic_warmup_steps=0",
        "steps=3",
        "evaluation.stop_at=null",
        "data.eval=null",
        "data.train.max_rows=1024",
        "batch={prompts_per_step: 16, samples_per_prompt: 1, mini_batches: 1}",
        f"timeouts.no_progress_s={NO_PROGRESS_S}",
    ]


def fail(task: str, how: str, folder: Path, arguments: list[str]) -> str:
    """What the job printed, which must have ended soon after the fault, with an error."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={NUM_RANKS}"]
    fault = [task, str(STEP), str(VICTIMS[task][0]), how, str(folder)]
    done = run([*torchrun, "tests/support/faulty_train.py", *fault, *arguments], timeout_s=240)
    assert done.returncode != 0
    assert (folder / "fault").exists(), done.stderr
    assert time.time() - (folder / "fault").stat().st_mtime < SOON_S
    return done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("task", VICTIMS)
def test_a_rank_that_hangs_in_a_task_is_named(task: str, tmp_path: Path, arguments: list[str]) -> None:
    rank, role = VICTIMS[task]
    output = fail(task, "sleep", tmp_path, arguments)
    assert output.count("rltrain: ") == 1, output
    assert re.search(rf"rltrain: rank {rank} is at {task}\[{STEP}\] \([a-z+]*{role}[a-z+]*\) and has shown no", output)
    stacks = {r: (tmp_path / "stalls" / f"rank{r}.txt").read_text() for r in range(NUM_RANKS)}
    assert [r for r, text in stacks.items() if "in fall_asleep" in text] == [rank]


@pytest.mark.slow
@pytest.mark.parametrize("task", VICTIMS)
def test_a_rank_killed_in_a_task_ends_the_job(task: str, tmp_path: Path, arguments: list[str]) -> None:
    output = fail(task, "kill", tmp_path, arguments)
    assert re.search(rf"rank +: {VICTIMS[task][0]} .*\n.*exitcode +: -9", output), output
