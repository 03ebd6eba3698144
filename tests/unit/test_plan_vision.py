"""A dry run estimates the bytes and seconds of vision towers and images."""

import json
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from PIL import Image
from torch import Tensor

from rltrain.config.schema import Config
from rltrain.models import Architecture, read_architecture
from rltrain.models.flops import vision_flops
from rltrain.models.vision import Tower as Kind
from rltrain.models.vision_tower import CLASSES, encode
from rltrain.planning.description import describe_job
from rltrain.planning.hardware import GB, GPUS
from rltrain.planning.image_estimates import image_tokens, tower_bytes
from rltrain.planning.memory import host_bytes, resident_bytes, working_bytes
from rltrain.planning.options import DryRunOptions, best_changes
from rltrain.planning.planned import PlannedJob, Workload, plan_job, trained_elements
from rltrain.planning.task_time import TrainingTime, drawing
from rltrain.runtime.grid import Grid
from rltrain.runtime.placement import resolve_placement
from tests.support.counting_images import GRPO
from tests.support.vision_checkpoints import CONFIGS, load_model, tiny_vision, write_checkpoint

H100 = GPUS["h100"]
FP32 = 4
PROMPT, PROMPTS, SAMPLES = 256, 16, 4


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("qwen3_vl")
    write_checkpoint(folder, "qwen3_vl")
    return folder


@pytest.fixture
def seeing(checkpoint: Path) -> Architecture:
    return read_architecture(checkpoint, sees=True)


def job_of(
    architecture: Architecture, *, ranks: str = "0", vision: dict[str, Any] | None = None, **sections: Any
) -> PlannedJob:
    """Returns a job in which role actor has the first ranks, and the rollout the next one."""
    num_actors = int(ranks.rpartition("-")[2]) + 1
    model = {"path": "m", "vision": vision or {}, **sections.pop("model", {})}
    values = {
        "steps": 10,
        "placement": {"actor": ranks, "rollout, reward": num_actors},
        "data": {"train": {"path": "t"}, "max_prompt_tokens": PROMPT},
        "batch": {"prompts_per_step": PROMPTS, "samples_per_prompt": SAMPLES, "mini_batches": 2},
        "loss": {"old_logprobs": "rollout"},
    }
    config = Config.model_validate(values | sections | {"model": model})
    placed = resolve_placement(config.placement, num_actors + 1, 8)
    return plan_job(config, placed, {role: architecture for role in ("actor", *placed.roles)}, 8)


def language_model(architecture: Architecture) -> Architecture:
    return replace(architecture, vision=None)


# Bytes.


@pytest.mark.parametrize("kind", get_args(Kind))
def test_the_first_stage_has_the_elements_of_the_tower(kind: Kind, tmp_path: Path) -> None:
    write_checkpoint(tmp_path, kind)
    architecture = read_architecture(tmp_path, sees=True)
    real = {name: parameter.numel() for name, parameter in load_model(tmp_path).named_parameters()}
    assert trained_elements(architecture, Grid((0,)), 0).total == sum(real.values())
    tower = sum(size for name, size in real.items() if ".visual." in name)
    with_tower, without = (
        [trained_elements(one, Grid((0, 1), pp=2), stage).total for stage in (0, 1)]
        for one in (architecture, language_model(architecture))
    )
    assert with_tower == [without[0] + tower, without[1]]


@pytest.mark.parametrize("backend", ["megatron", "fsdp"])
def test_a_frozen_tower_has_weights_alone(seeing: Architecture, backend: str) -> None:
    jobs = [
        job_of(architecture, vision={"train": trains}, actor={"backend": backend})
        for architecture, trains in ((seeing, True), (seeing, False), (language_model(seeing), False))
    ]
    trained, frozen, without = (resident_bytes(job, "actor", 0) for job in jobs)
    for part in ("optimizer", "gradients", "master_weights"):
        assert frozen[part] == without[part]
    assert trained["optimizer"] > frozen["optimizer"]
    assert trained["weights"] == frozen["weights"] > without["weights"]


