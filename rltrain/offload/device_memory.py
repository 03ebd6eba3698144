"""Copies between device and host on a separate stream. Also moves models to the device of their role."""

import resource
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

# Memory of a device: asynchronous copies, and the state of its allocator.

SPARE_BYTES = 2**30
"""Bytes that a prefetch leaves free, as a margin for errors in the estimated need of the present task."""


MAPPED_BYTES: Counter[torch.device] = Counter()
"""Bytes of each device that are in use beside torch's allocator, as memory at reserved addresses."""


class DeviceMemory:
    """Memory of a CPU. Copies finish before they return, and nothing is prefetched.

    It is also the base of CudaMemory, which implements the methods with streams and an allocator.
    """

    pins = False
    """Whether the host memory of copies is pinned."""

    def __init__(self, device: torch.device) -> None:
        if device.type == "cuda" and not isinstance(self, CudaMemory):
            raise ValueError("CUDA needs asynchronous copies: create the memory of a device with device_memory(device)")
        self.device = device

    def copies(self) -> AbstractContextManager[None]:
        """Returns a context for asynchronous copies. They see all work requested before and overlap later work of the
        device."""
        return nullcontext()

    def mark(self) -> Callable[[], None]:
        """Returns a function that makes later work of the device wait for the copies so far."""
        return lambda: None

    def finish_copies(self) -> None:
        """Waits for all copies so far. Their memory can then be freed or used."""

    def spare_bytes(self, task: str) -> int:
        """Returns the bytes available for a prefetch, leaving enough for the need of earlier tasks named `task`."""
        return 0

    def begin_task(self, task: str) -> None:
        """Starts to measure the need of a task. All allocations until the next call count for the task's name."""

    def release_residue(self) -> None:
        """Returns the allocator's cached memory to the device."""

    def residue_bytes(self, resident_bytes: int) -> int:
        """Returns the bytes held on the device beyond `resident_bytes`, the bytes of known tensors."""
        return 0

    def take_peak_bytes(self) -> int:
        """Returns the peak of allocated bytes since the last call. On a CPU it is the peak of the whole process."""
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

    def reserved_bytes(self) -> int:
        """Returns the bytes held by the allocator. On a CPU it is the resident set of the process."""
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


class CudaMemory(DeviceMemory):
    """Memory of a GPU, with copies on a side stream and torch's caching allocator."""

    pins = True

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call, unused-ignore]
        self._task: str | None = None
        self._before_task = self._mapped_bytes = 0
        self._needs: dict[str, int] = {}
        self._peak = 0

    def copies(self) -> AbstractContextManager[None]:
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        return torch.cuda.stream(self._stream)  # type: ignore[no-any-return, unused-ignore]

    def mark(self) -> Callable[[], None]:
        event = torch.cuda.Event()  # type: ignore[no-untyped-call, unused-ignore]
        event.record(self._stream)
        return lambda: torch.cuda.current_stream(self.device).wait_event(event)

    def finish_copies(self) -> None:
        self._stream.synchronize()

    def spare_bytes(self, task: str) -> int:
        self._note_need()
        if task not in self._needs:
            return 0  # the first such task, with an unknown need
        free, _ = torch.cuda.mem_get_info(self.device)
        cached = torch.cuda.memory_reserved(self.device) - torch.cuda.memory_allocated(self.device)
        return max(free + cached - self._needs[task] - SPARE_BYTES, 0)

    def begin_task(self, task: str) -> None:
        self._note_need()
        torch.cuda.reset_peak_memory_stats(self.device)
        self._task, self._before_task = task, torch.cuda.memory_allocated(self.device)
        self._mapped_bytes = MAPPED_BYTES[self.device]

    def _note_need(self) -> None:
        most = torch.cuda.max_memory_allocated(self.device)
        self._peak = max(self._peak, most + self._mapped_bytes)
        if self._task is not None:
            need = most - self._before_task
            self._needs[self._task] = max(need, self._needs.get(self._task, 0))
            self._task = None

    def release_residue(self) -> None:
        torch.cuda.empty_cache()

    def residue_bytes(self, resident_bytes: int) -> int:
        return max(torch.cuda.memory_reserved(self.device) - resident_bytes, 0)

    def take_peak_bytes(self) -> int:
        peak = max(self._peak, torch.cuda.max_memory_allocated(self.device) + self._mapped_bytes)
        self._peak = 0
        return peak

    def reserved_bytes(self) -> int:
        return torch.cuda.memory_reserved(self.device) + MAPPED_BYTES[self.device]


