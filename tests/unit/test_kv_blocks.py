"""Keys and values in blocks within a budget: responses do not depend on it."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rltrain.errors import ConfigError
from rltrain.models import read_architecture
from rltrain.offload.device_memory import DeviceMemory
from rltrain.offload.memory_parts import MemoryPart, PausedRegion, ResizedStorages
from rltrain.offload.offload import Offloader
from rltrain.rollout.embedded import EmbeddedEngine
from rltrain.rollout.embedded.block_tables import KvBudget, num_blocks
from rltrain.rollout.embedded.engine import budget_within, build_embedded
from rltrain.rollout.embedded.model import EngineModel
from rltrain.rollout.engine import SamplingParams
from rltrain.rollout.sample import Sample
from rltrain.runtime.grid import Grid
from rltrain.schedule.order import Order
from rltrain.tasks.roles import TRAINED_PARTS
from tests.model_shards import tiny_architecture
from tests.rollout_models import LetterTokenizer, load_engine, ragged_requests
from tests.unit.recorded_steps import Recorder
from tests.unit.schedule_configs import make_config
from tests.unit.test_residency import FakeSaver, order_of

pytestmark = pytest.mark.usefixtures("small_blocks")
SAMPLED = SamplingParams(1.0, 1.0, 0, 30, (3,))
GREEDY = SamplingParams(0.0, 1.0, 0, 30, ())
CONTEXT = 60
"""Tokens of the longest sample in these tests: 15 blocks of 4."""


@pytest.fixture(scope="module")
def unlimited(qwen3: Path) -> list[Sample]:
    """What samples of three groups give without a budget."""
    return load_engine(qwen3)[0].generate(groups(3, 3), SAMPLED)


def groups(num_groups: int = 3, num_samples: int = 4) -> list[Sample]:
    """Samples of prompts of 5, 11, 17, ... tokens."""
    prompts = [sample.prompt for sample in ragged_requests(3 * num_groups)][2::3]
    return [
        Sample(10 * group + number, prompt, seed=100 * group + number)
        for group, prompt in enumerate(prompts)
        for number in range(num_samples)
    ]


def assert_same(done: Sequence[Sample], expected: Sequence[Sample]) -> None:
    for one, other in zip(done, expected, strict=True):
        assert (one.id, one.tokens, one.status) == (other.id, other.tokens, other.status)
        assert one.policy_versions == other.policy_versions
        assert one.logprobs == pytest.approx(other.logprobs, abs=3e-5)


def drain(engine: EmbeddedEngine) -> list[Sample]:
    done = []
    while engine.num_unfinished:
        done += engine.step()
    return sorted(done, key=lambda sample: sample.id)


@pytest.mark.parametrize("sampling", [SAMPLED, GREEDY, SamplingParams(0.8, 0.9, 5, 30, (3, 5, 8))])
def test_a_tight_budget_gives_what_none_gives(qwen3: Path, sampling: SamplingParams) -> None:
    samples = groups()
    expected = load_engine(qwen3, max_context_tokens=CONTEXT)[0].generate(samples, sampling)
    assert len({len(done.tokens) for done in expected}) > 1 or not sampling.stop_token_ids
    preemptions = []
    for num_tokens in (64, 100, 4000):
        engine, _ = load_engine(qwen3, max_context_tokens=CONTEXT, kv_tokens=num_tokens)
        assert_same(engine.generate(samples, sampling), expected)
        assert_same(engine.generate(samples, sampling), expected)
        metrics = engine.cache_metrics()
        preemptions.append(metrics["rollout/preemptions"])
        assert 0 < metrics["rollout/kv_cache_peak"] <= 1
        assert engine.cache_metrics() == {"rollout/kv_cache_peak": 0.0, "rollout/preemptions": 0}
        keys, values = engine.cache_tensors()
        assert keys.nbytes + values.nbytes <= num_tokens * 2 * 2 * 2 * 8 * 4, "layers, both, heads, size, bytes"
    assert preemptions[1] > 0 and preemptions[-1] == 0


def test_the_smallest_budget_runs_samples_one_after_the_other(qwen3: Path) -> None:
    engine, _ = load_engine(qwen3, max_context_tokens=CONTEXT, kv_tokens=CONTEXT + 4)
    expected = load_engine(qwen3, max_context_tokens=CONTEXT)[0].generate(groups(1), GREEDY)
    engine.submit(groups(1), GREEDY)
    assert_same(drain(engine), expected)
    with pytest.raises(
        ConfigError, match=r"rollout\.kv_cache_gb: got .*15 blocks.*at least 16.*max_context_tokens = 60"
    ):
        load_engine(qwen3, max_context_tokens=CONTEXT, kv_tokens=CONTEXT + 3)


def test_no_more_is_taken_than_all_samples_fill() -> None:
    options = {"block_bytes": 10, "block_tokens": 4, "max_context_tokens": 18, "max_running_requests": 3}
    assert num_blocks(KvBudget("auto", lambda: 0), 10**6, **options) == 3 * 5 + 1
    assert num_blocks(KvBudget("auto", lambda: 0), 99, **options) == 9


def test_a_prompt_is_computed_once_however_its_samples_start(qwen3: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    computed: list[int] = []
    fill_cache = EngineModel.fill_cache
    monkeypatch.setattr(
        EngineModel,
        "fill_cache",
        lambda self, tokens, *rest: (computed.append(len(tokens)), fill_cache(self, tokens, *rest)),
    )
    samples = groups(1, 6)
    assert len(samples[0].prompt) % 4, "the last of its blocks is copied"
    expected = load_engine(qwen3)[0].generate(samples, GREEDY)
    computed.clear()
    engine, _ = load_engine(qwen3, kv_tokens=4000)
    for sample in samples:
        engine.submit([sample], GREEDY)
        engine.step()
    assert computed == [len(samples[0].prompt) - 1]
    assert_same(drain(engine), expected)


def test_preempted_samples_keep_their_tokens_and_versions_and_their_turn(qwen3: Path) -> None:
    engine, _ = load_engine(qwen3, max_context_tokens=CONTEXT, kv_tokens=100)
    samples = groups(3, 2)
    sampling = replace(GREEDY, max_response_tokens=25)
    engine.submit(samples, sampling)
    done: list[Sample] = []
    seen: dict[int, Sample] = {}
    for version in range(300):
        engine.policy_version = version
        done += engine.step()
        if version == 12:
            taken = engine.suspend()
            assert [sample.id for sample in taken] == [s.id for s in samples if s.id not in {d.id for d in done}]
            seen = {sample.id: sample for sample in taken}
            engine.submit(taken, sampling)
        if not engine.num_unfinished:
            break
    assert engine.cache_metrics()["rollout/preemptions"] > 0
    assert [sample.id for sample in done] == [sample.id for sample in samples], "first in, first out"
    expected = load_engine(qwen3)[0].generate(samples, sampling)
    for one, other in zip(done, expected, strict=True):
        assert one.tokens == other.tokens
        assert one.logprobs == pytest.approx(other.logprobs, abs=3e-5)
        assert list(one.policy_versions) == sorted(set(one.policy_versions)), "each step draws one"
        before = seen.get(one.id, one)
        assert one.policy_versions[: len(before.tokens)] == before.policy_versions
        assert one.logprobs[: len(before.tokens)] == before.logprobs


def test_no_slot_is_free_for_more_while_samples_wait_for_room(qwen3: Path) -> None:
    engine, _ = load_engine(qwen3, max_context_tokens=CONTEXT, kv_tokens=80)
    engine.submit(groups(4), GREEDY)
    assert engine.num_free_slots == 64 - 16
    engine.step()
    assert engine.num_free_slots == 0
    while engine.num_unfinished > 1:
        engine.step()
    assert engine.num_free_slots == 64 - 1


def test_a_stop_string_is_found_across_a_preemption(qwen3: Path) -> None:
    samples = groups(2, 3)
    free = load_engine(qwen3)[0].generate(samples, GREEDY)
    stops = tuple(
        LetterTokenizer().decode(done.tokens)[at : at + 3] for at, done in zip((9, 17), free[::3], strict=True)
    )
    sampling = replace(GREEDY, stop=stops)
    expected = load_engine(qwen3, tokenizer=LetterTokenizer())[0].generate(samples, sampling)
    engine, _ = load_engine(qwen3, max_context_tokens=CONTEXT, kv_tokens=76, tokenizer=LetterTokenizer())
    assert_same(engine.generate(samples, sampling), expected)
    assert engine.cache_metrics()["rollout/preemptions"] > 0


@settings(max_examples=8, deadline=None)
@given(
    actions=st.lists(st.sampled_from(["submit", "step", "step", "step", "suspend", "release"]), max_size=25),
    num_tokens=st.integers(64, 200),
    num_slots=st.integers(1, 9),
)
def test_no_history_changes_a_response(
    qwen3: Path, unlimited: list[Sample], actions: list[str], num_tokens: int, num_slots: int
) -> None:
    samples = groups(3, 3)
    engine, _ = load_engine(qwen3, max_context_tokens=CONTEXT, kv_tokens=num_tokens, max_running_requests=num_slots)
    waiting, done = list(samples), []
    for action in [*actions, *["submit"] * len(samples)]:
        if action == "submit" and waiting:
            engine.submit([waiting.pop(0)], SAMPLED)
        elif action == "step":
            done += engine.step()
        elif action in ("suspend", "release"):
            suspended = engine.suspend()
            if action == "release":
                engine.release_cache()
            engine.submit(suspended, SAMPLED)
    done += drain(engine)
    assert_same(sorted(done, key=lambda sample: sample.id), unlimited)


def test_replayed_steps_draw_what_steps_draw(qwen3: Path) -> None:
    samples, record = groups(2), Recorder()
    expected = load_engine(qwen3)[0].generate(samples, SAMPLED)
    engine, _ = load_engine(qwen3, max_context_tokens=CONTEXT, kv_tokens=100, record=record)
    for _ in range(2):
        assert_same(engine.generate(samples, SAMPLED), expected)
    assert record.num_replayed > record.num_recorded > 0


def test_what_is_recorded_outlives_turns_of_others_where_memory_returns_to_its_place(qwen3: Path) -> None:
    samples, sampling, record = groups(1), replace(SAMPLED, max_response_tokens=9), Recorder()
    engine, _ = load_engine(qwen3, kv_tokens=2000, record=record, cache_returns=lambda: kv_cache.memory.keeps_addresses)
    kv_cache = MemoryPart(engine.cache_tensors, forget=lambda: (engine.suspend(), engine.release_cache())[1])
    turns = Order.of(order_of(5, ("generate", "update")))
    device, saver = DeviceMemory(torch.device("cpu")), FakeSaver()
    residency = Offloader(turns, {"actor": True, "rollout": True}, device, memory_saver=saver)
    residency.admit("actor", {name: MemoryPart(list) for name in TRAINED_PARTS})
    residency.admit("rollout", {"weights": MemoryPart(list), "kv_cache": kv_cache, "base": MemoryPart(tuple)})
    expected, num_recorded, addresses = None, [], []
    for turn in range(5):
        residency.enter(2 * turn)
        for _ in range(2):
            done = engine.generate(samples, sampling)
            expected = expected or done
            assert_same(done, expected)
        num_recorded.append(record.num_recorded)
        addresses.append(engine._slots.addresses())
        engine.submit(samples, sampling)
        engine.step()
        residency.enter(2 * turn + 1)
        assert kv_cache.place == "dropped" and engine.num_unfinished == 0
    assert num_recorded[0] < num_recorded[1] <= num_recorded[2] == num_recorded[3] == num_recorded[4]
    assert (num_recorded[1] < num_recorded[2]) == (addresses[1] != addresses[2]), "it moves once, perhaps to its place"
    assert addresses[2] == addresses[3] == addresses[4]


@pytest.mark.parametrize(
    ("device", "leaves", "others"), [("cpu", False, ["actor"]), ("cuda", True, ["actor"]), ("cuda", False, [])]
)
def test_auto_is_refused_where_others_will_need_what_is_free_now(device: str, leaves: bool, others: list[str]) -> None:
    def site(leaves: bool, others: list[str]) -> Any:
        world = SimpleNamespace(device=torch.device(device))
        served = {"config": make_config(model={"path": "m"}), "architecture": tiny_architecture(), "grid": Grid((0,))}
        return SimpleNamespace(world=world, leaves=leaves, others=others, **served)

    budget = budget_within(site(leaves, others), "auto", "rollout")
    assert (budget is None) == (device == "cpu"), "a CPU has no limit"
    if device == "cuda":
        with pytest.raises(
            ConfigError, match=r"rollout\.kv_cache_gb: got auto .* beside actor, critic.*rollout\.offload"
        ):
            budget_within(site(False, ["actor", "critic"]), "auto", "rollout")


@pytest.mark.parametrize(("memory", "stays"), [(PausedRegion(FakeSaver(), "kv"), True), (ResizedStorages(), False)])
def test_memory_that_returns_to_its_place_is_left_to_who_takes_it(
    qwen3: Path, memory: ResizedStorages | PausedRegion, stays: bool
) -> None:
    limits = {"max_context_tokens": CONTEXT, "kv_cache_gb": 0.001}
    config = make_config(model={"path": "m", "dtype": "float32"}, rollout=limits)
    site = SimpleNamespace(
        config=config,
        role="rollout",
        settings=config.rollout,
        world=SimpleNamespace(rank=0, device=torch.device("cpu")),
        **{"ranks": (0,), "grid": Grid((0,)), "architecture": read_architecture(qwen3)},
        **{"tokenizer": None, "leaves": True, "others": ("actor",)},
    )
    hosted = build_embedded(site, leave=lambda: None)  # type: ignore[arg-type]
    hosted.engine.end_update(0)
    hosted.parts["kv_cache"].memory = memory
    for _ in range(2):
        hosted.engine.generate(groups(1, 1), GREEDY)
        hosted.engine.release_cache()
    assert (hosted.parts["kv_cache"].size_bytes > 0) == stays
    assert hosted.metrics()["rollout/preemptions"] == 0


def test_more_ranks_are_no_remedy_where_each_keeps_all_of_a_token() -> None:
    options = {"block_bytes": 10, "block_tokens": 4, "max_context_tokens": 18, "max_running_requests": 3}
    with pytest.raises(ConfigError, match=r"lower rollout\.max_context_tokens, or give the engine more ranks"):
        num_blocks(KvBudget(1, lambda: 0), 9, **options)
    with pytest.raises(ConfigError, match=r"Raise rollout\.kv_cache_gb or lower rollout\.max_context_tokens\.$"):
        num_blocks(KvBudget(1, lambda: 0), 9, **options, is_cut=False)
