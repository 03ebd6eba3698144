"""Adapters train alike in every layout and as PEFT's adapters do. Their base does not change."""

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from rltrain.models import canonical_tensors, read_architecture
from rltrain.models.lora import A, B
from rltrain.planning.activation_memory import Activations
from tests.distributed.cases_lora import (
    FAMILIES,
    FROM_PEFT,
    LEARNING,
    LORA,
    OF_EXPERTS,
    QUICK_FAMILY,
    QUICK_LAYOUT,
    QUICK_TARGETS,
    QUICK_TRAINED,
    RESUMED,
    SAVED,
    SLOW_TRAINED,
    TARGETS,
)
from tests.support.checkpoint_files import stored_tensors
from tests.support.family_checkpoints import make_family_checkpoint
from tests.support.marks import slow_but
from tests.support.tiny_checkpoints import ENTROPY_COEF, make_checkpoints
from tests.support.worlds import Ranks, made_once, reports, run_case
from tests.unit.test_estimated_memory import job_of

TRAINED = slow_but(dict.fromkeys([*QUICK_TRAINED, *SLOW_TRAINED]), *QUICK_TRAINED)
RELATIVE = 1e-5
LAYER, OF_MEGATRON = "model.layers.1.", "decoder.layers.1."
FUSED = {
    f"{OF_MEGATRON}self_attention.linear_qkv.weight": [f"{LAYER}self_attn.{name}_proj.weight" for name in "qkv"],
    f"{OF_MEGATRON}self_attention.linear_proj.weight": [f"{LAYER}self_attn.o_proj.weight"],
    f"{OF_MEGATRON}mlp.linear_fc1.weight": [f"{LAYER}mlp.{name}_proj.weight" for name in ("gate", "up")],
    f"{OF_MEGATRON}mlp.linear_fc2.weight": [f"{LAYER}mlp.down_proj.weight"],
}
"""Megatron's parameters and the parameters of transformers inside them."""
CLOSE = 1e-5
ADAPTERS = "adapter_model.safetensors"


folder = made_once(lambda folder: folder)


@pytest.fixture(scope="module")
def base(folder: Path) -> Path:
    return Path(make_checkpoints(folder, ["qwen3"], num_hidden_layers=2)["qwen3"])


@pytest.fixture(scope="module")
def of_families(base: Path, folder: Path) -> dict[str, dict[str, Any]]:
    """Returns PEFT's results of other families for the same samples, and transformers' results of one with experts."""
    found = {}
    for name, (targets, _) in FAMILIES.items():
        make = made_with_experts if name == "qwen3_moe" else peft_made
        found[name] = make(family_base(name, base), folder / f"{name}_peft", targets)
    return found


@pytest.fixture(scope="module")
def of_quick_family(base: Path, folder: Path) -> dict[str, Any]:
    return peft_made(family_base(QUICK_FAMILY, base), folder / f"{QUICK_FAMILY}_peft", QUICK_TARGETS)


def family_base(name: str, base: Path) -> Path:
    """Writes a checkpoint of a family beside `base`, with the same samples."""
    path = base.parent / name
    make_family_checkpoint(name, path)
    shutil.copy(base / "experience.safetensors", path)
    return path


@pytest.fixture(scope="module")
def by_peft(base: Path, folder: Path) -> dict[str, Any]:
    return peft_made(base, folder / "qwen3_peft", TARGETS)


