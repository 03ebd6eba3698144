"""The embedded engine on models with experts and with latent attention, against transformers."""

from pathlib import Path

import pytest
import torch
import transformers
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

from rltrain.checkpoint.hf_reader import load_parameters
from rltrain.models import read_architecture
from rltrain.models.products import LIMIT, clamped_swiglu
from rltrain.reshard.copy_table import allocate_parameters
from rltrain.reshard.execute import Resharding
from rltrain.reshard.megatron_layout import megatron_layout
from rltrain.reshard.plan import plan
from rltrain.rollout.embedded.model import route
from rltrain.rollout.embedded.parameters import grouped_product
from rltrain.rollout.engine import SamplingParams
from rltrain.rollout.layout import engine_layout
from rltrain.rollout.sample import Sample
from rltrain.runtime.grid import Grid
from tests.distributed.family_checkpoints import OTHER_DENSE, QUICK_DENSE, QUICK_SPARSE, VARIANTS
from tests.marks import slow_but
from tests.rollout_models import load_engine, ragged_requests
from tests.unit.conftest import SPARSE_FAMILIES

pytestmark = pytest.mark.usefixtures("small_blocks")
FAMILIES, DENSE = [*SPARSE_FAMILIES], [*OTHER_DENSE]
EVERY = slow_but([*FAMILIES, *DENSE, *VARIANTS], *QUICK_DENSE, *QUICK_SPARSE)
GREEDY = SamplingParams(0.0, 1.0, 0, 12, ())
TOLERANCE = 1e-4


def hf_model(path: Path) -> transformers.PreTrainedModel:
    load = transformers.AutoModelForCausalLM.from_pretrained
    return load(path, dtype=torch.float32, attn_implementation="eager").eval()  # of which alone Gemma 2 is itself


@torch.no_grad()
def hf_logprobs(model: transformers.PreTrainedModel, done: Sample) -> tuple[torch.Tensor, torch.Tensor]:
    """Of the response's tokens; and of the likeliest in each one's place."""
    tokens = torch.tensor([done.context])
    logprobs = torch.log_softmax(model(tokens).logits[0, len(done.prompt) - 1 : -1], -1)
    return logprobs.gather(-1, tokens[0, len(done.prompt) :, None])[:, 0], logprobs.amax(-1)


@pytest.mark.parametrize("family", EVERY)
def test_greedy_equals_transformers_and_so_do_conversations(checkpoints: dict[str, Path], family: str) -> None:
    """In slots, in blocks, in few blocks, where samples wait again and again, and where a second turn goes on from what
    was kept of the first."""
    model, samples = hf_model(checkpoints[family]), ragged_requests(7)
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
        for done in found:
            drawn, sequence = torch.tensor(done.loss_mask), (*done.prompt, *done.tokens)
            if sequence not in expected:
                expected[sequence] = hf_logprobs(model, done)
            logprobs, likeliest = expected[sequence]
            assert (likeliest - logprobs)[drawn].max() <= 1e-6, "capped logits may be equal"
            torch.testing.assert_close(torch.tensor(done.logprobs)[drawn], logprobs[drawn], atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tokens_visit_the_experts_of_transformers(
    checkpoints: dict[str, Path], family: str, dtype: torch.dtype
) -> None:
    """Scores are computed in float32 from weights of any type; in bfloat16 transformers rounds some of them first."""
    model, architecture = hf_model(checkpoints[family]).to(dtype), read_architecture(checkpoints[family])
    moe = architecture.moe
    assert moe is not None
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


@pytest.mark.parametrize("family", FAMILIES + DENSE)
def test_a_sync_from_the_trainer_s_layout_gives_the_bits_of_the_checkpoint(
    checkpoints: dict[str, Path], family: str
) -> None:
    path, rank = checkpoints[family], Grid((0,))
    architecture = read_architecture(path)
    source, destination = megatron_layout(architecture, rank), engine_layout(architecture, rank)
    trained, served = allocate_parameters(source, 0), allocate_parameters(destination, 0)
    load_parameters(path, source, 0, trained)
    resharding = Resharding(
        plan(source, destination, 0, 1), group=None, cpu_group=None, bucket_bytes=2**16, device=torch.device("cpu")
    )
    resharding.run(trained, served)
    _, expected = load_engine(path)
    assert served.keys() == expected.keys()
    for name, tensor in expected.items():
        assert tensor.dtype == served[name].dtype and torch.equal(tensor, served[name]), name


def test_a_product_per_expert_with_tokens() -> None:
    rows, matrices, ends = torch.randn(7, 5), torch.randn(4, 3, 5), torch.tensor([0, 2, 2, 6])
    product = grouped_product(rows, matrices, ends)
    expected = torch.cat([rows[0:2] @ matrices[1].T, rows[2:6] @ matrices[3].T])
    torch.testing.assert_close(product[:6], expected)


def test_the_clamped_activation_is_that_of_transformers() -> None:
    """Also where it is clamped, which small models hardly ever do."""
    config = transformers.GptOssConfig(hidden_size=4, intermediate_size=6, num_local_experts=2)
    experts = GptOssExperts(config)
    gate_up = 10 * torch.randn(200, 12)
    assert (gate_up.abs() > LIMIT).float().mean() > 0.3
    torch.testing.assert_close(clamped_swiglu(gate_up), experts._apply_gate(gate_up))
