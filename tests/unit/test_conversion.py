"""Whole conversions of every family: nothing changes on the way to Megatron's format and back."""

import json
from collections.abc import Mapping
from dataclasses import replace
from math import prod
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import save_file

from rltrain.checkpoint import conversion as hf_writer
from rltrain.checkpoint import conversion as megatron_writer
from rltrain.checkpoint import durable_file
from rltrain.checkpoint.conversion import (
    convert_to_hf,
    convert_to_megatron,
    describe,
    first_difference,
    open_source,
    writers_grid,
)
from rltrain.checkpoint.conversion_sources import Processes
from rltrain.checkpoint.durable_file import BEHIND_BYTES
from rltrain.checkpoint.hf_reader import Box, load_parameters
from rltrain.checkpoint.hf_writer import save_checkpoint
from rltrain.models import read_architecture, table_of
from rltrain.reshard.layout import hf_layout
from tests.converted_checkpoints import SIZES, TOKENIZER_FILES, loads_alike, make_checkpoint, stored_tensors
from tests.distributed.family_checkpoints import CHECKPOINTS, QUICK_DENSE, QUICK_SPARSE
from tests.marks import slow_but

ALONE = Processes()
WRITERS = {"qwen2_tied": {}, "qwen3": {"tp": 3}, "mixtral": {"ep": 2}, "moonlight": {"tp": 2, "ep": 2}}
"""Where they are others than tp 2 and pp 2."""


def to_megatron(
    source: Path, output: Path, *, dtype: str | None = None, iteration: int | None = None, **cut: int
) -> None:
    opened = open_source(source, "--input")
    writers = writers_grid(opened.architecture, 1, **{"tp": None, "pp": None, "ep": None, **cut})
    convert_to_megatron(opened, output, ALONE, writers=writers, dtype=dtype, iteration=iteration)


def to_hf(source: Path, output: Path, *, dtype: str | None = None, max_file_bytes: int = 10**9) -> None:
    convert_to_hf(open_source(source, "--input"), output, ALONE, dtype=dtype, max_file_bytes=max_file_bytes)


def difference(a: Path, b: Path, dtype: str | None = None) -> str | None:
    return first_difference(open_source(a, "A"), open_source(b, "B"), ALONE, dtype=dtype)


@pytest.mark.parametrize("name", slow_but(CHECKPOINTS, *QUICK_DENSE, *QUICK_SPARSE))
def test_there_and_back_is_bit_exact(name: str, tmp_path: Path) -> None:
    original, megatron, back = tmp_path / "original", tmp_path / "megatron", tmp_path / "back"
    tensors = make_checkpoint(original, name, dtype=torch.bfloat16, shard="20KB")
    to_megatron(original, megatron, **WRITERS.get(name, {"tp": 2, "pp": 2}))
    to_hf(megatron, back, max_file_bytes=20_000)
    written = stored_tensors(back)
    assert written.keys() == tensors.keys()
    assert all(written[key].dtype == tensors[key].dtype for key in tensors)
    assert all(torch.equal(written[key], tensors[key]) for key in tensors)
    assert len(list(back.glob("*.safetensors"))) > 2
    assert read_architecture(back) == read_architecture(original)
    told, kept = (json.loads((folder / "config.json").read_text()) for folder in (original, back))
    assert kept == told, "what the architecture does not tell is kept as well"
    for one in (original, back):
        assert difference(one, megatron) is None


@pytest.mark.parametrize("cut", [{}, {"pp": 2}, {"tp": 3}, {"ep": 2}, {"tp": 2, "pp": 2, "ep": 4}], ids=str)
def test_writers_do_not_change_the_checkpoint(cut: dict[str, int], tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "original", "qwen3_moe")
    to_megatron(tmp_path / "original", tmp_path / "megatron", **cut)
    assert difference(tmp_path / "original", tmp_path / "megatron") is None
    num_files = len(list((tmp_path / "megatron/release").glob("__*_0.distcp")))
    assert num_files == prod(cut.values())


