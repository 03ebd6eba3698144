"""Samples of an experience as reward functions and models get them: what those of this run ask for, and no more."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from rltrain.config import schema
from rltrain.data.columns import RowColumns, read_columns
from rltrain.data.experience import Experience
from rltrain.data.prompts import PromptDataset
from rltrain.data.tokenizer import TextDecoder
from rltrain.errors import ConfigError
from rltrain.rewards.answers import Scorable, Turn
from rltrain.rewards.scorer import CombinedScores, Part

ENVIRONMENT_FIELDS = frozenset({"turns", "env_reward"})
TOKEN_FIELDS = frozenset({"prompt_ids", "response_ids", "response_mask"})


class Scorables:
    """Of the samples drawn for one prompt file. Reads from it the columns that functions ask for.

    Raises DataError where it lacks one, ConfigError where a function takes labels and the file has none.
    """

    def __init__(
        self,
        functions: Sequence[Part],
        dataset: PromptDataset,
        decoder: TextDecoder,
        file: schema.PromptFile,
        config_key: str,
    ) -> None:
        self.dataset = dataset
        self.decoder = decoder
        self.fields = frozenset(name for function in functions for name in function.convention.fields)
        self.columns = _wanted_columns(functions, dataset, file, config_key)

    def of(self, experience: Experience, step: int) -> list[Scorable]:
        lengths = experience.lengths.tolist()
        samples = zip(
            experience.prompt_ids.tolist(),
            experience.group_ids.tolist(),
            experience.tokens.split(lengths),
            experience.response_mask.split(lengths),
            experience.turn_rewards.split(lengths),
            strict=True,
        )
        of_samples = {"truncated": "truncated", "sample_id": "sample_ids"}
        more = {name: getattr(experience, of).tolist() for name, of in of_samples.items() if name in self.fields}
        return [
            Scorable(
                self.dataset.prompt_text(row),
                self.decoder.decode(tokens[mask].tolist()),
                self.dataset[row].label,
                group=group,
                step=step,
                **(self._asked_for(row, tokens, mask) if self.fields else {}),
                **(self._from_environment(tokens, mask, rewards) if ENVIRONMENT_FIELDS & self.fields else {}),
                **{name: values[index] for name, values in more.items()},
            )
            for index, (row, group, tokens, mask, rewards) in enumerate(samples)
        ]

    def conversation(self, experience: Experience, sample: int) -> list[Turn]:
        """The turns of a sample that has several; none of one that has not."""
        first, end = experience.offsets()[sample : sample + 2].tolist()
        mask, rewards = experience.response_mask[first:end], experience.turn_rewards[first:end]
        ends = turn_ends(mask).tolist()
        return [*self._turns(experience.tokens[first:end], mask, rewards, ends)] if len(ends) > 1 else []

    def rendered_prompt(self, experience: Experience, sample: int) -> str | None:
        """The text before the first token of a sample that is learnt; None where no token of it is."""
        first, end = experience.offsets()[sample : sample + 2].tolist()
        mask = experience.response_mask[first:end]
        if not mask.any():
            return None
        return self.decoder.spelled(experience.tokens[first : first + int(mask.nonzero()[0])].tolist())

    def _from_environment(self, tokens: Tensor, mask: Tensor, rewards: Tensor) -> dict[str, Any]:
        """Turns are runs of drawn tokens: two with nothing observed between them are one."""
        ends = turn_ends(mask).tolist()
        values: dict[str, Any] = {"env_reward": float(rewards.sum())}
        if "turns" in self.fields and (len(ends) > 1 or values["env_reward"]):
            values["turns"] = [*self._turns(tokens, mask, rewards, ends)]
        return values

    def _turns(self, tokens: Tensor, mask: Tensor, rewards: Tensor, ends: Sequence[int]) -> Iterator[Turn]:
        begin = int(mask.nonzero()[0])
        for end, following in zip(ends, [*ends[1:], len(mask)], strict=True):
            drawn = mask[end:following].nonzero()
            next_begin = end + int(drawn[0]) if len(drawn) else len(mask)
            said = {"role": "assistant", "content": self.decoder.decode(tokens[begin:end].tolist())}
            observed = self.decoder.decode(tokens[end:next_begin].tolist())
            replies = [{"role": "user", "content": observed}] if observed else []
            yield {"message": said, "replies": replies, "reward": float(rewards[begin:end].sum())}
            begin = next_begin

    def _asked_for(self, row: int, tokens: Tensor, mask: Tensor) -> dict[str, Any]:
        values: dict[str, Any] = {}
        if "messages" in self.fields:
            prompt = self.dataset[row].prompt
            values["messages"] = () if isinstance(prompt, str) else prompt
        if self.columns is not None:
            values["row"] = columns = self.columns[row]
            values["label_value"] = self.columns.label_value(row, columns)
        if TOKEN_FIELDS & self.fields:
            start = int(mask.nonzero()[0]) if mask.any() else len(mask)
            values["prompt_ids"], values["response_ids"] = tokens[:start].tolist(), tokens[start:].tolist()
            values["response_mask"] = mask[start:].tolist()
        return values


def turn_ends(mask: Tensor) -> Tensor:
    """[turns] where each run of drawn tokens ends, of one sample's response_mask [tokens]."""
    following = torch.cat([mask[1:], mask.new_zeros(min(len(mask), 1))])
    return torch.nonzero(mask & ~following).flatten() + 1


def _wanted_columns(
    functions: Sequence[Part], dataset: PromptDataset, file: schema.PromptFile, config_key: str
) -> RowColumns | None:
    wanted = [function.convention.columns for function in functions]
    has_labels = all(source.label_key is not None for source in file.parts())
    for function in functions:
        if function.convention.takes_label and not has_labels:
            raise ConfigError(
                f"{config_key}.label_key: got null, but {function.key} {function.name!r} takes a "
                "label; expected the column that has it"
            )
    if not any(columns.any for columns in wanted):
        return None
    return read_columns(
        dataset,
        file,
        config_key=config_key,
        required={
            name: f"{function.key} {function.name!r}"
            for function in functions
            for name in sorted(function.convention.columns.required)
        },
        optional=frozenset(name for columns in wanted for name in columns.optional),
        every=any(columns.every for columns in wanted),
        label=any(columns.label for columns in wanted),
    )


def reward_parts(scores: CombinedScores) -> Tensor:
    """[samples, functions] what each function gave, unweighted; NaN where it is not for the sample."""
    return torch.tensor(scores.by_sample(), dtype=torch.float32).view(len(scores.rewards), len(scores.by_function))
