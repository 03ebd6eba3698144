"""Samples as reward functions get them, their scores, records for people, and the limit on failures."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from rltrain.config import schema
from rltrain.data.columns import RowColumns, read_columns
from rltrain.data.experience import Experience
from rltrain.data.prompts import PromptDataset
from rltrain.data.tokenizer import TextDecoder
from rltrain.errors import ConfigError, RewardError
from rltrain.rewards.answers import Scorable, Turn, time_limit
from rltrain.rewards.scorer import Part, Scores
from rltrain.roles.reward_statistics import RewardStatistics, prefix
from rltrain.runtime.job_store import JobStore, Waiter, poll, poll_s

# Samples of an experience as reward functions and models get them: what those of this run ask for, and no more.

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


def reward_parts(scores: Scores) -> Tensor:
    """[samples, functions] what each function gave, unweighted; NaN where it is not for the sample."""
    columns = [
        [math.nan if index in of.skipped else reward for index, reward in enumerate(of.rewards)]
        for of in scores.by_function.values()
    ]
    return torch.tensor(columns, dtype=torch.float32).T.contiguous()


# What reward functions said of samples, as fields of their experience.


def with_scores(experience: Experience, scores: Scores) -> Experience:
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


# Scored samples for people to read.


def sample_records(source: Scorables, scored: Experience, step: int, parts: Sequence[Part]) -> Iterator[dict[str, Any]]:
    """What JSON can write of each of the samples, which were drawn for the prompts of `source`; of several `parts` of
    the reward, what each gave. `rendered_prompt` is what the model was shown before it first drew, where that is not
    the row's prompt."""
    versions = scored.policy_version.split(scored.lengths.tolist())
    masks = scored.response_mask.split(scored.lengths.tolist())
    samples = zip(source.of(scored, step), scored.rewards.tolist(), versions, masks, strict=True)
    for number, (sample, reward, version, mask) in enumerate(samples):
        record = {
            "step": step,
            "prompt": sample.prompt,
            "response": sample.response,
            "label": sample.label,
            "reward": reward,
            "length": int(mask.sum()),
            "policy_version_min": min(version[mask].tolist(), default=None),
            "policy_version_max": max(version[mask].tolist(), default=None),
        }
        rendered = source.rendered_prompt(scored, number)
        if rendered not in (None, sample.prompt):
            record["rendered_prompt"] = rendered
        if len(parts) > 1:
            given = zip(parts, scored.reward_parts[number].tolist(), strict=True)
            record["rewards"] = {part.title: None if math.isnan(value) else value for part, value in given}
        if len(source.dataset.sources) > 1:
            record["source"] = source.dataset.source_of(int(scored.prompt_ids[number]))
        if turns := source.conversation(scored, number):
            record["turns"] = turns
        yield record


# How many samples reward functions may fail on before the job ends.


class FailureLimit:
    """Of the reward's parts, or those of an evaluation set's own reward, over the tasks of a run."""

    def __init__(self, parts: Sequence[Part], settings: schema.Reward) -> None:
        self.parts, self.settings = parts, settings
        self.has_judged = False

    def judged(self, task: str, gathered: Sequence[Any]) -> dict[str, float]:
        """Metrics of what all ranks of the role have recorded: [statistics, first failures, ...] each.

        Raises RewardError if a function failed on more samples of `task` than may, or on all of the first task's.
        """
        records = [record for record, *_ in gathered]
        first_failures = {title: failure for _, of, *_ in reversed(gathered) for title, failure in of.items()}
        sums = RewardStatistics.sums_of(records)
        is_first, self.has_judged = not self.has_judged, True
        num_samples, settings = int(sums["samples"]), self.settings

        def are_too_many(num_failed: int) -> bool:
            return num_failed > settings.max_failures * num_samples or (is_first and num_failed == num_samples)

        rule = (
            "Expected a number for every response, 0 for one that deserves nothing: the job ends where more than "
            f"reward.max_failures = {settings.max_failures:g} of a step's samples fail, or all of the first."
        )
        for part in self.parts:
            errors, timeouts = (int(sums[f"{prefix(part.title)}_{kind}"]) for kind in ("errors", "timeouts"))
            if are_too_many(errors + timeouts):
                raise RewardError(
                    f"{part.key}: {part.place} failed on {errors + timeouts} of {num_samples} "
                    f"samples of {task}: {errors} by an error, {timeouts} by taking longer than "
                    f"{time_limit(settings.timeout_s)}. {rule} The first failure was {first_failures.get(part.title)}"
                )
        unscored = int(sums["reward_unscored"])
        if are_too_many(unscored):
            raise RewardError(
                f"reward: every function returned None for {unscored} of {num_samples} samples of {task}. {rule}"
            )
        return RewardStatistics.metrics(records)


# What the ranks of a role have to say of the same thing, brought together on one of them through the job's store.


class RankRecords:
    """Of `ranks` of a role, the first of which is their leader.

    No collective: these ranks may be an engine's too, which others need for weight syncs while it waits.
    """

    def __init__(self, job_store: JobStore, waiter: Waiter, role: str, ranks: Sequence[int]) -> None:
        self.job_store, self.waiter, self.role, self.ranks = job_store, waiter, role, tuple(ranks)

    def collect(self, what: str, step: int, record: Any, serve: Callable[[], None] | None) -> list[Any]:
        """The records of all ranks on the leader, nothing on the others. `serve` is what it does for others while it
        waits."""
        job_store, rank = self.job_store, self.job_store.world.rank
        keys = {other: f"{self.role} {what}/{step}/{other}" for other in self.ranks}
        job_store.put(keys[rank], record)
        if rank != self.ranks[0]:
            return []
        others = [other for other in keys if other != rank]
        what, every_s = f"the rewards of step {step}", poll_s(len(keys))
        poll(self.waiter, lambda: job_store.has(*keys.values()) or None, what, others, serve, every_s)
        gathered = [job_store.get(key, waiting_for=key) for key in keys.values()]
        for key in keys.values():
            job_store.forget(key)
        return gathered
