"""Values that ranks leave for each other in the store, waits with a limit, and the search for the cause of a stall."""

import hmac
import json
import logging
import math
import secrets
import socket
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch.distributed as dist

from rltrain.config.schema import Timeouts
from rltrain.errors import StallError
from rltrain.runtime.ending import NEAR, wait_briefly
from rltrain.runtime.heartbeat import INTERVAL_S, Beat, Board, Heartbeat, Posted
from rltrain.runtime.machine import has_ended, host_of
from rltrain.runtime.world import LOOPBACK, World

# The cause of a stall, found from the statuses of all ranks. No communication.
#
# In a stall no rank shows progress for longer than a limit. All ranks follow one order of tasks. So a rank still at
# work at its lowest position holds up the others, directly or not.

SILENT_S = 30.0
"""Seconds without a beat, or half of the shortest limit if that is less. The rank's process then does not run: it is
stopped, or in a call that holds Python's interpreter lock."""


@dataclass(frozen=True)
class RankStatus:
    """The status of a rank as seen by one observer, by the observer's own clock."""

    beat: Beat
    still_s: float
    """Seconds since the rank's last progress."""
    silent_s: float
    """Seconds since its last beat."""

    @property
    def works(self) -> bool:
        """Whether the rank is neither done nor waiting for named ranks."""
        return not self.beat.finished and self.beat.wait is None


@dataclass(frozen=True)
class Stall:
    """A stall of the job. `culprit` holds up `waiters`: the other unfinished ranks, ascending."""

    culprit: RankStatus
    waiters: tuple[RankStatus, ...]
    limit_s: float
    is_silent: bool = False
    """Whether the process of `culprit` does not run."""

    @property
    def rank(self) -> int:
        return self.culprit.beat.rank

    def __str__(self) -> str:
        beat = self.culprit.beat
        state = f"is at {beat} and has shown no progress for {self.culprit.still_s:.0f} s"
        if self.is_silent:
            state = (
                f"was last known to be at {beat}, {self.culprit.silent_s:.0f} s ago, and its process has not run since "
                "(stopped, or in a call that holds the interpreter lock)"
            )
        elif beat.wait is not None:
            state += f": it waits at {beat.wait.what} for {_named(beat.wait.ranks)}, but none of them is at work"
        by = "".join(f"; rank {w.beat.rank} {what_it_does(w.beat)}" for w in self.waiters[:MAX_WAITERS_NAMED])
        more = len(self.waiters) - MAX_WAITERS_NAMED
        return (
            f"rank {beat.rank}{self._host} {state}; timeouts.no_progress_s, or the task's own limit in "
            f"timeouts.tasks, is {self.limit_s:.0f} s{by}" + (f"; and {more} more ranks wait" if more > 0 else "")
        )

    @property
    def _host(self) -> str:
        """Text such as " on node7". Empty if all ranks are on one host, or if the host is unknown."""
        hosts = {host_of(status.beat.process) for status in (self.culprit, *self.waiters)}
        host = host_of(self.culprit.beat.process)
        return f" on {host}" if host and len(hosts) > 1 else ""


@dataclass(frozen=True)
class Lost:
    """A rank without a sign of life, even if other ranks still make progress."""

    culprit: RankStatus
    limit_s: float

    def __str__(self) -> str:
        beat = self.culprit.beat
        return (
            f"rank {beat.rank} on {host_of(beat.process)} was last known to be at {beat}, {self.culprit.silent_s:.0f} "
            "s ago, and has given no sign of life since (its host is down or cut off, or its process does not run); "
            f"timeouts.lost_s is {self.limit_s:.0f} s"
        )


MAX_WAITERS_NAMED = 4


def what_it_does(beat: Beat) -> str:
    """Returns text such as "is at generate[3] (rollout)"."""
    if beat.wait is None:
        return f"is at {beat}"
    return f"is at {beat} and waits at {beat.wait.what} for {_named(beat.wait.ranks)}"


