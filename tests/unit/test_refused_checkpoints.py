"""Damaged, foreign and hostile checkpoints are refused with the reason."""

import errno
import fcntl
import json
import os
import re
import shutil
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor

from rltrain.checkpoint.conversion import convert_to_hf, open_source
from rltrain.checkpoint.conversion_sources import HfSource, Processes
from rltrain.checkpoint.durable_file import DurableFile
from rltrain.checkpoint.hf_reader import Box, HfFolder, further_layers
from rltrain.checkpoint.peft_files import load_adapters
from rltrain.cli.main import parsed, run_script
from rltrain.cli.serve import serve
from rltrain.config.models import Lora
from rltrain.data.tokenizer import end_token_ids
from rltrain.errors import CheckpointError, UserError
from rltrain.models import canonical_tensors, read_architecture
from rltrain.models.checkpoint_model import num_predicting
from rltrain.models.of_roles import read_unlisted
from rltrain.models.table import read_weight_map, stored_names
from rltrain.reshard.fsdp_layout import fsdp_layout
from rltrain.runtime.grid import Grid
from rltrain.runtime.json_text import MOST_NESTED, parse_json, parse_json_at
from tests.support.checkpoint_files import make_checkpoint, write_megatron
from tests.support.mutations import mutated_json

INDEX = "model.safetensors.index.json"
UP = "model.layers.1.mlp.up_proj.weight"
main = partial(run_script, "convert")


def files_of(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.safetensors"))


Change = Callable[[Path], object]


def cut_short(folder: Path) -> None:
    files_of(folder)[1].write_bytes(files_of(folder)[1].read_bytes()[:-10])


def rewriting(change: Callable[[dict[str, Tensor]], object]) -> Change:
    """Returns a function that changes the tensors in the file with UP."""

    def rewrite(folder: Path) -> None:
        file = folder / json.loads((folder / INDEX).read_text())["weight_map"][UP]
        tensors = load_file(file)
        change(tensors)
        save_file(tensors, file)

    return rewrite


def reindexing(change: Callable[[dict[str, str]], object]) -> Change:
    def reindex(folder: Path) -> None:
        index = json.loads((folder / INDEX).read_text())
        change(index["weight_map"])
        (folder / INDEX).write_text(json.dumps(index))

    return reindex


def configured(**values: object) -> Change:
    """Returns a function that changes values of config.json."""

    def reconfigure(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, **values}))

    return reconfigure


def both(*changes: Change) -> Change:
    return lambda folder: [change(folder) for change in changes]


def adding(name: str, *shape: int) -> Change:
    added = rewriting(lambda tensors: tensors.update({name: torch.zeros(shape)}))
    return both(added, reindexing(lambda files: files.update({name: files[UP]})))


def retyped(dtype: torch.dtype) -> Change:
    return rewriting(lambda tensors: tensors.update({UP: tensors[UP].to(dtype)}))


without_tensor, without_entry = rewriting(lambda tensors: tensors.pop(UP)), reindexing(lambda files: files.pop(UP))

# mistake -> (change of the checkpoint, words of the message)
MISTAKES: dict[str, tuple[Change, list[str]]] = {
    "a file cut short": (cut_short, ["damaged or cut short", "-00002-of-"]),
    "a missing file": (lambda folder: files_of(folder)[1].unlink(), ["does not exist", "incomplete", "-00002-of-"]),
    "a tensor that is not in its file": (without_tensor, [f"lacks tensor {UP}", "[48, 32]"]),
    "a tensor that the index lacks": (without_entry, ["lacks 1 tensors", UP]),
    "a tensor that file and index lack": (both(without_tensor, without_entry), ["lacks 1 tensors", UP]),
    "a tensor too many": (adding("extra", 1), ["holds 1 tensors that the model", "does not have: extra"]),
    "a value model": (
        adding("score.weight", 1, 32),
        ["holds score.weight, the head of a value model", "expected a language model"],
    ),
    "a tensor that the index does not name": (
        rewriting(lambda tensors: tensors.update(extra=torch.zeros(1))),
        ["1 tensors that the index does not place there: extra"],
    ),
    "a type that is no float": (retyped(torch.int8), [UP, "of type I8", "BF16"]),
    "several types": (retyped(torch.float16), ["float32 (model.embed_tokens.weight)", f"float16 ({UP})", "--dtype"]),
    "another vocabulary": (configured(vocab_size=140), ["model.embed_tokens.weight has shape [131, 32]", "[140, 32]"]),
    "an unknown architecture": (configured(model_type="rwkv"), ['"rwkv"', "model_type", "qwen3"]),
    "no config.json": (lambda folder: (folder / "config.json").unlink(), ["config.json does not exist"]),
    "no index": (lambda folder: (folder / INDEX).unlink(), ["neither model.safetensors nor"]),
}


