"""Every shipped recipe loads, passes the checks, and fits the world that its header names."""

import json
import re
from pathlib import Path

import pytest

from rltrain.cli import quickstart
from rltrain.config.loader import load_config
from rltrain.planning.description import describe_job
from rltrain.planning.options import SHIPPED, DryRunOptions, shipped_folder
from rltrain.planning.validation import check_config
from rltrain.runtime.placement import resolve_placement, role_grids

CONFIGS = sorted((Path(__file__).resolve().parents[2] / "configs").rglob("*.yaml"))
HEADER = re.compile(r"^# world size: (\d+)$", re.MULTILINE)
RANKS_PER_NODE = 8


def test_there_are_recipes():
    assert {"quickstart.yaml", "quickstart_sft.yaml"} <= {path.name for path in CONFIGS}


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_the_recipe_is_accepted_in_its_world(path: Path):
    header = HEADER.search(path.read_text())
    assert header, f"{path.name} needs a line '# world size: N'"
    world_size = int(header[1])
    config = load_config(path, [])
    check_config(config)
    placement = resolve_placement(config.placement, world_size, min(world_size, RANKS_PER_NODE))
    grids = role_grids(config, placement)
    assert {rank for grid in grids.values() for rank in grid.ranks} == set(range(world_size)), "no rank stays idle"
    for role, grid in grids.items():
        assert config.batch.prompts_per_step // config.batch.mini_batches >= grid.dp, role


LARGE = ("qwen3_30b_a3b.yaml", "qwen3_30b_a3b_4_nodes.yaml", "deepseek_v3.yaml")


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_bytes_and_seconds_are_foretold_in_a_fresh_checkout(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # none of the models that recipes name is there
    header = HEADER.search(path.read_text())
    assert header
    text = describe_job(path, [], DryRunOptions(int(header[1]), RANKS_PER_NODE))  # refused where an H100 has no room
    assert "no deadlock" in text and "Bytes, foretold for h100" in text and "a step: " in text
    model = load_config(path, []).model.path
    assert f"model.path: {model} does not exist yet; the shape is that of the config.json of " in text
    assert path.name not in LARGE or "Warnings" not in text
    assert path.name != "deepseek_v3.yaml" or "layers of the stages: 7, 8, 8, 8, 8, 8, 8, 6" in text


def test_shipped_shapes_take_the_place_of_absent_folders_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert shipped_folder("Qwen/Qwen3-0.6B@main") == SHIPPED / "Qwen3-0.6B"
    assert shipped_folder("/quickstart/../no/hf") == SHIPPED / "quickstart"
    assert shipped_folder("models/another") is None
    (tmp_path / "models" / "Qwen3-8B").mkdir(parents=True)
    assert shipped_folder("models/Qwen3-8B") is None


@pytest.mark.parametrize(("name", "experts"), [("quickstart", 0), ("quickstart_moe", 8)])
def test_the_quickstarts_shape_is_that_of_what_it_makes(name: str, experts: int, tmp_path: Path) -> None:
    rows = ["--train-rows", "1", "--eval-rows", "1", "--experts", str(experts)]
    quickstart.main(["--output", str(tmp_path), *rows])
    shipped, made = (
        json.loads((folder / "config.json").read_text()) for folder in (SHIPPED / name, tmp_path / "model")
    )
    assert shipped == made
