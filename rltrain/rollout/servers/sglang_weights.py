"""The last step of a weight sync: from this rank's staging memory into the server's parameters."""

import base64
import ctypes
import json
import os
import queue
import secrets
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from rltrain.errors import EngineError, EngineLost
from rltrain.models import Architecture
from rltrain.models.registry import TOWERS
from rltrain.models.table import TOWER_PREFIX, ElementType
from rltrain.offload.host_memory import HostTensors, NodeCopy
from rltrain.reshard.checksums import checksum_of
from rltrain.reshard.copy_table import DTYPES
from rltrain.reshard.layout import Layout, parameter_types
from rltrain.runtime.group_messages import broadcast_json, gather_bytes
from rltrain.runtime.machine import JobThread
from rltrain.runtime.shared_memory import SharedMemory

# Staging memory: weights between the reshard and the server. The server's process maps it.
#
# The memory comes from the operating system or the CUDA driver, not from torch's allocator. So its handles do not
# depend on torch's version or allocator settings. It is freed with the last process that has it open, even after a
# crash.

ALIGNMENT_BYTES = 256
NUM_SLOTS = 2
"""One slot is filled while the server reads the other."""

IPC_HANDLE_BYTES = 64
DEVICE_PAGE_BYTES = 2**21
"""The driver shares whole pages of this size. Each segment has its own pages, so nothing else is shared."""


class HostSegment:
    """Shared host memory. Another process of this node can map it by `handle`. `bytes` is all of it, uint8."""

    def __init__(self, num_bytes: int) -> None:
        self._memory = SharedMemory.create()
        self._memory.resize(num_bytes)
        self.bytes = self._memory.map()
        self.handle = {"kind": "file", "id": secrets.token_hex(16), "path": self._memory.path, "bytes": num_bytes}

    def close(self) -> None:
        self.bytes = torch.empty(0, dtype=torch.uint8)
        self._memory.close()


