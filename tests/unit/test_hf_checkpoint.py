"""Tests of checkpoints in Hugging Face form: reading, writing by shares, value heads."""

import errno
import itertools
import json
import os
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor

from rltrain.checkpoint.durable_file import DurableFile
from rltrain.checkpoint.hf_files import HfFile, StoredPredictionLayers, planned_files
from rltrain.checkpoint.hf_reader import load_parameters
from rltrain.checkpoint.hf_writer import WRITTEN_BYTES, ShareWriter, save_checkpoint, writing_share, written_rows
from rltrain.checkpoint.safetensors_file import TensorEntry, in_file_order
from rltrain.errors import CheckpointError
from rltrain.models import Architecture, read_architecture
from rltrain.models.table import ITEM_BYTES
from rltrain.reshard.execute import execute
from rltrain.reshard.layout import Layout, hf_layout, hf_rows, holding_rows
from rltrain.reshard.megatron_layout import megatron_layout
from rltrain.reshard.plan import plan
from rltrain.rollout.layout import engine_layout
from rltrain.runtime.grid import Grid
from tests.support.checkpoint_files import loads_alike
from tests.support.model_shards import MOE, Place, engine_shard, megatron_shard, tiny_architecture
from tests.unit.test_families import MODELS, SPARSE_MODELS

SIZES = json.loads("""{"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 8, "intermediate_size": 48, "vocab_size": 51, "max_position_embeddings": 64}""")
FURTHER_SIZES = {
    "qwen3_5_text": {
        "linear_num_key_heads": 4,
        "linear_num_value_heads": 8,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
    }
}


def make_checkpoint(
    folder: Path, family: str, kind: str = "CausalLM", *, tied: bool = False, shard: str = "1GB", **values: int
) -> dict[str, Tensor]:
    """Saves a random model of `kind` "CausalLM" or "SequenceClassification" and returns the tensors of its files."""
    torch.manual_seed(0)
    sizes = {**SIZES, **FURTHER_SIZES.get(family, {}), **values}
    config = MODELS[family][0](**sizes, tie_word_embeddings=tied)
    model = getattr(transformers, f"AutoModelFor{kind}").from_config(config)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter)  # norms and biases too
    model.save_pretrained(folder, max_shard_size=shard)
    return stored_tensors(folder)


def stored_tensors(folder: Path) -> dict[str, Tensor]:
    return {name: tensor for file in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(file).items()}


def whole(folder: Path) -> Layout:
    """Returns the layout of a folder's model on one rank of Megatron."""
    return megatron_layout(read_architecture(folder), Grid((0,)))


def load(
    path: Path, layout: Layout, rank: int = 0, dtype: torch.dtype = torch.float32, config_key: str = "model.path"
) -> dict[str, Tensor]:
    parameters = {name: torch.full(shape, 7.0, dtype=dtype) for name, shape in layout.on(rank).parameters}
    load_parameters(path, layout, rank, parameters, config_key=config_key)
    return parameters


def saver(original: Path, **settings: object) -> Callable[..., None]:
    """Returns a function to write the model in `original` to another folder."""
    layout, architecture = whole(original), read_architecture(original)
    parameters, settings = load(original, layout), {"like": original, "group": None, "rank": 0} | settings
    return lambda target, **more: save_checkpoint(target, parameters, layout, architecture, **settings | more)


def zero_padding(shard: dict[str, np.ndarray], architecture: Architecture, place: Place) -> dict[str, np.ndarray]:
    """Zeroes the padding rows marked by the oracle, as in a loaded model."""
    for module in ("embedding.word_embeddings", "output_layer", "model.embed_tokens", "lm_head"):
        name = f"{module}.weight"
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
    save = saver(original, max_shard_bytes=max_shard_bytes)
    for written_bytes in (WRITTEN_BYTES, 10_000):  # the second replaces the first
        save(saved, written_bytes=written_bytes)
    assert sorted(path.name for path in saved.parent.iterdir()) == ["saved"]
    written = stored_tensors(saved)
    assert written.keys() == tensors.keys()
    assert all(torch.equal(written[name], tensors[name]) for name in tensors)
    assert (saved / "model.safetensors").exists() is (max_shard_bytes == 10**9)
    assert (saved / "tokenizer_config.json").read_text() == "{}"
    assert read_architecture(saved) == read_architecture(original)
    assert loads_alike(original, saved)


