"""Scoring of samples: their text for reward functions, scores, records for users, and the limit on failures."""

import json
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby, pairwise
from typing import Any, Literal

import torch
from torch import Tensor

from rltrain.algorithms.losses import response_lengths
from rltrain.checkpoint.run_files import Contents, read_contents, read_texts
from rltrain.config import schema
from rltrain.data.columns import RowColumns, read_columns
from rltrain.data.experience import SIBLINGS_APART, Experience, join
from rltrain.data.image_parts import MARK, with_references
from rltrain.data.images import thumbnail, thumbnail_of_pixels
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
from rltrain.runtime.image_files import ImageMissing, ImageStore
from rltrain.runtime.job_store import JobStore, Waiter, poll, poll_s

# Samples in the form for reward functions and models, with only the fields that these ask for.

ENVIRONMENT_FIELDS = frozenset({"turns", "env_reward"})
TOKEN_FIELDS = frozenset({"prompt_ids", "response_ids", "response_mask"})


class Scorables:
    """The samples for the prompts of one file as reward functions get them, with the columns that the functions ask
    for.

    Raises DataError if the file lacks such a column. Raises ConfigError if a function takes labels and the file has
    none.
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
        places = [slice(begin, end) for begin, end in pairwise(experience.offsets().tolist())]
        rows, groups = experience.prompt_ids.tolist(), experience.group_ids.tolist()
        of_samples = {"truncated": "truncated", "sample_id": "sample_ids"}
        more = {name: getattr(experience, of).tolist() for name, of in of_samples.items() if name in self.fields}
        return [
            Scorable(
                self.dataset.prompt_text(row),
                self.decoder.decode(response),
                self.dataset[row].label,
                group=group,
                step=step,
                **(self._asked_for(row, experience, places[index]) if self.fields else {}),
                **{name: values[index] for name, values in more.items()},
            )
            for index, (row, group, response) in enumerate(zip(rows, groups, _responses(experience), strict=True))
        ]

    def conversation(self, experience: Experience, sample: int) -> list[Turn]:
        """Returns the turns of a sample with several turns, else []."""
        of_sample = _tokens_of(experience, sample)
        mask, rewards = experience.response_mask[of_sample], experience.turn_rewards[of_sample]
        ends = turn_ends(mask).tolist()
        return [*self._turns(experience.tokens[of_sample], mask, rewards, ends)] if len(ends) > 1 else []

    def rendered_prompt(self, experience: Experience, sample: int) -> str | None:
        """Returns the text before a sample's first trained token, or None if no token of it is trained."""
        of_sample = _tokens_of(experience, sample)
        mask = experience.response_mask[of_sample]
        if not mask.any():
            return None
        before = slice(0, int(mask.nonzero()[0]))
        tokens = experience.tokens[of_sample][before]
        if experience.has("image_keys"):  # an image is one placeholder in the text
            keys = experience.image_keys[of_sample][before]
            tokens = tokens[(keys == 0) | _begins_image(keys)]
        return self.decoder.spelled(tokens.tolist())

    def _from_environment(self, tokens: Tensor, mask: Tensor, rewards: Tensor) -> dict[str, Any]:
        """Returns the fields from the environment. A turn is a run of generated tokens, ended by an observation or the
        sample's end."""
        ends = turn_ends(mask).tolist()
        values: dict[str, Any] = {"env_reward": float(rewards.sum())}
        if "turns" in self.fields and (len(ends) > 1 or values["env_reward"]):
            values["turns"] = [*self._turns(tokens, mask, rewards, ends)]
        return values

    def _turns(self, tokens: Tensor, mask: Tensor, rewards: Tensor, ends: Sequence[int]) -> Iterator[Turn]:
        begin = int(mask.nonzero()[0])
        for end, next_begin in zip(ends, next_turns(mask, ends), strict=True):
            said = {"role": "assistant", "content": self.decoder.decode(tokens[begin:end].tolist())}
            observed = self._observed(tokens[end:next_begin].tolist())
            replies = [{"role": "user", "content": observed}] if observed else []
            yield {"message": said, "replies": replies, "reward": float(rewards[begin:end].sum())}
            begin = next_begin

    def _observed(self, tokens: Sequence[int]) -> str:
        """Returns the text of an observation, with MARK for each image."""
        images = self.dataset.encoder.images
        if images is None:
            return self.decoder.decode(tokens)
        parts = groupby(tokens, key=lambda token: token == images.image_token)
        return "".join(MARK if is_image else self.decoder.decode([*part]) for is_image, part in parts)

    def _asked_for(self, row: int, experience: Experience, of_sample: slice) -> dict[str, Any]:
        tokens, mask = experience.tokens[of_sample], experience.response_mask[of_sample]
        values: dict[str, Any] = {}
        if ENVIRONMENT_FIELDS & self.fields:
            values |= self._from_environment(tokens, mask, experience.turn_rewards[of_sample])
        if "messages" in self.fields:
            prompt = self.dataset[row].prompt
            values["messages"] = () if isinstance(prompt, str) else with_references(prompt)
        if self.columns is not None:
            values["row"] = columns = self.columns[row]
            values["label_value"] = self.columns.label_value(row, columns)
        if "images" in self.fields:
            values["images"] = [source.reference for source in self.dataset.image_sources(row)]
        if TOKEN_FIELDS & self.fields:
            start = int(mask.nonzero()[0]) if mask.any() else len(mask)
            values["prompt_ids"], values["response_ids"] = tokens[:start].tolist(), tokens[start:].tolist()
            values["response_mask"] = mask[start:].tolist()
        return values


