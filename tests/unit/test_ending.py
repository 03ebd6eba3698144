"""One message for the job, last on the screen: who prints it, what the others do, and what torchrun makes of it."""

import json
import platform
import subprocess
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from rltrain.errors import FAILED, USER_ERROR, ConfigError
from rltrain.runtime import ending, whole_files
from rltrain.runtime.ending import Ending
from rltrain.runtime.heartbeat import Beat, Board
from rltrain.runtime.machine import process_here, this_process
from tests.unit.shared_store import open_store

NUM_RANKS = 3
LIMIT_S = 20.0


class Ended(BaseException):
    def __init__(self, status: int) -> None:
        self.status = status


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """What happened in order; the ranks' processes are threads of this one, and end by Ended."""
    events: list[str] = []

    def exit_by_raising(status: int) -> None:
        events.append(f"{threading.current_thread().name} ends with {status}")
        raise Ended(status)

    def close_mouth() -> None:
        events.append(f"{threading.current_thread().name} is quiet")

    monkeypatch.setattr(ending, "_exit", exit_by_raising)
    monkeypatch.setattr(ending, "_close_mouth", close_mouth)
    monkeypatch.setattr(ending, "_this_thread_ends_the_process", lambda: None)
    monkeypatch.setenv("GROUP_RANK", "0")
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    return events


@pytest.fixture
def store() -> Iterator[dist.Store]:
    with open_store() as store:
        yield store


@pytest.fixture
def ranks(store: dist.Store, said: list[str]) -> list[Ending]:
    return [Ending(store.clone(), rank, NUM_RANKS) for rank in range(NUM_RANKS)]  # type: ignore[attr-defined]


def status_of(end: Callable[[], object]) -> int:
    with pytest.raises(Ended) as ended:
        end()
    return ended.value.status


def summary_of(path: Path, status: int) -> str:
    """What torchrun prints last, of a rank that has left `path`."""
    return str(ChildFailedError("train.py", {0: ProcessFailure(0, 1234, status, str(path))}))


def test_the_first_to_fail_has_the_message_and_the_others_end_well(
    ranks: list[Ending], capsys: pytest.CaptureFixture[str]
) -> None:
    """What they fail by is but what the first one's end does to them."""
    error = ConfigError("steps: got many; expected a number")
    error.add_note("on rank 0")
    assert status_of(lambda: ranks[0].by(error)) == USER_ERROR
    assert capsys.readouterr().err == "\nrltrain: steps: got many; expected a number\n  on rank 0\n"
    assert status_of(lambda: ranks[1].by(RuntimeError("Connection closed by peer"))) == 0
    assert ranks[2].has_begun and status_of(ranks[2].follow) == 0
    assert capsys.readouterr().err == ""


def test_torchruns_summary_ends_with_the_message(ranks: list[Ending], tmp_path: Path) -> None:
    status_of(lambda: ranks[0].by(ConfigError("steps: got many; expected a number")))
    *_, last, border = summary_of(tmp_path / "error.json", USER_ERROR).splitlines()
    assert last == "  traceback : steps: got many; expected a number" and set(border) == {"="}


