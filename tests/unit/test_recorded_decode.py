"""Decode steps that are recorded and replayed: the same responses, and recordings that end with the memory they use.

The recorder is the CPU stand-in of recorded_steps.py; tests/gpu/test_decode_graph.py has the same of CUDA graphs.
"""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from rltrain.rollout.embedded import EmbeddedEngine
from rltrain.rollout.embedded.decoder import Decoder, Recordings, recorder
from rltrain.rollout.embedded.kv_cache import rounded
from rltrain.rollout.embedded.model import EngineModel
from rltrain.rollout.engine import SamplingParams
from rltrain.rollout.sample import Sample
from tests.marks import slow_but
from tests.rollout_models import load_engine, ragged_requests, write_checkpoint
from tests.unit.recorded_steps import Recorder

SAMPLED = SamplingParams(1.0, 1.0, 0, 24, (3, 4, 5))
GREEDY = SamplingParams(0.0, 1.0, 0, 24, (3,))
FIXED = SamplingParams(1.0, 1.0, 0, 24, ())
TRUNCATED = SamplingParams(0.8, 0.9, 5, 40, (3, 4, 5))


def recording_engine(path: Path, **options: int) -> tuple[EmbeddedEngine, dict[str, torch.Tensor], Recorder]:
    stand_in = Recorder()
    return *load_engine(path, record=stand_in, **options), stand_in


def assert_same(left: list[Sample], right: list[Sample]) -> None:
    for one, other in zip(left, right, strict=True):
        assert (one.id, list(one.tokens), one.status) == (other.id, list(other.tokens), other.status)
        assert list(one.logprobs) == pytest.approx(other.logprobs, abs=2e-5)


@pytest.mark.parametrize(
    ("sampling", "max_running_requests"),
    slow_but([(SAMPLED, 1), (SAMPLED, 5), (SAMPLED, 64), (GREEDY, 5), (TRUNCATED, 64)], (SAMPLED, 5), (TRUNCATED, 64)),
)
def test_replayed_steps_draw_what_steps_draw(qwen3: Path, sampling: SamplingParams, max_running_requests: int) -> None:
    requests = ragged_requests(min(12, 3 * max_running_requests))
    expected = load_engine(qwen3)[0].generate(requests, sampling)
    assert len({len(done.tokens) for done in expected}) > 1
    engine, _, stand_in = recording_engine(qwen3, max_running_requests=max_running_requests)
    for _ in range(3):
        assert_same(engine.generate(requests, sampling), expected)
    assert stand_in.num_replayed > stand_in.num_recorded > 0


def test_recordings_outlive_sessions_and_see_weights_that_change_in_place(qwen3: Path, tmp_path: Path) -> None:
    engine, parameters, stand_in = recording_engine(qwen3)
    other, new_parameters = load_engine(write_checkpoint(tmp_path, "qwen3", seed=1))
    requests = ragged_requests()
    for sampling in (FIXED, SAMPLED) * 3:
        engine.generate(requests, sampling)
    num_recorded = stand_in.num_recorded
    for name, tensor in parameters.items():
        tensor.copy_(new_parameters[name])
    assert_same(engine.generate(requests, FIXED), other.generate(requests, FIXED))
    assert stand_in.num_recorded == num_recorded
    assert_same(engine.generate(requests, SAMPLED), other.generate(requests, SAMPLED))


def test_recordings_end_with_the_cache(qwen3: Path) -> None:
    engine, _, stand_in = recording_engine(qwen3)
    requests = ragged_requests()
    expected = [engine.generate(requests, FIXED) for _ in range(3)]
    num_recorded = stand_in.num_recorded
    engine.release_cache()
    assert_same(engine.generate(requests, FIXED), expected[0])
    assert stand_in.num_recorded > num_recorded


def test_recordings_end_when_weights_move(qwen3: Path) -> None:
    engine, parameters, stand_in = recording_engine(qwen3)
    requests = ragged_requests()
    expected = [engine.generate(requests, FIXED) for _ in range(3)]
    num_recorded = stand_in.num_recorded
    for tensor in parameters.values():  # as memory that is offloaded comes back
        left = tensor.data
        tensor.data = left.clone()
        left.fill_(torch.nan)
    assert_same(engine.generate(requests, FIXED), expected[0])
    assert stand_in.num_recorded > num_recorded


def test_a_step_runs_then_is_recorded_then_replayed_until_addresses_change() -> None:
    done: list[str] = []

    def record(step: Callable[[], None]) -> Callable[[], None]:
        done.append("record")
        return lambda: done.append("replay")

    recordings = Recordings(record)
    for address in (1, 1, 1, 2, 2):
        recordings.expire((address,))
        recordings.run("a", lambda: done.append("step"))
    assert done == ["step", "record", "replay", "replay", "record", "replay", "replay"]


def test_nothing_is_recorded_on_cpu() -> None:
    assert recorder(torch.device("cpu"), None) is None


def test_sizes_of_recorded_steps() -> None:
    assert sorted({rounded(n, 2) for n in range(1, 33)}) == [1, 2, 3, 4, 6, 8, 12, 16, 24, 32]
    assert sorted({rounded(n, 4) for n in range(9, 65)}) == [10, 12, 14, 16, 20, 24, 28, 32, 40, 48, 56, 64]
    assert all(n <= rounded(n, 4) <= n * 1.34 for n in range(1, 3000))


def test_few_sizes_are_recorded(qwen3: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each costs some 60 ms on a GPU, and memory: no more than two between powers of two, however many samples run."""
    sizes, running = set[int](), set[int]()
    forward, step = EngineModel.forward, Decoder.step
    monkeypatch.setattr(EngineModel, "forward", lambda self, *rest: (sizes.add(len(rest[0])), forward(self, *rest))[1])
    monkeypatch.setattr(Decoder, "step", lambda self, num, *rest: (running.add(num), step(self, num, *rest))[1])
    engine, _, _ = recording_engine(qwen3, max_running_requests=64)
    engine.generate(ragged_requests(64), SAMPLED)
    assert max(running) == 64 and len(running) > 2 * 6 + 1
    assert len(sizes) <= 2 * 6 + 1
