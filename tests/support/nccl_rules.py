"""NCCL's rules on gloo: groups of backend "nccl" without a GPU. A hang on a GPU is an error with names here.

- The first call on a communicator needs all of its ranks. Later calls need only their own ranks.
- Ranks make equal collectives in equal order.
- Messages between two ranks match in the order of their calls, not by their tags, and have equal sizes.
- Messages issued separately block the later work of both ranks until they are matched. torch decides whether messages
  are issued together: `batch_isend_irecv` requires exactly the type ProcessGroup.
- All ranks destroy a communicator together, and only after its last recorded graph is gone.

Each call is announced in the store. The other ranks look for its counterpart there before any byte moves. So a rank
waits in the call, and on a GPU its stream would wait.
"""

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import Any
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d as c10d

from tests.support.cuda_graphs import RuleBrokenError, expect_unheld

FIRST_TAG = 2**29
"""First tag of messages. gloo uses its own tags for collectives, from 0."""
COLLECTIVES = (
    *("allreduce", "allreduce_coalesced", "reduce", "broadcast", "barrier", "allgather", "gather", "scatter"),
    *("all_gather_single", "_allgather_base", "all_gather_single_coalesced", "allgather_into_tensor_coalesced"),
    *("reduce_scatter", "reduce_scatter_single", "_reduce_scatter_base", "reduce_scatter_single_coalesced"),
    *("reduce_scatter_tensor_coalesced", "all_to_all_single", "alltoall_base", "alltoall"),
)
OF_ANY_SIZE = {"all_to_all_single", "alltoall_base", "alltoall", "barrier", "gather", "scatter"}
"""Collectives in which ranks may pass different numbers of bytes."""


