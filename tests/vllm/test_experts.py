"""A model with experts on a real vLLM server, which returns log-probs at any temperature."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import transformers

from rltrain.config.rollout import Sampling
from rltrain.errors import EngineError
from rltrain.rollout.engine import SamplingParams
from tests.support.rollout_models import hf_logprobs, hf_model, of_tokens
from tests.vllm.answers import body, parsed
from tests.vllm.engines import assert_greedy, engine_on
from tests.vllm.servers import VLLMServer, call, requests, write_models

SIZES = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "mlp_only_layers": []}

TEMPERED_TOLERANCE = 5e-5
"""A temperature below 1 enlarges differences of logits, and experts are summed in another order."""

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_models(tmp_path_factory.mktemp("models"), "qwen3_moe", **SIZES)[0]


@pytest.fixture(scope="module")
def model(checkpoint: Path) -> transformers.PreTrainedModel:
    return hf_model(checkpoint)


@pytest.fixture(scope="module")
def of_experts(vllm_python: str, checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[VLLMServer]:
    log = tmp_path_factory.mktemp("server") / "server.log"
    started = VLLMServer(vllm_python, checkpoint, log, "--logprobs-mode", "processed_logprobs")
    try:
        started.ensure()
        yield started
    finally:
        started.kill()


def test_the_weights_of_its_start_draw_what_transformers_draws(
    of_experts: VLLMServer, checkpoint: Path, model: transformers.PreTrainedModel
) -> None:
    """Evaluations and judges use servers so. Log-probs are those of the tempered distribution."""
    engine = engine_on(of_experts, checkpoint, Sampling(temperature=0.7), needs_weights=False)
    try:
        engine.start()
        engine.reload_weights(checkpoint, 0)
        for done in engine.generate(requests(), SamplingParams(0.0, 1.0, 0, 16, ())):
            assert_greedy([model], done)
        for done in engine.generate(requests(), SamplingParams(0.7, 1.0, 0, 16, ())):
            expected = of_tokens(hf_logprobs(model, done, 0.7), done)
            assert list(done.logprobs) == pytest.approx(expected.tolist(), abs=TEMPERED_TOLERANCE)
    finally:
        engine.close()


def test_it_is_refused_where_weights_change(
    of_experts: VLLMServer, checkpoint: Path, model: transformers.PreTrainedModel
) -> None:
    """vLLM 0.32 for CPUs draws otherwise after a reload of the same weights."""
    engine = engine_on(of_experts, checkpoint)
    try:
        with pytest.raises(EngineError, match="computes other results after a reload of such weights"):
            engine.start()
    finally:
        engine.close()
    load = {"method": "reload_weights", "kwargs": {"weights_path": str(checkpoint)}}
    found = []
    for _ in range(2):
        events = parsed(call(of_experts, "/inference/v1/generate", body("greedy", max_tokens=16))[1])
        drawn = [entry for event in events for entry in event["choices"][0]["logprobs"]["content"]]
        found.append([entry["logprob"] for entry in drawn])
        assert call(of_experts, "/pause?mode=abort&clear_cache=true", {})[0] == 200
        assert call(of_experts, "/collective_rpc", load)[0] == call(of_experts, "/resume", {})[0] == 200
    assert found[0] != pytest.approx(found[1], abs=0.1), "with a vLLM that loads experts rightly no refusal is needed"
