"""Low-rank adapters beside Megatron's parallel linear layers: x W.T + alpha / rank * (x A.T) B.T, Hu et al. 2021,
"LoRA", section 4.1. W stays as it was loaded and has no gradient.

B of a layer that is cut by rows is cut like it, A of one that is cut by columns; the other half every tensor-parallel
rank has. What goes between the ranks are the `rank` numbers of a token between A and B, summed over those that have a
part of the inputs. An expert's tokens come and go by the dispatcher, which sums what its ranks make: nothing more has
to be sent there, but the gradients of the half that all of them have are parts of a sum.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, set_tensor_model_parallel_attributes
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from torch import Tensor

from rltrain.config.lora import Lora
from rltrain.models.lora import ADAPTER_A, ADAPTER_B, WEIGHT
from rltrain.reshard.layout import Layout
from rltrain.training.adapter_mode import AdapterMode

Segment = tuple[int, int, int]
"""(part, first, stop): rows of B that go with the part of A of that number."""


class Adapter(torch.nn.Module):
    """That of one layer, or of several matrices that are one layer: `a` [parts * rank, inputs] has theirs one below the
    other, `b` [outputs, rank] the rows that `segments` say, in order."""

    def __init__(
        self,
        linear: Any,
        shapes: tuple[tuple[int, ...], tuple[int, ...]],
        segments: Sequence[Segment],
        settings: Lora,
        mode: AdapterMode,
    ) -> None:
        super().__init__()
        weight = linear.weight
        self.a, self.b = (
            torch.nn.Parameter(torch.zeros(shape, dtype=weight.dtype, device=weight.device)) for shape in shapes
        )
        self.rank, self.scale = settings.rank, settings.scale
        self.mode, self.group = mode, linear.tp_group
        self.by_rows = isinstance(linear, ColumnParallelLinear)
        self.of_expert = linear.is_expert
        self.sequence_parallel = linear.sequence_parallel and not self.of_expert
        num_parts = shapes[0][0] // self.rank
        self.rows = [
            torch.tensor([row for of, *rows in segments if of == part for row in range(*rows)], dtype=torch.long)
            for part in range(num_parts)
        ]
        order = torch.cat(self.rows)
        self.order = None if torch.equal(order, torch.arange(shapes[1][0])) else order.argsort()
        self._mark()

    def _mark(self) -> None:
        """Tell gradient norms which parameters are shards and which are whole on several ranks, data parallelism which
        ranks share an expert's, and sequence parallelism whose gradients are sums over the ranks' tokens."""
        cut, whole = (self.b, self.a) if self.by_rows else (self.a, self.b)
        set_tensor_model_parallel_attributes(cut, True, 0 if self.by_rows else 1, 1)
        if self.of_expert:
            for parameter in (cut, whole):
                parameter.allreduce = False  # type: ignore[attr-defined]
            set_tensor_model_parallel_attributes(whole, True, 0, 1)
            whole.shared = self.group.rank() != 0  # type: ignore[attr-defined]
        else:
            whole.sequence_parallel = self.sequence_parallel  # type: ignore[attr-defined]

    @property
    def partial(self) -> Tensor | None:
        """The parameter whose gradients are to be summed over the ranks that an expert is cut over, if any."""
        if not self.of_expert or self.group.size() == 1:
            return None
        return self.a if self.by_rows else self.b

    def forward(self, inputs: Tensor) -> Tensor:
        """[..., inputs (of this rank)] as the layer gets them -> what is added to its output, of the same shape.

        Collective over: the layer's tensor-parallel group, and in backward, but for an expert's.
        """
        inner = self._summed(F.linear(self._dropped(inputs), self.a) * self.scale)
        parts = inner.split(self.rank, dim=-1)
        if len(parts) == 1:
            return F.linear(inner, self.b)
        outer = [F.linear(part, self._rows(number)) for number, part in enumerate(parts)]
        added = torch.cat(outer, dim=-1)
        return added if self.order is None else added.index_select(-1, self._on_device(self.order))

    @torch.no_grad()
    def merged(self, weight: Tensor) -> Tensor:
        """A copy of the layer's weight [outputs, inputs] with what the adapter adds, summed in fp32, rounded once."""
        factors = self.a.float().split(self.rank)
        added = torch.cat([self._rows(number).float() @ factor for number, factor in enumerate(factors)])
        if self.order is not None:
            added = added[self._on_device(self.order)]
        return added.mul_(self.scale).add_(weight.float()).to(weight.dtype)

    def _rows(self, part: int) -> Tensor:
        rows = self.rows[part]
        if len(rows) == len(self.b):
            return self.b
        return self.b.index_select(0, self._on_device(rows))

    def _on_device(self, index: Tensor) -> Tensor:
        return index.to(self.b.device, non_blocking=True)

    def _summed(self, inner: Tensor) -> Tensor:
        """[..., parts * rank] of all inputs and, where the layer's output is of all tokens, of these."""
        if self.of_expert or self.group.size() == 1:
            return inner
        if self.by_rows and self.sequence_parallel:
            return gather_from_sequence_parallel_region(inner, group=self.group)
        if self.by_rows:
            return copy_to_tensor_model_parallel_region(inner, group=self.group)
        if self.sequence_parallel:
            return reduce_scatter_to_sequence_parallel_region(inner, group=self.group)
        return reduce_from_tensor_model_parallel_region(inner, group=self.group)

    def _dropped(self, inputs: Tensor) -> Tensor:
        has_own = self.sequence_parallel or not self.by_rows
        return self.mode.dropped(inputs, self.group.rank() if has_own else 0)


