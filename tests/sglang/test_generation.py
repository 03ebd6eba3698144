"""The SGLang engine on a real server: tokens and log-probs against transformers, stop conditions, interruptions."""

import os
import signal
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
import transformers
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

from rltrain.errors import DivergenceError, EngineError
from rltrain.rollout.engine import SamplingParams
from rltrain.rollout.sample import Sample, Status
from rltrain.rollout.servers.sglang_engine import SGLangEngine
from rltrain.rollout.servers.sglang_process import Server
from tests.sglang.servers import engine_on, processes, sync
from tests.support.rollout_models import VOCAB_SIZE, ragged_requests, write_checkpoint

TOLERANCE = 1e-4
NUM_SLOTS = 8
GREEDY = SamplingParams(0.0, 1.0, 0, 24, ())
LONG = SamplingParams(0.0, 1.0, 0, 100, ())
LIMIT_S = 600.0
MAX_ATTEMPTS = 5
"""Attempts to change weights during a response. A fast server may finish all responses before a slow test changes
them."""


@dataclass
class Rig:
    """An engine that gets the weights of checkpoints."""

    engine: SGLangEngine
    server: Server

    def sync(self, checkpoint: Path, version: int) -> None:
        sync(self.engine, checkpoint, version)


def letter_tokenizer() -> transformers.PreTrainedTokenizerFast:
    """Returns a tokenizer with one letter per token."""
    vocab = {chr(ord("A") + token): token for token in range(VOCAB_SIZE)}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="A"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="A")


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Returns two checkpoints of one architecture, with a tokenizer."""
    paths = [write_checkpoint(tmp_path_factory.mktemp(f"qwen3{seed}"), "qwen3", seed=seed) for seed in (0, 1)]
    for path in paths:
        letter_tokenizer().save_pretrained(path)
    return paths


@pytest.fixture(scope="module")
def started(sglang_python: str, checkpoints: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    """Yields an engine with the weights of the first checkpoint as version 0."""
    limits = {"max_running_requests": NUM_SLOTS, "max_context_tokens": 256}
    engine, server = engine_on(
        sglang_python,
        checkpoints[0],
        tmp_path_factory.mktemp("logs") / "engine.log",
        limits,
        spec={"needs_tokenizer": True},
        settings={"max_restarts": 2},
        tokenizer=letter_tokenizer(),
    )
    rig = Rig(engine, server)
    try:
        engine.start()
        rig.sync(checkpoints[0], 0)
        yield rig
    finally:
        engine.close()


@pytest.fixture
def rig(started: Rig, checkpoints: list[Path]) -> Rig:
    """Returns the same engine for all tests, with version 0 again."""
    if started.engine.policy_version != 0:
        started.sync(checkpoints[0], 0)
    return started


@pytest.fixture(scope="module")
def references(checkpoints: list[Path]) -> list[transformers.PreTrainedModel]:
    return [transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval() for path in checkpoints]


@torch.no_grad()
def decode_with_cache(models: Sequence[transformers.PreTrainedModel], request: Sample) -> tuple[list[int], list[float]]:
    """Returns greedy tokens and log-probs. `models[i]` generates token i with the cache of all tokens before it."""
    cache = transformers.DynamicCache()
    tokens: list[int] = []
    logprobs: list[float] = []
    fed = torch.tensor([request.prompt])
    for model in models:
        logits = model(fed, past_key_values=cache, use_cache=True).logits[:, -1:]
        fed = logits.argmax(-1)
        tokens.append(int(fed))
        logprobs.append(float(logits.log_softmax(-1).max()))
    return tokens, logprobs


def assert_greedy(request: Sample, done: Sample, models: Sequence[transformers.PreTrainedModel]) -> None:
    """Asserts that every token is that of the model of its version."""
    assert len(done.policy_versions) == len(done.tokens)
    tokens, logprobs = decode_with_cache([models[version] for version in done.policy_versions], request)
    assert list(done.tokens) == tokens
    assert list(done.logprobs) == pytest.approx(logprobs, abs=TOLERANCE)


def drain(engine: SGLangEngine) -> dict[int, Sample]:
    completions: dict[int, Sample] = {}
    deadline = time.monotonic() + LIMIT_S
    while engine.num_unfinished:
        assert time.monotonic() < deadline
        completions |= {done.id: done for done in engine.step()}
    return completions


def draw(engine: SGLangEngine, requests: Sequence[Sample], num_tokens: int) -> dict[int, Sample]:
    """Steps until an unfinished sample has `num_tokens` tokens or none is left, and returns the finished samples."""
    completions: dict[int, Sample] = {}
    ids = [request.id for request in requests]
    deadline = time.monotonic() + LIMIT_S
    while engine.num_unfinished and not any(len(sample.tokens) >= num_tokens for sample in engine.progress(ids)):
        assert time.monotonic() < deadline
        completions |= {done.id: done for done in engine.step()}
    return completions


def test_greedy_equals_transformers(rig: Rig, references: list[transformers.PreTrainedModel]) -> None:
    requests = ragged_requests(2 * NUM_SLOTS + 3)
    for request, done in zip(requests, rig.engine.generate(requests, GREEDY), strict=True):
        assert_greedy(request, done, references)
        assert (len(done.tokens), done.status) == (24, Status.TRUNCATED)


@pytest.mark.parametrize("truncation", [(1.0, 0), (0.7, 0), (1.0, 5), (0.8, 5)])
@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_logprobs_are_of_the_tempered_and_untruncated_distribution(
    rig: Rig, references: list[transformers.PreTrainedModel], temperature: float, truncation: tuple[float, int]
) -> None:
    requests = ragged_requests(6)
    drawn = rig.engine.generate(requests, SamplingParams(temperature, *truncation, 12, ()))
    for request, done in zip(requests, drawn, strict=True):
        tokens = torch.tensor([[*request.prompt, *done.tokens]])
        with torch.no_grad():
            logits = references[0](tokens).logits[0, len(request.prompt) - 1 : -1] / temperature
        expected = logits.log_softmax(-1).gather(-1, tokens[0, len(request.prompt) :, None])[:, 0]
        assert list(done.logprobs) == pytest.approx(expected.tolist(), abs=TOLERANCE)
        if truncation[1]:
            ranks = (logits > logits.gather(-1, tokens[0, len(request.prompt) :, None])).sum(-1)
            assert int(ranks.max()) < truncation[1]


def test_samples_of_one_prompt_differ_and_follow_the_models_distribution(
    rig: Rig, references: list[transformers.PreTrainedModel]
) -> None:
    prompt, count = ragged_requests(3)[2].prompt, 800
    sampling = SamplingParams(1.0, 1.0, 0, 1, ())
    drawn = rig.engine.generate([Sample(i, prompt, seed=i) for i in range(count)], sampling)
    counts = torch.tensor([done.tokens[0] for done in drawn]).bincount(minlength=VOCAB_SIZE).double()
    with torch.no_grad():
        expected = count * torch.softmax(references[0](torch.tensor([prompt])).logits[0, -1].double(), -1)
    common = expected >= 5
    observed = torch.cat([counts[common], counts[~common].sum()[None]])
    predicted = torch.cat([expected[common], expected[~common].sum()[None]])
    freedom = len(observed) - 1
    assert float(((observed - predicted) ** 2 / predicted).sum()) < freedom + 4 * (2 * freedom) ** 0.5 + 8


def test_a_stop_token_ends_a_response_and_is_part_of_it(rig: Rig) -> None:
    requests = ragged_requests()
    free = rig.engine.generate(requests, GREEDY)
    drawn = [token for done in free for token in done.tokens[2:20]]
    stops = (max(set(drawn), key=drawn.count), drawn[0])
    statuses = set()
    for whole, done in zip(free, rig.engine.generate(requests, replace(GREEDY, stop_token_ids=stops)), strict=True):
        ends = [place for place, token in enumerate(whole.tokens, 1) if token in stops]
        assert list(done.tokens) == list(whole.tokens)[: min(ends, default=24)]
        assert done.status == (Status.STOPPED if ends else Status.TRUNCATED)
        statuses.add(done.status)
    assert Status.STOPPED in statuses


def test_stop_strings_end_a_response_where_the_text_first_contains_one(rig: Rig) -> None:
    requests, tokenizer = ragged_requests(6), letter_tokenizer()
    free = rig.engine.generate(requests, GREEDY)
    texts = [tokenizer.decode(list(done.tokens)) for done in free]
    stops = (texts[0][3:6], texts[1][7:9])
    for text, done in zip(texts, rig.engine.generate(requests, replace(GREEDY, stop=stops)), strict=True):
        ends = [text.find(stop) + len(stop) for stop in stops if stop in text]
        assert tokenizer.decode(list(done.tokens)) == text[: min(ends, default=24)]
        assert len(done.tokens) == len(done.logprobs) == len(done.policy_versions)
        assert done.status == (Status.STOPPED if ends else Status.TRUNCATED)


def test_responses_end_at_the_context_limit(rig: Rig, references: list[transformers.PreTrainedModel]) -> None:
    requests = [replace(request, prompt=(request.prompt * 256)[: 256 - left]) for left, request in
                enumerate(ragged_requests(5), start=1)]  # fmt: skip
    for left, (request, done) in enumerate(zip(requests, rig.engine.generate(requests, GREEDY), strict=True), start=1):
        assert (len(done.tokens), done.status) == (left, Status.TRUNCATED)
        assert_greedy(request, done, references)


def test_suspended_responses_go_on_where_they_stopped(rig: Rig, references: list[transformers.PreTrainedModel]) -> None:
    requests = ragged_requests(NUM_SLOTS + 4)
    rig.engine.submit(requests, LONG)
    done_before = {}
    for num_tokens in (10, 40):
        done_before |= draw(rig.engine, requests, num_tokens)
        suspended = rig.engine.suspend()
        assert rig.engine.num_unfinished == 0
        assert any(0 < len(request.tokens) < 100 for request in suspended)
        rig.engine.release_cache()
        rig.engine.submit(suspended, LONG)
    completions = done_before | drain(rig.engine)
    for request in requests:
        assert len(completions[request.id].tokens) == 100
        assert_greedy(request, completions[request.id], references)


def test_a_stop_string_is_found_across_a_suspension(rig: Rig) -> None:
    [request], tokenizer = ragged_requests(1), letter_tokenizer()
    [free] = rig.engine.generate([request], GREEDY)
    stop = tokenizer.decode(list(free.tokens[5:9]))
    [half] = rig.engine.generate([request], replace(GREEDY, max_response_tokens=7))
    [done] = rig.engine.generate([half.first(7)], replace(GREEDY, stop=(stop,)))
    assert list(done.tokens) == list(free.tokens[:9])
    assert done.status == Status.STOPPED


def test_every_token_has_the_version_of_the_weights_that_drew_it(
    rig: Rig, checkpoints: list[Path], references: list[transformers.PreTrainedModel]
) -> None:
    """The versions have different weights, and cached keys and values of old weights stay in use.

    So a wrong version, a lost token or a duplicate changes all later tokens.
    """
    of_version = [references[version % 2] for version in range(4)]
    seen: list[set[int]] = []
    for attempt in range(MAX_ATTEMPTS):
        if attempt:
            rig.sync(checkpoints[0], 0)
        requests = ragged_requests(NUM_SLOTS + 4)
        rig.engine.submit(requests, LONG)
        completions = {}
        for version in (1, 2, 3):
            completions |= draw(rig.engine, requests, 10 * version)
            rig.sync(checkpoints[version % 2], version)
        completions |= drain(rig.engine)
        for request in requests:
            assert_greedy(request, completions[request.id], of_version)
        seen = [set(completions[request.id].policy_versions) for request in requests]
        if any(len(versions) > 1 for versions in seen):
            break
    else:
        pytest.fail(f"no response saw a change of weights: {seen}")


def test_a_prompt_that_old_weights_have_cached_is_computed_again(
    rig: Rig, checkpoints: list[Path], references: list[transformers.PreTrainedModel]
) -> None:
    long_prompt = [replace(ragged_requests(1)[0], prompt=tuple(range(40)))]
    rig.engine.generate(long_prompt, GREEDY)
    rig.engine.submit(ragged_requests(2), LONG)  # a running request prevents a flush of the cache
    rig.engine.step()
    rig.sync(checkpoints[1], 1)
    drain(rig.engine)
    [done] = rig.engine.generate(long_prompt, GREEDY)
    assert_greedy(long_prompt[0], done, references)


def test_a_killed_server_is_replaced_and_everything_completes(
    rig: Rig, checkpoints: list[Path], references: list[transformers.PreTrainedModel]
) -> None:
    num_starts, num_restarts = rig.server.num_starts, rig.engine.num_restarts
    rig.sync(checkpoints[1], 1)
    requests = ragged_requests(NUM_SLOTS + 4)
    rig.engine.submit(requests, LONG)
    completions = draw(rig.engine, requests, 1)
    os.kill(processes(rig.server)[-1], signal.SIGKILL)
    completions |= drain(rig.engine)
    assert (rig.server.num_starts, rig.engine.num_restarts) == (num_starts + 1, num_restarts + 1)
    assert rig.engine.policy_version == 1
    for request in requests:
        assert len(completions[request.id].tokens) == 100
        assert_greedy(request, completions[request.id], references)


def test_weights_that_are_not_finite_are_reported(rig: Rig, checkpoints: list[Path], tmp_path: Path) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(checkpoints[0], dtype=torch.float32)
    with torch.no_grad():
        model.model.layers[0].self_attn.q_proj.weight.fill_(float("nan"))
    model.save_pretrained(tmp_path)
    rig.sync(tmp_path, 9)
    with pytest.raises((DivergenceError, EngineError)):
        rig.engine.generate(ragged_requests(2), GREEDY)
    assert rig.engine.num_unfinished == 0
