"""Tests of scoring prompt groups during decoding, and of the filter of groups."""

import json
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import KW_ONLY, dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from rltrain.config import schema
from rltrain.data.experience import Experience
from rltrain.errors import ConfigError, RewardError
from rltrain.rewards.answers import Scorable
from rltrain.rewards.group_filter import FAILED, load_group_filter
from rltrain.rewards.scorer import PendingScores, Scorer, Scores
from rltrain.roles.reward_statistics import RewardStatistics
from rltrain.roles.role import SampleLog
from rltrain.roles.scoring import GroupScoring
from rltrain.rollout.generation_loop import GenerationLoop
from rltrain.rollout.groups import DropCount, ReadySamples, Selection, Verdict
from rltrain.rollout.rollout_state import EngineStart, RolloutState, share_out
from rltrain.rollout.sample import Sample, SampleGroup, Status, pack_groups
from tests.support.generation_loops import FRESH, Chunk, Setting, positions, prompt_groups
from tests.support.shared_store import Jobs, open_store


def test_a_group_is_finished_when_its_last_sample_is():
    groups = prompt_groups(lambda number: [3, 1, 2, 2][number])
    groups.start([0, 1])
    assert groups.step() == []
    assert [group.position for group in groups.step()] == [1]
    assert len(groups.begun) == 1
    (group,) = groups.step()
    assert [sample.id for sample in group.samples] == [0, 1], "not in the order of finishing"
    assert [sample.tokens for sample in group.samples] == [(0, 1, 2), (1000,)]
    assert (group.position, group.row, group.prompt) == (0, 100, (0,))
    assert len(groups.begun) == 0


def test_token_counts_are_those_of_all_samples():
    groups = prompt_groups(lambda number: number)
    groups.start([2])
    (group,) = [group for _ in range(5) for group in groups.step()]
    assert group.num_response_tokens == 4 + 5
    assert group.num_tokens == 2 * 3 + 4 + 5, "the prompt counts with every sample"
    assert group.num_distinct_tokens == 3 + 4 + 5


def test_tokens_of_a_group_that_begin_alike_are_counted_once():
    texts = [(5, 6, 7, 8), (5, 6), (5, 6, 9), (4,), (5, 6, 9)]
    samples = (Sample(number, text, seed=0) for number, text in enumerate(texts))
    beginnings = {text[: end + 1] for text in texts for end in range(len(text))}
    assert SampleGroup(0, 0, tuple(samples)).num_distinct_tokens == len(beginnings) == 6


def test_room_is_for_whole_groups():
    groups = prompt_groups(lambda number: 9, num_samples=2, num_slots=5)
    assert groups.num_wanted == 2
    groups.start([0])
    assert groups.num_wanted == 1
    groups.start([1])
    assert groups.num_wanted == 0


def test_a_group_larger_than_the_engine_is_taken_when_nothing_else_runs():
    groups = prompt_groups(lambda number: 1, num_samples=4, num_slots=3)
    assert groups.num_wanted == 1
    groups.start([0])
    assert groups.num_wanted == 0
    assert [len(groups.step()) for _ in range(2)] == [0, 1]
    assert groups.num_wanted == 1


@given(st.lists(st.integers(1, 6), min_size=8, max_size=8), st.sets(st.integers(0, 20), max_size=6))
def test_suspending_at_any_step_changes_no_response(lengths, suspensions):
    def draw(suspended_at: set[int]) -> dict[int, SampleGroup]:
        groups = prompt_groups(lambda number: lengths[number], num_slots=3)
        groups.start([0, 1])
        drawn = []
        for step in range(60):
            if step == 4:
                groups.start([2, 3])
            if step in suspended_at:
                groups.suspend()
                assert groups.engine.num_unfinished == 0
                groups.start(())
            drawn += groups.step()
        assert len(groups.begun) == 0
        return {group.position: group for group in drawn}

    assert draw(suspensions) == draw(set())


