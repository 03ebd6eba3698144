"""An engine with scripted answers, on a tokenizer of bytes with a chat template, and an endpoint in front of it."""

import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from rltrain.cli.serve import draw_turns
from rltrain.data.tokenizer import TextDecoder
from rltrain.endpoint.app import EndpointServer, EndpointSettings
from rltrain.endpoint.opening import RecordedSession
from rltrain.endpoint.request_images import RequestImages
from rltrain.endpoint.requests import Policy, RequestLimits, SamplingRules
from rltrain.endpoint.session import Session
from rltrain.rollout.engine import Engine, SamplingParams, check_samples, response_limit, served_version
from rltrain.rollout.engine_feed import EngineFeed, EngineMailbox
from rltrain.rollout.sample import Sample, Status

END, OTHER_END = "<|im_end|>", "<|endoftext|>"
CHATML = (
    "{% if tools %}<|im_start|>system\nTools:{% for tool in tools %}\n{{ tool | tojson }}{% endfor %}\n"
    'Call one by <tool_call>{"name": ..., "arguments": ...}</tool_call><|im_end|>\n{% endif %}'
    "{% for message in messages %}<|im_start|>{{ 'user' if message.role == 'tool' else message.role }}\n"
    "{% if message.role == 'tool' %}<tool_response>\n{{ message.content }}\n</tool_response>"
    "{% else %}{{ message.content }}{% endif %}"
    "{% for call in message.tool_calls or [] %}\n<tool_call>\n"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}\n</tool_call>'
    "{% endfor %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CONTEXT_TOKENS = 4096


@cache
def byte_tokenizer(chat_template: str = CHATML) -> PreTrainedTokenizerFast:
    """Returns a tokenizer with one token per byte."""
    vocabulary = {letter: number for number, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|im_start|>", END, OTHER_END])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=END, pad_token=END, chat_template=chat_template
    )


