"""Tests of the embedded engine against a whole forward pass, in one call and step by step."""

from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers

from rltrain.errors import ConfigError, DataError, DivergenceError, SyncError
from rltrain.rollout.embedded import EmbeddedEngine, generation
from rltrain.rollout.engine import SamplingParams
from rltrain.rollout.sample import Sample, Status
from tests.support.rollout_models import (
    VOCAB_SIZE,
    LetterTokenizer,
    hf_logprobs,
    hf_model,
    load_engine,
    of_tokens,
    ragged_requests,
    widths_of_prefills,
    write_checkpoint,
)

LOGPROB_TOLERANCE = 4e-5
VARIANTS = [(family, tied) for family in ("llama", "qwen2", "qwen3") for tied in (False, True)]


def greedy(max_response_tokens: int = 16, stop_token_ids: tuple[int, ...] = ()) -> SamplingParams:
    return SamplingParams(0.0, 1.0, 0, max_response_tokens, stop_token_ids)


def sampled(max_response_tokens: int = 16, stop_token_ids: tuple[int, ...] = (3, 4, 5)) -> SamplingParams:
    return SamplingParams(1.0, 1.0, 0, max_response_tokens, stop_token_ids)


def tokens_of(completions: Sequence[Sample]) -> list[list[int]]:
    return [list(completion.tokens) for completion in completions]


def logprobs_of(completions: Sequence[Sample]) -> torch.Tensor:
    return torch.tensor([value for completion in completions for value in completion.logprobs])


def assert_same_completions(left: Sequence[Sample], right: Sequence[Sample]) -> None:
    assert [completion.id for completion in left] == [completion.id for completion in right]
    assert tokens_of(left) == tokens_of(right)
    assert [completion.status for completion in left] == [completion.status for completion in right]
    torch.testing.assert_close(logprobs_of(left), logprobs_of(right), atol=LOGPROB_TOLERANCE, rtol=0)


def until(stops: Collection[int], tokens: list[int]) -> list[int]:
    """Returns the tokens through the first of `stops`, or all of them."""
    return tokens[: next((n + 1 for n, token in enumerate(tokens) if token in stops), None)]


def assert_logprobs_match(path: Path, completions: Sequence[Sample], temperature: float = 1.0) -> None:
    model = hf_model(path)
    expected = torch.cat([of_tokens(hf_logprobs(model, done, temperature), done) for done in completions])
    torch.testing.assert_close(logprobs_of(completions), expected, atol=LOGPROB_TOLERANCE, rtol=0)


@pytest.mark.parametrize(("family", "tied"), VARIANTS)
def test_greedy_equals_transformers(tmp_path: Path, family: str, tied: bool) -> None:
    path = write_checkpoint(tmp_path, family, tied=tied, **({"attention_bias": tied} if family == "llama" else {}))
    engine, _ = load_engine(path, max_running_requests=4)
    requests, model = ragged_requests(), hf_model(path)
    free = engine.generate(requests, greedy())
    drawn = [token for completion in free for token in completion.tokens[2:8]]
    sampling = greedy(stop_token_ids=(max(set(drawn), key=drawn.count), drawn[0]))
    stopped = engine.generate(requests, sampling)
    expected = [hf_logprobs(model, done).argmax(-1).tolist() for done in free]
    assert tokens_of(free) == expected and {len(tokens) for tokens in expected} == {sampling.max_response_tokens}
    assert tokens_of(stopped) == [until(sampling.stop_token_ids, tokens) for tokens in expected]
    ends = [done.tokens[-1] in sampling.stop_token_ids for done in stopped]
    assert [done.status for done in stopped] == [Status.STOPPED if end else Status.TRUNCATED for end in ends]
    assert any(ends)
    assert_logprobs_match(path, stopped)


def test_llama3_scaled_rotary_frequencies_equal_transformers(tmp_path: Path) -> None:
    rope = {"rope_type": "llama3", "rope_theta": 1000.0, "factor": 8.0, "original_max_position_embeddings": 64}
    rope |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    path = write_checkpoint(tmp_path, "llama", rope_parameters=rope)
    engine, _ = load_engine(path)
    assert_logprobs_match(path, engine.generate(ragged_requests(3), sampled(60, stop_token_ids=())))


