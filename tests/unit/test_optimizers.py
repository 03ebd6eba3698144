"""Optimizer steps, their overlap with communication, and the learning rate."""

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rltrain.config import schema
from rltrain.config.schema import Actor
from rltrain.models.table import is_hidden_matrix
from rltrain.offload import host_memory
from rltrain.training import optimizers
from rltrain.training.megatron.optimizer import GradientReduction, data_parallel_config
from rltrain.training.optimizers import (
    COEFFICIENTS,
    AdamRule,
    AdamTensors,
    CudaHostCopies,
    HostParameter,
    HostSteps,
    adam_step,
    keep_rounded,
    learning_rate,
    orthogonalize,
    update_scale,
)
from tests.support.cuda_streams import Device, Operators, RaceError

CUDA = torch.device("cuda")
RULE = AdamRule(lr=0.01, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1, step=1)
FINITE = st.floats(-(2.0**99), 2.0**99, width=32).filter(lambda value: value == 0 or abs(value) > 2.0**-99)


def rounded(values: torch.Tensor, weights: torch.Tensor, step: int = 3) -> torch.Tensor:
    kept = torch.empty(len(values), dtype=torch.bfloat16)
    keep_rounded(kept, values, weights, step, salt=1)
    return kept


@given(st.lists(st.tuples(FINITE, FINITE), min_size=1, max_size=20), st.integers(0, 10**6))
def test_a_value_comes_to_one_of_its_neighbours(pairs: list[tuple[float, float]], step: int) -> None:
    values, weights = torch.tensor(pairs).T.contiguous()
    kept = rounded(values, weights, step).float()
    spacing = torch.maximum(values.abs(), kept.abs()) * 2.0**-7
    assert ((kept - values).abs() <= spacing).all()
    exact = values.bfloat16().float()
    assert torch.equal(rounded(exact, weights, step).float(), exact)
    assert torch.equal(rounded(values, weights, step).float(), kept)


def test_the_mean_error_is_zero() -> None:
    torch.manual_seed(0)
    values, weights = torch.rand(200_000) + 1, torch.randn(200_000)
    error = (rounded(values, weights).double() - values.double()) / 2.0**-7
    assert abs(error.mean()) < 4 * error.std() / len(values) ** 0.5
    again = rounded(values, weights, step=4).double() - values.double()
    assert abs(torch.corrcoef(torch.stack([error, again]))[0, 1]) < 0.02


def test_a_moment_that_hardly_decays_is_not_stuck() -> None:
    """With rounding to nearest it would never change: 0.999 times a bf16 value rounds to the same value."""
    kept, weights = torch.ones(5000, dtype=torch.bfloat16), torch.zeros(5000)
    for step in range(500):
        keep_rounded(kept, kept.float() * 0.999, weights + torch.arange(5000), step, salt=2)
    assert kept.double().mean() == pytest.approx(0.999**500, rel=0.01)


def tensors(size: int, dtype: torch.dtype = torch.float32) -> AdamTensors:
    torch.manual_seed(size)
    moments = torch.zeros(size, dtype=dtype), torch.zeros(size, dtype=dtype)
    return AdamTensors(torch.randn(size), torch.randn(size), *moments)


