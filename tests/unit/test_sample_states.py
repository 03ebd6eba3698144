"""States of gated delta nets in the embedded engine: of the sample whose slot it is, whatever happens to slots."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from rltrain.errors import ConfigError
from rltrain.planning.memory import kv_bytes, state_bytes
from rltrain.rollout.embedded.block_tables import KvBudget, num_blocks
from rltrain.rollout.embedded.kv_cache import KvCache, SampleStates, StateShape
from rltrain.rollout.engine import SamplingParams
from rltrain.rollout.sample import Sample
from tests.model_shards import tiny_architecture
from tests.rollout_models import load_engine, ragged_requests, write_checkpoint
from tests.unit.recorded_steps import Recorder

pytestmark = pytest.mark.usefixtures("small_blocks")
SAMPLED = SamplingParams(1.0, 1.0, 0, 12, (3, 4, 5))
TOLERANCE = 1e-4
BUDGET = KvBudget(1, lambda: 0)
SHAPE = StateShape(num_layers=3, num_heads=2, key_dim=4, value_dim=5, channels=6, kernel=4)


@pytest.fixture(scope="module")
def qwen3_5(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("qwen3_5"), "qwen3_5")


def of_one_prompt(num: int) -> list[Sample]:
    return [Sample(id=200 + number, prompt=(7, 1, 9, 9, 2, 30, 4), seed=number) for number in range(num)]


def assert_alike(found: list[Sample], expected: list[Sample]) -> None:
    for one, other in zip(found, expected, strict=True):
        assert one.tokens == other.tokens
        torch.testing.assert_close(torch.tensor(one.logprobs), torch.tensor(other.logprobs), atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("kv_tokens", [None, 400])
def test_samples_draw_what_each_draws_alone(qwen3_5: Path, kv_tokens: int | None) -> None:
    """Some enter later than others of their prompt, in slots that these or longer ones had before; responses end at
    different steps, so that slots move."""
    requests = [*ragged_requests(4), *of_one_prompt(5), *ragged_requests(2, seed=1)[::-1]]
    requests = [Sample(number, sample.prompt, sample.seed) for number, sample in enumerate(requests)]
    alone, _ = load_engine(qwen3_5)
    expected = [done for sample in requests for done in alone.generate([sample], SAMPLED)]
    assert len({len(done.tokens) for done in expected}) > 3
    engine, _ = load_engine(qwen3_5, max_running_requests=4, max_context_tokens=48, kv_tokens=kv_tokens)
    assert_alike(engine.generate(requests, SAMPLED), expected)


def test_a_replayed_step_takes_a_token_in_once(qwen3_5: Path) -> None:
    requests, recorder = ragged_requests(3), Recorder()
    expected = load_engine(qwen3_5)[0].generate(requests, SAMPLED)
    engine, _ = load_engine(qwen3_5, max_running_requests=4, record=recorder)
    for _ in range(2):
        assert_alike(engine.generate(requests, SAMPLED), expected)
    assert recorder.num_replayed > recorder.num_recorded > 0


def test_memory_is_held_while_samples_run_and_given_back(qwen3_5: Path) -> None:
    for kv_tokens in (None, 400):
        engine, _ = load_engine(qwen3_5, max_running_requests=4, kv_tokens=kv_tokens)
        engine.generate(ragged_requests(3), SAMPLED)
        cache: KvCache = engine._slots.cache
        sizes = {tuple(tensor.shape[2:]) for tensor in cache.tensors() if tensor.dim() == 5 and tensor.size(1) <= 4}
        assert sizes, "states are among what the engine says that it holds"
        engine.release_cache()
        assert not any(tensor.numel() for tensor in engine.cache_tensors())


def test_the_budget_holds_states_of_all_slots() -> None:
    sizes = {"block_bytes": 10, "block_tokens": 4, "max_context_tokens": 8, "max_running_requests": 5}
    assert num_blocks(BUDGET, 130, states_bytes=100, **sizes) == num_blocks(BUDGET, 30, **sizes) == 3
    with pytest.raises(ConfigError, match=r"beside 1e-07 GB of states of rollout\.max_running_requests samples"):
        num_blocks(BUDGET, 129, states_bytes=100, **sizes)


@pytest.mark.parametrize("tp", [1, 2])
def test_estimates_are_of_what_is_held(tp: int) -> None:
    architecture = tiny_architecture("qwen3_next", num_layers=5)
    shape = StateShape.of(architecture, tp)
    assert shape is not None and shape.num_layers == 3 and architecture.num_attention_layers == 2
    assert state_bytes(architecture, 7, tp=tp, item_bytes=2) == 7 * shape.sample_bytes(torch.bfloat16)
    assert kv_bytes(architecture, 1, tp=tp) * 5 == kv_bytes(replace(architecture, delta=None), 1, tp=tp) * 2


def test_what_is_parked_comes_back_to_any_slot() -> None:
    states = SampleStates(SHAPE, torch.bfloat16, torch.device("cpu"))
    states.hold(3)
    for tensor in states.tensors():
        tensor.copy_(torch.randn_like(tensor))
    kept, parked = [tensor[:, 1].clone() for tensor in states.tensors()], states.parked(1)
    states.begin(0, 3)
    assert not any(tensor.any() for tensor in states.tensors())
    states.resume(2, parked)
    states.move([2], [0])
    states.hold(5, num_used=1)
    assert all(torch.equal(x[:, 0], y) and not x[:, 1:].any() for x, y in zip(states.tensors(), kept, strict=True))
    assert SHAPE.sample_bytes(torch.bfloat16) == 3 * (2 * 4 * 5 * 4 + 6 * 3 * 2)
