"""Differences between the supported releases of megatron-core, 0.16.1 to 0.19.

Each entry names the release with the change. It can go when no older release is supported.
"""

import logging
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer import optimizer as optimizers
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig

LATENT_MODULES = ("linear_q_proj", "linear_q_up_proj", "linear_kv_up_proj", "q_layernorm", "kv_layernorm")


def skip_separate_gradient_norms(members: Sequence[MegatronOptimizer]) -> None:
    """Marks the optimizers as having no parameter groups with a separate gradient norm.

    Since 0.19 they ask all ranks for such groups before clipping. A pipeline stage without parameters does not take
    part, so the others would wait for it. rltrain has no such groups.
    """
    groups = getattr(optimizers, "SEPARATE_GRAD_NORM_GROUPS", ())
    for member in members:
        member._has_grad_norm_group_cache = dict.fromkeys(groups, False)


class ModulesOfSpec:
    """A mixin of latent attention: it uses the modules named by its spec.

    Since 0.19 Megatron replaces the projection of queries without a latent by one with a norm inside. Moonlight has no
    such norm.
    """

    def _resolve_qk_norm_config(self, submodules: Any) -> dict[str, Any]:
        return {name: getattr(submodules, name) for name in LATENT_MODULES}


def data_parallel(
    config: TransformerConfig,
    settings: DistributedDataParallelConfig,
    chunk: torch.nn.Module,
    groups: ProcessGroupCollection,
) -> DistributedDataParallel:
    """Returns `chunk` with its gradient buffers. Hides Megatron's warning about their layout, new in 0.19."""
    logger = logging.getLogger(DistributedDataParallel.__module__)
    logger.addFilter(_is_no_advice)
    try:
        return DistributedDataParallel(config, settings, chunk, pg_collection=groups)
    finally:
        logger.removeFilter(_is_no_advice)


def _is_no_advice(record: logging.LogRecord) -> bool:
    return "full_param_layout not provided" not in record.getMessage()


def dense_mlp(submodules: MLPSubmodules) -> Any:
    """Returns the spec of an MLP for a layer. Since 0.17 a layer takes a function, and warns about a ModuleSpec."""
    if hasattr(MLP, "as_mlp_submodule"):
        return partial(MLP.as_mlp_submodule, submodules=submodules)
    return ModuleSpec(module=MLP, submodules=submodules)
