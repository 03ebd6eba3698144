"""Checkpoints in Megatron's format against megatron-core's own code, in both directions."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from rltrain.checkpoint.megatron_keys import GlobalTensors, extra_state_keys
from rltrain.reshard.megatron_layout import padded_vocab_size
from tests.support.checkpoint_files import ARCHITECTURES, canonical_values, read_megatron, write_megatron
from tests.support.torchrun import run_distributed

pytestmark = pytest.mark.slow  # the default suite converts without megatron-core

LAYOUTS = {
    "qwen3": ["dp4", "tp2_pp2"],
    "qwen2_tied": ["pp2"],
    "llama_biases": ["tp2"],
    "qwen3_moe": ["pp2_ep2"],
    "mixtral": ["ep2"],
    "deepseek_v3": ["tp2_ep4_etp1"],
    "moonlight": ["pp2_ep2"],
    "value": ["tp2_pp2"],
}
"""Each is saved again at the last layout."""


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("megatron_checkpoint")
    for name in LAYOUTS:
        (folder / name / "hf").mkdir(parents=True)
        save_file(canonical_values(ARCHITECTURES[name]), folder / name / "hf" / "model.safetensors")
        write_megatron(folder / name / "megatron", ARCHITECTURES[name])
    return folder


@pytest.fixture(scope="module")
def ranks(checkpoints: Path) -> list[dict[str, Any]]:
    return run_distributed(
        "tests.distributed.cases_megatron_checkpoint:load_and_save",
        num_ranks=4,
        arguments={"folder": str(checkpoints), "layouts": LAYOUTS, "save_as": "saved"},
    )


@pytest.mark.parametrize(("name", "layout"), [(name, layout) for name in LAYOUTS for layout in LAYOUTS[name]])
def test_megatron_core_loads_what_the_hugging_face_checkpoint_holds(
    ranks: list[dict[str, Any]], name: str, layout: str
) -> None:
    assert [rank[f"{name}/{layout}"] for rank in ranks] == [[]] * 4


@pytest.mark.parametrize("name", LAYOUTS)
def test_keys_and_shapes_are_those_of_megatron_core(ranks: list[dict[str, Any]], name: str) -> None:
    tp = 2 if "tp2" in LAYOUTS[name][-1] else 1
    padded = padded_vocab_size(ARCHITECTURES[name].vocab_size, tp)
    tensors = GlobalTensors(ARCHITECTURES[name], padded_vocab_size=padded)
    found = {key: tuple(shape) for rank in ranks for key, shape in rank[name]["tensors"].items()}
    assert found == tensors.shapes
    objects = {key for rank in ranks for key in rank[name]["objects"]}
    assert objects
    assert objects <= set(extra_state_keys(tensors))


@pytest.mark.parametrize("name", LAYOUTS)
def test_what_megatron_core_saved_is_read(ranks: list[dict[str, Any]], checkpoints: Path, name: str) -> None:
    read = read_megatron(checkpoints / name / "saved", ARCHITECTURES[name])
    expected = canonical_values(ARCHITECTURES[name])
    assert read.keys() == expected.keys()
    assert [key for key, value in read.items() if not torch.equal(value, expected[key])] == []
