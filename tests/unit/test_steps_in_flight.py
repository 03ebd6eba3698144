"""Tests of an engine that launches a step before it reads the results of the step before."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from rltrain.errors import DivergenceError
from rltrain.rollout.embedded import EmbeddedEngine, block_cache, decoder, engine, generation, kv_cache
from rltrain.rollout.embedded.decoder import Decoder, HostCopy
from rltrain.rollout.embedded.model import EngineModel
from rltrain.rollout.engine import SamplingParams
from rltrain.rollout.sample import Sample, Status
from tests.support.cuda_graphs import FROM_HOST, READS_BACK, Recorder
from tests.support.rollout_models import VOCAB_SIZE, LetterTokenizer, load_engine, ragged_requests

pytestmark = pytest.mark.usefixtures("small_blocks")

SAMPLED = SamplingParams(1.0, 1.0, 0, 24, (3, 4, 5))
CONTEXT = 60
"""Tokens of the longest sample in these tests."""
NUM_SCENARIOS = 15
ODD = 49
"""A token that makes everything after it NaN in the stand-in model."""


class LateCopy(HostCopy):
    """A copy under CUDA's rules: it has no data before the host has waited for it, and is overwritten by the next."""

    is_read = True
    copies: ClassVar[list["LateCopy"]] = []
    """The copies in the order of their steps."""

    def send(self) -> None:
        assert self.is_read, "a copy is overwritten before it is read"
        super().send()
        self.copies.append(self)
        self.sent, self.is_read = self.on_host.clone(), False
        self.on_host.fill_(0xA5)

    def wait(self) -> None:
        self.on_host.copy_(self.sent)
        self.is_read = True


@pytest.fixture(autouse=True)
def late_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoder, "HostCopy", LateCopy)


# A stand-in for a model whose results depend on the tokens before and on nothing else, bit for bit. A real one rounds
# differently in other company.

TABLE = torch.randn(211, VOCAB_SIZE, generator=torch.Generator().manual_seed(0))
TABLE[:, ODD] -= 1  # to be drawn now and then


def stored(tokens: Tensor, positions: Tensor) -> Tensor:
    values = torch.zeros(len(tokens), 2, 8)
    weighted = (tokens + 1) * (1 + positions % 7).to(torch.float32)
    values[:, 0, 0] = weighted.masked_fill(tokens == ODD, torch.nan)
    return values


def forward(self: EngineModel, tokens: Tensor, positions: Tensor, attention: Any) -> Tensor:
    """Returns the weighted sums of the tokens so far. Attention gives their mean, which is rounded after all."""
    values = stored(tokens, positions)
    attended = attention(0, torch.zeros(len(tokens), 8, 8), torch.zeros_like(values), values)
    return (attended[:, 0] * (positions + 1)).round()


def fill_cache(self: EngineModel, tokens: Tensor, positions: Tensor, attention: Any) -> None:
    values = stored(tokens, positions)
    attention.store(0, torch.zeros_like(values), values)


def logits(self: EngineModel, sums: Tensor) -> Tensor:
    return TABLE[sums.nan_to_num(0).long() % len(TABLE)] + torch.where(sums.isfinite(), 0.0, torch.nan)[:, None]


def draw_by_row(logits: Tensor, streams: Tensor, positions: Tensor, sampling: SamplingParams) -> tuple[Tensor, Tensor]:
    rows = range(len(logits))
    drawn = [decoder.draw(*(of[row : row + 1] for of in (logits, streams, positions)), sampling) for row in rows]
    tokens, logprobs = zip(*drawn, strict=True)
    return torch.cat(tokens), torch.cat(logprobs)


@pytest.fixture
def exact(monkeypatch: pytest.MonkeyPatch) -> None:
    for function in (forward, fill_cache, logits):
        monkeypatch.setattr(EngineModel, function.__name__, function)
    monkeypatch.setattr(engine, "choose_draw", lambda device: (draw_by_row, ""))


def outcome(sample: Sample) -> tuple[int, tuple[int, ...], tuple[float, ...], Status]:
    return sample.id, tuple(sample.tokens), tuple(sample.logprobs), sample.status


class Caller:
    """A caller that interrupts an engine at random. Samples that it takes away come back later."""

    def __init__(self, made: EmbeddedEngine, samples: list[Sample], random: Random) -> None:
        self.engine, self.random, self.outside, self.version = made, random, [*samples], 0
        self.done: dict[int, Sample] = {}

    def submit(self) -> None:
        count = self.random.randint(0, 4)
        self.engine.submit(self.outside[:count], SAMPLED)
        del self.outside[:count]

    def step(self) -> None:
        for sample in self.engine.step():
            assert sample.id not in self.done
            if further := answered(sample):
                self.outside.append(further)
            else:
                self.done[sample.id] = sample

    def withdraw(self) -> None:
        self.outside += self.engine.withdraw([number for number in range(16) if self.random.random() < 0.2])

    def suspend(self) -> None:
        self.outside += self.engine.suspend()

    def look(self) -> None:
        for sample in self.engine.progress(range(16)):
            assert not sample.is_finished

    def update(self) -> None:
        self.version += 1
        self.engine.begin_update()
        self.engine.end_update(self.version)

    def call(self, num_calls: int) -> None:
        """Makes calls at random, and then lets every sample finish."""
        kinds = [self.submit, self.step, self.withdraw, self.suspend, self.look, self.update]
        for kind in self.random.choices(kinds, [4, 12, 2, 1, 2, 2], k=num_calls):
            kind()
        while self.outside or self.engine.num_unfinished:
            self.submit()
            self.step()


