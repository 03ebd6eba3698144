"""The reward: scores responses against their prompts' labels."""

import torch
import torch.distributed as dist

from rltrain.algorithms.losses import response_lengths
from rltrain.cluster.exchange import Shipment
from rltrain.data.experience import Experience
from rltrain.data.prompts import PromptDataset
from rltrain.rewards.registry import load_reward
from rltrain.rewards.scorer import Sample, Scorer, Scores
from rltrain.roles.role import Job, Metrics, Role


class Reward(Role):
    name = "reward"
    uses_device = False

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        reward = self.config.reward
        self.scorer = Scorer(
            load_reward(reward),
            timeout_s=reward.timeout_s,
            num_workers=reward.num_workers,
            budget_s=self.config.cluster.timeout_s / 2,
        )
        self.evaluation_score = float("nan")

    def score(self, step: int) -> Metrics:
        """A reward for each response. Collective over: the reward's ranks."""
        experience, metrics = self._score("samples", self.job.prompts.train)
        self.shipments["scored"] = Shipment(experience.columns(), self.shipments.pop("samples").group_tokens)
        return {f"rollout/{name}": value for name, value in metrics.items()}

    def score_evaluation(self, step: int) -> Metrics:
        """The held-out score, known to all of the role. Collective over: the reward's ranks."""
        evaluation = self.job.prompts.evaluation
        assert evaluation is not None, "the order evaluates only where data.eval is set"
        _, metrics = self._score("evaluation_samples", evaluation)
        del self.shipments["evaluation_samples"]
        self.evaluation_score = metrics["reward_mean"]
        return {"eval/score": self.evaluation_score, "eval/response_length_mean": metrics["response_length_mean"]}

    def close(self) -> None:
        """End the reward function's processes."""
        self.scorer.close()

    def _score(self, transfer: str, prompts: PromptDataset) -> tuple[Experience, Metrics]:
        experience = Experience(**self.shipments[transfer].columns)
        samples = []
        for prompt_id, tokens, mask in zip(
            experience.prompt_ids.tolist(),
            experience.tokens.split(experience.lengths.tolist()),
            experience.response_mask.split(experience.lengths.tolist()),
            strict=True,
        ):
            response = self.job.prompts.decoder.decode(tokens[mask].tolist())
            samples.append(Sample(prompts.prompt_text(prompt_id), response, prompts[prompt_id].label))
        scores = self.scorer.score(samples)
        experience = experience.with_fields(rewards=torch.tensor(scores.rewards, dtype=torch.float32))
        return experience, self._metrics(experience, scores)

    def _metrics(self, experience: Experience, scores: Scores) -> Metrics:
        """Means over all samples of the step. Collective over: the reward's ranks."""
        assert experience.rewards is not None
        rewards = experience.rewards.double()
        lengths = response_lengths(experience).double()
        sums = torch.tensor(
            [
                len(rewards),
                rewards.sum(),
                rewards.square().sum(),
                lengths.sum(),
                experience.truncated.sum(),
                scores.num_errors,
                scores.num_timeouts,
            ],
            dtype=torch.float64,
        )
        longest = lengths.max() if len(lengths) else torch.zeros((), dtype=torch.float64)
        group = self.job.groups.cpu[self.grid.ranks]
        dist.all_reduce(sums, group=group)
        dist.all_reduce(longest, op=dist.ReduceOp.MAX, group=group)
        count, total, squares, length_total, truncated, errors, timeouts = sums.tolist()
        mean = total / count
        return {
            "reward_mean": mean,
            "reward_std": max(squares / count - mean * mean, 0.0) ** 0.5,
            "response_length_mean": length_total / count,
            "response_length_max": float(longest),
            "truncated_ratio": truncated / count,
            "reward_errors": errors,
            "reward_timeouts": timeouts,
        }
