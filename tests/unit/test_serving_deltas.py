"""What changed of a checkpoint in the server of launch/serve.py: applied in place, bit for bit as the whole is."""

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from rltrain.endpoint import served_engine
from rltrain.endpoint.served_engine import NO_VERSION, Reloads
from rltrain.errors import CheckpointError
from rltrain.models import read_architecture
from rltrain.reshard.copy_table import allocate_parameters
from rltrain.rollout.layout import engine_layout
from rltrain.runtime.grid import Grid
from tests.delta_folders import changed_somewhat, damage, tensors_of, write_delta, write_version
from tests.rollout_models import write_checkpoint

TYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class Server:
    """An engine's parameters, and what loads into them."""

    def __init__(self, checkpoint: Path, dtype: str) -> None:
        layout = engine_layout(read_architecture(checkpoint), Grid((0,)), dtype=dtype)
        self.parameters: dict[str, Tensor] = allocate_parameters(layout, 0, device=torch.device("cpu"))
        engine: Any = SimpleNamespace(
            policy_version=0,
            begin_update=lambda: None,
            incoming=lambda part: self.parameters,
            end_update=lambda v: None,
        )
        self.reloads = Reloads(engine, checkpoint, dtype, lambda: None)

    def load(self, folder: Path, label: str | None) -> None:
        async def both() -> None:
            asked = asyncio.ensure_future(self.reloads.reload(folder, label))
            await asyncio.sleep(0)
            self.reloads.carry_out()
            await asked

        asyncio.run(both())

    @property
    def bits(self) -> dict[str, Tensor]:
        return {name: tensor.clone().view(torch.uint8) for name, tensor in self.parameters.items()}


@pytest.mark.parametrize("served", TYPES)
@pytest.mark.parametrize("sent", TYPES)
@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe", "deepseek_v3"])
def test_deltas_make_what_the_whole_makes(family: str, sent: str, served: str, tmp_path: Path) -> None:
    """Fused matrices, experts and latent attention; a server may keep weights in another type than is sent."""
    checkpoint = write_checkpoint(tmp_path / "checkpoint", family)
    versions = [{name: tensor.to(TYPES[sent]) for name, tensor in tensors_of(checkpoint).items()}]
    versions += [changed_somewhat(versions[0], 0)]
    versions += [changed_somewhat(versions[1], 1, share=0.7)]
    server, other = Server(checkpoint, served), Server(checkpoint, served)
    server.load(write_version(tmp_path / "v0", versions[0], checkpoint, "v0"), "v0")
    for number in (1, 2):
        folder = tmp_path / f"d{number}"
        server.load(write_delta(folder, versions[number - 1], versions[number], f"v{number - 1}", f"v{number}"), None)
        assert server.reloads.label() == f"v{number}"
    other.load(write_version(tmp_path / "v2", versions[2], checkpoint, "v2"), "v2")
    expected = other.bits
    assert server.bits.keys() == expected.keys()
    assert all(torch.equal(bits, expected[name]) for name, bits in server.bits.items())


@pytest.fixture
def rig(tmp_path: Path) -> SimpleNamespace:
    checkpoint = write_checkpoint(tmp_path / "checkpoint", "qwen3")
    old = tensors_of(checkpoint)
    new = changed_somewhat(old, 0)
    delta = write_delta(tmp_path / "delta", old, new, "v0", "v1", num_files=3)
    server = Server(checkpoint, "float32")
    server.load(write_version(tmp_path / "v0", old, checkpoint, "v0"), "v0")
    return SimpleNamespace(server=server, delta=delta, old=old, new=new, folder=tmp_path)


def refuse(rig: SimpleNamespace, folder: Path, said: str, label: str | None = None) -> None:
    before, held = rig.server.bits, rig.server.reloads.label()
    with pytest.raises(CheckpointError, match=said):
        rig.server.load(folder, label)
    assert rig.server.reloads.label() == held
    assert all(torch.equal(bits, before[name]) for name, bits in rig.server.bits.items()), "it keeps what it has"


def test_what_does_not_fit_is_refused_before_anything_changes(rig: SimpleNamespace) -> None:
    other = write_delta(rig.folder / "other", rig.old, rig.new, "v7", "v8")
    refuse(rig, other, "changes version v7; expected v0, which is served")
    refuse(rig, rig.delta, "weight_version: got v9 with .*, which makes version v1", label="v9")
    names = {f"a.{name}": (rig.old[name], rig.new[name]) for name in rig.old}
    renamed = write_delta(
        *(rig.folder / "renamed", {n: o for n, (o, _) in names.items()}, {n: m for n, (_, m) in names.items()}),
        *("v0", "v1"),
    )
    refuse(rig, renamed, "has tensor a.* the model that is served has none of that name")
    damage(rig.delta)
    refuse(rig, rig.delta, "is damaged or cut short")


def test_weights_that_somebody_else_changed_are_of_no_version(rig: SimpleNamespace) -> None:
    """And take no further delta, but a whole checkpoint."""
    for parameter in rig.server.parameters.values():
        parameter.view(-1)[-1] += 1.0
    with pytest.raises(CheckpointError, match="is not what was sent once it is applied"):
        rig.server.load(rig.delta, "v1")
    assert rig.server.reloads.label() == NO_VERSION
    refuse(rig, rig.delta, f"expected {NO_VERSION}, which is served")
    rig.server.load(rig.folder / "v0", "v0")
    rig.server.load(rig.delta, "v1")
    assert rig.server.reloads.label() == "v1"


def test_what_breaks_off_is_of_no_version(rig: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that goes away in between."""
    compare = served_engine._compare

    def lose(*args: Any) -> None:
        compare(*args)
        for path in rig.delta.glob("*.delta"):
            path.unlink()

    monkeypatch.setattr(served_engine, "_compare", lose)
    with pytest.raises(
        CheckpointError, match="cannot be read: No such file or directory, after some of it was applied"
    ):
        rig.server.load(rig.delta, "v1")
    assert rig.server.reloads.label() == NO_VERSION
