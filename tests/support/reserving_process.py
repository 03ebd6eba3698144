"""Moves memory at reserved addresses off the stand-in of NVIDIA's driver and back. Prints the findings as JSON.

python -m tests.support.reserving_process LIBRARY moves
python -m tests.support.reserving_process LIBRARY generations
"""

import ctypes
import gc
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from rltrain.offload.device_memory import MAPPED_BYTES
from rltrain.offload.memory_parts import MemoryPart, reserved_memory
from tests.support.cuda_driver import install

DEVICE = torch.device("cuda", 0)
PAGE = 2**21


def moves(driver: ctypes.CDLL) -> dict[str, Any]:
    """Returns what is found of tensors that leave and return."""
    memory = reserved_memory(DEVICE)
    assert memory is not None
    gc.collect()
    found: dict[str, Any] = {"bytes after the trial": driver.stand_in_physical_bytes()}
    kinds = [((3, 5), torch.float32), ((PAGE,), torch.bfloat16), ((0, 2), torch.int8)]
    tensors = memory.zeros(kinds)
    found["zeros"] = [[*tensor.shape] for tensor in tensors if not tensor.any()]
    found["bytes"] = driver.stand_in_physical_bytes(), MAPPED_BYTES[DEVICE]
    part = MemoryPart(tensors.copy)
    part.memory = memory
    tensors[0].copy_(torch.arange(15).view(3, 5))
    addresses = [tensor.data_ptr() for tensor in tensors]
    part.save()
    part.leave()
    found["bytes away"] = driver.stand_in_physical_bytes(), MAPPED_BYTES[DEVICE], part.allocated_bytes
    driver.stand_in_limit_physical(PAGE)
    try:
        part.allocate()
    except torch.OutOfMemoryError as error:
        found["too much"] = str(error)
    driver.stand_in_limit_physical(8 * PAGE)
    part.allocate()
    part.fill()
    found["addresses stay"] = addresses == [tensor.data_ptr() for tensor in tensors]
    found["content"] = tensors[0].flatten().tolist()
    part.leave(drop=True)
    part.allocate()
    part.fill(rewritten=True)
    found["dropped"] = bool(tensors[0].any())
    del tensors, part
    gc.collect()
    found["bytes at the end"] = driver.stand_in_physical_bytes(), MAPPED_BYTES[DEVICE]
    return found


def generations(driver: ctypes.CDLL) -> dict[str, Any]:
    """Returns how often an engine recorded its step, and the memory beside it, over generations and moves."""
    from rltrain.rollout.engine import SamplingParams
    from tests.support.cuda_graphs import Recorder
    from tests.support.rollout_models import load_engine, ragged_requests, write_checkpoint

    memory, record = reserved_memory(DEVICE), Recorder()
    assert memory is not None
    checkpoint = write_checkpoint(Path(tempfile.mkdtemp()), "qwen3")
    options = {"record": record, "cache_returns": lambda: True, "zeros": memory.zeros}
    engine, _ = load_engine(checkpoint, kv_tokens=2000, **options)  # type: ignore[arg-type]
    part = MemoryPart(engine.cache_tensors, forget=engine.release_cache)
    part.memory = memory
    found: dict[str, Any] = {"recorded": [], "bytes": [], "equal": []}
    first = None
    for _ in range(4):
        for _ in range(2):
            done = engine.generate(ragged_requests(3), SamplingParams(0.0, 1.0, 0, 6, ()))
            tokens = [sample.tokens for sample in done]
            first = first or tokens
            found["equal"].append(tokens == first)
        found["recorded"].append(record.num_recorded)
        part.leave(drop=True)
        found["bytes"].append(driver.stand_in_physical_bytes())
        part.allocate()
        part.fill(rewritten=True)
    return found


if __name__ == "__main__":
    installed = install(Path(sys.argv[1]))
    print(json.dumps({"moves": moves, "generations": generations}[sys.argv[2]](installed)))
