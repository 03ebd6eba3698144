"""Weights over update groups, to stand-ins that make their ends of torch's own: parts, late joiners, losses."""

import time

import pytest
import torch
from torch import Tensor

from rltrain.reshard.layout import Layout, hf_layout
from rltrain.rollout.layout import engine_parts
from rltrain.rollout.servers.http_engine import HttpEngine
from rltrain.rollout.servers.http_weights import GroupWeights
from rltrain.runtime.grid import Grid
from tests.model_shards import tiny_architecture
from tests.unit.http_servers import LIMIT_S, StandInServer
from tests.unit.schedule_configs import make_config
from tests.unit.test_http_engine import LONG, SHORT, Rig, drawn_right, finish, rig, samples

__all__ = ["rig"]

PART_BYTES = 2_000


def parts_on(*ranks: int) -> list[Layout]:
    http = {"weights": "group", "staging_mb": PART_BYTES / 2**20}
    rollout = {"engine": "http", "urls": [f"http://a:{rank}" for rank in ranks], "http": http}
    config = make_config(rollout=rollout, model={"path": "m", "dtype": "bfloat16"})
    return [part.plain for part in engine_parts(config, tiny_architecture("qwen3_moe"), Grid(ranks))]


def start(rig: Rig, limit_s: float = LIMIT_S) -> tuple[HttpEngine, int]:
    """With weights by groups, and how many parts they have."""
    parts = parts_on(0)
    weights = GroupWeights(parts, 0, device=torch.device("cpu"), run="run", update_timeout_s=limit_s)
    return rig.start(weights=weights), len(parts)


def sync(engine: HttpEngine, version: int, num_parts: int) -> dict[str, Tensor]:
    """What servers are to have received."""
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
    """For the next update, since they were not there, or not to the end, in the last one."""
    deadline = time.monotonic() + LIMIT_S
    while sum(server.waits for server in engine._fleet._servers.values()) < num_servers:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_every_rank_gets_all_tensors() -> None:
    names = set(hf_layout(tiny_architecture("qwen3_moe"), (0,)).on(0).parameters)
    for rank in (4, 5):
        held = [parameter for part in parts_on(4, 5) for parameter in part.on(rank).parameters]
        assert {*held} == names and len(held) == len(names)


def test_parts_are_broadcast_and_one_that_comes_gets_the_next_update(rig: Rig) -> None:
    first, late = rig.server("sglang"), rig.server("sglang")
    first.broadcasts.is_open = True  # a job that ended in the middle of an update
    rig.names(first)
    engine, num_parts = start(rig)
    sent = sync(engine, 0, num_parts)
    assert num_parts > 3 and has(first, sent) and first.broadcasts.num_parts == num_parts
    assert {tensor.dtype for tensor in sent.values()} == {torch.bfloat16}
    rig.names(first, late)
    wait_until_waiting(engine, 1)
    assert drawn_right(engine.generate(samples(), SHORT)) and late.versions_drawn == []
    sent = sync(engine, 1, num_parts)
    assert has(first, sent) and has(late, sent) and first.label == late.label == "run.1"
    assert drawn_right(engine.generate(samples(), SHORT)) and {*late.versions_drawn} == {1}
    first.die()
    first.start()
    sent = sync(engine, 2, num_parts)
    assert has(first, sent) and has(late, sent), "started anew in silence, it joins anew"
    engine.close()
    assert not first.broadcasts.groups and not late.broadcasts.groups


@pytest.mark.slow
def test_one_that_fails_in_an_update_holds_up_nobody(rig: Rig) -> None:
    servers = [rig.server("sglang", pace_s=0.003) for _ in range(3)]
    engine, num_parts = start(rig, limit_s=LIMIT_S / 3)  # a busy machine may stand still for seconds
    sync(engine, 0, num_parts)
    engine.submit(samples(12), LONG)
    done = finish(engine, lambda: all(len(server.versions_drawn) > 1 for server in servers))
    servers[1].broadcasts.dies_in, servers[2].broadcasts.hangs_in = 2, 3
    began = time.monotonic()
    sent = sync(engine, 1, num_parts)
    assert time.monotonic() - began < LIMIT_S / 2
    assert has(servers[0], sent) and servers[2].label == "run.0" and servers[2].broadcasts.is_open
    servers[1].die()
    servers[1].start()
    servers[2].broadcasts.hangs_in = 0
    done += finish(engine)
    wait_until_waiting(engine, 2)
    sent = sync(engine, 2, num_parts)
    assert all(has(server, sent) and server.label == "run.2" for server in servers)
    assert sorted(one.id for one in done) == [one.id for one in samples(12)] and drawn_right(done)
