"""Legal combinations of models with experts, INT4, replayed routing and multi-token prediction."""

import json
import re
from contextlib import nullcontext
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
from rltrain.models import (
    Architecture,
    DynamicScaling,
    LongRopeScaling,
    YarnScaling,
    canonical_tensors,
    prediction_layer,
    read_architecture,
)
from rltrain.models.checkpoint_model import num_predicting
from rltrain.models.of_roles import role_architectures
from rltrain.models.registry import PREDICTIONS
from rltrain.models.table import is_hidden_matrix
from rltrain.planning.activation_memory import Activations
from rltrain.planning.memory import host_bytes, kv_bytes, resident_bytes, working_bytes
from rltrain.planning.validation import check_config
from rltrain.planning.validation_models import (
    check_against_architecture,
    fake_quantization_problems,
    fake_quantization_problems_of_models,
    mtp_problems,
    mtp_problems_of_models,
    replay_problems,
    replay_problems_of_models,
    vision_problems,
)
from rltrain.reshard.layout import hf_layout
from rltrain.reshard.megatron_layout import megatron_layout
from rltrain.roles.resuming import _architecture_problems
from rltrain.rollout.layout import engine_layout
from rltrain.runtime.grid import Grid
from rltrain.runtime.placement import resolve_placement, role_grids
from rltrain.training.megatron.prediction import AHEAD, weights_of_rows
from rltrain.training.packing import pack
from tests.support.checkpoint_files import stored_tensors
from tests.support.model_shards import DELTA, MOE, tiny_architecture
from tests.support.packed_experience import packed_experience
from tests.support.schedule_configs import GRPO, make_config
from tests.support.vision_checkpoints import tiny_vision
from tests.unit.test_estimated_memory import job_of
from tools.benchmarks.model_shapes import qwen3_30b_a3b

GEMMA = replace(tiny_architecture("gemma3_text", num_layers=4, max_positions=4096), activation="gelu_tanh")
PHI4_MINI = tiny_architecture("phi3", max_positions=64, rope_scaling=LongRopeScaling((1.0, 2.0), 1.1))
GEMMA2 = tiny_architecture("gemma2", max_positions=4096, attention_softcap=50.0, logits_softcap=30.0)
DELTA_MODEL = replace(tiny_architecture("qwen3_5_text", num_layers=4, max_positions=4096), num_heads=8, num_kv_heads=8)
GPT_OSS = tiny_architecture("gpt_oss", max_positions=4096)
DYNAMIC = tiny_architecture("qwen2", max_positions=64, rope_scaling=DynamicScaling(2.0))
YARN = YarnScaling(4.0, 32.0, 1.0, 0.0, 0.0, 1024)
SCALED = tiny_architecture("qwen2", max_positions=4096, rope_scaling=YARN)
OF_OWN_FACTOR = replace(SCALED, rope_scaling=replace(YARN, attention_factor=1.5))
BIASED = tiny_architecture("llama", max_positions=4096, mlp_bias=True)
TRANSFORMER_ENGINE = {"model": {"path": "m", "transformer_impl": "transformer_engine", "dtype": "bfloat16"}}
LONG_ANSWERS = {"max_response_tokens": 4000}
SGLANG = {"rollout": {"engine": "sglang"}}
CP = {"actor": {"parallel": {"cp": 2}}}
VISION = tiny_architecture("qwen3_vl", max_positions=4096)
HTTP = {"rollout": {"engine": "http", "urls": ("http://a:1",)}}
GLM, NEMOTRON = (tiny_architecture(family, max_positions=4096) for family in ("glm4_moe", "nemotron"))
ONE_KEY_HEAD = replace(DELTA_MODEL, delta=replace(DELTA_MODEL.delta, num_key_heads=1))  # type: ignore[type-var]
ODD_DELTA = replace(DELTA_MODEL, delta=replace(DELTA_MODEL.delta, layers=(False, True, True, False)))  # type: ignore[type-var]
UNTIED_GEMMA = replace(GEMMA, tied_embeddings=False)
FIRST_GEMMA = tiny_architecture("gemma", max_positions=4096)
WINDOWED = replace(GEMMA, family="mistral")
SPARSE_MODEL = tiny_architecture("qwen2_moe", max_positions=4096)
SGLANG_FP8 = {"rollout": {"engine": "sglang", "dtype": "fp8"}}
PARTLY_DENSE = replace(SPARSE_MODEL, moe=replace(SPARSE_MODEL.moe, dense_layers=(0,)))  # type: ignore[type-var]
APART = {"rollout": {"engine": "sglang"}, "model": {"path": "m", "lora": {"rank": 2}}} | {
    "weight_sync": {"adapters": "apart"}
}
UNKEPT = {"rollout": {"engine": "sglang", "sglang": {"keep_weights": False}}, "weight_sync": {"delta": {}}}
PART_TURNED = replace(SCALED, family="glm4_moe", rotary_dim=2)
LONG_SET = {"name": "long", "data": {"path": "l"}, "sampling": LONG_ANSWERS}
LONG = {"rollout": {"max_context_tokens": 8192}, "evaluation": {"sets": [LONG_SET]}}
FSDP = {"actor": {"backend": "fsdp"}}
LOCAL = "expected auto or local"


