"""What is refused of models with windows, further norms and rotary embeddings of other kinds, and of experts' ways."""

from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest

from rltrain.errors import ConfigError
from rltrain.models import Architecture, DynamicScaling, LongRopeScaling, YarnScaling
from rltrain.planning.validation_models import check_against_architecture
from rltrain.runtime.placement import resolve_placement, role_grids
from tests.model_shards import tiny_architecture
from tests.unit.schedule_configs import make_config

GEMMA = replace(tiny_architecture("gemma3_text", num_layers=4, max_positions=4096), activation="gelu_tanh")
PHI4_MINI = tiny_architecture("phi3", max_positions=64, rope_scaling=LongRopeScaling((1.0, 2.0), 1.1))
GEMMA2 = tiny_architecture("gemma2", max_positions=4096, attention_softcap=50.0, logits_softcap=30.0)
DELTA = replace(tiny_architecture("qwen3_5_text", num_layers=4, max_positions=4096), num_heads=8, num_kv_heads=8)
GPT_OSS = tiny_architecture("gpt_oss", max_positions=4096)
DYNAMIC = tiny_architecture("qwen2", max_positions=64, rope_scaling=DynamicScaling(2.0))
YARN = YarnScaling(4.0, 32.0, 1.0, 0.0, 0.0, 1024)
SCALED = tiny_architecture("qwen2", max_positions=4096, rope_scaling=YARN)
OF_OWN_FACTOR = replace(SCALED, rope_scaling=replace(YARN, attention_factor=1.5))
BIASED = tiny_architecture("llama", max_positions=4096, mlp_bias=True)
TRANSFORMER_ENGINE = {"model": {"path": "m", "transformer_impl": "transformer_engine", "dtype": "bfloat16"}}
LONG_ANSWERS = {"max_response_tokens": 4000}
SGLANG = {"rollout": {"engine": "sglang"}}


def check(architecture: Architecture, **sections: Any) -> None:
    config = make_config(placement={"actor": "0-1", "rollout,reward": "2-3"}, **sections)
    grids = role_grids(config, resolve_placement(config.placement, 4, 8))
    check_against_architecture(config, grids, dict.fromkeys(("actor", *grids), architecture))


@pytest.mark.parametrize("sections", [SGLANG, TRANSFORMER_ENGINE, {"actor": {"parallel": {"cp": 2}}}], ids=str)
def test_yarn_goes_with_sglang_transformer_engine_and_context_parallelism(sections: dict[str, Any]) -> None:
    check(SCALED, **sections)


@pytest.mark.parametrize("architecture", [GEMMA, DELTA, GPT_OSS], ids=lambda architecture: architecture.family)
def test_what_there_is_is_not_refused(architecture: Architecture) -> None:
    for sections in (
        {},
        {"actor": {"parallel": {"tp": 2, "sequence_parallel": True}}},
        {"actor": {"parallel": {"pp": 2}}},
        *([{"actor": {"parallel": {"cp": 2}}}] if architecture is DELTA else []),
    ):
        check(architecture, **sections)


