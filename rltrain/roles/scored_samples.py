"""What reward functions said of samples, as fields of their experience."""

from collections.abc import Mapping, Sequence

import torch

from rltrain.data.experience import Experience
from rltrain.rewards.scorer import CombinedScores
from rltrain.roles.scorables import reward_parts, turn_ends


def with_scores(experience: Experience, scores: CombinedScores) -> Experience:
    """With what `scored` carries beside the samples."""
    return experience.with_fields(
        rewards=torch.tensor(scores.rewards, dtype=torch.float32),
        turn_rewards=at_turn_ends(experience, scores.turn_rewards),
        reward_parts=reward_parts(scores),
    )


def at_turn_ends(experience: Experience, turn_rewards: Mapping[int, Sequence[float]]) -> torch.Tensor:
    """[tokens] the rewards of each turn at its last token, of the samples that have such."""
    placed = torch.zeros(experience.num_tokens)
    starts = experience.offsets().tolist()
    for sample, rewards in turn_rewards.items():
        ends = starts[sample] + turn_ends(experience.response_mask[starts[sample] : starts[sample + 1]])
        placed[ends[: len(rewards)] - 1] = torch.tensor(rewards[: len(ends)])
    return placed
