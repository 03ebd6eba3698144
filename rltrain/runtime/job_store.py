"""Values that ranks leave for each other, waits for them, and who holds up the job."""

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

# Who holds up the job: from what all ranks say of themselves to the one rank that a stall is due to. No communication.
#
# A stall is that no rank shows progress for longer than a limit. As all ranks follow one order of tasks, whoever is
# still at work at its lowest position is what the others wait for, directly or not.

SILENT_S = 30.0
"""A rank without a beat for this long, or half of the shortest limit, does not run: stopped, or in a call that holds
Python's interpreter lock."""


@dataclass(frozen=True)
class RankStatus:
    """A rank as one observer sees it, by the observer's own clock."""

    beat: Beat
    still_s: float
    """Since it last got on."""
    silent_s: float
    """Since its last beat."""

    @property
    def works(self) -> bool:
        """Neither done nor waiting for anybody by name."""
        return not self.beat.finished and self.beat.wait is None


@dataclass(frozen=True)
class Stall:
    """`culprit` holds up `waiters`, the other ranks that have not finished, ascending."""

    culprit: RankStatus
    waiters: tuple[RankStatus, ...]
    limit_s: float
    is_silent: bool = False
    """`culprit` does not run at all."""

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
            state += f": it waits at {beat.wait.what} for {_named(beat.wait.ranks)}, of whom nobody is at work any more"
        by = "".join(f"; rank {w.beat.rank} {what_it_does(w.beat)}" for w in self.waiters[:MAX_WAITERS_NAMED])
        more = len(self.waiters) - MAX_WAITERS_NAMED
        return (
            f"rank {beat.rank}{self._host} {state}; timeouts.no_progress_s, or the task's own limit in "
            f"timeouts.tasks, is {self.limit_s:.0f} s{by}" + (f"; and {more} more ranks wait" if more > 0 else "")
        )

    @property
    def _host(self) -> str:
        """Such as " on node7"; nothing where all are on one host, or its rank has not said yet."""
        hosts = {host_of(status.beat.process) for status in (self.culprit, *self.waiters)}
        host = host_of(self.culprit.beat.process)
        return f" on {host}" if host and len(hosts) > 1 else ""


@dataclass(frozen=True)
class Lost:
    """A rank that is not heard of any more, though others may get on without it."""

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
    """Such as "is at generate[3] (rollout)"."""
    if beat.wait is None:
        return f"is at {beat}"
    return f"is at {beat} and waits at {beat.wait.what} for {_named(beat.wait.ranks)}"


def find_stall(statuses: Iterable[RankStatus], limits: Timeouts) -> Stall | None:
    """The stall of the job, or None while there is none. `statuses` has every rank of the job.

    A rank that has just finished was at work: what the others say of themselves may be of before.
    """
    everybody = sorted(statuses, key=lambda status: status.beat.rank)
    unfinished = [status for status in everybody if not status.beat.finished]
    suspects = [status for status in unfinished if status.works] or unfinished
    if not suspects:
        return None
    newest = _newest_sequences(suspects)
    culprit = min(suspects, key=lambda status: (not is_silent(status, limits), *_innocence(status, newest)))
    limit = limit_s(culprit.beat, limits)
    others_stand_still = all(status.still_s > limit or _is_gone(status, limits) for status in everybody)
    if not (culprit.still_s > limit and others_stand_still):
        return None
    waiters = tuple(status for status in unfinished if status is not culprit)
    return Stall(culprit, waiters, limit, is_silent(culprit, limits))


def forbids_a_stall(status: RankStatus, limits: Timeouts) -> bool:
    """Whether there is none, whatever the other ranks say: this one got on within every limit."""
    shortest_s = min([limits.no_progress_s, *limits.tasks.values()])
    return status.still_s <= shortest_s and not _is_gone(status, limits)


def _is_gone(status: RankStatus, limits: Timeouts) -> bool:
    """Nothing more is to be expected of it, without its having finished."""
    return not status.beat.finished and is_silent(status, limits)


def limit_s(beat: Beat, limits: Timeouts) -> float:
    return limits.tasks.get(beat.task, limits.no_progress_s)


def is_silent(status: RankStatus, limits: Timeouts) -> bool:
    """Whether the rank does not run at all; known well before the end of any limit."""
    return status.silent_s > min(SILENT_S, limits.no_progress_s / 2, *(limit / 2 for limit in limits.tasks.values()))


