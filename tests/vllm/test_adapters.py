"""Low-rank adapters apart from the base, on a real vLLM server that was started with adapters enabled."""

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch

from rltrain.rollout.servers.calls import Access, Calls
from rltrain.rollout.servers.protocols import ADAPTER, MODELS, VLLM_GENERATE, VLLMAdapters, VLLMProtocol
from tests.support.http_servers import VLLM
from tests.support.jobs import QUICKSTART, column, train
from tests.support.tolerances import EPS_OF_ACTOR
from tests.vllm.answers import ALLOWS_LOADS, WITH_ADAPTERS, body, fits, recorded_with_adapters
from tests.vllm.engines import LIMIT_S, TOLERANCE
from tests.vllm.servers import RANK, TOKEN, VLLMServer, call, events, hits_of_prefix_cache, write_adapters
from tests.vllm.test_jobs import STEPS, TIMEOUT_S, assert_every_sample_once, job_on, weight_version

PROMPT = [*range(2, 14)] * 16
"""Longer than a block of the prefix cache, which has 128 tokens on a CPU."""
T = TypeVar("T")


@pytest.fixture(scope="module")
def adapting(
    vllm_python: str, checkpoints: list[Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[VLLMServer]:
    """Yields a server with the second checkpoint as its base, so only a sync gives it the first one."""
    log = tmp_path_factory.mktemp("server") / "server.log"
    server = VLLMServer(vllm_python, checkpoints[1], log, *WITH_ADAPTERS, environment=ALLOWS_LOADS)
    try:
        server.ensure()
        yield server
    finally:
        server.kill()


def asked(server: VLLMServer, ask: Callable[..., Awaitable[T]], *values: Any) -> T:
    """Returns what `ask` returns for the calls to a server and `values`."""

    async def run() -> T:
        calls = Calls(server.url, Access(TOKEN))
        try:
            return await ask(calls, *values)
        finally:
            await calls.close()

    return asyncio.run(run())


def drawn(server: VLLMServer, label: str) -> tuple[list[int], list[float], str]:
    """Returns greedy tokens after PROMPT, their log-probs, and the label of their weights."""
    request = body(f"adapters.{label}", max_tokens=4, stream_interval=64)
    status, text = call(server, VLLM_GENERATE, request | {"model": ADAPTER + label, "token_ids": PROMPT})
    assert status == 200, text
    choices = [event["choices"][0] for event in events(text)]
    tokens = [token for choice in choices for token in choice["token_ids"]]
    found = [one["logprob"] for choice in choices for one in choice["logprobs"]["content"]]
    [span] = choices[-1]["weight_versions"]
    return tokens, found, span["version"]


@torch.no_grad()
def log_probs(model: torch.nn.Module, tokens: list[int]) -> list[float]:
    logits = model(torch.tensor([PROMPT + tokens])).logits[0].log_softmax(-1)
    return [float(logits[len(PROMPT) - 1 + place, token]) for place, token in enumerate(tokens)]


def test_a_job_sends_the_base_once_and_then_the_adapters(
    adapting: VLLMServer, checkpoints: list[Path], data_overrides: list[str], tmp_path: Path
) -> None:
    """The server's log-probs equal the trainer's while the adapters learn."""
    records: list[dict[str, Any]] = train(
        *(QUICKSTART, *job_on(adapting, checkpoints[0], data_overrides, tmp_path), EPS_OF_ACTOR),
        *("model.lora={rank: 8, alpha: 16}", "weight_sync={adapters: apart, verify: true}"),
        *("rollout.http.staging_mb=0.02", "placement={'actor, reference, rollout, reward': 0}"),
        num_ranks=1,
        timeout_s=TIMEOUT_S,
    )
    differences = column(records, "train/train_rollout_logprob_abs_diff_max")
    assert len(differences) == STEPS and max(differences) <= TOLERANCE
    assert column(records, "train/reference_kl")[-1] > 1e-3, "the adapters add more than rounding"
    assert max(column(records, "train/staleness_max")) == 0
    for name in ("perf/weight_sync_local_bytes", "rollout/weight_files_bytes"):
        with_base, *alone = column(records, name)
        assert alone and len({*alone}) == 1 and 0 < alone[0] < with_base / 2
    label = json.loads(weight_version(adapting))["weight_version"]
    assert label.endswith(f".{STEPS - 1}")
    served = [model["id"] for model in json.loads(call(adapting, MODELS)[1])["data"]]
    assert [name for name in served if name.startswith(ADAPTER)] == [ADAPTER + label], "earlier ones are unloaded"
    assert_every_sample_once(tmp_path / "run")
    assert not (tmp_path / "run/http_weights").exists(), "loaded weight files are removed"


def test_responses_continue_while_adapters_change(
    adapting: VLLMServer, checkpoints: list[Path], data_overrides: list[str], tmp_path: Path
) -> None:
    """An asynchronous job with partial rollouts and adapters of some matrices. No sample is lost or used twice."""
    records = train(
        *(QUICKSTART, *job_on(adapting, checkpoints[0], data_overrides, tmp_path)),
        *("model.lora={rank: 4, alpha: 16, targets: [q_proj, down_proj]}", "weight_sync.adapters=apart"),
        "placement={'actor, reference': 0, 'rollout, reward': 1}",
        "schedule={mode: asynchronous, max_staleness: 1, partial_rollouts: true, on_stale: mask}",
        "loss.old_logprobs=actor",
        num_ranks=2,
        timeout_s=TIMEOUT_S,
    )
    assert len(column(records, "train/loss")) == STEPS
    assert max(column(records, "train/fresh_logprob_abs_diff")) <= TOLERANCE
    assert_every_sample_once(tmp_path / "run")


def test_cached_prefixes_are_those_of_the_present_adapters(
    adapting: VLLMServer, checkpoints: list[Path], tmp_path: Path
) -> None:
    """The same prompt comes by two versions, each time twice, so the second is found in the prefix cache."""
    for version, base in enumerate((str(checkpoints[0]), None)):
        label, folder = f"cache.{version}", tmp_path / str(version)
        model = write_adapters(checkpoints[0], folder, version)
        asked(adapting, VLLMAdapters().load, base, str(folder), label, LIMIT_S)
        assert json.loads(weight_version(adapting))["weight_version"] == label
        tokens, found, of = drawn(adapting, label)
        hits = hits_of_prefix_cache(adapting)
        assert (tokens, of) == (drawn(adapting, label)[0], label) and hits_of_prefix_cache(adapting) > hits
        assert found == pytest.approx(log_probs(model, tokens), abs=TOLERANCE)
    assert call(adapting, VLLM_GENERATE, body("old", max_tokens=1) | {"model": ADAPTER + "cache.0"})[0] == 404


def test_a_load_that_fails_leaves_the_server_running(
    adapting: VLLMServer, checkpoints: list[Path], tmp_path: Path
) -> None:
    async def load(calls: Calls) -> None:
        with pytest.raises(Exception, match="No adapter found"):
            await VLLMAdapters().load(calls, None, str(tmp_path / "none"), "missing.0", LIMIT_S)
        assert await calls.get("/is_paused") == {"is_paused": False}

    before = weight_version(adapting)
    asked(adapting, load)
    assert weight_version(adapting) == before


def test_servers_without_room_for_adapters_are_refused(adapting: VLLMServer, server: VLLMServer) -> None:
    """The server of the other tests was started without adapters."""
    prepare = VLLMProtocol().prepare_for_weights
    assert asked(adapting, prepare, "adapters", RANK) is None
    too_large = asked(adapting, prepare, "adapters", 16)
    assert too_large is not None and "takes adapters up to rank 8, but model.lora.rank is 16" in too_large
    assert asked(server, prepare, "adapters", RANK) == (
        "it takes no adapters; start it with --enable-lora --max-lora-rank 8 and VLLM_ALLOW_RUNTIME_LORA_UPDATING=1"
    )


def test_the_server_answers_in_the_recorded_form(adapting: VLLMServer, checkpoints: list[Path], tmp_path: Path) -> None:
    write_adapters(checkpoints[0], tmp_path / "adapters", 0)
    for name, answer in recorded_with_adapters(adapting, tmp_path / "adapters").items():
        assert answer["status"] == VLLM[name]["status"] and fits(answer, VLLM[name]), f"{name}: {answer}"