@pytest.fixture
def assert_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., None]:
    """Returns a function that converts the folder `input`. It expects words in the message, and no new folder."""

    def assert_refused(command: str, *words: str) -> None:
        assert main([command, "--input", str(tmp_path / "input"), "--output", str(tmp_path / "output")]) == 2
        message = capsys.readouterr().err
        assert all(word in message for word in words), message
        assert [path.name for path in tmp_path.iterdir()] == ["input"]

    return assert_refused


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_source_that_cannot_be_used_is_refused(mistake: str, tmp_path: Path, assert_refused: Any) -> None:
    make_checkpoint(tmp_path / "input", shard="20KB")
    make_mistake, words = MISTAKES[mistake]
    make_mistake(tmp_path / "input")
    assert_refused("hf-to-megatron", *words, "(option --input)", str(tmp_path / "input"))


def test_a_type_may_be_chosen_where_the_source_has_several(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "input", shard="20KB")
    MISTAKES["several types"][0](tmp_path / "input")
    convert_to_hf(HfSource(tmp_path / "input", "--input"), tmp_path / "output", Processes(), dtype="bfloat16")
    assert {tensor.dtype for tensor in load_file(tmp_path / "output/model.safetensors").values()} == {torch.bfloat16}


def convert(folder: Path) -> None:
    make_checkpoint(folder / "input")
    convert_to_hf(HfSource(folder / "input", "--input"), folder / "output", Processes())


def test_an_existing_folder_is_kept(tmp_path: Path) -> None:
    (tmp_path / "output").mkdir()
    (tmp_path / "output/notes.txt").write_text("mine")
    with pytest.raises(CheckpointError, match=r"output exists; expected .* \(option --output\)"):
        convert(tmp_path)
    assert (tmp_path / "output/notes.txt").read_text() == "mine"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["input", "output"]


