"""What model.router_replay may be asked for."""

from collections.abc import Iterator, Mapping

from rltrain.algorithms.registry import algorithm_of
from rltrain.config.schema import Config
from rltrain.models import Architecture
from rltrain.runtime.grid import Grid


def replay_problems(config: Config) -> Iterator[str]:
    """Sentences with the key, the reason, and what is expected in its place."""
    algorithm, mode = algorithm_of(config), config.model.router_replay
    if mode == "off" or not algorithm.trains:
        return
    given = f"model.router_replay: got {mode}"
    if not algorithm.generates:
        yield f"{given} with algorithm {algorithm.name}, whose samples no engine draws; expected off"
    elif mode == "recompute" and not algorithm.needs_actor_logprobs():
        yield (
            f"{given}, but the actor computes no old log-probs, whose choice of experts that would be, with "
            f"loss.old_logprobs {config.loss.old_logprobs} and algorithm {algorithm.name}; expected loss.old_logprobs: "
            "actor, or model.router_replay: rollout or off"
        )


def replay_problems_of_models(
    config: Config, grids: Mapping[str, Grid], architectures: Mapping[str, Architecture]
) -> Iterator[str]:
    """As `replay_problems`, of the placed models. Role inference is in `grids` where it is not the actor itself."""
    mode = config.model.router_replay
    if mode == "off" or not algorithm_of(config).trains:
        return
    if architectures["actor"].moe is None:
        yield f"model.router_replay: got {mode}; expected off: the model in {config.model.path} has no experts"
    elif mode == "recompute" and "inference" in grids:
        yield (
            "model.router_replay: got recompute with role inference, whose ranks would choose the experts that the "
            "actor's are to use; expected rollout or off, or no inference in placement"
        )
