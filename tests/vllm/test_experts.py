"""A model with experts on a real vLLM server, which returns log-probs at any temperature."""

from pathlib import Path

import pytest

from rltrain.config.rollout import Sampling
from rltrain.rollout.engine import SamplingParams
from tests.support.rollout_models import hf_logprobs, hf_model, of_tokens
from tests.vllm.engines import TOLERANCE, assert_greedy, started_on
from tests.vllm.servers import VLLMServer, requests, write_models

SIZES = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "mlp_only_layers": []}


@pytest.mark.slow
def test_tokens_and_log_probs_are_those_of_transformers(vllm_python: str, tmp_path: Path) -> None:
    checkpoints = write_models(tmp_path, "qwen3_moe", **SIZES)
    models = [hf_model(path) for path in checkpoints]
    processed = ("--logprobs-mode", "processed_logprobs")
    server = VLLMServer(vllm_python, checkpoints[0], tmp_path / "server.log", *processed)
    try:
        server.ensure()
        with started_on(server, checkpoints, models, Sampling(temperature=0.7)) as rig:
            for version in (0, 1, 2):
                if version:
                    rig.sync(version % 2, version)
                for done in rig.engine.generate(requests(), SamplingParams(0.0, 1.0, 0, 16, ())):
                    assert_greedy(models, done)
                for done in rig.engine.generate(requests(), SamplingParams(0.7, 1.0, 0, 16, ())):
                    expected = of_tokens(hf_logprobs(models[version % 2], done, 0.7), done)
                    assert list(done.logprobs) == pytest.approx(expected.tolist(), abs=TOLERANCE)
    finally:
        server.kill()