def test_further_chat_templates_are_exported(tmp_path: Path) -> None:
    original, saved = tmp_path / "original", tmp_path / "saved"
    make_checkpoint(original, "qwen3")
    templates = {"tool_use": "{{ messages[0].content }}", "rag": "{{ documents }}"}
    (original / "additional_chat_templates").mkdir()
    for name, text in templates.items():
        (original / "additional_chat_templates" / f"{name}.jinja").write_text(text)
    save = saver(original)
    for _ in range(2):  # the second replaces the first
        save(saved)
    written = {file.stem: file.read_text() for file in (saved / "additional_chat_templates").iterdir()}
    assert written == templates


def test_shards_are_bounded_and_indexed(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "original", "qwen3")
    limit = 10_000
    saver(tmp_path / "original", dtype=torch.bfloat16, max_shard_bytes=limit)(tmp_path / "saved")
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
    loaded = load(tmp_path, whole(tmp_path), dtype=torch.bfloat16)
    expected = tensors["model.layers.1.mlp.down_proj.weight"].to(torch.bfloat16)
    assert torch.equal(loaded["decoder.layers.1.mlp.linear_fc2.weight"], expected)


def rewrite(folder: Path, tensors: dict[str, Tensor]) -> None:
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")


def refusal(folder: Path, layout: Layout, config_key: str = "model.path") -> str:
    with pytest.raises(CheckpointError) as refused:
        load(folder, layout, config_key=config_key)
    return str(refused.value)


def test_a_checkpoint_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    tensors = make_checkpoint(tmp_path, "qwen3")
    layout = whole(tmp_path)
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
    assert load(tmp_path, layout)


def test_damaged_files_are_refused(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "sharded", "llama", shard="20KB")
    layout = whole(tmp_path / "sharded")
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
    layout = whole(tmp_path)
    head = tensors["model.embed_tokens.weight"].clone()
    rewrite(tmp_path, {**tensors, "lm_head.weight": head})
    assert load(tmp_path, layout)
    head[50, 31] += 1
    rewrite(tmp_path, {**tensors, "lm_head.weight": head})
    assert "lm_head.weight differs from model.embed_tokens.weight" in refusal(tmp_path, layout)


def test_parameters_must_be_those_of_the_layout(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "llama")
    layout = whole(tmp_path)
    parameters = {name: torch.zeros(shape) for name, shape in layout.on(0).parameters}
    del parameters["output_layer.weight"]
    with pytest.raises(ValueError, match=r"output_layer\.weight"):
        load_parameters(tmp_path, layout, 0, parameters)


@pytest.mark.parametrize("added", ["notes.txt", "model.safetensors"])
def test_a_folder_that_is_not_ours_is_never_replaced(added: str, tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "original", "llama")
    save, target = saver(tmp_path / "original"), tmp_path / "saved"
    save(target)
    (target / added).write_bytes((tmp_path / "original" / "model.safetensors").read_bytes())
    with pytest.raises(CheckpointError, match="output_dir") as refused:
        save(target)
    assert str(target) in str(refused.value)
    assert (target / added).read_bytes() == (tmp_path / "original" / "model.safetensors").read_bytes()


def test_a_failed_save_leaves_the_earlier_checkpoint(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "original", "llama")
    save, target = saver(tmp_path / "original"), tmp_path / "saved"
    save(target)
    before = {path.name: path.read_bytes() for path in target.iterdir()}
    with pytest.raises(CheckpointError, match="cannot be written"):
        save(target, like=tmp_path / "nowhere")
    assert {path.name: path.read_bytes() for path in target.iterdir()} == before


def test_a_full_disk_leaves_the_earlier_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_space(file: DurableFile, block: memoryview) -> None:
        if file.num_bytes > 20_000:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write(file, block)

    make_checkpoint(tmp_path / "original", "llama")
    save, target, write = saver(tmp_path / "original", written_bytes=5000), tmp_path / "saved", DurableFile._write
    save(target)
    before, threads = {path.name: path.read_bytes() for path in target.iterdir()}, threading.active_count()
    monkeypatch.setattr(DurableFile, "_write", no_space)
    with pytest.raises(CheckpointError, match="saved cannot be written: .*No space left"):
        save(target)
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
    """Returns equal tensors as views of one flat buffer, like the parameters of Megatron's data parallelism."""
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
    assert all(torch.equal(parameters[name], expected) for name, expected in load(tmp_path, source).items())
    engine = inside_one_buffer({n: torch.zeros(s) for n, s in destination.on(0).parameters})
    execute(plan(source, destination, 0, 1), parameters, engine, group=None, bucket_bytes=2**20)
    assert all(torch.equal(engine[name], expected) for name, expected in load(tmp_path, destination).items())


