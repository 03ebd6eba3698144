"""Block tables: the blocks of each slot's positions. Also computes the number of blocks of a rank."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from rltrain.errors import ConfigError
from rltrain.rollout.embedded.kv_cache import ParkedSamples
from rltrain.rollout.sample import Sample
from rltrain.rollout.workspace import room_for_cache

# Allocation of a KV cache's blocks to slots.

_MOST_SPARED = 4
"""At most 1/4 of the blocks is reserved for running samples. Samples about to end need none."""
_ADMIT_FRACTION = 8
"""Fewer samples than wanted may start once 1/8 of the blocks is free."""

States = tuple[Tensor, Tensor]
"""The states of a sample, as parked by SampleStates."""
_PrefixKey = tuple[int, tuple[int, ...]]
"""(version of the weights, prompt without its last token)."""


class BlockPool:
    """Blocks 1 .. num_blocks - 1, each free, held by running samples, or only kept by parked samples.

    Block 0 is never allocated. Idle slots write there.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._free = list(range(num_blocks - 1, 0, -1))
        self.num_holders, self.num_keepers = [0] * num_blocks, [0] * num_blocks
        self.num_kept = 0
        """Number of blocks with keepers and without holders."""
        self.most_used = 0

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_used(self) -> int:
        """Number of blocks with holders."""
        return self.num_blocks - 1 - len(self._free) - self.num_kept

    def is_kept(self, block: int) -> bool:
        """Returns whether the block has keepers but no holder."""
        return bool(self.num_keepers[block]) and not self.num_holders[block]

    def take(self, count: int) -> list[int]:
        """Takes free blocks. Each then has one holder."""
        blocks = [self._free.pop() for _ in range(count)]
        self.share(blocks)
        return blocks

    def share(self, blocks: Sequence[int]) -> None:
        """Adds one holder to each block."""
        for block in blocks:
            if not self.num_holders[block] and self.num_keepers[block]:
                self.num_kept -= 1
            self.num_holders[block] += 1
        self.most_used = max(self.most_used, self.num_used)

    def give_back(self, blocks: Sequence[int]) -> None:
        """Removes one holder from each block. A block without holders and keepers becomes free."""
        for block in blocks:
            self.num_holders[block] -= 1
            if not self.num_holders[block]:
                self._free_unless_kept(block)

    def keep(self, blocks: Sequence[int]) -> None:
        """Turns one holder of each block into a keeper."""
        for block in blocks:
            self.num_keepers[block] += 1
        self.give_back(blocks)

    def hold_again(self, blocks: Sequence[int]) -> None:
        """Turns one keeper of each block into a holder."""
        self.share(blocks)
        for block in blocks:
            self.num_keepers[block] -= 1

    def give_up(self, blocks: Sequence[int]) -> None:
        """Removes one keeper from each block. A block without holders and keepers becomes free."""
        for block in blocks:
            self.num_keepers[block] -= 1
            if not self.num_holders[block]:
                self.num_kept -= 1
                self._free_unless_kept(block)

    def _free_unless_kept(self, block: int) -> None:
        """Frees a block without holders, unless it has keepers."""
        if self.num_keepers[block]:
            self.num_kept += 1
        else:
            self._free.append(block)


@dataclass(eq=False)
class _Holding:
    blocks: list[int]
    key: _PrefixKey
    states: States | None = None
    """States of a parked sample, if the model has any."""


@dataclass
class _Prefix:
    """All holdings of one prompt. They share its full blocks. Each has a separate block for the rest of the prompt."""

    holdings: list[_Holding] = field(default_factory=list)
    is_computed: bool = False


class EnteredSample(NamedTuple):
    """The work needed for a newly entered sample.

    If `is_computed`, its head is computed and stored from position `first` on. Otherwise only the partly filled block
    of its prompt is copied, as (source, destination). If it `follows`, the cache already holds everything before
    `first`, and the sample's `states` there if the model has any.
    """

    is_computed: bool
    first: int
    copy: tuple[int, int] | None
    follows: bool = False
    states: States | None = None


