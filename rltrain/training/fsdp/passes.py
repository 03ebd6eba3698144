"""Micro-batches through a sharded model."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from rltrain.data.experience import Experience
from rltrain.training.evaluable import Outputs
from rltrain.training.fsdp.model import ShardedModel
from rltrain.training.packing import MicroBatch, pack, padding_alone


def make_micro_batches(model: ShardedModel, experience: Experience, max_tokens: int) -> list[MicroBatch]:
    """`experience` in micro-batches of at most `max_tokens` for each rank of context parallelism, and others of padding
    alone: all ranks have as many, as each gathers what the others compute with. Collective over: the role's ranks."""
    share, batches = model.share, list[MicroBatch]()
    if experience.num_samples:
        batches = pack(experience, max_tokens * share.size, device=model.device, share=share)
    count = torch.tensor([len(batches)], device=model.device)
    dist.all_reduce(count, dist.ReduceOp.MAX, group=model.pg_collection.all)
    rows = share.multiple // share.size
    padding = padding_alone(experience, rows, model.device)
    return batches + [replace(padding, segments=(share.multiple,))] * (int(count) - len(batches))


def run(model: ShardedModel, micro_batches: Sequence[MicroBatch], outputs: Outputs, *, backward: bool) -> list[Any]:
    """Forward (and backward) over the micro-batches; what `outputs` kept of each that has samples. Losses are summed,
    and gradients over all ranks. Collective over: the role's ranks."""
    kept = []
    for batch in micro_batches:
        model.on_micro_batch(batch.lengths, backward)
        found = model.outputs(batch)
        if batch.num_tokens:
            loss, of_batch = outputs(batch, found[: batch.num_rows])
            kept.append(of_batch)
        else:
            loss = found[:0].sum()
        if backward:
            loss.backward()
    return kept
