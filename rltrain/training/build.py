"""The training backends by name."""

from rltrain.training.backend import TrainingBackend
from rltrain.training.megatron import backend as megatron

BACKENDS: dict[str, TrainingBackend] = {"megatron": megatron}


def training_backend(name: str = "megatron") -> TrainingBackend:
    """The one that trains and evaluates the models of roles."""
    return BACKENDS[name]