def peft_made(base: Path, adapters: Path, targets: Sequence[str]) -> dict[str, Any]:
    """Writes adapters of PEFT without zeros, and returns their results for the samples."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    torch.manual_seed(3)
    settings = LoraConfig(r=LORA.rank, lora_alpha=int(LORA.alpha), target_modules=[*targets], task_type="CAUSAL_LM")
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(base), settings).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.1)
    model.save_pretrained(adapters)
    logprobs = with_gradients(model, base)
    gradients = {
        name.replace(".default", ""): parameter.grad
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }
    merged = model.merge_and_unload().state_dict()
    return {"logprobs": logprobs, "gradients": gradients, "merged": merged}


def with_gradients(model: torch.nn.Module, base: Path) -> torch.Tensor:
    """Returns the log-probs of the samples' tokens. The model then has the gradients of their loss."""
    columns = load_file(base / "experience.safetensors")
    mask, logprobs, entropies = columns["response_mask"].float(), [], []
    for tokens in columns["tokens"].split(columns["lengths"].tolist()):
        log_softmax = model(tokens[None]).logits[0, :-1].log_softmax(-1)
        logprobs += [torch.zeros(1), log_softmax.gather(1, tokens[1:, None])[:, 0]]
        entropies += [torch.zeros(1), -(log_softmax.exp() * log_softmax).sum(-1)]
    loss = -((torch.cat(logprobs) + ENTROPY_COEF * torch.cat(entropies)) * mask).sum() / mask.sum()
    loss.backward()
    return torch.cat(logprobs).detach()


def made_with_experts(base: Path, adapters: Path, targets: Sequence[str]) -> dict[str, Any]:
    """Writes adapters of experts and returns transformers' results with the merged weights.

    The adapters' gradients follow from those of the weights, because PEFT has another kind of adapter for stacked
    experts.
    """
    from transformers import AutoModelForCausalLM

    adapted = canonical_tensors(read_architecture(base).adapted(LORA.rank, tuple(targets)))
    torch.manual_seed(4)
    halves = {name: 0.1 * torch.randn(shape) for name, shape in zip(adapted.names, adapted.shapes, strict=True)}
    adapters.mkdir()
    save_file(halves, adapters / ADAPTERS)
    said = {"peft_type": "LORA", "r": LORA.rank, "lora_alpha": LORA.alpha, "target_modules": [*targets]}
    (adapters / "adapter_config.json").write_text(json.dumps(said))
    model = AutoModelForCausalLM.from_pretrained(base).eval()
    pairs = [(name, name.removesuffix(A) + B) for name in halves if name.endswith(A)]
    held = dict(model.named_parameters())
    with torch.no_grad():
        for a, b in pairs:
            matrix_of(held, a).add_(LORA.scale * halves[b] @ halves[a])
    logprobs = with_gradients(model, base)
    gradients = {}
    of_weights = {name: parameter.grad for name, parameter in held.items()}
    for a, b in pairs:
        gradient = LORA.scale * matrix_of(of_weights, a)
        gradients |= {a: halves[b].T @ gradient, b: gradient @ halves[a].T}
    return {"logprobs": logprobs, "gradients": gradients}


def matrix_of(held: Mapping[str, Any], a: str) -> torch.Tensor:
    """Returns the matrix of an adapter in transformers' parameters. Experts are stacked there."""
    layer = a.removeprefix("base_model.model.").removesuffix(A)
    block, is_expert, matrix = layer.partition(".experts.")
    if not is_expert:
        return held[f"{layer}.weight"]
    number, matrix = matrix.split(".")
    if matrix == "down_proj":
        return held[f"{block}.experts.down_proj"][int(number)]
    return held[f"{block}.experts.gate_up_proj"][int(number)].chunk(2)[matrix == "up_proj"]


@pytest.fixture(scope="module")
def quick_world(base: Path, by_peft: Any, of_quick_family: Any, folder: Path) -> Ranks:
    return run_case("cases_lora:quick_cases", dense=base, folder=folder)


@pytest.fixture(scope="module")
def slow_world(base: Path, of_families: Any, folder: Path) -> Ranks:
    return run_case("cases_lora:slow_cases", dense=base, experts=folder / "qwen3_moe", folder=folder)


def assert_equal_steps(ranks: Ranks, name: str, expected: list[dict[str, float]]) -> None:
    for report in reports(ranks, name):
        steps = report["steps"] if isinstance(report, dict) else report
        for step, (values, wanted) in enumerate(zip(steps, expected, strict=True)):
            assert values == pytest.approx(wanted, rel=RELATIVE, abs=1e-7), f"{name}, step {step}"


