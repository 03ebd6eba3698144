"""Models by their config: rotations, windows, FLOPs, weights in the form of engines."""

import json
import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.numpy import save_file
from torch.utils.flop_counter import FlopCounterMode

from rltrain.checkpoint.hf_reader import load_parameters, load_quantized
from rltrain.config.schema import Config
from rltrain.endpoint.served_engine import longest_context
from rltrain.errors import CheckpointError, ConfigError
from rltrain.models import DynamicScaling, YarnScaling, read_architecture
from rltrain.models.attention import inverse_frequencies
from rltrain.models.experts import is_expert
from rltrain.models.flops import forward_flops, latent_reading_flops, positions_read
from rltrain.models.products import int4_rounded
from rltrain.reshard.copy_table import allocate_parameters
from rltrain.rollout.build import serve_checkpoint
from rltrain.rollout.layout import engine_of, engine_parts, whole_engine
from rltrain.runtime.grid import Grid
from tests.distributed.cases_quantized import ARCHITECTURES, model, quantised_shard
from tests.support.family_checkpoints import tiny_config
from tests.support.marks import slow_but
from tests.support.model_shards import PADDING, Place, engine_shard, tiny_architecture
from tests.support.schedule_configs import make_config
from tests.support.tiny_checkpoints import LLAMA3_ROPE, SHAPE
from tools.benchmarks.model_shapes import deepseek_v3, qwen3_8b

FAMILIES = (
    "llama", "qwen2", "qwen3", "qwen2_moe", "qwen3_moe", "mixtral", "deepseek_v3", "moonlight", "glm4_moe_lite", "glm4",
    "nemotron", "minimax_m2", "qwen3_next", "gpt_oss",
)  # fmt: skip
"""Some of these families have latent attention, rotated neighbours, or a partial rotation of heads."""
YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64}
WHOLE_YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
MSCALES = {"mscale": 1.0, "mscale_all_dim": 0.5}
SCALINGS: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 3.0},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
    "llama3": LLAMA3_ROPE,
    "yarn": YARN,
    "yarn of all positions": {"rope_type": "yarn", "factor": 4.0},
    "yarn by mscales": {**YARN, **MSCALES, "beta_fast": 16, "beta_slow": 2, "truncate": False},
    "yarn by mscale_all_dim alone": {**YARN, "mscale_all_dim": 0.5},
    "yarn by its attention_factor": {**YARN, **MSCALES, "attention_factor": 1.7},
    "yarn that turns nothing fast": {**YARN, "original_max_position_embeddings": 2, "rope_theta": 1e6},
    "yarn that stretches nothing": {**YARN, "factor": 1.0, "original_max_position_embeddings": 10**6},
}


def write_config(folder: Path, rope: dict[str, Any], **changes: Any) -> Path:
    """Writes a config.json in the form of transformers 4, for a model with heads of 8 elements."""
    sizes = {**SHAPE, "hidden_size": 32, "head_dim": 8, "model_type": "qwen2", "rms_norm_eps": 1e-6}
    values = {**sizes, "rope_theta": 1e4, "rope_scaling": rope, **changes}
    (folder / "config.json").write_text(json.dumps(values))
    return folder


def of_transformers(config: Any) -> tuple[torch.Tensor, float, float]:
    """Returns transformers' inverse frequencies, its factor of rotated elements, and its factor of scores."""
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    rotary = type(model.model.rotary_emb)(config)
    scores = next(module.scaling for module in model.modules() if hasattr(module, "scaling"))
    return rotary.inv_freq, rotary.attention_scaling, scores


@pytest.mark.parametrize("family", slow_but(FAMILIES, "llama", "deepseek_v3", "nemotron"))
def test_frequencies_and_magnitudes_are_those_of_transformers(family: str, tmp_path: Path) -> None:
    widths = {"head_dim": 24} if family == "mixtral" else {}  # transformers scales only this width of mixtral
    for name, scaling in SCALINGS.items():
        rope = {"rope_theta": 1000.0, **scaling}
        config = tiny_config(family, SHAPE, rope_parameters=rope, num_hidden_layers=4, **widths)
        config.save_pretrained(tmp_path)
        architecture = read_architecture(tmp_path)
        frequencies, magnitude, scores = of_transformers(config)
        torch.testing.assert_close(inverse_frequencies(architecture), frequencies, rtol=1e-6, atol=0, msg=name)
        assert architecture.rotation_magnitude == pytest.approx(magnitude, rel=1e-12), name
        assert architecture.score_scale == pytest.approx(scores, rel=1e-12), name


