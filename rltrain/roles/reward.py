"""The reward: scores responses against their prompts' labels."""

from collections.abc import Mapping
from dataclasses import replace

import torch

from rltrain.algorithms.registry import algorithm_of
from rltrain.data.experience import Experience
from rltrain.errors import RewardError
from rltrain.exchange.exchange import Shipment
from rltrain.liveness.polling import poll
from rltrain.rewards.combined import CombinedScorer, CombinedScores
from rltrain.rewards.group_filter import load_group_filter
from rltrain.roles.group_scoring import GroupScoring
from rltrain.roles.reward_statistics import RewardStatistics, is_of_one_function, prefix
from rltrain.roles.role import Job, Metrics, Role
from rltrain.roles.rollout import Rollout
from rltrain.roles.sample_log import SampleLog
from rltrain.roles.scorables import Scorables
from rltrain.roles.scored_samples import with_scores


class Reward(Role):
    name = "reward"

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        self.has_judged = False
        self.scorer = CombinedScorer(self.config.reward, job.heartbeat.advance)
        prompts, data, functions = job.prompts, self.config.data, self.scorer.functions
        of_training = functions if algorithm_of(self.config).generates else ()
        self.training = Scorables(of_training, prompts.train, prompts.decoder, data.train, "data.train")
        self.evaluation = None
        if data.eval is not None and prompts.evaluation is not None:
            self.evaluation = Scorables(functions, prompts.evaluation, prompts.decoder, data.eval, "data.eval")
        self.evaluation_score = float("nan")
        self.statistics = RewardStatistics()
        self.log = SampleLog(self.config.output_dir, "samples.jsonl")
        if job.world.rank == self.leader:
            self.logs.append(self.log)

        self.scoring: GroupScoring | None = None
        """On an engine's first rank, where groups are selected: it has scored what that engine drew."""

    @classmethod
    def beside(cls, job: Job, hosted: Mapping[str, Role]) -> "Reward":
        reward, rollout, selection = cls(job), hosted.get("rollout"), job.config.batch.dynamic_sampling
        if selection is not None and isinstance(rollout, Rollout) and rollout.decisions.is_leader:
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
        samples = self.shipments.pop(("samples", step, chunk))
        scored = samples
        if not self.job.shape.selects_groups:
            scored = self._score(samples, self.training, step, self.statistics)
        elif self.scoring is not None:
            handed_over = self.scoring.handed_over.pop((step, chunk))
            for experience, scores in handed_over.groups:
                self._add(experience, scores, self.training, self.statistics)
            self.statistics.add_dropped(handed_over.dropped, handed_over.num_spared)
        if chunk == 0 and self.job.world.rank == self.leader:
            self._log_samples(step, scored.experience)
        self.shipments["scored", step, chunk] = scored
        if chunk < self.job.shape.num_chunks - 1:
            return {}
        metrics = self._gather("score", step, self.statistics)
        return {f"rollout/{name}": value for name, value in metrics.items()}

    def score_evaluation(self, step: int, chunk: int) -> Metrics:
        """The held-out score, which the role's leader learns from its other ranks."""
        assert self.evaluation is not None, "the order evaluates only where data.eval is set"
        statistics = RewardStatistics()
        self._score(self.shipments.pop(("evaluation_samples", step, chunk)), self.evaluation, step, statistics)
        metrics = self._gather("evaluation", step, statistics)
        if not metrics:
            return {}
        self.evaluation_score = metrics["reward_mean"]
        of_all = {"eval/score": self.evaluation_score, "eval/response_length_mean": metrics["response_length_mean"]}
        return of_all | {f"eval/{name}": value for name, value in metrics.items() if is_of_one_function(name)}

    def close(self) -> None:
        """End the reward function's processes."""
        self.scorer.close()

    def _score(self, shipment: Shipment, source: Scorables, step: int, statistics: RewardStatistics) -> Shipment:
        scores = self.scorer.score(source.of(shipment.experience, step))
        scored = replace(shipment, experience=with_scores(shipment.experience, scores))
        self._add(scored.experience, scores, source, statistics)
        return scored

    @staticmethod
    def _add(experience: Experience, scores: CombinedScores, source: Scorables, statistics: RewardStatistics) -> None:
        statistics.add(experience, scores)
        if len(source.dataset.sources) > 1:
            reported = statistics.reported(experience)
            sources = [source.dataset.source_of(row) for row in reported.prompt_ids.tolist()]
            statistics.add_sources(sources, reported.rewards.tolist())

    def _gather(self, what: str, step: int, statistics: RewardStatistics) -> Metrics:
        """Metrics of all ranks of the role on its leader, none on the others.

        No collective: these ranks may be an engine's too, which others need for weight syncs while it waits. Where too
        many samples have failed the leader raises RewardError, which ends the job.
        """
        job_store, rank = self.job.job_store, self.job.world.rank
        keys = {other: f"reward {what}/{step}/{other}" for other in self.grid.ranks}
        job_store.put(keys[rank], [statistics.record(), statistics.first_failures])
        if rank != self.leader:
            return {}
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
        records = [record for record, _ in gathered]
        first_failures = {title: failure for _, failures in reversed(gathered) for title, failure in failures.items()}
        self._judge(f"{what}[{step}]", RewardStatistics.sums_of(records), first_failures)
        return RewardStatistics.metrics(records)

    def _judge(self, task: str, sums: Mapping[str, float], first_failures: Mapping[str, str]) -> None:
        """Raise RewardError if a function failed on more samples of `task` than may, or on all of the first task's."""
        is_first, self.has_judged = not self.has_judged, True
        num_samples, settings = int(sums["samples"]), self.config.reward

        def are_too_many(num_failed: int) -> bool:
            return num_failed > settings.max_failures * num_samples or (is_first and num_failed == num_samples)

        rule = (
            "Expected a number for every response, 0 for one that deserves nothing: the job ends where more than "
            f"reward.max_failures = {settings.max_failures:g} of a step's samples fail, or all of the first."
        )
        for function in self.scorer.functions:
            errors, timeouts = (int(sums[f"{prefix(function.title)}_{kind}"]) for kind in ("errors", "timeouts"))
            if are_too_many(errors + timeouts):
                raise RewardError(
                    f"{function.config_key}.function: {function.place} failed on {errors + timeouts} of {num_samples} "
                    f"samples of {task}: {errors} by an error, {timeouts} by taking longer than reward.timeout_s = "
                    f"{settings.timeout_s:g}. {rule} The first failure was {first_failures.get(function.title)}"
                )
        unscored = int(sums["reward_unscored"])
        if are_too_many(unscored):
            raise RewardError(
                f"reward: every function returned None for {unscored} of {num_samples} samples of {task}. {rule}"
            )

    def _log_samples(self, step: int, experience: Experience) -> None:
        """Some samples of the step, for people to read."""
        first = experience.select(torch.arange(min(self.config.logging.samples, experience.num_samples)))
        versions = first.policy_version.split(first.lengths.tolist())
        masks = first.response_mask.split(first.lengths.tolist())
        samples = zip(self.training.of(first, step), experience.rewards.tolist(), versions, masks, strict=False)
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
            if len(self.training.dataset.sources) > 1:
                record["source"] = self.training.dataset.source_of(int(first.prompt_ids[number]))
            if turns := self.training.conversation(first, number):
                record["turns"] = turns
            self.log.append(record)
