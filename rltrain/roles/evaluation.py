"""Held-out evaluation by separate engines or the rollout's, and its scores."""

import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import torch
from torch import Tensor

from rltrain.checkpoint.hf_writer import save_checkpoint
from rltrain.checkpoint.run_files import Contents, read_texts
from rltrain.config.evaluation import SHORT_FORM, EvaluationPlan, has_reached
from rltrain.data.experience import SIBLINGS_APART, Experience
from rltrain.data.prompts import PromptDataset
from rltrain.observability.evaluations import (
    BEST_FILE,
    BEST_FOLDER,
    BEST_STATE_FILE,
    REACHED,
    Best,
    BestSoFar,
    best_at_k,
    best_verdict_of,
    end_verdict_of,
    pass_at_k,
    reported,
    sizes_up_to,
)
from rltrain.rewards.scorer import Scorer, Scores
from rltrain.roles.reward_statistics import RewardStatistics, is_of_one_function
from rltrain.roles.role import Job, Metrics, SampleLog
from rltrain.roles.rollout import DrawingRole
from rltrain.roles.scoring import FailureLimit, RankRecords, Scorables, are_logged, sample_records, with_scores
from rltrain.rollout.in_flight_sync import InFlightSync, NoInFlightSync
from rltrain.rollout.layout import engine_parts, whole_engine
from rltrain.runtime.job_store import POLL_S, poll_s

# Rewards of an evaluation by prompt, collected from the ranks that scored them.

Record = Mapping[str, Any]
"""A rank's outcomes as JSON values."""


def record_of(experience: Experience) -> Record:
    """Returns each prompt's rewards on a rank, and the oldest and newest policy version of a generated token.

    An episode has one reward, even with several trajectories. The versions are None if no token was generated.
    """
    episodes = zip(
        experience.prompt_ids.tolist(),
        (experience.sample_ids % SIBLINGS_APART).tolist(),
        experience.rewards.tolist(),
        strict=True,
    )
    rewards: dict[str, list[float]] = defaultdict(list)
    for (prompt, _), reward in {(prompt, episode): reward for prompt, episode, reward in episodes}.items():
        rewards[str(prompt)].append(reward)
    versions = experience.policy_version[experience.response_mask]
    seen = [int(versions.min()), int(versions.max())] if len(versions) else None
    return {"rewards": rewards, "versions": seen}


def metrics_of(records: Sequence[Record], *, num_samples: int, threshold: float) -> dict[str, float]:
    """Returns the metrics of an evaluation from the records of all ranks.

    They are the policy version, the number of prompts and the standard error of their mean reward. With several samples
    per prompt they also are mean@n, pass@k and best@k. A sample passes with a reward above `threshold`. Means are over
    prompts.
    """
    metrics: dict[str, float] = {}
    versions = [version for record in records for version in record["versions"] or ()]
    if versions:
        metrics["policy_version"] = min(versions)
        if max(versions) > min(versions):
            metrics["policy_version_max"] = max(versions)
    prompts = _by_prompt(records)
    metrics["prompts"] = len(prompts)
    if len(prompts) > 1:
        means = [sum(rewards) / len(rewards) for rewards in prompts]
        metrics["score_stderr"] = stdev(means) / len(means) ** 0.5
    if num_samples == 1 or not prompts:
        return metrics
    passed = [sum(reward > threshold for reward in rewards) for rewards in prompts]
    metrics[f"mean@{num_samples}"] = fmean(best_at_k(rewards, 1) for rewards in prompts)
    for k in sizes_up_to(num_samples):
        pairs = zip(prompts, passed, strict=True)
        metrics[f"pass@{k}"] = fmean(pass_at_k(len(rewards), count, k) for rewards, count in pairs)
        if k > 1:
            metrics[f"best@{k}"] = fmean(best_at_k(rewards, k) for rewards in prompts)
    return metrics


def _by_prompt(records: Sequence[Record]) -> list[list[float]]:
    prompts: dict[int, list[float]] = defaultdict(list)
    for record in records:
        for prompt, rewards in record["rewards"].items():
            prompts[int(prompt)] += rewards
    return [prompts[prompt] for prompt in sorted(prompts)]


# An evaluation set on a rank of the scoring role: its scorer and its metrics.

OF_ALL_SAMPLES = {
    "reward_mean": "score",
    "response_length_mean": "response_length_mean",
    "truncated_ratio": "truncated_ratio",
}
"""Name in RewardStatistics -> name of the metric after the set's prefix."""


