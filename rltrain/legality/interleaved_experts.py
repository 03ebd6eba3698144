"""What gpt-oss's experts, whose matrices every side keeps as files have them, cannot go with."""

from collections.abc import Iterator, Mapping

from rltrain.config.schema import Config
from rltrain.models import Architecture
from rltrain.runtime.grid import Grid
from rltrain.tasks.roles import served_roles, trained_roles

KEPT = "whose experts' matrices are kept as its files have them"


def interleaved_expert_problems(
    config: Config, grids: Mapping[str, Grid], architectures: Mapping[str, Architecture]
) -> Iterator[str]:
    """Of the placed models."""
    found = [role for role in grids if role in architectures and _has_such(architectures[role])]
    for role in found:
        what = f"the model of role {role} is {architectures[role].family}, {KEPT}"
        if role in trained_roles() and getattr(config, role).optimizer.name == "muon":
            yield (
                f"{role}.optimizer.name: got muon, but {what}, all of a layer in one tensor that is no matrix; "
                "expected adamw"
            )
        if role in served_roles() and config.served(role).dtype == "fp8":
            yield (
                f"{config.engine_key(role, 'dtype')}: got fp8, but {what}, and are not rounded: attention alone would "
                "be; expected auto"
            )
    if found and config.model.fake_quantization:
        role = found[0]
        yield (
            f"model.fake_quantization: got a section, but the model of role {role} is {architectures[role].family}, "
            f"{KEPT}; expected null"
        )


def _has_such(architecture: Architecture) -> bool:
    return architecture.moe is not None and architecture.moe.interleaved
