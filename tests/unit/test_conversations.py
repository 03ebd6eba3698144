"""Tests of samples with a cache that is kept between turns."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rltrain.rollout.embedded import EmbeddedEngine, generation
from rltrain.rollout.embedded.generation import suffix_passes
from rltrain.rollout.embedded.kv_cache import Suffix
from rltrain.rollout.engine import SamplingParams
from rltrain.rollout.sample import Sample, Status
from tests.support.cuda_graphs import Recorder
from tests.support.rollout_models import VOCAB_SIZE, LetterTokenizer, load_engine, ragged_requests, widths_of_prefills

pytestmark = pytest.mark.usefixtures("small_blocks")


GREEDY = SamplingParams(0.0, 1.0, 0, 200, (3,))
SAMPLED = SamplingParams(1.0, 1.0, 0, 200, (3,))
CONTEXT = 60
"""Tokens of the longest conversation in these tests: 15 blocks of 4."""
REUSED, EVICTED = "rollout/kv_reused_tokens", "rollout/kv_evictions"


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Returns a list of the widths of all prefills, in tokens."""
    return widths_of_prefills(monkeypatch)


@dataclass
class Talk:
    """An episode. Its environment answers every turn but the last, some decode steps later."""

    sample: Sample
    answers: list[tuple[int, ...]]
    turn_tokens: list[int]
    waits: list[int]

    @property
    def turn(self) -> int:
        return len(self.sample.turns)

    @property
    def is_over(self) -> bool:
        return self.turn > len(self.answers)

    def next_turn(self, *, kept: bool) -> Sample:
        """Returns the sample to submit next."""
        limit = len(self.sample.tokens) + self.turn_tokens[self.turn]
        if not self.turn:
            return replace(self.sample, turn_limit=limit, goes_on=kept)
        answer = self.answers[self.turn - 1]
        return self.sample.observed(answer, turn_limit=limit + len(answer))


