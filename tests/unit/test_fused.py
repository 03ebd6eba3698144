"""Tests of the fused kernels of layers, in Triton's interpreter: values and gradients equal torch's in fp64."""

from collections.abc import Callable, Iterator, Sequence
from itertools import product
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rltrain.models import attention, fused, layer_kernels
from tests.support.fused_references import EPS, KINDS, agrees, normal, plain_norm, plain_turn, turn_of
from tests.support.triton_interpreter import compiled


@given(
    rows=st.integers(1, 40), size=st.integers(1, 200), offset=st.sampled_from([0.0, 1.0]), kind=st.sampled_from(KINDS)
)
def test_norms(rows: int, size: int, offset: float, kind: torch.dtype) -> None:
    inputs = normal(rows, 1, size, dtype=kind), normal(size, dtype=kind, seed=1)
    agrees(
        lambda x, weight: [fused.rms_norm(x, weight, EPS, offset)],
        lambda x, weight: [plain_norm(x, weight, offset)],
        inputs,
    )


@given(rows=st.integers(1, 40), size=st.integers(1, 200), kinds=st.sampled_from([*product(KINDS, KINDS)]))
def test_norms_of_sums(rows: int, size: int, kinds: tuple[torch.dtype, torch.dtype]) -> None:
    """An fp32 residual stream takes products in half precision, and the norm is in the weights' type."""
    of_residual, of_weights = kinds
    inputs = normal(rows, 1, size, dtype=of_residual), normal(rows, 1, size, dtype=of_weights, seed=1)

    def plain(x: Tensor, added: Tensor, weight: Tensor) -> list[Tensor]:
        total = x + added
        rounded = total.to(torch.promote_types(*kinds)).double()  # the norm is that of the rounded sum
        total = total + (rounded - total).detach()
        return [total, plain_norm(total, weight, 0.0)]

    agrees(
        lambda x, added, weight: fused.added_norm(x, added, weight, EPS),
        plain,
        [*inputs, normal(size, dtype=of_weights, seed=2)],
    )


def test_a_sum_can_be_used_without_its_norm() -> None:
    x, added, weight = (normal(3, 8, seed=seed).requires_grad_() for seed in range(3))
    weight = normal(8).requires_grad_()
    total, _ = fused.added_norm(x, added, weight, EPS)
    of_x, of_added = torch.autograd.grad(total.sum(), (x, added))
    assert torch.equal(of_x, torch.ones_like(x)) and torch.equal(of_added, of_x)


def test_frozen_weights_get_no_gradient() -> None:
    x, weight = normal(3, 8).requires_grad_(), normal(8, seed=1)
    fused.rms_norm(x, weight, EPS).sum().backward()
    expected = torch.autograd.grad(plain_norm(x, weight, 0.0).sum(), x)[0]
    torch.testing.assert_close(x.grad, expected)


@settings(max_examples=12)
@given(
    rows=st.integers(1, 20),
    size=st.sampled_from([1, 96, 1024, 1500]),
    is_gelu=st.booleans(),
    kind=st.sampled_from(KINDS),
)
def test_gated_activations(rows: int, size: int, is_gelu: bool, kind: torch.dtype) -> None:
    gate, up = normal(rows, 1, size, dtype=kind), normal(rows, 1, size, dtype=kind, seed=1)

    def plain(gate: Tensor, up: Tensor) -> list[Tensor]:
        return [(F.gelu(gate, approximate="tanh") if is_gelu else F.silu(gate)) * up]

    agrees(lambda gate, up: [fused.gated_product(gate, up, is_gelu)], plain, [gate, up])
    side_by_side = [torch.cat([gate, up], -1)]
    agrees(lambda both: [fused.gated(both, is_gelu)], lambda both: plain(*both.chunk(2, -1)), side_by_side)


@settings(max_examples=12)
@given(
    tokens=st.integers(1, 20),
    shape=st.sampled_from([(1, 1), (2, 3), (3, 2), (8, 1)]),
    head=st.sampled_from([(2, 1), (16, 8), (20, 6), (24, 12), (80, 20)]),
    pairs=st.booleans(),
    norms=st.booleans(),
    kind=st.sampled_from(KINDS),
)
def test_rotation_of_groups(
    tokens: int, shape: tuple[int, int], head: tuple[int, int], pairs: bool, norms: bool, kind: torch.dtype
) -> None:
    (groups, group), (head_dim, half) = shape, head
    turn = turn_of(tokens, half, pairs=pairs)
    heads = normal(tokens, groups, group + 2, head_dim, dtype=kind)
    weights = [normal(head_dim, dtype=kind, seed=seed) for seed in (4, 5)] if norms else []

    def turned(heads: Tensor, *weights: Tensor) -> Sequence[Tensor]:
        return fused.turned_groups(heads, turn._replace(norms=weights or None))  # type: ignore[arg-type]

    def plain(heads: Tensor, *weights: Tensor) -> Sequence[Tensor]:
        of_queries, of_keys = weights or (None, None)
        queries, keys = heads[:, :, :-2].flatten(1, 2), heads[:, :, -2]
        return plain_turn(queries, of_queries, turn), plain_turn(keys, of_keys, turn), heads[:, :, -1]

    agrees(turned, plain, [heads, *weights])


