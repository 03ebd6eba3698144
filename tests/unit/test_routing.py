"""Losses, counts and biases of routers, against formulas written out."""

import rltrain.training.megatron  # noqa: F401  # isort: skip  # first: it loads Megatron without torch's compiler

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rltrain.algorithms.losses import SharedLoss, divisor_shares, num_pairs, pair_shares, sample_shares, token_weights
from rltrain.config import schema
from rltrain.data.experience import Experience
from rltrain.errors import ConfigError
from rltrain.runtime.grid import Grid
from rltrain.training.megatron.chunk import ModelOptions
from rltrain.training.megatron.experts import RoutedSamples, SampleRouter, load_metrics, routed_samples
from rltrain.training.megatron.model import check_dispatcher, transformer_config
from rltrain.training.megatron.platform import adapt_to_platform
from rltrain.training.packing import pack, padded_to, padding_alone
from tests.model_shards import tiny_architecture

CPU = torch.device("cpu")
AUX, Z = 0.3, 0.07


def make_experience(lengths: list[int], prompt: int = 1) -> Experience:
    samples = torch.arange(len(lengths))
    positions = torch.cat([torch.arange(length) for length in lengths])
    return Experience(
        sample_ids=samples,
        group_ids=samples // 2,
        lengths=torch.tensor(lengths),
        tokens=positions,
        response_mask=positions >= prompt,
        chosen=samples % 2 == 0,
    )


def make_router(family: str) -> SampleRouter:
    adapt_to_platform()
    model = schema.Model(path="m", dtype="float32", moe=schema.MoE(aux_loss_coef=AUX, z_loss_coef=Z))
    options = ModelOptions(model, schema.Parallel(), CPU, transformer_engine=False)
    config = transformer_config(tiny_architecture(family), Grid((0,)), 0, options)
    groups = SimpleNamespace(**dict.fromkeys(("tp", "cp", "tp_cp", "tp_dp_cp"), SimpleNamespace(rank=lambda: 0)))
    return SampleRouter(config, groups)  # type: ignore[arg-type]


def formula(router: SampleRouter, logits: Tensor, lengths: list[int], shares: Tensor) -> tuple[Tensor, Tensor]:
    """(balance, z) of DeepSeek-V3's equations 17 to 20 and ST-MoE's equation 5, sample by sample."""
    balance, size = torch.zeros(()).double(), torch.zeros(()).double()
    for of_sample, share in zip(logits.split(lengths), shares, strict=True):
        scores = of_sample.softmax(-1) if router.score_function == "softmax" else of_sample.sigmoid()
        for expert in range(router.num_experts):
            chosen = sum(expert in row.topk(router.topk).indices for row in scores)
            f = router.num_experts / (router.topk * len(scores)) * chosen
            p = sum(row[expert] / row.sum() for row in scores) / len(scores)
            balance = balance + share * f * p
        size = size + share * sum(row.exp().sum().log() ** 2 for row in of_sample) / len(scores)
    return balance, size


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3"])
@given(st.lists(st.integers(1, 5), min_size=1, max_size=3), st.integers(0, 3), st.integers(0, 99))
@settings(max_examples=10, deadline=None)
def test_losses_are_those_of_the_formulas_whatever_pads(
    family: str, lengths: list[int], padding: int, seed: int
) -> None:
    router = make_router(family)
    random = torch.Generator().manual_seed(seed)
    logits = torch.randn(sum(lengths) + padding, router.num_experts, generator=random, dtype=torch.float64)
    shares = torch.rand(len(lengths), generator=random).double()
    (batch,) = pack(make_experience(lengths), 100, device=CPU)
    batch = padded_to(batch, sum(lengths) + padding)
    router.samples = routed_samples(batch, shares)

    given_logits = logits.float().requires_grad_()
    probs, chosen = router.routing(given_logits[:, None])
    (probs * 0).sum().backward()

    wanted_logits = logits[: sum(lengths)].requires_grad_()
    balance, size = formula(router, wanted_logits, lengths, shares)
    (AUX * balance + Z * size).backward()
    assert router.losses.tolist() == pytest.approx([balance.item(), size.item()], rel=1e-5)
    assert torch.allclose(given_logits.grad[: sum(lengths)].double(), wanted_logits.grad, atol=1e-5)
    assert not given_logits.grad[sum(lengths) :].any()
    assert router.load.tolist() == chosen[: sum(lengths)].sum(0).tolist()


def test_nothing_is_counted_without_gradients() -> None:
    router = make_router("qwen3_moe")
    router.samples = RoutedSamples(torch.zeros(3, dtype=torch.int64), torch.tensor([3, 0]), torch.tensor([1.0, 0.0]))
    with torch.no_grad():
        router.routing(torch.randn(3, 1, router.num_experts))
    assert not router.load.any()
    assert not router.losses.any()


def test_a_micro_batch_of_padding_alone_counts_nothing() -> None:
    router = make_router("deepseek_v3")
    batch = padding_alone(make_experience([2, 3]), 4, CPU)
    router.samples = routed_samples(batch, divisor_shares(batch.experience, "token_mean"))
    logits = torch.randn(4, 1, router.num_experts, requires_grad=True)
    router.routing(logits)[0].sum().mul(0).backward()
    assert not logits.grad.any()
    assert not router.load.any()


@pytest.mark.parametrize("normalization", ["token_mean", "sequence_mean", "dr_grpo"])
@given(st.lists(st.integers(1, 6), min_size=1, max_size=5))
def test_shares_of_samples_add_up_to_the_divisor(normalization: str, lengths: list[int]) -> None:
    """A sample of one token is all prompt."""
    experience = make_experience(lengths)
    shares = divisor_shares(experience, normalization, 7)  # type: ignore[arg-type]
    assert float(shares.sum()) == float(token_weights(experience, normalization, 7).divisor)  # type: ignore[arg-type]
    assert ((shares > 0) == (experience.lengths > 1)).all()


def test_a_loss_of_pairs_tells_shares_of_its_own() -> None:
    experience = make_experience([3, 4, 5, 6])
    of_pairs = SharedLoss(lambda *_: None, pair_shares)  # type: ignore[arg-type, return-value]
    assert float(sample_shares(of_pairs, experience).sum()) == float(num_pairs(experience))
    assert sample_shares(lambda *_: None, experience).tolist() == [2, 3, 4, 5]  # type: ignore[arg-type, return-value]


@pytest.mark.parametrize(
    ("device", "problem"),
    [("cpu", "this machine has no GPU"), ("cuda", "megatron-core cannot import Buffer, EventHandle and EventOverlap")],
)
def test_deepep_is_refused_where_it_cannot_be_had(device: str, problem: str) -> None:
    model = schema.Model(path="m", moe=schema.MoE(dispatcher="deepep"))
    grid = Grid((0, 1), ep=2)
    with pytest.raises(ConfigError, match=rf"dispatcher is deepep, but {problem}.*; set it to alltoall"):
        check_dispatcher(tiny_architecture("qwen3_moe"), model, grid, torch.device(device))
    check_dispatcher(tiny_architecture("qwen3"), model, grid, torch.device(device))


def test_metrics_name_the_worst_layer() -> None:
    tokens = torch.tensor([[2, 2, 2, 2], [0, 8, 0, 0]]).double()
    assert load_metrics(tokens) == {
        "moe_load_imbalance": 4.0,
        "moe_load_imbalance_mean": 2.5,
        "moe_load_min": 0.0,
        "moe_idle_experts": 3.0,
    }
