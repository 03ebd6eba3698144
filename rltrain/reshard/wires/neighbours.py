"""Ranks that read each other's memory, so that what goes between them passes through no socket."""

import mmap
import os
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from rltrain.models.table import IntArray
from rltrain.reshard.execute.agreement import Agreement
from rltrain.reshard.kernels import signals
from rltrain.reshard.kernels.signals import Signal
from rltrain.reshard.plan.stages import ReadPlaces
from rltrain.runtime.machine import process_here, this_process
from rltrain.runtime.shared_memory import AVAILABLE, SharedMemory

TOKEN_BYTES = 8
SLOTS = 2
PACKED_WORD, TAKEN_WORD = 0, 16
"""Of a rank's words, on cache lines of their own."""


class RankMemory:
    """One rank's, as it is mapped here: two slots, and how many rounds it has `packed` into them and has `taken` out of
    its neighbours'. `process` is the rank's, as system/processes.py names it."""

    def __init__(self, memory: SharedMemory, process: str) -> None:
        mapped = memory.map()
        words = mapped[: mmap.PAGESIZE].numpy().view(np.uint32)
        self.slots = mapped[mmap.PAGESIZE :].tensor_split(SLOTS)
        self.packed, self.taken = Signal(words, PACKED_WORD), Signal(words, TAKEN_WORD)
        self.process = process


@dataclass(frozen=True, eq=False)
class NodeMemory:
    """This rank's memory and that of its neighbours, ascending; `timeout_s` is how long one waits for another."""

    own: RankMemory
    neighbours: Mapping[int, RankMemory]
    timeout_s: float

    @property
    def slots(self) -> list[Tensor]:
        """This rank's two, then two of every neighbour."""
        return [slot for memory in (self.own, *self.neighbours.values()) for slot in memory.slots]

    @property
    def own_bytes(self) -> int:
        return sum(slot.numel() for slot in self.own.slots)


class Neighbours:
    """Finds out which of `candidates` can map this rank's memory, and it theirs: those are its `ranks`, ascending.

    Whether ranks can is tried and not derived: those in containers of their own may not, whatever their host. What
    cannot be reached by both of two ranks is reached by neither. Collective over: the agreement's ranks.
    """

    def __init__(self, agreement: Agreement, candidates: Sequence[int]) -> None:
        self._agreement = agreement
        self._own = _created() if candidates else None
        offers = agreement.exchange(np.repeat([self._offer()], len(agreement.ranks), axis=0))
        found = {peer: offers[agreement.ranks.index(peer)].tolist() for peer in sorted(candidates)}
        opened = {peer: _opened(*offer) for peer, offer in found.items() if self._own}
        mutual = agreement.exchange(np.array([[bool(opened.get(peer))] for peer in agreement.ranks], dtype=np.int64))
        self._theirs: dict[int, SharedMemory] = {}
        for peer, memory in opened.items():
            if memory and mutual[agreement.ranks.index(peer), 0]:
                self._theirs[peer] = memory
            elif memory:
                memory.close()
        self.ranks = tuple(self._theirs)
        self._processes = {peer: process_here(found[peer][0]) for peer in self.ranks}

    def read_places(self, places: IntArray) -> ReadPlaces:
        """From the `shared_places` that each rank has come to. Collective over: the agreement's ranks."""
        rows = [self._agreement.ranks.index(peer) for peer in self.ranks]
        return ReadPlaces(self.ranks, self._agreement.exchange(places)[rows])

    def memory(self, slot_bytes: int, timeout_s: float) -> NodeMemory | None:
        """Slots of at least `slot_bytes`, for as long as they are referred to; None where this rank cannot have any.

        Ends the use of this object. Collective over: the agreement's ranks.
        """
        slot_bytes = -(-slot_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        if self._own is not None:
            os.pwrite(self._own.file, bytes(TOKEN_BYTES), 0)  # where the counters will be
            self._own.resize(mmap.PAGESIZE + SLOTS * slot_bytes)
        self._agreement.meet()  # so that nobody maps what has not its size yet
        if self._own is None:
            return None
        own = RankMemory(self._own, this_process())
        theirs = {peer: RankMemory(memory, self._processes[peer]) for peer, memory in self._theirs.items()}
        for memory in (self._own, *self._theirs.values()):
            memory.close()
        return NodeMemory(own, theirs, timeout_s)

    def _offer(self) -> list[int]:
        """What another rank needs to find this rank's memory, and to know it again: process, file and token."""
        if self._own is None:
            return [0, 0, 0]
        token = secrets.token_bytes(TOKEN_BYTES)
        os.pwrite(self._own.file, token, 0)
        return [os.getpid(), self._own.file, int.from_bytes(token, "little", signed=True)]


def _created() -> SharedMemory | None:
    """None where this rank has no such memory, or no native code to count in it."""
    if not (AVAILABLE and signals.available()):
        return None
    try:
        return SharedMemory.create()
    except OSError:
        return None


def _opened(process: int, file: int, token: int) -> SharedMemory | None:
    """What another process offers, or None where this one does not reach it."""
    if not process:
        return None
    try:
        memory = SharedMemory.open(process, file)
    except OSError:
        return None
    if os.pread(memory.file, TOKEN_BYTES, 0) == token.to_bytes(TOKEN_BYTES, "little", signed=True):
        return memory
    memory.close()
    return None