def test_suspended_groups_come_before_new_ones():
    groups = prompt_groups(lambda number: 3)
    groups.start([0])
    groups.step()
    groups.suspend()
    groups.start([1])
    assert [sample.id for sample in groups.engine.unfinished] == [0, 1, 2, 3]
    assert [len(sample.tokens) for sample in groups.engine.unfinished] == [1, 1, 0, 0]


def test_suspending_twice_in_a_row_keeps_everything():
    groups = prompt_groups(lambda number: 2)
    groups.start([0])
    groups.suspend()
    groups.suspend()
    groups.start(())
    assert [group.position for _ in range(2) for group in groups.step()] == [0]


def after_turns(number: int, num_turns: int) -> Sample:
    return replace(Sample(number, (1,), seed=0), turns=tuple(range(1, num_turns + 1)))


def test_those_with_the_fewest_turns_made_come_first_and_of_these_who_waits_longest():
    ready = ReadySamples()
    ready.add([after_turns(number, turns) for number, turns in enumerate([2, 0, 1, 0, 2, 1])], spread=6)
    assert [sample.id for sample in ready.take(4)] == [1, 3, 2, 5]
    ready.add([after_turns(9, 0)], spread=6)
    assert len(ready) == 3
    assert [sample.id for sample in ready.take(9)] == [9, 0, 4]
    assert not ready and ready.take(1) == []


@settings(max_examples=50, derandomize=True, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 6), st.lists(st.integers(0, 5), max_size=6)), max_size=30), st.data())
def test_nobody_is_overtaken_by_more_than_its_turns_allow(
    arrivals: list[tuple[int, list[int]]], data: st.DataObject
) -> None:
    """In each round, samples arrive with any number of turns, and some samples are taken."""
    ready, waiting, number = ReadySamples(), dict[int, list[int]](), 0
    for spread, turns in arrivals:
        samples = [after_turns(number + place, made) for place, made in enumerate(turns)]
        number += len(samples)
        ready.add(samples, spread)
        waiting |= {sample.id: [] for sample in samples}
        for sample in ready.take(data.draw(st.integers(0, 4))):
            del waiting[sample.id]
            for other, overtaking in waiting.items():
                if other < sample.id:
                    overtaking.append(sample.id)
    bounds = [spread * made for spread, turns in arrivals for made in turns]
    assert all(len(overtaking) <= bounds[sample_id] for sample_id, overtaking in waiting.items())


DIFFER = schema.DynamicSampling()
SAMPLES = [Scorable("2+2", text, "4") for text in ("4", "5")]


def scores(*rewards: float, errors: int = 0) -> Scores:
    return Scores([*rewards], by_function={"": Scores([*rewards], num_errors=errors)})


def by_length(prompt: str, responses: list[str], rewards: list[float], label: str) -> object:
    """A user's filter. The label chooses its answer."""
    assert (prompt, len(responses)) == ("2+2", len(rewards))
    return {"keep": True, "drop": False, "why": "too easy!", "wrong": None}[label] if label != "raise" else 1 / 0


@pytest.mark.parametrize(
    ("rewards", "errors", "reason"),
    [
        ((1.0, 0.0), 0, None),
        ((1.0, 1.0), 0, "zero_std_1.0"),
        ((0.0, 0.0), 0, "zero_std_0.0"),
        ((0.1 + 0.2, 0.3), 0, "zero_std_0.3"),
        ((0.0, 0.0), 1, "zero_std_0.0"),
        ((0.0, 0.0), 2, FAILED),
    ],
)
def test_groups_count_whose_rewards_differ_in_training(rewards, errors, reason):
    assert load_group_filter(DIFFER)(SAMPLES, scores(*rewards, errors=errors)) == reason


@pytest.mark.parametrize(("label", "reason"), [("keep", None), ("drop", "filter"), ("why", "too_easy_")])
def test_a_filter_of_ones_own_names_its_reason(label, reason):
    own = load_group_filter(schema.DynamicSampling(filter=f"{__name__}:by_length"))
    assert own([sample._replace(label=label) for sample in SAMPLES], scores(1.0, 1.0)) == reason


