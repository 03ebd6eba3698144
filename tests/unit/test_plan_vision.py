"""A dry run estimates the bytes and seconds of vision towers and images."""

import json
import re
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
from rltrain.planning.planned import PlannedJob, RowImages, Workload, plan_job, trained_elements
from rltrain.planning.task_time import TrainingTime, drawing
from rltrain.runtime.grid import Grid
from rltrain.runtime.placement import resolve_placement
from tests.support.counting_images import GRPO
from tests.support.vision_checkpoints import CONFIGS, MERGE, load_model, tiny_vision, write_checkpoint

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
    measured = sections.pop("measured", None)
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
    return plan_job(config, placed, {role: architecture for role in ("actor", *placed.roles)}, 8, measured)


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


def images_of(*sides: int) -> RowImages:
    """Returns the images of rows with one square image each, of these sides in patches."""
    tokens = [side * side // MERGE**2 for side in sides]
    grids = tuple((1, side, side) for side in sides)
    return RowImages(len(sides), 100, sum(tokens) / len(sides), max(tokens), grids, max(sides) ** 2)


def test_measured_images_take_the_memory_of_their_tokens(seeing: Architecture) -> None:
    def features(**sections: Any) -> int:
        return working_bytes(job_of(seeing, **sections), "update", {"actor": 0})["image features"]

    of_token = seeing.hidden_size * 3 * FP32 * 2
    assert features(measured=images_of(4, 8)) == PROMPTS * (4 + 16) // 2 * of_token
    single = {"prompts_per_step": 1, "samples_per_prompt": 2}
    assert features(measured=images_of(4, 8), batch=single) == 16 * of_token, "the prompt may be the one with the most"
    settings = {"sampling": {"max_response_tokens": 64}, "max_context_tokens": 320}
    env = {"rollout": settings, "placement": {"actor": 0, "rollout, reward, env": 1}, "env": {"function": "calculator"}}
    assert features(measured=images_of(4, 8), **env) == features(**env), "an environment shows other images"


def test_an_image_beyond_the_limit_of_patches_is_encoded_alone(seeing: Architecture) -> None:
    """The estimate of a pass with small pieces is the one of a limit as large as the image."""
    short = {"sampling": {"max_response_tokens": 64}, "max_context_tokens": 320}

    def needed(max_patches: int, measured: RowImages) -> list[dict[str, int]]:
        own = {"actor": {"micro_batch_tokens": 320}, "rollout": short, "measured": measured}
        job = job_of(wide, vision={"max_patches": max_patches}, **own)
        return [working_bytes(job, task, {role: 0}) for task, role in (("update", "actor"), ("generate", "rollout"))]

    wide = replace(seeing, vision=replace(tiny_vision("qwen3_vl"), hidden=1024, ffn=4096))
    large, small = images_of(24, 24), images_of(8, 8)
    assert needed(64, large) == needed(24**2, large)
    for more, less in zip(needed(64, large), needed(64, small), strict=True):
        assert sum(more.values()) > sum(less.values())


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
    frozen = job_of(seeing, ranks="0-1", vision={"train": False, "training_cache_gb": 2}, actor={"parallel": {"pp": 2}})
    kept = [host_bytes(frozen, {"actor": stage}, frozenset()).get("image features, not pinned") for stage in (0, 1)]
    assert kept == [2 * GB, None] and "image features, not pinned" not in host_bytes(job, {"actor": 0}, frozenset())


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
    workload = replace(workload, images=images_of(4, 16))
    measured = vision_flops(seeing.vision, [(1, 4, 4), (1, 16, 16)]) / 2
    assert encoding(False) / forward == pytest.approx(measured / vision_flops(seeing.vision, [(1, 16, 16)]))


def test_prefill_encodes_the_images_of_each_prompt_once(seeing: Architecture) -> None:
    def generating(image_tokens: float) -> float:
        workload = Workload(100, 50, 50, image_tokens)
        return drawing(job_of(seeing), "rollout", H100, workload, 10**9, PROMPTS * SAMPLES, SAMPLES, 0)

    assert seeing.vision is not None
    small, large = (vision_flops(seeing.vision, [(1, side, side)]) for side in (8, 16))
    peak = H100.flops("bfloat16") * H100.efficiency.matmul
    assert generating(64) - generating(16) == pytest.approx(PROMPTS * (large - small) / peak, rel=1e-3)


# The text.


def described(checkpoint: Path, folder: Path, *overrides: str, reads_rows: bool = True) -> str:
    """Returns the dry run of rows with an image of 16 tokens, and of one row with 64."""
    for side in (56, 112):
        Image.new("RGB", (side, side)).save(folder / f"{side}.png")
    rows, lines = folder / "rows.jsonl", []
    for side in (56, 56, 112):
        lines.append(json.dumps({"prompt": "<image>red?", "images": [f"{side}.png"], "label": "1"}))
    if reads_rows:
        rows.write_text("\n".join(lines))
    given = [f"model.path={checkpoint}", f"data.train.path={rows}", f"data.eval.path={rows}", *overrides]
    text = describe_job(GRPO, [*given, "data.max_prompt_tokens=128", "rollout.max_context_tokens=130"], DryRunOptions())
    return " ".join(text.split())


def test_a_dry_run_tells_about_images(checkpoint: Path, tmp_path: Path) -> None:
    text = described(checkpoint, tmp_path)
    found = re.search("data.train: a prompt has 1 images with 32 of its ([0-9.]+) tokens", text)
    assert found is not None and "on average over 3 rows, and at most 64; estimates use them" in text
    assert f"prompts of {float(found[1]):.1f} tokens (32.0 of images, as measured in 3 rows)" in text
    assert "images, not pinned 4.00 GB" in text and "encoded alone" not in text


def test_a_dry_run_tells_about_images_beyond_the_limit(checkpoint: Path, tmp_path: Path) -> None:
    assert (
        "an image has 256 patches, more than model.vision.max_patches 100: it is encoded alone, and the estimated "
        "bytes include this"
    ) in described(checkpoint, tmp_path, "model.vision.max_patches=100")


def test_a_dry_run_without_rows_assumes_images(checkpoint: Path, tmp_path: Path) -> None:
    text = described(checkpoint, tmp_path, reads_rows=False)
    assert "rows unknown" in text and "prompts of 64.0 tokens (32.0 of images), responses" in text, (
        "half of the longest prompt's 128 tokens on average, and half of these"
    )
