"""The scores of evaluation sets, and what follows from them, on the ranks of the role that scores them."""

import time
from collections.abc import Callable, Mapping, Sequence

from rltrain.checkpoint.run_files import Contents, read_texts
from rltrain.config.evaluation import SHORT_FORM, EvaluationPlan, has_reached
from rltrain.data.experience import Experience
from rltrain.evaluation.outcomes import record_of
from rltrain.observability.evaluations import (
    BEST_STATE_FILE,
    REACHED,
    BestSoFar,
    best_verdict_of,
    end_verdict_of,
    reported,
)
from rltrain.rewards.scorer import CombinedScorer, CombinedScores, Scores
from rltrain.roles.evaluated_set import EvaluatedSet, Judges
from rltrain.roles.failure_limit import FailureLimit
from rltrain.roles.rank_records import RankRecords
from rltrain.roles.reward_statistics import RewardStatistics
from rltrain.roles.role import Job, Metrics
from rltrain.roles.sample_log import SampleLog
from rltrain.roles.sample_records import sample_records
from rltrain.roles.scored_samples import with_scores
from rltrain.runtime.job_store import POLL_S

SCORING_ROLES = ("reward", "evaluation")
"""Those that may have scored the evaluations of a run that goes on."""


class EvaluationScoring:
    """`scorer` is the run's, for sets without a reward of their own; `records` bring ranks together."""

    def __init__(self, job: Job, scorer: CombinedScorer, limit: FailureLimit, records: RankRecords) -> None:
        self.job, self.config, self.records = job, job.config, records
        self.of_run = Judges(scorer, limit)
        self.sets = [
            EvaluatedSet(plan, dataset, job.prompts.decoder, self.of_run, job.heartbeat.advance)
            for plan, dataset in zip(self.config.evaluations, job.prompts.evaluations, strict=True)
        ]
        self.best = self._best()
        self.log = SampleLog(self.config.output_dir, f"evaluation_samples/rank{job.world.rank}.jsonl")

    def _best(self) -> BestSoFar | None:
        """As the checkpoint has it that the run goes on from."""
        if self.config.evaluation.keep_best is None:
            return None
        best = BestSoFar(self.config.evaluation.keep_best)
        for role in SCORING_ROLES if self.job.resumed else ():
            for file in self.job.resumed.files(role):  # type: ignore[union-attr]
                if file.name == BEST_STATE_FILE:
                    best.restore(read_texts(file)["best"])
        return best

    def score(
        self,
        step: int,
        number: int,
        experience: Experience,
        told: Sequence[Scores] = (),
        serve: Callable[[], None] | None = None,
    ) -> Metrics:
        """What the set of this number is worth, which the leader of the ranks learns from the others. Models have
        `told` of the samples what is part of the run's reward. `serve` is what the rank does for others meanwhile."""
        evaluated, statistics = self.sets[number], RewardStatistics()
        plan, scorer = evaluated.plan, evaluated.judges.scorer
        scores = self._scores(evaluated, experience, step, told if scorer is self.of_run.scorer else (), serve)
        experience = with_scores(experience, scores)
        statistics.add_of(evaluated.scorables.dataset, experience, scores)
        shown = evaluated.shown(experience, self.config.evaluation.logged_prompts)
        records = sample_records(evaluated.scorables, shown, step, scorer.parts)
        self.log.append(*({"set": plan.name, **record} for record in records))
        what = "evaluation" if plan.name == SHORT_FORM else f"evaluation {plan.name}"
        record = [statistics.record(), statistics.first_failures, record_of(experience)]
        gathered = self.records.collect(what, step, record, serve)
        if not gathered:
            return {}
        of_samples = evaluated.judges.limit.judged(f"{what}[{step}]", gathered)
        metrics = evaluated.metrics(
            of_samples, [outcomes for *_, outcomes in gathered], self.config.evaluation.pass_threshold
        )
        self._leave_verdicts(step, plan, metrics)
        return metrics

    def _scores(
        self,
        evaluated: EvaluatedSet,
        experience: Experience,
        step: int,
        told: Sequence[Scores],
        serve: Callable[[], None] | None,
    ) -> CombinedScores:
        scorer = evaluated.judges.scorer
        pending = scorer.begin(evaluated.scorables.of(experience, step))
        while serve and not all(scores.is_done for scores in pending):  # at work, so that a stall is this rank's
            serve()
            time.sleep(POLL_S)
        return scorer.wait(pending, told)

    def _leave_verdicts(self, step: int, plan: EvaluationPlan, metrics: Metrics) -> None:
        """For those who wait for them."""
        goal, metric, job_store = self.config.evaluation.stop_at, self.config.stop_metric, self.job.job_store
        if self.best is not None and plan.reports(self.best.settings.metric):
            job_store.put(best_verdict_of(step), self.best.verdict(step, metrics))
        if goal is not None and metric is not None and plan.reports(metric):
            is_reached = has_reached(metric, reported(metrics, metric, "evaluation.stop_metric"), goal)
            job_store.put(end_verdict_of(step), is_reached)
            if is_reached:
                job_store.put(REACHED, step)

    def save_state(self) -> Mapping[str, Contents]:
        """Which evaluation was the best so far."""
        if self.best is None or self.job.world.rank != self.records.ranks[0]:
            return {}
        return {BEST_STATE_FILE: Contents({}, {"best": self.best.state()})}

    def close(self) -> None:
        """End the processes of sets' own reward functions."""
        for evaluated in self.sets:
            if evaluated.judges is not self.of_run:
                evaluated.judges.scorer.close()
