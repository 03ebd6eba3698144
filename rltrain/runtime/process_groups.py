"""Process groups from explicit rank lists. No other module creates any.

Every group of the job is created here at start-up, in one global order. So is every later generation of a group with a
released communicator. Equal rank lists share one communicator, for all roles and purposes.
"""

import itertools
import threading
from collections.abc import Callable, Collection, Iterable, Mapping
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d as c10d

from rltrain.runtime.machine import JobThread
from rltrain.runtime.placement import RankList, format_ranks, global_order

# A process group with a replaceable communicator. Its users keep the same object.

LOOK_S, LONGEST_LOOK_S = 0.005, 2.0
"""First and longest pause, in seconds, between checks for released communicators. Each pause doubles the last one."""
OWN = frozenset({"rank", "size", "shutdown", "abort", "boxed", "unbox", "BackendType", "send", "recv"})


class ReopenableGroup(dist.ProcessGroup):
    """A process group that forwards every call to the present communicator.

    Models, optimizers and schedules hold process groups in many places, so the groups cannot be replaced. Communicators
    have generations. Members that open the same generation meet in a part of the store reserved for it, independent of
    their earlier generations. Callers of `batch_isend_irecv` must pass it the `plain_group`.
    """

    def __init__(self, name: str, ranks: tuple[int, ...], *, backend: str, timeout: timedelta) -> None:
        """Opens generation 0. `name` is unique in the job. Collective over: `ranks`. This rank must be one of them."""
        super().__init__(ranks.index(dist.get_rank()), len(ranks))  # type: ignore[call-arg]  # missing in torch's stub
        self._name, self._ranks, self._backend, self._timeout = name, ranks, backend, timeout
        self._inner: dist.ProcessGroup | None = None
        self._ending: _Ending | None = None
        self.generation: int | None = None
        self.open(0)
        self._register()

    def open(self, generation: int) -> None:
        """Opens the communicator of `generation` and closes an older one. Collective over: the ranks, if it is new.

        NCCL creates its communicator in the first call. All ranks must make that call.
        """
        if generation == self.generation:
            return
        self.close()
        if self._ending is not None:
            self._ending.finish(self._timeout)
        name = c10d.GroupName(f"{self._name}, generation {generation}")
        self._inner, _ = c10d._new_process_group_helper(
            len(self._ranks),
            self._ranks.index(dist.get_rank()),
            list(self._ranks),
            dist.Backend(self._backend),
            dist.PrefixStore(name, c10d._get_default_store()),
            group_name=name,
            timeout=self._timeout,
        )
        c10d._world.pg_group_ranks[self._inner] = {rank: index for index, rank in enumerate(self._ranks)}
        self.generation = generation
        if self._backend == "gloo":
            # A member has its connections before others have theirs. Closing now would break them off.
            self._inner.barrier().wait()

    def close(self) -> None:
        """Releases the communicator, if one is open. Its work on the device must be done, and CUDA graphs that captured
        it must be destroyed first, since NCCL waits for them.

        Does not wait for other members, because each closes at its own place in the order of tasks. Destroying an NCCL
        communicator may wait for them. So it is destroyed, and its memory freed, once all have released it.
        """
        if self._inner is None:
            return
        if self._backend == "nccl":
            store = dist.PrefixStore(f"{self._name}, released {self.generation}", c10d._get_default_store())
            self._ending = _Ending(self._inner, store, self._ranks)
        else:
            dist.destroy_process_group(self._inner)
        self._inner = self.generation = None

    def shutdown(self) -> None:
        """Lets torch destroy a released communicator. Torch ends every group that it knows, and knows the communicator
        as well."""
        if self._ending is not None:
            self._ending.leave_to_torch(self._timeout)

    def abort(self) -> None:
        self.shutdown()

    def send(self, tensors: list[Tensor], peer: int, tag: int) -> dist.Work:
        """Sends like any group. Raises RuntimeError if the backend needs messages to be issued together."""
        return self._for_single_messages(tensors[0]).send(tensors, peer, tag)

    def recv(self, tensors: list[Tensor], peer: int, tag: int) -> dist.Work:
        """Receives like any group. Raises RuntimeError if the backend needs messages to be issued together."""
        return self._for_single_messages(tensors[0]).recv(tensors, peer, tag)

    @property
    def inner(self) -> dist.ProcessGroup:
        if self._inner is None:
            raise RuntimeError(
                f"the communicator over ranks {self._ranks} was released, but a task uses it; the task's role is not "
                "among the roles of this group"
            )
        return self._inner

    def _for_single_messages(self, tensor: Tensor) -> dist.ProcessGroup:
        if self.inner._get_backend(tensor.device).supports_coalescing:
            raise RuntimeError(
                f"a message over ranks {self._ranks} is issued alone, so ranks that send to each other could wait "
                "forever; pass plain_group(group) of rltrain/runtime/process_groups.py to batch_isend_irecv"
            )
        return self.inner

    def _register(self) -> None:
        """Registers this object with torch, which looks up the facts of a group by its object."""
        world, inner = c10d._world, self.inner
        world.pg_map[self] = world.pg_map[inner]
        world.pg_group_ranks[self] = world.pg_group_ranks[inner]
        world.pg_backend_config[self] = world.pg_backend_config[inner]
        world.pg_names[self] = c10d.GroupName(self._name)


