"""tools/parity.py names the first layer in which trainer and engine differ; a residual stream in fp32 makes them
agree."""

from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from tests.support.family_checkpoints import make_family_checkpoint
from tests.support.talking_engine import byte_tokenizer
from tests.support.tiny_checkpoints import make_checkpoints
from tests.support.vision_checkpoints import write_checkpoint
from tests.support.worlds import made_once, run_case

DISTURBED = {
    "embedding": ["model.embed_tokens.weight"],
    "layer 2 attention": ["model.layers.2.self_attn.o_proj.weight"],
    "layer 3 mlp": ["model.layers.3.mlp.up_proj.weight", "model.layers.5.input_layernorm.weight"],
    "final norm": ["model.norm.weight"],
    "logits": ["lm_head.weight"],
}
"""The stage that differs -> the changed tensors."""
OTHERS = {
    "megatron deepseek_v3": ("layer 1 attention", ["model.layers.1.self_attn.kv_b_proj.weight"]),
    "megatron glm4_moe": ("layer 3 mlp", ["model.layers.3.mlp.gate.e_score_correction_bias"]),
    "fsdp mixtral": ("layer 1 mlp", ["model.layers.1.block_sparse_moe.experts.2.w2.weight"]),
}
"""The same by backend and family. Other tests compare each family of both sides with transformers."""


@made_once
def found(folder: Path) -> dict[str, Any]:
    checkpoint = make_checkpoints(folder, ["qwen3"], num_hidden_layers=8, initializer_range=0.05)["qwen3"]
    families = {name: str(make_family_checkpoint(name, folder / name)) for _, name in map(str.split, OTHERS)}
    others = {case: tensors for case, (_, tensors) in OTHERS.items()}
    given = {"folder": checkpoint, "disturbed": DISTURBED, "families": families, "others": others}
    return run_case("cases_parity:all_cases", 1, **given)[0]


@made_once
def of_one_layer(folder: Path) -> dict[str, Any]:
    tokenizer = byte_tokenizer()
    shape = {"num_hidden_layers": 1, "vocab_size": len(tokenizer)}
    checkpoint = make_checkpoints(folder, ["qwen3"], **shape)["qwen3"]
    tokenizer.save_pretrained(checkpoint)
    texts, empty = folder / "texts", folder / "empty"
    texts.write_text("two words\n\nx\nand a longer line of more than sixteen tokens\n")
    empty.write_text("x\n")
    return run_case("cases_parity:of_one_layer", 1, checkpoint=checkpoint, texts=texts, empty=empty)[0]


def test_both_backends_are_compared_with_the_engine(of_one_layer: dict[str, Any]) -> None:
    alike, text = of_one_layer["megatron"]
    assert alike and text.count("no stage differs by more than 1e-04") == 2
    assert "trainer and engine" in text and "trainer and transformers" in text
    for stage in ("embedding", "layer 0 attention", "layer 0 mlp", "final norm", "logits", "log-probs"):
        assert text.count(f" {stage} ") == 2, text
    alike, text = of_one_layer["fsdp"]
    assert not alike and "first stage beyond 1e-04: layer 0 mlp, by" in text


def test_samples_with_images_are_compared(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "model", "qwen3_vl")
    images = [str(tmp_path / f"{side}.png") for side in (28, 56)]
    for side, file in zip((28, 56), images, strict=True):
        Image.effect_noise((side, side), 80).save(file)
    tensor = "model.visual.merger.linear_fc2.weight"
    found = run_case("cases_parity:of_images", 1, checkpoint=tmp_path / "model", images=images, tensor=tensor)[0]
    alike, text = found["alike"]
    assert alike and text.count("no stage differs by more than 1e-04") == 2
    assert "trainer and engine" in text and "trainer and transformers" in text
    alike, text = found["sharded"]
    assert alike and "trainer and engine" in text
    alike, text = found["disturbed"]
    assert not alike and "first stage beyond 1e-04: embedding, by" in text


def test_texts_need_a_line_of_two_tokens(of_one_layer: dict[str, Any]) -> None:
    assert "no line has 2 tokens or more; expected one text per line" in of_one_layer["empty"]
    assert "cannot read it: No such file or directory; expected a file of one text per line" in of_one_layer["missing"]


@pytest.mark.slow  # test_training.py and test_engine.py compare the same
def test_trainer_engine_and_transformers_are_alike(found: dict[str, Any]) -> None:
    alike, text = found["alike"]
    assert alike and "trainer and engine" in text and "trainer and transformers" in text
    assert text.count("no stage differs by more than 1e-04") == 2
    assert "layer 7 mlp" in text and "log-probs:" in text


@pytest.mark.slow
@pytest.mark.parametrize("stage", DISTURBED)
def test_the_first_stage_that_differs_is_named(found: dict[str, Any], stage: str) -> None:
    alike, text = found["disturbed"][stage]
    assert not alike
    assert f"first stage beyond 1e-04: {stage}, by" in text


@pytest.mark.slow
@pytest.mark.parametrize("case", OTHERS)
def test_so_it_is_of_experts_latent_attention_and_backend_fsdp(found: dict[str, Any], case: str) -> None:
    (alike, text), (disturbed, of_disturbed) = found["others"][case]
    assert alike and not disturbed, text
    assert f"first stage beyond 1e-04: {OTHERS[case][0]}, by" in of_disturbed


@pytest.mark.slow
def test_a_residual_stream_in_fp32_takes_much_of_the_noise_of_bfloat16(found: dict[str, Any]) -> None:
    noise = found["noise"]
    assert 0 < noise["float32/float32"] < 0.6 * noise["None/None"]
    assert 0 < noise["float32/None"] < noise["None/None"]
