"""The routing returned by a real server is that of transformers' routers, also over several turns and after aborts."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from rltrain.models import read_architecture
from rltrain.rollout.engine import SamplingParams
from rltrain.rollout.servers.sglang_engine import SGLangEngine
from rltrain.rollout.servers.sglang_session import ServerRouting
from tests.sglang.servers import engine_on, sync
from tests.support.rollout_models import check, ragged_requests, write_checkpoint

LIMITS = {"max_running_requests": 4, "max_context_tokens": 256}
SAMPLED = SamplingParams(1.0, 1.0, 0, 12, (3,))
LONG = SamplingParams(0.0, 1.0, 0, 200, ())
CHUNKS = {"chunked_prefill_size": 16}
"""Prompts are prefilled in pieces."""


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Returns two checkpoints of one architecture."""
    sizes = {"num_experts": 8, "num_hidden_layers": 3, "mlp_only_layers": [], "head_dim": 16}
    folder = tmp_path_factory.mktemp("checkpoints")
    return [write_checkpoint(folder / f"{seed}", "qwen3_moe", seed=seed, **sizes) for seed in (0, 1)]


@pytest.fixture(scope="module")
def engine(
    sglang_python: str, checkpoints: list[Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[SGLangEngine]:
    log = tmp_path_factory.mktemp("engine") / "engine.log"
    spec = {"returns_routing": True, "args": CHUNKS}
    routing = ServerRouting.of(read_architecture(checkpoints[0]))
    started, _ = engine_on(sglang_python, checkpoints[0], log, LIMITS, spec=spec, routing=routing)
    try:
        started.start()
        yield started
    finally:
        started.close()


def test_it_is_that_of_transformers(engine: SGLangEngine, checkpoints: list[Path]) -> None:
    """Samples of one prompt share the routing of its first prefill."""
    sync(engine, checkpoints[0], 0)
    long = [replace(sample, prompt=sample.prompt * 20) for sample in ragged_requests(3)]
    same = [replace(long[0], id=1000 + number, seed=number) for number in range(3)]
    for done in engine.generate([*long, *same], SAMPLED):
        check(checkpoints[0], done)


def test_it_is_that_of_every_turn(engine: SGLangEngine, checkpoints: list[Path]) -> None:
    sync(engine, checkpoints[0], 0)
    turns = engine.generate([replace(one, turn_limit=4, goes_on=True) for one in ragged_requests(5)], SAMPLED)
    for done in engine.generate([turn.observed((7, 9, 11), turn_limit=12) for turn in turns], SAMPLED):
        check(checkpoints[0], done)


def test_what_was_recorded_before_a_suspension_stays(engine: SGLangEngine, checkpoints: list[Path]) -> None:
    """Aborted requests return the routing of their fed tokens. The rest has the routing of the later weights."""
    sync(engine, checkpoints[0], 0)
    engine.submit(ragged_requests(6), LONG)
    while not any(len(sample.tokens) > 1 for sample in engine.progress([s.id for s in ragged_requests(6)])):
        engine.step()
    suspended = engine.suspend()
    drawn = [sample for sample in suspended if sample.tokens]
    assert drawn and all(not sample.is_finished for sample in drawn)
    for sample in drawn:
        check(checkpoints[0], sample)
    sync(engine, checkpoints[1], 1)
    for before, done in zip(suspended, engine.generate(suspended, LONG), strict=True):
        assert done.tokens[: len(before.tokens)] == before.tokens
        if before.tokens:
            assert done.routing is not None and done.routing.first(len(before.routing or ())) == before.routing
            assert len(done.routing) == len(done.context) - 1
        else:
            check(checkpoints[1], done)
