"""Megatron's optimizer for one role: steps, overlapped reduction, loss scale."""

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import optimizer as megatron_optimizer
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import ChainedOptimizer, MegatronOptimizer, OptimizerConfig
from megatron.core.optimizer import optimizer as optimizers
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from rltrain.config import schema
from rltrain.models.experts import is_expert
from rltrain.models.table import Array, is_hidden_matrix
from rltrain.training.matrix_exchange import MatrixExchange
from rltrain.training.megatron.model import LanguageModel, local_parameters
from rltrain.training.megatron.versions import skip_separate_gradient_norms
from rltrain.training.optimizers import Slot, SteppingOptimizer
from rltrain.training.shards import within
from rltrain.training.trainable import LOSS_SCALE, OVERFLOWED

# Overlap of data-parallel communication: gradients during backward, weights during the next forward.
#
# Megatron's overlap assumes equal forward and backward passes on all replicas. Here a replica without samples of a
# mini-batch runs neither. So the start of each collective is decided here, in the same order on all replicas. Buckets,
# collectives and the waits of modules for their weights are Megatron's.

FP32_BYTES = 4

BucketGroup = Any
"""Megatron's group of buckets, reduced and gathered by one call."""


def data_parallel_config(
    settings: schema.Trained, replicas: int, device: torch.device
) -> DistributedDataParallelConfig:
    """Returns the settings of Megatron's data-parallel wrapper, for this many `replicas` of a parameter."""
    wanted = device.type == "cuda" if settings.overlap == "auto" else settings.overlap
    overlap, sharded = wanted and replicas > 1, settings.distributed_optimizer and replicas > 1
    bucket_mb = settings.gradient_bucket_mb
    return DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        use_distributed_optimizer=sharded,
        overlap_grad_reduce=overlap,
        overlap_param_gather=overlap and sharded,
        align_param_gather=True,  # a module's wait for its weights begins no other gather
        bucket_size=None if bucket_mb is None else max(1, int(bucket_mb * 2**20 / FP32_BYTES)),
    )


class GradientReduction:
    """Reduces each bucket once its gradients are complete and all earlier buckets have begun.

    Buckets are ordered as backward completes them: the last layers first. The buckets of vision `towers` come last, and
    only `begin_rest` begins them: a replica's number of their backward passes depends on its images.
    """

    def __init__(
        self, chunks: Sequence[DistributedDataParallel], towers: Sequence[DistributedDataParallel] = ()
    ) -> None:
        overlaps = chunks[0].ddp_config.overlap_grad_reduce
        self._groups = _last_layers_first([*towers, *chunks]) if overlaps else []
        of_towers = [group for tower in towers for group in tower.bucket_groups]
        for group in self._groups:
            # Megatron's own count would begin buckets in the order of this replica's backward.
            group.register_grad_ready = _nothing if group in of_towers else partial(self._added, group)
        self._backwards = 0
        """Number of backward passes until all gradients of the mini-batch are complete. 0: more passes follow."""
        self._times: Counter[torch.nn.Parameter] = Counter()
        self._missing: Counter[BucketGroup] = Counter()
        self._begun = 0

    def expect(self, num_backwards: int) -> None:
        """Announces the last `num_backwards` backward passes of this replica in the mini-batch."""
        self._backwards = num_backwards
        self._missing = Counter({group: len(group.params) for group in self._groups})

    def begin_rest(self) -> None:
        """Begins the remaining reductions. Every replica must call it before any other collective of the replicas."""
        while self._begun < len(self._groups):
            self._begin_next()

    def finish(self) -> None:
        """Makes the device wait for the reductions. The next mini-batch may follow."""
        for group in self._groups:
            if group.grad_reduce_handle is not None:
                group.grad_reduce_handle.wait()
                group.grad_reduce_handle = None
        self._backwards, self._begun = 0, 0
        self._times.clear()

    def _added(self, group: BucketGroup, parameter: torch.nn.Parameter, *_: bool) -> None:
        """Counts a gradient of a parameter, and begins the reductions of complete buckets."""
        if not self._backwards:
            return
        self._times[parameter] += 1
        if self._times[parameter] > self._backwards:
            raise RuntimeError(
                f"a parameter of shape {tuple(parameter.shape)} gets gradients {self._times[parameter]} times in "
                f"{self._backwards} backward passes, so its bucket may be reduced too early. Set overlap: false"
            )
        self._missing[group] -= self._times[parameter] == self._backwards
        while self._begun < len(self._groups) and not self._missing[self._groups[self._begun]]:
            self._begin_next()

    def _begin_next(self) -> None:
        self._groups[self._begun].start_grad_sync()
        self._begun += 1


