"""Weights of a checkpoint that reach an engine as an update does, without a sync."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

from rltrain.checkpoint.hf_reader import load_parameters, load_quantized
from rltrain.config.schema import Config
from rltrain.errors import CheckpointError
from rltrain.models import read_architecture
from rltrain.models.experts import is_expert
from rltrain.models.products import int4_rounded
from rltrain.reshard.copy_table import allocate_parameters
from rltrain.rollout.build import serve_checkpoint
from rltrain.rollout.layout import engine_of, engine_parts, whole_engine
from rltrain.runtime.grid import Grid
from tests.distributed.cases_quantized import ARCHITECTURES, model, quantised_shard
from tests.model_shards import PADDING, Place, engine_shard
from tests.unit.schedule_configs import make_config

CHECKPOINT = Path(__file__).resolve().parents[1] / "warmed_up"
CPU = torch.device("cpu")
GRID = Grid((0,))


def config(role: str, **engine: Any) -> Config:
    """Of the rollout and a judge; the role's model is the checkpoint, the other's is not there."""
    settings = {**engine, "sglang": {"staging_mb": 0.1}}
    judge = {"path": str(CHECKPOINT)} if role == "judge" else {}
    path = "nowhere" if role == "judge" else str(CHECKPOINT)
    return make_config(model={"path": path, "dtype": "float32"}, **{"judge": judge, role: {**judge, **settings}})


def served(of: Config, role: str) -> tuple[list[str], dict[str, torch.Tensor]]:
    """(what an engine was told, the parameters that it was given)."""
    architecture = read_architecture(CHECKPOINT)
    parts = engine_parts(of, architecture, GRID, role)
    received = [allocate_parameters(part.layout, 0, device=CPU) for part in parts]
    told: list[str] = []
    engine = SimpleNamespace(
        begin_update=lambda: told.append("begin"),
        incoming=received.__getitem__,
        arrived=lambda part: told.append(f"part {part}"),
        end_update=lambda version: told.append(f"version {version}"),
    )
    site = SimpleNamespace(config=of, role=role, architecture=architecture, grid=GRID, world=SimpleNamespace(rank=0))
    serve_checkpoint(engine, site, version=3)  # type: ignore[arg-type]
    assert told == ["begin", *(f"part {number}" for number in range(len(parts))), "version 3"]
    return told, {name: tensor for part in received for name, tensor in part.items()}


@pytest.mark.parametrize("role", ["rollout", "judge"])
@pytest.mark.parametrize("engine", ["embedded", "sglang"])
def test_an_engine_gets_its_role_s_checkpoint_part_by_part(engine: str, role: str) -> None:
    """SGLang's through slots that hold a parameter or two."""
    of = config(role, engine=engine)
    told, found = served(of, role)
    assert len(told) == 3 if engine == "embedded" else len(told) > 5
    whole = whole_engine(of, read_architecture(CHECKPOINT), GRID, role).layout
    expected = allocate_parameters(whole, 0, device=CPU)
    load_parameters(CHECKPOINT, whole, 0, expected)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) and found[name].any() for name in expected)


@pytest.mark.parametrize("role", ["rollout", "judge"])
def test_in_fp8_the_parts_are_those_of_the_whole(role: str) -> None:
    _, whole = served(config(role, dtype="fp8"), role)
    _, found = served(config(role, dtype="fp8", engine="sglang"), role)
    assert found.keys() == whole.keys() and any(tensor.dtype == torch.float8_e4m3fn for tensor in whole.values())
    assert all(torch.equal(as_bytes(found[name]), as_bytes(whole[name])) for name in whole)


@pytest.mark.parametrize(("role", "rounds"), [("rollout", True), ("judge", False)])
def test_experts_are_rounded_as_the_trainer_has_them(role: str, rounds: bool, tmp_path: Path) -> None:
    """Of the policy's engines, whichever rank has which rows. A judge is another model."""
    architecture, grid = ARCHITECTURES["experts"], Grid((0, 1), tp=2)
    full = {name: np.nan_to_num(one, posinf=1, neginf=1) for name, one in model(architecture, torch.float32).items()}
    save_file({name: np.ascontiguousarray(one) for name, one in full.items()}, tmp_path / "model.safetensors")
    fake = {"fake_quantization": {"group_size": 4}}
    paths = {"judge": {"path": str(tmp_path)}} if role == "judge" else {}
    of = make_config(model={"path": str(tmp_path), "dtype": "float32", **fake}, **paths)
    wanted = {name: int4_rounded(torch.from_numpy(one), 4, 7.0).numpy() for name, one in full.items()}
    wanted = {name: wanted[name] if rounds and is_expert(name) else one for name, one in full.items()}
    assert rounds == any(not np.array_equal(wanted[name], one) for name, one in full.items())
    for rank in grid.ranks:
        (part,) = engine_parts(of, architecture, grid, role)
        received = allocate_parameters(part.layout, rank, device=CPU)
        engine = SimpleNamespace(
            begin_update=lambda: None,
            incoming=lambda number, received=received: received,
            arrived=lambda number: None,
            end_update=lambda version: None,
        )
        world = SimpleNamespace(rank=rank)
        site = SimpleNamespace(config=of, role=role, architecture=architecture, grid=grid, world=world)
        serve_checkpoint(engine, site, version=1)  # type: ignore[arg-type]
        shard = engine_shard(architecture, wanted, Place(2, rank))
        for name, values in ((name, values) for name, values in shard.items() if ".layers." in name):  # without padding
            assert torch.equal(received[name], torch.from_numpy(values).view(received[name].shape)), name


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_blocks_are_quantised_whole_whatever_a_rank_has_of_them(name: str, tp: int, tmp_path: Path) -> None:
    architecture, grid = ARCHITECTURES[name], Grid(tuple(range(tp)), tp=tp)
    full = model(architecture, torch.bfloat16)
    save_file({tensor: np.ascontiguousarray(values) for tensor, values in full.items()}, tmp_path / "model.safetensors")
    part = engine_of(architecture, grid, dtype="bfloat16", fp8=True)
    layouts = part.filled_from(part.plain)
    for rank in range(tp):
        found = allocate_parameters(part.layout, rank)
        for tensor in found.values():
            tensor.view(torch.uint8).fill_(7)
        load_quantized(tmp_path, part.plain, layouts, rank, found, dtype=torch.bfloat16)
        for parameter, values in quantised_shard(architecture, full, Place(tp, rank)).items():
            mine, wanted = found[parameter], values.reshape(found[parameter].shape)
            assert mine.dtype == wanted.dtype == torch.float8_e4m3fn or parameter.endswith("_scale_inv"), parameter
            assert torch.equal(as_bytes(mine), as_bytes(wanted)), parameter
        embedding = found["model.embed_tokens.weight"]
        own = full["model.embed_tokens.weight"].shape[0] - rank * len(embedding)
        assert not embedding[max(own, 0) :].any() and embedding[:own].float().abs().nan_to_num().sum() != abs(PADDING)


def test_a_tensor_that_is_not_there_is_named_with_its_key(tmp_path: Path) -> None:
    save_file({"model.norm.weight": np.zeros(192, dtype=np.float32)}, tmp_path / "model.safetensors")
    part = engine_of(ARCHITECTURES["qwen2"], GRID, dtype="float32", fp8=True)
    parameters = allocate_parameters(part.layout, 0)
    with pytest.raises(CheckpointError, match=r"lacks tensor .*judge\.path"):
        load_quantized(
            tmp_path,
            part.plain,
            part.filled_from(part.plain),
            0,
            parameters,
            dtype=torch.float32,
            config_key="judge.path",
        )


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)
