"""Changed weights sent to a running SGLang server: by its own checksums it has the weights of a full sync."""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from rltrain.checkpoint.hf_reader import load_parameters
from rltrain.errors import EngineLost
from rltrain.models import read_architecture
from rltrain.reshard.layout import Layout, split
from rltrain.rollout.layout import engine_layout
from rltrain.rollout.servers.calls import Client
from rltrain.rollout.servers.sglang_process import Server
from rltrain.rollout.servers.sglang_weights import Delivery
from rltrain.runtime.grid import Grid
from tests.sglang.servers import PART_BYTES, call, checksums, connected, running
from tests.support.rollout_models import write_checkpoint

SHARE = 0.02
"""Share of elements that change from one checkpoint to the next."""


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def dtype(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Returns three checkpoints of one model. Some elements change from one to the next."""
    folders = [write_checkpoint(tmp_path_factory.mktemp("changes"), "qwen3", seed=3)]
    generator = torch.Generator().manual_seed(0)
    for _ in range(2):
        folders.append(tmp_path_factory.mktemp("changes"))
        shutil.copytree(folders[0], folders[-1], dirs_exist_ok=True)
        tensors = load_file(folders[-2] / "model.safetensors")
        for tensor in tensors.values():
            tensor.view(-1)[torch.rand(tensor.numel(), generator=generator) < SHARE] += 0.25
        save_file(tensors, folders[-1] / "model.safetensors", metadata={"format": "pt"})
    return folders


@pytest.fixture(scope="module")
def parts(checkpoints: list[Path], dtype: str) -> list[Layout]:
    return split(engine_layout(read_architecture(checkpoints[0]), Grid((0,)), dtype=dtype), PART_BYTES)


@pytest.fixture(scope="module")
def serving(start_server: Callable[..., Server], checkpoints: list[Path], dtype: str) -> Server:
    return start_server(checkpoints[0], dtype=dtype)


@pytest.fixture(scope="module")
def client(serving: Server) -> Iterator[Client]:
    with connected(serving) as client:
        yield client


@pytest.fixture
def delivery(client: Client, parts: list[Layout]) -> Iterator[Delivery]:
    made = Delivery(parts, 0, device=torch.device("cpu"), keep=True, group=None, call=client.call)
    made.check_layout()
    yield made
    made.close()


def send(
    delivery: Delivery,
    parts: list[Layout],
    checkpoint: Path,
    version: int,
    *,
    before: Path | None = None,
    after_part: Callable[[int], None] = lambda part: None,
) -> int:
    """Sends a checkpoint as a weight sync does and returns the number of written elements.

    With a checkpoint `before`, only the differences from it are written.
    """
    delivery.begin()
    written = 0
    for number, part in enumerate(parts):
        views = delivery.tensors(number, is_kept=before is not None)
        if before is None:
            load_parameters(checkpoint, part, 0, views)
        else:
            was, wanted = ({key: torch.zeros_like(view) for key, view in views.items()} for _ in range(2))
            load_parameters(before, part, 0, was)
            load_parameters(checkpoint, part, 0, wanted)
            for key, view in views.items():
                differs = was[key] != wanted[key]
                view[differs] = wanted[key][differs]
                written += int(differs.sum())
        delivery.arrived(number, verify=True)
        after_part(number)
    delivery.finish(version)
    return written


def test_the_server_holds_what_a_full_sync_gives_it(
    serving: Server, delivery: Delivery, parts: list[Layout], checkpoints: list[Path]
) -> None:
    assert len(parts) > 2, "slots must be used again"
    expected = []
    for version, checkpoint in enumerate(checkpoints):
        send(delivery, parts, checkpoint, version)
        expected.append(checksums(serving))
    assert len({str(found) for found in expected}) == len(checkpoints)
    for version, target in ((3, 0), (4, 1), (5, 2)):
        came_from = checkpoints[(version - 1) % 3]
        written = send(delivery, parts, checkpoints[target], version, before=came_from)
        assert 0 < written < sum(tensor.numel() for tensor in load_file(came_from / "model.safetensors").values()) / 5
        assert checksums(serving) == expected[target]
        assert call(serving, "/model_info")["weight_version"] == str(version) and delivery.version == version


def test_a_server_killed_amid_changes_gets_all_of_them(
    serving: Server, client: Client, delivery: Delivery, parts: list[Layout], checkpoints: list[Path]
) -> None:
    send(delivery, parts, checkpoints[1], 7)
    send(delivery, parts, checkpoints[0], 8)
    expected = checksums(serving)
    send(delivery, parts, checkpoints[1], 9)
    with pytest.raises(EngineLost):
        send(delivery, parts, checkpoints[0], 10, before=checkpoints[1], after_part=lambda part: kill(serving, part))
    running(serving)
    client.connect(serving.url, serving.token)
    delivery.check_layout()
    delivery.redeliver()
    assert checksums(serving) == expected and delivery.version == 10
    send(delivery, parts, checkpoints[1], 11, before=checkpoints[0])
    send(delivery, parts, checkpoints[0], 12, before=checkpoints[1])
    assert checksums(serving) == expected


def kill(server: Server, part: int) -> None:
    if part == 1:
        server.kill()
