"""The architecture of every role's model: the actor's, but for a value head and a role's own checkpoint."""

from collections.abc import Iterable, Mapping
from pathlib import Path

from rltrain.config.schema import Config
from rltrain.errors import ConfigError
from rltrain.models.architecture import Architecture, is_unlisted
from rltrain.models.checkpoint_model import num_predicting, read_architecture, require_classifier
from rltrain.runtime.grid import Grid
from rltrain.tasks.roles import DECLARED


def role_architectures(config: Config, roles: Iterable[str]) -> dict[str, Architecture]:
    """By role, with that of the trained model under actor. CheckpointError where a config.json cannot be used."""
    return {role: _architecture(config, role) for role in ("actor", *roles)}


def _architecture(config: Config, role: str) -> Architecture:
    declared, (path, key) = DECLARED[role], config.checkpoint_of(role)
    model = _read(config, role, Path(path), key)
    if role == "teacher":
        _expect_one_architecture(config, model)
    if declared.reads_text and declared.head == "value":
        require_classifier(Path(path), key)
    learns_scores = role == "actor" and config.algorithm == "reward_model"
    if declared.head == "value" or learns_scores:
        return model.value_model()
    predicts = config.predicts(role) and num_predicting(Path(path), model.family) == 1
    return model.predicting() if predicts else model


def _read(config: Config, role: str, path: Path, key: str) -> Architecture:
    """Of a family without a table by transformers, which takes seconds to load, where backend fsdp may have it."""
    if config.backend_of(role) == "fsdp" and is_unlisted(path):
        from rltrain.models.unlisted import read_unlisted

        return read_unlisted(path, key)
    return read_architecture(path, key)


def are_quickly_read(config: Config) -> bool:
    """Whether `role_architectures` does without transformers, which takes seconds to load."""
    roles = ("actor", *config.placed_roles)
    return not any(config.backend_of(r) == "fsdp" and is_unlisted(Path(config.checkpoint_of(r)[0])) for r in roles)


def _expect_one_architecture(config: Config, first: Architecture) -> None:
    for name, path in config.teacher.checkpoints.items():
        if _read(config, "teacher", Path(path), f"teacher.path.{name}") != first:
            raise ConfigError(
                f"teacher.path.{name}: the model in {path} has another architecture than the first of teacher.path; "
                "expected teachers of one architecture, since they share a layout and take each other's place"
            )


def reference_uses_actor_modules(
    config: Config, grids: Mapping[str, Grid], architectures: Mapping[str, Architecture]
) -> bool:
    """Whether the reference has the actor's ranks, layout and architecture, and so needs no model of its own: its
    weights take the place of the actor's."""
    return not config.makes_actor_weights and _share_modules(config, grids, architectures)


def reference_is_actors_base(
    config: Config, grids: Mapping[str, Grid], architectures: Mapping[str, Architecture]
) -> bool:
    """Whether the reference is what the actor is without its adapters, in the same memory: it has the actor's ranks,
    layout and checkpoint, and stays as it is."""
    return (
        config.model.lora is not None
        and not config.reference.refresh_every
        and config.checkpoint_of("reference")[0] == config.model.path
        and _share_modules(config, grids, architectures)
    )


def _share_modules(config: Config, grids: Mapping[str, Grid], architectures: Mapping[str, Architecture]) -> bool:
    return (
        {"actor", "reference"} <= grids.keys()
        and grids["reference"] == grids["actor"]
        and config.backend_of("reference") == config.backend_of("actor")
        and config.parallel_of("reference")[0] == config.actor.parallel
        and architectures.get("reference") == architectures.get("actor")
    )