@pytest.mark.parametrize(
    ("label", "message"), [("wrong", "returned None; expected true"), ("raise", "raised ZeroDivision")]
)
def test_a_filter_that_fails_ends_the_run_by_name(label, message):
    own = load_group_filter(schema.DynamicSampling(filter=f"{__name__}:by_length"))
    with pytest.raises(RewardError, match=f"dynamic_sampling.filter: .*by_length' {message}"):
        own([sample._replace(label=label) for sample in SAMPLES], scores(1.0, 1.0))


def test_an_unknown_filter_is_refused():
    with pytest.raises(ConfigError, match="dynamic_sampling.filter: 'rewards_difer' is unknown"):
        load_group_filter(schema.DynamicSampling(filter="rewards_difer"))


def test_scores_survive_a_checkpoint():
    turns = Scores([1.5, 0.0], 1, 0, "why", {0: [1.0, 0.5]}, frozenset({1}), {"length": (3.5, 2)})
    parts = {"a": turns, "b": Scores([0.1, 0.2], 0, 1)}
    whole = Scores([1.5, 0.0], turn_rewards={0: [1.0, 0.5]}, skipped=frozenset({1}), by_function=parts)
    again = Scores.of_record(json.loads(json.dumps(whole.record())))
    assert again == whole and again.by_function["a"].first_failure == "why"


def group_at(position: int, *lengths: int) -> SampleGroup:
    """Returns a group with two prompt tokens, and responses of these lengths."""
    return SampleGroup(
        position,
        row=position,
        samples=tuple(
            Sample(10 * position + i, (1, 2), seed=0).drawn([7] * n, [-0.5] * n, [3] * n, Status.STOPPED)
            for i, n in enumerate(lengths)
        ),
    )


def scorables(experience: Experience, step: int) -> list[Scorable]:
    """Returns scorables. The label is right if the length of the response is odd."""
    lengths = experience.response_mask.split(experience.lengths.tolist())
    return [Scorable("", str(int(mask.sum()) % 2), "1", step=step) for mask in lengths]


@pytest.fixture
def scoring(tmp_path: Path) -> Any:
    with Scorer.of(schema.Reward(function="exact_match")) as scorer:
        yield GroupScoring(scorer, scorables, load_group_filter(DIFFER), SampleLog(str(tmp_path), "dropped.jsonl"))


def test_rewards_travel_with_the_samples_that_count_and_nobody_scores_them_again(scoring, tmp_path):
    mixed, dull, other = group_at(4, 1, 2), group_at(5, 2, 2), group_at(9, 4, 3)
    spared, allowed = group_at(7, 2, 4), iter([True, False])
    finished = {group.position: group for group in (mixed, dull, spared, other)}
    verdicts = {v.position: v for v in scoring.verdicts(finished, 6, lambda step: next(allowed))}
    assert {position: verdict.is_dropped for position, verdict in verdicts.items()} == {
        4: False,
        5: True,
        7: False,
        9: False,
    }
    (line,) = (tmp_path / "dropped.jsonl").read_text().splitlines()
    assert json.loads(line) == {"step": 6, "reason": "zero_std_0.0", "sample_ids": [50, 51]}
    experience = pack_groups([other, mixed], [4, 9])
    given = scoring.hand_over(6, 0, experience, [(other, verdicts[9].record), (mixed, verdicts[4].record)])
    assert given.rewards.tolist() == [0.0, 1.0, 1.0, 0.0]
    assert given.reward_parts.tolist() == [[0.0], [1.0], [1.0], [0.0]]
    assert given.sample_ids.tolist() == [90, 91, 40, 41]
    statistics = RewardStatistics()
    handed_over = scoring.handed_over.pop((6, 0))
    for of_group, its_scores in handed_over.groups:
        statistics.add(of_group, its_scores)
    statistics.add_dropped(handed_over.dropped, handed_over.num_spared)
    metrics = RewardStatistics.metrics([statistics.record()])
    assert metrics["reward_mean"] == 0.5 and metrics["response_length_mean"] == 2.5
    assert metrics["dynamic_filter/kept_at_limit"] == 1
    assert metrics["dynamic_filter/dropped"] == metrics["dynamic_filter/drop_zero_std_0.0"] == 1
    (dropped,) = handed_over.dropped_groups
    assert dropped.sample_ids.tolist() == [50, 51] and dropped.rewards.tolist() == [0.0, 0.0]


