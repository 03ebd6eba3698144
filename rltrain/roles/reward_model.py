"""The reward model: a classifier's score of every response, for the reward."""

import logging
from pathlib import Path

import torch

from rltrain.data.experience import Experience
from rltrain.data.own_text import OwnText, UnreadableTextError
from rltrain.exchange.exchange import Shipment
from rltrain.models.classifier import padding_token
from rltrain.rewards.rewarding_model import rewarding_models
from rltrain.rewards.scorable import Scorable
from rltrain.roles.role import Job, Metrics, Role
from rltrain.roles.scorables import Scorables
from rltrain.training.build import training_backend

logger = logging.getLogger(__name__)

MAX_LOGGED_FAILURES = 10


class RewardModel(Role):
    """What was drawn leaves the policy's vocabulary here: it is decoded, written anew as the reward model's own chat
    template has it, and encoded once, by its own tokenizer."""

    name = "reward_model"

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        self.settings = self.config.reward_model
        self.model = training_backend().frozen_model(job.model_site(self.name))
        self.parts = self.model.parts
        (path, key), architecture = self.config.checkpoint_of(self.name), job.architectures[self.name]
        self.text = OwnText(
            Path(path), key, vocab_size=architecture.vocab_size, chat_template=self.settings.chat_template
        )
        self.padding = padding_token(Path(path), key)
        self.max_tokens = min(self.settings.max_tokens or architecture.max_positions, architecture.max_positions)
        prompts, data, wanting = job.prompts, self.config.data, rewarding_models(self.config, (self.name,))
        self.training = Scorables(wanting, prompts.train, prompts.decoder, data.train, "data.train")
        self.evaluation = None
        if data.eval is not None and prompts.evaluation is not None:
            self.evaluation = Scorables(wanting, prompts.evaluation, prompts.decoder, data.eval, "data.eval")
        self.num_samples = self.num_tokens = self.num_cut = self.num_failures = 0

    def model_scores(self, step: int, chunk: int) -> Metrics:
        """A score for each response. Collective over: this replica."""
        if chunk == 0:
            self.num_samples = self.num_tokens = self.num_cut = 0
        samples = self.shipments.pop(("samples", step, chunk))
        self.shipments["model_scores", step, chunk] = self._scored(samples, self.training, step)
        if chunk < self.job.shape.num_chunks - 1 or not self.num_samples:
            return {}
        return {
            "reward_model/text_tokens_mean": self.num_tokens / self.num_samples,
            "reward_model/cut_ratio": self.num_cut / self.num_samples,
        }

    def evaluation_model_scores(self, step: int, chunk: int) -> None:
        """A score for each answer to a held-out prompt. Collective over: this replica."""
        assert self.evaluation is not None, "the order evaluates only where data.eval is set"
        samples = self.shipments.pop(("evaluation_samples", step, chunk))
        self.shipments["evaluation_model_scores", step, chunk] = self._scored(samples, self.evaluation, step)

    def _scored(self, samples: Shipment, source: Scorables, step: int) -> Shipment:
        """With NaN for what cannot be read."""
        texts = [self._read(sample) for sample in source.of(samples.experience, step)]
        readable = [index for index, ids in enumerate(texts) if ids]
        scores = torch.full((len(texts),), torch.nan)
        scores[readable] = self._scores_of([texts[index] for index in readable])
        return samples.with_fields(model_scores=scores)

    def _read(self, sample: Scorable) -> list[int]:
        """The sample's ids that are read; none where it cannot be."""
        try:
            ids = self.text.ids(sample.prompt, sample.messages, sample.completion())
        except UnreadableTextError as error:
            self._log_failure(sample, str(error))
            return []
        self.num_samples += 1
        self.num_cut += len(ids) > self.max_tokens
        ids = ids[-self.max_tokens :]
        while len(ids) > 1 and ids[-1] == self.padding:
            ids.pop()
        self.num_tokens += len(ids)
        return ids

    def _scores_of(self, texts: list[list[int]]) -> torch.Tensor:
        """[texts] the score at the last token of each."""
        lengths = torch.tensor([len(ids) for ids in texts], dtype=torch.int64)
        experience = Experience(
            group_ids=torch.arange(len(texts)),
            lengths=lengths,
            tokens=torch.tensor([token for ids in texts for token in ids], dtype=torch.int64),
        )
        scores = self.model.evaluate(experience, max_tokens=self.settings.micro_batch_tokens)
        return scores[lengths.cumsum(0) - 1]

    def _log_failure(self, sample: Scorable, reason: str) -> None:
        self.num_failures += 1
        if self.num_failures <= MAX_LOGGED_FAILURES:
            last = " (further failures are only counted)" if self.num_failures == MAX_LOGGED_FAILURES else ""
            logger.warning("reward model on response %.80r: %s%s", sample.response, reason, last)
