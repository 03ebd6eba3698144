"""Roles whose models tell the reward: the judge and the reward model."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch

from rltrain.algorithms.registry import algorithm_of
from rltrain.config import schema
from rltrain.data.chat_template import ChatTemplate, RenderError, ends_of_turns
from rltrain.data.experience import Experience
from rltrain.data.tokenizer import TextDecoder, end_token_ids, load_tokenizer
from rltrain.errors import CheckpointError
from rltrain.models.checkpoint_model import padding_token
from rltrain.rewards.answers import FailureLog, Scorable
from rltrain.rewards.scorer import NoVerdictError, Question, rewarding_models, verdict_parser
from rltrain.roles.role import Job, Metrics, Role
from rltrain.roles.rollout import engine_site, sampling_params
from rltrain.roles.scoring import Scorables
from rltrain.rollout.build import build_engine, serve_checkpoint
from rltrain.rollout.sample import Sample, Status, request_seed
from rltrain.training.backend import training_backend

# What roles have in common that tell the reward something of samples by a model that reads text.


class TellingRole(Role):
    """What was drawn leaves the policy's vocabulary here: it is decoded, and encoded once by the model's own
    tokenizer. `OF_SAMPLES` are the metrics that are means over the samples of a step that the model read."""

    OF_SAMPLES: ClassVar[tuple[str, ...]]

    def __init__(self, job: Job, settings: schema.Judge | schema.RewardModel) -> None:
        super().__init__(job)
        prompts, data, wanting = job.rows.prompts, self.config.data, rewarding_models(self.config, (self.name,))
        self.training = None
        if algorithm_of(self.config).generates:
            self.training = Scorables(wanting, prompts.train, prompts.decoder, data.train, "data.train")
        self.evaluations = [
            Scorables(wanting, dataset, prompts.decoder, plan.file, plan.config_key)
            for plan, dataset in zip(self.config.evaluations, prompts.evaluations, strict=True)
        ]
        (path, self.key), self.architecture = self.config.checkpoint_of(self.name), job.architectures[self.name]
        self.path, vocab_size = Path(path), self.architecture.vocab_size
        self.text = OwnText(self.path, self.key, vocab_size=vocab_size, chat_template=settings.chat_template)
        self.failures = FailureLog(self.name)
        self._begin_step()

    def _begin_step(self) -> None:
        self.num_read, self.sums = 0, dict.fromkeys(self.OF_SAMPLES, 0)

    def count(self, *numbers: int) -> None:
        """Of a sample that the model has read, for OF_SAMPLES."""
        self.num_read += 1
        self.sums = {name: total + number for (name, total), number in zip(self.sums.items(), numbers, strict=True)}

    def tell_of_chunk(self, leaves: str, step: int, chunk: int) -> Metrics:
        """As `tell_reward`, of samples to train on; with the step's last chunk, what is reported of the step."""
        if chunk == 0:
            self._begin_step()
        self.tell_reward("samples", leaves, step, chunk)
        if chunk < self.job.shape.num_chunks - 1 or not self.num_read:
            return {}
        return {f"{self.name}/{name}": total / self.num_read for name, total in self.sums.items()}

    def tell(self, samples: Sequence[Scorable]) -> list[float]:
        """What the model says of each; NaN where it says nothing, of which `failures` tells why."""
        raise NotImplementedError

    def tell_reward(self, of: str, leaves: str, step: int, chunk: int) -> None:
        """Take the samples that the transfer `of` brought, and leave what is said of them for the transfer `leaves`."""
        source = self.training if of == "samples" else self.evaluations[chunk]
        assert source is not None, "only an algorithm that generates has samples to train on"
        samples = self.shipments.pop((of, step, chunk))
        told = torch.tensor(self.tell(source.of(samples.experience, step)), dtype=torch.float32)
        self.shipments[leaves, step, chunk] = samples.with_fields(model_scores=told)


# Conversations as a model reads them that has a tokenizer and chat template of its own.

Message = Mapping[str, Any]


