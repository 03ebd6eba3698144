"""Samples as reward functions get them, their scores, records for people, and the limit on failures."""

import json
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from rltrain.algorithms.losses import response_lengths
from rltrain.checkpoint.run_files import Contents, read_contents, read_texts
from rltrain.config import schema
from rltrain.data.columns import RowColumns, read_columns
from rltrain.data.experience import SIBLINGS_APART, Experience, join
from rltrain.data.prompt_order import SolvedRateOrder, SolvedRates
from rltrain.data.prompts import PromptDataset
from rltrain.data.tokenizer import TextDecoder
from rltrain.errors import CheckpointError, ConfigError, RewardError
from rltrain.rewards.answers import Scorable, Turn, time_limit
from rltrain.rewards.group_filter import GroupFilter
from rltrain.rewards.scorer import Part, PendingScores, Scorer, Scores
from rltrain.roles.reward_statistics import RewardStatistics, prefix
from rltrain.roles.role import Job, SampleLog
from rltrain.rollout.groups import Verdict
from rltrain.rollout.rollout_state import FixedRows, OutcomeLog, RowStream, SolvedRateRows
from rltrain.rollout.sample import SampleGroup, pack_groups
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


# Rewards of prompt groups as an engine finishes them, while it goes on with others: those groups count that a filter
# keeps.


@dataclass
class HandedOver:
    """What this engine drew for a chunk: each group that counts with its scores, how many it dropped by reason, and how
    many count because no more could be dropped."""

    groups: list[tuple[Experience, Scores]] = field(default_factory=list)
    dropped: Counter[str] = field(default_factory=Counter)
    dropped_groups: list[Experience] = field(default_factory=list)
    """Those, with their scores."""
    num_spared: int = 0


class GroupScoring:
    """On an engine's first rank: implements `rollout.groups.GroupFilter`, by the role reward there.

    Reward functions work in processes of their own; a trusted one is called at once, so that what it says of a group
    is known before the next decode step.
    """

    def __init__(
        self,
        scorer: Scorer,
        scorables: Callable[[Experience, int], list[Scorable]],
        dropped_for: GroupFilter,
        log: SampleLog | None,
    ) -> None:
        """`log` gets the ids of samples that were dropped."""
        self.scorer, self.scorables, self.dropped_for, self.log = scorer, scorables, dropped_for, log
        self.handed_over: dict[tuple[int, int], HandedOver] = {}
        """By step and chunk, for the task that reports of them."""
        self._pending: dict[int, PendingScores] = {}
        """By position."""
        self._doubtful: dict[int, Experience] = {}
        """By position: scored groups that are dropped unless too many have been."""
        self._since = HandedOver()
        """The last hand-over."""

    def verdicts(self, groups: Mapping[int, SampleGroup], step: int) -> list[Verdict]:
        for position, group in groups.items():
            if position not in self._pending:
                samples = self.scorables(pack_groups([group], [position]), step)
                self._pending[position] = self.scorer.begin(samples)
        known = [position for position in groups if self._pending[position].is_done]
        return [self._verdict(position, groups[position]) for position in known]

    def _verdict(self, position: int, group: SampleGroup) -> Verdict:
        pending = self._pending.pop(position)
        scores = self.scorer.wait(pending)
        reason = self.dropped_for(pending.samples, scores)
        if reason is not None:
            self._doubtful[position] = with_scores(pack_groups([group], [position]), scores)
        return Verdict(position, reason, json.dumps(scores.record()))

    def drop(self, group: SampleGroup, step: int, reason: str) -> None:
        self._since.dropped[reason] += 1
        self._since.dropped_groups.append(self._doubtful.pop(group.position))
        if self.log is not None:
            ids = [sample.id for sample in group.samples]
            self.log.append({"step": step, "reason": reason, "sample_ids": ids})

    def spare(self, group: SampleGroup, step: int, reason: str) -> None:
        self._doubtful.pop(group.position, None)
        self._since.num_spared += 1

    def hand_over(
        self, step: int, chunk: int, experience: Experience, groups: Iterable[tuple[SampleGroup, str]]
    ) -> Experience:
        """`experience` of these groups, one after the other, with the rewards that their records have."""
        handed_over, first = self._since, 0
        self._since = HandedOver()
        for group, record in groups:
            scores = Scores.of_record(json.loads(record))
            own = experience.select(torch.arange(first, first + len(group.samples)))
            handed_over.groups.append((with_scores(own, scores), scores))
            first += len(group.samples)
        self.handed_over[step, chunk] = handed_over
        nothing = Scores([], by_function={function.title: Scores([]) for function in self.scorer.functions})
        none = with_scores(experience.select(torch.arange(0)), nothing)
        return join([scored for scored, _ in handed_over.groups] or [none])


