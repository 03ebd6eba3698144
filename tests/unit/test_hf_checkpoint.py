"""Hugging Face checkpoints made by transformers, read through layouts and written back."""

import errno
import json
import os
import re
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from rltrain.checkpoint.durable_file import DurableFile
from rltrain.checkpoint.hf_reader import load_parameters
from rltrain.checkpoint.hf_writer import WRITTEN_BYTES, save_checkpoint
from rltrain.errors import CheckpointError
from rltrain.models import Architecture, read_architecture
from rltrain.reshard.execute import execute
from rltrain.reshard.layout import Layout, hf_layout
from rltrain.reshard.megatron_layout import megatron_layout
from rltrain.reshard.plan import plan
from rltrain.rollout.layout import engine_layout
from rltrain.runtime.grid import Grid
from tests.converted_checkpoints import loads_alike
from tests.model_shards import Place, engine_shard, megatron_shard, tiny_architecture
from tests.unit.test_families import MODELS

SIZES = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 48,
    "vocab_size": 51,
    "max_position_embeddings": 64,
}
FURTHER_SIZES = {
    "qwen3_5_text": {
        "linear_num_key_heads": 4,
        "linear_num_value_heads": 8,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
    }
}


def make_checkpoint(folder: Path, family: str, *, tied: bool = False, shard: str = "1GB") -> dict[str, Tensor]:
    """A random model in `folder`; returns the tensors that its files hold."""
    torch.manual_seed(0)
    config_class, model_class = MODELS[family]
    model = model_class(config_class(**SIZES, **FURTHER_SIZES.get(family, {}), tie_word_embeddings=tied))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter)  # norms and biases too
    model.save_pretrained(folder, max_shard_size=shard)
    return stored_tensors(folder)


def stored_tensors(folder: Path) -> dict[str, Tensor]:
    return {name: tensor for file in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(file).items()}