def find_stall(statuses: Iterable[RankStatus], limits: Timeouts) -> Stall | None:
    """Returns the stall of the job, or None if there is none. `statuses` has every rank of the job.

    A rank that has just finished counts as recent progress, since the beats of the others may be older.
    """
    everybody = sorted(statuses, key=lambda status: status.beat.rank)
    unfinished = [status for status in everybody if not status.beat.finished]
    suspects = [status for status in unfinished if status.works] or unfinished
    if not suspects:
        return None
    newest = _newest_sequences(suspects)
    culprit = min(suspects, key=lambda status: (not is_silent(status, limits), *_blame_order(status, newest)))
    limit = limit_s(culprit.beat, limits)
    others_stand_still = all(status.still_s > limit or _is_gone(status, limits) for status in everybody)
    if not (culprit.still_s > limit and others_stand_still):
        return None
    waiters = tuple(status for status in unfinished if status is not culprit)
    return Stall(culprit, waiters, limit, is_silent(culprit, limits))


def forbids_a_stall(status: RankStatus, limits: Timeouts) -> bool:
    """Returns whether this rank alone rules out a stall: its last progress is within every limit."""
    shortest_s = min([limits.no_progress_s, *limits.tasks.values()])
    return status.still_s <= shortest_s and not _is_gone(status, limits)


def _is_gone(status: RankStatus, limits: Timeouts) -> bool:
    """Returns whether an unfinished rank does not run. It cannot make progress any more."""
    return not status.beat.finished and is_silent(status, limits)


def limit_s(beat: Beat, limits: Timeouts) -> float:
    return limits.tasks.get(beat.task, limits.no_progress_s)


def is_silent(status: RankStatus, limits: Timeouts) -> bool:
    """Returns whether the rank's process does not run. This is known well before the end of any limit."""
    return status.silent_s > min(SILENT_S, limits.no_progress_s / 2, *(limit / 2 for limit in limits.tasks.values()))


def _blame_order(status: RankStatus, newest: Mapping[str, int]) -> tuple[float, bool, bool, float, int]:
    """Returns a sort key. Of the running ranks, the one with the smallest key is the cause of the stall.

    The criteria in turn: the lowest position in the order, not inside a transfer (a rank there rather waits for
    others), missing in a collective that others have begun. The last criterion is the longest time without progress.
    """
    beat = status.beat
    is_behind = any(newest[group] > number for group, number in (beat.sequences or {}).items())
    return (
        math.inf if beat.position is None else beat.position,
        beat.communicates,
        not is_behind,
        -status.still_s,
        beat.rank,
    )


def _newest_sequences(statuses: Iterable[RankStatus]) -> dict[str, int]:
    newest: dict[str, int] = {}
    for status in statuses:
        for group, number in (status.beat.sequences or {}).items():
            newest[group] = max(newest.get(group, number), number)
    return newest


def _named(ranks: Collection[int]) -> str:
    if not ranks:
        return "the others"
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, sorted(ranks)))}"


# One rank's view of all heartbeats: the seconds without progress or without a beat of every other rank.

MOST_BETWEEN_LOOKS_S = 2.0
"""Longest pause in seconds that counts as silence of other ranks. After a longer one this process may itself have been
stopped, for example with the whole machine."""
GONE_S = 10.0
"""Seconds without a beat after which a rank of another machine counts as gone, for a rank about to end. While the job
continues, the limit is timeouts.lost_s."""
Seen = dict[int, tuple[Posted, float]]
"""Rank -> its last beat, and the seconds for which there was no newer one."""


