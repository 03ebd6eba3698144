"""The reward model: a classifier's score of every response, for the reward."""

import math
from collections.abc import Sequence
from pathlib import Path

import torch

from rltrain.data.experience import Experience
from rltrain.data.own_text import OwnText, UnreadableTextError
from rltrain.models.checkpoint_model import padding_token
from rltrain.rewards.answers import Scorable
from rltrain.roles.role import Job, Metrics
from rltrain.roles.telling_role import TellingRole
from rltrain.training.build import training_backend


class RewardModel(TellingRole):
    """A conversation is written as the reward model's own chat template has it; its score is that of the last token."""

    name = "reward_model"

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        self.settings = self.config.reward_model
        self.model = training_backend(job.config, self.name).frozen_model(job.model_site(self.name))
        self.parts = self.model.parts
        (path, key), architecture = self.config.checkpoint_of(self.name), job.architectures[self.name]
        self.text = OwnText(
            Path(path), key, vocab_size=architecture.vocab_size, chat_template=self.settings.chat_template
        )
        self.padding = padding_token(Path(path), key)
        self.max_tokens = min(self.settings.max_tokens or architecture.max_positions, architecture.max_positions)
        self.num_samples = self.num_tokens = self.num_cut = 0

    def model_scores(self, step: int, chunk: int) -> Metrics:
        """A score for each response. Collective over: this replica."""
        if chunk == 0:
            self.num_samples = self.num_tokens = self.num_cut = 0
        self.tell_reward("samples", "model_scores", step, chunk)
        if chunk < self.job.shape.num_chunks - 1 or not self.num_samples:
            return {}
        return {
            "reward_model/text_tokens_mean": self.num_tokens / self.num_samples,
            "reward_model/cut_ratio": self.num_cut / self.num_samples,
        }

    def evaluation_model_scores(self, step: int, chunk: int) -> None:
        """A score for each answer to a held-out prompt. Collective over: this replica."""
        self.tell_reward("evaluation_samples", "evaluation_model_scores", step, chunk)

    def tell(self, samples: Sequence[Scorable]) -> list[float]:
        """Collective over: this replica."""
        texts = [self._read(sample) for sample in samples]
        scores = iter(self._scores_of([ids for ids in texts if ids]))
        return [next(scores) if ids else math.nan for ids in texts]

    def _read(self, sample: Scorable) -> list[int]:
        """The sample's ids that are read; none where it cannot be."""
        try:
            ids = self.text.ids(sample.prompt, sample.messages, sample.completion())
        except UnreadableTextError as error:
            self.log_failure(sample, str(error))
            return []
        if self.settings.ends_with_eos:
            ids = self.text.up_to_eos(ids)
        self.num_samples += 1
        self.num_cut += len(ids) > self.max_tokens
        ids = ids[-self.max_tokens :]
        while len(ids) > 1 and ids[-1] == self.padding:
            ids.pop()
        self.num_tokens += len(ids)
        return ids

    def _scores_of(self, texts: list[list[int]]) -> list[float]:
        """The score at the last token of each."""
        lengths = torch.tensor([len(ids) for ids in texts], dtype=torch.int64)
        experience = Experience(
            group_ids=torch.arange(len(texts)),
            lengths=lengths,
            tokens=torch.tensor([token for ids in texts for token in ids], dtype=torch.int64),
        )
        scores = self.model.evaluate(experience, max_tokens=self.settings.micro_batch_tokens)
        return [float(score) for score in scores[lengths.cumsum(0) - 1]]
