"""The architecture of every role's model: the actor's, but for a critic's head and a role's own checkpoint."""

from collections.abc import Iterable, Mapping
from pathlib import Path

from rltrain.cluster.grid import Grid
from rltrain.config.schema import Config
from rltrain.errors import ConfigError
from rltrain.models.architecture import Architecture, read_architecture


def role_architectures(config: Config, roles: Iterable[str]) -> dict[str, Architecture]:
    """By role, with that of model.path under actor. CheckpointError where a config.json cannot be used."""
    architectures = {}
    for role in ("actor", *roles):
        path, key = config.checkpoint_of(role)
        model = read_architecture(Path(path), key)
        architectures[role] = model.value_model() if role == "critic" else model
        if role == "teacher":
            _expect_one_architecture(config, model)
    return architectures


def _expect_one_architecture(config: Config, first: Architecture) -> None:
    for name, path in config.teacher.checkpoints.items():
        if read_architecture(Path(path), f"teacher.path.{name}") != first:
            raise ConfigError(
                f"teacher.path.{name}: the model in {path} has another architecture than the first of teacher.path; "
                "expected teachers of one architecture, since they share a layout and take each other's place"
            )


def reference_uses_actor_modules(
    config: Config, grids: Mapping[str, Grid], architectures: Mapping[str, Architecture]
) -> bool:
    """Whether the reference has the actor's ranks, layout and architecture, and so needs no model of its own."""
    return (
        {"actor", "reference"} <= grids.keys()
        and grids["reference"] == grids["actor"]
        and config.parallel_of("reference")[0] == config.actor.parallel
        and architectures.get("reference") == architectures.get("actor")
    )
