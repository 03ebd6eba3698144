"""Tests of engines of servers at URLs: requests, weights, failures."""

import math
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from rltrain.config.rollout import Http
from rltrain.errors import EngineError
from rltrain.models.vision import PlacedImage
from rltrain.reshard.layout import Layout, hf_layout
from rltrain.rollout.engine import SamplingParams
from rltrain.rollout.layout import engine_parts
from rltrain.rollout.sample import Sample, Status
from rltrain.rollout.servers import update_groups
from rltrain.rollout.servers.calls import Access, Calls
from rltrain.rollout.servers.fleet import Addresses, Fleet, dealt_out
from rltrain.rollout.servers.http_engine import HttpEngine
from rltrain.rollout.servers.http_weights import GroupWeights, Weights
from rltrain.rollout.servers.protocols import ServerProtocol, VLLMBroadcasts
from rltrain.rollout.servers.remote_engine import Drawing
from rltrain.rollout.servers.server_images import ServerImages
from rltrain.runtime.grid import Grid
from rltrain.runtime.image_files import ImageStore
from tests.support.http_servers import LIMIT_S, STARTED_WITH, TOKEN, StandInServer
from tests.support.model_shards import tiny_architecture
from tests.support.nccl_on_gloo import TorchBackend
from tests.support.schedule_configs import make_config
from tests.support.sglang_server import IMAGE_TOKEN, expected_tokens, logprob_of, next_token

ACCESS = Access(TOKEN)
KINDS = ("sglang", "vllm", "rltrain")
SHORT, LONG = SamplingParams(1.0, 1.0, 0, 12, (3,)), SamplingParams(1.0, 1.0, 0, 60, ())


class Folders(Weights):
    """A stand-in for `DiskWeights`: versions without files."""

    way = "folder"

    def __init__(self) -> None:
        self.label: str | None = None

    def begin(self) -> None: ...

    def tensors(self, part: int) -> Mapping[str, Tensor]:
        return {}

    def arrived(self, part: int) -> None: ...

    def complete(self, version: int) -> None:
        self.label = f"run.{version}"

    async def give(self, protocol: ServerProtocol, calls: Calls) -> None:
        assert self.label is not None
        await protocol.load_from_disk(calls, f"/weights/{self.label}", self.label, LIMIT_S)

    def close(self) -> None: ...


class Rig:
    """An engine with stand-ins for servers. Their URLs are in a file."""

    def __init__(self, folder: Path) -> None:
        self.file, self.servers = folder / "urls", list[StandInServer]()
        self.engine: HttpEngine | None = None

    def server(self, kind: str, **settings: Any) -> StandInServer:
        self.servers.append(StandInServer(kind, **settings))
        return self.servers[-1]

    def names(self, *servers: StandInServer) -> None:
        self.file.write_text("# one a line\n" + "".join(f"{server.url}/\n" for server in servers))

    def start(
        self,
        *,
        access: Access = ACCESS,
        needs_weights: bool = True,
        slots: int = 4,
        weights: Weights | None = None,
        images: ServerImages | None = None,
        protocol: str = "auto",
        **settings: Any,
    ) -> HttpEngine:
        if not self.file.exists():
            self.names(*self.servers)
        limits = {
            "reread_s": 0.02,
            "hang_timeout_s": LIMIT_S,
            "start_timeout_s": LIMIT_S,
            "update_timeout_s": LIMIT_S,
            **settings,
        }
        weights = weights or Folders()
        fleet = Fleet(
            Addresses(str(self.file), "rollout.urls", None, "rollout", 0, 1),  # type: ignore[arg-type]
            access,
            weights,
            Http(**limits),
            protocol=protocol,
            role="rollout",
            max_running_requests=slots,
            max_context_tokens=400,
            needs_weights=needs_weights,
            images=images,
        )
        self.engine = HttpEngine(
            fleet, weights, max_running_requests=slots, max_context_tokens=400, advance=lambda: None
        )
        self.engine.start()
        return self.engine

    def close(self) -> None:
        if self.engine is not None:
            self.engine.close()
        for server in self.servers:
            server.die()
            assert server.broken == []


