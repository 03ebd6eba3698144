"""The reward: scores responses, and warns if all samples of every prompt score alike."""

import logging
from collections.abc import Mapping
from dataclasses import replace

import torch

from rltrain.algorithms.registry import algorithm_of
from rltrain.algorithms.reinforcement import GroupRelative
from rltrain.checkpoint.run_files import Contents
from rltrain.data.experience import Experience
from rltrain.exchange.exchange import Shipment
from rltrain.rewards.group_filter import load_group_filter
from rltrain.rewards.scorer import Scorer, Scores, rewarding_models
from rltrain.roles.evaluation import EvaluationScoring
from rltrain.roles.reward_statistics import FLAT_GROUPS, RewardStatistics
from rltrain.roles.role import Job, Metrics, Role, SampleLog
from rltrain.roles.rollout import RolloutRole
from rltrain.roles.scoring import (
    FailureLimit,
    GroupScoring,
    OutcomeTeller,
    RankRecords,
    Scorables,
    sample_records,
    with_scores,
)

# Warnings about prompts with equal rewards for all samples. A group-relative algorithm learns nothing from them.

logger = logging.getLogger(__name__)

ADVICE = (
    "Look at the responses and rewards in samples.jsonl: the reward function may be wrong for the task, or the prompts "
    "too hard or too easy for the model (batch.dynamic_sampling replaces such prompts)"
)


WARN_AFTER_STEPS = 5


class FlatRewards:
    """A watch over the rewards of a run's steps. It looks for a spread of rewards within groups.

    The first step without any spread is logged once. WARN_AFTER_STEPS such steps in a row cause one warning.
    """

    def __init__(self) -> None:
        self._first_step: int | None = None
        self._num_steps = 0
        self._has_said = False

    def look(self, step: int, metrics: Mapping[str, float]) -> None:
        """Checks a step. `metrics` are the metrics of its rewards."""
        if metrics.get(FLAT_GROUPS) != 1.0:
            self._first_step, self._num_steps = None, 0
            return
        if self._first_step is None:
            self._first_step = step
        self._num_steps += 1
        if self._num_steps == WARN_AFTER_STEPS:
            logger.warning(
                "in %d steps in a row, since step %d, 100 %% of the groups have no spread of rewards: the policy "
                "learns nothing from them. %s",
                *(self._num_steps, self._first_step, ADVICE),
            )
        elif not self._has_said:
            logger.info(
                "step %d: 100 %% of the groups have no spread of rewards (mean %.3g): the policy learns nothing. %s",
                *(step, metrics["reward_mean"], ADVICE),
            )
        self._has_said = True


# The role: scores responses against the labels of their prompts.