def check(architecture: Architecture, **sections: Any) -> None:
    config = make_config(**{"placement": {"actor": "0-1", "rollout,reward": "2-3"}} | sections)
    grids = role_grids(config, resolve_placement(config.placement, 16, 8))
    check_against_architecture(config, grids, dict.fromkeys(("actor", *grids), architecture))


@pytest.mark.parametrize("architecture", [GLM, DELTA_MODEL], ids=lambda architecture: architecture.family)
def test_weights_by_names_may_be_in_fp8(architecture: Architecture) -> None:
    check(architecture, **SGLANG_FP8)


def test_ranks_of_a_server_may_share_a_model_with_a_tower() -> None:
    check(replace(VISION, vision=tiny_vision("qwen3_vl")), rollout={"engine": "sglang", "parallel": {"tp": 2}})


@pytest.mark.parametrize("sections", [SGLANG, TRANSFORMER_ENGINE, CP], ids=str)
def test_yarn_goes_with_sglang_transformer_engine_and_context_parallelism(sections: dict[str, Any]) -> None:
    check(SCALED, **sections)


@pytest.mark.parametrize("architecture", [GEMMA, DELTA_MODEL, GPT_OSS], ids=lambda architecture: architecture.family)
def test_what_there_is_is_not_refused(architecture: Architecture) -> None:
    for sections in (
        {},
        {"actor": {"parallel": {"tp": 2, "sequence_parallel": True}}},
        {"actor": {"parallel": {"pp": 2}}},
        *([CP] if architecture is DELTA_MODEL else []),
    ):
        check(architecture, **sections)


