"""The whole life of an SGLang engine on a stand-in that keeps SGLang's rules: its weights, its memory, its restarts."""

import time
from collections.abc import Callable, Iterator, Sequence

import pytest
import torch
from torch import Tensor

from rltrain.config.schema import SGLang
from rltrain.reshard.layout import split
from rltrain.rollout.engine import SamplingParams
from rltrain.rollout.layout import engine_layout
from rltrain.rollout.sample import Sample
from rltrain.rollout.servers.calls import Client
from rltrain.rollout.servers.sglang_engine import SGLangEngine
from rltrain.rollout.servers.sglang_weights import Delivery, fields_of
from rltrain.runtime.grid import Grid
from tests.loading_server import NOISE, LoadingServer, model_of
from tests.model_shards import tiny_architecture
from tests.sglang_rules import TAGS
from tests.unit.fake_sglang import FakeServer, logprob_of, next_token
from tests.unit.test_engine_residency import residency_of

LAYOUT = engine_layout(tiny_architecture("qwen2"), Grid((0,)))
PARTS = split(LAYOUT, 3000)
SAMPLING, GREEDY = SamplingParams(1.0, 1.0, 0, 40, ()), SamplingParams(0.0, 1.0, 0, 12, ())
LONG = SamplingParams(1.0, 1.0, 0, 150, ())
LIMIT_S = 20.0


def weights(version: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(version)
    return {field.name: torch.randn(field.shape, generator=generator) for field in fields_of(LAYOUT, 0)}


def samples(count: int = 6) -> list[Sample]:
    return [Sample(100 + number, tuple(range(1, 3 + number)), seed=number) for number in range(count)]


class Life:
    """An engine, its real way of delivering weights, and a server whose every start has noise for weights."""

    def __init__(self, *, leaves: bool, overlap: bool = False, pace_s: float = 0.001) -> None:
        self.server = FakeServer(pace_s=pace_s, overlap=overlap, saves_memory=leaves)
        self.loading = LoadingServer(model_of(LAYOUT, 0))
        self.server.load = self.loading.load
        self.server.lose = lambda tag: self.lose_weights() if tag == "weights" else None
        self.server.on_start = self.lose_weights
        client = Client(limit_s=LIMIT_S)
        delivery = Delivery(PARTS, 0, device=torch.device("cpu"), keep=True, group=None, call=client.call)
        self.engine = SGLangEngine(
            self.server,
            client,
            delivery,
            group=None,
            max_running_requests=4,
            max_context_tokens=500,
            settings=SGLang(hang_timeout_s=LIMIT_S, max_restarts=9),
            advance=lambda: None,
        )
        self.engine.start()

    def lose_weights(self) -> None:
        for parameter in self.loading.models[0].parameters():
            parameter.data.fill_(NOISE)

    def sync(self, version: int) -> None:
        self.engine.begin_update()
        for part in range(self.engine.delivery.num_parts):
            for name, view in self.engine.incoming(part).items():
                view.copy_(weights(version)[name])
            self.engine.arrived(part)
        self.engine.end_update(version)
        self.check_weights(version)

    def check_weights(self, version: int) -> None:
        held = self.loading.models[0].held
        assert all(torch.equal(held[name], value) for name, value in weights(version).items())
        assert (self.engine.policy_version, self.server.version) == (version, version)

    def finish(self) -> list[Sample]:
        done: list[Sample] = []
        deadline = time.monotonic() + LIMIT_S
        while self.engine.num_unfinished:
            done += self.engine.step()
            assert time.monotonic() < deadline
        return done

    def wait_until_running(self, count: int) -> None:
        """And until each of these has drawn four tokens more."""
        deadline = time.monotonic() + LIMIT_S
        drawn = {id(one): len(one.tokens) for one in self.server._running}
        while self.server.num_running < count or not all(
            len(one.tokens) > 3 + drawn.get(id(one), 0) for one in self.server._running
        ):
            self.engine.step()
            assert time.monotonic() < deadline


@pytest.fixture
def life() -> Iterator[Callable[..., Life]]:
    lives: list[Life] = []

    def make(**settings: bool | float) -> Life:
        lives.append(Life(**settings))  # type: ignore[arg-type]
        return lives[-1]

    yield make
    for one in lives:
        one.engine.close()
        assert one.server.broken == []


def miscounted(done: Sequence[Sample]) -> int:
    """Tokens that another version would have drawn than the one that they are said to be of."""
    prompts = {sample.id: sample.prompt for sample in samples()}
    wrong = 0
    for sample in done:
        for place, (token, version) in enumerate(zip(sample.tokens, sample.policy_versions, strict=True)):
            drawn = next_token([*prompts[sample.id], *sample.tokens[:place]], version)
            wrong += (token, sample.logprobs[place]) != (drawn, logprob_of(drawn, version))
    return wrong


@pytest.mark.parametrize("overlap", [False, True])
def test_an_engine_that_shares_its_device(life: Callable[..., Life], overlap: bool) -> None:
    """Syncs, generation, an evaluation and its absence, five times; its server dies while it draws, while it is away,
    and in a sync."""
    one = life(leaves=True, overlap=overlap)
    names = ("weight_sync", "generate", "generate_evaluation", "update")
    residency, suspended = residency_of(one.engine, names, num_steps=5)
    for step in range(5):
        residency.enter(4 * step)
        if step == 3:
            one.server.die()
        one.sync(step)
        residency.enter(4 * step + 1)
        one.engine.submit(samples(), LONG if step == 1 else SAMPLING)
        if step == 1:
            one.wait_until_running(4)
            one.server.die()
        done = one.finish()
        assert len(done) == 6 and miscounted(done) == 0
        residency.enter(4 * step + 2)
        done = one.engine.generate(samples(), GREEDY)
        assert miscounted(done) == 0 and {sample.policy_versions for sample in done} == {(step,) * 12}
        residency.enter(4 * step + 3)
        assert one.server.rules.released == {*TAGS} and not one.server.rules.is_paused
        if step == 2:
            one.server.die()
    assert one.engine.num_restarts == 3 and suspended == []


def test_an_engine_that_takes_weights_in_flight(life: Callable[..., Life]) -> None:
    """With an evaluation in between, and a server that dies with half of the weights."""
    one = life(leaves=False, pace_s=0.002)
    one.sync(0)
    one.engine.submit(samples(), LONG)
    for version in (1, 2):
        one.wait_until_running(4)
        one.sync(version)
    one.wait_until_running(4)
    begun = one.engine.suspend()
    assert miscounted(one.engine.generate(samples(2), GREEDY)) == 0
    one.engine.submit(begun, LONG)
    one.wait_until_running(4)
    one.engine.begin_update()
    one.engine.incoming(0)
    one.server.die()
    for part in range(one.engine.delivery.num_parts):
        for name, view in one.engine.incoming(part).items():
            view.copy_(weights(3)[name])
        one.engine.arrived(part)
    one.engine.end_update(3)
    one.check_weights(3)
    done = one.finish()
    assert len(done) == 6 and miscounted(done) == 0
    assert {version for sample in done for version in sample.policy_versions} == {0, 1, 2, 3}


def test_steps_that_overlap_would_count_tokens_to_weights_that_did_not_draw_them(life: Callable[..., Life]) -> None:
    """Which is why a server whose weights come in flight is started without."""
    one = life(leaves=False, overlap=True, pace_s=0.002)
    one.sync(0)
    one.engine.submit(samples(), LONG)
    one.wait_until_running(4)
    one.sync(1)
    assert miscounted(one.finish()) > 0