def load(path: Path, layout: Layout, rank: int, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    parameters = {name: torch.full(shape, 7.0, dtype=dtype) for name, shape in layout.on(rank).parameters}
    load_parameters(path, layout, rank, parameters)
    return parameters


def zero_padding(shard: dict[str, np.ndarray], architecture: Architecture, place: Place) -> dict[str, np.ndarray]:
    """The oracle marks padding rows; a loaded model has zeros there."""
    for name in (
        "embedding.word_embeddings.weight",
        "output_layer.weight",
        "model.embed_tokens.weight",
        "lm_head.weight",
    ):
        if name in shard:
            rows = len(shard[name])
            shard[name] = shard[name].copy()
            shard[name][max(0, architecture.vocab_size - place.tp_rank * rows) :] = 0
    return shard


@pytest.mark.parametrize("family", MODELS)
@pytest.mark.parametrize(("tied", "shard"), [(False, "1GB"), (True, "10KB")])
def test_load_gives_every_rank_its_share(family: str, tied: bool, shard: str, tmp_path: Path) -> None:
    tensors = make_checkpoint(tmp_path, family, tied=tied, shard=shard)
    assert (tmp_path / "model.safetensors.index.json").exists() is (shard == "10KB")
    architecture = read_architecture(tmp_path)
    full = {name: tensor.numpy() for name, tensor in tensors.items()}
    for tp, pp in ((1, 1), (2, 1), (4, 1), (2, 2)):
        grid = Grid(tuple(range(tp * pp)), tp=tp, pp=pp)
        layout = megatron_layout(architecture, grid)
        for rank in grid.ranks:
            place = Place(tp, grid.coordinates(rank).tp, pp, grid.coordinates(rank).pp)
            expected = zero_padding(megatron_shard(architecture, full, place), architecture, place)
            loaded = load(tmp_path, layout, rank)
            assert loaded.keys() == expected.keys()
            assert all(np.array_equal(loaded[name].numpy(), expected[name]) for name in expected)
    place = Place(4, 3)
    expected = zero_padding(engine_shard(architecture, full, place), architecture, place)
    loaded = load(tmp_path, engine_layout(architecture, Grid((0, 1, 2, 3), tp=4)), 3)
    assert all(np.array_equal(loaded[name].numpy(), expected[name]) for name in expected)


@pytest.mark.parametrize("family", MODELS)
@pytest.mark.parametrize(("tied", "max_shard_bytes"), [(False, 10**9), (True, 10_000)])
def test_round_trip_is_bit_exact(family: str, tied: bool, max_shard_bytes: int, tmp_path: Path) -> None:
    original, saved = tmp_path / "original", tmp_path / "runs" / "saved"
    tensors = make_checkpoint(original, family, tied=tied)
    (original / "tokenizer_config.json").write_text("{}")
    architecture = read_architecture(original)
    layout = megatron_layout(architecture, Grid((0,)))
    parameters = load(original, layout, 0)
    for written_bytes in (WRITTEN_BYTES, 10_000):  # the second replaces the first
        save_checkpoint(
            saved, parameters, layout, architecture, group=None, rank=0, like=original,
            max_shard_bytes=max_shard_bytes, written_bytes=written_bytes,
        )  # fmt: skip
    assert sorted(path.name for path in saved.parent.iterdir()) == ["saved"]
    written = stored_tensors(saved)
    assert written.keys() == tensors.keys()
    assert all(torch.equal(written[name], tensors[name]) for name in tensors)
    assert (saved / "model.safetensors").exists() is (max_shard_bytes == 10**9)
    assert (saved / "tokenizer_config.json").read_text() == "{}"
    assert read_architecture(saved) == architecture
    assert loads_alike(original, saved)


def test_further_chat_templates_are_exported(tmp_path: Path) -> None:
    original, saved = tmp_path / "original", tmp_path / "saved"
    make_checkpoint(original, "qwen3")
    templates = {"tool_use": "{{ messages[0].content }}", "rag": "{{ documents }}"}
    (original / "additional_chat_templates").mkdir()
    for name, text in templates.items():
        (original / "additional_chat_templates" / f"{name}.jinja").write_text(text)
    layout = megatron_layout(read_architecture(original), Grid((0,)))
    for _ in range(2):  # the second replaces the first
        save_checkpoint(
            saved, load(original, layout, 0), layout, read_architecture(original), group=None, rank=0, like=original
        )
    written = {file.stem: file.read_text() for file in (saved / "additional_chat_templates").iterdir()}
    assert written == templates


def test_shards_are_bounded_and_indexed(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "original", "qwen3")
    architecture = read_architecture(tmp_path / "original")
    layout = megatron_layout(architecture, Grid((0,)))
    parameters = load(tmp_path / "original", layout, 0)
    limit = 10_000
    save_checkpoint(
        tmp_path / "saved", parameters, layout, architecture, group=None, rank=0, like=tmp_path / "original",
        dtype=torch.bfloat16, max_shard_bytes=limit,
    )  # fmt: skip
    files = sorted((tmp_path / "saved").glob("*.safetensors"))
    assert [file.name for file in files] == [
        f"model-{i:05d}-of-{len(files):05d}.safetensors" for i in range(1, len(files) + 1)
    ]
    assert len(files) > 2
    for file in files:
        contents = load_file(file)
        assert len(contents) == 1 or sum(tensor.nbytes for tensor in contents.values()) <= limit
    written = stored_tensors(tmp_path / "saved")
    index = json.loads((tmp_path / "saved" / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == written.keys()
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in written.values())
    assert {tensor.dtype for tensor in written.values()} == {torch.bfloat16}
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    assert loaded.dtype == torch.bfloat16


def test_values_take_the_dtype_of_the_parameters(tmp_path: Path) -> None:
    tensors = make_checkpoint(tmp_path, "llama")
    architecture = read_architecture(tmp_path)
    loaded = load(tmp_path, megatron_layout(architecture, Grid((0,))), 0, torch.bfloat16)
    expected = tensors["model.layers.1.mlp.down_proj.weight"].to(torch.bfloat16)
    assert torch.equal(loaded["decoder.layers.1.mlp.linear_fc2.weight"], expected)


def rewrite(folder: Path, tensors: dict[str, Tensor]) -> None:
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")


def refusal(folder: Path, layout: Layout) -> str:
    with pytest.raises(CheckpointError) as refused:
        load(folder, layout, 0)
    return str(refused.value)


def test_a_checkpoint_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    tensors = make_checkpoint(tmp_path, "qwen3")
    layout = megatron_layout(read_architecture(tmp_path), Grid((0,)))
    name, file = "model.layers.1.mlp.up_proj.weight", str(tmp_path / "model.safetensors")

    rewrite(tmp_path, {other: tensor for other, tensor in tensors.items() if other != name})
    message = refusal(tmp_path, layout)
    assert name in message and "[48, 32]" in message and str(tmp_path) in message

    rewrite(tmp_path, {**tensors, name: torch.zeros(40, 32)})
    message = refusal(tmp_path, layout)
    assert all(part in message for part in (name, file, "[40, 32]", "[48, 32]"))

    rewrite(tmp_path, {**tensors, "model.layers.1.mlp.router.weight": torch.zeros(3), "extra": torch.zeros(1)})
    message = refusal(tmp_path, layout)
    assert "2 tensors" in message and "extra, model.layers.1.mlp.router.weight" in message

    rewrite(tmp_path, {**tensors, "model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(4)})
    assert load(tmp_path, layout, 0)


def test_damaged_files_are_refused(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "sharded", "llama", shard="20KB")
    layout = megatron_layout(read_architecture(tmp_path / "sharded"), Grid((0,)))
    first, second = sorted((tmp_path / "sharded").glob("*.safetensors"))[:2]
    contents = first.read_bytes()
    first.write_bytes(contents[:-10])
    message = refusal(tmp_path / "sharded", layout)
    assert str(first) in message and "cut short" in message
    first.write_bytes(contents)
    moved = load_file(second)
    lost = sorted(moved)[0]
    save_file({name: tensor for name, tensor in moved.items() if name != lost} | {"other": torch.zeros(1)}, second)
    message = refusal(tmp_path / "sharded", layout)
    assert str(second) in message and lost in message
    second.unlink()
    message = refusal(tmp_path / "sharded", layout)
    assert str(second) in message and "incomplete" in message
    (tmp_path / "sharded" / "model.safetensors.index.json").write_text('{"metadata": {}}')
    assert "not a safetensors index" in refusal(tmp_path / "sharded", layout)
    (tmp_path / "sharded" / "model.safetensors.index.json").unlink()
    assert "neither model.safetensors nor" in refusal(tmp_path / "sharded", layout)


def test_a_head_beside_tied_embeddings_must_equal_them(tmp_path: Path) -> None:
    tensors = make_checkpoint(tmp_path, "qwen2", tied=True)
    layout = megatron_layout(read_architecture(tmp_path), Grid((0,)))
    head = tensors["model.embed_tokens.weight"].clone()
    rewrite(tmp_path, {**tensors, "lm_head.weight": head})
    assert load(tmp_path, layout, 0)
    head[50, 31] += 1
    rewrite(tmp_path, {**tensors, "lm_head.weight": head})
    assert "lm_head.weight differs from model.embed_tokens.weight" in refusal(tmp_path, layout)


def test_parameters_must_be_those_of_the_layout(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "llama")
    layout = megatron_layout(read_architecture(tmp_path), Grid((0,)))
    parameters = {name: torch.zeros(shape) for name, shape in layout.on(0).parameters}
    del parameters["output_layer.weight"]
    with pytest.raises(ValueError, match=r"output_layer\.weight"):
        load_parameters(tmp_path, layout, 0, parameters)


@pytest.mark.parametrize("added", ["notes.txt", "model.safetensors"])
def test_a_folder_that_is_not_ours_is_never_replaced(added: str, tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "original", "llama")
    architecture = read_architecture(tmp_path / "original")
    layout = megatron_layout(architecture, Grid((0,)))
    parameters = load(tmp_path / "original", layout, 0)
    save = {"group": None, "rank": 0, "like": tmp_path / "original"}
    target = tmp_path / "saved"
    save_checkpoint(target, parameters, layout, architecture, **save)
    (target / added).write_bytes((tmp_path / "original" / "model.safetensors").read_bytes())
    with pytest.raises(CheckpointError, match="output_dir") as refused:
        save_checkpoint(target, parameters, layout, architecture, **save)
    assert str(target) in str(refused.value)
    assert (target / added).read_bytes() == (tmp_path / "original" / "model.safetensors").read_bytes()


def test_a_failed_save_leaves_the_earlier_checkpoint(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "original", "llama")
    architecture = read_architecture(tmp_path / "original")
    layout = megatron_layout(architecture, Grid((0,)))
    parameters = load(tmp_path / "original", layout, 0)
    target = tmp_path / "saved"
    save_checkpoint(target, parameters, layout, architecture, group=None, rank=0, like=tmp_path / "original")
    before = {path.name: path.read_bytes() for path in target.iterdir()}
    with pytest.raises(CheckpointError, match="cannot be written"):
        save_checkpoint(target, parameters, layout, architecture, group=None, rank=0, like=tmp_path / "nowhere")
    assert {path.name: path.read_bytes() for path in target.iterdir()} == before


def test_a_full_disk_leaves_the_earlier_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_space(file: DurableFile, block: memoryview) -> None:
        if file.num_bytes > 20_000:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write(file, block)

    make_checkpoint(tmp_path / "original", "llama")
    architecture = read_architecture(tmp_path / "original")
    layout = megatron_layout(architecture, Grid((0,)))
    parameters, target, write = load(tmp_path / "original", layout, 0), tmp_path / "saved", DurableFile._write
    save = {"group": None, "rank": 0, "like": tmp_path / "original", "written_bytes": 5000}
    save_checkpoint(target, parameters, layout, architecture, **save)
    before, threads = {path.name: path.read_bytes() for path in target.iterdir()}, threading.active_count()
    monkeypatch.setattr(DurableFile, "_write", no_space)
    with pytest.raises(CheckpointError, match="saved cannot be written: .*No space left"):
        save_checkpoint(target, parameters, layout, architecture, **save)
    assert {path.name: path.read_bytes() for path in target.iterdir()} == before
    assert threading.active_count() == threads


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 5])
def test_writers_share_the_bytes(num_ranks: int) -> None:
    architecture = tiny_architecture(num_layers=12, vocab_size=40)
    layout = hf_layout(architecture, tuple(range(num_ranks)))
    shares = [sum(int(np.prod(shape)) for _, shape in layout.on(rank).parameters) for rank in layout.ranks]
    names = [name for rank in layout.ranks for name, _ in layout.on(rank).parameters]
    assert names == list(layout.tensors.names)
    largest = int(layout.tensors.matrix_shapes.prod(axis=1).max())
    assert max(shares) <= sum(shares) / num_ranks + largest


def inside_one_buffer(parameters: dict[str, Tensor]) -> dict[str, Tensor]:
    """Equal tensors as views of one flat buffer, as Megatron's data parallelism keeps its parameters."""
    buffer = torch.cat([torch.full((3,), 7.0), *(tensor.flatten() for tensor in parameters.values())])
    sizes = [3, *(tensor.numel() for tensor in parameters.values())]
    views = buffer.split(sizes)[1:]
    return {name: view.view(old.shape) for view, (name, old) in zip(views, parameters.items(), strict=True)}


def test_parameters_may_lie_anywhere_in_a_larger_buffer(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "qwen3")
    architecture = read_architecture(tmp_path)
    grid = Grid((0,))
    source, destination = megatron_layout(architecture, grid), engine_layout(architecture, grid)
    parameters = inside_one_buffer({n: torch.full(s, 7.0) for n, s in source.on(0).parameters})
    load_parameters(tmp_path, source, 0, parameters)
    assert all(torch.equal(parameters[name], expected) for name, expected in load(tmp_path, source, 0).items())
    engine = inside_one_buffer({n: torch.zeros(s) for n, s in destination.on(0).parameters})
    execute(plan(source, destination, 0, 1), parameters, engine, group=None, bucket_bytes=2**20)
    assert all(torch.equal(engine[name], expected) for name, expected in load(tmp_path, destination, 0).items())


@pytest.mark.parametrize("num_told", [0, 1])
def test_layers_that_predict_further_tokens_are_left_out_where_config_json_tells_of_them(
    num_told: int, tmp_path: Path
) -> None:
    tensors = make_checkpoint(tmp_path, "qwen3")
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": num_told}))
    further = f"model.layers.{config['num_hidden_layers']}.eh_proj.weight"
    save_file({**tensors, further: torch.zeros(2, 2)}, tmp_path / "model.safetensors")
    layout = megatron_layout(read_architecture(tmp_path), Grid((0,)))
    parameters = {name: torch.zeros(shape) for name, shape in layout.on(0).parameters}
    if num_told:
        load_parameters(tmp_path, layout, 0, parameters)
        assert all(parameter.any() for name, parameter in parameters.items() if name.endswith("weight"))
    else:
        with pytest.raises(CheckpointError, match=re.escape(further)):
            load_parameters(tmp_path, layout, 0, parameters)
