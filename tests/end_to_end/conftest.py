"""The quickstart's files and its warmed-up checkpoint, for all end-to-end tests."""

import json
import shutil
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.support.counting_images import make_counting
from tests.support.jobs import REPOSITORY, succeed

NUM_EXPERTS = 4


@pytest.fixture(scope="session")
def quickstart_files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns the folder with model/, train.jsonl and eval.jsonl."""
    folder = tmp_path_factory.mktemp("quickstart")
    succeed([sys.executable, "tools/make_quickstart.py", "--output", str(folder / "start"), "--seed", "0"], 120)
    return folder / "start"


@pytest.fixture(scope="session")
def data_overrides(quickstart_files: Path) -> list[str]:
    return [f"data.train.path={quickstart_files}/train.jsonl", f"data.eval.path={quickstart_files}/eval.jsonl"]


@pytest.fixture(scope="session")
def warmed_up() -> Path:
    """Returns a checkpoint of the quickstart's warm-up: the model_path of tests that continue from there.

    `bash launch/quickstart.sh` makes it again, as runs/quickstart/sft/hf.
    """
    return REPOSITORY / "tests/warmed_up"


@pytest.fixture(scope="session")
def warm_start(warmed_up: Path, data_overrides: list[str]) -> list[str]:
    """Returns the overrides of a job that begins at the end of the warm-up."""
    return [f"model.path={warmed_up}", *data_overrides]


@pytest.fixture(scope="session")
def upcycled(warmed_up: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns the warmed-up checkpoint with its MLP as each of four experts. Two chosen experts equal the MLP, so it
    generates as before."""
    folder = tmp_path_factory.mktemp("upcycled")
    for file in ("generation_config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(warmed_up / file, folder)
    config = json.loads((warmed_up / "config.json").read_text())
    config |= {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "num_experts": NUM_EXPERTS,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
        "moe_intermediate_size": config["intermediate_size"],
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }
    (folder / "config.json").write_text(json.dumps(config))
    torch.manual_seed(0)
    tensors = {}
    for name, tensor in load_file(warmed_up / "model.safetensors").items():
        layer, is_mlp, matrix = name.partition(".mlp.")
        if not is_mlp:
            tensors[name] = tensor
            continue
        tensors |= {f"{layer}.mlp.experts.{expert}.{matrix}": tensor.clone() for expert in range(NUM_EXPERTS)}
        tensors[f"{layer}.mlp.gate.weight"] = 0.02 * torch.randn(NUM_EXPERTS, config["hidden_size"])
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture(scope="session")
def counting(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns the folder with the model and rows of the example with images in start/, and its warm-up in sft/."""
    return make_counting(tmp_path_factory.mktemp("counting"))
