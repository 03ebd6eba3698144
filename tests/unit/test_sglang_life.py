"""The whole life of an engine with a server that follows SGLang's rules, and the messages between them."""

import base64
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from rltrain.config.schema import SGLang
from rltrain.errors import EngineError, EngineLost
from rltrain.models import Architecture
from rltrain.models.routing_shape import NOT_RECORDED
from rltrain.reshard.layout import split
from rltrain.rollout.engine import SamplingParams
from rltrain.rollout.layout import engine_layout
from rltrain.rollout.sample import Sample, Status
from rltrain.rollout.servers.calls import Calls, Client
from rltrain.rollout.servers.sglang_session import OwnRequests, RequestedRouting, ServerRouting
from rltrain.rollout.servers.sglang_weights import Delivery, fields_of
from rltrain.runtime.grid import Grid
from tests.support.loading_server import NOISE, LoadingServer, model_of
from tests.support.model_shards import tiny_architecture
from tests.support.sglang_server import TAGS, FakeServer, experts_of, logprob_of, next_token
from tests.unit.test_sglang_engine import engine_on, wait_for
from tests.unit.test_sglang_memory import residency_of

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
    """An engine, its real delivery of weights, and a server with noise as weights after each start."""

    def __init__(self, *, leaves: bool, overlap: bool = False, pace_s: float = 0.001) -> None:
        self.server = FakeServer(pace_s=pace_s, overlap=overlap, saves_memory=leaves)
        self.loading = LoadingServer(model_of(LAYOUT, 0))
        self.server.load = self.loading.load
        self.server.lose = lambda tag: self.lose_weights() if tag == "weights" else None
        self.server.on_start = self.lose_weights
        self.engine = engine_on(
            self.server,
            slots=4,
            limit_s=LIMIT_S,
            settings=SGLang(hang_timeout_s=LIMIT_S, max_restarts=9),
            delivery=lambda client: Delivery(
                PARTS, 0, device=torch.device("cpu"), keep=True, group=None, call=client.call
            ),
        )
        self.engine.start()

    def lose_weights(self) -> None:
        for parameter in self.loading.models[0].parameters():
            parameter.data.fill_(NOISE)

    def sync(self, version: int) -> None:
        self.engine.begin_update()
        self.bring(version)

    def bring(self, version: int) -> None:
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
        wait_for(lambda: not self.engine.num_unfinished, lambda: done.extend(self.engine.step()))
        return done

    def wait_until_running(self, count: int) -> None:
        """Waits until `count` samples run and each has four more tokens."""
        drawn = {id(one): len(one.tokens) for one in self.server._running}

        def runs() -> bool:
            running = self.server._running
            return self.server.num_running >= count and all(
                len(one.tokens) > 3 + drawn.get(id(one), 0) for one in running
            )

        wait_for(runs, self.engine.step)


def made_of(kind: Callable[..., Any]) -> Any:
    """Returns a fixture for objects of a kind. Their engines are closed after the test."""

    @pytest.fixture
    def fixture() -> Iterator[Callable[..., Any]]:
        made: list[Any] = []

        def make(**settings: object) -> Any:
            made.append(kind(**settings))
            return made[-1]

        yield make
        for one in made:
            one.engine.close()
            assert one.server.broken == []

    return fixture


life = made_of(Life)


def miscounted(done: Sequence[Sample]) -> int:
    """Counts the tokens with a wrong recorded version."""
    prompts = {sample.id: sample.prompt for sample in samples()}
    wrong = 0
    for sample in done:
        for place, (token, version) in enumerate(zip(sample.tokens, sample.policy_versions, strict=True)):
            drawn = next_token([*prompts[sample.id], *sample.tokens[:place]], version)
            wrong += (token, sample.logprobs[place]) != (drawn, logprob_of(drawn, version))
    return wrong


@pytest.mark.parametrize("overlap", [False, True])
def test_an_engine_that_shares_its_device(life: Callable[..., Life], overlap: bool) -> None:
    """Five times it syncs, generates, evaluates and leaves. Its server dies during generation, during an absence, and
    in a sync."""
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
    """An evaluation comes in between, and a server dies with half of the weights."""
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
    one.bring(3)
    done = one.finish()
    assert len(done) == 6 and miscounted(done) == 0
    assert {version for sample in done for version in sample.policy_versions} == {0, 1, 2, 3}


