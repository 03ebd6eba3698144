"""Vision-language models in layouts and files, compared with transformers."""

import json
import shutil
from dataclasses import replace
from functools import cache
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import Qwen3VLMoeForConditionalGeneration

from rltrain.checkpoint.hf_reader import load_parameters
from rltrain.checkpoint.hf_writer import save_checkpoint
from rltrain.errors import CheckpointError
from rltrain.models import canonical_tensors, read_architecture, tower_names
from rltrain.models.registry import FAMILIES
from rltrain.models.table import is_hidden_matrix
from rltrain.models.vision import MRope, Tower
from rltrain.reshard.execute import execute
from rltrain.reshard.fsdp_layout import fsdp_layout
from rltrain.reshard.layout import Layout, hf_layout
from rltrain.reshard.megatron_layout import megatron_layout
from rltrain.reshard.plan import plan
from rltrain.rollout.layout import EnginePart, engine_layout, engine_parts
from rltrain.runtime.grid import Grid
from tests.support.plan_simulation import Side, reshard
from tests.support.schedule_configs import make_config
from tests.support.vision_checkpoints import (
    CONFIGS,
    IMAGE_TOKEN,
    VISION_END,
    VISION_START,
    load_model,
    model_inputs,
    tiny_config,
    tiny_vision,
    turn_experts,
    write_checkpoint,
)
from tests.support.vision_configs import PUBLISHED

IDS = [1, 9, VISION_START, *[IMAGE_TOKEN] * 16, VISION_END, 10, 11, VISION_START, *[IMAGE_TOKEN] * 8, VISION_END, 12]
GRIDS = ({}, {"tp": 2}, {"pp": 2}, {"tp": 2, "pp": 2})


@pytest.fixture(scope="module", params=CONFIGS)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a checkpoint of each kind. Its folder has the name of the kind."""
    folder = tmp_path_factory.mktemp("vision") / request.param
    write_checkpoint(folder, request.param)
    return folder


def kind_of(folder: Path) -> Tower:
    return folder.name  # type: ignore[return-value]


@cache
def parameters_of(folder: Path) -> dict[str, Tensor]:
    """Returns the parameters of transformers' model."""
    return {name: parameter.detach() for name, parameter in load_model(folder).named_parameters()}


def tower_of(folder: Path, prefix: str = "vision.") -> dict[str, Tensor]:
    """Returns the parameters of transformers' tower after `prefix`."""
    of_model = "model.visual."
    return {
        prefix + name.removeprefix(of_model): value
        for name, value in parameters_of(folder).items()
        if name.startswith(of_model)
    }


def language_model(folder: Path, written: Path) -> Path:
    """Writes transformers' language model without the tower, in the format of its family of texts."""
    config = json.loads((folder / "config.json").read_text())
    named = {name.replace("model.language_model.", "model."): value for name, value in parameters_of(folder).items()}
    texts = {name: value.contiguous() for name, value in named.items() if "visual" not in name}
    family = FAMILIES[kind_of(folder)].built_as or f"{kind_of(folder)}_text"
    written.mkdir()
    text_config = {**config["text_config"], "model_type": family, "tie_word_embeddings": False, "norm_topk_prob": True}
    save_file(_apart(texts) if family == "qwen3_moe" else texts, written / "model.safetensors")
    (written / "config.json").write_text(json.dumps(text_config))
    return written


