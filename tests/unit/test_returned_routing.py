"""The routing that an SGLang server returns reaches samples: of every token once, unknown where it tells nothing."""

import base64
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rltrain.config.schema import SGLang
from rltrain.errors import EngineError
from rltrain.models import Architecture
from rltrain.models.routing_shape import NOT_RECORDED
from rltrain.rollout.engine import SamplingParams
from rltrain.rollout.sample import Sample, Status
from rltrain.rollout.servers.calls import Client
from rltrain.rollout.servers.sglang_engine import SGLangEngine
from rltrain.rollout.servers.sglang_session import RequestedRouting, ServerRouting
from tests.model_shards import tiny_architecture
from tests.unit.fake_sglang import FakeDelivery, FakeServer, experts_of

NUM_LAYERS, DENSE, NUM_EXPERTS = 4, (1,), 200
SPARSE = [layer for layer in range(NUM_LAYERS) if layer not in DENSE]
SAMPLED = SamplingParams(1.0, 1.0, 0, 12, (3, 4))
LONG = SamplingParams(1.0, 1.0, 0, 200, ())
LIMIT_S = 10.0


def sparse_architecture() -> Architecture:
    tiny = tiny_architecture("qwen3_moe")
    assert tiny.moe is not None
    moe = replace(tiny.moe, num_experts=NUM_EXPERTS, top_k=3, dense_layers=frozenset(DENSE))
    return replace(tiny, num_layers=NUM_LAYERS, moe=moe)


class Rig:
    def __init__(self, *, routed_layers: int = NUM_LAYERS, **options: object) -> None:
        self.server = FakeServer(routed_layers=routed_layers, dense=DENSE, **options)  # type: ignore[arg-type]
        client = Client(limit_s=2.0)
        self.engine = SGLangEngine(
            self.server,  # type: ignore[arg-type]
            client,
            FakeDelivery(client),  # type: ignore[arg-type]
            group=None,
            max_running_requests=8,
            max_context_tokens=500,
            settings=SGLang(hang_timeout_s=5.0, max_restarts=2),
            advance=lambda: None,
            routing=ServerRouting.of(sparse_architecture()),
        )
        self.engine.start()
        self.sync(0)

    def sync(self, version: int) -> None:
        self.engine.begin_update()
        self.engine.end_update(version)

    def until_drawn(self, ids: list[int], num_tokens: int) -> None:
        deadline = time.monotonic() + LIMIT_S
        while any(len(self.server_tokens(number)) < num_tokens for number in ids):
            assert time.monotonic() < deadline
            self.engine.step()

    def server_tokens(self, number: int) -> tuple[int, ...]:
        return next((sample.tokens for sample in self.engine.progress([number])), ())


@pytest.fixture
def rig() -> Iterator[Callable[..., Rig]]:
    rigs: list[Rig] = []

    def make(**options: object) -> Rig:
        rigs.append(Rig(**options))  # type: ignore[arg-type]
        return rigs[-1]

    yield make
    for one in rigs:
        one.engine.close()
        assert one.server.broken == []


def samples(count: int = 5) -> list[Sample]:
    return [Sample(100 + i, tuple(range(1, 3 + i)), seed=i) for i in range(count)]


def expected(sample: Sample, versions: list[int | None]) -> np.ndarray:
    """By token the version that has fed it, None where that was not recorded."""
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
    for done in rig(overlap=overlap).engine.generate(samples(), SAMPLED):
        check(done, [0] * (len(done.context) - 1))


def test_turns_ask_for_what_they_lack(rig: Callable[..., Rig]) -> None:
    """What the first turn drew last is fed in the second, by other weights."""
    one = rig()
    turns = one.engine.generate([replace(sample, turn_limit=4, goes_on=True) for sample in samples()], SAMPLED)
    known = {turn.id: len(turn.context) - 1 for turn in turns}
    one.sync(1)
    for done in one.engine.generate([turn.observed((7, 9, 11), turn_limit=12) for turn in turns], SAMPLED):
        check(done, [0] * known[done.id] + [1] * (len(done.context) - 1 - known[done.id]))
    starts = [body["routed_experts_start_len"] for path, body in one.server.calls if path == "/generate"]
    assert starts == [0, min(known.values())]


def test_suspended_samples_keep_what_was_recorded(rig: Callable[..., Rig]) -> None:
    """Others have drawn nothing: theirs is of the weights that feed them first."""
    one = rig(max_running=3)
    one.engine.submit(samples(), LONG)
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
    for done in one.engine.generate(suspended, LONG):
        check(done, [0] * known[done.id] + [1] * (len(done.context) - 1 - known[done.id]))


def test_tokens_of_a_server_that_died_have_no_record(rig: Callable[..., Rig]) -> None:
    """They are fed anew by the next one, which tells of what follows."""
    one = rig()
    one.engine.submit(samples(1), LONG)
    one.until_drawn([100], 70)
    one.server.die()
    done: list[Sample] = []
    deadline = time.monotonic() + LIMIT_S
    while not done:
        assert time.monotonic() < deadline
        done = one.engine.step()
    routing = done[0].routing
    assert routing is not None
    num_unknown = int((routing.experts == NOT_RECORDED).all((1, 2)).sum())
    assert num_unknown >= 70
    check(done[0], [None] * num_unknown + [0] * (len(done[0].context) - 1 - num_unknown))


def test_a_checkpoint_has_unfinished_samples_without_a_record(rig: Callable[..., Rig]) -> None:
    one = rig(pace_s=0.01)
    one.engine.submit(samples(1), LONG)
    one.until_drawn([100], 1)
    (seen,) = one.engine.progress([100])
    check(seen, [None] * (len(seen.context) - 1))


def test_a_stop_string_cuts_it_too() -> None:
    """The server may have fed more than the sample keeps."""
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
        one.engine.generate(samples(1), replace(LONG, max_response_tokens=2))


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
    """It comes without its last token, and with the routing of all that it has left."""
    one, other = rig(pace_s=0.02), rig()
    one.engine.submit(samples(1), replace(LONG, max_response_tokens=5))
    assert one.engine.step() == []
    deadline = time.monotonic() + LIMIT_S
    while one.server.num_running or not one.server.most_running:
        assert time.monotonic() < deadline
        time.sleep(0.001)
    (back,) = one.engine.suspend()
    assert back.routing is not None and len(back.routing) == len(back.context)
    (done,) = other.engine.generate([back], replace(LONG, max_response_tokens=5))
    assert done.status == Status.TRUNCATED
    check(done, [0] * (len(done.context) - 1))
