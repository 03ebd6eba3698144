"""Copies between device and host on a stream of their own; puts a model on its role's device."""

import resource
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

# The device's side of moving memory: copies on a stream of their own, and what its allocator holds.

SPARE_BYTES = 2**30
"""What a prefetch leaves free for whatever the estimate of the present task does not know."""


class DeviceMemory:
    """A device whose copies are finished when they return, and from which nothing is fetched ahead: the CPU.

    Base of CudaMemory, whose methods do what these say with streams and an allocator.
    """

    pins = False
    """Whether host memory is pinned that copies go to and come from."""

    def __init__(self, device: torch.device) -> None:
        if device.type == "cuda" and not isinstance(self, CudaMemory):
            raise ValueError(
                "copies on CUDA have to be waited for: make the memory of a device by device_memory(device)"
            )
        self.device = device

    def copies(self) -> AbstractContextManager[None]:
        """Copies made inside run beside the device's other work; they see all that was asked for before."""
        return nullcontext()

    def mark(self) -> Callable[[], None]:
        """What has the device's later work come after the copies so far."""
        return lambda: None

    def finish_copies(self) -> None:
        """Wait until all copies so far are done, so that their memory can be freed or used."""

    def spare_bytes(self, task: str) -> int:
        """Bytes that can be taken now such that a task of this name still gets what others of its name needed."""
        return 0

    def begin_task(self, task: str) -> None:
        """What is allocated from here on, until the next call, is the need of tasks of this name."""

    def release_residue(self) -> None:
        """Give what the allocator caches back to the device."""

    def residue_bytes(self, resident_bytes: int) -> int:
        """Bytes held on the device beyond `resident_bytes`, which lie in tensors that are known."""
        return 0

    def take_peak_bytes(self) -> int:
        """The most that was allocated since the last call; on a CPU by the whole process since its start."""
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

    def reserved_bytes(self) -> int:
        """What the allocator holds of the device; on a CPU the process's resident set."""
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


class CudaMemory(DeviceMemory):
    """Copies on a side stream; the caching allocator of torch."""

    pins = True

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call, unused-ignore]
        self._task: str | None = None
        self._before_task = 0
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
            return 0  # its first time
        free, _ = torch.cuda.mem_get_info(self.device)
        cached = torch.cuda.memory_reserved(self.device) - torch.cuda.memory_allocated(self.device)
        return max(free + cached - self._needs[task] - SPARE_BYTES, 0)

    def begin_task(self, task: str) -> None:
        self._note_need()
        torch.cuda.reset_peak_memory_stats(self.device)
        self._task, self._before_task = task, torch.cuda.memory_allocated(self.device)

    def _note_need(self) -> None:
        most = torch.cuda.max_memory_allocated(self.device)
        self._peak = max(self._peak, most)
        if self._task is not None:
            need = most - self._before_task
            self._needs[self._task] = max(need, self._needs.get(self._task, 0))
            self._task = None

    def release_residue(self) -> None:
        torch.cuda.empty_cache()

    def residue_bytes(self, resident_bytes: int) -> int:
        return max(torch.cuda.memory_reserved(self.device) - resident_bytes, 0)

    def take_peak_bytes(self) -> int:
        peak = max(self._peak, torch.cuda.max_memory_allocated(self.device))
        self._peak = 0
        return peak

    def reserved_bytes(self) -> int:
        return torch.cuda.memory_reserved(self.device)


def device_memory(device: torch.device) -> DeviceMemory:
    return CudaMemory(device) if device.type == "cuda" else DeviceMemory(device)


def copy_bytes(pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
    """Copy every (destination, source), without waiting where one of them is pinned and the other on a device."""
    for destination, source in pairs:
        destination.copy_(source, non_blocking=True)


# A role's model on the role's device, wherever a library made its tensors.
#
# megatron-core makes the weights of routers and of shared experts' gates on the CPU, transformers the frequencies of
# rotary embeddings. Code that builds models moves them once, before anything refers to their memory.

REGISTERED = ("_parameters", "_buffers", "_modules")
"""Attributes of torch's modules whose entries have names of their own."""
OWN_PACKAGES = ("rltrain", "megatron")
"""Objects of their classes are searched for tensors. In other packages' modules only registered tensors and plain
attributes count."""


def move_to_device(module: torch.nn.Module, device: torch.device) -> None:
    """Moves parameters, buffers and tensors that are plain attributes of modules. Parameters stay the same objects.

    Parameters without memory, on torch's meta device, stay without. To be called before data parallelism or an
    optimizer takes the parameters over.
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
    """Raises RuntimeError where a tensor that `holder` reaches is not on `device`, the device of its role.

    `parameters` is where the model's parameters belong, if that is another device. Attributes named in `on_host` may
    be anywhere.
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
        others = f" So are {len(misplaced) - 1} more." if len(misplaced) > 1 else ""
        raise RuntimeError(
            f"{kind} {name} of a model is on {tensor.device}, and the device of its role is {device}.{others} "
            "This is a fault in rltrain: please report it with the model's config.json"
        )


def is_on(tensor: Tensor, device: torch.device) -> bool:
    """Whether `tensor` is on `device`; a device without a number means any of its kind."""
    return tensor.device.type == device.type and device.index in (None, tensor.device.index)


def named_tensors(holder: object) -> Iterator[tuple[str, Tensor]]:
    """Yields every tensor that `holder` reaches once, with the attributes that lead to it.

    Searches modules, containers and objects of OWN_PACKAGES in breadth, so names are the shortest.
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