def test_steps_that_overlap_would_count_tokens_to_weights_that_did_not_draw_them(life: Callable[..., Life]) -> None:
    """For this reason a server is started without overlap if its weights come in flight."""
    one = life(leaves=False, overlap=True, pace_s=0.002)
    one.sync(0)
    one.engine.submit(samples(), LONG)
    one.wait_until_running(4)
    one.sync(1)
    assert miscounted(one.finish()) > 0


NUM_LAYERS, DENSE, NUM_EXPERTS = 4, (1,), 200
SPARSE = [layer for layer in range(NUM_LAYERS) if layer not in DENSE]
SAMPLED = SamplingParams(1.0, 1.0, 0, 12, (3, 4))
LONG_RESPONSES = SamplingParams(1.0, 1.0, 0, 200, ())


def sparse_architecture() -> Architecture:
    tiny = tiny_architecture("qwen3_moe")
    assert tiny.moe is not None
    moe = replace(tiny.moe, num_experts=NUM_EXPERTS, top_k=3, dense_layers=frozenset(DENSE))
    return replace(tiny, num_layers=NUM_LAYERS, moe=moe)


class Rig:
    def __init__(self, *, routed_layers: int = NUM_LAYERS, **options: object) -> None:
        self.server = FakeServer(routed_layers=routed_layers, dense=DENSE, **options)  # type: ignore[arg-type]
        self.engine = engine_on(
            self.server,
            slots=8,
            settings=SGLang(hang_timeout_s=5.0, max_restarts=2),
            routing=ServerRouting.of(sparse_architecture()),
        )
        self.engine.start()
        self.sync(0)

    def sync(self, version: int) -> None:
        self.engine.begin_update()
        self.engine.end_update(version)

    def until_drawn(self, ids: list[int], num_tokens: int) -> None:
        wait_for(lambda: all(len(self.server_tokens(number)) >= num_tokens for number in ids), self.engine.step)

    def server_tokens(self, number: int) -> tuple[int, ...]:
        return next((sample.tokens for sample in self.engine.progress([number])), ())


rig = made_of(Rig)


def expected(sample: Sample, versions: list[int | None]) -> np.ndarray:
    """Returns the experts of each token by the version that fed it. None means no record."""
    unknown = [[NOT_RECORDED] * 3] * len(SPARSE)
    rows = [
        unknown if version is None else [experts_of(token, place, version, layer) for layer in SPARSE]
        for place, (token, version) in enumerate(zip(sample.context, versions, strict=False))
    ]
    return np.array(rows, dtype=np.int16)


def check(sample: Sample, versions: list[int | None]) -> None:
    assert sample.routing is not None and sample.routing.experts.dtype == np.int16
    assert len(versions) == len(sample.context) - 1
    assert np.array_equal(sample.routing.experts, expected(sample, versions))


@pytest.mark.parametrize("overlap", [False, True])
def test_every_fed_token_has_its_experts(rig: Callable[..., Rig], overlap: bool) -> None:
    for done in rig(overlap=overlap).engine.generate(samples(5), SAMPLED):
        check(done, [0] * (len(done.context) - 1))


def test_turns_ask_for_what_they_lack(rig: Callable[..., Rig]) -> None:
    """The second turn feeds the last token of the first turn, with other weights."""
    one = rig()
    turns = one.engine.generate([replace(sample, turn_limit=4, goes_on=True) for sample in samples(5)], SAMPLED)
    known = {turn.id: len(turn.context) - 1 for turn in turns}
    one.sync(1)
    for done in one.engine.generate([turn.observed((7, 9, 11), turn_limit=12) for turn in turns], SAMPLED):
        check(done, [0] * known[done.id] + [1] * (len(done.context) - 1 - known[done.id]))
    starts = [body["routed_experts_start_len"] for path, body in one.server.calls if path == "/generate"]
    assert starts == [0, min(known.values())]