@pytest.mark.parametrize("type_key", ["rope_type", "type"])
def test_both_places_and_both_names_of_the_kind_are_read(type_key: str, tmp_path: Path) -> None:
    rope = {type_key: "yarn", "factor": 4, "original_max_position_embeddings": 64}
    old = read_architecture(write_config(tmp_path, rope))
    new = read_architecture(write_config(tmp_path, {}, rope_theta=None, rope_parameters={**rope, "rope_theta": 1e4}))
    assert old == new
    assert old.rope_scaling == YarnScaling(4.0, 32.0, 1.0, 0.0, 0.0, 64)
    both = write_config(tmp_path, {**rope, "rope_theta": 1e4}, rope_parameters={**rope, "rope_theta": 1e4})
    assert read_architecture(both) == new


@pytest.mark.parametrize(
    ("rope", "expected"),
    [
        ({"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}, 1024),
        ({"type": "yarn", "factor": 4.0}, 1024),
        ({"type": "yarn", "factor": 1.5, "original_max_position_embeddings": 64}, 256),
        ({"type": "linear", "factor": 4.0}, 256),
        ({"type": "dynamic", "factor": 4.0}, 256),
    ],
)
def test_positions_are_those_that_a_scaling_serves(rope: dict[str, Any], expected: int, tmp_path: Path) -> None:
    assert read_architecture(write_config(tmp_path, rope)).max_positions == expected


def test_served_contexts_have_these_positions(tmp_path: Path) -> None:
    assert longest_context(write_config(tmp_path, WHOLE_YARN), 256) == 256
    assert longest_context(write_config(tmp_path, {**WHOLE_YARN, "factor": 400.0}), 25_600) == 25_600
    dynamic = write_config(tmp_path, {"type": "dynamic", "factor": 4.0})
    assert longest_context(dynamic, None) == 256
    with pytest.raises(ConfigError, match=r"--max-context-tokens: got 257, .* has 256 positions .*dynamic RoPE"):
        longest_context(dynamic, 257)


def test_dynamic_scaling_changes_no_frequency_of_those_positions(tmp_path: Path) -> None:
    scaled = read_architecture(write_config(tmp_path, {"type": "dynamic", "factor": 4.0}))
    plain = read_architecture(write_config(tmp_path, {}))
    assert scaled.rope_scaling == DynamicScaling(4.0)
    assert torch.equal(inverse_frequencies(scaled), inverse_frequencies(plain))


WHOLE_LLAMA3 = {key: value for key, value in LLAMA3_ROPE.items() if key != "rope_theta"}


@pytest.mark.parametrize(
    ("rope", "key"),
    [
        *(({"type": kind, "factor": factor}, "factor")
          for kind in ("linear", "dynamic", "yarn")
          for factor in (0, 0.0, -2.0, 0.5, math.nan, math.inf, 10**400, "4", True, None)),
        *(({"type": kind}, "factor") for kind in ("linear", "dynamic", "yarn", "llama3")),
        *(({"type": kind, "factor": 2.0}, "type") for kind in ("ntk", "longrope", "su", "", None, 3, [1])),
        *(({**WHOLE_YARN, key: value}, key)
          for key in ("beta_fast", "beta_slow", "attention_factor")
          for value in (0, -1.0, math.nan, "1", False)),
        *(({**WHOLE_YARN, key: value}, key)
          for key in ("mscale", "mscale_all_dim") for value in (-1.0, math.nan, "1")),
        ({**WHOLE_YARN, "beta_fast": 0.5}, "beta_fast"),
        ({**WHOLE_YARN, "truncate": 1}, "truncate"),
        *(({**WHOLE_YARN, "original_max_position_embeddings": value}, "original_max_position_embeddings")
          for value in (0, -4, 64.5, math.nan, "64")),
        *(({**WHOLE_YARN, "rope_theta": value}, "rope_theta") for value in (0, 1, -1e4, math.nan, "1e4")),
        ({**WHOLE_LLAMA3, "high_freq_factor": 1.0}, "high_freq_factor"),
        ({**WHOLE_LLAMA3, "low_freq_factor": -1.0}, "low_freq_factor"),
        ({"type": "linear", "factor": 2.0, "mscale_all_dim": 1.0}, "mscale_all_dim"),
    ],
    ids=str,
)  # fmt: skip
def test_a_value_that_no_frequency_follows_from_is_refused_by_its_key(
    rope: dict[str, Any], key: str, tmp_path: Path
) -> None:
    key = "rope_type" if key == "type" and "rope_type" in rope else key
    with pytest.raises(CheckpointError) as refusal:
        read_architecture(write_config(tmp_path, rope))
    assert f"rope_scaling.{key} is " in str(refusal.value) and "expected" in str(refusal.value)


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({"rope_scaling": [1]}, ["rope_scaling is [1]", "an object or null"]),
        ({"rope_theta": math.nan}, ["rope_theta is NaN", "a finite number"]),
        (
            {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
            ["rope_scaling", "null if rope_parameters is set", "move the scaling there"],
        ),
        (
            {"original_max_position_embeddings": 32},
            ["rope_scaling.original_max_position_embeddings is 64", "expected 32"],
        ),
        ({"model_type": "phi3", "rope_scaling": {"type": "linear"}}, ['"linear"', '"default" or "longrope"']),
    ],
)
def test_contradictions_are_refused(changes: dict[str, Any], parts: list[str], tmp_path: Path) -> None:
    with pytest.raises(CheckpointError) as refusal:
        read_architecture(write_config(tmp_path, WHOLE_YARN, **changes))
    for part in parts:
        assert part in str(refusal.value)


LENGTH = 24
COUNTED = ("qwen3", "qwen3_moe", "deepseek_v3", "moonlight", "qwen2_moe", "glm4_moe", "phi3")


def counted_flops(model, *, backward):
    """Counts with torch. It counts all products of attention, masked or not."""
    tokens = torch.randint(model.config.vocab_size, (1, LENGTH))
    with FlopCounterMode(display=False) as counter:
        loss = model(tokens).logits.sum()
        if backward:
            loss.backward()
    return counter.get_total_flops()


@pytest.mark.parametrize("name", COUNTED)
def test_equal_to_torchs_count(name, tmp_path):
    config = tiny_config(name, SHAPE)
    config._attn_implementation = "eager"
    config._experts_implementation = "eager"
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    config.save_pretrained(tmp_path)
    flops = forward_flops(read_architecture(tmp_path))
    expected = LENGTH * flops.of_token(LENGTH)
    assert counted_flops(model, backward=False) == pytest.approx(expected, rel=0.005), "all but rotary frequencies"
    assert counted_flops(model, backward=True) == pytest.approx(3 * expected, rel=0.005)


def test_a_causal_token_reads_the_positions_up_to_itself():
    assert positions_read([4, 1]) == (1 + 2 + 3 + 4) + 1
    flops = forward_flops(tiny_architecture())
    assert flops.forward([4, 1]) == sum(flops.of_token(context) for context in (1, 2, 3, 4, 1))


def test_in_a_window_a_token_reads_no_more_than_that():
    assert positions_read([4, 1, 2], 2) == (1 + 2 + 2 + 2) + 1 + (1 + 2)
    architecture = tiny_architecture("gemma3_text", num_layers=4)
    flops, whole = forward_flops(architecture), forward_flops(replace(architecture, windows=None))
    per_layer = whole.attention // 4
    assert (flops.attention, flops.sliding, flops.window) == (per_layer, 3 * per_layer, 3)
    assert flops.forward([4, 1]) == sum(flops.of_token(context) for context in (1, 2, 3, 4, 1))
    assert whole.of_token(4) - flops.of_token(4) == 3 * per_layer


def test_recomputation_repeats_what_it_says():
    flops = forward_flops(tiny_architecture())
    lengths = [5, 9]
    training = flops.training(lengths)
    assert training == 3 * flops.forward(lengths)
    assert flops.training(lengths, recompute="core_attn") - training == positions_read(lengths) * flops.attention
    assert flops.training(lengths, recompute="full") - training == flops.forward(lengths) - sum(lengths) * flops.head


def test_a_value_head_has_one_row():
    architecture = tiny_architecture()
    assert forward_flops(architecture.value_model()).head == 2 * architecture.hidden_size
    assert forward_flops(architecture).head == 2 * architecture.hidden_size * architecture.vocab_size
    assert forward_flops(replace(architecture, tied_embeddings=True)).head == forward_flops(architecture).head


def test_latents_are_attended_to_by_queries_as_wide_as_they_are():
    """Each of 128 heads has a score over 512 + 64 elements and a weighted latent of 512."""
    assert latent_reading_flops(deepseek_v3()) == 2 * 128 * (576 + 512)
    assert latent_reading_flops(qwen3_8b()) == 0


CONFIGS = {"qwen2": "Qwen2", "qwen3": "Qwen3", "qwen2_moe": "Qwen2Moe", "qwen3_moe": "Qwen3Moe"}
LAYERS = 4
SIZES = {"num_hidden_layers": LAYERS} | json.loads("""{"vocab_size": 50, "hidden_size": 32, "intermediate_size": 24,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128, "rms_norm_eps": 1e-06,
    "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16}""")
SLIDING, FULL = "sliding_attention", "full_attention"
ON = {"use_sliding_window": True}
WAYS: list[dict[str, Any]] = [
    {},
    {"use_sliding_window": False, "sliding_window": 7, "max_window_layers": 0},
    {**ON, "sliding_window": 7},
    {**ON, "sliding_window": 7, "max_window_layers": 0},
    {**ON, "sliding_window": 7, "max_window_layers": 2},
    {**ON, "sliding_window": 7, "max_window_layers": LAYERS},
    {**ON, "max_window_layers": 1},
    {**ON, "sliding_window": 7, "layer_types": [FULL, SLIDING, SLIDING, FULL]},
    {**ON, "sliding_window": 7, "layer_types": [FULL] * LAYERS},
    {"layer_types": [FULL] * LAYERS},
]


def write(folder: Path, family: str, **changes: Any) -> Path:
    (folder / "config.json").write_text(json.dumps({"model_type": family, **SIZES, **changes}))
    return folder


def windows_of(path: Path) -> list[int | None]:
    architecture = read_architecture(path)
    return [architecture.window_of(layer) for layer in range(LAYERS)]


UNREAD = [way for way in WAYS if "sliding_window" in way and "layer_types" in way]
"""For these, transformers reads layer_types in all families but qwen3_moe."""


@pytest.mark.parametrize(
    ("family", "way"),
    [(family, way) for family in CONFIGS for way in WAYS if family != "qwen3_moe" or way not in UNREAD],
    ids=str,
)
def test_windows_are_those_of_transformers(family: str, way: dict[str, Any], tmp_path: Path) -> None:
    config = getattr(transformers, f"{CONFIGS[family]}Config")(**SIZES, **way)
    kinds = getattr(config, "layer_types", [SLIDING if config.sliding_window else FULL] * LAYERS)
    size = config.sliding_window if (config.sliding_window or 999) < SIZES["max_position_embeddings"] else None
    expected = [size if kind == SLIDING else None for kind in kinds]
    assert windows_of(write(tmp_path, family, **way)) == expected
    config.save_pretrained(tmp_path)
    assert windows_of(tmp_path) == expected


@pytest.mark.parametrize(
    ("family", "changes", "parts"),
    [
        ("qwen2", {"layer_types": [SLIDING] * LAYERS}, ["layer_types", "unless use_sliding_window is true"]),
        ("qwen2", {**ON, "sliding_window": 7, "layer_types": [SLIDING]}, ["layer_types", "each of 4 layers"]),
        ("qwen2", {**ON, "sliding_window": 7, "layer_types": [[], 1, None, 2]}, ["layer_types", "each of 4 layers"]),
        ("qwen3", {**ON, "sliding_window": None}, ["sliding_window is null", "use_sliding_window is true"]),
        ("qwen3", {**ON, "sliding_window": 0}, ["sliding_window is 0", "at least 1"]),
        ("qwen3", {**ON, "sliding_window": "wide"}, ["sliding_window", "an integer"]),
        ("qwen3", {"use_sliding_window": "yes"}, ["use_sliding_window", "true or false"]),
        ("qwen2_moe", {**ON, "max_window_layers": 1.5}, ["max_window_layers", "an integer"]),
        ("qwen3_moe", {**ON, "sliding_window": 7, "layer_types": [FULL] * LAYERS}, ["layer_types", "every layer"]),
        ("llama", ON, ["use_sliding_window", "llama"]),
    ],
)
def test_what_says_nothing_of_windows_is_refused_by_its_key(
    family: str, changes: dict[str, Any], parts: list[str], tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError) as refusal:
        read_architecture(write(tmp_path, family, **changes))
    for part in parts:
        assert part in str(refusal.value)


CHECKPOINT = Path(__file__).resolve().parents[1] / "warmed_up"
CPU = torch.device("cpu")
GRID = Grid((0,))


def config(role: str, **engine: Any) -> Config:
    """Returns a config with a rollout and a judge. Only the model of `role` exists."""
    settings = {**engine, "sglang": {"staging_mb": 0.1}}
    judge = {"path": str(CHECKPOINT)} if role == "judge" else {}
    path = "nowhere" if role == "judge" else str(CHECKPOINT)
    return make_config(model={"path": path, "dtype": "float32"}, **{"judge": judge, role: {**judge, **settings}})


def served(of: Config, role: str) -> tuple[list[str], dict[str, torch.Tensor]]:
    """Returns the calls to an engine, and the received parameters."""
    architecture = read_architecture(CHECKPOINT)
    parts = engine_parts(of, architecture, GRID, role)
    received = [allocate_parameters(part.layout, 0, device=CPU) for part in parts]
    told: list[str] = []
    engine = SimpleNamespace(
        begin_update=lambda: told.append("begin"),
        incoming=received.__getitem__,
        arrived=lambda part: told.append(f"part {part}"),
        end_update=lambda version: told.append(f"version {version}"),
    )
    site = SimpleNamespace(config=of, role=role, architecture=architecture, grid=GRID, world=SimpleNamespace(rank=0))
    serve_checkpoint(engine, site, version=3)  # type: ignore[arg-type]
    assert told == ["begin", *(f"part {number}" for number in range(len(parts))), "version 3"]
    return told, {name: tensor for part in received for name, tensor in part.items()}


@pytest.mark.parametrize("role", ["rollout", "judge"])
@pytest.mark.parametrize("engine", ["embedded", "sglang"])
def test_an_engine_gets_its_role_s_checkpoint_part_by_part(engine: str, role: str) -> None:
    """SGLang receives its weights through slots with room for one or two parameters."""
    of = config(role, engine=engine)
    told, found = served(of, role)
    assert len(told) == 3 if engine == "embedded" else len(told) > 5
    whole = whole_engine(of, read_architecture(CHECKPOINT), GRID, role).layout
    expected = allocate_parameters(whole, 0, device=CPU)
    load_parameters(CHECKPOINT, whole, 0, expected)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) and found[name].any() for name in expected)


