"""Process groups from explicit rank lists. The only module that makes any.

Every group of the job is made here, at start-up, in one global order, and every later generation of a group whose
communicator was released. Equal rank lists share one communicator, whichever role or purpose they come from.
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

# A process group whose communicator can be destroyed and made again while everybody keeps the same object.

LOOK_S, LONGEST_LOOK_S = 0.005, 2.0
"""Between two looks whether all members have released a communicator: each waits twice as long as the one before."""
OWN = frozenset({"rank", "size", "shutdown", "abort", "boxed", "unbox", "BackendType", "send", "recv"})


class ReopenableGroup(dist.ProcessGroup):
    """Passes every call on to the process group that is open at present.

    Models, optimizers and schedules hold process groups in many places, so these cannot be replaced. Communicators
    have generations: members that open the same one meet, in a part of the store of its own, whatever they made before.
    Who sends and receives by `batch_isend_irecv` gives it the `plain_group`.
    """

    def __init__(self, name: str, ranks: tuple[int, ...], *, backend: str, timeout: timedelta) -> None:
        """Generation 0. `name` is this group's alone in the job. Collective over: `ranks`, this rank among them."""
        super().__init__(ranks.index(dist.get_rank()), len(ranks))  # type: ignore[call-arg]  # as its stub leaves out
        self._name, self._ranks, self._backend, self._timeout = name, ranks, backend, timeout
        self._inner: dist.ProcessGroup | None = None
        self._ending: _Ending | None = None
        self.generation: int | None = None
        self.open(0)
        self._register()

    def open(self, generation: int) -> None:
        """Have the communicator of this generation, closing an older one. Collective over: the ranks, if it is new.

        NCCL's is made in the first call, which all ranks must make.
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
            # A member has its own connections before others have theirs, which would break off were it to close now.
            self._inner.barrier().wait()

    def close(self) -> None:
        """Release the communicator, if one is open. All its work must be done on the device, and what is recorded of it
        forgotten, since NCCL waits until no CUDA graph holds it.

        Waits for nobody, since members close at places of their own in the order of tasks. On NCCL, where destroying
        may wait for the other members, it is destroyed, and its memory free, once all have released it.
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
        """Torch ends every group that it knows, and the communicator is one of its own."""
        if self._ending is not None:
            self._ending.leave_to_torch(self._timeout)

    def abort(self) -> None:
        self.shutdown()

    def send(self, tensors: list[Tensor], peer: int, tag: int) -> dist.Work:
        """As of any group; RuntimeError where messages have to be issued together."""
        return self._for_single_messages(tensors[0]).send(tensors, peer, tag)

    def recv(self, tensors: list[Tensor], peer: int, tag: int) -> dist.Work:
        """As of any group; RuntimeError where messages have to be issued together."""
        return self._for_single_messages(tensors[0]).recv(tensors, peer, tag)

    @property
    def inner(self) -> dist.ProcessGroup:
        if self._inner is None:
            raise RuntimeError(
                f"the communicator over ranks {self._ranks} was released, and is used by a task that was not expected "
                "to: its role is not among those that the group was made for"
            )
        return self._inner

    def _for_single_messages(self, tensor: Tensor) -> dist.ProcessGroup:
        if self.inner._get_backend(tensor.device).supports_coalescing:
            raise RuntimeError(
                f"a message over ranks {self._ranks} is issued on its own, where ranks that send to each other would "
                "wait forever: torch takes messages together only on a plain ProcessGroup. Give batch_isend_irecv "
                "plain_group(group) of rltrain/runtime/process_groups.py"
            )
        return self.inner

    def _register(self) -> None:
        """torch looks up what it knows of a group by the object that it is given."""
        world, inner = c10d._world, self.inner
        world.pg_map[self] = world.pg_map[inner]
        world.pg_group_ranks[self] = world.pg_group_ranks[inner]
        world.pg_backend_config[self] = world.pg_backend_config[inner]
        world.pg_names[self] = c10d.GroupName(self._name)


class _Ending(JobThread):
    """Destroys a communicator of NCCL once every member has released it.

    A rank that destroys one may wait for the others of its node to do so (github.com/NVIDIA/nccl/issues/863), which it
    can only where nobody has anything left to do before.
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
        c10d._abort_process_group(self._communicator)  # an orderly end would wait for work that others may have left

    def finish(self, timeout: timedelta) -> None:
        """RuntimeError where members do not come to release it. Collective over: the members."""
        self.join(timeout.total_seconds())
        if self.is_alive():
            missing = [rank for rank in self._ranks if not self._store.check([str(rank)])]
            raise RuntimeError(f"the communicator over ranks {self._ranks} is still held by ranks {missing}")

    def leave_to_torch(self, timeout: timedelta) -> None:
        """At the end of the job, when members may never release it."""
        self._left_to_torch.set()
        self.join(timeout.total_seconds())


def plain_group(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """The same group for messages that are issued together, until it is released.

    `batch_isend_irecv` asks for exactly the type ProcessGroup before it makes one call of NCCL of them. Of a subclass
    each message goes alone, on a communicator of two ranks that is made for it, and two ranks that both send first
    wait for each other.
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
"""All ranks make sets of groups in one order, so these tell them apart in the store."""


class GroupTable(dict[RankList, dist.ProcessGroup]):
    """Rank list -> process group, for the lists that hold this rank."""

    def __missing__(self, ranks: RankList) -> dist.ProcessGroup:
        known = "; ".join(format_ranks(known) for known in self)
        raise KeyError(
            f"rank {dist.get_rank()} has no process group over ranks {format_ranks(ranks)}; it has: {known or 'none'}"
        )


class ProcessGroups:
    """This rank's groups: `groups[ranks]` on the compute backend, `groups.cpu[ranks]` over the same ranks on gloo.

    Where the backend is gloo both are the same group. A group's ranks are numbered in ascending world order.
    """

    def __init__(
        self,
        lists: Iterable[RankList],
        *,
        backend: str,
        timeout_s: float,
        reopenable: Collection[RankList] = (),
    ) -> None:
        """Make the groups. Collective over: all ranks, which give equal `lists` in equal order.

        The communicators of `reopenable` lists on the compute backend can be released and made again later.

        All ranks make every call, since torch names a group by counting them; for a rank that is no member the call
        returns at once. With `use_local_synchronization` torch would name a group by how many groups a rank has
        already, which differs between the members of overlapping lists: they would wait for each other forever.
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
        """Those of this rank's groups whose communicators can be released."""
        return tuple(self._reopenable)

    def open(self, generations: Mapping[RankList, int]) -> None:
        """Have these generations of reopenable groups. Collective over: all members of each list, at one task.

        In the order in which all ranks make groups: in any other, members of overlapping lists could wait for each
        other forever.
        """
        self.close(
            ranks for ranks, generation in generations.items() if self._reopenable[ranks].generation != generation
        )
        for ranks in sorted(generations, key=global_order):
            self._reopenable[ranks].open(generations[ranks])

    def close(self, lists: Iterable[RankList]) -> None:
        """Release the communicators of reopenable groups, as ReopenableGroup.close does."""
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