@pytest.mark.parametrize(
    ("architecture", "sections", "parts"),
    [
        (GEMMA, {"actor": {"parallel": {"cp": 2}}}, ["actor.parallel.cp: got 2", "expected 1", "window of 3 tokens"]),
        (
            GEMMA,
            {"model": {"path": "m", "transformer_impl": "transformer_engine", "dtype": "bfloat16"}},
            ["model.transformer_impl", "sliding windows and norms behind", "expected auto or local"],
        ),
        (GEMMA, SGLANG, ["rollout.engine: got sglang", "sliding windows", "expected embedded"]),
        (tiny_architecture("glm4_moe", max_positions=4096), SGLANG, ["got sglang", "model_type glm4_moe", "embedded"]),
        (GEMMA2, {"actor": {"parallel": {"cp": 2}}}, ["actor.parallel.cp: got 2", "expected 1", "bends its scores"]),
        (GEMMA2, {"model": {"path": "m", "logits_chunk_tokens": 9}}, ["model.logits_chunk_tokens: got 9", "null"]),
        (
            tiny_architecture("nemotron", max_positions=4096),
            {"actor": {"backend": "fsdp"}},
            ["actor.backend: got fsdp", "transformers' nemotron", "expected megatron"],
        ),
        (PHI4_MINI, {}, ["has 64 positions", "short factors"]),
        (
            DYNAMIC,
            {},
            ["data.max_prompt_tokens", "has 64 positions", "max_position_embeddings", "dynamic RoPE scaling"],
        ),
        (
            replace(DYNAMIC, max_positions=2048),
            {
                "rollout": {"max_context_tokens": 8192},
                "evaluation": {"sets": [{"name": "long", "data": {"path": "l"}, "sampling": LONG_ANSWERS}]},
            },
            [
                "evaluation.sets.0.sampling.max_response_tokens 4000 = 5024",
                "has 2048 positions",
                "dynamic RoPE scaling",
            ],
        ),
        (replace(DYNAMIC, max_positions=4096), SGLANG, ["rollout.engine: got sglang", "dynamic RoPE", "embedded"]),
        (OF_OWN_FACTOR, SGLANG, ["rollout.engine: got sglang", "attention_factor", "embedded"]),
        (BIASED, SGLANG, ["rollout.engine: got sglang", "mlp_bias", "embedded"]),
        (BIASED, TRANSFORMER_ENGINE, ["model.transformer_impl", "biases in MLPs", "expected auto or local"]),
        (
            replace(SCALED, family="glm4_moe", rotary_dim=2),
            TRANSFORMER_ENGINE,
            ["model.transformer_impl", "multiply a part of heads", "expected auto or local"],
        ),
        (
            replace(DELTA, delta=replace(DELTA.delta, num_key_heads=1)),  # type: ignore[type-var]
            {"actor": {"parallel": {"cp": 2}}},
            ["actor.parallel.cp: got 2", "a divisor of 1", "gated delta nets"],
        ),
        (
            DELTA,
            {"actor": {"backend": "fsdp", "parallel": {"cp": 2}}},
            ["actor.parallel.cp: got 2 with backend fsdp", "expected 1, or megatron"],
        ),
        (
            replace(DELTA, delta=replace(DELTA.delta, num_key_heads=1)),  # type: ignore[type-var]
            {"actor": {"parallel": {"tp": 2}}},
            ["actor.parallel.tp: got 2", "the 1 key heads of the model's gated delta nets"],
        ),
        (
            replace(DELTA, delta=replace(DELTA.delta, num_key_heads=1)),  # type: ignore[type-var]
            {"rollout": {"parallel": {"tp": 2}}},
            ["rollout.parallel.tp: got 2", "the 1 key heads"],
        ),
        (GPT_OSS, {"actor": {"parallel": {"cp": 2}}}, ["actor.parallel.cp: got 2", "expected 1", "attention sinks"]),
        (GPT_OSS, SGLANG, ["rollout.engine: got sglang", "model_type gpt_oss", "expected embedded"]),
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
        (
            GPT_OSS,
            {"model": {"path": "m", "transformer_impl": "transformer_engine", "dtype": "bfloat16"}},
            ["model.transformer_impl", "attention sinks", "expected auto or local"],
        ),
        (DELTA, SGLANG, ["rollout.engine: got sglang", "model_type qwen3_5_text", "expected embedded"]),
        (
            DELTA,
            {"model": {"path": "m", "transformer_impl": "transformer_engine", "dtype": "bfloat16"}},
            ["model.transformer_impl", "gated delta nets", "expected auto or local"],
        ),
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
        ("float16", EXPERTS, 2, ["model.dtype float16", "or model.dtype bfloat16: it sends nothing else"]),
        ("bfloat16", replace(EXPERTS, hidden_size=60), 2, ["has a hidden size of 60", "multiples of 8"]),
        ("bfloat16", replace(EXPERTS, moe=replace(EXPERTS.moe, num_experts=6)), 6, ["6 ranks", "the nearest is 4"]),  # type: ignore[type-var]
    ],
)
def test_deepep_is_refused_what_it_has_no_kernels_for(
    dtype: str, architecture: Architecture, ep: int, parts: list[str]
) -> None:
    model = {"path": "m", "dtype": dtype, "moe": {"dispatcher": "deepep"}}
    config = make_config(
        placement={"actor": f"0-{ep - 1}", "rollout,reward": ep}, actor={"parallel": {"ep": ep}}, model=model
    )
    grids = role_grids(config, resolve_placement(config.placement, ep + 1, 8))
    with pytest.raises(ConfigError) if parts else nullcontext() as refusal:
        check_against_architecture(config, grids, dict.fromkeys(("actor", *grids), architecture))
    for part in parts:
        assert part in str(refusal.value) and "model.moe.dispatcher: got deepep" in str(refusal.value)


def test_experts_are_trained_in_float16() -> None:
    check(EXPERTS, model={"path": "m", "dtype": "float16"})


def test_an_evaluation_may_have_the_losses_of_the_run_that_it_is_of() -> None:
    moe = {"aux_loss_coef": 1e-3}
    config = make_config(algorithm="evaluate", placement={"rollout, reward": 0}, model={"path": "m", "moe": moe})
    grids = role_grids(config, resolve_placement(config.placement, 1, 8))
    check_against_architecture(config, grids, dict.fromkeys(("actor", *grids), EXPERTS))
    with pytest.raises(ConfigError, match="no model that is trained has experts"):
        check(tiny_architecture("qwen3", max_positions=4096), model={"path": "m", "moe": moe})
