"""Real processes that get signals, or lose one of them."""

import time
from pathlib import Path

import pytest

from tests.distributed.cases_stopping import FAULT_FILE, NUM_RANKS
from tests.support.torchrun import run_distributed

CASES = "tests.distributed.cases_stopping"
AT_ONCE_S = 4.0


def failure_of(case: str, folder: Path) -> tuple[str, float]:
    """Runs a case that must fail. Returns torchrun's output and the seconds since the fault."""
    with pytest.raises(AssertionError, match="failed on") as failure:
        run_distributed(f"{CASES}:{case}", NUM_RANKS, {"folder": str(folder)}, timeout_s=100)
    return str(failure.value), time.time() - (folder / FAULT_FILE).stat().st_mtime


def test_a_killed_rank_ends_the_others_at_once(tmp_path: Path) -> None:
    """torchrun sends the others the same signal that asks a job to save, and waits for them before a restart."""
    output, seconds = failure_of("killed", tmp_path)
    assert "exitcode  : -9" in output and "the job saves at the end of its step" not in output, output
    assert seconds < AT_ONCE_S


def test_a_job_whose_step_does_not_end_in_time_says_so_once(tmp_path: Path) -> None:
    output, seconds = failure_of("overdue", tmp_path)
    assert output.count("rltrain: ") == 1, output
    said = "SIGTERM: the step did not end within checkpoint.stop_within_s = 1 s, so nothing was saved; nothing is"
    assert said in output
    assert seconds < 1 + AT_ONCE_S


def test_nothing_is_said_of_connections_to_a_rank_that_ends_the_job(tmp_path: Path) -> None:
    output, seconds = failure_of("refused", tmp_path)
    assert output.count("rltrain: ") == 1 and "rltrain: steps: got many\n" in output, output
    assert "monitoredBarrier" not in output and "[rank" not in output, output
    assert seconds < AT_ONCE_S


def test_a_signal_is_heard_inside_a_collective() -> None:
    verdicts = run_distributed(f"{CASES}:signalled_in_a_collective", NUM_RANKS)
    assert verdicts[0] == ["SIGUSR1", None]
