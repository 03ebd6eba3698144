"""Ranges of a file's bytes, [from, to): which ones to ask for, where some are there already."""

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from rltrain.checkpoint.run.saved_file import Rows


class Span(NamedTuple):
    begin: int
    end: int


def merged(spans: Iterable[Span], gap: int = 0) -> list[Span]:
    """In order and apart: what lies between two that are no more than `gap` from each other is taken too."""
    found: list[Span] = []
    for span in sorted(span for span in spans if span.begin < span.end):
        if found and span.begin <= found[-1].end + gap:
            found[-1] = Span(found[-1].begin, max(found[-1].end, span.end))
        else:
            found.append(span)
    return found


def without(spans: Iterable[Span], there: Iterable[Span]) -> list[Span]:
    """What of `spans` is not in `there`; both are as `merged` returns them."""
    found, held = [], [*there]
    for begin, end in spans:
        for other in held:
            if other.end <= begin or end <= other.begin:
                continue
            found.append(Span(begin, other.begin))
            begin = other.end
        found.append(Span(begin, end))
    return [span for span in found if span.begin < span.end]


def spans_of(rows: Rows, begin: int, item_bytes: int, gap: int) -> Iterator[Span]:
    """Of elements of a tensor whose bytes are from `begin` on. Rows that are near each other are one span."""
    first, row_bytes, stride_bytes = begin + rows.first * item_bytes, rows.cols * item_bytes, rows.stride * item_bytes
    if rows.rows and stride_bytes - row_bytes <= gap:
        yield Span(first, first + (rows.rows - 1) * stride_bytes + row_bytes)
        return
    for row in range(rows.rows):
        yield Span(first + row * stride_bytes, first + row * stride_bytes + row_bytes)
