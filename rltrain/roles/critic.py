"""The critic: estimates the reward that is still to come, for PPO's advantages."""

import torch

from rltrain.algorithms.value import value_loss
from rltrain.data.experience import Experience
from rltrain.exchange.exchange import Shipment
from rltrain.roles.role import Job, Metrics
from rltrain.roles.step_batch import StepBatch, summarize
from rltrain.roles.trained import TrainedRole
from rltrain.training.megatron.objective import VALUE
from rltrain.training.megatron.values import compute_values


class Critic(TrainedRole):
    name = "critic"

    def __init__(self, job: Job) -> None:
        config, settings = job.config, job.config.critic
        super().__init__(job, settings, total_updates=config.steps * config.batch.mini_batches, objective=VALUE)
        self.loss_function = value_loss(settings.value_clip)
        self.evaluated: dict[tuple[int, int], Experience] = {}
        self.batch = StepBatch(config)

    def values(self, step: int, chunk: int) -> None:
        """The value before every token. Collective over: this replica."""
        scored = self.shipments.pop(("scored", step, chunk))
        experience = Experience(**scored.columns)
        values = compute_values(self.model.model, experience, max_tokens=self.config.critic.micro_batch_tokens)
        self.evaluated[step, chunk] = experience.with_fields(values=values)
        columns = {"group_ids": experience.group_ids, "lengths": experience.lengths, "values": values}
        self.shipments["values", step, chunk] = Shipment(columns, scored.group_tokens)

    def accumulate_critic(self, step: int, chunk: int) -> None:
        """Gradients of a chunk, while others still decode. Collective over: this replica."""
        self._take_returns(step, chunk)
        self.model.accumulate(self.batch.chunks[chunk], self.loss_function)

    def update_critic(self, step: int, chunk: int) -> Metrics:
        """One optimizer step per mini-batch. Collective over: the critic's ranks."""
        if self.job.shape.accumulates_critic:
            self.batch.take()
            updates = [self.model.step()]
        else:
            for number in range(self.job.shape.num_chunks):
                self._take_returns(step, number)
            mini_batches = self.batch.mini_batches(self.batch.take())
            updates = [self.model.train_batch(mini_batch, self.loss_function) for mini_batch in mini_batches]
        return {f"critic/{name}": value for name, value in summarize(updates).items()}

    def _take_returns(self, step: int, chunk: int) -> None:
        """What the actor made of the values, and the tokens that are trained on."""
        experience = self.evaluated.pop((step, chunk))
        received = self.shipments.pop(("returns", step, chunk)).columns
        assert torch.equal(received["group_ids"], experience.group_ids), "both follow the assignment of groups"
        fields = {name: received[name] for name in ("response_mask", "returns")}
        self.batch.add(chunk, experience.with_fields(**fields))