# How many samples of each prompt have solved it, for data.solved_rate: role reward counts and tells, engines heed.

RATES_FILES = "solved_rates_*.safetensors"
"""Of a checkpoint: what each engine knows."""
OUTCOMES_FILE = "outcomes.safetensors"

Counts = list[tuple[int, int, int]]
"""Rows, each with its samples that solve it and with all of its samples."""


class OutcomeTeller:
    """On every rank of role reward; the leader tells of all."""

    def __init__(self, job: Job, *, is_leader: bool) -> None:
        self.job, self.settings = job, job.config.data.solved_rate
        self.counts: dict[int, tuple[int, int]] = {}
        self.told: dict[int, Counts] = {}
        """On the leader: of the last steps, which engines may not have read yet."""
        if self.settings is not None:
            self.log = _outcome_log(job)
            if is_leader:
                self._resume()

    def begin_step(self) -> None:
        self.counts = {}

    def add(self, experience: Experience) -> None:
        """Scored samples of this rank. Episodes that failed tell nothing, and one of several trajectories counts
        once."""
        if self.settings is None:
            return
        tells = response_lengths(experience) > 0
        episodes = (experience.sample_ids % SIBLINGS_APART)[tells]
        rows, solved = experience.prompt_ids[tells], (experience.rewards > self.settings.solved_above)[tells]
        of_episodes = {
            episode: (row, is_solved)
            for episode, row, is_solved in zip(episodes.tolist(), rows.tolist(), solved.tolist(), strict=True)
        }
        self._count((row, int(is_solved), 1) for row, is_solved in of_episodes.values())

    def record(self) -> Counts:
        """Of the step, for the leader."""
        return [(row, *counts) for row, counts in self.counts.items()]

    def tell(self, step: int, records: Iterable[Counts]) -> None:
        """What all ranks have counted. On the leader."""
        if self.settings is None:
            return
        self.begin_step()
        for record in records:
            self._count(record)
        self.told[step] = self.record()
        self.told = {of: counts for of, counts in self.told.items() if of >= step - self.job.shape.lead}
        self.log.put(step, self.counts)

    def contents(self) -> dict[str, Contents]:
        """What a run that goes on from here tells its engines once more."""
        if self.settings is None:
            return {}
        return {OUTCOMES_FILE: Contents({}, {"told": json.dumps(self.told)})}

    def _resume(self) -> None:
        resumed = self.job.resumed
        if resumed is None or resumed.has_new_data:
            return
        files = resumed.files("reward")
        told = next((read_texts(file)["told"] for file in files if file.name == OUTCOMES_FILE), "{}")
        self.told = {int(step): [tuple(counts) for counts in of] for step, of in json.loads(told).items()}
        for step, of in self.told.items():
            if resumed.continues or step < resumed.step:  # others are scored again
                self.log.put(step, {row: (solved, drawn) for row, solved, drawn in of})

    def _count(self, counts: Iterable[tuple[int, int, int]]) -> None:
        for row, solved, drawn in counts:
            before = self.counts.get(row, (0, 0))
            self.counts[row] = before[0] + solved, before[1] + drawn


def training_rows(job: Job) -> RowStream:
    """On a rank of the rollout: the stream of training prompts, from where the run begins. CheckpointError where it
    cannot go on with what the run's checkpoint holds."""
    settings, order = job.config.data.solved_rate, job.rows.prompts.order
    per_step = job.config.batch.prompts_per_step
    if settings is None:
        return FixedRows(order, first=job.rows.first_step * per_step)
    rates = SolvedRates(len(job.rows.prompts.train), settings)
    rows = SolvedRateRows(
        SolvedRateOrder(order, rates, per_window=per_step, seed=job.config.seed),
        _outcome_log(job),
        lead=job.shape.lead,
        scoring=job.leader_of("reward"),
        waiter=job.waiter,
        first_window=job.first_step,
    )
    resumed = job.resumed
    if resumed is None or resumed.has_new_data:
        return rows
    files = resumed.files("rollout")
    saved = [file for file in files if file.path.match(RATES_FILES)]
    if saved:
        rows.resume([*map(read_contents, saved)])
    elif resumed.continues:
        raise CheckpointError(
            f"data.solved_rate: {resumed.folder} was saved without, and does not hold what samples under way have "
            "shown. Go on without data.solved_rate, or start anew with another checkpoint.dir."
        )
    return rows


def _outcome_log(job: Job) -> OutcomeLog:
    return OutcomeLog(job.world.store, len(job.grids["rollout"].ranks))