@pytest.mark.parametrize(
    ("architecture", "sections", "parts"),
    [
        (GEMMA, CP, ["actor.parallel.cp: got 2", "expected 1", "window of 3 tokens"]),
        (GEMMA, TRANSFORMER_ENGINE, ["model.transformer_impl", "sliding windows and norms after", LOCAL]),
        (UNTIED_GEMMA, SGLANG, ["rollout.engine: got sglang", "a head of its own", "expected embedded"]),
        (NEMOTRON, SGLANG, ["got sglang", "model_type nemotron (SGLang has no class of it)", "embedded"]),
        (FIRST_GEMMA, SGLANG, ["got sglang", "model_type gemma (SGLang computes its GELU exactly", "embedded"]),
        (WINDOWED, SGLANG, ["rollout.engine: got sglang", "sliding windows", "ignores", "expected embedded"]),
        (PARTLY_DENSE, SGLANG, ["rollout.engine: got sglang", "layers without experts", "expected embedded"]),
        (tiny_architecture("phi3"), SGLANG_FP8, ["rollout.dtype: got fp8", "drops the scales", "auto, or embedded"]),
        (GLM, APART, ["weight_sync.adapters: got apart", "merged; expected merged"]),
        (GLM, UNKEPT, ["weight_sync.delta", "without rollout.sglang.keep_weights", "expected null"]),
        (
            GLM,
            SGLANG | {"model": {"path": "m", "router_replay": "rollout"}},
            ["model.router_replay: got rollout with rollout.engine sglang", "untested"],
        ),
        (GEMMA2, CP, ["actor.parallel.cp: got 2", "expected 1", "has soft caps on its scores"]),
        (NEMOTRON, FSDP, ["actor.backend: got fsdp", "is nemotron", "expected megatron"]),
        (PHI4_MINI, {}, ["has 64 positions", "short factors"]),
        (DYNAMIC, {}, ["data.max_prompt_tokens", "64 positions", "max_position_embeddings", "dynamic RoPE scaling"]),
        (
            replace(DYNAMIC, max_positions=2048),
            LONG,
            [
                "evaluation.sets.0.sampling.max_response_tokens 4000 = 5024",
                "has 2048 positions",
                "dynamic RoPE scaling",
            ],
        ),
        (replace(DYNAMIC, max_positions=4096), SGLANG, ["rollout.engine: got sglang", "dynamic RoPE", "embedded"]),
        (OF_OWN_FACTOR, SGLANG, ["rollout.engine: got sglang", "attention_factor", "embedded"]),
        (BIASED, SGLANG, ["rollout.engine: got sglang", "mlp_bias", "embedded"]),
        (BIASED, TRANSFORMER_ENGINE, ["model.transformer_impl", "biases in MLPs", LOCAL]),
        (PART_TURNED, TRANSFORMER_ENGINE, ["model.transformer_impl", "scaled rotations of a part of heads", LOCAL]),
        (ONE_KEY_HEAD, CP, ["actor.parallel.cp: got 2", "a divisor of 1", "gated delta nets"]),
        (
            DELTA_MODEL,
            {"actor": {"backend": "fsdp", "parallel": {"cp": 2}}},
            ["actor.parallel.cp: got 2 with backend fsdp", "expected 1, or megatron"],
        ),
        (
            ONE_KEY_HEAD,
            {"actor": {"parallel": {"tp": 2}}},
            ["actor.parallel.tp: got 2", "the 1 key heads of the model's gated delta nets"],
        ),
        (ONE_KEY_HEAD, {"rollout": {"parallel": {"tp": 2}}}, ["rollout.parallel.tp: got 2", "the 1 key heads"]),
        (GPT_OSS, CP, ["actor.parallel.cp: got 2", "expected 1", "attention sinks"]),
        (GPT_OSS, {"rollout": {"dtype": "fp8"}}, ["rollout.dtype: got fp8", "gpt_oss", "expected auto"]),
        (GPT_OSS, {"actor": {"optimizer": {"name": "muon"}}}, ["actor.optimizer.name: got muon", "expected adamw"]),
        (
            GPT_OSS,
            {"model": {"path": "m", "fake_quantization": {"group_size": 4}}},
            ["model.fake_quantization: got a section", "gpt_oss", "expected null"],
        ),
        (
            GPT_OSS,
            {"model": {"path": "m", "lora": {"rank": 2, "targets": ["gate_proj"]}}},
            ["model.lora.targets: got ['gate_proj']", "q_proj, k_proj, v_proj, o_proj"],
        ),
        (GPT_OSS, TRANSFORMER_ENGINE, ["model.transformer_impl", "attention sinks", LOCAL]),
        (ODD_DELTA, SGLANG, ["rollout.engine: got sglang", "gated delta nets in other layers", "expected embedded"]),
        (VISION, SGLANG, ["rollout.engine: got sglang", "a vision tower, but no model.vision", "expected embedded"]),
        (
            replace(VISION, vision=tiny_vision("qwen3_vl")),
            {"actor": {"parallel": {"pp": 2}}, "model": {"path": "m", "vision": {}}},
            ["actor.parallel: the first pipeline stage begins with 1 layers", "for the first 2"],
        ),
        (
            replace(VISION, vision=tiny_vision("qwen3_vl")),
            {**HTTP, "model": {"path": "m", "vision": {}}},
            ["rollout.engine: got http with model.vision.train true", "or model.vision.train: false"],
        ),
        (
            replace(VISION, vision=tiny_vision("qwen3_vl")),
            {**HTTP, "model": {"path": "m", "vision": {}, "lora": {"rank": 2, "vision": True}}},
            ["rollout.engine: got http with model.lora.vision true"],
        ),
        (
            tiny_architecture("qwen3_vl_moe", moe=MOE["qwen3_moe"], max_positions=4096),
            {"rollout": {**HTTP["rollout"], "http": {"weights": "group"}}},
            ["rollout.engine: got http with a model of qwen3_vl_moe", "rollout.http.weights: folder"],
        ),
        (DELTA_MODEL, TRANSFORMER_ENGINE, ["model.transformer_impl", "gated delta nets", LOCAL]),
    ],
)
def test_what_there_is_not_is_refused_with_the_reason(
    architecture: Architecture, sections: dict[str, Any], parts: list[str]
) -> None:
    with pytest.raises(ConfigError) as refusal:
        check(architecture, **sections)
    for part in parts:
        assert part in str(refusal.value)


