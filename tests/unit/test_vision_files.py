"""Vision-language models in states of runs, adapters and FP8 engines."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForImageTextToText

from rltrain.checkpoint.hf_reader import load_parameters, load_quantized
from rltrain.checkpoint.hf_writer import save_checkpoint
from rltrain.checkpoint.peft_files import load_adapters, save_adapters
from rltrain.checkpoint.run_files import checksum
from rltrain.checkpoint.run_folder import CheckpointFolder
from rltrain.checkpoint.saved_state import MASTER, Destination, SavedState
from rltrain.cli.main import main
from rltrain.config.loader import load_config
from rltrain.config.models import Lora
from rltrain.models import adapted_tensors, canonical_tensors, quantizable_tensors, read_architecture, tower_names
from rltrain.models.canonical import matrices_of
from rltrain.models.lora import PEFT_PREFIX, WEIGHT, A, B
from rltrain.models.vision import Tower
from rltrain.reshard.copy_table import allocate_parameters
from rltrain.reshard.layout import Layout
from rltrain.reshard.megatron_layout import megatron_layout
from rltrain.rollout.layout import engine_of
from rltrain.runtime.grid import Grid
from tests.support.checkpoint_files import PADDING, flats_of, save, stored_tensors, whole_tensors
from tests.support.marks import slow_but
from tests.support.model_shards import tiny_architecture
from tests.support.vision_checkpoints import CONFIGS, tiny_vision, write_checkpoint

GRID = Grid((0, 1, 2, 3), tp=2, pp=2)
RANK, ALPHA = 2, 6


@pytest.fixture(scope="module", params=slow_but(CONFIGS, "qwen2_5_vl", "qwen3_vl_moe"))
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("files") / request.param
    write_checkpoint(folder, request.param)
    return folder


# States of runs.

CONFIG = """\
steps: 10
placement: {'actor, reference, rollout, reward': 0-3}
data: {train: {path: train.jsonl}}
checkpoint: {save_interval: 2}
"""


def saved_run(tmp_path: Path, model: Path, layout: Layout, *overrides: str) -> dict[str, Tensor]:
    """Writes four ranks' files of step 4 and returns the canonical tensors."""
    (tmp_path / "config.yaml").write_text(CONFIG)
    config = load_config(tmp_path / "config.yaml", [f"model.path={model}", "model.dtype=float32", *overrides])
    folder = CheckpointFolder(tmp_path / "checkpoints")
    files = save(layout, folder.begin(4) / "actor")
    records = {f"actor/{file.name}": checksum(file) for file in files}
    folder.complete(4, records, {"config": config.model_dump(mode="json")}, keep=0)
    values = zip(layout.tensors.names, layout.tensors.shapes, whole_tensors(layout), strict=True)
    return {name: tensor.view(shape) for name, shape, tensor in values}


def exported(tmp_path: Path) -> dict[str, Tensor]:
    arguments = ["convert", "run-to-hf", "--input", tmp_path / "checkpoints", "--output", tmp_path / "hf"]
    assert main([str(argument) for argument in arguments]) == 0
    return stored_tensors(tmp_path / "hf")


def as_stored(name: str, value: Tensor, stored: dict[str, Tensor]) -> Tensor:
    """Returns the value in the form of the files, where experts may be transposed."""
    return value if value.shape == stored[name].shape else value.transpose(1, 2)


def test_a_trained_tower_is_exported_from_a_run(checkpoint: Path, tmp_path: Path) -> None:
    architecture = read_architecture(checkpoint, sees=True)
    trained = saved_run(tmp_path, checkpoint, megatron_layout(architecture, GRID), "model.vision={}")
    found, base = exported(tmp_path), stored_tensors(checkpoint)
    assert found.keys() == trained.keys() == base.keys()
    for name, value in trained.items():
        assert torch.equal(found[name], as_stored(name, value, base)), name


def test_a_frozen_tower_is_exported_from_its_checkpoint(checkpoint: Path, tmp_path: Path) -> None:
    layout = megatron_layout(read_architecture(checkpoint), GRID)
    trained = saved_run(tmp_path, checkpoint, layout, "model.vision={train: false}")
    found, base = exported(tmp_path), stored_tensors(checkpoint)
    tower = tower_names(read_architecture(checkpoint, sees=True))
    assert found.keys() == trained.keys() | tower
    assert all(torch.equal(found[name], base[name]) for name in tower)


