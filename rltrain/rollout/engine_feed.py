"""Turns on their way between a server's thread and the thread of an engine."""

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from rltrain.errors import DataError
from rltrain.rollout.engine import Engine, SamplingParams, StopStrings, Tokenizer
from rltrain.rollout.sample import Sample, Status

# Turns requested from outside, beside the groups of the engine.


@dataclass(frozen=True)
class PendingTurn:
    """A pending sample with a requested turn. Samples requested at the same time have distinct ids."""

    sample: Sample
    sampling: SamplingParams
    stop: tuple[str, ...] = ()
    """Stop strings of this request, added to those of `sampling`.

    They are only matched within the text of the turn. The tokens of a match are part of the turn.
    """
    is_watched: bool = False
    """Whether the caller wants to see its progress."""


@dataclass(frozen=True)
class Mail:
    """Requests since the last decode step. Equal on all ranks of the engine."""

    turns: tuple[PendingTurn, ...] = ()
    given_up: frozenset[int] = frozenset()
    """Ids of samples with requested turns that nothing waits for any more."""
    forgotten: frozenset[int] = frozenset()
    """Ids of samples without a further turn."""

    def __bool__(self) -> bool:
        return bool(self.turns or self.given_up or self.forgotten)


# The requests of a server to the thread with the engine.

Progress = Callable[[Sample], None]
"""Called with the sample of a running turn and its tokens so far."""


class EngineGone(Exception):  # noqa: N818 - names what happened
    """No further turns are generated, because the job ends or the engine has failed. The message has the reason."""


class EngineBusy(Exception):  # noqa: N818
    """The most turns allowed are under way."""


# The mailbox between a server's thread and the thread of an engine.


@dataclass(frozen=True)
class _Waiter:
    """The waiting side of a turn: a future in an event loop of another thread."""

    loop: asyncio.AbstractEventLoop
    future: "asyncio.Future[Sample]"
    progress: Progress | None


class EngineMailbox:
    """Generates turns for coroutines of any thread.

    The engine's thread calls `take`, `deliver`, `report`, `fail` and `wait`. At most `max_turns` are under way; a turn
    is under way until it is delivered, failed or given up.
    """

    def __init__(self, max_turns: int) -> None:
        self._max_turns = max_turns
        self._changed = threading.Condition()
        self._new: dict[int, PendingTurn] = {}
        self._waiters: dict[int, _Waiter] = {}
        self._given_up: set[int] = set()
        self._forgotten: set[int] = set()
        self._ending: str | None = None
        self._is_woken = False

    @property
    def num_turns(self) -> int:
        """Number of turns under way."""
        return len(self._waiters)

    async def draw(self, turn: PendingTurn, progress: Progress | None = None) -> Sample:
        """Returns the turn's sample at the end of the turn. Cancellation gives the turn up.

        Raises EngineGone, EngineBusy, or ValueError if a turn of the same sample is under way.
        """
        number, loop = turn.sample.id, asyncio.get_running_loop()
        waiter = _Waiter(loop, loop.create_future(), progress)
        with self._changed:
            if self._ending is not None:
                raise EngineGone(self._ending)
            if number in self._waiters:
                raise ValueError(f"a turn of sample {number} is under way; expected the next one after its end")
            if len(self._waiters) >= self._max_turns:
                raise EngineBusy(f"{self._max_turns} turns are under way")
            self._waiters[number], self._new[number] = waiter, turn
            self._changed.notify_all()
        try:
            return await waiter.future
        except asyncio.CancelledError:
            self._give_up(number, waiter)
            raise

    def forget(self, ids: Collection[int]) -> None:
        """Declares that the samples with these ids have no further turn. The engine may free what it keeps for them."""
        with self._changed:
            self._forgotten.update(ids)

    def take(self) -> Mail:
        """Returns the turns, withdrawals and finished ids that arrived since the last call."""
        with self._changed:
            mail = Mail(tuple(self._new.values()), frozenset(self._given_up), frozenset(self._forgotten))
            self._new.clear()
            self._given_up.clear()
            self._forgotten.clear()
        return mail

    def wait(self, timeout_s: float) -> bool:
        """Waits up to `timeout_s` for news or a call of `wake`. Returns whether one came."""
        with self._changed:
            looked = bool(self._changed.wait_for(self._has_news, timeout_s))
            self._is_woken = False
        return looked

    def wake(self) -> None:
        """Ends the current or next `wait`."""
        with self._changed:
            self._is_woken = True
            self._changed.notify_all()

    def deliver(self, samples: Sequence[Sample]) -> None:
        """Ends the turns of these samples. Ignores turns given up in the meantime."""
        with self._changed:
            found = [(sample, self._waiters.pop(sample.id, None)) for sample in samples]
            self._given_up -= {sample.id for sample in samples}
        _call(found, lambda waiter, sample: _resolve(waiter.future, sample))

    def report(self, samples: Sequence[Sample]) -> None:
        """Reports the tokens so far of running turns."""
        with self._changed:
            found = [(sample, self._waiters.get(sample.id)) for sample in samples]
        _call(found, _tell)

    def fail(self, errors: Mapping[int, Exception]) -> None:
        """Ends the turns of these samples with errors."""
        with self._changed:
            found = [(error, self._waiters.pop(number, None)) for number, error in errors.items()]
            self._given_up -= errors.keys()
        for error, waiter in found:
            if waiter is not None:
                _in_loop(waiter.loop, partial(_reject, waiter.future, error))

    def close(self, reason: str) -> None:
        """Ends all turns under way, and refuses new ones, with EngineGone(`reason`). May be called again."""
        with self._changed:
            self._ending = self._ending or reason
            numbers = [*self._waiters]
            self._new.clear()
            self._changed.notify_all()
        self.fail({number: EngineGone(reason) for number in numbers})

    def _has_news(self) -> bool:
        return bool(self._new or self._given_up or self._ending or self._is_woken)

    def _give_up(self, number: int, waiter: _Waiter) -> None:
        with self._changed:
            if self._waiters.get(number) is not waiter:
                return
            del self._waiters[number]
            if self._new.pop(number, None) is None:
                self._given_up.add(number)
            self._changed.notify_all()


