"""Tests of samples from the prompt to experience, and of episodes with several turns."""

import math
import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rltrain.data.experience import FIELDS, SIBLINGS_APART, mini_batch_of
from rltrain.data.images import Context
from rltrain.environments.batch import EpisodeEvent, EpisodeFailure
from rltrain.environments.interface import Action, Row, TokenIds, Trajectory
from rltrain.errors import EpisodeError
from rltrain.rollout.engine import SamplingParams, check_samples, response_limit
from rltrain.rollout.episodes import (
    CURRENT_VERSION,
    EnvironmentEpisodes,
    Observed,
    TurnLimits,
    Unusable,
    told_trajectories,
    with_shared_reward,
)
from rltrain.rollout.generation_loop import LeaderDecision
from rltrain.rollout.groups import PromptGroups
from rltrain.rollout.rollout_state import RolloutState
from rltrain.rollout.sample import Sample, SampleGroup, Status, pack_groups
from tests.support.scripted_engine import ScriptedEngine
from tests.through_json import through_json

SAMPLING = SamplingParams(1.0, 1.0, 0, 20, ())


def drawn(sample: Sample, count: int, status: Status = Status.PENDING) -> Sample:
    return sample.drawn((1,) * count, (-1.0,) * count, (5,) * count, status)


@given(st.lists(st.tuples(st.integers(1, 4), st.integers(0, 3)), max_size=5), st.integers(0, 3), st.data())
@settings(max_examples=25)
def test_turns_end_where_the_model_stopped(turns: list[tuple[int, int]], count: int, data: st.DataObject) -> None:
    sample, ends, whose = Sample(0, (9,), 0), [], []
    for num_drawn, num_observed in turns:
        sample = drawn(drawn(sample, num_drawn - 1), 1, Status.STOPPED)
        whose += [True] * num_drawn + [False] * num_observed
        ends.append(len(whose) - num_observed)
        assert sample.is_finished and sample.turns[-1] == len(sample.tokens)
        sample = sample.observed((2,) * num_observed)
    sample = drawn(sample, count)
    assert not sample.is_finished
    assert (sample.turns, sample.loss_mask) == (tuple(ends), (*whose, *[True] * count))
    assert sample.tokens == tuple(1 if mine else 2 for mine in sample.loss_mask)
    assert sample.policy_versions == tuple(5 * mine for mine in sample.loss_mask)
    assert sample.logprobs == tuple(-1.0 * mine for mine in sample.loss_mask)
    assert sample.turn_tokens == (1,) * count
    length = data.draw(st.integers(0, len(sample.tokens)))
    cut = sample.first(length)
    assert (cut.tokens, cut.turns) == (sample.tokens[:length], tuple(end for end in ends if end < length))


def test_a_turn_may_have_a_limit_of_its_own() -> None:
    sample = Sample(0, (9, 9), 0, turn_limit=4)
    assert response_limit(sample, SAMPLING, 100) == 4
    answered = drawn(sample, 4, Status.TRUNCATED).observed((2, 2), turn_limit=30)
    assert response_limit(answered, SAMPLING, 100) == 20
    assert response_limit(answered.observed(()), SAMPLING, 10) == 8, "the limit was only for that turn"
    with pytest.raises(ValueError, match="fewer than 4 tokens"):
        check_samples([drawn(sample, 4)], SAMPLING, unfinished=(), running=None, max_context_tokens=100)


def test_rewards_belong_to_turns_that_have_ended() -> None:
    with pytest.raises(ValueError, match="1 turn_rewards for 0 finished turns"):
        Sample(0, (9,), 0, turn_rewards=(1.0,))


LONG = Sample(8, (1, 2), 0).drawn((5, 6, 7), (-0.5, -0.25, -1.0), (2, 2, 3), Status.TRUNCATED)
SHORT = Sample(9, (1, 2), 0).drawn((6,), (-2.0,), (3,), Status.STOPPED)
OTHER = Sample(2, (3,), 0).drawn((4, 4), (-3.0, -4.0), (1, 1), Status.STOPPED)
GROUPS = [SampleGroup(4, 17, (LONG, SHORT)), SampleGroup(1, 30, (OTHER,))]