def device_memory(device: torch.device) -> DeviceMemory:
    return CudaMemory(device) if device.type == "cuda" else DeviceMemory(device)


def copy_bytes(pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
    """Copies every (destination, source). Does not wait for copies between pinned memory and a device."""
    for destination, source in pairs:
        destination.copy_(source, non_blocking=True)


# Placement of a role's model on its device.
#
# megatron-core makes the weights of routers and of gates for shared experts on the CPU. transformers does so with the
# frequencies of rotary embeddings. Code that builds models moves them once, before anything refers to their memory.

REGISTERED = ("_parameters", "_buffers", "_modules")
"""Attributes of torch modules with registered tensors and submodules."""
OWN_PACKAGES = ("rltrain", "megatron")
"""Packages whose objects are searched for tensors. Modules of other packages are searched only in registered tensors
and plain attributes."""


def move_to_device(module: torch.nn.Module, device: torch.device) -> None:
    """Moves parameters, buffers and tensors in plain attributes of modules. Parameters stay the same objects.

    Parameters on torch's meta device stay there. Call this before data parallelism or an optimizer takes the
    parameters.
    """

    def moved(tensor: Tensor) -> Tensor:
        return tensor if tensor.is_meta else tensor.to(device)

    module._apply(moved)
    for part in module.modules():
        for name, value in vars(part).items():
            if isinstance(value, Tensor):
                setattr(part, name, moved(value))


def check_device(
    holder: object, device: torch.device, *, parameters: torch.device | None = None, on_host: Collection[str] = ()
) -> None:
    """Raises RuntimeError if a tensor reachable from `holder` is not on `device`, the device of its role.

    `parameters` is the device of the model's parameters, if it differs. Attributes named in `on_host` may be anywhere.
    """
    misplaced = [
        (name, tensor)
        for name, tensor in named_tensors(holder)
        if not is_on(tensor, parameters if parameters and isinstance(tensor, torch.nn.Parameter) else device)
        and name.rpartition(".")[2] not in on_host
    ]
    if misplaced:
        name, tensor = misplaced[0]
        kind = "parameter" if isinstance(tensor, torch.nn.Parameter) else "tensor"
        others = f" {len(misplaced) - 1} more tensors are misplaced." if len(misplaced) > 1 else ""
        raise RuntimeError(
            f"{kind} {name} of a model is on {tensor.device}, but the device of its role is {device}.{others} "
            "This is a bug of rltrain: please report it with the model's config.json"
        )


def is_on(tensor: Tensor, device: torch.device) -> bool:
    """Returns whether `tensor` is on `device`. A device without an index matches all of its type."""
    return tensor.device.type == device.type and device.index in (None, tensor.device.index)


def named_tensors(holder: object) -> Iterator[tuple[str, Tensor]]:
    """Yields every tensor reachable from `holder` once, with its path of attributes.

    Searches modules, containers and objects of OWN_PACKAGES breadth-first, so paths are the shortest.
    """
    waiting, seen = deque([("", holder)]), {id(holder)}
    while waiting:
        name, value = waiting.popleft()
        if isinstance(value, Tensor):
            yield name, value
            continue
        for key, entry in _entries(value):
            if id(entry) not in seen:
                seen.add(id(entry))
                own = "" if key in REGISTERED else key
                waiting.append((f"{name}.{own}" if name and own else name or own, entry))


def _entries(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        yield from ((str(key), entry) for key, entry in value.items())
    elif isinstance(value, list | tuple | set | deque):
        yield from ((str(number), entry) for number, entry in enumerate(value))
    elif type(value).__module__.partition(".")[0] in OWN_PACKAGES:
        yield from getattr(value, "__dict__", {}).items()
    elif isinstance(value, torch.nn.Module):
        yield from ((key, entry) for key, entry in vars(value).items() if key in REGISTERED or torch.is_tensor(entry))
