"""Answers to requests while they are generated: whole, in pieces, and as server-sent events."""

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus
from os.path import commonprefix
from typing import Any

from starlette.responses import StreamingResponse

from rltrain.endpoint.opening import Opening, PlaceOfTurn, Reply, TokenText
from rltrain.endpoint.requests import RequestRefused
from rltrain.rollout.engine_feed import EngineBusy, EngineGone, EngineMailbox, PendingTurn
from rltrain.rollout.sample import Sample, Status

# The answer to a request, during and after generation. Its client may leave and come back.

logger = logging.getLogger(__name__)

FIRST_CLIENT_S = 5.0
"""Seconds for which a new answer waits for its client at least."""


class Choice:
    """One of the turns generated for a request. Its `mark` is unique."""

    def __init__(self, turn: PendingTurn, mark: str) -> None:
        self.turn, self.sample, self.mark = turn, turn.sample, mark
        self.start = len(turn.sample.tokens)
        """Number of response tokens before the turn."""

    @property
    def tokens(self) -> tuple[int, ...]:
        """Tokens generated in the turn so far."""
        return self.sample.tokens[self.start :]

    @property
    def logprobs(self) -> tuple[float, ...]:
        return self.sample.logprobs[self.start :]

    @property
    def policy_versions(self) -> tuple[int, ...]:
        return self.sample.policy_versions[self.start :]

    @property
    def context(self) -> tuple[int, ...]:
        """The model's input token ids."""
        return self.turn.sample.context

    @property
    def is_done(self) -> bool:
        return self.sample.is_finished

    def read(self, opening: Opening) -> Reply:
        """Returns the content of the turn so far."""
        return opening.read(self.tokens, self.turn.stop, self.mark)

    def standing(self, opening: Opening) -> str:
        """Returns the beginning of the text that further tokens cannot change."""
        return self.read(opening).text if self.is_done else opening.standing(self.tokens, self.turn.stop)


class Answer:
    """The turns generated for one request. Continues from the turn at `end`, or None. Its `mark` is unique.

    `settle` is called once. The flag is True when the answer is complete and its client is present, and False when the
    answer is given up. Without a client it continues for `repeat_within_s` seconds, so that the client may come back.
    """

    def __init__(
        self,
        opening: Opening,
        wanted: Sequence[PendingTurn],
        end: PlaceOfTurn | None,
        *,
        mark: str,
        settle: Callable[["Answer", bool], None],
        repeat_within_s: float,
    ) -> None:
        self.opening, self.end = opening, end
        self.choices = [Choice(turn, f"{mark}.{number}") for number, turn in enumerate(wanted)]
        self.error: RequestRefused | None = None
        self.is_settled = False
        self.is_followed = False
        """Whether a later turn continues this answer."""
        self._settle, self._repeat_within_s = settle, repeat_within_s
        self._num_clients = 0
        self._pulse = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._timer: asyncio.TimerHandle | None = None

    @property
    def is_whole(self) -> bool:
        """Whether all choices are complete."""
        return all(choice.is_done for choice in self.choices)

    @property
    def is_over(self) -> bool:
        """Whether the answer is complete or failed."""
        return self.is_whole or self.error is not None

    @property
    def is_orphaned(self) -> bool:
        """Whether the answer has no client and was never delivered."""
        return self._num_clients == 0 and not self.is_settled

    def start(self, turns: EngineMailbox) -> None:
        """Submits the turns."""
        self._tasks = [asyncio.ensure_future(self._draw(turns, choice)) for choice in self.choices]
        self._give_up_after(max(FIRST_CLIENT_S, self._repeat_within_s))

    @contextmanager
    def attached(self) -> Iterator[None]:
        """Marks a client as present inside the context."""
        self._num_clients += 1
        if self._timer is not None:
            self._timer.cancel()
        self._settle_if_whole()
        try:
            yield
        finally:
            self._num_clients -= 1
            if self.is_orphaned:
                self._give_up_after(self._repeat_within_s)

    async def changes(self) -> AsyncIterator[None]:
        """Yields at once, after every change, and last at the end. Raises RequestRefused if the answer failed."""
        while True:
            pulse, is_over = self._pulse, self.is_over
            if self.error is not None:
                raise self.error
            yield
            if is_over:
                return
            await pulse.wait()

    async def whole(self) -> None:
        """Waits until the answer is complete. Raises RequestRefused if it failed."""
        async for _ in self.changes():
            pass

    def give_up(self, reason: str = "the request was given up") -> None:
        """Cancels the remaining generation."""
        for task in self._tasks:
            task.cancel()
        if not self.is_settled:
            self.is_settled = True
            self.error = self.error or RequestRefused(HTTPStatus.GONE, reason, code="given_up")
            self._settle(self, False)
        self._change()

    async def _draw(self, turns: EngineMailbox, choice: Choice) -> None:
        try:
            choice.sample = await turns.draw(choice.turn, partial(self._progress, choice))
        except EngineGone as gone:
            self._fail(RequestRefused(HTTPStatus.SERVICE_UNAVAILABLE, f"the engine has stopped: {gone}", code="gone"))
        except EngineBusy as busy:
            self._fail(RequestRefused(HTTPStatus.TOO_MANY_REQUESTS, str(busy), code="busy"))
        except Exception as error:  # noqa: BLE001 - the refusal's message goes to the client
            self._fail(RequestRefused(HTTPStatus.BAD_REQUEST, f"the engine refuses this request: {error}"))
        else:
            if choice.sample.status == Status.FAILED:
                said = "the model's log-probs are not finite for this request, so no token can be sampled"
                self._fail(RequestRefused(HTTPStatus.INTERNAL_SERVER_ERROR, said, code="not_finite"))
            else:
                self._drawn()

    def _drawn(self) -> None:
        try:
            self._settle_if_whole()
        except Exception:
            logger.exception("the tokens generated for a request could not be read")
            self.error = RequestRefused(HTTPStatus.INTERNAL_SERVER_ERROR, "an error of the server; see its log")
        self._change()

    def _progress(self, choice: Choice, sample: Sample) -> None:
        if not choice.is_done:
            choice.sample = sample
            self._change()

    def _fail(self, error: RequestRefused) -> None:
        if self.error is None:
            self.error = error
            self.give_up()

    def _settle_if_whole(self) -> None:
        if self.is_whole and not self.is_settled and self._num_clients:
            self.is_settled = True
            self._settle(self, True)

    def _give_up_after(self, seconds: float) -> None:
        self._timer = asyncio.get_running_loop().call_later(seconds, self._give_up_if_orphaned)

    def _give_up_if_orphaned(self) -> None:
        if self.is_orphaned:
            self.give_up()

    def _change(self) -> None:
        pulse, self._pulse = self._pulse, asyncio.Event()
        pulse.set()


