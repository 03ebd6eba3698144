"""SGLang on GPUs: weights by inter-process memory, FP8, released memory. Uses two GPUs if there are two."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from rltrain.reshard.copy_table import quantize_blocks
from tests.gpu.sglang_cases import is_quantised
from tests.support.rollout_models import write_checkpoint
from tests.support.torchrun import run_distributed

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(1500),
    pytest.mark.skipif(not os.environ.get("RLTRAIN_SGLANG_PYTHON"), reason="needs SGLang: RLTRAIN_SGLANG_PYTHON"),
]

GIB = 2**30
MOST_RESIDUE_BYTES = 4 * GIB
"""Bytes of a server after it has released its memory: CUDA's context and memory of libraries."""
TIMEOUT_S = 1400
CASES = "tests.gpu.sglang_cases"

# Every shard of two ranks consists of whole blocks of 128 x 128. SGLang's FP8 layers require this.
SHAPE = {
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 128,
}


def on_ranks(case: str, **arguments: Any) -> list[dict[str, Any]]:
    """Returns the result of each rank of an engine."""
    num_ranks = min(2, max(1, torch.cuda.device_count()))
    arguments = {name: str(value) for name, value in arguments.items()}
    return run_distributed(f"{CASES}:{case}", num_ranks, arguments, timeout_s=TIMEOUT_S)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("checkpoint"), "qwen3", **SHAPE)


@pytest.fixture(scope="module")
def quantised_checkpoint(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns the checkpoint in blocks of FP8, in the format of DeepSeek and Qwen."""
    folder = tmp_path_factory.mktemp("quantised")
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in load_file(checkpoint / "model.safetensors").items():
        tensors[name] = tensor.bfloat16()
        if is_quantised(name):
            tensors[name], tensors[f"{name}_scale_inv"] = quantize_blocks(tensors[name])
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((checkpoint / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_delivered_weights_equal_those_that_sglang_loads(checkpoint: Path, tmp_path: Path) -> None:
    first, *_ = found = on_ranks("weights", checkpoint=checkpoint, folder=tmp_path)
    assert first["num_parts"] > 4
    assert len(first["fresh"]["checksums"]) == len(found)
    assert_equal(first["delivered"], first["fresh"])


def test_weights_quantised_before_the_wire_equal_a_quantised_checkpoint(
    checkpoint: Path, quantised_checkpoint: Path, tmp_path: Path
) -> None:
    first, *_ = on_ranks("fp8", checkpoint=checkpoint, quantised_checkpoint=quantised_checkpoint, folder=tmp_path)
    assert_equal(first["delivered"], first["fresh"])


def assert_equal(delivered: dict[str, Any], fresh: dict[str, Any]) -> None:
    """Asserts bitwise equal weights, and log-probs equal to the precision of two processes."""
    assert delivered["checksums"] == fresh["checksums"]
    (tokens, logprobs), (expected_tokens, expected_logprobs) = delivered["greedy"], fresh["greedy"]
    assert tokens == expected_tokens
    assert logprobs == pytest.approx(expected_logprobs, abs=1e-3)


def test_a_server_gives_its_memory_back_and_takes_it_again(checkpoint: Path, tmp_path: Path) -> None:
    for found in on_ranks("memory", checkpoint=checkpoint, folder=tmp_path):
        used, responses = found["used"], found["responses"]
        assert used["full"] - used["before"] > 2 * MOST_RESIDUE_BYTES
        for moment in ("released", "released again"):
            assert used[moment] - used["before"] <= MOST_RESIDUE_BYTES, used
        assert abs(used["synced"] - used["full"]) <= GIB, used
        tokens, logprobs, versions = responses["full"]
        for moment, version in (("resumed", 1), ("synced", 2)):
            assert responses[moment][0] == tokens
            assert responses[moment][1] == pytest.approx(logprobs, abs=1e-3)
            assert responses[moment][2] == [version] * len(tokens)
        assert versions == [1] * len(tokens)
