"""Tensors that backward makes again."""

import gc
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from rltrain.training.recipes import MadeAgain, with_recipe

LEFT, RIGHT = torch.randn(5, 4, dtype=torch.float64), torch.randn(4, 3, dtype=torch.float64)


class Counted:
    """A function and the number of its calls."""

    def __init__(self, function: Callable[..., Tensor | tuple[Tensor, ...]]) -> None:
        self.function, self.calls = function, 0

    def __call__(self, *inputs: Tensor) -> Tensor | tuple[Tensor, ...]:
        self.calls += 1
        return self.function(*inputs)


def gradients(of: Callable[[Tensor, Tensor], Tensor]) -> tuple[Tensor, ...]:
    left, right = LEFT.clone().requires_grad_(), RIGHT.clone().requires_grad_()
    return torch.autograd.grad(of(left, right).sin().sum(), (left, right))


def product_of(make: Counted, copies: int = 1) -> Callable[[Tensor, Tensor], Tensor]:
    """Returns a function of left and right: the sum of some products of tanh(left) and right. The products do not keep
    tanh(left)."""

    def product(left: Tensor, right: Tensor) -> Tensor:
        tangents = with_recipe(left.tanh(), make, left)
        with MadeAgain(tangents):
            return torch.stack([tangents.view(5, 4) @ right for _ in range(copies)]).sum(0)

    return product


@pytest.mark.parametrize("copies", [1, 3])
def test_a_tensor_is_made_again_once_for_all_its_uses(copies: int) -> None:
    make = Counted(torch.tanh)
    found = gradients(product_of(make, copies))
    expected = gradients(lambda left, right: copies * (left.tanh() @ right))
    assert make.calls == 1
    assert all(torch.allclose(one, other, rtol=1e-14) for one, other in zip(found, expected, strict=True))


def test_a_second_backward_makes_it_again() -> None:
    make, right = Counted(torch.tanh), RIGHT.clone().requires_grad_()
    loss = product_of(make)(LEFT, right).sum()
    first, second = (torch.autograd.grad(loss, right, retain_graph=True)[0] for _ in range(2))
    assert make.calls == 2 and torch.equal(first, second)


class KeepsItsInput(torch.autograd.Function):
    """tanh(x), which keeps x in place of the result."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:  # type: ignore[no-untyped-def]
        ctx.save_for_backward(x)
        return x.tanh()

    @staticmethod
    def backward(ctx, gradient: Tensor) -> Tensor:  # type: ignore[no-untyped-def, override]
        return gradient * (1 - ctx.saved_tensors[0].tanh() ** 2)


@pytest.mark.parametrize("noted", [True, False])
def test_its_memory_is_free_until_backward(noted: bool) -> None:
    left, right = LEFT.clone().requires_grad_(), RIGHT.clone().requires_grad_()
    made = KeepsItsInput.apply(left)
    if noted:
        with_recipe(made, torch.tanh, left)
    with MadeAgain(made):
        product = made @ right
    memory = StorageWeakRef(made.untyped_storage())
    del made
    gc.collect()
    assert memory.expired() is noted
    product.sum().backward()
    assert right.grad is not None and torch.allclose(right.grad, LEFT.tanh().T @ torch.ones(5, 3, dtype=torch.float64))


def test_results_of_one_recipe_are_made_together_and_recipes_depend_on_recipes() -> None:
    def both(x: Tensor) -> tuple[Tensor, Tensor]:
        return x.tanh(), x.sin()

    def chosen(x: Tensor) -> Tensor:
        return x.index_select(0, torch.tensor([4, 0, 4, 1]))

    make, select = Counted(both), Counted(chosen)

    def of(left: Tensor, right: Tensor) -> Tensor:
        first, second = with_recipe(both(left), make, left)
        with MadeAgain(first, second):
            rows = with_recipe(chosen(second), select, second)
            with MadeAgain(rows):
                return (rows @ right).square().sum() + (first @ right).sum()

    def plain(left: Tensor, right: Tensor) -> Tensor:
        return (chosen(left.sin()) @ right).square().sum() + (left.tanh() @ right).sum()

    found, expected = gradients(of), gradients(plain)
    assert (make.calls, select.calls) == (1, 1)
    assert all(torch.allclose(one, other, rtol=1e-14) for one, other in zip(found, expected, strict=True))


def test_nothing_is_noted_without_gradients() -> None:
    make = Counted(torch.tanh)
    with torch.no_grad():
        made = with_recipe(LEFT.tanh(), make, LEFT)
    right = RIGHT.clone().requires_grad_()
    with MadeAgain(made):
        product = made @ right
    product.sum().backward()
    assert make.calls == 0