@pytest.mark.parametrize("num_told", [0, 1])
def test_layers_that_predict_further_tokens_are_left_out_where_config_json_tells_of_them(
    num_told: int, tmp_path: Path
) -> None:
    tensors = make_checkpoint(tmp_path, "qwen3")
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": num_told}))
    further = f"model.layers.{config['num_hidden_layers']}.eh_proj.weight"
    save_file({**tensors, further: torch.zeros(2, 2)}, tmp_path / "model.safetensors")
    layout = whole(tmp_path)
    if num_told:
        assert not any((parameter == 7.0).all() for parameter in load(tmp_path, layout).values()), (
            "all parameters are filled"
        )
    else:
        assert further in refusal(tmp_path, layout)


ENTRIES = (
    TensorEntry("first", torch.bfloat16, (3, 2)),
    TensorEntry("wide", torch.float32, (2,)),
    TensorEntry("last", torch.bfloat16, (5,)),
)
VALUES = {entry.name: torch.arange(1, 1 + np.prod(entry.shape)).to(entry.dtype).view(entry.shape) for entry in ENTRIES}


def elements_of(layout: Layout, rank: int) -> set[tuple[str, int, int, int, int]]:
    """Returns (parameter, its element, tensor, row, column) of all elements."""
    mine = layout.on(rank)
    found = set()
    for piece in mine.pieces:
        name = mine.parameters[piece["parameter"]][0]
        for row in range(piece["rows"]):
            for col in range(piece["cols"]):
                place = piece["offset"] + row * piece["stride"] + col
                found.add((name, int(place), int(piece["tensor"]), int(piece["row"] + row), int(piece["col"] + col)))
    return found


@settings(max_examples=12, deadline=None)
@given(
    family=st.sampled_from(["qwen3", *MOE]),
    num_writers=st.sampled_from([1, 2, 4]),
    max_bytes=st.sampled_from([1, 700, 20_000, 10**9]),
    max_file_bytes=st.sampled_from([9000, 10**9]),
)
def test_every_row_is_written_once_in_the_order_of_the_files(
    family: str, num_writers: int, max_bytes: int, max_file_bytes: int
) -> None:
    layout = hf_layout(tiny_architecture(family), tuple(range(num_writers)), dtype="bfloat16")
    files = planned_files(layout, max_file_bytes)
    shapes, item = layout.tensors.matrix_shapes, ITEM_BYTES[layout.types]
    turns = list(written_rows(layout, files, max_bytes))
    for writer in layout.ranks:
        names = [entry.name for file in files if file.writer == writer for entry in in_file_order(file.entries)]
        of_writer = [layout.tensors.numbers[name] for name in names]
        found = []
        for rows in turns:
            taken = [(number, *rows[number].tolist()) for number in of_writer if rows[number, 1]]
            sizes = [(end - first) * int(shapes[number, 1] * item[number]) for number, first, end in taken]
            assert sum(sizes) <= max_bytes or len(taken) == 1 == taken[0][2] - taken[0][1]
            assert dict(hf_rows(layout, rows).on(writer).parameters) == {
                layout.tensors.names[number]: (end - first, shapes[number, 1]) for number, first, end in taken
            }
            found += taken
        expected = [(number, row) for number in of_writer for row in range(shapes[number, 0])]
        assert [(number, row) for number, first, end in found for row in range(first, end)] == expected


