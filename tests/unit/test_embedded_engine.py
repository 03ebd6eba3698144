"""The embedded engine against transformers, and its invariance to batching."""

from collections.abc import Collection, Sequence
from pathlib import Path

import pytest
import torch
import transformers

from rltrain.errors import ConfigError, DataError, DivergenceError
from rltrain.rollout.embedded import generation
from rltrain.rollout.engine import SamplingParams
from rltrain.rollout.sample import Sample, Status
from tests.rollout_models import VOCAB_SIZE, LetterTokenizer, load_engine, ragged_requests, write_checkpoint

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


def hf_model(path: Path) -> transformers.PreTrainedModel:
    return transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()


@torch.no_grad()
def hf_likeliest(model: transformers.PreTrainedModel, done: Sample) -> list[int]:
    """In each place of the response, after what stands before it: greedy decoding's, where all before are so too."""
    logits = model(torch.tensor([done.context])).logits[0, len(done.prompt) - 1 : -1]
    return logits.argmax(-1).tolist()


def until(stops: Collection[int], tokens: list[int]) -> list[int]:
    """With the first of `stops`, if there is one, as the last."""
    return tokens[: next((n + 1 for n, token in enumerate(tokens) if token in stops), None)]


@torch.no_grad()
def hf_logprobs(
    model: transformers.PreTrainedModel, request: Sample, completion: Sample, temperature: float = 1.0
) -> torch.Tensor:
    """Log-probs of the completion's tokens by one forward pass over the whole sequence."""
    tokens = torch.tensor([[*request.prompt, *completion.tokens]])
    logits = model(tokens).logits[0, len(request.prompt) - 1 : -1] / temperature
    return torch.log_softmax(logits, -1).gather(-1, tokens[0, len(request.prompt) :, None])[:, 0]


def assert_logprobs_match(
    path: Path, requests: Sequence[Sample], completions: Sequence[Sample], temperature: float = 1.0
) -> None:
    model = hf_model(path)
    pairs = zip(requests, completions, strict=True)
    expected = torch.cat([hf_logprobs(model, request, done, temperature) for request, done in pairs])
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
    expected = [hf_likeliest(model, done) for done in free]
    assert tokens_of(free) == expected and {len(tokens) for tokens in expected} == {sampling.max_response_tokens}
    assert tokens_of(stopped) == [until(sampling.stop_token_ids, tokens) for tokens in expected]
    ends = [done.tokens[-1] in sampling.stop_token_ids for done in stopped]
    assert [done.status for done in stopped] == [Status.STOPPED if end else Status.TRUNCATED for end in ends]
    assert any(ends)
    assert_logprobs_match(path, requests, stopped)


