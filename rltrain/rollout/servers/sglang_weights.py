"""The last hop of a weight sync: from this rank's staging memory into the server's parameters."""

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
from rltrain.models.table import ElementType
from rltrain.offload.host_memory import HostTensors, NodeCopy
from rltrain.reshard.checksums import checksum_of
from rltrain.reshard.copy_table import DTYPES
from rltrain.reshard.layout import Layout, parameter_types
from rltrain.rollout.servers.sglang_process import AdapterSpec
from rltrain.runtime.group_messages import broadcast_json, gather_bytes
from rltrain.runtime.machine import JobThread
from rltrain.runtime.shared_memory import SharedMemory

# Memory of this rank that the process of an SGLang server can map: weights lie here between reshard and engine.
#
# It comes from the operating system or the CUDA driver and not from torch's allocator, so that what the server is told
# depends on no version of torch and on no setting of its allocator. It is gone with the last process that has it open,
# however that ends.

ALIGNMENT_BYTES = 256
NUM_SLOTS = 2
"""One is filled while the engine reads the other."""

IPC_HANDLE_BYTES = 64
DEVICE_PAGE_BYTES = 2**21
"""The driver shares memory by pages of this size: a segment has its own, so that nothing else is shared with it."""


class HostSegment:
    """Shared memory of the host, which another process of this node can map as `handle` says. `bytes` is all of it,
    uint8."""

    def __init__(self, num_bytes: int) -> None:
        self._memory = SharedMemory.create()
        self._memory.resize(num_bytes)
        self.bytes = self._memory.map()
        self.handle = {"kind": "file", "id": secrets.token_hex(16), "path": self._memory.path, "bytes": num_bytes}

    def close(self) -> None:
        self.bytes = torch.empty(0, dtype=torch.uint8)
        self._memory.close()


class DeviceSegment:
    """As `HostSegment`, memory of the CUDA driver, exported by an inter-process handle."""

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
    """Call a function of the CUDA driver; EngineError where it fails."""
    status = getattr(ctypes.CDLL("libcuda.so.1"), function)(*arguments)
    if status:
        raise EngineError(
            f"{function} of the CUDA driver returned error {status} while staging memory for an SGLang engine was set "
            "up; expected 0. Is the device out of memory (rollout.sglang.staging_mb), or does this container forbid "
            "CUDA's inter-process memory?"
        )


@dataclass(frozen=True)
class Field:
    """A parameter in a slot: from byte `offset`. `padded`: some of its elements are padding, in no piece."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    offset: int
    padded: bool

    @property
    def num_bytes(self) -> int:
        return int(np.prod(self.shape)) * self.dtype.itemsize


def fields_of(layout: Layout, rank: int) -> tuple[Field, ...]:
    """The parameters of `rank`, one after another."""
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
    """Two slots; part i of the weights passes through slot i % 2. `parts` are layouts of some parameters each."""

    def __init__(self, parts: Sequence[Layout], rank: int, device: torch.device) -> None:
        self.fields = tuple(fields_of(part, rank) for part in parts)
        num_bytes = max([1, *(self.num_bytes(part) for part in range(len(parts)))])
        self._slots: list[HostSegment | DeviceSegment] = [
            DeviceSegment(num_bytes, device) if device.type == "cuda" else HostSegment(num_bytes)
            for _ in range(min(NUM_SLOTS, len(parts)))
        ]

    def num_bytes(self, part: int) -> int:
        fields = self.fields[part]
        return fields[-1].offset + fields[-1].num_bytes if fields else 0

    def slot(self, part: int) -> int:
        return part % len(self._slots)

    def bytes(self, part: int) -> Tensor:
        """uint8 [num_bytes(part)]: the slot as far as the part fills it."""
        return self._slots[self.slot(part)].bytes[: self.num_bytes(part)]

    def views(self, part: int) -> Mapping[str, Tensor]:
        """The part's parameters, by name, in its slot."""
        memory = self.bytes(part)
        return {
            field.name: memory[field.offset : field.offset + field.num_bytes].view(field.dtype).view(field.shape)
            for field in self.fields[part]
        }

    def clear_padding(self, part: int) -> None:
        """Zero every parameter of the part that pieces do not fill: the slot has other weights in these places."""
        memory = self.bytes(part)
        for field in self.fields[part]:
            if field.padded:
                memory[field.offset : field.offset + field.num_bytes].zero_()

    def handle(self, part: int) -> dict[str, Any]:
        """How the engine's process maps the part's slot: values that JSON has."""
        return self._slots[self.slot(part)].handle

    def close(self) -> None:
        for slot in self._slots:
            slot.close()
        self._slots = []


# Calls to a server that are made while this rank goes on with something else.

