"""Experts and latent attention on a GPU: grouped products in recorded steps, and the same tokens as on the CPU."""

from pathlib import Path

import pytest
import torch

from rltrain.rollout.embedded.decoder import CudaGraphs
from rltrain.rollout.embedded.parameters import grouped_product, is_grouped_on_device
from rltrain.rollout.engine import SamplingParams
from tests.support.rollout_models import load_engine, ragged_requests, write_checkpoint

pytestmark = pytest.mark.gpu

FAMILIES = ["qwen3_moe", "mixtral", "deepseek_v3", "moonlight", "gpt_oss"]
SAMPLED = SamplingParams(1.0, 1.0, 0, 30, (3,))


def test_one_launch_gives_the_products_of_all_experts() -> None:
    rows, matrices = torch.randn(40, 64), torch.randn(5, 32, 64)
    ends = torch.tensor([0, 7, 7, 30, 36])
    expected = grouped_product(rows, matrices, ends)
    on_gpu = [tensor.cuda() for tensor in (rows.bfloat16(), matrices.bfloat16(), ends)]
    assert is_grouped_on_device(on_gpu[1], torch.bfloat16)
    found = grouped_product(*on_gpu)
    torch.testing.assert_close(found[:36].float().cpu(), expected[:36], atol=0.3, rtol=0.03)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kv_tokens", [None, 400])
def test_graphs_give_the_bits_of_eager_steps(tmp_path: Path, family: str, kv_tokens: int | None) -> None:
    path = write_checkpoint(tmp_path, family)
    options = {"dtype": torch.bfloat16, "device": "cuda", "kv_tokens": kv_tokens, "record_routing": True}
    replayed, _ = load_engine(path, record=CudaGraphs(), **options)
    eager, _ = load_engine(path, record=lambda step: step, **options)
    for _ in range(3):
        assert replayed.generate(ragged_requests(), SAMPLED) == eager.generate(ragged_requests(), SAMPLED)


@pytest.mark.parametrize("family", FAMILIES)
def test_it_draws_what_is_drawn_on_the_cpu(tmp_path: Path, family: str) -> None:
    path = write_checkpoint(tmp_path, family)
    found, expected = (
        load_engine(path, device=device)[0].generate(ragged_requests(), SamplingParams(0.0, 1.0, 0, 20, ()))
        for device in ("cuda", "cpu")
    )
    for done, other in zip(found, expected, strict=True):
        assert done.tokens == other.tokens
        assert done.logprobs == pytest.approx(other.logprobs, abs=1e-4)