def test_an_engine_that_drew_none_of_a_chunk_has_none_to_reward(scoring):
    none = scoring.hand_over(0, 1, pack_groups([], [1, 2]), [])
    assert none.num_samples == 0 and len(none.rewards) == len(none.turn_rewards) == 0
    assert none.reward_parts.shape == (0, 1), "as many functions as on other engines"


def test_scores_are_done_when_every_worker_has_answered():
    first, second = futures = (Future[list[Any]](), Future[list[Any]]())
    pending = PendingScores([], [futures, []])
    first.set_result([])
    assert not pending.is_done
    second.set_exception(ConfigError("no worker could start"))
    assert pending.is_done, "a waiting caller must notice it"
    with Scorer.of(schema.Reward(function="exact_match")) as scorer:
        assert scorer.begin([Scorable("p", "r", "l")]).is_done, "the function needs no worker"


class Slow:
    """A scorer with answers on command."""

    def __init__(self) -> None:
        self.answered = threading.Event()

    def begin(self, samples: list[Scorable]) -> Any:
        self.samples = samples
        return self

    @property
    def is_done(self) -> bool:
        return self.answered.is_set()

    def wait(self, pending: Any) -> Scores:
        assert self.is_done, "no wait for rewards while the engine can decode"
        return scores(0.0, 1.0)


def any_number(step: int) -> bool:
    """Allows a step to drop any number of groups."""
    return True


def test_the_engine_goes_on_until_rewards_are_known():
    slow = Slow()
    scoring = GroupScoring(slow, scorables, load_group_filter(DIFFER), None)  # type: ignore[arg-type]
    groups = {3: group_at(3, 1, 1)}
    assert scoring.verdicts(groups, 0, any_number) == scoring.verdicts(groups, 0, any_number) == []
    slow.answered.set()
    assert [verdict.position for verdict in scoring.verdicts(groups, 0, any_number)] == [3]


@dataclass
class ScriptedFilter:
    """A filter that drops groups by `drops`. Its verdict takes `lag` looks after a group is finished."""

    drops: Callable[[int], bool]
    lag: int = 0
    looks: Counter[int] = field(default_factory=Counter)
    told: Counter[int] = field(default_factory=Counter)
    dropped: list[tuple[int, int]] = field(default_factory=list)
    """Pairs of (step, position)."""
    spared: list[tuple[int, int]] = field(default_factory=list)
    """Pairs of (step, position)."""

    def __call__(
        self, groups: Mapping[int, SampleGroup], step: int, may_drop: Callable[[int], bool]
    ) -> Iterable[Verdict]:
        known = [position for position in groups if self.looks[position] >= self.lag]
        self.looks.update(groups.keys())
        self.told.update(known)
        return [self._verdict(position, step, may_drop) for position in known]

    def _verdict(self, position: int, step: int, may_drop: Callable[[int], bool]) -> Verdict:
        if not self.drops(position):
            return Verdict(position, is_dropped=False, record=f"of {position}")
        is_dropped = may_drop(step)
        (self.dropped if is_dropped else self.spared).append((step, position))
        return Verdict(position, is_dropped, f"of {position}")


