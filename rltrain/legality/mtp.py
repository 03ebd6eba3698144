"""What model.mtp may be asked for."""

from collections.abc import Iterator, Mapping
from pathlib import Path

from rltrain.algorithms.registry import algorithm_of
from rltrain.config.schema import Config
from rltrain.models import Architecture
from rltrain.models.prediction import PREDICTIONS, num_predicting
from rltrain.runtime.grid import Grid

KEY = "model.mtp"
GIVEN = f"{KEY}: got a section"


def mtp_problems(config: Config) -> Iterator[str]:
    """In any world: sentences with the key, the reason, and what is expected in its place."""
    algorithm, model = algorithm_of(config), config.model
    if model.mtp is None or not algorithm.trains:
        return
    if algorithm.name == "reward_model":
        yield f"{GIVEN} with algorithm reward_model, whose model ends in a score and has no such layer; expected null"
    for role in ("actor", "inference"):
        if role in config.placed_roles and config.backend_of(role) == "fsdp":
            yield (
                f"{GIVEN} with backend fsdp for role {role}, whose model is transformers', which has no such layer; "
                f"expected null, or {role}.backend: megatron"
            )
    if model.lora is not None:
        yield f"{GIVEN} with model.lora, which trains adapters alone; expected either alone"
    if model.residual_dtype is not None:
        yield f"model.residual_dtype: got {model.residual_dtype} with {KEY}; expected null"
    reference_path, key = config.checkpoint_of("reference")
    if config.reference.refresh_every and not config.predicts("reference"):
        yield (
            f"reference.refresh_every: got {config.reference.refresh_every} with {KEY} and {key} {reference_path}; "
            "expected 0, or no path: the reference would have to have the actor's layer that predicts a further token"
        )


def mtp_problems_of_models(
    config: Config, grids: Mapping[str, Grid], architectures: Mapping[str, Architecture]
) -> Iterator[str]:
    """As above, of the placed models."""
    if config.model.mtp is None or not algorithm_of(config).trains or "actor" not in grids:
        return
    path, model = config.model.path, architectures["actor"]
    found = num_predicting(Path(path), model.family)
    if model.family not in PREDICTIONS:
        yield (
            f"{GIVEN}, but the model in {path} is of family {model.family}; expected null: such layers are trained of "
            f"{', '.join(PREDICTIONS)}, and are carried along of others"
        )
    elif found != 1:
        yield (
            f"{GIVEN}, but {PREDICTIONS[model.family].counts[0]} is {found} in the config.json of {path} (model.path); "
            "expected null, or a checkpoint with one such layer"
        )
    elif model.tied_embeddings and grids["actor"].pp > 1:
        yield (
            f"actor.parallel.pp: got {grids['actor'].pp} with {KEY} and tied embeddings; expected 1: the last stage "
            "would need the embedding for its tokens too"
        )
