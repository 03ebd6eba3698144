"""Low-rank adapters of Megatron's and Transformer Engine's parallel linear layers: x W.T + alpha / rank * (x A.T) B.T,
Hu et al. 2021, "LoRA", section 4.1. W is frozen.

If a layer is split by rows, B is split like it. If it is split by columns, A is. Every tensor-parallel rank has the
other half whole. Ranks communicate only the `rank` numbers per token between A and B, summed over ranks with parts of
the inputs.

An expert's tokens are moved by the dispatcher, and it sums the results of the expert's ranks. So adapters of experts
communicate nothing in forward. The gradients of their whole half are partial sums.
"""

from collections.abc import Sequence
from functools import cache
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from torch import Tensor

from rltrain.config.models import Lora
from rltrain.models.experts import is_expert
from rltrain.models.lora import WEIGHT
from rltrain.reshard.layout import Layout, Segment
from rltrain.reshard.megatron_layout import AdapterPair, adapter_pairs
from rltrain.training.adapters import AdapterMode
from rltrain.training.megatron.tower import NAME as TOWER_NAME
from rltrain.training.recipes import MadeAgain

TOWER = TOWER_NAME + "."
"""The beginning of the names of a vision tower's layers."""
NAME = "lora"
"""Name of the submodule with a layer's adapters."""


class Adapter(torch.nn.Module):
    """The adapter of one layer, or of several matrices in one layer.

    `a` [parts * rank, inputs] has the matrices' parts below each other. `b` [outputs, rank] has the rows of `segments`,
    in order.
    """

    def __init__(
        self,
        pair: AdapterPair,
        settings: Lora,
        mode: AdapterMode,
        groups: ProcessGroupCollection,
        like: Tensor,
        *,
        sequence_parallel: bool,
    ) -> None:
        """Creates zeros with the type and device of `like`."""
        super().__init__()
        self.a, self.b = (
            torch.nn.Parameter(torch.zeros(shape, dtype=like.dtype, device=like.device)) for shape in (pair.a, pair.b)
        )
        self.rank, self.scale = settings.rank, settings.scale
        self.mode, self.cut = mode, pair.cut
        self.of_expert = is_expert(pair.adapted)
        self.group = groups.expt_tp if self.of_expert else groups.tp
        self.sequence_parallel = sequence_parallel and not self.of_expert
        self.rows, self.order = _rows_of_parts(pair.segments, pair.num_parts, like.device)
        self._mark()

    def _mark(self) -> None:
        """Marks the parameters for Megatron.

        Gradient norms must tell shards from copies. Data parallelism must know the parameters of experts. Sequence
        parallelism must know which gradients to sum over the ranks' tokens.
        """
        is_shard = {"a": self.cut == "columns", "b": self.cut == "rows"}
        for name, parameter in (("a", self.a), ("b", self.b)):
            if is_shard[name] or self.of_expert:
                set_tensor_model_parallel_attributes(parameter, True, 1 if self.cut == "columns" else 0, 1)
            if self.of_expert:
                parameter.allreduce = False  # type: ignore[attr-defined]
                parameter.shared = not is_shard[name] and self.group.rank() != 0  # type: ignore[attr-defined]
            elif not is_shard[name]:
                parameter.sequence_parallel = self.sequence_parallel  # type: ignore[attr-defined]

    @property
    def partial(self) -> Tensor | None:
        """The parameter with partial gradients on the ranks of a split expert, or None."""
        if not self.of_expert or self.group.size() == 1:
            return None
        return self.a if self.cut == "rows" else self.b

    def forward(self, inputs: Tensor) -> Tensor:
        """Returns the addition to the layer's output, from the layer's inputs [..., inputs (of this rank)].

        Collective over: the layer's tensor-parallel group, and in backward. Adapters of experts are not collective.
        """
        with MadeAgain(inputs):
            products = F.linear(self._dropped(inputs), self.a)
        inner = self._summed(products * self.scale)
        parts = inner.split(self.rank, dim=-1)
        if len(parts) == 1:
            return F.linear(inner, self.b)
        outer = [F.linear(part, self._rows(number)) for number, part in enumerate(parts)]
        added = torch.cat(outer, dim=-1)
        return added if self.order is None else added.index_select(-1, self.order)

    @torch.no_grad()
    def merged(self, weight: Tensor) -> Tensor:
        """Returns a copy of the layer's weight [outputs, inputs] with the adapter merged in fp32, rounded once."""
        factors = self.a.float().split(self.rank)
        added = torch.cat([self._rows(number).float() @ factor for number, factor in enumerate(factors)])
        if self.order is not None:
            added = added[self.order]
        return added.mul_(self.scale).add_(weight.float()).to(weight.dtype)

    def _rows(self, part: int) -> Tensor:
        rows = self.rows[part]
        if len(rows) == len(self.b):
            return self.b
        return self.b.index_select(0, rows)

    def _summed(self, inner: Tensor) -> Tensor:
        """Sums [..., parts * rank] over all inputs. Gathers the tokens too if the layer's output is for all tokens."""
        if self.of_expert or self.cut is None:
            return inner
        if self.cut == "rows" and self.sequence_parallel:
            return gather_from_sequence_parallel_region(inner, group=self.group)
        if self.cut == "rows":
            return copy_to_tensor_model_parallel_region(inner, group=self.group)
        if self.sequence_parallel:
            return reduce_scatter_to_sequence_parallel_region(inner, group=self.group)
        return reduce_from_tensor_model_parallel_region(inner, group=self.group)

    def _dropped(self, inputs: Tensor) -> Tensor:
        has_own = self.sequence_parallel or self.cut == "columns"
        return self.mode.dropped(inputs, self.group.rank() if has_own else 0)