def _apart(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Divides the tensors of all experts of a layer, as in the files of qwen3_moe."""
    apart: dict[str, Tensor] = {}
    for name, value in tensors.items():
        block, _, matrix = name.partition(".experts.")
        for number, expert in enumerate(value if matrix else ()):
            halves = expert.chunk(2) if matrix == "gate_up_proj" else (expert,)
            names = ("gate_proj", "up_proj") if matrix == "gate_up_proj" else ("down_proj",)
            parts = {f"{block}.experts.{number}.{of}.weight": half for of, half in zip(names, halves, strict=True)}
            apart |= {of: half.contiguous() for of, half in parts.items()}
        if not matrix:
            apart[name] = value
    return apart


def loaded(folder: Path, layout: Layout, rank: int) -> dict[str, Tensor]:
    parameters = {name: torch.full(shape, 7.0) for name, shape in layout.on(rank).parameters}
    load_parameters(folder, layout, rank, parameters)
    return parameters


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name].shape == value.shape and torch.equal(found[name], value), name


# config.json.


def test_the_tower_of_config_json(checkpoint: Path) -> None:
    kind = kind_of(checkpoint)
    architecture = read_architecture(checkpoint, sees=True)
    assert architecture.vision == tiny_vision(kind)
    assert architecture.mrope == MRope((2, 3, 3), interleaved=kind != "qwen2_5_vl")
    assert read_architecture(checkpoint) == replace(architecture, vision=None, mrope=None)


# Layouts.


@pytest.mark.parametrize("sizes", GRIDS, ids=str)
def test_megatron_has_the_tower_on_its_first_stage(checkpoint: Path, sizes: dict[str, int], tmp_path: Path) -> None:
    grid = Grid((0, 1, 2, 3), **sizes)
    texts = language_model(checkpoint, tmp_path / "texts")
    layout = megatron_layout(read_architecture(checkpoint, sees=True), grid)
    of_texts = megatron_layout(read_architecture(texts), grid)
    for rank in grid.ranks:
        tower = tower_of(checkpoint) if grid.coordinates(rank).pp == 0 else {}
        found, language = loaded(checkpoint, layout, rank), loaded(texts, of_texts, rank)
        assert_same(found, language | tower)
        assert [*found][: len(language)] == [*language]


def test_interleaved_stages_have_the_tower_in_the_first_chunk(checkpoint: Path) -> None:
    architecture = replace(read_architecture(checkpoint, sees=True), num_layers=4, moe=None, delta=None)
    layout = megatron_layout(architecture, Grid((0, 1), pp=2, vpp=2))
    first, second = ([name for name, _ in layout.on(rank).parameters] for rank in (0, 1))
    assert {name for name in first if "vision." in name} == {f"0.{name}" for name in tower_of(checkpoint)}
    assert not any("vision." in name for name in second)


@pytest.mark.parametrize("tp", [1, 2])
def test_every_rank_of_an_engine_has_the_tower(checkpoint: Path, tp: int, tmp_path: Path) -> None:
    grid = Grid((0, 1), tp=tp)
    texts = language_model(checkpoint, tmp_path / "texts")
    layout = engine_layout(read_architecture(checkpoint, sees=True), grid)
    of_texts = engine_layout(read_architecture(texts), grid)
    for rank in grid.ranks:
        assert_same(loaded(checkpoint, layout, rank), loaded(texts, of_texts, rank) | tower_of(checkpoint))


def test_sglang_has_other_names_and_fused_gates(checkpoint: Path) -> None:
    architecture, grid = read_architecture(checkpoint, sees=True), Grid((0,))
    ours, theirs = (loaded(checkpoint, engine_layout(architecture, grid, sglang=sglang), 0) for sglang in (False, True))
    tower = tower_of(checkpoint, "visual.")
    expected = {name.replace("attn.qkv.", "attn.qkv_proj."): value for name, value in tower.items()}
    for name in [name for name in expected if "gate_proj" in name]:
        up = expected.pop(name.replace("gate_proj", "up_proj"))
        expected[name.replace("gate_proj", "gate_up_proj")] = torch.cat([expected.pop(name), up])
    language = {name: value for name, value in ours.items() if not name.startswith("vision.")}
    assert_same(theirs, language | expected)


@pytest.mark.parametrize("shards", [1, 3])
def test_fsdp_has_the_parameters_of_transformers(checkpoint: Path, shards: int) -> None:
    grid = Grid((*range(shards),))
    layout = fsdp_layout(read_architecture(checkpoint, sees=True), grid)
    held = [loaded(checkpoint, layout, rank) for rank in grid.ranks]
    whole = {name: torch.cat([part[name] for part in held if name in part]) for name in held[0]}
    assert_same(whole, parameters_of(checkpoint))


@pytest.mark.parametrize("sizes", [{"tp": 2}, {"pp": 2}], ids=str)
def test_texts_keep_their_numbers(sizes: dict[str, int], checkpoint: Path) -> None:
    """The tower comes after all other tensors, so it does not move them."""
    sees, reads = read_architecture(checkpoint, sees=True), read_architecture(checkpoint)
    names = canonical_tensors(sees).names
    texts = canonical_tensors(reads).names
    assert names[: len(texts)] == texts
    assert {*names[len(texts) :]} == tower_names(sees) and not tower_names(reads)
    shapes = dict(zip(names, canonical_tensors(sees).shapes, strict=True))
    assert not any(is_hidden_matrix(name, shapes[name]) for name in tower_names(sees)), "Muon leaves the tower out"
    grid = Grid((0, 1), **sizes)
    for rank in grid.ranks:
        whole, of_texts = megatron_layout(sees, grid).on(rank), megatron_layout(reads, grid).on(rank)
        assert np.array_equal(whole.pieces[: len(of_texts.pieces)], of_texts.pieces)


@pytest.mark.parametrize("kind", ["qwen3_5", "qwen3_5_moe"])
def test_the_tower_follows_the_layer_for_multi_token_prediction(kind: Tower, tmp_path: Path) -> None:
    write_checkpoint(tmp_path, kind)
    architecture = read_architecture(tmp_path, sees=True).predicting()
    names = canonical_tensors(architecture).names
    assert {*names[-len(tower_names(architecture)) :]} == tower_names(architecture)
    layout = megatron_layout(architecture, Grid((0, 1), pp=2))
    held: dict[str, set[str]] = {}
    for rank in layout.ranks:
        on = layout.on(rank)
        for parameter, tensor in zip(on.pieces["parameter"].tolist(), on.pieces["tensor"].tolist(), strict=True):
            held.setdefault(on.parameters[parameter][0], set()).add(names[tensor])
    assert set().union(*held.values()) == {*names}
    tower = {name: tensors for name, tensors in held.items() if name.startswith("vision.")}
    assert tower == {name: {"model.visual." + name.removeprefix("vision.")} for name in tower}
    assert {of for name, tensors in held.items() if name not in tower for of in tensors}.isdisjoint(
        tower_names(architecture)
    )


@pytest.mark.parametrize("engine", ["embedded", "sglang"])
def test_a_frozen_tower_is_a_part_of_its_own(checkpoint: Path, engine: str) -> None:
    def parts_of(trains: bool, of: str = engine, **model: Any) -> list[EnginePart]:
        servers = {"urls": ["http://h:1"]} if of == "http" else {"sglang": {"staging_mb": 0.1}}
        config = make_config(
            model={"path": str(checkpoint), "vision": {"train": trains}, **model}, rollout={"engine": of, **servers}
        )
        return engine_parts(config, read_architecture(checkpoint, sees=True), Grid((0,)))

    found = parts_of(trains=False)
    of_tower, others = ([part for part in found if part.is_frozen is wanted] for wanted in (True, False))
    assert found == [*of_tower, *others] and of_tower and others
    tower, rest = ({name for part in some for name, _ in part.layout.on(0).parameters} for some in (of_tower, others))
    whole = {name for part in parts_of(trains=True) for name, _ in part.layout.on(0).parameters}
    assert tower | rest == whole and not tower & rest
    beginnings = ("vision.",) if engine == "embedded" else ("visual.", "model.visual.")
    assert tower == {name for name in whole if name.startswith(beginnings)}
    assert not any(part.is_frozen for part in parts_of(trains=True))
    adapters = {"lora": {"rank": 2, "alpha": 4}}
    assert any(part.is_frozen for part in parts_of(trains=True, **adapters)), "adapters leave the tower alone"
    assert not any(part.is_frozen for part in parts_of(trains=False, of="http")), "files need all tensors"


# Reshards.


def moved(source: Layout, destination: Layout, held: dict[str, Tensor]) -> dict[str, Tensor]:
    """Reshards on one rank."""
    found = {name: torch.full(shape, 7.0) for name, shape in destination.on(0).parameters}
    execute(plan(source, destination, 0, 1), held, found, group=None, cpu_group=None, bucket_bytes=10_000)
    return found


def test_a_reshard_moves_every_bit(checkpoint: Path) -> None:
    architecture, grid = read_architecture(checkpoint, sees=True), Grid((0,))
    layouts = [make(architecture, grid) for make in (megatron_layout, fsdp_layout, engine_layout)]
    layouts.append(hf_layout(architecture, grid.ranks))
    expected = [loaded(checkpoint, layout, 0) for layout in layouts]
    for source, held in zip(layouts, expected, strict=True):
        for destination, wanted in zip(layouts, expected, strict=True):
            found = moved(source, destination, held)
            trained = {name: value for name, value in found.items() if wanted[name].numel() == value.numel()}
            assert_same(trained, wanted)


@pytest.mark.parametrize(
    ("training", "engine"), [({"tp": 2, "pp": 2}, {"tp": 2}), ({"pp": 2}, {"tp": 1}), ({"tp": 4}, {"tp": 4})], ids=str
)
def test_every_rank_of_engines_receives_the_tower(
    checkpoint: Path, training: dict[str, int], engine: dict[str, int]
) -> None:
    architecture = read_architecture(checkpoint, sees=True)
    if architecture.delta and training == {"tp": 4}:
        training = engine = {"tp": 2}
    layouts = (
        megatron_layout(architecture, Grid((0, 1, 2, 3), **training)),
        engine_layout(architecture, Grid((2, 3, 4, 5), **engine)),
    )
    source, destination = (
        Side(layout, {rank: arrays(checkpoint, layout, rank) for rank in layout.ranks}) for layout in layouts
    )
    reshard(source, destination, ranks_per_node=3)


def arrays(folder: Path, layout: Layout, rank: int) -> dict[str, NDArray[np.float32]]:
    return {name: value.numpy() for name, value in loaded(folder, layout, rank).items()}


# Files.


def logits_of(folder: Path) -> Tensor:
    generator = np.random.default_rng(0)
    images = [generator.integers(0, 256, (height, 56, 3), np.uint8) for height in (56, 28)]
    with torch.no_grad():
        found: Tensor = load_model(folder)(**model_inputs(folder, IDS, images)).logits
    return found


@pytest.mark.parametrize("sees", [True, False])
@pytest.mark.parametrize("shard_bytes", [10**9, 20_000])
def test_transformers_opens_what_is_saved(checkpoint: Path, sees: bool, shard_bytes: int, tmp_path: Path) -> None:
    """Without model.vision the tower is copied from the files."""
    architecture = read_architecture(checkpoint, sees=sees)
    layout = megatron_layout(architecture, Grid((0,)))
    held = loaded(checkpoint, layout, 0)
    saved = tmp_path / "saved"
    settings: dict[str, Any] = {"group": None, "rank": 0, "like": checkpoint, "written_bytes": 10_000}
    save_checkpoint(saved, held, layout, architecture, max_shard_bytes=shard_bytes, **settings)
    written = {name: value for file in saved.glob("*.safetensors") for name, value in load_file(file).items()}
    assert_same(written, load_file(checkpoint / "model.safetensors"))
    torch.testing.assert_close(logits_of(saved), logits_of(checkpoint), rtol=0, atol=1e-5)


def test_a_trained_tower_is_saved(checkpoint: Path, tmp_path: Path) -> None:
    architecture = read_architecture(checkpoint, sees=True)
    layout = megatron_layout(architecture, Grid((0,)))
    held = {name: value + 1 for name, value in loaded(checkpoint, layout, 0).items()}
    save_checkpoint(tmp_path / "saved", held, layout, architecture, group=None, rank=0, like=checkpoint)
    found = load_model(tmp_path / "saved")
    for name, value in tower_of(checkpoint, "").items():
        assert torch.equal(found.model.visual.get_parameter(name), value + 1), name


def test_both_forms_of_names_are_read_and_kept(tmp_path: Path) -> None:
    """Some releases of transformers saved Qwen2.5-VL with the names of its modules."""
    old, new = tmp_path / "old", tmp_path / "new"
    write_checkpoint(old, "qwen2_5_vl")
    shutil.copytree(old, new)
    renamed = {
        name.replace("model.", "model.language_model.", 1)
        if name.startswith("model.")
        else name.replace("visual.", "model.visual.", 1): value
        for name, value in load_file(old / "model.safetensors").items()
    }
    save_file(renamed, new / "model.safetensors", metadata={"format": "pt"})
    architecture, grid = read_architecture(new, sees=True), Grid((0,))
    layout = megatron_layout(architecture, grid)
    held = loaded(new, layout, 0)
    assert_same(held, loaded(old, megatron_layout(read_architecture(old, sees=True), grid), 0))
    save_checkpoint(tmp_path / "saved", held, layout, architecture, group=None, rank=0, like=new)
    assert_same(load_file(tmp_path / "saved" / "model.safetensors"), renamed)
    assert_same(parameters_of(tmp_path / "saved"), parameters_of(old))


# Experts of Qwen3-VL: published files have their matrices transposed.


@pytest.fixture(scope="module")
def experts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("experts") / "qwen3_vl_moe"
    write_checkpoint(folder, "qwen3_vl_moe")
    return folder


@pytest.mark.parametrize("sizes", [{}, {"tp": 2}, {"ep": 2}, {"ep": 2, "etp": 1}], ids=str)
def test_both_forms_of_experts_are_read(experts: Path, sizes: dict[str, int], tmp_path: Path) -> None:
    """transformers 5 saves them as it holds them."""
    load_model(experts).save_pretrained(tmp_path)
    stored = [load_file(of / "model.safetensors") for of in (experts, tmp_path)]
    shapes = [{name: value.shape for name, value in tensors.items() if ".experts." in name} for tensors in stored]
    assert shapes[0] == {name: (count, columns, rows) for name, (count, rows, columns) in shapes[1].items()}
    architecture, grid = read_architecture(experts, sees=True), Grid((0, 1), **sizes)
    assert read_architecture(tmp_path, sees=True) == architecture
    for layout in (megatron_layout(architecture, grid), fsdp_layout(architecture, Grid((0, 1)))):
        for rank in layout.ranks:
            assert_same(loaded(experts, layout, rank), loaded(tmp_path, layout, rank))


@pytest.mark.parametrize("written_bytes", [20_000, 2**25])
def test_experts_are_saved_in_the_form_of_their_checkpoint(experts: Path, written_bytes: int, tmp_path: Path) -> None:
    load_model(experts).save_pretrained(tmp_path / "other")
    architecture = read_architecture(experts, sees=True)
    layout = megatron_layout(architecture, Grid((0,)))
    held = loaded(experts, layout, 0)
    for like in (experts, tmp_path / "other"):
        saved = tmp_path / f"saved as {like.name}"
        settings: dict[str, Any] = {"group": None, "rank": 0, "like": like, "written_bytes": written_bytes}
        save_checkpoint(saved, held, layout, architecture, **settings)
        assert_same(load_file(saved / "model.safetensors"), load_file(like / "model.safetensors"))


def test_square_matrices_of_transposed_experts_are_refused(experts: Path, tmp_path: Path) -> None:
    config = tiny_config("qwen3_vl_moe")
    config.text_config.moe_intermediate_size = config.text_config.hidden_size // 2
    model = Qwen3VLMoeForConditionalGeneration(config)
    model.save_pretrained(tmp_path)
    layout = megatron_layout(read_architecture(tmp_path), Grid((0,)))
    found = loaded(tmp_path, layout, 0)
    gates = model.model.language_model.layers[0].mlp.experts.gate_up_proj
    assert torch.equal(found["decoder.layers.0.mlp.experts.local_experts.0.linear_fc1.weight"], gates[0])
    turn_experts(tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"square ones in .*gate_up_proj: transformers 5 does not"):
        loaded(tmp_path, layout, 0)


# Parts of config.json.


def test_flat_and_nested_configs_are_the_same(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "qwen2_5_vl")
    file = tmp_path / "config.json"
    nested = json.loads(file.read_text())
    expected = read_architecture(tmp_path, sees=True)
    text = nested.pop("text_config")
    rope = text.pop("rope_parameters")
    flat = {**text, **nested, "rope_theta": rope["rope_theta"]}
    flat["rope_scaling"] = {"type": "mrope", "mrope_section": rope["mrope_section"]}
    file.write_text(json.dumps(flat))
    assert read_architecture(tmp_path, sees=True) == expected


WRONG: dict[str, tuple[Tower, dict[str, Any], str]] = {
    "no tower": ("qwen3_vl", {"vision_config": None}, "vision_config is null; expected an object with the vision"),
    "no tokens": ("qwen3_vl", {"image_token_id": None}, "image_token_id is null; expected an integer"),
    "a token beyond": ("qwen2_5_vl", {"image_token_id": 128}, "image_token_id is 128; expected from 0 to 127"),
    "sections": (
        "qwen2_5_vl",
        {"text_config": {"rope_parameters": {"rope_theta": 1e4, "mrope_section": [2, 2, 2]}}},
        "text_config.rope_parameters.mrope_section is .* expected three numbers with the sum 8",
    ),
    "alternation": (
        "qwen3_vl",
        {
            "text_config": {
                "rope_parameters": {"rope_theta": 1e4, "mrope_interleaved": False, "mrope_section": [2, 3, 3]}
            }
        },
        "mrope_interleaved is false; expected True, as in transformers",
    ),
    "output": (
        "qwen3_vl",
        {"vision_config": {"out_hidden_size": 32}},
        "vision_config.out_hidden_size is 32; expected 64",
    ),
    "heads": (
        "qwen3_vl",
        {"vision_config": {"num_heads": 3}},
        "num_heads is 3; expected a divisor of hidden_size = 32",
    ),
    "blocks": (
        "qwen2_5_vl",
        {"vision_config": {"fullatt_block_indexes": [3]}},
        "expected a list of blocks from 0 to 2",
    ),
    "positions": ("qwen3_5", {"vision_config": {"num_position_embeddings": 15}}, "is 15; expected a square number"),
    "deepstack": (
        "qwen3_vl",
        {"vision_config": {"deepstack_visual_indexes": [0, 1, 2]}},
        "expected at most 2 deepstack_visual_indexes",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_config_is_refused(name: str, tmp_path: Path) -> None:
    kind, changes, message = WRONG[name]
    config = tiny_config(kind).to_dict()
    for key, value in changes.items():
        config[key] = {**config[key], **value} if isinstance(value, dict) else value
    (tmp_path / "config.json").write_text(json.dumps(config))
    read_architecture(tmp_path)
    with pytest.raises(CheckpointError, match=message):
        read_architecture(tmp_path, sees=True)


def test_a_family_without_a_tower_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(
        json.dumps({**tiny_config("qwen3_vl").text_config.to_dict(), "model_type": "qwen3"})
    )
    with pytest.raises(
        CheckpointError, match='model_type is "qwen3"; expected one of .*qwen2_5_vl.* since model.vision'
    ):
        read_architecture(tmp_path, sees=True)


def test_more_blocks_in_the_files_are_refused(tmp_path: Path) -> None:
    """Without model.vision they are copied."""
    write_checkpoint(tmp_path, "qwen2_5_vl")
    config = json.loads((tmp_path / "config.json").read_text())
    config["vision_config"]["depth"] = 2
    (tmp_path / "config.json").write_text(json.dumps(config))
    loaded(tmp_path, megatron_layout(read_architecture(tmp_path), Grid((0,))), 0)
    with pytest.raises(CheckpointError, match=r"12 tensors that the model .* does not have: visual\.blocks\.2\."):
        loaded(tmp_path, megatron_layout(read_architecture(tmp_path, sees=True), Grid((0,))), 0)


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_config_has_the_published_number_of_parameters(name: str, tmp_path: Path) -> None:
    config, count = PUBLISHED[name]
    (tmp_path / "config.json").write_text(json.dumps(config))
    shapes = canonical_tensors(read_architecture(tmp_path, sees=True)).shapes
    assert sum(map(prod, shapes)) == count


# Without model.vision.


def test_without_images_it_is_the_language_model(checkpoint: Path, tmp_path: Path) -> None:
    """Everything depends on the architecture alone, so it computes what the family of texts does."""
    found = read_architecture(checkpoint)
    texts = read_architecture(language_model(checkpoint, tmp_path / "texts"))
    of_files = {name: getattr(texts, name) for name in ("family", "decoder_prefix", "stacked_experts")}
    assert replace(found, **of_files) == texts