def test_samples_follow_each_other_with_their_prompts():
    experience = pack_groups(GROUPS, [1, 2, 4])
    assert experience.tokens.tolist() == [1, 2, 5, 6, 7, 1, 2, 6, 3, 4, 4]
    assert experience.response_mask.int().tolist() == [0, 0, 1, 1, 1, 0, 0, 1, 0, 1, 1]
    assert experience.rollout_logprobs.tolist() == [0, 0, -0.5, -0.25, -1.0, 0, 0, -2.0, 0, -3.0, -4.0]
    assert experience.policy_version.tolist() == [0, 0, 2, 2, 3, 0, 0, 3, 0, 1, 1], "of each token"
    assert experience.lengths.tolist() == [5, 3, 3]


def test_only_what_the_model_drew_is_trained_on():
    """Tokens of a tool stand between those of the model."""
    mixed = replace(LONG, loss_mask=(True, False, True))
    experience = pack_groups([SampleGroup(4, 17, (mixed, SHORT))], [4])
    assert experience.tokens.tolist() == [1, 2, 5, 6, 7, 1, 2, 6]
    assert experience.response_mask.int().tolist() == [0, 0, 1, 0, 1, 0, 0, 1]


def test_samples_are_known_by_id_group_row_and_end():
    experience = pack_groups(GROUPS, [1, 2, 4])
    assert experience.sample_ids.tolist() == [8, 9, 2]
    assert experience.group_ids.tolist() == [2, 2, 0]
    assert experience.prompt_ids.tolist() == [17, 17, 30]
    assert experience.truncated.tolist() == [True, False, False]


def test_no_groups_are_experience_too():
    """An engine without finished samples of a chunk sends the same fields as the others."""
    nothing, something = pack_groups([], []), pack_groups(GROUPS, [1, 4])
    assert (nothing.num_samples, nothing.num_tokens) == (0, 0)
    assert nothing.present() == something.present()
    for experience in (nothing, something):
        for name, values in experience.columns().items():
            assert values.dtype is FIELDS[name][0], name
            count = experience.num_samples if FIELDS[name][1] == "sample" else experience.num_tokens
            assert values.shape == (count,)


