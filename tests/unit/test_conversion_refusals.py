"""What a conversion refuses, with a message that says what to do, and what it leaves behind: nothing."""

import errno
import fcntl
import json
import os
import re
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from rltrain.checkpoint.conversion import convert_to_hf, open_source
from rltrain.checkpoint.conversion_sources import HfSource, Processes
from rltrain.checkpoint.durable_file import DurableFile
from rltrain.checkpoint.hf_reader import Box
from rltrain.cli.convert import main
from rltrain.errors import CheckpointError
from rltrain.models import read_architecture
from tests.converted_checkpoints import make_checkpoint
from tests.megatron_checkpoints import write_megatron

INDEX = "model.safetensors.index.json"
UP = "model.layers.1.mlp.up_proj.weight"


def files_of(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.safetensors"))


def cut_short(folder: Path) -> None:
    files_of(folder)[1].write_bytes(files_of(folder)[1].read_bytes()[:-10])


def lose_a_file(folder: Path) -> None:
    files_of(folder)[1].unlink()


def rewrite(folder: Path, change: Callable[[dict[str, Tensor]], None]) -> None:
    """Change what the file with UP holds."""
    file = folder / json.loads((folder / INDEX).read_text())["weight_map"][UP]
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file)


def reindex(folder: Path, change: Callable[[dict[str, str]], None]) -> None:
    index = json.loads((folder / INDEX).read_text())
    change(index["weight_map"])
    (folder / INDEX).write_text(json.dumps(index))


def reconfigure(folder: Path, **values: object) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **values}))


def add_a_tensor(folder: Path) -> None:
    rewrite(folder, lambda tensors: tensors.update(extra=torch.zeros(1)))
    reindex(folder, lambda files: files.update(extra=files[UP]))


def add_a_value_head(folder: Path) -> None:
    rewrite(folder, lambda tensors: tensors.update({"score.weight": torch.zeros(1, 32)}))
    reindex(folder, lambda files: files.update({"score.weight": files[UP]}))


