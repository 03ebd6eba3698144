"""Tests of prompts that begin alike: what is computed once, for how long it is kept, and that it changes nothing."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from rltrain.rollout.embedded import EmbeddedEngine, generation
from rltrain.rollout.embedded.block_tables import BlockTables
from rltrain.rollout.engine import SamplingParams
from rltrain.rollout.sample import Sample, Status
from tests.support.rollout_models import (
    check,
    load_engine,
    requests_of_one_system,
    widths_of_prefills,
)

pytestmark = pytest.mark.usefixtures("small_blocks")

GREEDY = SamplingParams(0.0, 1.0, 0, 10, ())
SAMPLED = SamplingParams(1.0, 1.0, 0, 10, (3,))
ASKED, COMPUTED, OF_GROUPS, OF_PREFIXES, OF_TURNS = (
    f"rollout/{name}"
    for name in (
        "context_tokens",
        "context_computed_tokens",
        "context_group_tokens",
        "context_prefix_tokens",
        "kv_reused_tokens",
    )
)


def assert_same(found: Sequence[Sample], expected: Sequence[Sample]) -> None:
    for one, other in zip(found, expected, strict=True):
        assert (one.id, one.tokens, one.status) == (other.id, other.tokens, other.status)
        assert one.logprobs == pytest.approx(other.logprobs, abs=3e-5)


def drain(engine: EmbeddedEngine) -> list[Sample]:
    done = []
    while engine.num_unfinished:
        done += engine.step()
    return sorted(done, key=lambda sample: sample.id)


# Blocks.

SYSTEM = (9, 8, 7, 6, 5, 4, 3, 2)
"""Two blocks of 4 tokens."""


def prompt(number: int, tokens: int = 3, begin: tuple[int, ...] = SYSTEM) -> Sample:
    return Sample(number, begin + (100 + number,) * tokens, number)


def work(tables: BlockTables, slot: int, *samples: Sample, version: int = 0) -> list[tuple[int, int]]:
    """Returns (first computed position, round) of each sample that enters."""
    return [(entry.first, entry.round) for entry in tables.enter(slot, samples, version)]


def test_later_prompts_follow_the_first_and_hold_its_blocks() -> None:
    tables = BlockTables(40, 4, 8, 40)
    assert work(tables, 0, prompt(0), prompt(1), prompt(2, begin=SYSTEM[:4])) == [(0, 0), (8, 0), (4, 0)]
    assert (tables.rows[:2, :2] == tables.rows[0, :2]).all() and tables.rows[2, 0] == tables.rows[0, 0]
    assert tables.pool.num_used == 2 + 1 + 1 + 1, "two shared, and each prompt's rest"
    tables.free(0)
    assert work(tables, 3, prompt(3)) == [(8, 0)], "another sample holds the blocks of the first"


def test_prompts_that_follow_one_another_are_computed_in_rounds() -> None:
    tables = BlockTables(40, 4, 8, 40)
    longer = SYSTEM + (1, 1, 1, 1)
    entries = [prompt(0, begin=SYSTEM[:4]), prompt(1), prompt(2, begin=longer), prompt(3, begin=longer)]
    assert work(tables, 0, *entries) == [(0, 0), (4, 0), (8, 1), (12, 2)]
    assert work(tables, 4, prompt(4, begin=longer)) == [(12, 0)], "all is there"


def test_what_saves_little_is_held_once_and_computed_by_each() -> None:
    tables = BlockTables(60, 4, 8, 80)
    (long,) = tables.enter(0, [prompt(0, 40, begin=SYSTEM[:4])], 0)
    longer, short = tables.enter(1, [prompt(1, 37, begin=SYSTEM[:4]), prompt(2, 36, begin=SYSTEM[:4])], 0)
    assert [entry.follows for entry in (long, longer, short)] == [False, True, True]
    (longest,) = tables.enter(3, [prompt(3, 38, begin=SYSTEM[:4])], 0)
    assert (longest.first, longest.follows) == (4, False), "4 of 41 tokens"
    assert len(set(tables.rows[:4, 0])) == 1


def test_kept_prompts_make_room_the_least_recently_used_first() -> None:
    tables = BlockTables(11, 4, 8, 40)
    others = (50, 51, 52, 53, 54, 55, 56, 57)
    work(tables, 0, prompt(0), prompt(1, begin=others))
    tables.free(1)
    tables.free(0)
    assert (tables.pool.num_used, tables.pool.num_kept, tables.pool.num_free) == (0, 4, 6)
    assert work(tables, 0, prompt(2, begin=others)) == [(8, 0)]
    tables.free(0)
    assert work(tables, 0, prompt(3, 26, begin=(7,))) == [(0, 0)], "7 blocks: one of the kept ones goes"
    tables.free(0)
    assert work(tables, 0, prompt(4, 1, begin=others)) == [(8, 0)]
    assert work(tables, 1, prompt(5, 1)) == [(4, 0)], "the other's end went, as it was used before"


def test_parked_samples_and_prompts_go_in_the_order_of_their_use() -> None:
    tables = BlockTables(9, 4, 4, 32)
    first, second = prompt(0, 5), prompt(1, 5, begin=(40,) * 8)
    work(tables, 0, first)
    tables.free(0)
    work(tables, 0, second)
    tables.park(0, second.drawn((1,), (0.0,), (0,), Status.STOPPED))
    work(tables, 0, prompt(2, 11, begin=(30,)))
    assert len(tables.parked) == 1 and tables.pool.num_kept == 4 + 1, "two of three blocks of the older one are gone"
    work(tables, 1, prompt(3, 6, begin=(20,)))
    assert len(tables.parked) == 0


def test_a_new_version_and_forgetting_leave_nothing_to_others() -> None:
    tables = BlockTables(40, 4, 8, 40)
    work(tables, 0, prompt(0))
    assert work(tables, 1, prompt(1), version=1) == [(0, 0)]
    tables.forget_prompts()
    assert work(tables, 2, prompt(2), version=1) == [(0, 0)]
    for slot in range(3):
        tables.free(slot)
    tables.forget_prompts()
    assert (tables.pool.num_kept, tables.pool.num_free) == (0, 39)


# Samples.


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED])
@pytest.mark.parametrize("kv_tokens", [60, 90, 4000])
def test_results_are_those_without_sharing(qwen3: Path, sampling: SamplingParams, kv_tokens: int) -> None:
    requests = requests_of_one_system(5, 3)
    expected = load_engine(qwen3)[0].generate(requests, sampling)
    engine, _ = load_engine(qwen3, max_context_tokens=48, kv_tokens=kv_tokens)
    assert_same(engine.generate(requests, sampling), expected)
    metrics = engine.cache_metrics()
    assert metrics[ASKED] == metrics[COMPUTED] + metrics[OF_GROUPS] + metrics[OF_PREFIXES]
    assert metrics[OF_PREFIXES] > 0 and (metrics["rollout/preemptions"] > 0) == (kv_tokens < 100)


def test_tokens_of_contexts_are_counted_by_where_they_come_from(qwen3: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, _ = load_engine(qwen3, kv_tokens=4000)
    computed, requests = widths_of_prefills(monkeypatch), requests_of_one_system(3, 2)
    expected = load_engine(qwen3)[0].generate(requests, GREEDY)
    computed.clear()
    assert_same(engine.generate(requests, GREEDY), expected)
    heads = [len(request.prompt) - 1 for request in requests[::2]]
    assert heads == [14, 17, 20]
    assert computed == [14, 2 * (20 - 12)], "the first prompt, then the rest of both others, padded to the longer one"
    assert engine.cache_metrics() == {
        "rollout/kv_cache_peak": pytest.approx(0.03, abs=0.03),
        "rollout/preemptions": 0,
        ASKED: 2 * sum(heads),
        COMPUTED: 14 + (17 - 12) + (20 - 12),
        OF_GROUPS: sum(heads),
        OF_PREFIXES: 2 * 12,
    }
    free, _ = load_engine(qwen3)
    free.generate(requests, GREEDY)
    assert free.cache_metrics() == {ASKED: 102, COMPUTED: 51, OF_GROUPS: 51, OF_PREFIXES: 0}, "slots share no blocks"


def test_prompts_are_kept_while_others_run(qwen3: Path) -> None:
    requests = requests_of_one_system(4)
    long = Sample(1, (5, 6, 7), 0)
    expected = [load_engine(qwen3)[0].generate([request], GREEDY)[0] for request in requests]
    engine, _ = load_engine(qwen3, kv_tokens=4000)
    sampling = replace(GREEDY, max_response_tokens=60)
    engine.submit([long], sampling)
    done: list[Sample] = []
    for request in requests:  # each begins after the one before has ended
        engine.submit([replace(request, turn_limit=10)], sampling)
        while engine.num_unfinished > 1:
            done += engine.step()
        if len(done) == 2:
            assert engine.cache_metrics()[OF_PREFIXES] == 12
    assert [one.tokens for one in done[: len(requests)]] == [one.tokens for one in expected]


def test_a_generation_repeats_bit_for_bit_whatever_ran_before(qwen3: Path) -> None:
    engine, _ = load_engine(qwen3, kv_tokens=4000)
    requests = requests_of_one_system(4, 2)
    first = engine.generate(requests, SAMPLED)
    engine.generate(requests_of_one_system(3)[::-1], GREEDY)
    assert [done.logprobs for done in engine.generate(requests, SAMPLED)] == [done.logprobs for done in first]


@pytest.mark.parametrize("runs", [False, True])
def test_nothing_outlives_a_change_of_weights(qwen3: Path, runs: bool) -> None:
    requests = requests_of_one_system(3)
    engine, parameters = load_engine(qwen3, kv_tokens=4000)
    renewed, others = load_engine(qwen3)
    if runs:  # in flight: a sample goes on with what it has
        engine.submit(requests[:1], GREEDY)
        engine.step()
    else:
        engine.generate(requests[:1], GREEDY)
    engine.begin_update()
    for weights in (parameters, others):
        weights["model.embed_tokens.weight"].mul_(-1)
    engine.end_update(0)  # of the same number
    engine.submit(requests[1:], GREEDY)
    found = drain(engine)[-2:]
    assert_same(found, renewed.generate(requests[1:], GREEDY))


def test_nothing_outlives_an_offload(qwen3: Path) -> None:
    requests = requests_of_one_system(3)
    engine, _ = load_engine(qwen3, kv_tokens=4000, cache_returns=lambda: True)
    expected = load_engine(qwen3)[0].generate(requests, GREEDY)
    for _ in range(2):
        engine.generate(requests, GREEDY)
        engine.release_cache()
        with torch.inference_mode():
            for tensor in engine.cache_tensors():
                tensor.fill_(7.0)  # by others who have the memory
    assert_same(engine.generate(requests, GREEDY), expected)


def test_conversations_share_the_system_prompt_and_keep_their_own_past(qwen3: Path) -> None:
    engine, _ = load_engine(qwen3, kv_tokens=4000)
    requests = [replace(request, turn_limit=4, goes_on=True) for request in requests_of_one_system(3, 2)]
    sampling = replace(GREEDY, max_response_tokens=30)
    turns = [done.observed((7, 9, 11), turn_limit=12) for done in engine.generate(requests, sampling)]
    found = engine.generate(turns, sampling)
    free, _ = load_engine(qwen3)
    expected = [replace(one, goes_on=False) for one in turns]
    assert_same(found, free.generate(expected, sampling))
    metrics = engine.cache_metrics()
    assert metrics[OF_TURNS] == sum(len(one.prompt) + 4 - 1 for one in turns)
    assert metrics[COMPUTED] == 14 + (17 - 12) + (20 - 12) + 6 * 3, "an answer, and a token of the turn before it"
    assert metrics[ASKED] == sum(metrics[name] for name in (COMPUTED, OF_GROUPS, OF_PREFIXES, OF_TURNS))


def test_samples_that_start_again_follow_their_prompt(qwen3: Path) -> None:
    """Their contexts differ after the prompt, and under new weights all of them are computed."""
    engine, _ = load_engine(qwen3, kv_tokens=4000)
    requests = requests_of_one_system(2, 3)
    expected = load_engine(qwen3)[0].generate(requests, SAMPLED)
    engine.submit(requests, SAMPLED)
    done = [sample for _ in range(4) for sample in engine.step()]
    engine.cache_metrics()
    engine.submit(engine.suspend(), SAMPLED)
    done += drain(engine)
    assert_same(sorted(done, key=lambda sample: sample.id), expected)
    metrics = engine.cache_metrics()
    assert metrics[COMPUTED] < metrics[ASKED] - 5 * 12 + 5


def test_long_prompts_are_computed_in_pieces_for_all_their_samples(
    qwen3: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = requests_of_one_system(6, 2)
    expected = load_engine(qwen3)[0].generate(requests, GREEDY)
    monkeypatch.setattr(generation, "_PASS_SCORES", 100)
    engine, _ = load_engine(qwen3, kv_tokens=4000)
    assert_same(engine.generate(requests, GREEDY), expected)


def test_a_failed_sample_leaves_no_prompt_behind(qwen3: Path) -> None:
    engine, parameters = load_engine(qwen3, kv_tokens=4000)
    requests = requests_of_one_system(3)
    expected = load_engine(qwen3)[0].generate(requests, GREEDY)
    long = Sample(1, (5, 6, 7), 0)
    engine.submit([long], GREEDY)
    engine.step()
    head = parameters["model.embed_tokens.weight"]
    token, kept = requests[0].prompt[0], head[requests[0].prompt[0]].clone()
    head[token] = torch.nan
    engine.submit(requests[:1], GREEDY)
    failed = [sample for sample in engine.step() if sample.status == Status.FAILED]
    head[token] = kept
    assert failed
    engine.submit(requests[1:], GREEDY)
    assert_same([sample for sample in drain(engine) if sample.id > 1000], expected[1:])


def test_experts_of_shared_tokens_come_with_every_sample(checkpoints: dict[str, Path]) -> None:
    path = checkpoints["qwen3_moe"]
    engine, _ = load_engine(path, kv_tokens=4000, record_routing=True)
    for done in engine.generate(requests_of_one_system(3, 2), GREEDY):
        check(path, done)
    assert engine.cache_metrics()[OF_PREFIXES] > 0
