"""CUDA graphs of decode steps give the bits of the steps themselves."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from rltrain.offload.memory_parts import MemoryPart, reserved_memory
from rltrain.rollout.embedded import EmbeddedEngine
from rltrain.rollout.embedded import engine as engine_module
from rltrain.rollout.embedded.decoder import CudaGraphs
from rltrain.rollout.embedded.layers import choose_kernels
from rltrain.rollout.engine import SamplingParams
from rltrain.rollout.sample import Sample
from tests.support.rollout_models import load_engine, ragged_requests, write_checkpoint

pytestmark = pytest.mark.gpu

SAMPLINGS = (
    SamplingParams(1.0, 1.0, 0, 60, (3, 4, 5)),
    SamplingParams(0.0, 1.0, 0, 60, (3,)),
    SamplingParams(0.8, 0.9, 5, 60, (3,)),
)


def as_it_is(step: Callable[[], None]) -> Callable[[], None]:
    """Returns the step itself. Its kernels are launched one after the other."""
    return step


class CountedGraphs(CudaGraphs):
    num_recorded = 0

    def __call__(self, step: Callable[[], None]) -> Callable[[], None]:
        self.num_recorded += 1
        return super().__call__(step)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("qwen3"), "qwen3")


def bits(completions: list[Sample]) -> list[tuple[int, list[int], list[float], int]]:
    return [(done.id, list(done.tokens), list(done.logprobs), done.status) for done in completions]


def generate(engine: EmbeddedEngine, num_times: int = 3) -> list[list[Sample]]:
    return [engine.generate(ragged_requests(40), sampling) for _ in range(num_times) for sampling in SAMPLINGS]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("max_running_requests", [7, 64])
def test_graphs_give_the_bits_of_eager_steps(checkpoint: Path, dtype: torch.dtype, max_running_requests: int) -> None:
    graphs = CountedGraphs()
    options = {"dtype": dtype, "device": "cuda", "max_running_requests": max_running_requests}
    replayed, _ = load_engine(checkpoint, record=graphs, **options)
    eager, _ = load_engine(checkpoint, record=as_it_is, **options)
    for found, expected in zip(generate(replayed), generate(eager), strict=True):
        assert bits(found) == bits(expected)
    assert graphs.num_recorded > 0


def test_graphs_are_the_default_and_follow_weights_and_cache(checkpoint: Path, tmp_path: Path) -> None:
    engine, parameters = load_engine(checkpoint, device="cuda")
    eager, eager_parameters = load_engine(checkpoint, device="cuda", record=as_it_is)
    _, new_parameters = load_engine(write_checkpoint(tmp_path, "qwen3", seed=1), device="cuda")
    generate(engine), generate(eager)
    for name, tensor in new_parameters.items():  # in place
        parameters[name].copy_(tensor)
        eager_parameters[name].copy_(tensor)
    changed = [bits(done) for done in generate(eager, 1)]
    assert [bits(done) for done in generate(engine, 1)] == changed
    for tensor in parameters.values():  # like memory that returns after offloading
        left = tensor.data
        tensor.data = left.clone()
        left.fill_(torch.nan)
    assert [bits(done) for done in generate(engine, 1)] == changed
    engine.release_cache()
    assert [bits(done) for done in generate(engine, 1)] == changed


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_kernels_of_layers_are_chosen_and_give_torchs_tokens(
    checkpoint: Path, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernels, reason = choose_kernels(torch.device("cuda"), dtype)
    assert kernels is not None, reason
    options = {"dtype": dtype, "device": "cuda", "kv_tokens": 4000}
    fused, _ = load_engine(checkpoint, **options)
    monkeypatch.setattr(engine_module, "choose_kernels", lambda device, dtype: (None, ""))
    plain, _ = load_engine(checkpoint, **options)
    found, expected = (engine.generate(ragged_requests(8), SAMPLINGS[1]) for engine in (fused, plain))
    pairs = [
        pair for one, other in zip(found, expected, strict=True) for pair in zip(one.tokens, other.tokens, strict=False)
    ]
    same = sum(one == other for one, other in pairs)
    assert same == len(pairs) if dtype == torch.float32 else same > len(pairs) // 2


def test_graphs_stay_valid_while_memory_leaves_and_returns(checkpoint: Path) -> None:
    memory = reserved_memory(torch.device("cuda", 0))
    assert memory is not None, "the driver has virtual memory"
    graphs = CountedGraphs()
    options = {"record": graphs, "kv_tokens": 4000, "cache_returns": lambda: True}
    engine, _ = load_engine(checkpoint, device="cuda:0", zeros=memory.zeros, **options)
    part = MemoryPart(engine.cache_tensors, forget=engine.release_cache)
    part.memory = memory
    expected, recorded = None, []
    for _ in range(4):
        done = [bits(each) for each in generate(engine, 2)]
        expected = expected or done
        assert done == expected
        recorded.append(graphs.num_recorded)
        part.leave(drop=True)
        part.allocate()
        part.fill(rewritten=True)
    assert recorded[1] == recorded[2] == recorded[3], "captured anew at most once"


def test_the_memory_of_graphs_goes_with_the_cache(checkpoint: Path) -> None:
    engine, _ = load_engine(checkpoint, device="cuda")
    engine.generate(ragged_requests(40), SAMPLINGS[0])
    engine.release_cache()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    generate(engine)
    engine.release_cache()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() <= before
