"""The algorithms by the names that a config gives them."""

from rltrain.algorithms.algorithm import Algorithm
from rltrain.algorithms.distillation import Distillation
from rltrain.algorithms.evaluate import Evaluate
from rltrain.algorithms.grpo import Grpo
from rltrain.algorithms.ppo import Ppo
from rltrain.algorithms.sft import Sft
from rltrain.config.schema import Config

ALGORITHMS: dict[str, type[Algorithm]] = {
    algorithm.name: algorithm for algorithm in (Grpo, Ppo, Distillation, Sft, Evaluate)
}


def algorithm_of(config: Config) -> Algorithm:
    """That of `config`."""
    return ALGORITHMS[config.algorithm](config)
