"""transformers' model of a checkpoint, sharded by fully_shard, with adapters and rounded experts."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor
from transformers import CONFIG_MAPPING, AutoConfig, AutoModel, AutoModelForCausalLM, PreTrainedModel

from rltrain.config import schema
from rltrain.config.models import Lora
from rltrain.config.schema import FakeQuantization
from rltrain.errors import ConfigError
from rltrain.models import NUM_LABELS, Architecture
from rltrain.models.experts import is_expert
from rltrain.models.lora import ADAPTER_A, ADAPTER_B, PEFT_PREFIX, WEIGHT, A, B
from rltrain.models.registry import FAMILIES
from rltrain.offload.device_memory import check_device, move_to_device
from rltrain.reshard.fsdp_layout import fsdp_layout, whole_parameters
from rltrain.reshard.layout import Layout
from rltrain.runtime.grid import Grid
from rltrain.runtime.process_groups import ProcessGroups
from rltrain.training.adapters import AdapterMode
from rltrain.training.fake_quantization import rounded
from rltrain.training.fsdp_attention import NAME, SEQUENCES, SequenceSlices, compute_packed, register, spread_heads
from rltrain.training.logprobs import Logits, PackedModel, groups_of_rank
from rltrain.training.packed_attention import PackedRows, packed_rows
from rltrain.training.packing import MicroBatch, Packing

# transformers' experts, whose matrices are stacked in parameters of a layer, with low-rank adapters beside them.


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


# Low-rank adapters beside the linear layers of transformers' models: x W.T + alpha / rank * (x A.T) B.T, Hu et al.
# 2021, "LoRA", section 4.1. They are sharded with the decoder layer that they are in, B in the rows of W, which has no
# gradient; those of experts by expert, as the experts are.


class ShardedAdapter(torch.nn.Module):
    """That of one layer: `a` [rank, inputs] and `b` [outputs, rank], without memory. Of the experts of a layer
    [experts, matrices * rank, inputs] and [experts, outputs, rank]."""

    def __init__(self, a: tuple[int, ...], b: tuple[int, ...], adapters: "ShardedAdapters") -> None:
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


class ShardedAdapters(AdapterMode):
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
            adapter = ShardedAdapter(shapes[name], shapes[other], self)
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

    def held(self) -> list[Tensor]:
        return [*self.parameters.values(), *self.whole_a.values()]

    @torch.no_grad()
    def merged(self, name: str, weight: Tensor) -> Tensor:
        """A `weight` is a shard in rows or of experts."""
        layer, halves = PEFT_PREFIX + name.removesuffix(WEIGHT), self.parameters
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


# transformers' experts, computing with rounded weights.


def round_experts(model: torch.nn.Module, settings: FakeQuantization) -> None:
    """Have the matrices of experts in `model` be rounded in every pass, once they are gathered; adapters are not. To be
    called after adapters were added, whose layers look their matrices up."""
    for name, part in model.named_modules():
        held = [own for own, _ in part.named_parameters(recurse=False) if is_expert(f"{name}.{own}")]
        if held and not isinstance(part, ShardedAdapter):
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


# transformers' own model of a checkpoint's config.json, made without memory for its parameters.


class ValueModel(torch.nn.Module):
    """A decoder with a score of every token, named as in transformers' models for sequence classification."""

    def __init__(self, model: torch.nn.Module, hidden_size: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.prefix: str = model.base_model_prefix  # type: ignore[assignment]
        setattr(self, self.prefix, model)
        self.score = torch.nn.Linear(hidden_size, NUM_LABELS, bias=False, dtype=dtype)

    def forward(self, **arguments: Any) -> Tensor:
        """[1, rows] fp32"""
        hidden = getattr(self, self.prefix)(**arguments).last_hidden_state
        return hidden.float() @ self.score.weight[0].float()


class Policy(torch.nn.Module):
    """A causal language model as it is, of whose output nothing but the logits is kept."""

    def __init__(self, language_model: torch.nn.Module) -> None:
        super().__init__()
        self.language_model = language_model

    def forward(self, **arguments: Any) -> Tensor:
        """[1, rows, vocabulary]"""
        logits: Tensor = self.language_model(**arguments).logits
        return logits


def empty_model(folder: Path, architecture: Architecture, dtype: torch.dtype) -> torch.nn.Module:
    """With the head that `architecture` has, its parameters of `dtype` on torch's meta device, never in training mode:
    without dropout."""
    register()
    family = FAMILIES.get(architecture.family)
    kind: Any = CONFIG_MAPPING[family.built_as] if family and family.built_as else AutoConfig
    config = kind.from_pretrained(folder)
    with _parameters_without_memory():
        if architecture.head == "value":
            decoder = AutoModel.from_config(config.get_text_config(), dtype=dtype, attn_implementation=NAME)
            model: torch.nn.Module = ValueModel(decoder, architecture.hidden_size, dtype)
        else:
            model = Policy(AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=NAME))
    _train_padding_tokens(model)
    return model.eval()