def test_suspended_samples_keep_what_was_recorded(rig: Callable[..., Rig]) -> None:
    """Samples without tokens have the routing of the weights that feed them first."""
    one = rig(max_running=3)
    one.engine.submit(samples(5), LONG_RESPONSES)
    one.until_drawn([100, 101, 102], 1)
    suspended = one.engine.suspend()
    known = {sample.id: len(sample.routing or ()) for sample in suspended}
    for sample in suspended:
        if sample.tokens:
            check(sample, [0] * (len(sample.context) - 1))
        else:
            assert sample.routing is None
    assert sum(1 for size in known.values() if size) == 3
    one.sync(1)
    for done in one.engine.generate(suspended, LONG_RESPONSES):
        check(done, [0] * known[done.id] + [1] * (len(done.context) - 1 - known[done.id]))


def test_tokens_of_a_server_that_died_have_no_record(rig: Callable[..., Rig]) -> None:
    """The next server feeds them again, and reports the routing of later tokens only."""
    one = rig()
    one.engine.submit(samples(1), LONG_RESPONSES)
    one.until_drawn([100], 70)
    one.server.die()
    done: list[Sample] = []
    wait_for(lambda: done, lambda: done.extend(one.engine.step()))
    routing = done[0].routing
    assert routing is not None
    num_unknown = int((routing.experts == NOT_RECORDED).all((1, 2)).sum())
    assert num_unknown >= 70
    check(done[0], [None] * num_unknown + [0] * (len(done[0].context) - 1 - num_unknown))


def test_a_checkpoint_has_unfinished_samples_without_a_record(rig: Callable[..., Rig]) -> None:
    one = rig(pace_s=0.01)
    one.engine.submit(samples(1), LONG_RESPONSES)
    one.until_drawn([100], 1)
    (seen,) = one.engine.progress([100])
    check(seen, [None] * (len(seen.context) - 1))


def test_a_stop_string_cuts_it_too() -> None:
    """The server may have fed more tokens than the sample keeps."""
    server = ServerRouting.of(sparse_architecture())
    rows = np.array([[experts_of(1, place, 0, layer) for layer in range(NUM_LAYERS)] for place in range(2, 9)])
    sent = base64.b64encode(rows.astype(np.int32).tobytes()).decode()
    found = RequestedRouting(server, start=2).rows(sent, 4, 7, num_fed=9)
    assert np.array_equal(found, rows[2:5, SPARSE])


@pytest.mark.parametrize(
    ("returns", "said"),
    [
        (lambda rows: None, "returned sample 100 without routed_experts, which it was asked for"),
        (lambda rows: "", "returned 0 characters as routed_experts of 3 tokens; expected base64 of 3 x 4 x 3 int32"),
        (lambda rows: "not base64!", "returned 11 characters as routed_experts"),
        (lambda rows: _encoded(rows[:-1]), "as routed_experts of 3 tokens; expected base64 of 3 x 4 x 3 int32"),
        (lambda rows: _encoded(rows[:, SPARSE]), "of 3 tokens; expected base64 of 3 x 4 x 3 int32"),
        (lambda rows: _encoded(rows + 200), "returned experts 2.. to ... of tokens; expected 0 to 199"),
        (lambda rows: _encoded(rows * 0 - 1), "returned experts -1 to -1 of tokens; expected 0 to 199"),
        (lambda rows: _encoded(rows * 0), "the same expert twice for a token.*moe_runner_backend"),
    ],
)
def test_what_is_no_routing_ends_the_run(
    rig: Callable[..., Rig], returns: Callable[..., str | None], said: str
) -> None:
    one = rig()
    one.server.returns = returns
    with pytest.raises(EngineError, match=said):
        one.engine.generate(samples(1), replace(LONG_RESPONSES, max_response_tokens=2))


def _encoded(rows: np.ndarray) -> str:
    return base64.b64encode(rows.astype(np.int32).tobytes()).decode()


def test_a_server_that_was_started_without_it_is_noticed(rig: Callable[..., Rig]) -> None:
    with pytest.raises(EngineError, match="without routed_experts, which it was asked for"):
        rig(routed_layers=0).engine.generate(samples(1), SAMPLED)


