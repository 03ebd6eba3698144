"""Tensors that backward makes again, because they cost little time and much memory."""

import threading
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

ATTRIBUTE = "rltrain_recipe"
"""Attribute of a tensor with its recipe, and its number among the recipe's results."""

Made = TypeVar("Made", Tensor, tuple[Tensor, ...])


class Recipe:
    """A function that makes tensors of others. It keeps the others for backward. They may have recipes themselves."""

    __slots__ = ("_inputs", "_made", "_make", "_uses")

    def __init__(
        self, count: int, make: Callable[..., Tensor | tuple[Tensor, ...]], inputs: tuple[Tensor, ...]
    ) -> None:
        self._make, self._inputs = make, [_packed(one.detach()) for one in inputs]
        self._uses = [0] * count
        """The number of times that backward will still ask for each result."""
        self._made: list[Tensor | None] = [None] * count
        """Results that backward will ask for again."""

    def keep(self, number: int) -> None:
        """Announces a use of result `number`."""
        self._uses[number] += 1

    def take(self, number: int) -> Tensor:
        """Returns result `number`. All results are made at once, and dropped with their last announced use."""
        found = self._made[number]
        if found is None:
            with torch.no_grad():
                made = self._make(*map(_unpacked, self._inputs))
            all_made = made if isinstance(made, tuple) else (made,)
            found = all_made[number]
            self._made = [one if uses else None for one, uses in zip(all_made, self._uses, strict=True)]
        self._uses[number] -= 1
        if self._uses[number] <= 0:
            self._made[number] = None
        return found


class _Again:
    """A view of a recipe's result, as autograd keeps it."""

    __slots__ = ("_number", "_recipe", "_view")

    def __init__(self, recipe: Recipe, number: int, view: Tensor) -> None:
        self._recipe, self._number = recipe, number
        self._view = view.size(), view.stride(), view.storage_offset()
        recipe.keep(number)

    def take(self) -> Tensor:
        return self._recipe.take(self._number).as_strided(*self._view)


class _Known(threading.local):
    """The recipes of the tensors of all contexts around, by storage."""

    def __init__(self) -> None:
        self.of_storage: dict[int, tuple[Recipe, int]] = {}


_known = _Known()


def with_recipe(made: Made, make: Callable[..., Made], *inputs: Tensor) -> Made:
    """Returns `made`, one or several contiguous tensors. They are noted as the results of make(*inputs)."""
    if torch.is_grad_enabled():
        results = made if isinstance(made, tuple) else (made,)
        recipe = Recipe(len(results), make, inputs)
        for number, one in enumerate(results):
            setattr(one, ATTRIBUTE, (recipe, number))
    return made


class MadeAgain:
    """A context in which autograd keeps recipes in place of `tensors`, if these have any."""

    __slots__ = ("_before", "_found", "_hooks")

    def __init__(self, *tensors: Tensor) -> None:
        noted = [(one, recipe) for one in tensors if (recipe := getattr(one, ATTRIBUTE, None)) is not None]
        self._found = {one.untyped_storage()._cdata: recipe for one, recipe in noted}

    def __enter__(self) -> None:
        if self._found:
            self._before = _known.of_storage
            _known.of_storage = self._before | self._found if self._before else self._found
            self._hooks = saved_tensors_hooks(_packed, _unpacked)
            self._hooks.__enter__()

    def __exit__(self, *error: Any) -> None:
        if self._found:
            self._hooks.__exit__(*error)
            _known.of_storage = self._before


def _packed(tensor: Tensor) -> Tensor | _Again:
    known = _known.of_storage.get(tensor.untyped_storage()._cdata)
    return tensor if known is None else _Again(*known, tensor)


def _unpacked(kept: Tensor | _Again) -> Tensor:
    return kept.take() if isinstance(kept, _Again) else kept
