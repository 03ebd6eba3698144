"""The client of engines on servers: unfinished samples, their requests, and the tokens received for each."""

import asyncio
import math
import secrets
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from itertools import count
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

from rltrain.errors import DivergenceError, EngineError, EngineLost
from rltrain.rollout.engine import (
    START_FRACTION,
    Engine,
    SamplingParams,
    StopCut,
    Tokenizer,
    check_samples,
    response_limit,
    served_version,
    stop_cut,
    stop_strings,
)
from rltrain.rollout.sample import Sample, Status
from rltrain.rollout.servers.calls import Calls, ServerBusy, ServerGone, ServerRefuses, StreamCut
from rltrain.rollout.servers.server_images import ServerImages

T = TypeVar("T")

# A sample at a server, and the tokens received for it.

_LOWEST_LOGPROB = -1e30
"""SGLang sends the lowest finite number in place of minus infinity."""
_NAN = "NaN happened"
"""What SGLang matched if it ended a response because of its log-probs."""


@dataclass
class Drawing:
    """A sample as it was sent to a server, with the tokens and log-probs received since."""

    sample: Sample
    limit: int
    """Most tokens of the whole response, including the tokens already in `sample`."""
    version: int = 0
    """Policy version of the server's weights when the sample was sent."""
    name: str = ""
    """Name of the request."""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float | None] = field(default_factory=list)
    num_certain: int = 0
    """Number of leading entries of `tokens` known to come from the weights of `version`."""
    end: str | None = None
    """The server's own reason for ending the request, or None while it runs."""
    matched: object = None
    """The stop token or stop string that the server found at the end, or None."""
    meta: Mapping[str, Any] = field(default_factory=dict)
    """What an SGLang server reported with the last token."""
    failures: int = 0
    """Number of requests in a row that brought no new token."""
    images: ServerImages | None = None
    """The images of samples, with model.vision."""

    @property
    def is_certain(self) -> bool:
        """Whether all received tokens are certain."""
        return self.num_certain == len(self.tokens)

    @property
    def num_left(self) -> int:
        """Number of tokens that the server may still generate for `sample`, as it was sent."""
        return self.limit - len(self.sample.tokens)

    def add(self, tokens: Sequence[int], logprobs: Sequence[float | None], total: int | None = None) -> None:
        """Adds tokens and log-probs that the server sent.

        `total` is the number of tokens generated so far, including these. With None they follow the known tokens.
        Raises EngineError if the numbers of tokens and log-probs differ, or if tokens are missing.
        """
        begin = len(self.tokens) if total is None else total - len(tokens)
        if len(tokens) != len(logprobs) or begin > len(self.tokens):
            raise EngineError(
                f"a server returned {len(tokens)} tokens and {len(logprobs)} log-probs after {len(self.tokens)} of "
                f"{total or 'all'} tokens of sample {self.sample.id}; expected each token with one log-prob. Leave out "
                "server arguments that change what it returns"
            )
        self.tokens[begin:] = tokens
        self.logprobs[begin:] = logprobs

    def known(self) -> Sample:
        """Returns the pending sample with its certain tokens. At least one token remains to be generated, so the last
        token is left out if the server has ended the request."""
        most = len(self.tokens) - 1 if self.end is not None else self.num_left - 1
        certain = self.logprobs[: min(self.num_certain, max(0, most))]
        return self._drawn(count_finite(certain), Status.PENDING)

    def ended(self, sampling: SamplingParams, cut: StopCut | None) -> Sample:
        """Returns the sample after its server has ended the request. It is pending if it may have more tokens.

        The sample has failed if a log-prob is not finite, and ends before the first such token. `cut` finds stop
        strings; None if there are none.
        """
        num_finite = count_finite(self.logprobs)
        if num_finite < len(self.logprobs) or self.matched == _NAN:
            return self._drawn(num_finite, Status.FAILED)
        count = cut(self.sample.turn_tokens, self.tokens) if cut else None
        if count is not None:
            return self._drawn(count, Status.STOPPED)
        return self._drawn(min(len(self.tokens), self.num_left), self._status(sampling))

    def _status(self, sampling: SamplingParams) -> Status:
        if (self.tokens and self.tokens[-1] in sampling.stop_token_ids) or self.matched in sampling.stop:
            return Status.STOPPED
        return Status.TRUNCATED if len(self.tokens) >= self.num_left else Status.PENDING

    def _drawn(self, count: int, status: Status) -> Sample:
        logprobs = [math.nan if value is None else value for value in self.logprobs[:count]]
        return self.sample.drawn(self.tokens[:count], logprobs, self._versions(count), status)

    def _versions(self, count: int) -> list[int]:
        """Returns the policy versions of the first `count` received tokens."""
        return [self.version] * count