@pytest.mark.parametrize("way", ["hf-to-megatron", "megatron-to-hf"])
@pytest.mark.parametrize("when", ["the thread writes", "the file is closed"])
def test_a_full_disk_is_told_and_leaves_nothing(
    way: str, when: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def no_space(*arguments: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    make_checkpoint(tmp_path / "original")
    if way == "megatron-to-hf":
        assert main(["hf-to-megatron", "--input", str(tmp_path / "original"), "--output", str(tmp_path / "made")]) == 0
    before, threads = sorted(path.name for path in tmp_path.iterdir()), threading.active_count()
    patched, name = (DurableFile, "_write") if when == "the thread writes" else (os, "fsync")
    monkeypatch.setattr(patched, name, no_space)
    source = tmp_path / ("made" if way == "megatron-to-hf" else "original")
    assert main([way, "--input", str(source), "--output", str(tmp_path / "output")]) == 2
    assert re.search("output cannot be written: .*No space left on device", capsys.readouterr().err)
    assert sorted(path.name for path in tmp_path.iterdir()) == before and threading.active_count() == threads


def test_what_was_interrupted_is_begun_anew(tmp_path: Path) -> None:
    left = tmp_path / ".output.partial"
    (left / "hf").mkdir(parents=True)
    (left / "model.safetensors").write_bytes(b"half a file")
    convert(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["input", "output"]
    assert not (tmp_path / "output/hf").exists()


def test_two_conversions_into_one_folder_are_refused(tmp_path: Path) -> None:
    other = tmp_path / ".output.partial"
    other.mkdir()
    (other / "model.safetensors").write_bytes(b"being written")
    descriptor = os.open(other, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    with pytest.raises(CheckpointError, match="being filled by another conversion"):
        convert(tmp_path)
    assert (other / "model.safetensors").exists()
    os.close(descriptor)


def test_an_element_that_is_not_read_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from rltrain.checkpoint import conversion

    make_checkpoint(tmp_path / "input")
    source = conversion.CountedSource(HfSource(tmp_path / "input", "--input"))
    for tensor in range(len(source.source.tensors.names)):
        for box in conversion.row_blocks(source.source, tensor):
            source.read(box)
    source.refuse_other_than_once(Processes())
    source.num_read[source.source.tensors.numbers[UP]] -= 1
    with pytest.raises(
        CheckpointError, match=rf"1 tensors were not taken exactly once: {UP} \(1535 of 1536 elements\)"
    ):
        source.refuse_other_than_once(Processes())


def test_a_writer_that_takes_a_tensor_twice_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, assert_refused: Any
) -> None:
    from rltrain.checkpoint import conversion

    write = conversion.write_checkpoint

    def write_twice(folder: Path, architecture: Any, writers: Any, mine: Any, read: Any, **rest: Any) -> None:
        read(Box(0, 0, 0, 1, 32))
        write(folder, architecture, writers, mine, read, **rest)

    monkeypatch.setattr(conversion, "write_checkpoint", write_twice)
    make_checkpoint(tmp_path / "input")
    assert_refused("hf-to-megatron", "not taken exactly once: model.embed_tokens.weight (4224 of 4192 elements)")


@pytest.mark.parametrize("what", ["nowhere", "an empty folder", "a file"])
def test_what_is_no_checkpoint_is_refused(what: str, tmp_path: Path) -> None:
    path = tmp_path / "given"
    if what == "an empty folder":
        path.mkdir()
    elif what == "a file":
        path.write_text("")
    with pytest.raises(CheckpointError, match=r"given is (no checkpoint|not a folder); expected .* \(argument PATH\)"):
        open_source(path, "PATH")


def of_hf(**values: object) -> Change:
    return lambda folder: configured(**values)(folder / "hf")


def distcp(folder: Path) -> Path:
    return folder / "release/__1_0.distcp"


MEGATRON_MISTAKES: dict[str, tuple[Change, list[str]]] = {
    "a file cut short": (
        lambda folder: distcp(folder).write_bytes(distcp(folder).read_bytes()[:-5000]),
        ["__1_0.distcp"],
    ),
    "a missing file": (lambda folder: distcp(folder).unlink(), ["__1_0.distcp", "incomplete"]),
    "a missing iteration": (
        lambda folder: (folder / "latest_checkpointed_iteration.txt").write_text("12"),
        ["iter_0000012", "incomplete"],
    ),
    "another rope theta": (of_hf(rope_parameters={"rope_theta": 5e5}), ["10000", "500000"]),
    "another vocabulary": (of_hf(vocab_size=120), ["vocab_size", "131", "120"]),
    "tied embeddings": (of_hf(tie_word_embeddings=True), ["embeddings", "True", "False"]),
    "another family": (of_hf(model_type="llama"), ["qk_layernorm", "True", "False"]),
    "no config": (lambda folder: shutil.rmtree(folder / "hf"), ["hf/config.json", "--hf-config"]),
}


@pytest.fixture(scope="module")
def megatron(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("converted")
    make_checkpoint(folder / "original")
    arguments = ["--input", str(folder / "original"), "--output", str(folder / "megatron"), "--tp", "2"]
    assert main(["hf-to-megatron", *arguments]) == 0
    return folder / "megatron"


@pytest.mark.parametrize("mistake", MEGATRON_MISTAKES)
def test_a_megatron_checkpoint_that_cannot_be_used_is_refused(
    mistake: str, megatron: Path, tmp_path: Path, assert_refused: Any
) -> None:
    shutil.copytree(megatron, tmp_path / "input")
    make_mistake, words = MEGATRON_MISTAKES[mistake]
    make_mistake(tmp_path / "input")
    assert_refused("megatron-to-hf", *words, "(option --input)", str(tmp_path / "input"))


def test_a_value_models_megatron_checkpoint_is_refused(megatron: Path, tmp_path: Path, assert_refused: Any) -> None:
    write_megatron(tmp_path / "input", read_architecture(megatron / "hf").value_model())
    shutil.copytree(megatron / "hf", tmp_path / "input/hf")
    assert_refused("megatron-to-hf", "of another shape: output_layer.weight [1, 32] instead of [256, 32]")


def test_experts_must_be_as_many_as_in_the_config(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_checkpoint(tmp_path / "original", "mixtral")
    given = [str(tmp_path / "original"), "--output", str(tmp_path / "megatron")]
    assert main(["hf-to-megatron", "--input", *given, "--ep", "5"]) == 2
    assert "--ep is 5" in capsys.readouterr().err
    assert main(["hf-to-megatron", "--input", *given]) == 0
    of_hf(num_local_experts=8)(tmp_path / "megatron")
    assert main(["inspect", str(tmp_path / "megatron")]) == 2
    message = capsys.readouterr().err
    assert "num_experts is 4, expected 8" in message, message


def test_a_foreign_checkpoint_needs_a_config(megatron: Path, tmp_path: Path) -> None:
    shutil.copytree(megatron, tmp_path / "foreign")
    shutil.rmtree(tmp_path / "foreign/hf")
    original = str(megatron.parent / "original")
    given = ["--input", str(tmp_path / "foreign"), "--output", str(tmp_path / "output")]
    assert main(["megatron-to-hf", *given]) == 2
    assert main(["megatron-to-hf", *given, "--hf-config", original]) == 0
    assert main(["verify", original, str(tmp_path / "output")]) == 0


@pytest.mark.parametrize(
    ("command", "given", "expected"),
    [("hf-to-megatron", "megatron", "Hugging Face"), ("megatron-to-hf", "original", "Megatron")],
)
def test_the_other_format_is_named(
    command: str, given: str, expected: str, megatron: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = megatron.parent / given
    assert main([command, "--input", str(path), "--output", str(megatron.parent / "output")]) == 2
    assert f"{path} is a checkpoint of" in (message := capsys.readouterr().err)
    assert f"expected {expected}" in message


CONFIG = {
    "model_type": "qwen3_moe", "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 8, "intermediate_size": 24, "moe_intermediate_size": 8, "num_experts": 3,
    "num_experts_per_tok": 2, "vocab_size": 32, "max_position_embeddings": 64, "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False, "eos_token_id": 31,
}  # fmt: skip
GPT2 = {"model_type": "gpt2", "n_layer": 2, "n_embd": 16, "n_head": 2, "n_positions": 64, "vocab_size": 32}
DEEP = "[" * 100_000
AT_ONCE_S = 20.0
"""Upper limit for a hanging read. A refusal takes milliseconds."""
MANY_SIZES = ("num_hidden_layers", "num_attention_heads", "hidden_size", "vocab_size", "num_experts", "head_dim",
              "intermediate_size", "moe_intermediate_size", "max_position_embeddings")  # fmt: skip


def checkpoint(folder: Path, settings: dict[str, Any] | None = None, *, split: bool = False) -> Path:
    """Writes a valid checkpoint to `folder`, then changes config.json by `settings`."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    tensors = canonical_tensors(read_architecture(folder))
    filled = {name: torch.zeros(shape) for name, shape in zip(tensors.names, tensors.shapes, strict=True)}
    if split:
        save_file(filled, folder / "part.safetensors")
        (folder / INDEX).write_text(json.dumps({"weight_map": dict.fromkeys(filled, "part.safetensors")}))
    else:
        save_file(filled, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(CONFIG | (settings or {})))
    return folder


def refusal(read: Callable[[], object]) -> str:
    """Returns the message of the error. It must be one line and come at once."""
    begin = time.monotonic()
    with pytest.raises(UserError) as refused:
        read()
    assert time.monotonic() - begin < AT_ONCE_S
    assert "\n" not in str(refused.value) and len(str(refused.value)) < 2000
    return str(refused.value)


@pytest.mark.parametrize("name", MANY_SIZES)
@pytest.mark.parametrize("has_files", [True, False])
def test_sizes_beyond_any_model_are_refused(name: str, has_files: bool, tmp_path: Path) -> None:
    checkpoint(tmp_path, {name: 10**10})
    if not has_files:
        (tmp_path / "model.safetensors").unlink()
    assert f"config.json: {name} is 10000000000; expected at most" in refusal(lambda: read_architecture(tmp_path))


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"num_hidden_layers": 3}, "num_hidden_layers is 3; expected at most 2, the number in the folder's files"),
        ({"num_experts": 4}, "num_experts is 4; expected at most 3, the number in the folder's files"),
        ({"num_experts_per_tok": 4}, "num_experts_per_tok is 4; expected at most 3, the number of experts"),
        ({"vocab_size": 2**20}, "model.embed_tokens.weight has shape [1048576, 16], but the folder's files have"),
        ({"hidden_size": 2**14}, "but the folder's files have"),
        ({"num_nextn_predict_layers": 10**9}, "num_nextn_predict_layers is 1000000000; expected at most"),
        ({"num_nextn_predict_layers": "many"}, 'num_nextn_predict_layers is "many"; expected an integer'),
        ({"model_type": []}, "model_type is []; expected one of"),
        ({"layer_types": [[]]}, "layer_types is [[]]; expected one of full_attention"),
    ],
)
def test_sizes_beyond_the_files_are_refused(settings: dict[str, Any], told: str, tmp_path: Path) -> None:
    for split in (False, True):
        folder = checkpoint(tmp_path / str(split), settings, split=split)
        message = refusal(partial(read_architecture, folder))
        assert told in message and str(folder / "config.json") in message and "model.path" in message


def test_many_experts_of_many_layers_are_refused_together(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | {"num_hidden_layers": 4096, "num_experts": 4096}))
    assert "num_hidden_layers is 4096; expected at most 64" in refusal(lambda: read_architecture(tmp_path))


@pytest.mark.parametrize(
    "settings", [{"n_layer": 10**9}, {"n_embd": 10**9}, {"vocab_size": 10**10}, {"n_head": 10**30}]
)
def test_families_without_a_table_are_bounded_too(settings: dict[str, int], tmp_path: Path) -> None:
    checkpoint(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(GPT2 | settings))
    assert str(tmp_path) in refusal(lambda: read_unlisted(tmp_path))


@pytest.mark.parametrize("file", ["config.json", "generation_config.json"])
@pytest.mark.parametrize("value", [10**9, 32, -1, [2, 32], "2", True, 1.5])
def test_end_tokens_are_of_the_vocabulary(file: str, value: object, tmp_path: Path) -> None:
    checkpoint(tmp_path)
    held = json.loads((tmp_path / file).read_text()) if (tmp_path / file).exists() else {}
    (tmp_path / file).write_text(json.dumps(held | {"eos_token_id": value}))
    message = refusal(lambda: read_architecture(tmp_path))
    assert f"{file}: eos_token_id is" in message and ("from 0 to 31" in message or "an integer" in message)


@pytest.mark.parametrize(
    ("token", "fits"), [(None, True), (-1, True), (31, True), (32, False), (-2, False), ("0", False)]
)
def test_the_pad_token_is_of_the_vocabulary(token: object, fits: bool, tmp_path: Path) -> None:
    checkpoint(tmp_path, {"pad_token_id": token})
    if fits:
        read_architecture(tmp_path)
    else:
        assert "pad_token_id is" in refusal(lambda: read_architecture(tmp_path))


OUTSIDE = ("../../x", "/etc/x", "..", "a/../../x", ".", "", "\0", None, 5, ["x"])


@pytest.mark.parametrize("file", OUTSIDE)
def test_a_weight_map_does_not_lead_out_of_its_folder(file: object, tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "inside", split=True)
    (folder / "part.safetensors").rename(tmp_path / "x")
    weight_map = json.loads((folder / INDEX).read_text())["weight_map"]
    name = next(iter(weight_map))
    (folder / INDEX).write_text(json.dumps({"weight_map": weight_map | {name: file}}))
    for read in (read_architecture, HfFolder, HfSource):
        message = refusal(partial(read, folder, "--checkpoint"))
        assert f"{folder / INDEX}: weight_map has {file!r} for {name!r}; expected the name of a file" in message
        assert "--checkpoint" in message


def test_links_inside_the_folder_are_followed(tmp_path: Path) -> None:
    """The hub's cache consists of links: all files of a snapshot link to ../../blobs."""
    folder = checkpoint(tmp_path / "snapshot", split=True)
    (folder / "part.safetensors").rename(tmp_path / "blob")
    (folder / "part.safetensors").symlink_to(Path("../blob"))
    assert HfSource(folder, "--checkpoint").dtypes


@given(st.lists(st.sampled_from(["..", ".", "a", "b.safetensors", ""]), min_size=1, max_size=6).map("/".join))
def test_what_is_let_through_lies_inside(tmp_path_factory: pytest.TempPathFactory, file: str) -> None:
    folder = Path("/nowhere/checkpoint")
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("rltrain.models.table.read_json", lambda index: {"weight_map": {"t": file}})
        try:
            read_weight_map(folder, "model.path")
        except CheckpointError:
            assert ".." in file.split("/") or file.startswith("/") or not file.replace("/", "").replace(".", "")
        else:
            inside = Path(*(part for part in (folder / file).parts))
            assert inside.is_relative_to(folder) and inside != folder and ".." not in inside.parts


def test_json_that_is_nested_too_deeply_is_refused_wherever_checkpoints_have_it(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "whole", split=True)
    architecture = read_architecture(folder)
    (folder / "generation_config.json").write_text(DEEP)
    assert "generation_config.json cannot be read" in refusal(lambda: read_architecture(folder))
    assert "generation_config.json" in refusal(lambda: end_token_ids(folder))
    (folder / "generation_config.json").unlink()
    (folder / INDEX).write_text(DEEP)
    assert "nested too deeply" in refusal(lambda: HfFolder(folder, "model.path"))
    assert not stored_names(folder)
    for text in (DEEP, '{"a":' * 500 + "1" + "}" * 500):
        (folder / "config.json").write_text(text)
        for read in (read_architecture, read_unlisted):
            message = refusal(partial(read, folder))
            assert "config.json cannot be read as JSON: it is nested too deeply" in message
        assert further_layers(folder) == () and num_predicting(folder, "qwen3_next") == 0
    (tmp_path / "adapter_config.json").write_text(DEEP)
    adapted = fsdp_layout(architecture.adapted(2, None), Grid((0,)))
    for text in (DEEP, "[]"):
        (tmp_path / "adapter_config.json").write_text(text)
        message = refusal(lambda: load_adapters(tmp_path, adapted, 0, {}, Lora(rank=2)))
        assert "adapter_config.json" in message and "model.lora.path" in message


@pytest.mark.parametrize("size", [2**63, 10**9])
def test_a_header_is_read_no_further_than_it_may_be_long(size: int, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(size.to_bytes(8, "little") + b"{}")
    assert not stored_names(tmp_path)


@pytest.mark.parametrize(
    "settings", [{"num_hidden_layers": 10**9}, {"eos_token_id": 10**9}, {"max_position_embeddings": 1e400}]
)
def test_a_server_refuses_before_it_reads_anything_else(settings: dict[str, Any], tmp_path: Path) -> None:
    checkpoint(tmp_path, settings)
    arguments = parsed("serve", ["--checkpoint", str(tmp_path)])
    message = refusal(lambda: serve(arguments, threading.Event()))
    assert f"config.json: {next(iter(settings))} is" in message and "--checkpoint" in message


def test_damaged_configs_are_refused_or_read(tmp_path: Path) -> None:
    for text in mutated_json(CONFIG, 300):
        (tmp_path / "config.json").write_bytes(text)
        try:
            read_architecture(tmp_path)
        except UserError:
            continue


PLAIN = st.none() | st.booleans() | st.integers() | st.text()


@given(st.recursive(PLAIN, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner)))
def test_json_is_read_as_it_was_written(value: object) -> None:
    text = json.dumps(value)
    assert parse_json(text) == parse_json(text.encode()) == value
    assert parse_json_at(f"  {text} ]", 2) == (value, len(text) + 2)


@given(st.integers(1, 2 * MOST_NESTED), st.booleans())
def test_json_is_read_down_to_a_depth(depth: int, objects: bool) -> None:
    opening, closing = ('{"a":', "}") if objects else ("[", "]")
    beside = json.dumps([[]] * MOST_NESTED)
    text = f"{opening * (depth - 1)}{beside}{closing * (depth - 1)}"
    for parse in (parse_json, parse_json_at, lambda text: parse_json(text.encode())):
        if depth + 1 <= MOST_NESTED:
            assert parse(text)
        else:
            with pytest.raises(ValueError, match="nested too deeply"):
                parse(text)


@pytest.mark.parametrize("text", [DEEP, '{"a":' * 100_000])
def test_any_depth_is_an_error_of_the_value(text: str) -> None:
    for parse in (parse_json, parse_json_at):
        with pytest.raises(ValueError, match="nested too deeply"):
            parse(text)
