"""Checkpoints in Megatron's format against megatron-core's own code, in both directions."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from rltrain.checkpoint.megatron_keys import GlobalTensors, extra_state_keys
from rltrain.reshard.megatron_layout import padded_vocab_size
from tests.support.checkpoint_files import ARCHITECTURES, canonical_values, read_megatron, write_megatron
from tests.support.worlds import Ranks, made_once, run_case

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
"""Each checkpoint is saved again in its last layout."""


@made_once
def checkpoints(folder: Path) -> Path:
    for name in LAYOUTS:
        (folder / name / "hf").mkdir(parents=True)
        save_file(canonical_values(ARCHITECTURES[name]), folder / name / "hf" / "model.safetensors")
        write_megatron(folder / name / "megatron", ARCHITECTURES[name])
    return folder


@pytest.fixture(scope="module")
def ranks(checkpoints: Path) -> Ranks:
    return run_case("cases_megatron_checkpoint:load_and_save", folder=checkpoints, layouts=LAYOUTS, save_as="saved")


@pytest.mark.parametrize(("name", "layout"), [(name, layout) for name in LAYOUTS for layout in LAYOUTS[name]])
def test_megatron_core_loads_what_the_hugging_face_checkpoint_holds(ranks: Ranks, name: str, layout: str) -> None:
    assert [rank[f"{name}/{layout}"] for rank in ranks] == [[]] * 4


@pytest.mark.parametrize("name", LAYOUTS)
def test_keys_and_shapes_are_those_of_megatron_core(ranks: Ranks, name: str) -> None:
    tp = 2 if "tp2" in LAYOUTS[name][-1] else 1
    padded = padded_vocab_size(ARCHITECTURES[name].vocab_size, tp)
    tensors = GlobalTensors(ARCHITECTURES[name], padded_vocab_size=padded)
    found = {key: tuple(shape) for rank in ranks for key, shape in rank[name]["tensors"].items()}
    assert found == tensors.shapes
    objects = {key for rank in ranks for key in rank[name]["objects"]}
    assert objects and objects <= set(extra_state_keys(tensors))


@pytest.mark.parametrize("name", LAYOUTS)
def test_what_megatron_core_saved_is_read(ranks: Ranks, checkpoints: Path, name: str) -> None:
    read = read_megatron(checkpoints / name / "saved", ARCHITECTURES[name])
    expected = canonical_values(ARCHITECTURES[name])
    assert read.keys() == expected.keys()
    assert [key for key, value in read.items() if not torch.equal(value, expected[key])] == []
