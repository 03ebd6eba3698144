"""Sampling on a GPU by torch and by the Triton kernel: the same tokens as on the CPU, and the time per call."""

import time

import pytest
import torch

from rltrain.rollout.embedded.decoder import NO_STREAM, choose_draw, draw, draw_by_kernel, log_uniforms, random_streams
from rltrain.rollout.engine import GreedyPlaces, SamplingParams

pytestmark = pytest.mark.gpu

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
SAMPLINGS = [
    SamplingParams(1.0, 1.0, 0, 1, ()),
    SamplingParams(0.0, 1.0, 0, 1, ()),
    SamplingParams(0.6, 1.0, 0, 1, (), greedy=GreedyPlaces(1, 4)),
    SamplingParams(0.8, 0.9, 50, 1, ()),
    SamplingParams(1.3, 0.9, 0, 1, (), greedy=GreedyPlaces(1, 4)),
]


def test_the_kernel_is_chosen() -> None:
    assert choose_draw(CUDA) == (draw_by_kernel, "")


def test_numbers_are_those_of_the_cpu() -> None:
    counters = torch.arange(100_000)
    arguments = (random_streams([3], CPU), torch.tensor([7]), counters)
    found = log_uniforms(*(one.cuda() for one in arguments)).cpu()
    torch.testing.assert_close(found, log_uniforms(*arguments), rtol=1e-6, atol=0)


@pytest.mark.parametrize("vocab", [20, 128, 129, 5000, 151_936])
@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_tokens_are_those_of_the_cpu(sampling: SamplingParams, vocab: int) -> None:
    """Near ties may differ."""
    rows = 256 if vocab <= 5000 else 32
    logits = 3 * torch.randn(rows, vocab, generator=torch.Generator().manual_seed(0))
    logits[5, ::2] = -torch.inf
    streams, positions = random_streams([*range(rows)], CPU), torch.arange(rows)
    if sampling.greedy is not None:
        streams[3::4] = NO_STREAM
    tokens, logprobs = draw(logits, streams, positions, sampling)
    for function in (draw, draw_by_kernel):
        found = function(logits.cuda(), streams.cuda(), positions.cuda(), sampling)
        same = found[0].cpu() == tokens
        assert int(same.logical_not().sum()) <= 1
        torch.testing.assert_close(found[1].cpu()[same], logprobs[same], atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_rows_that_are_not_finite_are_seen(bad: float) -> None:
    logits = torch.zeros(3, 5000, device=CUDA)
    logits[1] = bad
    streams, positions = random_streams([1, 2, 3], CUDA), torch.zeros(3, dtype=torch.int64, device=CUDA)
    tokens, logprobs = draw_by_kernel(logits, streams, positions, SAMPLINGS[0])
    assert int(tokens.min()) >= 0 and int(tokens.max()) < 5000
    assert torch.isfinite(logprobs).tolist() == [True, False, True]


@pytest.mark.parametrize("rows", [1, 64, 256])
def test_what_a_draw_takes(rows: int, capsys: pytest.CaptureFixture[str]) -> None:
    logits = 3 * torch.randn(rows, 151_936, device=CUDA)
    streams, positions = random_streams([*range(rows)], CUDA), torch.arange(rows, device=CUDA)
    took = {}
    for function in (draw, draw_by_kernel):
        for repeats in (3, 50):
            torch.cuda.synchronize()
            begin = time.perf_counter()
            for _ in range(repeats):
                function(logits, streams, positions, SAMPLINGS[0])
            torch.cuda.synchronize()
            took[function] = (time.perf_counter() - begin) / repeats * 1e6
    with capsys.disabled():
        print(f"\ndraw of {rows} rows: torch {took[draw]:.0f} us, kernel {took[draw_by_kernel]:.0f} us")
    assert took[draw_by_kernel] < took[draw]