@given(st.lists(st.integers(1, 7), min_size=1, max_size=6), st.sampled_from([(4, 1), (4, 2), (4, 4), (4, 8), (1, 2)]))
def test_every_sample_is_in_one_mini_batch_and_each_takes_some_of_every_large_group(sizes, shape):
    samples_per_group, num_mini_batches = shape
    num_groups = len(sizes)
    if num_groups * samples_per_group % num_mini_batches:
        return
    groups = torch.repeat_interleave(torch.arange(num_groups), torch.tensor(sizes))
    num_blocks = max(num_mini_batches // samples_per_group, 1)
    found = mini_batch_of(groups, num_groups, samples_per_group, num_mini_batches, num_blocks)
    assert len(found) == sum(sizes)
    assert int(found.min()) >= 0 and int(found.max()) < num_mini_batches
    if num_mini_batches <= samples_per_group:
        for group, size in enumerate(sizes):
            if size >= samples_per_group:
                assert set(found[groups == group].tolist()) == set(range(num_mini_batches))


def drawn_by_turns(number: int, prompt: tuple[int, ...], turns: list[tuple[int, ...]]) -> Sample:
    sample = Sample(number, prompt, seed=5)
    for turn in turns:
        sample = sample.observed((90,)) if sample.tokens else sample
        sample = sample.drawn(turn, [-1.0] * len(turn), [3] * len(turn), Status.STOPPED)
    return sample


def test_a_context_that_does_not_go_on_begins_another_trajectory():
    sample = drawn_by_turns(7, (1, 2), [(5, 6)])
    new, closed = Observed(7, tokens=(1, 2, 5, 9), reward=0.5, branches=True).applied_to(sample, max_turn_tokens=4)
    assert (closed.id, closed.turn_rewards, closed.status) == (7 + SIBLINGS_APART, (0.5,), Status.STOPPED)
    assert (new.id, new.prompt, new.tokens, new.parent) == (7, (1, 2, 5, 9), (), closed.id)
    assert new.seed != sample.seed and new.episode == closed.episode == 7
    new = new.drawn((8,), (-0.5,), (3,), Status.STOPPED)
    again, second = Observed(7, tokens=(4,), branches=True).applied_to(new, max_turn_tokens=None)
    assert second.id == 7 + 2 * SIBLINGS_APART and again.parent == second.id


def test_all_trajectories_of_an_episode_are_worth_what_it_was():
    first = Observed(1, Status.STOPPED, reward=0.25).applied_to(drawn_by_turns(1, (1,), [(5,)]), None)[0]
    second = Observed(1, Status.STOPPED, reward=1.0).applied_to(drawn_by_turns(1, (1, 2), [(6,)]), None)[0]
    shared = with_shared_reward([first, second])
    assert [sum(sample.turn_rewards) for sample in shared] == [1.25, 1.25]


def test_told_trajectories_take_what_the_engine_recorded():
    known = drawn_by_turns(3, (1, 2), [(5, 6), (7,)])
    told = Trajectory(known.context, num_response_tokens=4, reward=2.0)
    answer = told_trajectories(known, [known], [told])
    (sample,) = answer.trajectories
    assert (sample.prompt, sample.tokens, sample.loss_mask) == (known.prompt, known.tokens, known.loss_mask)
    assert (sample.logprobs, sample.turn_rewards) == (known.logprobs, (2.0,))
    other = Trajectory((1, 8, 9), num_response_tokens=2, reward=1.0, logprobs=(-0.1, -0.2), trained_on=False)
    first, second = told_trajectories(known, [known], [told, other]).trajectories
    assert (second.id, second.tokens, second.loss_mask) == (3 + SIBLINGS_APART, (8, 9), (False, False))
    assert set(second.policy_versions) == {CURRENT_VERSION}
    unknown = Trajectory((1, 8, 9), num_response_tokens=2, reward=1.0)
    with pytest.raises(Unusable, match="trajectory 0"):
        told_trajectories(known, [known], [unknown])


@pytest.mark.parametrize("answer", [Observed(3, tokens=(1,), reward=0.1), Observed(4, Status.FAILED)])
def test_answers_are_the_same_on_all_ranks(answer):
    assert through_json(answer) == answer


EPISODE_SAMPLING = SamplingParams(temperature=1.0, top_p=1.0, top_k=0, max_response_tokens=60, stop_token_ids=())
NUM_SAMPLES = 3
END = 7
"""The token at the end of a turn."""


class TurnEngine(ScriptedEngine):
    """An engine with turns of random lengths. Its log has all given and generated tokens of each sample."""

    def __init__(self, seed: int, num_slots: int) -> None:
        super().__init__(lambda number: 0, num_slots)
        self.random = random.Random(seed)
        self.log: dict[int, list[int]] = {}
        self.most_at_once = 0
        self.forgotten: set[int] = set()

    def submit(self, samples: Sequence[Sample], sampling: SamplingParams) -> None:
        for sample in samples:
            known = self.log.setdefault(sample.id, [])
            assert [*sample.context[: len(known)]] == known, "generated tokens are never encoded again"
            known += sample.context[len(known) :]
        super().submit(samples, sampling)

    def step(self) -> list[Sample]:
        running = self.unfinished[: self.num_slots]
        self.most_at_once = max(self.most_at_once, len(running))
        drawn = [self._draw(sample) for sample in running]
        self.unfinished[: self.num_slots] = [sample for sample in drawn if not sample.is_finished]
        return [sample for sample in drawn if sample.is_finished]

    def forget(self, ids: Sequence[int]) -> None:
        assert not set(ids) & {sample.id for sample in self.unfinished}
        self.forgotten |= set(ids)

    def _draw(self, sample: Sample) -> Sample:
        token = self.random.choice([1, 2, 3, END])
        self.log[sample.id].append(token)
        limit = min(EPISODE_SAMPLING.max_response_tokens, sample.turn_limit or EPISODE_SAMPLING.max_response_tokens)
        status = Status.STOPPED if token == END else Status.PENDING
        if status == Status.PENDING and len(sample.tokens) + 1 >= limit:
            status = Status.TRUNCATED
        return sample.drawn([token], [-0.5], [0], status)


@dataclass
class RandomEnvironments:
    """Environments that answer in any order, after a while. They record the answers. The reward of a turn is its
    number."""

    seed: int
    fails: float = 0.0
    """The share of steps that fail."""
    pending: deque[EpisodeEvent] = field(default_factory=deque)
    turns: dict[int, int] = field(default_factory=dict)
    abandoned: list[int] = field(default_factory=list)
    actions: dict[int, list[Action]] = field(default_factory=dict)
    going_on: frozenset[int] = frozenset()
    claimed: list[int] = field(default_factory=list)
    num_saved: int = 0

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)

    def begin(self, episode: int, row: Row, seed: int) -> None:
        self.turns[episode] = 0
        self.pending.append(EpisodeEvent(episode, row["prompt"]))

    def act(self, episode: int, action: Action) -> None:
        self.actions.setdefault(episode, []).append(action)
        self.turns[episode] += 1
        if self.random.random() < self.fails:
            failure = EpisodeFailure("error", "KeyError: 'x'")
            self.pending.append(EpisodeEvent(episode, None, done=True, failure=failure))
            return
        done = self.random.random() < 0.3
        observation = "".join(self.random.choices("abc", k=self.random.randint(0, 5)))
        self.pending.append(EpisodeEvent(episode, observation, reward=float(self.turns[episode]), done=done))

    def abandon(self, episode: int) -> None:
        self.abandoned.append(episode)

    def claim(self, episode: int) -> None:
        assert episode in self.going_on
        self.claimed.append(episode)

    def save(self, number: int) -> None:
        self.num_saved = number

    def events(self) -> list[EpisodeEvent]:
        self.random.shuffle(self.pending)
        count = self.random.randint(0, len(self.pending))
        return [self.pending.popleft() for _ in range(count)]


