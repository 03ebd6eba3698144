"""Tests of the conversion between checkpoints of Hugging Face, of Megatron and of runs."""

import io
import json
import re
import signal
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from math import prod
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import transformers
from rich.console import Console
from safetensors.torch import load_file, save_file
from torch import Tensor

from rltrain.checkpoint import conversion, durable_file
from rltrain.checkpoint.conversion import (
    ConversionProgress,
    convert_to_hf,
    convert_to_megatron,
    describe,
    first_difference,
    open_source,
    writers_grid,
)
from rltrain.checkpoint.conversion_sources import HfSource, Processes
from rltrain.checkpoint.durable_file import BEHIND_BYTES
from rltrain.checkpoint.hf_reader import Box, load_parameters
from rltrain.checkpoint.hf_writer import save_checkpoint
from rltrain.checkpoint.run_files import checksum
from rltrain.checkpoint.run_folder import CheckpointFolder, name_of
from rltrain.cli.main import main
from rltrain.config.loader import load_config
from rltrain.models import canonical_tensors, read_architecture, table_of
from rltrain.models.lora import PEFT_PREFIX, WEIGHT, A, B
from rltrain.reshard.layout import Layout, hf_layout
from rltrain.reshard.megatron_layout import megatron_layout
from rltrain.rollout.layout import engine_layout
from rltrain.runtime.grid import Grid
from tests.support.checkpoint_files import (
    TOKENIZER_FILES,
    loads_alike,
    make_checkpoint,
    save,
    stored_tensors,
    whole_tensors,
)
from tests.support.family_checkpoints import CHECKPOINTS, QUICK_DENSE, QUICK_SPARSE
from tests.support.marks import slow_but

ALONE = Processes()
TEXT = {"vocab_size": 50, "hidden_size": 32, "num_hidden_layers": 2, "full_attention_interval": 2, "head_dim": 8}
TEXT |= {"num_attention_heads": 4, "num_key_value_heads": 2, "linear_num_key_heads": 2, "linear_num_value_heads": 4}
TEXT |= {"linear_key_head_dim": 4, "linear_value_head_dim": 4}
PICTURES = {"depth": 1, "hidden_size": 8, "intermediate_size": 8, "num_heads": 2, "num_position_embeddings": 4}
PICTURES |= {"out_hidden_size": 32}
WRITERS = {"qwen2_tied": {}, "qwen3": {"tp": 3}, "mixtral": {"ep": 2}, "moonlight": {"tp": 2, "ep": 2}}
"""Families with grids other than tp 2 and pp 2."""


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
    assert_equal(stored_tensors(back), tensors)
    assert len(list(back.glob("*.safetensors"))) > 2
    assert read_architecture(back) == read_architecture(original)
    told, kept = (json.loads((folder / "config.json").read_text()) for folder in (original, back))
    assert kept == told, "keys beyond the architecture are kept too"
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
        monkeypatch.setattr(conversion, "BEHIND_BYTES", behind_bytes)
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
    """MiMo is Qwen2 with such layers. Checkpoints of its training have them too."""
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


def assert_equal(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    """Fails unless all tensors have the same names, types and bits."""
    assert found.keys() == expected.keys()
    assert all(found[name].dtype == expected[name].dtype for name in expected)
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def written_again(original: Path, tensors: Mapping[str, torch.Tensor], folder: Path) -> tuple[Path, Path]:
    """Writes the checkpoint through Megatron's format and as a run saves it. Both must have all of `tensors`."""
    back, saved = folder / "back", folder / "saved"
    to_megatron(original, folder / "megatron")
    to_hf(folder / "megatron", back)
    architecture = read_architecture(original)
    layout = hf_layout(architecture, (0,))
    parameters = loaded(original, layout, 0)
    save_checkpoint(saved, parameters, layout, architecture, group=None, rank=0, like=original)
    for written in (back, saved):
        assert_equal(stored_tensors(written), tensors)
    return back, saved


def test_what_encodes_pictures_is_carried_along(tmp_path: Path) -> None:
    """Qwen3.5 also has layers that predict further tokens. Its config.json need not mention them."""
    original = tmp_path / "original"
    config = transformers.Qwen3_5Config(text_config=TEXT | {"intermediate_size": 48}, vision_config=PICTURES)
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


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Path, Path]:
    """Returns two equal checkpoints."""
    make_checkpoint(tmp_path / "a")
    make_checkpoint(tmp_path / "b")
    return tmp_path / "a", tmp_path / "b"


def change(folder: Path, name: str, index: tuple[int, ...], value: float) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors[name][index] = value
    save_file(tensors, folder / "model.safetensors")


