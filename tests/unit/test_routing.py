"""Routers of experts: their losses, and replayed routing."""

import rltrain.training.megatron  # noqa: F401  # isort: skip  # first: it loads Megatron without torch's compiler
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rltrain.algorithms.losses import SharedLoss, divisor_shares, num_pairs, pair_shares, sample_shares, token_weights
from rltrain.config import schema
from rltrain.data.experience import Experience, join
from rltrain.errors import ConfigError
from rltrain.models.architecture import ExpertLayers
from rltrain.models.routing_shape import NOT_RECORDED, RoutingShape
from rltrain.rollout.sample import Sample, SampleGroup, Status, pack_groups
from rltrain.runtime.grid import Grid
from rltrain.training.megatron.backend import given_choices
from rltrain.training.megatron.experts import (
    Choices,
    RoutedSamples,
    SampleRouter,
    load_metrics,
    replay_metrics,
    routed_samples,
)
from rltrain.training.megatron.model_config import ModelOptions, check_dispatcher, transformer_config
from rltrain.training.megatron.platform import adapt_to_platform
from rltrain.training.packing import ContextShare, pack, padded_to, padding_alone
from tests.support.model_shards import tiny_architecture

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
    """Returns (balance, z) by DeepSeek-V3's equations 17 to 20 and ST-MoE's equation 5, sample by sample."""
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


def shape_of(num_experts: int, num_layers: int = 3, dense: tuple[int, ...] = ()) -> RoutingShape:
    moe = ExpertLayers(num_experts=num_experts, top_k=2, ffn_hidden_size=8, dense_layers=dense)
    architecture = tiny_architecture("qwen3_moe", num_layers=num_layers, moe=moe)
    shape = RoutingShape.of(architecture)
    assert shape.token_bytes == architecture.routing_bytes
    return shape


def test_numbers_of_experts_are_as_small_as_they_can_be() -> None:
    types = [shape_of(count).experts for count in (8, 128, 129, 256)]
    assert types == [torch.int8, torch.int8, torch.int16, torch.int16]
    assert shape_of(8, 4, dense=(0, 2)).num_layers == 2


@given(st.sampled_from([128, 256]), st.integers(0, 5), st.integers(0, 99))
def test_they_are_packed_in_bytes_and_cut_by_tokens(num_experts: int, num_tokens: int, seed: int) -> None:
    shape, random = shape_of(num_experts), torch.Generator().manual_seed(seed)
    experts = torch.randint(NOT_RECORDED, num_experts, (num_tokens, 3, 2), generator=random)
    packed = shape.packed(experts)
    assert packed.dtype == torch.int8 and packed.shape == (num_tokens, shape.token_bytes)
    some = torch.arange(num_tokens)[::2]
    assert torch.equal(shape.unpacked(packed[some]).long(), experts[some])


@pytest.mark.parametrize("num_experts", [8, 300])
def test_samples_bring_what_was_recorded_and_nothing_of_other_tokens(num_experts: int) -> None:
    """The engine has not fed the last token, nor the environment's answer to the last turn. It does not record tokens
    of other models."""
    shape = shape_of(num_experts)
    dtype = np.int8 if num_experts == 8 else np.int16

    def recorded(count: int) -> np.ndarray:
        return (np.arange(count * 6) % 7).reshape(count, 3, 2).astype(dtype)

    whole = Sample(0, (1, 2), 0).drawn((5, 6), (-0.5, -0.25), (2, 2), Status.STOPPED).routed(recorded(3))
    turns = whole.observed((7, 8)).drawn((9,), (-1.0,), (3,), Status.STOPPED).routed(recorded(3))
    answered = turns.observed((4, 4, 4))
    foreign = Sample(3, (1,), 0).drawn((5,), (-0.5,), (2,), Status.STOPPED)
    group = SampleGroup(0, 0, (whole, answered, foreign))
    experience = join([pack_groups([], [0], shape), pack_groups([group], [0], shape)])
    of_samples = shape.unpacked(experience.routed_experts).split(experience.lengths.tolist())
    for sample, experts, known in zip(group.samples, of_samples, (3, 6, 0), strict=True):
        assert len(experts) == len(sample.context)
        if sample.routing is not None:
            assert experts[:known].tolist() == sample.routing.experts.tolist()
        assert (experts[known:] == NOT_RECORDED).all() and (experts[:known] >= 0).all()
    assert not pack_groups([group], [0]).has("routed_experts")