def checkpoint_names(module: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """The parameters of an `empty_model` by transformers' names; those that are tied once."""
    return {name.removeprefix("language_model."): parameter for name, parameter in module.named_parameters()}


def decoder_layers(module: torch.nn.Module) -> list[torch.nn.Module]:
    """In order: those that transformers says are not to be split."""
    kinds = {kind for part in module.modules() for kind in getattr(part, "_no_split_modules", None) or ()}
    return [part for part in module.modules() if type(part).__name__ in kinds]


def give_memory(module: torch.nn.Module, device: torch.device, given: dict[int, Any]) -> None:
    """To the parameters of `module` that have none, contents undefined. `given` keeps those that are tied together."""
    for part in module.modules():
        for name, parameter in part._parameters.items():
            if parameter is None or not parameter.is_meta:
                continue
            if id(parameter) not in given:
                empty = torch.nn.Parameter(torch.empty_like(parameter, device=device), parameter.requires_grad)
                given[id(parameter)] = (parameter, empty)  # the former too: its id must stay its own
            part._parameters[name] = given[id(parameter)][1]


def _train_padding_tokens(module: torch.nn.Module) -> None:
    """Makes embeddings give the pad token's row its gradient, as Megatron does. transformers drops that gradient,
    although a policy can draw the token as any other."""
    for part in module.modules():
        if isinstance(part, torch.nn.Embedding):
            part.padding_idx = None


@contextmanager
def _parameters_without_memory() -> Iterator[None]:
    """Buffers, such as rotary frequencies, are made as ever."""
    original = torch.nn.Module.register_parameter

    def register(module: torch.nn.Module, name: str, parameter: torch.nn.Parameter | None) -> None:
        if parameter is not None and not parameter.is_meta:
            parameter = torch.nn.Parameter(parameter.detach().to("meta"), parameter.requires_grad)
        original(module, name, parameter)

    torch.nn.Module.register_parameter = register  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        torch.nn.Module.register_parameter = original  # type: ignore[method-assign]


# A model of transformers, its parameters sharded over the ranks of a role by torch's fully_shard (FSDP2).


class ShardedModel(PackedModel):
    """This rank's shards of a model, and the model that gathers them layer by layer."""

    adapters: ShardedAdapters | None

    def __init__(
        self,
        architecture: Architecture,
        grid: Grid,
        groups: ProcessGroups,
        *,
        folder: Path,
        model: schema.Model,
        fsdp: schema.Fsdp,
        device: torch.device,
        trains: bool,
        on_host: bool = False,
        lora: Lora | None = None,
        seed: int = 0,
    ) -> None:
        """Weights not yet loaded. Shards of what is trained are in fp32, whatever the model computes in: with `trains`
        all of it, with `lora` adapters alone, whose random numbers come of `seed`. `on_host` are shards and gradients
        that come to the device when layers are gathered."""
        layout = layout_of_model(architecture, grid, dtype=model.dtype, trains=trains)
        own = SimpleNamespace(**groups_of_rank(grid, groups), all=groups[grid.ranks])
        super().__init__(architecture, grid, own, layout, device, model)
        computed = self.dtype
        self.module = empty_model(folder, architecture, torch.float32 if trains else computed)
        _check_parameters(self.module, architecture, folder)
        self.module.requires_grad_(trains)
        if architecture.delta:
            compute_packed(self.module)
        self.adapters = ShardedAdapters(self.module, architecture, lora, seed) if lora else None
        if model.fake_quantization:
            round_experts(self.module, model.fake_quantization)
        if lora and isinstance(self.module, ValueModel):
            self.module.score.float().requires_grad_(True)
        mixed = (trains or lora is not None) and computed != torch.float32
        policy = MixedPrecisionPolicy(computed, torch.float32) if mixed else MixedPrecisionPolicy()
        if model.recomputed.granularity == "full":
            _recompute(self.module, model.recomputed)
        self.on_host = on_host
        move_to_device(self.module, device)
        self._shard(fsdp, policy, CPUOffloadPolicy(pin_memory=device.type == "cuda") if on_host else OffloadPolicy())
        check_device(self, device, parameters=torch.device("cpu") if on_host else None)
        if self.adapters:
            self.adapters.layout = fsdp_layout(self.adapters.adapted, grid)
            self.adapters.parameters = local_shards(self.named_learned())

    @property
    def weights(self) -> Mapping[str, Tensor]:
        """What the sharded parameters hold, in their memory."""
        return local_shards(self.named())

    @property
    def packing(self) -> Packing:
        """All ranks have as many micro-batches, as each gathers what the others compute with."""
        return Packing(self.device, self.share, together=self.pg_collection.all)

    def named(self) -> dict[str, torch.nn.Parameter]:
        """The sharded parameters, DTensors, by transformers' names. Without adapters."""
        known = self.adapters.names if self.adapters else {}
        return {name: parameter for name, parameter in checkpoint_names(self.module).items() if name not in known}

    def named_learned(self) -> dict[str, torch.nn.Parameter]:
        """Those that training changes; adapters by their names in checkpoints."""
        if self.adapters is None:
            return self.named()
        found = checkpoint_names(self.module)
        learned = {name: found[own] for own, name in self.adapters.names.items()}
        return learned | {name: found[name] for name in self.adapters.heads}

    def sequences(self, lengths: Sequence[int]) -> PackedRows | SequenceSlices:
        """Packed end to end; with context parallelism whole ones, of which this rank has its slices."""
        if self.share.size > 1:
            return spread_heads(lengths, self.share, self.device, self.pg_collection.cp)
        return packed_rows(lengths, self.device, PackedRows)

    def outputs(self, batch: MicroBatch) -> Tensor:
        """[rows of this rank with padding, ...] logits or values. Collective over: the role's ranks."""
        sequences = self.sequences(batch.segments)
        found: Tensor = self.module(
            input_ids=batch.padded_tokens[None],
            position_ids=sequences.positions[None],
            use_cache=False,
            **{SEQUENCES: sequences},
        )
        return found[0]

    def logits_of(self, outputs: Tensor) -> Logits:
        return Logits(outputs)

    def give_up_gathered(self) -> None:
        """Weights that a forward without backward has left whole: they are void once the shards change."""
        for part in self.module.modules():
            if isinstance(part, FSDPModule):
                part.reshard()

    def _shard(self, fsdp: schema.Fsdp, policy: MixedPrecisionPolicy, offload: OffloadPolicy) -> None:
        """Layer by layer, so that no more than one is ever whole here."""
        mesh, given = self._mesh(), dict[int, object]()
        units = [*decoder_layers(self.module), self.module]
        for unit in units:
            give_memory(unit, self.device, given)
            reshard = fsdp.reshard_after_forward and unit is not self.module
            fully_shard(unit, mesh=mesh, reshard_after_forward=reshard, mp_policy=policy, offload_policy=offload)
            assert isinstance(unit, FSDPModule)
            # Gradients are sums, divided once by what the whole mini-batch says; gloo knows no other reduction.
            unit.set_gradient_divide_factor(1.0)
            unit.set_force_sum_reduction_for_comms(True)
            if hasattr(unit, "set_reduce_scatter_unused_params"):  # torch 2.12 and later
                # Without it ranks reduce alike too: a pass of a rank, of padding alone as well, uses every parameter.
                unit.set_reduce_scatter_unused_params(True, recurse=False)

    def _mesh(self) -> DeviceMesh:
        groups, kind = self.pg_collection, self.device.type
        if self.grid.copies in (None, 1):
            return DeviceMesh.from_group(groups.shard, kind)
        array = torch.from_numpy(self.grid.sharded_array.copy())
        return DeviceMesh.from_group(
            [groups.replicate, groups.shard], kind, mesh=array, mesh_dim_names=("replicate", "shard")
        )


def layout_of_model(architecture: Architecture, grid: Grid, *, dtype: str, trains: bool) -> Layout:
    """Where the shards lie of a model that computes in `dtype`."""
    return fsdp_layout(architecture, grid, dtype="float32" if trains else dtype)


@torch.no_grad()
def local_shard(sharded: Tensor) -> Tensor:
    """What this rank holds of a sharded parameter or gradient: its own memory."""
    assert isinstance(sharded, DTensor)
    shard: Tensor = sharded.to_local()
    return shard.detach()


def local_shards(named: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns what this rank holds of sharded parameters by name, without those of which it holds nothing."""
    shards = {name: local_shard(parameter) for name, parameter in named.items()}
    return {name: shard for name, shard in shards.items() if shard.numel()}


def _check_parameters(module: torch.nn.Module, architecture: Architecture, folder: Path) -> None:
    """ConfigError where transformers' model has other parameters than its layout."""
    whole = whole_parameters(architecture)
    expected = dict(zip(whole.names, whole.shapes, strict=True))
    found = {name: tuple(parameter.shape) for name, parameter in checkpoint_names(module).items()}
    if found != expected:
        name = next(name for name in [*found, *expected] if found.get(name) != expected.get(name))
        raise ConfigError(
            f"the model in {folder} has {name} as {expected.get(name, 'nothing')} in its checkpoint's terms and as "
            f"{found.get(name, 'nothing')} in transformers' modules, which actor.backend fsdp cannot bring together; "
            "expected actor.backend: megatron"
        )


def _recompute(module: torch.nn.Module, recompute: schema.Recompute) -> None:
    """Have decoder layers keep nothing but what goes into them. Only they themselves are in training mode: transformers
    asks that, and nothing inside them drops anything out."""
    layers = decoder_layers(module)
    for part in module.modules():
        if isinstance(part, PreTrainedModel):
            part.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
            break
    for number, layer in enumerate(layers):
        layer.gradient_checkpointing = number < recompute.full_layers(len(layers))  # type: ignore[assignment]
        layer.training = True
