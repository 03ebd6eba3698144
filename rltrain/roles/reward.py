"""The reward: scores responses against their prompts' labels."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from rltrain.algorithms.registry import algorithm_of
from rltrain.checkpoint.run.files import Contents, read_contents
from rltrain.config.evaluation import SHORT_FORM, EvaluationPlan
from rltrain.data.experience import Experience
from rltrain.evaluation.best import BEST_STATE_FILE, BestSoFar
from rltrain.evaluation.outcomes import record_of
from rltrain.evaluation.verdicts import best_verdict_of, end_verdict_of, reported
from rltrain.exchange.exchange import Shipment
from rltrain.liveness.polling import poll
from rltrain.rewards.combined import CombinedScorer, CombinedScores
from rltrain.rewards.group_filter import load_group_filter
from rltrain.rewards.rewarding_model import rewarding_models
from rltrain.rewards.scorer import Scores
from rltrain.roles.evaluated_set import EvaluatedSet, Judges
from rltrain.roles.failure_limit import FailureLimit
from rltrain.roles.group_scoring import GroupScoring
from rltrain.roles.outcomes import OutcomeTeller
from rltrain.roles.reward_statistics import RewardStatistics
from rltrain.roles.role import Job, Metrics, Role
from rltrain.roles.rollout import Rollout
from rltrain.roles.sample_log import SampleLog
from rltrain.roles.sample_records import sample_records
from rltrain.roles.scorables import Scorables
from rltrain.roles.scored_samples import with_scores


class Reward(Role):
    name = "reward"

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        self.models = rewarding_models(job.config, job.placement.roles)
        self.scorer = CombinedScorer(self.config.reward, job.heartbeat.advance, models=self.models)
        self.limit = FailureLimit(self.scorer.parts, self.config.reward)
        self.training = self._training()
        self.evaluations = [
            EvaluatedSet(plan, dataset, job.prompts.decoder, Judges(self.scorer, self.limit), job.heartbeat.advance)
            for plan, dataset in zip(self.config.evaluations, job.prompts.evaluations, strict=True)
        ]
        self.best = self._best()
        self.statistics = RewardStatistics()
        self.outcomes = OutcomeTeller(job, is_leader=job.world.rank == self.leader)
        self.log = SampleLog(self.config.output_dir, "samples.jsonl")
        if job.world.rank == self.leader:
            self.logs.append(self.log)
        self.evaluation_log = SampleLog(self.config.output_dir, f"evaluation_samples/rank{job.world.rank}.jsonl")
        self.logs.append(self.evaluation_log)
        self.scoring: GroupScoring | None = None
        """On an engine's first rank, where groups are selected: it has scored what that engine drew."""

    def _best(self) -> BestSoFar | None:
        """As the checkpoint has it that the run goes on from."""
        if self.config.evaluation.keep_best is None:
            return None
        best = BestSoFar(self.config.evaluation.keep_best)
        for path in self.job.resumed.files(self.name) if self.job.resumed else []:
            if path.name == BEST_STATE_FILE:
                best.restore(read_contents(path).metadata["best"])
        return best

    def _training(self) -> Scorables | None:
        """Nothing where no training prompt is answered."""
        if not algorithm_of(self.config).generates:
            return None
        prompts, functions = self.job.prompts, self.scorer.functions
        return Scorables(functions, prompts.train, prompts.decoder, self.config.data.train, "data.train")

    @classmethod
    def beside(cls, job: Job, hosted: Mapping[str, Role]) -> "Reward":
        reward, rollout, selection = cls(job), hosted.get("rollout"), job.config.batch.dynamic_sampling
        if selection is not None and isinstance(rollout, Rollout) and rollout.decisions.is_leader:
            assert reward.training is not None, "only an algorithm that generates selects groups"
            log = None
            if job.config.logging.sample_ids:
                log = SampleLog(job.config.output_dir, f"dropped_sample_ids/rank{job.world.rank}.jsonl")
                reward.logs.append(log)
            reward.scoring = GroupScoring(reward.scorer, reward.training.of, load_group_filter(selection), log)
            rollout.select_groups_by(reward.scoring)
        return reward

    def score(self, step: int, chunk: int) -> Metrics:
        """A reward for each response, which it has already where groups were selected by theirs. With the step's last
        chunk the role's leader waits for its other ranks."""
        if chunk == 0:
            self.statistics = RewardStatistics(algorithm_of(self.config).is_greedy)
            self.outcomes.begin_step()
        assert self.training is not None, "only an algorithm that generates has this task"
        if not self.job.shape.selects_groups:
            scored = self._score("samples", chunk, self.scorer, self.training, step, self.statistics)
            self.outcomes.add(self.statistics.reported(scored.experience))
        else:
            scored = self.shipments.pop(("samples", step, chunk))
            self._take_handed_over(self.training, step, chunk)
        if chunk == 0 and self.job.world.rank == self.leader:
            num_shown = min(self.config.logging.samples, scored.experience.num_samples)
            shown = scored.experience.select(torch.arange(num_shown))
            self.log.append(*sample_records(self.training, shown, step, self.scorer.parts))
        self.shipments["scored", step, chunk] = scored
        if chunk < self.job.shape.num_chunks - 1:
            return {}
        metrics = self._gather("score", step, self.statistics, self.outcomes)
        return {f"rollout/{name}": value for name, value in metrics.items()}

    def score_evaluation(self, step: int, chunk: int) -> Metrics:
        """What the evaluation set of number `chunk` is worth, which the role's leader learns from its other ranks."""
        evaluated, statistics = self.evaluations[chunk], RewardStatistics()
        judges, plan = evaluated.judges, evaluated.plan
        scored = self._score("evaluation_samples", chunk, judges.scorer, evaluated.scorables, step, statistics)
        experience = scored.experience
        shown = evaluated.shown(experience, self.config.evaluation.logged_prompts)
        records = sample_records(evaluated.scorables, shown, step, judges.scorer.parts)
        self.evaluation_log.append(*({"set": plan.name, **record} for record in records))
        what = "evaluation" if plan.name == SHORT_FORM else f"evaluation {plan.name}"
        gathered = self._collect(what, step, [statistics.record(), statistics.first_failures, record_of(experience)])
        if not gathered:
            return {}
        of_samples = self._judged(f"{what}[{step}]", gathered, judges.limit)
        metrics = evaluated.metrics(
            of_samples, [outcomes for *_, outcomes in gathered], self.config.evaluation.pass_threshold
        )
        self._leave_verdicts(step, plan, metrics)
        return metrics

    def _leave_verdicts(self, step: int, plan: EvaluationPlan, metrics: Metrics) -> None:
        """For those who wait for them."""
        goal, metric = self.config.evaluation.stop_at, self.config.stop_metric
        if self.best is not None and plan.reports(self.best.settings.metric):
            self.job.job_store.put(best_verdict_of(step), self.best.verdict(step, metrics))
        if goal is not None and metric is not None and plan.reports(metric):
            is_reached = reported(metrics, metric, "evaluation.stop_metric") >= goal
            self.job.job_store.put(end_verdict_of(step), is_reached)

    def save_state(self) -> Mapping[str, Contents]:
        """Which evaluation was the best so far, and what engines may not have read yet."""
        if self.job.world.rank != self.leader:
            return {}
        best = {} if self.best is None else {BEST_STATE_FILE: Contents({}, {"best": self.best.state()})}
        return {**best, **self.outcomes.contents()}

    def close(self) -> None:
        """End the reward functions' processes."""
        self.scorer.close()
        for evaluated in self.evaluations:
            evaluated.judges.scorer.close()

    def _score(
        self,
        transfer: str,
        chunk: int,
        scorer: CombinedScorer,
        source: Scorables,
        step: int,
        statistics: RewardStatistics,
    ) -> Shipment:
        """What models have told is part of the run's reward, and not of an evaluation set's own."""
        shipment = self.shipments.pop((transfer, step, chunk))
        told = self._told_of(transfer, step, chunk, shipment.experience)
        samples = source.of(shipment.experience, step)
        scores = scorer.score(samples, told if scorer is self.scorer else ())
        scored = replace(shipment, experience=with_scores(shipment.experience, scores))
        self._add(scored.experience, scores, source, statistics)
        return scored

    def _take_handed_over(self, source: Scorables, step: int, chunk: int) -> None:
        """What the engine of this rank had scored before it handed its samples over."""
        if self.scoring is None:
            return
        handed_over = self.scoring.handed_over.pop((step, chunk))
        for experience, scores in handed_over.groups:
            self._add(experience, scores, source, self.statistics)
        for experience in (*(experience for experience, _ in handed_over.groups), *handed_over.dropped_groups):
            self.outcomes.add(self.statistics.reported(experience))
        self.statistics.add_dropped(handed_over.dropped, handed_over.num_spared)

    @staticmethod
    def _add(experience: Experience, scores: CombinedScores, source: Scorables, statistics: RewardStatistics) -> None:
        statistics.add(experience, scores)
        if len(source.dataset.sources) > 1:
            reported = statistics.reported(experience)
            sources = [source.dataset.source_of(row) for row in reported.prompt_ids.tolist()]
            statistics.add_sources(sources, reported.rewards.tolist())

    def _told_of(self, transfer: str, step: int, chunk: int, samples: Experience) -> list[Scores]:
        """What each model has said of the samples that a transfer brought."""
        told = (self.shipments.pop((model.transfer(transfer), step, chunk)) for model in self.models)
        scores = (samples.with_fields_of(shipment.experience).model_scores.tolist() for shipment in told)
        return [model.scores(of_model) for model, of_model in zip(self.models, scores, strict=True)]

    def _gather(
        self, what: str, step: int, statistics: RewardStatistics, outcomes: OutcomeTeller | None = None
    ) -> Metrics:
        """Metrics of all ranks of the role on its leader, which tells their `outcomes`; none on the others. Where too
        many samples have failed the leader raises RewardError, which ends the job."""
        counts = [] if outcomes is None else outcomes.record()
        gathered = self._collect(what, step, [statistics.record(), statistics.first_failures, counts])
        if not gathered:
            return {}
        if outcomes is not None:
            outcomes.tell(step, [of_rank for *_, of_rank in gathered])
        return self._judged(f"{what}[{step}]", gathered, self.limit)

    def _collect(self, what: str, step: int, record: Any) -> list[Any]:
        """The records of all ranks of the role on its leader, nothing on the others.

        No collective: these ranks may be an engine's too, which others need for weight syncs while it waits.
        """
        job_store, rank = self.job.job_store, self.job.world.rank
        keys = {other: f"reward {what}/{step}/{other}" for other in self.grid.ranks}
        job_store.put(keys[rank], record)
        if rank != self.leader:
            return []
        others = [other for other in keys if other != rank]
        poll(
            self.job.waiter,
            lambda: job_store.has(*keys.values()) or None,
            f"the rewards of step {step}",
            others,
            self.serve,
        )
        gathered = [job_store.get(key, waiting_for=key) for key in keys.values()]
        for key in keys.values():
            job_store.forget(key)
        return gathered

    @staticmethod
    def _judged(task: str, gathered: Sequence[Any], limit: FailureLimit) -> Metrics:
        records = [record for record, *_ in gathered]
        first_failures = {title: failure for _, of, *_ in reversed(gathered) for title, failure in of.items()}
        limit.judge(task, RewardStatistics.sums_of(records), first_failures)
        return RewardStatistics.metrics(records)
