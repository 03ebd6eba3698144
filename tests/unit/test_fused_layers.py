"""Whole models with fused kernels, in Triton's interpreter, have the log-probs and gradients of models without them."""

import rltrain.training.megatron  # noqa: F401  # isort: skip  # first: it loads Megatron without torch's compiler

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from megatron.core.tensor_parallel import layers
from safetensors.torch import load_file
from torch import Tensor

from rltrain.algorithms.losses import likelihood_loss
from rltrain.cli.parity import world_of_one
from rltrain.data.experience import Experience
from rltrain.models import attention, fused, layer_kernels, read_architecture
from rltrain.planning.activation_memory import Activations
from rltrain.runtime.grid import Grid
from rltrain.runtime.process_groups import ProcessGroups
from rltrain.training.megatron import model_config, platform
from tests.support.family_checkpoints import make_family_checkpoint
from tests.support.marks import slow_but
from tests.support.packed_experience import plain_experience
from tests.support.sharded_models import reading_in_training
from tests.support.trained_models import CPU, groups_on, in_training, megatron_model, summed_gradients
from tests.unit.test_estimated_memory import job_of
from tools.benchmarks import launches

GRID, GRID_OF_FSDP = Grid((0,)), Grid((0,), copies=1)
LENGTHS, MAX_TOKENS = (5, 9), 256
MODEL, NUM_TOKENS = launches.SHIPPED / "Qwen3-0.6B", 8192
PLACEMENT = {"actor": 0, "rollout, reward": 1}
TOLERANCE = 1e-4
"""Largest difference of log-probs, and of gradients relative to their largest element."""
OF_EQUAL_KERNELS = 1e-6
"""The same, where only what is kept differs."""
MOST_LAUNCHES = {"megatron": 33, "fsdp": 50}
"""Launches of a layer, forward and backward."""
MOST_OF_A_MICRO_BATCH = 1200
"""Launches of a micro-batch of 8,192 tokens with Megatron's 28 layers, log-probs, policy loss and gradients."""


@pytest.fixture(scope="module", autouse=True)
def groups() -> Iterator[ProcessGroups]:
    with world_of_one(CPU):
        yield groups_on([GRID, GRID_OF_FSDP])


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[str]]:
    """Lets CPUs use the kernels. Returns a function for the names of those launched since its last call."""
    names: list[str] = []
    launch = layer_kernels.launch

    def noting(kernel: Any, *arguments: Any, **constants: Any) -> None:
        names.append(kernel.__name__)
        launch(kernel, *arguments, **constants)

    monkeypatch.setattr(platform, "HAS_ONEDNN", False)  # it pads micro-batches, and the interpreter needs time for rows
    monkeypatch.setattr(layer_kernels, "launch", noting)
    monkeypatch.setattr(attention, "fused_kernels", lambda device: fused)

    def take() -> list[str]:
        taken = sorted(set(names))
        names.clear()
        return taken

    return take


ROTATION_AND_NORMS = ["_norm_backward", "_norm_forward", "_sum_parts", "_turn_backward", "_turn_forward"]
GATES = ["_gate_backward", "_gate_forward"]
FAMILIES = {
    "qwen3": [*GATES, *ROTATION_AND_NORMS],
    "llama": [*GATES, *ROTATION_AND_NORMS],
    "gemma2": [*GATES, *ROTATION_AND_NORMS],
    "glm4": [*GATES, *ROTATION_AND_NORMS],
    "phi4_mini": [*GATES, *ROTATION_AND_NORMS],
    "qwen3_moe": [*GATES, *ROTATION_AND_NORMS],
    "qwen3_5": [*GATES, *ROTATION_AND_NORMS[:3]],
}
"""Kernels that a family uses with Megatron. Gated attention rotates without them."""


def samples_of(path: Path) -> Experience:
    return plain_experience(LENGTHS, load_file(path / "expected.safetensors")["tokens"][: sum(LENGTHS)])


def of_megatron(path: Path, groups: ProcessGroups, **settings: Any) -> dict[str, Tensor]:
    model = megatron_model(path, GRID, groups, **settings)
    trained = in_training(model, updates=1, max_tokens=MAX_TOKENS, optimizer={}, distributed_optimizer=False)
    samples = samples_of(path)
    logprobs = trained.evaluate(samples, max_tokens=MAX_TOKENS)
    return {"logprobs": logprobs} | summed_gradients(trained, samples, likelihood_loss())