class TalkingEngine:
    """An engine with scripted answers. Implements `Engine`.

    A turn generates `say(text of its context)`, one token per step, up to its limit. It ends with END unless the text
    ends with OTHER_END. `log` has every finished turn: the sample with all ids known to the engine.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerFast,
        say: Callable[[str], str],
        num_slots: int = 256,
        context_tokens: int = CONTEXT_TOKENS,
    ) -> None:
        self.tokenizer, self.say, self.num_slots = tokenizer, say, num_slots
        self.context_tokens = context_tokens
        self.policy_version: int | None = 0
        self.log: list[Sample] = []
        self.submitted: list[Sample] = []
        self.before_step: Callable[[int], None] = lambda number: None
        self.num_steps = self.num_drawn_tokens = 0
        self.forgotten: set[int] = set()
        self.samplings: list[SamplingParams] = []
        self._unfinished: dict[int, Sample] = {}
        self._said: dict[int, tuple[int, ...]] = {}
        self._sampling: SamplingParams | None = None

    @property
    def num_unfinished(self) -> int:
        return len(self._unfinished)

    @property
    def num_free_slots(self) -> int:
        return max(0, self.num_slots - len(self._unfinished))

    @property
    def num_usable(self) -> int:
        return self.num_free_slots

    def submit(self, samples: Sequence[Sample], sampling: SamplingParams) -> None:
        check_samples(
            samples,
            sampling,
            unfinished=self._unfinished,
            running=self._sampling,
            max_context_tokens=self.context_tokens,
        )
        self._sampling = sampling
        for sample in samples:
            if sample.id not in self._said:
                said = self.say(self.tokenizer.decode(sample.context))
                ended = said if said.endswith(OTHER_END) else said + END
                self._said[sample.id] = tuple(self.tokenizer(ended)["input_ids"])
                self.submitted.append(sample)
                self.samplings.append(sampling)
            self._unfinished[sample.id] = sample

    def step(self) -> list[Sample]:
        self.before_step(self.num_steps)
        version = served_version(self.policy_version)
        self.num_steps += 1
        finished = [self._draw(sample, version) for sample in [*self._unfinished.values()][: self.num_slots]]
        return [sample for sample in finished if sample.is_finished]

    def _draw(self, sample: Sample, version: int) -> Sample:
        assert self._sampling is not None
        self.num_drawn_tokens += 1
        said = self._said[sample.id]
        token, self._said[sample.id] = said[0], said[1:]
        logprob = -float(token + 1) / 1000
        drawn = sample.drawn([token], [logprob], [version])
        limit = response_limit(sample, self._sampling, self.context_tokens)
        if not said[1:] or len(drawn.tokens) >= limit:
            status = Status.TRUNCATED if said[1:] else Status.STOPPED
            drawn = sample.drawn([token], [logprob], [version], status)
            del self._unfinished[sample.id], self._said[sample.id]
            self.log.append(drawn)
        else:
            self._unfinished[sample.id] = drawn
        return drawn

    def progress(self, ids: Collection[int]) -> list[Sample]:
        return [sample for sample in self._unfinished.values() if sample.id in ids]

    def withdraw(self, ids: Collection[int]) -> list[Sample]:
        return [self._unfinished.pop(number) for number in [*self._unfinished] if number in ids]

    def suspend(self) -> list[Sample]:
        return self.withdraw([*self._unfinished])

    def forget(self, ids: Collection[int]) -> None:
        self.forgotten |= {*ids}


@dataclass
class Endpoint:
    """A running server with its inner state."""

    server: EndpointServer
    engine: TalkingEngine
    mailbox: EngineMailbox
    ended: list[RecordedSession] = field(default_factory=list)

    @property
    def url(self) -> str:
        return self.server.url

    def session(self, number: str) -> Session:
        found = self.server._sessions.find(number)
        assert found is not None
        return found

    def record(self, number: str, **how: Any) -> RecordedSession:
        """Ends a session and returns its record."""
        self.server.end_session(number, "test", **how)
        return next(session for session in self.ended if session.id == number)


OWNER = "sk-owner"


@contextmanager
def endpoint(
    say: Callable[[str], str],
    *,
    policy: Policy = "request",
    sampling: SamplingParams | None = None,
    num_slots: int = 256,
    context_tokens: int = CONTEXT_TOKENS,
    before_step: Callable[[int], None] = lambda number: None,
    drawn_by: Engine | None = None,
    chat_template: str = CHATML,
    end_tokens: Collection[int] = (),
    tokenizer: PreTrainedTokenizerFast | None = None,
    images: RequestImages | None = None,
    **limits: Any,
) -> Iterator[Endpoint]:
    """Runs an endpoint. OWNER is the token of its owner. `drawn_by` is an engine to use instead of the
    TalkingEngine. `images` lets requests have images."""
    tokenizer = tokenizer or byte_tokenizer(chat_template)
    engine = TalkingEngine(tokenizer, say, num_slots, context_tokens)
    engine.before_step = before_step
    own = sampling or SamplingParams(1.0, 1.0, 0, context_tokens, (tokenizer.eos_token_id,))
    bounds = replace(RequestLimits(context_tokens, len(tokenizer), repeat_within_s=5.0), **limits)
    settings = EndpointSettings(
        SamplingRules(own, policy), bounds, "model", OWNER, answers_passers_by=True, end_tokens=end_tokens
    )
    mailbox, ended = EngineMailbox(bounds.max_turns), []
    server = EndpointServer(mailbox, tokenizer, settings, ended.append, images=images)
    stopping = threading.Event()
    feed = EngineFeed(drawn_by or engine, TextDecoder(tokenizer), mailbox)
    steps = threading.Thread(target=draw_turns, args=(feed, stopping))
    server.start()
    steps.start()
    try:
        yield Endpoint(server, engine, mailbox, ended)
    finally:
        stopping.set()
        mailbox.close("the test is over")
        steps.join(60)
        server.stop()
    assert not steps.is_alive()