class UnreadableTextError(Exception):
    """Why a text cannot be given to the model."""


class OwnText:
    """Texts that another model drew, each encoded once, as a whole."""

    def __init__(
        self, path: Path, config_key: str, *, vocab_size: int, chat_template: Literal["auto", "never"]
    ) -> None:
        """CheckpointError where the checkpoint's folder has no usable tokenizer."""
        self.tokenizer, self.vocab_size = load_tokenizer(path, config_key), vocab_size
        self.config_key, self.named_ends = config_key, end_token_ids(path, config_key)
        uses_template = chat_template == "auto" and self.tokenizer.chat_template is not None
        self.template = ChatTemplate(self.tokenizer, (), {}) if uses_template else None

    def ids(self, prompt: str, messages: Sequence[Message], completion: Sequence[Message]) -> list[int]:
        """Of a conversation that has ended: what the prompt was as text, its chat messages if it had any, and those
        that followed. Without a template the texts stand one after the other. Raises UnreadableTextError."""
        if self.template is None:
            said = (str(message.get("content") or "") for message in completion)
            return self._usable(self.tokenizer("".join([prompt, *said]))["input_ids"])
        asked = messages or [{"role": "user", "content": prompt}]
        return self._rendered("conversation", [*asked, *completion], generation_prompt=False)

    def up_to_eos(self, ids: Sequence[int]) -> list[int]:
        """Without what stands behind the last end-of-sequence token, which is added where there is none."""
        eos = self.eos
        behind = next((count for count, token in enumerate(reversed(ids)) if token == eos), None)
        return [*ids, eos] if behind is None else [*ids[: len(ids) - behind]]

    @property
    def eos(self) -> int:
        """CheckpointError where the tokenizer names none."""
        token = self.tokenizer.eos_token_id
        if not isinstance(token, int):
            raise CheckpointError(f"{self.config_key}: the tokenizer has no eos_token; set it in tokenizer_config.json")
        return token

    def question_ids(self, question: str) -> list[int]:
        """Of a user's question, up to where the model's answer begins. Raises UnreadableTextError."""
        if self.template is None:
            return self._usable(self.tokenizer(question)["input_ids"])
        return self._rendered("question", [{"role": "user", "content": question}])

    @property
    def end_tokens(self) -> frozenset[int]:
        """The tokens that end an answer."""
        return ends_of_turns(self.tokenizer, self.named_ends, self.template)

    def _rendered(self, what: str, messages: Sequence[Message], *, generation_prompt: bool = True) -> list[int]:
        assert self.template is not None, "texts stand one after the other without one"
        try:
            text = self.template.render(messages, generation_prompt=generation_prompt)
        except RenderError as error:
            raise UnreadableTextError(f"its chat template refuses the {what}: {error}") from error
        return self._usable(self.template.encode(text))

    def _usable(self, ids: Sequence[int]) -> list[int]:
        if not ids:
            raise UnreadableTextError("the text has no token")
        if max(ids) >= self.vocab_size:
            raise UnreadableTextError(
                f"its tokenizer gives token {max(ids)}, and the model's vocabulary has {self.vocab_size}"
            )
        return list(ids)


# The judge: a model that is asked what every response is worth, and answers in words.


