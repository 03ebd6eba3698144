"""Megatron's modules have the shapes of our layouts, also with the stand-in for Transformer Engine. Their import is
quick."""

import rltrain.training.megatron  # noqa: F401  # isort: skip  # first: it loads Megatron without torch's compiler
import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import megatron.core.timers
import pytest
import torch

from rltrain.models.families import LATENT_NORM_EPS
from rltrain.reshard.megatron_layout import chunks_of, megatron_layout
from rltrain.runtime.grid import Grid
from rltrain.training.megatron import uncompiled
from rltrain.training.megatron.uncompiled import _absent
from tests.forked import popen as forked
from tests.forked.popen import PYTHON_PATH, REPOSITORY, run
from tests.support.model_shards import MOE, VARIANTS, tiny_architecture

CASES: dict[str, dict[str, Any]] = {
    "experts": {"family": "qwen3_moe", "layers": 3, "grid": {"tp": 2, "ep": 2}},
    "experts_not_cut": {"family": "qwen3_moe", "layers": 3, "grid": {"tp": 2, "ep": 4, "etp": 1}},
    "experts_cut_more": {"family": "mixtral", "layers": 2, "grid": {"tp": 1, "ep": 2, "etp": 2}},
    "latent_attention": {"family": "deepseek_v3", "layers": 3, "grid": {"tp": 2, "ep": 2}},
    "virtual_stages": {"family": "qwen3_moe", "layers": 4, "tied": True, "grid": {"pp": 2, "ep": 2, "vpp": 2}},
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
    """Returns the results by case and rank."""
    cases, results = (tmp_path_factory.mktemp("megatron_shapes") / name for name in ("cases.json", "results.json"))
    sizes = [{"num_layers": case["layers"], "tied_embeddings": case.get("tied", False)} for case in CASES.values()]
    cases.write_text(
        json.dumps([{**case, "ranks": 4, "architecture": of} for case, of in zip(CASES.values(), sizes, strict=True)])
    )
    done = run([sys.executable, "tests/support/megatron_shapes.py", str(cases), str(results)], timeout_s=300)
    assert done.returncode == 0, done.stderr[-4000:]
    return dict(zip(CASES, json.loads(results.read_text()), strict=True))


@pytest.mark.parametrize("name", CASES)
def test_layouts_are_those_of_megatron_core(name: str, real: dict[str, list[dict[str, Any]]]) -> None:
    case = CASES[name]
    architecture = tiny_architecture(case["family"], num_layers=case["layers"], tied_embeddings=case.get("tied", False))
    grid = Grid((0, 1, 2, 3), **case["grid"])
    layout, chunks = megatron_layout(architecture, grid), chunks_of(architecture, grid)
    for rank, found in enumerate(real[name]):
        assert {key: list(shape) for key, shape in layout.on(rank).parameters} == found["parameters"]
        assert found["layers"] == {
            f"{chunk.prefix}decoder.layers.{local}": layer
            for chunk in chunks[grid.coordinates(rank).pp]
            for local, layer in enumerate(chunk.layers)
        }


FAMILIES = ("llama", "qwen2", "qwen3", "qwen3_moe", "mixtral", "deepseek_v3")
SPARSE = {*MOE, "moonlight"}
SHAPE_CASES: dict[str, dict[str, Any]] = {
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
        *([({"tp": 2, "ep": 2, "etp": 1}, 2), ({"tp": 1, "ep": 2, "etp": 2}, 4)] if name in SPARSE else []),
    )
}


def run_beside_stand_ins(script: str, *arguments: Path, timeout_s: float) -> None:
    """Runs a script in a separate process, because an imported megatron-core does not look for Transformer Engine
    again."""
    path = os.pathsep.join((str(REPOSITORY / "tests/support/packages"), PYTHON_PATH))
    done = subprocess.run(
        [sys.executable, "-W", "ignore", f"tests/support/{script}", *map(str, arguments)],
        cwd=REPOSITORY,
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-8000:]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """Returns the results by case and rank."""
    folder = tmp_path_factory.mktemp("transformer_engine_shapes")
    cases, results = folder / "cases.json", folder / "results.json"
    cases.write_text(json.dumps([*SHAPE_CASES.values()]))
    run_beside_stand_ins("megatron_shapes.py", cases, results, timeout_s=300)
    return dict(zip(SHAPE_CASES, json.loads(results.read_text()), strict=True))


@pytest.mark.parametrize("name", SHAPE_CASES)
def test_layouts_are_those_of_transformer_engines_modules(name: str, built: dict[str, list[dict[str, Any]]]) -> None:
    case = SHAPE_CASES[name]
    architecture = VARIANTS[case["variant"]] if "variant" in case else tiny_architecture(case["family"])
    layout = megatron_layout(architecture, Grid(tuple(range(case["ranks"])), **case["grid"]), transformer_engine=True)
    for rank, found in enumerate(built[name]):
        assert {key: list(shape) for key, shape in layout.on(rank).parameters} == found["parameters"]
    assert any("layer_norm_weight" in key for key in found["parameters"]), (
        "expected parameters of Transformer Engine's modules"
    )


@pytest.mark.parametrize("name", SHAPE_CASES)
def test_adapters_fit_beside_transformer_engines_modules(name: str, built: dict[str, list[dict[str, Any]]]) -> None:
    """On one rank, adapters add the same as merged weights. Their inputs are normed if the module contains a norm.
    Tokens of an expert go to the adapter of this expert."""
    case = SHAPE_CASES[name]
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
    """The config has another epsilon here."""
    assert {tuple(rank["latent_norm_eps"]) for name in built for rank in built[name]} == {(), (LATENT_NORM_EPS,)}