def _innocence(status: RankStatus, newest: Mapping[str, int]) -> tuple[float, bool, bool, float, int]:
    """The least is to blame, of ranks that run. In turn: has not come to the task that others do already; is not inside
    a transfer, where it would rather wait for others; has not begun a collective that others are in; stopped first.
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


# One rank's view of all heartbeats: for how long each of the others has shown no progress, or no beat at all.

MOST_BETWEEN_LOOKS_S = 2.0
"""Whoever looks less often may not have run either, as where the whole machine stood still: more does not count as
silence of the others."""
GONE_S = 10.0
"""A rank of another machine without a heartbeat for this long is gone for one that is about to end itself; for a job
that goes on it is lost after timeouts.lost_s."""
Seen = dict[int, tuple[Posted, float]]
"""By rank: its beat, and for how many seconds there has been no other."""


class Observer:
    """Clocks of machines differ: what passes since a beat is measured here, from when it was first seen.

    To be asked every second or so. For any thread.
    """

    def __init__(
        self, board: Board, num_ranks: int, limits: Timeouts, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.board = board
        self.ranks = range(num_ranks)
        self.limits = limits
        self.clock = clock
        self._seen: dict[int, tuple[int, float]] = {}
        """Rank -> its last beat's number, and `_looked_for_s` when that was new."""
        self._looked_at: float | None = None
        self._looked_for_s = 0.0
        """Seconds in which this process is known to have run."""
        self._looking = threading.Lock()
        self._witness = 0
        """The rank whose beat was the last to show that there is no stall."""

    def look(self, ranks: Collection[int]) -> dict[int, RankStatus]:
        """How `ranks` stand now."""
        seen = self._see(ranks)
        return {rank: _status(*seen[rank]) for rank in sorted(seen)}

    def gone(self, ranks: Collection[int]) -> list[int]:
        """Those of `ranks` whose process has ended, or is not heard of any more, before they had done their part."""
        statuses = self.look(ranks)
        ended = [rank for rank, status in statuses.items() if has_ended(status.beat.process)]
        statuses |= self.look(ended)  # what they said last: one that has just finished is not gone
        return [
            rank
            for rank, status in statuses.items()
            if (rank in ended or status.silent_s > GONE_S) and not status.beat.finished
        ]

    def verdict(self) -> Stall | Lost | None:
        """Why the job is to end: the stall of all ranks, or that one is lost, whatever the others do; else None.

        Beats are read to the end until one of them rules a stall out: usually the one that did so last time.
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


# Beats of a node's ranks, gathered by its first one: a call of the store for all of them, and a look for the end.
#
# In a job of thousands the store's server would otherwise spend a seventh of its processor on what every rank says and
# asks once a second. Ranks of a node speak over loopback, which no rank waits at: whoever the first one has not
# confirmed lately says and asks for itself, as where that one has ended, is stopped or cannot be reached.

GATHERED_FROM = 512
"""Ranks of a job in which beats are gathered: the store of a smaller one has little to do."""
CONFIRMED_FOR_S = 2.5 * INTERVAL_S
"""So long a rank relies on the last word of its node's first one, and that one on its own last look."""
BEATS_LOOK_S = 0.2
MOST_BYTES = 60_000
"""Of a datagram."""
TOKEN_BYTES = 16
CONFIRMED, ENDS = b"confirmed", b"ends"


class OwnBeats:
    """A rank that speaks for itself, and asks for itself. `store` is for calls from threads: World.background."""

    def __init__(self, store: dist.Store) -> None:
        self.store, self.board = store, Board(store)

    def put(self, beat: Beat) -> None:
        """Publish it. By the heartbeat's thread."""
        self.board.put(beat)

    def job_ends(self) -> bool:
        """Whether a rank ends the job, or is about to. By the watchdog's thread."""
        return bool(self.store.check([NEAR]))

    def wait(self, over: threading.Event, seconds: float) -> bool:
        """Until the next look: whether it is `over`."""
        return over.wait(seconds)


