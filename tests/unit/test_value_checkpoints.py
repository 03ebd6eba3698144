"""Critics from both kinds of checkpoint, and written as what transformers scores sequences with."""

import itertools
import json
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from rltrain.checkpoint.hf_reader import load_parameters
from rltrain.checkpoint.hf_writer import save_checkpoint
from rltrain.errors import CheckpointError
from rltrain.models import read_architecture
from rltrain.reshard.layout import Layout
from rltrain.reshard.megatron_layout import megatron_layout
from rltrain.runtime.grid import Grid
from tests.unit.test_families import MODELS, SPARSE_MODELS
from tests.unit.test_hf_checkpoint import SIZES

BODY = "decoder.layers.1.mlp.linear_fc2.weight"
HEAD = "output_layer.weight"
TOKENS = torch.arange(12).reshape(1, 12)


def make_checkpoint(folder: Path, family: str, kind: str, *, tied: bool = False, num_labels: int = 1) -> Path:
    """A random model of `kind` "CausalLM" or "SequenceClassification", with all weights from one seed."""
    torch.manual_seed(0)
    config = MODELS[family][0](**SIZES, tie_word_embeddings=tied, num_labels=num_labels)
    model = getattr(transformers, f"AutoModelFor{kind}").from_config(config)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter)
    model.save_pretrained(folder)
    return folder


def layout_of(folder: Path, grid: Grid | None = None) -> Layout:
    return megatron_layout(read_architecture(folder).value_model(), grid or Grid((0,)))


def load(folder: Path, layout: Layout, rank: int = 0) -> dict[str, Tensor]:
    parameters = {name: torch.full(shape, 7.0) for name, shape in layout.on(rank).parameters}
    load_parameters(folder, layout, rank, parameters, config_key="critic.path")
    return parameters


def refusal(folder: Path) -> str:
    with pytest.raises(CheckpointError) as refused:
        load(folder, layout_of(folder))
    return str(refused.value)


@pytest.mark.parametrize("tied", [False, True])
def test_from_a_language_model_the_head_starts_at_zero(tied: bool, tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, "qwen2", "CausalLM", tied=tied)
    layout = layout_of(folder, Grid((0, 1, 2, 3), tp=2, pp=2))
    for rank, last_stage in ((0, False), (1, False), (2, True), (3, True)):
        parameters = load(folder, layout, rank)
        assert (HEAD in parameters) is last_stage
        assert not last_stage or torch.equal(parameters[HEAD], torch.zeros(1, SIZES["hidden_size"]))
    expected = load_file(folder / "model.safetensors")["model.layers.1.mlp.down_proj.weight"]
    assert torch.equal(load(folder, layout_of(folder))[BODY], expected)


@pytest.mark.parametrize("family", MODELS)
def test_from_a_sequence_classifier_the_head_is_its_score(family: str, tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, family, "SequenceClassification")
    stored = load_file(folder / "model.safetensors")
    layout = layout_of(folder, Grid((0, 1), tp=2))
    for rank in (0, 1):
        assert torch.equal(load(folder, layout, rank)[HEAD], stored["score.weight"])


def test_a_head_of_several_scores_is_refused(tmp_path: Path) -> None:
    message = refusal(make_checkpoint(tmp_path, "llama", "SequenceClassification", num_labels=3))
    for part in ("score.weight", "[3, 32]", "[1, 32]", "num_labels 1", "critic.path", str(tmp_path)):
        assert part in message


def test_other_tensors_too_many_or_too_few_are_refused(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, "qwen3", "CausalLM")
    tensors = load_file(folder / "model.safetensors")
    save_file({**tensors, "v_head.weight": torch.zeros(1)}, folder / "model.safetensors")
    message = refusal(folder)
    assert "v_head.weight" in message and "lm_head" not in message and "critic.path" in message
    save_file({n: t for n, t in tensors.items() if n != "model.norm.weight"}, folder / "model.safetensors")
    assert "lacks tensor model.norm.weight" in refusal(folder)


@pytest.mark.parametrize("tied", [False, True])
def test_an_actor_takes_no_sequence_classifier(tied: bool, tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, "qwen3", "SequenceClassification", tied=tied)
    layout = megatron_layout(read_architecture(folder), Grid((0,)))
    with pytest.raises(CheckpointError, match=r"does not have: score\.weight"):
        load_parameters(folder, layout, 0, {name: torch.empty(shape) for name, shape in layout.on(0).parameters})


KINDS = itertools.cycle([("CausalLM", False), ("SequenceClassification", True), ("CausalLM", True)])
SAVED = [(family, "SequenceClassification", False) for family in MODELS]
SAVED += [(family, *kind) for family, kind in zip(MODELS, KINDS, strict=False)]


@pytest.mark.parametrize(("family", "kind", "tied"), SAVED)
def test_transformers_scores_alike_with_what_was_saved(family: str, kind: str, tied: bool, tmp_path: Path) -> None:
    original, saved = make_checkpoint(tmp_path / "original", family, kind, tied=tied), tmp_path / "saved"
    layout = layout_of(original)
    parameters = load(original, layout)
    if kind == "CausalLM":
        parameters[HEAD].normal_()
    architecture = read_architecture(original).value_model()
    save_checkpoint(saved, parameters, layout, architecture, group=None, rank=0, like=original)

    config = json.loads((saved / "config.json").read_text())
    of_transformers = transformers.AutoModelForSequenceClassification.from_pretrained(saved)
    assert config["architectures"] == [type(of_transformers).__name__]
    assert "lm_head.weight" not in load_file(saved / "model.safetensors")
    scorer = transformers.AutoModelForSequenceClassification.from_pretrained(saved).eval()
    assert scorer.config.num_labels == 1
    decoder = transformers.AutoModel.from_pretrained(original).eval()
    expected = decoder(TOKENS).last_hidden_state[:, -1] @ parameters[HEAD].T
    assert torch.allclose(scorer(TOKENS).logits, expected, rtol=1e-5, atol=1e-5)
    reloaded = load(saved, layout_of(saved))
    assert all(torch.equal(reloaded[name], parameters[name]) for name in parameters)


WITHOUT_CLASSIFIER = ("glm4_moe", "glm4_moe_lite", "minimax_m2", "hy_v3", "qwen3_5_moe_text")
"""Families that transformers has no model for sequence classification of: such a file is rltrain's alone."""


@pytest.mark.parametrize("family", [*MODELS, *SPARSE_MODELS])
def test_every_family_is_saved_under_a_class_that_transformers_has(family: str, tmp_path: Path) -> None:
    config_class = {**MODELS, **SPARSE_MODELS}[family][0]
    sizes = SPARSE_MODELS[family][2] if family in SPARSE_MODELS else {}
    config_class(**{**SIZES, **sizes}).save_pretrained(tmp_path)
    layout = layout_of(tmp_path)
    parameters = {name: torch.zeros(shape) for name, shape in layout.on(0).parameters}
    architecture = read_architecture(tmp_path).value_model()
    save_checkpoint(tmp_path / "saved", parameters, layout, architecture, group=None, rank=0, like=tmp_path)
    (name,) = json.loads((tmp_path / "saved" / "config.json").read_text())["architectures"]
    assert hasattr(transformers, name) == (family not in WITHOUT_CLASSIFIER)
