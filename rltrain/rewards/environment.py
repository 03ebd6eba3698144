"""The reward of a sample's environment, per turn if there were several turns."""

from collections.abc import Sequence
from typing import Any

from rltrain.rewards.answers import Turn


def environment(env_reward: float, turns: Sequence[Turn]) -> Any:
    """Returns the environment's reward. It is 0 for a sample without an environment."""
    return {"turns": [turn["reward"] for turn in turns]} if turns else env_reward
