"""A job with a hanging or dead rank ends soon and reports the rank, its task and the time. A slow job continues."""

import re
import time
from pathlib import Path

import pytest

from tests.distributed.cases_watchdog import FAULT_FILE, FAULTY_STEP, NO_PROGRESS_S, NUM_RANKS, TASKS, VICTIMS
from tests.support.marks import slow_but
from tests.support.torchrun import run_distributed

CASES = "tests.distributed.cases_watchdog"
SOON_S = 40.0
VICTIM_TASKS = slow_but(VICTIMS, "weight_sync")


def failure_of(case: str, folder: Path, **arguments: str) -> str:
    """Runs a case that must fail soon after the fault, and returns torchrun's output."""
    with pytest.raises(AssertionError, match="failed on") as failure:
        run_distributed(f"{CASES}:{case}", NUM_RANKS, {"folder": str(folder), **arguments}, timeout_s=100)
    assert time.time() - (folder / FAULT_FILE).stat().st_mtime < SOON_S
    return str(failure.value)


@pytest.mark.parametrize("task", VICTIM_TASKS)
def test_a_rank_that_hangs_is_named_once_with_its_task_and_step(task: str, tmp_path: Path) -> None:
    victim = VICTIMS[task]
    output = failure_of("sleeping", tmp_path, task=task)
    assert output.count("rltrain: ") == 1, output
    role = "+".join(TASKS.get(task, ("actor",)))
    expected = rf"rltrain: rank {victim} is at {task}\[{FAULTY_STEP}\] \({re.escape(role)}\) and has shown no progress"
    assert re.search(expected, output), output
    assert "timeouts.no_progress_s" in output and f"{tmp_path}/stalls" in output
    stacks = {rank: (tmp_path / "stalls" / f"rank{rank}.txt").read_text() for rank in range(NUM_RANKS)}
    assert [rank for rank, text in stacks.items() if "in deep_in_a_task" in text] == [victim]
    assert all(f"rank {victim} is at {task}" in text and f"rank {rank} is at" in text for rank, text in stacks.items())


@pytest.mark.slow
def test_a_frozen_process_is_named_by_the_next_one(tmp_path: Path) -> None:
    output = failure_of("stopped", tmp_path)
    assert output.count("rltrain: ") == 1, output
    last = rf"rltrain: rank 0 was last known to be at weight_sync\[{FAULTY_STEP}\] \(actor\+rollout\), \d+ s ago"
    assert re.search(f"{last}, and its process has not run since", output), output


@pytest.mark.parametrize("task", VICTIM_TASKS)
def test_a_killed_rank_ends_the_others(task: str, tmp_path: Path) -> None:
    output = failure_of("killed", tmp_path, task=task)
    assert re.search(rf"rank +: {VICTIMS[task]} .*\n.*exitcode +: -9", output), output
    assert not (tmp_path / "stalls").exists(), "the launcher ends the job long before any wait times out"


@pytest.mark.slow
def test_a_slow_rank_that_gets_on_is_left_alone(tmp_path: Path) -> None:
    seconds = run_distributed(f"{CASES}:slow", NUM_RANKS, {"folder": str(tmp_path)}, timeout_s=100)
    assert min(seconds) > 2 * NO_PROGRESS_S, "longer than the limit in one task after another"
    assert not (tmp_path / "stalls").exists()
