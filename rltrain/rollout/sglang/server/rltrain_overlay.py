"""Some elements of a checkpoint's tensor, to be loaded as all of it would be: a model's own loader cuts it, fuses it with
others and copies it where it goes, and what has not changed stays there as it is.

Needs torch alone: the Python of an engine need not have rltrain.
"""

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor

if TYPE_CHECKING:
    from rltrain_delta_files import Changed

CUTS = frozenset(
    "narrow view reshape transpose t permute contiguous clone chunk split split_with_sizes unbind unsqueeze squeeze "
    "flatten detach __getitem__ select swapaxes movedim".split()
)
"""Of which one made of values and marks alike says which values are marked."""
MOVES = frozenset(("to", "cpu", "cuda", "type", "float", "half", "bfloat16"))
"""Of values, to another device or type."""
ASKS = frozenset(
    "size dim numel nelement element_size is_contiguous storage_offset untyped_storage stride is_floating_point "
    "__len__ get_device ndimension data_ptr is_complex __repr__ __hash__".split()
)
"""What is asked of a tensor and changes nothing."""


class CannotLoad(Exception):  # noqa: N818 - what is told to whoever asked
    """A model's loader does what keeps no track of single elements."""


class Count:
    """Of the marked elements that loaders have copied."""

    def __init__(self) -> None:
        self.copied = 0
        self._lock = threading.Lock()

    def add(self, number: int) -> None:
        with self._lock:  # experts may be loaded by several threads
            self.copied += number


class Overlay(torch.Tensor):
    """Values of which those count that are marked: `copy_` of it changes nothing else. CannotLoad where anything is done
    with it that would lose the marks."""

    marks: Tensor
    count: Count

    @classmethod
    def of(cls, values: Tensor, marks: Tensor, count: Count) -> Self:
        made = values.as_subclass(cls)
        made.marks, made.count = marks, count
        return made

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        named = kwargs or {}
        name = getattr(func, "__name__", "")
        with torch._C.DisableTorchFunctionSubclass():
            if name == "copy_" and not isinstance(args[0], Overlay):
                return _copy(args[0], args[1])
            self = args[0] if args else None
            others = [*args[1:], *named.values()]
            if not isinstance(self, Overlay) or any(isinstance(other, Overlay) for other in others):
                raise CannotLoad(f"{name} of a tensor of which some elements are known")
            return _done(func, name, self, args[1:], named)


def _done(func: Callable[..., Any], name: str, of: Overlay, others: Sequence[Any], named: Mapping[str, Any]) -> Any:
    found = func(of.as_subclass(Tensor), *others, **named)
    if name in MOVES:
        return Overlay.of(found, of.marks.to(found.device), of.count)
    if name in CUTS or (name == "__get__" and isinstance(found, Tensor)):
        marks = func(of.marks, *others, **named)
        if isinstance(found, Tensor):
            return Overlay.of(found, marks, of.count)
        return tuple(Overlay.of(one, marked, of.count) for one, marked in zip(found, marks, strict=True))
    if name == "item" and bool(of.marks):
        of.count.add(1)
        return found
    if name in ASKS or name == "__get__":
        return found
    raise CannotLoad(f"{name} of a tensor of which some elements are known")


def _copy(target: Tensor, source: Overlay) -> Tensor:
    marks = source.marks.to(target.device)
    values = source.as_subclass(Tensor).to(target.device, target.dtype)
    if values.shape != target.shape:
        raise CannotLoad(f"a copy of {list(values.shape)} to {list(target.shape)}")
    source.count.add(int(marks.sum()))
    return target.copy_(torch.where(marks, values, target))


def load_changes(load: Callable[[Iterator[tuple[str, Tensor]]], Any], tensors: "Iterable[Changed]") -> list[Count]:
    """By a model's `load` of named tensors; how many elements of each were copied. CannotLoad as `Overlay`."""
    counts = []

    def overlays() -> Iterator[tuple[str, Tensor]]:
        for changed in tensors:
            count = Count()
            counts.append(count)
            values = torch.zeros(changed.numel, dtype=changed.dtype)
            marks = torch.zeros(changed.numel, dtype=torch.bool)
            values[changed.elements], marks[changed.elements] = changed.values, True
            yield changed.name, Overlay.of(values.view(changed.shape), marks.view(changed.shape), count)

    load(overlays())
    return counts
