"""Episodes of an engine's samples in environments, wherever these run."""

import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from operator import index
from typing import Protocol

from rltrain.environments.batch import Event, Failure
from rltrain.environments.interface import Action, Row, TokenIds
from rltrain.environments.statistics import EpisodeStatistics, metrics
from rltrain.errors import EpisodeError
from rltrain.rollout.sample import Sample, SampleGroup, Status
from rltrain.rollout.stream.episodes import Answer, Unusable
from rltrain.rollout.stream.told_trajectories import told_trajectories
from rltrain.rollout.stream.turn_format import Shown, TurnFormat


class Environments(Protocol):
    """Those of one rank. Episodes are numbered by whoever begins them."""

    def begin(self, episode: int, row: Row, seed: int) -> None: ...

    def act(self, episode: int, action: Action) -> None: ...

    def abandon(self, episode: int) -> None: ...

    @property
    def going_on(self) -> Collection[int]:
        """Episodes that have come from a checkpoint."""
        ...

    def claim(self, episode: int) -> None:
        """One of them is for this engine."""
        ...

    def save(self, number: int) -> None:
        """All that was asked for before is to be in the checkpoint of this number, or answered before `num_saved` is
        that number."""
        ...

    @property
    def num_saved(self) -> int: ...

    def events(self) -> list[Event]:
        """What has come since the last call; never blocks."""
        ...


@dataclass(frozen=True)
class TurnLimits:
    max_turns: int
    max_prompt_tokens: int
    max_response_tokens: int
    """Of all turns together, with what was observed between them."""
    max_context_tokens: int
    vocab_size: int
    """Of the model, which has embeddings for the ids below it."""

    def has_room(self, sample: Sample, num_observed: int) -> bool:
        """Whether another token could be drawn after so many were observed."""
        num_tokens = len(sample.tokens) + num_observed
        return num_tokens < min(self.max_response_tokens, self.max_context_tokens - len(sample.prompt))


@dataclass
class Waiting:
    sample: Sample
    truncated: bool
    since: float