def _tell(waiter: _Waiter, sample: Sample) -> None:
    if waiter.progress is not None and not waiter.future.done():
        waiter.progress(sample)


def _resolve(future: "asyncio.Future[Sample]", sample: Sample) -> None:
    if not future.done():
        future.set_result(sample)


def _reject(future: "asyncio.Future[Sample]", error: Exception) -> None:
    if not future.done():
        future.set_exception(error)


def _call(found: Sequence[tuple[Sample, _Waiter | None]], action: Callable[[_Waiter, Sample], None]) -> None:
    """Calls `action(waiter, sample)` in each waiter's own event loop. Wakes each loop once for all its samples."""
    by_loop: dict[asyncio.AbstractEventLoop, list[tuple[_Waiter, Sample]]] = {}
    for sample, waiter in found:
        if waiter is not None:
            by_loop.setdefault(waiter.loop, []).append((waiter, sample))

    def act(pairs: Sequence[tuple[_Waiter, Sample]]) -> None:
        for waiter, sample in pairs:
            action(waiter, sample)

    for loop, pairs in by_loop.items():
        _in_loop(loop, partial(act, pairs))


def _in_loop(loop: asyncio.AbstractEventLoop, action: Callable[[], None]) -> None:
    try:
        loop.call_soon_threadsafe(action)
    except RuntimeError:  # a closed loop has no waiters
        if not loop.is_closed():
            raise


# The engine's side of the mailbox.

PULSE_STEPS = 4
"""Decode steps between two checks of running turns, for stop strings and progress reports."""
SLICE_STEPS = 64
"""Decode steps after which waiting turns with other sampling parameters get the engine."""


@dataclass
class _StopSearch:
    """A search for a turn's stop strings. Looks at each generated token once."""

    strings: StopStrings
    recent: deque[int]
    num_seen: int
    """Number of response tokens already searched, including those before the turn."""

    def end_of(self, sample: Sample) -> int | None:
        """Returns the number of response tokens at the end of the first complete stop string, or None."""
        while self.num_seen < len(sample.tokens):
            token = sample.tokens[self.num_seen]
            self.num_seen += 1
            if self.strings.append([self.recent], [token])[0]:
                return self.num_seen
        return None


@dataclass
class _Entry:
    """A turn taken from the mailbox, and its sample when it was last off the engine."""

    turn: PendingTurn
    sample: Sample
    search: _StopSearch | None


