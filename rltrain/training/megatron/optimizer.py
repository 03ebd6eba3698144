"""Megatron's optimizer for one role, which may live on some of the world's ranks."""

from collections.abc import Sequence

import torch
from megatron.core import optimizer as megatron_optimizer
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import ChainedOptimizer, MegatronOptimizer, OptimizerConfig
from megatron.core.optimizer import optimizer as optimizers
from megatron.core.process_groups_config import ProcessGroupCollection

from rltrain.config import schema
from rltrain.models.experts import is_expert
from rltrain.training.megatron.loss_scale import scaler_settings
from rltrain.training.megatron.versions import skip_separate_gradient_norms


class OptimizerWithExperts(ChainedOptimizer):
    """One optimizer for what all ranks of data parallelism share, and one for experts, which fewer ranks share. In fp16
    they have one loss scale."""

    def __init__(self, chained_optimizers: list[MegatronOptimizer]) -> None:
        super().__init__(chained_optimizers)
        self.grad_scaler = getattr(chained_optimizers[0], "grad_scaler", None)
        for member in chained_optimizers if self.grad_scaler else ():
            member.grad_scaler = self.grad_scaler

    @torch.no_grad()
    def prepare_grads(self) -> bool:
        """As Megatron has it, but that the loss scale follows from both members' gradients together, and moves once.
        Collective over: the role's ranks."""
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
        """The norm of all gradients together, each counted once, and clips them by it. Collective over: the role's
        ranks."""
        norm = float(self.get_grad_norm())
        for member in self.chained_optimizers:
            parameters = member.get_parameters()
            if parameters:
                optimizers.clip_grad_by_total_norm_fp32(parameters, clip_grad, norm)
        return norm


def members(optimizer: MegatronOptimizer) -> Sequence[MegatronOptimizer]:
    """The optimizers that it consists of."""
    return optimizer.chained_optimizers if isinstance(optimizer, ChainedOptimizer) else [optimizer]


def build_optimizer(
    chunks: Sequence[DistributedDataParallel], settings: schema.Optimizer, groups: ProcessGroupCollection
) -> MegatronOptimizer:
    """AdamW over the parameters of a model's `chunks`, sharded over data parallelism where these say so; fp32 master
    weights, and in fp16 a loss scale. What makes the steps may be replaced: megatron/stepping.py.

    Weights must be loaded before: parameters in half precision are copied to their masters here. Goes past Megatron's
    `get_megatron_optimizer`, which gathers parameter groups over the whole world and so hangs when some ranks of the
    world hold another role.
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
    """Matrices, which decay, and vectors (norm weights, biases), which do not; on some stages there may be none."""
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
