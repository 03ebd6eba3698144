"""Stand-ins for a job's store, process groups and transports. They count the calls of each rank.

The store is torch's in-process store. Messages are dropped, except those to ranks in `kept_for`.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from rltrain.exchange.transport import InTransit
from rltrain.reshard import agreement
from rltrain.reshard.agreement import rounds

WAIT = timedelta(seconds=300)


@dataclass
class Traffic:
    """A rank's calls of the store since the last `take`."""

    operations: Counter[str] = field(default_factory=Counter)
    num_bytes: int = 0
    """Bytes of keys and values, in both directions."""

    @property
    def num_operations(self) -> int:
        return self.operations.total()

    def note(self, operation: str, keys: Iterable[str], values: Iterable[str | bytes] = ()) -> None:
        self.operations[operation] += 1
        self.num_bytes += sum(map(len, keys)) + sum(map(len, values))


class SharedStore:
    """The server of a store, for all its clients: torch's in-process store."""

    def __init__(self) -> None:
        self.values = dist.HashStore()
        self.values.set_timeout(WAIT)
        self.traffic: dict[int, Traffic] = {}
        self.num_connections: Counter[int] = Counter()
        self._clients: list[CountedStore] = []
        """torch keeps only the C++ half of a store alive. This list keeps the Python half."""

    def client(self, rank: int) -> "CountedStore":
        """Returns a new connection of `rank`."""
        self.num_connections[rank] += 1
        client = CountedStore(self, rank)
        self._clients.append(client)
        return client

    def take(self) -> dict[int, Traffic]:
        """Returns the traffic since the last call, by rank."""
        traffic, self.traffic = self.traffic, {}
        return traffic


class CountedStore(dist.Store):
    """A connection to a SharedStore."""

    def __init__(self, shared: SharedStore, rank: int) -> None:
        super().__init__()
        self._shared, self._rank, self._values = shared, rank, shared.values

    def clone(self) -> "CountedStore":
        return self._shared.client(self._rank)

    def set(self, key: str, value: Any) -> None:
        self._note("set", [key], [value])
        self._values.set(key, value)

    def get(self, key: str) -> bytes:
        value: bytes = self._values.get(key)
        self._note("get", [key], [value])
        return value

    def add(self, key: str, amount: int) -> int:
        self._note("add", [key])
        return self._values.add(key, amount)

    def check(self, keys: list[str]) -> bool:
        self._note("check", keys)
        return self._values.check(keys)

    def compare_set(self, key: str, expected: Any, desired: Any) -> bytes:
        self._note("compare_set", [key], [expected, desired])
        value: bytes = self._values.compare_set(key, expected, desired)
        return value

    def delete_key(self, key: str) -> bool:
        self._note("delete", [key])
        return self._values.delete_key(key)

    deleteKey = delete_key  # noqa: N815 - the name that torch looks for

    def wait(self, keys: list[str], timeout: timedelta = WAIT) -> None:
        self._note("wait", keys)
        self._values.wait(keys, timeout)

    def append(self, key: str, value: Any) -> None:
        self._note("append", [key], [value])
        self._values.append(key, value)  # type: ignore[attr-defined]

    def multi_get(self, keys: list[str]) -> list[bytes]:
        values = [self._values.get(key) for key in keys]
        self._note("multi_get", keys, values)
        return values

    def multi_set(self, keys: list[str], values: Sequence[Any]) -> None:
        self._note("multi_set", keys, values)
        for key, value in zip(keys, values, strict=True):
            self._values.set(key, value)

    def has_extended_api(self) -> bool:
        return True

    def set_timeout(self, timeout: timedelta) -> None:
        """Does nothing, because this store's waits have their own limits."""

    def _note(self, operation: str, keys: Iterable[str], values: Iterable[Any] = ()) -> None:
        self._shared.traffic.setdefault(self._rank, Traffic()).note(operation, keys, values)


@dataclass
class Messages:
    """Messages of the rank that is running: counts, peers, and the groups that it made."""

    num_ranks: int
    rank: int = 0
    num_messages: int = 0
    num_bytes: int = 0
    peers: set[int] = field(default_factory=set)
    num_groups: int = 0
    num_calls: int = 0
    num_received: int = 0
    kept_for: set[int] = field(default_factory=set)
    """Ranks that run later. Messages to them are kept."""
    kept: dict[tuple[int, int, int], Tensor] = field(default_factory=dict)
    """Kept messages by sender, receiver and tag."""

    def become(self, rank: int) -> None:
        """Resets the counts for the rank that runs next."""
        self.__init__(self.num_ranks, rank, kept_for=self.kept_for, kept=self.kept)  # type: ignore[misc]

    def send(self, peer: int, tag: int, parts: Sequence[Tensor]) -> InTransit:
        """Sends as a Transport does. `receive` and `wait` are Transport's methods too."""
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
        """Counts messages as torch does: all ranks write to the first one, and it answers each."""
        peers = range(1, self.num_ranks) if self.rank == 0 else [0]
        self._note(torch.zeros(1), peers)

    def all_reduce(self, numbers: Tensor, *settings: Any) -> Tensor:
        """Counts messages of a reshard's agreement. Returns the numbers unchanged, as all ranks have equal ones."""
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
    """Inside the context calls of torch.distributed are counted and not executed."""
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
