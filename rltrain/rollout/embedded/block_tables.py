"""Block tables: the blocks of each slot's positions. Also computes the number of blocks of a rank."""

from collections import OrderedDict
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
_LEAST_SAVED = 10
"""A sample follows the blocks of others if they save 1/10 of its tokens. Attention to cached tokens takes longer."""
_ADMIT_FRACTION = 8
"""Fewer samples than wanted may start once 1/8 of the blocks is free."""

States = tuple[Tensor, Tensor]
"""The states of a sample, as parked by SampleStates."""
_Tokens = tuple[int, ...]


class BlockPool:
    """Blocks 1 .. num_blocks - 1, each free, held by running samples, or only kept for later ones.

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

    def keep_also(self, block: int) -> None:
        """Adds a keeper to a block with holders."""
        self.num_keepers[block] += 1

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
    """Blocks of a sample. The first ones are those of its prompt up to `end`, and the prompt's `rest` follows them."""

    blocks: list[int]
    end: "_PromptBlock"
    rest: _Tokens
    states: States | None = None
    """States of a parked sample, if the model has any."""
    last_use: int = 0


@dataclass(eq=False)
class _PromptBlock:
    """A full block of prompts: `tokens` that follow those of `parent`. The root of a tree has neither."""

    parent: "_PromptBlock | None" = None
    tokens: _Tokens = ()
    block: int = 0
    round: int = 0
    """Number of rounds of suffixes before the one that computes it. 0 for blocks that are there or in whole heads."""
    children: "dict[_Tokens, _PromptBlock]" = field(default_factory=dict)
    prompts: dict[_Tokens, list[_Holding]] = field(default_factory=dict)
    """Holdings of the prompts whose full blocks end here, by the rest of the prompt."""
    last_use: int = 0
    is_kept: bool = True
    """Whether the tree keeps the block."""


class PromptTree:
    """Full blocks of the prompts computed with the present weights. Prompts that begin alike share them.

    The tree keeps the blocks after their samples have ended, until others need them. The least recently used go first.
    """

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self.root = _PromptBlock()
        self._idle: OrderedDict[_PromptBlock, None] = OrderedDict()
        """Blocks without holders and children that nobody else keeps, from the least to the most recently used."""
        self._now = 0

    @property
    def oldest(self) -> _PromptBlock | None:
        """The block to be evicted next."""
        return next(iter(self._idle), None)

    def tick(self) -> int:
        """Returns the time of a use. It counts uses."""
        self._now += 1
        return self._now

    def hold(self, first: _PromptBlock, following: Sequence[_Tokens]) -> tuple[list[int], _PromptBlock]:
        """Holds the blocks that follow `first` and have the tokens of `following`, as far as they exist.

        Returns them and the last of them, or `first`.
        """
        blocks, last = list[int](), first
        for tokens in following:
            child = last.children.get(tokens)
            if child is None:
                break
            blocks.append(child.block)
            last = child
        self._pool.share(blocks)
        self._idle.pop(last, None)
        return blocks, last

    def add(self, parent: _PromptBlock, tokens: _Tokens, block: int, number: int) -> _PromptBlock:
        """Adds a block that round `number` computes, and keeps it. A sample must hold it."""
        child = parent.children[tokens] = _PromptBlock(parent, tokens, block, number)
        self._pool.keep_also(block)
        return child

    def release(self, last: _PromptBlock) -> None:
        """Notes the use of the blocks up to `last` by a sample that no longer holds or keeps them."""
        now, node = self.tick(), last
        while node.parent is not None:
            node.last_use = now
            node = node.parent
        if self._is_idle(last):
            self._idle[last] = None
            self._idle.move_to_end(last)

    def evict(self) -> None:
        """Gives up the oldest block."""
        gone, _ = self._idle.popitem(last=False)
        self._give_up(gone)
        assert gone.parent is not None, "a root is never idle"
        del gone.parent.children[gone.tokens]
        if self._is_idle(gone.parent):  # its last use was that of `gone`
            self._idle[gone.parent] = None
            self._idle.move_to_end(gone.parent, last=False)

    def forget(self) -> None:
        """Gives up all blocks. Samples that hold or keep them go on."""
        left = [*self.root.children.values()]
        while left:
            node = left.pop()
            left += node.children.values()
            self._give_up(node)
        self._idle.clear()
        self.root = _PromptBlock()

    def _give_up(self, node: _PromptBlock) -> None:
        node.is_kept = False
        self._pool.give_up([node.block])

    def _is_idle(self, node: _PromptBlock) -> bool:
        if node.parent is None or node.children or not node.is_kept:
            return False
        return self._pool.num_holders[node.block] == 0 and self._pool.num_keepers[node.block] == 1


