"""Turns on their way from a server's thread to the thread that steps an engine, and back."""

import asyncio
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from rltrain.endpoint.turn import EngineBusy, EngineGone, Progress
from rltrain.rollout.groups import Mail, Turn
from rltrain.rollout.sample import Sample


@dataclass(frozen=True)
class _Waiter:
    """Who waits for a turn: a future of an event loop in another thread."""

    loop: asyncio.AbstractEventLoop
    future: "asyncio.Future[Sample]"
    progress: Progress | None


class EngineMailbox:
    """Implements `Turns` for coroutines of any thread. `take`, `deliver`, `report`, `fail` and `wait` are for the one
    that steps the engine. At most `max_turns` are under way; a turn is, until it is delivered or given up.
    """

    def __init__(self, max_turns: int) -> None:
        self._max_turns = max_turns
        self._changed = threading.Condition()
        self._new: dict[int, Turn] = {}
        self._waiters: dict[int, _Waiter] = {}
        self._given_up: set[int] = set()
        self._forgotten: set[int] = set()
        self._ending: str | None = None
        self._is_woken = False

    @property
    def num_turns(self) -> int:
        """Under way."""
        return len(self._waiters)

    async def draw(self, turn: Turn, progress: Progress | None = None) -> Sample:
        """As `Turns` says. ValueError where a turn of the same sample is under way."""
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
        """As `Turns` says."""
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