class _Ending(JobThread):
    """Destroys an NCCL communicator once every member has released it.

    A rank that destroys one may wait for the other ranks of its node (github.com/NVIDIA/nccl/issues/863). So no rank
    may still have other work to do before that.
    """

    def __init__(self, communicator: dist.ProcessGroup, store: dist.Store, ranks: tuple[int, ...]) -> None:
        super().__init__(name=f"end the communicator over ranks {ranks}", daemon=True)
        self._communicator, self._store, self._ranks = communicator, store, ranks
        self._device = torch.cuda.current_device() if torch.cuda.is_available() else None
        self._left_to_torch = threading.Event()
        store.set(str(dist.get_rank()), "released")
        self.start()

    def run(self) -> None:
        look_s = LOOK_S
        while not self._store.check([str(rank) for rank in self._ranks]):
            if self._left_to_torch.wait(look_s):
                return
            look_s = min(2 * look_s, LONGEST_LOOK_S)
        if self._device is not None:
            torch.cuda.set_device(self._device)
        c10d._abort_process_group(self._communicator)  # a destroy would wait for work that others may have dropped

    def finish(self, timeout: timedelta) -> None:
        """Waits until the communicator is destroyed. Raises RuntimeError if members still hold it. Collective over: the
        members."""
        self.join(timeout.total_seconds())
        if self.is_alive():
            missing = [rank for rank in self._ranks if not self._store.check([str(rank)])]
            raise RuntimeError(f"the communicator over ranks {self._ranks} is still held by ranks {missing}")

    def leave_to_torch(self, timeout: timedelta) -> None:
        """Stops waiting at the end of the job. Members may then never release the communicator."""
        self._left_to_torch.set()
        self.join(timeout.total_seconds())