@settings(max_examples=6)
@given(tokens=st.integers(1, 20), counts=st.sampled_from([(4, 4), (6, 2)]), kind=st.sampled_from(KINDS))
def test_rotation_of_queries_and_keys(tokens: int, counts: tuple[int, int], kind: torch.dtype) -> None:
    """Rows of transformers' angles hold both halves."""
    turn = turn_of(tokens, 8, pairs=False)
    turn = turn._replace(cos=turn.cos.repeat(1, 2), sin=turn.sin.repeat(1, 2))
    agrees(
        lambda queries, keys: fused.turned_pair(queries, keys, turn),
        lambda queries, keys: (plain_turn(queries, None, turn), plain_turn(keys, None, turn)),
        [normal(tokens, count, 16, dtype=kind) for count in counts],
    )


def test_no_tokens() -> None:
    turn, heads = turn_of(0, 4, pairs=False), torch.empty(0, 2, 4, 8, requires_grad=True)
    weight = normal(8).requires_grad_()
    queries, _, _ = fused.turned_groups(heads, turn._replace(norms=(weight, weight)))
    normed = fused.rms_norm(queries, weight, EPS)
    (fused.gated(normed).sum() + normed.sum()).backward()
    assert torch.equal(weight.grad, torch.zeros(8))


def kernels_of_a_model(kind: str) -> dict[ModuleType, dict[str, tuple[dict[str, str], dict[str, object]]]]:
    """Returns signatures and constants of all kernels by module, for heads of 128 elements and rows of 4096."""
    shapes = {
        name: "i32" for name in ("size", "num_rows", "num_tokens", "num_queries", "num_keys", "num_first", "group")
    }
    numbers = shapes | {"eps": "fp32", "offset": "fp32", "num_parts": "i32"}
    head = {"head_dim": 128, "half": 64, "is_pairs": False, "rows": 16, "half_block": 64, "rest_block": 1}
    head |= {"head_block": 128}
    rows, gate = {"rows": 1, "block": 4096}, {"activation": "gelu_tanh", "rows": 1, "block": 1024}
    without = dict.fromkeys
    constants: dict[ModuleType, dict[str, dict[str, object]]] = {
        layer_kernels: {
            "_norm_forward": rows | without(("added_bias", "post_weight", "bias")),
            "_gate_forward": gate | without(("weights", "group_size", "group_stride")),
            "_turn_forward": head
            | without(("values", "made_values", "angle_rows", "table", "positions", "table_stride", "block_tokens")),
        },
        fused: {
            "_sum_parts": {"block": 128, "rows": 16},
            "_norm_backward": rows,
            "_gate_backward": gate,
            "_turn_backward": head,
        },
    }

    def type_of(name: str) -> str:
        if name.endswith(("stride", "_token", "_group", "_head")):
            return "i32"
        return numbers.get(name, "*fp32" if name in ("parts", "cos", "sin") else f"*{kind}")

    return {
        module: {
            name: ({argument: type_of(argument) for argument in getattr(module, name).arg_names}, own)
            for name, own in of_module.items()
        }
        for module, of_module in constants.items()
    }


@pytest.mark.slow
def test_kernels_compile_for_gpus() -> None:
    """No kernel needs more registers than a thread can have."""
    for kind in ("bf16", "fp32"):
        for module, kernels in kernels_of_a_model(kind).items():
            norms = {name: kernels.pop(name) for name in [*kernels] if name.startswith("_norm")}
            for group, num_warps in ((kernels, 4), (norms, 8)):
                for name, by_architecture in compiled(module.__name__, group, num_warps).items():
                    for architecture, figures in by_architecture.items():
                        assert figures["spills"] == 0, (name, kind, architecture, figures)


@pytest.fixture
def chosen(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], ModuleType | None]]:
    """Yields a function that chooses the kernels of a GPU, whose stand-in is the CPU."""
    monkeypatch.setattr(attention, "FUSED_DEVICE", "cpu")
    attention.fused_kernels.cache_clear()
    yield lambda: attention.fused_kernels(torch.device("cpu"))
    attention.fused_kernels.cache_clear()


def test_kernels_that_agree_with_torch_are_chosen(chosen: Callable[[], ModuleType | None], caplog: Any) -> None:
    assert chosen() is fused and not caplog.text


@pytest.mark.parametrize("name", ["added_norm", "gated", "turned_groups"])
def test_a_kernel_that_computes_other_gradients_is_not_chosen(
    name: str, chosen: Callable[[], ModuleType | None], monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    kernel = getattr(fused, name)

    def without_some(*arguments: Any, **settings: Any) -> Any:
        made = kernel(*arguments, **settings)
        first, *others = made if isinstance(made, tuple) else (made,)
        halved = first.detach() / 2 + first / 2  # the same values
        return halved if isinstance(made, Tensor) else (halved, *others)

    monkeypatch.setattr(fused, name, without_some)
    assert chosen() is None and "layers use torch's operators, not fused Triton kernels" in caplog.text