def difference_of_files(a: Path, b: Path, processes: Processes = ALONE) -> str | None:
    return first_difference(HfSource(a, "A"), HfSource(b, "B"), processes)


@pytest.mark.parametrize("block_bytes", [1, 300, 10**9])
def test_the_first_of_several_differences_is_named(
    block_bytes: int, pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(conversion, "BLOCK_BYTES", block_bytes)
    a, b = pair
    assert difference_of_files(a, b) is None
    change(b, "lm_head.weight", (0, 0), 1.0)
    change(a, "model.layers.1.mlp.up_proj.weight", (40, 31), 7.0)
    change(b, "model.layers.1.mlp.up_proj.weight", (40, 31), 0.5)
    change(b, "model.layers.1.mlp.up_proj.weight", (47, 0), 0.5)
    expected = f"model.layers.1.mlp.up_proj.weight[40, 31] is 7.0 in {a} and 0.5 in {b}"
    assert difference_of_files(a, b) == expected
    change(a, "model.layers.0.self_attn.q_norm.weight", (3,), -2.0)
    assert str(difference_of_files(a, b)).startswith("model.layers.0.self_attn.q_norm.weight[3] is -2.0")


def test_values_are_compared_by_their_bits(pair: tuple[Path, Path]) -> None:
    for folder in pair:
        change(folder, "model.norm.weight", (4,), float("nan"))
    assert difference_of_files(*pair) is None
    change(pair[0], "model.norm.weight", (5,), 0.0)
    change(pair[1], "model.norm.weight", (5,), -0.0)
    found = difference_of_files(*pair)
    assert "model.norm.weight[5] is 0.0" in found and "-0.0" in found


@pytest.mark.parametrize(
    ("name", "changes", "words"),
    [
        ("qwen3", {"rope_theta": 5e5}, "rope_theta is 10000.0 in"),
        ("qwen3", {"vocab_size": 130}, "vocab_size is 131 in"),
        ("qwen3_tied", {}, "head_dim is 32 in"),
        ("llama", {}, "family is qwen3 in"),
        ("qwen3", {"dtype": torch.bfloat16}, "model.embed_tokens.weight is float32 in .*--dtype"),
    ],
)
def test_architectures_are_compared_first_and_types(
    name: str, changes: dict[str, object], words: str, tmp_path: Path
) -> None:
    make_checkpoint(tmp_path / "a")
    make_checkpoint(tmp_path / "b", name, **changes)
    assert re.search(words, str(difference_of_files(tmp_path / "a", tmp_path / "b")), re.DOTALL)


def in_processes(count: int, work: Callable[[Processes], object]) -> list[Any]:
    """Returns the results of `work` in `count` processes, simulated by threads."""
    store = dist.HashStore()
    with ThreadPoolExecutor(count) as threads:
        return list(threads.map(work, [Processes(rank, count, store) for rank in range(count)]))


@pytest.mark.parametrize("count", [1, 2, 5])
def test_every_process_gets_what_all_gave(count: int) -> None:
    def work(processes: Processes) -> list[list[bytes]]:
        processes.meet()
        return [processes.gather(bytes([processes.rank, step])) for step in range(3)]

    assert in_processes(count, work) == [[[bytes([rank, step]) for rank in range(count)] for step in range(3)]] * count


def test_waiting_hears_signals() -> None:
    """After a failure, torchrun sends SIGTERM to the other processes and kills them 30 s later."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise InterruptedError

    previous = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, 0.1)
    try:
        with pytest.raises(InterruptedError):
            Processes(0, 2, dist.HashStore()).meet()
    finally:
        signal.signal(signal.SIGALRM, previous)


def test_three_write_what_one_writes(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "original", "qwen3")
    original, output = tmp_path / "original", tmp_path / "output"
    in_processes(3, lambda processes: convert_to_hf(HfSource(original, "--input"), output, processes))
    assert len(list(output.glob("*.safetensors"))) == 3
    assert difference_of_files(original, output) is None


def test_the_first_of_all_processes_differences_is_named(tmp_path: Path) -> None:
    tensors = make_checkpoint(tmp_path / "a")
    make_checkpoint(tmp_path / "b")
    for name in list(tensors)[5:]:
        tensors[name] += 1
    save_file(tensors, tmp_path / "b/model.safetensors")
    first = min(list(tensors)[5:], key=HfSource(tmp_path / "a", "A").tensors.numbers.__getitem__)
    found = {*in_processes(3, lambda processes: difference_of_files(tmp_path / "a", tmp_path / "b", processes))}
    assert len(found) == 1
    assert str(found.pop()).startswith(f"{first}[0")


def shown(rank: int, *, terminal: bool) -> str:
    """Returns the output of one of two processes. Each does half of 2 MB."""
    store, screen = dist.HashStore(), io.StringIO()
    other = ConversionProgress(Processes(1 - rank, 2, store), "to_hf", 2 * 10**6, console=Console(file=io.StringIO()))
    console = Console(file=screen, force_terminal=terminal, width=120)
    with ConversionProgress(Processes(rank, 2, store), "to_hf", 2 * 10**6, console=console) as bar:
        other.advance(10**6)
        bar.advance(10**6)
    return screen.getvalue()


def test_the_first_process_shows_what_all_have_done() -> None:
    assert "to_hf" in (screen := shown(0, terminal=True))
    assert "2.0/2.0 MB" in screen
    assert shown(1, terminal=True) == ""
    assert shown(0, terminal=False) == ""


NUM_EXPERTS = 4
SPARSE = {"num_experts": NUM_EXPERTS, "num_experts_per_tok": 2, "moe_intermediate_size": 6}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Returns a checkpoint with one tensor per expert, and the same checkpoint with stacked experts."""
    apart, stacked = tmp_path_factory.mktemp("apart"), tmp_path_factory.mktemp("stacked")
    text = TEXT | SPARSE | {"shared_expert_intermediate_size": 8}
    config = transformers.Qwen3_5MoeConfig(text_config=text, vision_config=PICTURES)
    torch.manual_seed(0)
    model = transformers.Qwen3_5MoeForConditionalGeneration(config)
    for folder in (apart, stacked):
        model.save_pretrained(folder)
    tensors = stored_tensors(apart)
    for layer in range(TEXT["num_hidden_layers"]):
        experts = f"model.language_model.layers.{layer}.mlp.experts"
        gate, up, down = (
            torch.stack([tensors.pop(f"{experts}.{number}.{name}_proj.weight") for number in range(NUM_EXPERTS)])
            for name in ("gate", "up", "down")
        )
        tensors |= {f"{experts}.gate_up_proj": torch.cat([gate, up], dim=1), f"{experts}.down_proj": down}
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, stacked / "model.safetensors")
    return apart, stacked