class EnteredSample(NamedTuple):
    """The work needed for a newly entered sample.

    If `is_computed`, its head is computed and stored from position `first` on. Otherwise only the partly filled block
    of its prompt is copied, as (source, destination). If it `follows`, the cache holds everything before `first` by the
    `round` of suffixes. A parked sample returns with its `states` there if the model has any.
    """

    is_computed: bool
    first: int
    copy: tuple[int, int] | None = None
    follows: bool = False
    is_parked: bool = False
    states: States | None = None
    round: int = 0
    is_of_prompt: bool = False
    """Whether another sample of its prompt is there."""


class _Start(NamedTuple):
    """What is there of a sample. `entry` says it if the sample was parked."""

    holding: _Holding
    entry: EnteredSample | None = None
    mate: _Holding | None = None
    """Another sample of the prompt."""


class BlockTables:
    """Tables of blocks of `block_tokens` tokens. A slot holds as many blocks as its positions need.

    Prompts that begin alike share their full blocks, which are never written again. All other blocks belong to one
    sample. Parked samples keep their blocks until another sample needs them, and so does the tree of prompts. Without
    `shares_computed` a prompt is computed again for later samples, because the states of the earlier ones have advanced
    past it.
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
        self._prompts = PromptTree(self.pool)
        self._version: int | None = None
        self.parked: ParkedSamples[_Holding] = ParkedSamples(self._give_up)

    def num_admissible(self, waiting: Sequence[Sample], num_wanted: int, num_running: int, version: int) -> int:
        """Implements KvCache.num_admissible. One block per running sample stays free, since all may fill theirs
        together."""
        self._expect(version)
        pool, planned, claimed = self.pool, dict[tuple[object, _Tokens], object](), set[int]()
        num_left, count = pool.num_free + pool.num_kept, 0
        for sample in waiting:
            num_own, there = self._needs(sample, planned)
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
        self._expect(version)
        # Blocks found for any sample are held before kept blocks are given up for the others.
        found = [self._find(sample) for sample in samples]
        new: list[_PromptBlock] = []
        entries = [
            self._enter(slot, sample, start, new)
            for slot, (sample, start) in enumerate(zip(samples, found, strict=True), first_slot)
        ]
        for node in new:
            node.round = 0
        return entries

    def forget_prompts(self) -> None:
        """Implements KvCache.forget_prompts."""
        self._prompts.forget()

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
        holding.states, holding.last_use = states, self._prompts.tick()
        self.pool.keep(holding.blocks)
        self.parked.add(sample, holding)
        self._holdings[slot] = None
        self.rows[slot] = 0

    def _expect(self, version: int) -> None:
        """Forgets prompts computed under another version of the weights."""
        if version != self._version:
            self.forget_prompts()
            self._version = version

    def _needs(self, sample: Sample, planned: dict[tuple[object, _Tokens], object]) -> tuple[int, Sequence[int]]:
        """Returns (number of new blocks for the sample, blocks available for sharing). Adds its prompt to `planned`.

        `planned` has the blocks of prompts considered before it, by the block before and the tokens.
        """
        num_blocks = blocks_of(len(sample.prompt) + len(sample.tokens), self.block_tokens)
        if parked := self.parked.get(sample):
            return num_blocks - len(parked.memory.blocks), parked.memory.blocks
        node: _PromptBlock | None = self._prompts.root
        last: object = node
        there, num_shared = list[int](), 0
        for tokens in self._full_blocks(sample):
            node = node.children.get(tokens) if node else None
            if node:
                there.append(node.block)
                last = node
                continue
            num_shared += (last, tokens) in planned
            last = planned.setdefault((last, tokens), object())
        return num_blocks - len(there) - num_shared, there

    def _full_blocks(self, sample: Sample) -> list[_Tokens]:
        """Returns the tokens of the full blocks of a prompt without its last token."""
        size, prompt = self.block_tokens, sample.prompt
        return [prompt[end - size : end] for end in range(size, len(prompt), size)]

    def _find(self, sample: Sample) -> _Start:
        """Holds the blocks that are there for the sample."""
        if parked := self.parked.take(sample):
            self.pool.hold_again(parked.memory.blocks)
            states, parked.memory.states = parked.memory.states, None
            entry = EnteredSample(True, len(parked.head), follows=True, is_parked=True, states=states)
            return _Start(parked.memory, entry)
        full = self._full_blocks(sample)
        blocks, last = self._prompts.hold(self._prompts.root, full)
        holding = _Holding(blocks, last, sample.prompt[len(full) * self.block_tokens : -1])
        mates = last.prompts.get(holding.rest) if len(blocks) == len(full) else None
        return _Start(holding, mate=mates[0] if mates else None)

    def _enter(self, slot: int, sample: Sample, start: _Start, new: list[_PromptBlock]) -> EnteredSample:
        """Completes the blocks of a sample. Adds the blocks that it computes to the tree, and to `new`."""
        holding, entry, _ = start
        full = [] if entry else self._full_blocks(sample)
        if not entry:
            more, holding.end = self._prompts.hold(holding.end, full[len(holding.blocks) :])
            holding.blocks += more
        num_found = len(holding.blocks)
        num_own = blocks_of(len(sample.prompt) + len(sample.tokens), self.block_tokens) - num_found
        self._make_free(num_own)
        holding.blocks += self.pool.take(num_own)
        self._holdings[slot] = holding
        self.rows[slot, : len(holding.blocks)] = holding.blocks
        if entry:
            return entry
        entry = self._work(sample, start, num_found)
        for tokens, block in zip(full[num_found:], holding.blocks[num_found:], strict=False):
            holding.end = self._prompts.add(holding.end, tokens, block, entry.round + entry.follows)
            new.append(holding.end)
        holding.end.prompts.setdefault(holding.rest, []).append(holding)
        return entry

    def _work(self, sample: Sample, start: _Start, num_found: int) -> EnteredSample:
        """Returns the work for a sample with its first `num_found` blocks there by the time of its round."""
        first, mate = num_found * self.block_tokens, start.mate
        if not self._shares_computed:
            return EnteredSample(True, first)
        if mate and not sample.tokens:
            own = start.holding.blocks[num_found] if start.holding.rest else 0
            return EnteredSample(False, 0, (mate.blocks[num_found], own) if own else None, is_of_prompt=True)
        if first * _LEAST_SAVED < max(len(sample.context) - 1, 1):
            return EnteredSample(True, first)
        return EnteredSample(True, first, follows=True, round=start.holding.end.round, is_of_prompt=bool(mate))

    def _make_free(self, num_blocks: int) -> bool:
        """Evicts parked samples and kept prompts until so many blocks are free. Returns whether they are."""
        while self.pool.num_free < num_blocks:
            prompt, parked = self._prompts.oldest, self.parked.oldest
            if prompt and (parked is None or prompt.last_use < parked.memory.last_use):
                self._prompts.evict()
            elif not self.parked.evict():
                return False
        return True

    def _give_up(self, holding: _Holding) -> None:
        """Gives up the blocks of a parked sample."""
        self.pool.give_up(holding.blocks)
        self._forget(holding)

    def _forget(self, holding: _Holding) -> None:
        """Forgets a sample that no longer holds or keeps its blocks."""
        mates = holding.end.prompts[holding.rest]
        mates.remove(holding)
        if not mates:
            del holding.end.prompts[holding.rest]
        self._prompts.release(holding.end)

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
