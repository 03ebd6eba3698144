"""The judge: a model that is asked what every response is worth, and answers in words."""

import math
from collections.abc import Sequence
from pathlib import Path

from rltrain.data.own_text import OwnText, UnreadableTextError
from rltrain.data.tokenizer import TextDecoder
from rltrain.rewards.answers import Scorable
from rltrain.rewards.scorer import NoVerdictError, Question, verdict_parser
from rltrain.roles.role import Job, Metrics
from rltrain.roles.telling_role import TellingRole
from rltrain.rollout.build import build_engine, serve_checkpoint
from rltrain.rollout.engine import EngineSite, SamplingParams
from rltrain.rollout.sample import Sample, Status, request_seed
from rltrain.schedule.memory_plan import leaving_roles


class Judge(TellingRole):
    """One engine per data-parallel replica, with weights of its own."""

    name = "judge"

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        self.settings = self.config.judge
        self.question, self.verdict = Question(self.settings.prompt), verdict_parser(self.settings)
        (path, key), architecture = self.config.checkpoint_of(self.name), job.architectures[self.name]
        self.text = OwnText(
            Path(path), key, vocab_size=architecture.vocab_size, chat_template=self.settings.chat_template
        )
        self.decoder = TextDecoder(self.text.tokenizer)
        site = self._site()
        hosted = build_engine(site, lambda: hosted.engine.release_cache())
        self.engine, self.parts = hosted.engine, hosted.parts
        serve_checkpoint(self.engine, site, version=0)
        self.sampling = self._sampling()
        self.num_answers = self.num_question_tokens = self.num_answer_tokens = self.num_cut = 0

    def _site(self) -> EngineSite:
        job, offload = self.job, self.job.offloads
        return EngineSite(
            config=self.config,
            world=job.world,
            ranks=self.grid.replica(self.dp),
            grid=self.grid,
            groups=job.groups,
            architecture=job.architectures[self.name],
            tokenizer=self.decoder,
            job_store=job.job_store,
            leaves=self.name in leaving_roles(offload),
            draws_during_syncs=False,
            others=tuple(role for role in offload if role != self.name),
            role=self.name,
            updates_together=True,
            weights_change=False,
        )

    def _sampling(self) -> SamplingParams:
        sampling = self.settings.sampling
        return SamplingParams(
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            max_response_tokens=sampling.max_response_tokens,
            stop_token_ids=tuple(sorted({*self.text.end_tokens, *sampling.stop_token_ids})),
            stop=sampling.stop,
        )

    def verdicts(self, step: int, chunk: int) -> Metrics:
        """What each response is worth. Collective over: this engine's ranks."""
        if chunk == 0:
            self.num_answers = self.num_question_tokens = self.num_answer_tokens = self.num_cut = 0
        self.tell_reward("samples", "verdicts", step, chunk)
        if chunk < self.job.shape.num_chunks - 1 or not self.num_answers:
            return {}
        return {
            "judge/question_tokens_mean": self.num_question_tokens / self.num_answers,
            "judge/answer_tokens_mean": self.num_answer_tokens / self.num_answers,
            "judge/cut_ratio": self.num_cut / self.num_answers,
        }

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
            self.log_failure(sample, str(error))
            return None
        limit = self.settings.max_context_tokens
        if len(prompt) >= limit:
            self.log_failure(
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
        self.job.operations.add(self.job.architectures[self.name], lengths, ranks, backward=False)
        return answers

    def _verdict(self, answer: Sample | None, sample: Scorable) -> float:
        if answer is None:
            return math.nan
        self.num_answers += 1
        self.num_question_tokens += len(answer.prompt)
        self.num_answer_tokens += len(answer.tokens)
        self.num_cut += answer.status == Status.TRUNCATED
        text = self.decoder.decode(answer.tokens)
        try:
            return self.verdict(text)
        except NoVerdictError as error:
            self.log_failure(sample, f"{error}; the answer was {text!r:.200}")
            return math.nan

    def close(self) -> None:
        """End what the engine has outside of this process."""
        self.engine.close()
