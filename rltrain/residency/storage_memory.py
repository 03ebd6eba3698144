"""How the memory of storages on the device is given up and taken again."""

from importlib import import_module
from typing import Any, Protocol

from torch import UntypedStorage

from rltrain.errors import ConfigError

SizedStorages = list[tuple[UntypedStorage, int]]
"""Storages and the bytes that each has when it is on the device."""


class StorageMemory(Protocol):
    keeps_addresses: bool
    """Whether memory that is taken again lies where it did; the first time it may not."""

    def free(self, storages: SizedStorages) -> None:
        """Give up the memory, contents lost."""

    def allocate(self, storages: SizedStorages) -> None:
        """Take as much again, contents undefined."""

    def allocated_bytes(self, storages: SizedStorages) -> int:
        """Bytes of memory behind them now."""


class ResizedStorages:
    """Storages that are made empty and large again; addresses change."""

    keeps_addresses = False

    def free(self, storages: SizedStorages) -> None:
        for storage, _ in storages:
            storage.resize_(0)

    def allocate(self, storages: SizedStorages) -> None:
        for storage, size in storages:
            storage.resize_(size)

    def allocated_bytes(self, storages: SizedStorages) -> int:
        return sum(storage.nbytes() for storage, _ in storages)


class PausedRegion:
    """Storages in a region of torch_memory_saver, whose pages go and come under unchanged addresses.

    A storage comes to the region when its memory is taken for the first time after it was given up. All storages of a
    part are freed and allocated together.
    """

    keeps_addresses = True

    def __init__(self, saver: Any, tag: str) -> None:
        self._saver, self._tag = saver, tag
        self._inside: dict[int, UntypedStorage] = {}
        self._paused = False

    def free(self, storages: SizedStorages) -> None:
        for storage, _ in storages:
            if storage._cdata not in self._inside:
                storage.resize_(0)
        if self._inside:
            self._saver.pause(self._tag)
        self._paused = True

    def allocate(self, storages: SizedStorages) -> None:
        if self._inside:
            self._saver.resume(self._tag)
        self._paused = False
        with self._saver.region(tag=self._tag):
            for storage, size in storages:
                if storage._cdata not in self._inside:
                    storage.resize_(size)
                    self._inside[storage._cdata] = storage

    def allocated_bytes(self, storages: SizedStorages) -> int:
        return 0 if self._paused else sum(storage.nbytes() for storage, _ in storages)


def memory_saver() -> Any:
    """torch_memory_saver in its hook mode for torch's allocator; ConfigError where it is not installed."""
    try:
        saver = import_module("torch_memory_saver").torch_memory_saver
    except ImportError as error:
        raise ConfigError(
            "residency.allocator is torch_memory_saver, which is not installed in this Python environment "
            f"({error}); pip install torch-memory-saver, or set residency.allocator to torch"
        ) from None
    saver.hook_mode = "torch"
    return saver