class EnvironmentEpisodes:
    """Implements `Episodes`. A group's samples have their episodes on one rank, from one seed.

    Without `overlaps` everybody takes turns: no environment begins a step before the engine has nothing left to draw,
    and it goes on when all of them have answered.
    """

    def __init__(
        self,
        environments: Sequence[Environments],
        turn_format: TurnFormat,
        limits: TurnLimits,
        row_at: Callable[[int], Row],
        wait_for: Callable[[Callable[[], bool | None], str], object],
        *,
        number_of: Callable[[int], int] = lambda sample: sample,
        overlaps: bool = True,
        own_prompt: Callable[[int], Shown] | None = None,
    ) -> None:
        """`row_at` gives the data of a prompt row, `number_of` the number of a sample's episode, and `wait_for` waits
        until something has come, which it names. `own_prompt` gives what a row begins with where its environment shows
        nothing else, for `turn_format` to encode; None: samples have it."""
        self.environments, self.turn_format, self.limits = environments, turn_format, limits
        self.row_at, self.number_of, self.overlaps = row_at, number_of, overlaps
        self._wait_for, self._own_prompt = wait_for, own_prompt
        self._own_prompts: dict[int, Shown] = {}
        """By episode that has yet to begin."""
        self.statistics = EpisodeStatistics()
        self._waiting: dict[int, Waiting] = {}
        """By episode."""
        self._places: dict[int, Environments] = {}
        """Likewise: where it runs."""
        self._held_actions: list[tuple[int, Action]] = []
        self._held_events: list[Event] = []
        self._num_saved = 0
        self._has_worked = False
        """Whether an episode has come to its end."""
        self._by_ids: set[int] = set()
        """Episodes whose environment has a tokenizer of its own."""
        self._closed: dict[int, list[Sample]] = {}
        """By episode: trajectories from which it has branched."""

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
        """What the episode gets."""
        return self.row_at(row)

    def goes_on(self, sample: Sample) -> bool:
        return any(self.number_of(sample.id) in environments.going_on for environments in self.environments)

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
        failure = Failure("error", "the model's log-probs are not finite after what the environment has shown")
        self._end(sample, Event(self.number_of(sample.id), None, failure=failure))

    def answers(self, *, engine_is_idle: bool) -> list[Answer]:
        events = [event for environments in self.environments for event in environments.events()]
        if not self.overlaps:
            events = self._in_turn(events, engine_is_idle)
        return self._answered(events)

    def begin_anew(self, count: int) -> None:
        self.statistics.began_anew(count)

    def settle(self) -> list[Answer]:
        self._act_all()
        self._num_saved += 1
        for environments in self.environments:
            environments.save(self._num_saved)
        events, self._held_events = self._held_events, []

        def come() -> bool | None:
            events.extend(event for environments in self.environments for event in environments.events())
            return all(environments.num_saved == self._num_saved for environments in self.environments) or None

        self._wait_for(come, "environments, to save episodes")
        return self._answered(events)

    def metrics(self) -> dict[str, float]:
        """Raises EpisodeError where none of the first episodes has come to its end: nothing would ever be learnt."""
        failure = self.statistics.first_failure
        found = metrics(self.statistics.take())
        if found and not self._has_worked:
            if found["failed"] == found["episodes"]:
                raise EpisodeError(
                    f"env: all {found['episodes']:g} episodes of the first step failed; expected environments that "
                    "answer: a failure costs its episode, and the job goes on where others come to their end. The "
                    f"first failure was {failure}"
                )
            self._has_worked = True
        return {f"env/{name}": value for name, value in found.items()}

    def _in_turn(self, events: list[Event], engine_is_idle: bool) -> list[Event]:
        """Nothing, before all who are to answer have."""
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

    def _answered(self, events: Iterable[Event]) -> list[Answer]:
        return [self._answer(event) for event in events if event.episode in self._waiting]

    def _answer(self, event: Event) -> Answer:
        waiting = self._waiting.pop(event.episode)
        try:
            answer = self._what_follows(waiting, event)
        except Unusable as problem:
            answer = Answer(waiting.sample.id, Status.FAILED)
            event = replace(event, failure=Failure("error", str(problem)))
        self.statistics.waited(time.monotonic() - waiting.since)
        if answer.status == Status.PENDING:
            self.statistics.happened(event)
        else:
            self._end(waiting.sample, event)
        return answer

    def _end(self, sample: Sample, event: Event) -> None:
        """Its environment is told where it has not ended the episode itself."""
        place = self._places.pop(event.episode)
        if not event.done:
            place.abandon(event.episode)
        self._closed.pop(event.episode, None)
        self._own_prompts.pop(event.episode, None)
        self._by_ids.discard(event.episode)
        self.statistics.observed(len(sample.tokens) - sum(sample.loss_mask))
        self.statistics.happened(event if event.done else replace(event, done=True, truncated=True))

    def _what_follows(self, waiting: Waiting, event: Event) -> Answer:
        sample = waiting.sample
        if event.failure is not None:
            return Answer(sample.id, Status.FAILED)
        if event.trajectories:
            for told in event.trajectories:
                self._refuse_unknown_ids(told.ids)
            known = [*self._closed.get(event.episode, ()), sample]
            return told_trajectories(sample, known, event.trajectories)
        if event.done:
            cut = waiting.truncated or event.truncated
            return Answer(sample.id, Status.TRUNCATED if cut else Status.STOPPED, reward=event.reward)
        if isinstance(event.observation, TokenIds):
            return self._turn_of_ids(sample, event.observation, event)
        if not sample.turns:
            return self._beginning(sample, event)
        tokens = self.turn_format.continuation(sample.last_turn, event.observation or "")
        return self._next_turn(sample, tokens, event.reward)

    def _next_turn(self, sample: Sample, tokens: tuple[int, ...], reward: float, limit: int | None = None) -> Answer:
        self._refuse_unknown_ids(tokens)
        if len(sample.turns) >= self.limits.max_turns or not self.limits.has_room(sample, len(tokens)):
            return Answer(sample.id, Status.TRUNCATED, reward=reward)
        return Answer(sample.id, tokens=tokens, reward=reward, max_turn_tokens=limit)

    def _beginning(self, sample: Sample, event: Event) -> Answer:
        assert not isinstance(event.observation, TokenIds)
        own_prompt = self._own_prompts.pop(event.episode, None)
        shown = own_prompt if event.observation is None else event.observation
        if shown is None:
            return Answer(sample.id)
        return self._begun(sample, self.turn_format.prompt(shown), None)

    def _begun(self, sample: Sample, prompt: tuple[int, ...], limit: int | None) -> Answer:
        if not 0 < len(prompt) <= self.limits.max_prompt_tokens:
            raise Unusable(
                f"it begins with {len(prompt)} tokens, with the tools that it is told of; expected 1 to "
                f"{self.limits.max_prompt_tokens} (data.max_prompt_tokens)"
            )
        self._refuse_unknown_ids(prompt)
        return Answer(sample.id, Status.PENDING, prompt, max_turn_tokens=limit)

    def _refuse_unknown_ids(self, tokens: Sequence[int]) -> None:
        """Raises Unusable for an id that the model has no embedding for."""
        vocab_size = self.limits.vocab_size
        unknown = next((token for token in tokens if not 0 <= token < vocab_size), None)
        if unknown is not None:
            raise Unusable(
                f"its context has the token id {unknown}, and the model has ids 0 to {vocab_size - 1}; expected a "
                "model whose embeddings were resized when tokens were added to its tokenizer"
            )

    def _turn_limit(self, wanted: object) -> int | None:
        """Returns the limit of tokens that an environment asks for. Raises Unusable if it is no number of tokens."""
        if wanted is None:
            return None
        if isinstance(wanted, bool) or not hasattr(wanted, "__index__") or (limit := index(wanted)) < 1:
            raise Unusable(f"its sampling has max_new_tokens = {str(wanted)[:80]}; expected a whole number, at least 1")
        return min(limit, self.limits.max_response_tokens)

    def _turn_of_ids(self, sample: Sample, wanted: TokenIds, event: Event) -> Answer:
        """The context that an environment with a tokenizer of its own gives for its next turn."""
        self._by_ids.add(event.episode)
        limit = self._turn_limit(wanted.sampling.get("max_new_tokens"))
        if not sample.turns:
            return self._begun(sample, wanted.ids, limit)
        context = sample.context
        if wanted.ids[: len(context)] == context:
            return self._next_turn(sample, wanted.ids[len(context) :], event.reward, limit)
        self._refuse_unknown_ids(wanted.ids)
        self._closed.setdefault(event.episode, []).append(sample)
        if len(wanted.ids) >= self.limits.max_context_tokens:
            return Answer(sample.id, Status.TRUNCATED, reward=event.reward)
        return Answer(sample.id, tokens=wanted.ids, reward=event.reward, branches=True, max_turn_tokens=limit)