Call = Callable[[str, dict[str, Any] | None], dict[str, Any]]
"""(path, body) -> the server's answer: a POST, without a body a GET. Blocks; raises EngineError, EngineLost or OSError
where there is no answer or one that says it failed. Called from another thread, one call at a time."""


class CallQueue:
    """Makes calls one after another in a thread of its own. After one has failed the next ones fail as it did."""

    def __init__(self, call: Call) -> None:
        self._call = call
        self._queue: queue.SimpleQueue[tuple[str, dict[str, Any] | None, Future[dict[str, Any]]] | None]
        self._queue = queue.SimpleQueue()
        self._last: Future[dict[str, Any]] | None = None
        self._failure: Exception | None = None
        JobThread(target=self._work, name="sglang-delivery", daemon=True).start()

    def send(self, path: str, body: dict[str, Any] | None) -> Future[dict[str, Any]]:
        self._last = Future()
        self._queue.put((path, body, self._last))
        return self._last

    def reset(self) -> None:
        """Forget an earlier failure, after calls under way have ended."""
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


# What SGLang's /update_weights_from_tensor takes as a rank's named tensors: a pickle that holds a text and no data.
#
# SGLang unpickles it with an allow-list that has torch.Tensor on it. The bytes are put together here, so that nothing
# depends on how this or the server's torch pickles a tensor, and rltrain pickles nothing.

NO_TENSORS = base64.b64encode(b"\x80\x03}.").decode()
"""An empty dict, as /load_lora_adapter_from_tensors takes a rank's tensors by name: an adapter of zeros."""

_BEFORE = b"\x80\x03](X"  # protocol 3; a list; a mark; a text whose length and bytes follow
_AFTER = b"ctorch\nTensor\n)R\x86e."  # torch.Tensor(); both as a pair, appended to the list


def payload(text: str) -> str:
    """[(text, an empty tensor)] as SGLang's HTTP server takes it."""
    data = text.encode()
    return base64.b64encode(_BEFORE + len(data).to_bytes(4, "little") + data + _AFTER).decode()


# A copy on the host of weights that passed through staging memory, for a server that is started anew.


class HostCopy:
    """All parts of one rank; pinned beside CUDA.

    Ranks of a node that are the same share of several engines have one copy, `shared`, which the first of them writes;
    None: a copy of this rank's own. Of two updates the second one's parts come to any rank only when all ranks have
    joined it, so that nobody reads any more what it overwrites.
    """

    def __init__(self, staging: Staging, num_parts: int, device: torch.device, shared: NodeCopy | None = None) -> None:
        self._staging, self._shared = staging, shared
        sizes = (staging.num_bytes(part) for part in range(num_parts))
        like = {str(part): torch.empty(size, dtype=torch.uint8, device="meta") for part, size in enumerate(sizes)}
        self._host = shared.tensors(like, lambda host: None) if shared else HostTensors(like, device)
        self._num_updates = 0
        """Whose last part has arrived: the same on all ranks that share the copy."""

    @property
    def num_bytes(self) -> int:
        """Of memory that this rank has for it, and no other."""
        return sum(tensor.nbytes for tensor in self._host.tensors.values()) if self._host.is_own else 0

    def store(self, part: int) -> None:
        """After each part of an update. Returns when it is copied, where this rank makes the copy."""
        if self._host.is_own:
            staged = self._staging.bytes(part)
            self._host.tensors[str(part)].copy_(staged, non_blocking=True)
            if staged.is_cuda:
                torch.cuda.synchronize(staged.device)

    def complete(self) -> None:
        """After the last part of an update: the copy has all of it, as far as this rank makes one."""
        self._num_updates += 1
        if self._shared and self._shared.is_first:
            self._shared.renewed(self._num_updates)

    def await_update(self) -> None:
        """Before `restore`: until whoever keeps the copy has all of the last update that is complete here."""
        if self._shared and not self._host.is_own:
            self._shared.await_renewed(self._num_updates)

    def restore(self, part: int) -> None:
        """Into the part's slot of staging memory."""
        self._staging.bytes(part).copy_(self._host.tensors[str(part)], non_blocking=True)


# The last hop of a weight sync: from this rank's staging memory into the parameters of the server's process.

LOADER = "rltrain_weight_loader.load"
"""For the server's --custom-weight-loader: server/rltrain_weight_loader.py on its PYTHONPATH."""

TARGET = {"selector": "target"}
"""Weights of a draft model are not ours."""


@dataclass
class _Flight:
    """A message that the engine's ranks are about to answer, each into `file`. `answer`: on the engine's first rank."""

    id: str
    file: int
    answer: Future[dict[str, Any]] | None


