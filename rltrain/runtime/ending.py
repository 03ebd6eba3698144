"""Ends a process of a failing job, with one message for all ranks."""

import json
import os
import platform
import re
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, NoReturn

import torch.distributed as dist

from rltrain.errors import FAILED, USER_ERROR, UserError
from rltrain.runtime.heartbeat import INTERVAL_S, Beat, Board
from rltrain.runtime.machine import has_ended, host_of, leave_for_launcher

# Waits inside the store, without polling. The store answers once a key is set, however many ranks wait.


def wait_briefly(store: dist.Store, keys: Sequence[str], seconds: float) -> bool:
    """Waits until all `keys` are in the store, for at most `seconds`. Returns whether they are.

    The connection serves no other call in the meantime.
    """
    until_there = store.wait  # heartbeat.communicates would take a line with ".wait(" for a transfer
    try:
        until_there([*keys], timedelta(seconds=max(seconds, 0.001)))
    except dist.DistStoreError:
        return False
    return True


# The end of a process of a failing job. One message serves all ranks, for any number of failures at a time.

MESSAGE_GRACE_S = 5.0
QUIET_GRACE_S = 3.0
HEARD_OF_WITHIN_S = 4 * INTERVAL_S
"""Seconds within which a running rank publishes a heartbeat."""
LOOK_S = 0.2

BROKEN_CONNECTION = re.compile(r"connection (closed|reset|broke|refused)|broken pipe|ncclRemoteError", re.IGNORECASE)
"""Errors of gloo and NCCL on ranks connected with a process that ends."""

NEAR, CLAIMED, FAILURE, PRINTED = "end_is_near", "failure_claimed", "failure", "failure_printed"


