"""The actor: the policy being trained."""

import time
from pathlib import Path

import torch
import torch.distributed as dist

from rltrain.algorithms.advantages import with_advantages
from rltrain.algorithms.grpo import grpo_loss
from rltrain.algorithms.kl import apply_kl_to_rewards
from rltrain.algorithms.losses import LossFunction
from rltrain.algorithms.sft import sft_loss
from rltrain.checkpoint.hf import load_parameters, save_checkpoint
from rltrain.data.assignment import mini_batch_of
from rltrain.data.demonstrations import Demonstrations
from rltrain.data.experience import Experience
from rltrain.roles.role import Job, Metrics, Role
from rltrain.training.forward import compute_logprobs
from rltrain.training.model import build_model, local_parameters
from rltrain.training.trainable import TrainableModel

# Measured under the weights that drew the samples, which only the first mini-batch still has.
ON_POLICY_METRICS = ("train_rollout_logprob_abs_diff", "train_rollout_logprob_abs_diff_max")


class Actor(Role):
    name = "actor"

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        actor, world = self.config.actor, job.world
        self.layout = job.megatron_layout(self.name)
        model = build_model(
            job.architecture,
            self.grid,
            job.groups,
            model=self.config.model,
            parallel=actor.parallel,
            device=world.device,
        )
        self.parameters = local_parameters(model)
        load_parameters(Path(self.config.model.path), self.layout, world.rank, self.parameters)
        total_updates = self.config.steps * self.config.batch.mini_batches
        self.model = TrainableModel(model, actor, total_updates=total_updates)
        self.loss_function = self._loss_function()
        self.temperature = 1.0 if self.config.algorithm == "sft" else self.config.rollout.sampling.temperature
        self.demonstrations = Demonstrations(self.config) if self.config.algorithm == "sft" else None
        self.experience: Experience | None = None

    def _loss_function(self) -> LossFunction:
        if self.config.algorithm == "sft":
            return sft_loss()
        return grpo_loss(self.config.loss, self.config.rollout.sampling.max_response_tokens)

    def demonstrate(self, step: int) -> None:
        """Take this replica's share of the step's demonstrations."""
        assert self.demonstrations is not None, "only algorithm: sft has this task"
        self.experience = self.demonstrations.for_step(step, part=self.dp, num_parts=self.grid.dp)

    def actor_logprobs(self, step: int) -> None:
        """Log-probs of the drawn tokens before the first update. Collective over: this replica."""
        columns = self.shipments["scored"].columns
        columns["actor_logprobs"] = self.logprobs(Experience(**columns))

    def advantages(self, step: int) -> None:
        """Put together what the other roles sent, and turn rewards into advantages."""
        columns = dict(self.shipments.pop("scored").columns)
        if "reference_logprobs" in self.shipments:
            reference = self.shipments.pop("reference_logprobs").columns
            assert torch.equal(reference["group_ids"], columns["group_ids"]), "both follow the assignment of groups"
            columns["reference_logprobs"] = reference["reference_logprobs"]
        experience = Experience(**columns)
        if self.config.loss.kl.coef and self.config.loss.kl.where == "reward":
            experience = apply_kl_to_rewards(experience, self.config.loss.kl)
        self.experience = with_advantages(experience, normalize_std=self.config.advantages.normalize_std)

    def update(self, step: int) -> Metrics:
        """One optimizer step per mini-batch. Collective over: the actor's ranks."""
        assert self.experience is not None
        experience, self.experience = self.experience, None
        batch = self.config.batch
        mini_batch = mini_batch_of(
            experience.group_ids, batch.prompts_per_step, self.config.samples_per_group, batch.mini_batches
        )
        start = time.perf_counter()
        updates = [
            self.model.train_batch(
                experience.select(torch.nonzero(mini_batch == i).flatten()),
                self.loss_function,
                temperature=self.temperature,
            )
            for i in range(batch.mini_batches)
        ]
        metrics = {f"train/{name}": value for name, value in summarize(updates).items()}
        metrics["perf/train_tokens_per_s"] = self._total_tokens(experience) / (time.perf_counter() - start)
        return metrics

    def _total_tokens(self, experience: Experience) -> int:
        """Tokens of all replicas. Collective over: the actor's ranks."""
        tokens = torch.tensor(experience.num_tokens)
        dist.all_reduce(tokens, group=self.job.groups.cpu[self.grid.ranks])
        return int(tokens) * self.grid.dp // len(self.grid.ranks)

    def save_hf(self, step: int) -> None:
        """Write <output_dir>/hf. Collective over: the actor's ranks."""
        save_checkpoint(
            Path(self.config.output_dir, "hf"),
            self.parameters,
            self.layout,
            self.job.architecture,
            group=self.job.groups[self.grid.ranks],
            cpu_group=self.job.groups.cpu[self.grid.ranks],
            rank=self.job.world.rank,
            like=Path(self.config.model.path),
        )

    def logprobs(self, experience: Experience) -> torch.Tensor:
        """[tokens] fp32 of the actor's tempered distribution. Collective over: this replica."""
        return compute_logprobs(
            self.model.model,
            experience,
            temperature=self.temperature,
            max_tokens=self.config.actor.micro_batch_tokens,
        )


def summarize(updates: list[Metrics]) -> Metrics:
    """The step's metrics from its mini-batches': maxima for names ending in _max, means for the others."""
    summary = {}
    for name in updates[0]:
        values = [update[name] for update in updates]
        summary[name] = max(values) if name.endswith("_max") else sum(values) / len(values)
        if name in ON_POLICY_METRICS:
            summary[name] = values[0]
    return summary