@dataclass
class EngineFeed:
    """Runs the turns of a mailbox on `engine`, beside the engine's other samples.

    Call `begin_step` with the `mail` before every decode step, and `end_step` with the finished samples after it. All
    calls come from the engine's thread. If another caller suspends the engine, pass the samples to `take_back`. They
    continue at the next `begin_step`.

    An engine uses one SamplingParams at a time. If turns with others wait, the groups of equal parameters alternate by
    decode steps. So all of them progress, and the generated tokens do not depend on time. Other samples on the engine
    must have the sampling of the turns.

    Every rank of an engine has a feed and begins a step with equal mail. Only the first rank has the mailbox and
    searches for stop strings. Its next mail withdraws the stopped turns on all ranks.
    """

    engine: Engine
    tokenizer: Tokenizer
    mailbox: EngineMailbox | None = None
    """The mailbox on the engine's first rank, None on others."""
    slice_steps: int = SLICE_STEPS
    _waiting: dict[SamplingParams, deque[_Entry]] = field(default_factory=dict)
    """Turns off the engine, by sampling. The sampling served next comes first."""
    _running: dict[int, _Entry] = field(default_factory=dict)
    _sampling: SamplingParams | None = None
    """Sampling of the running turns."""
    _cut: set[int] = field(default_factory=set)
    """Delivered turns that the engine still runs."""
    _num_steps: int = 0
    _slice_end: int = 0

    @property
    def num_turns(self) -> int:
        """Number of turns taken from the mailbox and not ended."""
        return len(self._running) + sum(map(len, self._waiting.values()))

    def mail(self) -> Mail | None:
        """Returns the news for the next decode step, or None if there is nothing to do. Called on the engine's first
        rank."""
        assert self.mailbox is not None, "the engine's first rank is asked"
        come = self.mailbox.take()
        mail = replace(come, given_up=come.given_up | self._cut)
        self._cut.clear()
        return mail if mail or self.num_turns else None

    def begin_step(self, mail: Mail) -> None:
        """Submits, withdraws and forgets samples on the engine, as the mail asks."""
        if mail.given_up:
            self._drop(mail.given_up)
        if mail.forgotten:
            self.engine.forget(mail.forgotten)
        for turn in mail.turns:
            self._waiting.setdefault(turn.sampling, deque()).append(self._entry(turn))
        others = any(sampling != self._sampling for sampling in self._waiting)
        if self._running and others and self._num_steps >= self._slice_end:
            self.take_back(self.engine.withdraw(self._running.keys()))
        if not self._running and self._waiting:
            self._sampling = next(iter(self._waiting))
            self._slice_end = self._num_steps + self.slice_steps
        if self._sampling is not None and self._sampling in self._waiting:
            self._submit(self._waiting.pop(self._sampling), self._sampling)

    def end_step(self, finished: Iterable[Sample]) -> list[Sample]:
        """Delivers the turns among `finished`. Returns the samples of others."""
        self._num_steps += 1
        own, foreign = [], []
        for sample in finished:
            entry = self._running.pop(sample.id, None)
            if entry is None:
                foreign.append(sample)
            elif sample.id not in self._cut:
                own.append(_ended(entry, sample) or sample)
        if self.mailbox is not None:
            if own:
                self.mailbox.deliver(own)
            if self._num_steps % PULSE_STEPS == 0:
                self._look(self.mailbox)
        return foreign

    def fail_running(self) -> None:
        """Delivers all running turns as failed, after the engine dropped them for log-probs that are not finite."""
        lost, self._running = self._running, {}
        if self.mailbox is not None:
            entries = (entry for number, entry in lost.items() if number not in self._cut)
            self.mailbox.deliver([replace(entry.sample, status=Status.FAILED) for entry in entries])

    def take_back(self, samples: Iterable[Sample]) -> list[Sample]:
        """Queues turns again that the engine returned unfinished. Returns the samples of others."""
        back, foreign = deque[_Entry](), []
        for sample in samples:
            entry = self._running.pop(sample.id, None)
            if entry is None:
                foreign.append(sample)
            else:
                entry.sample = sample
                back.append(entry)
        if back:
            assert self._sampling is not None
            newer = self._waiting.pop(self._sampling, deque())
            self._waiting[self._sampling] = back + newer
        return foreign

    def _submit(self, entries: Collection[_Entry], sampling: SamplingParams) -> None:
        try:
            self.engine.submit([entry.sample for entry in entries], sampling)
        except (DataError, ValueError) as error:  # one sample is refused, and none is queued
            if len(entries) == 1:
                if self.mailbox is not None:
                    self.mailbox.fail({entry.sample.id: error for entry in entries})
                return
            for entry in entries:
                self._submit([entry], sampling)
            return
        self._running |= {entry.sample.id: entry for entry in entries}

    def _drop(self, numbers: Collection[int]) -> None:
        running = [number for number in numbers if self._running.pop(number, None) is not None]
        if running:
            self.engine.withdraw(running)
        for sampling, entries in [*self._waiting.items()]:
            left = deque(entry for entry in entries if entry.sample.id not in numbers)
            if left:
                self._waiting[sampling] = left
            else:
                del self._waiting[sampling]

    def _look(self, mailbox: EngineMailbox) -> None:
        """Reports the progress of watched turns, and ends turns with a complete stop string."""
        going_on_here = [(n, entry) for n, entry in self._running.items() if n not in self._cut]
        looked_at = [n for n, entry in going_on_here if entry.turn.is_watched or entry.search is not None]
        going_on, ended = [], []
        for sample in self.engine.progress(looked_at) if looked_at else ():
            if (cut := _ended(self._running[sample.id], sample)) is not None:
                ended.append(cut)
            elif self._running[sample.id].turn.is_watched:
                going_on.append(sample)
        if ended:
            self._cut.update(sample.id for sample in ended)
            mailbox.deliver(ended)
        mailbox.report(going_on)

    def _entry(self, turn: PendingTurn) -> _Entry:
        search = None
        if turn.stop and self.mailbox is not None:
            strings = StopStrings(self.tokenizer, turn.stop)
            search = _StopSearch(strings, strings.recent(()), len(turn.sample.tokens))
        return _Entry(turn, turn.sample, search)


def _ended(entry: _Entry, sample: Sample) -> Sample | None:
    """Returns `sample` cut after the first of its turn's stop strings, or None if there is none."""
    end = entry.search.end_of(sample) if entry.search is not None else None
    if end is None:
        return None
    return sample.first(end).drawn((), (), (), Status.STOPPED)
