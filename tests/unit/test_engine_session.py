"""The engine as a session: requests come, weights change and work is taken back between two decode steps."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

from rltrain.errors import DivergenceError, SyncError
from rltrain.rollout.embedded import EmbeddedEngine
from rltrain.rollout.embedded.model import EngineModel
from rltrain.rollout.engine import SamplingParams
from rltrain.rollout.sample import Sample, Status
from tests.rollout_models import LetterTokenizer, load_engine, ragged_requests, write_checkpoint

GREEDY = SamplingParams(0.0, 1.0, 0, 16, ())
SAMPLED = SamplingParams(1.0, 1.0, 0, 16, (3, 4, 5))
LOGPROB_TOLERANCE = 4e-5


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same architecture with other weights."""
    return write_checkpoint(tmp_path_factory.mktemp("other"), "qwen3", seed=1)


@pytest.fixture(scope="module")
def uninterrupted(qwen3: Path) -> dict[int, Sample]:
    """By id, what each of `ragged_requests` gives in one call."""
    return {done.id: done for done in load_engine(qwen3)[0].generate(ragged_requests(), SAMPLED)}


def assert_same(done: Sample, expected: Sample) -> None:
    assert list(done.tokens) == list(expected.tokens)
    assert done.status == expected.status
    assert done.logprobs == pytest.approx(expected.logprobs, abs=LOGPROB_TOLERANCE)


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
            assert_same(done, uninterrupted[done.id])
        assert engine.num_unfinished == sum(len(done.tokens) > step for done in uninterrupted.values())
    assert engine.step() == []


def test_requests_start_in_the_order_of_submission(qwen3: Path) -> None:
    engine, _ = load_engine(qwen3, max_running_requests=2)
    first, second = ragged_requests(5)[:3], ragged_requests(5)[3:]
    engine.submit(first, GREEDY)
    engine.step()
    engine.submit(second, GREEDY)
    assert [done.id for done in drain(engine)] == [request.id for request in first + second]


@pytest.mark.parametrize("max_running_requests", [3, 64])
def test_requests_that_come_while_others_run_change_nothing(
    qwen3: Path, uninterrupted: dict[int, Sample], max_running_requests: int
) -> None:
    engine, _ = load_engine(qwen3, max_running_requests=max_running_requests)
    completions = []
    for request in ragged_requests()[::-1]:
        engine.submit([request], SAMPLED)
        completions += engine.step()
    completions += drain(engine)
    assert sorted(done.id for done in completions) == sorted(uninterrupted)
    for done in completions:
        assert_same(done, uninterrupted[done.id])


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
        assert_same(done, uninterrupted[done.id])
    for request, done in zip(suspended, resumed, strict=True):
        assert tuple(done.logprobs)[: len(request.logprobs)] == request.logprobs


def test_a_suspended_response_continues_in_another_engine(qwen3: Path, uninterrupted: dict[int, Sample]) -> None:
    first, _ = load_engine(qwen3)
    first.submit(ragged_requests(), SAMPLED)
    finished = steps(first, 3)
    second, _ = load_engine(qwen3, max_running_requests=2)
    for done in finished + second.generate(first.suspend()[::-1], SAMPLED):
        assert_same(done, uninterrupted[done.id])


ACTIONS = st.sampled_from(["submit", "step", "step", "step", "suspend", "release"])


@settings(max_examples=8)
@given(actions=st.lists(ACTIONS, max_size=25), max_running_requests=st.integers(1, 9))
def test_no_history_loses_repeats_or_changes_a_response(
    qwen3: Path, uninterrupted: dict[int, Sample], actions: Sequence[str], max_running_requests: int
) -> None:
    engine, _ = load_engine(qwen3, max_running_requests=max_running_requests)
    waiting, completions = ragged_requests(), []
    for number, action in enumerate([*actions, *["submit"] * 9]):
        engine.policy_version = number
        if action == "submit" and waiting:
            engine.submit([waiting.pop(0)], SAMPLED)
        elif action == "step":
            returned = engine.step()
            assert all(done.policy_versions[-1] == number for done in returned)
            completions += returned
        elif action in ("suspend", "release"):
            suspended = engine.suspend()
            if action == "release":
                engine.release_cache()
            engine.submit(suspended, SAMPLED)
    completions += drain(engine)
    assert sorted(done.id for done in completions) == sorted(uninterrupted)
    for done in completions:
        assert_same(done, uninterrupted[done.id])
        assert len(done.policy_versions) == len(done.tokens)
        last = len(actions) + 8  # the version while draining: before it each step had a version of its own
        early = [version for version in done.policy_versions if version < last]
        assert list(done.policy_versions) == sorted(done.policy_versions)
        assert len(set(early)) == len(early)


@torch.no_grad()
def decode_with_cache(models: Sequence[transformers.PreTrainedModel], request: Sample) -> list[int]:
    """Greedy tokens where `models[i]` draws token i, on the keys and values that those before it computed."""
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
    old, new = (transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32) for path in (qwen3, other))
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


def test_limits_count_tokens_drawn_before(qwen3: Path) -> None:
    engine, _ = load_engine(qwen3, max_context_tokens=14)
    requests = ragged_requests(5)
    whole = engine.generate(requests, GREEDY)
    assert [len(done.tokens) for done in whole] == [13, 11, 9, 7, 5]
    engine.submit(requests, GREEDY)
    steps(engine, 4)
    for done, expected in zip(engine.generate(engine.suspend(), GREEDY), whole, strict=True):
        assert_same(done, expected)


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
    widths: list[int] = []
    fill_cache = EngineModel.fill_cache
    monkeypatch.setattr(
        EngineModel,
        "fill_cache",
        lambda self, tokens, *rest: (widths.append(len(tokens)), fill_cache(self, tokens, *rest)),
    )
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
        (
            lambda r: ([r[3], r[4].drawn((1,) * 16, (0.0,) * 16, (0,) * 16)], GREEDY),
            "fewer than the 16",
        ),
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
    engine.submit(ragged_requests(2), SAMPLED)  # another sampling, once nothing is unfinished


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
        assert_same(done, uninterrupted[done.id])


def test_drawn_names_what_does_not_fit_together() -> None:
    with pytest.raises(ValueError, match="2 tokens, 1 logprobs, 2 policy_versions and 2 entries of loss_mask"):
        ragged_requests(1)[0].drawn((1, 2), (0.5,), (0, 0))