def talks(seed: int, count: int = 5) -> list[Talk]:
    """Returns talks of one to four turns. Pairs of talks share a prompt, and some prompts begin alike."""
    draw = random.Random(seed)

    def tokens(longest: int) -> tuple[int, ...]:
        return tuple(draw.randrange(4, VOCAB_SIZE) for _ in range(draw.randint(0, longest)))

    systems = [(5, *tokens(9)) for _ in range(2)]
    prompts = [(*systems[number % 2], *tokens(3)) for number in range(count)]
    made = []
    for number in range(count):
        answers = [tokens(6) for _ in range(draw.randint(0, 3))]
        sample = Sample(number, prompts[number // 2], seed=100 * seed + number)
        lengths = [draw.randint(1, 6) for _ in range(len(answers) + 1)]
        made.append(Talk(sample, answers, lengths, [draw.randint(0, 7) for _ in answers]))
    return made


def recomputed(path: Path, made: Sequence[Talk], sampling: SamplingParams) -> list[Sample]:
    """Returns the samples of an engine that keeps nothing between two turns."""
    engine, _ = load_engine(path, max_context_tokens=CONTEXT)
    left = [replace(talk) for talk in made]
    done: dict[int, Sample] = {}
    while left:
        for talk, sample in zip(left, engine.generate([t.next_turn(kept=False) for t in left], sampling), strict=True):
            talk.sample = sample
        done |= {talk.sample.id: talk.sample for talk in left}
        left = [talk for talk in left if not talk.is_over]
    assert REUSED not in engine.cache_metrics()
    return [done[talk.sample.id] for talk in made]


def hold(
    engine: EmbeddedEngine, made: Sequence[Talk], sampling: SamplingParams, disturb: Callable[[int], None]
) -> list[Sample]:
    """Returns the samples of `engine` with all talks at once. Calls `disturb` before every step."""
    by_id = {talk.sample.id: talk for talk in made}
    waiting: list[tuple[int, Talk]] = [(3 * index, talk) for index, talk in enumerate(made)]
    for step in range(2000):
        for entry in [entry for entry in waiting if entry[0] <= step]:
            engine.submit([entry[1].next_turn(kept=True)], sampling)
            waiting.remove(entry)
        disturb(step)
        for sample in engine.step():
            talk = by_id[sample.id]
            talk.sample = sample
            if not talk.is_over:
                waiting.append((step + talk.waits[talk.turn - 1], talk))
        if not waiting and not engine.num_unfinished:
            return [talk.sample for talk in made]
    raise AssertionError("some conversation makes no progress")


def assert_same(done: Sequence[Sample], expected: Sequence[Sample]) -> None:
    for one, other in zip(done, expected, strict=True):
        assert (one.id, one.tokens, one.status) == (other.id, other.tokens, other.status)
        assert (one.turns, one.loss_mask) == (other.turns, other.loss_mask)
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-4)


@settings(max_examples=10, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    sampling=st.sampled_from([GREEDY, SAMPLED]),
    num_slots=st.integers(1, 6),
    kv_tokens=st.none() | st.integers(64, 260),
    disturbances=st.dictionaries(st.integers(0, 40), st.sampled_from(["suspend", "release", "forget"]), max_size=2),
)
def test_no_history_changes_a_conversation(
    qwen3: Path,
    seed: int,
    sampling: SamplingParams,
    num_slots: int,
    kv_tokens: int | None,
    disturbances: dict[int, str],
) -> None:
    engine, _ = load_engine(qwen3, max_context_tokens=CONTEXT, max_running_requests=num_slots, kv_tokens=kv_tokens)

    def disturb(step: int) -> None:
        action = disturbances.get(step)
        if action == "forget":
            engine.forget([0, 1, 2])
        elif action is not None:
            suspended = engine.suspend()
            if action == "release":
                engine.release_cache()
            engine.submit(suspended, sampling)

    assert_same(hold(engine, talks(seed), sampling, disturb), recomputed(qwen3, talks(seed), sampling))


@pytest.mark.parametrize("kv_tokens", [None, 400])
def test_a_further_turn_computes_what_is_new_alone(qwen3: Path, computed: list[int], kv_tokens: int | None) -> None:
    engine, _ = load_engine(qwen3, max_context_tokens=CONTEXT, kv_tokens=kv_tokens)
    prompt, answer = tuple(range(10, 21)), (7, 8, 9)
    (first,) = engine.generate([Sample(0, prompt, 0, turn_limit=6, goes_on=True)], replace(GREEDY, stop_token_ids=()))
    assert computed == [len(prompt) - 1]
    (second,) = engine.generate([first.observed(answer, turn_limit=14)], replace(GREEDY, stop_token_ids=()))
    assert computed[1:] == [1 + len(answer) - 1], "the last generated token, and the answer without its last token"
    assert engine.cache_metrics()[REUSED] == len(prompt) + 6 - 1
    assert (second.turns, second.status) == ((6, 14), Status.TRUNCATED)
    assert second.loss_mask == (*[True] * 6, *[False] * 3, *[True] * 5)
    assert engine.cache_metrics()[REUSED] == 0, "nothing reused since the last call"


@pytest.mark.parametrize("kv_tokens", [None, 400])
def test_a_conversation_that_comes_back_with_another_past_is_computed_anew(qwen3: Path, kv_tokens: int | None) -> None:
    engine, _ = load_engine(qwen3, max_context_tokens=CONTEXT, kv_tokens=kv_tokens)
    (first,) = engine.generate([Sample(0, (10, 11, 12, 13, 14, 15), 0, turn_limit=6, goes_on=True)], GREEDY)
    changed = replace(first, prompt=(10, 11, 40, 13, 14, 15)).observed((7, 8), turn_limit=14)
    (found,) = engine.generate([changed], GREEDY)
    assert engine.cache_metrics()[REUSED] == 0
    assert_same([found], load_engine(qwen3)[0].generate([changed], GREEDY))


def finishing_steps(engine: EmbeddedEngine, samples: Sequence[Sample]) -> dict[int, int]:
    """Returns the finishing step of each sample, by sample id."""
    engine.submit(samples, replace(GREEDY, max_response_tokens=20, stop_token_ids=()))
    done: dict[int, int] = {}
    step = 0
    while engine.num_unfinished:
        done |= {sample.id: step for sample in engine.step()}
        step += 1
    return done


def test_what_waits_for_its_environment_makes_nobody_wait(qwen3: Path) -> None:
    others = [Sample(100 + number, (20 + number % 3,) * 9, number) for number in range(6)]
    free, _ = load_engine(qwen3, max_context_tokens=CONTEXT, kv_tokens=120)
    crowded, _ = load_engine(qwen3, max_context_tokens=CONTEXT, kv_tokens=120)
    crowded.generate([Sample(n, (10 + n,) * 20, n, turn_limit=8, goes_on=True) for n in range(4)], GREEDY)
    before = crowded.cache_metrics()
    assert finishing_steps(crowded, others) == finishing_steps(free, others)
    found, expected = crowded.cache_metrics(), free.cache_metrics()
    assert before["rollout/preemptions"] == 0 < found[EVICTED]
    assert found["rollout/preemptions"] == expected["rollout/preemptions"] > 0
    assert found["rollout/kv_cache_peak"] == expected["rollout/kv_cache_peak"]


def test_without_a_budget_no_more_is_kept_than_slots_hold(qwen3: Path) -> None:
    engine, _ = load_engine(qwen3, max_context_tokens=CONTEXT, max_running_requests=2)
    for number in range(12):
        engine.generate([Sample(number, (10,) * 20, number, turn_limit=8, goes_on=True)], GREEDY)
        cache = engine._slots.cache
        assert 0 < cache.parked.num_tokens <= cache.num_slots * cache.capacity
    assert engine.cache_metrics()[EVICTED] > 0


@pytest.mark.parametrize("kv_tokens", [None, 400])
def test_what_was_kept_goes_on_under_new_weights_as_what_runs_does(qwen3: Path, kv_tokens: int | None) -> None:
    engine, _ = load_engine(qwen3, max_context_tokens=CONTEXT, kv_tokens=kv_tokens)
    sampling = replace(GREEDY, stop_token_ids=())
    (first,) = engine.generate([Sample(0, (10, 11, 12), 0, turn_limit=3, goes_on=True)], sampling)
    engine.begin_update()
    engine.end_update(5)
    (second,) = engine.generate([first.observed((7, 8), turn_limit=8)], sampling)
    assert engine.cache_metrics()[REUSED] == 5
    assert second.policy_versions == (0, 0, 0, 0, 0, 5, 5, 5), "observed tokens have no version"


@pytest.mark.parametrize("kv_tokens", [None, 400])
@pytest.mark.parametrize("end", ["suspend", "release_cache", "forget"])
def test_what_was_kept_is_free_afterwards(qwen3: Path, kv_tokens: int | None, end: str) -> None:
    engine, _ = load_engine(qwen3, max_context_tokens=CONTEXT, kv_tokens=kv_tokens)
    samples = [Sample(number, (10 + number,) * 6, 0, turn_limit=3, goes_on=True) for number in range(3)]
    done = engine.generate(samples, GREEDY)
    assert engine._slots.cache.parked.num_tokens == sum(len(sample.context) - 1 for sample in done)
    getattr(engine, end)(*[[0, 1, 2]] if end == "forget" else [])
    assert engine._slots.cache.parked.num_tokens == 0
    if kv_tokens and end != "release_cache":
        pool, num_of_prompts = engine._slots.cache._allocated().pool, 3 if end == "forget" else 0
        assert (pool.num_used, pool.num_kept) == (0, num_of_prompts), "a full block of each prompt stays for others"
        assert pool.num_free == pool.num_blocks - 1 - num_of_prompts


def test_a_stop_string_that_was_observed_ends_no_turn(qwen3: Path) -> None:
    answer = (30, 31, 32)
    sampling = replace(GREEDY, stop_token_ids=(), stop=(LetterTokenizer().decode(answer),))
    engine, _ = load_engine(qwen3, tokenizer=LetterTokenizer())
    (first,) = engine.generate([Sample(0, (10, 11), 0, turn_limit=4, goes_on=True)], sampling)
    (second,) = engine.generate([first.observed(answer, turn_limit=12)], sampling)
    assert (second.turns, second.status) == ((4, 12), Status.TRUNCATED)


def test_recorded_steps_serve_conversations_too(qwen3: Path) -> None:
    record = Recorder()
    engine, _ = load_engine(qwen3, max_context_tokens=CONTEXT, kv_tokens=150, record=record)
    for seed in (1, 2):
        assert_same(hold(engine, talks(seed), SAMPLED, lambda step: None), recomputed(qwen3, talks(seed), SAMPLED))
    assert record.num_replayed > record.num_recorded > 0
    assert engine.cache_metrics()[REUSED] > 0


@pytest.mark.parametrize("kv_tokens", [None, 400])
def test_a_long_answer_is_computed_in_pieces(
    qwen3: Path, computed: list[int], monkeypatch: pytest.MonkeyPatch, kv_tokens: int | None
) -> None:
    monkeypatch.setattr(generation, "_PASS_SCORES", 120)
    engine, _ = load_engine(qwen3, max_context_tokens=CONTEXT, kv_tokens=kv_tokens)
    answer = tuple(range(10, 33))
    (first,) = engine.generate([Sample(0, (10, 11, 12), 0, turn_limit=4, goes_on=True)], GREEDY)
    computed.clear()
    long = first.observed(answer, turn_limit=40)
    (found,) = engine.generate([long], GREEDY)
    assert len(computed) > 3 and sum(computed) == len(answer)
    assert_same([found], load_engine(qwen3)[0].generate([long], GREEDY))


@given(
    lengths=st.lists(st.tuples(st.integers(0, 40), st.integers(0, 60)), max_size=8),
    most_tokens=st.integers(1, 60),
    most_scores=st.integers(1, 3000),
)
@settings(max_examples=30)
def test_passes_compute_every_token_after_those_before_it(
    lengths: list[tuple[int, int]], most_tokens: int, most_scores: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(generation, "PASS_TOKENS", most_tokens)
        patch.setattr(generation, "_PASS_SCORES", most_scores)
        passes = suffix_passes(
            Suffix(slot, first, tuple(range(first, first + count))) for slot, (first, count) in enumerate(lengths)
        )
    there = [first for first, _ in lengths]
    for suffixes in passes:
        assert len({suffix.slot for suffix in suffixes}) == len(suffixes)
        width, end = max(len(suffix.tokens) for suffix in suffixes), max(suffix.end for suffix in suffixes)
        assert len(suffixes) * width <= most_tokens
        assert len(suffixes) * width * end <= max(most_scores, end)
        for suffix in suffixes:
            assert suffix.first == there[suffix.slot] and suffix.tokens == tuple(range(suffix.first, suffix.end))
            there[suffix.slot] = suffix.end
    assert there == [first + count for first, count in lengths]


SAMPLING = SamplingParams(1.0, 1.0, 0, 16, (3,))


@pytest.mark.parametrize("kv_tokens", [None, 2048])
def test_others_draw_on_and_what_was_taken_back_goes_on_later(qwen3: Path, kv_tokens: int | None) -> None:
    requests = ragged_requests()
    alone = {done.id: done for done in load_engine(qwen3)[0].generate(requests, SAMPLING)}
    engine, _ = load_engine(qwen3, max_running_requests=6, kv_tokens=kv_tokens)
    engine.submit(requests, SAMPLING)
    finished: dict[int, Sample] = {}
    for _ in range(4):
        finished |= {sample.id: sample for sample in engine.step()}
    wanted = {request.id for request in requests[1::2]}
    looked_at = engine.progress(wanted)
    assert looked_at and all(sample.id in wanted and sample.tokens for sample in looked_at)
    before = engine.num_unfinished
    taken = engine.withdraw(wanted)
    assert [sample.id for sample in taken] == sorted(wanted - finished.keys())
    assert engine.num_unfinished == before - len(taken)
    assert {sample.id: sample for sample in looked_at}.items() <= {sample.id: sample for sample in taken}.items()
    assert engine.withdraw(wanted) == engine.progress(wanted) == []
    while engine.num_unfinished:
        finished |= {sample.id: sample for sample in engine.step()}
    finished |= {sample.id: sample for sample in engine.generate(taken, SAMPLING)}
    ends = [{number: (done.tokens, done.status) for number, done in one.items()} for one in (finished, alone)]
    assert ends[0] == ends[1]


def test_all_may_be_taken_back_and_others_come(qwen3: Path) -> None:
    engine, _ = load_engine(qwen3)
    assert engine.withdraw([1]) == engine.progress([1]) == []
    requests = ragged_requests(3)
    engine.submit(requests, SAMPLING)
    engine.step()
    assert len(engine.withdraw([request.id for request in requests])) == 3 and engine.num_unfinished == 0
    other = SamplingParams(0.0, 1.0, 0, 4, ())
    assert [len(done.tokens) for done in engine.generate(ragged_requests(2, seed=1), other)] == [4, 4]