@pytest.fixture
def rig(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Rig]:
    monkeypatch.setattr(
        Addresses, "_deal", lambda self, urls: self._dealt.clear() or self._dealt.update(dict.fromkeys(urls, 0))
    )
    made = Rig(tmp_path)
    yield made
    made.close()


def samples(count: int = 10) -> list[Sample]:
    return [Sample(100 + number, tuple(range(1, 3 + number)), seed=number) for number in range(count)]


def sync(engine: HttpEngine, version: int) -> None:
    engine.begin_update()
    engine.end_update(version)


def await_(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def drawn_right(done: Sequence[Sample]) -> bool:
    """Returns whether every token, log-prob and version match."""
    for sample in done:
        context = [*sample.prompt]
        for token, logprob, version in zip(sample.tokens, sample.logprobs, sample.policy_versions, strict=True):
            if token != next_token(context, version) or logprob != logprob_of(token, version):
                return False
            context.append(token)
    return True


def finish(engine: HttpEngine, until: Callable[[], bool] = lambda: False) -> list[Sample]:
    done: list[Sample] = []
    deadline = time.monotonic() + LIMIT_S
    while engine.num_unfinished and not until():
        done += engine.step()
        assert time.monotonic() < deadline, f"{engine.num_unfinished} unfinished"
    return done


@pytest.mark.parametrize("kind", KINDS)
def test_samples_are_drawn_by_the_weights_that_were_given(rig: Rig, kind: str) -> None:
    servers = [rig.server(kind), rig.server(kind)]
    engine = rig.start()
    for version in (0, 3):
        sync(engine, version)
        done = engine.generate(samples(), SHORT)
        assert [list(one.tokens) for one in done] == [expected_tokens(one, SHORT, version) for one in samples()]
        assert {one.status for one in done} == {Status.STOPPED, Status.TRUNCATED} and drawn_right(done)
        assert {v for one in done for v in one.policy_versions} == {version}
    assert [server.folders for server in servers] == [["/weights/run.0", "/weights/run.3"]] * 2
    assert all(len(server.versions_drawn) >= 8 for server in servers), "requests go to the least loaded"


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_under_way_goes_on_by_new_weights(rig: Rig, kind: str) -> None:
    servers = [rig.server(kind, pace_s=0.05), rig.server(kind, pace_s=0.05)]
    engine = rig.start()
    sync(engine, 0)
    engine.submit(samples(), LONG)
    done = finish(engine, lambda: any(len(one.tokens) > 10 for one in engine.progress([100, 101])))
    sync(engine, 1)
    suspended = engine.suspend()
    for server in servers:
        server.pace_s = 0.001
    assert suspended and sorted(one.id for one in [*done, *suspended]) == [one.id for one in samples()]
    assert [one.id for one in suspended] == sorted(one.id for one in suspended) and drawn_right(suspended)
    engine.submit(suspended, LONG)
    back = engine.withdraw([109])
    engine.submit(back, LONG)
    done += finish(engine)
    assert len(done) == 10 and drawn_right(done) and all(len(one.tokens) == 60 for one in done)
    assert any({*one.policy_versions} == {0, 1} for one in done)


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_is_lost_with_a_server(rig: Rig, kind: str) -> None:
    """One server is killed under load and restarted at the same address with other weights. Another joins, and another
    leaves."""
    first, second = rig.server(kind, pace_s=0.003), rig.server(kind, pace_s=0.003)
    engine = rig.start()
    sync(engine, 0)
    engine.submit(samples(16), LONG)
    done = finish(engine, lambda: len(first.versions_drawn) > 3 and len(second.versions_drawn) > 3)
    first.die()
    done += finish(engine, lambda: engine.metrics()["rollout/servers"] == 1)
    first.start()
    done += finish(engine, lambda: bool(first.folders[1:]))
    third = rig.server(kind, pace_s=0.003)
    rig.names(first, third)
    done += finish(engine, lambda: bool(third.versions_drawn))
    sync(engine, 1)
    done += finish(engine)
    assert sorted(one.id for one in done) == [one.id for one in samples(16)] and drawn_right(done)
    assert {v for server in rig.servers for v in server.versions_drawn} <= {0, 1}, "no server used its own weights"
    assert second.label.endswith(".0") and third.label.endswith(".1"), "a server that left gets no update"


@pytest.mark.parametrize("joins", [True, False])
def test_a_server_that_leaves_during_an_update_takes_it_to_its_end(rig: Rig, joins: bool) -> None:
    first, second = rig.server("vllm"), rig.server("vllm", load_s=0.3)
    rig.names(first, *[second][joins:])
    engine = rig.start()

    def leave() -> None:
        await_(lambda: bool(second.folders))
        rig.names(first)
        time.sleep(0.1)  # the file is read several times

    thread = threading.Thread(target=leave)
    if not joins:
        thread.start()
    sync(engine, 0)
    if joins:
        rig.names(first, second)
        thread.start()
    thread.join()
    rig.names(first, second)
    engine.submit(samples(), LONG)
    assert drawn_right(finish(engine))
    await_(lambda: engine.metrics()["rollout/servers"] == 2)
    assert drawn_right(engine.generate(samples(), SHORT)) and second.versions_drawn
    assert second.folders == ["/weights/run.0"], "the server has the weights and does not get them again"


def test_weights_are_taken_while_the_scheduler_still_holds_the_last_batch(rig: Rig) -> None:
    """SGLang then refuses to flush its cache at once, and at any time while another flush waits."""
    server = rig.server("sglang", holds_batch_s=1.0)
    engine = rig.start(update_timeout_s=1.0)  # a single flush waits for half of it
    for version in (0, 1):
        server.num_busy_flushes = 2
        sync(engine, version)
        assert drawn_right(engine.generate(samples(2), SHORT))
    assert server.folders == ["/weights/run.0", "/weights/run.1"], "each version was sent once"


def test_one_that_never_gets_idle_is_taken_out_of_service(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rltrain.rollout.servers.protocols.FLUSH_S", 0.3)
    first, second = rig.server("sglang"), rig.server("sglang")
    first.num_busy_flushes = 10**6
    engine = rig.start()
    sync(engine, 0)
    assert drawn_right(engine.generate(samples(2), SHORT)) and not first.versions_drawn and second.versions_drawn
    first.num_busy_flushes = 0
    await_(lambda: engine.metrics()["rollout/servers"] == 2)


def test_what_is_taken_back_has_something_left_to_draw() -> None:
    """All tokens are certain, but the server is lost before the sample is reported."""
    for end, num_kept in ((None, 2), ("stop", 2), ("length", 2)):
        drawing = Drawing(samples(1)[0], 5 if end == "stop" else 3)
        drawing.add([4, 5, 3], [-1.0] * 3)
        drawing.num_certain, drawing.end = 3, end
        assert drawing.known().tokens == (4, 5, 3)[:num_kept] and not drawing.known().is_finished


@pytest.mark.parametrize("broken", [None, math.nan, -math.inf])
def test_a_sample_without_finite_log_probs_ends_before_them(broken: float | None) -> None:
    drawing = Drawing(samples(1)[0], 5)
    drawing.add([4, 5, 6], [-1.0, broken, -1.0])
    drawing.num_certain, drawing.end = 3, "length"
    ended = drawing.ended(SHORT, None)
    assert (ended.status, ended.tokens, ended.logprobs) == (Status.FAILED, (4,), (-1.0,))


def test_a_server_that_is_started_anew_in_silence_is_found_out(rig: Rig) -> None:
    """Between two requests, only its version shows the restart."""
    server = rig.server("vllm")
    engine = rig.start()
    sync(engine, 0)
    server.label = "default"
    done = engine.generate(samples(), SHORT)
    assert drawn_right(done) and {v for one in done for v in one.policy_versions} == {0}
    assert server.folders == ["/weights/run.0"] * 2


def test_one_that_hangs_is_given_up(rig: Rig) -> None:
    first, _ = rig.server("sglang"), rig.server("sglang")
    engine = rig.start(hang_timeout_s=1.0, slots=2, max_retries=1000)
    sync(engine, 0)
    first.hangs = True
    done = engine.generate(samples(), SHORT)
    assert drawn_right(done) and engine.metrics()["rollout/requests_sent_again"] >= 1
    first.hangs = False


def test_samples_of_a_server_whose_engine_has_ended_continue_elsewhere(rig: Rig) -> None:
    """vLLM's routes answer for a while then. Requests get an event with an error."""
    first, _ = rig.server("vllm", pace_s=0.003), rig.server("vllm", pace_s=0.003)
    engine = rig.start(max_retries=1000)
    sync(engine, 0)
    engine.submit(samples(), LONG)
    done = finish(engine, lambda: len(first.versions_drawn) > 2)
    first.engine_is_dead = True
    done += finish(engine, lambda: engine.metrics()["rollout/requests_sent_again"] > 0)
    first.die()
    done += finish(engine)
    assert sorted(one.id for one in done) == [one.id for one in samples()] and drawn_right(done)


def test_certificates_are_checked(rig: Rig, tmp_path: Path) -> None:
    files = [str(tmp_path / name) for name in ("certificate.pem", "key.pem")]
    made = "req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 1 -subj /CN=engine"
    names = ["-addext", "subjectAltName=IP:127.0.0.1", "-out", files[0], "-keyout", files[1]]
    subprocess.run(["openssl", *made.split(), *names], check=True, capture_output=True)
    rig.server("sglang", certificate=(files[0], files[1]))
    with pytest.raises(EngineError, match="CERTIFICATE_VERIFY_FAILED"):
        rig.start(start_timeout_s=0.5)
    assert rig.engine is not None
    rig.engine.close()
    engine = rig.start(access=Access(TOKEN, ca_file=files[0]))
    sync(engine, 0)
    assert drawn_right(engine.generate(samples(2), SHORT))


def test_one_that_is_busy_is_asked_again(rig: Rig) -> None:
    rig.server("vllm", most=2)
    engine = rig.start(max_retries=1000)
    sync(engine, 0)
    assert drawn_right(engine.generate(samples(6), SHORT))


@pytest.mark.parametrize("kind", KINDS)
def test_one_that_takes_no_weights_is_refused(rig: Rig, kind: str) -> None:
    rig.server(kind, takes_weights=False)
    with pytest.raises(EngineError, match="would silently keep old ones"):
        rig.start()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"disaggregation_mode": "prefill"}, "only serves one phase"),
        ({"hicache_storage_backend": "mooncake"}, r"its store of keys and values \(mooncake\) would keep"),
    ],
)
def test_servers_whose_arguments_break_training_are_refused(rig: Rig, arguments: dict[str, str], said: str) -> None:
    rig.server("sglang", arguments=arguments)
    with pytest.raises(EngineError, match=said):
        rig.start()


