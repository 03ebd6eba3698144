"""Models that tell the reward what responses are worth, as parts of it beside its functions."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from rltrain.config.schema import Config
from rltrain.rewards.conventions import Wants
from rltrain.rewards.judge_question import Question
from rltrain.rewards.scorer import Scores
from rltrain.tasks.roles import DECLARED, rewarding_roles


class WholeConversation(Wants):
    """The prompt's messages, and all turns."""

    fields = frozenset({"messages", "turns"})
    takes_label = False


@dataclass(frozen=True)
class RewardingModel:
    """What the reward knows of a role that scores samples by a model."""

    role: str
    title: str
    """What its metrics are called by."""
    weight: float
    name: str
    """The checkpoint."""
    convention: Wants

    @property
    def config_key(self) -> str:
        return self.role

    @property
    def key(self) -> str:
        """Where it stands in the config."""
        return f"{self.role}.path"

    @property
    def place(self) -> str:
        return f"the model in {self.name!r}"

    def transfer(self, samples: str) -> str:
        """The one that brings what it says of those of a transfer."""
        tasks = DECLARED[self.role].tasks
        return next(task.leaves[0] for task in tasks if task.informs == "reward" and samples in task.takes)

    def scores(self, told: Sequence[float]) -> Scores:
        """`told` is NaN of samples that it could not score, which are worth nothing and are counted."""
        failed = sum(not math.isfinite(score) for score in told)
        return Scores(
            rewards=[score if math.isfinite(score) else 0.0 for score in told],
            num_errors=failed,
            num_timeouts=0,
            first_failure=f"told by a warning of role {self.role}" if failed else None,
        )


def rewarding_models(config: Config, placed: Sequence[str]) -> list[RewardingModel]:
    """Of the roles in `placed`. ConfigError where a judge's question cannot be asked."""
    found = []
    for role in rewarding_roles():
        if role in placed:
            settings = getattr(config, role)
            wants = Question(config.judge.prompt) if role == "judge" else WholeConversation()
            found.append(RewardingModel(role, settings.name, settings.weight, settings.path, wants))
    return found
