"""The order in which prompt groups get done, over all engines: numbers drawn from a counter in the shared store."""

import time
from dataclasses import dataclass

import torch.distributed as dist

from rltrain.runtime.job_store import poll_s


@dataclass(frozen=True)
class Finished:
    """One prompt group that some engine has completed."""

    position: int
    """Its place in the stream of all prompts of the run."""
    num_tokens: int
    """Of all its samples, prompts included."""
    num_response_tokens: int
    engine: int
    """The number of the one that has it."""
    dropped: tuple[int, ...] = ()
    """Positions of groups that its engine has dropped since the one before."""


class CompletionLog:
    """A log per name; every `per_chunk` entries of it are a chunk, which any rank can read once it is full.

    Engines that finish groups at the same time agree on who is first by one counter per log. A chunk's entry is
    deleted once `num_readers` ranks have read it, and with the last of `chunks_per_log` the counter, which nobody looks
    at any more.
    """

    def __init__(self, store: dist.Store, per_chunk: int, num_readers: int, chunks_per_log: int) -> None:
        self.store = dist.PrefixStore("completion_log", store)
        self.per_chunk = per_chunk
        self.num_readers = num_readers
        self.chunks_per_log = chunks_per_log
        self.poll_s = poll_s(num_readers)
        self._num_known: dict[str, int] = {}
        """Per log, the entries that this rank knows of: all of them, where nobody else makes any."""
        self._last_look = 0.0

    def add(self, log: str, finished: Finished) -> None:
        """Append to the log."""
        self._num_known[log] = self.store.add(f"{log}/count", 1)
        number = self._num_known[log] - 1
        of_group = (finished.position, finished.num_tokens, finished.num_response_tokens, finished.engine)
        entry = ":".join(map(str, (*of_group, *finished.dropped))) + ";"
        self.store.append(f"{log}/{number // self.per_chunk}", entry)  # type: ignore[attr-defined]

    def is_full(self, log: str, chunk: int) -> bool:
        """Whether the chunk's last number has been drawn: known at once where this rank drew it or a later one, found
        in the store, which is looked into every `poll_s` at most, where another did."""
        wanted, now = (chunk + 1) * self.per_chunk, time.monotonic()
        if self._num_known.get(log, 0) < wanted and now - self._last_look >= self.poll_s:
            self._last_look = now
            self._num_known[log] = self.store.add(f"{log}/count", 0)
        return self._num_known.get(log, 0) >= wanted

    def read(self, log: str, chunk: int) -> list[Finished] | None:
        """The groups of a full chunk by position, once per rank; None while an engine has yet to write its entry."""
        if not self.store.check([f"{log}/{chunk}"]):
            return None
        text = self.store.get(f"{log}/{chunk}").decode()
        entries = [_read(entry) for entry in text.split(";")[:-1]]
        if len(entries) < self.per_chunk:
            return None
        if self._is_last(chunk):
            self._num_known.pop(log, None)
        self._forget_when_all_have_read(log, chunk)
        return sorted(entries, key=lambda finished: finished.position)

    def _forget_when_all_have_read(self, log: str, chunk: int) -> None:
        if self.store.add(f"{log}/{chunk}/read", 1) < self.num_readers:
            return
        self.store.delete_key(f"{log}/{chunk}")
        self.store.delete_key(f"{log}/{chunk}/read")
        if self._is_last(chunk):
            self.store.delete_key(f"{log}/count")

    def _is_last(self, chunk: int) -> bool:
        return chunk == self.chunks_per_log - 1


def _read(entry: str) -> Finished:
    position, num_tokens, num_response_tokens, engine, *dropped = map(int, entry.split(":"))
    return Finished(position, num_tokens, num_response_tokens, engine, tuple(dropped))
