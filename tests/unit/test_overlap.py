"""When buckets of gradients begin to be reduced: in one order, whatever the order in which gradients are made."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rltrain.config.schema import Actor
from rltrain.training.megatron.optimizer import GradientReduction, data_parallel_config

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


class Group:
    """A bucket of Megatron's; says when it begins."""

    def __init__(self, parameters: list[torch.nn.Parameter], log: list["Group"]) -> None:
        self.params, self.log, self.grad_reduce_handle = set(parameters), log, None

    def start_grad_sync(self) -> None:
        self.log.append(self)


def made(sizes: list[int]) -> tuple[GradientReduction, list[Group], list[tuple[Group, Any]], list[Group]]:
    """(reduction, groups from the last layers to the first, (group, parameter) in the model's order, what began)."""
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
        assert len(log) == len(groups) or any(left[id(p)] for p in groups[len(log)].params), "it could begin"
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
    assert data_parallel_config(Actor(), 2, CUDA).overlap_param_gather
    assert not data_parallel_config(Actor(), 2, CPU).overlap_grad_reduce
    assert not data_parallel_config(Actor(overlap=False), 2, CUDA).overlap_grad_reduce
    assert not data_parallel_config(Actor(overlap=True), 1, CUDA).overlap_grad_reduce
    whole = data_parallel_config(Actor(overlap=True, distributed_optimizer=False, gradient_bucket_mb=1), 2, CPU)
    assert whole.overlap_grad_reduce and not whole.overlap_param_gather and whole.bucket_size == 2**18