QUICK = [(QUICK_FAMILY, QUICK_LAYOUT)]
DENSE = [*(("qwen3", layout) for layout in FROM_PEFT), *QUICK]
OTHERS = [(name, layout) for name, (_, layouts) in FAMILIES.items() for layout in layouts]
"""Latent attention, layers with norms at their end, and experts."""


@pytest.mark.parametrize(("family", "layout"), slow_but(DENSE + OTHERS, *DENSE))
def test_log_probs_and_gradients_equal_those_of_peft(
    ranks: Ranks, request: pytest.FixtureRequest, folder: Path, family: str, layout: str
) -> None:
    expected = peft_results(request, family)
    for report in reports(ranks, f"peft/{family}/{layout}"):
        assert (torch.tensor(report["logprobs"]) - expected["logprobs"]).abs().max() <= 2 * CLOSE
    gradients = load_file(folder / family / layout / "gradients" / ADAPTERS)
    assert gradients.keys() == expected["gradients"].keys()
    for name, gradient in gradients.items():
        assert (gradient - expected["gradients"][name]).abs().max() <= CLOSE, name


def peft_results(request: pytest.FixtureRequest, family: str) -> dict[str, Any]:
    quick = {"qwen3": "by_peft", QUICK_FAMILY: "of_quick_family"}
    if family in quick:
        return request.getfixturevalue(quick[family])
    return request.getfixturevalue("of_families")[family]


BY_NAMES = [(name, layout) for name, layout in OTHERS if name not in ("llama_biases", "qwen3_moe")]


@pytest.mark.parametrize(("family", "layout"), slow_but(QUICK + BY_NAMES, *QUICK))
def test_a_sync_by_names_brings_sglang_what_peft_merges(
    ranks: Ranks, request: pytest.FixtureRequest, folder: Path, family: str, layout: str
) -> None:
    """SGLang's own loader gets each whole tensor of the checkpoint once, on one rank of the engine."""
    start, found = load_file(folder / family / "model.safetensors"), dict[str, torch.Tensor]()
    expected = start | peft_results(request, family)["merged"]  # transformers stacks experts, which have no adapters
    for path in (folder / family / layout).glob("synced_*.safetensors"):
        tensors = load_file(path)
        assert found.keys().isdisjoint(tensors)
        found |= tensors
    assert found.keys() == {*canonical_tensors(read_architecture(folder / family)).names}
    for name, tensor in found.items():
        assert (tensor - expected[name]).abs().max() <= 1e-6, name
    assert any(not torch.equal(tensor, start[name]) for name, tensor in found.items()), "adapters are merged"


@pytest.mark.parametrize("layout", FROM_PEFT)
def test_files_of_peft_come_out_bit_for_bit_as_they_went_in(ranks: Ranks, folder: Path, layout: str) -> None:
    went_in = load_file(folder / "qwen3_peft" / ADAPTERS)
    came_out = load_file(folder / "qwen3" / layout / "adapters" / ADAPTERS)
    assert went_in.keys() == came_out.keys()
    assert all(torch.equal(tensor, went_in[name]) for name, tensor in came_out.items())


def test_peft_loads_what_is_written(ranks: Ranks, base: Path, folder: Path) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), folder / "qwen3/tp2_pp2/adapters")
    held = {name.replace(".default", ""): tensor for name, tensor in model.state_dict().items() if "lora" in name}
    went_in = load_file(folder / "qwen3_peft" / ADAPTERS)
    assert held.keys() == went_in.keys()
    assert all(torch.equal(tensor, went_in[name]) for name, tensor in held.items())


