"""Which prompt groups are worth to be trained on, by the rewards of their samples."""

import re
from array import array
from collections.abc import Callable, Sequence

from rltrain.config import schema
from rltrain.errors import RewardError
from rltrain.rewards.answers import Scorable
from rltrain.rewards.locating import locate
from rltrain.rewards.scorer import Scores

GroupFilter = Callable[[Sequence[Scorable], Scores], str | None]
"""Of a group's samples and their scores: the reason why it is dropped, part of a metric's name; None: it counts."""

REWARDS_DIFFER = "rewards_differ"
CONFIG_KEY = "batch.dynamic_sampling.filter"
FAILED = "failed"
UNNAMED = "filter"


def load_group_filter(settings: schema.DynamicSampling) -> GroupFilter:
    """The filter that the section names. ConfigError where a user's cannot be imported."""
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
                f"{CONFIG_KEY}: {settings.filter!r} returned {answer!r:.100}; expected true for a group that counts, "
                "false or the reason, a string, for one that does not"
            )
        return (None if answer else UNNAMED) if isinstance(answer, bool) else _as_name(answer)

    return dropped_for


def without_spread(samples: Sequence[Scorable], scores: Scores) -> str | None:
    """Drops groups whose samples have one reward, in the precision that advantages are computed in (Yu et al. 2025,
    "DAPO", equation 11)."""
    if len({*array("f", scores.rewards)}) > 1:
        return None
    if all(
        of_function.num_errors + of_function.num_timeouts == len(samples) for of_function in scores.by_function.values()
    ):
        return FAILED
    return f"zero_std_{scores.rewards[0]:.1f}"


def _as_name(reason: str) -> str:
    return re.sub(r"[^A-Za-z0-9_.-]", "_", reason) or UNNAMED
