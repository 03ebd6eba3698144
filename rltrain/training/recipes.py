"""Tensors that backward makes again, because they cost little time and much memory."""

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch
from torch import Tensor

ATTRIBUTE = "rltrain_recipe"
"""Attribute of a tensor with its recipe."""


class Recipe:
    """How tensors are made of others. It keeps the others for backward, which may have recipes themselves."""

    def __init__(self, make: Callable[..., Tensor | tuple[Tensor, ...]], *inputs: Tensor) -> None:
        self._make, self._inputs = make, [_packed(one.detach()) for one in inputs]
        self._uses = Counter[int]()
        """How often backward will still ask for each result."""
        self._made = dict[int, Tensor]()
        """Results that backward will ask for again."""

    def keep(self, number: int) -> None:
        """Announces a use of result `number`."""
        self._uses[number] += 1

    def take(self, number: int) -> Tensor:
        """Returns result `number`. All results are made at once, and dropped with their last announced use."""
        if number not in self._made:
            with torch.no_grad():
                made = self._make(*map(_unpacked, self._inputs))
            self._made = dict(enumerate(made if isinstance(made, tuple) else (made,)))
        found = self._made[number]
        self._uses[number] -= 1
        self._made = {other: one for other, one in self._made.items() if self._uses[other] > 0}
        return found


class _Again:
    """What is kept of a tensor, a view of a recipe's result."""

    def __init__(self, recipe: Recipe, number: int, view: Tensor) -> None:
        self._recipe, self._number = recipe, number
        self._view = view.size(), view.stride(), view.storage_offset()
        recipe.keep(number)

    def take(self) -> Tensor:
        return self._recipe.take(self._number).as_strided(*self._view)


class _Known(threading.local):
    """The recipes of the tensors of all contexts around, by storage."""

    def __init__(self) -> None:
        self.of_storage = dict[int, tuple[Recipe, int]]()


_known = _Known()


Made = TypeVar("Made", Tensor, tuple[Tensor, ...])


def with_recipe(made: Made, make: Callable[..., Made], *inputs: Tensor) -> Made:
    """Returns `made`, one or several contiguous tensors. They are noted as results of make(*inputs)."""
    if torch.is_grad_enabled():
        recipe = Recipe(make, *inputs)
        for number, one in enumerate(made if isinstance(made, tuple) else (made,)):
            setattr(one, ATTRIBUTE, (recipe, number))
    return made


@contextmanager
def made_again(*tensors: Tensor) -> Iterator[None]:
    """Within the context autograd keeps the recipes of those `tensors` that have one, in place of their elements."""
    found = {one.untyped_storage()._cdata: getattr(one, ATTRIBUTE) for one in tensors if hasattr(one, ATTRIBUTE)}
    if not found:
        yield
        return
    before = _known.of_storage
    _known.of_storage = before | found
    try:
        with torch.autograd.graph.saved_tensors_hooks(_packed, _unpacked):
            yield
    finally:
        _known.of_storage = before


def _packed(tensor: Tensor) -> Tensor | _Again:
    known = _known.of_storage.get(tensor.untyped_storage()._cdata)
    return tensor if known is None else _Again(*known, tensor)


def _unpacked(kept: Tensor | _Again) -> Tensor:
    return kept.take() if isinstance(kept, _Again) else kept
