"""Megatron-core's own reshard between two of its models. Needs all that training does."""

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from megatron.core.resharding.refit import swap_model_weights
from megatron.core.transformer.moe.moe_layer import MoELayer
from weight_sync_case import Case, fill

from rltrain.config import schema
from rltrain.reshard.layout import Layout
from rltrain.reshard.megatron_layout import megatron_layout
from rltrain.runtime.grid import Grid
from rltrain.runtime.placement import model_group_lists
from rltrain.runtime.process_groups import ProcessGroups
from rltrain.training.megatron.model import LanguageModel, build_model, local_parameters


class Refit:
    """Reshards between real models of Megatron on the case's grids. The first call makes its plan and keeps it."""

    def __init__(self, case: Case, timeout_s: float) -> None:
        """Collective over: all ranks."""
        self.cuda = case.device.type == "cuda"
        grids = (case.source, case.destination)
        lists = {ranks for grid in grids for field in model_group_lists(grid).values() for ranks in field}
        ordered = sorted(lists, key=lambda ranks: (len(ranks), ranks))
        groups = ProcessGroups(ordered, backend="nccl" if self.cuda else "gloo", timeout_s=timeout_s)
        self.source, self.destination = (_build(case, grid, groups) for grid in grids)
        fill(case.source_layout, dist.get_rank(), local_parameters(self.source), case)
        self.written = local_parameters(self.destination)
        self.layout: Layout = megatron_layout(case.architecture, case.destination, dtype=case.dtype_name)
        for model in (self.source, self.destination):
            _name_as_grouped(model)

    def __call__(self) -> None:
        if self.cuda:
            swap_model_weights(self.source.chunks[0], self.destination.chunks[0], "nccl")
            return
        with _no_cuda_streams():
            swap_model_weights(self.source.chunks[0], self.destination.chunks[0], "gloo")


def _build(case: Case, grid: Grid, groups: ProcessGroups) -> LanguageModel:
    model = build_model(
        case.architecture,
        grid,
        groups,
        model=schema.Model.model_validate({"path": "", "dtype": case.dtype_name, "transformer_impl": "local"}),
        parallel=schema.Parallel(tp=grid.tp, pp=grid.pp, ep=grid.ep, etp=grid.etp),
        device=case.device,
    )
    for name, parameter in local_parameters(model).items():
        if name.endswith("linear_fc1.weight"):
            # As Megatron marks it when it initialises weights itself: a shard is its part of the gate, then of the up
            # projection. Without it the refit would mix the two.
            parameter.partition_stride = 2  # type: ignore[attr-defined]
    return model


def _name_as_grouped(model: LanguageModel) -> None:
    """The same parameters of experts under the names of Transformer Engine's grouped layers: the refit tells which
    expert is whose by these alone."""
    for module in model.modules():
        if isinstance(module, MoELayer):
            experts, grouped = module.experts, torch.nn.Module()
            for name in ("linear_fc1", "linear_fc2"):
                layer = torch.nn.Module()
                for number, expert in enumerate(experts.local_experts):
                    layer.register_parameter(f"weight{number}", getattr(expert, name).weight)
                grouped.add_module(name, layer)
            module.experts = grouped


@contextlib.contextmanager
def _no_cuda_streams() -> Iterator[None]:
    """Its copy service makes CUDA streams and pinned memory, on machines without CUDA too."""
    stream = SimpleNamespace(wait_stream=lambda other: None, synchronize=lambda: None)
    empty = torch.empty

    def made(*arguments: Any) -> Any:
        return stream

    def unpinned(*arguments: Any, pin_memory: bool = False, **settings: Any) -> torch.Tensor:
        return empty(*arguments, **settings)

    context = contextlib.nullcontext
    cuda = mock.patch.multiple(torch.cuda, Stream=made, current_stream=made, stream=context, synchronize=made)
    with cuda, mock.patch.object(torch, "empty", unpinned):
        yield