EXPERTS = tiny_architecture("qwen3_moe", hidden_size=64, max_positions=4096)


@pytest.mark.parametrize(
    ("dtype", "architecture", "ep", "parts"),
    [
        ("bfloat16", EXPERTS, 2, []),
        ("float16", EXPERTS, 2, ["model.dtype float16", "or model.dtype bfloat16, the only dtype"]),
        ("bfloat16", replace(EXPERTS, hidden_size=60), 2, ["has a hidden size of 60", "multiples of 8"]),
        ("bfloat16", replace(EXPERTS, moe=replace(EXPERTS.moe, num_experts=6)), 6, ["6 ranks", "the nearest is 4"]),  # type: ignore[type-var]
    ],
)
def test_deepep_is_refused_what_it_has_no_kernels_for(
    dtype: str, architecture: Architecture, ep: int, parts: list[str]
) -> None:
    placed = {"placement": {"actor": f"0-{ep - 1}", "rollout,reward": ep}, "actor": {"parallel": {"ep": ep}}}
    with pytest.raises(ConfigError) if parts else nullcontext() as refusal:
        check(architecture, **placed, model={"path": "m", "dtype": dtype, "moe": {"dispatcher": "deepep"}})
    for part in parts:
        assert part in str(refusal.value) and "model.moe.dispatcher: got deepep" in str(refusal.value)


def test_experts_are_trained_in_float16() -> None:
    check(EXPERTS, model={"path": "m", "dtype": "float16"})


def test_an_evaluation_may_have_the_losses_of_the_run_that_it_is_of() -> None:
    moe = {"aux_loss_coef": 1e-3}
    check(EXPERTS, algorithm="evaluate", placement={"rollout, reward": 0}, model={"path": "m", "moe": moe})
    with pytest.raises(ConfigError, match="no trained model has experts"):
        check(tiny_architecture("qwen3", max_positions=4096), model={"path": "m", "moe": moe})


SPARSE = tiny_architecture("mixtral", hidden_size=48)
"""A model with experts of 24 units."""
LORA = {"lora": {"rank": 4}}
EVALUATES = {"algorithm": "evaluate", "placement": {"rollout, reward": 0}}
EVALUATES_APART = {"evaluation": {"dtype": "fp8"}, "placement": {**GRPO, "evaluation": 3}}
HTTP = {"engine": "http", "urls": ["http://h:1"]}


def make(group_size: int = 8, model: dict[str, Any] | None = None, **sections: Any) -> Config:
    rounded = {"path": "m", "fake_quantization": {"group_size": group_size}, **(model or {})}
    return make_config(model=rounded, **sections)


