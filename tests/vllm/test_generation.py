"""An engine on a real vLLM server: tokens and log-probs against transformers, stops, truncation, aborts, weights.

Weights come as checkpoints in folders, as those that a job writes.
"""

import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers

from rltrain.config.rollout import Sampling
from rltrain.errors import DivergenceError, EngineError
from rltrain.rollout.engine import SamplingParams
from rltrain.rollout.sample import Sample, Status
from rltrain.rollout.servers.http_engine import HttpEngine
from tests.support.http_servers import VLLM
from tests.support.rollout_models import hf_logprobs, hf_model, of_tokens
from tests.vllm.answers import broken, fits
from tests.vllm.engines import NUM_SLOTS, TOLERANCE, Rig, assert_greedy, engine_on, started_on
from tests.vllm.servers import CONTEXT, START_TIMEOUT_S, VLLMServer, hits_of_prefix_cache, requests

GREEDY = SamplingParams(0.0, 1.0, 0, 24, ())
LONG = SamplingParams(0.0, 1.0, 0, 100, ())


@pytest.fixture(scope="module")
def models(checkpoints: list[Path]) -> list[transformers.PreTrainedModel]:
    return [hf_model(path) for path in checkpoints]


@pytest.fixture
def rig(server: VLLMServer, checkpoints: list[Path], models: list[transformers.PreTrainedModel]) -> Iterator[Rig]:
    """Yields an engine with the weights of the first checkpoint as version 0."""
    with started_on(server, checkpoints, models) as rig:
        yield rig


def drain(engine: HttpEngine, until_tokens: int | None = None) -> list[Sample]:
    """Returns the samples that finish, until all have or a running one has so many tokens."""
    done: list[Sample] = []
    ids = [*engine._unfinished]
    deadline = time.monotonic() + START_TIMEOUT_S
    while engine.num_unfinished:
        done += engine.step()
        if until_tokens and any(len(one.tokens) >= until_tokens for one in engine.progress(ids)):
            break
        assert time.monotonic() < deadline
    return done


def while_too_late() -> Iterator[int]:
    """Counts attempts. On a busy machine the server may be done before the test acts."""
    yield from range(20)
    pytest.fail("in no attempt a response was under way")


def test_greedy_tokens_and_their_log_probs_are_those_of_transformers(rig: Rig) -> None:
    for version in (0, 1, 2):
        if version:
            rig.sync(version % 2, version)
        found = rig.engine.generate(requests(), GREEDY)
        assert [(len(done.tokens), done.status) for done in found] == [(24, Status.TRUNCATED)] * len(found)
        assert {own for done in found for own in done.policy_versions} == {version}
        for done in found:
            assert_greedy(rig.models, done)


def test_sampled_tokens_have_the_log_probs_of_the_whole_distribution(rig: Rig) -> None:
    """That holds for top-k and top-p too. Truncation leaves out what transformers' distribution leaves out."""
    prompt = requests(2)[1].prompt
    for top_p, top_k, most in ((1.0, 0, 15), (1.0, 3, 3), (0.6, 0, 14), (0.9, 5, 5)):
        same = [Sample(number, prompt, seed=number) for number in range(80)]
        sampling = SamplingParams(1.0, top_p, top_k, 4, ())
        found = rig.engine.generate(same, sampling)
        assert 1 < len({done.tokens[0] for done in found}) <= most
        for done in found:
            logprobs = hf_logprobs(rig.models[0], done)
            assert list(done.logprobs) == pytest.approx(of_tokens(logprobs, done).tolist(), abs=TOLERANCE)
            for place, token in enumerate(done.tokens):
                assert token in kept(logprobs[place].exp(), top_p, top_k)


def kept(probabilities: torch.Tensor, top_p: float, top_k: int) -> list[int]:
    """Returns the tokens within top-k, and of these the fewest that reach `top_p`."""
    best, ids = probabilities.sort(descending=True)
    best, ids = (best[: top_k or None], ids[: top_k or None])
    before = best.cumsum(0) - best
    return ids[before < (top_p + 1e-6) * best.sum()].tolist()


def test_defaults_of_a_checkpoint_do_not_change_the_sampling(rig: Rig) -> None:
    """The checkpoint has an end-of-text token, top_k 1, and a penalty of repetition. The job has none of them."""
    found = rig.engine.generate(
        [replace(one, prompt=(3, 5)) for one in requests(16)], SamplingParams(1.0, 1.0, 0, 60, ())
    )
    assert {len(done.tokens) for done in found} == {60} and len({done.tokens for done in found}) == len(found)
    assert any(0 in done.tokens[:-1] for done in found)


def test_a_stop_token_ends_a_response_and_is_part_of_it(rig: Rig) -> None:
    free = rig.engine.generate(requests(), GREEDY)
    drawn = [token for done in free for token in done.tokens[2:20]]
    stops = (max(set(drawn), key=drawn.count), drawn[0])
    for whole, done in zip(free, rig.engine.generate(requests(), replace(GREEDY, stop_token_ids=stops)), strict=True):
        ends = [place for place, token in enumerate(whole.tokens, 1) if token in stops]
        assert list(done.tokens) == list(whole.tokens)[: min(ends, default=24)]
        assert done.status == (Status.STOPPED if ends else Status.TRUNCATED)


