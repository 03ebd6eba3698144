"""The inference role: the actor's log-probs before an update, on ranks of their own, while the actor trains."""

from rltrain.algorithms.registry import algorithm_of
from rltrain.roles.role import Job, Role
from rltrain.training.build import training_backend


class Inference(Role):
    """Its model has the actor's weights, in a layout of its own, as of the last weight sync before the task."""

    name = "inference"

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        self.model = training_backend(job.config, self.name).frozen_model(job.model_site(self.name))
        self.parts = self.model.parts
        self.temperature = algorithm_of(job.config).temperature()

    def inference_logprobs(self, step: int, chunk: int) -> None:
        """Log-probs of the drawn tokens under the weights at hand. Collective over: this replica."""
        scored = self.shipments.pop(("scored", step, chunk))
        logprobs = self.model.evaluate(
            scored.experience,
            max_tokens=self.config.inference.micro_batch_tokens,
            temperature=self.temperature,
        )
        self.shipments["inference_logprobs", step, chunk] = scored.with_fields(actor_logprobs=logprobs)