def answered(sample: Sample) -> Sample | None:
    """Returns the sample with an answer to its first turn, if it has another one."""
    goes_on = sample.goes_on and sample.status != Status.FAILED and len(sample.turns) == 1
    return sample.observed((7, 8, 9)) if goes_on and len(sample.tokens) < 10 else None


def some_samples(random: Random) -> list[Sample]:
    """Returns samples of a few prompts. Some contain the odd token, and some responses have limits of their own."""
    prompts = [
        tuple(random.choices(range(VOCAB_SIZE), [10] * ODD + [1], k=random.randint(1, 30)))
        for _ in range(random.randint(1, 4))
    ]
    limits = [None, *range(1, 25)]
    return [
        Sample(
            number,
            random.choice(prompts),
            random.randrange(1000),
            turn_limit=random.choice(limits),
            goes_on=random.random() < 0.5,
        )
        for number in range(random.randint(4, 16))
    ]


@pytest.mark.usefixtures("exact")
@pytest.mark.parametrize("kv_tokens", [70, 150, 2000])
def test_interrupted_at_random_it_gives_what_each_sample_gives_alone(qwen3: Path, kv_tokens: int) -> None:
    alone, _ = load_engine(qwen3, max_context_tokens=CONTEXT, ahead=0)
    statuses, num_diverged = set(), 0
    for seed in range(NUM_SCENARIOS):
        random = Random(seed)
        samples = some_samples(random)
        expected = [result_alone(alone, sample) for sample in samples]
        made, _ = load_engine(qwen3, max_context_tokens=CONTEXT, max_running_requests=5, kv_tokens=kv_tokens, ahead=1)
        caller = Caller(made, samples, random)
        try:
            caller.call(random.randint(0, 40))
        except DivergenceError:  # a sample with the odd token ran alone
            num_diverged += 1
            continue
        assert [outcome(caller.done[sample.id]) for sample in samples] == [outcome(sample) for sample in expected], seed
        statuses |= {sample.status for sample in expected}
        assert made.cache_metrics()["rollout/kv_cache_peak"] > 0
        assert made.cache_metrics()["rollout/kv_cache_peak"] == 0, "a block is held without a sample"
    assert num_diverged < NUM_SCENARIOS // 4
    assert statuses == {Status.STOPPED, Status.TRUNCATED, Status.FAILED}


def result_alone(alone: EmbeddedEngine, sample: Sample) -> Sample:
    """Returns the sample finished. Others beside it keep a failure from being taken for that of all."""
    try:
        done = alone.generate([sample], SAMPLED)[0]
    except DivergenceError:
        others = [Sample(1000 + seed, (1, 2), seed) for seed in range(8)]
        done = alone.generate([sample, *others], SAMPLED)[0]
    return result_alone(alone, further) if (further := answered(done)) else done


@pytest.mark.usefixtures("exact")
def test_one_that_fails_in_flight_harms_no_sample_of_its_prompt(qwen3: Path) -> None:
    """The block that the later sample copies has both the end of the prompt and the token that gives NaN."""
    prompt = (9, 8, 7, 6, 5, 4)
    first_logits = TABLE[sum((token + 1) * (1 + place) for place, token in enumerate(prompt)) % len(TABLE)]
    seeds = torch.arange(1000)
    streams = decoder.random_streams(seeds.tolist(), seeds.device)
    first_tokens, _ = decoder.draw(first_logits.expand(1000, -1), streams, torch.zeros_like(seeds), SAMPLED)
    numbers = [first_tokens.tolist().index(ODD), *range(1000, 1010)]
    alone, _ = load_engine(qwen3, max_context_tokens=CONTEXT, ahead=0)
    failed, *others = alone.generate([Sample(number, prompt, number) for number in numbers], SAMPLED)
    later, beside = [sample for sample in others if len(sample.tokens) > 3][:2]
    assert failed.tokens == (ODD,)
    made, _ = load_engine(qwen3, max_context_tokens=CONTEXT, kv_tokens=2000, ahead=1)
    made.submit([Sample(sample.id, prompt, sample.id) for sample in (failed, beside)], SAMPLED)
    done = made.step() + made.step()
    made.submit([Sample(later.id, prompt, later.id)], SAMPLED)
    assert not done and (done := made.step()) and done[0].status == Status.FAILED, "its failure was in flight"
    while made.num_unfinished:
        done += made.step()
    assert {sample.id: outcome(sample) for sample in done} == {
        sample.id: outcome(sample) for sample in (failed, beside, later)
    }