class Ending:
    """Ends this process, and with it the job. It tears nothing down, since other ranks may still use the process
    groups.

    The first rank to fail has the message. It prints it, and leaves it for torchrun's summary at the end of the screen.
    It stays until the others are silent (`follow`, called by every watchdog), because a broken connection makes
    transports print errors. Other ranks of its launcher exit with status 0, so the summary shows one failure.

    Usable from any thread. Only one thread can end the process.
    """

    def __init__(
        self, store: dist.Store, rank: int, num_ranks: int, doing: Callable[[], str] = lambda: "is at its start"
    ) -> None:
        """`store` is World.background, usable from any thread. `doing` returns this rank's activity in words.

        `way_on` may be set later. It returns how the run continues if ranks are lost.
        """
        self.way_on: Callable[[], str] | None = None
        self.store = store
        self.rank = rank
        self.num_ranks = num_ranks
        self.doing = doing

    def by(self, error: BaseException, thread: str = "") -> NoReturn:
        """Ends with the message of a UserError, or with the traceback of any other `error`. `thread` is the failed
        thread."""
        if isinstance(error, UserError):
            message = "\n  ".join([str(error), *getattr(error, "__notes__", ())])
            self.with_message(message, USER_ERROR, summary=message)
        where = f"rank {self.rank}{f', thread {thread!r},' if thread else ''} failed"
        last = "".join(traceback.format_exception_only(error)).strip()
        text = "".join(traceback.format_exception(error)).rstrip()
        if isinstance(error, dist.DistNetworkError) and not self._reaches_store():
            self._without_store(error)
        self.with_message(f"{where}:\n{text}", FAILED, summary=f"{where}: {last}\n(its traceback is above)")

    def with_message(
        self, message: str, status: int, *, summary: str = "", before_printing: Callable[[], None] = lambda: None
    ) -> NoReturn:
        """Prints `message` and ends this process with exit status `status`, if this rank is the first to fail.

        This rank calls `before_printing` first. `summary` (default: `message`) is for torchrun. If another rank was
        first, this rank prints nothing and ignores its own arguments. It then exits with status 0 under the same
        launcher as the first rank, or with the first rank's status under another launcher. If the first rank's
        message does not appear in time, the status is always that of the first rank. If the store cannot be
        reached, one rank per node prints its own message, and the status is FAILED.
        """
        _this_thread_ends_the_process()
        try:
            self._with_message(message, status, summary or message, before_printing)
        except dist.DistNetworkError as error:
            self._without_store(error, f"\n{message}")

    def follow(self) -> NoReturn:
        """Ends silently, because another rank ends the job."""
        _this_thread_ends_the_process()
        try:
            self._follow(json.loads(self.store.get(FAILURE)))
        except dist.DistNetworkError:
            _exit(FAILED)

    def come_near(self) -> None:
        """Announces that this rank is about to end the job."""
        self.store.set(NEAR, "1")

    def told_way_on(self) -> str:
        """Returns the end of a message with the way to continue the run. Empty if unknown."""
        return f"; {self.way_on()}" if self.way_on else ""

    @property
    def has_begun(self) -> bool:
        """Whether a rank ends the job."""
        return bool(self.store.check([FAILURE]))

    def _with_message(self, message: str, status: int, summary: str, before_printing: Callable[[], None]) -> NoReturn:
        self.come_near()
        self._follow_first()
        others = self._running()
        lost = [beat for beat in others if has_ended(beat.process)]
        if not lost and BROKEN_CONNECTION.search(message):
            lost = self._not_heard_of(others)
        if lost:
            summary = f"{_name(lost)}{self.told_way_on()}"
            message = f"{summary}. The error on rank {self.rank}:\n{message}"
        mine = {
            "rank": self.rank,
            "launcher": _launcher(),
            "status": status,
            "summary": f"rank {self.rank} ended the job: {summary}",
        }
        failure = json.loads(self.store.compare_set(FAILURE, "", json.dumps(mine)))
        if failure["rank"] != self.rank:
            self._follow(failure)
        before_printing()
        print(f"\nrltrain: {message}", file=sys.stderr, flush=True)
        leave_for_launcher(summary)
        _discard_output()  # this rank's other threads still run
        self.store.set(PRINTED, "1")
        wait_briefly(self.store, [_quiet(beat.rank) for beat in others if beat not in lost], QUIET_GRACE_S)
        _exit(status)

    def _follow_first(self) -> None:
        """Follows the first rank to come here. Returns on the first rank itself, or if the first one was killed on its
        way."""
        first = self.store.compare_set(CLAIMED, "", str(self.rank)).decode()
        if first != str(self.rank) and wait_briefly(self.store, [FAILURE], MESSAGE_GRACE_S + HEARD_OF_WITHIN_S):
            self._follow(json.loads(self.store.get(FAILURE)))

    def _follow(self, failure: dict[str, Any]) -> NoReturn:
        _discard_output()
        self.store.set(_quiet(self.rank), "1")
        if not wait_briefly(self.store, [PRINTED], 2 * MESSAGE_GRACE_S):
            _exit(failure["status"])
        if failure["launcher"] == _launcher():
            _exit(0)
        leave_for_launcher(failure["summary"])
        _exit(failure["status"])

    def _running(self) -> list[Beat]:
        """Returns the last beats of the other ranks that have begun and are not done."""
        beats = Board(self.store).read([rank for rank in range(self.num_ranks) if rank != self.rank])
        return [beat for beat in beats.values() if beat.alive and not beat.finished]

    def _not_heard_of(self, beats: list[Beat]) -> list[Beat]:
        """Returns those of `beats` without a newer one after a while. Nothing else shows the end of a rank on another
        machine."""
        deadline = time.monotonic() + HEARD_OF_WITHIN_S
        while beats and time.monotonic() < deadline:
            time.sleep(LOOK_S)
            now = Board(self.store).read([beat.rank for beat in beats])
            beats = [beat for beat in beats if now[beat.rank].alive == beat.alive]
        return beats

    def _reaches_store(self) -> bool:
        try:
            self.store.check([NEAR])
        except dist.DistNetworkError:
            return False
        return True

    def _without_store(self, error: dist.DistNetworkError, message: str = "") -> NoReturn:
        """Ends alone, because without the store the ranks cannot agree on one that prints."""
        end_alone(
            f"rank {self.rank} on {platform.node()} {self.doing()}: the job's store is gone, because torchrun has "
            f"ended on the first node, {first_node()} ({first_line(error)}){message}"
        )


def end_alone(message: str) -> NoReturn:
    """Ends this process without asking other ranks. The first rank of every node prints `message`."""
    _this_thread_ends_the_process()
    if os.environ.get("LOCAL_RANK", "0") == "0":
        print(f"\nrltrain: {message}", file=sys.stderr, flush=True)
    leave_for_launcher(message)
    _exit(FAILED)


def end_quietly() -> NoReturn:
    """Ends this process at once with status 0, without tearing anything down."""
    _exit(0)


_the_end = threading.RLock()


def _this_thread_ends_the_process() -> None:
    """Blocks any other thread that wants to end the process, until the process is gone."""
    _the_end.acquire()


def _exit(status: int) -> NoReturn:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _discard_output() -> None:
    """Discards all further output of libraries, including C++."""
    sys.stdout.flush()
    sys.stderr.flush()
    nobody = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):
        os.dup2(nobody, stream)


def _launcher() -> str:
    """Returns the index of this rank's torchrun agent in the job."""
    return os.environ.get("GROUP_RANK", "0")


def _quiet(rank: int) -> str:
    return f"quiet/{rank}"


def _name(lost: list[Beat]) -> str:
    names = "; ".join(f"rank {beat.rank} on {host_of(beat.process)}, last known to be at {beat}" for beat in lost)
    return f"killed (for example for lack of memory) or crashed without a message: {names}"


def first_node() -> str:
    """Returns the first node's address as given to torchrun."""
    return os.environ.get("MASTER_ADDR", "of unknown address")


def first_line(error: BaseException) -> str:
    return str(error).split("\n", 1)[0]
