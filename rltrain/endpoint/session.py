"""Sessions of the endpoint: an episode's requests and trajectories, and the access to them."""

import asyncio
import hashlib
import hmac
import itertools
import secrets
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from http import HTTPStatus

from rltrain.data.images import Context
from rltrain.endpoint.answer import Answer
from rltrain.endpoint.opening import History, Opening, PlaceOfTurn, RecordedSession, SampleIds, SessionTrajectory
from rltrain.endpoint.request_images import RequestImages
from rltrain.endpoint.requests import RequestLimits, RequestRefused, invalid
from rltrain.errors import DataError, one_of
from rltrain.rewards.answers import EXPECTED_REWARD, is_reward
from rltrain.rollout.engine import SamplingParams
from rltrain.rollout.engine_feed import EngineMailbox, PendingTurn
from rltrain.rollout.sample import Sample, Status, request_seed

# One session: requests of one client that continue each other.

REMEMBERED_ANSWERS = 128
"""Most answers that a session keeps for repeated requests."""


@dataclass(frozen=True)
class Asked:
    """The settings of a request for its turns."""

    sampling: SamplingParams
    num_choices: int = 1
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    seed: int | None = None
    is_watched: bool = False


@dataclass(frozen=True)
class Repetition:
    """The marks by which a repeated request is recognized.

    `digest` is a hash of its path and body. `key` is the client's Idempotency-Key, or None. `is_said` means that the
    client declares the request a repetition.
    """

    digest: bytes
    key: str | None = None
    is_said: bool = False