@pytest.mark.usefixtures("exact")
@pytest.mark.parametrize("leave", [lambda made: made.withdraw([0]), EmbeddedEngine.suspend], ids=["withdrawn", "all"])
def test_one_that_leaves_while_it_fails_harms_no_later_owner_of_its_blocks(
    qwen3: Path, leave: Callable[[EmbeddedEngine], list[Sample]]
) -> None:
    failing, beside, later = Sample(0, (*[1] * 10, ODD, 1), 0), Sample(1, (2,) * 5, 1), Sample(2, (3, 4), 2)
    expected = load_engine(qwen3, kv_tokens=2000, ahead=0)[0].generate([later], SAMPLED)
    made, _ = load_engine(qwen3, kv_tokens=2000, ahead=1)
    made.submit([failing, beside], SAMPLED)
    assert made.step() == []
    assert outcome(leave(made)[0]) == outcome(failing), "what is in flight is dropped"
    made.submit([later], SAMPLED)
    done = []
    while made.num_unfinished:
        done += made.step()
    assert [outcome(sample) for sample in done if sample.id == 2] == [outcome(sample) for sample in expected]


@pytest.fixture
def num_processed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Returns a list that receives the number of running samples of each step."""
    processed: list[int] = []
    step = Decoder.step
    monkeypatch.setattr(Decoder, "step", lambda self, num, *rest: (processed.append(num), step(self, num, *rest))[1])
    return processed


@pytest.mark.parametrize("max_running_requests", [1, 3, 64])
def test_at_most_one_step_of_a_sample_is_wasted(
    qwen3: Path, max_running_requests: int, num_processed: list[int]
) -> None:
    options = {"kv_tokens": 3000, "max_running_requests": max_running_requests}
    requests, wasted = ragged_requests(), []
    for ahead, sampling in ((0, SAMPLED), (1, SAMPLED), (1, replace(SAMPLED, stop_token_ids=()))):
        num_processed.clear()
        done = load_engine(qwen3, ahead=ahead, **options)[0].generate(requests, sampling)
        wasted.append(sum(num_processed) - sum(len(sample.tokens) for sample in done))
    assert wasted[0] == 0 < wasted[1] <= len(requests)
    assert wasted[2] == 0, "the host knows which steps are the last by length"


def test_stop_strings_end_the_same_samples(qwen3: Path) -> None:
    options = {"kv_tokens": 3000, "max_running_requests": 3, "tokenizer": LetterTokenizer()}
    whole = load_engine(qwen3, **options)[0].generate(ragged_requests(), SAMPLED)
    texts = [LetterTokenizer().decode(done.tokens) for done in whole if len(done.tokens) > 5]
    sampling = replace(SAMPLED, stop=tuple(text[2:4] for text in texts[:3]))
    expected, found = (
        load_engine(qwen3, ahead=ahead, **options)[0].generate(ragged_requests(), sampling) for ahead in (0, 1)
    )
    assert [(done.tokens, done.status) for done in found] == [(done.tokens, done.status) for done in expected]
    assert sum(len(done.tokens) for done in found) < sum(len(done.tokens) for done in whole)


def test_weights_are_not_written_while_a_step_reads_them(qwen3: Path) -> None:
    made, _ = load_engine(qwen3, kv_tokens=3000, ahead=1)
    made.submit(ragged_requests(), SAMPLED)
    copies = LateCopy.copies
    copies.clear()
    made.step()
    assert [copy.is_read for copy in copies] == [False], "the step is in flight"
    made.begin_update()
    assert [copy.is_read for copy in copies] == [True]


class Unwaited(TorchDispatchMode):
    """Refuses operators for which the host waits for the device, except within `allowed` functions."""

    allowed = False

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        waits = operator in READS_BACK or (operator in FROM_HOST and args[0].dim() > 0)  # numbers go with a launch
        assert self.allowed or not waits, f"the host waits for {operator}"
        return operator(*args, **(kwargs or {}))

    def allows(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def allowed(*arguments: Any) -> Any:
            self.allowed = True
            try:
                return function(*arguments)
            finally:
                self.allowed = False

        return allowed


def test_the_host_waits_for_results_alone(qwen3: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Samples start, end, share prompts and move between slots meanwhile."""
    made, _ = load_engine(qwen3, kv_tokens=3000, max_running_requests=4, ahead=1, record=Recorder())
    requests = [replace(one, id=one.id + 100 * number) for one in ragged_requests() for number in range(3)]
    expected = made.generate(requests, SAMPLED)
    mode = Unwaited()
    for module in (kv_cache, block_cache, decoder, generation):
        monkeypatch.setattr(module, "uploaded", mode.allows(kv_cache.uploaded))
    monkeypatch.setattr(generation, "random_streams", mode.allows(generation.random_streams))  # on the host
    with mode:
        found = made.generate(requests, SAMPLED)
    assert [done.tokens for done in found] == [done.tokens for done in expected]