@pytest.mark.parametrize(
    ("model", "sections", "said"),
    [
        ({}, {"rollout": {"dtype": "fp8"}}, r"got a section with rollout\.dtype fp8"),
        ({}, EVALUATES_APART, r"got a section with evaluation\.dtype fp8"),
        ({}, {**EVALUATES, "rollout": HTTP}, "whose servers load the checkpoint themselves"),
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
    assert "in role actor, split over 2 ranks, or experts on fewer ranks (actor.parallel.etp)" in said
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


def thirty(**sections: Any) -> Any:
    """Returns a job of Qwen3-30B-A3B with eight ranks for training and eight for generation."""
    return job_of(qwen3_30b_a3b(), {"actor": "0-7", "rollout, reward": "8-15"}, 16, **sections)


@pytest.mark.parametrize(
    ("recompute", "layers"),
    [("none", 2 * 24), ("full", 1), ({"granularity": "full", "layers": 4}, 2 * 20 + 1), (["moe"], 1)],
)
def test_what_products_keep_for_backward_takes_memory(recompute: Any, layers: int) -> None:
    """The first of two stages has two micro-batches in flight. For each layer and micro-batch it keeps the rounded
    matrices of a fourth of the experts."""
    if isinstance(recompute, list):
        recompute = {"granularity": "selective", "modules": recompute}

    def activations(rounded: dict[str, int] | None) -> Activations:
        model = {"path": "m", "recompute": recompute, "fake_quantization": rounded}
        return Activations(thirty(model=model, actor={"parallel": {"pp": 2, "ep": 4}}), "actor", 0)

    plain, found = activations(None), activations({"group_size": 128})
    of_layer = 3 * 2048 * 768 * 128 // 4 * 2
    assert found.training(1000) - plain.training(1000) == layers * of_layer
    assert found.evaluating(1000) - plain.evaluating(1000) == of_layer
    assert "merged" not in working_bytes(plain.job, "weight_sync", {"actor": 0})
    assert working_bytes(found.job, "weight_sync", {"actor": 0})["merged"] > 0
    assert "merged" not in working_bytes(found.job, "sync_inference", {"actor": 0})


SFT = {"algorithm": "sft", "placement": {"actor": 0}, "data": {"train": {"path": "t"}}}


def replayed_config(mode: object, **sections: Any) -> Any:
    return make_config(model={"path": "m", "router_replay": mode}, **sections)


WITHOUT_BOTH_PASSES = r"got recompute, but .*; expected loss.old_logprobs: actor"


@pytest.mark.parametrize(
    ("mode", "sections", "said"),
    [
        ("rollout", SFT, r"got rollout with algorithm sft, which uses no samples of an engine; expected off"),
        ("recompute", {"loss": {"old_logprobs": "rollout"}}, WITHOUT_BOTH_PASSES),
    ],
)
def test_what_has_nothing_to_replay_is_refused(mode: str, sections: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=f"model.router_replay: {said}"):
        check_config(replayed_config(mode, **sections))


@pytest.mark.parametrize(
    ("mode", "sections"),
    [
        ("rollout", {"loss": {"old_logprobs": "rollout"}}),
        ("recompute", {}),
        ("recompute", SGLANG),
        ("rollout", SGLANG),
        (False, SGLANG | SFT),
        ("rollout", {"algorithm": "evaluate", "placement": {"rollout, reward": 0}}),
    ],
)
def test_what_has_is_not(mode: object, sections: Any) -> None:
    """YAML reads a bare off as false."""
    config = replayed_config(mode, **sections)
    assert config.model.router_replay in ("off", "rollout", "recompute")
    assert not [*replay_problems(config)]


def test_it_takes_a_model_with_experts_and_one_that_makes_both_passes() -> None:
    sparse, dense = {"actor": tiny_architecture("qwen3_moe")}, {"actor": tiny_architecture("qwen3")}
    grids = {"actor": Grid((0,))}
    beside = grids | {"inference": Grid((1,))}
    for mode in ("rollout", "recompute"):
        assert "expected off: the model in m has no experts" in next(
            replay_problems_of_models(replayed_config(mode), grids, dense)
        )
        assert not [*replay_problems_of_models(replayed_config(mode), grids, sparse)]
    assert not [*replay_problems_of_models(replayed_config("off"), grids, dense)]
    assert not [*replay_problems_of_models(replayed_config("rollout"), beside, sparse)]
    assert "got recompute with role inference" in next(
        replay_problems_of_models(replayed_config("recompute"), beside, sparse)
    )


def test_what_travels_takes_memory() -> None:
    sections = {"actor": {"parallel": {"tp": 2, "pp": 2}}, "rollout": {"parallel": {"tp": 8}}}
    off, rollout, recompute = (
        thirty(model={"path": "m", "router_replay": mode}, loss={"old_logprobs": "actor"}, **sections)
        for mode in ("off", "rollout", "recompute")
    )
    caches = [resident_bytes(job, "rollout", 0)["kv_cache"] for job in (off, rollout, recompute)]
    assert caches[0] == caches[2]
    assert caches[1] / caches[0] == pytest.approx(1 + 48 * 8 / kv_bytes(qwen3_30b_a3b(), 1, tp=8))
    for task in ("actor_logprobs", "update"):
        assert "routed experts" not in working_bytes(off, task, {"actor": 0})
        for job in (rollout, recompute):
            tokens = job.micro_batch_rows("actor")
            assert working_bytes(job, task, {"actor": 0})["routed experts"] == tokens * 24 * 8 * 2 // 2


def test_a_server_keeps_what_it_records_on_the_host() -> None:
    """The record has int32 numbers for every token with a place in the cache."""
    server = {"engine": "sglang", "parallel": {"tp": 8}}
    off, rollout = (thirty(model={"path": "m", "router_replay": mode}, rollout=server) for mode in ("off", "rollout"))
    caches = [resident_bytes(job, "rollout", 0)["kv_cache"] for job in (off, rollout)]
    assert caches[0] == caches[1]
    num_tokens = caches[1] // kv_bytes(qwen3_30b_a3b(), 1, tp=8)
    host = [host_bytes(job, {"rollout": 0}, frozenset()) for job in (off, rollout)]
    assert "server's routed experts" not in host[0]
    assert host[1]["server's routed experts"] == num_tokens * 48 * 8 * 4


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


def predicting_config(path: Path | str = "m", model: dict[str, Any] | None = None, **sections: Any) -> Config:
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
        ({"lora": {"rank": 4}}, {}, "which trains only adapters"),
        ({"residual_dtype": "float32"}, {}, r"model\.residual_dtype: got float32 with"),
        ({}, {"reference": REFERENCE}, r"reference\.refresh_every: got 2 with model\.mtp"),
    ],
)
def test_what_cannot_train_it_is_refused(model: Any, sections: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        check_config(predicting_config(model=model, **sections))


def test_a_model_without_a_head_has_no_such_layer() -> None:
    assert "reward_model" in " ".join(mtp_problems(predicting_config(algorithm="reward_model")))
    assert not [*mtp_problems(predicting_config(algorithm="evaluate", model={"lora": {"rank": 4}}))]
    assert not [*mtp_problems(predicting_config(reference={"refresh_every": 2}))]


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        ({"model": {"path": "m", "lora": {"vision": True}}}, r"model\.lora\.vision: got true without model\.vision"),
        ({"data": {"train": {"path": "p"}, "images": {"max_pixels": 784}}}, r"data\.images: got a section without"),
    ],
)
def test_what_needs_a_vision_tower_is_refused(sections: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        check_config(make_config(**sections))


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        ({"placement": {**GRPO, "judge": 3}, "judge": {"path": "j", "prompt": "p"}}, "with role judge"),
        ({"placement": {**GRPO, "reward_model": 3}, "reward_model": {"path": "r"}}, "with role reward_model"),
        ({"algorithm": "reward_model", "placement": {"actor": 0}}, "with algorithm reward_model"),
        ({"model": {"mtp": {}}}, r"with model\.mtp"),
        ({"model": {"fake_quantization": {}}}, r"with model\.fake_quantization"),
        ({"model": {"transformer_impl": "transformer_engine"}}, r"model\.transformer_impl: got transformer_engine"),
        ({"rollout": {"engine": "http", "urls": ["http://a:1"], "protocol": "vllm"}}, r"rollout\.protocol: got vllm"),
    ],
)
def test_what_would_not_see_images_is_refused(sections: dict[str, Any], said: str) -> None:
    model = {"path": "m", "vision": {}, **sections.pop("model", {})}
    assert re.search(said, " ".join(vision_problems(make_config(model=model, **sections))))


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
    config = predicting_config(
        write_config(tmp_path, **{"attention_bias": True, **changes}), actor={"parallel": {"pp": pp}}
    )
    architectures = role_architectures(config, [])
    problems = " ".join(mtp_problems_of_models(config, {"actor": Grid((*range(pp),), pp=pp)}, architectures))
    assert problems == "" if said is None else said in problems


def test_those_that_get_the_actors_weights_have_it_too(tmp_path: Path) -> None:
    found = role_architectures(predicting_config(write_config(tmp_path)), ["inference", "reference", "critic"])
    assert {role for role, model in found.items() if model.predicts} == {"actor", "inference", "reference"}
    assert found["actor"] == found["reference"]
    off = make_config(model={"path": str(tmp_path)})
    assert not role_architectures(off, [])["actor"].predicts


def test_what_is_saved_has_it_as_it_was_trained(tmp_path: Path) -> None:
    """The trained layer replaces the layer of the checkpoint. Checkpoint tensors without a counterpart in the model are
    kept."""
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