class Deltas(Folders):
    """A stand-in for `DeltaWeights`."""

    way = "delta"


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("sglang", r"it takes deltas of format None; .*rltrain's plugin for SGLang.* or have weight_sync.delta: null"),
        ("rltrain", r"it takes deltas of format None; .*; have weight_sync.delta: null"),
        ("vllm", r"rltrain knows no such way for servers of vllm; expected weight_sync.delta: null"),
    ],
)
def test_one_that_takes_no_deltas_is_refused(rig: Rig, kind: str, said: str) -> None:
    rig.server(kind, takes_deltas=kind == "vllm")
    with pytest.raises(EngineError, match=rf"by way of a delta \(weight_sync.delta\), .* keep old ones: {said}"):
        rig.start(weights=Deltas())


@pytest.mark.parametrize("kind", ["sglang", "rltrain"])
def test_one_that_takes_deltas_is_given_them(rig: Rig, kind: str) -> None:
    server = rig.server(kind, takes_deltas=True)
    engine = rig.start(weights=Deltas())
    sync(engine, 0)
    assert drawn_right(engine.generate(samples(2), SHORT)) and server.folders == ["/weights/run.0"]


def test_where_nothing_is_trained_it_draws_by_its_own(rig: Rig) -> None:
    rig.server("rltrain", takes_weights=False)
    engine = rig.start(needs_weights=False)
    sync(engine, 7)
    [done] = engine.generate(samples(1), SHORT)
    assert list(done.tokens) == expected_tokens(done, SHORT, 99)[: len(done.tokens)]


