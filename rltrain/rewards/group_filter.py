"""Filters of prompt groups by the rewards of their samples."""

import re
from array import array
from collections.abc import Callable, Sequence

from rltrain.config import schema
from rltrain.errors import RewardError
from rltrain.rewards.answers import Scorable
from rltrain.rewards.locating import locate
from rltrain.rewards.scorer import Scores

GroupFilter = Callable[[Sequence[Scorable], Scores], str | None]
"""Takes a group's samples and scores. Returns the reason to drop the group (part of a metric's name), or None to keep
it."""

REWARDS_DIFFER = "rewards_differ"
CONFIG_KEY = "batch.dynamic_sampling.filter"
FAILED = "failed"
UNNAMED = "filter"


def load_group_filter(settings: schema.DynamicSampling) -> GroupFilter:
    """Returns the filter of the config. Raises ConfigError if a user's filter cannot be imported."""
    if settings.filter == REWARDS_DIFFER:
        return without_spread
    function = locate(settings.filter, CONFIG_KEY, known=[REWARDS_DIFFER])

    def dropped_for(samples: Sequence[Scorable], scores: Scores) -> str | None:
        try:
            answer = function(samples[0].prompt, [s.response for s in samples], scores.rewards, samples[0].label)
        except Exception as error:
            raise RewardError(f"{CONFIG_KEY}: {settings.filter!r} raised {type(error).__name__}: {error}") from error
        if not isinstance(answer, (bool, str)):
            raise RewardError(
                f"{CONFIG_KEY}: {settings.filter!r} returned {answer!r:.100}; expected true to keep the group, or "
                "false or a reason (a string) to drop it"
            )
        return (None if answer else UNNAMED) if isinstance(answer, bool) else _as_name(answer)

    return dropped_for


def without_spread(samples: Sequence[Scorable], scores: Scores) -> str | None:
    """Drops groups with a single distinct reward, compared in float32 as for advantages (Yu et al. 2025, "DAPO",
    equation 11)."""
    if len({*array("f", scores.rewards)}) > 1:
        return None
    if all(
        of_function.num_errors + of_function.num_timeouts == len(samples) for of_function in scores.by_function.values()
    ):
        return FAILED
    return f"zero_std_{scores.rewards[0]:.1f}"


def _as_name(reason: str) -> str:
    return re.sub(r"[^A-Za-z0-9_.-]", "_", reason) or UNNAMED
