"""Layouts against real megatron-core models: what each rank's parameters are called, their shapes, its layers."""

import json
import sys
from typing import Any

import pytest

from rltrain.reshard.megatron_layout import chunks_of, megatron_layout
from rltrain.runtime.grid import Grid
from tests.forked.popen import run
from tests.model_shards import tiny_architecture

CASES: dict[str, dict[str, Any]] = {
    "experts": {"family": "qwen3_moe", "layers": 3, "grid": {"tp": 2, "ep": 2}},
    "experts_not_cut": {"family": "qwen3_moe", "layers": 3, "grid": {"tp": 2, "ep": 4, "etp": 1}},
    "experts_cut_more": {"family": "mixtral", "layers": 2, "grid": {"tp": 1, "ep": 2, "etp": 2}},
    "latent_attention": {"family": "deepseek_v3", "layers": 3, "grid": {"tp": 2, "ep": 2}},
    "virtual_stages": {
        "family": "qwen3_moe",
        "layers": 4,
        "tied": True,
        "grid": {"tp": 1, "pp": 2, "ep": 2, "vpp": 2},
    },
    "uneven": {
        "family": "deepseek_v3",
        "layers": 5,
        "grid": {"tp": 2, "pp": 2, "ep": 2, "etp": 1, "layers_per_stage": [3, 2]},
    },
    "uneven_virtual_stages": {
        "family": "qwen2",
        "layers": 7,
        "grid": {"pp": 2, "vpp": 2, "layers_per_stage": [1, 2, 3, 1]},
    },
}


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """By case and rank."""
    folder = tmp_path_factory.mktemp("megatron_shapes")
    cases = [
        {
            **case,
            "ranks": 4,
            "architecture": {"num_layers": case["layers"], "tied_embeddings": case.get("tied", False)},
        }
        for case in CASES.values()
    ]
    (folder / "cases.json").write_text(json.dumps(cases))
    command = [sys.executable, "tests/megatron_shapes.py", str(folder / "cases.json"), str(folder / "results.json")]
    done = run(command, timeout_s=300)
    assert done.returncode == 0, done.stderr[-4000:]
    return dict(zip(CASES, json.loads((folder / "results.json").read_text()), strict=True))


@pytest.mark.parametrize("name", CASES)
def test_layouts_are_those_of_megatron_core(name: str, real: dict[str, list[dict[str, Any]]]) -> None:
    case = CASES[name]
    architecture = tiny_architecture(case["family"], num_layers=case["layers"], tied_embeddings=case.get("tied", False))
    grid = Grid((0, 1, 2, 3), **case["grid"])
    layout = megatron_layout(architecture, grid)
    chunks = chunks_of(architecture, grid)
    for rank, found in enumerate(real[name]):
        assert {key: list(shape) for key, shape in layout.on(rank).parameters} == found["parameters"]
        assert found["layers"] == {
            f"{chunk.prefix}decoder.layers.{local}": layer
            for chunk in chunks[grid.coordinates(rank).pp]
            for local, layer in enumerate(chunk.layers)
        }