# mistake -> (what makes it, words of the message)
MISTAKES: dict[str, tuple[Callable[[Path], object], list[str]]] = {
    "a file cut short": (cut_short, ["damaged or cut short", "-00002-of-"]),
    "a missing file": (lose_a_file, ["does not exist", "incomplete", "-00002-of-"]),
    "a tensor that is not in its file": (
        lambda folder: rewrite(folder, lambda tensors: tensors.pop(UP)),
        [f"lacks tensor {UP}", "[48, 32]"],
    ),
    "a tensor that the index lacks": (
        lambda folder: reindex(folder, lambda files: files.pop(UP)),
        ["lacks 1 tensors", UP],
    ),
    "a tensor that file and index lack": (
        lambda folder: (
            rewrite(folder, lambda tensors: tensors.pop(UP)),
            reindex(folder, lambda files: files.pop(UP)),
        ),
        ["lacks 1 tensors", UP],
    ),
    "a tensor too many": (add_a_tensor, ["holds 1 tensors that the model", "does not have: extra"]),
    "a value model": (add_a_value_head, ["holds score.weight, the head of a value model", "expected a language model"]),
    "a tensor that the index does not name": (
        lambda folder: rewrite(folder, lambda tensors: tensors.update(extra=torch.zeros(1))),
        ["1 tensors that the index does not place there: extra"],
    ),
    "a type that is no float": (
        lambda folder: rewrite(folder, lambda tensors: tensors.update({UP: tensors[UP].to(torch.int8)})),
        [UP, "of type I8", "BF16"],
    ),
    "several types": (
        lambda folder: rewrite(folder, lambda tensors: tensors.update({UP: tensors[UP].half()})),
        ["float32 (model.embed_tokens.weight)", f"float16 ({UP})", "--dtype"],
    ),
    "another vocabulary": (
        lambda folder: reconfigure(folder, vocab_size=140),
        ["model.embed_tokens.weight has shape [131, 32]", "[140, 32]"],
    ),
    "an unknown architecture": (
        lambda folder: reconfigure(folder, model_type="rwkv"),
        ['"rwkv"', "model_type", "qwen3"],
    ),
    "no config.json": (lambda folder: (folder / "config.json").unlink(), ["config.json does not exist"]),
    "no index": (lambda folder: (folder / INDEX).unlink(), ["neither model.safetensors nor"]),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_source_that_cannot_be_used_is_refused(
    mistake: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_checkpoint(tmp_path / "input", shard="20KB")
    make_mistake, words = MISTAKES[mistake]
    make_mistake(tmp_path / "input")
    status = main(["hf-to-megatron", "--input", str(tmp_path / "input"), "--output", str(tmp_path / "output")])
    message = capsys.readouterr().err
    assert status == 2
    assert all(word in message for word in [*words, "(option --input)", str(tmp_path / "input")]), message
    assert [path.name for path in tmp_path.iterdir()] == ["input"]


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
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from rltrain.checkpoint import conversion

    write = conversion.write_checkpoint

    def write_twice(folder: Path, architecture: Any, writers: Any, mine: Any, read: Any, **rest: Any) -> None:
        read(Box(0, 0, 0, 1, 32))
        write(folder, architecture, writers, mine, read, **rest)

    monkeypatch.setattr(conversion, "write_checkpoint", write_twice)
    make_checkpoint(tmp_path / "input")
    assert main(["hf-to-megatron", "--input", str(tmp_path / "input"), "--output", str(tmp_path / "output")]) == 2
    assert "not taken exactly once: model.embed_tokens.weight (4224 of 4192 elements)" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["input"]


@pytest.mark.parametrize("what", ["nowhere", "an empty folder", "a file"])
def test_what_is_no_checkpoint_is_refused(what: str, tmp_path: Path) -> None:
    path = tmp_path / "given"
    if what == "an empty folder":
        path.mkdir()
    elif what == "a file":
        path.write_text("")
    with pytest.raises(CheckpointError, match=r"given is (no checkpoint|not a folder); expected .* \(argument PATH\)"):
        open_source(path, "PATH")


def replace_config(folder: Path, **values: object) -> None:
    reconfigure(folder / "hf", **values)


def distcp(folder: Path) -> Path:
    return folder / "release/__1_0.distcp"


MEGATRON_MISTAKES: dict[str, tuple[Callable[[Path], object], list[str]]] = {
    "a file cut short": (
        lambda folder: distcp(folder).write_bytes(distcp(folder).read_bytes()[:-5000]),
        ["__1_0.distcp"],
    ),
    "a missing file": (lambda folder: distcp(folder).unlink(), ["__1_0.distcp", "incomplete"]),
    "a missing iteration": (
        lambda folder: (folder / "latest_checkpointed_iteration.txt").write_text("12"),
        ["iter_0000012", "incomplete"],
    ),
    "another rope theta": (
        lambda folder: replace_config(folder, rope_parameters={"rope_theta": 5e5}),
        ["10000", "500000"],
    ),
    "another vocabulary": (lambda folder: replace_config(folder, vocab_size=120), ["vocab_size", "131", "120"]),
    "tied embeddings": (
        lambda folder: replace_config(folder, tie_word_embeddings=True),
        ["embeddings", "True", "False"],
    ),
    "another family": (lambda folder: replace_config(folder, model_type="llama"), ["qk_layernorm", "True", "False"]),
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
    mistake: str, megatron: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(megatron, tmp_path / "input")
    make_mistake, words = MEGATRON_MISTAKES[mistake]
    make_mistake(tmp_path / "input")
    status = main(["megatron-to-hf", "--input", str(tmp_path / "input"), "--output", str(tmp_path / "output")])
    message = capsys.readouterr().err
    assert status == 2
    assert all(word in message for word in [*words, "(option --input)", str(tmp_path / "input")]), message
    assert [path.name for path in tmp_path.iterdir()] == ["input"]


def test_a_value_models_megatron_checkpoint_is_refused(
    megatron: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    language_model = read_architecture(megatron / "hf")
    write_megatron(tmp_path / "input", language_model.value_model())
    shutil.copytree(megatron / "hf", tmp_path / "input/hf")
    assert main(["megatron-to-hf", "--input", str(tmp_path / "input"), "--output", str(tmp_path / "output")]) == 2
    message = capsys.readouterr().err
    assert "of another shape: output_layer.weight [1, 32] instead of [256, 32]" in message, message
    assert [path.name for path in tmp_path.iterdir()] == ["input"]


def test_experts_must_be_as_many_as_in_the_config(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_checkpoint(tmp_path / "original", "mixtral")
    given = [str(tmp_path / "original"), "--output", str(tmp_path / "megatron")]
    assert main(["hf-to-megatron", "--input", *given, "--ep", "5"]) == 2
    assert "--ep is 5" in capsys.readouterr().err
    assert main(["hf-to-megatron", "--input", *given]) == 0
    replace_config(tmp_path / "megatron", num_local_experts=8)
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