class ExpertAdapters(torch.nn.ModuleList):
    """The adapters of the experts in one layer of Transformer Engine."""

    def forward(self, inputs: Tensor, counts: Sequence[int]) -> Tensor:
        """Returns the addition to the layer's output, from [tokens of all experts, inputs]. `counts` are tokens per
        expert."""
        parts = inputs.split([*counts])
        return torch.cat([adapter(part) for adapter, part in zip(self, parts, strict=True)])


class Adapters(AdapterMode):
    """The adapters of a rank's part of a model. Other parameters are frozen, except a head for scores.

    `parameters` include this head, and have the names of `layout.on(rank)`.
    """

    def __init__(
        self,
        chunks: Sequence[torch.nn.Module],
        layout: Layout,
        rank: int,
        settings: Lora,
        groups: ProcessGroupCollection,
        *,
        sequence_parallel: bool,
        seed: int = 0,
        tower: torch.nn.Module | None = None,
    ) -> None:
        super().__init__(settings.dropout, seed)
        for part in (*chunks, *([tower] if tower else [])):
            part.requires_grad_(False)
        self.layout = layout
        self.parameters = parameters = dict[str, Tensor]()
        self.of_weight: dict[str, Adapter] = {}
        """Adapters by the name of their weight."""
        for pair in adapter_pairs(layout, rank):
            linear, weight = _module(chunks, tower, pair.adapted), WEIGHT + pair.expert
            like = getattr(linear, weight.removeprefix("."))
            adapter = Adapter(pair, settings, self, groups, like, sequence_parallel=sequence_parallel)
            _put_beside(linear, adapter, pair)
            parameters |= dict(zip(pair.names, (adapter.a, adapter.b), strict=True))
            self.of_weight[pair.adapted + weight] = adapter
        for name in (name for name, _ in layout.on(rank).parameters if name not in self.parameters):
            # A head for scores: the base has none, so it is trained itself.
            module, _, own = name.rpartition(".")
            head: torch.nn.Parameter = getattr(_module(chunks, tower, module), own)
            parameters[name] = head.requires_grad_(True)
        if chunks[0].pre_process:
            # Recomputed layers have gradients only if their input needs one.
            chunks[0].embedding.register_forward_hook(_with_gradient)  # type: ignore[union-attr]

    def sum_gradients_of_experts(self) -> None:
        """Sums the partial gradients of adapters over the ranks of each expert. Collective over: these ranks."""
        for adapter in self.of_weight.values():
            if adapter.partial is not None:
                dist.all_reduce(adapter.partial.main_grad, group=adapter.group)  # type: ignore[attr-defined]

    def merged(self, name: str, weight: Tensor) -> Tensor:
        adapter = self.of_weight.get(name)
        return weight if adapter is None else adapter.merged(weight)


