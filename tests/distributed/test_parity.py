"""tools/parity.py names the layer in which trainer and engine part; a residual stream in fp32 brings them together."""

from pathlib import Path
from typing import Any

import pytest

from tests.support.family_checkpoints import make_family_checkpoint
from tests.support.tiny_checkpoints import make_checkpoints
from tests.support.torchrun import run_distributed

pytestmark = pytest.mark.slow  # test_training.py and test_engine.py compare the same

FAMILIES = ("mixtral", "deepseek_v3", "glm4_moe", "gpt_oss", "qwen3_next", "gemma2", "phi4_mini", "nemotron")
"""Every kind of layer is among them. Other tests compare each family of both sides with transformers."""
DISTURBED = {
    "embedding": ["model.embed_tokens.weight"],
    "layer 2 attention": ["model.layers.2.self_attn.o_proj.weight"],
    "layer 3 mlp": ["model.layers.3.mlp.up_proj.weight", "model.layers.5.input_layernorm.weight"],
    "final norm": ["model.norm.weight"],
    "logits": ["lm_head.weight"],
}
"""The stage that parts, by the tensors that are other ones."""
OTHERS = {
    "megatron deepseek_v3": ("layer 1 attention", ["model.layers.1.self_attn.kv_b_proj.weight"]),
    "megatron glm4_moe": ("layer 3 mlp", ["model.layers.3.mlp.gate.e_score_correction_bias"]),
    "fsdp mixtral": ("layer 1 mlp", ["model.layers.1.block_sparse_moe.experts.2.w2.weight"]),
}
"""By backend and family, the same."""


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder: Path = tmp_path_factory.mktemp("parity")
    checkpoint = make_checkpoints(folder, ["qwen3"], num_hidden_layers=8, initializer_range=0.05)["qwen3"]
    families = {name: str(make_family_checkpoint(name, folder / name)) for name in FAMILIES}
    others = {case: tensors for case, (_, tensors) in OTHERS.items()}
    arguments = {"folder": checkpoint, "disturbed": DISTURBED, "families": families, "others": others}
    (rank,) = run_distributed("tests.distributed.cases_parity:all_cases", 1, arguments, timeout_s=200)
    return rank


def test_trainer_engine_and_transformers_are_alike(found: dict[str, Any]) -> None:
    alike, text = found["alike"]
    assert alike and "trainer and engine" in text and "trainer and transformers" in text
    assert text.count("no stage differs by more than 1e-04") == 2
    assert "layer 7 mlp" in text and "log-probs:" in text


@pytest.mark.parametrize("stage", DISTURBED)
def test_the_first_stage_that_differs_is_named(found: dict[str, Any], stage: str) -> None:
    alike, text = found["disturbed"][stage]
    assert not alike
    assert f"first stage beyond 1e-04: {stage}, by" in text


@pytest.mark.parametrize("case", OTHERS)
def test_so_it_is_of_experts_latent_attention_and_backend_fsdp(found: dict[str, Any], case: str) -> None:
    (alike, text), (disturbed, of_disturbed) = found["others"][case]
    assert alike and not disturbed, text
    assert f"first stage beyond 1e-04: {OTHERS[case][0]}, by" in of_disturbed


@pytest.mark.parametrize("family", FAMILIES)
def test_engine_and_trainer_agree_on_every_kind_of_layer(found: dict[str, Any], family: str) -> None:
    assert found["families"][family] < 1e-4


def test_a_residual_stream_in_fp32_takes_much_of_the_noise_of_bfloat16(found: dict[str, Any]) -> None:
    noise = found["noise"]
    assert 0 < noise["float32/float32"] < 0.6 * noise["None/None"]
    assert 0 < noise["float32/None"] < noise["None/None"]