class Letters:
    """A `TurnFormat` with letters as the tokens from 10 on."""

    def prompt(self, observation: str) -> Context:
        return Context(tuple(10 + ord(letter) - ord("a") for letter in observation))

    def continuation(self, turn: Sequence[int], observation: str) -> Context:
        return self.prompt(observation)

    def action(self, turn: Sequence[int], *, truncated: bool, position: int) -> Action:
        return Action(" ".join(map(str, turn)), truncated=truncated)


LIMITS = TurnLimits(max_turns=6, max_prompt_tokens=10, max_response_tokens=60, max_context_tokens=70, vocab_size=1000)


def wait_for(come: Callable[[], bool | None], what: str) -> None:
    for _ in range(1000):
        if come():
            return
    raise AssertionError(f"{what} never come")


def conversations(
    environments: RandomEnvironments, engine: TurnEngine, *, overlaps: bool = True, limits: TurnLimits = LIMITS
) -> PromptGroups:
    episodes = EnvironmentEpisodes(
        [environments], Letters(), limits, lambda row: {"prompt": "ab" + "c" * row}, wait_for, overlaps=overlaps
    )

    def group_at(position: int) -> SampleGroup:
        ids = range(position * NUM_SAMPLES, (position + 1) * NUM_SAMPLES)
        return SampleGroup(position, position, tuple(Sample(number, (99,), seed=number) for number in ids))

    return PromptGroups(engine, EPISODE_SAMPLING, group_at, NUM_SAMPLES, episodes, max_turn_tokens=9)


def run(groups: PromptGroups, positions: deque[int], num_rounds: int = 5000) -> list[SampleGroup]:
    """Begins groups while there is room, and returns the finished ones."""
    finished: list[SampleGroup] = []
    for _ in range(num_rounds):
        if not (positions or groups.begun):
            break
        groups.start([positions.popleft() for _ in range(min(groups.num_wanted, len(positions)))])
        finished += groups.answer(groups.answers())
        finished += groups.step()
    return finished


def draw(
    environments: RandomEnvironments, engine: TurnEngine, *, overlaps: bool = True, limits: TurnLimits = LIMITS
) -> list[SampleGroup]:
    """Returns four finished groups."""
    groups = conversations(environments, engine, overlaps=overlaps, limits=limits)
    finished = run(groups, deque(range(4)))
    assert not groups.begun and not groups.waiting, "every group ends"
    return finished


class SilentEnvironments:
    """Environments without an observation at the beginning."""

    going_on = ()

    def __init__(self) -> None:
        self.pending: list[EpisodeEvent] = []

    def begin(self, episode: int, row: dict, seed: int) -> None:
        self.pending.append(EpisodeEvent(episode, None))

    def abandon(self, episode: int) -> None:
        """Ends nothing."""

    def events(self) -> list[EpisodeEvent]:
        events, self.pending = self.pending, []
        return events


def silent(
    environments: SilentEnvironments, count: int = 1, limits: TurnLimits = LIMITS, **more: Any
) -> EnvironmentEpisodes:
    """Returns the episodes of a group after its beginning."""
    episodes = EnvironmentEpisodes([environments], Letters(), limits, lambda row: {}, wait_for, **more)
    samples = [Sample(number, (), seed=0) for number in range(count)]
    episodes.begin(SampleGroup(0, 7, (*samples,)), samples)
    return episodes


