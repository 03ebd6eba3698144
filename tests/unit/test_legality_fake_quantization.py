"""model.fake_quantization is refused with what would round differently on two sides, and its bytes are foretold."""

from typing import Any

import pytest

from rltrain.config.schema import Config
from rltrain.errors import ConfigError
from rltrain.models import Architecture
from rltrain.planning.activation_memory import Activations
from rltrain.planning.memory import working_bytes
from rltrain.planning.validation import check_config
from rltrain.planning.validation_models import fake_quantization_problems, fake_quantization_problems_of_models
from rltrain.runtime.grid import Grid
from tests.model_shards import tiny_architecture
from tests.unit.schedule_configs import make_config
from tests.unit.test_estimated_memory import job_of
from tools.benchmarks.model_shapes import qwen3_30b_a3b

SPARSE = tiny_architecture("mixtral", hidden_size=48)
"""Experts of 24 units."""
LORA = {"lora": {"rank": 4}}
EVALUATES = {"algorithm": "evaluate", "placement": {"rollout, reward": 0}}


def make(group_size: int = 8, model: dict[str, Any] | None = None, **sections: Any) -> Config:
    rounded = {"path": "m", "fake_quantization": {"group_size": group_size}, **(model or {})}
    return make_config(model=rounded, **sections)


@pytest.mark.parametrize(
    ("model", "sections", "said"),
    [
        ({}, {"rollout": {"dtype": "fp8"}}, r"got a section with rollout\.dtype fp8"),
        (
            {},
            {
                "evaluation": {"dtype": "fp8"},
                "placement": {"actor": 0, "reference": 0, "rollout": 1, "reward": 2, "evaluation": 3},
            },
            r"got a section with evaluation\.dtype fp8",
        ),
        (
            {},
            {**EVALUATES, "rollout": {"engine": "http", "urls": ["http://h:1"]}},
            "whose servers load the checkpoint themselves",
        ),
        ({"activation_offload": True}, {}, r"model\.activation_offload: got true with"),
        (LORA, {"weight_sync": {"adapters": "apart"}}, r"weight_sync\.adapters: got apart with"),
        (LORA, {"reference": {"refresh_every": 2}}, r"reference\.refresh_every: got 2 with"),
    ],
)
def test_what_would_round_on_one_side_alone_is_refused(model: Any, sections: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        check_config(make(model=model, **sections))


@pytest.mark.parametrize(
    ("model", "sections"),
    [
        ({}, {"weight_sync": {"delta": {}, "verify": True}}),
        ({}, {"reference": {"refresh_every": 2}}),
        ({}, {"actor": {"optimizer": {"name": "muon"}}}),
        ({}, {"judge": {"dtype": "fp8"}}),
        ({"activation_offload": True, "recompute": "full"}, {}),
        (LORA, {}),
        ({}, EVALUATES),
    ],
)
def test_what_would_not_is_taken(model: Any, sections: Any) -> None:
    assert not [*fake_quantization_problems(make(model=model, **sections))]
    assert not [*fake_quantization_problems(make_config(rollout={"dtype": "fp8"}))]


def problems(config: Config, sparse: Architecture | None = None, **grids: Grid) -> list[str]:
    architectures = dict.fromkeys(("actor", *grids), sparse or SPARSE)
    return [*fake_quantization_problems_of_models(config, grids, architectures)]


def test_groups_fill_the_rows_of_every_rank() -> None:
    alone, halved = Grid((0,)), Grid((0, 1), tp=2)
    assert problems(make(24), actor=alone) == []
    assert problems(make(12), actor=halved, reference=alone) == []
    (said,) = problems(make(24), actor=halved, reference=alone)
    assert "group_size: got 24; expected a divisor of 12, the rows" in said
    assert "in role actor, cut over 2 ranks, or experts on fewer ranks (actor.parallel.etp)" in said
    assert problems(make(24), actor=Grid((0, 1), tp=2, etp=1)) == []
    assert problems(make(24), actor=Grid((0, 1), copies=1)) == []
    hidden, inner = problems(make(32), actor=alone)
    assert "divisor of 48, the hidden size of the model of role actor" in hidden
    assert "divisor of 24, the rows of an expert's last matrix in role actor" in inner and "ranks" not in inner


def test_engines_cut_what_is_rounded_already_but_where_they_load_it_themselves() -> None:
    engine = Grid((0, 1), tp=2)
    assert problems(make(24), actor=Grid((0,)), rollout=engine) == []
    (said,) = problems(make(24, **EVALUATES), rollout=engine)
    assert "expected a divisor of 12" in said and "(rollout.parallel.ep)" in said
    assert problems(make(24, **EVALUATES), rollout=Grid((0, 1), tp=2, ep=2)) == []


def test_it_is_of_experts_and_not_of_merged_adapters() -> None:
    grids = {"actor": Grid((0,)), "inference": Grid((1,))}
    (said,) = problems(make(), tiny_architecture("qwen3"), **grids)
    assert said.startswith("model.fake_quantization: got a section; expected null: the model in m has no experts")
    (said,) = problems(make(model=LORA), **grids)
    assert "with model.lora and role inference" in said
    assert not problems(make(), **grids) and not problems(make_config(), tiny_architecture("qwen3"), **grids)


def test_other_models_than_the_policys_are_as_they_are() -> None:
    config = make()
    for role in ("actor", "inference", "reference", "rollout", "evaluation"):
        assert config.model_of(role).fake_quantization == config.model.fake_quantization
    for role in ("critic", "teacher", "reward_model", "judge"):
        assert config.model_of(role) == make_config().model


@pytest.mark.parametrize(
    ("recompute", "layers"),
    [("none", 2 * 24), ("full", 1), ({"granularity": "full", "layers": 4}, 2 * 20 + 1), (["moe"], 1)],
)
def test_what_products_keep_for_backward_takes_memory(recompute: Any, layers: int) -> None:
    """On the first of two stages, which has two micro-batches under way: by layer and micro-batch the rounded matrices
    of a fourth of the experts."""
    if isinstance(recompute, list):
        recompute = {"granularity": "selective", "modules": recompute}

    def activations(rounded: dict[str, int] | None) -> Activations:
        return Activations(
            job_of(
                qwen3_30b_a3b(),
                {"actor": "0-7", "rollout, reward": "8-15"},
                16,
                model={"path": "m", "recompute": recompute, "fake_quantization": rounded},
                actor={"parallel": {"pp": 2, "ep": 4}},
            ),
            "actor",
            0,
        )

    plain, found = activations(None), activations({"group_size": 128})
    of_layer = 3 * 2048 * 768 * 128 // 4 * 2
    assert found.training(1000) - plain.training(1000) == layers * of_layer
    assert found.evaluating(1000) - plain.evaluating(1000) == of_layer
    assert "merged" not in working_bytes(plain.job, "weight_sync", {"actor": 0})
    assert working_bytes(found.job, "weight_sync", {"actor": 0})["merged"] > 0
    assert "merged" not in working_bytes(found.job, "sync_inference", {"actor": 0})
