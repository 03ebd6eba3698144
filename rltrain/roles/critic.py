"""The critic: estimates the reward still to come, for PPO's advantages."""

from rltrain.algorithms import losses
from rltrain.data.experience import Experience
from rltrain.roles.role import Job, Metrics
from rltrain.roles.trained import StepBatch, TrainedRole, summarize


class CriticRole(TrainedRole):
    name = "critic"

    def __init__(self, job: Job) -> None:
        config, settings = job.config, job.config.critic
        super().__init__(job, settings, total_updates=config.steps * job.shape.updates_per_step)
        self.loss_function = losses.of_states(losses.value_loss(settings.value_clip))
        self.evaluated: dict[tuple[int, int], Experience] = {}
        self.batch = StepBatch(config)

    def values(self, step: int, chunk: int) -> None:
        """Computes the value before every token. Collective over: this replica."""
        scored = self.shipments.pop(("scored", step, chunk))
        scores = self.model.evaluate(scored.experience, max_tokens=self.config.critic.micro_batch_limit)
        evaluated = scored.with_fields(values=losses.before_tokens(scores, scored.experience.lengths))
        self.evaluated[step, chunk] = evaluated.experience
        self.shipments["values", step, chunk] = evaluated

    def accumulate_critic(self, step: int, chunk: int) -> None:
        """Accumulates the gradients of a chunk while engines still decode later ones. Collective over: this replica."""
        self._take_returns(step, chunk)
        self.model.accumulate(self.batch.chunks[chunk], self.loss_function)

    def update_critic(self, step: int, chunk: int) -> Metrics:
        """Makes one optimizer step per mini-batch and pass. If gradients were accumulated by chunk, makes the step's
        only one.

        Collective over: the critic's ranks.
        """
        if self.job.shape.accumulates_critic:
            self.batch.take()
            updates = [self.model.step()]
        else:
            for number in range(self.job.shape.num_chunks):
                self._take_returns(step, number)
            mini_batches = self.batch.mini_batches(self.batch.take())
            updates = self.model.train_batches(mini_batches, self.loss_function)
        self.warn_of_skipped(step, updates)
        self.replicas.check(step, self.model)
        metrics = summarize([losses.summarize(update) for update in updates])
        return {f"critic/{name}": number for name, number in metrics.items()}

    def _take_returns(self, step: int, chunk: int) -> None:
        """Adds a chunk to the batch, with the actor's returns and its mask of trained tokens."""
        experience = self.evaluated.pop((step, chunk))
        received = self.shipments.pop(("returns", step, chunk)).experience
        self.batch.add(chunk, experience.with_fields_of(received))
