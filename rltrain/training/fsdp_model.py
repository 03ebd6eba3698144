"""The transformers model of a checkpoint, sharded by fully_shard, with adapters and rounded experts."""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
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
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PreTrainedModel,
)

from rltrain.config import schema
from rltrain.config.models import Lora
from rltrain.config.schema import FakeQuantization
from rltrain.errors import ConfigError
from rltrain.models import NUM_LABELS, Architecture
from rltrain.models.attention import fused_kernels
from rltrain.models.experts import is_expert
from rltrain.models.lora import ADAPTER_A, ADAPTER_B, PEFT_PREFIX, WEIGHT, A, B
from rltrain.models.registry import FAMILIES
from rltrain.models.table import NESTED_TOWER_PREFIX
from rltrain.models.vision import Vision
from rltrain.models.vision_tower import build_tower
from rltrain.offload.device_memory import check_device, move_to_device
from rltrain.reshard.fsdp_layout import fsdp_layout, whole_parameters
from rltrain.reshard.layout import Layout
from rltrain.runtime.grid import Grid
from rltrain.runtime.process_groups import ProcessGroups
from rltrain.training.adapters import AdapterMode
from rltrain.training.fake_quantization import rounded
from rltrain.training.fsdp_attention import (
    NAME,
    SEQUENCES,
    SequenceSlices,
    compute_fused,
    compute_packed,
    register,
    spread_heads,
    spread_tree,
)
from rltrain.training.fsdp_vision import (
    ATTENTIONS,
    ShardedTower,
    VisionPolicy,
    inputs_with_images,
    positions_around_images,
)
from rltrain.training.logprobs import PackedModel, groups_of_rank
from rltrain.training.packed_attention import PackedRows, packed_rows
from rltrain.training.packing import MicroBatch, Packing
from rltrain.training.recipes import MadeAgain
from rltrain.training.sliced_attention import SlicedRows, tree_rows
from rltrain.training.tower_pass import Shown, Sight, TowerPass, pieces_of
from rltrain.training.vocabulary import Logits

# Low-rank adapters of transformers' experts. The experts' matrices are stacked in parameters of a layer.


def compute_beside_adapters(experts: Any, matrix: str, adapter: torch.nn.Module, mode: AdapterMode) -> None:
    """Adds an adapter to the parameter `matrix` of the module `experts`, gate_up_proj or down_proj.

    The module's forward is replaced by the one below, because transformers' own uses only the stacked matrices.
    """
    if not hasattr(experts, "lora"):
        experts.lora = torch.nn.ModuleDict()
        experts.forward = _forward_of(experts, experts.forward, mode)
    experts.lora[matrix] = adapter


