"""The training state of a sharded model, saved and loaded through layouts, in the terms of every backend."""

from collections.abc import Mapping, MutableMapping, Sequence

import torch.distributed as dist
from torch import Tensor

from rltrain.checkpoint.run_files import AnyFile, Contents
from rltrain.checkpoint.saved_state import MASTER, Counts, Destination, SavedState, contents, flat_name
from rltrain.offload.memory_parts import MemoryPart
from rltrain.training.fsdp.model import ShardedModel
from rltrain.training.fsdp.optimizer import MOMENTS, ShardedAdam
from rltrain.training.late_copies import LateCopies, LateTensors
from rltrain.training.shards import replica_of


def save_state(
    model: ShardedModel,
    optimizer: ShardedAdam,
    parts: Mapping[str, MemoryPart],
    num_updates: int,
    copies: MutableMapping[str, Tensor],
    late: LateCopies,
) -> Contents:
    """This rank's shards and what the optimizer keeps of them, read where they lie: on the device or on the host. Of
    ranks with equal shards the first one saves.

    `parts` are the model's. `copies` is empty at the first save and given again at the next, which writes over the
    tensors of the one before. What they are given is left to `late`. RuntimeError where a part was dropped. Not
    collective.
    """
    layout, rank = model.learned_layout, dist.get_rank()
    mine = layout.on(rank)
    names, pieces = [name for name, _ in mine.parameters], mine.pieces
    if replica_of(layout, rank)[0]:
        pieces, names = pieces[:0], []
    flats: dict[str, Tensor] = {}

    def copy(kind: str, name: str, part: str, values: Tensor) -> None:
        flat = flat_name(kind, name)
        flats[flat] = late.add(parts[part], values, 0, values.numel(), copies.get(flat))

    late.begin()
    for name in names:
        copy(MASTER, name, "weights", optimizer.shards[name])
        for moment, values in optimizer.moments(name).items():
            copy(moment, name, "optimizer", values)
    copies.update(flats)
    saved = contents(layout.tensors, names, pieces, flats, Counts(num_updates, optimizer.num_steps))
    return Contents(LateTensors(saved.tensors, late), saved.metadata)


def load_state(model: ShardedModel, optimizer: ShardedAdam, files: Sequence[AnyFile], role: str) -> Counts:
    """Take over a training state from the files of all ranks that saved it, whatever their backend and layout; its
    counts.

    Of a model that has made no optimizer step and is on the device. CheckpointError where a file is missing or damaged,
    where they do not belong together or to a model of these tensors or to another optimizer, and where they lack a part
    of one. Not collective.
    """
    layout = model.learned_layout
    saved = SavedState(files, layout.tensors)
    saved.require_optimizer(Counts.optimizer, role)
    kinds = {MASTER: {name: shard.detach() for name, shard in optimizer.shards.items()}}
    if saved.counts.optimizer_steps:
        optimizer.make_states(saved.counts.optimizer_steps)
        kinds |= {moment: {name: optimizer.moments(name)[moment] for name in optimizer.shards} for moment in MOMENTS}
    mine = layout.on(dist.get_rank())
    saved.read(
        [
            Destination(kind, mine.pieces, [tensors[name].view(-1) for name, _ in mine.parameters])
            for kind, tensors in kinds.items()
        ]
    )
    return saved.counts
