"""Partial updates through a model's own weight loader. The loader cuts, fuses and copies only the changed elements.

Needs only torch, because an engine's Python may lack rltrain.
"""

import math
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor

if TYPE_CHECKING:
    from rltrain_delta_files import Changed

Shape = tuple[int, ...]

CUTS = frozenset(
    (
        *("narrow", "chunk", "split", "split_with_sizes", "unbind", "select", "__getitem__"),
        *("view", "reshape", "flatten", "unsqueeze", "squeeze", "transpose", "t", "permute", "swapaxes", "movedim"),
        *("contiguous", "clone", "detach"),
    )
)
"""Operations that move values and marks alike. The result's marks belong to the result's values."""
MOVES = frozenset(("to", "cpu", "cuda", "type", "float", "half", "bfloat16"))
"""Operations that convert values to another device or dtype."""
ASKS = frozenset(
    (
        *("size", "dim", "ndimension", "numel", "nelement", "element_size", "__len__", "__hash__", "get_device"),
        *("is_contiguous", "stride", "storage_offset", "untyped_storage", "is_floating_point", "is_complex"),
    )
)
"""Operations that only read properties of a tensor."""
MOST_JOINED = 127
"""Most tensors that marks can distinguish."""


class CannotLoad(Exception):  # noqa: N818 - names what happened
    """A model's loader uses an operation that loses track of single elements."""


class Count:
    """The number of a tensor's marked elements copied by loaders. Thread-safe."""

    def __init__(self) -> None:
        self.copied = 0
        self._lock = threading.Lock()

    def add(self, number: int) -> None:
        with self._lock:  # experts may be loaded by several threads
            self.copied += number


class Overlay(torch.Tensor):
    """A tensor of which only the elements with nonzero `marks` (int8) count. `copy_` from it changes nothing else.

    A mark n belongs to the tensor with the count `counts[n - 1]`. Nothing is marked if `counts` is empty. Raises
    CannotLoad for operations that would lose the marks.
    """

    marks: Tensor
    counts: tuple[Count, ...]

    @classmethod
    def of(cls, values: Tensor, marks: Tensor, counts: tuple[Count, ...]) -> Self:
        """Returns an overlay of `values`. `marks` must have their shape."""
        made = values.as_subclass(cls)
        made.marks, made.counts = marks, counts
        return made

    @property
    def values(self) -> Tensor:  # type: ignore[override]
        """The values as a plain tensor."""
        with torch._C.DisableTorchFunctionSubclass():
            return self.as_subclass(Tensor)

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        named, name = kwargs or {}, getattr(func, "__name__", "")
        with torch._C.DisableTorchFunctionSubclass():
            if name == "copy_" and not isinstance(args[0], Overlay):
                return _copy(args[0], args[1])
            if name in ("cat", "concat"):
                return _joined(*args, **named)
            of, others = args[0], args[1:]
            if not isinstance(of, Overlay) or any(isinstance(one, Overlay) for one in (*others, *named.values())):
                raise CannotLoad(f"{name} of a tensor with only some known elements")
            return _done(func, name, of, others, named)


def _done(func: Callable[..., Any], name: str, of: Overlay, others: Sequence[Any], named: Mapping[str, Any]) -> Any:
    found = func(of.values, *others, **named)
    if name in MOVES:
        return Overlay.of(found, of.marks.to(found.device), of.counts)
    if name in CUTS or (name == "__get__" and isinstance(found, Tensor)):
        marks = func(of.marks, *others, **named)
        if isinstance(found, Tensor):
            return _cut(of, name, found, marks)
        return tuple(_cut(of, name, one, marked) for one, marked in zip(found, marks, strict=True))
    if name == "item" and of.counts and bool(of.marks):
        of.counts[int(of.marks) - 1].add(1)
        return found
    if name in ASKS or name == "__get__":
        return found
    raise CannotLoad(f"{name} of a tensor with only some known elements")


def _cut(of: Overlay, name: str, values: Tensor, marks: Tensor) -> Overlay:
    if values.dtype != of.values.dtype or values.shape != marks.shape:
        raise CannotLoad(f"{name} to another type, of a tensor with only some known elements")
    return Overlay.of(values, marks, of.counts)


def _joined(tensors: Sequence[Tensor], *args: Any, **named: Any) -> Overlay:
    """Concatenates overlays and plain tensors, such as zeros for padding. Plain tensors are not marked, because they do
    not change after the first load."""
    values, marks, counts = [], [], tuple[Count, ...]()
    for tensor in tensors:
        if not isinstance(tensor, Overlay):
            values.append(tensor)
            marks.append(torch.zeros_like(tensor, dtype=torch.int8))
            continue
        values.append(tensor.values)
        marks.append(torch.where(tensor.marks > 0, tensor.marks + len(counts), 0).to(torch.int8))
        counts += tensor.counts
    if len(counts) > MOST_JOINED:
        raise CannotLoad(f"cat of {len(counts)} tensors with only some known elements; at most {MOST_JOINED}")
    return Overlay.of(torch.cat(values, *args, **named), torch.cat(marks, *args, **named), counts)


def _copy(target: Tensor, source: Overlay) -> Tensor:
    if source.shape != target.shape:
        raise CannotLoad(f"a copy of {list(source.shape)} to {list(target.shape)}")
    if not source.counts:
        return target
    marks = source.marks.to(target.device)
    for number, count in enumerate(source.counts, start=1):
        count.add(int((marks == number).sum()))
    return target.copy_(torch.where(marks > 0, source.values.to(target.device, target.dtype), target))


def load_changes(
    load: Callable[[Iterator[tuple[str, Tensor]]], Any],
    tensors: "Iterable[Changed]",
    others: Iterable[tuple[str, torch.dtype, Shape]] = (),
) -> list[Count]:
    """Loads changed elements through a model's `load` of named tensors.

    `load` also sees `others`, all unchanged, because it may wait for some of them. Returns the number of copied
    elements for each of `tensors`. Raises CannotLoad as `Overlay` does.
    """
    counts = []

    def overlays() -> Iterator[tuple[str, Tensor]]:
        for changed in tensors:
            counts.append(Count())
            values = torch.zeros(math.prod(changed.shape), dtype=changed.dtype)
            marks = torch.zeros(len(values), dtype=torch.int8)
            values[changed.elements], marks[changed.elements] = changed.values, 1
            yield changed.name, Overlay.of(values.view(changed.shape), marks.view(changed.shape), (counts[-1],))
        for name, dtype, shape in others:
            nothing = torch.zeros(1, dtype=dtype).expand(shape), torch.zeros(1, dtype=torch.int8).expand(shape)
            yield name, Overlay.of(*nothing, ())

    load(overlays())
    return counts
