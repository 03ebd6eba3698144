"""The time between two turns of a conversation: its environment answers, and its sample continues or ends."""

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from operator import index
from typing import Protocol

from rltrain.data.chat_format import ChatFormat
from rltrain.data.experience import SIBLINGS_APART
from rltrain.data.image_parts import IMAGE, kind_of
from rltrain.data.images import Context
from rltrain.data.tokenizer import PromptEncoder
from rltrain.environments.batch import EpisodeEvent, EpisodeFailure
from rltrain.environments.engine_service import RemoteEnvironments
from rltrain.environments.interface import Action, Message, Row, TokenIds, Trajectory
from rltrain.environments.statistics import EpisodeStatistics, metrics
from rltrain.errors import DataError, EpisodeError
from rltrain.models.vision import PlacedImage
from rltrain.rollout.sample import Sample, SampleGroup, Status, mix64

# Answers to waiting samples, as known to all ranks of an engine.

CURRENT_VERSION = -1
"""Placeholder for a policy version. The engine replaces it by its version when it receives the token."""


class Unusable(Exception):  # noqa: N818 - a finding that fails one episode
    """Raised with a reason if nothing of an episode can be generated or trained on."""


@dataclass(frozen=True)
class Observed:
    """The answer to a waiting sample, at its beginning or after a turn. Equal on all ranks of its engine."""

    id: int
    status: Status = Status.PENDING
    """The new status of the sample. A pending sample returns to the engine."""
    tokens: tuple[int, ...] = ()
    """Tokens to append before the next turn. At the beginning this is the prompt; if empty, the sample keeps its
    prompt."""
    images: tuple[PlacedImage, ...] = ()
    """Images of `tokens`. Their places are relative to the first of them."""
    reward: float = 0.0
    """Reward of the finished turn."""
    branches: bool = False
    """Whether `tokens` are the whole context of another trajectory, which continues the episode."""
    max_turn_tokens: int | None = None
    """Token limit of the next turn. None: the limit of the run."""
    trajectories: tuple[Sample, ...] = ()
    """Final trajectories of an ended episode. They replace the generated samples."""

    def applied_to(self, sample: Sample, max_turn_tokens: int | None) -> tuple[Sample, ...]:
        """Returns the updated sample, followed by new trajectories of its episode. `max_turn_tokens` is the run's
        limit."""
        most = max_turn_tokens if self.max_turn_tokens is None else self.max_turn_tokens
        if self.trajectories:
            return self.trajectories
        if self.branches:
            return self._branched(sample, most)
        if not sample.turns:
            goes_on = self.status == Status.PENDING
            if self.tokens:
                sample = replace(sample, prompt=self.tokens, images=self.images)
            return (replace(sample, status=self.status, turn_limit=most, goes_on=goes_on),)
        rewards = (*sample.turn_rewards, self.reward)
        if self.status != Status.PENDING:
            return (replace(sample, status=self.status, turn_rewards=rewards, turn_limit=None, goes_on=False),)
        limit = None if most is None else len(sample.tokens) + len(self.tokens) + most
        return (replace(sample.observed(self.tokens, self.images, turn_limit=limit), turn_rewards=rewards),)

    def _branched(self, sample: Sample, max_turn_tokens: int | None) -> tuple[Sample, ...]:
        """Returns the episode's new trajectory and the closed one.

        The new one keeps the sample's id, because the engine knows that id. The closed one gets another id. Their
        common tokens are trained on only in the closed one.
        """
        before = sample.parent or sample.id
        closed = replace(
            sample,
            id=before + SIBLINGS_APART,
            status=Status.STOPPED,
            turn_rewards=(*sample.turn_rewards, self.reward),
            turn_limit=None,
            goes_on=False,
        )
        seed = mix64(sample.seed + closed.id) >> 1
        new = Sample(
            sample.id,
            self.tokens,
            seed,
            turn_limit=max_turn_tokens,
            goes_on=True,
            parent=closed.id,
            images=self.images,
        )
        return new, closed


def with_shared_reward(trajectories: Sequence[Sample], besides: float = 0.0) -> list[Sample]:
    """Returns the trajectories of an ended episode with the reward of the whole episode: all its turns plus `besides`.

    The last turn of each trajectory gets the difference to the rewards of its turns.
    """
    total = besides + sum(sum(sample.turn_rewards) for sample in trajectories)
    return [_worth(sample, total) if sample.turns else sample for sample in trajectories]