class BlockTables:
    """Tables of blocks of `block_tokens` tokens. A slot holds as many blocks as its positions need.

    Samples of one prompt share its full blocks, which are never written again. All other blocks belong to one sample.
    Parked samples keep their blocks until another sample needs them. Without `shares_computed` a prompt is computed
    again for later samples, because the states of the earlier ones have advanced past it.
    """

    def __init__(
        self, num_blocks: int, block_tokens: int, num_slots: int, max_tokens: int, *, shares_computed: bool = True
    ) -> None:
        self._shares_computed = shares_computed
        self.block_tokens = block_tokens
        self.pool = BlockPool(num_blocks)
        self.rows = np.zeros((num_slots, blocks_of(max_tokens, block_tokens)), dtype=np.int32)
        """Blocks of each slot, 0 for unused entries, shape [slots, blocks of the longest sample]."""
        self._holdings: list[_Holding | None] = [None] * num_slots
        self._prefixes: dict[_PrefixKey, _Prefix] = {}
        self.parked: ParkedSamples[_Holding] = ParkedSamples(self._give_up)

    def num_admissible(self, waiting: Sequence[Sample], num_wanted: int, num_running: int, version: int) -> int:
        """Implements KvCache.num_admissible. One block per running sample stays free, since all may fill theirs
        together."""
        pool, counted, claimed = self.pool, set[_PrefixKey](), set[int]()
        num_left, count = pool.num_free + pool.num_kept, 0
        for sample in waiting:
            num_own, there = self._needs(sample, version, counted)
            if pool.num_kept:
                found = {block for block in there if pool.is_kept(block)} - claimed
                claimed |= found
                num_left -= len(found)
            num_left -= num_own
            if num_left < min(num_running + count + 1, pool.num_blocks // _MOST_SPARED):
                break
            count += 1
        if not num_running:
            return max(count, 1)
        many = count >= num_wanted or (pool.num_free + pool.num_kept) * _ADMIT_FRACTION >= pool.num_blocks
        return count if many else 0

    def enter(self, first_slot: int, samples: Sequence[Sample], version: int) -> list[EnteredSample]:
        """Allocates room for the samples' contexts in slots from `first_slot` on."""
        # Blocks found for any sample are held before parked blocks are given up for the others.
        found = [self._find(sample, version) for sample in samples]
        entries = [
            self._enter(slot, sample, start or self._find(sample, version) or self._begin(sample, version))
            for slot, (sample, start) in enumerate(zip(samples, found, strict=True), first_slot)
        ]
        for slot in range(first_slot, first_slot + len(samples)):
            self._prefixes[self._held(slot).key].is_computed = True
        return entries

    def extend(self, slot: int, position: int) -> int:
        """Implements KvCache.extend."""
        holding = self._held(slot)
        count = len(holding.blocks)
        if count * self.block_tokens <= position and self._make_free(1):
            holding.blocks += self.pool.take(1)
            self.rows[slot, count] = holding.blocks[-1]
        return len(holding.blocks) * self.block_tokens

    def move(self, source: int, destination: int) -> None:
        """Frees the blocks of `destination` and moves those of `source` there."""
        self.free(destination)
        self._holdings[destination], self._holdings[source] = self._holdings[source], None
        self.rows[destination], self.rows[source] = self.rows[source], 0

    def free(self, slot: int) -> None:
        """Frees the blocks of the slot, if any."""
        holding = self._holdings[slot]
        if holding is None:
            return
        self.pool.give_back(holding.blocks)
        self._forget(holding)
        self._holdings[slot] = None
        self.rows[slot] = 0

    def park(self, slot: int, sample: Sample, states: States | None = None) -> None:
        """Implements KvCache.park."""
        holding = self._held(slot)
        holding.states = states
        self.pool.keep(holding.blocks)
        self.parked.add(sample, holding)
        self._holdings[slot] = None
        self.rows[slot] = 0

    def _needs(self, sample: Sample, version: int, counted: set[_PrefixKey]) -> tuple[int, Sequence[int]]:
        """Returns (number of new blocks for the sample, blocks available for sharing). Adds its prompt to `counted`.

        `counted` has the prompts of samples considered before it.
        """
        num_blocks = blocks_of(len(sample.prompt) + len(sample.tokens), self.block_tokens)
        if parked := self.parked.get(sample):
            return num_blocks - len(parked.memory.blocks), parked.memory.blocks
        key = (version, sample.prompt[:-1])
        num_full = len(key[1]) // self.block_tokens
        if prefix := self._prefixes.get(key):
            return num_blocks - num_full, prefix.holdings[0].blocks[:num_full]
        num_shared = num_full if key in counted else 0
        counted.add(key)
        return num_blocks - num_shared, ()

    def _find(self, sample: Sample, version: int) -> tuple[_Holding, EnteredSample] | None:
        """Holds the blocks available for the sample. Returns None if there are none."""
        if parked := self.parked.take(sample):
            self.pool.hold_again(parked.memory.blocks)
            states, parked.memory.states = parked.memory.states, None
            return parked.memory, EnteredSample(True, len(parked.head), None, follows=True, states=states)
        key = (version, sample.prompt[:-1])
        prefix = self._prefixes.get(key)
        if prefix is None:
            return None
        num_full, rest = divmod(len(key[1]), self.block_tokens)
        blocks = prefix.holdings[0].blocks
        holding = _Holding(blocks[:num_full], key)
        self.pool.share(holding.blocks)
        prefix.holdings.append(holding)
        if sample.tokens or not prefix.is_computed or not self._shares_computed:
            return holding, EnteredSample(True, num_full * self.block_tokens, None)
        return holding, EnteredSample(False, 0, (blocks[num_full], 0) if rest else None)

    def _begin(self, sample: Sample, version: int) -> tuple[_Holding, EnteredSample]:
        key = (version, sample.prompt[:-1])
        holding = _Holding([], key)
        self._prefixes[key] = _Prefix([holding])
        return holding, EnteredSample(True, 0, None)

    def _enter(self, slot: int, sample: Sample, start: tuple[_Holding, EnteredSample]) -> EnteredSample:
        holding, entry = start
        num_own = blocks_of(len(sample.prompt) + len(sample.tokens), self.block_tokens) - len(holding.blocks)
        self._make_free(num_own)
        own = self.pool.take(num_own)
        holding.blocks += own
        self._holdings[slot] = holding
        self.rows[slot, : len(holding.blocks)] = holding.blocks
        return entry._replace(copy=(entry.copy[0], own[0])) if entry.copy else entry

    def _make_free(self, num_blocks: int) -> bool:
        """Evicts parked samples until so many blocks are free. Returns whether they are."""
        while self.pool.num_free < num_blocks:
            if not self.parked.evict():
                return False
        return True

    def _give_up(self, holding: _Holding) -> None:
        """Gives up the blocks of a parked sample."""
        self.pool.give_up(holding.blocks)
        self._forget(holding)

    def _forget(self, holding: _Holding) -> None:
        prefix = self._prefixes[holding.key]
        prefix.holdings.remove(holding)
        if not prefix.holdings:
            del self._prefixes[holding.key]

    def _held(self, slot: int) -> _Holding:
        holding = self._holdings[slot]
        assert holding is not None, f"slot {slot} holds no blocks"
        return holding


def blocks_of(num_tokens: int, block_tokens: int) -> int:
    """Returns the number of blocks for so many positions."""
    return -(-num_tokens // block_tokens)


# The number of blocks of a rank.

GB = 10**9


@dataclass(frozen=True)
class KvBudget:
    """The limit of KV cache memory. `num_bytes` is called at each allocation. `given` is the value of
    rollout.kv_cache_gb."""

    given: float | str
    num_bytes: Callable[[], int]


def budget_of(given: float | str, device: torch.device, workspace_bytes: int) -> KvBudget | None:
    """Returns the meaning of rollout.kv_cache_gb on `device`.

    "auto" means no limit on a CPU. On a GPU it means the free memory minus the engine's `workspace_bytes`.
    """
    if not isinstance(given, str):
        num_bytes = int(given * GB)
        return KvBudget(given, lambda: num_bytes)
    return KvBudget(given, lambda: free_bytes(device, workspace_bytes)) if device.type == "cuda" else None


def free_bytes(device: torch.device, workspace_bytes: int) -> int:
    """Returns the free bytes of a CUDA device available to keys and values."""
    torch.cuda.empty_cache()  # the allocator's cached memory is fragmented
    free, total = torch.cuda.mem_get_info(device)
    return room_for_cache(free, total, workspace_bytes)


def num_blocks(
    budget: KvBudget,
    num_bytes: int,
    *,
    block_bytes: int,
    block_tokens: int,
    max_context_tokens: int,
    max_running_requests: int,
    states_bytes: int = 0,
    is_cut: bool = True,
) -> int:
    """Returns the number of blocks in `num_bytes` after subtracting `states_bytes` for states of samples.

    It includes one block for idle slots, and is at most the number that all running samples can fill. `is_cut` says
    whether ranks divide a token's keys and values; it affects only the advice. Raises ConfigError if the longest sample
    does not fit.
    """
    longest = blocks_of(max_context_tokens, block_tokens)
    found = max(0, num_bytes - states_bytes) // block_bytes
    remedy = ", lower rollout.max_context_tokens, or give the engine more ranks (rollout.parallel.tp)"
    if not is_cut:
        remedy = " or lower rollout.max_context_tokens"
    if found < longest + 1:
        beside = ""
        if states_bytes:
            beside = f", plus {states_bytes / GB:.3g} GB of states of rollout.max_running_requests samples"
        raise ConfigError(
            f"rollout.kv_cache_gb: got {budget.given}, which is {num_bytes / GB:.3g} GB here and holds {found} blocks "
            f"of {block_tokens} tokens, {block_bytes / GB:.3g} GB each{beside}; expected at least {longest + 1}, or "
            f"{((longest + 1) * block_bytes + states_bytes) / GB:.3g} GB, for one sample of rollout.max_context_tokens "
            f"= {max_context_tokens} and one block for idle slots. Raise rollout.kv_cache_gb{remedy}."
        )
    return min(found, max_running_requests * longest + 1)
