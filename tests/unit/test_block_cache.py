"""Tests of blocks for keys, values and states: allocation, sharing and release."""

from collections.abc import Iterator, Sequence
from copy import deepcopy
from dataclasses import replace
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from rltrain.errors import ConfigError
from rltrain.models import read_architecture
from rltrain.offload.device_memory import DeviceMemory
from rltrain.offload.memory_parts import MemoryPart, PausedRegion, ResizedStorages
from rltrain.offload.offload import Offloader
from rltrain.planning.memory import kv_bytes, state_bytes
from rltrain.rollout.embedded import EmbeddedEngine
from rltrain.rollout.embedded.block_tables import BlockTables, KvBudget, blocks_of, num_blocks
from rltrain.rollout.embedded.engine import budget_within, build_embedded
from rltrain.rollout.embedded.kv_cache import KvCache, SampleStates, StateShape
from rltrain.rollout.engine import SamplingParams
from rltrain.rollout.sample import Sample, Status
from rltrain.runtime.grid import Grid
from rltrain.schedule.order import Order
from rltrain.tasks.roles import TRAINED_PARTS
from tests.support.cuda_graphs import Recorder
from tests.support.model_shards import tiny_architecture
from tests.support.rollout_models import (
    LetterTokenizer,
    load_engine,
    ragged_requests,
    widths_of_prefills,
)
from tests.support.schedule_configs import make_config
from tests.unit.test_memory_plan import FakeSaver, order_of

pytestmark = pytest.mark.usefixtures("small_blocks")


NUM_SLOTS, SIZE, LONGEST = 6, 4, 32


def pending(prompt_tokens: int, response_tokens: int, kind: int, number: int) -> Sample:
    drawn = (0,) * response_tokens
    return Sample(number, (kind,) * prompt_tokens, 0).drawn(drawn, (0.0,) * response_tokens, drawn)


def prompt_blocks(tables: BlockTables) -> Iterator[Any]:
    """Yields the blocks kept of prompts."""
    left = [tables._prompts.root]
    while left:
        node = left.pop()
        left += node.children.values()
        yield from node.children.values()