@pytest.mark.parametrize(
    ("settings", "server", "message"),
    [
        ({"access": Access("other")}, {}, "status 401"),
        ({}, {"context": 100}, "a context of 100 tokens; expected rollout.max_context_tokens = 400"),
        ({}, {"kind": "vllm", "has_experts": True}, "vLLM's build for CPUs computes other results after a reload"),
        ({}, {"kind": "vllm", "scale_out": False}, "no /inference/v1/generate; start vLLM .* --enable-scale-out"),
        (
            {"protocol": "openai"},
            {"kind": "sglang"},
            "is a server of sglang; expected protocol: sglang or auto, got openai",
        ),
        ({"protocol": "openai"}, {"kind": "vllm"}, "is a server of vllm; expected protocol: vllm or auto, got openai"),
    ],
)
def test_what_cannot_be_asked_is_refused_at_the_start(
    rig: Rig, settings: dict[str, Any], server: dict[str, Any], message: str
) -> None:
    rig.server(**{"kind": "sglang", **server})
    with pytest.raises(EngineError, match=message):
        rig.start(**settings)


def test_without_any_server_the_job_ends_with_their_names(rig: Rig) -> None:
    server = rig.server("sglang")
    engine = rig.start()
    sync(engine, 0)
    engine._fleet._settings = Http(start_timeout_s=0.3, reread_s=0.02)
    engine.submit(samples(), LONG)
    server.die()
    with pytest.raises(EngineError, match=f"no server has served this rank for 0.3 s.*{server.url}"):
        finish(engine)
    server.start()


