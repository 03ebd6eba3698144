"""Turns between a server's thread and the thread that steps an engine."""

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from rltrain.errors import DataError
from rltrain.rollout.engine import Engine, SamplingParams, StopStrings, Tokenizer
from rltrain.rollout.groups import Mail, PendingTurn
from rltrain.rollout.sample import Sample, Status

# What a server of requests asks of whoever holds an engine: to draw turns of conversations.

Progress = Callable[[Sample], None]
"""Is given the sample of a turn with what has been drawn of it so far."""


class EngineGone(Exception):  # noqa: N818 - names what happened
    """Nobody draws turns any more: the job ends, or the engine has failed. The message says why."""


class EngineBusy(Exception):  # noqa: N818
    """As many turns are under way as there may be."""


# Turns on their way from a server's thread to the thread that steps an engine, and back.


@dataclass(frozen=True)
class _Waiter:
    """Who waits for a turn: a future of an event loop in another thread."""

    loop: asyncio.AbstractEventLoop
    future: "asyncio.Future[Sample]"
    progress: Progress | None


class EngineMailbox:
    """Draws turns for coroutines of any thread: all that a server of requests knows of engines. `take`, `deliver`,
    `report`, `fail` and `wait` are for the one that steps the engine. At most `max_turns` are under way; a turn is,
    until it is delivered or given up.
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
        """Under way."""
        return len(self._waiters)

    async def draw(self, turn: PendingTurn, progress: Progress | None = None) -> Sample:
        """The turn's sample when the turn has ended. Cancelling gives the turn up.

        Raises EngineGone, EngineBusy, and ValueError where a turn of the same sample is under way.
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
        """The samples with these ids have no further turn: nothing need be kept for one."""
        with self._changed:
            self._forgotten.update(ids)

    def take(self) -> Mail:
        """What has come since the last call."""
        with self._changed:
            mail = Mail(tuple(self._new.values()), frozenset(self._given_up), frozenset(self._forgotten))
            self._new.clear()
            self._given_up.clear()
            self._forgotten.clear()
        return mail

    def wait(self, timeout_s: float) -> bool:
        """Until there is something to take, somebody wakes it, or for `timeout_s`; whether there is or did."""
        with self._changed:
            looked = bool(self._changed.wait_for(self._has_news, timeout_s))
            self._is_woken = False
        return looked

    def wake(self) -> None:
        """End the wait."""
        with self._changed:
            self._is_woken = True
            self._changed.notify_all()

    def deliver(self, samples: Sequence[Sample]) -> None:
        """The turns of these samples have ended. One that was given up in the meantime is passed over."""
        with self._changed:
            found = [(sample, self._waiters.pop(sample.id, None)) for sample in samples]
            self._given_up -= {sample.id for sample in samples}
        _call(found, lambda waiter, sample: _resolve(waiter.future, sample))

    def report(self, samples: Sequence[Sample]) -> None:
        """What has been drawn so far of turns that go on."""
        with self._changed:
            found = [(sample, self._waiters.get(sample.id)) for sample in samples]
        _call(found, _tell)

    def fail(self, errors: Mapping[int, Exception]) -> None:
        """These samples' turns cannot be drawn."""
        with self._changed:
            found = [(error, self._waiters.pop(number, None)) for number, error in errors.items()]
            self._given_up -= errors.keys()
        for error, waiter in found:
            if waiter is not None:
                _in_loop(waiter.loop, partial(_reject, waiter.future, error))

    def close(self, reason: str) -> None:
        """Nothing is drawn from now on: all that wait, and all that come, are told so. May be called again."""
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
    """`action(waiter, sample)` in each waiter's own loop, which is woken once for all of its samples."""
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
    except RuntimeError:  # the loop has been closed: whoever waited there is gone
        if not loop.is_closed():
            raise


# Turns of an endpoint on an engine: the side of whoever steps it.