class Engine:
    """An engine with random use of its tables. `away` has the samples between two turns."""

    def __init__(self, num_blocks: int, data: st.DataObject) -> None:
        self.tables = BlockTables(num_blocks, SIZE, NUM_SLOTS, LONGEST)
        self.draw = data.draw
        self.samples: list[Sample | None] = [None] * NUM_SLOTS
        self.lengths = [0] * NUM_SLOTS
        self.away: list[Sample] = []
        self.numbers = count()

    @property
    def running(self) -> list[int]:
        return [slot for slot in range(NUM_SLOTS) if self.samples[slot] is not None]

    def enter(self) -> None:
        first = max(self.running, default=-1) + 1
        shapes = st.tuples(st.sampled_from([1, 4, 5, 9, 14]), st.integers(0, 9), st.integers(0, 1))
        waiting = [pending(*shape, next(self.numbers)) for shape in self.draw(st.lists(shapes, max_size=4))]
        version = self.draw(st.integers(0, 1))
        self.expect_no_less_than_without_what_is_kept(waiting, version)
        back = [self.away.pop(0) for _ in range(self.draw(st.integers(0, len(self.away))))]
        for sample in back:
            self.tables.parked.expect(sample)
        waiting = [*back, *waiting][: NUM_SLOTS - first]
        entered = waiting[: self.tables.num_admissible(waiting, 1, len(self.running), version)]
        entries = self.tables.enter(first, entered, version)
        for slot, (sample, entry) in enumerate(zip(entered, entries, strict=True), first):
            self.samples[slot], self.lengths[slot] = sample, len(sample.context)
            assert not entry.is_parked or entry.first == len(sample.prompt) + sample.turns[-1] - 1
            assert not entry.follows or entry.is_parked or entry.first % SIZE == 0 < entry.first < len(sample.prompt)
        self.away += [sample for sample in back if sample not in entered]

    def expect_no_less_than_without_what_is_kept(self, waiting: list[Sample], version: int) -> None:
        without = deepcopy(self.tables)
        without.parked.clear()
        without.forget_prompts()
        num_admissible = without.num_admissible(waiting, 1, len(self.running), version)
        assert self.tables.num_admissible(waiting, 1, len(self.running), version) >= num_admissible

    def extend(self) -> None:
        slot = self.draw(st.sampled_from(self.running))
        if self.lengths[slot] < LONGEST:
            there = self.tables.pool.num_free + self.tables.pool.num_kept
            has_room = self.tables.extend(slot, self.lengths[slot]) > self.lengths[slot]
            assert has_room or not there
            self.lengths[slot] += has_room

    def park(self) -> None:
        slot = self.draw(st.sampled_from(self.running))
        drawn = (1,) * (self.lengths[slot] + 1 - len(self.samples[slot].context))
        turn = self.samples[slot].drawn(drawn, (0.0,) * len(drawn), drawn, Status.STOPPED)
        answer = (2,) * self.draw(st.integers(0, 5))
        if len(turn.context) + len(answer) <= LONGEST:
            self.tables.park(slot, turn)
            self.away.append(turn.observed(answer))
            self.samples[slot] = None

    def forget(self) -> None:
        self.tables.forget_prompts()

    def free(self) -> None:
        slot = self.draw(st.sampled_from(self.running))
        self.tables.free(slot)
        self.samples[slot] = None

    def move(self) -> None:
        source, destination = max(self.running), self.draw(st.integers(0, max(self.running)))
        if source != destination:
            self.tables.move(source, destination)
            self.samples[destination], self.samples[source] = self.samples[source], None
            self.lengths[destination] = self.lengths[source]

    def assert_sound(self) -> None:
        pool = self.tables.pool
        held, kept = [0] * pool.num_blocks, [0] * pool.num_blocks
        for slot, sample in enumerate(self.samples):
            row = self.tables.rows[slot]
            num_blocks = blocks_of(self.lengths[slot], SIZE) if sample else 0
            assert row[:num_blocks].all() and not row[num_blocks:].any()
            for index, block in enumerate(row[:num_blocks]):
                held[block] += 1
                writes = sample is not None and (index + 1) * SIZE > len(sample.prompt) - 1
                assert not writes or (pool.num_holders[block], pool.num_keepers[block]) == (1, 0), "two writers"
        num_prompt_tokens = {sample.id: len(sample.prompt) for sample in self.away}
        for number, parked in self.tables.parked._parked.items():
            assert len(parked.memory.blocks) == blocks_of(len(parked.head), SIZE)
            for index, block in enumerate(parked.memory.blocks):
                kept[block] += 1
                will_write = (index + 1) * SIZE > num_prompt_tokens[number] - 1
                assert not will_write or (pool.num_holders[block], pool.num_keepers[block]) == (0, 1)
        idle = set()
        for node in prompt_blocks(self.tables):
            kept[node.block] += 1
            if not node.children and (pool.num_holders[node.block], pool.num_keepers[node.block]) == (0, 1):
                idle.add(node)
        assert idle == set(self.tables._prompts._idle), "the blocks to be evicted next"
        assert held[0] == kept[0] == 0
        assert (held, kept) == (pool.num_holders, pool.num_keepers)
        assert pool.num_used == sum(holders > 0 for holders in held)
        assert pool.num_kept == sum(keepers > 0 and not held[block] for block, keepers in enumerate(kept))
        assert pool.num_free + pool.num_kept + pool.num_used == pool.num_blocks - 1


