"""Checkpoints made to hurt are refused in one message, at once, by whatever reads them."""

import argparse
import json
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
from safetensors.torch import save_file

from rltrain.checkpoint.conversion_sources import HfSource
from rltrain.checkpoint.hf_reader import HfFolder, further_layers
from rltrain.checkpoint.peft_files import load_adapters
from rltrain.cli.serve import parser, serve
from rltrain.config.models import Lora
from rltrain.data.tokenizer import end_token_ids
from rltrain.errors import CheckpointError, UserError
from rltrain.models import canonical_tensors, read_architecture
from rltrain.models.checkpoint_model import num_predicting
from rltrain.models.table import read_weight_map, stored_names
from rltrain.models.unlisted import read_unlisted
from rltrain.reshard.fsdp_layout import fsdp_layout
from rltrain.runtime.grid import Grid
from rltrain.runtime.json_text import MOST_NESTED, parse_json, parse_json_at
from tests.mutations import mutated_json

CONFIG = {
    "model_type": "qwen3_moe",
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "intermediate_size": 24,
    "moe_intermediate_size": 8,
    "num_experts": 3,
    "num_experts_per_tok": 2,
    "vocab_size": 32,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "eos_token_id": 31,
}
GPT2 = {"model_type": "gpt2", "n_layer": 2, "n_embd": 16, "n_head": 2, "n_positions": 64, "vocab_size": 32}
DEEP = "[" * 100_000
AT_ONCE_S = 20.0
"""Limits what hangs; refusals take milliseconds."""
INDEX = "model.safetensors.index.json"
MANY_SIZES = ("num_hidden_layers", "num_attention_heads", "hidden_size", "vocab_size", "num_experts", "head_dim",
              "intermediate_size", "moe_intermediate_size", "max_position_embeddings")  # fmt: skip


def checkpoint(folder: Path, settings: dict[str, Any] | None = None, *, split: bool = False) -> Path:
    """Makes a whole one in `folder`, whose config.json then says what `settings` say."""
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
    """Returns the message of the error, which has to be one line and to come at once."""
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
        ({"num_hidden_layers": 3}, "num_hidden_layers is 3; expected at most 2, as many as the folder's files"),
        ({"num_experts": 4}, "num_experts is 4; expected at most 3, as many as the folder's files"),
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
    """The hub's cache is made of them: all files of a snapshot link to ../../blobs."""
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
    arguments: argparse.Namespace = parser().parse_args(["--checkpoint", str(tmp_path)])
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
