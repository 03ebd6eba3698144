"""Engines on vLLM servers for tests, and the comparison of their tokens with transformers."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import transformers

from rltrain.config.rollout import Http, Sampling
from rltrain.rollout.sample import Sample
from rltrain.rollout.servers.calls import Access
from rltrain.rollout.servers.fleet import Addresses, Fleet
from rltrain.rollout.servers.http_engine import CheckpointWeights, HttpEngine
from tests.support.rollout_models import hf_logprobs
from tests.vllm.servers import CONTEXT, START_TIMEOUT_S, TOKEN, VLLMServer

TOLERANCE = 1e-5
NUM_SLOTS = 8
LIMIT_S = 120.0


@dataclass
class Rig:
    """An engine whose server loads checkpoints."""

    engine: HttpEngine
    checkpoints: list[Path]
    models: list[transformers.PreTrainedModel]

    def sync(self, number: int, version: int) -> None:
        """Gives the server the weights of a checkpoint."""
        self.engine.reload_weights(self.checkpoints[number], version)


def engine_on(
    server: VLLMServer, model: Path, sampling: Sampling | None = None, *, needs_weights: bool = True
) -> HttpEngine:
    """Returns an engine that has not been started. `model` has the tokenizer, `sampling` is that of the job."""
    weights = CheckpointWeights(LIMIT_S)
    fleet = Fleet(
        Addresses([server.url], "rollout.urls", None, "rollout", 0, 1),  # type: ignore[arg-type]
        Access(TOKEN),
        weights,
        Http(reread_s=0.2, hang_timeout_s=60.0, start_timeout_s=START_TIMEOUT_S, max_retries=1000),
        protocol="auto",
        role="rollout",
        max_running_requests=NUM_SLOTS,
        max_context_tokens=CONTEXT,
        needs_weights=needs_weights,
        trained_sampling=sampling or Sampling(),
    )
    return HttpEngine(
        fleet,
        weights,
        max_running_requests=NUM_SLOTS,
        max_context_tokens=CONTEXT,
        advance=lambda: None,
        tokenizer=transformers.AutoTokenizer.from_pretrained(model),
    )


@contextmanager
def started_on(
    server: VLLMServer,
    checkpoints: list[Path],
    models: list[transformers.PreTrainedModel],
    sampling: Sampling | None = None,
) -> Iterator[Rig]:
    """Yields an engine with the weights of the first checkpoint as version 0."""
    engine = engine_on(server, checkpoints[0], sampling)
    try:
        engine.start()
        rig = Rig(engine, checkpoints, models)
        rig.sync(0, 0)
        yield rig
    finally:
        engine.close()


def assert_greedy(models: Sequence[transformers.PreTrainedModel], done: Sample) -> None:
    """Asserts that each token is the best one of the model of its version, with that model's log-prob."""
    for version in {*done.policy_versions}:
        logprobs = hf_logprobs(models[version % 2], done)
        of_version = [place for place, own in enumerate(done.policy_versions) if own == version]
        best, ids = logprobs[of_version].max(-1)
        assert [done.tokens[place] for place in of_version] == ids.tolist()
        assert [done.logprobs[place] for place in of_version] == pytest.approx(best.tolist(), abs=TOLERANCE)