@pytest.mark.parametrize("sizes", [{}, {"tp": 4}, {"pp": 2, "vpp": 2}], ids=str)
def test_a_state_is_read_in_another_layout(sizes: dict[str, int], tmp_path: Path) -> None:
    tiny = tiny_architecture("qwen2_5_vl", num_layers=4)
    vision = replace(tiny_vision("qwen2_5_vl"), depth=1, hidden=8, out_hidden=tiny.hidden_size)
    architecture = replace(tiny, vision=vision)
    saved, wanted = (megatron_layout(architecture, grid) for grid in (GRID, Grid((0, 1, 2, 3), **sizes)))
    state = SavedState(save(saved, tmp_path), saved.tensors)
    for rank in wanted.ranks:
        expected = [flat.where(flat != PADDING, torch.zeros(())) for flat in flats_of(wanted, rank)]
        flats = [torch.full_like(flat, PADDING) for flat in expected]
        state.read([Destination(MASTER, wanted.on(rank).pieces, flats)])
        assert all(torch.equal(found, values) for found, values in zip(flats, expected, strict=True))


# Megatron's format.


def test_a_conversion_carries_the_tower(checkpoint: Path, tmp_path: Path) -> None:
    there, back = tmp_path / "there", tmp_path / "back"
    for command, source, target in (("hf-to-megatron", checkpoint, there), ("megatron-to-hf", there, back)):
        assert main(["convert", command, "--input", str(source), "--output", str(target)]) == 0
    found, expected = (in_megatron(folder) for folder in (back, checkpoint))
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], value) for name, value in expected.items())


def in_megatron(folder: Path) -> dict[str, Tensor]:
    """Returns Megatron's parameters on one rank. Files of equal models may differ in the form of experts."""
    layout = megatron_layout(read_architecture(folder, sees=True), Grid((0,)))
    parameters = {name: torch.empty(shape) for name, shape in layout.on(0).parameters}
    load_parameters(folder, layout, 0, parameters)
    return parameters


# Adapters.


@pytest.mark.parametrize("vision", [False, True])
def test_adapters_are_merged_into_the_export_of_a_run(checkpoint: Path, vision: bool, tmp_path: Path) -> None:
    whole = read_architecture(checkpoint, sees=True)
    adapted = whole.adapted(RANK, None, vision=vision) if vision else replace(whole, vision=None).adapted(RANK, None)
    lora = f"model.lora={{rank: {RANK}, alpha: {ALPHA}, vision: {str(vision).lower()}}}"
    layout = megatron_layout(adapted, GRID)
    adapters = saved_run(tmp_path, checkpoint, layout, lora, "model.vision={}")
    found, base = exported(tmp_path), stored_tensors(checkpoint)
    changed = {name for name, value in base.items() if not torch.equal(found[name], value)}
    assert changed == adapted_tensors(adapted)
    assert bool(changed & tower_names(whole)) is vision
    shapes = dict(zip(canonical_tensors(whole).names, canonical_tensors(whole).shapes, strict=True))
    for name in changed:
        form = torch.empty(shapes[name])
        before, after = (as_stored(name, of[name], {name: form}).flatten(0, -2) for of in (base, found))
        place = 0
        for matrix, _, rows in matrices_of(name, shapes[name], 0, len(before)):
            module = adapter_module(matrix, whole.decoder_prefix, vision)
            a, b = (adapters[module + half].double() for half in (A, B))
            expected = before[place : place + rows].double() + ALPHA / RANK * (b @ a)
            torch.testing.assert_close(after[place : place + rows].double(), expected, rtol=1e-6, atol=1e-6)
            place += rows


def adapter_module(matrix: str, decoder_prefix: str, vision: bool) -> str:
    """Returns PEFT's name of a module: transformers' model of texts and images, or that of texts alone."""
    name = matrix.removesuffix(WEIGHT)
    if "visual." in name:
        return f"{PEFT_PREFIX}model.visual.{name.partition('visual.')[2]}"
    inner = "model.language_model." if vision else "model."
    return PEFT_PREFIX + inner + name.removeprefix(decoder_prefix)


