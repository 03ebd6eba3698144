"""Engines on weights in FP8: what products read, what is drawn, and the parts that a weight sync quantises."""

from pathlib import Path

import numpy as np
import pytest
import torch

from rltrain.config.schema import Config
from rltrain.models import Architecture, read_architecture
from rltrain.models.table import ElementType
from rltrain.reshard.copy_table import allocate_parameters, dequantize, quantize_blocks
from rltrain.reshard.execute import Resharding
from rltrain.reshard.fp8_blocks import SCALE_SUFFIX
from rltrain.reshard.fp8_scales import BlockScales, BlockTable
from rltrain.reshard.megatron_layout import megatron_layout
from rltrain.reshard.plan import plan
from rltrain.rollout.embedded import EmbeddedEngine
from rltrain.rollout.embedded.parameters import quantized_matrices
from rltrain.rollout.engine import SamplingParams
from rltrain.rollout.layout import engine_parts, whole_engine
from rltrain.runtime.grid import Grid
from tests.distributed.cases_quantized import ARCHITECTURES, in_layer, model, quantised_shard
from tests.model_shards import Place, engine_shard
from tests.rollout_models import load_engine, ragged_requests, write_checkpoint
from tests.unit.schedule_configs import make_config

CPU = torch.device("cpu")


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
        ("qwen3", torch.float32),
        ("qwen3", torch.bfloat16),
        ("qwen3_moe", torch.float32),
        ("deepseek_v3", torch.bfloat16),
        ("moonlight", torch.float32),
        ("phi3", torch.float32),
        ("gemma3", torch.bfloat16),
        ("qwen3_5", torch.bfloat16),
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
    """An engine that a sync has filled from `weights`, and its matrices."""
    part = whole_engine(config(model_dtype=str(dtype).removeprefix("torch.")), architecture, Grid((0,)))
    layouts = part.filled_from(part.plain)
    parameters = allocate_parameters(part.layout, 0)
    matrices = quantized_matrices(part.layout, 0, parameters, dtype)
    resharding = Resharding(
        plan(layouts.source, layouts.destination, 0, 1),
        group=None,
        cpu_group=None,
        bucket_bytes=2**20,
        device=CPU,
        magnitudes=BlockScales(BlockTable(layouts, 0), CPU),
    )
    resharding.run(weights, parameters)
    engine = EmbeddedEngine(
        architecture,
        parameters,
        tp_group=None,
        max_running_requests=64,
        max_context_tokens=64,
        dtype=dtype,
        matrices=matrices,
    )
    return engine, matrices


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
