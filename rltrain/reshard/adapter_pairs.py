"""Which rows of B go with which part of A, where a layout keeps the low-rank adapters of several matrices in one
parameter."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import groupby
from math import prod
from typing import Literal

from rltrain.models.lora import ADAPTER_A, ADAPTER_B, A, B
from rltrain.reshard.layout import Layout, Segment

_A_NAME = re.compile(rf"(?P<adapted>.+){re.escape(ADAPTER_A)}(?P<expert>\d*)")


@dataclass(frozen=True)
class AdapterPair:
    """`a` [parts * rank, inputs] and `b` [outputs, rank], with a first dimension more where experts are stacked."""

    adapted: str
    """The layer or the parameter that it is added to."""
    expert: str
    """The number of the expert in a layer of several, where each has parameters of its own; else nothing."""
    a: tuple[int, ...]
    b: tuple[int, ...]
    segments: tuple[Segment, ...]
    """Rows of `b`, in order, with the part of `a` that they go with as their tensor."""
    cut: Literal["rows", "columns", None]
    """How the matrices are cut: by rows, as `b` then is, or by columns, as `a` is."""

    @property
    def names(self) -> tuple[str, str]:
        return self.adapted + ADAPTER_A + self.expert, self.adapted + ADAPTER_B + self.expert

    @property
    def num_parts(self) -> int:
        return self.a[-2] // self.b[-1]

    @property
    def rows_of_parts(self) -> list[int]:
        """Rows of `b` that go with each part, where those of a part lie together and in the parts' order. ValueError
        elsewhere."""
        runs = [(part, [*run]) for part, run in groupby(self.segments, key=lambda segment: segment.tensor)]
        if [part for part, _ in runs] != [*range(self.num_parts)]:
            raise ValueError(f"{self.adapted}: the rows of its adapters do not lie part by part")
        return [sum(segment.count for segment in run) for _, run in runs]


def adapter_pairs(layout: Layout, rank: int) -> list[AdapterPair]:
    """Those of `rank`, in the order of its parameters."""
    mine, tensors = layout.on(rank), layout.tensors.names
    shapes: Mapping[str, tuple[int, ...]] = dict(mine.parameters)
    boxes: dict[str, list[tuple[int, int, int]]] = {name: [] for name in shapes}
    names, ones = [*shapes], [prod(shape[-2:]) for shape in shapes.values()]
    for parameter, offset, tensor, rows in zip(
        *(mine.pieces[field].tolist() for field in ("parameter", "offset", "tensor", "rows")), strict=True
    ):
        if offset < ones[parameter]:  # of stacked experts the first tells of all
            boxes[names[parameter]].append((offset, tensor, rows))
    found = []
    for name in names:
        if (matched := _A_NAME.fullmatch(name)) is None:
            continue
        adapted, expert = matched["adapted"], matched["expert"]
        other = adapted + ADAPTER_B + expert
        part = {tensors[tensor]: number for number, (_, tensor, _) in enumerate(sorted(boxes[name]))}
        width = shapes[other][-1]
        segments = tuple(
            Segment(part[tensors[tensor].removesuffix(B) + A], offset // width, rows)
            for offset, tensor, rows in sorted(boxes[other])
        )
        cut = _cut(layout, part, shapes[name], shapes[other])
        found.append(AdapterPair(adapted, expert, shapes[name], shapes[other], segments, cut))
    return found


def _cut(
    layout: Layout, parts: Iterable[str], a: tuple[int, ...], b: tuple[int, ...]
) -> Literal["rows", "columns", None]:
    """Of adapters whose A are the tensors `parts`, from what one rank has of them."""
    whole = [layout.tensors.shapes[layout.tensors.numbers[name]] for name in parts]
    if a[-1] < whole[0][1]:
        return "columns"
    others = [layout.tensors.numbers[name.removesuffix(A) + B] for name in parts]
    return "rows" if b[-2] < sum(layout.tensors.shapes[number][0] for number in others) else None