URLS = st.lists(st.sampled_from([f"http://{name}" for name in "abcdefgh"]), unique=True)


@given(steps=st.lists(URLS, min_size=1, max_size=5), num_ranks=st.integers(1, 4))
def test_servers_are_dealt_out_evenly_and_stay_where_they_are(steps: list[list[str]], num_ranks: int) -> None:
    dealt: dict[str, int] = {}
    for urls in steps:
        before, dealt = dealt, dealt_out(urls, dealt, num_ranks)
        counts = [list(dealt.values()).count(rank) for rank in range(num_ranks)]
        assert dealt.keys() == {*urls} and {*dealt.values()} <= {*range(num_ranks)}
        assert min(counts) > 0 or max(counts) <= 1, "no server is idle while another has several requests"
        moved = [url for url in urls if url in before and dealt[url] != before[url]]
        assert len(moved) < num_ranks


PART_BYTES = 2_000


def parts_on(*ranks: int) -> list[Layout]:
    http = {"weights": "group", "staging_mb": PART_BYTES / 2**20}
    rollout = {"engine": "http", "urls": [f"http://a:{rank}" for rank in ranks], "http": http}
    config = make_config(rollout=rollout, model={"path": "m", "dtype": "bfloat16"})
    return [part.plain for part in engine_parts(config, tiny_architecture("qwen3_moe"), Grid(ranks))]


def start(rig: Rig, limit_s: float = LIMIT_S) -> tuple[HttpEngine, int]:
    """Starts an engine with weights by groups, and returns it with its number of parts."""
    parts = parts_on(0)
    weights = GroupWeights(parts, 0, device=torch.device("cpu"), run="run", update_timeout_s=limit_s)
    return rig.start(weights=weights), len(parts)


def sync_in_parts(engine: HttpEngine, version: int, num_parts: int) -> dict[str, Tensor]:
    """Syncs `version` part by part, and returns the tensors that servers should have."""
    engine.begin_update()
    sent = {}
    for part in range(num_parts):
        for number, (name, tensor) in enumerate(engine.incoming(part).items()):
            sent[name] = tensor.copy_(torch.arange(tensor.numel()).view(tensor.shape) % 97 + number + 31 * version)
        engine.arrived(part)
    engine.end_update(version)
    return sent