@given(data=st.data(), num_blocks=st.integers(9, 40))
@settings(max_examples=30, deadline=None)
def test_blocks_stay_within_the_budget_and_have_one_writer(data: st.DataObject, num_blocks: int) -> None:
    engine = Engine(num_blocks, data)
    names = ["enter", "enter", "extend", "extend", "park", "park", "free", "free", "move", "forget"]
    for name in data.draw(st.lists(st.sampled_from(names), min_size=5, max_size=40)):
        if engine.running or name == "enter":
            getattr(engine, name)()
        engine.assert_sound()
    for slot in range(NUM_SLOTS):
        engine.tables.free(slot)
        engine.samples[slot] = None
    pool = engine.tables.pool
    assert pool.num_used == 0 and not any(pool.num_holders)
    engine.tables.parked.clear()
    engine.assert_sound()
    assert pool.num_kept == sum(1 for _ in prompt_blocks(engine.tables))
    engine.tables.forget_prompts()
    assert pool.num_free == num_blocks - 1 and not any(pool.num_keepers)


def test_a_groups_prompt_is_held_once_and_what_follows_by_each() -> None:
    tables = BlockTables(100, 4, 8, 40)
    first = tables.enter(0, [Sample(0, (7,) * 10, 0), Sample(1, (7,) * 10, 1)], version=3)
    assert [(entry.is_computed, entry.first, entry.copy) for entry in first] == [(True, 0, None), (True, 8, None)]
    assert tables.rows[0, :2].tolist() == tables.rows[1, :2].tolist()
    assert tables.rows[0, 2] != tables.rows[1, 2]
    assert tables.pool.num_used == 4
    [later] = tables.enter(2, [Sample(2, (7,) * 10, 2)], version=3)
    assert (later.is_computed, later.copy) == (False, (tables.rows[0, 2], tables.rows[2, 2]))
    assert tables.pool.num_used == 5
    [renewed] = tables.enter(3, [Sample(3, (7,) * 10, 3)], version=4)
    assert renewed.is_computed and renewed.first == 0, "new weights need new keys and values"
    for slot in (0, 1, 2):
        tables.free(slot)
    [again] = tables.enter(0, [Sample(4, (7,) * 10, 4)], version=3)
    assert again.is_computed, "no sample held the old blocks"


def ended(sample: Sample) -> Sample:
    """Adds a turn of one token and ends it."""
    return sample.drawn((1,), (0.0,), (0,), Status.STOPPED)


def test_what_comes_back_is_not_given_up_for_what_starts_beside_it() -> None:
    tables = BlockTables(13, 4, 8, 40)
    first, second = Sample(0, (7,) * 12, 0), Sample(1, (8,) * 12, 0)
    tables.enter(0, [first, second], version=0)
    for slot, sample in enumerate((first, second)):
        tables.park(slot, ended(sample))
    waiting = [Sample(2, (9,) * 32, 0), ended(first).observed((2,))]
    assert tables.num_admissible(waiting, 1, 0, version=0) == 1, "8 + 4 of 12 blocks would leave none for growth"
    started, returned = tables.enter(0, waiting, version=0)
    assert (started.is_computed, started.follows) == (True, False)
    assert (returned.follows, returned.first) == (True, 12)
    assert tables.parked.num_tokens == 0, "the other sample made room"
    assert tables.pool.num_free == 0


def test_few_start_only_where_much_is_free() -> None:
    tables = BlockTables(101, 4, 8, 400)
    tables.enter(0, [Sample(0, (1,) * 200, 0)], version=0)
    waiting = [Sample(n, (2 + n,) * 60, n) for n in range(4)]
    assert tables.num_admissible(waiting, 4, 1, version=0) == 3, (
        "15 of 50 blocks each, plus one for each of four samples"
    )
    tables.enter(1, [Sample(9, (9,) * 152, 0)], version=0)
    assert tables.pool.num_free == 12
    short = [Sample(10 + n, (20 + n,), n) for n in range(9)]
    assert tables.num_admissible(short, 5, 2, version=0) == 5
    assert tables.num_admissible(short, 6, 2, version=0) == 0, "all six should start together later"
    assert tables.num_admissible([Sample(0, (1,) * 400, 0)], 1, 0, version=5) == 1, "one starts if nothing runs"


