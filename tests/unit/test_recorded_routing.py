"""The routing that an engine hands over with samples is that of transformers' routers, for every token it has fed."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from rltrain.checkpoint.hf_reader import load_parameters
from rltrain.models import read_architecture
from rltrain.models.routing_shape import NOT_RECORDED, RoutingShape
from rltrain.rollout.embedded import EmbeddedEngine
from rltrain.rollout.embedded import parameters as grouped_product
from rltrain.rollout.engine import SamplingParams
from rltrain.rollout.layout import engine_layout
from rltrain.rollout.sample import RecordedRouting, Sample, SampleGroup, pack_groups
from rltrain.runtime.grid import Grid
from tests.expected_routing import check
from tests.rollout_models import load_engine, ragged_requests, write_checkpoint
from tests.through_json import through_json
from tests.unit.recorded_steps import Recorder

SAMPLED = SamplingParams(1.0, 1.0, 0, 12, (3,))
pytestmark = pytest.mark.usefixtures("small_blocks")


def whole(engine: EmbeddedEngine, samples: list[Sample]) -> list[Sample]:
    return engine.generate(samples, SAMPLED)


def suspended(engine: EmbeddedEngine, samples: list[Sample]) -> list[Sample]:
    """And withdrawn, looked at in the middle, and handed in again."""
    engine.submit(samples, SAMPLED)
    done = [sample for _ in range(4) for sample in engine.step()]
    running = engine.progress([sample.id for sample in samples])
    assert all(len(sample.routing) == len(sample.context) - 1 for sample in running if sample.routing is not None)
    back = engine.withdraw([samples[-1].id]) + engine.suspend()
    return sorted(done + engine.generate(back, SAMPLED), key=lambda sample: sample.id)


def in_turns(engine: EmbeddedEngine, samples: list[Sample]) -> list[Sample]:
    turns = engine.generate([replace(sample, turn_limit=4, goes_on=True) for sample in samples], SAMPLED)
    return engine.generate([done.observed((7, 9, 11), turn_limit=12) for done in turns], SAMPLED)


@pytest.mark.parametrize("way", [whole, suspended, in_turns])
@pytest.mark.parametrize(("family", "kv_tokens"), [("qwen3_moe", None), ("mixtral", 60), ("deepseek_v3", 4000)])
def test_every_fed_token_has_that_of_transformers(
    checkpoints: dict[str, Path],
    family: str,
    kv_tokens: int | None,
    way: Callable[[EmbeddedEngine, list[Sample]], list[Sample]],
) -> None:
    """Prompts that several samples share are computed once, and samples that find no room are computed anew."""
    path = checkpoints[family]
    engine, _ = load_engine(path, kv_tokens=kv_tokens, max_context_tokens=48, record_routing=True)
    prompts = ragged_requests(7)[::2]
    samples = [replace(prompts[n // 2], id=n, seed=n) for n in range(2 * len(prompts))]
    done = way(engine, samples)
    assert kv_tokens != 60 or way is in_turns or engine.cache_metrics()["rollout/preemptions"] > 0
    without, _ = load_engine(path, kv_tokens=kv_tokens, max_context_tokens=48)
    assert [sample.tokens for sample in way(without, samples)] == [sample.tokens for sample in done]
    for sample in done:
        check(path, sample)
    shape = RoutingShape.of(read_architecture(path))
    packed = pack_groups([SampleGroup(0, 0, tuple(done))], [0], shape)
    of_samples = shape.unpacked(packed.routed_experts).split(packed.lengths.tolist())
    for sample, experts in zip(done, of_samples, strict=True):
        assert sample.routing is not None and np.array_equal(experts[:-1], sample.routing.experts)
        assert (experts[-1] == NOT_RECORDED).all()


@pytest.mark.parametrize("kv_tokens", [None, 4000])
def test_recorded_steps_keep_it_too(
    checkpoints: dict[str, Path], monkeypatch: pytest.MonkeyPatch, kv_tokens: int | None
) -> None:
    """Steps can be recorded where all experts are multiplied without a look of the host, which CPUs can do as well."""
    monkeypatch.setattr(grouped_product, "is_grouped_on_device", lambda matrices, dtype: True)
    record = Recorder()
    engine, _ = load_engine(checkpoints["deepseek_v3"], kv_tokens=kv_tokens, record_routing=True, record=record)
    for sample in engine.generate(ragged_requests(4), SAMPLED):
        check(checkpoints["deepseek_v3"], sample)
    assert record.num_replayed > 0


def test_what_was_recorded_stays_when_it_is_computed_anew_under_other_weights(
    checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    path, other = checkpoints["qwen3_moe"], write_checkpoint(tmp_path, "qwen3_moe", seed=1)
    engine, parameters = load_engine(path, record_routing=True)
    engine.submit(ragged_requests(3), SamplingParams(1.0, 1.0, 0, 12, ()))
    for _ in range(5):
        engine.step()
    before = engine.suspend()
    for sample in before:
        check(path, sample)
    load_parameters(other, engine_layout(read_architecture(other), Grid((0,))), 0, parameters)
    after = engine.generate(before, SamplingParams(1.0, 1.0, 0, 12, ()))
    for sample, earlier in zip(after, before, strict=True):
        assert sample.routing is not None and earlier.routing is not None
        assert sample.routing.first(len(earlier.routing)) == earlier.routing
        check(other, sample, first=len(earlier.routing))


def test_it_crosses_json_and_is_cut_with_its_sample(checkpoints: dict[str, Path]) -> None:
    engine, _ = load_engine(checkpoints["mixtral"], record_routing=True)
    (sample,) = engine.generate(ragged_requests(1), SAMPLED)
    assert through_json(sample) == sample
    routing = sample.first(2).routing
    assert sample.routing is not None and routing == sample.routing.first(len(sample.prompt) + 2)
    assert routing != sample.routing
    assert replace(sample, routing=None) == through_json(replace(sample, routing=None))


def test_a_model_without_experts_has_nothing_to_record(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="the model has no experts"):
        load_engine(write_checkpoint(tmp_path, "qwen3"), record_routing=True)


def test_routings_follow_each_other() -> None:
    one, two = (RecordedRouting(np.full((n, 2, 1), n, np.int8)) for n in (1, 2))
    assert one.followed_by(two).experts[:, 0, 0].tolist() == [1, 2, 2]