@given(data=st.data(), num_tokens=st.integers(0, 20))
def test_numbers_come_back_as_they_were_chosen(data: st.DataObject, num_tokens: int) -> None:
    server = ServerRouting.of(sparse_architecture())
    choices = st.lists(st.integers(0, NUM_EXPERTS - 1), min_size=3, max_size=3, unique=True)
    rows = [[data.draw(choices) for _ in range(NUM_LAYERS)] for _ in range(num_tokens)]
    numbers = np.array(rows, dtype=np.int32).reshape(num_tokens, NUM_LAYERS, 3)
    found = server.decoded(_encoded(numbers), num_tokens)
    assert found.dtype == np.int16 and np.array_equal(found, numbers[:, SPARSE])


def test_what_ended_while_it_was_suspended_goes_on_elsewhere(rig: Callable[..., Rig]) -> None:
    """It returns without its last token. The routing covers all remaining tokens."""
    one, other = rig(pace_s=0.02), rig()
    one.engine.submit(samples(1), replace(LONG_RESPONSES, max_response_tokens=5))
    assert one.engine.step() == []
    wait_for(lambda: one.server.most_running and not one.server.num_running)
    (back,) = one.engine.suspend()
    assert back.routing is not None and len(back.routing) == len(back.context)
    (done,) = other.engine.generate([back], replace(LONG_RESPONSES, max_response_tokens=5))
    assert done.status == Status.TRUNCATED
    check(done, [0] * (len(done.context) - 1))


CLIENT_LIMIT_S = 0.5


@pytest.fixture
def server() -> Iterator[FakeServer]:
    server = server_with_weights()
    yield server
    server.kill()


def server_with_weights() -> FakeServer:
    server = FakeServer()
    server.start()
    server.rules.version = "0"
    return server


@pytest.fixture
def client(server: FakeServer) -> Iterator[Client]:
    client = Client(CLIENT_LIMIT_S)
    client.connect(server.url, server.token)
    yield client
    client.close()


class Session:
    """The requests of an engine to the server of `client`, with weights of version 0."""

    def __init__(self, client: Client) -> None:
        limits = {"max_running_requests": 4, "max_context_tokens": 10**6, "hang_timeout_s": LIMIT_S}
        self.client, self.requests = client, OwnRequests(role="rollout", ending=lambda: None, **limits)
        self.serve()

    def serve(self) -> None:
        self.client.run(self.requests.serve(self.client.calls, 0))

    def submit(self, some: list[Sample], sampling: SamplingParams) -> None:
        self.client.run(self.requests.submit(some, sampling, None))

    def progress(self) -> list[Sample]:
        return self.client.run(self.requests.progress([100, 101]))

    def wait_for_tokens(self) -> None:
        wait_for(lambda: any(sample.tokens for sample in self.progress()))

    def take(self, count: int, look: Callable[[], object] = lambda: None) -> list[Sample]:
        """Waits for `count` finished samples, or raises the error of the requests."""
        done: list[Sample] = []

        def step() -> None:
            look()
            self.requests.check()
            while not self.requests.outbox.empty():
                item = self.requests.outbox.get()
                if isinstance(item, Exception):
                    raise item
                done.append(item)

        wait_for(lambda: len(done) == count, step)
        return done

    def close(self) -> None:
        if not self.client.is_closed:
            self.client.run(self.requests.stop())


@pytest.fixture
def session(client: Client) -> Iterator[Session]:
    session = Session(client)
    yield session
    session.close()


ENDLESS = SamplingParams(1.0, 1.0, 0, 10**5, ())


def test_an_answer_is_parsed_where_it_is_json(client: Client) -> None:
    assert client.call("/pause_generation", {"mode": "in_place"})["success"] is True
    assert client.call("/flush_cache", {}) == "Cache flushed."
    assert client.call("/model_info") == {"success": True, "message": "Success", "weight_version": "0"}