def route(router: SampleRouter, logits: Tensor, experts: Tensor | None, found: dict[int, Tensor] | None = None) -> Any:
    router.set_layer_number(1)
    router.replayed.choices = None if experts is None and found is None else Choices({}, found)
    if experts is not None:
        router.replayed.choices = Choices({0: experts}, found)
    return router.routing(logits[:, None])


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3"])
@given(st.integers(0, 99))
def test_weights_and_gradients_are_of_the_routers_own_scores(family: str, seed: int) -> None:
    router, random = make_router(family), torch.Generator().manual_seed(seed)
    logits = torch.randn(6, router.num_experts, generator=random).requires_grad_()
    experts = torch.rand(6, router.num_experts, generator=random).argsort(-1)[:, : router.topk]
    experts[::3] = NOT_RECORDED
    own_probs, own = route(router, logits, None)
    probs, chosen = route(router, logits, experts.to(torch.int8))
    assert torch.equal(chosen[::3], own[::3]) and torch.equal(probs[::3], own_probs[::3])
    scores = logits.softmax(-1) if router.score_function == "softmax" else logits.sigmoid()
    for row in (1, 2, 4, 5):
        assert chosen[row].nonzero().flatten().tolist() == sorted(experts[row].tolist())
        of_chosen = scores[row, experts[row]]
        expected = of_chosen / of_chosen.sum() * (router.config.moe_router_topk_scaling_factor or 1)
        torch.testing.assert_close(probs[row, experts[row]], expected)
    probs[1, experts[1, 0]].backward()
    assert logits.grad is not None and logits.grad[1, experts[1]].abs().min() > 0

    differing = sum(int((~own[row, experts[row]]).sum()) for row in (1, 2, 4, 5))
    assert router.replayed.counts.tolist() == [4 * router.topk, differing]
    with torch.no_grad():
        route(router, logits, experts)
    assert router.replayed.counts.tolist() == [4 * router.topk, differing], "passes without gradients count nothing"


def test_what_is_found_is_what_gives_the_same() -> None:
    router, logits, found = make_router("deepseek_v3"), torch.randn(5, 1, 8), dict[int, Tensor]()
    logits = torch.randn(5, router.num_experts)
    probs, chosen = route(router, logits, None, found)
    again, chosen_again = route(router, logits, found[0])
    assert torch.equal(probs, again) and torch.equal(chosen, chosen_again)
    assert replay_metrics(*router.replayed.counts.tolist(), num_choices=5 * router.topk) == {
        "replayed_choices": 1.0,
        "replayed_choices_differing": 0.0,
    }
    assert replay_metrics(0, 0, num_choices=3) == {}


@given(st.lists(st.integers(1, 7), min_size=1, max_size=4), st.integers(1, 3), st.sampled_from([1, 2]))
def test_every_rank_is_given_the_choices_of_its_rows_and_layers(lengths: list[int], cp: int, tp: int) -> None:
    """Numbers identify token and layer: token * 10 + layer, below 128 for these few."""
    moe = ExpertLayers(num_experts=256, top_k=2, ffn_hidden_size=8, dense_layers=(1,))
    architecture = tiny_architecture("qwen3_moe", num_layers=3, moe=moe)
    shape, count = RoutingShape.of(architecture), sum(lengths)
    numbers = torch.arange(count)[:, None, None] * 10 + torch.tensor([0, 2])[:, None]
    experience = make_experience(lengths).with_fields(
        tokens=torch.arange(count), routed_experts=shape.packed(numbers.expand(-1, -1, 2).contiguous())
    )
    given_tokens: list[int] = []
    for rank in range(cp * tp):
        at = SimpleNamespace(cp=rank // tp, tp=rank % tp)
        model: Any = SimpleNamespace(
            architecture=architecture,
            device=CPU,
            share=ContextShare(at.cp, cp),
            grid=Grid((0,)),
            config=SimpleNamespace(sequence_parallel=tp > 1),
            pg_collection=SimpleNamespace(
                pp=SimpleNamespace(rank=lambda: 0), tp=SimpleNamespace(rank=lambda at=at: at.tp, size=lambda: tp)
            ),
        )
        (batch,) = pack(experience, 100, device=CPU, multiple_of=2 * cp * tp, share=model.share)
        own_tokens = batch.padded_tokens.chunk(tp)[at.tp]
        of_layers = given_choices(model, batch)
        assert [*of_layers] == [0, 2]
        for layer, experts in of_layers.items():
            assert experts.shape == (len(own_tokens), 2)
            is_given = experts[:, 0] != NOT_RECORDED
            rows = torch.arange(at.tp * len(own_tokens), (at.tp + 1) * len(own_tokens))
            tokens = batch.rows_of(experience.tokens)[rows[is_given]]
            given_tokens += tokens.tolist() if layer == 0 else []
            assert torch.equal(experts[is_given, 0].long(), tokens * 10 + layer)
        nothing = given_choices(model, padding_alone(experience, 2 * tp, CPU))
        assert all((experts == NOT_RECORDED).all() and len(experts) == 2 for experts in nothing.values())
    assert sorted(given_tokens) == [*range(count)], "one row per token, and none of padding"
    assert given_choices(model, padding_alone(make_experience(lengths), 4, CPU)) == {}