def test_stop_strings_end_a_response_where_the_text_first_contains_one(rig: Rig, checkpoints: list[Path]) -> None:
    """That holds across an interruption too."""
    decode = transformers.AutoTokenizer.from_pretrained(checkpoints[0]).decode
    free = rig.engine.generate(requests(), GREEDY)
    stops = (decode(list(free[2].tokens[3:6])), decode(list(free[1].tokens[7:9])))
    expected = []
    for whole in free:
        texts = [decode(list(whole.tokens[:count])) for count in range(1, 25)]
        expected.append(next((count for count, text in enumerate(texts, 1) if any(s in text for s in stops)), None))
    assert (expected[2] or 0) > 1 and None in expected
    interrupted = free[2].first(expected[2] - 1)
    for again in (requests(), [*requests(2), interrupted, *requests()[3:]]):
        found = rig.engine.generate(again, replace(GREEDY, stop=stops))
        for whole, count, done in zip(free, expected, found, strict=True):
            assert list(done.tokens) == list(whole.tokens)[:count]
            assert len(done.tokens) == len(done.logprobs) == len(done.policy_versions)
            assert done.status == (Status.STOPPED if count else Status.TRUNCATED)


def test_responses_end_at_the_context_limit(rig: Rig) -> None:
    full = [replace(one, prompt=(one.prompt * CONTEXT)[: CONTEXT - left]) for left, one in enumerate(requests(4), 1)]
    for left, done in enumerate(rig.engine.generate(full, GREEDY), 1):
        assert (len(done.tokens), done.status) == (left, Status.TRUNCATED)
        assert_greedy(rig.models, done)


def test_aborted_responses_come_back_with_their_tokens_and_continue(rig: Rig) -> None:
    for _ in while_too_late():
        rig.engine.submit(requests(NUM_SLOTS + 2), LONG)
        done = drain(rig.engine, 8)
        suspended = rig.engine.suspend()
        assert rig.engine.num_unfinished == 0
        if any(0 < len(one.tokens) < 100 for one in suspended):
            break
    [back, *others] = suspended
    rig.engine.submit(others, LONG)
    rig.engine.submit([back], LONG)
    [withdrawn] = rig.engine.withdraw([back.id])
    rig.engine.submit([withdrawn], LONG)
    done += drain(rig.engine)
    assert sorted(one.id for one in done) == [one.id for one in requests(NUM_SLOTS + 2)]
    for one in done:
        assert len(one.tokens) == 100
        assert_greedy(rig.models, one)


def test_running_responses_continue_under_new_weights(rig: Rig) -> None:
    """Each token has the version of the weights that drew it. Keys and values of older weights are not used again."""
    for attempt in while_too_late():
        rig.engine.submit(requests(NUM_SLOTS + 2), LONG)
        done = drain(rig.engine, 8)
        for version in (2 * attempt + 1, 2 * attempt + 2):
            rig.sync(version % 2, version)
            done += drain(rig.engine, 30)
        done += drain(rig.engine)
        assert sorted(one.id for one in done) == [one.id for one in requests(NUM_SLOTS + 2)]
        for one in done:
            assert_greedy(rig.models, one)
        if any(len({*one.policy_versions}) > 1 for one in done):
            break


def test_prompts_cached_by_old_weights_are_computed_again(rig: Rig, server: VLLMServer) -> None:
    long_prompt = [replace(requests(1)[0], prompt=tuple(place * 7 % 13 for place in range(200)))]
    rig.engine.generate(long_prompt, GREEDY)
    hits = hits_of_prefix_cache(server)
    assert_greedy(rig.models, rig.engine.generate(long_prompt, GREEDY)[0])
    assert hits_of_prefix_cache(server) > hits, "the second prompt was found in the cache"
    rig.sync(1, 1)
    hits = hits_of_prefix_cache(server)
    [done] = rig.engine.generate(long_prompt, GREEDY)
    assert_greedy(rig.models, done)
    assert {*done.policy_versions} == {1} and hits_of_prefix_cache(server) == hits


@pytest.mark.parametrize(
    ("sampling", "said"),
    [
        (Sampling(temperature=0.7), "start it with --logprobs-mode processed_logprobs"),
        (Sampling(temperature=0.7, top_p=0.9), "expected rollout.sampling.temperature 1"),
    ],
)
def test_sampling_whose_log_probs_it_does_not_return_is_refused(
    server: VLLMServer, checkpoints: list[Path], sampling: Sampling, said: str
) -> None:
    engine = engine_on(server, checkpoints[0], sampling)
    try:
        with pytest.raises(EngineError, match=said):
            engine.start()
    finally:
        engine.close()


def test_a_killed_server_is_replaced_and_everything_completes(rig: Rig, server: VLLMServer) -> None:
    """The process of its engine is killed. The new server starts at the same address with the first checkpoint. It gets
    the second one's weights again."""
    rig.sync(1, 1)
    rig.engine.submit(requests(NUM_SLOTS + 4), LONG)
    done = drain(rig.engine, 8)
    assert fits(broken(server), VLLM["broken"])
    server.kill()
    server.start()
    done += drain(rig.engine)
    assert sorted(one.id for one in done) == [one.id for one in requests(NUM_SLOTS + 4)]
    assert {own for one in done for own in one.policy_versions} == {1}
    for one in done:
        assert len(one.tokens) == 100
        assert_greedy(rig.models, one)


def test_weights_that_are_not_finite_are_reported(rig: Rig, server: VLLMServer, tmp_path: Path) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(rig.checkpoints[0], dtype=torch.float32)
    with torch.no_grad():
        model.model.layers[0].self_attn.q_proj.weight.fill_(float("nan"))
    model.save_pretrained(tmp_path)
    rig.engine.reload_weights(tmp_path, 1)
    with pytest.raises(DivergenceError):
        rig.engine.generate(requests(2), GREEDY)
    server.kill()  # its memory of keys and values has the same numbers, which make sound weights fail too