def count_finite(logprobs: Sequence[float | None]) -> int:
    """Returns the number of log-probs before the first one that is not finite."""
    return next((place for place, value in enumerate(logprobs) if not _is_finite(value)), len(logprobs))


def _is_finite(logprob: float | None) -> bool:
    return logprob is not None and math.isfinite(logprob) and logprob > _LOWEST_LOGPROB


class DivergenceWatch:
    """Detects diverged weights. With such weights every sample fails, and not only single ones.

    A server does not report the other samples of a decode step. So the required number of failures in a row is the
    number of samples that ran when the first one failed. It is at least ON_SOUND_WEIGHTS if a sample has succeeded on
    the same weights.
    """

    ON_SOUND_WEIGHTS = 16

    def __init__(self) -> None:
        self._num_failed, self._num_enough = 0, 0
        self._sound_version: int | None = None
        """Version of the weights of the most recent sample that succeeded."""

    def ended(self, sample: Sample, version: int, num_beside: int) -> None:
        """Records an ended sample of weights `version`, with `num_beside` other samples running.

        Ignores pending samples. Raises DivergenceError once the required number of samples has failed in a row.
        """
        if sample.status == Status.PENDING:
            return
        if sample.status != Status.FAILED:
            self._num_failed, self._sound_version = 0, version
            return
        if self._num_failed == 0:
            least = self.ON_SOUND_WEIGHTS if version == self._sound_version else 1
            self._num_enough = max(num_beside + 1, least)
        self._num_failed += 1
        if self._num_failed >= self._num_enough:
            self._num_failed = 0
            raise DivergenceError(
                f"The rollout policy (version {version}) gives log-probs that are not finite, in every running "
                "response: its weights have diverged or were never loaded. Lower actor.optimizer.lr, or check "
                "model.path."
            )


# A server of a rank. Each request has one sample or several.


class DrawingServer(ABC):
    """A server and the samples at it. Belongs to one event loop. Methods raise as `Calls` does."""

    def __init__(self, calls: Calls) -> None:
        self.calls = calls
        self.drawings: dict[int, Drawing] = {}
        """Samples at the server, by id."""
        self.problem = "has not answered yet"
        """The reason if the server does not serve."""
        self.last_event_s = time.monotonic()
        """Time of the last event (time.monotonic())."""

    @property
    def url(self) -> str:
        return self.calls.url

    @abstractmethod
    def request(self, drawings: Sequence[Drawing], sampling: SamplingParams) -> tuple[str, Mapping[str, Any]]:
        """Returns the path and body of a POST that asks for the responses as a stream."""

    @abstractmethod
    def take(self, drawing: Drawing, event: Mapping[str, Any]) -> None:
        """Adds the tokens of an event to `drawing`, and marks those as certain that the event makes certain.

        Raises ServerRefuses if the event is an error, and ServerGone if the server has other weights than expected.
        """

    @abstractmethod
    async def withdraw(self, names: Sequence[str]) -> bool:
        """Ends these requests early. Returns whether the server then streams their remaining tokens."""

    async def confirm(self) -> None:
        """Marks the tokens received so far as certain, if the server still has the weights of `version`."""
        return

    def holds(self, drawing: Drawing) -> bool:
        """Returns whether the sample is at the server by this request."""
        return self.drawings.get(drawing.sample.id) is drawing

    async def draw(
        self,
        drawings: Sequence[Drawing],
        sampling: SamplingParams,
        limit_s: float | None,
        ended: Callable[[Drawing], None],
    ) -> None:
        """Sends samples as one request and calls `ended` for each that ends with certain tokens.

        Raises ServerGone if no data arrives for `limit_s` seconds, or if a sample has no end.
        """
        path, body = self.request(drawings, sampling)
        by_name = {drawing.name: drawing for drawing in drawings}
        with suppress(StreamCut):  # some servers close the stream right after the last token
            async with aclosing(self.calls.stream(path, body, limit_s)) as events:
                async for event in events:
                    self.last_event_s = time.monotonic()
                    name = event.get("meta_info", {}).get("id")  # errors and other protocols have none
                    drawing = by_name.get(name) if name else next(filter(self.holds, drawings), None)
                    if drawing is None or not self.holds(drawing):
                        continue
                    self.take(drawing, event)
                    if drawing.end is not None and drawing.is_certain:
                        ended(drawing)
        left = [*filter(self.holds, drawings)]
        if any(drawing.end is None for drawing in left):
            raise ServerGone(f"{path} of {self.calls.name}: its answer ended in the middle")
        if left:
            await self.confirm()
        for drawing in filter(self.holds, left):
            ended(drawing)