class RewardRole(Role):
    name = "reward"

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        self.models = rewarding_models(job.config, job.placement.roles)
        self.scorer = Scorer.of(self.config.reward, job.heartbeat.advance, models=self.models)
        self.limit = FailureLimit(self.scorer.parts, self.config.reward)
        self.flat = FlatRewards()
        self.training = self._training()
        self.records = RankRecords(job.job_store, job.waiter, self.name, self.grid.ranks)
        self.evaluations: EvaluationScoring | None = None
        """Scores evaluations. None if role evaluation generates and scores them."""
        if not self.config.evaluates_apart:
            self.evaluations = EvaluationScoring(job, self.scorer, self.limit, self.records)
            self.logs.append(self.evaluations.log)
        self.statistics = RewardStatistics()
        self.outcomes = OutcomeTeller(job, is_leader=job.world.rank == self.leader)
        self.log = SampleLog(self.config.output_dir, "samples.jsonl")
        if job.world.rank == self.leader:
            self.logs.append(self.log)
        self.scoring: GroupScoring | None = None
        """Scores groups for dynamic sampling. Set on an engine's first rank only."""

    def _training(self) -> Scorables | None:
        """Returns the source of scorable training samples, or None if the algorithm does not generate."""
        if not algorithm_of(self.config).generates:
            return None
        prompts, functions = self.job.rows.prompts, self.scorer.functions
        return Scorables(functions, prompts.train, prompts.decoder, self.config.data.train, "data.train")

    @classmethod
    def beside(cls, job: Job, hosted: Mapping[str, Role]) -> "RewardRole":
        reward, rollout, selection = cls(job), hosted.get("rollout"), job.config.batch.dynamic_sampling
        if selection is not None and isinstance(rollout, RolloutRole) and rollout.decisions.is_leader:
            assert reward.training is not None, "only an algorithm that generates selects groups"
            log = None
            if job.config.logging.sample_ids:
                log = SampleLog(job.config.output_dir, f"dropped_sample_ids/rank{job.world.rank}.jsonl")
                reward.logs.append(log)
            reward.scoring = GroupScoring(reward.scorer, reward.training.of, load_group_filter(selection), log)
            rollout.select_groups_by(reward.scoring)
        return reward

    def score(self, step: int, chunk: int) -> Metrics:
        """Scores the responses of a chunk. With dynamic sampling they have arrived with their rewards.

        After the step's last chunk the role's leader waits for the other ranks and returns the metrics of the step.
        """
        if chunk == 0:
            algorithm = algorithm_of(self.config)
            compares = isinstance(algorithm, GroupRelative)
            self.statistics = RewardStatistics(algorithm.is_greedy, counts_flat_groups=compares)
            self.outcomes.begin_step()
        assert self.training is not None, "only an algorithm that generates has this task"
        if not self.job.shape.selects_groups:
            scored = self._score(step, chunk, self.training)
            self.outcomes.add(self.statistics.reported(scored.experience))
        else:
            scored = self.shipments.pop(("samples", step, chunk))
            self._take_handed_over(self.training, step, chunk)
        if chunk == 0 and self.job.world.rank == self.leader:
            num_shown = min(self.config.logging.samples, scored.experience.num_samples)
            shown = scored.experience.select(torch.arange(num_shown))
            self.log.append(*sample_records(self.training, shown, step, self.scorer.parts, self.job.images))
        self.shipments["scored", step, chunk] = scored
        if chunk < self.job.shape.num_chunks - 1:
            return {}
        metrics = self._gather("score", step, self.statistics)
        self.flat.look(step, metrics)
        return {f"rollout/{name}": value for name, value in metrics.items()}

    def score_evaluation(self, step: int, chunk: int) -> Metrics:
        """Scores evaluation set number `chunk`. The role's leader collects the scores of the other ranks."""
        assert self.evaluations is not None, "no role evaluation is placed"
        samples = self.shipments.pop(("evaluation_samples", step, chunk)).experience
        told = self._told_of("evaluation_samples", step, chunk, samples)
        return self.evaluations.score(step, chunk, samples, told, self.serve)

    def save_state(self) -> Mapping[str, Contents]:
        """Returns the best evaluation so far, and outcomes that engines may not have read yet. Only the
        leader has any."""
        if self.job.world.rank != self.leader:
            return {}
        return {**(self.evaluations.save_state() if self.evaluations else {}), **self.outcomes.contents()}

    def close(self) -> None:
        """Ends the processes of the reward functions."""
        self.scorer.close()
        if self.evaluations:
            self.evaluations.close()

    def _score(self, step: int, chunk: int, source: Scorables) -> Shipment:
        shipment = self.shipments.pop(("samples", step, chunk))
        told = self._told_of("samples", step, chunk, shipment.experience)
        scores = self.scorer.score(source.of(shipment.experience, step), told)
        scored = replace(shipment, experience=with_scores(shipment.experience, scores))
        self.statistics.add_of(source.dataset, scored.experience, scores)
        return scored

    def _take_handed_over(self, source: Scorables, step: int, chunk: int) -> None:
        """Counts the groups that this rank's engine has scored for the chunk."""
        if self.scoring is None:
            return
        handed_over = self.scoring.handed_over.pop((step, chunk))
        for experience, scores in handed_over.groups:
            self.statistics.add_of(source.dataset, experience, scores)
        for experience in (*(experience for experience, _ in handed_over.groups), *handed_over.dropped_groups):
            self.outcomes.add(self.statistics.reported(experience))
        self.statistics.add_dropped(handed_over.dropped, handed_over.num_spared)

    def _told_of(self, transfer: str, step: int, chunk: int, samples: Experience) -> list[Scores]:
        """Returns each model's scores of the samples of a transfer."""
        told = (self.shipments.pop((model.transfer(transfer), step, chunk)) for model in self.models)
        scores = (samples.with_fields_of(shipment.experience).model_scores.tolist() for shipment in told)
        return [model.scores(of_model) for model, of_model in zip(self.models, scores, strict=True)]

    def _gather(self, what: str, step: int, statistics: RewardStatistics) -> Metrics:
        """Returns the metrics of all ranks on the role's leader, and {} on the others. The leader also publishes the
        outcomes.

        Raises RewardError on the leader if too many samples have failed. The error ends the job.
        """
        record = [statistics.record(), statistics.first_failures, self.outcomes.record()]
        gathered = self.records.collect(what, step, record, self.serve)
        if not gathered:
            return {}
        self.outcomes.tell(step, [of_rank for *_, of_rank in gathered])
        return self.limit.judged(f"{what}[{step}]", gathered)