class ParameterGather:
    """Gathers the new weights from the optimizer's shards, while the next mini-batch's forward already runs.

    Every replica begins all gathers after the optimizer's step, the first layers first. In forward a module waits for
    its own weights. Other readers must call `finish` before.
    """

    def __init__(self, chunks: Sequence[DistributedDataParallel]) -> None:
        self._groups = _last_layers_first(chunks)[::-1] if chunks[0].ddp_config.overlap_param_gather else []
        self.finish()

    def begin(self) -> None:
        """Begins all gathers. Collective over: the ranks with the same parameters."""
        for group in self._groups:
            if group.buckets[0].param_data.is_cpu:
                _gather_by_bucket(group)
            else:
                group.start_param_sync()

    def finish(self) -> None:
        """Makes the device wait for all weights, and prevents further gathers in forward."""
        for group in self._groups:
            if group.param_gather_handle is not None:
                group.param_gather_handle.wait()
                group.param_gather_handle = None
            group.param_gather_dispatched = True


def _gather_by_bucket(group: BucketGroup) -> None:
    """Begins to gather the weights of a group of buckets, with one collective per bucket.

    Megatron coalesces them. Gloo crashes or hangs with several coalesced all-gathers at once (pytorch issue 65231).
    """
    replicas = group.intra_distributed_optimizer_instance_group
    group.param_gather_handle = _Collectives(
        dist.all_gather_into_tensor(
            bucket.param_data, bucket.param_data.chunk(replicas.size())[replicas.rank()], replicas, async_op=True
        )
        for bucket in group.buckets
    )
    group.param_gather_dispatched = True


class _Collectives(list[dist.Work]):
    """A list of collectives with a common wait."""

    def wait(self) -> None:
        for work in self:
            work.wait()


def _last_layers_first(chunks: Sequence[DistributedDataParallel]) -> list[BucketGroup]:
    """Returns the bucket groups in the order of backward. It is the same on all replicas."""
    parameters = (parameter for chunk in chunks for parameter in chunk.module.parameters())
    depth = {parameter: index for index, parameter in enumerate(parameters)}
    groups = [group for chunk in chunks for group in (*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups)]
    return sorted(groups, key=lambda group: -min(depth[parameter] for parameter in group.params))


# Megatron's dynamic loss scale: a factor of fp16 losses, so that small gradients do not underflow.


def scaler_settings(settings: schema.LossScale) -> dict[str, Any]:
    """Returns the loss scale settings under the names of Megatron's OptimizerConfig."""
    return {
        "initial_loss_scale": settings.initial,
        "min_loss_scale": settings.minimum,
        "loss_scale_window": settings.window,
        "hysteresis": settings.hysteresis,
    }


class MegatronLossScale:
    """The loss scale of a model's optimizer. Without fp16 weights there is none.

    The optimizer divides gradients by the scale before using them. It halves the scale after overflows and doubles it
    after a number of steps without one. The scale is equal on all ranks of the role.
    """

    def __init__(self, optimizer: MegatronOptimizer, config: TransformerConfig) -> None:
        self._scaler: Any = getattr(optimizer, "grad_scaler", None)
        if self._scaler is not None:
            config.grad_scale_func = optimizer.scale_loss

    @property
    def value(self) -> float:
        return 1.0 if self._scaler is None else float(self._scaler.scale)

    def can_fall(self) -> bool:
        """Returns whether a smaller scale may avoid an overflow of gradients."""
        return self._scaler is not None and self.value > float(self._scaler.min_scale)

    def metrics(self, *, overflowed: bool) -> dict[str, float]:
        if self._scaler is None:
            return {}
        return {LOSS_SCALE: self.value, OVERFLOWED: float(overflowed)}

    def state(self) -> str:
        """Returns the state for `load`, empty without a loss scale."""
        if self._scaler is None:
            return ""
        return json.dumps([self.value, self._scaler._growth_tracker, self._scaler._hysteresis_tracker])

    def load(self, state: str) -> None:
        """Restores a `state`, unless it is empty or this model has no loss scale."""
        if self._scaler is None or not state:
            return
        scale, growth, hysteresis = json.loads(state)
        self._scaler._scale.fill_(scale)
        self._scaler._growth_tracker, self._scaler._hysteresis_tracker = growth, hysteresis


# Megatron's optimizer for a role on some of the world's ranks.