class Done:
    """A finished work handle."""

    def wait(self, timeout: object = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True


@dataclass(frozen=True)
class Message:
    kind: str
    tensor: Tensor
    peer: int

    def __str__(self) -> str:
        return f"{self.kind} of {self.tensor.nbytes} bytes"


@dataclass(eq=False)
class Communicator:
    """The communicator of one process group on this rank. Its bytes go over `gloo`."""

    name: str
    ranks: list[int]
    gloo: dist.ProcessGroup
    limit_s: float
    holders: WeakSet[Any] = field(default_factory=WeakSet)
    """Recorded graphs that use this communicator."""
    counts: Counter[str] = field(default_factory=Counter)
    together: list[Message] | None = None
    """Messages being issued together, or None."""
    first_call_made: bool = False

    @property
    def rank(self) -> int:
        return self.gloo.rank()

    def collective(self, kind: str, call: Callable[..., dist.Work], arguments: Sequence[Any]) -> dist.Work:
        tensors = [tensor for given in arguments[:2] for tensor in _tensors(given)]
        size = "" if kind in OF_ANY_SIZE else f" of {max((t.nbytes for t in tensors), default=0)} bytes"
        said = f"{kind}{size}"
        number = self._next("collective")
        keys = {rank: f"collective/{number}/{rank}" for rank in range(len(self.ranks))}
        for rank, theirs in self._announced(said, {keys[self.rank]: said}, keys).items():
            if theirs != said:
                raise RuleBrokenError(
                    f"call {number + 1} on {self.name}: {said} by rank {dist.get_rank()}, {theirs} by rank "
                    f"{self.ranks[rank]}; NCCL would have them wait for each other"
                )
        self.first_call_made = True
        return call(*arguments)

    def message(self, message: Message) -> Done:
        if self.together is not None:
            self.together.append(message)
        else:
            self._alone(message)
        return Done()

    def end_together(self) -> Done:
        """Issues all messages at once. Each matches the next message of its peer in the other direction."""
        messages, self.together = self.together or [], None
        said = ", ".join(f"{message} {_way(message)} {self.ranks[message.peer]}" for message in messages)
        if not self.first_call_made:
            keys = {rank: f"first/{rank}" for rank in range(len(self.ranks))}
            self._announced(f"the first call on it, {said}", {keys[self.rank]: said}, keys)
            self.first_call_made = True
        numbers = [self._next(f"{message.kind} {message.peer}") for message in messages]
        mine = {self._key(m, self.rank, m.peer, n): str(m) for m, n in zip(messages, numbers, strict=True)}
        theirs = {
            i: self._key(Message(_other(m.kind), m.tensor, self.rank), m.peer, self.rank, n)
            for i, (m, n) in enumerate(zip(messages, numbers, strict=True))
        }
        found = self._announced(said, mine, theirs, [message.peer for message in messages])
        for i, announced in found.items():
            self._compare(messages[i], announced)
        self._move(messages, numbers)
        return Done()

    def _alone(self, message: Message) -> None:
        """Issues one message on a communicator of two ranks, which runs its calls in order."""
        pair = sorted((self.rank, message.peer))
        number = self._next(f"pair {message.peer}")
        key = f"pair/{pair[0]}-{pair[1]}/{number}"
        said = f"{message} {_way(message)} {self.ranks[message.peer]}, issued alone"
        mine, theirs = {f"{key}/{self.rank}": str(message)}, {0: f"{key}/{message.peer}"}
        self._compare(message, self._announced(said, mine, theirs, [message.peer])[0])
        self._move([message], [self._next(f"alone {message.kind} {message.peer}") + FIRST_TAG // 2])

    def destroy(self) -> None:
        expect_unheld(self.name, self.holders)
        if self.first_call_made:
            keys = {rank: f"destroyed/{rank}" for rank in range(len(self.ranks))}
            self._announced("destroying it", {keys[self.rank]: ""}, keys)

    def _compare(self, message: Message, theirs: str) -> None:
        expected = f"{_other(message.kind)} of {message.tensor.nbytes} bytes"
        if theirs != expected:
            raise RuleBrokenError(
                f"on {self.name} the {message} {_way(message)} rank {self.ranks[message.peer]}, by rank "
                f"{dist.get_rank()}, meets a {theirs}: expected a {expected}"
            )

    def _move(self, messages: Sequence[Message], numbers: Sequence[int]) -> None:
        works = []
        for message, number in zip(messages, numbers, strict=True):
            call = ORIGINAL["send" if message.kind == "send" else "recv"]
            works.append(call(self.gloo, [message.tensor], message.peer, FIRST_TAG + number))
        for work in works:
            work.wait()

    def _announced(
        self, said: str, mine: dict[str, str], theirs: dict[int, str], peers: Sequence[int] | None = None
    ) -> dict[int, str]:
        """Announces `mine` and returns the announcements of others under the keys `theirs`, of all ranks or of
        `peers`."""
        store = _store()
        own, others = ([f"{self.name}/{key}" for key in keys] for keys in (mine, theirs.values()))
        store.multi_set([f"doing/{dist.get_rank()}", *own], [f"{said} on {self.name}", *mine.values()])
        try:
            store.wait(others, timedelta(seconds=self.limit_s))
        except dist.DistStoreError:
            missing = [i for i, key in zip(theirs, others, strict=True) if not store.check([key])]
            absent = sorted({self.ranks[i if peers is None else peers[i]] for i in missing})
            raise RuleBrokenError(
                f"rank {dist.get_rank()} waits for ranks {absent} in {said} on {self.name}. "
                + "; ".join(f"rank {rank}: {_doing(store, rank)}" for rank in absent)
            ) from None
        return {i: said.decode() for i, said in zip(theirs, store.multi_get(others), strict=True)}

    def _next(self, what: str) -> int:
        self.counts[what] += 1
        return self.counts[what] - 1

    @staticmethod
    def _key(message: Message, rank: int, peer: int, number: int) -> str:
        return f"{message.kind}/{rank}/{peer}/{number}"


def _store() -> dist.Store:
    """Returns this thread's own connection to the store, because a waiting thread blocks its connection."""
    if not hasattr(STORES, "of_thread"):
        STORES.of_thread = dist.PrefixStore("nccl_rules", c10d._get_default_store().clone())
    store: dist.Store = STORES.of_thread
    return store


def _doing(store: dist.Store, rank: int) -> str:
    key = f"doing/{rank}"
    return store.get(key).decode() if store.check([key]) else "has made no call"


STORES = threading.local()
COMMUNICATORS: dict[dist.ProcessGroup, Communicator] = {}
ORIGINAL: dict[str, Any] = {}


class CoalescingBackend:
    """Answers torch's question whether messages can be issued together."""

    supports_coalescing = True

    def __init__(self, backend: Any) -> None:
        self._backend = backend

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)


def install(limit_s: float = 60.0) -> None:
    """Makes new groups of backend "nccl" in this process follow the rules. Ranks wait up to `limit_s`."""
    make = c10d._new_process_group_helper

    def new_group(size: int, rank: int, ranks: list[int], backend: str, *rest: Any, **named: Any) -> Any:
        if str(backend) != "nccl":
            return make(size, rank, ranks, backend, *rest, **named)
        group, group_store = make(size, rank, ranks, dist.Backend("gloo"), *rest, **named)
        if isinstance(group, dist.ProcessGroup):
            c10d._world.pg_map[group] = (dist.Backend("nccl"), group_store)
            name = f"the communicator of ranks {ranks} ({group.group_name})"
            COMMUNICATORS[group] = Communicator(name, list(ranks), group, limit_s)
        return group, group_store

    c10d._new_process_group_helper = new_group
    torch.cuda.nccl.version = lambda: (0, 0, 0)  # torch logs it with errors
    for name in COLLECTIVES:
        if hasattr(dist.ProcessGroup, name):
            _replace(name, partial(_collective, name))
    _replace("send", lambda group, _, tensors, peer, tag=0: group.message(Message("send", tensors[0], peer)))
    _replace("recv", lambda group, _, tensors, peer, tag=0: group.message(Message("receive", tensors[0], peer)))
    _replace("_start_coalescing", lambda group, _, device: setattr(group, "together", []))
    _replace("_end_coalescing", lambda group, _, device: group.end_together())
    _replace("_get_backend", lambda group, call, device: CoalescingBackend(call(device)))
    _replace("abort", _destroyed)
    _replace("shutdown", _destroyed)


def _collective(name: str, group: Communicator, call: Callable[..., dist.Work], *given: Any, **named: Any) -> dist.Work:
    return group.collective(name, partial(call, **named), given)


def _destroyed(group: Communicator, call: Callable[[], None]) -> None:
    group.destroy()
    COMMUNICATORS.pop(group.gloo, None)
    ORIGINAL["shutdown"](group.gloo)


def _replace(name: str, rule: Callable[..., Any]) -> None:
    original = ORIGINAL[name] = getattr(dist.ProcessGroup, name)

    def method(group: dist.ProcessGroup, *arguments: Any, **named: Any) -> Any:
        communicator = COMMUNICATORS.get(group)
        if communicator is None:
            return original(group, *arguments, **named)
        return rule(communicator, partial(original, group), *arguments, **named)

    setattr(dist.ProcessGroup, name, method)


def _tensors(given: Any) -> list[Tensor]:
    if isinstance(given, torch.Tensor):
        return [given]
    return [tensor for part in given for tensor in _tensors(part)] if isinstance(given, (list, tuple)) else []


def _other(kind: str) -> str:
    return "receive" if kind == "send" else "send"


def _way(message: Message) -> str:
    return "to" if message.kind == "send" else "from"