@pytest.mark.parametrize("name", ["deepseek_v3 tp2", "deepseek_v3 tp2 ep2 etp1", "moonlight tp2", "qwen3_moe tp2"])
def test_gradient_norms_count_once_what_every_tensor_parallel_rank_has(
    name: str, built: dict[str, list[dict[str, Any]]]
) -> None:
    """Transformer Engine marks such a parameter as a shard."""
    whole = {"kv_down_proj", "q_down_proj", "router"} if "deepseek" in name else {"kv_down_proj", "router"}
    found = {key.split(".")[-2].removeprefix("linear_") for key in built[name][1]["whole"]}
    assert found == (whole if "qwen3" not in name else {"router"})


LATENT, GROUPS = "deepseek_v3", "qwen3_moe"
CASES_OF = {
    LATENT: ("tp2", "pp2 cp2 ep2", "tp2 cp2 ep4 etp1", "tp2 cp2 etp2 by heads", "tp2 ep2 deepep"),
    "further": ("pp2 cp2 ep2",),
    "further of dense": ("tp2 pp2",),
    "yarn": ("tp2 pp2", "cp2"),
    "latent linear": ("tp2 ep2",),
    "moonlight": ("tp2 cp2 ep2",),
    GROUPS: ("tp4", "cp2 ep4 deepep", "pp2 cp2 ep2 by heads"),
    "rounded": ("ep2 etp2",),
    "alike": ("tp2 ep2", "cp2 ep4"),
    "alike of yarn": ("tp2 pp2", "tp2 cp2 by heads"),
    "alike latent": ("tp2 ep2", "pp2 cp2 ep2 by heads"),
    "alike further": ("pp2 cp2 ep2",),
}
NAMES = {LATENT: "latent", GROUPS: "groups"}
TRAINING_CASES = {f"{NAMES.get(of, of)} {grid}": of for of, grids in CASES_OF.items() for grid in grids}
RELATIVE, ABSOLUTE, TOLD = 1e-5, 1e-6, 1e-4


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("transformer_engine_training")
    run_beside_stand_ins("transformer_engine_ranks.py", folder, timeout_s=500)
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(4)]


@pytest.mark.slow
@pytest.mark.parametrize("case", TRAINING_CASES)
def test_steps_and_log_probs_are_those_of_megatrons_own_modules(case: str, ranks: list[dict[str, Any]]) -> None:
    alone, found = ranks[0][TRAINING_CASES[case]], [rank[case] for rank in ranks if case in rank]
    assert len(found) > 1
    for report in found:
        for step, wanted in zip(report["steps"], alone["steps"], strict=True):
            assert step == pytest.approx(wanted, rel=RELATIVE, abs=ABSOLUTE)
        assert report["told"] == pytest.approx(alone["told"], abs=TOLD)


@pytest.mark.slow
def test_rounded_experts_tell_other_than_those_that_are_not(ranks: list[dict[str, Any]]) -> None:
    assert ranks[0]["rounded"]["told"] != pytest.approx(ranks[0][GROUPS]["told"], abs=10 * TOLD)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "theirs", "ours"),
    [
        ("odd heads", "No dot product attention backend", "keys and values have 20 and 16; set it to auto or local"),
        ("one key head by heads", "requires num_heads % cp_size == 0", "1 key-value heads of a tensor-parallel rank"),
    ],
)
def test_what_it_refuses_is_refused_before(case: str, theirs: str, ours: str, ranks: list[dict[str, Any]]) -> None:
    for rank in (0, 1):
        found = ranks[rank][case]
        assert theirs in found["transformer_engine"] and ours in found["rltrain"]


def test_a_package_is_absent_for_as_long_as_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "wave", raising=False)
    with _absent("wave"), pytest.raises(ImportError):
        importlib.import_module("wave")
    assert importlib.import_module("wave") is sys.modules["wave"]


def test_one_that_is_in_use_stays() -> None:
    with _absent("sys"):
        assert importlib.import_module("sys") is sys


def test_megatron_has_neither_wandb_nor_tensorboard() -> None:
    assert megatron.core.timers.wandb is None and megatron.core.timers.SummaryWriter is None


ABSENT = ("wandb", "torch.utils.tensorboard")


@pytest.mark.parametrize("on_gpu", [False, True])
def test_it_is_imported_without_them_everywhere(on_gpu: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    imported: list[tuple[str, list[object]]] = []

    def import_module(name: str) -> object:
        imported.append((name, [sys.modules[package] for package in ABSENT]))
        return sys.modules[name]

    for package in ABSENT:
        monkeypatch.delitem(sys.modules, package, raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: on_gpu)
    monkeypatch.setattr(uncompiled.importlib, "import_module", import_module)
    uncompiled.import_megatron()
    assert imported == [("megatron.core.jit", [None, None])] and sys.modules.keys().isdisjoint(ABSENT)


PROGRAM = """
import sys, torch
torch.cuda.is_available = lambda: {has_gpu}
compiled = torch.compile
import rltrain.trainer, rltrain.training.megatron.backend
print("torch._inductor.compile_fx" in sys.modules, torch.compile is compiled)
"""


def test_a_rank_without_a_gpu_does_not_load_the_compiler(tmp_path: Path) -> None:
    """The process from which tests fork their ranks does not load it either."""
    script = tmp_path / "rank.py"
    script.write_text(PROGRAM.format(has_gpu=False))
    done = forked.run([sys.executable, str(script)], timeout_s=120)
    assert done.stdout.split() == ["False", "True"], done.stderr


@pytest.mark.slow  # the compiler takes long to load
def test_a_rank_with_a_gpu_does_and_torch_compiles_as_before() -> None:
    program = PROGRAM.format(has_gpu=True)
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True", "True"]