SAMPLED = SamplingParams(1.0, 1.0, 0, 30, (3,))
GREEDY = SamplingParams(0.0, 1.0, 0, 30, ())
CONTEXT = 60
"""Tokens of the longest sample in these tests: 15 blocks of 4."""


@pytest.fixture(scope="module")
def unlimited(qwen3: Path) -> list[Sample]:
    """Returns samples of three groups, generated without a budget."""
    return load_engine(qwen3)[0].generate(groups(3, 3), SAMPLED)


def groups(num_groups: int = 3, num_samples: int = 4) -> list[Sample]:
    """Returns samples with prompts of 5, 11, 17, ... tokens."""
    prompts = [sample.prompt for sample in ragged_requests(3 * num_groups)][2::3]
    return [
        Sample(10 * group + number, prompt, seed=100 * group + number)
        for group, prompt in enumerate(prompts)
        for number in range(num_samples)
    ]


def assert_same(
    done: Sequence[Sample], expected: Sequence[Sample], *, logprob: float = 3e-5, of_versions: bool = True
) -> None:
    for one, other in zip(done, expected, strict=True):
        assert (one.id, one.tokens, one.status) == (other.id, other.tokens, other.status)
        assert one.policy_versions == other.policy_versions or not of_versions
        assert one.logprobs == pytest.approx(other.logprobs, abs=logprob)


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
        assert not any(engine.cache_metrics().values()), "nothing since the last call"
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


BUDGET, AUTO = KvBudget(1, lambda: 0), KvBudget("auto", lambda: 0)
OPTIONS = {"block_bytes": 10, "block_tokens": 4, "max_context_tokens": 18, "max_running_requests": 3}


def test_no_more_is_taken_than_all_samples_fill() -> None:
    assert num_blocks(AUTO, 10**6, **OPTIONS) == 3 * 5 + 1
    assert num_blocks(AUTO, 99, **OPTIONS) == 9