def loaded(path: Path, layout: Layout, rank: int) -> dict[str, torch.Tensor]:
    parameters = {name: torch.full(shape, torch.nan) for name, shape in layout.on(rank).parameters}
    load_parameters(path, layout, rank, parameters)
    return parameters


def test_the_tensors_are_those_of_the_file(folders: tuple[Path, Path]) -> None:
    tensors = canonical_tensors(read_architecture(folders[1]))
    stored = {name: tuple(tensor.shape) for name, tensor in stored_tensors(folders[1]).items()}
    assert dict(zip(tensors.names, tensors.shapes, strict=True)) == {
        name: shape for name, shape in stored.items() if not name.startswith("model.visual.")
    }


@pytest.mark.parametrize("layout_of", [megatron_layout, engine_layout])
@pytest.mark.parametrize("sizes", [{}, {"tp": 2}, {"tp": 2, "ep": 2}], ids=str)
def test_ranks_hold_the_same(folders: tuple[Path, Path], layout_of: Any, sizes: dict[str, int]) -> None:
    grid = Grid((0, 1, 2, 3), **sizes)
    if layout_of is megatron_layout and sizes.get("ep"):
        grid = Grid((0, 1, 2, 3), **sizes, etp=1)
    apart, stacked = (layout_of(read_architecture(folder), grid) for folder in folders)
    for rank in grid.ranks:
        one, other = (loaded(path, of, rank) for path, of in zip(folders, (apart, stacked), strict=True))
        assert_equal(one, other)


def test_stacked_experts_there_and_back_are_bit_exact(folders: tuple[Path, Path], tmp_path: Path) -> None:
    to_megatron(folders[1], tmp_path / "megatron", tp=2, ep=2)
    to_hf(tmp_path / "megatron", tmp_path / "back", max_file_bytes=20_000)
    assert_equal(stored_tensors(tmp_path / "back"), stored_tensors(folders[1]))
    assert difference(folders[1], tmp_path / "back") is None


RANK, ALPHA = 2, 6
CONFIG = """\
steps: 10
placement: {'actor, reference, rollout, reward': 0-3}
data: {train: {path: train.jsonl}}
checkpoint: {save_interval: 2}
"""
MADE_OF_ADAPTERS = ("model.layers.1.mlp.up_proj", "model.layers.0.self_attn.k_proj")

SaveRun = Callable[..., dict[str, Tensor]]