def _worth(sample: Sample, total: float) -> Sample:
    rewards = [*sample.turn_rewards, *[0.0] * (len(sample.turns) - len(sample.turn_rewards))]
    rewards[-1] += total - sum(rewards)
    return replace(sample, turn_rewards=tuple(rewards))


class Episodes:
    """Episodes of one engine's samples.

    The engine's first rank has `EnvironmentEpisodes`. The other ranks follow its answers. By themselves they only know
    the episodes in `going_on`, restored from a checkpoint.
    """

    def __init__(self, going_on: Collection[int]) -> None:
        self.going_on = going_on

    def begin(self, group: SampleGroup, samples: Sequence[Sample]) -> None:
        """Begins one episode for each of these samples of the group. The samples then wait for the beginning."""

    def goes_on(self, sample: Sample) -> bool:
        """Returns whether the checkpoint that restored the sample also restored its episode. Known on all ranks."""
        return sample.id in self.going_on

    def resume(self, sample: Sample) -> None:
        """Continues the restored episode of a sample on this engine."""

    def act(self, sample: Sample, *, truncated: bool) -> None:
        """Passes a finished turn on. The sample then waits for the answer. `truncated` if a limit of tokens ended the
        turn."""

    def fail(self, sample: Sample) -> None:
        """Ends the episode of a sample with a failed turn."""

    def answers(self, *, engine_is_idle: bool) -> list[Observed]:
        """Returns the answers since the last call. Never blocks."""
        return []

    def begin_anew(self, count: int) -> None:
        """Counts episodes that could not be restored from a checkpoint."""

    def settle(self) -> list[Observed]:
        """Prepares a checkpoint. Waits until environments have saved their episodes and returns the answers up to then.

        Called by all engines.
        """
        return []

    def metrics(self) -> dict[str, float]:
        """Returns the metrics of the episodes ended since the last call."""
        return {}


# Trajectories given by an environment at the end of an episode, replacing the generated turns.

STATUS = {
    "completed": Status.STOPPED,
    "truncated": Status.TRUNCATED,
    "aborted": Status.ABORTED,
    "failed": Status.FAILED,
}


def told_trajectories(sample: Sample, known: Sequence[Sample], told: Sequence[Trajectory]) -> Observed:
    """Returns the end of the episode of `sample` with the trajectories `told` by its environment.

    `known` are the trajectories generated by the engine. Raises Unusable if a trajectory is not among them and has no
    log-probs.
    """
    samples = []
    for number, trajectory in enumerate(told):
        recorded = next((one for one in known if one.context == trajectory.ids), None)
        if recorded is None and trajectory.logprobs is None:
            raise Unusable(f"trajectory {number} of its environment was not generated here and has no log-probs")
        made = _recorded(recorded, trajectory) if recorded else _from_trajectory(sample, trajectory)
        samples.append(replace(made, id=sample.episode + number * SIBLINGS_APART))
    return Observed(sample.id, samples[0].status, trajectories=tuple(samples))


def _recorded(sample: Sample, trajectory: Trajectory) -> Sample:
    """Returns `sample` with the environment's data: its reward, its mask and the beginning of its response."""
    count = trajectory.num_response_tokens
    first = max(len(sample.tokens) - count, 0)
    mask = sample.loss_mask[first:] if trajectory.loss_mask is None else trajectory.loss_mask
    return replace(
        sample,
        prompt=sample.prompt + sample.tokens[:first],
        tokens=sample.tokens[first:],
        logprobs=sample.logprobs[first:],
        policy_versions=sample.policy_versions[first:],
        loss_mask=_masked(mask, len(sample.tokens) - first, trajectory.trained_on),
        status=STATUS[trajectory.status],
        turns=(len(sample.tokens) - first,),
        turn_rewards=(trajectory.reward or 0.0,),
        turn_limit=None,
        goes_on=False,
    )