def test_a_prompt_is_computed_once_however_its_samples_start(qwen3: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    computed = widths_of_prefills(monkeypatch)
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
        assert list(one.policy_versions) == sorted(set(one.policy_versions)), "each step generates one token"
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


@settings(max_examples=12, deadline=None)
@example(actions=["submit"] * 9, num_tokens=None, num_slots=1)
@example(actions=["submit", "step"] * 9, num_tokens=None, num_slots=3)
@example(actions=["submit", "step"] * 9, num_tokens=None, num_slots=64)
@given(
    actions=st.lists(st.sampled_from(["submit", "step", "step", "step", "suspend", "release"]), max_size=25),
    num_tokens=st.none() | st.integers(64, 200),
    num_slots=st.integers(1, 9),
)
def test_no_history_loses_repeats_or_changes_a_response(
    qwen3: Path, unlimited: list[Sample], actions: list[str], num_tokens: int | None, num_slots: int
) -> None:
    engine, _ = load_engine(qwen3, max_context_tokens=CONTEXT, kv_tokens=num_tokens, max_running_requests=num_slots)
    waiting, done = groups(3, 3), []
    for number, action in enumerate([*actions, *["submit"] * len(waiting)]):
        engine.policy_version = number
        if action == "submit" and waiting:
            engine.submit([waiting.pop(0)], SAMPLED)
        elif action == "step":
            returned = engine.step()
            assert all(one.policy_versions[-1] == number for one in returned)
            done += returned
        elif action in ("suspend", "release"):
            suspended = engine.suspend()
            if action == "release":
                engine.release_cache()
            engine.submit(suspended, SAMPLED)
    done += drain(engine)
    assert_same(sorted(done, key=lambda sample: sample.id), unlimited, of_versions=False)
    last = len(actions) + 8  # the version while draining; each earlier step has its own
    for one in done:
        early = [version for version in one.policy_versions if version < last]
        assert list(one.policy_versions) == sorted(one.policy_versions) and len(set(early)) == len(early)


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
        addresses.append(engine._slots.cache.addresses())
        engine.submit(samples, sampling)
        engine.step()
        residency.enter(2 * turn + 1)
        assert kv_cache.place == "dropped" and engine.num_unfinished == 0
    assert num_recorded[0] < num_recorded[1] <= num_recorded[2] == num_recorded[3] == num_recorded[4]
    assert (num_recorded[1] < num_recorded[2]) == (addresses[1] != addresses[2]), (
        "it moves once, perhaps to the same address"
    )
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
    with pytest.raises(ConfigError, match=r"lower rollout\.max_context_tokens, or give the engine more ranks"):
        num_blocks(BUDGET, 9, **OPTIONS)
    with pytest.raises(ConfigError, match=r"Raise rollout\.kv_cache_gb or lower rollout\.max_context_tokens\.$"):
        num_blocks(BUDGET, 9, **OPTIONS, is_cut=False)


SAMPLED_WITH_STOPS = SamplingParams(1.0, 1.0, 0, 12, (3, 4, 5))
SHAPE = StateShape(num_layers=3, num_heads=2, key_dim=4, value_dim=5, channels=6, kernel=4)


@pytest.fixture(scope="module")
def qwen3_5(checkpoints: dict[str, Path]) -> Path:
    return checkpoints["qwen3_5"]


@pytest.mark.parametrize("kv_tokens", [None, 400])
def test_samples_draw_what_each_draws_alone(qwen3_5: Path, kv_tokens: int | None) -> None:
    """Some samples start later than others of their prompt and reuse slots. Responses end at different steps, so slots
    move."""
    of_one_prompt = [Sample(200, (7, 1, 9, 9, 2, 30, 4), seed=number) for number in range(5)]
    requests = [*ragged_requests(4), *of_one_prompt, *ragged_requests(2, seed=1)[::-1]]
    requests = [Sample(number, sample.prompt, sample.seed) for number, sample in enumerate(requests)]
    alone, _ = load_engine(qwen3_5)
    expected = [done for sample in requests for done in alone.generate([sample], SAMPLED_WITH_STOPS)]
    assert len({len(done.tokens) for done in expected}) > 3
    engine, _ = load_engine(qwen3_5, max_running_requests=4, max_context_tokens=48, kv_tokens=kv_tokens)
    assert_same(engine.generate(requests, SAMPLED_WITH_STOPS), expected, logprob=1e-4)


def test_a_replayed_step_takes_a_token_in_once(qwen3_5: Path) -> None:
    requests, recorder = ragged_requests(3), Recorder()
    expected = load_engine(qwen3_5)[0].generate(requests, SAMPLED_WITH_STOPS)
    engine, _ = load_engine(qwen3_5, max_running_requests=4, record=recorder)
    for _ in range(2):
        assert_same(engine.generate(requests, SAMPLED_WITH_STOPS), expected, logprob=1e-4)
    assert recorder.num_replayed > recorder.num_recorded > 0


def test_memory_is_held_while_samples_run_and_given_back(qwen3_5: Path) -> None:
    for kv_tokens in (None, 400):
        engine, _ = load_engine(qwen3_5, max_running_requests=4, kv_tokens=kv_tokens)
        engine.generate(ragged_requests(3), SAMPLED_WITH_STOPS)
        cache: KvCache = engine._slots.cache
        sizes = {tuple(tensor.shape[2:]) for tensor in cache.tensors() if tensor.dim() == 5 and tensor.size(1) <= 4}
        assert sizes, "the engine reports its states"
        engine.release_cache()
        assert not any(tensor.numel() for tensor in engine.cache_tensors())


def test_the_budget_holds_states_of_all_slots() -> None:
    sizes = OPTIONS | {"max_context_tokens": 8, "max_running_requests": 5}
    assert num_blocks(BUDGET, 130, states_bytes=100, **sizes) == num_blocks(BUDGET, 30, **sizes) == 3
    with pytest.raises(ConfigError, match=r"plus 1e-07 GB of states of rollout\.max_running_requests samples"):
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
