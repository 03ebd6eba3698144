"""The presets are legal in their worlds, overlap the right tasks, and fit their GPUs."""

import re
import sys
from pathlib import Path

import pytest

from rltrain.planning.description import describe_job
from rltrain.planning.options import DryRunOptions

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPOSITORY / "tools"))
from stand_in_models import shape_of, write_stand_in  # noqa: E402

PRESETS = sorted((REPOSITORY / "configs").glob("preset_*.yaml"))


def test_there_are_four() -> None:
    assert len(PRESETS) == 4


@pytest.mark.parametrize("path", PRESETS, ids=lambda path: path.stem)
def test_the_preset_fits(path: Path, tmp_path: Path) -> None:
    world = re.match(r"# world size: (\d+)", path.read_text())
    assert world
    model = write_stand_in("Qwen/Qwen3-8B", tmp_path)
    told = describe_job(path, [f"model.path={model}"], DryRunOptions(world_size=int(world[1])))
    hybrid = path.stem == "preset_hybrid_env"
    assert re.search(rf"actor +rollout +{'hybrid' if hybrid else 'disaggregated'}", told)
    assert "Schedule: sequential" in told if hybrid else "Schedule: asynchronous" in told


@pytest.mark.parametrize("name", ["mujoco", "maniskill"])
def test_simulators_share_the_gpus_of_half_of_the_actors(name: str, tmp_path: Path) -> None:
    model = write_stand_in("Qwen/Qwen3-VL-2B-Instruct", tmp_path)
    config = REPOSITORY / f"configs/{name}_qwen3_vl.yaml"
    told = describe_job(config, [f"model.path={model}"], DryRunOptions(world_size=8))
    assert re.search(r"actor +rollout +hybrid", told) and re.search(r"env +rollout +disaggregated", told)
    assert "Schedule: pipelined" in told


def test_stand_ins_are_found_by_name() -> None:
    seeing = shape_of("Qwen/Qwen3-VL-30B-A3B-Instruct") or {}
    assert (seeing["model_type"], seeing["vision_config"]["out_hidden_size"]) == ("qwen3_vl_moe", 2048)
    assert shape_of("Qwen/Qwen3-30B-A3B-Base")["num_experts"] == 128  # type: ignore[index]
    assert shape_of("/models/Qwen2.5-0.5B-Instruct/")["hidden_size"] == 896  # type: ignore[index]
    assert shape_of("Qwen/Qwen3.5-9B")["text_config"]["num_hidden_layers"] == 32  # type: ignore[index]
    assert shape_of("unsloth/gpt-oss-20b-BF16")["num_local_experts"] == 32  # type: ignore[index]
    assert shape_of("nvidia/Nemotron-Mini-4B-Instruct")["model_type"] == "nemotron"  # type: ignore[index]
    assert shape_of("nvidia/Nemotron-H-8B") == {"model_type": "nemotron_h"} and shape_of("my-model") is None