class Gatherer(OwnBeats):
    """The first rank of a node: it puts the others' beats with its own, and passes on that the job ends."""

    def __init__(self, node: int, store: dist.Store, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(store)
        self._clock = clock
        self._token = secrets.token_bytes(TOKEN_BYTES)
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._socket.bind((LOOPBACK, 0))
        self._socket.setblocking(False)
        self._looked_at = float("-inf")
        self._addresses: dict[int, tuple[str, int]] = {}
        """Of the node's other ranks, as far as they have spoken."""
        store.set(_key(node), json.dumps([self._socket.getsockname()[1], self._token.hex()]))

    def put(self, beat: Beat) -> None:
        gathered = self._gathered()
        self.board.put_lines({beat.rank: Board.line(beat)} | gathered)
        if beat.finished:  # one that finishes too may have put its last beat before an older one that came by here
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
        """Rank -> the line of its last beat, of those that have come since the last call."""
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
            except OSError:  # it hears nothing, and speaks for itself
                continue


class Gathered(OwnBeats):
    """Any other rank of a node."""

    def __init__(self, node: int, store: dist.Store, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(store)
        self._node, self._clock = node, clock
        self._token: bytes | None = None
        """None: nothing is known of the first rank yet."""
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
            except OSError:  # the first rank has ended, or does not read
                self._confirmed_at = float("-inf")

    def _is_confirmed(self) -> bool:
        """Whether the first rank has lately said that it spoke and asked for this one."""
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
    """How this rank's beats come to the store."""
    if world.size < GATHERED_FROM or world.ranks_per_node == 1:
        return OwnBeats(world.background)
    return (Gathered if world.local_rank else Gatherer)(world.node, world.background)


def _key(node: int) -> str:
    return f"node_beats/{node}"


# Small values that ranks leave for each other in the shared store, and waits for them.

LOOK_S = 1.0
"""Between two looks at the heartbeats of the ranks waited for."""
GUARDED_LOOK_S = 10.0
"""As long a wait goes on at the store where a watchdog looks at them."""


class JobStore:
    """Small JSON values that ranks leave for each other in the store: metrics, verdicts; and this rank's heartbeat.

    In a `guarded` job a watchdog ends waits that are in vain; otherwise they end
    themselves.
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
        """The value at `key`, once any other rank has put it there; StallError naming `waiting_for` if none will."""
        if not self.has(key):
            self._wait_for(key, waiting_for)
        return json.loads(self.store.get(key))

    def agreed(self, key: str, proposed: bool) -> bool:
        """What the first rank to come here has proposed, for all ranks."""
        found: bool = json.loads(self.store.compare_set(key, "", json.dumps(proposed)))
        return found

    def meet(self, key: str, num_ranks: int, waiting_for: str) -> None:
        """Return once so many ranks have come here. Collective over: those ranks."""
        if self.store.add(f"{key}/came", 1) == num_ranks:
            self.put(key, True)
        self.get(key, waiting_for)

    def forget(self, key: str) -> None:
        self.store.delete_key(key)

    def activity(self, rank: int) -> str:
        """What `rank` is doing, in words."""
        beat = self.heartbeat.now() if rank == self.world.rank else self.heartbeat.board.read([rank])[rank]
        return f"{what_it_does(beat)} since {max(time.time() - beat.since, 0):.0f} s"

    def end_wait_in_vain(self, describe: Callable[[], str]) -> None:
        """Raise StallError if nobody in the job gets on, or a rank is lost; `describe` says what it waits for.

        To be called every LOOK_S seconds of a wait inside `heartbeat.waiting`.
        """
        if not self.guarded and (verdict := self.observer.verdict()):
            raise StallError(f"{describe()}: {verdict}")

    def _wait_for(self, key: str, waiting_for: str) -> None:
        with self.heartbeat.waiting(waiting_for, ()):
            while not wait_briefly(self.store, [key], GUARDED_LOOK_S if self.guarded else LOOK_S):
                self.end_wait_in_vain(lambda: f"rank {self.world.rank} waits for {waiting_for}")


# Waits with a limit and a name: what they wait for is reported, and the limit runs while the others do not get on.

logger = logging.getLogger(__name__)

SERVE_S = 0.005
"""Between two calls of `serve`."""
REPORT_EVERY_S = 30.0
"""A wait that lasts is reported, with what the awaited ranks are doing."""

MOST_DESCRIBED = 8
"""Ranks of which a report says what they do: the heartbeats of all of them are for one rank to read."""


class Waiter:
    """How this rank waits for others, and reports what they do every `report_s`. For one thread at a time."""

    def __init__(self, job_store: JobStore, report_s: float = REPORT_EVERY_S) -> None:
        self.job_store = job_store
        self.rank = job_store.world.rank
        self.report_s = report_s
        self.meanwhile: Callable[[], None] = lambda: None
        """Called every LOOK_S seconds of a wait, and by tasks that take long. It may not wait itself."""

    def until(
        self,
        arrived: Callable[[float], bool],
        what: str,
        ranks: Sequence[int],
        serve: Callable[[], None] | None = None,
    ) -> None:
        """Call `arrived(seconds)`, which waits that long at most and says whether it is done, until it is.

        `ranks` are those waited for, none for any other. `serve` is called in between, every few milliseconds: what
        this rank does meanwhile, for others that need it. Raises StallError when nobody in the job has shown
        progress for longer than `timeouts` allows; in a guarded job the watchdog ends the process instead. Also where
        `arrived` raises ConnectionError.
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


# Waiting for something that has to be looked for, such as a key in the store.

POLL_S = 0.002
LOOKS_PER_S = 2_000
"""Of all ranks together that look into the store for something: a sixteenth of one server's processor."""

Found = TypeVar("Found")


def poll_s(num_looking: int) -> float:
    """Between two looks of one of so many ranks that may look at the same time."""
    return max(POLL_S, num_looking / LOOKS_PER_S)


def poll(
    waiter: Waiter,
    look: Callable[[], Found | None],
    what: str,
    ranks: Sequence[int],
    serve: Callable[[], None] | None = None,
    every_s: float = POLL_S,
) -> Found:
    """What `look` finds, as soon as it finds something. It is called every `every_s`: `poll_s` where it asks the store.
    The other arguments and errors are those of Waiter.until."""
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
