"""Weights sent to a running SGLang server piece by piece, against a fresh load of the same checkpoint."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from rltrain.checkpoint.hf_reader import load_parameters
from rltrain.errors import EngineError, EngineLost
from rltrain.models import read_architecture
from rltrain.reshard.layout import split
from rltrain.rollout.layout import engine_layout
from rltrain.rollout.servers.calls import Client
from rltrain.rollout.servers.sglang_process import Server
from rltrain.rollout.servers.sglang_weights import Delivery
from rltrain.runtime.grid import Grid
from tests.sglang.servers import PART_BYTES, PROMPT, assert_serves, call, connected, greedy, parts_of, running
from tests.support.rollout_models import write_checkpoint

OF_ALL = "qwen3"
"""The family of the server shared by all tests."""
FAMILIES = [OF_ALL, "tied qwen2", "qwen3_moe"]
SPARSE = {"num_experts": 4, "num_experts_per_tok": 2, "head_dim": 8, "mlp_only_layers": []}


def deliver(
    delivery: Delivery, checkpoint: Path, version: int, after_part: Callable[[int], None] | None = None
) -> None:
    """Sends the tensors of a checkpoint as a weight sync does."""
    delivery.begin()
    for number, part in enumerate(parts_of(checkpoint)):
        load_parameters(checkpoint, part, 0, delivery.tensors(number))
        delivery.arrived(number, verify=version % 2 == 1)
        if after_part is not None:
            after_part(number)
    delivery.finish(version)


def served_version(server: Server) -> str:
    return call(server, "/model_info")["weight_version"]


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def checkpoints(family: str, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Returns two checkpoints of one architecture."""
    folders = [tmp_path_factory.mktemp(f"weights{seed}") for seed in (1, 2)]
    for seed, folder in enumerate(folders):
        sizes = SPARSE if family == "qwen3_moe" else {}
        write_checkpoint(folder, family.split()[-1], tied=family.startswith("tied"), seed=seed, **sizes)
    return folders


@pytest.fixture(scope="module")
def serving(
    family: str, server_of_all: Server, start_server: Callable[..., Server], checkpoints: list[Path]
) -> Iterator[Server]:
    if family == OF_ALL:
        yield running(server_of_all)
        return
    server = start_server(checkpoints[0])
    yield server
    server.kill()


@pytest.fixture
def client(serving: Server) -> Iterator[Client]:
    with connected(serving) as client:
        yield client


@pytest.fixture
def delivery(client: Client, checkpoints: list[Path]) -> Iterator[Delivery]:
    made = delivery_through(client, checkpoints[0])
    yield made
    made.close()


def delivery_through(client: Client, checkpoint: Path, **changes: Any) -> Delivery:
    architecture = replace(read_architecture(checkpoint), **changes)
    parts = split(engine_layout(architecture, Grid((0,))), PART_BYTES)
    assert len(parts) > 2, "slots must be used again"
    return Delivery(parts, 0, device=torch.device("cpu"), keep=True, group=None, call=client.call)


def test_weights_that_change_after_a_generation(serving: Server, delivery: Delivery, checkpoints: list[Path]) -> None:
    delivery.check_layout()
    for version, checkpoint in ((4, checkpoints[0]), (5, checkpoints[1]), (6, checkpoints[0])):
        deliver(delivery, checkpoint, version)
        assert (delivery.version, served_version(serving)) == (version, str(version))
        call(serving, "/flush_cache", {})
        assert_serves(serving, checkpoint)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [({"hidden_size": 48}, r"embed_tokens\.weight is \[\d+, 32\] of float32.*expected \[\d+, 48\]"),
     ({"num_layers": 3}, r"it has no parameter model\.layers\.2\."),
     ({"num_layers": 1}, r"it has a parameter model\.layers\.1\.")],
    ids=["shape", "missing", "extra"],
)  # fmt: skip
def test_another_layout_is_refused_and_the_server_goes_on(
    serving: Server, client: Client, checkpoints: list[Path], changes: dict[str, int], expected: str
) -> None:
    wrong = delivery_through(client, checkpoints[0], **changes)
    with pytest.raises(EngineError, match=expected):
        wrong.check_layout()
    wrong.close()
    call(serving, "/end_weight_update", {})
    assert greedy(serving, PROMPT, 2)[0]


@pytest.mark.parametrize("family", [OF_ALL], indirect=True)
def test_a_server_killed_during_a_sync_gets_the_new_weights(
    serving: Server, client: Client, delivery: Delivery, checkpoints: list[Path]
) -> None:
    delivery.check_layout()
    deliver(delivery, checkpoints[0], 1)
    with pytest.raises(EngineLost):
        deliver(delivery, checkpoints[1], 2, after_part=lambda part: serving.kill() if part == 1 else None)
    assert delivery.version is None
    running(serving)
    client.connect(serving.url, serving.token)
    delivery.check_layout()
    delivery.redeliver()
    assert (delivery.version, served_version(serving)) == (2, "2")
    assert_serves(serving, checkpoints[1])
