"""The agreement of a reshard's ranks over gloo. Before anything else, they wait for each other and compare their
plans."""

from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from typing import Literal, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from rltrain.errors import SyncError
from rltrain.models.table import IntArray
from rltrain.reshard.rounds import (
    NO_HEADERS,
    Headers,
    Rounds,
    StageStreams,
    Streams,
    checksums,
    choose_rounds,
    stream_numbers,
)
from rltrain.runtime.group_messages import broadcast_bytes
from rltrain.runtime.heartbeat import Waiting, unnoted

# Sums and maxima of a few numbers over all ranks of a gloo group, in about as many rounds as the number of ranks has
# bits.
#
# Gloo's own all-reduce is a ring. Its last rank is reached after twice as many successive messages as there are ranks,
# and thousands of ranks would wait for it. This is recursive doubling (Thakur, Rabenseifner and Gropp 2005): bit by
# bit, every rank exchanges its partial result with the rank differing in one bit of its number.

Round = tuple[Literal["exchange", "give", "take"], int]
"""A rank's action in a round, and its peer. A take after a give brings the final result. Any other take brings a part
of it."""
Combine = Callable[[Tensor, Tensor], Tensor]

TAG = 2**30
"""The tag of these messages over the group."""


def rounds(rank: int, num_ranks: int) -> Iterator[Round]:
    """Yields the rounds of a rank. Ranks from the largest power of two on are represented by lower ranks."""
    power = 1 << (num_ranks.bit_length() - 1)
    if rank >= power:
        yield "give", rank - power
        yield "take", rank - power
        return
    represented = rank + power if rank + power < num_ranks else None
    if represented is not None:
        yield "take", represented
    for bit in range(power.bit_length() - 1):
        yield "exchange", rank ^ 1 << bit
    if represented is not None:
        yield "give", represented


def all_reduce(numbers: Tensor, combine: Combine, group: dist.ProcessGroup) -> Tensor:
    """Returns `combine` of the `numbers` of all ranks. Each rank combines in another order, so use whole numbers.
    Raises RuntimeError if another rank is lost. Collective over: `group`."""
    result, theirs = numbers.clone(), torch.empty_like(numbers)
    has_given = False
    for what, peer in rounds(group.rank(), group.size()):
        sending = group.send([result], peer, TAG) if what != "take" else None
        if what != "give":
            group.recv([theirs], peer, TAG).wait()
        if sending is not None:
            sending.wait()
        if what == "exchange" or (what == "take" and not has_given):
            result = combine(result, theirs)
        elif what == "take":
            result = theirs
        has_given = has_given or what == "give"
    return result


# The agreement of a reshard's ranks.

MAX_MESSAGE_BYTES = 2000
"""Maximum bytes of an error sent to the other ranks."""

Result = TypeVar("Result")


