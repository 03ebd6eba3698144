"""Samples and run arguments in slime's form, for reward functions written for slime."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from types import SimpleNamespace
from typing import Any

from rltrain.rewards.answers import Scorable


class SlimeStatus(StrEnum):
    PENDING = "pending"
    COMPLETED = "completed"
    TRUNCATED = "truncated"
    ABORTED = "aborted"
    FAILED = "failed"


@dataclass
class SlimeSample:
    """A sample in slime's form. Fields unknown to the scorer are empty."""

    group_index: int | None = None
    index: int | None = None
    rollout_id: int | None = None
    prompt: Any = ""
    """The prompt of the file: a text, or chat messages."""
    tokens: list[int] = field(default_factory=list)
    """Token ids of prompt and response."""
    response: str = ""
    response_length: int = 0
    label: Any = None
    """The label of the file."""
    reward: Any = None
    loss_mask: list[int] | None = None
    """Mask with one entry per token of the response."""
    weight_versions: list[str] = field(default_factory=list)
    rollout_log_probs: list[float] | None = None
    rollout_routed_experts: Any = None
    remove_sample: bool = False
    teacher_log_probs: list[float] | None = None
    status: SlimeStatus = SlimeStatus.COMPLETED
    metadata: dict[str, Any] = field(default_factory=dict)
    """The column named by args.metadata_key."""
    session_id: str | None = None

    Status = SlimeStatus

    @classmethod
    def of(cls, sample: Scorable, metadata_key: str) -> "SlimeSample":
        return cls(
            group_index=sample.group,
            index=sample.sample_id,
            prompt=sample.messages or sample.prompt,
            tokens=[*sample.prompt_ids, *sample.response_ids],
            response=sample.response,
            response_length=len(sample.response_ids),
            label=sample.label_value,
            loss_mask=[int(drawn) for drawn in sample.response_mask],
            status=SlimeStatus.TRUNCATED if sample.truncated else SlimeStatus.COMPLETED,
            metadata=sample.row.get(metadata_key) or {},
        )


class RewardArguments(SimpleNamespace):
    """The args of a reward function: reward.options as attributes, with defaults for common ones."""

    rm_type: str | None = None
    rm_url: str | None = None
    reward_key: str | None = None
    eval_reward_key: str | None = None
    custom_rm_path: str | None = None
    group_rm: bool = False
    metadata_key: str = "metadata"

    def __init__(self, options: Mapping[str, Any]) -> None:
        super().__init__(**options)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"args has no {name!r}; set it in reward.options")