@pytest.mark.parametrize("role", ["rollout", "judge"])
def test_in_fp8_the_parts_are_those_of_the_whole(role: str) -> None:
    _, whole = served(config(role, dtype="fp8"), role)
    _, found = served(config(role, dtype="fp8", engine="sglang"), role)
    assert found.keys() == whole.keys() and any(tensor.dtype == torch.float8_e4m3fn for tensor in whole.values())
    assert all(torch.equal(as_bytes(found[name]), as_bytes(whole[name])) for name in whole)


@pytest.mark.parametrize(("role", "rounds"), [("rollout", True), ("judge", False)])
def test_experts_are_rounded_as_the_trainer_has_them(role: str, rounds: bool, tmp_path: Path) -> None:
    """Engines of the policy have rounded experts, for any distribution of rows. A judge is another model."""
    architecture, grid = ARCHITECTURES["experts"], Grid((0, 1), tp=2)
    full = {name: np.nan_to_num(one, posinf=1, neginf=1) for name, one in model(architecture, torch.float32).items()}
    save_file({name: np.ascontiguousarray(one) for name, one in full.items()}, tmp_path / "model.safetensors")
    fake = {"fake_quantization": {"group_size": 4}}
    paths = {"judge": {"path": str(tmp_path)}} if role == "judge" else {}
    of = make_config(model={"path": str(tmp_path), "dtype": "float32", **fake}, **paths)
    wanted = {name: int4_rounded(torch.from_numpy(one), 4, 7.0).numpy() for name, one in full.items()}
    wanted = {name: wanted[name] if rounds and is_expert(name) else one for name, one in full.items()}
    assert rounds == any(not np.array_equal(wanted[name], one) for name, one in full.items())
    for rank in grid.ranks:
        (part,) = engine_parts(of, architecture, grid, role)
        received = allocate_parameters(part.layout, rank, device=CPU)
        engine = SimpleNamespace(
            begin_update=lambda: None,
            incoming=lambda number, received=received: received,
            arrived=lambda number: None,
            end_update=lambda version: None,
        )
        world = SimpleNamespace(rank=rank)
        site = SimpleNamespace(config=of, role=role, architecture=architecture, grid=grid, world=world)
        serve_checkpoint(engine, site, version=1)  # type: ignore[arg-type]
        shard = engine_shard(architecture, wanted, Place(2, rank))
        for name, values in ((name, values) for name, values in shard.items() if ".layers." in name):  # without padding
            assert torch.equal(received[name], torch.from_numpy(values).view(received[name].shape)), name


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_blocks_are_quantised_whole_whatever_a_rank_has_of_them(name: str, tp: int, tmp_path: Path) -> None:
    architecture, grid = ARCHITECTURES[name], Grid(tuple(range(tp)), tp=tp)
    full = model(architecture, torch.bfloat16)
    save_file({tensor: np.ascontiguousarray(values) for tensor, values in full.items()}, tmp_path / "model.safetensors")
    part = engine_of(architecture, grid, dtype="bfloat16", fp8=True)
    layouts = part.filled_from(part.plain)
    for rank in range(tp):
        found = allocate_parameters(part.layout, rank)
        for tensor in found.values():
            tensor.view(torch.uint8).fill_(7)
        load_quantized(tmp_path, part.plain, layouts, rank, found, dtype=torch.bfloat16)
        for parameter, values in quantised_shard(architecture, full, Place(tp, rank)).items():
            mine, wanted = found[parameter], values.reshape(found[parameter].shape)
            assert mine.dtype == wanted.dtype == torch.float8_e4m3fn or parameter.endswith("_scale_inv"), parameter
            assert torch.equal(as_bytes(mine), as_bytes(wanted)), parameter
        embedding = found["model.embed_tokens.weight"]
        own = full["model.embed_tokens.weight"].shape[0] - rank * len(embedding)
        assert not embedding[max(own, 0) :].any() and embedding[:own].float().abs().nan_to_num().sum() != abs(PADDING)


def test_a_tensor_that_is_not_there_is_named_with_its_key(tmp_path: Path) -> None:
    save_file({"model.norm.weight": np.zeros(192, dtype=np.float32)}, tmp_path / "model.safetensors")
    part = engine_of(ARCHITECTURES["qwen2"], GRID, dtype="float32", fp8=True)
    parameters = allocate_parameters(part.layout, 0)
    with pytest.raises(CheckpointError, match=r"lacks tensor .*judge\.path"):
        load_quantized(
            tmp_path,
            part.plain,
            part.filled_from(part.plain),
            0,
            parameters,
            dtype=torch.float32,
            config_key="judge.path",
        )


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)