def test_files_are_the_same_bytes_whether_a_thread_writes_them_or_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_checkpoint(tmp_path / "original", "qwen3_moe", dtype=torch.bfloat16)
    found: dict[int, dict[str, bytes]] = {}
    for behind_bytes in (0, 1, 5000, BEHIND_BYTES):
        folder = tmp_path / str(behind_bytes)
        for module in (hf_writer, megatron_writer):
            monkeypatch.setattr(module, "BEHIND_BYTES", behind_bytes)
        monkeypatch.setattr(durable_file, "BEHIND_BLOCK_BYTES", 700)
        to_megatron(tmp_path / "original", folder / "megatron", tp=2)
        to_hf(folder / "megatron", folder / "hf", dtype="float32", max_file_bytes=100_000)
        files = [*folder.rglob("*.distcp"), *folder.rglob("*.safetensors")]
        found[behind_bytes] = {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}
    assert len(found[0]) > 4 and all(files == found[0] for files in found.values())


@pytest.mark.parametrize("name", ["qwen2", "deepseek_v3"])
def test_any_box_can_be_read(name: str, tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "original", name)
    to_megatron(tmp_path / "original", tmp_path / "megatron", tp=2, pp=2)
    original, megatron = (open_source(tmp_path / folder, "PATH") for folder in ("original", "megatron"))
    random = np.random.default_rng(0)
    for tensor, (rows, cols) in enumerate(original.tensors.matrix_shapes.tolist()):
        row, col = int(random.integers(rows)), int(random.integers(cols))
        box = Box(tensor, row, col, int(random.integers(1, rows - row + 1)), int(random.integers(1, cols - col + 1)))
        assert torch.equal(original.read(box), megatron.read(box)), original.tensors.names[tensor]


def test_layers_that_predict_further_tokens_are_carried_along(tmp_path: Path) -> None:
    """MiMo's, whose model is Qwen2's but for them; and what is saved from training has them too."""
    original, further = tmp_path / "original", {"model.mtp_layers.0.input_proj.weight": torch.randn(4, 8)}
    tensors = make_checkpoint(original, "qwen2") | further
    qwen2 = read_architecture(original)
    config = json.loads((original / "config.json").read_text())
    config |= {"model_type": "mimo", "attention_bias": True, "num_nextn_predict_layers": 1}
    (original / "config.json").write_text(json.dumps(config))
    save_file(tensors, original / "model.safetensors")
    architecture = read_architecture(original)
    assert architecture == replace(qwen2, family="mimo") and table_of(architecture) == table_of(qwen2)

    for folder in written_again(original, tensors, tmp_path):
        assert difference(original, folder) is None

    value_model = architecture.value_model()
    layout = hf_layout(value_model, (0,))
    parameters = {name: torch.zeros(shape) for name, shape in layout.on(0).parameters}
    save_checkpoint(tmp_path / "critic", parameters, layout, value_model, group=None, rank=0, like=original)
    assert not further.keys() & stored_tensors(tmp_path / "critic").keys()


def written_again(original: Path, tensors: Mapping[str, torch.Tensor], folder: Path) -> tuple[Path, Path]:
    """The checkpoint as it comes back from Megatron's format, and as a run saves it, each with all of `tensors`."""
    back, saved = folder / "back", folder / "saved"
    to_megatron(original, folder / "megatron")
    to_hf(folder / "megatron", back)
    architecture = read_architecture(original)
    layout = hf_layout(architecture, (0,))
    parameters = {name: torch.zeros(shape) for name, shape in layout.on(0).parameters}
    load_parameters(original, layout, 0, parameters)
    save_checkpoint(saved, parameters, layout, architecture, group=None, rank=0, like=original)
    for written in map(stored_tensors, (back, saved)):
        assert written.keys() == tensors.keys()
        assert all(torch.equal(written[name], tensors[name]) for name in tensors)
    return back, saved