def _forward_of(experts: Any, plain: Callable[..., Tensor], mode: AdapterMode) -> Callable[..., Tensor]:
    def forward(hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """Computes the experts' output. `hidden` is [tokens, hidden]. `chosen` and `weights` are [tokens, visits]."""
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
        # Summed in a fixed order of each token's visits. On GPUs, adding rows by index has no fixed order.
        visits = torch.zeros_like(weighted).index_copy(0, order, weighted)
        return visits.view(*chosen.shape, -1).sum(1).to(hidden.dtype)

    return forward


def _products(experts: Any, matrix: str, inputs: list[Tensor]) -> list[Tensor]:
    """Returns each expert's products with its matrix, plus those of its adapter if there is one."""
    weights = getattr(experts, matrix)
    found = [F.linear(own, weights[number]) for number, own in enumerate(inputs)]
    if matrix not in experts.lora:
        return found
    return [one + other for one, other in zip(found, experts.lora[matrix].of_experts(inputs), strict=True)]


# Low-rank adapters of transformers' linear layers: x W.T + alpha / rank * (x A.T) B.T, Hu et al. 2021, "LoRA", section
# 4.1. They are sharded with their decoder layer: B by rows, like the frozen W. Adapters of experts are sharded by
# expert.


class ShardedAdapter(torch.nn.Module):
    """The adapter of one layer: `a` [rank, inputs] and `b` [outputs, rank], created without memory.

    For the experts of a layer they are [experts, matrices * rank, inputs] and [experts, outputs, rank].
    """

    def __init__(self, a: tuple[int, ...], b: tuple[int, ...], adapters: "ShardedAdapters") -> None:
        super().__init__()
        self.a, self.b = (torch.nn.Parameter(torch.empty(shape, device="meta")) for shape in (a, b))
        self._adapters = (adapters,)  # in a tuple, so it is no submodule

    def forward(self, inputs: Tensor) -> Tensor:
        """Returns the addition to the layer's output [..., outputs] from inputs [..., inputs]."""
        (adapters,) = self._adapters
        a, b = (half.to(inputs.dtype) for half in (self.a, self.b))
        with MadeAgain(inputs):
            inner = F.linear(adapters.dropped(inputs), a)
        return F.linear(inner * adapters.scale, b)

    def of_experts(self, inputs: list[Tensor]) -> list[Tensor]:
        """Returns the additions for each expert's inputs. The experts' matrices have equal sizes."""
        (adapters,) = self._adapters
        a, b = (half.to(inputs[0].dtype) for half in (self.a, self.b))
        added = []
        for number, own in enumerate(inputs):
            inner = F.linear(adapters.dropped(own), a[number]) * adapters.scale
            parts = zip(inner.split(b.shape[-1], -1), b[number].chunk(a.shape[1] // b.shape[-1]), strict=True)
            added.append(torch.cat([F.linear(part, rows) for part, rows in parts], -1))
        return added


class ShardedAdapters(AdapterMode):
    """The adapters of a model. Its other parameters are frozen.

    `settings.targets` get adapters. So do matrices fused with a target in another backend's parameters, so that states
    can move between backends.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        architecture: Architecture,
        settings: Lora,
        seed: int,
        tower: torch.nn.Module | None = None,
    ) -> None:
        """Adds the adapters to `module` and its vision `tower`. Call it before they are sharded."""
        super().__init__(settings.dropout, seed)
        self.scale = settings.scale
        self.adapted = architecture.adapted(settings.rank, settings.targets, vision=settings.vision)
        self.names: dict[str, str] = {}
        """Adapter names as in their layout, by the names of the module's parameters."""
        self.whole_a: dict[str, Tensor] = {}
        """Whole A matrices by the name of their weight. Experts are not included: every rank has what it needs."""
        whole = whole_parameters(self.adapted)
        shapes = dict(zip(whole.names, whole.shapes, strict=True))
        self.heads = [name for name in shapes if not name.endswith((A, B))]
        """Heads for scores. They are trained as well."""
        for name in (name for name in shapes if name.endswith(A)):
            layer = name.removeprefix(PEFT_PREFIX).removesuffix(A)
            other = PEFT_PREFIX + layer + B
            adapter = ShardedAdapter(shapes[name], shapes[other], self)
            if len(shapes[name]) == 3:
                block, _, matrix = layer.rpartition(".")
                compute_beside_adapters(_part(module, tower, block), matrix, adapter, self)
                held = f"{block}.lora.{matrix}."
                self.names |= {f"{held}a": name, f"{held}b": other}
                continue
            linear: Any = _part(module, tower, layer)
            linear.lora = adapter
            linear.register_forward_hook(self._add)
            self.names |= {layer + ADAPTER_A: name, layer + ADAPTER_B: other}

    def _add(self, linear: Any, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
        return output + linear.lora(inputs[0]) if self.is_on else output

    @torch.no_grad()
    def gather(self, sharded: Mapping[str, Tensor]) -> None:
        """Gathers the whole A on every rank, for merging it with the rank's rows. Collective over: the role's ranks."""
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
        """Returns the merged weight. `weight` is a shard of rows or of experts."""
        layer, halves = PEFT_PREFIX + name.removesuffix(WEIGHT), self.parameters
        a = halves.get(layer + A) if weight.dim() == 3 else self.whole_a.get(name)
        if a is None:
            return weight
        a, b = a.float(), halves[layer + B].float()
        parts = a.shape[-2] // b.shape[-1]
        added = [rows @ factor for rows, factor in zip(b.chunk(parts, -2), a.chunk(parts, -2), strict=True)]
        return torch.cat(added, -2).mul_(self.scale).add_(weight.float()).to(weight.dtype)


def _part(module: torch.nn.Module, tower: torch.nn.Module | None, name: str) -> torch.nn.Module:
    """Returns a layer by its name in transformers' whole model."""
    if tower is not None and name.startswith(NESTED_TOWER_PREFIX):
        return tower.get_submodule(name.removeprefix(NESTED_TOWER_PREFIX))
    return module.get_submodule(f"language_model.{name}" if hasattr(module, "language_model") else name)


# Rounded weights in transformers' experts.


def round_experts(model: torch.nn.Module, settings: FakeQuantization) -> None:
    """Makes experts in `model` round their gathered matrices in every pass. Adapters are not rounded.

    Call it after adapters were added, because their layers look up the matrices.
    """
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


# The transformers model of a checkpoint's config.json, with parameters on the meta device.


class ValueModel(torch.nn.Module):
    """A decoder with a score per token, named as in transformers' models for sequence classification."""

    def __init__(self, model: torch.nn.Module, hidden_size: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.prefix: str = model.base_model_prefix  # type: ignore[assignment]
        setattr(self, self.prefix, model)
        self.score = torch.nn.Linear(hidden_size, NUM_LABELS, bias=False, dtype=dtype)

    def forward(self, **arguments: Any) -> Tensor:
        """Returns scores, fp32 [1, rows]."""
        decoder = getattr(self, self.prefix)
        hidden = decoder(**inputs_with_images(decoder, **arguments)).last_hidden_state
        return hidden.float() @ self.score.weight[0].float()


class Policy(torch.nn.Module):
    """A causal language model whose head is left to the loss.

    `softcap` is the model's cap of logits. If the model changes the head's products in another way, as by a factor, the
    head computes whole logits. The first pass finds this out, and is then repeated.
    """

    def __init__(self, language_model: Any, softcap: float | None) -> None:
        super().__init__()
        self.language_model, self.softcap = language_model, softcap
        head = language_model.get_output_embeddings()
        self.defers_head = isinstance(head, torch.nn.Linear) and head.bias is None

    @property
    def head(self) -> torch.nn.Module:
        head: torch.nn.Module = self.language_model.get_output_embeddings()
        return head

    def forward(self, **arguments: Any) -> Tensor:
        """Returns the head's inputs [1, rows, hidden], or logits [1, rows, vocabulary]."""
        if not self.defers_head:
            return self._logits(arguments)
        head, given = self.head, list[Tensor]()

        def pass_on(states: Tensor) -> Tensor:
            given.append(states)
            return states

        head.forward = pass_on
        try:
            found = self._logits(arguments)
        finally:
            del head.forward
        if self.softcap is not None or found is given[0]:
            return given[0]
        self.defers_head = False
        return self._logits(arguments)

    def _logits(self, arguments: dict[str, Any]) -> Tensor:
        logits: Tensor = self.language_model(**arguments).logits
        return logits


def empty_model(folder: Path, architecture: Architecture, dtype: torch.dtype) -> torch.nn.Module:
    """Returns the model with the head of `architecture`, its parameters in `dtype` on torch's meta device.

    It is in eval mode, so it has no dropout. It excludes the vision tower (`empty_tower`).
    """
    register()
    config = _config(folder, architecture)
    with _parameters_without_memory():
        if architecture.head == "value":
            decoder = AutoModel.from_config(config.get_text_config(), dtype=dtype, attn_implementation=NAME)
            model: torch.nn.Module = ValueModel(decoder, architecture.hidden_size, dtype)
        elif architecture.vision:
            whole = AutoModelForImageTextToText.from_config(config, dtype=dtype, attn_implementation=ATTENTIONS)
            model = VisionPolicy(whole)
        else:
            causal = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=NAME)
            model = Policy(causal, architecture.logits_softcap)
    _train_padding_tokens(model)
    return model.eval()


def _config(folder: Path, architecture: Architecture) -> Any:
    """Returns transformers' configuration of a checkpoint. Without its tower it may be one of the language model."""
    family = None if architecture.vision else FAMILIES.get(architecture.family)
    if family is None or family.built_as is None:
        return AutoConfig.from_pretrained(folder)
    kind: Any = CONFIG_MAPPING[family.built_as]
    if family.nested is None:
        return kind.from_pretrained(folder)
    values = AutoConfig.from_pretrained(folder).get_text_config().to_dict() | {"model_type": family.built_as}
    # Vision-language models with experts always normalise the routers' weights.
    return kind(**values, **({"norm_topk_prob": True} if architecture.moe else {}))


def empty_tower(folder: Path, vision: Vision, dtype: torch.dtype) -> torch.nn.Module:
    """Returns the vision tower of a checkpoint, its parameters in `dtype` on torch's meta device, in eval mode."""
    with _parameters_without_memory():
        return build_tower(vision, folder, dtype, torch.device("cpu"))


def checkpoint_names(module: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """Returns the parameters of an `empty_model` by transformers' names. Tied parameters appear once."""
    return {name.removeprefix("language_model."): parameter for name, parameter in module.named_parameters()}


def decoder_layers(module: torch.nn.Module) -> list[torch.nn.Module]:
    """Returns the decoder layers in order: the modules that transformers marks as not to be split."""
    kinds = {kind for part in module.modules() for kind in getattr(part, "_no_split_modules", None) or ()}
    return [part for part in module.modules() if type(part).__name__ in kinds]


def give_memory(module: torch.nn.Module, device: torch.device, given: dict[int, Any]) -> None:
    """Gives memory with undefined contents to the meta parameters of `module`. `given` keeps tied parameters tied."""
    for part in module.modules():
        for name, parameter in part._parameters.items():
            if parameter is None or not parameter.is_meta:
                continue
            if id(parameter) not in given:
                empty = torch.nn.Parameter(torch.empty_like(parameter, device=device), parameter.requires_grad)
                given[id(parameter)] = (parameter, empty)  # keeps the old one, so its id is not reused
            part._parameters[name] = given[id(parameter)][1]


def _train_padding_tokens(module: torch.nn.Module) -> None:
    """Makes embeddings train the pad token's row, as Megatron does.

    transformers drops that gradient, but a policy can sample the token like any other.
    """
    for part in module.modules():
        if isinstance(part, torch.nn.Embedding):
            part.padding_idx = None


@contextmanager
def _parameters_without_memory() -> Iterator[None]:
    """Creates parameters on the meta device. Buffers, such as rotary frequencies, are created normally."""
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


# A transformers model with parameters sharded over a role's ranks by torch's fully_shard (FSDP2).


class ShardedModel(PackedModel):
    """This rank's shards of a model, and its module. The module gathers the shards layer by layer."""

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
        sight: Sight | None = None,
    ) -> None:
        """Builds the sharded model without loaded weights. Takes `sight` if the architecture has a vision tower.

        Trained shards are fp32 for every dtype of the computation: all with `trains`, only the adapters with `lora`.
        `seed` is for adapters. With `on_host` shards and gradients are on the host, and layers move to the device when
        gathered.
        """
        layout = layout_of_model(architecture, grid, dtype=model.dtype, trains=trains)
        own = SimpleNamespace(**groups_of_rank(grid, groups), all=groups[grid.ranks])
        super().__init__(architecture, grid, own, layout, device, model)
        computed, self.wide_head = self.dtype, model.head != model.dtype
        held = torch.float32 if trains else computed
        self.module = empty_model(folder, architecture, held).requires_grad_(trains)
        self.tower: ShardedTower | None = None
        tower: torch.nn.Module | None = None
        if architecture.vision is not None:
            assert sight is not None, "the model has a vision tower"
            tower = empty_tower(folder, architecture.vision, held).requires_grad_(trains and sight.settings.train)
            self.tower = ShardedTower(tower, architecture.vision, sight, device)
            if not sight.settings.train:
                texts = replace(architecture, vision=None)
                self.trained_layout = layout_of_model(texts, grid, dtype=model.dtype, trains=trains)
        _check_parameters(self.named(), architecture, folder)
        if architecture.delta:
            compute_packed(self.module)
        _fuse(self.module, device, model.recomputed)
        self.adapters = ShardedAdapters(self.module, architecture, lora, seed, tower) if lora else None
        if model.fake_quantization:
            round_experts(self.module, model.fake_quantization)
        if lora and isinstance(self.module, ValueModel):
            self.module.score.float().requires_grad_(True)
        mixed = (trains or lora is not None) and computed != torch.float32
        policy = MixedPrecisionPolicy(computed, torch.float32) if mixed else MixedPrecisionPolicy()
        if model.recomputed.granularity == "full":
            _recompute(self.module, model.recomputed)
        self.on_host = on_host
        for root in self._roots():
            move_to_device(root, device)
        self._shard(fsdp, policy, CPUOffloadPolicy(pin_memory=device.type == "cuda") if on_host else OffloadPolicy())
        check_device(self, device, parameters=torch.device("cpu") if on_host else None)
        if self.adapters:
            self.adapters.layout = fsdp_layout(self.adapters.adapted, grid)
            self.adapters.parameters = local_shards(self.named_learned())

    @property
    def weights(self) -> Mapping[str, Tensor]:
        """The local shards by name, in their own memory."""
        return local_shards(self.named())

    @property
    def packing(self) -> Packing:
        """The packing requirements. All ranks have the same number of micro-batches, because each gathers the others'
        shards."""
        return Packing(self.device, self.share, together=self.pg_collection.all, prefixes=self.share_prefixes)

    def named(self) -> dict[str, torch.nn.Parameter]:
        """Returns the sharded parameters, DTensors, by transformers' names, without adapters."""
        known = self.adapters.names if self.adapters else {}
        return {name: parameter for name, parameter in self._all_named().items() if name not in known}

    def _all_named(self) -> dict[str, torch.nn.Parameter]:
        return checkpoint_names(self.module) | (self.tower.named() if self.tower else {})

    def named_learned(self) -> dict[str, torch.nn.Parameter]:
        """Returns the trained parameters. Adapters have their names in checkpoints."""
        if self.adapters is None:
            return {name: parameter for name, parameter in self.named().items() if parameter.requires_grad}
        found = self._all_named()
        learned = {name: found[own] for own, name in self.adapters.names.items()}
        return learned | {name: found[name] for name in self.adapters.heads}

    def sequences_of(self, batch: MicroBatch) -> PackedRows | SlicedRows | SequenceSlices:
        """Describes the rows of a micro-batch."""
        if batch.tree is None:
            return self.sequences(batch.segments)
        if self.share.size > 1:
            return spread_tree(batch, self.share, self.device, self.pg_collection.cp)
        return tree_rows(batch.tree, batch.segments, batch.lengths, SlicedRows, self.device)

    def sequences(self, lengths: Sequence[int]) -> PackedRows | SequenceSlices:
        """Describes sequences packed end to end. With context parallelism this rank has slices of whole sequences."""
        if self.share.size > 1:
            return spread_heads(lengths, self.share, self.device, self.pg_collection.cp)
        return packed_rows(lengths, self.device, PackedRows)

    def tower_pass(self, batches: Sequence[MicroBatch], *, trains: bool) -> TowerPass | None:
        """Encodes the images of the micro-batches. Returns None if there are none on any rank.

        Ranks encode equally often, because each gathers the others' shards. Collective over: the role's ranks.
        """
        if self.tower is None:
            return None
        assert self.tower.store is not None, "a model with samples has a store of images"
        with_fields = [batch for batch in batches if batch.experience.has("image_keys")]
        own = len(pieces_of(self.tower.tower, with_fields, self.tower.store))
        most = torch.tensor(own, device=self.device)
        dist.all_reduce(most, dist.ReduceOp.MAX, group=self.pg_collection.all)
        if not most and not any(batch.experience.image_keys.any() for batch in with_fields):
            return None  # otherwise all images may have kept features
        trains = trains and self.tower.is_trained
        return TowerPass(self.tower.tower, with_fields, self.tower.store, trains=trains, num_pieces=int(most))

    def outputs(self, batch: MicroBatch, shown: Shown | None = None) -> Tensor:
        """Returns inputs of the head, logits or values of this rank's rows with padding, [rows, ...].

        Collective over: the role's ranks.
        """
        sequences = self.sequences_of(batch)
        positions = sequences.positions[None]
        images = {} if self.tower is None else {"shown": shown}
        found: Tensor = self.module(
            input_ids=batch.padded_tokens[None],
            position_ids=positions if self.tower is None else positions_around_images(batch, positions[0]),
            use_cache=False,
            **{SEQUENCES: sequences},
            **images,
        )
        return found[0]

    def logits_of(self, outputs: Tensor) -> Logits:
        """Returns the outputs as logits. The head's weight is whole on each rank since the forward."""
        policy = self.module
        assert isinstance(policy, Policy | VisionPolicy), "the model has a vocabulary head"
        if not policy.defers_head:
            if self.wide_head:
                raise ConfigError(
                    f"model.head_dtype: got float32, but {type(policy.language_model).__name__} computes its logits "
                    "itself; expected null"
                )
            return Logits(outputs)
        weight = policy.head.weight
        assert isinstance(weight, Tensor)
        return Logits(outputs, weight, self.wide_head, policy.softcap)

    def give_up_gathered(self) -> None:
        """Frees whole weights left by a forward without backward. They are outdated once the shards change."""
        for root in self._roots():
            for part in root.modules():
                if isinstance(part, FSDPModule):
                    part.reshard()

    def _roots(self) -> list[torch.nn.Module]:
        """Returns the modules with a forward of their own."""
        return [self.module, self.tower.module] if self.tower else [self.module]

    def _shard(self, fsdp: schema.Fsdp, policy: MixedPrecisionPolicy, offload: OffloadPolicy) -> None:
        """Gives memory to and shards one layer after the other, so at most one layer is whole on a rank."""
        mesh, given = self._mesh(), dict[int, object]()
        for unit in [unit for root in self._roots() for unit in (*decoder_layers(root), root)]:
            give_memory(unit, self.device, given)
            reshard = fsdp.reshard_after_forward and unit is not self.module
            fully_shard(unit, mesh=mesh, reshard_after_forward=reshard, mp_policy=policy, offload_policy=offload)
            assert isinstance(unit, FSDPModule)
            # Gradients are sums with one division per mini-batch, and gloo supports no other reduction.
            unit.set_gradient_divide_factor(1.0)
            unit.set_force_sum_reduction_for_comms(True)
            if hasattr(unit, "set_reduce_scatter_unused_params"):  # torch 2.12 and later
                # Older releases reduce alike too, since every pass uses every parameter, even with padding alone.
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
    """Returns the layout of the shards of a model with the compute type `dtype`."""
    return fsdp_layout(architecture, grid, dtype="float32" if trains else dtype)


@torch.no_grad()
def local_shard(sharded: Tensor) -> Tensor:
    """Returns this rank's shard of a sharded parameter or gradient, in its own memory."""
    assert isinstance(sharded, DTensor)
    shard: Tensor = sharded.to_local()
    return shard.detach()


def local_shards(named: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns this rank's shards by name, without empty ones."""
    shards = {name: local_shard(parameter) for name, parameter in named.items()}
    return {name: shard for name, shard in shards.items() if shard.numel()}


def _fuse(module: torch.nn.Module, device: torch.device, recomputed: schema.Recompute) -> None:
    """Lets fused kernels compute the layers if the device has any. Warns if cheap outputs cannot be made again."""
    made_again = recomputed.chosen(transformer_engine=False)
    if fused_kernels(device) is not None:
        compute_fused(module, made_again)
    elif made_again:
        logging.getLogger(__name__).warning(
            "model.recompute: got selective, but with backend fsdp it makes outputs of fused kernels again, and %s has "
            "none, so it saves nothing; expected none or full",
            device,
        )


def _check_parameters(named: Mapping[str, Tensor], architecture: Architecture, folder: Path) -> None:
    """Raises ConfigError if transformers' model and its layout have different parameters."""
    whole = whole_parameters(architecture)
    expected = dict(zip(whole.names, whole.shapes, strict=True))
    found = {name: tuple(parameter.shape) for name, parameter in named.items()}
    if found != expected:
        name = next(name for name in [*found, *expected] if found.get(name) != expected.get(name))
        raise ConfigError(
            f"the model in {folder} has {name} with shape {expected.get(name, 'none')} in its checkpoint and "
            f"{found.get(name, 'none')} in transformers' modules; actor.backend fsdp needs equal ones, so use "
            "actor.backend: megatron"
        )


def _recompute(module: torch.nn.Module, recompute: schema.Recompute) -> None:
    """Makes decoder layers keep only their inputs for backward.

    Only these layers are set to training mode, as transformers requires. Nothing inside them has dropout.
    """
    layers = decoder_layers(module)
    for part in module.modules():
        if isinstance(part, PreTrainedModel):
            part.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
            break
    for number, layer in enumerate(layers):
        layer.gradient_checkpointing = number < recompute.full_layers(len(layers))  # type: ignore[assignment]
        layer.training = True