def test_an_error_that_nobody_expects_ends_the_wait_for_a_stream(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    """asyncio would report it only when the task is collected."""
    monkeypatch.setattr("rltrain.rollout.servers.calls._lines", lambda response, limit_s: 1 / 0)
    session.submit(samples(1), GREEDY)
    with pytest.raises(ZeroDivisionError):
        session.take(1)


@pytest.mark.parametrize(
    ("status", "error"), [(400, EngineError), (422, EngineError), (500, EngineLost), (503, EngineLost)]
)
def test_a_refusal_is_an_error_and_a_broken_server_is_lost(
    server: FakeServer, client: Client, session: Session, status: int, error: type[Exception]
) -> None:
    server.answers["/flush_cache"] = server.answers["/generate"] = (status, "because")
    with pytest.raises(error, match=f"/flush_cache of the SGLang server answered with status {status}: because"):
        client.call("/flush_cache", {})
    session.submit(samples(1), GREEDY)
    with pytest.raises(error, match=f"/generate of the SGLang server answered with status {status}: because"):
        session.take(1)


def test_a_silent_server_is_lost_when_the_limit_is_over(server: FakeServer, client: Client) -> None:
    server.hangs = True
    start = time.monotonic()
    with pytest.raises(EngineLost, match=r"/flush_cache of the SGLang server: no answer within 0\.5 s"):
        client.call("/flush_cache", {})
    assert CLIENT_LIMIT_S <= time.monotonic() - start < CLIENT_LIMIT_S + 2


def test_a_dead_server_is_lost_at_once_also_in_the_middle_of_a_call(
    server: FakeServer, client: Client, session: Session
) -> None:
    session.submit(samples(1), ENDLESS)
    session.wait_for_tokens()
    server.die()
    with pytest.raises(EngineLost, match="/generate"):
        session.take(1)
    with pytest.raises(EngineLost, match="/flush_cache"):
        client.call("/flush_cache", {})


def test_events_of_all_requests_arrive_as_they_happen(server: FakeServer, session: Session) -> None:
    session.submit(samples(2), LONG)
    seen: set[tuple[int, int]] = set()
    done = session.take(2, lambda: seen.update((one.id, len(one.tokens)) for one in session.progress()))
    assert seen <= {(number, count) for number in (100, 101) for count in (0, 1, 65, 129)}
    assert len({count for _, count in seen}) > 1 and miscounted(done) == 0


def test_an_error_without_a_name_is_raised_after_the_end_of_another_sample(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SGLang streams an error of one of several samples without naming the sample."""

    async def stream(self: Calls, path: str, body: dict[str, Any], limit_s: float | None) -> AsyncIterator[Any]:
        meta = {"finish_reason": {"type": "length"}, "completion_tokens": 12, "weight_version": "0"}
        yield {"meta_info": {**meta, "id": body["rid"][0], "output_token_logprobs": [[-1.0, 7, None]] * 12}}
        yield {"error": {"message": "out of tune"}}

    monkeypatch.setattr(Calls, "stream", stream)
    session.submit(samples(2), GREEDY)
    with pytest.raises(EngineError, match="refuses sample 101: /generate: .*out of tune"):
        session.take(2)


def test_proxies_of_the_environment_are_ignored(server: FakeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "ALL_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    client = Client(CLIENT_LIMIT_S)
    client.connect(server.url, server.token)
    assert client.call("/flush_cache", {}) == "Cache flushed."
    client.close()


def test_another_server_brings_nothing_of_the_one_before(client: Client, session: Session) -> None:
    """Its sample continues from the tokens known before."""
    session.submit(samples(1), LONG)
    session.wait_for_tokens()
    other = server_with_weights()
    client.run(session.requests.lose_server())
    client.connect(other.url, other.token)
    session.serve()
    (done,) = session.take(1)
    assert len(done.tokens) == LONG.max_response_tokens and miscounted([done]) == 0
    assert len(other.cache_keys) == 1
    session.close()
    other.kill()


def test_closing_is_quick_whatever_the_server_does(server: FakeServer, session: Session) -> None:
    server.hangs = True
    session.submit(samples(1), GREEDY)
    start = time.monotonic()
    session.close()
    session.client.close()
    session.client.close()
    assert time.monotonic() - start < 2


def test_without_a_server_every_call_says_so(server: FakeServer, client: Client) -> None:
    client.disconnect()
    with pytest.raises(EngineLost, match="no SGLang server is connected"):
        client.call("/flush_cache", {})
    with pytest.raises(EngineLost, match="no SGLang server is connected"):
        Session(client)