def turn_ends(mask: Tensor) -> Tensor:
    """Returns the end of each run of generated tokens, shape [turns], for one sample's response_mask
    of shape [tokens]."""
    following = torch.cat([mask[1:], mask.new_zeros(min(len(mask), 1))])
    return torch.nonzero(mask & ~following).flatten() + 1


def next_turns(mask: Tensor, ends: Sequence[int]) -> list[int]:
    """Returns where the turn after each of `ends` begins. For the last one this is the end of the sample.

    `mask` is one sample's response_mask, and `ends` are its `turn_ends`.
    """
    begins = (torch.nonzero(mask[1:] & ~mask[:-1]).flatten() + 1).tolist()
    return [*(begin for begin in begins if begin >= ends[0]), len(mask)]


def _responses(experience: Experience) -> list[list[int]]:
    """Returns the response tokens of every sample."""
    mask, offsets = experience.response_mask, experience.offsets()
    ends = torch.nn.functional.pad(mask.cumsum(0), (1, 0))[offsets].tolist()
    tokens = experience.tokens[mask].tolist()
    return [tokens[begin:end] for begin, end in pairwise(ends)]


def _tokens_of(experience: Experience, sample: int) -> slice:
    return slice(*experience.offsets()[sample : sample + 2].tolist())


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
    """Returns the unweighted reward of each function, shape [samples, functions]. NaN for a sample that a function
    skips."""
    columns = [
        [math.nan if index in of.skipped else reward for index, reward in enumerate(of.rewards)]
        for of in scores.by_function.values()
    ]
    return torch.tensor(columns, dtype=torch.float32).T.contiguous()


# Scores as fields of an experience.


def with_scores(experience: Experience, scores: Scores) -> Experience:
    """Returns the experience with its scores: the fields added by transfer `scored`, and rewards of turns."""
    return experience.with_fields(
        rewards=torch.tensor(scores.rewards, dtype=torch.float32),
        turn_rewards=at_turn_ends(experience, scores.turn_rewards),
        reward_parts=reward_parts(scores),
    )