@pytest.fixture
def save_run(tmp_path: Path) -> SaveRun:
    """Returns a function that writes four ranks' files of step 4, of a run begun with `model`. It returns their
    canonical tensors."""

    def of(model: Path, *overrides: str) -> dict[str, Tensor]:
        (tmp_path / "config.yaml").write_text(CONFIG)
        config = load_config(tmp_path / "config.yaml", [f"model.path={model}", *overrides])
        architecture = read_architecture(model, "model.path")
        if config.model.lora:
            architecture = architecture.adapted(config.model.lora.rank, config.model.lora.targets)
        layout = megatron_layout(architecture, Grid((0, 1, 2, 3), tp=2, pp=2))
        folder = CheckpointFolder(tmp_path / "checkpoints")
        files = save(layout, folder.begin(4) / "actor")
        records = {f"actor/{file.name}": checksum(file) for file in files}
        folder.complete(4, records, {"config": config.model_dump(mode="json")}, keep=0)
        shapes = layout.tensors.shapes
        values = (tensor.view(shape) for tensor, shape in zip(whole_tensors(layout), shapes, strict=True))
        return dict(zip(layout.tensors.names, values, strict=True))

    return of


def export(tmp_path: Path, *options: object) -> int:
    arguments = ["convert", "run-to-hf", "--input", tmp_path / "checkpoints", "--output", tmp_path / "hf", *options]
    return main([str(argument) for argument in arguments])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_master_weights_are_exported_rounded_once(save_run: SaveRun, tmp_path: Path, dtype: str) -> None:
    make_checkpoint(tmp_path / "model", "qwen3", tie_word_embeddings=False)
    trained = save_run(tmp_path / "model", f"model.dtype={dtype}")
    assert export(tmp_path) == 0
    expected = {name: tensor.to(getattr(torch, dtype)) for name, tensor in trained.items()}
    assert_equal(stored_tensors(tmp_path / "hf"), expected)
    assert (tmp_path / "hf/tiktoken.model").exists(), "the tokenizer is copied"
    assert main(["convert", "verify", str(tmp_path / "checkpoints" / name_of(4)), str(tmp_path / "hf")]) == 0


def test_adapters_are_merged_into_the_model_that_the_run_began_with(save_run: SaveRun, tmp_path: Path) -> None:
    base = make_checkpoint(tmp_path / "model", "qwen3", tie_word_embeddings=False)
    lora = f"model.lora={{rank: {RANK}, alpha: {ALPHA}, targets: [up_proj, k_proj]}}"
    adapters = save_run(tmp_path / "model", lora, "model.dtype=float32")
    assert export(tmp_path) == 0
    exported = stored_tensors(tmp_path / "hf")
    for module in MADE_OF_ADAPTERS:
        a, b = (adapters[PEFT_PREFIX + module + half].double() for half in (A, B))
        expected = base[module + WEIGHT].double() + ALPHA / RANK * (b @ a)
        torch.testing.assert_close(exported[module + WEIGHT].double(), expected, rtol=1e-6, atol=0)
    changed = {name for name in exported if not torch.equal(exported[name], base[name])}
    assert changed == {name.removeprefix(PEFT_PREFIX).removesuffix(A) + WEIGHT for name in adapters if A in name}


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (lambda actor: (actor / "rank_00001.safetensors").unlink(), r"rank_00001.safetensors cannot be read"),
        (
            lambda actor: flip_a_bit(actor / "rank_00002.safetensors"),
            r"rank_00002.safetensors is damaged: its checksum",
        ),
    ],
    ids=["missing", "damaged"],
)
def test_damage_is_named(
    save_run: SaveRun, tmp_path: Path, capsys: pytest.CaptureFixture[str], harm: Callable[[Path], None], message: str
) -> None:
    make_checkpoint(tmp_path / "model", "qwen3")
    save_run(tmp_path / "model")
    harm(tmp_path / "checkpoints" / name_of(4) / "actor")
    assert export(tmp_path) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "hf").exists()


def flip_a_bit(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[-3] ^= 1
    file.write_bytes(content)


def test_a_model_that_is_gone_is_asked_for(
    save_run: SaveRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_checkpoint(tmp_path / "model", "qwen3")
    save_run(tmp_path / "model")
    (tmp_path / "model").rename(tmp_path / "moved")
    assert export(tmp_path) == 2
    told = f"the run began with the model {tmp_path / 'model'}, which has no config.json here"
    assert told in capsys.readouterr().err
    assert export(tmp_path, "--hf-config", tmp_path / "moved") == 0


def test_what_is_no_checkpoint_of_a_run_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_checkpoint(tmp_path / "checkpoints", "qwen3")
    assert export(tmp_path) == 2
    assert "expected a run of rltrain" in capsys.readouterr().err
