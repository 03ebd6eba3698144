"""Rewards of prompt groups as an engine finishes them, while it goes on with others: those groups count that a filter
keeps.
"""

import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

import torch

from rltrain.algorithms.losses import response_lengths
from rltrain.checkpoint.run_files import Contents, read_contents, read_texts
from rltrain.data.experience import SIBLINGS_APART, Experience, join
from rltrain.data.prompt_order import SolvedRateOrder, SolvedRates
from rltrain.errors import CheckpointError
from rltrain.rewards.answers import Scorable
from rltrain.rewards.group_filter import GroupFilter
from rltrain.rewards.scorer import PendingScores, Scorer, Scores
from rltrain.roles.role import Job, SampleLog
from rltrain.roles.scoring import with_scores
from rltrain.rollout.groups import Verdict
from rltrain.rollout.rollout_state import FixedRows, OutcomeLog, RowStream, SolvedRateRows
from rltrain.rollout.sample import SampleGroup, pack_groups


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
