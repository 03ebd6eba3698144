"""Stand-ins for process groups and transports that count the sizes of what they are given; these carry what they are
told to keep."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from rltrain.exchange.transport import InTransit
from rltrain.reshard import agreement
from rltrain.reshard.agreement import rounds


@dataclass
class Messages:
    """Of the rank whose code runs: what it sends, to whom, what it receives, the rank lists it made groups of."""

    num_ranks: int
    rank: int = 0
    num_messages: int = 0
    num_bytes: int = 0
    peers: set[int] = field(default_factory=set)
    num_groups: int = 0
    num_calls: int = 0
    num_received: int = 0
    kept_for: set[int] = field(default_factory=set)
    """Ranks that run later: what is sent to them waits for them."""
    kept: dict[tuple[int, int, int], Tensor] = field(default_factory=dict)
    """By sender, receiver and tag."""

    def become(self, rank: int) -> None:
        """The rank whose code runs next."""
        self.__init__(self.num_ranks, rank, kept_for=self.kept_for, kept=self.kept)  # type: ignore[misc]

    def send(self, peer: int, tag: int, parts: Sequence[Tensor]) -> InTransit:
        """As a Transport has it; so are `receive` and `wait`."""
        message = torch.cat([part.view(torch.uint8) for part in parts])
        self._note(message, [peer])
        if peer in self.kept_for:
            self.kept[self.rank, peer, tag] = message
        return InTransit(peer, tag, is_done=True)

    def receive(self, peer: int, tag: int) -> InTransit:
        self.num_received += 1
        return InTransit(peer, tag, is_done=True, message=self.kept.pop((peer, self.rank, tag)))

    def wait(self, deliveries: Iterable[InTransit], seconds: float) -> bool:
        return all(delivery.is_done for delivery in deliveries)

    def new_group(self, ranks: list[int], **settings: Any) -> object:
        self.num_calls += 1
        if self.rank not in ranks:
            return None
        self.num_groups += 1
        return object()

    def monitored_barrier(self, group: object, **settings: Any) -> None:
        """As torch has it: all ranks write to the first one, which answers each."""
        peers = range(1, self.num_ranks) if self.rank == 0 else [0]
        self._note(torch.zeros(1), peers)

    def all_reduce(self, numbers: Tensor, *settings: Any) -> Tensor:
        """As a reshard's agreement has it. Ranks have equal numbers, or say nothing."""
        self._note(numbers, [peer for what, peer in rounds(self.rank, self.num_ranks) if what != "take"])
        return numbers

    def all_to_all_single(self, result: Tensor, rows: Tensor, **settings: Any) -> None:
        result.copy_(rows)
        for peer in range(self.num_ranks):
            if peer != self.rank:
                self._note(rows[peer], [peer])

    def _note(self, tensor: Tensor, peers: Any) -> None:
        self.num_messages += len(peers)
        self.num_bytes += tensor.nbytes * len(peers)
        self.peers.update(peers)


@contextmanager
def counted_messages(num_ranks: int) -> Iterator[Messages]:
    """Inside, what torch.distributed is asked for is counted, and goes to nobody."""
    messages = Messages(num_ranks)
    names = ("new_group", "monitored_barrier", "all_to_all_single")
    stand_ins = {name: getattr(messages, name) for name in names}
    with (
        mock.patch.object(agreement, "all_reduce", messages.all_reduce),
        mock.patch.multiple(
            dist,
            get_rank=lambda *_: messages.rank,
            get_backend=lambda *_: "gloo",
            get_process_group_ranks=lambda *_: list(range(num_ranks)),
            **stand_ins,
        ),
    ):
        yield messages
