"""INT4 in groups: against the formula written element by element, and what training, engines and files make of it."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rltrain.config.schema import FakeQuantization
from rltrain.models import products
from rltrain.models.products import int4_rounded
from rltrain.training.fake_quantization import rounded, rounded_weights
from rltrain.training.fsdp_model import round_experts

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
FOUR = FakeQuantization(group_size=4)


def to_bfloat16(x: np.ndarray) -> np.ndarray:
    """float32 numbers of eight significant bits, of two equally near ones the even one."""
    bits = x.astype(np.float32).view(np.uint32)
    kept = (bits + 0x7FFF + ((bits >> 16) & 1)) & np.uint32(0xFFFF0000)
    return np.where(np.isfinite(x), kept.view(np.float32), x).astype(np.float32)


def in_type(x: np.ndarray, dtype: torch.dtype) -> np.ndarray:
    if dtype == torch.bfloat16:
        return to_bfloat16(x)
    with np.errstate(over="ignore"):
        return x.astype(np.float16 if dtype == torch.float16 else np.float32).astype(np.float32)


def slow(x: np.ndarray, group_size: int, divisor: float, dtype: torch.dtype) -> np.ndarray:
    """Group by group of each row; of float32 values that are numbers of `dtype`."""
    made = np.zeros_like(x)
    for row in range(x.shape[0]):
        for first in range(0, x.shape[1], group_size):
            group = x[row, first : first + group_size]
            with np.errstate(invalid="ignore"):
                scale = in_type(np.abs(group).max(keepdims=True) / np.float32(divisor), dtype)[0]
                codes = np.clip(np.rint(group / scale), -8, 7) if scale != 0 else np.zeros_like(group)
                made[row, first : first + group_size] = in_type(codes * scale, dtype)
    return made


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(DTYPES),
    st.tuples(st.integers(1, 3), st.integers(1, 40)),
    st.integers(1, 17),
    st.sampled_from([7.0, 7.5, 8.0]),
    st.sampled_from([0.0, 1e-7, 2e-2, 1.0, 3e4]),
    st.integers(0, 2**31),
)
def test_it_is_the_formula(
    dtype: torch.dtype, shape: tuple[int, int], group_size: int, divisor: float, magnitude: float, seed: int
) -> None:
    x = (np.random.default_rng(seed).standard_normal(shape) * magnitude).astype(np.float32)
    given = torch.from_numpy(x).to(dtype)
    before = given.clone()
    found = int4_rounded(given, group_size, divisor)
    assert found.dtype == dtype and found.data_ptr() != given.data_ptr()
    assert torch.equal(given, before)
    assert np.array_equal(
        found.float().numpy(), slow(given.float().numpy(), group_size, divisor, dtype), equal_nan=True
    )


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 5), st.integers(1, 8), st.sampled_from([7.0, 7.5]), st.integers(0, 2**31))
def test_a_group_is_a_few_multiples_of_one_number(groups: int, group_size: int, divisor: float, seed: int) -> None:
    """No element moves by more than half a scale, but that which no integer up to 7 is near enough to."""
    x = torch.randn(2, groups * group_size, generator=torch.Generator().manual_seed(seed), dtype=torch.float32)
    found = int4_rounded(x, group_size, divisor).view(2, groups, group_size)
    scale = x.view(2, groups, group_size).abs().amax(-1, keepdim=True) / divisor
    codes = found / scale
    assert torch.allclose(codes, codes.round(), atol=1e-5)
    assert codes.max() <= 7.001 and codes.min() >= (-7.001 if divisor == 7 else -8.001)
    assert bool(((found - x.view_as(found)).abs() <= scale * 0.50001).all())


@pytest.mark.parametrize("dtype", DTYPES)
def test_by_seven_what_is_rounded_stays_as_it_is(dtype: torch.dtype) -> None:
    """Whatever a group's largest magnitude is: all significands of half precision, many of float32. By another number
    it does not."""
    bits = {torch.float32: 4096, torch.bfloat16: 128, torch.float16: 1024}[dtype]
    largest = (1 + torch.arange(bits) / bits).repeat_interleave(4)[:, None].to(dtype)
    groups = torch.cat([largest, largest * (2 * torch.rand(len(largest), 7) - 1).to(dtype)], -1)
    once = int4_rounded(groups, 8, 7.0)
    assert torch.equal(int4_rounded(once, 8, 7.0), once)
    other = int4_rounded(groups, 8, 7.5)
    assert not torch.equal(int4_rounded(other, 8, 7.5), other)


@pytest.mark.parametrize("group_size", [4, 5])
def test_rows_are_rounded_alike_whatever_is_rounded_with_them(group_size: int, monkeypatch: Any) -> None:
    """Experts one above the other, rows of one rank, and as many at a time as memory has room for."""
    x = torch.randn(3, 6, 8)
    whole = int4_rounded(x, group_size, 7.0)
    assert torch.equal(int4_rounded(x[1, 2:5], group_size, 7.0), whole[1, 2:5])
    assert torch.equal(int4_rounded(x.transpose(0, 1), group_size, 7.0), whole.transpose(0, 1))
    monkeypatch.setattr(products, "AT_ONCE_ELEMENTS", 16)
    assert torch.equal(int4_rounded(x, group_size, 7.0), whole)


def test_what_is_not_finite_spoils_its_group_alone() -> None:
    x = torch.tensor([[1.0, 2.0, torch.inf, 1.0, 1.0, 7.0, 3.0, 0.0], [torch.nan, 0, 0, 0, 0, 0, 0, 0]])
    found = int4_rounded(x, 4, 7.0)
    assert found[0, :4].isnan().all() and found[0, 4:].tolist() == [1, 7, 3, 0]
    assert found[1, :4].isnan().all() and not found[1, 4:].any()


def test_the_gradient_is_that_of_the_rounded_weights() -> None:
    """As if they were what is trained: of a loss that is no linear one."""
    weight, inputs = torch.randn(6, 8, requires_grad=True), torch.randn(5, 8)
    made = rounded(weight, FOUR)
    assert not torch.equal(made, weight)
    (inputs @ made.t()).exp().sum().backward()
    plain = made.detach().requires_grad_(True)
    (inputs @ plain.t()).exp().sum().backward()
    assert torch.equal(weight.grad, plain.grad)


class Experts(torch.nn.Module):
    """As transformers has them."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_up_proj, self.down_proj = (torch.nn.Parameter(torch.randn(2, *shape)) for shape in ((16, 4), (4, 8)))

    def forward(self, hidden: Tensor, expert: Tensor) -> Tensor:
        gate, up = (hidden @ self.gate_up_proj[int(expert)].t()).chunk(2, -1)
        return (gate * up) @ self.down_proj[int(expert)].t()


