"""Layers on CPUs, in wide precision, with the delta rule and with rounded weights."""

import rltrain.training.megatron  # noqa: F401  # isort: skip  # first: it loads Megatron without torch's compiler
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules
from torch import Tensor
from transformers.models.qwen3_next.modeling_qwen3_next import causal_conv1d_fn, torch_chunk_gated_delta_rule

from rltrain.config import schema
from rltrain.config.schema import FakeQuantization
from rltrain.errors import ConfigError
from rltrain.models import products
from rltrain.models.delta_rule import convolve, convolve_step, delta_rule_step, gated_delta_rule, gates, packed_states
from rltrain.models.products import int4_rounded, wide_product
from rltrain.runtime.grid import Grid
from rltrain.training.fake_quantization import rounded, rounded_weights
from rltrain.training.fsdp_model import round_experts
from rltrain.training.megatron import model_config, platform
from rltrain.training.megatron.attention import (
    PackedAttention,
    PositionRotaryEmbedding,
    ShortAttention,
    packed_sequences,
    rotation,
)
from rltrain.training.megatron.layers import RMSNorm, RoundedInput, residual_addition, widen_residual_stream
from rltrain.training.megatron.model_config import ModelOptions
from rltrain.training.megatron.platform import (
    LEAST_ROWS,
    Product,
    RmsNorm,
    SwiGlu,
    TurnedHeads,
    rows_multiple,
    rows_product,
    takes_fused,
    takes_onednn,
)
from tests.support.model_shards import tiny_architecture

CPU = torch.device("cpu")
EPS = 1e-5
GROUPS, PER_GROUP, HEAD_DIM = 2, 4, 6
"""Two heads of a group are queries."""
LENGTHS = [3, 1, 5, 2]


def numbers(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


def norm(x: Tensor, weight: Tensor) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + EPS).sqrt() * weight