def has(server: StandInServer, sent: dict[str, Tensor]) -> bool:
    received = server.broadcasts.received
    same = received.keys() == sent.keys() and all(torch.equal(received[name], sent[name]) for name in sent)
    return same and not server.broadcasts.is_open


def wait_until_waiting(engine: HttpEngine, num_servers: int) -> None:
    """Waits until so many servers wait for the next update. They missed the last one or part of it."""
    deadline = time.monotonic() + LIMIT_S
    while sum(server.waits for server in engine._fleet._servers.values()) < num_servers:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_every_rank_gets_all_tensors() -> None:
    names = set(hf_layout(tiny_architecture("qwen3_moe"), (0,)).on(0).parameters)
    for rank in (4, 5):
        held = [parameter for part in parts_on(4, 5) for parameter in part.on(rank).parameters]
        assert {*held} == names and len(held) == len(names)


@pytest.fixture
def on_gloo(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets a rank without a GPU broadcast to servers of vLLM, with a stand-in for NCCL."""
    monkeypatch.setattr(VLLMBroadcasts, "refusal", lambda self, device: None)
    monkeypatch.setattr(update_groups, "nccl", TorchBackend)


RECEIVERS: dict[str, dict[str, Any]] = {"sglang": {}, "vllm": {"transfers": "nccl"}}
"""Kinds of servers that receive broadcasts, with their settings."""


@pytest.mark.usefixtures("on_gloo")
@pytest.mark.parametrize("kind", RECEIVERS)
def test_parts_are_broadcast_and_one_that_comes_gets_the_next_update(rig: Rig, kind: str) -> None:
    first, late = (rig.server(kind, **RECEIVERS[kind]) for _ in range(2))
    first.broadcasts.is_open = True  # a job that ended in the middle of an update
    rig.names(first)
    engine, num_parts = start(rig)
    sent = sync_in_parts(engine, 0, num_parts)
    assert num_parts > 3 and has(first, sent) and first.broadcasts.num_parts == num_parts
    assert {tensor.dtype for tensor in sent.values()} == {torch.bfloat16}
    rig.names(first, late)
    wait_until_waiting(engine, 1)
    assert drawn_right(engine.generate(samples(), SHORT)) and late.versions_drawn == []
    sent = sync_in_parts(engine, 1, num_parts)
    assert has(first, sent) and has(late, sent) and first.label == late.label == "run.1"
    assert drawn_right(engine.generate(samples(), SHORT)) and {*late.versions_drawn} == {1}
    first.die()
    first.start()
    sent = sync_in_parts(engine, 2, num_parts)
    assert has(first, sent) and has(late, sent), "a silently restarted server joins again"
    engine.close()
    assert not first.broadcasts.groups and not late.broadcasts.groups


@pytest.mark.slow
@pytest.mark.usefixtures("on_gloo")
@pytest.mark.parametrize("kind", RECEIVERS)
def test_one_that_fails_in_an_update_holds_up_nobody(rig: Rig, kind: str) -> None:
    servers = [rig.server(kind, pace_s=0.003, **RECEIVERS[kind]) for _ in range(3)]
    engine, num_parts = start(rig, limit_s=LIMIT_S / 3)  # a busy machine may pause for seconds
    sync_in_parts(engine, 0, num_parts)
    engine.submit(samples(12), LONG)
    done = finish(engine, lambda: all(len(server.versions_drawn) > 1 for server in servers))
    servers[1].broadcasts.dies_in, servers[2].broadcasts.hangs_in = 2, 3
    began = time.monotonic()
    sent = sync_in_parts(engine, 1, num_parts)
    assert time.monotonic() - began < LIMIT_S / 2
    assert has(servers[0], sent) and servers[2].label == "run.0" and servers[2].broadcasts.is_open
    servers[1].die()
    servers[1].start()
    servers[2].broadcasts.hangs_in = 0
    done += finish(engine)
    wait_until_waiting(engine, 2)
    sent = sync_in_parts(engine, 2, num_parts)
    assert all(has(server, sent) and server.label == "run.2" for server in servers)
    assert sorted(one.id for one in done) == [one.id for one in samples(12)] and drawn_right(done)


@pytest.mark.usefixtures("on_gloo")
def test_a_server_of_vllm_forgets_a_failed_update_before_the_next(rig: Rig) -> None:
    server = rig.server("vllm", transfers="nccl")
    engine, num_parts = start(rig)
    server.transfers.fails_in = 2
    sync_in_parts(engine, 0, num_parts)
    assert server.is_paused and server.label == STARTED_WITH, "it has parts of two versions"
    server.transfers.fails_in = 0
    wait_until_waiting(engine, 1)
    sent = sync_in_parts(engine, 1, num_parts)
    assert has(server, sent) and server.label == "run.1" and not server.is_paused
    assert drawn_right(engine.generate(samples(), SHORT))


@pytest.mark.usefixtures("on_gloo")
def test_a_server_of_vllm_that_fails_to_join_keeps_its_weights_until_the_next_update(rig: Rig) -> None:
    server, other = (rig.server("vllm", transfers="nccl") for _ in range(2))
    engine, num_parts = start(rig, limit_s=5.0)
    server.transfers.fails_to_join = True
    sent = sync_in_parts(engine, 0, num_parts)
    assert has(other, sent) and server.label == STARTED_WITH and not server.is_paused
    server.transfers.fails_to_join = False
    wait_until_waiting(engine, 1)
    sent = sync_in_parts(engine, 1, num_parts)
    assert has(server, sent) and has(other, sent)


NO_SUCH_SERVER = {
    "a rank without a GPU": ("nccl", 1, "cpu", "over NCCL only, which needs GPUs, and this rank has none"),
    "no engine": ("", 1, "cuda", "its engine for weight transfers is missing; start it with"),
    "another engine": ("ipc", 1, "cuda", "its engine for weight transfers is ipc; start it with"),
    "replicas": ("nccl", 2, "cuda", "it has data_parallel_size 2; .* need 1"),
}


@pytest.mark.parametrize(("transfers", "num_replicas", "device", "said"), NO_SUCH_SERVER.values(), ids=NO_SUCH_SERVER)
def test_a_server_of_vllm_without_what_broadcasts_need_is_refused(
    rig: Rig, transfers: str, num_replicas: int, device: str, said: str
) -> None:
    server = rig.server("vllm", transfers=transfers)
    server.transfers.num_replicas = num_replicas
    weights = GroupWeights(parts_on(0), 0, device=torch.device(device), run="run", update_timeout_s=LIMIT_S)
    with pytest.raises(EngineError, match=rf"by way of a group \(http.weights\), .* keep old ones: .*{said}"):
        rig.start(weights=weights)


@pytest.fixture
def images(tmp_path: Path) -> ServerImages:
    """Returns the images of a store with image 7 of 4 tokens."""
    store = ImageStore(tmp_path, 0, keep_steps=1, cache_bytes=1e9)
    store.put(7, np.zeros((1, 28, 28, 3), np.uint8), step=0)
    return ServerImages(store, merge=2)


def test_servers_of_sglang_get_images_with_token_ids(rig: Rig, images: ServerImages) -> None:
    """They have the context of the sample then, so tokens are those of its ids."""
    rig.server("sglang")
    engine = rig.start(images=images)
    sync(engine, 1)
    seeing = Sample(0, (1, *[IMAGE_TOKEN] * 4, 2), seed=0, images=(PlacedImage(1, 7, (1, 4, 4)),))
    for done in engine.generate([seeing, Sample(1, (1, 2), seed=1)], SHORT):
        assert [*done.tokens] == expected_tokens(done, SHORT, 1)


def test_other_servers_are_refused_with_images(rig: Rig, images: ServerImages) -> None:
    rig.server("vllm")
    with pytest.raises(EngineError, match="takes no images with token ids; expected a server of SGLang"):
        rig.start(images=images)
