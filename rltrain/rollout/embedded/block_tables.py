"""Which blocks of a KV cache hold which positions of which slot."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from rltrain.rollout.sample import Sample

_MOST_SPARED = 4
"""No more than 1/4 of the blocks is kept free for samples that run: those that are about to end need none."""
_ADMIT_FRACTION = 8
"""Once 1/8 of the blocks are free few samples may start too."""

_PrefixKey = tuple[int, tuple[int, ...]]
"""A version of the weights and all but the last token of a prompt."""


class BlockPool:
    """Blocks 1 .. num_blocks - 1, each free or held. Block 0 is nobody's: idle slots write there."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._free = list(range(num_blocks - 1, 0, -1))
        self.num_holders = [0] * num_blocks
        self.most_used = 0

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_used(self) -> int:
        return self.num_blocks - 1 - len(self._free)

    def take(self, count: int) -> list[int]:
        """Free blocks, each with one holder now."""
        blocks = [self._free.pop() for _ in range(count)]
        self.share(blocks)
        self.most_used = max(self.most_used, self.num_used)
        return blocks

    def share(self, blocks: Sequence[int]) -> None:
        """One more holds each of them."""
        for block in blocks:
            self.num_holders[block] += 1

    def give_back(self, blocks: Sequence[int]) -> None:
        """One less holds each of them; who was the last frees it."""
        for block in blocks:
            self.num_holders[block] -= 1
            if not self.num_holders[block]:
                self._free.append(block)


@dataclass(eq=False)
class _Holding:
    blocks: list[int]
    key: _PrefixKey


@dataclass
class _Prefix:
    """Who holds a prompt's full blocks, which are equal, and what follows of the prompt, in a block each."""

    holdings: list[_Holding] = field(default_factory=list)
    is_computed: bool = False


class Entry(NamedTuple):
    """What a sample needs that has just entered: its head computed, and stored from position `first` on; or nothing but
    a copy (source, destination) of the block that its prompt fills in part."""

    is_computed: bool
    first: int
    copy: tuple[int, int] | None


class BlockTables:
    """Tables of blocks of `block_tokens` tokens; a slot holds as many as its positions need.

    Samples of one prompt refer to the same blocks where the prompt fills them; nobody writes to those. All else a
    sample has for itself.
    """

    def __init__(self, num_blocks: int, block_tokens: int, num_slots: int, max_tokens: int) -> None:
        self.block_tokens = block_tokens
        self.pool = BlockPool(num_blocks)
        self.rows = np.zeros((num_slots, blocks_of(max_tokens, block_tokens)), dtype=np.int32)
        """[slots, blocks of the longest sample]: the blocks of each slot; 0 where it has none."""
        self._holdings: list[_Holding | None] = [None] * num_slots
        self._prefixes: dict[_PrefixKey, _Prefix] = {}

    def num_admissible(self, waiting: Sequence[Sample], num_wanted: int, num_running: int, version: int) -> int:
        """As KvCache says. One more block stays free for each that runs then, since all may fill theirs at one time."""
        num_free, count, counted = self.pool.num_free, 0, set[_PrefixKey]()
        for sample in waiting:
            key = (version, sample.prompt[:-1])
            shared = len(key[1]) // self.block_tokens if key in counted or key in self._prefixes else 0
            num_free -= blocks_of(len(sample.prompt) + len(sample.tokens), self.block_tokens) - shared
            if num_free < min(num_running + count + 1, self.pool.num_blocks // _MOST_SPARED):
                break
            counted.add(key)
            count += 1
        if not num_running:
            return max(count, 1)
        many = count >= num_wanted or self.pool.num_free * _ADMIT_FRACTION >= self.pool.num_blocks
        return count if many else 0

    def enter(self, first_slot: int, samples: Sequence[Sample], version: int) -> list[Entry]:
        """Room for each sample's context in slots from `first_slot` on."""
        entries = [self._enter(slot, sample, version) for slot, sample in enumerate(samples, first_slot)]
        for sample in samples:
            self._prefixes[version, sample.prompt[:-1]].is_computed = True
        return entries

    def extend(self, slot: int, position: int) -> int:
        """As KvCache says."""
        holding = self._held(slot)
        count = len(holding.blocks)
        if count * self.block_tokens <= position and self.pool.num_free:
            holding.blocks += self.pool.take(1)
            self.rows[slot, count] = holding.blocks[-1]
        return len(holding.blocks) * self.block_tokens

    def move(self, source: int, destination: int) -> None:
        """`destination` gives its blocks back and gets those of `source`."""
        self.free(destination)
        self._holdings[destination], self._holdings[source] = self._holdings[source], None
        self.rows[destination], self.rows[source] = self.rows[source], 0

    def free(self, slot: int) -> None:
        """The slot gives its blocks back, if it has any."""
        holding = self._holdings[slot]
        if holding is None:
            return
        self.pool.give_back(holding.blocks)
        prefix = self._prefixes[holding.key]
        prefix.holdings.remove(holding)
        if not prefix.holdings:
            del self._prefixes[holding.key]
        self._holdings[slot] = None
        self.rows[slot] = 0

    def _enter(self, slot: int, sample: Sample, version: int) -> Entry:
        key = (version, sample.prompt[:-1])
        num_full, rest = divmod(len(key[1]), self.block_tokens)
        num_blocks = blocks_of(len(sample.prompt) + len(sample.tokens), self.block_tokens)
        prefix = self._prefixes.setdefault(key, _Prefix())
        donor = prefix.holdings[0] if prefix.holdings else None
        shared = donor.blocks[:num_full] if donor else []
        own = self.pool.take(num_blocks - len(shared))
        self.pool.share(shared)
        holding = _Holding([*shared, *own], key)
        prefix.holdings.append(holding)
        self._holdings[slot] = holding
        self.rows[slot, :num_blocks] = holding.blocks
        if donor is None or not prefix.is_computed or sample.tokens:
            return Entry(True, len(shared) * self.block_tokens, None)
        return Entry(False, 0, (donor.blocks[num_full], own[0]) if rest else None)

    def _held(self, slot: int) -> _Holding:
        holding = self._holdings[slot]
        assert holding is not None, f"slot {slot} holds no blocks"
        return holding


def blocks_of(num_tokens: int, block_tokens: int) -> int:
    """Blocks that so many positions take."""
    return -(-num_tokens // block_tokens)