PULSE_STEPS = 4
"""Decode steps between two looks at what running turns have drawn: their stop strings, and what is told of them."""
SLICE_STEPS = 64
"""Decode steps after which turns of other sampling, where some wait, have theirs."""


@dataclass
class _StopSearch:
    """Looks for a turn's stop strings in the tokens that it draws, each once."""

    strings: StopStrings
    recent: deque[int]
    num_seen: int
    """Response tokens, those before the turn included."""

    def end_of(self, sample: Sample) -> int | None:
        """How many response tokens there are once a string is complete."""
        while self.num_seen < len(sample.tokens):
            token = sample.tokens[self.num_seen]
            self.num_seen += 1
            if self.strings.append([self.recent], [token])[0]:
                return self.num_seen
        return None


@dataclass
class _Entry:
    """A turn that was taken from the mailbox, and how far it has come when it was last off the engine."""

    turn: PendingTurn
    sample: Sample
    search: _StopSearch | None


@dataclass
class EngineFeed:
    """Implements `Guests`: the turns of a mailbox on `engine`, beside whatever else it draws.

    Before every decode step call `begin_step` with the `mail`, after it `end_step` with what the step returned; all by
    the engine's one thread. Where somebody suspends the engine in between, `take_back` what was this feed's of it: it
    goes on at the next `begin_step`. An engine draws with one SamplingParams at a time. Where others wait, turns take
    turns by decode steps: so everybody gets on, and what is drawn does not depend on the clock. Whatever else is on the
    engine must have the sampling of the turns.

    All ranks of an engine have one, and begin a step with equal mail. The mailbox is the first one's, which alone looks
    for stop strings of turns: what it finds ended it gives up for the others in its next mail.
    """

    engine: Engine
    tokenizer: Tokenizer
    mailbox: EngineMailbox | None = None
    """None: this is not the engine's first rank."""
    slice_steps: int = SLICE_STEPS
    _waiting: dict[SamplingParams, deque[_Entry]] = field(default_factory=dict)
    """Not on the engine, by sampling; those that are served next come first."""
    _running: dict[int, _Entry] = field(default_factory=dict)
    _sampling: SamplingParams | None = None
    """Of what runs."""
    _cut: set[int] = field(default_factory=set)
    """Turns that have been delivered, and that the engine has yet to be rid of."""
    _num_steps: int = 0
    _slice_end: int = 0

    @property
    def num_turns(self) -> int:
        """Taken from the mailbox and not ended."""
        return len(self._running) + sum(map(len, self._waiting.values()))

    def mail(self) -> Mail | None:
        """As `Guests` says."""
        assert self.mailbox is not None, "the engine's first rank is asked"
        come = self.mailbox.take()
        mail = replace(come, given_up=come.given_up | self._cut)
        self._cut.clear()
        return mail if mail or self.num_turns else None

    def begin_step(self, mail: Mail) -> None:
        """Give the engine what it is to draw."""
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
        """Deliver the turns that are among `finished`; those that are not this feed's."""
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
        """The engine has given up all that ran, since none of it was finite: deliver it as failed."""
        lost, self._running = self._running, {}
        if self.mailbox is not None:
            entries = (entry for number, entry in lost.items() if number not in self._cut)
            self.mailbox.deliver([replace(entry.sample, status=Status.FAILED) for entry in entries])

    def take_back(self, samples: Iterable[Sample]) -> list[Sample]:
        """The engine has given these back unfinished; those that are not this feed's."""
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
        except (DataError, ValueError) as error:  # one of them alone can be refused, and none has been queued
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
        """Tell what is watched, and end what has drawn a stop string of its own."""
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
    """`sample` as one of its turn's own stop strings ends it; None where it has drawn none of them."""
    end = entry.search.end_of(sample) if entry.search is not None else None
    if end is None:
        return None
    return sample.first(end).drawn((), (), (), Status.STOPPED)