@dataclass(frozen=True)
class EvaluatedSet:
    """One of the run's evaluation sets with its scorer, of the set's reward or else the run's."""

    plan: EvaluationPlan
    scorables: Scorables
    scorer: Scorer
    limit: FailureLimit

    def metrics(
        self, of_samples: Mapping[str, float], outcomes: Sequence[Mapping[str, Any]], threshold: float
    ) -> dict[str, float]:
        """Returns the set's metrics. `of_samples` are RewardStatistics' metrics of all samples, `outcomes` the records
        of all ranks."""
        shown = {metric: of_samples[name] for name, metric in OF_ALL_SAMPLES.items()}
        shown |= {name: value for name, value in of_samples.items() if is_of_one_function(name)}
        shown |= metrics_of(outcomes, num_samples=self.plan.samples_per_prompt, threshold=threshold)
        return {f"{self.plan.prefix}/{name}": value for name, value in shown.items()}


# Scores of evaluation sets and the verdicts based on them, on the ranks of the scoring role.

SCORING_ROLES = ("reward", "evaluation")
"""Roles that may have scored the evaluations of the resumed run."""


class EvaluationScoring:
    """The scores of evaluation sets, and the verdicts on them.

    `scorer` is the run's, for sets without a separate reward. `records` collects the results of the ranks.
    """

    def __init__(self, job: Job, scorer: Scorer, limit: FailureLimit, records: RankRecords) -> None:
        self.job, self.config, self.records = job, job.config, records
        self.scorer, self.limit = scorer, limit
        datasets = job.rows.prompts.evaluations
        self.sets = [self._set(*of_set) for of_set in zip(self.config.evaluations, datasets, strict=True)]
        self.best = self._best()
        self.log = SampleLog(self.config.output_dir, f"evaluation_samples/rank{job.world.rank}.jsonl")

    def _set(self, plan: EvaluationPlan, dataset: PromptDataset) -> EvaluatedSet:
        scorer, limit, decoder = self.scorer, self.limit, self.job.rows.prompts.decoder
        if plan.reward is not None:
            section = plan.config_key.removesuffix("data") + "reward"
            scorer = Scorer.of(plan.reward, self.job.heartbeat.advance, section)
            limit = FailureLimit(scorer.parts, plan.reward)
        scorables = Scorables(scorer.functions, dataset, decoder, plan.file, plan.config_key)
        return EvaluatedSet(plan, scorables, scorer, limit)

    def _best(self) -> BestSoFar | None:
        """Returns the best evaluation, restored from the resumed checkpoint if there is one."""
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
        """Scores the samples of set `number`. Returns its metrics on the leader of the ranks, and {} on the others.

        `told` are models' scores of the samples. Only sets with the run's reward use them. `serve` is called while the
        rank waits.
        """
        evaluated, statistics, num_shown = self.sets[number], RewardStatistics(), self.config.evaluation.logged_prompts
        plan, scorer = evaluated.plan, evaluated.scorer
        pending = scorer.begin(evaluated.scorables.of(experience, step))
        while serve and not pending.is_done:  # not a wait for others, so a stall is blamed on this rank
            serve()
            time.sleep(POLL_S)
        scores = scorer.wait(pending, told if scorer is self.scorer else ())
        experience = with_scores(experience, scores)
        statistics.add_of(evaluated.scorables.dataset, experience, scores)
        shown = experience.select(torch.nonzero(are_logged(experience, num_shown)).flatten())
        records = sample_records(evaluated.scorables, shown, step, scorer.parts, self.job.images)
        self.log.append(*({"set": plan.name, **record} for record in records))
        what = "evaluation" if plan.name == SHORT_FORM else f"evaluation {plan.name}"
        record = [statistics.record(), statistics.first_failures, record_of(experience)]
        gathered = self.records.collect(what, step, record, serve)
        if not gathered:
            return {}
        of_samples = evaluated.limit.judged(f"{what}[{step}]", gathered)
        metrics = evaluated.metrics(
            of_samples, [outcomes for *_, outcomes in gathered], self.config.evaluation.pass_threshold
        )
        self._leave_verdicts(step, plan, metrics)
        return metrics

    def _leave_verdicts(self, step: int, plan: EvaluationPlan, metrics: Metrics) -> None:
        """Publishes the verdicts of an evaluation (best so far, stop) in the job store."""
        goal, metric, job_store = self.config.evaluation.stop_at, self.config.stop_metric, self.job.job_store
        if self.best is not None and plan.reports(self.best.settings.metric):
            job_store.put(best_verdict_of(step), self.best.verdict(step, metrics))
        if goal is not None and metric is not None and plan.reports(metric):
            is_reached = has_reached(metric, reported(metrics, metric, "evaluation.stop_metric"), goal)
            job_store.put(end_verdict_of(step), is_reached)
            if is_reached:
                job_store.put(REACHED, step)

    def save_state(self) -> Mapping[str, Contents]:
        """Returns the best evaluation so far, on the leader of the ranks."""
        if self.best is None or self.job.world.rank != self.records.ranks[0]:
            return {}
        return {BEST_STATE_FILE: Contents({}, {"best": self.best.state()})}

    def close(self) -> None:
        """Ends the processes of the sets' separate reward functions."""
        for evaluated in self.sets:
            if evaluated.scorer is not self.scorer:
                evaluated.scorer.close()