def test_torchrun_finds_no_half_of_a_message(
    ranks: list[Ending], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It reads what a rank has left that it kills on its way."""

    def is_killed_amid(path: Path) -> None:
        path.write_text(path.read_text()[:9])
        raise KeyboardInterrupt

    monkeypatch.setattr(whole_files, "flush", is_killed_amid)
    with pytest.raises(KeyboardInterrupt):
        ranks[0].by(ConfigError("no"))
    assert not (tmp_path / "error.json").exists()


def test_of_an_error_that_nobody_expected_the_summary_has_the_last_line(
    ranks: list[Ending], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        {}["key"]
    except KeyError as error:
        failure = error
    assert status_of(lambda: ranks[2].by(failure, thread="heartbeat")) == FAILED
    printed = capsys.readouterr().err
    assert printed.startswith("\nrltrain: rank 2, thread 'heartbeat', failed:\nTraceback") and "test_ending" in printed
    summary = summary_of(tmp_path / "error.json", FAILED)
    assert "rank 2, thread 'heartbeat', failed: KeyError: 'key'" in summary and "test_ending" not in summary


def test_whoever_has_the_message_stays_until_the_others_are_quiet(
    ranks: list[Ending], store: dist.Store, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A connection that breaks makes their transports talk; those that have not begun, or are done, have none."""
    monkeypatch.setattr(ending, "QUIET_GRACE_S", LIMIT_S)
    Board(store).put(Beat(1, "generate", alive=1, process=this_process()))
    Board(store).put(Beat(2, "finished", alive=9, finished=True))
    refused = threading.Thread(target=status_of, args=(lambda: ranks[0].by(ConfigError("no")),), name="first")
    refused.start()
    assert ending.wait_briefly(store, [ending.PRINTED], LIMIT_S)
    threads = [threading.Thread(target=status_of, args=(ranks[1].follow,), name="other"), refused]
    threads[0].start()
    for thread in threads:
        thread.join(LIMIT_S)
    assert said.index("first is quiet") < said.index("other is quiet") < said.index("first ends with 2")


def test_a_killed_rank_is_named_before_what_others_saw_of_it(
    ranks: list[Ending], store: dist.Store, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    gone = subprocess.Popen(["true"])
    gone.wait()
    Board(store).put(Beat(1, "generate", "rollout", step=3, alive=4, process=process_here(gone.pid)))
    ranks[0].way_on = lambda: "the same command goes on from step 2"
    status_of(lambda: ranks[0].by(RuntimeError("Connection closed by peer")))
    lost = (
        "killed, as for want of memory, or crashed without a message: "
        f"rank 1 on {platform.node()}, last known to be at generate[3] (rollout); the same command goes on from step 2"
    )
    assert f"rltrain: {lost}. What rank 0 saw of it:\nrank 0 failed:\nRuntimeError: Conn" in capsys.readouterr().err
    assert summary_of(tmp_path / "error.json", FAILED).splitlines()[-2] == f"  traceback : {lost}"


@pytest.mark.parametrize("broken", [True, False])
def test_where_a_connection_breaks_a_rank_of_another_machine_that_is_silent_is_named(
    broken: bool,
    ranks: list[Ending],
    store: dist.Store,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ending, "HEARD_OF_WITHIN_S", 1.0)
    beat = Beat(1, "generate", "rollout", step=3, alive=4, process="n2 pid:[1] 7")
    silent, running = Board(store), Board(store.clone())  # type: ignore[attr-defined]
    silent.put(beat)
    running.put(replace(beat, rank=2, alive=5))
    beats_again = threading.Timer(0.3, running.put, [replace(beat, rank=2, alive=6)])
    beats_again.start()
    status_of(lambda: ranks[0].by(RuntimeError("Connection reset by peer" if broken else "out of memory")))
    beats_again.join()
    printed = capsys.readouterr().err
    assert ("message: rank 1 on n2, last known to be at generate[3] (rollout). What rank 0 saw" in printed) == broken
    assert "rank 2" not in printed


def test_another_launcher_learns_who_ended_the_job(
    ranks: list[Ending], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where all its ranks ended well it would wait for the others."""
    status_of(lambda: ranks[0].by(ConfigError("no")))
    capsys.readouterr()
    monkeypatch.setenv("GROUP_RANK", "1")
    assert status_of(ranks[2].follow) == USER_ERROR
    content = json.loads((tmp_path / "error.json").read_text())
    assert content["message"]["message"] == "rank 0 ended the job: no"
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("local_rank", [0, 1])
def test_without_the_store_one_rank_of_a_machine_says_so(
    said: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], local_rank: int
) -> None:
    with open_store() as store:
        alone = Ending(store.clone(), 4, NUM_RANKS)  # type: ignore[attr-defined]
    del store  # with which the server ends
    monkeypatch.setenv("LOCAL_RANK", str(local_rank))
    assert status_of(lambda: alone.by(RuntimeError("whatever"))) == FAILED
    message = (
        f"rltrain: rank 4 on {platform.node()} is at its start: the job's store is gone: "
        "torchrun, which has it, was ended on the first node"
    )
    assert (message in capsys.readouterr().err) == (local_rank == 0)