@pytest.mark.parametrize("kind", slow_but(("qwen2_5_vl", "qwen3_vl", "qwen3_5"), "qwen3_vl"))
@pytest.mark.parametrize("targets", [None, ("gate_proj", "q_proj", "qkv", "linear_fc2")], ids=str)
@pytest.mark.parametrize("vision", [True, False])
def test_peft_loads_adapters(kind: Tower, targets: tuple[str, ...] | None, vision: bool, tmp_path: Path) -> None:
    from peft import PeftModel

    base, files = tmp_path / "base", tmp_path / "adapters"
    write_checkpoint(base, kind)
    settings = Lora(rank=RANK, alpha=ALPHA, targets=targets, vision=vision)
    adapted = read_architecture(base, sees=True).adapted(RANK, targets, vision=vision)
    layout = megatron_layout(adapted, Grid((0,)))
    generator = torch.Generator().manual_seed(0)
    values = {name: 0.1 * torch.randn(shape, generator=generator) for name, shape in layout.on(0).parameters}
    save_adapters(files, values, layout, adapted, settings, group=None, rank=0, base=str(base))
    model = PeftModel.from_pretrained(AutoModelForImageTextToText.from_pretrained(base), files)
    held = {name.replace(".default", ""): value for name, value in model.named_parameters() if "lora_" in name}
    stored = stored_tensors(files)
    assert held.keys() == stored.keys()
    assert any("visual" in name for name in held) is (vision and bool({"qkv", *settings_of(targets)} & {"qkv", "all"}))
    assert all(torch.equal(held[name], stored[name]) for name in held)
    back = {name: torch.full_like(value, 7.0) for name, value in values.items()}
    load_adapters(files, layout, 0, back, settings)
    save_adapters(tmp_path / "again", back, layout, adapted, settings, group=None, rank=0, base=str(base))
    again = stored_tensors(tmp_path / "again")
    assert again.keys() == stored.keys() and all(torch.equal(again[name], stored[name]) for name in stored)


def settings_of(targets: tuple[str, ...] | None) -> tuple[str, ...]:
    return ("all",) if targets is None else targets


# FP8.


def test_the_tower_stays_in_the_type_of_the_model(checkpoint: Path) -> None:
    architecture = read_architecture(checkpoint, sees=True)
    in_fp8 = quantizable_tensors(architecture)
    names = canonical_tensors(architecture).names
    assert not tower_names(architecture) & {names[number] for number in in_fp8.nonzero()[0]}
    assert in_fp8[: len(quantizable_tensors(replace(architecture, vision=None)))].any()
    part = engine_of(architecture, Grid((0,)), dtype="bfloat16", fp8=True)
    layouts = part.filled_from(part.plain)
    found = allocate_parameters(layouts.destination, 0, device=torch.device("cpu"))
    load_quantized(checkpoint, part.plain, layouts, 0, found, dtype=torch.bfloat16)
    plain = {name: torch.empty(shape) for name, shape in part.plain.on(0).parameters}
    load_parameters(checkpoint, part.plain, 0, plain)
    tower = [name for name in plain if name.startswith("vision.")]
    assert len(tower) == len(tower_names(architecture))
    assert all(torch.equal(found[name], plain[name].bfloat16()) for name in tower)
    assert any(tensor.dtype == torch.float8_e4m3fn for tensor in found.values())


# Critics.


def test_a_critic_keeps_its_tower(checkpoint: Path, tmp_path: Path) -> None:
    architecture = read_architecture(checkpoint, sees=True).value_model()
    layout = megatron_layout(architecture, Grid((0,)))
    held = {name: torch.full(shape, 0.5) for name, shape in layout.on(0).parameters}
    load_parameters(checkpoint, layout, 0, held)
    assert not held["output_layer.weight"].any()
    trained = {name: value + 1 for name, value in held.items()}
    save_checkpoint(tmp_path / "critic", trained, layout, architecture, group=None, rank=0, like=checkpoint)
    assert read_architecture(tmp_path / "critic", sees=True).value_model() == architecture
    found = {name: torch.empty(shape) for name, shape in layout.on(0).parameters}
    load_parameters(tmp_path / "critic", layout, 0, found)
    assert all(torch.equal(found[name], value) for name, value in trained.items())
