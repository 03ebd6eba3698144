"""Every shipped recipe loads, passes the checks, and fits the world that its header names."""

import re
from pathlib import Path

import pytest

from rltrain.cluster.placement import resolve_placement, role_grids
from rltrain.config.loader import load_config
from rltrain.dry_run.description import describe_job
from rltrain.dry_run.options import DryRunOptions
from rltrain.legality.config import check_config

CONFIGS = sorted((Path(__file__).resolve().parents[2] / "configs").rglob("*.yaml"))
HEADER = re.compile(r"^# world size: (\d+)$", re.MULTILINE)
RANKS_PER_NODE = 8


def test_there_are_recipes():
    assert {"quickstart.yaml", "quickstart_sft.yaml"} <= {path.name for path in CONFIGS}


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_the_recipe_is_accepted_in_its_world(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
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
    monkeypatch.chdir(tmp_path)  # where none of its files lie
    assert "no deadlock" in describe_job(path, [], DryRunOptions(world_size, min(world_size, RANKS_PER_NODE)))