def at_turn_ends(experience: Experience, turn_rewards: Mapping[int, Sequence[float]]) -> torch.Tensor:
    """Returns the rewards of turns at the last token of each, shape [tokens]. All other tokens have 0."""
    placed = torch.zeros(experience.num_tokens)
    starts = experience.offsets().tolist()
    for sample, rewards in turn_rewards.items():
        ends = starts[sample] + turn_ends(experience.response_mask[starts[sample] : starts[sample + 1]])
        placed[ends[: len(rewards)] - 1] = torch.tensor(rewards[: len(ends)])
    return placed


# Records of scored samples for users.

MAX_THUMBNAILS = 4
"""Number of images of a prompt or an observation with a small copy."""
MAX_OBSERVED = 16
"""Number of small copies of images of a sample's observations."""


def are_logged(experience: Experience, num_prompts: int | Literal["all"]) -> Tensor:
    """Returns whether each sample of an evaluation has a record, by evaluation.logged_prompts."""
    return experience.prompt_ids < (math.inf if num_prompts == "all" else num_prompts)


def sample_records(
    source: Scorables,
    scored: Experience,
    step: int,
    parts: Sequence[Part],
    images: ImageStore | None = None,
) -> Iterator[dict[str, Any]]:
    """Yields a JSON record of each sample. The samples answer prompts of `source`.

    With several `parts` a record has the reward of each part. It has `rendered_prompt`, the text before the first
    generated token, if this is not the row's prompt. With `images`, the decoded images of this node, it has small
    copies of the first images that the model was shown, in the order of the text. Those before the first generated
    token belong to the record, and others to the reply that showed them.
    """
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
        of_row = source.dataset.image_sources(int(scored.prompt_ids[number]))
        of_prompt, *of_replies = _thumbnails(scored, number, images)
        if of_prompt or of_row:
            record["images"] = of_prompt or [thumbnail(image) for image in of_row[:MAX_THUMBNAILS]]
        if turns := source.conversation(scored, number):
            record["turns"] = [*_with_thumbnails(turns, of_replies)]
        yield record


def _thumbnails(experience: Experience, sample: int, images: ImageStore | None) -> list[list[str]]:
    """Returns small copies of the images before a sample's first generated token, then of those after each turn."""
    of_sample = _tokens_of(experience, sample)
    mask = experience.response_mask[of_sample]
    ends = turn_ends(mask).tolist()
    if images is None or not experience.has("image_keys"):
        return [[] for _ in range(1 + len(ends))]
    keys = experience.image_keys[of_sample]
    keys = torch.where(_begins_image(keys), keys, 0)
    first, room = int(mask.nonzero()[0]) if ends else len(mask), MAX_OBSERVED
    found = [_copies(images, keys[:first], MAX_THUMBNAILS)]
    for end, next_begin in zip(ends, next_turns(mask, ends) if ends else [], strict=True):
        found.append(_copies(images, keys[end:next_begin], min(room, MAX_THUMBNAILS)))
        room -= len(found[-1])
    return found


def _copies(images: ImageStore, keys: Tensor, most: int) -> list[str]:
    """Returns small copies of the first images of `keys`, of those that this node still has."""
    found = []
    for key in keys[keys > 0][:most].tolist():
        try:
            found.append(thumbnail_of_pixels(images.pixels(key)))
        except ImageMissing:
            continue
    return found


def _begins_image(keys: Tensor) -> Tensor:
    """Returns whether an image begins at each token, for one sample's image_keys of shape [tokens]."""
    return (keys != 0) & (keys != torch.cat([keys.new_zeros(min(len(keys), 1)), keys[:-1]]))


def _with_thumbnails(turns: Iterable[Turn], of_turns: Iterable[list[str]]) -> Iterator[Turn]:
    """Yields the turns with small copies of images under "images" of the reply that showed them."""
    for turn, copies in zip(turns, of_turns, strict=True):
        shown = [{**reply, "images": copies} for reply in turn["replies"]] if copies else turn["replies"]
        yield {**turn, "replies": shown}