def test_stacked_experts_compute_with_rounded_weights_and_keep_their_own() -> None:
    model = torch.nn.ModuleDict({"mlp": torch.nn.ModuleDict({"experts": Experts(), "gate": torch.nn.Linear(4, 2)})})
    experts, kept = model["mlp"]["experts"], Experts()
    kept.load_state_dict({name: int4_rounded(one, 4, 7.0) for name, one in experts.state_dict().items()})
    own, inputs = dict(experts.named_parameters()), (torch.randn(3, 4), torch.tensor(1))
    round_experts(model, FOUR)
    found, wanted = experts(*inputs), kept(*inputs)
    assert torch.equal(found, wanted)
    assert all(experts.get_parameter(name) is one for name, one in own.items())
    found.square().sum().backward()
    wanted.square().sum().backward()
    assert all(torch.equal(one.grad, kept.get_parameter(name).grad) for name, one in own.items())


def test_engines_get_experts_as_the_model_computes_with_them() -> None:
    """In the type of their computation, though what is trained is wider."""
    weights = {name: torch.randn(2, 8) for name in ("mlp.experts.gate_up_proj", "mlp.shared_experts.up_proj", "norm")}
    found = rounded_weights(weights, FOUR, torch.bfloat16)
    assert [*found] == [*weights] and len(found) == 3
    expert = found["mlp.experts.gate_up_proj"]
    wanted = int4_rounded(weights["mlp.experts.gate_up_proj"].bfloat16(), 4, 7.0)
    assert expert.dtype == torch.float32 and torch.equal(expert, wanted.float())
    assert all(found[name] is weights[name] for name in ("mlp.shared_experts.up_proj", "norm"))
    assert rounded_weights(weights, None, torch.bfloat16) is weights


def test_a_transformer_engine_that_lets_nobody_round_is_refused() -> None:
    from rltrain.errors import ConfigError
    from rltrain.training.megatron.experts import round_experts as round_megatrons

    grouped = torch.nn.Module()
    grouped.weight0 = torch.nn.Parameter(torch.randn(4, 8))
    model = torch.nn.ModuleDict({"mlp": torch.nn.ModuleDict({"experts": torch.nn.ModuleDict({"linear_fc1": grouped})})})
    with pytest.raises(ConfigError, match=r"model\.fake_quantization: .* have no _get_weight_tensors.*local"):
        round_megatrons(model, FOUR)
    grouped._get_weight_tensors = lambda: [grouped.weight0]
    round_megatrons(model, FOUR)
    assert torch.equal(grouped._get_weight_tensors()[0], int4_rounded(grouped.weight0, 4, 7.0))