class JudgeRole(TellingRole):
    """One engine per data-parallel replica, with weights of its own."""

    name = "judge"
    OF_SAMPLES = ("question_tokens_mean", "answer_tokens_mean", "cut_ratio")

    def __init__(self, job: Job) -> None:
        super().__init__(job, job.config.judge)
        self.settings = self.config.judge
        self.question, self.verdict = Question(self.settings.prompt), verdict_parser(self.settings)
        self.decoder = TextDecoder(self.text.tokenizer)
        ranks = self.grid.replica(self.dp)
        modes = {"draws_during_syncs": False, "updates_together": True, "weights_change": False}
        site = engine_site(self, ranks, self.architecture, self.decoder, **modes)
        hosted = build_engine(site, lambda: hosted.engine.release_cache())
        self.engine, self.parts = hosted.engine, hosted.parts
        serve_checkpoint(self.engine, site, version=0)
        sampling = self.settings.sampling
        self.sampling = sampling_params(sampling, sorted({*self.text.end_tokens, *sampling.stop_token_ids}))

    def verdicts(self, step: int, chunk: int) -> Metrics:
        """What each response is worth. Collective over: this engine's ranks."""
        return self.tell_of_chunk("verdicts", step, chunk)

    def evaluation_verdicts(self, step: int, chunk: int) -> None:
        """What each answer to a held-out prompt is worth. Collective over: this engine's ranks."""
        self.tell_reward("evaluation_samples", "evaluation_verdicts", step, chunk)

    def tell(self, samples: Sequence[Scorable]) -> list[float]:
        """Collective over: this engine's ranks."""
        questions = [self._asked(number, sample) for number, sample in enumerate(samples)]
        answers = self._answers([question for question in questions if question is not None])
        return [self._verdict(answers.get(number), sample) for number, sample in enumerate(samples)]

    def _asked(self, number: int, sample: Scorable) -> Sample | None:
        """None where the question cannot be put to the model."""
        try:
            prompt = tuple(self.text.question_ids(self.question.of(sample)))
        except UnreadableTextError as error:
            self.failures.add(sample, str(error))
            return None
        limit = self.settings.max_context_tokens
        if len(prompt) >= limit:
            self.failures.add(
                sample, f"the question has {len(prompt)} tokens; expected fewer than judge.max_context_tokens {limit}"
            )
            return None
        return Sample(number, prompt, request_seed(self.config.seed, sample.step, 0, sample.sample_id))

    def _answers(self, questions: Sequence[Sample]) -> dict[int, Sample]:
        """By the questions' numbers. Collective over: this engine's ranks."""
        answers: dict[int, Sample] = {}
        self.engine.submit(questions, self.sampling)
        while self.engine.num_unfinished:
            answers |= {answer.id: answer for answer in self.engine.step()}
            self.job.heartbeat.advance()
        lengths = [len(answer.context) for answer in answers.values()]
        ranks = len(self.grid.replica(self.dp))
        self.job.operations.add(self.architecture, lengths, ranks, backward=False)
        return answers

    def _verdict(self, answer: Sample | None, sample: Scorable) -> float:
        if answer is None:
            return math.nan
        self.count(len(answer.prompt), len(answer.tokens), answer.status == Status.TRUNCATED)
        text = self.decoder.decode(answer.tokens)
        try:
            return self.verdict(text)
        except NoVerdictError as error:
            self.failures.add(sample, f"{error}; the answer was {text!r:.200}")
            return math.nan

    def close(self) -> None:
        """End what the engine has outside of this process."""
        self.engine.close()


# The reward model: a classifier's score of every response, for the reward.


class RewardModelRole(TellingRole):
    """A conversation is written as the reward model's own chat template has it; its score is that of the last token."""

    name = "reward_model"
    OF_SAMPLES = ("text_tokens_mean", "cut_ratio")

    def __init__(self, job: Job) -> None:
        super().__init__(job, job.config.reward_model)
        self.settings = self.config.reward_model
        self.model = training_backend(job.config, self.name).frozen_model(job.model_site(self.name))
        self.parts = self.model.parts
        self.padding, longest = padding_token(self.path, self.key), self.architecture.max_positions
        self.max_tokens = min(self.settings.max_tokens or longest, longest)

    def model_scores(self, step: int, chunk: int) -> Metrics:
        """A score for each response. Collective over: this replica."""
        return self.tell_of_chunk("model_scores", step, chunk)

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
            self.failures.add(sample, str(error))
            return []
        if self.settings.ends_with_eos:
            ids = self.text.up_to_eos(ids)
        is_cut, ids = len(ids) > self.max_tokens, ids[-self.max_tokens :]
        while len(ids) > 1 and ids[-1] == self.padding:
            ids.pop()
        self.count(len(ids), is_cut)
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
