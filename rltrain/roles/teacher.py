"""The teacher: a frozen policy that the actor learns to be like on what it draws; or one for each kind of row."""

import torch
from torch import Tensor

from rltrain.algorithms.registry import algorithm_of
from rltrain.data.columns import teachers_of_rows
from rltrain.data.experience import Experience
from rltrain.offload.memory_parts import MemoryPart
from rltrain.roles.role import Job, Role
from rltrain.training.backend import Model, log_probs
from rltrain.training.build import training_backend


class Teacher(Role):
    """Several have one architecture and layout; a row's column says whose it is."""

    name = "teacher"

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        self.settings = job.config.teacher
        self.temperature = algorithm_of(job.config).temperature()
        checkpoints = self.settings.checkpoints
        sites = [job.model_site(self.name, checkpoint) for checkpoint in checkpoints.values()]
        self.models: list[Model] = [training_backend(job.config, self.name).frozen_model(site) for site in sites]
        self.parts = {"weights": MemoryPart(self._weights)}
        self.teacher_of_row: Tensor | None = None
        """[rows of data.train] the number of each one's teacher; None where all have the same."""
        if len(checkpoints) > 1:
            train, column = job.config.data.train, self.settings.column
            assigned = teachers_of_rows(job.prompts.train, train, column, [*checkpoints])
            self.teacher_of_row = torch.tensor(assigned, dtype=torch.int16)
        vocabulary = job.architectures[self.name].vocab_size
        self.count = vocabulary if self.settings.top_k == "full" else self.settings.top_k

    def teacher_logprobs(self, step: int, chunk: int) -> None:
        """What the samples' teachers think of the drawn tokens, and where it is wanted of the likeliest ones.

        Collective over: this replica.
        """
        scored = self.shipments.pop(("scored", step, chunk))
        experience = scored.experience
        logprobs = torch.zeros(experience.num_tokens)
        ids = torch.zeros(experience.num_tokens, self.count, dtype=torch.int64)
        top = torch.zeros(experience.num_tokens, self.count)
        for number, model in enumerate(self.models):
            mine = self._samples_of(number, experience)
            at = torch.nonzero(torch.repeat_interleave(mine, experience.lengths)).flatten()
            found = log_probs(
                model,
                experience.select(torch.nonzero(mine).flatten()),
                count=self.count,
                max_tokens=self.settings.micro_batch_tokens,
                temperature=self.temperature,
            )
            for result, values in zip((logprobs, ids, top), found, strict=True):
                result[at] = values
        self.shipments["teacher_logprobs", step, chunk] = scored.with_fields(
            teacher_logprobs=logprobs, teacher_top_ids=ids, teacher_top_logprobs=top
        )

    def _samples_of(self, number: int, experience: Experience) -> Tensor:
        """[samples] whether it is their teacher."""
        if self.teacher_of_row is None:
            return torch.ones(experience.num_samples, dtype=torch.bool)
        return self.teacher_of_row[experience.prompt_ids] == number

    def _weights(self) -> list[Tensor]:
        return [parameter for model in self.models for parameter in model.parameters.values()]
