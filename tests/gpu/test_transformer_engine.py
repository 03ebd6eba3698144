"""Models with Transformer Engine's modules train on one GPU as models with Megatron's own modules do."""

import importlib.util
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from rltrain.algorithms.losses import likelihood_loss
from rltrain.config import schema
from rltrain.models import Architecture
from rltrain.models.architecture import MLA
from rltrain.runtime.grid import Grid
from rltrain.training.megatron.backend import TrainableModel
from tests.distributed.cases_context_parallel import experience, write_weights
from tests.forked.popen import run_module
from tests.support.model_shards import tiny_architecture
from tests.support.trained_models import groups_on, megatron_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        importlib.util.find_spec("transformer_engine") is None, reason="transformer-engine is not installed"
    ),
]

GRID = Grid((0,))
NUM_STEPS, MAX_TOKENS = 3, 64
LATENT = MLA(q_rank=16, kv_rank=32, plain_head_dim=32, rope_head_dim=16, value_head_dim=32)
SIZES: dict[str, Any] = {"hidden_size": 128, "vocab_size": 61, "num_layers": 2}
MODELS: dict[str, Architecture] = {
    "dense": tiny_architecture("qwen3", num_heads=4, num_kv_heads=2, head_dim=32, **SIZES),
    "experts": tiny_architecture("qwen3_moe", num_heads=4, num_kv_heads=2, head_dim=32, **SIZES),
    "latent": replace(tiny_architecture("deepseek_v3", head_dim=48, mla=LATENT, **SIZES), moe=None),
}
RELATIVE, OF_LOGPROBS = 2e-2, 0.1
"""Allowed differences between two orders of bfloat16 operations: metrics relatively, log-probs in nats."""


@pytest.mark.parametrize("name", MODELS)
def test_steps_and_log_probs_are_those_of_megatrons_own_modules(name: str, tmp_path: Path) -> None:
    local, fused = (reports(name, kind, tmp_path) for kind in ("local", "transformer_engine"))
    assert fused["modules"] and not local["modules"]
    for found, expected in zip(fused["steps"], local["steps"], strict=True):
        for metric in ("loss", "entropy", "grad_norm"):
            assert found[metric] == pytest.approx(expected[metric], rel=RELATIVE), metric
    assert fused["logprobs"] == pytest.approx(local["logprobs"], abs=OF_LOGPROBS)


def reports(name: str, implementation: str, folder: Path) -> dict[str, Any]:
    """Returns the output of a new process. Its communicators and Megatron's state end with it."""
    printed = run_module("tests.gpu.test_transformer_engine", name, implementation, str(folder), "cuda", timeout_s=100)
    return json.loads(printed.splitlines()[-1])


def trained(architecture: Architecture, implementation: Any, folder: Path, device: torch.device) -> dict[str, Any]:
    """Returns the metrics of some steps, log-probs after them, and the names of Transformer Engine's modules."""
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    groups = groups_on([GRID], backend[-4:])
    checkpoint = folder / f"{architecture.family}_{implementation}"
    write_weights(architecture, checkpoint)
    own = {"architecture": architecture, "device": device, "transformer_impl": implementation, "dtype": "bfloat16"}
    model = megatron_model(checkpoint, GRID, groups, **own)
    settings = schema.Actor(optimizer=schema.Optimizer(lr=1e-4), micro_batch_tokens=MAX_TOKENS)
    trainable, samples = TrainableModel(model, settings, total_updates=NUM_STEPS), experience("grpo")
    return {
        "steps": [trainable.train_batch(samples, likelihood_loss()) for _ in range(NUM_STEPS)],
        "logprobs": trainable.evaluate(samples, max_tokens=MAX_TOKENS).tolist(),
        "modules": sorted({type(one).__name__ for one in model.modules() if "engine" in type(one).__module__}),
    }


if __name__ == "__main__":
    name, implementation, folder, device = sys.argv[1:]
    print(json.dumps(trained(MODELS[name], implementation, Path(folder), torch.device(device))))
    dist.destroy_process_group()