@settings(max_examples=8, deadline=None)
@given(
    family=st.sampled_from(["qwen3", *MOE]),
    grid=st.sampled_from([Grid((0,)), Grid((0, 1), tp=2), Grid((0, 1), pp=2)]),
    max_bytes=st.sampled_from([2000, 50_000]),
)
def test_rows_of_a_layout_are_all_of_it_at_its_places(family: str, grid: Grid, max_bytes: int) -> None:
    architecture = tiny_architecture(family)
    layout = megatron_layout(architecture, grid)
    saved = hf_layout(architecture, grid.ranks)
    turns = list(written_rows(saved, planned_files(saved, 10**9), max_bytes))
    for rank in grid.ranks:
        parts = [elements_of(holding_rows(layout, rows), rank) for rows in turns]
        assert set.union(*parts) == elements_of(layout, rank)
        assert sum(map(len, parts)) == len(elements_of(layout, rank))


def writer_in(folder: Path) -> AbstractContextManager[ShareWriter]:
    (folder / "config.json").write_text("{}")
    files = [HfFile("a.safetensors", 0, ENTRIES[:2]), HfFile("b.safetensors", 0, ENTRIES[2:])]
    return writing_share(folder, files, StoredPredictionLayers(folder), torch.device("cpu"))


@pytest.mark.parametrize("order", [["wide", "first", "last"], ["last", "first", "wide"], ["first", "wide", "last"]])
def test_what_is_not_due_waits(order: list[str], tmp_path: Path) -> None:
    with writer_in(tmp_path) as writer:
        for name in order:
            memory = writer.memory_for(((name, VALUES[name].shape),))[name]
            memory.copy_(VALUES[name])
            writer.write({name: memory})
    written = load_file(tmp_path / "a.safetensors") | load_file(tmp_path / "b.safetensors")
    assert written.keys() == VALUES.keys() and all(torch.equal(written[name], VALUES[name]) for name in VALUES)


def test_rows_come_one_after_the_other_in_memory_that_is_used_again_once_they_are_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def slowly(file: DurableFile, block: memoryview) -> None:
        time.sleep(0.02)
        write(file, block)

    write, places = DurableFile._write, set()
    monkeypatch.setattr(DurableFile, "_write", slowly)
    with writer_in(tmp_path) as writer:
        writer.write({"wide": VALUES["wide"]})
        for first, end in ((0, 1), (1, 2), (2, 3)):
            memory = writer.memory_for((("first", (end - first, 2)),))["first"]
            memory.copy_(VALUES["first"][first:end])
            places.add(memory.data_ptr())
            writer.write({"first": memory})
        writer.write({"last": VALUES["last"]})
    assert torch.equal(load_file(tmp_path / "a.safetensors")["first"], VALUES["first"]) and len(places) == 2


def test_what_did_not_come_is_an_error(tmp_path: Path) -> None:
    with (
        pytest.raises(CheckpointError, match="a.safetensors: 6 elements of first are missing"),
        writer_in(tmp_path) as w,
    ):
        w.write({"wide": VALUES["wide"]})


BODY = "decoder.layers.1.mlp.linear_fc2.weight"
HEAD = "output_layer.weight"
TOKENS = torch.arange(12).reshape(1, 12)


def layout_of(folder: Path, grid: Grid | None = None) -> Layout:
    return megatron_layout(read_architecture(folder).value_model(), grid or Grid((0,)))


def load_critic(folder: Path, layout: Layout, rank: int = 0) -> dict[str, Tensor]:
    return load(folder, layout, rank, config_key="critic.path")


def critic_refusal(folder: Path) -> str:
    return refusal(folder, layout_of(folder), "critic.path")


@pytest.mark.parametrize("tied", [False, True])
def test_from_a_language_model_the_head_starts_at_zero(tied: bool, tmp_path: Path) -> None:
    stored = make_checkpoint(tmp_path, "qwen2", tied=tied)
    layout = layout_of(tmp_path, Grid((0, 1, 2, 3), tp=2, pp=2))
    for rank, last_stage in ((0, False), (1, False), (2, True), (3, True)):
        parameters = load_critic(tmp_path, layout, rank)
        assert (HEAD in parameters) is last_stage
        assert not last_stage or torch.equal(parameters[HEAD], torch.zeros(1, SIZES["hidden_size"]))
    expected = stored["model.layers.1.mlp.down_proj.weight"]
    assert torch.equal(load_critic(tmp_path, layout_of(tmp_path))[BODY], expected)


