"""The training backends by name."""

from rltrain.config.schema import Config
from rltrain.training.backend import TrainingBackend
from rltrain.training.fsdp import backend as fsdp
from rltrain.training.megatron import backend as megatron

BACKENDS: dict[str, TrainingBackend] = {"megatron": megatron, "fsdp": fsdp}


def training_backend(config: Config, role: str) -> TrainingBackend:
    """The one that trains or evaluates the model of a role."""
    return BACKENDS[config.backend_of(role)]