def _from_trajectory(sample: Sample, trajectory: Trajectory) -> Sample:
    count = trajectory.num_response_tokens
    assert trajectory.logprobs is not None
    mask = (True,) * count if trajectory.loss_mask is None else trajectory.loss_mask
    return Sample(
        sample.id,
        trajectory.ids[: len(trajectory.ids) - count],
        sample.seed,
        tokens=trajectory.ids[len(trajectory.ids) - count :],
        logprobs=tuple(trajectory.logprobs),
        policy_versions=(CURRENT_VERSION,) * count,
        loss_mask=_masked(mask, count, trajectory.trained_on),
        status=STATUS[trajectory.status],
        turns=(count,),
        turn_rewards=(trajectory.reward or 0.0,),
    )


def _masked(mask: Sequence[bool], count: int, trained_on: bool) -> tuple[bool, ...]:
    """Returns the last `count` entries of the mask, or all False if the trajectory is not trained on."""
    return tuple(mask[len(mask) - count :]) if trained_on else (False,) * count


# Conversion of observations to tokens and of turns to actions, by a chat template or as plain text.

Shown = str | Sequence[Message]
"""An observation before encoding."""


class TurnFormat(Protocol):
    """The encoding of observations. Its methods raise EpisodeError if it cannot show an observation at all, and
    Unusable if an image of it cannot be used."""

    def prompt(self, observation: Shown) -> Context:
        """Returns the token ids before the model's first turn, and their images."""
        ...

    def continuation(self, turn: Sequence[int], observation: Shown) -> Context:
        """Returns the token ids between the generated ids `turn` and the beginning of the next turn, and their
        images."""
        ...

    def action(self, turn: Sequence[int], *, truncated: bool, position: int) -> Action:
        """Returns the action of the generated ids `turn` for an environment. `position` counts the turns from 0."""
        ...


class PlainText:
    """Implements `TurnFormat` for models without a chat template. Texts are concatenated."""

    def __init__(self, encoder: PromptEncoder) -> None:
        self.tokenizer = encoder.tokenizer

    def prompt(self, observation: Shown) -> Context:
        return Context(tuple(self.tokenizer(_text_of(observation))["input_ids"]))

    def continuation(self, turn: Sequence[int], observation: Shown) -> Context:
        return Context(tuple(self.tokenizer(_text_of(observation), add_special_tokens=False)["input_ids"]))

    def action(self, turn: Sequence[int], *, truncated: bool, position: int) -> Action:
        return Action(str(self.tokenizer.decode(list(turn), skip_special_tokens=True)), truncated=truncated)


class ChatTurns:
    """Implements `TurnFormat` with the tokenizer's chat template."""

    def __init__(self, chat_format: ChatFormat, system_prompt: str | None) -> None:
        self.chat_format, self.system_prompt = chat_format, system_prompt

    def prompt(self, observation: Shown) -> Context:
        messages = _messages_of(observation)
        if self.system_prompt is not None and messages[0]["role"] != "system":
            messages.insert(0, {"role": "system", "content": self.system_prompt})
        with self._explained(messages):
            return self.chat_format.prompt(messages)

    def continuation(self, turn: Sequence[int], observation: Shown) -> Context:
        messages = _messages_of(observation)
        with self._explained(messages):
            return self.chat_format.continuation(turn, messages)

    def action(self, turn: Sequence[int], *, truncated: bool, position: int) -> Action:
        said = self.chat_format.message_of(turn, mark=position)
        return Action(said.text, tuple(said.tool_calls), truncated)

    @contextmanager
    def _explained(self, messages: Sequence[Message]) -> Iterator[None]:
        """Raises EpisodeError for images without a model that sees. If the model sees, unusable images and texts with
        its placeholders raise Unusable."""
        shows = any(
            kind_of(part) == IMAGE
            for message in messages
            if isinstance(message.get("content"), list | tuple)
            for part in message["content"]
        )
        if shows and self.chat_format.images is None:
            raise EpisodeError(
                "an environment shows images, but model.vision is not set; set model.vision: {} for a vision-language "
                "model, or let env.function show texts"
            )
        try:
            yield
        except DataError as error:
            if self.chat_format.images is None:
                raise
            raise Unusable(f"its observation cannot be shown: {error}") from None


def _messages_of(observation: Shown) -> list[Message]:
    return [{"role": "user", "content": observation}] if isinstance(observation, str) else list(observation)


def _text_of(observation: Shown) -> str:
    if isinstance(observation, str):
        return observation
    raise EpisodeError(
        f"an environment answered with {len(observation)} chat messages, but the tokenizer has no chat template or "
        "data.chat_template is never; expected a text"
    )


