"""A part of a role's memory that another process holds on this rank's device, such as the server of an engine."""

from collections.abc import Callable

from rltrain.residency.memory_parts import MemoryPart
from rltrain.residency.storage_memory import SizedStorages


def _nothing() -> None:
    pass


class RemotePart(MemoryPart):
    """`release` makes the other process free the memory, contents lost, and `resume` take it again; `restore` brings
    the contents back from what this process keeps of them, None where it keeps nothing. `num_bytes` tells how much it
    is, `kept_bytes` how much host memory of its own this process has for `restore`. All may be collective over the
    ranks that share the process, which therefore host the same roles.
    """

    def __init__(
        self,
        *,
        release: Callable[[], None],
        resume: Callable[[], None],
        num_bytes: Callable[[], int],
        restore: Callable[[], None] | None = None,
        kept_bytes: Callable[[], int] = lambda: 0,
        forget: Callable[[], None] = _nothing,
    ) -> None:
        super().__init__(lambda: (), forget=forget)
        self._release, self._resume, self._restore = release, resume, restore
        self._num_bytes, self._kept_bytes = num_bytes, kept_bytes

    @property
    def size_bytes(self) -> int:
        return self._num_bytes()

    @property
    def allocated_bytes(self) -> int:
        """Of this process: none."""
        return 0

    @property
    def host_bytes(self) -> int:
        return self._kept_bytes()

    def storages(self) -> SizedStorages:
        return []

    def save(self) -> None:
        """What `restore` needs is kept as soon as it arrives, so nothing has to be copied."""
        if self._restore is None:
            raise RuntimeError("a part of another process of which nothing is kept can only be dropped")
        super().save()

    def leave(self, *, drop: bool = False) -> None:
        super().leave(drop=drop)
        self._release()

    def allocate(self) -> None:
        super().allocate()
        self._resume()

    def fill(self, *, rewritten: bool = False) -> None:
        super().fill(rewritten=rewritten)
        if not rewritten and self._restore is not None:
            self._restore()