def test_steps_are_those_of_torch() -> None:
    one = tensors(1000)
    weights = one.weights.clone().requires_grad_()
    expected = torch.optim.AdamW([weights], lr=0.01, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    for step in range(1, 4):
        weights.grad = one.gradient * step
        expected.step()
        adam_step(
            [AdamTensors(one.weights, one.gradient * step, one.exp_avg, one.exp_avg_sq)], replace(RULE, step=step)
        )
    torch.testing.assert_close(one.weights, weights.detach(), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("chunk", [64, 1 << 20])
def test_moments_in_bf16_lead_nearly_where_moments_in_fp32_do(monkeypatch: pytest.MonkeyPatch, chunk: int) -> None:
    monkeypatch.setitem(optimizers.CHUNK_ELEMENTS, "cpu", chunk)
    wide, small = tensors(999), tensors(999, torch.bfloat16)
    before = wide.weights.clone()
    for step in range(1, 21):
        rule = replace(RULE, step=step)
        for one in (wide, small):
            gradient = one.gradient + torch.sin(torch.arange(999.0) * step)
            adam_step([AdamTensors(one.weights, gradient, one.exp_avg, one.exp_avg_sq)], rule)
    moved = (wide.weights - before).abs().mean()
    assert (small.weights - wide.weights).abs().mean() < 0.01 * moved


class Hosted:
    """Parameters of several sizes with optimizer steps on the host. The device records the order of operations."""

    def __init__(self, sizes: list[int], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
        self.device = Device()
        self.device.install(monkeypatch)
        monkeypatch.setattr(host_memory, "pin", lambda memory: None)
        monkeypatch.setattr(optimizers, "_threads_of_a_rank", lambda: None)
        self.resident = [tensors(size) for size in sizes]
        self.weights = [one.weights.to(dtype, copy=True) for one in self.resident]
        self.gradients = [one.gradient.clone() for one in self.resident]
        masters = [one.weights.clone() if dtype != torch.float32 else None for one in self.resident]
        moments = [(torch.zeros(size), torch.zeros(size)) for size in sizes]
        self.parameters = [
            HostParameter(w, g, m, *states, RULE)
            for w, g, m, states in zip(self.weights, self.gradients, masters, moments, strict=True)
        ]
        self.steps = HostSteps(CUDA, bucket_elements=64)

    def run(self) -> None:
        with Operators(self.device) as operators:
            operators.holds([*self.weights, *self.gradients])
            for weights, gradient in zip(self.weights, self.gradients, strict=True):
                gradient.mul_(weights.sum() * 0 + 1)  # like clipping, on the default stream
            self.steps.run(self.parameters)
            for weights, gradient in zip(self.weights, self.gradients, strict=True):
                weights.mul(2)  # like the next forward
                gradient.zero_()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@settings(max_examples=25, deadline=None)
@given(sizes=st.lists(st.integers(1, 200), min_size=1, max_size=7))
def test_steps_on_the_host_are_ordered_and_equal(dtype: torch.dtype, sizes: list[int]) -> None:
    with pytest.MonkeyPatch.context() as monkeypatch:
        hosted = Hosted(sizes, dtype, monkeypatch)
        hosted.run()
        adam_step(hosted.resident, RULE)
        for one, weights in zip(hosted.resident, hosted.weights, strict=True):
            torch.testing.assert_close(weights, one.weights.to(dtype), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("what", ["begin", "end", "arrival", "departure"])
def test_a_missing_wait_is_a_race(monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    hosted = Hosted([200, 200], torch.bfloat16, monkeypatch)
    if what in ("begin", "end"):
        monkeypatch.setattr(CudaHostCopies, what, lambda self: None)
    else:
        copies = hosted.steps._down if what == "arrival" else hosted.steps._up
        copy = copies.copy

        def unawaited(pairs):  # type: ignore[no-untyped-def]
            copy(pairs)
            return lambda: None

        monkeypatch.setattr(copies, "copy", unawaited)
    with pytest.raises(RaceError):
        hosted.run()


@pytest.mark.parametrize("shape", [(4, 9), (9, 4), (6, 6), (2, 40)])
def test_singular_vectors_stay_and_values_follow_the_polynomial(shape: tuple[int, int]) -> None:
    matrices = torch.randn(3, *shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    found = orthogonalize(matrices, 5).numpy()
    a, b, c = COEFFICIENTS
    for matrix, made in zip(matrices.numpy(), found, strict=True):
        left, values, right = np.linalg.svd(matrix, full_matrices=False)
        values = values / np.linalg.norm(values)
        for _ in range(5):
            values = a * values + b * values**3 + c * values**5
        np.testing.assert_allclose(made, left * values @ right, atol=1e-6)
        assert values.min() > 0.6 and values.max() < 1.3
    assert torch.count_nonzero(orthogonalize(torch.zeros(1, *shape), 5)) == 0


@pytest.mark.parametrize("shape", [(64, 64), (32, 256), (256, 32)])
def test_an_updates_elements_are_as_large_as_adams(shape: tuple[int, int]) -> None:
    matrices = torch.randn(1, *shape, generator=torch.Generator().manual_seed(2))
    update = orthogonalize(matrices, 5) * update_scale(*shape)
    assert 0.7 * 0.2 < update.square().mean().sqrt() < 1.3 * 0.2


def test_which_tensors_are_matrices_of_layers() -> None:
    inside = [
        "self_attn.q_proj.weight",
        "mlp.gate_proj.weight",
        "mlp.experts.3.w1.weight",
        "self_attn.kv_b_proj.weight",
    ]
    outside = ["mlp.gate.weight", "block_sparse_moe.gate.weight", "mlp.shared_expert_gate.weight"]
    assert all(is_hidden_matrix(f"model.layers.11.{name}", (8, 4)) for name in inside)
    assert not any(is_hidden_matrix(f"model.layers.11.{name}", (8, 4)) for name in outside)
    assert not is_hidden_matrix("model.layers.1.self_attn.q_proj.bias", (8,))
    assert not is_hidden_matrix("model.layers.1.input_layernorm.weight", (8,))
    assert not any(is_hidden_matrix(n, (8, 4)) for n in ("model.embed_tokens.weight", "lm_head.weight", "score.weight"))


CPU, CUDA_DEVICE = torch.device("cpu"), torch.device("cuda")


class Group:
    """A bucket of Megatron that records its start."""

    def __init__(self, parameters: list[torch.nn.Parameter], log: list["Group"]) -> None:
        self.params, self.log, self.grad_reduce_handle = set(parameters), log, None

    def start_grad_sync(self) -> None:
        self.log.append(self)


def made(sizes: list[int]) -> tuple[GradientReduction, list[Group], list[tuple[Group, Any]], list[Group]]:
    """Returns the reduction, the groups from last to first layer, the (group, parameter) pairs in the model's order,
    and the started groups."""
    log: list[Group] = []
    groups = [Group([torch.nn.Parameter(torch.zeros(1)) for _ in range(size)], log) for size in sizes]
    in_order = [(group, parameter) for group in reversed(groups) for parameter in group.params]
    module = SimpleNamespace(parameters=lambda: [parameter for _, parameter in in_order])
    half = len(groups) // 2
    model = SimpleNamespace(
        ddp_config=SimpleNamespace(overlap_grad_reduce=True),
        module=module,
        bucket_groups=groups[:half],
        expert_parallel_bucket_groups=groups[half:],
    )
    return GradientReduction([model]), groups, in_order, log  # type: ignore[arg-type]


@settings(max_examples=40, derandomize=True)
@given(st.lists(st.integers(1, 3), min_size=1, max_size=4), st.integers(1, 3), st.data())
def test_buckets_begin_in_one_order_and_never_before_their_gradients_are_whole(
    sizes: list[int], num_backwards: int, data: st.DataObject
) -> None:
    reduction, groups, in_order, log = made(sizes)
    reduction.expect(num_backwards)
    left = {id(parameter): num_backwards for _, parameter in in_order}
    for group, parameter in data.draw(st.permutations(in_order * num_backwards)):
        left[id(parameter)] -= 1
        group.register_grad_ready(parameter, False)
        assert log == groups[: len(log)]
        assert not any(left[id(p)] for group in log for p in group.params)
        assert len(log) == len(groups) or any(left[id(p)] for p in groups[len(log)].params), (
            "the next group is ready but has not started"
        )
    assert log == groups


def test_a_replica_without_samples_begins_the_same_in_the_same_order() -> None:
    reduction, groups, _, log = made([1, 2, 1])
    reduction.begin_rest()
    assert log == groups


def test_nothing_begins_while_other_parts_may_follow() -> None:
    reduction, groups, in_order, log = made([1, 2])
    for group, parameter in in_order:
        group.register_grad_ready(parameter, False)
    assert log == []
    reduction.begin_rest()
    reduction.finish()
    reduction.expect(1)
    for group, parameter in in_order:
        group.register_grad_ready(parameter, False)
    assert log == groups * 2


def test_a_gradient_that_comes_too_often_is_an_error() -> None:
    reduction, _, in_order, _ = made([1])
    reduction.expect(1)
    group, parameter = in_order[0]
    group.register_grad_ready(parameter, False)
    with pytest.raises(RuntimeError, match="gets gradients 2 times in 1 backward passes.*overlap: false"):
        group.register_grad_ready(parameter, False)


def test_overlap_is_for_gpus_and_for_several_replicas() -> None:
    assert data_parallel_config(Actor(), 2, CUDA_DEVICE).overlap_param_gather
    assert not data_parallel_config(Actor(), 2, CPU).overlap_grad_reduce
    assert not data_parallel_config(Actor(overlap=False), 2, CUDA_DEVICE).overlap_grad_reduce
    assert not data_parallel_config(Actor(overlap=True), 1, CUDA_DEVICE).overlap_grad_reduce
    whole = data_parallel_config(Actor(overlap=True, distributed_optimizer=False, gradient_bucket_mb=1), 2, CPU)
    assert whole.overlap_grad_reduce and not whole.overlap_param_gather and whole.bucket_size == 2**18


def rates(total_updates: int, **settings: object) -> list[float]:
    optimizer = schema.Optimizer(**{"lr": 1.0, **settings})
    return [learning_rate(optimizer, update, total_updates) for update in range(total_updates)]


def test_warm_up_rises_linearly_and_reaches_the_rate() -> None:
    assert rates(6, warmup_steps=4) == pytest.approx([0.25, 0.5, 0.75, 1.0, 1.0, 1.0])


def test_linear_decay_would_reach_the_minimum_one_step_after_the_last() -> None:
    assert rates(5, decay="linear", min_lr=0.5) == pytest.approx([1.0, 0.9, 0.8, 0.7, 0.6])


def test_cosine_decay_passes_half_way_between_the_rates_at_half_time() -> None:
    values = rates(8, decay="cosine", min_lr=0.2)
    assert values[0] == 1.0
    assert values[4] == pytest.approx(0.6)
    assert values[7] == pytest.approx(0.2 + 0.8 * (1 + math.cos(math.pi * 7 / 8)) / 2)


@pytest.mark.parametrize("decay", ["linear", "cosine"])
def test_decay_follows_warm_up_and_never_passes_the_minimum(decay: str) -> None:
    values = rates(20, warmup_steps=5, decay=decay, min_lr=0.1)
    assert values[4] == values[5] == 1.0
    assert all(later <= earlier for earlier, later in zip(values[5:], values[6:], strict=False))
    optimizer = schema.Optimizer(lr=1.0, decay=decay, min_lr=0.1, warmup_steps=5)
    assert learning_rate(optimizer, 1000, 20) == pytest.approx(0.1)


def test_warm_up_longer_than_the_run() -> None:
    assert rates(3, warmup_steps=10, decay="linear") == pytest.approx([0.1, 0.2, 0.3])
