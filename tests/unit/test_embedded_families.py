"""Tests of the embedded engine with experts, adapters, FP8 and recorded routing."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

from rltrain.checkpoint.hf_reader import load_parameters
from rltrain.checkpoint.peft_files import load_adapters
from rltrain.config.models import Lora
from rltrain.config.schema import Config
from rltrain.models import Architecture, canonical_tensors, read_architecture
from rltrain.models.lora import A, B
from rltrain.models.products import LIMIT, clamped_swiglu
from rltrain.models.routing_shape import NOT_RECORDED, RoutingShape
from rltrain.models.table import ElementType
from rltrain.reshard.copy_table import allocate_parameters, dequantize, quantize_blocks
from rltrain.reshard.execute import Resharding
from rltrain.reshard.fp8_blocks import SCALE_SUFFIX
from rltrain.reshard.fp8_scales import BlockScales, BlockTable
from rltrain.reshard.layout import Layout
from rltrain.reshard.megatron_layout import megatron_layout
from rltrain.reshard.plan import plan
from rltrain.rollout.embedded import EmbeddedEngine
from rltrain.rollout.embedded import parameters as embedded_parameters
from rltrain.rollout.embedded.model import route
from rltrain.rollout.embedded.parameters import adapted_matrices, quantized_matrices
from rltrain.rollout.engine import SamplingParams
from rltrain.rollout.layout import engine_layout, engine_parts, whole_engine
from rltrain.rollout.sample import Sample, SampleGroup, pack_groups
from rltrain.runtime.grid import Grid
from tests.distributed.cases_quantized import ARCHITECTURES, in_layer, model, quantised_shard
from tests.support.cuda_graphs import Recorder
from tests.support.family_checkpoints import OTHER_DENSE, QUICK_DENSE, QUICK_SPARSE, VARIANTS
from tests.support.marks import slow_but
from tests.support.model_shards import Place, engine_shard
from tests.support.rollout_models import (
    check,
    hf_logprobs,
    hf_model,
    load_engine,
    of_tokens,
    ragged_requests,
    requests_of_one_system,
    write_checkpoint,
)
from tests.support.schedule_configs import make_config
from tests.through_json import through_json
from tests.unit.conftest import SPARSE_FAMILIES

pytestmark = pytest.mark.usefixtures("small_blocks")


FAMILIES = ("phi3", "glm4", "gemma3", "qwen3_5", *SPARSE_FAMILIES)
LORA = Lora(rank=4, alpha=8)
GREEDY = SamplingParams(0.0, 1.0, 0, 12, ())
ONE, CPU = Grid((0,)), torch.device("cpu")


def random_adapters(path: Path, folder: Path) -> dict[str, torch.Tensor]:
    """Writes random adapters of all matrices to PEFT files in `folder` and returns them."""
    adapted = canonical_tensors(read_architecture(path).adapted(LORA.rank, None))
    generator = torch.Generator().manual_seed(1)
    tensors = {
        name: torch.randn(shape, generator=generator) * 0.1
        for name, shape in zip(adapted.names, adapted.shapes, strict=True)
    }
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    targets = {name.removesuffix(A).removesuffix(B).rpartition(".")[2] for name in tensors}
    config = {"peft_type": "LORA", "r": LORA.rank, "lora_alpha": LORA.alpha, "target_modules": sorted(targets)}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return tensors


def merged(path: Path, folder: Path, adapters: dict[str, torch.Tensor]) -> Path:
    """Writes a checkpoint to `folder` with the adapters merged into the weights of `path`."""
    shutil.copytree(path, folder)
    weights = load_file(folder / "model.safetensors")
    for name, a in adapters.items():
        if name.endswith(A):
            weight = name.removeprefix("base_model.model.").removesuffix(A) + ".weight"
            weights[weight] += LORA.scale * adapters[name.removesuffix(A) + B] @ a
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def resharding(source: Layout, destination: Layout, **more: object) -> Resharding:
    """Returns the resharding of a single rank."""
    planned = plan(source, destination, 0, 1)
    return Resharding(planned, group=None, cpu_group=None, bucket_bytes=2**16, device=CPU, **more)


def engine_on(architecture: Architecture, parameters: dict[str, torch.Tensor], **more: object) -> EmbeddedEngine:
    """Returns an engine on these parameters."""
    limits = {"max_running_requests": 64, "max_context_tokens": 64}
    return EmbeddedEngine(architecture, parameters, tp_group=None, **limits, **more)


def engine_with_adapters_apart(path: Path, folder: Path) -> EmbeddedEngine:
    """Returns an engine with separate adapters. They come from PEFT files through the training layout."""
    architecture = read_architecture(path)
    adapted = architecture.adapted(LORA.rank, None)
    layout, beside = (engine_layout(of, ONE) for of in (architecture, adapted))
    source = megatron_layout(adapted, ONE)
    weights, trained, adapters = (allocate_parameters(of, 0) for of in (layout, source, beside))
    load_parameters(path, layout, 0, weights)
    load_adapters(folder, source, 0, trained, LORA)
    resharding(source, beside).run(trained, adapters)
    matrices = adapted_matrices(beside, 0, weights | adapters, {}, LORA.scale)
    return engine_on(architecture, weights | adapters, dtype=torch.float32, matrices=matrices)


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
    assert plain != [done.tokens for done in expected.generate(samples, GREEDY)], "the adapters change the tokens"


SPARSE_NAMES, DENSE = [*SPARSE_FAMILIES], [*OTHER_DENSE]
EVERY = slow_but([*SPARSE_NAMES, *DENSE, *VARIANTS], *QUICK_DENSE, *QUICK_SPARSE)
TOLERANCE = 1e-4


@pytest.mark.parametrize("family", EVERY)
def test_greedy_equals_transformers_and_so_do_conversations(checkpoints: dict[str, Path], family: str) -> None:
    """Covers slots, blocks, so few blocks that samples are preempted, second turns that reuse the cache, and prompts
    that begin alike."""
    model, samples = hf_model(checkpoints[family]), ragged_requests(7)
    alike = requests_of_one_system(4)
    expected: dict[tuple[int, ...], tuple[torch.Tensor, torch.Tensor]] = {}  # the same sequences with any budget
    for kv_tokens in (None, 52, 4000):
        engine, _ = load_engine(checkpoints[family], max_context_tokens=48, kv_tokens=kv_tokens)
        found = engine.generate(samples, GREEDY)
        assert [len(done.tokens) for done in found] == [12] * len(samples)
        assert (engine.cache_metrics().get("rollout/preemptions", 0) > 0) == (kv_tokens == 52)
        turns = [Sample(s.id, s.prompt, s.seed, turn_limit=4, goes_on=True) for s in samples]
        turns = [done.observed((7, 9, 11), turn_limit=12) for done in engine.generate(turns, GREEDY)]
        found += engine.generate(turns, GREEDY)
        assert engine.cache_metrics()["rollout/kv_reused_tokens"] > 0 or kv_tokens == 52
        found += engine.generate(alike, GREEDY)
        has_prefixes = kv_tokens == 4000 and read_architecture(checkpoints[family]).delta is None
        assert (engine.cache_metrics()["rollout/context_prefix_tokens"] > 0) == has_prefixes or kv_tokens == 52
        for done in found:
            drawn, sequence = torch.tensor(done.loss_mask), (*done.prompt, *done.tokens)
            if sequence not in expected:
                every = hf_logprobs(model, done)
                expected[sequence] = of_tokens(every, done), every.amax(-1)
            logprobs, likeliest = expected[sequence]
            assert (likeliest - logprobs)[drawn].max() <= 1e-6, "capped logits may be equal"
            torch.testing.assert_close(torch.tensor(done.logprobs)[drawn], logprobs[drawn], atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("family", SPARSE_NAMES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tokens_visit_the_experts_of_transformers(
    checkpoints: dict[str, Path], family: str, dtype: torch.dtype
) -> None:
    """The router computes scores in float32 from weights of any dtype. In bfloat16, transformers rounds some of them
    first."""
    model, architecture = hf_model(checkpoints[family]).to(dtype), read_architecture(checkpoints[family])
    moe = architecture.moe
    layer = model.model.layers[architecture.sparse_layers.index(True)]
    gate = layer.mlp.router if family == "gpt_oss" else layer.mlp.gate
    hidden = torch.randn(200, architecture.hidden_size, dtype=dtype)
    exact, of_block = gate.float(), getattr(layer.mlp, "e_score_correction_bias", None)
    _, weights, experts = exact(hidden.float(), *([] if of_block is None else [of_block]))
    bias = getattr(gate, "e_score_correction_bias", of_block)
    found = route(hidden, gate.weight.to(dtype), bias, moe, logit_bias=getattr(gate, "bias", None))
    experts, order = experts.sort(-1)
    found_experts, found_order = found.experts.sort(-1)
    assert torch.equal(found_experts, experts)
    torch.testing.assert_close(found.weights.gather(-1, found_order), weights.gather(-1, order).float())
    assert found.weights.dtype == torch.float32


@pytest.mark.parametrize("family", SPARSE_NAMES + DENSE)
def test_a_sync_from_the_trainer_s_layout_gives_the_bits_of_the_checkpoint(
    checkpoints: dict[str, Path], family: str
) -> None:
    path = checkpoints[family]
    architecture = read_architecture(path)
    source, destination = megatron_layout(architecture, ONE), engine_layout(architecture, ONE)
    trained, served = allocate_parameters(source, 0), allocate_parameters(destination, 0)
    load_parameters(path, source, 0, trained)
    resharding(source, destination).run(trained, served)
    _, expected = load_engine(path)
    assert served.keys() == expected.keys()
    for name, tensor in expected.items():
        assert tensor.dtype == served[name].dtype and torch.equal(tensor, served[name]), name


def test_the_clamped_activation_is_that_of_transformers() -> None:
    """Covers clamped values, since small models hardly ever produce them."""
    config = transformers.GptOssConfig(hidden_size=4, intermediate_size=6, num_local_experts=2)
    experts = GptOssExperts(config)
    gate_up = 10 * torch.randn(200, 12)
    assert (gate_up.abs() > LIMIT).float().mean() > 0.3
    torch.testing.assert_close(clamped_swiglu(gate_up), experts._apply_gate(gate_up))


def config(engine: str = "embedded", *, dtype: str = "fp8", model_dtype: str = "float32", **sglang: float) -> Config:
    rollout = {"engine": engine, "dtype": dtype, "sglang": sglang}
    return make_config(model={"path": "m", "dtype": model_dtype}, rollout=rollout)


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_products_read_whole_matrices_quantised_and_cut(name: str, tp: int) -> None:
    architecture = ARCHITECTURES[name]
    full = model(architecture, torch.float32)
    rounded = full | {
        tensor: dequantize(*quantize_blocks(torch.tensor(values))).numpy()
        for tensor, values in full.items()
        if in_layer(tensor)
    }
    layout = whole_engine(config(), architecture, Grid(tuple(range(tp)), tp=tp)).layout
    for rank in range(tp):
        parameters = allocate_parameters(layout, rank)
        held = quantised_shard(architecture, full, Place(tp, rank))
        for parameter, values in held.items():
            assert parameters[parameter].dtype == values.dtype
            parameters[parameter].view(-1).copy_(values.reshape(-1))
        matrices = quantized_matrices(layout, rank, parameters, torch.float32)
        assert matrices.keys() == {parameter for parameter in held if not parameter.endswith(SCALE_SUFFIX)}
        expected = engine_shard(architecture, rounded, Place(tp, rank))
        for parameter, matrix in matrices.items():
            np.testing.assert_array_equal(matrix.read().numpy(), expected[parameter], err_msg=parameter)


@pytest.mark.parametrize(
    ("family", "dtype"),
    [
        *((family, torch.float32) for family in ("qwen3", "qwen3_moe", "moonlight", "phi3")),
        *((family, torch.bfloat16) for family in ("qwen3", "deepseek_v3", "gemma3", "qwen3_5")),
    ],
)
def test_it_draws_what_an_engine_on_the_rounded_weights_draws(tmp_path: Path, family: str, dtype: torch.dtype) -> None:
    sampling = SamplingParams(1.0, 1.0, 0, 8, (3,))
    checkpoint = write_checkpoint(tmp_path, family, hidden_size=160, intermediate_size=200)
    plain, weights = load_engine(checkpoint, dtype=dtype)
    drawn_before = plain.generate(ragged_requests(), sampling)
    quantised, matrices = quantised_engine(read_architecture(checkpoint), weights, dtype)
    for name, matrix in matrices.items():
        weights[name].copy_(matrix.read())
    drawn, expected = (engine.generate(ragged_requests(), sampling) for engine in (quantised, plain))
    assert drawn == expected
    assert [sample.logprobs for sample in drawn] != [sample.logprobs for sample in drawn_before]


def quantised_engine(architecture: Architecture, weights: dict[str, torch.Tensor], dtype: torch.dtype) -> tuple:
    """Returns an engine filled from `weights` by a sync, and its matrices."""
    part = whole_engine(config(model_dtype=str(dtype).removeprefix("torch.")), architecture, Grid((0,)))
    layouts = part.filled_from(part.plain)
    parameters = allocate_parameters(part.layout, 0)
    matrices = quantized_matrices(part.layout, 0, parameters, dtype)
    magnitudes = BlockScales(BlockTable(layouts, 0), CPU)
    resharding(layouts.source, layouts.destination, magnitudes=magnitudes).run(weights, parameters)
    return engine_on(architecture, parameters, dtype=dtype, matrices=matrices), matrices


@pytest.mark.parametrize("tp", [1, 2])
def test_each_part_of_a_server_s_weights_measures_its_own_blocks(tp: int) -> None:
    architecture, grid = ARCHITECTURES["experts"], Grid(tuple(range(tp)), tp=tp)
    source = megatron_layout(architecture, Grid((0,)))
    whole = whole_engine(config("sglang"), architecture, grid)
    parts = engine_parts(config("sglang", staging_mb=0.1), architecture, grid)
    assert len(parts) > 3
    tables = [BlockTable(part.filled_from(source), 0) for part in parts]
    assert sum(table.num_entries for table in tables) == BlockTable(whole.filled_from(source), 0).num_entries
    for rank in grid.ranks:
        expected = dict(whole.layout.on(rank).parameters)
        found = [parameter for part in parts for parameter in part.layout.on(rank).parameters]
        assert sorted(found) == sorted(expected.items())


def test_without_fp8_nothing_is_quantised() -> None:
    part = whole_engine(config(dtype="auto"), ARCHITECTURES["qwen2"], Grid((0,)))
    assert not part.quantized.any()
    assert part.layout.on(0).parameters == part.plain.on(0).parameters
    assert ElementType.FLOAT8_E4M3 not in part.layout.types


SAMPLED = SamplingParams(1.0, 1.0, 0, 12, (3,))


def whole(engine: EmbeddedEngine, samples: list[Sample]) -> list[Sample]:
    return engine.generate(samples, SAMPLED)


def suspended(engine: EmbeddedEngine, samples: list[Sample]) -> list[Sample]:
    """Suspends the samples, after withdrawing one, and submits them again. Checks their progress in between."""
    engine.submit(samples, SAMPLED)
    done = [sample for _ in range(4) for sample in engine.step()]
    running = engine.progress([sample.id for sample in samples])
    assert all(len(sample.routing) == len(sample.context) - 1 for sample in running if sample.routing is not None)
    back = engine.withdraw([samples[-1].id]) + engine.suspend()
    return sorted(done + engine.generate(back, SAMPLED), key=lambda sample: sample.id)


def in_turns(engine: EmbeddedEngine, samples: list[Sample]) -> list[Sample]:
    turns = engine.generate([replace(sample, turn_limit=4, goes_on=True) for sample in samples], SAMPLED)
    return engine.generate([done.observed((7, 9, 11), turn_limit=12) for done in turns], SAMPLED)


@pytest.mark.parametrize("way", [whole, suspended, in_turns])
@pytest.mark.parametrize(("family", "kv_tokens"), [("qwen3_moe", None), ("mixtral", 60), ("deepseek_v3", 4000)])
def test_every_fed_token_has_that_of_transformers(
    checkpoints: dict[str, Path],
    family: str,
    kv_tokens: int | None,
    way: Callable[[EmbeddedEngine, list[Sample]], list[Sample]],
) -> None:
    """Samples of a shared prompt compute it once. Samples without room are computed again."""
    path = checkpoints[family]
    engine, _ = load_engine(path, kv_tokens=kv_tokens, max_context_tokens=48, record_routing=True)
    prompts = ragged_requests(7)[::2]
    samples = [replace(prompts[n // 2], id=n, seed=n) for n in range(2 * len(prompts))]
    done = way(engine, samples)
    assert kv_tokens != 60 or way is in_turns or engine.cache_metrics()["rollout/preemptions"] > 0
    without, _ = load_engine(path, kv_tokens=kv_tokens, max_context_tokens=48)
    assert [sample.tokens for sample in way(without, samples)] == [sample.tokens for sample in done]
    for sample in done:
        check(path, sample)
    shape = RoutingShape.of(read_architecture(path))
    packed = pack_groups([SampleGroup(0, 0, tuple(done))], [0], shape)
    of_samples = shape.unpacked(packed.routed_experts).split(packed.lengths.tolist())
    for sample, experts in zip(done, of_samples, strict=True):
        assert sample.routing is not None and np.array_equal(experts[:-1], sample.routing.experts)
        assert (experts[-1] == NOT_RECORDED).all()


@pytest.mark.parametrize("kv_tokens", [None, 4000])
def test_recorded_steps_keep_it_too(
    checkpoints: dict[str, Path], monkeypatch: pytest.MonkeyPatch, kv_tokens: int | None
) -> None:
    """Steps are recordable if all experts are multiplied without host synchronisation. CPUs can do this too."""
    monkeypatch.setattr(embedded_parameters, "is_grouped_on_device", lambda matrices, dtype: True)
    record = Recorder()
    engine, _ = load_engine(checkpoints["deepseek_v3"], kv_tokens=kv_tokens, record_routing=True, record=record)
    for sample in engine.generate(ragged_requests(4), SAMPLED):
        check(checkpoints["deepseek_v3"], sample)
    assert record.num_replayed > 0


def test_what_was_recorded_stays_when_it_is_computed_anew_under_other_weights(
    checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    path, other = checkpoints["qwen3_moe"], write_checkpoint(tmp_path, "qwen3_moe", seed=1)
    engine, parameters = load_engine(path, record_routing=True)
    engine.submit(ragged_requests(3), SamplingParams(1.0, 1.0, 0, 12, ()))
    for _ in range(5):
        engine.step()
    before = engine.suspend()
    for sample in before:
        check(path, sample)
    load_parameters(other, engine_layout(read_architecture(other), Grid((0,))), 0, parameters)
    after = engine.generate(before, SamplingParams(1.0, 1.0, 0, 12, ()))
    for sample, earlier in zip(after, before, strict=True):
        assert sample.routing.first(len(earlier.routing)) == earlier.routing
        check(other, sample, first=len(earlier.routing))


def test_it_crosses_json_and_is_cut_with_its_sample(checkpoints: dict[str, Path]) -> None:
    engine, _ = load_engine(checkpoints["mixtral"], record_routing=True)
    (sample,) = engine.generate(ragged_requests(1), SAMPLED)
    assert through_json(sample) == sample
    routing = sample.first(2).routing
    assert sample.routing is not None and routing == sample.routing.first(len(sample.prompt) + 2)
    assert routing != sample.routing
    assert replace(sample, routing=None) == through_json(replace(sample, routing=None))


def test_a_model_without_experts_has_nothing_to_record(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="the model has no experts"):
        load_engine(write_checkpoint(tmp_path, "qwen3"), record_routing=True)