def plain_group(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """Returns the same group for messages issued together. It is valid until the group is released.

    `batch_isend_irecv` combines messages into one NCCL call only for the exact type ProcessGroup. For a subclass it
    sends each message alone, on a communicator of two ranks. Two ranks that both send first would wait for each other.
    """
    return group.inner if isinstance(group, ReopenableGroup) else group


def _forwarded(name: str) -> Callable[..., Any] | property:
    if isinstance(getattr(dist.ProcessGroup, name), property):
        return property(lambda self: getattr(self.inner, name))

    def method(self: ReopenableGroup, *arguments: Any, **named: Any) -> Any:
        return getattr(self.inner, name)(*arguments, **named)

    return method


for _name in {*dir(dist.ProcessGroup)} - OWN:
    if not _name.startswith("__"):
        setattr(ReopenableGroup, _name, _forwarded(_name))


_numbers = itertools.count()
"""Numbers of sets of groups, equal on all ranks. They distinguish the sets in the store."""


class GroupTable(dict[RankList, dist.ProcessGroup]):
    """Rank list -> process group, for the lists with this rank."""

    def __missing__(self, ranks: RankList) -> dist.ProcessGroup:
        known = "; ".join(format_ranks(known) for known in self)
        raise KeyError(
            f"rank {dist.get_rank()} has no process group over ranks {format_ranks(ranks)}; it has: {known or 'none'}"
        )


class ProcessGroups:
    """This rank's groups: `groups[ranks]` on the compute backend, `groups.cpu[ranks]` over the same ranks on gloo.

    If the backend is gloo, both are the same group. A group's ranks are numbered in ascending world order.
    """

    def __init__(
        self,
        lists: Iterable[RankList],
        *,
        backend: str,
        timeout_s: float,
        reopenable: Collection[RankList] = (),
    ) -> None:
        """Creates the groups. Collective over: all ranks, with equal `lists` in equal order.

        Communicators of the `reopenable` lists on the compute backend can be released and created again later.

        All ranks make every call, since torch names a group by counting calls. The call returns at once for ranks
        outside the group. With `use_local_synchronization` torch would name a group by the number of groups of a rank.
        Members of overlapping lists differ in this number and would wait for each other forever.
        """
        self._number = next(_numbers)
        self._reopenable: dict[RankList, ReopenableGroup] = {}
        self.compute = GroupTable()
        self.cpu = self.compute if backend == "gloo" else GroupTable()
        timeout = timedelta(seconds=timeout_s)
        for ranks in lists:
            _check(ranks)
            if ranks in reopenable:
                self._make_reopenable(ranks, backend, timeout)
            else:
                self._make(self.compute, ranks, backend, timeout)
            if self.cpu is not self.compute:
                self._make(self.cpu, ranks, "gloo", timeout)

    def __getitem__(self, ranks: RankList) -> dist.ProcessGroup:
        return self.compute[ranks]

    @property
    def reopenable(self) -> tuple[RankList, ...]:
        """The lists of this rank's groups with releasable communicators."""
        return tuple(self._reopenable)

    def open(self, generations: Mapping[RankList, int]) -> None:
        """Opens these generations of reopenable groups. Collective over: all members of each list, at one task.

        Groups open in the global order. In any other order, members of overlapping lists could wait for each other
        forever.
        """
        self.close(
            ranks for ranks, generation in generations.items() if self._reopenable[ranks].generation != generation
        )
        for ranks in sorted(generations, key=global_order):
            self._reopenable[ranks].open(generations[ranks])

    def close(self, lists: Iterable[RankList]) -> None:
        """Releases the communicators of reopenable groups, like ReopenableGroup.close."""
        for ranks in lists:
            self._reopenable[ranks].close()

    def _make_reopenable(self, ranks: RankList, backend: str, timeout: timedelta) -> None:
        if dist.get_rank() in ranks:
            name = f"ranks {format_ranks(ranks)} of set {self._number} on {backend}"
            group = ReopenableGroup(name, ranks, backend=backend, timeout=timeout)
            self.compute[ranks] = self._reopenable[ranks] = group

    @staticmethod
    def _make(groups: GroupTable, ranks: RankList, backend: str, timeout: timedelta) -> None:
        group = dist.new_group(list(ranks), timeout=timeout, backend=backend)
        if dist.get_rank() in ranks:
            groups[ranks] = cast(dist.ProcessGroup, group)


def _check(ranks: RankList) -> None:
    if not ranks or list(ranks) != sorted(set(ranks)):
        raise ValueError(f"a process group needs ascending distinct ranks, got {ranks}")
