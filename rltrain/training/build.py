"""The training backends by name. A process imports those that its roles name, once the config has been checked: each
takes seconds."""

from collections.abc import Callable

from rltrain.config.schema import Config
from rltrain.training.backend import TrainingBackend


def _megatron() -> TrainingBackend:
    from rltrain.training.megatron import backend

    return backend


def _fsdp() -> TrainingBackend:
    from rltrain.training import fsdp_backend

    return fsdp_backend


BACKENDS: dict[str, Callable[[], TrainingBackend]] = {"megatron": _megatron, "fsdp": _fsdp}


def training_backend(config: Config, role: str) -> TrainingBackend:
    """The one that trains or evaluates the model of a role."""
    return BACKENDS[config.backend_of(role)]()
