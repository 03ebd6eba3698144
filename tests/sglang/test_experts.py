"""Models with experts on a real server: greedy tokens are those of transformers, before and after a weight sync."""

from pathlib import Path

import pytest
import torch
import transformers

from rltrain.checkpoint.hf_reader import load_parameters
from rltrain.config.schema import SGLang
from rltrain.rollout.engine import SamplingParams
from rltrain.rollout.servers.calls import Client
from rltrain.rollout.servers.sglang_engine import SGLangEngine
from rltrain.rollout.servers.sglang_process import Server
from rltrain.rollout.servers.sglang_weights import Delivery
from tests.sglang.servers import START_TIMEOUT_S, parts_of, server_spec
from tests.support.rollout_models import ragged_requests, write_checkpoint

NUM_SLOTS, MAX_CONTEXT_TOKENS = 8, 256
GREEDY = SamplingParams(0.0, 1.0, 0, 16, ())
OWN = {"num_experts": 8, "mlp_only_layers": [], "head_dim": 16}


def engine_on(python: str, checkpoint: Path, folder: Path) -> SGLangEngine:
    limits = {"max_running_requests": NUM_SLOTS, "max_context_tokens": MAX_CONTEXT_TOKENS}
    server, client = Server(server_spec(python, checkpoint, folder / "engine.log", **limits)), Client(limit_s=60.0)
    parts = parts_of(checkpoint)
    delivery = Delivery(parts, 0, device=torch.device("cpu"), keep=False, group=None, call=client.call)
    settings = SGLang(start_timeout_s=START_TIMEOUT_S, hang_timeout_s=60.0, keep_weights=False)
    return SGLangEngine(
        server, client, delivery, group=None, settings=settings, advance=lambda: None, tokenizer=None, **limits
    )


def sync(engine: SGLangEngine, checkpoint: Path, version: int) -> None:
    engine.begin_update()
    for number, part in enumerate(parts_of(checkpoint)):
        load_parameters(checkpoint, part, 0, engine.incoming(number))
        engine.arrived(number)
    engine.end_update(version)


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
    engine = engine_on(sglang_python, checkpoints[0], tmp_path)
    try:
        engine.start()
        for version, checkpoint in enumerate(checkpoints):
            sync(engine, checkpoint, version)
            found = engine.generate(ragged_requests(5), GREEDY)
            assert [list(done.tokens) for done in found] == expected(checkpoint)
    finally:
        engine.close()
