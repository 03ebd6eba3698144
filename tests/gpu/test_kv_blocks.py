"""Keys and values in blocks on a GPU: flash attention over block tables, graphs, and a budget from the free memory."""

from pathlib import Path

import pytest
import torch

from rltrain.rollout.embedded.block_cache import KernelBlocks, choose_attention, difference
from rltrain.rollout.embedded.block_tables import budget_of
from rltrain.rollout.embedded.decoder import CudaGraphs
from rltrain.rollout.embedded.kv_cache import AttentionShape
from rltrain.rollout.engine import SamplingParams
from rltrain.rollout.sample import Sample
from tests.support.rollout_models import (
    assert_same_but_for_ties,
    load_engine,
    ragged_requests,
    requests_of_one_system,
    write_checkpoint,
)

pytestmark = pytest.mark.gpu

SAMPLED = SamplingParams(1.0, 1.0, 0, 60, (3, 4, 5))
MODEL = {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64, "hidden_size": 128}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("qwen3"), "qwen3", max_position_embeddings=1024, **MODEL)


def samples(count: int = 40) -> list[Sample]:
    """Returns samples in groups of four. The longest prompts have more than a block."""
    prompts = [sample.prompt for sample in ragged_requests(160)][:: 640 // count]
    return [Sample(number, prompts[number // 4], seed=number) for number in range(count)]


def grouped(num_heads: int, num_kv_heads: int, head_dim: int) -> AttentionShape:
    return AttentionShape(num_heads, num_kv_heads, head_dim, head_dim, head_dim**-0.5)


def test_what_is_chosen_gives_what_gathering_gives(capsys: pytest.CaptureFixture[str]) -> None:
    like = torch.empty(0, dtype=torch.bfloat16, device="cuda")
    kind, words = choose_attention(grouped(32, 8, 128), like)
    with capsys.disabled():
        print(f"\ntorch {torch.__version__}: {words}")
    for num_heads, num_kv_heads, head_dim in ((32, 8, 128), (16, 16, 64), (8, 1, 128)):
        assert difference(kind, grouped(num_heads, num_kv_heads, head_dim), like) < 0.05


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim"), [(32, 8, 128), (16, 16, 64), (8, 1, 256), (8, 2, 80)]
)
def test_the_kernel_gives_what_gathering_gives(
    num_heads: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype
) -> None:
    like = torch.empty(0, dtype=dtype, device="cuda")
    limit = 1e-5 if dtype == torch.float32 else 0.03
    assert difference(KernelBlocks, grouped(num_heads, num_kv_heads, head_dim), like) < limit


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kv_tokens", [1600, 100_000])
def test_graphs_over_blocks_give_the_bits_of_eager_steps(checkpoint: Path, dtype: torch.dtype, kv_tokens: int) -> None:
    options = {"dtype": dtype, "device": "cuda", "max_context_tokens": 1024, "kv_tokens": kv_tokens}
    replayed, _ = load_engine(checkpoint, record=CudaGraphs(), **options)
    eager, _ = load_engine(checkpoint, record=lambda step: step, **options)
    for _ in range(3):
        found, expected = (engine.generate(samples(), SAMPLED) for engine in (replayed, eager))
        assert [(done.tokens, done.logprobs) for done in found] == [(done.tokens, done.logprobs) for done in expected]


def test_a_tight_budget_gives_what_none_gives(checkpoint: Path) -> None:
    options = {"device": "cuda", "max_context_tokens": 1024}
    requests = samples() + requests_of_one_system(6, 2, system_tokens=300)
    expected = load_engine(checkpoint, **options)[0].generate(requests, SAMPLED)
    engine, _ = load_engine(checkpoint, kv_tokens=1600, **options)
    assert_same_but_for_ties(engine.generate(requests, SAMPLED), expected, logprob=1e-4)
    assert engine.cache_metrics()["rollout/context_prefix_tokens"] > 0


@pytest.mark.parametrize("kv_tokens", [1600, 100_000])
def test_steps_in_flight_give_what_steps_read_at_once_give(checkpoint: Path, kv_tokens: int) -> None:
    """The default is a step in flight. Other company rounds differently."""
    options = {"device": "cuda", "max_context_tokens": 1024, "kv_tokens": kv_tokens}
    at_once, in_flight = (load_engine(checkpoint, ahead=ahead, **options)[0] for ahead in (0, None))
    for _ in range(3):
        expected, found = (engine.generate(samples(), SAMPLED) for engine in (at_once, in_flight))
        assert_same_but_for_ties(found, expected, logprob=1e-4)


def test_auto_leaves_the_workspace_and_a_20th_of_the_device() -> None:
    workspace_bytes = 2**30
    budget = budget_of("auto", torch.device("cuda"), workspace_bytes)
    assert budget is not None
    held = torch.empty(2**30, dtype=torch.uint8, device="cuda")
    before = budget.num_bytes()
    del held
    assert 0.95 * 2**30 < budget.num_bytes() - before < 1.05 * 2**30
    taken = budget.num_bytes()
    free, total = torch.cuda.mem_get_info()
    assert taken == pytest.approx(free - workspace_bytes - 0.05 * total, rel=0.01)
