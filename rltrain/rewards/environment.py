"""The reward that the environment of a sample gave, turn by turn where there were several."""

from collections.abc import Sequence
from typing import Any

from rltrain.rewards.answers import Turn


def environment(env_reward: float, turns: Sequence[Turn]) -> Any:
    """0 for a sample without an environment."""
    return {"turns": [turn["reward"] for turn in turns]} if turns else env_reward
