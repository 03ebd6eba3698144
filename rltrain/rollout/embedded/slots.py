"""All that a decode step reads and writes besides weights: it outlives sessions, so that recorded steps can too."""

from collections.abc import Sequence

import torch
from torch import Tensor

from rltrain.rollout.embedded.kv_cache import KvCache
from rltrain.rollout.embedded.transcript import Transcript

# Rows of the state.
TOKEN, POSITION, DRAWN, PLACE, LIMIT, STREAM = range(6)


class Slots:
    """Running responses fill slots 0 .. num_running - 1 of the cache and of `state` [6, slots] int64.

    `TOKEN` is the next token to feed, `POSITION` where it stands, `DRAWN` how many response tokens exist, `LIMIT` how
    many may, `PLACE` where the transcript notes the next one, `STREAM` where the random numbers start. An idle slot may
    take part in a step: it feeds the same token to position 0 again and again, and nobody reads what it draws.
    """

    def __init__(self, cache: KvCache, num_slots: int, device: torch.device) -> None:
        self.cache = cache
        self.num_slots = num_slots
        self.transcript = Transcript(num_slots, device)
        self.state = torch.zeros(6, num_slots, dtype=torch.int64, device=device)
        self.increments = torch.zeros(3, num_slots, dtype=torch.int64, device=device)
        """What a step adds to POSITION, DRAWN and PLACE."""
        self.stopped, self.failed, self.finished = torch.zeros(3, num_slots, dtype=torch.bool, device=device)
        """Of the last step: whose token was a stop token, whose logits were not finite, and whose response ends for
        either or for its length."""
        self.num_preempted = 0
        """Samples that had to wait again since somebody set it to 0."""
        idle = [0, 0, 0, self.transcript.nowhere, 1, 0]
        self._idle_state = torch.tensor(idle, device=device)[:, None]
        self.clear()

    def clear(self) -> None:
        """All slots are idle."""
        self.transcript.clear()
        self.free(0, self.num_slots)

    def release(self) -> None:
        """Give the memory back that grows with the context."""
        self.cache.release()
        self.transcript.release()

    def reserve(self, num_slots: int, num_positions: int, *, num_used: int) -> None:
        """Make room for `num_positions` in each of `num_slots`, of which the first `num_used` keep what they hold."""
        self.cache.reserve(num_slots, num_positions, num_used=num_used)
        self.transcript.reserve(self.cache.capacity)

    def fill(self, first: int, rows: Sequence[Sequence[int]], streams: Tensor) -> None:
        """Start responses from slot `first` on: `rows` are their TOKEN to LIMIT."""
        new = slice(first, first + len(streams))
        self.state[:STREAM, new] = torch.tensor(rows, dtype=torch.int64, device=streams.device)
        self.state[STREAM, new] = streams
        self.increments[:2, new] = 1
        self.increments[2, new] = self.transcript.stride

    def move(self, sources: Sequence[int], destinations: Sequence[int], num_positions: int) -> None:
        """Copy slots `sources` over slots `destinations`, up to `num_positions`."""
        to, by = torch.tensor([destinations, sources], device=self.state.device)
        self.state.index_copy_(1, to, self.state.index_select(1, by))
        self.cache.move(sources, destinations, num_positions)

    def free(self, first: int, end: int) -> None:
        """Slots from `first` up to `end` are idle from now on."""
        self.state[:, first:end] = self._idle_state
        self.increments[:, first:end] = 0
        self.cache.free(first, end)

    def addresses(self) -> tuple[int, ...]:
        """Where everything lies now, and how: equal as long as a recorded step is valid."""
        return *self.cache.addresses(), *self.transcript.addresses()
