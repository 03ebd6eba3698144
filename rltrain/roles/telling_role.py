"""What roles have in common that tell the reward something of samples by a model that reads text."""

import logging
from collections.abc import Sequence

import torch

from rltrain.algorithms.registry import algorithm_of
from rltrain.rewards.answers import Scorable
from rltrain.rewards.scorer import rewarding_models
from rltrain.roles.role import Job, Role
from rltrain.roles.scorables import Scorables

logger = logging.getLogger(__name__)

MAX_LOGGED_FAILURES = 10


class TellingRole(Role):
    """What was drawn leaves the policy's vocabulary here: it is decoded, and encoded once by the model's own
    tokenizer."""

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        prompts, data, wanting = job.prompts, self.config.data, rewarding_models(self.config, (self.name,))
        self.training = None
        if algorithm_of(self.config).generates:
            self.training = Scorables(wanting, prompts.train, prompts.decoder, data.train, "data.train")
        self.evaluations = [
            Scorables(wanting, dataset, prompts.decoder, plan.file, plan.config_key)
            for plan, dataset in zip(self.config.evaluations, prompts.evaluations, strict=True)
        ]
        self._num_failures = 0

    def tell(self, samples: Sequence[Scorable]) -> list[float]:
        """What the model says of each; NaN where it says nothing, of which `log_failure` has told why."""
        raise NotImplementedError

    def tell_reward(self, of: str, leaves: str, step: int, chunk: int) -> None:
        """Take the samples that the transfer `of` brought, and leave what is said of them for the transfer `leaves`."""
        source = self.training if of == "samples" else self.evaluations[chunk]
        assert source is not None, "only an algorithm that generates has samples to train on"
        samples = self.shipments.pop((of, step, chunk))
        told = torch.tensor(self.tell(source.of(samples.experience, step)), dtype=torch.float32)
        self.shipments[leaves, step, chunk] = samples.with_fields(model_scores=told)

    def log_failure(self, sample: Scorable, reason: str) -> None:
        self._num_failures += 1
        if self._num_failures <= MAX_LOGGED_FAILURES:
            last = " (further failures are only counted)" if self._num_failures == MAX_LOGGED_FAILURES else ""
            logger.warning("%s on response %.80r: %s%s", self.name, sample.response, reason, last)
