"""NeMo-RL's environments: step(message_log_batch, metadata) of whole conversations, in batches."""

from collections.abc import Mapping, Sequence
from typing import Any

from rltrain.environments.batch import EnvironmentFactory
from rltrain.environments.convention import Build, as_messages, parameters_of
from rltrain.environments.interface import Action, Environment, Message, Row, StepResult

OWN_OPTIONS = ("metadata_key",)


def recognises(thing: Any) -> bool:
    return (parameters_of(thing, "step") or ())[:2] == ("message_log_batch", "metadata")


def adapt(build: Build, factory: EnvironmentFactory) -> Environment:
    return NemoRl(build, factory)


class NemoRl:
    """`env.options` are the environment's cfg, but for `metadata_key`, the column that is an episode's first metadata
    ("extra_env_info"; the whole row where it has none)."""

    def __init__(self, build: Build, factory: EnvironmentFactory) -> None:
        options = {key: value for key, value in factory.options.items() if key not in OWN_OPTIONS}
        self.environment = build(options) if len(parameters_of(build) or ()) == 1 else build(**options)
        self.metadata_key = factory.options.get("metadata_key", "extra_env_info")
        self.prompt_key = factory.prompt_key
        self.logs: list[list[Message]] = []
        self.metadata: list[Any] = []

    def reset(self, rows: Sequence[Row], seeds: Sequence[int]) -> Sequence[None]:
        """First observations are the rows' prompts."""
        prompts = [row[self.prompt_key] for row in rows]
        self.logs = [as_messages(prompt) for prompt in prompts]
        self.metadata = [row.get(self.metadata_key, row) for row in rows]
        return [None] * len(rows)

    def step(self, actions: Sequence[Action | None]) -> Sequence[StepResult | None]:
        acting = [index for index, action in enumerate(actions) if action is not None]
        for index in acting:
            action = actions[index]
            assert action is not None
            self.logs[index].append({"role": "assistant", "content": action.text})
        returned = self.environment.step([self.logs[i] for i in acting], [self.metadata[i] for i in acting])
        rewards, ends = _summed(returned.rewards), _plain(returned.terminateds)
        results: list[StepResult | None] = [None] * len(actions)
        for place, index in enumerate(acting):
            observation = returned.observations[place]
            self.logs[index].append(observation)
            self.metadata[index] = returned.metadata[place]
            results[index] = StepResult([observation], float(rewards[place]), bool(ends[place]))
        return results

    def close(self) -> None:
        if hasattr(self.environment, "shutdown"):
            self.environment.shutdown()

    def get_state(self) -> Any:
        return [self.logs, self.metadata]

    def load_state(self, state: Any) -> None:
        self.logs, self.metadata = state


def _plain(values: Any) -> Sequence[Any]:
    plain: Sequence[Any] = values.tolist() if hasattr(values, "tolist") else values
    return plain


def _summed(rewards: Any) -> Sequence[float]:
    """Several rewards by name are added."""
    if isinstance(rewards, Mapping):
        return [sum(parts) for parts in zip(*map(_plain, rewards.values()), strict=True)]
    return _plain(rewards)
