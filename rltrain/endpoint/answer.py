"""Answers to requests while they are drawn: whole, in pieces, and as server-sent events."""

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager
from functools import partial
from http import HTTPStatus
from os.path import commonprefix
from typing import Any

from starlette.responses import StreamingResponse

from rltrain.endpoint.engine_feed import EngineBusy, EngineGone, EngineMailbox
from rltrain.endpoint.opening import Opening, PlaceOfTurn, Reply, TokenText
from rltrain.endpoint.requests import RequestRefused
from rltrain.rollout.groups import PendingTurn
from rltrain.rollout.sample import Sample, Status

# What a request is answered with, while it is drawn and after that; also where its client goes, or asks again.

logger = logging.getLogger(__name__)

FIRST_CLIENT_S = 5.0
"""A client is there at the beginning; its answer waits no longer for it."""


class Choice:
    """One of the turns that are drawn for a request. No other turn has its `mark`."""

    def __init__(self, turn: PendingTurn, mark: str) -> None:
        self.turn, self.sample, self.mark = turn, turn.sample, mark
        self.start = len(turn.sample.tokens)
        """Response tokens before the turn."""

    @property
    def tokens(self) -> tuple[int, ...]:
        """Drawn in the turn, so far."""
        return self.sample.tokens[self.start :]

    @property
    def logprobs(self) -> tuple[float, ...]:
        return self.sample.logprobs[self.start :]

    @property
    def policy_versions(self) -> tuple[int, ...]:
        return self.sample.policy_versions[self.start :]

    @property
    def context(self) -> tuple[int, ...]:
        """Ids that the model was given."""
        return self.turn.sample.context

    @property
    def is_done(self) -> bool:
        return self.sample.is_finished

    def read(self, opening: Opening) -> Reply:
        """What it says so far."""
        return opening.read(self.tokens, self.turn.stop, self.mark)

    def standing(self, opening: Opening) -> str:
        """Returns the text of it that stays, whatever is drawn next."""
        return self.read(opening).text if self.is_done else opening.standing(self.tokens, self.turn.stop)


class Answer:
    """`settle` is called once: with True when the answer is whole and has a client that is there, with False when it is
    given up. Without a client it is drawn on for `repeat_within_s`, so that one may come back for it.

    `end` is the turn that it goes on from. No other answer has its `mark`.
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
        """Whether a later turn goes on from it."""
        self._settle, self._repeat_within_s = settle, repeat_within_s
        self._num_clients = 0
        self._pulse = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._timer: asyncio.TimerHandle | None = None

    @property
    def is_whole(self) -> bool:
        return all(choice.is_done for choice in self.choices)

    @property
    def is_over(self) -> bool:
        """Nothing more will come."""
        return self.is_whole or self.error is not None

    @property
    def is_orphaned(self) -> bool:
        """Nobody is there to take it, and nobody has had it."""
        return self._num_clients == 0 and not self.is_settled

    def start(self, turns: EngineMailbox) -> None:
        """Have it drawn."""
        self._tasks = [asyncio.ensure_future(self._draw(turns, choice)) for choice in self.choices]
        self._give_up_after(max(FIRST_CLIENT_S, self._repeat_within_s))

    @contextmanager
    def attached(self) -> Iterator[None]:
        """A client is there."""
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
        """Now, whenever there is more, and last when it is over. Raises Refused where it could not be drawn."""
        while True:
            pulse, is_over = self._pulse, self.is_over
            if self.error is not None:
                raise self.error
            yield
            if is_over:
                return
            await pulse.wait()

    async def whole(self) -> None:
        """When it is. Raises Refused where it could not be drawn."""
        async for _ in self.changes():
            pass

    def give_up(self, reason: str = "the request was given up") -> None:
        """Have nothing more drawn for it."""
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
            self._fail(RequestRefused(HTTPStatus.SERVICE_UNAVAILABLE, f"no engine draws any more: {gone}", code="gone"))
        except EngineBusy as busy:
            self._fail(RequestRefused(HTTPStatus.TOO_MANY_REQUESTS, str(busy), code="busy"))
        except Exception as error:  # noqa: BLE001 - the engine refused it: its client is told why
            self._fail(RequestRefused(HTTPStatus.BAD_REQUEST, f"the engine refuses this request: {error}"))
        else:
            if choice.sample.status == Status.FAILED:
                said = "the model's log-probs are not finite for this request: nothing can be drawn"
                self._fail(RequestRefused(HTTPStatus.INTERNAL_SERVER_ERROR, said, code="not_finite"))
            else:
                self._drawn()

    def _drawn(self) -> None:
        try:
            self._settle_if_whole()
        except Exception:
            logger.exception("what was drawn for a request could not be read")
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


# A turn in pieces of text as it is drawn; and its log-probs in OpenAI's form.


class Deltas:
    """Of one choice. What is given out is never taken back: together it is the text of the whole."""

    def __init__(self, answer: Answer, choice: Choice) -> None:
        self._answer, self._choice = answer, choice
        self._sent = ""
        self._num_tokens = 0
        self._num_tokens_told = 0

    def text(self) -> str:
        """Returns what has been added since the last call.

        A tokenizer may change text of tokens before, where a new one follows. Then nothing is given until the turn is
        done, and then what follows the place where the text changed.
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
        return self._choice.read(self._answer.opening)

    def new_tokens(self) -> slice:
        """Which of the turn's tokens have come since the last call."""
        start, self._num_tokens_told = self._num_tokens_told, len(self._choice.tokens)
        return slice(start, self._num_tokens_told)


def finish_reason(choice: Choice, reply: Reply) -> str:
    """OpenAI's word for how the turn ended."""
    if choice.sample.status.name == "TRUNCATED":
        return "length"
    return "tool_calls" if reply.tool_calls else "stop"


def token_logprobs(choice: Choice, which: slice, tokens: TokenText) -> list[dict[str, Any]]:
    """Of some of a turn's tokens; those that might have been drawn instead are not known."""
    items = []
    for token, logprob in zip(choice.tokens[which], choice.logprobs[which], strict=True):
        text = tokens.spelling(token)
        items.append({"token": text, "logprob": logprob, "bytes": list(text.encode()), "top_logprobs": []})
    return items


# Answers in pieces, as server-sent events.

Event = Mapping[str, Any] | str
"""JSON, or a text as it is. One with a `type` that `named` streams is sent under that name."""


def event_stream(
    answer: Answer,
    events: AsyncIterator[Event],
    error_of: Callable[[RequestRefused], Mapping[str, Any]],
    *,
    named: bool = False,
) -> StreamingResponse:
    """`events` are made while the answer is drawn; where it cannot be, `error_of` is the last one. The client is there
    as long as it reads."""

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