class Session:
    """An episode, from the endpoint's point of view. Belongs to the server's event loop.

    `metadata` comes from the client that opened the session. `seed` determines the tokens of requests without a seed. A
    session with `is_recorded` False serves one request only. `images` keeps the images of requests.
    """

    def __init__(
        self,
        number: str,
        turns: EngineMailbox,
        limits: RequestLimits,
        ids: SampleIds,
        *,
        seed: int,
        metadata: object = None,
        is_recorded: bool = True,
        images: RequestImages | None = None,
    ) -> None:
        self.id, self.metadata, self.is_recorded = number, metadata, is_recorded
        self.trajectories: dict[int, SessionTrajectory] = {}
        self.reward: float | None = None
        self.ended_by: str | None = None
        self.responses: dict[str, Answer] = {}
        """Answers by their ids in the Responses API."""
        self._turns, self._limits, self._ids, self._seed = turns, limits, ids, seed
        self._images = images
        self._history = History()
        self._claims: dict[int, Answer] = {}
        """The answer that is generating the next turn of a trajectory, by the trajectory's id."""
        self._open: set[Answer] = set()
        """Answers that are not settled yet."""
        self._answers: OrderedDict[bytes, Answer] = OrderedDict()
        self._keys: dict[str, bytes] = {}
        self._numbers = itertools.count()
        """Numbers for the marks of answers."""
        self._num_turns = 0
        self._num_drawn_tokens = 0

    async def keep_images(self, opening: Opening) -> None:
        """Waits until the images of a prompt are decoded, before its turns are started. Raises RequestRefused."""
        if self._images is None or not opening.sources or self.ended_by is not None:
            return
        try:
            await self._images.keep(self.id, opening.sources)
        except DataError as error:
            raise invalid(f"messages: {error}", "messages") from error

    def drop_images(self) -> None:
        """Ends the use of the images of a request without a recorded session."""
        if self._images is not None and not self.is_recorded:
            self._images.forget(self.id)

    def answer(self, opening: Opening, asked: Asked, repetition: Repetition | None = None) -> Answer:
        """Starts the turns of a request and returns their answer.

        The turns continue an earlier turn of the session if `opening` contains one, else start a trajectory. A repeated
        request gets its earlier answer. Raises RequestRefused.
        """
        if self.ended_by is not None:
            raise RequestRefused(HTTPStatus.GONE, f"this session has ended: {self.ended_by}", code="session_ended")
        if repetition is not None and (known := self._repeated(repetition)) is not None:
            return known
        self._check_budget(asked)
        end, context = opening.begin(self._history)
        self._refuse_unknown_ids(context)
        answer = Answer(
            opening,
            self._wanted(end, context, asked),
            end,
            mark=f"{self._seed}.{next(self._numbers)}",
            settle=self._settle,
            repeat_within_s=self._limits.repeat_within_s if self.is_recorded else 0.0,
        )
        if end is not None and answer.choices[0].sample.id == end.trajectory.id:
            self._claims[end.trajectory.id] = answer
        self._open.add(answer)
        if repetition is not None:
            self._remember(answer, repetition)
        answer.start(self._turns)
        return answer

    @property
    def num_abandoned(self) -> int:
        """Number of answers still being generated after their clients have left. These clients may come back."""
        return sum(answer.is_orphaned for answer in self._open)

    def is_drawing(self, repetition: Repetition) -> bool:
        """Returns whether an equal request is being answered."""
        known = self._answers.get(repetition.digest)
        return known is not None and not known.is_settled

    def set_reward(self, reward: float, *, trajectory: int | None = None, turn: int | None = None) -> None:
        """Sets the reward of the episode, or of one turn if `trajectory` or `turn` is given.

        Turn -1, the default, is the last one. The default trajectory is the newest one. A second call replaces the
        reward. Raises RequestRefused.
        """
        if not is_reward(reward):
            raise invalid(f"reward: got {reward}; {EXPECTED_REWARD}", "reward")
        if turn is None and trajectory is None:
            self.reward = reward
            return
        found = self.trajectories.get(trajectory if trajectory is not None else max(self.trajectories, default=-1))
        if found is None:
            raise invalid(
                f"trajectory: got {trajectory}; expected {one_of(trajectory, self.trajectories)}", "trajectory"
            )
        num_turns, place = len(found.sample.turns), -1 if turn is None else turn
        if not -num_turns <= place < num_turns:
            raise invalid(f"turn: got {place}; trajectory {found.id} has {num_turns} turns", "turn")
        found.rewards[place % num_turns] = reward

    def end(self, by: str, status: Status | None = None) -> RecordedSession:
        """Ends the session for the reason `by`, stops its turns, and returns its record.

        `status` replaces the status of every trajectory's last turn.
        """
        if self.ended_by is None:
            self.ended_by = by
            for answer in [*self._open]:
                answer.give_up(f"this session has ended: {by}")
            self._turns.forget([*self.trajectories])
        return self.record(status)

    def record(self, status: Status | None = None) -> RecordedSession:
        """Returns the record of the session so far."""
        recorded = tuple(trajectory.finished(status) for trajectory in self.trajectories.values())
        return RecordedSession(self.id, self.metadata, recorded, self.reward, self.ended_by or "")

    def _check_budget(self, asked: Asked) -> None:
        limits = self._limits
        if asked.num_choices > limits.max_choices:
            raise invalid(f"n: got {asked.num_choices}; expected at most {limits.max_choices}", "n")
        if self._num_turns >= limits.max_session_turns:
            raise RequestRefused(
                HTTPStatus.TOO_MANY_REQUESTS,
                f"this session has reached its limit of {limits.max_session_turns} turns",
                code="turns",
            )
        if self._num_drawn_tokens >= limits.max_session_tokens:
            raise RequestRefused(
                HTTPStatus.TOO_MANY_REQUESTS,
                f"this session has reached its limit of {limits.max_session_tokens} generated tokens",
                code="tokens",
            )

    def _refuse_unknown_ids(self, context: Context) -> None:
        vocab_size = self._limits.vocab_size
        unknown = next((token for token in context.ids if not 0 <= token < vocab_size), None)
        if unknown is not None:
            raise invalid(
                f"prompt: got the token id {unknown}, given directly or encoded from a text; expected ids from 0 to "
                f"{vocab_size - 1}, the rows of the model's embedding",
                "prompt",
            )
        if self._images is not None and not context.images and self._images.rules.image_token in context.ids:
            raise invalid(
                "prompt: got the placeholder of images without an image; expected a chat with images in its messages",
                "prompt",
            )

    def _wanted(self, end: PlaceOfTurn | None, context: Context, asked: Asked) -> list[PendingTurn]:
        """Returns one pending turn per choice."""
        limit = self._turn_limit(end, len(context.ids), asked)
        wanted = []
        for choice in range(asked.num_choices):
            continues = end is not None and choice == 0 and self._may_extend(end)
            number = end.trajectory.id if end is not None and continues else self._ids.take()
            seed = self._seed_of(number, asked, choice)
            if end is None:
                sample = Sample(number, context.ids, seed, turn_limit=limit, images=context.images)
            else:
                before = end.sample()
                seed = before.seed if continues and asked.seed is None else seed
                observed = before.observed(context.ids, context.images, turn_limit=limit)
                sample = replace(observed, id=number, seed=seed)
            sample = replace(sample, goes_on=self.is_recorded)
            wanted.append(PendingTurn(sample, asked.sampling, asked.stop, asked.is_watched))
        return wanted

    def _turn_limit(self, end: PlaceOfTurn | None, num_tokens: int, asked: Asked) -> int:
        """Returns the most response tokens that the trajectory may have at the end of the turn."""
        prompt = num_tokens if end is None else len(end.trajectory.sample.prompt)
        before = 0 if end is None else end.num_tokens + num_tokens
        room = self._limits.max_context_tokens - prompt - before
        if prompt == 0:
            raise invalid("the prompt is empty; expected at least one token", code="empty_prompt")
        if room < 1:
            raise invalid(
                f"this conversation has {prompt + before} tokens; the model's context has room for "
                f"{self._limits.max_context_tokens}, the response included",
                code="context_length_exceeded",
            )
        left = asked.sampling.max_response_tokens - before
        if left < 1:
            raise invalid(
                f"this conversation has {before} tokens after its prompt, and the run allows "
                f"{asked.sampling.max_response_tokens} (rollout.sampling.max_response_tokens)",
                code="context_length_exceeded",
            )
        budget = self._limits.max_session_tokens - self._num_drawn_tokens
        return before + min(room, left, budget, asked.max_tokens or room)

    def _may_extend(self, end: PlaceOfTurn) -> bool:
        """Returns whether the turn continues its trajectory. Otherwise it starts a branch."""
        if not end.is_tip:
            return False
        claim = self._claims.get(end.trajectory.id)
        if claim is not None and claim.is_orphaned:  # its client continues without it
            claim.give_up()
            claim = None
        return claim is None

    def _seed_of(self, number: int, asked: Asked, choice: int) -> int:
        if asked.seed is not None:
            return request_seed(asked.seed, 0, 0, choice)
        return request_seed(self._seed, 0, 0, number)

    def _settle(self, answer: Answer, is_taken: bool) -> None:
        self._open.discard(answer)
        self.drop_images()
        for number in [number for number, claim in self._claims.items() if claim is answer]:
            del self._claims[number]
        if is_taken and self.ended_by is None:
            for choice in answer.choices:
                self._keep(answer, choice.sample)
        elif not is_taken:
            for digest in [digest for digest, known in self._answers.items() if known is answer]:
                del self._answers[digest]

    def _keep(self, answer: Answer, sample: Sample) -> None:
        """Adds a finished turn to its trajectory, once its client has received it."""
        start, end = len(answer.choices[0].turn.sample.tokens), answer.end
        self._num_turns += 1
        self._num_drawn_tokens += len(sample.tokens) - start
        trajectory = self.trajectories.get(sample.id)
        if trajectory is not None:
            trajectory.sample = sample
        else:
            parent = (None, 0) if end is None else (end.trajectory.id, end.num_tokens)
            trajectory = self.trajectories[sample.id] = SessionTrajectory(sample, *parent)
        if end is not None:
            self._follow(end)
        place = PlaceOfTurn(trajectory, len(sample.turns) - 1)
        choice = next(choice for choice in answer.choices if choice.sample is sample)
        answer.opening.remember(self._history, place, choice.read(answer.opening))

    def _follow(self, end: PlaceOfTurn) -> None:
        for known in self._answers.values():
            for choice in known.choices:
                is_before = len(choice.sample.tokens) <= end.num_tokens
                known.is_followed |= is_before and choice.sample.id == end.trajectory.id

    def _repeated(self, repetition: Repetition) -> Answer | None:
        """Returns the known answer if the request is a repetition, else None."""
        digest = repetition.digest
        if repetition.key is not None and (named := self._keys.get(repetition.key)) is not None:
            if named != digest:
                raise invalid("Idempotency-Key: a different request had the same key", code="idempotency_key")
            return self._answers.get(digest)
        known = self._answers.get(digest)
        if known is None or known.is_followed or (repetition.key is not None and not repetition.is_said):
            return None
        return known if repetition.is_said or known.is_orphaned else None

    def _remember(self, answer: Answer, repetition: Repetition) -> None:
        self._answers[repetition.digest] = answer
        self._answers.move_to_end(repetition.digest)
        if repetition.key is not None:
            self._keys[repetition.key] = repetition.digest
        while len(self._answers) > REMEMBERED_ANSWERS:
            gone, _ = self._answers.popitem(last=False)
            self._keys = {key: digest for key, digest in self._keys.items() if digest != gone}