# Pieces of text of a running turn, and log-probs in OpenAI's form.


class Deltas:
    """The growing text of one choice. Returned pieces are never taken back, and together they are the whole text."""

    def __init__(self, answer: Answer, choice: Choice) -> None:
        self._answer, self._choice = answer, choice
        self._sent = ""
        self._num_tokens = 0
        self._num_tokens_told = 0

    def text(self) -> str:
        """Returns the text added since the last call.

        A tokenizer may change the text of earlier tokens when a new one follows. In that case nothing is returned until
        the turn is done, and then only the text after the first difference.
        """
        if not self._choice.is_done and len(self._choice.tokens) == self._num_tokens:
            return ""
        self._num_tokens = len(self._choice.tokens)
        whole = self._choice.standing(self._answer.opening)
        if not whole.startswith(self._sent) and not self._choice.is_done:
            return ""
        new = whole[len(commonprefix([whole, self._sent])) :]
        self._sent += new
        return new

    def reply(self) -> Reply:
        """Returns the content of the turn so far."""
        return self._choice.read(self._answer.opening)

    def new_tokens(self) -> slice:
        """Returns the range of the turn's tokens added since the last call."""
        start, self._num_tokens_told = self._num_tokens_told, len(self._choice.tokens)
        return slice(start, self._num_tokens_told)


@dataclass(frozen=True)
class Piece:
    """Text added to choice number `index` of an answer. It may be empty in the last piece."""

    index: int
    choice: Choice
    deltas: Deltas
    text: str
    is_last: bool


async def pieces(answer: Answer) -> AsyncIterator[Piece]:
    """Yields the pieces of all choices of an answer during generation."""
    going_on = {index: (choice, Deltas(answer, choice)) for index, choice in enumerate(answer.choices)}
    async for _ in answer.changes():
        for index, (choice, deltas) in [*going_on.items()]:
            text, is_last = deltas.text(), choice.is_done
            if is_last:
                del going_on[index]
            if text or is_last:
                yield Piece(index, choice, deltas, text, is_last)


def finish_reason(choice: Choice, reply: Reply) -> str:
    """Returns OpenAI's word for the end of the turn."""
    if choice.sample.status.name == "TRUNCATED":
        return "length"
    return "tool_calls" if reply.tool_calls else "stop"


def token_logprobs(choice: Choice, which: slice, tokens: TokenText) -> list[dict[str, Any]]:
    """Returns the log-probs of a range of the turn's tokens. Alternatives to these tokens are not known."""
    items = []
    for token, logprob in zip(choice.tokens[which], choice.logprobs[which], strict=True):
        text = tokens.spelling(token)
        items.append({"token": text, "logprob": logprob, "bytes": list(text.encode()), "top_logprobs": []})
    return items


# Server-sent events.

Event = Mapping[str, Any] | str
"""A JSON object or plain text. Named streams send an object under its `type`."""


def event_stream(
    answer: Answer,
    events: AsyncIterator[Event],
    error_of: Callable[[RequestRefused], Mapping[str, Any]],
    *,
    named: bool = False,
) -> StreamingResponse:
    """Returns a response that streams `events`. `error_of` makes the last event if the answer fails.

    The client counts as present while it reads the stream.
    """

    async def lines() -> AsyncIterator[str]:
        with answer.attached():
            try:
                async with aclosing(events) as opened:  # type: ignore[type-var]
                    async for event in opened:
                        yield _line(event, named)
            except RequestRefused as refused:
                yield _line(error_of(refused), named)

    return StreamingResponse(lines(), media_type="text/event-stream", headers={"Cache-Control": "no-cache"})


def _line(event: Event, named: bool) -> str:
    data = event if isinstance(event, str) else json.dumps(event, ensure_ascii=False)
    name = f"event: {event['type']}\n" if named and not isinstance(event, str) else ""
    return f"{name}data: {data}\n\n"
