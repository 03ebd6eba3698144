"""Low-rank adapters beside the linear layers of transformers' models: x W.T + alpha / rank * (x A.T) B.T, Hu et al.
2021, "LoRA", section 4.1. They are sharded with the decoder layer that they are in, B in the rows of W, which has no
gradient; those of experts by expert, as the experts are.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor

from rltrain.config.models import Lora
from rltrain.config.schema import FakeQuantization
from rltrain.models import Architecture
from rltrain.models.experts import is_expert
from rltrain.models.lora import ADAPTER_A, ADAPTER_B, PEFT_PREFIX, WEIGHT, A, B
from rltrain.reshard.fsdp_layout import whole_parameters
from rltrain.training.adapters import AdapterMode
from rltrain.training.fake_quantization import rounded


def compute_beside_adapters(experts: Any, matrix: str, adapter: torch.nn.Module, mode: AdapterMode) -> None:
    """Give the module `experts` an adapter of its parameter `matrix`, gate_up_proj or down_proj. Its forward is then
    the one below: what transformers computes takes the stacked matrices alone."""
    if not hasattr(experts, "lora"):
        experts.lora = torch.nn.ModuleDict()
        experts.forward = _forward_of(experts, experts.forward, mode)
    experts.lora[matrix] = adapter


def _forward_of(experts: Any, plain: Callable[..., Tensor], mode: AdapterMode) -> Callable[..., Tensor]:
    def forward(hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """hidden [tokens, hidden]; of each token the experts that it visits, and their weights, [tokens, visits]."""
        if not mode.is_on:
            return plain(hidden, chosen, weights)
        order = chosen.flatten().argsort(stable=True)
        counts = chosen.flatten().bincount(minlength=experts.num_experts).tolist()
        token = order // chosen.shape[1]
        inputs = [*hidden.index_select(0, token).split(counts)]
        inner = []
        for of_expert in _products(experts, "gate_up_proj", inputs):
            gate, up = of_expert.chunk(2, -1)
            inner.append(experts.act_fn(gate) * up)
        made = torch.cat(_products(experts, "down_proj", inner))
        weighted = made * weights.flatten().index_select(0, order)[:, None]
        # Summed visit by visit of each token: a sum that adds up rows where they come has no order of its own on GPUs.
        visits = torch.zeros_like(weighted).index_copy(0, order, weighted)
        return visits.view(*chosen.shape, -1).sum(1).to(hidden.dtype)

    return forward


def _products(experts: Any, matrix: str, inputs: list[Tensor]) -> list[Tensor]:
    """Of each expert's tokens with its matrix, and with its adapter where there is one."""
    weights = getattr(experts, matrix)
    found = [F.linear(own, weights[number]) for number, own in enumerate(inputs)]
    if matrix not in experts.lora:
        return found
    return [one + other for one, other in zip(found, experts.lora[matrix].of_experts(inputs), strict=True)]


