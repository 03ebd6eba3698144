"""A run's checkpoint as the source of a conversion: what it exports, and what it refuses."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from rltrain.checkpoint.run_files import checksum
from rltrain.checkpoint.run_folder import CheckpointFolder, name_of
from rltrain.cli.convert import main
from rltrain.config.loader import load_config
from rltrain.models import read_architecture
from rltrain.models.lora import PEFT_PREFIX, WEIGHT, A, B
from rltrain.reshard.megatron_layout import megatron_layout
from rltrain.runtime.grid import Grid
from tests.converted_checkpoints import make_checkpoint, stored_tensors
from tests.state_files import save, whole_tensors

RANK, ALPHA = 2, 6
CONFIG = """\
steps: 10
placement: {'actor, reference, rollout, reward': 0-3}
data: {train: {path: train.jsonl}}
checkpoint: {save_interval: 2}
"""
MADE_OF_ADAPTERS = ("model.layers.1.mlp.up_proj", "model.layers.0.self_attn.k_proj")

SaveRun = Callable[..., dict[str, Tensor]]


@pytest.fixture
def save_run(tmp_path: Path) -> SaveRun:
    """Four ranks' files of step 4, of a run that began with `model`; the canonical tensors that they hold."""

    def of(model: Path, *overrides: str) -> dict[str, Tensor]:
        (tmp_path / "config.yaml").write_text(CONFIG)
        config = load_config(tmp_path / "config.yaml", [f"model.path={model}", *overrides])
        architecture = read_architecture(model, "model.path")
        if config.model.lora:
            architecture = architecture.adapted(config.model.lora.rank, config.model.lora.targets)
        layout = megatron_layout(architecture, Grid((0, 1, 2, 3), tp=2, pp=2))
        folder = CheckpointFolder(tmp_path / "checkpoints")
        files = save(layout, folder.begin(4) / "actor")
        records = {f"actor/{file.name}": checksum(file) for file in files}
        folder.complete(4, records, {"config": config.model_dump(mode="json")}, keep=0)
        shapes = layout.tensors.shapes
        values = (tensor.view(shape) for tensor, shape in zip(whole_tensors(layout), shapes, strict=True))
        return dict(zip(layout.tensors.names, values, strict=True))

    return of


def export(tmp_path: Path, *options: object) -> int:
    arguments = ["run-to-hf", "--input", tmp_path / "checkpoints", "--output", tmp_path / "hf", *options]
    return main([str(argument) for argument in arguments])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_master_weights_are_exported_rounded_once(save_run: SaveRun, tmp_path: Path, dtype: str) -> None:
    make_checkpoint(tmp_path / "model", "qwen3", tie_word_embeddings=False)
    trained = save_run(tmp_path / "model", f"model.dtype={dtype}")
    assert export(tmp_path) == 0
    exported = stored_tensors(tmp_path / "hf")
    assert exported.keys() == trained.keys()
    assert all(torch.equal(exported[name], trained[name].to(getattr(torch, dtype))) for name in trained)
    assert (tmp_path / "hf/tiktoken.model").exists(), "the tokenizer comes along"
    assert main(["verify", str(tmp_path / "checkpoints" / name_of(4)), str(tmp_path / "hf")]) == 0


def test_adapters_are_merged_into_the_model_that_the_run_began_with(save_run: SaveRun, tmp_path: Path) -> None:
    base = make_checkpoint(tmp_path / "model", "qwen3", tie_word_embeddings=False)
    lora = f"model.lora={{rank: {RANK}, alpha: {ALPHA}, targets: [up_proj, k_proj]}}"
    adapters = save_run(tmp_path / "model", lora, "model.dtype=float32")
    assert export(tmp_path) == 0
    exported = stored_tensors(tmp_path / "hf")
    for module in MADE_OF_ADAPTERS:
        a, b = (adapters[PEFT_PREFIX + module + half].double() for half in (A, B))
        expected = base[module + WEIGHT].double() + ALPHA / RANK * (b @ a)
        torch.testing.assert_close(exported[module + WEIGHT].double(), expected, rtol=1e-6, atol=0)
    changed = {name for name in exported if not torch.equal(exported[name], base[name])}
    assert changed == {name.removeprefix(PEFT_PREFIX).removesuffix(A) + WEIGHT for name in adapters if A in name}


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (lambda actor: (actor / "rank_00001.safetensors").unlink(), r"rank_00001.safetensors cannot be read"),
        (
            lambda actor: flip_a_bit(actor / "rank_00002.safetensors"),
            r"rank_00002.safetensors is damaged: its checksum",
        ),
    ],
    ids=["missing", "damaged"],
)
def test_damage_is_named(
    save_run: SaveRun, tmp_path: Path, capsys: pytest.CaptureFixture[str], harm: Callable[[Path], None], message: str
) -> None:
    make_checkpoint(tmp_path / "model", "qwen3")
    save_run(tmp_path / "model")
    harm(tmp_path / "checkpoints" / name_of(4) / "actor")
    assert export(tmp_path) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "hf").exists()


def flip_a_bit(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[-3] ^= 1
    file.write_bytes(content)


def test_a_model_that_is_gone_is_asked_for(
    save_run: SaveRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_checkpoint(tmp_path / "model", "qwen3")
    save_run(tmp_path / "model")
    (tmp_path / "model").rename(tmp_path / "moved")
    assert export(tmp_path) == 2
    assert (
        f"the run began with the model {tmp_path / 'model'}, which has no config.json here" in capsys.readouterr().err
    )
    assert export(tmp_path, "--hf-config", tmp_path / "moved") == 0


def test_what_is_no_checkpoint_of_a_run_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_checkpoint(tmp_path / "checkpoints", "qwen3")
    assert export(tmp_path) == 2
    assert "expected a run of rltrain" in capsys.readouterr().err
