"""Stages weights in one process and loads them in another, through memory of the stand-in driver. Prints the findings
as JSON.

    python -m tests.support.staging_processes LIBRARY
"""

import ctypes
import json
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from rltrain.errors import EngineError
from rltrain.reshard.layout import split
from rltrain.rollout.layout import engine_layout
from rltrain.rollout.servers.in_sglang import rltrain_weight_loader as loader
from rltrain.rollout.servers.sglang_weights import DEVICE_PAGE_BYTES, Delivery, DeviceSegment, fields_of
from rltrain.runtime.grid import Grid
from tests.support.cuda_driver import install
from tests.support.loading_server import LoadingServer, Model, model_of
from tests.support.model_shards import tiny_architecture

DEVICE = torch.device("cuda", 0)
LAYOUT = engine_layout(tiny_architecture("qwen2"), Grid((0,)))
PARTS = split(LAYOUT, 3000)


class OtherProcess:
    """A fork of this process that acts as the server. It is made before this process has device memory."""

    def __init__(self, model: Model) -> None:
        requests, self._requests = os.pipe()
        self._answers, answers = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            os.close(self._requests)  # it would never end otherwise
            _serve(LoadingServer(model), requests, answers)
            os._exit(0)
        self._answers_file = os.fdopen(self._answers)

    def call(self, path: str, body: dict[str, Any] | None) -> dict[str, Any]:
        os.write(self._requests, json.dumps([path, body]).encode() + b"\n")
        answer: dict[str, Any] = json.loads(self._answers_file.readline())
        return answer

    def end(self) -> int:
        os.close(self._requests)
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


def _serve(server: LoadingServer, requests: int, answers: int) -> None:
    torch.cuda.synchronize()
    with os.fdopen(requests) as lines:
        for line in lines:
            path, body = json.loads(line)
            answer = {"sums": _sums(server.models[0])} if path == "sums" else server.call(path, body)
            os.write(answers, json.dumps(answer).encode() + b"\n")


def _sums(model: Model) -> dict[str, int]:
    return {name: loader.checksum_of(tensor) for name, tensor in model.held.items()}


def delivered_weights(other: OtherProcess) -> dict[str, Any]:
    """Runs two syncs through two slots into the other process, checks each there, and returns the server's findings."""
    delivery = Delivery(PARTS, 0, device=DEVICE, keep=False, group=None, call=other.call)
    kinds = {delivery._staging.handle(part)["kind"] for part in range(len(PARTS))}
    for version in (1, 2):
        generator = torch.Generator().manual_seed(version)
        values = {field.name: torch.randn(field.shape, generator=generator) for field in fields_of(LAYOUT, 0)}
        delivery.begin()
        for part in range(delivery.num_parts):
            for name, view in delivery.tensors(part).items():
                view.copy_(values[name])
            delivery.arrived(part, verify=True)
        delivery.finish(version)
    same = other.call("sums", None)["sums"] == {name: loader.checksum_of(value) for name, value in values.items()}
    delivery.close()
    return {"version": delivery.version, "same": same, "kinds": sorted(kinds)}


def wrong_calls(driver: ctypes.CDLL) -> dict[str, int]:
    """Returns the status of calls with wrong types or wrong order."""
    segment = DeviceSegment(1000, DEVICE)
    pointer, handle = segment._pointer, loader._IpcHandle.from_buffer_copy(bytes.fromhex(segment.handle["handle"]))
    other, size = ctypes.c_uint64(), ctypes.c_size_t(4096)
    calls: dict[str, Callable[[], int]] = {
        "size before pointer": lambda: driver.cuMemAlloc_v2(size, ctypes.byref(other)),
        "pointer before handle": lambda: driver.cuIpcGetMemHandle(pointer, ctypes.byref(handle)),
        "handle by reference": lambda: driver.cuIpcOpenMemHandle_v2(
            ctypes.byref(other), ctypes.byref(handle), ctypes.c_uint(1)
        ),
        "handle before pointer": lambda: driver.cuIpcOpenMemHandle_v2(handle, ctypes.byref(other), ctypes.c_uint(1)),
        "no flags": lambda: driver.cuIpcOpenMemHandle_v2(ctypes.byref(other), handle, ctypes.c_uint(0)),
        "opened where it was exported": lambda: driver.cuIpcOpenMemHandle_v2(
            ctypes.byref(other), handle, ctypes.c_uint(1)
        ),
        "freed by reference": lambda: driver.cuMemFree_v2(ctypes.byref(pointer)),
        "half a pointer": lambda: driver.cuMemFree_v2(ctypes.c_uint32(pointer.value & 0xFFFFFFFF)),
        "a thread without a context": lambda: _in_a_thread(lambda: driver.cuMemAlloc_v2(ctypes.byref(other), size)),
    }
    statuses = {name: int(call()) for name, call in calls.items()}
    segment.close()
    return statuses | {"freed twice": int(driver.cuMemFree_v2(pointer))}


def _in_a_thread(call: Callable[[], int]) -> int:
    results: list[int] = []
    thread = threading.Thread(target=lambda: results.append(call()))
    thread.start()
    thread.join()
    return results[0]


def refusals() -> list[str]:
    texts = []
    try:
        DeviceSegment(2**40, DEVICE)
    except EngineError as error:
        texts.append(str(error))
    segment = DeviceSegment(10, DEVICE)
    try:
        loader._map_cuda({**segment.handle, "device": "GPU-another"})
    except ValueError as error:
        texts.append(str(error))
    segment.close()
    return texts


def main(library: str) -> None:
    driver = install(Path(library))
    other = OtherProcess(model_of(LAYOUT, 0))
    torch.cuda.synchronize()
    found = {
        "weights": delivered_weights(other),
        "wrong": wrong_calls(driver),
        "refusals": refusals(),
        "pages": len(DeviceSegment(DEVICE_PAGE_BYTES + 1, DEVICE).bytes) // DEVICE_PAGE_BYTES,
        "other ended with": other.end(),
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1])
