"""The layer that predicts a further token: what its loss counts for, where its tensors lie, and what is refused."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from rltrain.checkpoint.hf_reader import load_parameters
from rltrain.checkpoint.hf_writer import save_checkpoint
from rltrain.config.schema import Config
from rltrain.errors import ConfigError
from rltrain.models import Architecture, canonical_tensors, prediction_layer, read_architecture
from rltrain.models.checkpoint_model import num_predicting
from rltrain.models.of_roles import role_architectures
from rltrain.models.registry import PREDICTIONS
from rltrain.models.table import is_hidden_matrix
from rltrain.planning.activation_memory import Activations
from rltrain.planning.validation import check_config
from rltrain.planning.validation_models import mtp_problems, mtp_problems_of_models
from rltrain.reshard.layout import hf_layout
from rltrain.reshard.megatron_layout import megatron_layout
from rltrain.roles.resuming import _architecture_problems
from rltrain.rollout.layout import engine_layout
from rltrain.runtime.grid import Grid
from rltrain.training.megatron.prediction import AHEAD, weights_of_rows
from rltrain.training.packing import pack
from tests.converted_checkpoints import stored_tensors
from tests.model_shards import DELTA, MOE, tiny_architecture
from tests.unit.packed_experience import packed_experience
from tests.unit.schedule_configs import GRPO, make_config
from tests.unit.test_estimated_memory import job_of

MIMO = tiny_architecture("mimo", qkv_bias=True).predicting()
REFERENCE = {"refresh_every": 2, "path": "other"}


@given(
    shape=st.lists(st.tuples(st.integers(1, 4), st.integers(0, 6)), min_size=1, max_size=5),
    shares=st.lists(st.floats(0, 8), min_size=5, max_size=5),
)
def test_a_samples_tokens_come_to_its_share_where_a_row_predicts_them(
    shape: list[tuple[int, int]], shares: list[float]
) -> None:
    (batch,) = pack(packed_experience(shape), 100, device=torch.device("cpu"))
    weights = weights_of_rows(batch, torch.tensor(shares[: len(shape)])).tolist()
    start = 0
    for (prompt, response), share in zip(shape, shares, strict=False):
        predicted = [place for place in range(AHEAD, prompt + response) if place >= prompt]
        expected = [0.0] * (prompt + response)
        for place in predicted:
            expected[place - AHEAD] = share / len(predicted)
        assert weights[start : start + prompt + response] == pytest.approx(expected)
        start += prompt + response


@pytest.mark.parametrize("family", sorted(PREDICTIONS.keys() & (*MOE, *DELTA, "mimo")))
def test_its_tensors_are_the_last_of_the_model(family: str) -> None:
    without = tiny_architecture(family)
    model = without.predicting()
    names = canonical_tensors(without).names
    assert canonical_tensors(model).names[: len(names)] == names
    shapes = dict(zip(canonical_tensors(model).names, canonical_tensors(model).shapes, strict=True))
    own = shapes.keys() - names
    layer = prediction_layer(model)
    rows = (*layer.rows, *layer.experts * layer.expert_copies(model.num_experts))
    assert len(own) == sum(len(row.parts) for row in rows)
    assert sum(shape == (12, 24) and is_hidden_matrix(name, shape) for name, shape in shapes.items() if name in own)
    assert model.value_model() == without.value_model()


STACKED = tiny_architecture("qwen3_5_moe_text", stacked_experts=True).predicting()


@pytest.mark.parametrize("model", [MIMO, tiny_architecture("deepseek_v3").predicting(), STACKED])
@pytest.mark.parametrize("grid", [Grid((0,)), Grid((0, 1), pp=2), Grid((0, 1, 2, 3), tp=2, pp=2, ep=2, etp=1)])
def test_the_last_stage_has_it_and_what_it_needs(model: Architecture, grid: Grid) -> None:
    layout, numbers = megatron_layout(model, grid), canonical_tensors(model).numbers
    held = {rank: {*layout.on(rank).pieces["tensor"].tolist()} for rank in grid.ranks}
    own = {*range(len(canonical_tensors(replace(model, predicts=False)).names), len(numbers))}
    last = [rank for rank in grid.ranks if grid.coordinates(rank).pp == grid.pp - 1]
    assert set().union(*(held[rank] & own for rank in last)) == own
    for rank in grid.ranks:
        assert rank in last or not held[rank] & own
        needs_embedding = rank in last or grid.coordinates(rank).pp == 0
        assert (numbers["model.embed_tokens.weight"] in held[rank]) == needs_embedding
    engine = engine_layout(model, Grid((0,)))
    assert engine.tensors == layout.tensors
    assert not own & {*engine.on(0).pieces["tensor"].tolist()}


@pytest.mark.parametrize(
    ("family", "config", "names", "expected"),
    [
        ("qwen2", {"num_nextn_predict_layers": 1}, (), 0),
        ("deepseek_v3", {"num_nextn_predict_layers": 1}, (), 1),
        ("glm4_moe", {"num_nextn_predict_layers": 3}, (), 3),
        ("glm4_moe", {}, (), 0),
        ("qwen3_5", {"text_config": {"mtp_num_hidden_layers": 1}}, (), 1),
        ("qwen3_5_moe_text", {"mtp_num_hidden_layers": 0}, ("mtp.layers.0.mlp.gate.weight",), 0),
        ("qwen3_next", {}, ("mtp.layers.0.mlp.gate.weight",), 1),
        ("qwen3_next", {}, ("model.norm.weight",), 0),
    ],
)
def test_a_checkpoint_tells_how_many_there_are(
    family: str, config: dict[str, Any], names: tuple[str, ...], expected: int, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    if names:
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": dict.fromkeys(names, "a")}))
    assert num_predicting(tmp_path, family) == expected


def write_config(folder: Path, **changes: Any) -> Path:
    sizes = {"hidden_size": 12, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    more = {"intermediate_size": 24, "vocab_size": 21, "max_position_embeddings": 4096, "rope_theta": 1e4}
    kind = {"model_type": "mimo", "attention_bias": True, "rms_norm_eps": 1e-6, "num_nextn_predict_layers": 1}
    text = json.dumps({**kind, **sizes, **more, "tie_word_embeddings": False, **changes})
    (folder / "config.json").write_text(text)
    return folder


def make(path: Path | str = "m", model: dict[str, Any] | None = None, **sections: Any) -> Config:
    return make_config(model={"path": str(path), "mtp": {}, **(model or {})}, **sections)


@pytest.mark.parametrize(
    ("model", "sections", "said"),
    [
        ({}, {"actor": {"backend": "fsdp"}}, "backend fsdp for role actor"),
        (
            {},
            {
                "inference": {"backend": "fsdp"},
                "placement": {**GRPO, "inference": 3},
                "loss": {"old_logprobs": "actor"},
            },
            "backend fsdp for role inference",
        ),
        ({"lora": {"rank": 4}}, {}, "which trains adapters alone"),
        ({"residual_dtype": "float32"}, {}, r"model\.residual_dtype: got float32 with"),
        ({}, {"reference": REFERENCE}, r"reference\.refresh_every: got 2 with model\.mtp"),
    ],
)
def test_what_cannot_train_it_is_refused(model: Any, sections: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        check_config(make(model=model, **sections))


def test_a_model_without_a_head_has_no_such_layer() -> None:
    assert "reward_model" in " ".join(mtp_problems(make(algorithm="reward_model")))
    assert not [*mtp_problems(make(algorithm="evaluate", model={"lora": {"rank": 4}}))]
    assert not [*mtp_problems(make(reference={"refresh_every": 2}))]


@pytest.mark.parametrize(
    ("changes", "pp", "said"),
    [
        ({"model_type": "qwen2", "attention_bias": None}, 1, "is of family qwen2"),
        ({"num_nextn_predict_layers": 0}, 1, "num_nextn_predict_layers is 0"),
        ({"num_nextn_predict_layers": 2}, 1, "num_nextn_predict_layers is 2"),
        ({"tie_word_embeddings": True}, 2, "actor.parallel.pp: got 2"),
        ({"tie_word_embeddings": True}, 1, None),
        ({}, 2, None),
    ],
)
def test_models_without_such_a_layer_are_refused(changes: Any, pp: int, said: str | None, tmp_path: Path) -> None:
    config = make(write_config(tmp_path, **{"attention_bias": True, **changes}), actor={"parallel": {"pp": pp}})
    architectures = role_architectures(config, [])
    problems = " ".join(mtp_problems_of_models(config, {"actor": Grid((*range(pp),), pp=pp)}, architectures))
    assert problems == "" if said is None else said in problems


def test_those_that_get_the_actors_weights_have_it_too(tmp_path: Path) -> None:
    found = role_architectures(make(write_config(tmp_path)), ["inference", "reference", "critic"])
    assert {role for role, model in found.items() if model.predicts} == {"actor", "inference", "reference"}
    assert found["actor"] == found["reference"]
    off = make_config(model={"path": str(tmp_path)})
    assert not role_architectures(off, [])["actor"].predicts


def test_what_is_saved_has_it_as_it_was_trained(tmp_path: Path) -> None:
    """In the place of what the checkpoint has, beside what it has there that no model has."""
    folder = write_config(tmp_path)
    model = read_architecture(folder).predicting()
    tensors = dict(zip(canonical_tensors(model).names, map(torch.randn, canonical_tensors(model).shapes), strict=True))
    copied = {"model.mtp_layers.0.embed_tokens.weight": torch.randn(21, 12)}
    save_file(tensors | copied, folder / "model.safetensors")
    layout = hf_layout(model, (0,))
    parameters = {name: torch.zeros(shape) for name, shape in layout.on(0).parameters}
    load_parameters(folder, layout, 0, parameters)
    assert all(torch.equal(one, tensors[name]) for name, one in parameters.items())
    trained = {name: one + 1 for name, one in parameters.items()}
    save_checkpoint(tmp_path / "saved", trained, layout, model, group=None, rank=0, like=folder)
    saved = stored_tensors(tmp_path / "saved")
    expected = {name: one + 1 for name, one in tensors.items()} | copied
    assert saved.keys() == expected.keys()
    assert all(torch.equal(one, expected[name]) for name, one in saved.items())


def test_a_run_that_was_saved_before_goes_on_without_it() -> None:
    model: Architecture = tiny_architecture("mimo")
    saved = {name: value for name, value in json.loads(json.dumps(vars(model))).items() if name != "predicts"}
    assert not [*_architecture_problems({"actor": model}, {"actor": saved})]
    (problem,) = _architecture_problems({"actor": model.predicting()}, {"actor": saved})
    assert "predicts of the actor's model is True, but it was saved with False" in problem


def test_what_it_leaves_for_backward_is_foretold_on_the_last_stage() -> None:
    def leaving(model: Architecture, stage: int, **settings: Any) -> int:
        sections = {"model": {"path": "m", "recompute": "full", **settings}, "actor": {"parallel": {"pp": 2}}}
        job = job_of(model, {"actor": "0-1", "rollout, reward": 2}, 3, **sections)
        return Activations(job, "actor", stage).training(1)

    without, layer = replace(MIMO, predicts=False), leaving(MIMO, 1, mtp={}) - leaving(MIMO, 1)
    one = Activations(job_of(without, {"actor": 0, "rollout, reward": 1}, 2), "actor", 0).layer(False)
    assert one < layer < 2 * one
    assert leaving(MIMO, 0, mtp={}) == leaving(without, 0)
    assert leaving(MIMO, 1) == leaving(without, 1)