def test_llama3_scaled_rotary_frequencies_equal_transformers(tmp_path: Path) -> None:
    rope = {
        "rope_type": "llama3",
        "rope_theta": 1000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    path = write_checkpoint(tmp_path, "llama", rope_parameters=rope)
    engine, _ = load_engine(path)
    requests = ragged_requests(3)
    completions = engine.generate(requests, sampled(60, stop_token_ids=()))
    assert_logprobs_match(path, requests, completions)


def test_growing_cache_keeps_long_responses_equal_to_transformers(qwen3: Path) -> None:
    engine, _ = load_engine(qwen3)
    requests = ragged_requests(4)
    completions = engine.generate(requests, greedy(100))
    model = hf_model(qwen3)
    assert tokens_of(completions) == [hf_likeliest(model, done) for done in completions]
    assert {len(done.tokens) for done in completions} == {100}


@pytest.mark.parametrize("truncation", [(1.0, 0), (0.7, 0), (1.0, 5), (0.8, 5)])
@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_sampled_logprobs_are_of_the_untruncated_distribution(
    qwen3: Path, temperature: float, truncation: tuple[float, int]
) -> None:
    engine, _ = load_engine(qwen3)
    requests = ragged_requests(6)
    completions = engine.generate(requests, SamplingParams(temperature, *truncation, 12, ()))
    assert_logprobs_match(qwen3, requests, completions, temperature)


@pytest.mark.parametrize("num_slots", [1, 3, 8])
def test_fewer_slots_than_requests_give_the_same_completions(qwen3: Path, num_slots: int) -> None:
    requests = ragged_requests(12)
    everything, _ = load_engine(qwen3)
    few, _ = load_engine(qwen3, max_running_requests=num_slots)
    for sampling in (greedy(), sampled()):
        expected = everything.generate(requests, sampling)
        assert len({len(done.tokens) for done in expected}) > 1 or sampling.temperature == 0
        assert_same_completions(few.generate(requests, sampling), expected)


def test_completions_do_not_depend_on_order_or_company(qwen3: Path) -> None:
    engine, _ = load_engine(qwen3)
    requests = ragged_requests(8)
    expected = engine.generate(requests, sampled())
    assert_same_completions(engine.generate(requests[::-1], sampled())[::-1], expected)
    alone = [engine.generate([request], sampled())[0] for request in requests]
    assert_same_completions(alone, expected)


def test_prefill_in_small_passes_gives_the_same_completions(qwen3: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, _ = load_engine(qwen3)
    requests = ragged_requests(8)
    expected = engine.generate(requests, sampled())
    monkeypatch.setattr(generation, "PASS_TOKENS", 10)
    assert_same_completions(engine.generate(requests, sampled()), expected)


def test_samples_of_one_prompt_differ_by_seed_and_match_single_draws(qwen3: Path) -> None:
    engine, _ = load_engine(qwen3, max_running_requests=5)
    prompts = [request.prompt for request in ragged_requests(3)]
    requests = [Sample(index, prompts[index // 4], seed=index) for index in range(12)]
    together = engine.generate(requests, sampled())
    assert_same_completions([engine.generate([request], sampled())[0] for request in requests], together)
    assert len({tuple(done.tokens) for done in together[:4]}) > 1


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


def test_weights_changed_in_place_take_effect(qwen3: Path, tmp_path: Path) -> None:
    engine, parameters = load_engine(qwen3)
    other, other_parameters = load_engine(write_checkpoint(tmp_path, "qwen3", seed=1))
    requests = ragged_requests()
    before = engine.generate(requests, greedy())
    assert {version for done in before for version in done.policy_versions} == {0}
    for name, tensor in parameters.items():
        tensor.copy_(other_parameters[name])
    engine.policy_version = 7
    after = engine.generate(requests, greedy())
    assert tokens_of(after) != tokens_of(before)
    assert_same_completions(after, other.generate(requests, greedy()))
    assert all(list(done.policy_versions) == [7] * len(done.tokens) for done in after)


def test_padded_vocabulary_columns_are_never_drawn(qwen3: Path) -> None:
    engine, parameters = load_engine(qwen3)
    requests = ragged_requests(4)
    expected = engine.generate(requests, sampled())
    head = parameters["lm_head.weight"]
    assert len(head) > VOCAB_SIZE
    head[VOCAB_SIZE:] = 100.0
    assert_same_completions(engine.generate(requests, sampled()), expected)


def test_responses_end_at_the_context_limit(qwen3: Path) -> None:
    engine, _ = load_engine(qwen3, max_context_tokens=20)
    requests = ragged_requests(10)
    limited = engine.generate(requests, greedy(16))
    free = load_engine(qwen3)[0].generate(requests, greedy(16))
    for request, short, full in zip(requests, limited, free, strict=True):
        limit = min(16, 20 - len(request.prompt))
        assert list(short.tokens) == list(full.tokens)[:limit]
        assert short.status == Status.TRUNCATED


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


def test_diverged_weights_are_reported_and_leave_no_trace(qwen3: Path) -> None:
    engine, parameters = load_engine(qwen3)
    requests = ragged_requests(3)
    expected = engine.generate(requests, sampled())
    intact = parameters["model.norm.weight"].clone()
    broken = parameters["model.layers.0.self_attn.qkv_proj.weight"]
    whole = broken.clone()
    broken.fill_(float("nan"))
    with pytest.raises(DivergenceError, match="version 0"):
        engine.generate(requests, sampled())
    broken.copy_(whole)
    assert torch.equal(parameters["model.norm.weight"], intact)
    assert_same_completions(engine.generate(requests, sampled()), expected)


@pytest.mark.parametrize("kv_tokens", [None, 600])
def test_logits_that_are_not_finite_end_their_own_sample(qwen3: Path, kv_tokens: int | None) -> None:
    """Whatever takes its place in the cache, what was drawn before counts, and the others draw what they would have."""
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


def test_released_cache_is_allocated_again(qwen3: Path) -> None:
    engine, _ = load_engine(qwen3)
    expected = engine.generate(ragged_requests(), sampled())
    engine.release_cache()
    assert_same_completions(engine.generate(ragged_requests(), sampled()), expected)


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