class Adapter(torch.nn.Module):
    """That of one layer: `a` [rank, inputs] and `b` [outputs, rank], without memory. Of the experts of a layer
    [experts, matrices * rank, inputs] and [experts, outputs, rank]."""

    def __init__(self, a: tuple[int, ...], b: tuple[int, ...], adapters: "Adapters") -> None:
        super().__init__()
        self.a, self.b = (torch.nn.Parameter(torch.empty(shape, device="meta")) for shape in (a, b))
        self._adapters = (adapters,)  # not a part of the module

    def forward(self, inputs: Tensor) -> Tensor:
        """[..., inputs] -> what is added to [..., outputs]."""
        (adapters,) = self._adapters
        a, b = (half.to(inputs.dtype) for half in (self.a, self.b))
        return F.linear(F.linear(adapters.dropped(inputs), a) * adapters.scale, b)

    def of_experts(self, inputs: list[Tensor]) -> list[Tensor]:
        """The same for what each of the experts gets; their matrices are equal in size."""
        (adapters,) = self._adapters
        a, b = (half.to(inputs[0].dtype) for half in (self.a, self.b))
        added = []
        for number, own in enumerate(inputs):
            inner = F.linear(adapters.dropped(own), a[number]) * adapters.scale
            parts = zip(inner.split(b.shape[-1], -1), b[number].chunk(a.shape[1] // b.shape[-1]), strict=True)
            added.append(torch.cat([F.linear(part, rows) for part, rows in parts], -1))
        return added


class Adapters(AdapterMode):
    """Those of a model whose other parameters are frozen; `settings.targets` and what is kept with them in one
    parameter elsewhere have one, so that states go from backend to backend."""

    def __init__(self, module: torch.nn.Module, architecture: Architecture, settings: Lora, seed: int) -> None:
        """To be called before `module` is sharded."""
        super().__init__(settings.dropout, seed)
        self.scale = settings.scale
        self.adapted = architecture.adapted(settings.rank, settings.targets)
        self.names: dict[str, str] = {}
        """Of the adapters as in their layout, by the names of the modules' parameters."""
        self.whole_a: dict[str, Tensor] = {}
        """A, whole, by the name of the weight that it goes with; of experts every rank has what it needs."""
        whole = whole_parameters(self.adapted)
        shapes = dict(zip(whole.names, whole.shapes, strict=True))
        self.heads = [name for name in shapes if not name.endswith((A, B))]
        """Of scores, which is learned as well."""
        for name in (name for name in shapes if name.endswith(A)):
            layer = name.removeprefix(PEFT_PREFIX).removesuffix(A)
            other = PEFT_PREFIX + layer + B
            adapter = Adapter(shapes[name], shapes[other], self)
            if len(shapes[name]) == 3:
                block, _, matrix = layer.rpartition(".")
                compute_beside_adapters(module.get_submodule(_inside(module, block)), matrix, adapter, self)
                held = f"{block}.lora.{matrix}."
                self.names |= {f"{held}a": name, f"{held}b": other}
                continue
            linear: Any = module.get_submodule(_inside(module, layer))
            linear.lora = adapter
            linear.register_forward_hook(self._add)
            self.names |= {layer + ADAPTER_A: name, layer + ADAPTER_B: other}

    def _add(self, linear: Any, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
        return output + linear.lora(inputs[0]) if self.is_on else output

    @torch.no_grad()
    def gather(self, sharded: Mapping[str, Tensor]) -> None:
        """Have every rank hold A whole, to merge its rows with. Collective over: the role's ranks."""
        for name, parameter in sharded.items():
            if name.endswith(A) and parameter.dim() == 2:
                assert isinstance(parameter, DTensor)
                weight = name.removeprefix(PEFT_PREFIX).removesuffix(A) + WEIGHT
                whole = parameter.full_tensor().detach()
                if weight in self.whole_a:
                    self.whole_a[weight].copy_(whole)
                else:
                    self.whole_a[weight] = whole.clone()

    @torch.no_grad()
    def merged(self, halves: Mapping[str, Tensor], name: str, weight: Tensor) -> Tensor:
        """`weight`, a shard in rows or of experts, with what its adapter adds, where it has one. `halves` are the
        adapters' shards as in their layout."""
        layer = PEFT_PREFIX + name.removesuffix(WEIGHT)
        a = halves.get(layer + A) if weight.dim() == 3 else self.whole_a.get(name)
        if a is None:
            return weight
        a, b = a.float(), halves[layer + B].float()
        parts = a.shape[-2] // b.shape[-1]
        added = [rows @ factor for rows, factor in zip(b.chunk(parts, -2), a.chunk(parts, -2), strict=True)]
        return torch.cat(added, -2).mul_(self.scale).add_(weight.float()).to(weight.dtype)


def _inside(module: torch.nn.Module, name: str) -> str:
    """What `module` calls a layer of transformers' model within it."""
    return f"language_model.{name}" if hasattr(module, "language_model") else name


def round_experts(model: torch.nn.Module, settings: FakeQuantization) -> None:
    """Have the matrices of experts in `model` be rounded in every pass, once they are gathered; adapters are not. To be
    called after adapters were added, whose layers look their matrices up."""
    for name, part in model.named_modules():
        held = [own for own, _ in part.named_parameters(recurse=False) if is_expert(f"{name}.{own}")]
        if held and not isinstance(part, Adapter):
            part.forward = _of_rounded(part, held, part.forward, settings)


def _of_rounded(
    layer: Any, names: list[str], plain: Callable[..., Tensor], settings: FakeQuantization
) -> Callable[..., Tensor]:
    def forward(*inputs: Tensor) -> Tensor:
        held = {name: layer._parameters[name] for name in names}
        layer._parameters.update({name: rounded(weight, settings) for name, weight in held.items()})
        try:
            return plain(*inputs)
        finally:
            layer._parameters.update(held)

    return forward
