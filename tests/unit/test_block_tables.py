"""Which blocks hold what: one writer for each, no more than there are, and what is parked makes nobody wait."""

from copy import deepcopy
from itertools import count

from hypothesis import given, settings
from hypothesis import strategies as st

from rltrain.rollout.embedded.block_tables import BlockTables, blocks_of
from rltrain.rollout.sample import Sample, Status

NUM_SLOTS, SIZE, LONGEST = 6, 4, 32


def pending(prompt_tokens: int, response_tokens: int, kind: int, number: int) -> Sample:
    drawn = (0,) * response_tokens
    return Sample(number, (kind,) * prompt_tokens, 0).drawn(drawn, (0.0,) * response_tokens, drawn)


class Engine:
    """What an engine does with its tables, by chance. `away` are samples between two turns."""

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
        self.expect_no_less_than_without_what_is_parked(waiting, version)
        back = [self.away.pop(0) for _ in range(self.draw(st.integers(0, len(self.away))))]
        for sample in back:
            self.tables.parked.expect(sample)
        waiting = [*back, *waiting][: NUM_SLOTS - first]
        entered = waiting[: self.tables.num_admissible(waiting, 1, len(self.running), version)]
        entries = self.tables.enter(first, entered, version)
        for slot, (sample, entry) in enumerate(zip(entered, entries, strict=True), first):
            self.samples[slot], self.lengths[slot] = sample, len(sample.context)
            assert not entry.follows or entry.first == len(sample.prompt) + sample.turns[-1] - 1
        self.away += [sample for sample in back if sample not in entered]

    def expect_no_less_than_without_what_is_parked(self, waiting: list[Sample], version: int) -> None:
        without = deepcopy(self.tables)
        without.parked.clear()
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
        for parked in self.tables.parked._parked.values():
            assert len(parked.memory.blocks) == blocks_of(len(parked.head), SIZE)
            for index, block in enumerate(parked.memory.blocks):
                kept[block] += 1
                will_write = (index + 1) * SIZE > len(parked.memory.key[1])
                assert not will_write or (pool.num_holders[block], pool.num_keepers[block]) == (0, 1)
        assert held[0] == kept[0] == 0
        assert (held, kept) == (pool.num_holders, pool.num_keepers)
        assert pool.num_used == sum(holders > 0 for holders in held)
        assert pool.num_kept == sum(keepers > 0 and not held[block] for block, keepers in enumerate(kept))
        assert pool.num_free + pool.num_kept + pool.num_used == pool.num_blocks - 1


@given(data=st.data(), num_blocks=st.integers(9, 40))
@settings(max_examples=30, deadline=None)
def test_blocks_stay_within_the_budget_and_have_one_writer(data: st.DataObject, num_blocks: int) -> None:
    engine = Engine(num_blocks, data)
    names = ["enter", "enter", "extend", "extend", "park", "park", "free", "move"]
    for name in data.draw(st.lists(st.sampled_from(names), min_size=5, max_size=40)):
        if engine.running or name == "enter":
            getattr(engine, name)()
        engine.assert_sound()
    for slot in range(NUM_SLOTS):
        engine.tables.free(slot)
    pool = engine.tables.pool
    assert pool.num_used == 0 and not any(pool.num_holders)
    engine.tables.parked.clear()
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
    assert renewed.is_computed and renewed.first == 0, "new weights, new keys and values"
    for slot in (0, 1, 2):
        tables.free(slot)
    [again] = tables.enter(0, [Sample(4, (7,) * 10, 4)], version=3)
    assert again.is_computed, "nobody held them any more"


def ended(sample: Sample) -> Sample:
    """A turn of one token."""
    return sample.drawn((1,), (0.0,), (0,), Status.STOPPED)


def test_what_comes_back_is_not_given_up_for_what_starts_beside_it() -> None:
    tables = BlockTables(13, 4, 8, 40)
    first, second = Sample(0, (7,) * 12, 0), Sample(1, (8,) * 12, 0)
    tables.enter(0, [first, second], version=0)
    for slot, sample in enumerate((first, second)):
        tables.park(slot, ended(sample))
    waiting = [Sample(2, (9,) * 32, 0), ended(first).observed((2,))]
    assert tables.num_admissible(waiting, 1, 0, version=0) == 1, "of 12 blocks 8 and 4: none would be left to grow"
    started, returned = tables.enter(0, waiting, version=0)
    assert (started.is_computed, started.follows) == (True, False)
    assert (returned.follows, returned.first) == (True, 12)
    assert tables.parked.num_tokens == 0, "the other one made room"
    assert tables.pool.num_free == 0


def test_few_start_only_where_much_is_free() -> None:
    tables = BlockTables(101, 4, 8, 400)
    tables.enter(0, [Sample(0, (1,) * 200, 0)], version=0)
    waiting = [Sample(n, (2 + n,) * 60, n) for n in range(4)]
    assert tables.num_admissible(waiting, 4, 1, version=0) == 3, "of 50 blocks 15 each, and one for each of four"
    tables.enter(1, [Sample(9, (9,) * 152, 0)], version=0)
    assert tables.pool.num_free == 12
    short = [Sample(10 + n, (20 + n,), n) for n in range(9)]
    assert tables.num_admissible(short, 5, 2, version=0) == 5
    assert tables.num_admissible(short, 6, 2, version=0) == 0, "better six at once, later"
    assert tables.num_admissible([Sample(0, (1,) * 400, 0)], 1, 0, version=5) == 1, "where nothing runs one starts"
