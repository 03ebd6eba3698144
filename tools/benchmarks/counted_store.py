"""A job's store that counts what each rank asks of it, for measurements of control code without a network."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch.distributed as dist

WAIT = timedelta(seconds=300)


@dataclass
class Traffic:
    """What one rank asked of the store since the last `take`."""

    operations: Counter[str] = field(default_factory=Counter)
    num_bytes: int = 0
    """Of keys and values, both ways."""

    @property
    def num_operations(self) -> int:
        return self.operations.total()

    def note(self, operation: str, keys: Iterable[str], values: Iterable[str | bytes] = ()) -> None:
        self.operations[operation] += 1
        self.num_bytes += sum(map(len, keys)) + sum(map(len, values))


class SharedStore:
    """One server, as all its clients see it: torch's own store within a process."""

    def __init__(self) -> None:
        self.values = dist.HashStore()
        self.values.set_timeout(WAIT)
        self.traffic: dict[int, Traffic] = {}
        self.num_connections: Counter[int] = Counter()
        self._clients: list[CountedStore] = []
        """torch keeps the C++ half of a store alive, not the Python one."""

    def client(self, rank: int) -> "CountedStore":
        """A connection of `rank`."""
        self.num_connections[rank] += 1
        client = CountedStore(self, rank)
        self._clients.append(client)
        return client

    def take(self) -> dict[int, Traffic]:
        """By rank, the traffic since the last call."""
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
        """Waits of this store have limits of their own."""

    def _note(self, operation: str, keys: Iterable[str], values: Iterable[Any] = ()) -> None:
        self._shared.traffic.setdefault(self._rank, Traffic()).note(operation, keys, values)
