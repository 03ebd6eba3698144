"""The rank of test_parity: trainer and engine on one checkpoint, in one process."""

import io
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from rich.console import Console
from safetensors.torch import load_file, save_file

from rltrain.cli.parity import Checked, logprob_difference, random_samples, run_engine, run_trainer
from rltrain.config import schema
from rltrain.errors import DataError
from tests.support.tiny_checkpoints import VOCAB_SIZE
from tools.parity import compare, parser

WIDE = (None, "float32")


def all_cases(
    folder: str, disturbed: dict[str, list[str]], families: dict[str, str], others: dict[str, list[str]]
) -> dict[str, Any]:
    dist.destroy_process_group()  # the tool makes its own
    path = Path(folder)
    results = {
        "alike": printed(path, path, "--transformers"),
        "disturbed": {
            name: printed(path, with_other_weights(path, tensors), "--threshold", "1e-4")
            for name, tensors in disturbed.items()
        },
        "others": {case: of_other(families, *case.split(), tensors) for case, tensors in others.items()},
        "noise": {f"{residual}/{head}": noise(path, residual, head) for residual in WIDE for head in WIDE},
    }
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    return results


def of_one_layer(checkpoint: str, texts: str, empty: str) -> dict[str, Any]:
    dist.destroy_process_group()  # the tool makes its own
    path = Path(checkpoint)
    disturbed = with_other_weights(path, ["model.layers.0.mlp.up_proj.weight"])
    results: dict[str, Any] = {
        "megatron": printed(path, path, "--texts", texts, "--transformers"),
        "fsdp": printed(path, disturbed, "--backend", "fsdp"),
    }
    for name, file in (("empty", empty), ("missing", f"{empty}.missing")):
        with pytest.raises(DataError) as refused:
            printed(path, path, "--texts", file)
        results[name] = str(refused.value)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    return results


def of_images(checkpoint: str, images: list[str], tensor: str) -> dict[str, Any]:
    """Returns the output for samples with images: with both backends, and for another weight in `tensor`."""
    dist.destroy_process_group()  # the tool makes its own
    path, options = Path(checkpoint), ("--images", *images)
    results: dict[str, Any] = {
        "alike": printed(path, path, *options, "--transformers"),
        "sharded": printed(path, path, *options, "--backend", "fsdp"),
        "disturbed": printed(path, with_other_weights(path, [tensor]), *options),
    }
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    return results


def of_other(families: dict[str, str], backend: str, family: str, tensors: list[str]) -> list[tuple[bool, str]]:
    """Returns the output for the same weights, and for other weights in `tensors`."""
    path, options = Path(families[family]), ("--backend", backend, "--threshold", "1e-4")
    return [printed(path, served, *options) for served in (path, with_other_weights(path, tensors))]


def printed(path: Path, served: Path, *options: str) -> tuple[bool, str]:
    """Returns whether the tool finds trainer and engine alike in fp32, and its output."""
    arguments = [str(path), "--engine-checkpoint", str(served), "--dtype", "float32", "--samples", "3", *options]
    console = Console(file=io.StringIO(), width=120)
    alike = compare(parser().parse_args([*arguments, "--tokens", "16"]), console)
    assert isinstance(console.file, io.StringIO)
    return alike, console.file.getvalue()


def with_other_weights(path: Path, tensors: list[str]) -> Path:
    """Returns a copy of the checkpoint in which `tensors` have another column, or another element if they are
    vectors."""
    copy = path / "_".join(tensors)
    copy.mkdir(exist_ok=True)
    (copy / "config.json").write_text((path / "config.json").read_text())
    weights = load_file(path / "model.safetensors")
    for name in tensors:
        weights[name][..., 7] += 1
    save_file(weights, copy / "model.safetensors", metadata={"format": "pt"})
    return copy


def noise(path: Path, residual: str | None, head: str | None) -> float:
    """Returns the mean difference of log-probs in bfloat16."""
    model = schema.Model(path=str(path), dtype="bfloat16", residual_dtype=residual, head_dtype=head)
    checked, samples = Checked(model, "cpu"), random_samples(6, 40, VOCAB_SIZE)
    return logprob_difference(run_trainer(checked, samples), run_engine(checked, samples), samples).mean
