"""The table of all algorithms by their config name."""

from rltrain.algorithms.algorithm import Algorithm
from rltrain.algorithms.reinforcement import (
    Gdpo,
    Gpg,
    Grpo,
    MaxRl,
    OptimalTokenBaseline,
    OwnAdvantages,
    PassAtK,
    Ppo,
    ReinforcePlusPlus,
    ReinforcePlusPlusBaseline,
    ReMax,
    Rloo,
)
from rltrain.algorithms.supervised import Distillation, Dpo, Evaluate, RewardModelling, Sft
from rltrain.config.schema import Config

ALGORITHMS: dict[str, type[Algorithm]] = {
    algorithm.name: algorithm
    for algorithm in (
        *(Grpo, Rloo, ReinforcePlusPlus, ReinforcePlusPlusBaseline, ReMax, MaxRl, PassAtK, Gdpo, Gpg),
        *(OptimalTokenBaseline, Ppo, OwnAdvantages),
        *(Distillation, Sft, Dpo, RewardModelling, Evaluate),
    )
}


def algorithm_of(config: Config) -> Algorithm:
    """Returns the algorithm of `config.algorithm`, bound to `config`."""
    return ALGORITHMS[config.algorithm](config)
