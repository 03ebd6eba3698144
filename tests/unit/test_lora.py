"""Tests of adapters without a run: names and shapes, initial values, refusals, memory."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from rltrain.checkpoint.peft_files import load_adapters
from rltrain.config.models import Lora
from rltrain.config.schema import Config
from rltrain.errors import CheckpointError, ConfigError
from rltrain.models import canonical_tensors
from rltrain.models.architecture import Architecture
from rltrain.models.canonical import table_of
from rltrain.models.lora import target_of, targets_in
from rltrain.planning.memory import resident_bytes, working_bytes
from rltrain.planning.planned import PlannedJob, plan_job
from rltrain.planning.problems import adapted_model_problems
from rltrain.planning.sync_time import PlannedSync
from rltrain.planning.validation import check_config
from rltrain.planning.validation_models import check_against_architecture
from rltrain.reshard.layout import Layout
from rltrain.reshard.megatron_layout import megatron_layout
from rltrain.rollout.layout import engine_layout
from rltrain.runtime.grid import Grid
from rltrain.runtime.placement import resolve_placement, role_grids
from rltrain.training.adapters import draw_adapters
from tests.support.model_shards import tiny_architecture


def filled(layout: Layout, rank: int, seed: int, targets: tuple[str, ...] | None = None) -> dict[str, torch.Tensor]:
    parameters = {name: torch.full(shape, torch.nan) for name, shape in layout.on(rank).parameters}
    draw_adapters(layout, rank, parameters, targets, seed)
    return parameters


def whole(layout: Layout, seed: int, targets: tuple[str, ...] | None = None) -> dict[str, torch.Tensor]:
    """Returns the canonical tensors, assembled from all ranks."""
    found = {
        name: torch.full(shape, torch.nan)
        for name, shape in zip(layout.tensors.names, layout.tensors.shapes, strict=True)
    }
    for rank in layout.ranks:
        mine, parameters = layout.on(rank), filled(layout, rank, seed, targets)
        flats = [parameters[name].view(-1) for name, _ in mine.parameters]
        for piece in mine.pieces:
            row, col, rows, cols = (int(piece[name]) for name in ("row", "col", "rows", "cols"))
            values = flats[piece["parameter"]][int(piece["offset"]) :].as_strided(
                (rows, cols), (int(piece["stride"]), 1)
            )
            found[layout.tensors.names[piece["tensor"]]][row : row + rows, col : col + cols] = values
    return found


@pytest.mark.parametrize("family", ["qwen3", "llama", "qwen3_moe", "mixtral", "deepseek_v3"])
def test_each_matrix_has_a_pair_of_its_shape_by_the_names_of_peft(family: str) -> None:
    architecture = tiny_architecture(family)
    base, adapters = canonical_tensors(architecture), canonical_tensors(architecture.adapted(4, None))
    shapes = dict(zip(base.names, base.shapes, strict=True))
    matrices = [name for name in base.names if target_of_or_none(name) in targets_in(table_of(architecture))]
    expected = {}
    for name in matrices:
        module = "base_model.model." + name.removesuffix(".weight")
        expected |= {f"{module}.lora_A.weight": (4, shapes[name][1]), f"{module}.lora_B.weight": (shapes[name][0], 4)}
    assert dict(zip(adapters.names, adapters.shapes, strict=True)) == expected


def target_of_or_none(name: str) -> str | None:
    return target_of(name) if name.endswith(".weight") else None


def test_those_of_a_critic_have_its_head_with_them() -> None:
    critic = tiny_architecture().value_model()
    plain, own = (canonical_tensors(of.adapted(4, None)).names for of in (tiny_architecture(), critic))
    assert own == (*plain, "score.weight")
    layout = megatron_layout(critic.adapted(4, None), Grid((0, 1), pp=2))
    heads = [[name for name, _ in layout.on(rank).parameters if ".lora." not in name] for rank in (0, 1)]
    assert heads == [[], ["output_layer.weight"]]
    parameters = {name: torch.full(shape, 3.0) for name, shape in layout.on(1).parameters}
    draw_adapters(layout, 1, parameters, None, 5)
    assert (parameters["output_layer.weight"] == 3).all(), "the loaded value stays"


@pytest.mark.parametrize("sizes", [{"tp": 2}, {"tp": 4}, {"pp": 2}, {"tp": 2, "pp": 2}])
@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_every_layout_begins_with_the_same_numbers(family: str, sizes: dict[str, int]) -> None:
    architecture = tiny_architecture(family).adapted(4, ("q_proj", "down_proj"))
    expected = whole(megatron_layout(architecture, Grid((0,))), 5, ("q_proj", "down_proj"))
    layout = megatron_layout(architecture, Grid(tuple(range(int(np.prod([*sizes.values()])))), **sizes))
    found = whole(layout, 5, ("q_proj", "down_proj"))
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def test_a_is_uniform_up_to_the_inverse_root_of_its_inputs_and_b_is_zero() -> None:
    layout = megatron_layout(tiny_architecture("qwen3", hidden_size=64).adapted(64, ("q_proj",)), Grid((0,)))
    drawn, other = whole(layout, 0, ("q_proj",)), whole(layout, 1, ("q_proj",))
    for name, tensor in drawn.items():
        if ".q_proj.lora_A" in name:
            assert tensor.abs().max() <= 64**-0.5 < 1.02 * tensor.abs().max()
            assert tensor.std() == pytest.approx((64 * 3) ** -0.5, rel=0.05)
            assert not torch.equal(tensor, other[name])
        else:
            assert not tensor.any(), f"{name}: B, or a neighbour of the adapted matrix in one parameter"
    of_a = [tensor for name, tensor in drawn.items() if ".q_proj.lora_A" in name]
    assert not torch.equal(of_a[0], of_a[1])


def make_config(lora: dict[str, Any], model: dict[str, Any] | None = None, **sections: Any) -> Config:
    values = {
        "steps": 1,
        "placement": {"actor,reference": "0-1", "rollout,reward": "2-3"},
        "model": {"path": "m", "lora": lora, **(model or {})},
        "data": {"train": {"path": "t"}},
    }
    return Config.model_validate(values | sections)


AT_URLS = {"engine": "http", "urls": ("http://a:1",)}


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        ({"model": {"moe": {"bias_update_rate": 0.1}}}, "model.moe.bias_update_rate: got 0.1 with model.lora"),
        ({"critic": {"lora": {"path": "peft"}}}, "critic.lora.path: got peft; expected null"),
        (
            {"weight_sync": {"adapters": "apart"}, "rollout": AT_URLS | {"protocol": "openai"}},
            "weight_sync.adapters: got apart with rollout.engine http and rollout.protocol openai",
        ),
        (
            {"weight_sync": {"adapters": "apart"}, "rollout": AT_URLS | {"http": {"weights": "group"}}},
            "weight_sync.adapters: got apart with rollout.http.weights group",
        ),
        (
            {"weight_sync": {"adapters": "apart", "delta": {}}},
            "weight_sync.delta: got a section with weight_sync.adapters apart",
        ),
    ],
)
def test_what_adapters_are_refused_with(sections: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        check_config(make_config({}, **sections))


@pytest.mark.parametrize("rollout", [{"engine": "sglang"}, AT_URLS])
def test_experts_in_servers_have_no_adapters_apart(rollout: dict[str, Any]) -> None:
    apart = make_config({}, weight_sync={"adapters": "apart"}, rollout=rollout)
    refused = [*adapted_model_problems(apart, {"actor": tiny_architecture("qwen3_moe")})]
    assert len(refused) == 1 and f"apart with rollout.engine {rollout['engine']} and adapters of experts" in refused[0]
    attention = make_config({"targets": ["q_proj"]}, weight_sync={"adapters": "apart"}, rollout=rollout)
    assert not [*adapted_model_problems(attention, {"actor": tiny_architecture("qwen3_moe")})]
    assert not [*adapted_model_problems(apart, {"actor": tiny_architecture()})]


def test_towers_in_sglang_have_no_adapters_apart() -> None:
    def problems(**rollout: str) -> list[str]:
        config = make_config({"vision": True}, {"vision": {}}, weight_sync={"adapters": "apart"}, rollout=rollout)
        return [*adapted_model_problems(config, {"actor": tiny_architecture("qwen3_vl")})]

    (refused,) = problems(engine="sglang")
    assert "apart with rollout.engine sglang and model.lora.vision" in refused
    assert not problems(engine="embedded")


def test_there_is_nothing_to_keep_apart_without_adapters() -> None:
    values = make_config({}, weight_sync={"adapters": "apart"}).model_dump()
    with pytest.raises(ConfigError, match="weight_sync.adapters: got apart without model.lora; expected merged"):
        check_config(Config.model_validate({**values, "model": {"path": "m"}}))


def check_with(architecture: Architecture, lora: dict[str, Any], **sections: Any) -> None:
    config = make_config(
        lora,
        data={"train": {"path": "t"}, "max_prompt_tokens": 8},
        rollout={"max_context_tokens": 24, "sampling": {"max_response_tokens": 16}},
        **sections,
    )
    placement = resolve_placement(config.placement, 4, 4)
    roles = dict.fromkeys(["actor", *placement.roles], architecture)
    check_against_architecture(config, role_grids(config, placement), roles)


def test_targets_that_a_model_does_not_have_are_refused() -> None:
    check_with(tiny_architecture(), {"targets": ["q_proj", "down_proj"]})
    for targets in (["query"], []):
        with pytest.raises(ConfigError, match="expected null, or some of q_proj, k_proj, v_proj, o_proj, gate_proj"):
            check_with(tiny_architecture(), {"targets": targets})
    with pytest.raises(ConfigError, match="expected null, or some of q_a_proj, kv_a_proj_with_mqa, q_b_proj"):
        check_with(tiny_architecture("deepseek_v3"), {"targets": ["q_proj"]})


def planned(**changes: Any) -> PlannedJob:
    config = make_config({"rank": 4}, **changes)
    placement = resolve_placement(config.placement, 4, 4)
    return plan_job(config, placement, dict.fromkeys(["actor", *placement.roles], tiny_architecture()), 4)


def test_the_reference_has_no_memory_where_it_is_the_actors_base() -> None:
    assert resident_bytes(planned(), "reference", 0) == {}
    for changes in (
        {"reference": {"refresh_every": 5}},
        {"reference": {"path": "other"}},
        {"reference": {"parallel": {"tp": 2}}},
        {"placement": {"actor": "0-1", "rollout,reward,reference": "2-3"}},
    ):
        assert resident_bytes(planned(**changes), "reference", 0)["weights"] > 0, changes


def test_gradients_and_optimizer_are_of_adapters_alone() -> None:
    job = planned(actor={"distributed_optimizer": False})
    parts = resident_bytes(job, "actor", 0)
    tensors = canonical_tensors(tiny_architecture().adapted(4, None))
    adapters = sum(int(np.prod(shape)) for shape in tensors.shapes)
    base = sum(int(np.prod(shape)) for shape in canonical_tensors(tiny_architecture()).shapes)
    assert parts["optimizer"] == 8 * adapters
    assert parts["master_weights"] == parts["gradients"] == 4 * adapters
    assert parts["weights"] == pytest.approx(2 * (base + adapters), rel=0.2)  # padded rows of the vocabulary
    assert working_bytes(job, "weight_sync", {"actor": 0})["merged"] == parts["weights"]


def test_engines_hold_adapters_apart_beside_their_base() -> None:
    merged, apart = planned(), planned(weight_sync={"adapters": "apart"})
    before, after = (resident_bytes(job, "rollout", 0) for job in (merged, apart))
    adapted = tiny_architecture().adapted(4, None)
    shapes = engine_layout(adapted, Grid((0,))).on(0).parameters
    assert after == {
        **before,
        "base": before["weights"],
        "weights": 2 * sum(int(np.prod(shape)) for _, shape in shapes),
    }
    assert before["base"] == 0
    assert "merged" not in working_bytes(apart, "weight_sync", {"actor": 0})
    ranks = {job: PlannedSync(job).planner.destination.tensors.names for job in (merged, apart)}
    assert set(ranks[apart]) == set(canonical_tensors(adapted).names)


LORA = Lora(rank=4, alpha=8, targets=("q_proj", "v_proj"))
PEFT = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"], "bias": "none"}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"r": 8}, "r is 8, but model.lora.rank is 4; set it to the same"),
        ({"lora_alpha": 4}, "lora_alpha is 4, but model.lora.alpha is"),
        ({"target_modules": ["q_proj"]}, "but model.lora.targets comes to .'q_proj', 'v_proj'.; set it to the same"),
        ({"use_rslora": True}, "use_rslora is True; expected False"),
        ({"rank_pattern": {"q_proj": 2}}, "rank_pattern is"),
        ({}, "has other tensors than the adapters of model.lora"),
    ],
)
def test_files_of_other_adapters_are_refused(change: dict[str, Any], said: str, tmp_path: Path) -> None:
    architecture = tiny_architecture().adapted(4, LORA.targets)
    layout = megatron_layout(architecture, Grid((0,)))
    parameters = {name: torch.empty(shape) for name, shape in layout.on(0).parameters}
    (tmp_path / "adapter_config.json").write_text(json.dumps(PEFT | change))
    names = [name for name in layout.tensors.names if target_of(name) in ("q_proj", "v_proj")]
    save_file({name: torch.zeros(1, 1) for name in names}, tmp_path / "adapter_model.safetensors")
    with pytest.raises(CheckpointError, match=said):
        load_adapters(tmp_path, layout, 0, parameters, LORA)


def test_files_that_are_missing_are_named(tmp_path: Path) -> None:
    layout = megatron_layout(tiny_architecture().adapted(4, LORA.targets), Grid((0,)))
    with pytest.raises(CheckpointError, match="adapter_config.json does not exist.*model.lora.path"):
        load_adapters(tmp_path, layout, 0, {}, LORA)