# Evaluation by separate engines, beside training and generation. Neither waits for it.


class EvaluationRole(DrawingRole):
    """The role that generates and scores evaluation sets with the weights of a step, while other roles continue.

    Weights of later steps can arrive meanwhile and wait on the host. So nothing here is a collective of several
    engines. One engine may have joined a weight sync before another.
    """

    name = "evaluation"

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        self.weights: dict[int, dict[str, Tensor]] = {}
        """Weights by step, for running and later evaluations: the engine's parameters by name, on the host."""
        self.in_flight: InFlightSync | NoInFlightSync = NoInFlightSync()
        self.scoring: EvaluationScoring | None = None
        """Set on each engine's first rank."""
        if self.decisions.is_leader:
            scorer = Scorer.of(self.config.reward, job.heartbeat.advance)
            limit = FailureLimit(scorer.parts, self.config.reward)
            records = RankRecords(job.job_store, job.waiter, self.name, self.grid.owners())
            self.scoring = EvaluationScoring(job, scorer, limit, records)
            self.logs.append(self.scoring.log)
        if job.world.rank == self.leader and "rollout" not in job.placement.roles:
            job.rows.prompts.report_rows(job.config.batch.prompts_per_step)

    @property
    def draws_during_syncs(self) -> bool:
        return False

    def has_room(self) -> bool:
        waiting = [step for step in self.weights if step != self.engine.policy_version]
        return len(waiting) < self.config.evaluation.max_waiting

    def take_in_flight(self, in_flight: InFlightSync) -> None:
        self.in_flight = in_flight

    def run_evaluation(self, step: int, chunk: int) -> Metrics:
        """Generates and scores evaluation set number `chunk`. Returns its metrics on the role's leader.

        Collective over: this engine's ranks.
        """
        if self.decisions.group is not None:
            self.in_flight.enter_together(self.job.waiter, f"run_evaluation[{step}.{chunk}]")
        self._take_weights(step)
        finished, drawn = self.draw_set(step, chunk, self.in_flight)
        experience = self.packed(finished, drawn)
        self.count_operations(experience)
        if self.scoring is None:
            return {}
        return self.scoring.score(step, chunk, experience, serve=self.serve)

    def keep_evaluated(self, step: int, chunk: int) -> None:
        """Writes <output_dir>/hf_best if the evaluation of the step is the best so far.

        Collective over: the ranks of the first engine.
        """
        if self.dp:
            return
        job_store, key = self.job.job_store, best_verdict_of(step)
        what = f"the verdict of rank {self.leader} at step {step}"
        self.wait_for(lambda: job_store.has(key) or None, what, [self.leader], poll_s(self.grid.tp))
        if verdict := job_store.get(key, waiting_for=what):
            self._save(step, Best(**verdict))

    def save_state(self) -> Mapping[str, Contents]:
        """Returns the best evaluation so far. Evaluations before the cut are complete when a rank of the role reaches
        it."""
        return self.scoring.save_state() if self.scoring else {}

    def close(self) -> None:
        """Closes the engine and the reward functions, with their resources outside this process."""
        super().close()
        if self.scoring:
            self.scoring.close()
            self.scoring.scorer.close()

    def _take_weights(self, step: int) -> None:
        """Loads the weights of the step into the engine."""
        for earlier in [kept for kept in self.weights if kept < step]:
            del self.weights[earlier]
        if self.engine.policy_version == step:
            return
        self.engine.begin_update()
        for number in range(len(engine_parts(self.config, self.job.architecture, self.grid, self.name))):
            for name, parameter in self.engine.incoming(number).items():
                parameter.copy_(self.weights[step][name])
            self.engine.arrived(number)
        self.engine.end_update(step)

    def _save(self, step: int, best: Best) -> None:
        """Saves the weights of the step. Collective over: this engine's ranks."""
        ranks, config = self.engine_ranks, self.config
        whole = whole_engine(config, self.job.architecture, replace(self.grid, ranks=ranks), self.name)
        save_checkpoint(
            Path(config.output_dir, BEST_FOLDER),
            self.weights[step],
            whole.plain,
            self.job.architecture,
            group=self.job.groups.cpu[ranks],
            rank=self.job.world.rank,
            like=Path(config.model.path),
            notes={BEST_FILE: best.as_json()},
        )