@dataclass
class Filtering(Setting):
    """The common settings of the engines in a run with a group filter."""

    drops: Callable[[int], bool]
    limit: int = 100
    lag: int = 0
    _: KW_ONLY
    per_step: int = 4
    num_steps: int = 3
    partial: bool = True
    shared: bool = False
    length_of: Callable[[int], int] = lambda number: 1 + number * 7 % 5

    def scripted(
        self, engine: int, store: dist.Store, start: EngineStart = FRESH
    ) -> tuple[GenerationLoop, ScriptedFilter]:
        selection = Selection(DropCount(store, self.limit))
        loop = self.loop(engine, store, start, selection)
        selection.filter = ScriptedFilter(self.drops, self.lag)
        return loop, selection.filter

    def run_filtered(self, jobs: Jobs) -> list[tuple[list[Chunk], GenerationLoop, ScriptedFilter]]:
        """Returns the chunks, the loop and the filter of each engine."""

        def engine(rank: int, own: dist.Store) -> Any:
            loop, scripted = self.scripted(rank, own)
            chunks = [loop.run(step, chunk) for step in range(self.num_steps) for chunk in range(self.num_chunks)]
            return chunks, loop, scripted

        return jobs.run(engine, self.num_engines)


@pytest.fixture(scope="module")
def jobs() -> Iterator[Jobs]:
    with open_store() as store:
        yield Jobs(store, num_ranks=2)


