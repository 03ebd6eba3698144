"""Carrying out a plan: copies within ranks, and packed messages between them."""

import time
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from rltrain.reshard.buckets import Message, messages_by_bucket
from rltrain.reshard.match import elements
from rltrain.reshard.plan import Parameters, RankPlan


@dataclass(frozen=True)
class SyncReport:
    """What a reshard did. `bytes_moved` crossed between ranks and `bytes_local` stayed on one, over all ranks together;
    the other numbers are this rank's."""

    bytes_moved: int
    bytes_local: int
    bytes_sent: int
    bytes_received: int
    num_buckets: int
    seconds: float

    @property
    def bandwidth_bytes_per_s(self) -> float:
        """Of all ranks together."""
        return self.bytes_moved / self.seconds


@torch.no_grad()
def execute(
    plan: RankPlan,
    source_tensors: Mapping[str, Tensor] | None,
    destination_tensors: Mapping[str, Tensor] | None,
    *,
    group: dist.ProcessGroup | None,
    bucket_bytes: int,
    dtype: torch.dtype | None = None,
) -> SyncReport:
    """Write this rank's `destination_tensors` from all ranks' `source_tensors`, both by the names of their layouts.

    A rank that is in one layout only passes None for the other. Values are cast to `dtype` when they are packed: the
    dtype of the destination; None where source and destination have the same. At most `bucket_bytes` are packed at a
    time per direction; a larger tensor is split. `group` contains the ranks of both layouts; it may be None where
    nothing leaves this rank, and with a gloo group the messages of GPU tensors pass through host memory.

    Collective over: the ranks of both layouts, from their main threads.
    """
    start = time.perf_counter()
    source = _flat("source", plan.source_parameters, source_tensors)
    destination = _flat("destination", plan.destination_parameters, destination_tensors)
    dtype = dtype or _common_dtype(source, destination)
    for copy in plan.copies:
        _box(destination, copy, "destination_").copy_(_box(source, copy, "source_").to(dtype))
    message_elements = max(bucket_bytes // dtype.itemsize // max(plan.max_peers, 1), 1)
    sends = messages_by_bucket(plan.sends, message_elements)
    receives = messages_by_bucket(plan.receives, message_elements)
    buckets = sorted({*sends, *receives})
    device = _wire_device(group, [*source, *destination])
    if group is not None and device.type == "cuda":
        # NCCL sets a group up in its first call, which all its ranks must make; some may have nothing to send.
        dist.barrier(group)
    for bucket in buckets:
        _exchange(sends.get(bucket, []), receives.get(bucket, []), source, destination, group, dtype, device)
    for used in {tensor.device for tensor in (*source, *destination) if tensor.is_cuda}:
        torch.cuda.current_stream(used).synchronize()
    return SyncReport(
        bytes_moved=plan.total_wire_elements * dtype.itemsize,
        bytes_local=plan.total_local_elements * dtype.itemsize,
        bytes_sent=int(elements(plan.sends).sum()) * dtype.itemsize,
        bytes_received=int(elements(plan.receives).sum()) * dtype.itemsize,
        num_buckets=len(buckets),
        seconds=time.perf_counter() - start,
    )


def _flat(side: str, parameters: Parameters, tensors: Mapping[str, Tensor] | None) -> list[Tensor]:
    """One-dimensional views of the tensors, in the order in which the plan numbers them."""
    if not parameters:
        return []
    if tensors is None:
        raise ValueError(f"this rank is in the {side} layout, but no {side} tensors were given")
    for name, shape in parameters:
        if name not in tensors or tuple(tensors[name].shape) != shape:
            found = tuple(tensors[name].shape) if name in tensors else "absent"
            raise ValueError(f"{side} tensor {name} is {found}; the layout says {shape}")
    return [tensors[name].detach().view(-1) for name, _ in parameters]


def _common_dtype(source: list[Tensor], destination: list[Tensor]) -> torch.dtype:
    dtypes = {tensor.dtype for tensor in (*source, *destination)}
    if len(dtypes) != 1:
        raise ValueError(f"tensors have dtypes {sorted(map(str, dtypes))}: pass the destination's as dtype")
    return dtypes.pop()


def _wire_device(group: dist.ProcessGroup | None, tensors: list[Tensor]) -> torch.device:
    if group is None or dist.get_backend(group) == "gloo":
        return torch.device("cpu")
    return tensors[0].device


def _exchange(
    sends: list[Message],
    receives: list[Message],
    source: list[Tensor],
    destination: list[Tensor],
    group: dist.ProcessGroup | None,
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    """One bucket: pack, send and receive among the ranks that have something in it, unpack."""
    if group is None:
        raise ValueError("boxes leave this rank or come to it, but no process group was given")
    outgoing = [torch.empty(message.size, dtype=dtype, device=device) for message in sends]
    incoming = [torch.empty(message.size, dtype=dtype, device=device) for message in receives]
    for message, buffer in zip(sends, outgoing, strict=True):
        for box, packed in _packed(message, buffer):
            packed.copy_(_box(source, box))
    operations = [
        dist.P2POp(operation, buffer.view(torch.uint8), message.peer, group)
        for operation, messages, buffers in ((dist.isend, sends, outgoing), (dist.irecv, receives, incoming))
        for message, buffer in zip(messages, buffers, strict=True)
    ]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    for message, buffer in zip(receives, incoming, strict=True):
        for box, packed in _packed(message, buffer):
            _box(destination, box).copy_(packed)


def _packed(message: Message, buffer: Tensor) -> list[tuple[np.void, Tensor]]:
    """Every box of a message with its place in the message's buffer."""
    shapes = zip(message.boxes["rows"].tolist(), message.boxes["cols"].tolist(), strict=True)
    parts = torch.split(buffer, elements(message.boxes).tolist())
    return [(box, part.view(shape)) for box, part, shape in zip(message.boxes, parts, shapes, strict=True)]


def _box(flats: list[Tensor], box: np.void, prefix: str = "") -> Tensor:
    """The elements of a box in the parameter that holds it, [rows, cols]."""
    parameter, stride, offset = (int(box[prefix + name]) for name in ("parameter", "stride", "offset"))
    # Sliced first: as_strided's own offset would count from the storage, which may hold other parameters before.
    return flats[parameter][offset:].as_strided((int(box["rows"]), int(box["cols"])), (stride, 1))