class DeviceSegment:
    """Shared device memory of the CUDA driver, exported by an inter-process handle. See `HostSegment`."""

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        num_bytes = -(-num_bytes // DEVICE_PAGE_BYTES) * DEVICE_PAGE_BYTES
        self._device = device
        self._pointer = ctypes.c_uint64()
        with torch.cuda.device(device):
            torch.cuda.synchronize()  # makes the device's context this thread's
            driver("cuMemAlloc_v2", ctypes.byref(self._pointer), ctypes.c_size_t(num_bytes))
            exported = (ctypes.c_char * IPC_HANDLE_BYTES)()
            driver("cuIpcGetMemHandle", ctypes.byref(exported), self._pointer)
            self.bytes = torch.as_tensor(_CudaArray(int(self._pointer.value), num_bytes), device=device)
        self.handle = {
            "kind": "cuda",
            "id": secrets.token_hex(16),
            "handle": bytes(exported).hex(),
            "device": str(torch.cuda.get_device_properties(device).uuid),
            "bytes": num_bytes,
        }

    def close(self) -> None:
        self.bytes = torch.empty(0, dtype=torch.uint8)
        with torch.cuda.device(self._device):
            torch.cuda.synchronize()
            driver("cuMemFree_v2", self._pointer)


class _CudaArray:
    def __init__(self, pointer: int, num_bytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (num_bytes,),
            "typestr": "|u1",
            "data": (pointer, False),
            "strides": None,
            "version": 3,
        }


def driver(function: str, *arguments: Any) -> None:
    """Calls a function of the CUDA driver. Raises EngineError if it fails."""
    status = getattr(ctypes.CDLL("libcuda.so.1"), function)(*arguments)
    if status:
        raise EngineError(
            f"{function} of the CUDA driver returned error {status}, not 0, while staging memory for an SGLang engine "
            "was set up. Lower rollout.sglang.staging_mb if the device is out of memory; the container must also "
            "allow CUDA's inter-process memory"
        )


@dataclass(frozen=True)
class Field:
    """A parameter in a slot, at byte `offset`. `padded` means that no piece covers some of its elements."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    offset: int
    padded: bool

    @property
    def num_bytes(self) -> int:
        return int(np.prod(self.shape)) * self.dtype.itemsize


def fields_of(layout: Layout, rank: int) -> tuple[Field, ...]:
    """Returns the parameters of `rank` one after another, each at a multiple of ALIGNMENT_BYTES."""
    share = layout.parts[layout.ranks.index(rank)]
    on = layout.part(share)
    covered = np.zeros(len(on.parameters), dtype=np.int64)
    np.add.at(covered, on.pieces["parameter"], on.pieces["rows"] * on.pieces["cols"])
    fields, offset = [], 0
    types = parameter_types(layout, share).tolist()
    for (name, shape), kind, held in zip(on.parameters, types, covered.tolist(), strict=True):
        field = Field(name, shape, DTYPES[ElementType(kind)], offset, padded=held < int(np.prod(shape)))
        fields.append(field)
        offset += -(-field.num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
    return tuple(fields)


class Staging:
    """Two slots of staging memory. Part i of the weights passes through slot i % 2. `parts` are layouts of some
    parameters each."""

    def __init__(self, parts: Sequence[Layout], rank: int, device: torch.device) -> None:
        self.fields = tuple(fields_of(part, rank) for part in parts)
        num_bytes = max([1, *(self.num_bytes(part) for part in range(len(parts)))])
        self._slots: list[HostSegment | DeviceSegment] = [
            DeviceSegment(num_bytes, device) if device.type == "cuda" else HostSegment(num_bytes)
            for _ in range(min(NUM_SLOTS, len(parts)))
        ]

    def num_bytes(self, part: int) -> int:
        """Returns the bytes of a part, including alignment between its parameters."""
        fields = self.fields[part]
        return fields[-1].offset + fields[-1].num_bytes if fields else 0

    def slot(self, part: int) -> int:
        """Returns the number of the part's slot."""
        return part % len(self._slots)

    def bytes(self, part: int) -> Tensor:
        """Returns the used bytes of the part's slot, uint8 [num_bytes(part)]."""
        return self._slots[self.slot(part)].bytes[: self.num_bytes(part)]

    def views(self, part: int) -> Mapping[str, Tensor]:
        """Returns the part's parameters in its slot, by name."""
        memory = self.bytes(part)
        return {
            field.name: memory[field.offset : field.offset + field.num_bytes].view(field.dtype).view(field.shape)
            for field in self.fields[part]
        }

    def clear_padding(self, part: int) -> None:
        """Zeroes the parameters of the part with padding. The slot has other weights in these places."""
        memory = self.bytes(part)
        for field in self.fields[part]:
            if field.padded:
                memory[field.offset : field.offset + field.num_bytes].zero_()

    def handle(self, part: int) -> dict[str, Any]:
        """Returns the JSON description by which the server's process maps the part's slot."""
        return self._slots[self.slot(part)].handle

    def close(self) -> None:
        for slot in self._slots:
            slot.close()
        self._slots = []


# Calls to the server in the background.

Call = Callable[[str, dict[str, Any] | None], dict[str, Any]]
"""A function (path, body) -> answer: a POST, or a GET if body is None. It blocks, and raises EngineError, EngineLost or
OSError without an answer or for a failure. It is called from another thread, one call at a time."""


class CallQueue:
    """Makes calls one after another in its own thread. After a failed call all later calls fail with the same error."""

    def __init__(self, call: Call) -> None:
        self._call = call
        self._queue: queue.SimpleQueue[tuple[str, dict[str, Any] | None, Future[dict[str, Any]]] | None]
        self._queue = queue.SimpleQueue()
        self._last: Future[dict[str, Any]] | None = None
        self._failure: Exception | None = None
        JobThread(target=self._work, name="sglang-delivery", daemon=True).start()

    def send(self, path: str, body: dict[str, Any] | None) -> Future[dict[str, Any]]:
        """Queues a call and returns a future for its answer."""
        self._last = Future()
        self._queue.put((path, body, self._last))
        return self._last

    def reset(self) -> None:
        """Waits for running calls and forgets an earlier failure."""
        if self._last is not None:
            self._last.exception()
        self._failure = None

    def close(self) -> None:
        self._queue.put(None)

    def _work(self) -> None:
        while (order := self._queue.get()) is not None:
            path, body, answer = order
            try:
                if self._failure is not None:
                    raise self._failure
                answer.set_result(self._checked(path, body))
            except Exception as error:
                self._failure = error
                answer.set_exception(error)

    def _checked(self, path: str, body: dict[str, Any] | None) -> dict[str, Any]:
        answer = self._call(path, body)
        if answer.get("success") is False:
            raise EngineError(f"{path} answered: {answer.get('message')}")
        return answer


# Payloads for SGLang's /update_weights_from_tensor: a pickle of a rank's named tensors, here with a text and no data.
#
# SGLang unpickles it with an allow-list that includes torch.Tensor. The bytes are written directly. So nothing depends
# on the pickling of either side's torch, and rltrain pickles nothing.

_BEFORE = b"\x80\x03](X"  # protocol 3; a list; a mark; the head of a text
_AFTER = b"ctorch\nTensor\n)R\x86e."  # torch.Tensor(); both as a pair, appended to the list


def payload(text: str) -> str:
    """Returns [(text, an empty tensor)] in the form of SGLang's HTTP server."""
    data = text.encode()
    return base64.b64encode(_BEFORE + len(data).to_bytes(4, "little") + data + _AFTER).decode()


# A host copy of the delivered weights, for a restarted server.


class HostCopy:
    """A host copy of all parts of one rank, in pinned memory with CUDA.

    Ranks of a node with the same share of several engines have one copy, `shared`. The first of them writes it. None
    makes a copy for this rank alone. Parts of the next update reach a rank only after all ranks have joined the update,
    so no rank reads the overwritten copy.
    """

    def __init__(self, staging: Staging, num_parts: int, device: torch.device, shared: NodeCopy | None = None) -> None:
        self._staging, self._shared = staging, shared
        sizes = (staging.num_bytes(part) for part in range(num_parts))
        like = {str(part): torch.empty(size, dtype=torch.uint8, device="meta") for part, size in enumerate(sizes)}
        self._host = shared.tensors(like, lambda host: None) if shared else HostTensors(like, device)
        self._num_updates = 0
        """Number of completed updates, equal on all ranks that share the copy."""

    @property
    def num_bytes(self) -> int:
        """Bytes of the copy in this rank's own memory. 0 if another rank has it."""
        return sum(tensor.nbytes for tensor in self._host.tensors.values()) if self._host.is_own else 0

    def store(self, part: int) -> None:
        """Copies a part of an update, if this rank makes the copy. Must be called after each part."""
        if self._host.is_own:
            staged = self._staging.bytes(part)
            self._host.tensors[str(part)].copy_(staged, non_blocking=True)
            if staged.is_cuda:
                torch.cuda.synchronize(staged.device)

    def complete(self) -> None:
        """Marks the update as complete. Must be called after the last part."""
        self._num_updates += 1
        if self._shared and self._shared.is_first:
            self._shared.renewed(self._num_updates)

    def await_update(self) -> None:
        """Waits until the rank with the copy has all of the last complete update. Must be called before `restore`."""
        if self._shared and not self._host.is_own:
            self._shared.await_renewed(self._num_updates)

    def restore(self, part: int) -> None:
        """Copies a part into its slot of staging memory."""
        self._staging.bytes(part).copy_(self._host.tensors[str(part)], non_blocking=True)


# Delivery: from this rank's staging memory into the parameters of the server's process.


@dataclass(frozen=True)
class NamedWeights:
    """Weights that SGLang's own loader puts in place, by the names of the checkpoint.

    `absent` are beginnings of names of parameters that only the server has, such as an unused vision tower.
    """

    absent: tuple[str, ...] = ()

    @classmethod
    def of(cls, architecture: Architecture) -> "NamedWeights":
        has_unused = architecture.family in TOWERS and architecture.vision is None
        return cls((TOWER_PREFIX,) if has_unused else ())


LOADER = "rltrain_weight_loader.load"
"""Value of --custom-weight-loader: in_sglang/rltrain_weight_loader.py on the server's PYTHONPATH."""

TARGET = {"selector": "target"}
"""Selects the model itself. rltrain does not sync draft models."""


@dataclass
class _Flight:
    """A message under way to the server's ranks. Each rank replies into its `file`. Only the engine's first rank has
    `answer`."""

    id: str
    file: int
    answer: Future[dict[str, Any]] | None


class Delivery:
    """This rank's share of an engine's weights on their way into the server.

    - `parts` divide the engine's layout, as rollout.layout.engine_parts does. They pass one after another through two
      slots of staging memory, so the server copies one part while the next arrives.
    - `group` holds the engine's ranks (gloo) in the order of the server's tensor-parallel ranks. None: this rank alone.
    - `call` reaches the server. Only the engine's first rank has it.
    - `keep` keeps a copy of the delivered weights in host memory.
    - `shared` names the ranks of the node that share this copy, because their engines have the same updates.
    - `role` is the config section of the engine, for messages.
    - `names` says that the parts have tensors of the checkpoint, for SGLang's own loader. Each tensor is on one rank.

    A sync is `begin`, then `tensors` and `arrived` for every part in order, then `finish`. In a sync of changes the
    server first writes its current parameters into the slots, while other parts are under way. Only the server has
    them. With `names` they come from the kept copy. If a server is lost during a sync, the remaining parts are still
    accepted and kept. `finish` then raises EngineLost on all ranks.

    Methods are collective over: the engine's ranks.
    """

    def __init__(
        self,
        parts: Sequence[Layout],
        rank: int,
        *,
        device: torch.device,
        keep: bool,
        group: dist.ProcessGroup | None,
        call: Call | None,
        shared: NodeCopy | None = None,
        role: str = "rollout",
        names: NamedWeights | None = None,
    ) -> None:
        self.version: int | None = None
        """Version of the server's weights, as the server reports it. None while they are incomplete."""
        self.num_parts = len(parts)
        self._parts, self._rank = parts, rank
        self._device, self._group, self._role, self._names = device, group, role, names
        self._staging = Staging(parts, rank, device)
        self._kept = HostCopy(self._staging, self.num_parts, device, shared) if keep else None
        self._arrived_version: int | None = None
        self._courier = CallQueue(call) if call else None
        self._replies = [_reply_file() for _ in range(2 * NUM_SLOTS)]
        """Reply files of loads from each slot, then of reads into each slot."""
        self._flights: dict[int, _Flight] = {}
        """Loads under way, by slot."""
        self._reads: dict[int, _Flight] = {}
        """Reads under way, by part."""
        self._lost = self._refused = False
        """Equal on all ranks. Nothing more is sent to a server after it is lost or has refused a message."""
        self._failure = ""

    @property
    def num_bytes(self) -> int:
        """Bytes of this rank's share of the weights."""
        return sum(self._staging.num_bytes(part) for part in range(self.num_parts))

    @property
    def kept_bytes(self) -> int:
        """Bytes of this rank's own host copy."""
        return self._kept.num_bytes if self._kept else 0

    def check_layout(self) -> None:
        """Checks that the server's parameters are those of `parts`. Must be called after every start of the server.

        Raises EngineError with the first difference, or if the server stores weights in another form than it takes
        them. Raises EngineLost if the server does not answer.
        """
        self.begin()
        reply = self._landed(self._send({"op": "describe", "names": self._names is not None}))
        refusal = self._first(self._refusal(reply) if reply else "")
        if self._refused:
            raise EngineError(f"the SGLang server takes no weights: {self._failure}")
        self._raise_if_failed()
        if refusal:
            raise EngineError(
                f"the SGLang server does not store its weights in the form that rltrain writes: {refusal}. Change "
                f"{self._role}.sglang.args, or use {self._role}.engine=embedded"
            )
        self._request("/end_weight_update", {})
        self._raise_if_failed()

    def begin(self) -> None:
        """Opens an update. The server's weights are incomplete until `finish` returns."""
        self.version = None
        self._flights, self._reads, self._lost, self._refused, self._failure = {}, {}, False, False, ""
        if self._courier:
            self._courier.reset()
            self._courier.send("/begin_weight_update", TARGET)

    def tensors(self, part: int, *, is_kept: bool = False) -> Mapping[str, Tensor]:
        """Returns the tensors to write the part's parameters to, by name, with zero padding.

        Waits until the server has read the slot's earlier contents. With `is_kept` the tensors hold the parameters of
        the last sync.
        """
        if is_kept:
            self._fill(part)
        else:
            self._end_reads()
            self._free_slot(part)
            self._staging.clear_padding(part)
        self._synchronize()
        return self._staging.views(part)

    def arrived(self, part: int, verify: bool = False) -> None:
        """Marks `tensors(part)` as written. The server copies them in the background.

        With `verify` the server compares checksums of its written parameters with those of the staged ones.
        """
        self._synchronize()
        if self._kept:
            self._kept.store(part)
        self._load(part, verify)

    def finish(self, version: int) -> None:
        """Completes the update after its last part. Returns once the server reports that it serves `version`.

        Raises EngineLost if a step of the sync failed on any rank. Kept parts can then be delivered to a restarted
        server with `redeliver`.
        """
        self._arrived_version = version
        if self._kept:
            self._kept.complete()
        self._finish(version)

    def _finish(self, version: int) -> None:
        for slot in sorted(self._flights):
            self._landed(self._flights.pop(slot))
        self._settle()
        absent = self._names.absent if self._names else None
        self._landed(self._send({"op": "finish", "absent": absent}, weight_version=str(version)))
        self._settle()
        self._request("/end_weight_update", {})
        served = self._request("/model_info", None).get("weight_version")
        if not self._failure and served != str(version):
            self._failure = f"it reports weights of version {served}; expected {version}"
        self._raise_if_failed()
        self.version = version

    def redeliver(self, verify: bool = False) -> None:
        """Delivers the kept weights to a restarted server. `version` stays the same. Does nothing before the first
        update.

        Raises EngineError without a copy, and EngineLost as `finish` does.
        """
        if self._arrived_version is None:
            return
        if self._kept is None:
            raise EngineError(
                "an SGLang server was restarted and needs its weights, but no copy of them was kept; expected "
                f"{self._role}.sglang.keep_weights=true"
            )
        self._kept.await_update()
        self.begin()
        for part in range(self.num_parts):
            self._free_slot(part)
            self._kept.restore(part)
            self._synchronize()
            self._load(part, verify)
        self._finish(self._arrived_version)

    def close(self) -> None:
        """Frees staging memory. The server must be gone, or outside of an update."""
        if self._courier:
            self._courier.close()
        self._staging.close()
        for file in self._replies:
            os.close(file)

    def _refusal(self, reply: Mapping[str, Any]) -> str:
        if self._names is None:
            return _difference(self._expected(), reply, self._device.type)
        return str(reply["refusals"][0]) if reply["refusals"] else ""

    def _load(self, part: int, verify: bool) -> None:
        slot = self._staging.slot(part)
        self._flights[slot] = self._send(self._message("load", part, verify), slot)

    def _fill(self, part: int) -> None:
        """Fills the part's slot with the server's current weights, or with the kept ones if the server is lost. Starts
        the read of the next part."""
        is_readable = self._names is None
        if is_readable:
            self._read(part)
        self._free_slot(part)
        if is_readable:
            self._landed(self._reads.pop(part))
        if (not is_readable or self._lost or self._failure) and self._kept:
            self._kept.await_update()
            self._kept.restore(part)

    def _read(self, part: int) -> None:
        for number in (part, part + 1):
            if number < self.num_parts and number not in self._reads:
                file = NUM_SLOTS + self._staging.slot(number)
                self._reads[number] = self._send(self._message("read", number), file)

    def _end_reads(self) -> None:
        """Waits for reads of an update that was begun again."""
        for flight in () if self._lost else self._reads.values():
            self._wait(flight.answer)
        self._reads.clear()

    def _free_slot(self, part: int) -> None:
        if (flight := self._flights.pop(self._staging.slot(part), None)) is not None:
            self._landed(flight)

    def _message(self, operation: str, part: int, verify: bool = False) -> dict[str, Any]:
        """Returns a message about the part's parameters in its slot. `verify` adds their checksums."""
        views = self._staging.views(part) if verify else {}
        sums = {name: checksum_of(view) for name, view in views.items()}
        message = {"op": operation, "memory": self._staging.handle(part)}
        if self._names is None:
            return {**message, "fields": _told(self._staging.fields[part], sums)}
        shares = [_told(fields, sums if rank == self._rank else {}) for rank, fields in self._shares(part).items()]
        of_sync = {"begins": not part, "marks": not part and verify}
        return {
            **message,
            "op": "load_names",
            "shares": shares,
            "rank": [*self._shares(part)].index(self._rank),
            **of_sync,
        }

    def _shares(self, part: int) -> dict[int, tuple[Field, ...]]:
        """Returns the part's parameters on each rank of the engine, in the order of the server's ranks."""
        ranks = dist.get_process_group_ranks(self._group) if self._group else [self._rank]
        return {rank: fields_of(self._parts[part], rank) for rank in ranks}

    def _send(self, message: dict[str, Any], file: int = 0, **settings: str) -> _Flight:
        """Sends each rank's message to its rank of the server, all in one request. A reply `file` takes one message at
        a time."""
        number, file = secrets.token_hex(8), self._replies[file]
        if self._lost:
            return _Flight(number, file, None)
        message |= {"id": number, "reply": f"/proc/{os.getpid()}/fd/{file}"}
        messages = gather_bytes(json.dumps(message).encode(), self._group)
        body = {
            "serialized_named_tensors": [payload(text.decode()) for text in messages],
            "load_format": LOADER,
            "flush_cache": False,
            **TARGET,
            **settings,
        }
        answer = self._courier.send("/update_weights_from_tensor", body) if self._courier else None
        return _Flight(number, file, answer)

    def _landed(self, flight: _Flight) -> dict[str, Any]:
        """Waits for the message and returns this rank's reply. Empty if the server has not answered, or has failed."""
        if self._lost:
            return {}
        self._wait(flight.answer)
        if self._lost:
            return {}
        reply = _reply(flight)
        if reply.get("error"):
            self._failure = self._failure or str(reply["error"])
            return {}
        return reply

    def _request(self, path: str, body: dict[str, Any] | None) -> dict[str, Any]:
        """Returns the server's answer on all ranks. Empty if the server is lost."""
        if self._lost:
            return {}
        answer = self._courier.send(path, body) if self._courier else None
        return self._wait(answer)

    def _wait(self, answer: Future[dict[str, Any]] | None) -> dict[str, Any]:
        """Waits for the answer on the first rank and returns it on all ranks. Records a failure there if it does not
        come."""
        result: dict[str, Any] = {}
        if answer is not None:
            try:
                result = {"answer": answer.result()}
            except (EngineError, EngineLost, OSError) as error:
                result = {"failure": str(error) or type(error).__name__, "refused": isinstance(error, EngineError)}
        result = broadcast_json(result, self._group)
        if "failure" in result:
            self._lost, self._refused = True, bool(result["refused"])
            self._failure = self._failure or result["failure"]
            return {}
        answered: dict[str, Any] = result["answer"]
        return answered

    def _first(self, text: str) -> str:
        """Returns the first nonempty text among the ranks, on all ranks."""
        return next((other.decode() for other in gather_bytes(text.encode(), self._group) if other), "")

    def _settle(self) -> None:
        """Shares a failure of any rank with all ranks."""
        self._failure = self._first(self._failure)
        self._lost = self._lost or bool(self._failure)

    def _raise_if_failed(self) -> None:
        self._settle()
        if self._failure:
            raise EngineLost(f"delivering weights to the SGLang server failed: {self._failure}")

    def _expected(self) -> dict[str, tuple[str, list[int]]]:
        return {
            field.name: (str(field.dtype).removeprefix("torch."), list(field.shape))
            for fields in self._staging.fields
            for field in fields
        }

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def _told(fields: Sequence[Field], checksums: Mapping[str, int]) -> list[Any]:
    return [
        (field.name, str(field.dtype).removeprefix("torch."), field.shape, field.offset, checksums.get(field.name))
        for field in fields
    ]


def _reply_file() -> int:
    """Returns a file without a name. The server's process opens it through /proc."""
    file = os.memfd_create("rltrain-reply")
    os.fchmod(file, 0o600)
    return file


def _reply(flight: _Flight) -> dict[str, Any]:
    text = os.pread(flight.file, os.fstat(flight.file).st_size, 0)
    reply: dict[str, Any] = json.loads(text) if text else {}
    if reply.pop("id", None) != flight.id:
        return {"error": "a rank of the server answered without running rltrain's weight loader; see its log"}
    return reply


def _difference(expected: Mapping[str, tuple[str, list[int]]], reply: Mapping[str, Any], device: str) -> str:
    """Returns the first difference between `expected` and a rank's described parameters, or ""."""
    live = {name: (dtype, shape, stride, place) for name, dtype, shape, stride, place in reply["parameters"]}
    if reply["refusals"]:
        return str(reply["refusals"][0])
    for name, (dtype, shape) in expected.items():
        if name not in live:
            return f"it has no parameter {name}; expected {shape} of {dtype}"
        wanted = (dtype, shape, _contiguous(shape), device)
        if live[name] != wanted:
            is_dtype, is_shape, is_stride, is_device = live[name]
            return (
                f"parameter {name} is {is_shape} of {is_dtype} with strides {is_stride} on {is_device}; expected "
                f"{shape} of {dtype} with strides {wanted[2]} on {device}"
            )
    for name in live:
        if name not in expected:
            return f"it has a parameter {name}, of {live[name][1]}, that training does not have"
    return ""


def _contiguous(shape: Sequence[int]) -> list[int]:
    strides = [1]
    for size in reversed(shape[1:]):
        strides.insert(0, strides[0] * size)
    return strides[: len(shape)]
