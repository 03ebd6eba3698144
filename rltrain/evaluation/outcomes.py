"""The rewards of an evaluation by prompt, brought together from the ranks that scored them."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from math import fsum
from statistics import stdev
from typing import Any

from rltrain.data.experience import SIBLINGS_APART, Experience
from rltrain.observability.evaluations import best_at_k, pass_at_k, sizes_up_to

Record = Mapping[str, Any]
"""What JSON can write of a rank's outcomes."""


def record_of(experience: Experience) -> Record:
    """Of the scored samples of a rank: each prompt's rewards, one of an episode however many trajectories it has, and
    the oldest and newest weights that drew a token (None where no token was drawn)."""
    episodes = zip(
        experience.prompt_ids.tolist(),
        (experience.sample_ids % SIBLINGS_APART).tolist(),
        experience.rewards.tolist(),
        strict=True,
    )
    rewards: dict[str, list[float]] = defaultdict(list)
    for (prompt, _), reward in {(prompt, episode): reward for prompt, episode, reward in episodes}.items():
        rewards[str(prompt)].append(reward)
    versions = experience.policy_version[experience.response_mask]
    seen = [int(versions.min()), int(versions.max())] if len(versions) else None
    return {"rewards": rewards, "versions": seen}


def metrics_of(records: Sequence[Record], *, num_samples: int, threshold: float) -> dict[str, float]:
    """From the records of all ranks: the policy version, the number of prompts, the standard error of their mean
    reward, and with several samples per prompt what k of them reach.

    A sample passes with a reward above `threshold`. Means are over prompts.
    """
    metrics: dict[str, float] = {}
    versions = [version for record in records for version in record["versions"] or ()]
    if versions:
        metrics["policy_version"] = min(versions)
        if max(versions) > min(versions):
            metrics["policy_version_max"] = max(versions)
    prompts = _by_prompt(records)
    metrics["prompts"] = len(prompts)
    if len(prompts) > 1:
        means = [sum(rewards) / len(rewards) for rewards in prompts]
        metrics["score_stderr"] = stdev(means) / len(means) ** 0.5
    if num_samples == 1 or not prompts:
        return metrics
    passed = [sum(reward > threshold for reward in rewards) for rewards in prompts]
    metrics[f"mean@{num_samples}"] = _mean(best_at_k(rewards, 1) for rewards in prompts)
    for k in sizes_up_to(num_samples):
        pairs = zip(prompts, passed, strict=True)
        metrics[f"pass@{k}"] = _mean(pass_at_k(len(rewards), count, k) for rewards, count in pairs)
        if k > 1:
            metrics[f"best@{k}"] = _mean(best_at_k(rewards, k) for rewards in prompts)
    return metrics


def _by_prompt(records: Sequence[Record]) -> list[list[float]]:
    prompts: dict[int, list[float]] = defaultdict(list)
    for record in records:
        for prompt, rewards in record["rewards"].items():
            prompts[int(prompt)] += rewards
    return [prompts[prompt] for prompt in sorted(prompts)]


def _mean(values: Iterable[float]) -> float:
    listed = [*values]
    return fsum(listed) / len(listed)