def test_what_encodes_pictures_is_carried_along(tmp_path: Path) -> None:
    """Qwen3.5's, beside layers that predict further tokens, which config.json need not tell of."""
    original = tmp_path / "original"
    text = {**SIZES, "num_hidden_layers": 2, "full_attention_interval": 2, "head_dim": 8, "linear_num_key_heads": 2}
    text |= {"linear_num_value_heads": 4, "linear_key_head_dim": 4, "linear_value_head_dim": 4}
    pictures = {"depth": 1, "hidden_size": 8, "intermediate_size": 8, "num_heads": 2, "out_hidden_size": 32}
    config = transformers.Qwen3_5Config(text_config=text, vision_config={**pictures, "num_position_embeddings": 4})
    transformers.Qwen3_5ForConditionalGeneration(config).save_pretrained(original)
    tensors = {**stored_tensors(original), "mtp.fc.weight": torch.randn(4, 8)}
    save_file(tensors, original / "model.safetensors")

    written_again(original, tensors, tmp_path)
    assert any(name.startswith("model.visual.") and tensor.dim() == 5 for name, tensor in tensors.items())


def test_transformers_loads_what_came_back(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "original", "qwen3")
    to_megatron(tmp_path / "original", tmp_path / "megatron")
    to_hf(tmp_path / "megatron", tmp_path / "back", max_file_bytes=30_000)
    assert loads_alike(tmp_path / "original", tmp_path / "back")


def test_config_and_tokenizer_are_carried_along(tmp_path: Path) -> None:
    original = tmp_path / "original"
    make_checkpoint(original, shard="20KB")
    to_megatron(original, tmp_path / "megatron")
    to_hf(tmp_path / "megatron", tmp_path / "back")
    for name in ("config.json", "generation_config.json", *TOKENIZER_FILES):
        expected = (original / name).read_bytes()
        assert (tmp_path / "megatron/hf" / name).read_bytes() == expected
        assert (tmp_path / "back" / name).read_bytes() == expected
    assert not (tmp_path / "megatron/hf/model.safetensors.index.json").exists()


def test_another_type_is_rounded_once(tmp_path: Path) -> None:
    tensors = make_checkpoint(tmp_path / "original", "deepseek_v3")
    to_megatron(tmp_path / "original", tmp_path / "megatron", dtype="bfloat16")
    to_hf(tmp_path / "megatron", tmp_path / "back")
    written = stored_tensors(tmp_path / "back")
    for name, tensor in tensors.items():
        kept = "e_score_correction_bias" in name
        assert torch.equal(written[name], tensor if kept else tensor.bfloat16())
    assert json.loads((tmp_path / "back/config.json").read_text())["dtype"] == "bfloat16"
    found = difference(tmp_path / "original", tmp_path / "back")
    assert found is not None
    assert "model.embed_tokens.weight is float32 in" in found and "bfloat16 in" in found
    assert difference(tmp_path / "original", tmp_path / "back", "bfloat16") is None


def test_an_iteration_has_its_number(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "original")
    to_megatron(tmp_path / "original", tmp_path / "release")
    to_megatron(tmp_path / "original", tmp_path / "trained", iteration=7)
    assert (tmp_path / "release/latest_checkpointed_iteration.txt").read_text() == "release"
    assert (tmp_path / "trained/latest_checkpointed_iteration.txt").read_text() == "7"
    assert difference(tmp_path / "release", tmp_path / "trained/iter_0000007") is None


def test_describe_names_format_architecture_and_tensors(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "original", "qwen3_moe", dtype=torch.bfloat16)
    to_megatron(tmp_path / "original", tmp_path / "megatron")
    hf = list(describe(tmp_path / "original", "PATH", tensors=True))
    assert hf[0].split(maxsplit=1) == ["format", "Hugging Face (safetensors)"]
    assert any(line.split() == ["family", "qwen3_moe"] for line in hf)
    assert hf[-1].split() == ["lm_head.weight", "[131,", "32]", "bfloat16"]
    megatron = list(describe(tmp_path / "megatron", "PATH"))
    assert "Megatron" in megatron[0]
    own = [line for line in megatron[1:] if line not in hf]
    assert [line.split()[0] for line in own] == ["iteration", "vocabulary", "global", "layers"]
