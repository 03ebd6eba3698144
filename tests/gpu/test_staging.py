"""Memory of the CUDA driver from which another process loads weights."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from rltrain.reshard.layout import split
from rltrain.rollout.layout import engine_layout
from rltrain.rollout.servers.in_sglang import rltrain_weight_loader as loader
from rltrain.rollout.servers.sglang_weights import HostCopy, Staging, checksum_of
from rltrain.runtime.grid import Grid
from tests.support.model_shards import tiny_architecture

pytestmark = pytest.mark.gpu

PROGRAM = f"""
import json, sys, torch
sys.path.insert(0, {str(Path(loader.__file__).parent)!r})
import rltrain_weight_loader
model = torch.nn.Linear(3, 2, device="cuda")
for line in sys.stdin:
    rltrain_weight_loader.load(model, [(line, torch.Tensor())])
    print(json.dumps(model.weight.tolist()), flush=True)
"""


def staging_of(num_parts: int) -> Staging:
    layout = engine_layout(tiny_architecture(num_layers=1), Grid((0,)))
    return Staging(split(layout, 2000)[:num_parts], 0, torch.device("cuda", 0))


def test_another_process_loads_from_both_slots_whatever_is_written_to_them() -> None:
    staging = staging_of(2)
    file = os.memfd_create("reply")
    other = subprocess.Popen([sys.executable, "-I", "-c", PROGRAM], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert other.stdin and other.stdout
    for number, part in enumerate((0, 1, 0, 1)):
        values = torch.arange(6.0).view(2, 3) + 10 * number
        staging.bytes(part)[:24].view(torch.float32).copy_(values.view(-1))
        torch.cuda.synchronize()
        fields = [["weight", "float32", [2, 3], 0, checksum_of(values)]]
        message = {"op": "load", "id": str(number), "reply": f"/proc/{os.getpid()}/fd/{file}", "fields": fields}
        other.stdin.write(json.dumps({**message, "memory": staging.handle(part)}).encode() + b"\n")
        other.stdin.flush()
        found = json.loads(other.stdout.readline())
        assert json.loads(os.pread(file, 4000, 0)) == {"id": str(number), "error": None}
        assert found == values.tolist()
    other.stdin.close()
    assert other.wait(60) == 0
    staging.close()
    os.close(file)


def test_a_copy_on_the_host_gives_a_slot_its_bytes_again() -> None:
    staging = staging_of(3)
    kept = HostCopy(staging, 3, torch.device("cuda", 0))
    written = []
    for part in range(3):
        memory = staging.bytes(part)
        memory.copy_(torch.randint(0, 256, (memory.numel(),), dtype=torch.uint8))
        written.append(memory.cpu())
        kept.store(part)
    for part in range(3):
        kept.restore(part)
        assert torch.equal(staging.bytes(part).cpu(), written[part])
    staging.close()


def test_memory_is_given_back() -> None:
    free = torch.cuda.mem_get_info()[0]
    for _ in range(3):
        staging = staging_of(2)
        assert torch.cuda.mem_get_info()[0] < free
        staging.close()
    assert abs(torch.cuda.mem_get_info()[0] - free) < 2**24