class Delivery:
    """This rank's share of an engine's weights on their way into the server.

    `parts` are the engine's layout as `reshard.parts.split` gives it: they pass one after another through two slots of
    staging memory, so that the engine copies one part while the next arrives. `group` holds the engine's ranks (gloo),
    in the order of the server's tensor-parallel ranks; None: this rank alone. `call` reaches the server and is given
    on the engine's first rank only. With `keep` a copy of what was delivered stays in host memory; `shared` says with
    which ranks of the node, whose engines have the same updates. `role` is the config section of the engine.

    A sync is `begin`, then for every part in order `tensors` and `arrived`, then `finish`. A sync of what changed has
    the server write the present parameters into the slots first, while other parts are on their way; there is no
    other memory of them beside the server's own. A server that is lost on the way holds up nobody: the remaining parts
    are still taken and kept, and `finish` raises EngineLost on all ranks.

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
    ) -> None:
        self.version: int | None = None
        """Of the weights that the server has, as it says itself; None while they are not complete."""
        self.num_parts = len(parts)
        self._device, self._group, self._role = device, group, role
        self._staging = Staging(parts, rank, device)
        self._kept = HostCopy(self._staging, self.num_parts, device, shared) if keep else None
        self._arrived_version: int | None = None
        self._courier = CallQueue(call) if call else None
        self._replies = [_reply_file() for _ in range(2 * NUM_SLOTS)]
        """Of what fills the server from each slot, then of what fills each slot from the server."""
        self._flights: dict[int, _Flight] = {}
        """By slot."""
        self._reads: dict[int, _Flight] = {}
        """By the part that the server writes into its slot."""
        self._lost = self._refused = False
        """Equal on all ranks. Nothing more is sent to a server once it is lost, or has refused something."""
        self._failure = ""

    @property
    def num_bytes(self) -> int:
        """Of this rank's share of the weights."""
        return sum(self._staging.num_bytes(part) for part in range(self.num_parts))

    @property
    def kept_bytes(self) -> int:
        """Of the copy on the host, where it is this rank's."""
        return self._kept.num_bytes if self._kept else 0

    def check_layout(self) -> None:
        """After every start of the server: whether its parameters are those that `parts` describe.

        Raises EngineError naming the first that differs, and where the server stores weights in another way than it
        takes them; EngineLost where it does not answer.
        """
        self.begin()
        flight = self._send({"op": "describe"})
        reply = self._landed(flight)
        refusal = self._first(_difference(self._expected(), reply, self._device.type) if reply else "")
        if self._refused:
            raise EngineError(f"the SGLang server takes no weights: {self._failure}")
        self._raise_if_failed()
        if refusal:
            raise EngineError(
                f"the SGLang server does not hold its weights as rltrain would write them: {refusal}. Change "
                f"{self._role}.sglang.args, or use {self._role}.engine=embedded"
            )
        self._request("/end_weight_update", {})
        self._raise_if_failed()

    def begin(self) -> None:
        """Open an update. The server has no complete weights until `finish` returns."""
        self.version = None
        self._flights, self._reads, self._lost, self._refused, self._failure = {}, {}, False, False, ""
        if self._courier:
            self._courier.reset()
            self._courier.send("/begin_weight_update", TARGET)

    def tensors(self, part: int, *, is_kept: bool = False) -> Mapping[str, Tensor]:
        """Where to write the part's parameters, by name; padding is zero. Waits until the engine has read what was
        there before. Where `is_kept` the parameters are there as the last sync left them."""
        if is_kept:
            self._fill(part)
        else:
            self._end_reads()
            self._free_slot(part)
            self._staging.clear_padding(part)
        self._synchronize()
        return self._staging.views(part)

    def arrived(self, part: int, verify: bool = False) -> None:
        """`tensors(part)` are written: hand them to the engine, which copies them while this rank goes on.

        `verify`: the engine compares checksums of its parameters, once written, with those of what was staged.
        """
        self._synchronize()
        if self._kept:
            self._kept.store(part)
        self._load(part, verify)

    def finish(self, version: int) -> None:
        """All parts have arrived. Returns when the server serves them as `version`, which is read back from it.

        Raises EngineLost where any of this, or of what came before, failed on any rank. The parts are kept then, if any
        are: `redeliver` gives them to a server that was started anew.
        """
        self._arrived_version = version
        if self._kept:
            self._kept.complete()
        self._finish(version)

    def _finish(self, version: int) -> None:
        for slot in sorted(self._flights):
            self._landed(self._flights.pop(slot))
        self._settle()
        self._landed(self._send({"op": "finish"}, weight_version=str(version)))
        self._settle()
        self._request("/end_weight_update", {})
        served = self._request("/model_info", None).get("weight_version")
        if not self._failure and served != str(version):
            self._failure = f"it says that its weights are of version {served}; expected {version}"
        self._raise_if_failed()
        self.version = version

    def redeliver(self, verify: bool = False) -> None:
        """Give the kept weights to a server that was started anew; `version` is as before. Nothing where none arrived.

        Raises EngineError without a copy, and EngineLost as `finish` does.
        """
        if self._arrived_version is None:
            return
        if self._kept is None:
            raise EngineError(
                "an SGLang server was started anew and needs its weights, but no copy of them was kept; expected "
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
        """Give staging memory back. The server must be gone, or at least in no update."""
        if self._courier:
            self._courier.close()
        self._staging.close()
        for file in self._replies:
            os.close(file)

    def _load(self, part: int, verify: bool) -> None:
        slot = self._staging.slot(part)
        self._flights[slot] = self._send(self._message("load", part, verify), slot)

    def _fill(self, part: int) -> None:
        """The part's slot with what the server has, or had where it is lost. The next part's follows meanwhile."""
        for number in (part, part + 1):
            if number < self.num_parts and number not in self._reads:
                file = NUM_SLOTS + self._staging.slot(number)
                self._reads[number] = self._send(self._message("read", number), file)
        self._free_slot(part)
        self._landed(self._reads.pop(part))
        if (self._lost or self._failure) and self._kept:
            self._kept.await_update()
            self._kept.restore(part)

    def _end_reads(self) -> None:
        """Wait for what the server still writes into slots, of an update that began anew."""
        for flight in () if self._lost else self._reads.values():
            self._wait(flight.answer)
        self._reads.clear()

    def _free_slot(self, part: int) -> None:
        if (flight := self._flights.pop(self._staging.slot(part), None)) is not None:
            self._landed(flight)

    def _message(self, operation: str, part: int, verify: bool = False) -> dict[str, Any]:
        """Of the part's parameters in its slot; `verify`: with their checksums."""
        views = self._staging.views(part) if verify else {}
        fields = [
            (
                field.name,
                str(field.dtype).removeprefix("torch."),
                field.shape,
                field.offset,
                checksum_of(views[field.name]) if verify else None,
            )
            for field in self._staging.fields[part]
        ]
        return {"op": operation, "memory": self._staging.handle(part), "fields": fields}

    def _send(self, message: dict[str, Any], file: int = 0, **settings: str) -> _Flight:
        """Each rank's message to its rank of the server, all in one request. One at a time per reply `file`."""
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
        """This rank's reply, once the server has answered; {} where it has not or says that it failed."""
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
        """The server's answer on all ranks; {} where it is lost."""
        if self._lost:
            return {}
        answer = self._courier.send(path, body) if self._courier else None
        return self._wait(answer)

    def _wait(self, answer: Future[dict[str, Any]] | None) -> dict[str, Any]:
        """The answer that the engine's first rank waits for, on all ranks; notes there where it does not come."""
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
        """The first rank's text that is not empty, on all ranks."""
        return next((other.decode() for other in gather_bytes(text.encode(), self._group) if other), "")

    def _settle(self) -> None:
        """Have all ranks know of a failure on any."""
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


def _reply_file() -> int:
    """A file without a name, which the server's process opens through this one's open files."""
    file = os.memfd_create("rltrain-reply")
    os.fchmod(file, 0o600)
    return file


def _reply(flight: _Flight) -> dict[str, Any]:
    text = os.pread(flight.file, os.fstat(flight.file).st_size, 0)
    reply: dict[str, Any] = json.loads(text) if text else {}
    if reply.pop("id", None) != flight.id:
        return {"error": "a rank of the server answered without having run rltrain's weight loader; see its log"}
    return reply


def _difference(expected: Mapping[str, tuple[str, list[int]]], reply: Mapping[str, Any], device: str) -> str:
    """What is first wrong with the parameters that a rank of the server described; empty where nothing is."""
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


# Low-rank adapters that a server keeps beside its weights: one set, under one name, which every request asks for.
#
# SGLang is given them once, all zeros. From then on weight syncs write them where SGLang has them, as they write
# weights,
# so that responses under way go on with new ones; another set would hold from the next request on.

ADAPTER = "rltrain"
"""What requests call them by."""


def first_load(adapter: AdapterSpec, num_ranks: int) -> tuple[str, dict[str, Any]]:
    """The call by which a server of so many ranks gets them, after its start."""
    config = {
        "peft_type": "LORA",
        "r": adapter.rank,
        "lora_alpha": adapter.alpha,
        "target_modules": [*adapter.targets],
    }
    body = {
        "lora_name": ADAPTER,
        "config_dict": config,
        "serialized_named_tensors": [NO_TENSORS] * num_ranks,
        "pinned": True,
    }
    return "/load_lora_adapter_from_tensors", body