def angles_of(lengths: list[int], rotated: int = HEAD_DIM) -> Tensor:
    frequencies = torch.tensor([1.0, 0.3, 0.01], dtype=torch.float64)[: rotated // 2]
    return PositionRotaryEmbedding(frequencies)(packed_sequences(lengths, CPU).positions).double()


def turned_by_formula(heads: Tensor, weight: Tensor | None, angles: Tensor, magnitude: float = 1.0) -> Tensor:
    straight, values = heads[:, :, :-1], heads[:, :, -1:]
    normed = straight if weight is None else norm(straight, weight[:-1])
    first, second = normed[..., : angles.size(-1)].chunk(2, dim=-1)
    cos, sin = (magnitude * part.chunk(2, dim=-1)[0] for part in (angles.cos(), angles.sin()))
    rotated = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
    rotated = torch.cat([rotated, normed[..., angles.size(-1) :]], dim=-1)
    return torch.cat([rotated, values], dim=2)


def attention_by_torch(heads: Tensor, lengths: list[int], window: int | None = None) -> Tensor:
    query, key, value = (part.flatten(1, 2)[:, None] for part in heads.split([PER_GROUP - 2, 1, 1], dim=2))
    packed = packed_sequences(lengths, CPU)
    return PackedAttention(softmax_scale=None, window=window)(query, key, value, None, packed_seq_params=packed)


def attention_in_window(heads: Tensor, lengths: list[int], window: int) -> Tensor:
    """Computes attention in a window token by token."""
    outputs = []
    for sequence in heads.split(lengths):
        for token in range(len(sequence)):
            seen = sequence[max(0, token - window + 1) : token + 1]
            keys, values = seen[:, :, -2], seen[:, :, -1]
            scores = torch.einsum("gqd,tgd->gqt", sequence[token, :, :-2], keys) * HEAD_DIM**-0.5
            outputs.append(torch.einsum("gqt,tgd->gqd", scores.softmax(-1), values).flatten())
    return torch.stack(outputs)[:, None]


def turned(heads: Tensor, weight: Tensor | None, rotated: int = HEAD_DIM, magnitude: float = 1.0) -> Tensor:
    angles = angles_of(LENGTHS, rotated)
    return TurnedHeads.apply(heads, weight, *rotation(angles, heads, magnitude), EPS, rotated)


def attended(heads: Tensor, lengths: list[int], window: int | None = None) -> Tensor:
    return ShortAttention.apply(heads, packed_sequences(lengths, CPU), HEAD_DIM**-0.5, window)


Case = tuple[Callable[..., Tensor], Callable[..., Tensor], tuple[Tensor, ...]]


def cases() -> dict[str, Case]:
    """Returns a function, its formula and its inputs for every case."""
    torch.manual_seed(0)
    tokens, angles = sum(LENGTHS), angles_of(LENGTHS)
    heads = (tokens, GROUPS, PER_GROUP, HEAD_DIM)

    def silu_of_gate_times_up(x: Tensor) -> Tensor:
        return x[..., :4] * x[..., :4].sigmoid() * x[..., 4:]

    def with_values(weight: Tensor) -> Tensor:
        """Adds a weight for the values. The function ignores it."""
        return torch.cat([weight, torch.ones_like(weight[:1])])

    return {
        "norm": (lambda x, w: RmsNorm.apply(x, w, EPS), norm, (numbers(7, 1, 5), numbers(5))),
        "swiglu": (SwiGlu.apply, silu_of_gate_times_up, (numbers(5, 1, 8),)),
        "product": (Product.apply, lambda x, w: x @ w.T, (numbers(5, 2, 3), numbers(4, 3))),
        "rotated heads": (lambda x: turned(x, None), lambda x: turned_by_formula(x, None, angles), (numbers(*heads),)),
        "normalised and rotated heads": (
            lambda x, w: turned(x, with_values(w)),
            lambda x, w: turned_by_formula(x, with_values(w), angles),
            (numbers(*heads), numbers(PER_GROUP - 1, HEAD_DIM)),
        ),
        "heads rotated in part": (
            lambda x, w: turned(x, with_values(w), 4, 1.3),
            lambda x, w: turned_by_formula(x, with_values(w), angles_of(LENGTHS, 4), 1.3),
            (numbers(*heads), numbers(PER_GROUP - 1, HEAD_DIM)),
        ),
        "attention in a window": (
            lambda x: attended(x, LENGTHS, 2),
            lambda x: attention_in_window(x, LENGTHS, 2),
            (numbers(*heads),),
        ),
        "attention": (lambda x: attended(x, LENGTHS), lambda x: attention_by_torch(x, LENGTHS), (numbers(*heads),)),
    }


@pytest.mark.parametrize("name", cases())
def test_fused_layers_equal_their_formulas(name: str) -> None:
    function, formula, inputs = cases()[name]
    actual, expected = function(*inputs), formula(*inputs)
    torch.testing.assert_close(actual, expected)
    upstream = torch.randn_like(expected)
    for mine, wanted in zip(
        torch.autograd.grad(actual, inputs, upstream), torch.autograd.grad(expected, inputs, upstream), strict=True
    ):
        torch.testing.assert_close(mine, wanted)


@pytest.mark.slow
@pytest.mark.parametrize("name", cases())
def test_gradients_are_those_of_small_differences(name: str) -> None:
    function, _, inputs = cases()[name]
    assert torch.autograd.gradcheck(function, inputs)


@given(st.lists(st.integers(1, 9), min_size=1, max_size=8))
def test_short_attention_takes_sequences_of_any_lengths(lengths: list[int]) -> None:
    heads = torch.randn(sum(lengths), GROUPS, PER_GROUP, HEAD_DIM, dtype=torch.float64)
    torch.testing.assert_close(attended(heads, lengths), attention_by_torch(heads, lengths))


@given(st.lists(st.integers(1, 9), min_size=1, max_size=5), st.integers(1, 10))
def test_windows_hold_in_both_attentions(lengths: list[int], window: int) -> None:
    heads = torch.randn(sum(lengths), GROUPS, PER_GROUP, HEAD_DIM, dtype=torch.float64)
    expected = attention_in_window(heads, lengths, window)
    torch.testing.assert_close(attended(heads, lengths, window), expected)
    torch.testing.assert_close(attention_by_torch(heads, lengths, window), expected)


def test_no_gradient_is_asked_for_where_weights_are_frozen() -> None:
    x, weight = numbers(5, 3), numbers(4, 3).detach()
    (gradient,) = torch.autograd.grad(Product.apply(x, weight).sum(), x)
    torch.testing.assert_close(gradient, weight.sum(0).expand(5, 3))


@pytest.mark.parametrize("width", [3, 40])
@pytest.mark.parametrize("onednn", [True, False])
def test_products_equal_those_of_double_precision(width: int, onednn: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "HAS_ONEDNN", onednn and platform.HAS_ONEDNN)
    torch.manual_seed(0)
    rows, matrix = (torch.randn(shape, requires_grad=True) for shape in [(LEAST_ROWS + 1, 16), (width, 16)])
    exact = rows.double() @ matrix.double().T
    close: dict[str, Any] = {"rtol": 1e-5, "atol": 1e-5, "check_dtype": False}
    with torch.no_grad():
        torch.testing.assert_close(rows_product(rows, matrix), exact, **close)
    upstream = torch.randn(len(rows), width)
    gradients = torch.autograd.grad(Product.apply(rows, matrix), (rows, matrix), upstream)
    for mine, wanted in zip(gradients, torch.autograd.grad(exact, (rows, matrix), upstream.double()), strict=True):
        torch.testing.assert_close(mine, wanted, **close)


def test_only_full_precision_on_cpus_is_fused() -> None:
    many = torch.empty(LEAST_ROWS, 2)
    assert takes_fused(many) and takes_fused(many.double())
    assert not any(takes_fused(x) for x in (many.bfloat16(), many.to("meta")))
    assert not any(takes_onednn(x) for x in (many.bfloat16(), many.double(), many.to("meta"), many[1:]))
    assert rows_multiple(CPU, torch.bfloat16) == rows_multiple(torch.device("cuda"), torch.float32) == 1


HALF = [torch.bfloat16, torch.float16]


@pytest.mark.parametrize("chunk", [1, 50, 1 << 20])
@pytest.mark.parametrize("dtype", HALF)
def test_products_of_weights_in_half_precision_are_rounded_nowhere(
    dtype: torch.dtype, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(products, "_CHUNK_ELEMENTS", chunk)
    x, weight = torch.randn(2, 3, 17).to(dtype), torch.randn(11, 17).to(dtype)
    product = wide_product(x, weight)
    assert product.dtype == torch.float32 and product.shape == (2, 3, 11)
    assert torch.allclose(product.double(), x.double() @ weight.double().T, rtol=1e-5, atol=1e-5)
    assert torch.equal(wide_product(x.float(), weight.float()), torch.nn.functional.linear(x.float(), weight.float()))


@pytest.mark.parametrize("dtype", HALF)
def test_what_layers_add_is_not_rounded_and_a_bias_neither(dtype: torch.dtype) -> None:
    residual, added, bias = torch.randn(5, 1, 8), torch.randn(5, 1, 8).to(dtype), torch.randn(8).to(dtype)
    add = residual_addition(training=True, fused=False)
    assert torch.equal(add((added, None), residual, 0.0), residual + added.float())
    assert torch.equal(add((added, bias), residual, 0.0), residual + added.float() + bias.float())


@pytest.mark.parametrize("dtype", HALF)
def test_norms_of_a_wide_stream_round_once_to_the_weights_type(dtype: torch.dtype) -> None:
    config = SimpleNamespace(
        use_cpu_initialization=True, params_dtype=dtype, sequence_parallel=False, layernorm_zero_centered_gamma=False
    )
    norm, wide = RMSNorm(config, 16, eps=1e-6), torch.randn(4, 16)
    torch.nn.init.normal_(norm.weight)
    exact = wide.double() / (wide.double().square().mean(-1, keepdim=True) + 1e-6).sqrt() * norm.weight.double()
    assert norm(wide).dtype == dtype
    error = ((norm(wide).double() - exact).abs() / exact.abs()).detach()
    assert float(error.max()) <= torch.finfo(dtype).eps / 2 * 1.01
    assert torch.equal(norm(wide.to(dtype)), torch.nn.functional.rms_norm(wide.to(dtype), (16,), norm.weight, 1e-6))


@pytest.mark.parametrize(("family", "by_megatron"), [("qwen3", False), ("qwen3_moe", True)])
def test_megatron_fuses_the_activations_of_experts_alone_on_gpus(
    family: str, by_megatron: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_config, "accumulates_in_products", lambda device: False)
    options = ModelOptions(schema.Model(path="m"), schema.Parallel(), torch.device("cuda"), transformer_engine=False)
    config = model_config.transformer_config(tiny_architecture(family), Grid((0,)), 0, options)
    assert config.bias_activation_fusion is by_megatron and config.use_te_activation_func is not by_megatron


@pytest.mark.parametrize(
    ("given", "te", "expected"),
    [
        ("selective", False, None),
        ("selective", True, ["core_attn"]),
        (["layernorm", "mlp"], False, ["mlp"]),
        (["layernorm", "mlp"], True, ["layernorm", "mlp"]),
    ],
)
def test_megatron_recomputes_what_recipes_do_not(given: Any, te: bool, expected: list[str] | None) -> None:
    recompute = given if isinstance(given, str) else {"granularity": "selective", "modules": given}
    settings = schema.Model(path="m", recompute=recompute).recomputed
    found = model_config.recompute_settings(settings, transformer_engine=te)
    assert found.get("recompute_modules") == expected and ("recompute_granularity" in found) is bool(expected)


def test_layers_of_transformer_engine_refuse_what_they_do_not_recompute() -> None:
    settings = schema.Recompute(granularity="selective", modules=("layernorm", "rotation"))
    with pytest.raises(ConfigError, match=r"got rotation, which Transformer Engine's layers do not.*impl: local"):
        model_config.recompute_settings(settings, transformer_engine=True)


def test_norms_that_are_fused_with_products_get_the_weights_type() -> None:
    fused, plain = TransformerLayerSubmodules(), TransformerLayerSubmodules(input_layernorm=RMSNorm)
    block = TransformerBlockSubmodules(layer_specs=[ModuleSpec(TransformerLayer, submodules=s) for s in (fused, plain)])
    widen_residual_stream(block)
    assert fused.input_layernorm is fused.pre_mlp_layernorm is RoundedInput
    assert plain.input_layernorm is RMSNorm and IdentityOp not in (plain.input_layernorm, plain.pre_mlp_layernorm)
    for modules in (fused, plain):
        assert modules.self_attn_bda is modules.mlp_bda is residual_addition
    rounded = RoundedInput(SimpleNamespace(params_dtype=torch.bfloat16), hidden_size=4, eps=1e-6)
    assert rounded(torch.randn(3, 4)).dtype == torch.bfloat16


KERNEL, KEY_HEADS, HEADS, KEY_DIM, VALUE_DIM = 4, 2, 4, 8, 6
SEQUENCE_LENGTHS = (5, 130, 1, 64, 2, 65)
packed_of = partial(packed_states, kernel=KERNEL, device=torch.device("cpu"))


def drawn(lengths: tuple[int, ...], dtype: torch.dtype = torch.float32) -> tuple[Tensor, ...]:
    """Returns random queries, keys, values, weights and decays of tokens."""
    torch.manual_seed(len(lengths))
    count = sum(lengths)
    q, k = torch.randn(2, count, KEY_HEADS, KEY_DIM, dtype=dtype)
    v = torch.randn(count, HEADS, VALUE_DIM, dtype=dtype)
    rate, bias = torch.randn(2, HEADS, dtype=dtype)
    return q, k, v, *gates(*torch.randn(2, count, HEADS, dtype=dtype), rate, bias)


@pytest.mark.parametrize("lengths", [SEQUENCE_LENGTHS, (1,), (7, 3), (64, 64), (3, 200)])
def test_packed_samples_are_those_of_transformers_each_alone(lengths: tuple[int, ...]) -> None:
    given = drawn(lengths)
    outputs, finals = gated_delta_rule(*given, packed_of(lengths))
    for number, parts in enumerate(zip(*(x.split(lengths) for x in (outputs, *given)), strict=True)):
        found, q, k, v, weights, decays = (part[None] for part in parts)
        q, k = (x.repeat_interleave(HEADS // KEY_HEADS, 2) for x in (q, k))
        expected, final = torch_chunk_gated_delta_rule(
            q, k, v, decays, weights, output_final_state=True, use_qk_l2norm_in_kernel=True
        )
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(finals[number], final[0], atol=1e-5, rtol=1e-5)


def test_tokens_one_by_one_come_to_the_same() -> None:
    given, packed = drawn(SEQUENCE_LENGTHS), packed_of(SEQUENCE_LENGTHS)
    outputs, finals = gated_delta_rule(*given, packed)
    for number, parts in enumerate(zip(*(x.split(SEQUENCE_LENGTHS) for x in (outputs, *given)), strict=True)):
        expected, *of_sample = parts
        state = torch.zeros(1, HEADS, KEY_DIM, VALUE_DIM)
        found = torch.cat([delta_rule_step(*(x[t : t + 1] for x in of_sample), state) for t in range(len(expected))])
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(state[0], finals[number], atol=1e-5, rtol=1e-5)


def test_what_follows_goes_on_from_the_states_before_it() -> None:
    lengths, firsts = (70, 9, 140), (64, 1, 33)
    given, channels = drawn(lengths), torch.randn(sum(lengths), 5)
    weight = torch.randn(5, KERNEL)
    whole, final = gated_delta_rule(*given, packed_of(lengths))
    convolved, last = convolve(channels, weight, packed_of(lengths))
    rests = tuple(length - first for length, first in zip(lengths, firsts, strict=True))
    states, before = None, None
    found: list[tuple[Tensor, ...]] = []
    for of_part, is_first in ((firsts, True), (rests, False)):

        def part(x: Tensor, is_first: bool = is_first) -> Tensor:
            halves = [(y[:first], y[first:]) for y, first in zip(x.split(lengths), firsts, strict=True)]
            return torch.cat([half[not is_first] for half in halves])

        packed = packed_of(of_part)
        output, states = gated_delta_rule(*map(part, given), packed, states)
        mixed, before = convolve(part(channels), weight, packed, before)
        found.append((output, mixed))
    for expected, parts in ((whole, [x for x, _ in found]), (convolved, [y for _, y in found])):
        pieces = zip(parts[0].split(firsts), parts[1].split(rests), strict=True)
        torch.testing.assert_close(torch.cat([x for pair in pieces for x in pair]), expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(states, final, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(before, last)


def test_the_convolution_reads_no_other_sample() -> None:
    inputs, weight = torch.randn(sum(SEQUENCE_LENGTHS), 5), torch.randn(5, KERNEL)
    outputs, last = convolve(inputs, weight, packed_of(SEQUENCE_LENGTHS))
    for number, (found, sample) in enumerate(
        zip(outputs.split(SEQUENCE_LENGTHS), inputs.split(SEQUENCE_LENGTHS), strict=True)
    ):
        expected = causal_conv1d_fn(sample.t()[None], weight, activation="silu")[0].t()
        torch.testing.assert_close(found, expected)
        before = torch.zeros(1, KERNEL - 1, 5)
        steps = torch.cat([convolve_step(sample[t : t + 1], weight, before) for t in range(len(sample))])
        torch.testing.assert_close(steps, expected)
        assert torch.equal(before[0], last[number])


def test_gradients_are_those_of_the_formula() -> None:
    lengths = (3, 18, 1)
    packed = packed_of(lengths)
    given = [x.requires_grad_() for x in drawn(lengths, torch.float64)]
    assert torch.autograd.gradcheck(lambda *x: gated_delta_rule(*x, packed), given, fast_mode=True)
    inputs, weight = (torch.randn(*shape, dtype=torch.float64, requires_grad=True) for shape in ((22, 3), (3, KERNEL)))
    assert torch.autograd.gradcheck(lambda *x: convolve(*x, packed)[0], (inputs, weight), fast_mode=True)


def test_a_sample_gives_no_gradient_to_another() -> None:
    lengths = (6, 70, 4)
    given = [x.requires_grad_() for x in drawn(lengths)]
    outputs, _ = gated_delta_rule(*given, packed_of(lengths))
    outputs.split(lengths)[1].sum().backward()
    ends = [0, *torch.tensor(lengths).cumsum(0).tolist()]
    for number, (first, end) in enumerate(pairwise(ends)):
        for x in given:
            assert x.grad is not None
            assert bool(x.grad[first:end].any()) is (number == 1)


DTYPES = (torch.float32, torch.bfloat16, torch.float16)
FOUR = FakeQuantization(group_size=4)


def to_bfloat16(x: np.ndarray) -> np.ndarray:
    """Rounds float32 numbers to eight significant bits, ties to even."""
    bits = x.astype(np.float32).view(np.uint32)
    kept = (bits + 0x7FFF + ((bits >> 16) & 1)) & np.uint32(0xFFFF0000)
    return np.where(np.isfinite(x), kept.view(np.float32), x).astype(np.float32)


def in_type(x: np.ndarray, dtype: torch.dtype) -> np.ndarray:
    if dtype == torch.bfloat16:
        return to_bfloat16(x)
    with np.errstate(over="ignore"):
        return x.astype(np.float16 if dtype == torch.float16 else np.float32).astype(np.float32)


def slow(x: np.ndarray, group_size: int, divisor: float, dtype: torch.dtype) -> np.ndarray:
    """Rounds float32 values group by group of each row. The values are exact in `dtype`."""
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
    """No element moves by more than half a scale, except elements beyond the largest integer, 7."""
    x = torch.randn(2, groups * group_size, generator=torch.Generator().manual_seed(seed), dtype=torch.float32)
    found = int4_rounded(x, group_size, divisor).view(2, groups, group_size)
    scale = x.view(2, groups, group_size).abs().amax(-1, keepdim=True) / divisor
    codes = found / scale
    assert torch.allclose(codes, codes.round(), atol=1e-5)
    assert codes.max() <= 7.001 and codes.min() >= (-7.001 if divisor == 7 else -8.001)
    assert bool(((found - x.view_as(found)).abs() <= scale * 0.50001).all())


@pytest.mark.parametrize("dtype", DTYPES)
def test_by_seven_what_is_rounded_stays_as_it_is(dtype: torch.dtype) -> None:
    """This holds for every largest magnitude of a group: all significands of half precision, and many of float32. With
    another divisor it does not hold."""
    bits = {torch.float32: 4096, torch.bfloat16: 128, torch.float16: 1024}[dtype]
    largest = (1 + torch.arange(bits) / bits).repeat_interleave(4)[:, None].to(dtype)
    groups = torch.cat([largest, largest * (2 * torch.rand(len(largest), 7) - 1).to(dtype)], -1)
    once = int4_rounded(groups, 8, 7.0)
    assert torch.equal(int4_rounded(once, 8, 7.0), once)
    other = int4_rounded(groups, 8, 7.5)
    assert not torch.equal(int4_rounded(other, 8, 7.5), other)


@pytest.mark.parametrize("group_size", [4, 5])
def test_rows_are_rounded_alike_whatever_is_rounded_with_them(group_size: int, monkeypatch: Any) -> None:
    """The rows of several experts, of one rank, or of one piece that fits into memory give equal results."""
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
    """The loss is not linear, so its gradient depends on the values of the weights."""
    weight, inputs = torch.randn(6, 8, requires_grad=True), torch.randn(5, 8)
    made = rounded(weight, FOUR)
    assert not torch.equal(made, weight)
    (inputs @ made.t()).exp().sum().backward()
    plain = made.detach().requires_grad_(True)
    (inputs @ plain.t()).exp().sum().backward()
    assert torch.equal(weight.grad, plain.grad)


class Experts(torch.nn.Module):
    """Experts with the parameters of transformers."""

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
    """Values have the precision of the computation, even if the trained weights are wider."""
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