class Agreement:
    """The communication of a reshard's ranks over `group` (gloo). It has the ranks of both layouts, or is None if this
    rank is alone.

    `waiting` is entered while early ranks wait for the others. Every method is collective over: `group`.
    """

    def __init__(
        self, group: dist.ProcessGroup | None, rank: int, timeout_s: float | None, waiting: Waiting = unnoted
    ) -> None:
        if group is not None and dist.get_backend(group) != "gloo":
            raise ValueError(f"cpu_group has backend {dist.get_backend(group)}; expected gloo")
        self.rank = rank
        self.ranks = [rank] if group is None else dist.get_process_group_ranks(group)
        self._group = group
        self._timeout = None if timeout_s is None else timedelta(seconds=timeout_s)
        self._waiting = waiting

    def meet(self) -> None:
        """Waits until all ranks have come. Otherwise raises SyncError. On one rank the message names the missing
        ranks."""
        if self._group is None:
            return
        try:
            with self._waiting("the others to come to a reshard"):
                dist.monitored_barrier(self._group, timeout=self._timeout, wait_all_ranks=True)
        except RuntimeError as error:
            raise SyncError(
                f"rank {self.rank} waits at a reshard for all of ranks {self.ranks}, but: {error}. Look in the "
                "log for messages of the missing ranks. Config key timeouts.no_progress_s sets how long a rank waits"
            ) from error

    def together(self, attempt: Callable[[], Result]) -> Result:
        """Returns the result of `attempt` once it has succeeded on all ranks.

        If it raises ValueError or SyncError on any rank, all ranks raise SyncError. Failed ranks raise their own
        message. The others raise the message of the highest failed rank.
        """
        problem: Exception | None = None
        result: list[Result] = []
        try:
            result.append(attempt())
        except (ValueError, SyncError) as error:
            problem = error
        if self._group is not None:
            (failed,) = self._all_reduce([-1 if problem is None else self.rank], torch.maximum)
            if failed >= 0:
                said = self._told(failed, "" if problem is None else str(problem))
                problem = problem or SyncError(f"rank {failed} cannot take part in the reshard: {said}")
        if problem is not None:
            raise problem if isinstance(problem, SyncError) else SyncError(str(problem)) from problem
        return result[0]

    def rounds(
        self,
        exchanged: tuple[StageStreams, ...],
        bucket_bytes: int,
        large_bytes: int | None,
        headers: Headers = NO_HEADERS,
    ) -> tuple[Rounds, ...]:
        """Returns the rounds of each stage, equal on all ranks. First compares the settings of all ranks, and the sends
        of each rank with the receives of its peers.

        `headers` has the bytes of a message in addition to its packed bytes, by stage.

        Raises SyncError if they differ. The message names two ranks and their values. If all agree, a maximum and a sum
        over all ranks show it, and no rank needs the values of every other rank.
        """
        self.together(lambda: self._check_peers(exchanged))
        if self._group is None:
            return tuple(Rounds(0, 1) for _ in exchanged)
        settings = [bucket_bytes, -1 if large_bytes is None else large_bytes, *headers]
        extents = [extent for stage in exchanged for extent in _extent(stage)]
        highest = self._maxima([*settings, *(-value for value in settings), *extents])
        differ = highest[: len(settings)] != [-value for value in highest[len(settings) : 2 * len(settings)]]
        if differ or self.total([_imbalance(self.rank, exchanged)]) != [0]:
            self._name_who_differs(settings, exchanged)
        largest = np.reshape(highest[2 * len(settings) :], (-1, 2)).tolist()
        return self.together(
            lambda: tuple(
                choose_rounds(num_bytes, num_peers, stage.kind.round_bytes(bucket_bytes) - header_bytes * num_peers)
                for stage, header_bytes, (num_bytes, num_peers) in zip(exchanged, headers, largest, strict=True)
            )
        )

    def _name_who_differs(self, settings: list[int], exchanged: tuple[StageStreams, ...]) -> None:
        """Finds two ranks in disagreement. Raises SyncError on all ranks."""
        streams = [column for stage in exchanged for column in self._table(stage.sends).T]
        rows = np.repeat([settings], len(self.ranks), axis=0)
        theirs = self.exchange(np.column_stack([rows, *streams]))

        def compare() -> None:
            self._compare_settings(theirs[:, : len(settings)])
            self._compare(theirs[:, len(settings) :].reshape(len(self.ranks), -1, 2), exchanged)

        self.together(compare)
        raise SyncError(f"rank {self.rank}: the plans of all pairs of ranks agree, but their sum does not")

    def exchange(self, rows: IntArray) -> IntArray:
        """Sends row i to rank `ranks[i]`. Row i of the result comes from this rank."""
        if self._group is None:
            return rows
        result = torch.empty(rows.shape, dtype=torch.int64)
        dist.all_to_all_single(result, torch.from_numpy(np.ascontiguousarray(rows)), group=self._group)
        received: IntArray = result.numpy()
        return received

    def lengths(self, sent: Mapping[int, int]) -> dict[int, int]:
        """Exchanges lengths in bytes. Takes the bytes `sent` to each rank and returns the bytes coming from each
        rank."""
        rows = np.array([[sent.get(rank, 0)] for rank in self.ranks], dtype=np.int64)
        return dict(zip(self.ranks, self.exchange(rows)[:, 0].tolist(), strict=True))

    def total(self, numbers: list[int]) -> list[int]:
        """Returns sums over all ranks, once all ranks have come here."""
        return self._all_reduce(numbers, torch.add)

    def _maxima(self, numbers: list[int]) -> list[int]:
        """Returns the maximum over all ranks for each of `numbers`."""
        return self._all_reduce(numbers, torch.maximum)

    def _all_reduce(self, numbers: list[int], combine: Combine) -> list[int]:
        if self._group is None:
            return numbers
        try:
            result: list[int] = all_reduce(torch.tensor(numbers), combine, self._group).tolist()
            return result
        except RuntimeError as error:
            raise SyncError(
                f"rank {self.rank} lost another one of ranks {self.ranks} during a reshard: {error}. Look in the "
                "log for the message of that rank"
            ) from error

    def _told(self, speaker: int, text: str) -> str:
        told = broadcast_bytes(text.encode()[:MAX_MESSAGE_BYTES], self._group, source=self.ranks.index(speaker))
        return told.decode(errors="replace")

    def _check_peers(self, exchanged: tuple[StageStreams, ...]) -> None:
        peers = {int(peer) for stage in exchanged for made in (stage.sends, stage.receives) for peer in made.peers}
        if strangers := sorted(peers - set(self.ranks)):
            raise ValueError(
                f"the plan of rank {self.rank} exchanges with ranks {strangers}, which are not in its process group of "
                f"ranks {self.ranks}: expected a group over the ranks of both layouts"
            )

    def _table(self, made: Streams) -> IntArray:
        """Returns bytes and checksum of the stream with each rank, shape [ranks of the group, 2]. They are zero without
        a stream."""
        table = np.zeros((len(self.ranks), 2), dtype=np.int64)
        known = np.isin(made.peers, self.ranks)
        place = [self.ranks.index(peer) for peer in made.peers[known].tolist()]
        table[place, 0], table[place, 1] = made.num_bytes[known], checksums(made)[known]
        return table

    def _compare_settings(self, settings: IntArray) -> None:
        """Raises SyncError if `settings`, a row for each rank, differ."""
        differ = np.flatnonzero((settings != settings[0]).any(axis=1))
        if len(differ):
            other = int(differ[0])
            raise SyncError(
                f"ranks cut messages differently: (bytes of buckets, least bytes sent in place, of headers) are "
                f"{settings[0].tolist()} on rank {self.ranks[0]} and {settings[other].tolist()} on rank "
                f"{self.ranks[other]}. Expected equal weight_sync.bucket_mb and devices of one kind on all of ranks "
                f"{self.ranks}"
            )

    def _compare(self, sent: IntArray, exchanged: tuple[StageStreams, ...]) -> None:
        for number, stage in enumerate(exchanged):
            expected, theirs = self._table(stage.receives), sent[:, number]
            for place in np.flatnonzero((expected != theirs).any(axis=1))[:1].tolist():
                peer = self.ranks[place]
                raise SyncError(
                    f"ranks {peer} and {self.rank} disagree about stage {stage.kind.name} of the reshard: rank {peer} "
                    f"sends {theirs[place, 0]} bytes (checksum of the boxes {theirs[place, 1]}), rank {self.rank} "
                    f"expects {expected[place, 0]} ({expected[place, 1]}). Both must plan from equal layouts: compare "
                    "their config, model.path and versions of rltrain"
                )


def _imbalance(rank: int, exchanged: tuple[StageStreams, ...]) -> int:
    """Returns a 64-bit number. Its sum over all ranks is 0 if every stream is the same at both ends."""
    total = 0
    for number, stage in enumerate(exchanged):
        sent = stream_numbers(stage.sends, number, sources=rank, destinations=stage.sends.peers)
        received = stream_numbers(stage.receives, number, sources=stage.receives.peers, destinations=rank)
        total += sent - received
    return (total + 2**63) % 2**64 - 2**63


def _extent(stage: StageStreams) -> tuple[int, int]:
    """Returns the larger bytes and the larger number of peers of both directions."""
    both = (stage.sends, stage.receives)
    return max(made.total_bytes for made in both), max(len(made.peers) for made in both)
