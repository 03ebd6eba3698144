"""Models with experts on a real server: greedy tokens are those of transformers, before and after a weight sync."""

from pathlib import Path

import pytest
import torch
import transformers

from rltrain.rollout.engine import SamplingParams
from tests.sglang.servers import engine_on, sync
from tests.support.rollout_models import ragged_requests, write_checkpoint

LIMITS = {"max_running_requests": 8, "max_context_tokens": 256}
GREEDY = SamplingParams(0.0, 1.0, 0, 16, ())
OWN = {"num_experts": 8, "mlp_only_layers": [], "head_dim": 16}


def expected(checkpoint: Path) -> list[list[int]]:
    model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    tokens = []
    for sample in ragged_requests(5):
        prompt = torch.tensor([sample.prompt])
        mask = torch.ones_like(prompt)
        drawn = model.generate(prompt, attention_mask=mask, do_sample=False, max_new_tokens=16, pad_token_id=0)
        tokens.append(drawn[0, len(sample.prompt) :].tolist())
    return tokens


@pytest.mark.parametrize(("family", "sizes"), [("qwen3_moe", OWN), ("mixtral", {})])
def test_greedy_equals_transformers(sglang_python: str, tmp_path: Path, family: str, sizes: dict[str, object]) -> None:
    checkpoints = [write_checkpoint(tmp_path / f"{seed}", family, seed=seed, **sizes) for seed in (0, 1)]
    engine, _ = engine_on(
        sglang_python, checkpoints[0], tmp_path / "engine.log", LIMITS, settings={"keep_weights": False}
    )
    try:
        engine.start()
        for version, checkpoint in enumerate(checkpoints):
            sync(engine, checkpoint, version)
            found = engine.generate(ragged_requests(5), GREEDY)
            assert [list(done.tokens) for done in found] == expected(checkpoint)
    finally:
        engine.close()
