"""Gated delta nets over packed samples: against transformers' own, one token at a time, in parts, and by gradients."""

from functools import partial
from itertools import pairwise

import pytest
import torch
from torch import Tensor
from transformers.models.qwen3_next.modeling_qwen3_next import (
    causal_conv1d_fn,
    torch_chunk_gated_delta_rule,
)

from rltrain.models.delta_rule import (
    convolve,
    convolve_step,
    delta_rule_step,
    gated_delta_rule,
    gates,
    packed_states,
)

KERNEL, KEY_HEADS, HEADS, KEY_DIM, VALUE_DIM = 4, 2, 4, 8, 6
LENGTHS = (5, 130, 1, 64, 2, 65)
packed_of = partial(packed_states, kernel=KERNEL, device=torch.device("cpu"))


def drawn(lengths: tuple[int, ...], dtype: torch.dtype = torch.float32) -> tuple[Tensor, ...]:
    """Queries, keys, values, weights and decays of tokens."""
    torch.manual_seed(len(lengths))
    count = sum(lengths)
    q, k = torch.randn(2, count, KEY_HEADS, KEY_DIM, dtype=dtype)
    v = torch.randn(count, HEADS, VALUE_DIM, dtype=dtype)
    rate, bias = torch.randn(2, HEADS, dtype=dtype)
    return q, k, v, *gates(*torch.randn(2, count, HEADS, dtype=dtype), rate, bias)


@pytest.mark.parametrize("lengths", [LENGTHS, (1,), (7, 3), (64, 64), (3, 200)])
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
    given, packed = drawn(LENGTHS), packed_of(LENGTHS)
    outputs, finals = gated_delta_rule(*given, packed)
    for number, parts in enumerate(zip(*(x.split(LENGTHS) for x in (outputs, *given)), strict=True)):
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
    inputs, weight = torch.randn(sum(LENGTHS), 5), torch.randn(5, KERNEL)
    outputs, last = convolve(inputs, weight, packed_of(LENGTHS))
    for number, (found, sample) in enumerate(zip(outputs.split(LENGTHS), inputs.split(LENGTHS), strict=True)):
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
