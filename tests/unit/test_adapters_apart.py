"""Engines that keep adapters beside their base draw what engines draw that have them merged."""

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from rltrain.checkpoint.hf_reader import load_parameters
from rltrain.checkpoint.peft_files import load_adapters
from rltrain.config.models import Lora
from rltrain.models import canonical_tensors, read_architecture
from rltrain.models.lora import A, B
from rltrain.reshard.copy_table import allocate_parameters
from rltrain.reshard.execute import Resharding
from rltrain.reshard.megatron_layout import megatron_layout
from rltrain.reshard.plan import plan
from rltrain.rollout.embedded import EmbeddedEngine
from rltrain.rollout.embedded.parameters import adapted_matrices
from rltrain.rollout.engine import SamplingParams
from rltrain.rollout.layout import engine_layout
from rltrain.runtime.grid import Grid
from tests.rollout_models import load_engine, ragged_requests
from tests.unit.conftest import SPARSE_FAMILIES

FAMILIES = ("phi3", "glm4", "gemma3", "qwen3_5", *SPARSE_FAMILIES)
LORA = Lora(rank=4, alpha=8)
GREEDY = SamplingParams(0.0, 1.0, 0, 12, ())
ONE = Grid((0,))


def random_adapters(path: Path, folder: Path) -> dict[str, torch.Tensor]:
    """Of all matrices, in PEFT's files in `folder`."""
    adapted = canonical_tensors(read_architecture(path).adapted(LORA.rank, None))
    generator = torch.Generator().manual_seed(1)
    tensors = {
        name: torch.randn(shape, generator=generator) * 0.1
        for name, shape in zip(adapted.names, adapted.shapes, strict=True)
    }
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    targets = {name.removesuffix(A).removesuffix(B).rpartition(".")[2] for name in tensors}
    config = (
        f'{{"peft_type": "LORA", "r": {LORA.rank}, "lora_alpha": {LORA.alpha}, "target_modules": {sorted(targets)}}}'
    )
    (folder / "adapter_config.json").write_text(config.replace("'", '"'))
    return tensors


def merged(path: Path, folder: Path, adapters: dict[str, torch.Tensor]) -> Path:
    """The checkpoint in `path` with what the adapters add."""
    shutil.copytree(path, folder)
    weights = load_file(folder / "model.safetensors")
    for name, a in adapters.items():
        if name.endswith(A):
            weight = name.removeprefix("base_model.model.").removesuffix(A) + ".weight"
            weights[weight] += LORA.scale * adapters[name.removesuffix(A) + B] @ a
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def engine_with_adapters_apart(path: Path, folder: Path) -> EmbeddedEngine:
    """Its adapters come from PEFT's files by way of training's layout."""
    architecture = read_architecture(path)
    adapted = architecture.adapted(LORA.rank, None)
    layout, beside = (engine_layout(of, ONE) for of in (architecture, adapted))
    source = megatron_layout(adapted, ONE)
    weights, trained, adapters = (allocate_parameters(of, 0) for of in (layout, source, beside))
    load_parameters(path, layout, 0, weights)
    load_adapters(folder, source, 0, trained, LORA)
    resharding = Resharding(
        plan(source, beside, 0, 1), group=None, cpu_group=None, bucket_bytes=2**16, device=torch.device("cpu")
    )
    resharding.run(trained, adapters)
    return EmbeddedEngine(
        architecture,
        weights | adapters,
        tp_group=None,
        max_running_requests=8,
        max_context_tokens=64,
        dtype=torch.float32,
        matrices=adapted_matrices(beside, 0, weights | adapters, {}, LORA.scale),
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_drawn_is_what_merged_weights_draw(checkpoints: dict[str, Path], family: str, tmp_path: Path) -> None:
    adapters = random_adapters(checkpoints[family], tmp_path / "adapters")
    whole = merged(checkpoints[family], tmp_path / "merged", adapters)
    apart = engine_with_adapters_apart(checkpoints[family], tmp_path / "adapters")
    samples = ragged_requests(5)
    (expected, _), base = load_engine(whole, max_context_tokens=64), load_engine(checkpoints[family])[0]
    for wanted, found in zip(expected.generate(samples, GREEDY), apart.generate(samples, GREEDY), strict=True):
        assert found.tokens == wanted.tokens
        torch.testing.assert_close(torch.tensor(found.logprobs), torch.tensor(wanted.logprobs), atol=1e-4, rtol=0)
    plain = [done.tokens for done in base.generate(samples, GREEDY)]
    assert plain != [done.tokens for done in expected.generate(samples, GREEDY)], "the adapters change what is drawn"