@pytest.mark.parametrize("kind", ["qwen2_5_vl", "qwen3_vl"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_activations_of_a_tower_are_those_that_autograd_keeps(kind: Kind, dtype: torch.dtype) -> None:
    config, text, tower = CONFIGS[kind]
    sizes = {"depth": 6, "hidden_size": 128, "intermediate_size": 384}
    module = import_module(f"transformers.models.{kind}.modeling_{kind}")
    of_tower = config(text_config=text, vision_config={**tower, **sizes}).vision_config
    model = getattr(module, CLASSES[kind])._from_config(of_tower, dtype=dtype, attn_implementation="sdpa")
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        if tensor.untyped_storage().data_ptr() not in weights:
            kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    vision = replace(tiny_vision(kind), depth=6, hidden=128, ffn=384)
    side = 16
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        encode(model, torch.randn(side**2, vision.patch_size, dtype=dtype), torch.tensor([[1, side, side]]))
    real = sum(tensor.untyped_storage().nbytes() for tensor in kept.values()) / side**2
    assert tower_bytes(vision, dtype.itemsize, learns=True) == pytest.approx(real, rel=0.05)


def test_images_take_memory_on_the_first_stage(seeing: Architecture) -> None:
    job = job_of(seeing, ranks="0-1", actor={"parallel": {"pp": 2}})
    first, second = (working_bytes(job, "update", {"actor": stage}) for stage in (0, 1))
    tokens = PROMPTS * PROMPT // 2  # a mini-batch has samples of all prompts, half as long as the longest on average
    assert image_tokens(job, "actor", trains=True) == tokens
    assert first["image features"] == tokens * seeing.hidden_size * 3 * FP32 * 2, (
        "deepstack has two more; and gradients"
    )
    assert second.keys().isdisjoint({"image features", "vision tower"})
    frozen = job_of(seeing, vision={"train": False})
    assert working_bytes(frozen, "update", {"actor": 0})["image features"] == first["image features"] / 2


def test_observations_of_environments_are_of_a_sample_alone(seeing: Architecture) -> None:
    settings = {"sampling": {"max_response_tokens": 64}, "max_context_tokens": 320}
    placement = {"actor": 0, "rollout, reward, env": 1}
    job = job_of(seeing, rollout=settings, placement=placement, env={"function": "calculator"})
    assert image_tokens(job, "actor", trains=True) == PROMPTS * SAMPLES // 2 * 320 // 2
    alone = job_of(seeing, batch={"prompts_per_step": 1, "samples_per_prompt": 2})
    assert image_tokens(alone, "actor", trains=True) == PROMPT, "a single prompt may be the longest"


def test_fewer_patches_at_a_time_take_less(seeing: Architecture) -> None:
    def tower(**vision: Any) -> dict[str, int]:
        short = {"sampling": {"max_response_tokens": 64}, "max_context_tokens": 320}
        job = job_of(seeing, vision=vision, actor={"micro_batch_tokens": 320}, rollout=short)
        return working_bytes(job, "update", {"actor": 0})

    large, small, kept = tower(), tower(max_patches=64), tower(recompute=False)
    assert "activations" not in large, "the tower runs before the language model and needs more"
    assert "vision tower" not in small and small["activations"] < large["vision tower"]
    assert kept["vision tower"] >= large["vision tower"] and kept["activations"] == small["activations"]


def test_a_dry_run_proposes_smaller_pieces(seeing: Architecture) -> None:
    large = replace(seeing, vision=replace(tiny_vision("qwen3_vl"), hidden=4096, depth=40, ffn=16384))
    short = {"sampling": {"max_response_tokens": 64}, "max_context_tokens": 320}
    job = job_of(large, actor={"micro_batch_tokens": 320}, rollout=short)
    assert "model.vision.max_patches: 4096" in {change.text for change in best_changes(job, H100, lambda job: True)}


@pytest.mark.parametrize("backend", ["megatron", "fsdp"])
def test_runs_without_images_take_what_they_did(seeing: Architecture, backend: str) -> None:
    texts = language_model(seeing)
    own = {"actor": {"backend": backend}, "model": {"vision": None}}
    for task in ("update", "generate"):
        stages = {"actor": 0} if task == "update" else {"rollout": 0}
        found = working_bytes(job_of(texts, **own), task, stages)
        assert found.keys().isdisjoint({"image features", "vision tower"})
    assert "images, not pinned" not in host_bytes(job_of(texts, **own), {"actor": 0}, frozenset())


def test_the_host_has_the_decoded_images(seeing: Architecture) -> None:
    job = job_of(seeing, data={"train": {"path": "t"}, "images": {"cache_gb": 8}})
    assert host_bytes(job, {"actor": 0}, frozenset())["images, not pinned"] == GB


# Seconds.


def test_the_tower_takes_its_operations(seeing: Architecture) -> None:
    workload = Workload(100, 50, 50, image_tokens=64)
    assert seeing.vision is not None
    forward = vision_flops(seeing.vision, [(1, 16, 16)]) / (H100.flops("bfloat16") * H100.efficiency.matmul)

    def encoding(trains: bool, **vision: Any) -> float:
        jobs = (job_of(one, vision=vision) for one in (seeing, language_model(seeing)))
        times = [TrainingTime(job, "actor", H100, workload) for job in jobs]
        with_tower, without = ((time.accumulating(1) if trains else time.evaluating(1)) for time in times)
        return (with_tower - without) / PROMPTS

    assert encoding(False) == pytest.approx(forward)
    assert encoding(True) == pytest.approx(4 * forward), "twice forward, and backward"
    assert encoding(True, recompute=False) == pytest.approx(3 * forward)
    assert encoding(True, train=False) == pytest.approx(forward)


def test_prefill_encodes_the_images_of_each_prompt_once(seeing: Architecture) -> None:
    def generating(image_tokens: float) -> float:
        workload = Workload(100, 50, 50, image_tokens)
        return drawing(job_of(seeing), "rollout", H100, workload, 10**9, PROMPTS * SAMPLES, SAMPLES, 0)

    assert seeing.vision is not None
    small, large = (vision_flops(seeing.vision, [(1, side, side)]) for side in (8, 16))
    peak = H100.flops("bfloat16") * H100.efficiency.matmul
    assert generating(64) - generating(16) == pytest.approx(PROMPTS * (large - small) / peak, rel=1e-3)


# The text.


@pytest.fixture
def described(checkpoint: Path, tmp_path: Path) -> str:
    Image.new("RGB", (56, 56)).save(tmp_path / "image.png")
    row = {"prompt": "<image>red?", "images": ["image.png"], "label": "1"}
    rows = tmp_path / "rows.jsonl"
    rows.write_text(3 * (json.dumps(row) + "\n"))
    overrides = [f"model.path={checkpoint}", f"data.train.path={rows}", f"data.eval.path={rows}"]
    return describe_job(
        GRPO, [*overrides, "data.max_prompt_tokens=64", "rollout.max_context_tokens=66"], DryRunOptions()
    )


def test_a_dry_run_tells_about_images(described: str) -> None:
    assert "a prompt has 1 images with 16 of its " in described
    assert "prompts of 32.0 tokens (16.0 of images)" in described, (
        "half of the longest prompt's 64 tokens on average, and half of these"
    )
    assert "images, not pinned 4.00 GB" in described