# The limit on failures of reward functions. Beyond it the job ends.


class FailureLimit:
    """A limit on the failures of reward functions, over all tasks of a run. `parts` are the run's or those of an
    evaluation set."""

    def __init__(self, parts: Sequence[Part], settings: schema.Reward) -> None:
        self.parts, self.settings = parts, settings
        self.has_judged = False

    def judged(self, task: str, gathered: Sequence[Any]) -> dict[str, float]:
        """Returns the metrics of all ranks' records. Each record is [statistics, first failures, ...].

        Raises RewardError if a function failed on too many samples of `task`, or on all samples of the first task.
        """
        records = [record for record, *_ in gathered]
        first_failures = {title: failure for _, of, *_ in reversed(gathered) for title, failure in of.items()}
        sums = RewardStatistics.sums_of(records)
        is_first, self.has_judged = not self.has_judged, True
        num_samples, settings = int(sums["samples"]), self.settings

        def are_too_many(num_failed: int) -> bool:
            return num_failed > settings.max_failures * num_samples or (is_first and num_failed == num_samples)

        rule = (
            "Expected a number for every response, 0 for a worthless one. The job ends if more than "
            f"reward.max_failures = {settings.max_failures:g} of a step's samples fail, or all in the first step."
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


# Records of a role's ranks, collected on its leader through the job's store.


class RankRecords:
    """The records of a role's `ranks`, collected on the first of them, their leader.

    It is no collective. A rank may belong to an engine, and other ranks need the engine for weight syncs meanwhile.
    """

    def __init__(self, job_store: JobStore, waiter: Waiter, role: str, ranks: Sequence[int]) -> None:
        self.job_store, self.waiter, self.role, self.ranks = job_store, waiter, role, tuple(ranks)

    def collect(self, what: str, step: int, record: Any, serve: Callable[[], None] | None) -> list[Any]:
        """Returns the records of all ranks on the leader, and [] on the others. The leader calls `serve` while it
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


# Rewards of prompt groups as an engine finishes them, while it still generates others. A filter decides whether a group
# counts.


@dataclass
class HandedOver:
    """An engine's groups for a chunk.

    It has the counted groups with their scores, and numbers of dropped groups by reason. `num_spared` groups are
    counted because no more could be dropped.
    """

    groups: list[tuple[Experience, Scores]] = field(default_factory=list)
    dropped: Counter[str] = field(default_factory=Counter)
    dropped_groups: list[Experience] = field(default_factory=list)
    """The dropped groups, with their scores."""
    num_spared: int = 0


class GroupScoring:
    """The scoring of groups on an engine's first rank, together with role reward there.

    Reward functions run in separate processes. A trusted one is called at once, so its result is known before the next
    decode step.
    """

    def __init__(
        self,
        scorer: Scorer,
        scorables: Callable[[Experience, int], list[Scorable]],
        dropped_for: GroupFilter,
        log: SampleLog | None,
    ) -> None:
        """`log` gets the ids of dropped samples."""
        self.scorer, self.scorables, self.dropped_for, self.log = scorer, scorables, dropped_for, log
        self.handed_over: dict[tuple[int, int], HandedOver] = {}
        """Groups of finished chunks by (step, chunk), until a task reports them."""
        self._pending: dict[int, PendingScores] = {}
        """Scores in progress, by position."""
        self._since = HandedOver()
        """Counts since the last hand-over."""

    def verdicts(self, groups: Mapping[int, SampleGroup], step: int, may_drop: Callable[[int], bool]) -> list[Verdict]:
        """Returns the decisions known so far on `groups`, given by position (see `rollout.groups.Verdicts`)."""
        for position, group in groups.items():
            if position not in self._pending:
                samples = self.scorables(pack_groups([group], [position]), step)
                self._pending[position] = self.scorer.begin(samples)
        known = [position for position in groups if self._pending[position].is_done]
        return [self._verdict(position, groups[position], step, may_drop) for position in known]

    def _verdict(self, position: int, group: SampleGroup, step: int, may_drop: Callable[[int], bool]) -> Verdict:
        pending = self._pending.pop(position)
        scores = self.scorer.wait(pending)
        reason = self.dropped_for(pending.samples, scores)
        if reason is not None and may_drop(step):
            self._drop(with_scores(pack_groups([group], [position]), scores), step, reason)
            return Verdict(position, is_dropped=True)
        self._since.num_spared += reason is not None
        return Verdict(position, is_dropped=False, record=json.dumps(scores.record()))

    def _drop(self, group: Experience, step: int, reason: str) -> None:
        self._since.dropped[reason] += 1
        self._since.dropped_groups.append(group)
        if self.log is not None:
            self.log.append({"step": step, "reason": reason, "sample_ids": group.sample_ids.tolist()})

    def hand_over(
        self, step: int, chunk: int, experience: Experience, groups: Iterable[tuple[SampleGroup, str]]
    ) -> Experience:
        """Returns `experience` with the rewards from the records of its groups. The groups are in the order of
        `experience`."""
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


# Solved rates of prompts, for data.solved_rate. Role reward counts and publishes them, and engines read them.

RATES_FILES = "solved_rates_*.safetensors"
"""Files of a checkpoint: the rates known to each engine."""
OUTCOMES_FILE = "outcomes.safetensors"

Counts = list[tuple[int, int, int]]
"""Tuples of a row, its number of solved samples and its number of samples."""


class OutcomeTeller:
    """The counts of solved samples of each row, on every rank of role reward. The leader publishes the sums."""

    def __init__(self, job: Job, *, is_leader: bool) -> None:
        self.job, self.settings = job, job.config.data.solved_rate
        self.counts: dict[int, tuple[int, int]] = {}
        self.told: dict[int, Counts] = {}
        """On the leader: the counts of the last steps. Engines may not have read them yet."""
        if self.settings is not None:
            self.log = _outcome_log(job)
            if is_leader:
                self._resume()

    def begin_step(self) -> None:
        self.counts = {}

    def add(self, experience: Experience) -> None:
        """Counts scored samples of this rank. Failed episodes do not count. An episode with several trajectories counts
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
        """Returns this rank's counts of the step, for the leader."""
        return [(row, *counts) for row, counts in self.counts.items()]

    def tell(self, step: int, records: Iterable[Counts]) -> None:
        """Publishes the sums of all ranks' counts. Called on the leader."""
        if self.settings is None:
            return
        self.begin_step()
        for record in records:
            self._count(record)
        self.told[step] = self.record()
        self.told = {of: counts for of, counts in self.told.items() if of >= step - self.job.shape.lead}
        self.log.put(step, self.counts)

    def contents(self) -> dict[str, Contents]:
        """Returns the counts that a resumed run publishes to its engines again."""
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
            if resumed.continues or step < resumed.step:  # later steps are scored again
                self.log.put(step, {row: (solved, drawn) for row, solved, drawn in of})

    def _count(self, counts: Iterable[tuple[int, int, int]]) -> None:
        for row, solved, drawn in counts:
            before = self.counts.get(row, (0, 0))
            self.counts[row] = before[0] + solved, before[1] + drawn


def training_rows(job: Job) -> RowStream:
    """Returns the stream of training prompts on a rank of the rollout, from the first step of this process.

    Raises CheckpointError if the stream cannot continue from the run's checkpoint.
    """
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
            f"data.solved_rate: {resumed.folder} was saved without it, so results of unfinished samples are missing. "
            "Remove data.solved_rate, or start a new run with another checkpoint.dir."
        )
    return rows


def _outcome_log(job: Job) -> OutcomeLog:
    return OutcomeLog(job.world.store, len(job.grids["rollout"].ranks))
