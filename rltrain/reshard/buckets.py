"""Cutting a plan's transfers into messages of bounded size, alike on both ends."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from rltrain.reshard.layout import Array, IntArray
from rltrain.reshard.match import elements


@dataclass(frozen=True, eq=False)
class Message:
    """What one rank and `peer` exchange in one bucket: `boxes` [TRANSFER] one after another, `size` elements."""

    peer: int
    boxes: Array
    size: int


def messages_by_bucket(transfers: Array, message_elements: int) -> dict[int, list[Message]]:
    """Bucket number -> its messages, in order of their peers.

    The boxes of a pair form one stream of elements. Bucket i takes the i-th `message_elements` of every pair's stream,
    whatever the other pairs have, so both ends arrive at equal messages.
    """
    cut, bucket = _cut(transfers, message_elements)
    order = np.lexsort((np.arange(len(cut)), cut["peer"], bucket))
    cut, bucket = cut[order], bucket[order]
    buckets: dict[int, list[Message]] = {}
    changes = np.flatnonzero((np.diff(bucket) != 0) | (np.diff(cut["peer"]) != 0)) + 1
    for start, stop in _runs(changes, len(cut)):
        boxes = cut[start:stop]
        message = Message(int(boxes["peer"][0]), boxes, int(elements(boxes).sum()))
        buckets.setdefault(int(bucket[start]), []).append(message)
    return buckets


def _runs(changes: IntArray, length: int) -> Iterator[tuple[int, int]]:
    bounds = [0, *changes.tolist(), length]
    return ((start, stop) for start, stop in zip(bounds, bounds[1:], strict=False) if start < stop)


def _cut(transfers: Array, message_elements: int) -> tuple[Array, IntArray]:
    """`transfers` cut wherever a message ends, and the bucket of every piece."""
    size = elements(transfers)
    end = np.cumsum(size)
    _, first_of_peer, peer = np.unique(transfers["peer"], return_index=True, return_inverse=True)
    start = end - size
    start = start - start[first_of_peer][peer]
    first_bucket = start // message_elements
    count = (start + size - 1) // message_elements - first_bucket + 1
    whole = np.repeat(np.arange(len(transfers)), count)
    bucket = first_bucket[whole] + np.arange(len(whole)) - np.repeat(np.cumsum(count) - count, count)
    low = np.maximum(bucket * message_elements - start[whole], 0)
    high = np.minimum((bucket + 1) * message_elements - start[whole], size[whole])
    return _rectangles(transfers[whole], low, high, bucket)


def _rectangles(boxes: Array, low: IntArray, high: IntArray, bucket: IntArray) -> tuple[Array, IntArray]:
    """Elements [low, high) of every box, row by row: part of a row, whole rows, part of a row, where not empty."""
    cols = boxes["cols"]
    first_row, last_row = -(-low // cols), high // cols
    within_row = last_row < first_row
    head = _part(boxes, low // cols, low % cols, 1, np.where(within_row, high - low, first_row * cols - low))
    body = _part(boxes, first_row, 0, np.maximum(last_row - first_row, 0), cols)
    tail = _part(boxes, last_row, 0, 1, np.where(within_row, 0, high - last_row * cols))
    parts = np.stack([head, body, tail], axis=1).reshape(-1)
    kept = elements(parts) > 0
    return parts[kept], np.repeat(bucket, 3)[kept]


def _part(boxes: Array, row: IntArray, col: IntArray | int, rows: IntArray | int, cols: IntArray) -> Array:
    part = boxes.copy()
    part["row"] += row
    part["col"] += col
    part["rows"], part["cols"] = rows, cols
    part["offset"] += row * boxes["stride"] + col
    return part