@pytest.mark.parametrize("layout", FROM_PEFT)
def test_the_merged_checkpoint_equals_what_peft_merges(
    ranks: Ranks, by_peft: dict[str, Any], folder: Path, layout: str
) -> None:
    merged = stored_tensors(folder / "qwen3" / layout / "merged")
    assert merged.keys() == by_peft["merged"].keys()
    for name, tensor in merged.items():
        assert (tensor - by_peft["merged"][name]).abs().max() <= 1e-6, name


@pytest.mark.parametrize("layout", TRAINED)
def test_steps_do_not_depend_on_the_layout(ranks: Ranks, layout: str) -> None:
    (expected,) = reports(ranks, "trained/tp1")
    assert_equal_steps(ranks, f"trained/{layout}", expected["steps"])


@pytest.mark.parametrize("layout", TRAINED)
def test_the_base_stays_and_is_what_the_model_begins_as(ranks: Ranks, layout: str) -> None:
    for report in reports(ranks, f"trained/{layout}"):
        assert report["begins_as_base"] and report["base_stays"] and report["weights_stay"]
        first, *_, last = report["steps"]
        assert last["loss"] < first["loss"] - 0.01


def test_gradients_and_optimizer_are_of_the_adapters_alone(ranks: Ranks) -> None:
    (report,) = reports(ranks, "trained/tp1")
    held = report["bytes"]
    assert held["weights"] == report["frozen"] + report["adapters"]
    assert held["gradients"] == report["adapters"]
    assert 2 * report["adapters"] <= held["optimizer"] < 2.1 * report["adapters"]


def test_a_run_goes_on_exactly_in_its_layout_and_to_rounding_in_another(ranks: Ranks) -> None:
    for report in reports(ranks, "resumed"):
        assert report[SAVED] == report["went_on"]
        for found, wanted in zip(report[RESUMED], report["went_on"], strict=True):
            assert found == pytest.approx(wanted, rel=RELATIVE)
        assert report["others"] == ["pieces"], "only adapters are saved"


