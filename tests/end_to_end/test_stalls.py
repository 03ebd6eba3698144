"""A whole job with a hanging rank ends soon, with one message that names the place."""

import re
import time
from pathlib import Path

import pytest

from tests.support.jobs import SHORT, run, torchrun

NUM_RANKS, STEP = 4, 1
NO_PROGRESS_S = 10.0
SOON_S = 60.0

# task of a PPO step -> (the failing rank, its role in the task)
VICTIMS = {"generate": (3, "rollout"), "update": (0, "actor"), "weight_sync": (2, "rollout")}
"""The other ranks wait for samples, in a collective of training, or in a sync."""


@pytest.fixture
def arguments(quickstart_files: Path, data_overrides: list[str], tmp_path: Path) -> list[str]:
    return [
        *("--config", "configs/quickstart_ppo.yaml", f"model.path={quickstart_files}/model", f"output_dir={tmp_path}"),
        *(*data_overrides, *SHORT, "steps=3", "evaluation.stop_at=null", "critic.critic_warmup_steps=0"),
        "placement={'actor,critic,reference': 0-1, 'rollout,reward': 2-3}",
        "batch={prompts_per_step: 16, samples_per_prompt: 1, mini_batches: 1}",
        f"timeouts.no_progress_s={NO_PROGRESS_S}",
    ]


@pytest.mark.slow  # test_faults.py has killed ranks in whole jobs
@pytest.mark.parametrize("task", VICTIMS)
def test_a_rank_that_hangs_in_a_task_is_named(task: str, tmp_path: Path, arguments: list[str]) -> None:
    rank, role = VICTIMS[task]
    fault = [task, str(STEP), str(rank), "sleep", str(tmp_path)]
    done = run([*torchrun(NUM_RANKS), "tests/support/faulty_train.py", *fault, *arguments], timeout_s=240)
    output = done.stderr
    assert done.returncode != 0 and (tmp_path / "fault").exists(), output
    assert time.time() - (tmp_path / "fault").stat().st_mtime < SOON_S
    assert output.count("rltrain: ") == 1, output
    assert re.search(rf"rltrain: rank {rank} is at {task}\[{STEP}\] \([a-z+]*{role}[a-z+]*\) and has shown no", output)
    stacks = {r: (tmp_path / "stalls" / f"rank{r}.txt").read_text() for r in range(NUM_RANKS)}
    assert [r for r, text in stacks.items() if "in fall_asleep" in text] == [rank]