@pytest.mark.parametrize("prompt", ["abc", "much too long"])
def test_a_rows_own_prompt_is_encoded_with_what_environments_tell_of_besides(prompt):
    episodes = silent(SilentEnvironments(), own_prompt=lambda row: prompt)
    (answer,) = episodes.answers(engine_is_idle=True)
    if prompt == "abc":
        assert answer == Observed(0, tokens=(10, 11, 12))
        return
    assert answer == Observed(0, Status.FAILED)
    with pytest.raises(EpisodeError, match="prompt has 13 tokens.*expected 1 to 10"):
        episodes.metrics()


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 12), st.booleans(), st.booleans())
def test_what_the_engine_drew_and_was_given_is_what_is_trained_on(seed, num_slots, overlaps, fails):
    environments, engine = RandomEnvironments(seed, 0.2 * fails), TurnEngine(seed, num_slots)
    groups = draw(environments, engine, overlaps=overlaps)
    assert sorted(group.position for group in groups) == [0, 1, 2, 3]
    for sample in (sample for group in groups for sample in group.samples):
        assert [*sample.context] == engine.log[sample.id]
        drawn = [token for token, is_drawn in zip(sample.tokens, sample.loss_mask, strict=True) if is_drawn]
        assert " ".join(action.text for action in environments.actions[sample.id]) == " ".join(map(str, drawn))
        assert len(sample.turns) == len(sample.turn_rewards) == environments.turns[sample.id]
        failed = sample.status == Status.FAILED
        assert [*sample.turn_rewards] == [*range(1, len(sample.turns) + 1 - failed), *[0.0] * failed]
        assert failed <= fails
    assert engine.most_at_once <= num_slots
    assert engine.forgotten == set(engine.log), "the engine forgets finished conversations"


def test_an_episode_ends_where_there_is_no_more_room_and_its_environment_is_told():
    environments, engine = RandomEnvironments(3), TurnEngine(3, num_slots=4)
    groups = draw(environments, engine, limits=replace(LIMITS, max_turns=2))
    samples = [sample for group in groups for sample in group.samples]
    cut = [sample for sample in samples if sample.id in environments.abandoned]
    assert cut and all(len(sample.turns) == 2 and sample.status == Status.TRUNCATED for sample in cut)
    assert all(len(sample.turns) <= 2 for sample in samples)


def test_nothing_is_learnt_from_an_episode_that_failed():
    environments, engine = RandomEnvironments(5, fails=0.2), TurnEngine(5, num_slots=4)
    groups = sorted(draw(environments, engine), key=lambda group: group.position)
    experience = pack_groups(groups, [0, 1, 2, 3])
    samples = [sample for group in groups for sample in group.samples]
    assert any(sample.status == Status.FAILED for sample in samples)
    masks = experience.response_mask.split(experience.lengths.tolist())
    rewards = experience.turn_rewards.split(experience.lengths.tolist())
    for sample, mask, reward in zip(samples, masks, rewards, strict=True):
        assert bool(mask.any()) == (sample.status != Status.FAILED)
        assert float(reward.sum()) == sum(sample.turn_rewards)
        ends = torch.nonzero(reward).flatten() - len(sample.prompt) + 1
        assert set(ends.tolist()) <= set(sample.turns)
    assert experience.turns.tolist() == [len(sample.turns) for sample in samples]


class FailingEngine(TurnEngine):
    """An engine with occasional logits that are not finite. Such a turn ends before that token."""

    def _draw(self, sample: Sample) -> Sample:
        if self.random.random() < 0.03:
            return sample.drawn((), (), (), Status.FAILED)
        return super()._draw(sample)


@pytest.mark.parametrize("overlaps", [True, False])
def test_a_turn_that_the_engine_could_not_draw_costs_its_episode(overlaps):
    environments, engine = RandomEnvironments(5), FailingEngine(5, num_slots=4)
    groups = conversations(environments, engine, overlaps=overlaps)
    finished = sorted(run(groups, deque(range(4))), key=lambda group: group.position)
    assert [group.position for group in finished] == [0, 1, 2, 3] and not groups.waiting
    samples = [sample for group in finished for sample in group.samples]
    failed = [sample for sample in samples if sample.status == Status.FAILED]
    assert 0 < len(failed) < len(samples)
    assert all(len(sample.turns) == len(sample.turn_rewards) for sample in samples)
    assert {sample.id for sample in failed} <= set(environments.abandoned)
    assert engine.forgotten == set(engine.log)
    masks = pack_groups(finished, [0, 1, 2, 3])
    masks = masks.response_mask.split(masks.lengths.tolist())
    assert [bool(mask.any()) for mask in masks] == [sample.status != Status.FAILED for sample in samples]
    assert groups.episodes.metrics()["env/failed"] == len(failed)