def of_fsdp(path: Path, groups: ProcessGroups, **settings: Any) -> dict[str, Tensor]:
    trained = reading_in_training(path, GRID_OF_FSDP, groups, max_tokens=MAX_TOKENS, **settings)
    samples = samples_of(path)
    logprobs = trained.evaluate(samples, max_tokens=MAX_TOKENS)
    trained.accumulate(samples, likelihood_loss())
    gradients = {name: one.grad.to_local() for name, one in trained.model.named().items() if one.grad is not None}  # type: ignore[attr-defined]
    return {"logprobs": logprobs} | gradients


def assert_alike(found: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float = TOLERANCE) -> None:
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        scale = max(1e-3, float(values.abs().max())) if name != "logprobs" else 1.0
        assert float((found[name] - values).abs().max()) / scale < tolerance, name


@pytest.mark.parametrize("family", slow_but(FAMILIES, "qwen3"))
def test_megatron_layers(
    family: str,
    tmp_path: Path,
    groups: ProcessGroups,
    launched: Callable[[], list[str]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path = make_family_checkpoint(family, tmp_path)
    found = of_megatron(path, groups)
    assert launched() == sorted(FAMILIES[family])
    monkeypatch.setattr(attention, "fused_kernels", lambda device: None)
    assert_alike(found, of_megatron(path, groups))
    assert launched() == []


@pytest.mark.slow
def test_recomputed_layers(tmp_path: Path, groups: ProcessGroups, launched: Callable[[], list[str]]) -> None:
    path = make_family_checkpoint("qwen3", tmp_path)
    assert_alike(of_megatron(path, groups, recompute="full"), of_megatron(path, groups))
    assert launched() == sorted(FAMILIES["qwen3"])


@pytest.mark.parametrize("family", slow_but(FAMILIES, "qwen3"))
def test_outputs_that_backward_makes_again(
    family: str, tmp_path: Path, groups: ProcessGroups, launched: Callable[[], list[str]]
) -> None:
    path = make_family_checkpoint(family, tmp_path)
    assert_alike(of_megatron(path, groups, recompute="selective"), of_megatron(path, groups), OF_EQUAL_KERNELS)


@pytest.mark.slow
def test_a_wide_residual_stream_of_half_precision(
    tmp_path: Path, groups: ProcessGroups, launched: Callable[[], list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kernels round each formula once, so they are about as near to fp32 as other layers, or nearer."""
    path = make_family_checkpoint("qwen3", tmp_path)
    settings = {"dtype": "bfloat16", "residual_dtype": "float32"}
    found = of_megatron(path, groups, **settings)
    assert launched() == sorted(FAMILIES["qwen3"])
    monkeypatch.setattr(attention, "fused_kernels", lambda device: None)
    unfused, expected = of_megatron(path, groups, **settings), of_megatron(path, groups)
    for name, values in expected.items():
        errors = [float((one[name].float() - values).norm() / values.norm()) for one in (found, unfused)]
        assert errors[0] < max(0.03, 2 * errors[1]), (name, errors)


@pytest.mark.parametrize("family", slow_but(["qwen3_tied", "qwen3_moe"], "qwen3_tied"))
def test_products_can_be_added_to_gradients(
    family: str, tmp_path: Path, groups: ProcessGroups, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Megatron's linear layers hand over all of a gradient. Only GPUs have the mixed product, so this one is plain."""
    path, products = make_family_checkpoint(family, tmp_path), []

    def add_to_gradient(inputs: Tensor, of_outputs: Tensor, gradient: Tensor) -> None:
        products.append(gradient.shape)
        gradient.addmm_(of_outputs.t(), inputs)

    expected = of_megatron(path, groups)
    monkeypatch.setattr(platform, "add_to_gradient", add_to_gradient)
    monkeypatch.setattr(platform, "HAS_ONEDNN", False)  # its layers have gradients of their own
    monkeypatch.setattr(layers, platform.EXTENSION, None, raising=False)
    monkeypatch.setattr(layers, "_grad_accum_fusion_available", False)
    monkeypatch.setattr(model_config, "accumulates_in_products", lambda device: True)
    platform.add_products_by_torch()
    assert_alike(of_megatron(path, groups), expected)
    assert len(products) >= 4 * 4


OF_FSDP = {
    "qwen3": [*GATES, *ROTATION_AND_NORMS],
    "gemma2": [*GATES, *ROTATION_AND_NORMS],
    "glm4": ROTATION_AND_NORMS[:3],
    "qwen3_5": [*GATES, *ROTATION_AND_NORMS[:3]],
}
"""Kernels that transformers' modules use. GLM has its own rotation and MLP there."""


@pytest.mark.parametrize("family", slow_but(OF_FSDP, "qwen3"))
def test_transformers_layers(
    family: str,
    tmp_path: Path,
    groups: ProcessGroups,
    launched: Callable[[], list[str]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path = make_family_checkpoint(family, tmp_path)
    # Modules were built for this device, so FSDP's model asks for kernels when it is made and at every call.
    monkeypatch.setattr("rltrain.training.fsdp_model.fused_kernels", lambda device: fused)
    found = of_fsdp(path, groups)
    assert launched() == sorted(OF_FSDP[family])
    monkeypatch.setattr(attention, "fused_kernels", lambda device: None)
    assert_alike(found, of_fsdp(path, groups))
    assert launched() == []


def test_without_kernels_transformers_layers_say_that_they_keep_outputs(
    tmp_path: Path, groups: ProcessGroups, caplog: pytest.LogCaptureFixture
) -> None:
    path = make_family_checkpoint("qwen3", tmp_path)
    reading_in_training(path, GRID_OF_FSDP, groups, recompute="selective")
    assert "model.recompute: got selective, but" in caplog.text and "it saves nothing" in caplog.text


@pytest.mark.slow
@pytest.mark.parametrize("family", OF_FSDP)
def test_outputs_of_transformers_that_backward_makes_again(
    family: str,
    tmp_path: Path,
    groups: ProcessGroups,
    launched: Callable[[], list[str]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path = make_family_checkpoint(family, tmp_path)
    monkeypatch.setattr("rltrain.training.fsdp_model.fused_kernels", lambda device: fused)
    found, expected = (of_fsdp(path, groups, recompute=recompute) for recompute in ("selective", "none"))
    assert_alike(found, expected, OF_EQUAL_KERNELS)


@pytest.mark.parametrize("backend", ["megatron", "fsdp"])
def test_launches_of_a_layer(backend: str, counted: dict[str, dict[str, launches.Measured]]) -> None:
    plain, again = (counted[recompute][backend].layer.launches.total() for recompute in ("none", "selective"))
    assert plain <= MOST_LAUNCHES[backend] and again - plain == {"megatron": 4, "fsdp": 3}[backend]


@pytest.mark.parametrize(
    ("backend", "recompute", "kept"),
    [
        ("megatron", "none", 45_120),
        ("megatron", "selective", 28_736),
        ("fsdp", "none", 45_120),
        ("fsdp", "selective", 34_880),
    ],
)
def test_a_layer_keeps_what_is_estimated(
    backend: str, recompute: str, kept: int, counted: dict[str, dict[str, launches.Measured]]
) -> None:
    assert counted[recompute][backend].layer.kept / NUM_TOKENS == pytest.approx(kept, rel=0.001)
    model, whole = {"path": "m", "recompute": recompute, "transformer_impl": "local"}, read_architecture(MODEL)
    jobs = (
        job_of(replace(whole, num_layers=count), PLACEMENT, 2, model=model, actor={"backend": backend})
        for count in (3, 2)
    )
    more, less = (Activations(job, "actor", 0).training(NUM_TOKENS) for job in jobs)
    assert (more - less) / NUM_TOKENS == pytest.approx(kept, rel=0.05)


def test_launches_of_a_micro_batch(counted: dict[str, dict[str, launches.Measured]]) -> None:
    found = counted["none"]["megatron"]
    assert {"read", "differentiate", "norm_backward"} <= found.outside.launches.keys()
    assert found.launches(num_layers=28) <= MOST_OF_A_MICRO_BATCH


def test_launches_of_a_decode_step() -> None:
    measured = launches.measure_decoding(MODEL, 8, 256)
    assert measured.layer.launches.total() == 9
    outside = {"embedding": 1, "norm_forward": 1, "linear": 1, "fill_": 1, "draw": 1, "finish_step": 1}
    assert +measured.outside.launches == outside


@pytest.fixture(scope="module")
def counted(groups: ProcessGroups) -> dict[str, dict[str, launches.Measured]]:
    return {recompute: launches.measure(MODEL, [512] * 16, recompute) for recompute in ("none", "selective")}
