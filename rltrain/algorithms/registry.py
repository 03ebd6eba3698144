"""The algorithms by the names that a config gives them."""

from rltrain.algorithms.algorithm import Algorithm
from rltrain.algorithms.distillation import Distillation
from rltrain.algorithms.dpo import Dpo
from rltrain.algorithms.evaluate import Evaluate
from rltrain.algorithms.gdpo import Gdpo
from rltrain.algorithms.gpg import Gpg
from rltrain.algorithms.grpo import Grpo
from rltrain.algorithms.maxrl import MaxRl
from rltrain.algorithms.optimal_token_baseline import OptimalTokenBaseline
from rltrain.algorithms.own import Own
from rltrain.algorithms.pass_at_k import PassAtK
from rltrain.algorithms.ppo import Ppo
from rltrain.algorithms.reinforce_plus_plus import ReinforcePlusPlus
from rltrain.algorithms.reinforce_plus_plus_baseline import ReinforcePlusPlusBaseline
from rltrain.algorithms.remax import ReMax
from rltrain.algorithms.reward_model import RewardModel
from rltrain.algorithms.rloo import Rloo
from rltrain.algorithms.sft import Sft
from rltrain.config.schema import Config

ALGORITHMS: dict[str, type[Algorithm]] = {
    algorithm.name: algorithm
    for algorithm in (
        *(Grpo, Rloo, ReinforcePlusPlus, ReinforcePlusPlusBaseline, ReMax, MaxRl, PassAtK, Gdpo, Gpg),
        *(OptimalTokenBaseline, Ppo, Own),
        *(Distillation, Sft, Dpo, RewardModel, Evaluate),
    )
}


def algorithm_of(config: Config) -> Algorithm:
    """That of `config`."""
    return ALGORITHMS[config.algorithm](config)