def test_growing_cache_keeps_long_responses_equal_to_transformers(qwen3: Path) -> None:
    engine, _ = load_engine(qwen3)
    completions, model = engine.generate(ragged_requests(4), greedy(100)), hf_model(qwen3)
    assert tokens_of(completions) == [hf_logprobs(model, done).argmax(-1).tolist() for done in completions]
    assert {len(done.tokens) for done in completions} == {100}


@pytest.mark.parametrize("truncation", [(1.0, 0), (0.7, 0), (1.0, 5), (0.8, 5)])
@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_sampled_logprobs_are_of_the_untruncated_distribution(
    qwen3: Path, temperature: float, truncation: tuple[float, int]
) -> None:
    engine, _ = load_engine(qwen3)
    completions = engine.generate(ragged_requests(6), SamplingParams(temperature, *truncation, 12, ()))
    assert_logprobs_match(qwen3, completions, temperature)


def test_prefill_in_small_passes_gives_the_same_completions(qwen3: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, _ = load_engine(qwen3)
    requests = ragged_requests(8)
    expected = engine.generate(requests, sampled())
    monkeypatch.setattr(generation, "PASS_TOKENS", 10)
    assert_same_completions(engine.generate(requests, sampled()), expected)


def test_completions_do_not_depend_on_order_or_company(qwen3: Path) -> None:
    """Samples of the same prompt differ by their seeds."""
    engine, _ = load_engine(qwen3, max_running_requests=5)
    of_one_prompt = [Sample(number, ragged_requests(3)[2].prompt, seed=number) for number in range(5)]
    requests = [*ragged_requests(8), *of_one_prompt]
    expected = engine.generate(requests, sampled())
    assert len({tuple(done.tokens) for done in expected[-5:]}) > 1
    assert_same_completions(engine.generate(requests[::-1], sampled())[::-1], expected)
    assert_same_completions([engine.generate([request], sampled())[0] for request in requests], expected)


def test_first_tokens_follow_the_models_distribution(qwen3: Path) -> None:
    engine, _ = load_engine(qwen3)
    prompt, count = ragged_requests(3)[2].prompt, 4000
    completions = engine.generate([Sample(i, prompt, seed=i) for i in range(count)], sampled(1))
    counts = torch.tensor([done.tokens[0] for done in completions]).bincount(minlength=VOCAB_SIZE).double()
    with torch.no_grad():
        expected = count * torch.softmax(hf_model(qwen3)(torch.tensor([prompt])).logits[0, -1].double(), -1)
    common = expected >= 5
    observed = torch.cat([counts[common], counts[~common].sum()[None]])
    predicted = torch.cat([expected[common], expected[~common].sum()[None]])
    freedom = len(observed) - 1
    assert float(((observed - predicted) ** 2 / predicted).sum()) < freedom + 4 * (2 * freedom) ** 0.5 + 8


def test_padded_vocabulary_columns_are_never_drawn(qwen3: Path) -> None:
    engine, parameters = load_engine(qwen3)
    requests = ragged_requests(4)
    expected = engine.generate(requests, sampled())
    head = parameters["lm_head.weight"]
    assert len(head) > VOCAB_SIZE
    head[VOCAB_SIZE:] = 100.0
    assert_same_completions(engine.generate(requests, sampled()), expected)


@pytest.mark.parametrize("num_tokens", [0, 20, 21])
def test_prompts_that_leave_no_room_are_refused(qwen3: Path, num_tokens: int) -> None:
    engine, _ = load_engine(qwen3, max_context_tokens=20)
    with pytest.raises(DataError, match=rf"sample 4 has {num_tokens} tokens.*rollout\.max_context_tokens = 20"):
        engine.generate([Sample(4, (1,) * num_tokens, 0)], greedy())


def test_stop_strings_end_a_response_where_the_text_first_contains_one(qwen3: Path) -> None:
    engine, _ = load_engine(qwen3, max_running_requests=3, tokenizer=LetterTokenizer())
    requests = ragged_requests(6)
    free = engine.generate(requests, greedy())
    texts = [LetterTokenizer().decode(done.tokens) for done in free]
    stops = (texts[0][3:6], texts[1][7:9])
    sampling = SamplingParams(0.0, 1.0, 0, 16, (), stops)
    for text, done in zip(texts, engine.generate(requests, sampling), strict=True):
        ends = [text.find(stop) + len(stop) for stop in stops if stop in text]
        assert LetterTokenizer().decode(done.tokens) == text[: min(ends, default=16)]
        assert done.status == (Status.STOPPED if ends else Status.TRUNCATED)


def test_stop_strings_need_a_tokenizer(qwen3: Path) -> None:
    engine, _ = load_engine(qwen3)
    with pytest.raises(ConfigError, match=r"rollout\.sampling\.stop"):
        engine.generate(ragged_requests(1), SamplingParams(0.0, 1.0, 0, 4, (), ("end",)))


@pytest.mark.parametrize("kv_tokens", [None, 600])
def test_logits_that_are_not_finite_end_their_own_sample(qwen3: Path, kv_tokens: int | None) -> None:
    """Covers every kind of cache. Earlier tokens of the failed sample count, and the other samples stay the same."""
    engine, parameters = load_engine(qwen3, max_running_requests=3, kv_tokens=kv_tokens)
    requests = ragged_requests(12)
    expected = engine.generate(requests, sampled())
    embedding = parameters["model.embed_tokens.weight"]
    odd = next(token for token in range(6, 50) if 1 < sum(token in done.context[:-1] for done in expected) < 9)
    intact = embedding[odd].clone()
    embedding[odd] = torch.nan
    found = engine.generate(requests, sampled())
    places = [done.context[:-1].index(odd) if odd in done.context[:-1] else None for done in expected]
    for done, other, place in zip(found, expected, places, strict=True):
        if place is None:
            assert_same_completions([done], [other])
        else:
            count = max(place + 1 - len(other.prompt), 0)
            assert done.status == Status.FAILED and done.tokens == other.tokens[:count]
            assert done.logprobs == pytest.approx(other.logprobs[:count], abs=1e-5)
    assert any(place is None for place in places) and any(place is not None for place in places)
    embedding[odd] = intact
    assert_same_completions(engine.generate(requests, sampled()), expected)


def test_bfloat16_stays_near_float32(qwen3: Path) -> None:
    engine, parameters = load_engine(qwen3, dtype=torch.bfloat16)
    rounded, rounded_parameters = load_engine(qwen3)
    for name, tensor in rounded_parameters.items():
        tensor.copy_(parameters[name])
    requests = ragged_requests()
    half, full = engine.generate(requests, greedy(1)), rounded.generate(requests, greedy(1))
    difference = (logprobs_of(half) - logprobs_of(full)).abs()
    assert float(difference.mean()) < 0.05


def test_no_requests_give_no_completions(qwen3: Path) -> None:
    engine, _ = load_engine(qwen3)
    assert engine.generate([], greedy()) == []


GREEDY = SamplingParams(0.0, 1.0, 0, 16, ())
SAMPLED = SamplingParams(1.0, 1.0, 0, 16, (3, 4, 5))


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns the same architecture with other weights."""
    return write_checkpoint(tmp_path_factory.mktemp("other"), "qwen3", seed=1)


@pytest.fixture(scope="module")
def uninterrupted(qwen3: Path) -> dict[int, Sample]:
    """Returns the results of `ragged_requests` in one call, by sample id."""
    return {done.id: done for done in load_engine(qwen3)[0].generate(ragged_requests(), SAMPLED)}


def steps(engine: EmbeddedEngine, count: int) -> list[Sample]:
    return [done for _ in range(count) for done in engine.step()]


def drain(engine: EmbeddedEngine) -> list[Sample]:
    completions = []
    while engine.num_unfinished:
        completions += engine.step()
    return completions


def test_a_step_draws_one_token_and_returns_what_it_finished(qwen3: Path, uninterrupted: dict[int, Sample]) -> None:
    engine, _ = load_engine(qwen3)
    engine.submit(ragged_requests(), SAMPLED)
    for step in range(1, 17):
        for done in engine.step():
            assert len(done.tokens) == step
            assert_same_completions([done], [uninterrupted[done.id]])
        assert engine.num_unfinished == sum(len(done.tokens) > step for done in uninterrupted.values())
    assert engine.step() == []


def test_requests_start_in_the_order_of_submission(qwen3: Path) -> None:
    engine, _ = load_engine(qwen3, max_running_requests=2)
    first, second = ragged_requests(5)[:3], ragged_requests(5)[3:]
    engine.submit(first, GREEDY)
    engine.step()
    engine.submit(second, GREEDY)
    assert [done.id for done in drain(engine)] == [request.id for request in first + second]


def test_free_slots_are_those_that_nothing_will_take(qwen3: Path) -> None:
    engine, _ = load_engine(qwen3, max_running_requests=4)
    requests = ragged_requests(6)
    assert engine.num_free_slots == 4
    engine.submit(requests[:3], GREEDY)
    assert (engine.num_free_slots, engine.num_unfinished) == (1, 3)
    engine.step()
    assert engine.num_free_slots == 1
    engine.submit(requests[3:], GREEDY)
    assert (engine.num_free_slots, engine.num_unfinished) == (0, 6)


@pytest.mark.parametrize(("num_steps", "max_running_requests"), [(0, 64), (1, 3), (4, 64), (9, 3)])
def test_suspended_responses_continue_as_if_never_stopped(
    qwen3: Path, uninterrupted: dict[int, Sample], num_steps: int, max_running_requests: int
) -> None:
    engine, _ = load_engine(qwen3, max_running_requests=max_running_requests)
    requests = ragged_requests()
    engine.submit(requests, SAMPLED)
    finished = steps(engine, num_steps)
    suspended = engine.suspend()
    assert (engine.num_unfinished, engine.num_free_slots) == (0, max_running_requests)
    ids = [done.id for done in finished]
    assert [request.id for request in suspended] == [request.id for request in requests if request.id not in ids]
    for request in suspended:
        expected = uninterrupted[request.id]
        assert list(request.tokens) == list(expected.tokens)[: len(request.tokens)]
        assert len(request.tokens) == num_steps or max_running_requests == 3
    engine.release_cache()
    resumed = engine.generate(suspended, SAMPLED)
    for done in finished + resumed:
        assert_same_completions([done], [uninterrupted[done.id]])
    for request, done in zip(suspended, resumed, strict=True):
        assert tuple(done.logprobs)[: len(request.logprobs)] == request.logprobs


def test_a_suspended_response_continues_in_another_engine(qwen3: Path, uninterrupted: dict[int, Sample]) -> None:
    first, _ = load_engine(qwen3)
    first.submit(ragged_requests(), SAMPLED)
    finished = steps(first, 3)
    second, _ = load_engine(qwen3, max_running_requests=2)
    for done in finished + second.generate(first.suspend()[::-1], SAMPLED):
        assert_same_completions([done], [uninterrupted[done.id]])


@torch.no_grad()
def decode_with_cache(models: Sequence[transformers.PreTrainedModel], request: Sample) -> list[int]:
    """Returns greedy tokens. `models[i]` generates token i on the keys and values of the earlier models."""
    cache = transformers.DynamicCache()
    tokens, fed = [], torch.tensor([request.prompt])
    for model in models:
        fed = model(fed, past_key_values=cache, use_cache=True).logits[:, -1:].argmax(-1)
        tokens.append(int(fed))
    return tokens


def test_weights_change_between_two_steps_without_losing_or_resampling(qwen3: Path, other: Path) -> None:
    engine, parameters = load_engine(qwen3)
    _, new_parameters = load_engine(other)
    requests = ragged_requests()
    before = engine.generate(requests, GREEDY)
    engine.policy_version = 3
    engine.submit(requests[:6], GREEDY)
    steps(engine, 5)
    engine.begin_update()
    with pytest.raises(SyncError):
        engine.step()
    for name, tensor in parameters.items():
        tensor.copy_(new_parameters[name])
    engine.policy_version = 4
    engine.submit(requests[6:], GREEDY)
    mixed = {done.id: done for done in drain(engine)}
    old, new = map(hf_model, (qwen3, other))
    for request, unchanged in zip(requests[:6], before[:6], strict=True):
        done = mixed[request.id]
        assert list(done.policy_versions) == [3] * 5 + [4] * 11
        assert list(done.tokens)[:5] == list(unchanged.tokens)[:5]
        assert list(done.logprobs)[:5] == pytest.approx(unchanged.logprobs[:5], abs=LOGPROB_TOLERANCE)
        assert list(done.tokens) == decode_with_cache([old] * 5 + [new] * 11, request)
        assert list(done.tokens) != list(unchanged.tokens)
    for request in requests[6:]:
        assert list(mixed[request.id].policy_versions) == [4] * 16
        assert list(mixed[request.id].tokens) == decode_with_cache([new] * 16, request)


def test_a_resumed_response_keeps_the_versions_of_its_tokens(qwen3: Path) -> None:
    engine, _ = load_engine(qwen3)
    pending = ragged_requests(3)
    for version, num_steps in ((1, 4), (2, 1), (5, 3)):
        engine.policy_version = version
        engine.submit(pending, GREEDY)
        assert steps(engine, num_steps) == []
        pending = engine.suspend()
    for done in engine.generate(pending, GREEDY):
        assert list(done.policy_versions) == [1] * 4 + [2] + [5] * 11


def test_responses_end_at_the_context_limit_and_tokens_drawn_before_count(qwen3: Path) -> None:
    engine, _ = load_engine(qwen3, max_context_tokens=14)
    requests = ragged_requests(5)
    whole, free = engine.generate(requests, GREEDY), load_engine(qwen3)[0].generate(requests, GREEDY)
    assert tokens_of(whole) == [list(done.tokens)[: 14 - len(done.prompt)] for done in free]
    assert {done.status for done in whole} == {Status.TRUNCATED} and len(whole[0].tokens) == 13
    engine.submit(requests, GREEDY)
    steps(engine, 4)
    assert_same_completions(engine.generate(engine.suspend(), GREEDY), whole)


@pytest.mark.parametrize("num_steps", [3, 4, 5])
def test_a_stop_string_is_found_across_a_suspension(qwen3: Path, num_steps: int) -> None:
    engine, _ = load_engine(qwen3, tokenizer=LetterTokenizer())
    request = ragged_requests(1)[0]
    text = LetterTokenizer().decode(engine.generate([request], GREEDY)[0].tokens)
    sampling = replace(GREEDY, stop=(text[2:6],))
    assert text.index(text[2:6]) == 2
    engine.submit([request], sampling)
    assert steps(engine, num_steps) == []
    [done] = engine.generate(engine.suspend(), sampling)
    assert LetterTokenizer().decode(done.tokens) == text[:6]
    assert done.status == Status.STOPPED


def test_equal_contexts_are_computed_once(qwen3: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, _ = load_engine(qwen3)
    widths = widths_of_prefills(monkeypatch)
    prompt = ragged_requests(4)[3].prompt
    engine.submit([Sample(number, prompt, seed=number) for number in range(5)], SAMPLED)
    engine.step()
    assert widths == [len(prompt) - 1]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda r: ([replace(r[3], id=r[0].id)], GREEDY), "equal ids"),
        (lambda r: ([r[3], r[3]], GREEDY), "equal ids"),
        (lambda r: ([r[3]], SAMPLED), "unfinished"),
        (lambda r: ([r[3], r[4].drawn((1,) * 16, (0.0,) * 16, (0,) * 16)], GREEDY), "fewer than 16"),
    ],
)
def test_a_refused_submission_queues_nothing(qwen3: Path, change, message: str) -> None:  # type: ignore[no-untyped-def]
    engine, _ = load_engine(qwen3)
    requests = ragged_requests(5)
    engine.submit(requests[:2], GREEDY)
    with pytest.raises(ValueError, match=message):
        engine.submit(*change(requests))
    assert engine.num_unfinished == 2
    assert {done.id for done in drain(engine)} == {request.id for request in requests[:2]}


def test_generate_and_release_need_an_idle_engine(qwen3: Path) -> None:
    engine, _ = load_engine(qwen3)
    engine.submit(ragged_requests(2), GREEDY)
    with pytest.raises(ValueError, match=r"generate with 2 samples unfinished.*suspend"):
        engine.generate(ragged_requests(4)[2:], GREEDY)
    with pytest.raises(ValueError, match=r"release_cache with 2 samples unfinished.*suspend"):
        engine.release_cache()
    assert len(drain(engine)) == 2
    engine.submit(ragged_requests(2), SAMPLED)  # another sampling is allowed once all samples are finished


def test_divergence_leaves_nothing_unfinished(qwen3: Path, uninterrupted: dict[int, Sample]) -> None:
    engine, parameters = load_engine(qwen3)
    weight = parameters["model.layers.0.self_attn.qkv_proj.weight"]
    intact = weight.clone()
    engine.submit(ragged_requests(3), GREEDY)
    engine.step()
    weight.fill_(float("nan"))
    engine.policy_version = 8
    with pytest.raises(DivergenceError, match="version 8"):
        engine.step()
    assert engine.num_unfinished == 0
    weight.copy_(intact)
    for done in engine.generate(ragged_requests(), SAMPLED):
        assert_same_completions([done], [uninterrupted[done.id]])


def test_drawn_names_what_does_not_fit_together() -> None:
    with pytest.raises(ValueError, match="2 tokens, 1 logprobs, 2 policy_versions and 2 entries of loss_mask"):
        ragged_requests(1)[0].drawn((1, 2), (0.5,), (0, 0))
