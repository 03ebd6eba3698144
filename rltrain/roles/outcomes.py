"""How many samples of each prompt have solved it, for data.solved_rate: role reward counts and tells, engines heed."""

import json
from collections.abc import Iterable

from rltrain.algorithms.losses import response_lengths
from rltrain.checkpoint.run_files import Contents, read_contents, read_texts
from rltrain.data.experience import SIBLINGS_APART, Experience
from rltrain.data.order import SolvedRateOrder, SolvedRates
from rltrain.errors import CheckpointError
from rltrain.roles.role import Job
from rltrain.rollout.rollout_state import FixedRows, OutcomeLog, RowStream, SolvedRateRows

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
    settings, order = job.config.data.solved_rate, job.prompts.order
    per_step = job.config.batch.prompts_per_step
    if settings is None:
        return FixedRows(order, first=job.data_from * per_step)
    rates = SolvedRates(len(job.prompts.train), settings)
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