class OptimizerWithExperts(ChainedOptimizer):
    """A pair of optimizers with one loss scale: one for parameters of all data-parallel ranks, one for experts.

    Experts are shared by fewer ranks.
    """

    def __init__(self, chained_optimizers: list[MegatronOptimizer]) -> None:
        super().__init__(chained_optimizers)
        self.grad_scaler = getattr(chained_optimizers[0], "grad_scaler", None)
        for member in chained_optimizers if self.grad_scaler else ():
            member.grad_scaler = self.grad_scaler

    @torch.no_grad()
    def prepare_grads(self) -> bool:
        """Prepares gradients like Megatron, but updates the loss scale once, for overflows in either member.

        Collective over: the role's ranks.
        """
        if self.grad_scaler is None:
            return bool(super().prepare_grads())
        overflowed = False
        for member in self.chained_optimizers:
            if not member.is_stub_optimizer:
                member._copy_model_grads_to_main_grads()
            overflowed |= member._unscale_main_grads_and_check_for_nan()
        self.grad_scaler.update(overflowed)
        return overflowed

    @torch.no_grad()
    def clip_grad_norm(self, clip_grad: float) -> float:
        """Returns the norm of all gradients, each counted once, and clips them. Collective over: the role's ranks."""
        norm = float(self.get_grad_norm())
        for member in self.chained_optimizers:
            parameters = member.get_parameters()
            if parameters:
                optimizers.clip_grad_by_total_norm_fp32(parameters, clip_grad, norm)
        return norm


def members(optimizer: MegatronOptimizer) -> Sequence[MegatronOptimizer]:
    """Returns the single optimizers of `optimizer`."""
    return optimizer.chained_optimizers if isinstance(optimizer, ChainedOptimizer) else [optimizer]


def build_optimizer(
    chunks: Sequence[DistributedDataParallel], settings: schema.Optimizer, groups: ProcessGroupCollection
) -> MegatronOptimizer:
    """Builds AdamW over the parameters of a model's `chunks`, sharded over data parallelism if their config says so.

    It has fp32 master weights, and in fp16 a loss scale. `replace_steps` may replace its steps.

    Weights must be loaded before: parameters in half precision are copied to their masters here. Megatron's
    `get_megatron_optimizer` is not used. It gathers parameter groups over the whole world, and hangs if some ranks of
    the world have another role.
    """
    config = OptimizerConfig(
        optimizer="adam",
        lr=settings.lr,
        min_lr=settings.min_lr,
        weight_decay=settings.weight_decay,
        adam_beta1=settings.beta1,
        adam_beta2=settings.beta2,
        adam_eps=settings.eps,
        clip_grad=settings.clip_grad,
        bf16=chunks[0].config.bf16,
        fp16=chunks[0].config.fp16,
        params_dtype=chunks[0].config.params_dtype,
        **scaler_settings(settings.loss_scale),
        use_distributed_optimizer=chunks[0].ddp_config.use_distributed_optimizer,
    )
    named = [(name, p) for chunk in chunks for name, p in chunk.module.named_parameters() if p.requires_grad]

    def member(of_experts: bool, **where: object) -> MegatronOptimizer:
        parameters = [parameter for name, parameter in named if is_expert(name) == of_experts]
        return megatron_optimizer._get_megatron_optimizer_based_on_param_groups(
            config=config,
            model_chunks=list(chunks),
            param_groups=_parameter_groups(parameters, settings, of_experts),
            intra_dist_opt_group=groups.intra_dist_opt,
            pg_collection=groups,
            **where,
        )

    dense = member(
        False,
        per_model_buffers={number: chunk.buffers for number, chunk in enumerate(chunks)},
        model_parallel_group=groups.mp,
        data_parallel_group=groups.intra_dp_cp,
        data_parallel_group_idx=groups.mp.rank(),
    )
    if not chunks[0].config.num_moe_experts:
        skip_separate_gradient_norms([dense])
        return dense
    experts = member(
        True,
        per_model_buffers={number: chunk.expert_parallel_buffers for number, chunk in enumerate(chunks)},
        model_parallel_group=groups.tp_ep_pp,
        data_parallel_group=groups.intra_expt_dp,
        data_parallel_group_idx=groups.tp_ep_pp.rank(),
    )
    skip_separate_gradient_norms([dense, experts])
    return OptimizerWithExperts([dense, experts])


def _parameter_groups(
    parameters: Sequence[torch.nn.Parameter], settings: schema.Optimizer, of_experts: bool
) -> list[dict[str, object]]:
    """Returns two groups, perhaps empty: matrices with weight decay, vectors (norm weights, biases) without."""
    shared = {"is_expert_parallel": of_experts, "default_config": True, "is_decoupled_lr": False, "lr_mult": 1.0}
    if megatron_optimizer.USING_PYTORCH_OPTIMIZER:
        shared["fused"] = True
    return [
        {
            "params": [p for p in parameters if (p.dim() > 1) == decays],
            "weight_decay": settings.weight_decay if decays else 0.0,
            "wd_mult": float(decays),
            "max_lr": settings.lr,
            "min_lr": settings.min_lr,
            **shared,
        }
        for decays in (True, False)
    ]


# Other optimizer steps than the Adam of torch or Transformer Engine.


