"""The ranks of test_two_ranks, both on one device. They use gloo, because NCCL takes one rank per device."""

from typing import Any

import torch
import torch.distributed as dist

from rltrain.reshard.megatron_layout import megatron_layout
from rltrain.rollout.layout import engine_layout
from rltrain.runtime.grid import Grid
from tests.distributed.cases_reshard import Settings, resharding_of, tensors
from tests.support.model_shards import PADDING, Place, engine_shard, full_tensors, megatron_shard, tiny_architecture

NUM_SYNCS = 3


def syncs(device: str, bucket_bytes: int) -> dict[str, Any]:
    """Reshards from one shard each to all weights on both ranks, several times with the same buffers.

    Returns the wrong parameters, the number of rounds and the received bytes.
    """
    architecture, rank = tiny_architecture("qwen3", num_layers=4), dist.get_rank()
    on, full = torch.device(device), full_tensors(architecture)
    source = megatron_layout(architecture, Grid((0, 1), tp=2))
    destination = engine_layout(architecture, Grid((0, 1)), dtype="bfloat16")
    held = {name: tensor.to(on) for name, tensor in tensors(megatron_shard(architecture, full, Place(2, rank))).items()}
    expected = tensors(engine_shard(architecture, full, Place(1, 0)))
    wanted = {
        name: torch.full_like(tensor, PADDING, dtype=torch.bfloat16, device=on) for name, tensor in expected.items()
    }
    settings = Settings(bucket_bytes, ranks_per_node=2)
    resharding = resharding_of(source, destination, dist.group.WORLD, settings, device=on)
    wrong: list[str] = []
    for number in range(NUM_SYNCS):
        scale = 2.0**number  # exact in both types
        report = resharding.run({name: tensor * scale for name, tensor in held.items()}, wanted)
        for name, tensor in wanted.items():
            real = expected[name] != PADDING
            if not torch.equal(tensor.cpu()[real], (expected[name][real] * scale).to(torch.bfloat16)):
                wrong.append(f"{name} in sync {number}")
    return {"wrong": wrong, "rounds": report.num_rounds, "bytes": report.bytes_received}
