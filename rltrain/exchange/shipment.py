"""Shipments of experience, and the messages that carry them: a header of whole numbers and one buffer of bytes."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from zlib import crc32

import torch
from torch import Tensor

from rltrain.data.experience import FIELDS, WIDE, Experience, join
from rltrain.errors import ExchangeError

HEADER = ("num_samples", "num_tokens", "num_groups")
ALIGNMENT_BYTES = HEADER_ITEM_BYTES = 8
Message = tuple[Tensor, Tensor]
"""Header and body."""


@dataclass(frozen=True)
class Shipment:
    """Samples on their way, and of all groups of the chunk, which `experience` has a part of: `group_tokens` [groups],
    and `holders` [groups], the replicas of the role that the samples are with."""

    experience: Experience
    group_tokens: Tensor
    holders: Tensor

    def with_fields(self, **values: Tensor) -> "Shipment":
        return replace(self, experience=self.experience.with_fields(**values))

    def without_samples(self) -> "Shipment":
        return replace(self, experience=self.experience.select(torch.empty(0, dtype=torch.int64)))


def together(parts: Sequence[Shipment]) -> Shipment:
    """All samples of parts of one shipment, and what one of the parts says of all groups."""
    told = max(parts, key=lambda part: len(part.group_tokens))
    return replace(told, experience=join(part.experience for part in parts))


def joined(parts: Sequence[Shipment]) -> Shipment:
    """All samples of parts of one shipment, by group id, and what one of the parts says of all groups. A copy."""
    whole = together(parts)
    by_group = torch.argsort(whole.experience.group_ids, stable=True)
    return Shipment(whole.experience.select(by_group), whole.group_tokens.clone(), whole.holders.clone())


def encode(shipment: Shipment, fields: Sequence[str]) -> Message:
    """Header [`header_length`] int64, its checksum last, and body [bytes] uint8: group_tokens and holders as int32 and
    then each field, padded to whole 8 bytes."""
    experience, group_tokens, holders = shipment.experience, shipment.group_tokens, shipment.holders
    values = [getattr(experience, name) for name in fields]
    widths = [value.shape[1] for name, value in zip(fields, values, strict=True) if name in WIDE]
    counts = torch.tensor([experience.num_samples, int(experience.lengths.sum()), len(group_tokens), *widths])
    header = torch.cat([counts, torch.tensor([crc32(counts.numpy().tobytes())])])
    return header, torch.cat([as_bytes(values) for values in (group_tokens.int(), holders.int(), *values)])


def opened(message: Tensor, fields: Sequence[str]) -> Shipment:
    """What a message [bytes] uint8, header and body in one, carries. Raises ExchangeError as `decode` does."""
    num_bytes = HEADER_ITEM_BYTES * header_length(fields)
    if len(message) < num_bytes:
        raise ExchangeError(f"{len(message)} bytes of experience arrived; expected a header of {num_bytes} at least")
    return decode(message[:num_bytes].view(torch.int64), message[num_bytes:], fields)


def decode(header: Tensor, body: Tensor, fields: Sequence[str]) -> Shipment:
    """The inverse of `encode`. Raises ExchangeError where they are of no shipment."""
    if len(body) != body_bytes(header, fields):
        raise ExchangeError(f"{len(body)} bytes of experience arrived; expected {body_bytes(header, fields)}")
    num_groups = header[2:3].tolist()
    shapes = [(torch.int32, num_groups), (torch.int32, num_groups), *shapes_of(header, fields)]
    padded = torch.split(body, [padded_bytes(dtype, shape) for dtype, shape in shapes])
    group_tokens, holders, *values = (
        piece[: dtype.itemsize * math.prod(shape)].view(dtype).view(shape)
        for piece, (dtype, shape) in zip(padded, shapes, strict=True)
    )
    shipment = Shipment(Experience(**dict(zip(fields, values, strict=True))), group_tokens.long(), holders.long())
    lengths = shipment.experience.lengths
    if bool((lengths < 0).any()) or int(lengths.sum()) != int(header[1]):
        raise ExchangeError(
            f"samples of {lengths.tolist()[:8]} tokens arrived (the first 8); expected {int(header[1])} in all: they "
            "were damaged on the way, or ranks run other versions of rltrain"
        )
    return shipment


def header_length(fields: Sequence[str]) -> int:
    return len(HEADER) + sum(name in WIDE for name in fields) + 1


def body_bytes(header: Tensor, fields: Sequence[str]) -> int:
    """Of the body that follows. Raises ExchangeError where the header is not what was sent."""
    if crc32(header[:-1].numpy().tobytes()) != int(header[-1]):
        raise ExchangeError(
            f"the header of a shipment, {header.tolist()}, does not fit its checksum: it was damaged on the way, or "
            "ranks run other versions of rltrain"
        )
    of_groups = padded_bytes(torch.int32, header[2:3].tolist())
    return 2 * of_groups + sum(padded_bytes(dtype, shape) for dtype, shape in shapes_of(header, fields))


def shapes_of(header: Tensor, fields: Sequence[str]) -> list[tuple[torch.dtype, list[int]]]:
    """(dtype, shape) of each field's tensor."""
    num_samples, num_tokens, _, *widths, _ = header.tolist()
    remaining = iter(widths)
    shapes = []
    for name in fields:
        dtype, extent = FIELDS[name]
        length = num_samples if extent == "sample" else num_tokens
        shapes.append((dtype, [length, next(remaining)] if name in WIDE else [length]))
    return shapes


def padded_bytes(dtype: torch.dtype, shape: Sequence[int]) -> int:
    return -(-dtype.itemsize * math.prod(shape) // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def as_bytes(values: Tensor) -> Tensor:
    flat = values.contiguous().flatten().view(torch.uint8)
    return torch.nn.functional.pad(flat, (0, -len(flat) % ALIGNMENT_BYTES))
