"""The Megatron models of the roles that have one: built on the role's ranks and filled from its checkpoint."""

from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from rltrain.checkpoint.hf import load_parameters
from rltrain.roles.role import Job
from rltrain.training.megatron.model import LanguageModel, build_model, local_parameters


def load_model(job: Job, role: str, *, with_weights: bool = True) -> LanguageModel:
    """This rank's part of a role's model, with the weights that it starts from, or else with undefined ones.

    Collective over: the role's ranks.
    """
    model = build_model(
        job.architectures[role],
        job.grids[role],
        job.groups,
        model=job.config.model,
        parallel=job.config.parallel_of(role)[0],
        device=job.world.device,
    )
    model.on_micro_batch = job.heartbeat.advance
    if with_weights:
        load_weights(job, role, local_parameters(model))
    return model


def load_weights(job: Job, role: str, parameters: Mapping[str, Tensor]) -> None:
    """Fill `parameters`, named and shaped as in the role's model on this rank, from the role's checkpoint."""
    path, key = job.config.checkpoint_of(role)
    load_parameters(Path(path), job.megatron_layout(role), job.world.rank, parameters, config_key=key)
