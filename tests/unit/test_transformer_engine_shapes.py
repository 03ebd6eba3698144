"""Layouts against models of Transformer Engine's modules, which a stand-in has: what each rank's parameters are called,
and their shapes, where Megatron's specs and rltrain build them."""

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from rltrain.models.families import LATENT_NORM_EPS
from rltrain.reshard.megatron_layout import megatron_layout
from rltrain.runtime.grid import Grid
from tests.forked.popen import PYTHON_PATH, REPOSITORY
from tests.model_shards import MOE, VARIANTS, tiny_architecture

FAMILIES = ("llama", "qwen2", "qwen3", "qwen3_moe", "mixtral", "deepseek_v3")
CASES: dict[str, dict[str, Any]] = {
    f"{name} {' '.join(f'{key}{size}' for key, size in grid.items())}": {
        ("variant" if name in VARIANTS else "family"): name,
        "grid": grid,
        "ranks": ranks,
    }
    for name in (*FAMILIES, *VARIANTS)
    for grid, ranks in (
        ({"tp": 1}, 1),
        ({"tp": 2}, 2),
        *([({"tp": 2, "cp": 2}, 4)] if name in ("qwen3", "deepseek_v3") else []),
        *(
            [({"tp": 2, "ep": 2, "etp": 1}, 2), ({"tp": 1, "ep": 2, "etp": 2}, 4)]
            if name in MOE or name == "moonlight"
            else []
        ),
    )
}


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """By case and rank. Made by a process of its own: one that has megatron-core already would not look again."""
    folder = tmp_path_factory.mktemp("transformer_engine_shapes")
    (folder / "cases.json").write_text(json.dumps([*CASES.values()]))
    command = ["tests/megatron_shapes.py", str(folder / "cases.json"), str(folder / "results.json")]
    path = os.pathsep.join((str(REPOSITORY / "tests/stand_ins"), PYTHON_PATH))
    done = subprocess.run(
        [sys.executable, "-W", "ignore", *command],
        cwd=REPOSITORY,
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return dict(zip(CASES, json.loads((folder / "results.json").read_text()), strict=True))


@pytest.mark.parametrize("name", CASES)
def test_layouts_are_those_of_transformer_engines_modules(name: str, built: dict[str, list[dict[str, Any]]]) -> None:
    case = CASES[name]
    architecture = VARIANTS[case["variant"]] if "variant" in case else tiny_architecture(case["family"])
    layout = megatron_layout(architecture, Grid(tuple(range(case["ranks"])), **case["grid"]), transformer_engine=True)
    for rank, found in enumerate(built[name]):
        assert {key: list(shape) for key, shape in layout.on(rank).parameters} == found["parameters"]
    assert any("layer_norm_weight" in key for key in found["parameters"]), "of Transformer Engine's modules"


@pytest.mark.parametrize("name", CASES)
def test_adapters_fit_beside_transformer_engines_modules(name: str, built: dict[str, list[dict[str, Any]]]) -> None:
    """On one rank what they add is what merged weights would: of normed inputs where a norm is inside, of an expert's
    tokens with its own."""
    case = CASES[name]
    architecture = VARIANTS[case["variant"]] if "variant" in case else tiny_architecture(case["family"])
    grid = Grid(tuple(range(case["ranks"])), **case["grid"])
    layout = megatron_layout(architecture.adapted(4, None), grid, transformer_engine=True)
    for rank, found in enumerate(built[name]):
        assert {key: list(shape) for key, shape in layout.on(rank).parameters} == found["adapters"]
        assert not found["misfits"]
        assert all(difference <= 1e-5 for difference in found["added"])
        assert bool(found["added"]) == (case["ranks"] == 1)


@pytest.mark.parametrize("family", ["qwen3", "deepseek_v3"])
def test_attention_is_told_of_the_ranks_that_share_its_sequences(
    family: str, built: dict[str, list[dict[str, Any]]]
) -> None:
    found = [rank["context_parallel"] for rank in built[f"{family} tp2 cp2"]]
    num_layers = tiny_architecture(family).num_layers
    assert found == [[[ranks, "p2p"]] * num_layers for ranks in ([0, 2], [1, 3], [0, 2], [1, 3])]
    assert built[f"{family} tp2"][0]["context_parallel"] == []


def test_norms_of_latents_have_their_own_epsilon(built: dict[str, list[dict[str, Any]]]) -> None:
    """Whatever the config's is, which here is another one."""
    assert {tuple(rank["latent_norm_eps"]) for name in built for rank in built[name]} == {(), (LATENT_NORM_EPS,)}


@pytest.mark.parametrize("name", ["deepseek_v3 tp2", "deepseek_v3 tp2 ep2 etp1", "moonlight tp2", "qwen3_moe tp2"])
def test_gradient_norms_count_once_what_every_tensor_parallel_rank_has(
    name: str, built: dict[str, list[dict[str, Any]]]
) -> None:
    """Transformer Engine marks it as a shard."""
    whole = {"kv_down_proj", "q_down_proj", "router"} if "deepseek" in name else {"kv_down_proj", "router"}
    found = {key.split(".")[-2].removeprefix("linear_") for key in built[name][1]["whole"]}
    assert found == (whole if "qwen3" not in name else {"router"})