def summary(session: RecordedSession) -> Mapping[str, object]:
    """Returns a session as a JSON object."""
    return {
        "id": session.id,
        "reward": session.reward,
        "ended_by": session.ended_by or None,
        "metadata": session.metadata,
        "samples": [
            {
                "id": recorded.sample.id,
                "parent": recorded.parent,
                "shared_tokens": recorded.num_shared_tokens,
                "prompt": recorded.sample.prompt,
                "tokens": recorded.sample.tokens,
                "images": [{"begin": image.begin, "grid": image.grid} for image in recorded.sample.images],
                "loss_mask": recorded.sample.loss_mask,
                "logprobs": recorded.sample.logprobs,
                "policy_versions": recorded.sample.policy_versions,
                "turns": recorded.sample.turns,
                "turn_rewards": recorded.sample.turn_rewards,
                "status": recorded.sample.status.name.lower(),
            }
            for recorded in session.trajectories
        ],
    }


# All sessions of an endpoint, and the access to them.


@dataclass(frozen=True)
class Opened:
    """The id and token of a new session. The server keeps only a hash of the token."""

    id: str
    token: str


class Sessions:
    """All sessions of an endpoint. Belongs to the server's event loop.

    `token` opens sessions and gives access to all of them. With None every client has this access. `on_end` is called
    once for every recorded session.
    """

    def __init__(
        self,
        turns: EngineMailbox,
        limits: RequestLimits,
        *,
        token: str | None,
        seed: int = 0,
        first_sample_id: int = 0,
        on_end: Callable[[RecordedSession], None] = lambda _: None,
        images: RequestImages | None = None,
    ) -> None:
        self._turns, self._limits, self._seed, self._on_end = turns, limits, seed, on_end
        self._images = images
        self._token_digest = None if token is None else _digest(token)
        self._ids = SampleIds(first_sample_id)
        self._open: dict[str, Session] = {}
        self._by_token: dict[bytes, tuple[bytes, Session]] = {}
        """Sessions by the hash of their token. The time of a look-up does not depend on a correct beginning of the
        token."""
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._num_opened = 0

    def __len__(self) -> int:
        return len(self._open)

    def open(self, metadata: object = None, seed: int | None = None) -> Opened:
        """Opens a session. Raises RequestRefused if `max_sessions` are open."""
        if len(self._open) >= self._limits.max_sessions:
            raise RequestRefused(
                HTTPStatus.TOO_MANY_REQUESTS, f"{self._limits.max_sessions} sessions are open", code="busy"
            )
        opened = Opened("session_" + secrets.token_hex(8), "sk-" + secrets.token_urlsafe(32))
        session = self._new(opened.id, metadata, seed, is_recorded=True)
        self._open[opened.id] = session
        digest = _digest(opened.token)
        self._by_token[digest] = digest, session
        loop = asyncio.get_running_loop()
        self._timers[opened.id] = loop.call_later(self._limits.session_timeout_s, self._expire, opened.id)
        return opened

    def passing(self) -> Session:
        """Returns a session for a single request of a client without a session."""
        return self._new(f"request_{self._num_opened}", None, None, is_recorded=False)

    def is_owner(self, credential: str | None) -> bool:
        """Returns whether the credential may open sessions."""
        if self._token_digest is None:
            return True
        return credential is not None and hmac.compare_digest(_digest(credential), self._token_digest)

    def of_token(self, credential: str | None) -> Session | None:
        """Returns the open session with this token, or None."""
        if credential is None:
            return None
        digest = _digest(credential)
        known, session = self._by_token.get(digest, (b"", None))
        return session if hmac.compare_digest(known, digest) else None

    def of_id(self, number: str, credential: str | None) -> Session:
        """Returns the open session with this id. Raises RequestRefused if there is none or the credential has no
        access."""
        session = self._open.get(number)
        if session is not None and (self.is_owner(credential) or self.of_token(credential) is session):
            return session
        if self.is_owner(credential):
            raise RequestRefused(HTTPStatus.NOT_FOUND, f"there is no open session {number!r}", code="session_not_found")
        raise RequestRefused(HTTPStatus.UNAUTHORIZED, "the token is not this session's", code="invalid_api_key")

    def end(self, session: Session, by: str, status: Status | None = None) -> RecordedSession:
        """Ends the session and returns its record. Raises RequestRefused if it has already ended."""
        if self._open.pop(session.id, None) is None:
            raise RequestRefused(HTTPStatus.GONE, f"this session has ended: {session.ended_by}", code="session_ended")
        self._by_token = {digest: known for digest, known in self._by_token.items() if known[1] is not session}
        self._timers.pop(session.id).cancel()
        recorded = session.end(by, status)
        self._on_end(recorded)
        return recorded

    def end_all(self, by: str) -> None:
        """Ends all open sessions as aborted."""
        for session in [*self._open.values()]:
            self.end(session, by, Status.ABORTED)

    def find(self, number: str) -> Session | None:
        """Returns the open session with this id, or None."""
        return self._open.get(number)

    def _new(self, number: str, metadata: object, seed: int | None, *, is_recorded: bool) -> Session:
        own = request_seed(self._seed, 0, 0, self._num_opened) if seed is None else seed
        self._num_opened += 1
        return Session(
            number,
            self._turns,
            self._limits,
            self._ids,
            seed=own,
            metadata=metadata,
            is_recorded=is_recorded,
            images=self._images,
        )

    def _expire(self, number: str) -> None:
        if (session := self._open.get(number)) is not None:
            self.end(session, f"its time limit of {self._limits.session_timeout_s:g} s has passed", Status.ABORTED)


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode(errors="surrogatepass")).digest()