def is_replaced(settings: schema.Optimizer) -> bool:
    """Returns whether the settings need more than Megatron's own Adam."""
    return settings.name != "adamw" or settings.moments_dtype != "float32" or bool(settings.cpu_offload)


def replace_steps(model: LanguageModel, optimizer: MegatronOptimizer, settings: schema.Optimizer) -> None:
    """Replaces the steps of a new `optimizer` as the settings say.

    Gradients, their norm, the loss scale and the gathering of weights stay Megatron's. Collective over: with muon, the
    ranks of the model's pipeline stage.
    """
    names = {id(parameter): name for name, parameter in local_parameters(model).items()}
    matrices = _matrix_pieces(model) if settings.name == "muon" else {}
    for member in members(optimizer):
        found: list[tuple[str, Slot]] = []
        firsts: list[int] = []
        for parameter, key in masters(member):
            name = names[id(parameter)]
            found.append((name, Slot(key, _weights(member, parameter, key), name in matrices)))
            firsts.append(first_of(member, parameter))
        exchange = None
        if settings.name == "muon":
            boxes = _boxes(found, firsts, matrices, model.layout.on(dist.get_rank()).pieces[:0])
            shapes = model.layout.tensors.shapes
            exchange = MatrixExchange.of(boxes, shapes, model.pg_collection.tp_dp_cp, model.device)
        slots = [slot for _, slot in found]
        member.optimizer = SteppingOptimizer(member.param_groups, slots, settings, model.device, exchange)
        if hasattr(member, "_copy_main_params_to_model_params"):
            member._copy_main_params_to_model_params = _nothing  # the step has written them


def stepping(member: MegatronOptimizer) -> SteppingOptimizer | None:
    """Returns the SteppingOptimizer installed in a member by `replace_steps`. Returns None if the member makes its
    steps with Megatron's own Adam."""
    return member.optimizer if isinstance(member.optimizer, SteppingOptimizer) else None


def masters(member: MegatronOptimizer) -> Iterator[tuple[torch.nn.Parameter, Tensor]]:
    """Yields the parameters with a share in this member, each with its master."""
    groups: list[tuple[list[Any], list[Any]]] = []
    if isinstance(member, DistributedOptimizer):
        groups += zip(member.model_fp32_groups, member.shard_fp32_groups, strict=True)
        groups += zip(member.model_float16_groups, member.shard_fp32_from_float16_groups, strict=True)
    elif member.config.bf16 or member.config.fp16:
        groups += zip(member.fp32_from_fp32_groups, member.fp32_from_fp32_groups, strict=True)
        groups += zip(member.float16_groups, member.fp32_from_float16_groups, strict=True)
    else:
        groups += [(group["params"], group["params"]) for group in member.param_groups]
    for parameters, held in groups:
        yield from zip(parameters, held, strict=True)


def first_of(member: MegatronOptimizer, parameter: torch.nn.Parameter) -> int:
    """Returns the start of a member's share in the flattened parameter."""
    if not isinstance(member, DistributedOptimizer):
        return 0
    first: int = member._get_model_param_range_map(parameter)["param"].start
    return first


def _weights(member: MegatronOptimizer, parameter: torch.nn.Parameter, key: Tensor) -> Tensor:
    """Returns the model's own weights of the member's share, flat."""
    if parameter.dtype == key.dtype:
        return key.detach().view(-1)
    first = first_of(member, parameter)
    return parameter.detach().view(-1)[first : first + key.numel()]


def _matrix_pieces(model: LanguageModel) -> Mapping[str, Array]:
    """Returns the pieces of parameters that consist only of matrices for Muon, by name."""
    on, tensors = model.layout.on(dist.get_rank()), model.layout.tensors
    found: dict[str, Array] = {}
    for number, (name, _) in enumerate(on.parameters):
        pieces = on.pieces[on.pieces["parameter"] == number]
        held = np.unique(pieces["tensor"])
        if len(held) and all(is_hidden_matrix(tensors.names[tensor], tensors.shapes[tensor]) for tensor in held):
            found[name] = pieces
    return found


def _boxes(found: list[tuple[str, Slot]], firsts: list[int], matrices: Mapping[str, Array], none: Array) -> Array:
    """Returns this rank's boxes of matrices, with the slot's number as `parameter`. `none` is an empty table."""
    tables = [none]
    for number, ((name, slot), first) in enumerate(zip(found, firsts, strict=True)):
        if slot.matrices:
            pieces = matrices[name].copy()
            pieces["parameter"] = 0
            cut = within(pieces, np.array([first]), np.array([first + slot.key.numel()]))
            cut["parameter"] = number
            tables.append(cut)
    return np.concatenate(tables)


def _nothing(*_: object) -> None:
    pass
