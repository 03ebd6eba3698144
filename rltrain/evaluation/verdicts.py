"""What follows from an evaluation: the reward's leader leaves it in the job's store, where other ranks read it."""

from collections.abc import Mapping

from rltrain.errors import ConfigError, one_of


def best_verdict_of(step: int) -> str:
    """Key of the evaluation as the best so far, null if it is not."""
    return f"evaluation/best/{step}"


def end_verdict_of(step: int) -> str:
    """Key of whether the evaluation ends training."""
    return f"evaluation/end/{step}"


REACHED = "evaluation/reached"
"""Key that is there once an evaluation by engines of their own has reached the goal."""


def stop_verdict_of(step: int) -> str:
    """Key of whether such a run ends after a step: what the first rank to have done with it knew."""
    return f"evaluation/stop/{step}"


def reported(metrics: Mapping[str, float], name: str, config_key: str) -> float:
    """ConfigError where an evaluation does not report what the config key names."""
    if name not in metrics:
        raise ConfigError(f"{config_key}: got {name!r}, which no evaluation reported; expected {one_of(name, metrics)}")
    return metrics[name]