def test_others_are_drawn_in_the_place_of_those_that_are_dropped(jobs):
    """Odd positions are dull. No group begins without a step to take it, so its weights are that step's."""
    ((chunks, loop, scripted),) = Filtering(lambda position: position % 2 == 1).run_filtered(jobs)
    assert [positions(drawn) for _, drawn in chunks] == [[0, 2, 4, 6], [8, 10, 12, 14], [16, 18, 20, 22]]
    assert sorted(scripted.dropped) == [((p + 1) // 8, p) for p in range(1, 23, 2)]
    assert not loop.groups.begun and not loop.selection.undecided
    assert loop.consumed.num_dropped == 11 and loop.consumed.num_handed_over == 12


def test_a_step_ends_though_every_group_is_dull(jobs):
    """After the limit of drops, the step takes dull groups."""
    ((chunks, loop, scripted),) = Filtering(lambda position: True, limit=3).run_filtered(jobs)
    assert [len(drawn) for _, drawn in chunks] == [4, 4, 4]
    assert Counter(step for step, _ in scripted.dropped) == {0: 3, 1: 3, 2: 3}
    assert Counter(step for step, _ in scripted.spared) == {0: 4, 1: 4, 2: 4}
    assert loop.selection.drops.total == 9


def test_what_is_known_of_a_group_is_kept_until_it_is_handed_over(jobs):
    setting = Filtering(lambda position: position == 1, ahead=4)
    loop, _ = setting.scripted(0, jobs.start(1)[0])
    _, drawn = loop.run(0, 0)
    assert {position: loop.selection.records[position] for position in positions(drawn)} == {
        position: f"of {position}" for position in positions(drawn)
    }
    assert loop.selection.records.keys() == {*positions(drawn), *loop.drawn}


@settings(max_examples=25, deadline=None)
@given(
    st.sets(st.integers(0, 40), max_size=25),
    st.sampled_from([0, 2, 100]),
    st.sampled_from([1, 2]),
    st.booleans(),
    st.sampled_from([0, 3]),
    st.sampled_from([0, 4]),
    st.sampled_from([1, 2]),
)
def test_every_group_is_handed_over_dropped_or_still_there(
    jobs, dull, limit, num_engines, shared, lag, ahead, num_chunks
):
    by_engine = Filtering(
        dull.__contains__, limit, num_engines=num_engines, shared=shared, lag=lag, ahead=ahead, num_chunks=num_chunks
    ).run_filtered(jobs)
    (finished, *others) = [[entries for entries, _ in chunks] for chunks, _, _ in by_engine]
    assert all(other == finished for other in others), "all engines agree"
    assert [len(entries) for entries in finished] == [4 // num_chunks] * 3 * num_chunks
    handed_over = [entry.position for entries in finished for entry in entries]
    assert sorted(handed_over) == sorted(
        p for chunks, _, _ in by_engine for _, drawn in chunks for p in positions(drawn)
    )
    dropped = [position for _, _, scripted in by_engine for _, position in scripted.dropped]
    assert dull.issuperset(dropped)
    assert (
        max(Counter(step for _, _, scripted in by_engine for step, _ in scripted.dropped).values(), default=0) <= limit
    )
    held = [p for _, loop, _ in by_engine for p in (*loop.groups.begun, *loop.drawn, *loop.selection.undecided)]
    everything = Counter([*handed_over, *dropped, *held])
    assert everything == Counter(range(len(everything))), "each position once, without gaps"
    if not ahead:
        assert not held, "a group's own step takes or drops it"
        if limit == 100:
            kept = [position for position in range(60) if position not in dull]
            assert sorted(handed_over) == kept[:12], "independent of the engines' speed"
    assert all(count == 1 for _, _, scripted in by_engine for count in scripted.told.values())
    (consumed,) = {loop.consumed for _, loop, _ in by_engine}
    unseen = [position for _, loop, _ in by_engine for position in loop.selection.unseen]
    assert consumed.num_dropped == len(dropped) - len(unseen)


@settings(max_examples=15, deadline=None)
@given(st.sets(st.integers(0, 40), max_size=25), st.sampled_from([0, 4]), st.sampled_from([0, 1]), st.integers(1, 3))
def test_a_run_that_goes_on_from_a_checkpoint_takes_what_it_would_have_taken(jobs, dull, ahead, lag, cut):
    """With one engine, the decode steps are the same. Known verdicts are not requested again."""
    setting = Filtering(dull.__contains__, limit=3, ahead=ahead, lag=lag, num_steps=4)
    ((expected, _, whole),) = setting.run_filtered(jobs)
    loop, before = setting.scripted(0, jobs.start(1)[0])
    found = [loop.run(step, 0) for step in range(cut)]
    state = RolloutState.from_contents(loop.state().contents())
    (start,) = share_out([state], 1)
    assert start.state.consumed.num_handed_over == 4 * cut
    resumed, after = setting.scripted(0, jobs.start(1)[0], start)
    found += [resumed.run(step, 0) for step in range(cut, 4)]
    assert [positions(drawn) for _, drawn in found] == [positions(drawn) for _, drawn in expected]
    assert [drawn for _, drawn in found] == [drawn for _, drawn in expected]
    assert before.dropped + after.dropped == whole.dropped
    assert not {p for p in before.told if p in state.records} & after.told.keys()


@settings(max_examples=10, deadline=None)
@given(st.sets(st.integers(0, 40), max_size=25), st.sampled_from([0, 2]), st.sampled_from([0, 2]))
def test_engines_of_another_number_go_on_with_what_was_dropped(jobs, dull, ahead, lag):
    setting = Filtering(dull.__contains__, num_engines=2, ahead=ahead, lag=lag, num_steps=4)

    def first(rank: int, own: dist.Store) -> Any:
        loop, scripted = setting.scripted(rank, own)
        chunks = [loop.run(step, 0) for step in range(2)]
        return [chunk for chunk, _ in chunks], scripted.dropped, loop.state()

    by_engine = jobs.run(first, 2)
    (start,) = share_out([state for _, _, state in by_engine], 1)
    alone = Filtering(setting.drops, num_steps=4, ahead=ahead, lag=lag)
    loop, scripted = alone.scripted(0, jobs.start(1)[0], start)
    later = [loop.run(step, 0)[0] for step in (2, 3)]
    handed_over = [entry.position for entries in (*by_engine[0][0], *later) for entry in entries]
    dropped = [p for _, of_engine, _ in by_engine for _, p in of_engine] + [p for _, p in scripted.dropped]
    held = [*loop.groups.begun, *loop.drawn, *loop.selection.undecided]
    everything = Counter([*handed_over, *dropped, *held])
    assert everything == Counter(range(len(everything)))
    assert len(handed_over) == 16 and dull.isdisjoint(handed_over)


@pytest.mark.parametrize("limit", [0, 1])
def test_counts_of_steps_that_are_over_do_not_stay(limit: int) -> None:
    store = dist.HashStore()
    engines = [DropCount(store, limit) for _ in range(2)]
    for step in range(0, 60, 3):
        assert [engine.take(step) for engine in engines] == [limit > 0, False]
        assert store.num_keys() <= 2, "one key of this step and one of all steps"
