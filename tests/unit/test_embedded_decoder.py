"""Tests of recorded and replayed decode steps, and of their memory."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from weakref import WeakSet

import pytest
import torch

from rltrain.data.experience import SIBLINGS_APART
from rltrain.models.attention import attend
from rltrain.offload.device_memory import DeviceMemory
from rltrain.offload.memory_parts import MemoryPart
from rltrain.offload.offload import Offloader
from rltrain.rollout.embedded import EmbeddedEngine, decoder, slot_cache
from rltrain.rollout.embedded.decoder import CudaGraphs, Decoder, Recordings, recorder
from rltrain.rollout.embedded.engine import keeps_recordings
from rltrain.rollout.embedded.kv_cache import AttentionShape, CacheShape, rounded
from rltrain.rollout.embedded.model import EngineModel
from rltrain.rollout.embedded.slot_cache import SlotCache
from rltrain.rollout.engine import GreedyPlaces, SamplingParams
from rltrain.rollout.sample import Sample
from rltrain.schedule.order import Order
from tests.support.cuda_graphs import Graph, GraphDevice, Recorder, RuleBrokenError, expect_unheld
from tests.support.marks import slow_but
from tests.support.rollout_models import load_engine, ragged_requests, write_checkpoint
from tests.support.schedule_configs import make_config
from tests.unit.test_memory_plan import order_of

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


def test_recordings_end_with_the_cache_and_when_weights_move(qwen3: Path) -> None:
    engine, parameters, stand_in = recording_engine(qwen3)
    requests = ragged_requests()

    def move() -> None:  # like the return of offloaded memory
        for tensor in parameters.values():
            left = tensor.data
            tensor.data = left.clone()
            left.fill_(torch.nan)

    for end in (engine.release_cache, move):
        expected = [engine.generate(requests, FIXED) for _ in range(3)]
        num_recorded = stand_in.num_recorded
        end()
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
    """Each size costs about 60 ms on a GPU, and memory. At most two sizes are recorded between powers of two."""
    sizes, running = set[int](), set[int]()
    forward, step = EngineModel.forward, Decoder.step
    monkeypatch.setattr(EngineModel, "forward", lambda self, *rest: (sizes.add(len(rest[0])), forward(self, *rest))[1])
    monkeypatch.setattr(Decoder, "step", lambda self, num, *rest: (running.add(num), step(self, num, *rest))[1])
    engine, _, _ = recording_engine(qwen3, max_running_requests=64)
    engine.generate(ragged_requests(64), SAMPLED)
    assert max(running) == 64 and len(running) > 2 * 6 + 1
    assert len(sizes) <= 2 * 6 + 1


GREEDY_OF_20 = SamplingParams(0.0, 1.0, 0, 20, ())


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> GraphDevice:
    """Returns the test's device, with one communicator for all recorded steps."""
    device = GraphDevice(holders=[WeakSet[Graph]()])
    device.install(monkeypatch)
    return device


def generate(engine: EmbeddedEngine) -> list[list[int]]:
    """Generates often enough to record steps."""
    for _ in range(2):
        engine.generate(ragged_requests(4), GREEDY_OF_20)
    return [list(done.tokens) for done in engine.generate(ragged_requests(4), GREEDY_OF_20)]


def test_what_is_recorded_after_all_was_forgotten_lies_in_a_new_pool(qwen3: Path, device: GraphDevice) -> None:
    engine, _ = load_engine(qwen3, record=CudaGraphs())
    expected = generate(engine)
    for _ in range(2):
        engine.release_cache()
        assert generate(engine) == expected
    assert [bool(graphs) for graphs in device.pools.values()] == [False] * (len(device.pools) - 1) + [True]
    assert len(device.pools) >= 3


@pytest.mark.usefixtures("device")
def test_a_pool_ends_with_the_last_recording_whatever_ends_that(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoder, "_MAX_REPLAYS", 1)
    recordings, total = Recordings(CudaGraphs()), torch.zeros(())
    for name in ("a", "b") * 3:
        recordings.run(name, lambda: total.add_(1))
    assert total == 6