@cache
def _rows_of_parts(
    segments: tuple[Segment, ...], num_parts: int, device: torch.device
) -> tuple[list[Tensor], Tensor | None]:
    """Returns the rows of B for each part of A, and the order that restores B's rows from the parts.

    The order is None if they are already in order. Layers of equal shapes share the tensors.
    """
    rows: list[list[int]] = [[] for _ in range(num_parts)]
    for segment in segments:
        rows[segment.tensor] += range(segment.first, segment.first + segment.count)
    order = torch.tensor([row for of_part in rows for row in of_part], dtype=torch.long)
    in_order = torch.equal(order, torch.arange(len(order)))
    on_device = [torch.tensor(of_part, dtype=torch.long, device=device) for of_part in rows]
    return on_device, None if in_order else order.argsort().to(device)


def is_adapter(parameter: str) -> bool:
    """Returns whether the parameter of this name belongs to an adapter."""
    return f".{NAME}." in parameter


def _put_beside(linear: Any, adapter: Adapter, pair: AdapterPair) -> None:
    if pair.expert and hasattr(linear, NAME):
        linear.lora.append(adapter)
        return
    linear.lora = ExpertAdapters([adapter]) if pair.expert else adapter
    if hasattr(linear, "return_layernorm_output"):  # Transformer Engine's, with a norm inside
        linear.return_layernorm_output = True
    if hasattr(linear, "fuse_wgrad_accumulation"):  # frozen weights have no gradients
        linear.fuse_wgrad_accumulation = False
    # First of all hooks: others normalize or gather the layer's output.
    linear.register_forward_hook(_add, prepend=True)


def _module(chunks: Sequence[torch.nn.Module], tower: torch.nn.Module | None, name: str) -> Any:
    """Returns the layer of this name in `local_parameters`. With several chunks, the name begins with the chunk's
    number."""
    number = 0
    if len(chunks) > 1:
        prefix, _, name = name.partition(".")
        number = int(prefix)
    if tower is not None and name.startswith(TOWER):
        return tower.get_submodule(name.removeprefix(TOWER))
    return chunks[number].get_submodule(name)


def _add(linear: Any, inputs: tuple[Any, ...], outputs: Any) -> Any:
    """Returns (output, bias) of a layer with the adapters' additions. Layers of a vision tower have only the output.

    Transformer Engine's layers with a norm inside return ((output, normed inputs), None) or (output, bias, normed
    inputs).
    """
    if isinstance(outputs, Tensor):
        return outputs + linear.lora(*inputs) if linear.lora.mode.is_on else outputs
    output, bias, *rest = outputs
    if isinstance(output, tuple):
        output, normed = output
        inputs = (normed, *inputs[1:])
    elif rest:
        inputs = (*rest, *inputs[1:])
    lora = linear.lora
    mode = cast(AdapterMode, (next(iter(lora)) if isinstance(lora, ExpertAdapters) else lora).mode)
    return (output + lora(*inputs), bias) if mode.is_on else (output, bias)


def _with_gradient(embedding: torch.nn.Module, inputs: Any, output: Tensor) -> None:
    if torch.is_grad_enabled() and embedding.training:
        output.requires_grad_(True)