class Adapters(AdapterMode):
    """Those of a rank's part of a model, whose other parameters are frozen. `parameters` are named as in
    `layout.on(rank)`."""

    def __init__(
        self, chunks: Sequence[torch.nn.Module], layout: Layout, rank: int, settings: Lora, seed: int = 0
    ) -> None:
        super().__init__(settings.dropout, seed)
        for chunk in chunks:
            chunk.requires_grad_(False)
        self.layout = layout
        self.parameters: dict[str, Tensor] = {}
        self.of_weight: dict[str, Adapter] = {}
        """By the name of the weight that it is added to."""
        mine = layout.on(rank)
        shapes, segments = dict(mine.parameters), _segments(layout, rank, settings.rank)
        for name in (name for name, _ in mine.parameters if name.endswith(ADAPTER_A)):
            layer, other = name.removesuffix(ADAPTER_A), name.removesuffix(ADAPTER_A) + ADAPTER_B
            linear = _module(chunks, layer)
            adapter = Adapter(linear, (shapes[name], shapes[other]), segments[other], settings, self)
            linear.lora = adapter
            linear.register_forward_hook(_add)
            self.parameters |= {name: adapter.a, other: adapter.b}
            self.of_weight[layer + WEIGHT] = adapter
        if chunks[0].pre_process:
            # Layers that are computed anew have gradients only where what they are given has one.
            chunks[0].embedding.register_forward_hook(_with_gradient)  # type: ignore[union-attr]

    def sum_gradients_of_experts(self) -> None:
        """Complete what is whole on all ranks that an expert is cut over. Collective over: these ranks."""
        for adapter in self.of_weight.values():
            if adapter.partial is not None:
                dist.all_reduce(adapter.partial.main_grad, group=adapter.group)  # type: ignore[attr-defined]

    def merged(self, name: str, weight: Tensor) -> Tensor:
        """`weight` with what its adapter adds, where it has one."""
        adapter = self.of_weight.get(name)
        return weight if adapter is None else adapter.merged(weight)


def is_adapter(parameter: str) -> bool:
    """Whether one of this name belongs to an adapter."""
    return parameter.endswith((ADAPTER_A, ADAPTER_B))


def _segments(layout: Layout, rank: int, lora_rank: int) -> dict[str, list[Segment]]:
    """By the name of each B, in the order of its rows. A layer's matrices have consecutive A, then as many B."""
    mine = layout.on(rank)
    names = [name for name, _ in mine.parameters]
    found: dict[str, list[Segment]] = {name: [] for name in names if name.endswith(ADAPTER_B)}
    first_a: dict[str, int] = {}
    parts: dict[str, int] = {}
    for number, tensor in zip(mine.pieces["parameter"].tolist(), mine.pieces["tensor"].tolist(), strict=True):
        layer = names[number].removesuffix(ADAPTER_A)
        if names[number].endswith(ADAPTER_A):
            first_a[layer] = min(tensor, first_a.get(layer, tensor))
            parts[layer] = parts.get(layer, 0) + 1
    for piece in mine.pieces:
        name = names[piece["parameter"]]
        if name.endswith(ADAPTER_B):
            layer = name.removesuffix(ADAPTER_B)
            part, first = int(piece["tensor"]) - first_a[layer] - parts[layer], int(piece["offset"]) // lora_rank
            found[name].append((part, first, first + int(piece["rows"])))
    return found


def _module(chunks: Sequence[torch.nn.Module], name: str) -> Any:
    """The layer of this name as `local_parameters` has names: after the chunk's number where there are several."""
    number = 0
    if len(chunks) > 1:
        prefix, _, name = name.partition(".")
        number = int(prefix)
    return chunks[number].get_submodule(name)


def _add(linear: Any, inputs: tuple[Tensor, ...], outputs: tuple[Tensor, Any]) -> tuple[Tensor, Any] | None:
    if not linear.lora.mode.is_on:
        return None
    output, bias = outputs
    return output + linear.lora(inputs[0]), bias


def _with_gradient(embedding: torch.nn.Module, inputs: Any, output: Tensor) -> None:
    if torch.is_grad_enabled() and embedding.training:
        output.requires_grad_(True)