def test_a_closed_engine_holds_no_communicator(qwen3: Path, device: GraphDevice) -> None:
    engine, _ = load_engine(qwen3, record=CudaGraphs())
    generate(engine)
    with pytest.raises(RuleBrokenError, match="recorded graphs hold it"):
        expect_unheld("the communicator", device.holders[0])
    engine.close()
    expect_unheld("the communicator", device.holders[0])


class Released:
    """A stand-in for Communicators. It destroys the given communicator before every task."""

    def __init__(self, release: Callable[[], None]) -> None:
        self._release = release
        self.num_released = 0

    def release(self, position: int) -> None:
        self._release()
        self.num_released += 1

    def restore(self, position: int) -> None:
        pass


def test_communicators_go_after_what_is_recorded_of_them(qwen3: Path, device: GraphDevice) -> None:
    engine, parameters = load_engine(qwen3, record=CudaGraphs())
    order = order_of(2, ("generate", "update"))
    communicators = Released(lambda: expect_unheld("the communicator", device.holders[0]))
    turns, memory = {"actor": "auto", "rollout": "auto"}, DeviceMemory(torch.device("cpu"))
    residency = Offloader(Order.of(order), turns, memory, communicators=communicators)  # type: ignore[arg-type]
    ones, actor = torch.ones(3), ("weights", "master_weights", "optimizer", "gradients")
    residency.admit("actor", {name: MemoryPart(lambda: [ones.clone()]) for name in actor})
    cache = MemoryPart(engine.cache_tensors, forget=engine.release_cache)
    residency.admit("rollout", {"weights": MemoryPart(parameters.values), "kv_cache": cache, "base": MemoryPart(tuple)})
    for position, entry in enumerate(order):
        residency.enter(position)
        if entry.name == "generate":
            generate(engine)
            assert len(device.holders[0]) > 0
    assert communicators.num_released == len(order)


@pytest.mark.parametrize(
    "communicators, num_ranks, kept", [("keep", 2, True), ("release", 2, False), ("release", 1, True)]
)
def test_recordings_are_kept_only_with_the_communicators_that_they_hold(
    communicators: str, num_ranks: int, kept: bool
) -> None:
    site = SimpleNamespace(config=make_config(residency={"communicators": communicators}), ranks=range(num_ranks))
    part = SimpleNamespace(memory=SimpleNamespace(keeps_addresses=True))
    assert keeps_recordings(site, part) is kept  # type: ignore[arg-type]


HEADS = AttentionShape(num_heads=2, num_kv_heads=2, head_dim=4, value_dim=4, scale=0.5)
LATENTS = AttentionShape(num_heads=2, num_kv_heads=1, head_dim=7, value_dim=5, scale=0.5, latent=True)


def small_cache(attention: AttentionShape = HEADS) -> SlotCache:
    """Returns a cache of two layers, with at most 12 slots of 48 positions."""
    return SlotCache(CacheShape(2, attention, 12, 48, torch.float32, torch.device("cpu")))


def shape_of(cache: SlotCache) -> tuple[int, int]:
    assert cache.keys.shape == cache.values.shape
    assert cache.first_positions.tolist() == [
        [(slot * 2 + head) * cache.capacity for head in range(2)] for slot in range(cache.num_slots)
    ]
    return cache.num_slots, cache.capacity


def test_growth_doubles_up_to_the_limits() -> None:
    cache = small_cache()
    sizes = [shape_of(cache)]
    for num_slots, num_positions in ((5, 8), (5, 9), (6, 9), (6, 40), (11, 33), (12, 48)):
        cache.reserve(num_slots, num_positions, num_used=min(sizes[-1][0], 5))
        sizes.append(shape_of(cache))
    assert sizes == [(0, 0), (5, 16), (5, 16), (10, 16), (10, 40), (12, 40), (12, 48)]