# Episodes of an engine's samples in local or remote environments.


@dataclass(frozen=True)
class TurnLimits:
    max_turns: int
    max_prompt_tokens: int
    max_response_tokens: int
    """Limit over all turns together, including the observations between them."""
    max_context_tokens: int
    vocab_size: int
    """Number of the model's embeddings. Token ids are below it."""

    def has_room(self, sample: Sample, num_observed: int) -> bool:
        """Returns whether another token fits after `num_observed` observed tokens."""
        num_tokens = len(sample.tokens) + num_observed
        return num_tokens < min(self.max_response_tokens, self.max_context_tokens - len(sample.prompt))


@dataclass
class Waiting:
    sample: Sample
    truncated: bool
    since: float


class EnvironmentEpisodes(Episodes):
    """Episodes in environments. All episodes of a group run on one rank with one seed.

    Without `overlaps` engine and environments take turns. Environments step only after the engine has nothing left to
    generate, and the engine continues only after all of them have answered.
    """

    def __init__(
        self,
        environments: Sequence[RemoteEnvironments],
        turn_format: TurnFormat,
        limits: TurnLimits,
        row_at: Callable[[int], Row],
        wait_for: Callable[[Callable[[], bool | None], str], object],
        *,
        number_of: Callable[[int], int] = lambda sample: sample,
        overlaps: bool = True,
        own_prompt: Callable[[int], Shown] | None = None,
        keep_images: Callable[[Context], None] = lambda context: None,
    ) -> None:
        """Sets up the episodes of one engine.

        `row_at` returns the data of a prompt row. `number_of` returns the number of a sample's episode. `wait_for`
        blocks until a condition holds; its second argument names the awaited event. `own_prompt` returns the beginning
        of a row whose environment shows none, encoded by `turn_format`. Without it samples already have their prompt.
        `keep_images` makes the images of an observation available to the engine and to training. It raises DataError
        for damaged images.
        """
        super().__init__([episode for of_rank in environments for episode in of_rank.going_on])
        self.environments, self.turn_format, self.limits = environments, turn_format, limits
        self.row_at, self.number_of, self.overlaps = row_at, number_of, overlaps
        self._wait_for, self._own_prompt, self._keep_images = wait_for, own_prompt, keep_images
        self._own_prompts: dict[int, Shown] = {}
        """Prompts of episodes that have not begun yet, by episode."""
        self.statistics = EpisodeStatistics()
        self._waiting: dict[int, Waiting] = {}
        """Waiting samples by episode."""
        self._places: dict[int, RemoteEnvironments] = {}
        """The rank with the environment of each episode."""
        self._held_actions: list[tuple[int, Action]] = []
        self._held_events: list[EpisodeEvent] = []
        self._num_saved = 0
        self._has_worked = False
        """Whether an episode has ended without failure."""
        self._by_ids: set[int] = set()
        """Episodes whose environment works with token ids."""
        self._closed: dict[int, list[Sample]] = {}
        """Trajectories closed by a branch, by episode."""

    def begin(self, group: SampleGroup, samples: Sequence[Sample]) -> None:
        environments = self.environments[group.position % len(self.environments)]
        seed = group.samples[0].seed
        for sample in samples:
            episode = self.number_of(sample.id)
            self._waiting[episode] = Waiting(sample, False, time.monotonic())
            self._places[episode] = environments
            if self._own_prompt is not None:
                self._own_prompts[episode] = self._own_prompt(group.row)
            environments.begin(episode, self._row(group.row, episode), seed)

    def _row(self, row: int, episode: int) -> Row:
        """Returns the row passed to the environment."""
        return self.row_at(row)

    def goes_on(self, sample: Sample) -> bool:
        return self.number_of(sample.id) in self.going_on

    def resume(self, sample: Sample) -> None:
        episode = self.number_of(sample.id)
        environments = next(one for one in self.environments if episode in one.going_on)
        self._places[episode] = environments
        if sample.waits:
            self._waiting[episode] = Waiting(sample, False, time.monotonic())
        environments.claim(episode)

    def act(self, sample: Sample, *, truncated: bool) -> None:
        episode = self.number_of(sample.id)
        self._waiting[episode] = Waiting(sample, truncated, time.monotonic())
        action = self.turn_format.action(sample.last_turn, truncated=truncated, position=len(sample.turns) - 1)
        if episode in self._by_ids:
            drawn = slice(len(sample.tokens) - len(sample.last_turn), None)
            version = sample.policy_versions[-1]
            action = replace(action, ids=sample.last_turn, logprobs=sample.logprobs[drawn], policy_version=version)
        self.statistics.acted(episode, action)
        if self.overlaps:
            self._places[episode].act(episode, action)
        else:
            self._held_actions.append((episode, action))

    def fail(self, sample: Sample) -> None:
        failure = EpisodeFailure("error", "the model's log-probs are not finite after the environment's observation")
        self._end(sample, EpisodeEvent(self.number_of(sample.id), None, failure=failure))

    def answers(self, *, engine_is_idle: bool) -> list[Observed]:
        events = [event for environments in self.environments for event in environments.events()]
        if not self.overlaps:
            events = self._in_turn(events, engine_is_idle)
        return self._answered(events)

    def begin_anew(self, count: int) -> None:
        self.statistics.began_anew(count)

    def settle(self) -> list[Observed]:
        self._act_all()
        self._num_saved += 1
        for environments in self.environments:
            environments.save(self._num_saved)
        events, self._held_events = self._held_events, []

        def come() -> bool | None:
            events.extend(event for environments in self.environments for event in environments.events())
            return all(environments.num_saved == self._num_saved for environments in self.environments) or None

        self._wait_for(come, "environments to save episodes")
        return self._answered(events)

    def metrics(self) -> dict[str, float]:
        """Returns the metrics named env/*. Raises EpisodeError if all episodes of the first step failed.

        Without this error a run with broken environments would never learn anything.
        """
        failure = self.statistics.first_failure
        found = metrics(self.statistics.take())
        if found and not self._has_worked:
            if found["failed"] == found["episodes"]:
                raise EpisodeError(
                    f"env: all {found['episodes']:g} episodes of the first step failed; expected at least one to end "
                    f"without a failure. The first failure was {failure}"
                )
            self._has_worked = True
        return {f"env/{name}": value for name, value in found.items()}

    def _in_turn(self, events: list[EpisodeEvent], engine_is_idle: bool) -> list[EpisodeEvent]:
        """Returns nothing until all awaited environments have answered. Then returns all events."""
        if engine_is_idle:
            self._act_all()
        self._held_events += events
        if len(self._held_events) < len(self._waiting):
            return []
        events, self._held_events = self._held_events, []
        return events

    def _act_all(self) -> None:
        held, self._held_actions = self._held_actions, []
        for episode, action in held:
            self._places[episode].act(episode, action)

    def _answered(self, events: Iterable[EpisodeEvent]) -> list[Observed]:
        return [self._answer(event) for event in events if event.episode in self._waiting]

    def _answer(self, event: EpisodeEvent) -> Observed:
        waiting = self._waiting.pop(event.episode)
        try:
            answer = self._what_follows(waiting, event)
        except Unusable as problem:
            answer = Observed(waiting.sample.id, Status.FAILED)
            event = replace(event, failure=EpisodeFailure("error", str(problem)))
        self.statistics.waited(time.monotonic() - waiting.since)
        if answer.status == Status.PENDING:
            self.statistics.happened(event)
        else:
            self._end(waiting.sample, event)
        return answer

    def _end(self, sample: Sample, event: EpisodeEvent) -> None:
        """Ends an episode. Its environment is notified unless it ended the episode itself."""
        place = self._places.pop(event.episode)
        if not event.done:
            place.abandon(event.episode)
        self._closed.pop(event.episode, None)
        self._own_prompts.pop(event.episode, None)
        self._by_ids.discard(event.episode)
        self.statistics.observed(len(sample.tokens) - sum(sample.loss_mask))
        self.statistics.happened(event if event.done else replace(event, done=True, truncated=True))

    def _what_follows(self, waiting: Waiting, event: EpisodeEvent) -> Observed:
        sample = waiting.sample
        if event.failure is not None:
            return Observed(sample.id, Status.FAILED)
        if event.trajectories:
            for told in event.trajectories:
                self._refuse_unknown_ids(told.ids)
            known = [*self._closed.get(event.episode, ()), sample]
            return told_trajectories(sample, known, event.trajectories)
        if event.done:
            cut = waiting.truncated or event.truncated
            return Observed(sample.id, Status.TRUNCATED if cut else Status.STOPPED, reward=event.reward)
        if isinstance(event.observation, TokenIds):
            return self._turn_of_ids(sample, event.observation, event)
        if not sample.turns:
            return self._beginning(sample, event)
        following = self.turn_format.continuation(sample.last_turn, event.observation or "")
        return self._next_turn(sample, following, event.reward)

    def _next_turn(self, sample: Sample, following: Context, reward: float, limit: int | None = None) -> Observed:
        self._refuse_unknown_ids(following.ids)
        if len(sample.turns) >= self.limits.max_turns or not self.limits.has_room(sample, len(following.ids)):
            return Observed(sample.id, Status.TRUNCATED, reward=reward)
        self._keep(following)
        return Observed(sample.id, tokens=following.ids, images=following.images, reward=reward, max_turn_tokens=limit)

    def _keep(self, context: Context) -> None:
        """Keeps the images of a context for its sample. Raises Unusable for damaged images."""
        if not context.images:
            return
        try:
            self._keep_images(context)
        except DataError as error:
            raise Unusable(f"its observation cannot be shown: {error}") from None

    def _beginning(self, sample: Sample, event: EpisodeEvent) -> Observed:
        assert not isinstance(event.observation, TokenIds)
        own_prompt = self._own_prompts.pop(event.episode, None)
        shown = own_prompt if event.observation is None else event.observation
        if shown is None:
            return Observed(sample.id)
        return self._begun(sample, self.turn_format.prompt(shown), None)

    def _begun(self, sample: Sample, prompt: Context, limit: int | None) -> Observed:
        if not 0 < len(prompt.ids) <= self.limits.max_prompt_tokens:
            raise Unusable(
                f"its prompt has {len(prompt.ids)} tokens, tool descriptions included; expected 1 to "
                f"{self.limits.max_prompt_tokens} (data.max_prompt_tokens)"
            )
        self._refuse_unknown_ids(prompt.ids)
        self._keep(prompt)
        return Observed(sample.id, Status.PENDING, prompt.ids, prompt.images, max_turn_tokens=limit)

    def _refuse_unknown_ids(self, tokens: Sequence[int]) -> None:
        """Raises Unusable if a token id has no embedding in the model."""
        vocab_size = self.limits.vocab_size
        unknown = next((token for token in tokens if not 0 <= token < vocab_size), None)
        if unknown is not None:
            raise Unusable(
                f"its context has the token id {unknown}, but the model has ids 0 to {vocab_size - 1}; resize the "
                "model's embeddings if tokens were added to its tokenizer"
            )

    def _turn_limit(self, wanted: object) -> int | None:
        """Returns the token limit requested by an environment. Raises Unusable if it is not a positive whole number."""
        if wanted is None:
            return None
        if isinstance(wanted, bool) or not hasattr(wanted, "__index__") or (limit := index(wanted)) < 1:
            raise Unusable(f"its sampling has max_new_tokens = {str(wanted)[:80]}; expected a whole number, at least 1")
        return min(limit, self.limits.max_response_tokens)

    def _turn_of_ids(self, sample: Sample, wanted: TokenIds, event: EpisodeEvent) -> Observed:
        """Returns the answer of an environment that gave the token ids of the whole context for its next turn."""
        if sample.images:
            raise EpisodeError(
                f"an environment asks for turns in token ids, but its row has {len(sample.images)} images; expected "
                "rows without images, or an environment with chat messages"
            )
        self._by_ids.add(event.episode)
        limit = self._turn_limit(wanted.sampling.get("max_new_tokens"))
        if not sample.turns:
            return self._begun(sample, Context(wanted.ids), limit)
        context = sample.context
        if wanted.ids[: len(context)] == context:
            return self._next_turn(sample, Context(wanted.ids[len(context) :]), event.reward, limit)
        self._refuse_unknown_ids(wanted.ids)
        self._closed.setdefault(event.episode, []).append(sample)
        if len(wanted.ids) >= self.limits.max_context_tokens:
            return Observed(sample.id, Status.TRUNCATED, reward=event.reward)
        return Observed(sample.id, tokens=wanted.ids, reward=event.reward, branches=True, max_turn_tokens=limit)