@pytest.mark.parametrize("family", MODELS)
def test_from_a_sequence_classifier_the_head_is_its_score(family: str, tmp_path: Path) -> None:
    stored = make_checkpoint(tmp_path, family, "SequenceClassification", num_labels=1)
    layout = layout_of(tmp_path, Grid((0, 1), tp=2))
    for rank in (0, 1):
        assert torch.equal(load_critic(tmp_path, layout, rank)[HEAD], stored["score.weight"])


def test_a_head_of_several_scores_is_refused(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "llama", "SequenceClassification", num_labels=3)
    message = critic_refusal(tmp_path)
    for part in ("score.weight", "[3, 32]", "[1, 32]", "num_labels 1", "critic.path", str(tmp_path)):
        assert part in message


def test_other_tensors_too_many_or_too_few_are_refused(tmp_path: Path) -> None:
    tensors = make_checkpoint(tmp_path, "qwen3")
    rewrite(tmp_path, {**tensors, "v_head.weight": torch.zeros(1)})
    message = critic_refusal(tmp_path)
    assert "v_head.weight" in message and "lm_head" not in message and "critic.path" in message
    rewrite(tmp_path, {n: t for n, t in tensors.items() if n != "model.norm.weight"})
    assert "lacks tensor model.norm.weight" in critic_refusal(tmp_path)


@pytest.mark.parametrize("tied", [False, True])
def test_an_actor_takes_no_sequence_classifier(tied: bool, tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "qwen3", "SequenceClassification", tied=tied, num_labels=1)
    assert "does not have: score.weight" in refusal(tmp_path, whole(tmp_path))


KINDS = itertools.cycle([("CausalLM", False), ("SequenceClassification", True), ("CausalLM", True)])
SAVED = [(family, "SequenceClassification", False) for family in MODELS]
SAVED += [(family, *kind) for family, kind in zip(MODELS, KINDS, strict=False)]


@pytest.mark.parametrize(("family", "kind", "tied"), SAVED)
def test_transformers_scores_alike_with_what_was_saved(family: str, kind: str, tied: bool, tmp_path: Path) -> None:
    original, saved = tmp_path / "original", tmp_path / "saved"
    make_checkpoint(original, family, kind, tied=tied, num_labels=1)
    layout = layout_of(original)
    parameters = load_critic(original, layout)
    if kind == "CausalLM":
        parameters[HEAD].normal_()
    architecture = read_architecture(original).value_model()
    save_checkpoint(saved, parameters, layout, architecture, group=None, rank=0, like=original)

    config = json.loads((saved / "config.json").read_text())
    of_transformers = transformers.AutoModelForSequenceClassification.from_pretrained(saved)
    assert config["architectures"] == [type(of_transformers).__name__]
    assert "lm_head.weight" not in load_file(saved / "model.safetensors")
    scorer = of_transformers.eval()
    assert scorer.config.num_labels == 1
    decoder = transformers.AutoModel.from_pretrained(original).eval()
    expected = decoder(TOKENS).last_hidden_state[:, -1] @ parameters[HEAD].T
    assert torch.allclose(scorer(TOKENS).logits, expected, rtol=1e-5, atol=1e-5)
    reloaded = load_critic(saved, layout_of(saved))
    assert all(torch.equal(reloaded[name], parameters[name]) for name in parameters)


WITHOUT_CLASSIFIER = ("glm4_moe", "glm4_moe_lite", "minimax_m2", "hy_v3", "qwen3_5_moe_text")
"""Families without a sequence classification model in transformers. Only rltrain has such files of them."""


@pytest.mark.parametrize("family", [*MODELS, *SPARSE_MODELS])
def test_every_family_is_saved_under_a_class_that_transformers_has(family: str, tmp_path: Path) -> None:
    config_class = {**MODELS, **SPARSE_MODELS}[family][0]
    sizes = SPARSE_MODELS[family][2] if family in SPARSE_MODELS else {}
    config_class(**{**SIZES, **sizes}).save_pretrained(tmp_path)
    layout = layout_of(tmp_path)
    parameters = {name: torch.zeros(shape) for name, shape in layout.on(0).parameters}
    architecture = read_architecture(tmp_path).value_model()
    save_checkpoint(tmp_path / "saved", parameters, layout, architecture, group=None, rank=0, like=tmp_path)
    (name,) = json.loads((tmp_path / "saved" / "config.json").read_text())["architectures"]
    assert hasattr(transformers, name) == (family not in WITHOUT_CLASSIFIER)