def test_growth_keeps_the_used_slots_and_everything_finite() -> None:
    cache = small_cache()
    cache.reserve(3, 16, num_used=0)
    keys, values = torch.rand_like(cache.keys), torch.rand_like(cache.values)
    cache.keys.copy_(keys)
    cache.values.copy_(values)
    cache.reserve(7, 20, num_used=2)
    for grown, before in ((cache.keys, keys), (cache.values, values)):
        assert torch.equal(grown[:, :2, :, :16], before[:, :2])
        assert not grown[:, 2:].any()
        assert not grown[:, :, :, 16:].any()


def test_memory_stays_until_released() -> None:
    cache = small_cache()
    cache.reserve(3, 8, num_used=0)
    address = cache.keys.data_ptr()
    cache.reserve(2, 5, num_used=0)
    assert cache.keys.data_ptr() == address
    cache.reserve(4, 20, num_used=0)
    assert shape_of(cache) == (4, 24)
    cache.release()
    assert cache.keys.untyped_storage().nbytes() == cache.values.untyped_storage().nbytes() == 0


def test_latents_are_kept_once_and_values_are_a_part_of_them() -> None:
    cache = small_cache(LATENTS)
    cache.reserve(3, 16, num_used=0)
    assert [tensor.shape for tensor in cache.tensors()] == [(2, 3, 1, 16, LATENTS.token_elements)]
    latents = torch.rand_like(cache.keys)
    cache.keys.copy_(latents)
    cache.reserve(7, 20, num_used=2)
    assert torch.equal(cache.values[:, :2, :, :16], latents[:, :2, ..., :5])
    cache.move([1], [0], 16)
    assert torch.equal(cache.keys[:, 0, :, :16], latents[:, 1])


def test_half_precision_attends_as_everything_else_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """Uses the attention that never takes cuDNN's kernel."""
    attended = []

    def noted(*tensors: torch.Tensor, **settings: float | None) -> torch.Tensor:
        attended.append(tensors[0].dtype)
        return attend(*tensors, **settings)

    monkeypatch.setattr(slot_cache, "attend", noted)
    q, k, v = torch.randn(3, 2, 4), torch.randn(3, 6, 4), torch.randn(3, 6, 4)
    bias = torch.zeros(3, 1, 6)
    whole = slot_cache._attend(q, k, v, bias, HEADS)
    half = slot_cache._attend(*(tensor.bfloat16() for tensor in (q, k, v, bias)), HEADS)
    assert attended == [torch.bfloat16]
    assert torch.allclose(half.float(), whole, atol=0.05)


PLACES = GreedyPlaces(count=1, of=3)


def test_the_last_places_of_each_group_whichever_trajectory() -> None:
    ids = [*range(6), SIBLINGS_APART + 4, SIBLINGS_APART + 5]
    held = [PLACES.hold(Sample(number, (1,), 0)) for number in ids]
    assert held == [False, False, True, False, False, True, False, True]
    assert not any(SamplingParams(1.0, 1.0, 0, 4, ()).is_greedy(Sample(number, (1,), 0)) for number in ids)


def test_they_are_what_a_greedy_engine_draws_and_the_others_what_they_were(qwen3: Path) -> None:
    """The engine has fewer slots than samples and is suspended in the middle. Stop tokens end some samples early."""
    requests, sampled = ragged_requests(), SamplingParams(1.3, 0.9, 0, 24, (3, 4))
    whole, _ = load_engine(qwen3)
    drawn, greedy = (whole.generate(requests, replace(sampled, temperature=heat)) for heat in (1.3, 0.0))
    engine, _ = load_engine(qwen3, max_running_requests=4)
    mixed = replace(sampled, greedy=PLACES)
    engine.submit(requests, mixed)
    done = [sample for _ in range(7) for sample in engine.step()]
    suspended = engine.suspend()
    assert suspended
    done += engine.generate(suspended, mixed)
    found = {sample.id: sample.tokens for sample in done}
    of_both = zip(drawn, greedy, strict=True)
    assert found == {one.id: other.tokens if PLACES.hold(one) else one.tokens for one, other in of_both}
    assert all(one.tokens != other.tokens for one, other in zip(drawn, greedy, strict=True))