@pytest.mark.parametrize("way", ["fsdp1x1", "fsdp3x1", "fsdp4x2"])
def test_sharded_models_train_the_same_adapters_and_go_on_from_megatrons_state(ranks: Ranks, way: str) -> None:
    (expected,) = reports(ranks, "backend/megatron1x1")
    assert_equal_steps(ranks, f"backend/{way}", expected["steps"])
    for report in reports(ranks, f"backend/{way}"):
        assert report["begins_as_base"] and report["base_stays"]
    if way == "fsdp1x1":
        (whole,) = reports(ranks, f"backend/{way}")
        merged = {name: sum(whole["merged"][part] for part in parts) for name, parts in FUSED.items()}
        assert merged == pytest.approx({name: expected["merged"][name] for name in FUSED}, abs=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("way", ["fsdp1x1", "fsdp3x1"])
def test_sharded_experts_train_the_same_adapters(ranks: Ranks, way: str) -> None:
    (expected,) = reports(ranks, "backend_of_experts/megatron1x1")
    told_by_both = reports(ranks, f"backend_of_experts/{way}")[0]["steps"][0].keys()
    assert {"loss", "grad_norm"} <= told_by_both, "all metrics agree except the loads of experts"
    steps = [{name: step[name] for name in told_by_both} for step in expected["steps"]]
    assert_equal_steps(ranks, f"backend_of_experts/{way}", steps)
    assert all(report["base_stays"] for report in reports(ranks, f"backend_of_experts/{way}"))
    if way == "fsdp1x1":
        (whole,) = reports(ranks, f"backend_of_experts/{way}")
        assert sum(whole["merged"].values()) == pytest.approx(sum(expected["merged"].values()), abs=1e-2)


@pytest.mark.slow
def test_adapters_train_alike_where_backward_makes_their_inputs_again(ranks: Ranks) -> None:
    (expected,) = reports(ranks, "trained/tp1")
    assert_equal_steps(ranks, "trained/made_again", expected["steps"])


@pytest.mark.slow
@pytest.mark.parametrize("recompute", ["full", "selective"])
def test_what_is_dropped_repeats_also_where_it_is_computed_anew(ranks: Ranks, recompute: str) -> None:
    (without,) = reports(ranks, "trained/tp1")
    twice, anew = (reports(ranks, f"dropout/{how}") for how in ("none", recompute))
    for (plain, again), (recomputed,) in zip(twice, anew, strict=True):
        assert plain["steps"] == again["steps"]
        assert plain["undisturbed"] and again["undisturbed"] and recomputed["undisturbed"]
        for found, wanted in zip(recomputed["steps"], plain["steps"], strict=True):
            assert found == pytest.approx(wanted, rel=RELATIVE)
        assert plain["steps"][0]["grad_norm"] != pytest.approx(without["steps"][0]["grad_norm"], rel=RELATIVE)


@pytest.mark.slow
@pytest.mark.parametrize("layout", OF_EXPERTS)
def test_adapters_of_experts_train_alike_in_every_layout(ranks: Ranks, layout: str) -> None:
    (expected,) = reports(ranks, "experts/one_rank")
    assert expected[0]["grad_norm"] > 0
    assert_equal_steps(ranks, f"experts/{layout}", expected)


def test_adapters_of_another_shape_are_refused(by_peft: dict[str, Any], folder: Path, tmp_path: Path) -> None:
    from rltrain.checkpoint.peft_files import load_adapters
    from rltrain.errors import CheckpointError
    from rltrain.reshard.megatron_layout import megatron_layout
    from rltrain.runtime.grid import Grid

    architecture = read_architecture(folder / "qwen3")

    def error(lora: Any, path: Path) -> str:
        layout = megatron_layout(architecture.adapted(lora.rank, lora.targets), Grid((0,)))
        parameters = {name: torch.empty(shape) for name, shape in layout.on(0).parameters}
        with pytest.raises(CheckpointError) as raised:
            load_adapters(path, layout, 0, parameters, lora)
        return str(raised.value)

    assert "but model.lora.rank is 8" in error(LORA.model_copy(update={"rank": 8}), folder / "qwen3_peft")
    assert "but model.lora.targets comes to" in error(LORA.model_copy(update={"targets": None}), folder / "qwen3_peft")
    (tmp_path / "adapter_config.json").write_text((folder / "qwen3_peft" / "adapter_config.json").read_text())
    tensors = load_file(folder / "qwen3_peft" / ADAPTERS)
    first = sorted(tensors)[0]
    save_file({name: tensor for name, tensor in tensors.items() if name != first}, tmp_path / ADAPTERS)
    assert f"such as {first} with shape None" in error(LORA, tmp_path)


@pytest.mark.parametrize("backend", ["megatron", "fsdp"])
def test_what_adapters_keep_for_backward_is_foretold(ranks: Ranks, base: Path, backend: str) -> None:
    """Compares the difference from full training. The plan for full training is exact.

    Transformers' model has no gradient before the first matrix with an adapter. The plan assumes one in the first
    layer.
    """

    def foretold(lora: dict[str, Any] | None) -> Activations:
        model, placement = {"path": "m", "dtype": "float32", "lora": lora}, {"actor": 0, "rollout, reward": 1}
        job = job_of(read_architecture(base), placement, 2, model=model, actor={"backend": backend})
        return Activations(job, "actor", 0)

    (kept,) = reports(ranks, "kept")
    whole, token_id = foretold(None), 8
    for name, lora in LEARNING.items():
        less = kept[f"{backend}/everything"] - kept[f"{backend}/{name}"]
        missing = whole.training(1) - foretold(lora).training(1) + token_id * (lora is not None) - less
        if backend == "megatron":
            assert missing == 0, name
        else:
            assert -foretold(lora).layer(sparse=False) < missing <= 0, name
    assert kept[f"{backend}/queries"] < min(kept[f"{backend}/all matrices"], kept[f"{backend}/everything"])