class Observer:
    """Measures the time since each rank's last beat. The clocks of machines differ, so it counts from the first sight
    of it.

    Call it about once a second. Safe for any thread.
    """

    def __init__(
        self, board: Board, num_ranks: int, limits: Timeouts, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.board = board
        self.ranks = range(num_ranks)
        self.limits = limits
        self.clock = clock
        self._seen: dict[int, tuple[int, float]] = {}
        """Rank -> the number of its last beat, and the value of `_looked_for_s` when that beat was new."""
        self._looked_at: float | None = None
        self._looked_for_s = 0.0
        """Seconds in which this process is known to have run."""
        self._looking = threading.Lock()
        self._witness = 0
        """The rank whose beat last ruled out a stall."""

    def look(self, ranks: Collection[int]) -> dict[int, RankStatus]:
        """Returns the present status of `ranks`."""
        seen = self._see(ranks)
        return {rank: _status(*seen[rank]) for rank in sorted(seen)}

    def gone(self, ranks: Collection[int]) -> list[int]:
        """Returns the unfinished ones of `ranks` with an ended process, or without a beat for GONE_S seconds."""
        statuses = self.look(ranks)
        ended = [rank for rank, status in statuses.items() if has_ended(status.beat.process)]
        statuses |= self.look(ended)  # their last beats: a rank that has just finished is not gone
        return [
            rank
            for rank, status in statuses.items()
            if (rank in ended or status.silent_s > GONE_S) and not status.beat.finished
        ]

    def verdict(self) -> Stall | Lost | None:
        """Returns the reason to end the job: a stall of all ranks, or a lost rank. None if there is none.

        Reads beats until one of them rules out a stall. It starts with the rank that did so last time.
        """
        seen = self._see(self.ranks)
        return self._stall(seen) or self._lost(seen)

    def _stall(self, seen: Seen) -> Stall | None:
        statuses = dict[int, RankStatus]()
        for rank in (self._witness, *self.ranks):
            status = statuses[rank] = _status(*seen[rank])
            if forbids_a_stall(status, self.limits):
                self._witness = rank
                return None
        return find_stall(statuses.values(), self.limits)

    def _lost(self, seen: Seen) -> Lost | None:
        for posted, silent_s in seen.values():
            if posted.alive and silent_s > self.limits.lost_s and not posted.beat().finished:
                return Lost(_status(posted, silent_s), self.limits.lost_s)
        return None

    def _see(self, ranks: Collection[int]) -> Seen:
        found = self.board.posted(list(ranks))
        with self._looking:
            now = self.clock()
            if self._looked_at is not None:
                self._looked_for_s += min(now - self._looked_at, MOST_BETWEEN_LOOKS_S)
            self._looked_at = now
            return {posted.rank: (posted, self._silent_s(posted)) for posted in found}

    def _silent_s(self, posted: Posted) -> float:
        number, new_at = self._seen.get(posted.rank, (-1, 0.0))
        if number != posted.alive:
            new_at = self._looked_for_s
            self._seen[posted.rank] = (posted.alive, new_at)
        return self._looked_for_s - new_at


def _status(posted: Posted, silent_s: float) -> RankStatus:
    beat = posted.beat()
    return RankStatus(beat, still_s=beat.still_s + silent_s, silent_s=silent_s)


# Beats of a node's ranks, gathered by its first rank. It makes one store call for all, and one check for the job's end.
#
# In a job of thousands of ranks, separate beats would take a seventh of the store server's processor. The ranks of a
# node use datagrams over loopback and never wait for them. A rank without a recent confirmation by the first rank uses
# the store itself. The first rank may have ended, be stopped or be unreachable.

GATHERED_FROM = 512
"""Number of ranks from which on beats are gathered. In a smaller job the store has little to do."""
CONFIRMED_FOR_S = 2.5 * INTERVAL_S
"""Seconds for which a rank relies on the last message of its node's first rank, and this one on its last check."""
BEATS_LOOK_S = 0.2
MOST_BYTES = 60_000
"""Largest size of a datagram."""
TOKEN_BYTES = 16
CONFIRMED, ENDS = b"confirmed", b"ends"


class OwnBeats:
    """Publishes a rank's beats and checks for the end of the job, directly in the store.

    `store` is World.background, for calls from threads other than the main one.
    """

    def __init__(self, store: dist.Store) -> None:
        self.store, self.board = store, Board(store)

    def put(self, beat: Beat) -> None:
        """Publishes a beat. The heartbeat's thread calls it."""
        self.board.put(beat)

    def job_ends(self) -> bool:
        """Returns whether a rank ends the job or is about to. The watchdog's thread calls it."""
        return bool(self.store.check([NEAR]))

    def wait(self, over: threading.Event, seconds: float) -> bool:
        """Waits until the next check. Returns whether `over` was set."""
        return over.wait(seconds)


class Gatherer(OwnBeats):
    """The beats of a node's first rank. It publishes the other ranks' beats too, and informs them if the job ends."""

    def __init__(self, node: int, store: dist.Store, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(store)
        self._clock = clock
        self._token = secrets.token_bytes(TOKEN_BYTES)
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._socket.bind((LOOPBACK, 0))
        self._socket.setblocking(False)
        self._looked_at = float("-inf")
        self._addresses: dict[int, tuple[str, int]] = {}
        """Addresses of the node's other ranks, known from their first message on."""
        store.set(_key(node), json.dumps([self._socket.getsockname()[1], self._token.hex()]))

    def put(self, beat: Beat) -> None:
        gathered = self._gathered()
        self.board.put_lines({beat.rank: Board.line(beat)} | gathered)
        if beat.finished:  # another finished rank may have put its last beat before an older one arrived here
            self.job_ends()
            if last := self._gathered():
                self.board.put_lines(last)
        if self._clock() - self._looked_at < CONFIRMED_FOR_S:
            self._say(CONFIRMED, [*gathered])

    def job_ends(self) -> bool:
        ends = super().job_ends()
        self._looked_at = self._clock()
        if ends:
            self._say(ENDS, [*self._addresses])
        return ends

    def _gathered(self) -> dict[int, str]:
        """Returns the lines of the beats received since the last call, by rank."""
        found: dict[int, str] = {}
        while True:
            try:
                message, address = self._socket.recvfrom(MOST_BYTES)
            except BlockingIOError:
                return found
            if hmac.compare_digest(message[:TOKEN_BYTES], self._token):
                rank, _, line = message[TOKEN_BYTES:].decode().partition(" ")
                found[int(rank)] = line
                self._addresses[int(rank)] = address

    def _say(self, word: bytes, ranks: list[int]) -> None:
        for rank in ranks:
            try:
                self._socket.sendto(self._token + word, self._addresses[rank])
            except OSError:  # the rank receives nothing, and uses the store itself
                continue


class Gathered(OwnBeats):
    """The beats of the other ranks of a node."""

    def __init__(self, node: int, store: dist.Store, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(store)
        self._node, self._clock = node, clock
        self._token: bytes | None = None
        """The token of the node's first rank. None until it is known."""
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._socket.setblocking(False)
        self._confirmed_at = float("-inf")
        self._ends = False
        self._hearing = threading.Lock()

    def put(self, beat: Beat) -> None:
        line = Board.line(beat)
        self._pass_on(f"{beat.rank} {line}".encode())
        if beat.finished or not self._is_confirmed():
            self.board.put(beat)

    def job_ends(self) -> bool:
        confirmed = self._is_confirmed()
        return self._ends or (not confirmed and super().job_ends())

    def wait(self, over: threading.Event, seconds: float) -> bool:
        until, knew = time.monotonic() + seconds, self._ends
        while (knew or not self._ends) and (left := until - time.monotonic()) > 0:
            if over.wait(min(left, BEATS_LOOK_S)):
                return True
            self._is_confirmed()
        return over.is_set()

    def _pass_on(self, message: bytes) -> None:
        if self._token is None:
            if not self.store.check([_key(self._node)]):
                return
            port, token = json.loads(self.store.get(_key(self._node)))
            self._token = bytes.fromhex(token)
            self._socket.connect((LOOPBACK, port))
        if len(message) + len(self._token) <= MOST_BYTES:
            try:
                self._socket.send(self._token + message)
            except OSError:  # the first rank has ended or does not read
                self._confirmed_at = float("-inf")

    def _is_confirmed(self) -> bool:
        """Returns whether the first rank has recently confirmed that it acts for this rank."""
        with self._hearing:
            while self._token is not None:
                try:
                    message = self._socket.recv(MOST_BYTES)
                except BlockingIOError:
                    break
                except OSError:  # it has ended
                    self._confirmed_at = float("-inf")
                    break
                if hmac.compare_digest(message[:TOKEN_BYTES], self._token):
                    self._ends = self._ends or message[TOKEN_BYTES:] == ENDS
                    self._confirmed_at = self._clock()
            return self._clock() - self._confirmed_at < CONFIRMED_FOR_S


def beats_of(world: World) -> OwnBeats:
    """Returns the publisher of this rank's beats."""
    if world.size < GATHERED_FROM or world.ranks_per_node == 1:
        return OwnBeats(world.background)
    return (Gathered if world.local_rank else Gatherer)(world.node, world.background)


def _key(node: int) -> str:
    return f"node_beats/{node}"


# Small values in the shared store, and waits for them.

LOOK_S = 1.0
"""Seconds between two checks of the heartbeats of awaited ranks."""
GUARDED_LOOK_S = 10.0
"""Seconds of one wait in the store if a watchdog checks the heartbeats."""


class JobStore:
    """The store of a job. Ranks leave small JSON values in it for each other, such as metrics and decisions.

    It also has this rank's heartbeat.

    In a `guarded` job a watchdog ends futile waits. Otherwise they raise StallError themselves.
    """

    def __init__(self, world: World, guarded: bool = False) -> None:
        self.world = world
        self.guarded = guarded
        self.store = dist.PrefixStore("job_store", world.store)
        self.beats = beats_of(world)
        self.heartbeat = Heartbeat(world.rank, world.store, put=self.beats.put)
        self.observer = Observer(self.heartbeat.board, world.size, world.timeouts)

    def put(self, key: str, value: Any) -> None:
        self.store.set(key, json.dumps(value))

    def has(self, *keys: str) -> bool:
        return self.store.check(list(keys))

    def get(self, key: str, waiting_for: str) -> Any:
        """Returns the value at `key` once another rank has put it there. Raises StallError with `waiting_for` if none
        will."""
        if not self.has(key):
            self._wait_for(key, waiting_for)
        return json.loads(self.store.get(key))

    def agreed(self, key: str, proposed: bool) -> bool:
        """Returns the proposal of the first rank that calls this, on all ranks."""
        found: bool = json.loads(self.store.compare_set(key, "", json.dumps(proposed)))
        return found

    def meet(self, key: str, num_ranks: int, waiting_for: str) -> None:
        """Returns once `num_ranks` ranks have called this. Collective over: those ranks."""
        if self.store.add(f"{key}/came", 1) == num_ranks:
            self.put(key, True)
        self.get(key, waiting_for)

    def forget(self, key: str) -> None:
        self.store.delete_key(key)

    def activity(self, rank: int) -> str:
        """Returns the present activity of `rank` in words."""
        beat = self.heartbeat.now() if rank == self.world.rank else self.heartbeat.board.read([rank])[rank]
        return f"{what_it_does(beat)} since {max(time.time() - beat.since, 0):.0f} s"

    def end_wait_in_vain(self, describe: Callable[[], str]) -> None:
        """Raises StallError if no rank makes progress, or if a rank is lost. `describe` returns the purpose of the
        wait.

        Call it every LOOK_S seconds of a wait inside `heartbeat.waiting`. In a guarded job it does nothing.
        """
        if not self.guarded and (verdict := self.observer.verdict()):
            raise StallError(f"{describe()}: {verdict}")

    def _wait_for(self, key: str, waiting_for: str) -> None:
        with self.heartbeat.waiting(waiting_for, ()):
            while not wait_briefly(self.store, [key], GUARDED_LOOK_S if self.guarded else LOOK_S):
                self.end_wait_in_vain(lambda: f"rank {self.world.rank} waits for {waiting_for}")


# Waits with a limit and a name. The name is reported, and the limit runs only while other ranks make no progress.

logger = logging.getLogger(__name__)

SERVE_S = 0.005
"""Seconds between two calls of `serve`."""
REPORT_EVERY_S = 30.0
"""Seconds between two reports of a long wait."""


MOST_DESCRIBED = 8
"""Number of ranks described in a report. One rank has to read all their heartbeats."""


class Waiter:
    """Waits of this rank for others. It logs their activities every `report_s` seconds. For one thread at a time."""

    def __init__(self, job_store: JobStore, report_s: float = REPORT_EVERY_S) -> None:
        self.job_store = job_store
        self.rank = job_store.world.rank
        self.report_s = report_s
        self.meanwhile: Callable[[], None] = lambda: None
        """Called every LOOK_S seconds of a wait, and by long tasks. It must not wait itself."""

    def until(
        self,
        arrived: Callable[[float], bool],
        what: str,
        ranks: Sequence[int],
        serve: Callable[[], None] | None = None,
    ) -> None:
        """Calls `arrived(seconds)` until it returns True. It may wait for `seconds` at most.

        `ranks` are the awaited ranks, empty for any other rank. `serve` is called in between, every few milliseconds,
        to work for ranks that need this one. Raises StallError if no rank of the job has shown progress for longer than
        `timeouts` allows, or if `arrived` raises ConnectionError. In a guarded job the watchdog ends a stalled process
        instead.
        """
        look_s = min(LOOK_S, self.report_s)
        start = last_look = last_report = time.monotonic()
        try:
            if arrived(0.0):
                return
            with self.job_store.heartbeat.waiting(what, ranks):
                while not arrived(SERVE_S if serve else look_s):
                    if serve:
                        serve()
                    now = time.monotonic()
                    if now - last_report >= self.report_s:
                        last_report = now
                        logger.warning(f"{self._describe(what, ranks)} for {now - start:.0f} s")
                    if now - last_look >= look_s:
                        last_look = now
                        self.meanwhile()
                        self.job_store.end_wait_in_vain(lambda: self._describe(what, ranks))
        except ConnectionError as error:
            raise StallError(f"{self._describe(what, ranks)}: the connection broke: {error}") from error

    def _describe(self, what: str, ranks: Sequence[int]) -> str:
        others = ranks or [rank for rank in range(self.job_store.world.size) if rank != self.rank]
        beats = self.job_store.heartbeat.board.read(others[:MOST_DESCRIBED])
        activity = [f"rank {rank} {what_it_does(beat)}" for rank, beat in sorted(beats.items())]
        more = [f"and {len(others) - len(beats)} more ranks"] if len(others) > len(beats) else []
        return f"rank {self.rank} waits at {what}: {'; '.join([*activity, *more])}"


# Waits by polling, for example for a key in the store.

POLL_S = 0.002
LOOKS_PER_S = 2_000
"""Polls per second of all ranks together in the store. They take a sixteenth of a server's processor."""

Found = TypeVar("Found")


def poll_s(num_looking: int) -> float:
    """Returns the seconds between two polls of one rank if `num_looking` ranks may poll at the same time."""
    return max(POLL_S, num_looking / LOOKS_PER_S)


def poll(
    waiter: Waiter,
    look: Callable[[], Found | None],
    what: str,
    ranks: Sequence[int],
    serve: Callable[[], None] | None = None,
    every_s: float = POLL_S,
) -> Found:
    """Calls `look` every `every_s` seconds until it returns a result, and returns it.

    Use `poll_s` for `every_s` if `look` asks the store. The other arguments and errors are those of Waiter.until.
    """
    found: list[Found] = []
    next_look = 0.0

    def arrived(seconds: float) -> bool:
        nonlocal next_look
        deadline = time.monotonic() + seconds
        while True:
            if time.monotonic() >= next_look:
                if (result := look()) is not None:
                    found.append(result)
                    return True
                next_look = time.monotonic() + every_s
            if time.monotonic() >= deadline:
                return False
            time.sleep(max(min(next_look, deadline) - time.monotonic(), 0))

    waiter.until(arrived, what, ranks, serve)
    return found[0]