# The samples of a rank at its servers. An engine's own server and servers at URLs differ in the abstract methods.

STEP_WAIT_S = 0.005
"""Longest wait of a step for a finished response: about one decode step of a fast model."""
BUSY_S = 0.2
"""Time before a busy server is asked again."""
_ABORT_AGAIN_S = 0.25
"""Time before an abort is repeated. Requests that have not reached a server's scheduler miss an abort."""


class Requests(ABC):
    """The samples of a rank, in a queue or at servers. Everything except `outbox` belongs to one event loop.

    Samples are sent first in, first out, and no more than `max_running_requests` to a server. If a server is lost, its
    samples return to the queue with their certain tokens. A request has at most `samples_per_stream` samples. It fails
    without data for `stream_limit_s` seconds. A withdrawn sample has `withdraw_s` seconds to come back. Errors of
    requests begin with the config key `where` and end with `hint`. `images` are those of samples, with model.vision.
    """

    def __init__(
        self,
        *,
        max_running_requests: int,
        max_context_tokens: int,
        withdraw_s: float,
        stream_limit_s: float | None,
        where: str,
        hint: str = "",
        samples_per_stream: int = 1,
        images: ServerImages | None = None,
    ) -> None:
        self.outbox: SimpleQueue[Sample | Exception] = SimpleQueue()
        """Finished samples, and errors that end the job."""
        self.num_sent_again = 0
        self.version = 0
        """Policy version of the current weights."""
        self._max_running_requests, self._max_context_tokens = max_running_requests, max_context_tokens
        self._where, self._hint = where, hint
        self._withdraw_s, self._stream_limit_s = withdraw_s, stream_limit_s
        self._samples_per_stream, self._images = samples_per_stream, images
        self._divergence = DivergenceWatch()
        self._queue: deque[Drawing] = deque()
        self._running: dict[int, tuple[asyncio.Task[None], DrawingServer]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._back: dict[int, Sample] = {}
        """Samples being taken back, with their tokens, by id."""
        self._withdrawn: set[int] = set()
        """Ids of samples being taken back that have not arrived yet."""
        self._sampling: SamplingParams | None = None
        self._cut: StopCut | None = None
        self._is_held = False
        """Whether nothing may be sent."""
        self._has_left = asyncio.Event()
        """Set whenever a sample leaves its server."""
        self._names, self._job = count(), secrets.token_hex(4)

    # What differs between kinds of servers.

    @abstractmethod
    def _free_server(self) -> DrawingServer | None:
        """Returns a server with room for a sample, or None."""

    @abstractmethod
    def _lose(self, server: DrawingServer, why: str) -> None:
        """Handles the loss of a server. `_requeue` returns its samples to the queue."""

    @abstractmethod
    def _not_back(self, server: DrawingServer, why: str) -> None:
        """Handles withdrawn samples that have not come back from a server. Their certain tokens are used."""

    @abstractmethod
    def _wrong_end(self, drawing: Drawing, again: Drawing, why: str) -> EngineError | None:
        """Returns the error for an unfinished sample that may not be sent again as `again`, or None if it may."""

    def _drawing(self, sample: Sample, limit: int) -> Drawing:
        return Drawing(sample, limit, images=self._images)

    def check(self) -> None:
        """Raises the error for a server that does nothing. Any thread may call it."""
        return

    # The same for all servers.

    async def submit(self, samples: Sequence[Sample], sampling: SamplingParams, cut: StopCut | None) -> None:
        """Queues `samples` and sends as many as servers have room for. `cut` finds stop strings."""
        self._sampling, self._cut = sampling, cut
        self._queue.extend(map(self._queued, samples))
        self._dispatch()

    async def take_back(self, ids: Collection[int] | None = None) -> dict[int, Sample]:
        """Takes back these samples, or all with None. Returns them by id with their certain tokens.

        Samples that ended before are in the outbox.
        """
        back = {drawing.sample.id: drawing.sample for drawing in self._queue if ids is None or drawing.sample.id in ids}
        self._queue = deque(drawing for drawing in self._queue if drawing.sample.id not in back)
        running = {number for number in self._running if ids is None or number in ids}
        self._withdrawn |= running
        servers = {id(server): server for number in running for _, server in [self._running[number]]}
        await asyncio.gather(*(self._withdraw(server, running) for server in servers.values()))
        for number in running & self._running.keys():
            back[number] = self._stop(number).known()
        self._withdrawn -= running
        for number in running & self._back.keys():
            back[number] = self._back.pop(number)
        self._dispatch()
        return back

    async def progress(self, ids: Collection[int]) -> list[Sample]:
        """Returns these samples with their certain tokens if servers are running them."""
        drawings = [server.drawings[number] for number, (_, server) in self._running.items() if number in ids]
        return [drawing.known() for drawing in drawings]

    async def stop(self) -> None:
        """Ends all requests and returns once their connections are free. Samples stay where they are."""
        tasks = [*self._tasks]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _dispatch(self) -> None:
        while self._queue and not self._is_held and (server := self._free_server()) is not None:
            room = min(self._max_running_requests - len(server.drawings), self._samples_per_stream, len(self._queue))
            self._send([self._queue.popleft() for _ in range(room)], server)

    def _send(self, drawings: Sequence[Drawing], server: DrawingServer) -> None:
        for drawing in drawings:
            # SGLang aborts all requests whose names begin with the given one. The final dot rules that out for other
            # requests.
            drawing.version, drawing.name = self.version, f"{self._job}.{next(self._names)}."
            server.drawings[drawing.sample.id] = drawing
        task = asyncio.get_running_loop().create_task(self._draw(drawings, server))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        self._running |= {drawing.sample.id: (task, server) for drawing in drawings}

    async def _draw(self, drawings: Sequence[Drawing], server: DrawingServer) -> None:
        assert self._sampling is not None
        try:
            await server.draw(drawings, self._sampling, self._stream_limit_s, self._ended)
        except ServerGone as gone:
            self._lose(server, str(gone))  # with all its samples
        except ServerBusy as busy:
            await asyncio.sleep(BUSY_S)
            for drawing in reversed([*filter(server.holds, drawings)]):
                self._again(self._stop(drawing.sample.id), str(busy))
            self._dispatch()
        except ServerRefuses as refused:
            number = next(filter(server.holds, drawings), drawings[0]).sample.id
            what = f"{server.calls.name} refuses sample {number}"
            self.outbox.put(EngineError(f"{self._where}: {what}: {refused}{self._hint}"))
        except Exception as error:  # the engine's next step raises it
            self.outbox.put(error)

    def _ended(self, drawing: Drawing) -> None:
        """Handles a request ended by its server. The server may have ended it before the sample is finished."""
        assert self._sampling is not None
        number = drawing.sample.id
        self._stop(number, cancel=False)
        try:
            sample = drawing.ended(self._sampling, self._cut)
            has_gained = len(sample.tokens) > len(drawing.sample.tokens)
            version = sample.policy_versions[-1] if has_gained else drawing.version
            self._divergence.ended(sample, version, len(self._running))
        except Exception as error:  # the engine's next step raises it
            self.outbox.put(error)
            return
        if sample.is_finished:
            self.outbox.put(sample)
        else:
            self._again(drawing, f"the server ended it ({drawing.end}) before the limit", sample)
        self._dispatch()

    def _requeue(self, server: DrawingServer) -> None:
        for number in reversed([*server.drawings]):
            self._again(self._stop(number), f"{server.calls.name}: {server.problem}")

    def _again(self, drawing: Drawing, why: str, sample: Sample | None = None) -> None:
        """Puts a sample at the front of the queue, unless it is being taken back."""
        sample = drawing.known() if sample is None else sample
        if sample.id in self._withdrawn:
            self._back[sample.id] = sample
            return
        again = self._queued(sample)
        again.failures = 1 if len(sample.tokens) > len(drawing.sample.tokens) else drawing.failures + 1
        self.num_sent_again += 1
        if (error := self._wrong_end(drawing, again, why)) is not None:
            self.outbox.put(error)
        else:
            self._queue.appendleft(again)

    def _queued(self, sample: Sample) -> Drawing:
        assert self._sampling is not None
        return self._drawing(sample, response_limit(sample, self._sampling, self._max_context_tokens))

    def _stop(self, number: int, *, cancel: bool = True) -> Drawing:
        """Removes a sample from its server. Cancels its request if no other sample needs it."""
        task, server = self._running.pop(number)
        self._has_left.set()
        is_needed = any(other is task for other, _ in self._running.values()) if cancel else True
        if not is_needed and task is not asyncio.current_task():
            task.cancel()
        return server.drawings.pop(number)

    async def _withdraw(self, server: DrawingServer, numbers: Collection[int]) -> None:
        """Has a server end these requests and return their tokens. It may fail to answer."""
        mine = [drawing for number, drawing in server.drawings.items() if number in numbers]
        try:
            async with asyncio.timeout(self._withdraw_s):
                while left := [drawing.name for drawing in mine if server.holds(drawing)]:
                    if not await server.withdraw(left):
                        await server.confirm()
                        return
                    with suppress(TimeoutError):
                        async with asyncio.timeout(_ABORT_AGAIN_S):
                            await self._left(server, mine)
        except TimeoutError:
            self._not_back(server, f"they have not come back within {self._withdraw_s:g} s")
        except (ServerGone, ServerBusy, ServerRefuses) as problem:
            self._not_back(server, str(problem))

    async def _left(self, server: DrawingServer, drawings: Sequence[Drawing]) -> None:
        """Waits until these samples have left the server."""
        while any(map(server.holds, drawings)):
            self._has_left.clear()
            await self._has_left.wait()


# The half of the client in the engine's thread.


class RemoteEngine(Engine):
    """An engine on servers. `requests` is None on ranks that have none, and make the same calls."""

    def __init__(
        self,
        requests: Requests | None,
        max_running_requests: int,
        max_context_tokens: int,
        tokenizer: Tokenizer | None,
    ) -> None:
        self.policy_version: int | None = None
        self._requests = requests
        self._max_running_requests, self._max_context_tokens = max_running_requests, max_context_tokens
        self._tokenizer = tokenizer
        self._unfinished: dict[int, Sample] = {}
        self._sampling: SamplingParams | None = None
        self._done: list[Sample] = []
        """Finished samples for the next step. This list and the next are used on the rank with `requests`."""
        self._ended: dict[Sample, Sample] = {}
        """Samples that finished while they were suspended, by the shortened sample given back for each."""

    @property
    def num_unfinished(self) -> int:
        return len(self._unfinished)

    @property
    def num_free_slots(self) -> int:
        return max(0, self._num_slots - self.num_unfinished)

    @property
    def num_usable(self) -> int:
        """Number of samples to submit at most. Exceeds `num_free_slots` so that servers always have a few samples
        queued."""
        return max(0, self._num_slots + max(1, self._num_slots // START_FRACTION) - self.num_unfinished)

    @property
    def _num_slots(self) -> int:
        return self._max_running_requests

    def submit(self, samples: Sequence[Sample], sampling: SamplingParams) -> None:
        """Queues `samples`. Raises as `check_samples` and `stop_strings` do, equally on all ranks."""
        if not samples:
            return
        check_samples(
            samples,
            sampling,
            unfinished=self._unfinished,
            running=self._sampling,
            max_context_tokens=self._max_context_tokens,
        )
        stop_strings(sampling.stop, self._tokenizer)
        self._sampling = sampling
        self._unfinished |= {sample.id: sample for sample in samples}
        if self._requests is not None:
            self._done += [self._ended[sample] for sample in samples if sample in self._ended]
            new = [sample for sample in samples if self._ended.pop(sample, None) is None]
            self._wait(self._requests.submit(new, sampling, stop_cut(sampling.stop, self._tokenizer)))

    def step(self) -> list[Sample]:
        """Returns the samples finished since the last step. Waits for some milliseconds if there are none.

        Raises SyncError before the first weight sync, and between `begin_update` and `end_update`. Raises EngineError
        if samples cannot be generated, and DivergenceError as in `Engine.step`.
        """
        served_version(self.policy_version)
        return self._taken(self._finished) if self._unfinished else []

    def suspend(self) -> list[Sample]:
        """Takes back all unfinished samples in the order of submission, with their tokens so far.

        Raises SyncError if samples are unfinished between `begin_update` and `end_update`.
        """
        return self.withdraw([*self._unfinished])

    def withdraw(self, ids: Collection[int]) -> list[Sample]:
        """Takes back these samples, as `suspend` does."""
        order = [number for number in self._unfinished if number in ids]
        if not order:
            return []
        served_version(self.policy_version)
        return self._taken(lambda: self._taken_back(order))

    def progress(self, ids: Collection[int]) -> list[Sample]:
        """Returns these samples with their certain tokens if they are running. Empty on ranks without requests."""
        return [] if self._requests is None else self._wait(self._requests.progress(ids))

    def forget(self, ids: Collection[int]) -> None:
        """Does nothing, because servers evict the least recently used prefixes by themselves."""
        return

    @abstractmethod
    def _wait(self, work: Coroutine[Any, Any, T]) -> T:
        """Runs a coroutine in the event loop of `requests` and returns its result."""

    def _on_all(self, action: Callable[[], list[Sample]]) -> list[Sample]:
        """Calls `action` on the rank with `requests`. Returns its samples, or raises its error, on all ranks."""
        return action()

    def _taken(self, action: Callable[[], list[Sample]]) -> list[Sample]:
        """Returns the samples of `action`, which are no longer unfinished. After a divergence none are."""
        try:
            samples = self._on_all(action)
        except DivergenceError:
            self._unfinished = {}
            with suppress(EngineLost):  # a lost server has no requests
                self._on_all(self._dropped)
            raise
        for sample in samples:
            del self._unfinished[sample.id]
        return samples

    # Actions of the rank with `requests`.

    def _finished(self) -> list[Sample]:
        assert self._requests is not None
        self._requests.check()
        self._receive(0.0 if self._done else STEP_WAIT_S)
        done, self._done = self._done, []
        return done

    def _taken_back(self, order: Sequence[int]) -> list[Sample]:
        assert self._requests is not None
        back = self._wait(self._requests.take_back(order))
        self._receive(0.0)
        for sample in [sample for sample in self._done if sample.id in order]:
            # The caller may continue the sample on another engine, so one token must remain to be generated.
            shorter = sample.first(len(sample.tokens) - 1)
            self._ended[shorter] = sample
            self._done.remove(sample)
            back[sample.id] = shorter
        return [back[number] for number in order]

    def _dropped(self) -> list[Sample]:
        """Drops all samples, here and at the servers."""
        assert self._requests is not None
        self._wait(self._requests.take_back())
        self._requests.outbox = SimpleQueue()
        self._done = []
        return []

    def _receive(self, wait_s: float) -> None:
        """Moves finished samples from the outbox to `_done`. Waits up to `wait_s` for the first one."""
        assert self._requests is not None
        with suppress(Empty):
            while True:
                item = self._requests.outbox.get(wait_s > 0, wait_s)
                if isinstance(item, Exception):
                    raise item
                self._done.append(item)
                wait_s = 0.0
