"""What a config may ask for of the optimizers."""

from collections.abc import Iterator

from rltrain.config.schema import Config
from rltrain.tasks.roles import trained_roles


def optimizer_problems(config: Config) -> Iterator[str]:
    """Sentences with the keys, the reason, and what is expected in their place."""
    for role in trained_roles():
        optimizer = getattr(config, role).optimizer
        if optimizer.name == "muon" and optimizer.cpu_offload:
            yield (
                f"{role}.optimizer.cpu_offload: got {str(optimizer.cpu_offload).lower()} with {role}.optimizer.name muon, which "
                "makes whole matrices orthogonal, for which a host takes too long; expected false, with "
                f"{role}.optimizer.moments_dtype bfloat16 or {role}.offload true where memory is short, or name adamw"
            )
        if optimizer.name != "muon" and "muon" in optimizer.model_fields_set:
            yield (
                f"{role}.optimizer.muon: given with {role}.optimizer.name {optimizer.name}, which does not look at it; "
                "expected name muon, or the key to be left out"
            )