@pytest.mark.parametrize("wanted", [0, -1, 1.5, "4", True, math.nan, [3], 4, 2**70, None])
def test_an_environment_may_ask_for_a_number_of_tokens_alone(wanted):
    environments = SilentEnvironments()
    episodes = silent(environments)
    environments.pending = [EpisodeEvent(0, TokenIds((1, 2), {"max_new_tokens": wanted}))]
    (answer,) = episodes.answers(engine_is_idle=True)
    if wanted in (4, 2**70, None) and wanted is not True:
        limit = None if wanted is None else min(wanted, LIMITS.max_response_tokens)
        assert answer == Observed(0, tokens=(1, 2), max_turn_tokens=limit)
        return
    assert answer == Observed(0, Status.FAILED)
    with pytest.raises(EpisodeError, match="max_new_tokens = .*expected a whole number, at least 1"):
        episodes.metrics()


@pytest.mark.parametrize("shown", [TokenIds((1, 1000)), TokenIds((-1,)), "b"], ids=str)
def test_an_observation_with_an_id_that_the_model_does_not_have_fails_its_episode(shown):
    environments = SilentEnvironments()
    episodes = silent(environments, 2, replace(LIMITS, vocab_size=11))  # "a" is token 10
    environments.pending = [EpisodeEvent(0, shown), EpisodeEvent(1, "a")]
    assert episodes.answers(engine_is_idle=True) == [Observed(0, Status.FAILED), Observed(1, Status.PENDING, (10,))]
    with pytest.raises(EpisodeError, match=r"the token id (1000|-1|11), but the model has ids 0 to 10"):
        episodes.metrics()


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 10**6), st.integers(0, 60), st.booleans(), st.booleans())
def test_conversations_go_on_from_a_checkpoint_where_their_episodes_do(seed, num_rounds, overlaps, all_go_on):
    """Episodes that were not saved begin again. No group is lost or returned twice."""
    environments, engine = RandomEnvironments(seed), TurnEngine(seed, num_slots=4)
    groups, positions = conversations(environments, engine, overlaps=overlaps), deque(range(4))
    finished = run(groups, positions, num_rounds)
    finished += groups.answer(groups.episodes.settle())
    file = RolloutState(begun=groups.state(), drawn=tuple(finished)).contents()
    state = RolloutState.from_contents(file)
    pending = [sample for group in state.begun for sample in group.pending]
    kept = frozenset(sample.id for sample in pending if all_go_on or sample.id % 2)
    environments.going_on = kept
    environments.pending = deque(event for event in environments.pending if event.episode in kept)
    for lost in {sample.id for sample in pending} - kept:
        engine.log.pop(lost, None)
    again = conversations(environments, engine, overlaps=overlaps)
    again.resume(state.begun)
    assert sorted(environments.claimed) == sorted(kept)
    finished = [*state.drawn, *run(again, positions)]
    assert sorted(group.position for group in finished) == [0, 1, 2, 3]
    for sample in (sample for group in finished for sample in group.samples):
        assert [*sample.context] == engine.log[sample.id]
        assert len(sample.turns) == len(sample.turn_rewards)


def test_a_job_in_which_no_environment_works_ends_with_the_first_failure():
    groups = conversations(RandomEnvironments(2, fails=1.0), TurnEngine(2, num_slots=4))
    run(groups, deque(range(4)))
    with pytest.raises(EpisodeError, match="all 12 episodes of the first step failed; .* failure was KeyError: 'x'"):
        groups.episodes.metrics()
    groups = conversations(RandomEnvironments(2, fails=0.5), TurnEngine(2, num_slots=4))
    run(groups, deque(range(4)))
    assert 0 < groups.episodes.metrics()["env/failed"] < 12


def test_in_turn_nobody_steps_while_the_engine_draws():
    """This is the order of `env.overlap: false`."""
    environments, engine = RandomEnvironments(1), TurnEngine(1, num_slots=100)
    act = environments.act

    def watched(episode: int, action: Action) -> None:
        assert engine.num_unfinished == 0
        act(episode, action)

    environments.act = watched  # type: ignore[method-assign]
    draw(environments, engine, overlaps=False)


def test_a_decision_says_whether_there_is_anything_to_do():
    assert not LeaderDecision() and LeaderDecision(claims=(1,))
