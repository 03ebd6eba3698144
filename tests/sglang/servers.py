"""SGLang servers for tests: describes, calls and compares them."""

import json
import os
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from rltrain.checkpoint.hf_reader import load_parameters
from rltrain.config.schema import SGLang
from rltrain.models import read_architecture
from rltrain.reshard.layout import Layout, split
from rltrain.rollout.layout import engine_layout
from rltrain.rollout.servers.calls import Client
from rltrain.rollout.servers.in_sglang.rltrain_supervise import descendants
from rltrain.rollout.servers.sglang_engine import SGLangEngine
from rltrain.rollout.servers.sglang_process import Server, ServerSpec
from rltrain.rollout.servers.sglang_weights import Delivery
from rltrain.runtime.grid import Grid
from tests.sglang.forked_python import forks_of

CPU = torch.device("cpu")
START_TIMEOUT_S = 600.0
CALL_TIMEOUT_S = 120.0
FROM_DISK = {"load_format": "auto"}
"""rollout.sglang.args of a server with the checkpoint's weights from its start, without a weight sync."""
PROMPT, NUM_TOKENS = [5, 9, 2, 14, 7, 1], 24
"""Of greedy responses that are compared with those of transformers."""
NARROW = dict.fromkeys(("intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size"), 64)
"""Widths of MLPs and experts that two ranks of SGLang need not pad on CPUs."""
PART_BYTES = 20_000
"""Bytes of a part of the weights. The tiny checkpoints have several parts."""


def parts_of(checkpoint: Path) -> list[Layout]:
    """Returns the parts of a checkpoint's weights for an engine on rank 0."""
    return split(engine_layout(read_architecture(checkpoint), Grid((0,))), PART_BYTES)


def server_spec(python: str, model_path: str | Path, log_path: Path, **overrides: Any) -> ServerSpec:
    """Returns the spec of an engine on one rank without a GPU. `overrides` are fields of ServerSpec."""
    settings: dict[str, Any] = {
        "python": python,
        "model_path": str(model_path),
        "device": "cpu",
        "dtype": "float32",
        "tp": 1,
        "gpus": (),
        "host": "127.0.0.1",
        "log_path": log_path,
        "max_running_requests": 64,
        "max_context_tokens": 256,
        "needs_tokenizer": False,
        "memory_saver": False,
        "fp8": False,
        "draws_during_syncs": True,
        "args": {},
    }
    return ServerSpec(**settings | overrides)


def engine_on(
    python: str,
    checkpoint: Path,
    log_path: Path,
    limits: Mapping[str, int],
    *,
    spec: Mapping[str, Any] | None = None,
    settings: Mapping[str, Any] | None = None,
    **options: Any,
) -> tuple[SGLangEngine, Server]:
    """Returns an engine, not yet started, and its server.

    `settings` are of rollout.sglang, `options` are the engine's.
    """
    server, client = Server(server_spec(python, checkpoint, log_path, **limits, **(spec or {}))), Client(limit_s=60.0)
    chosen = SGLang(**{"start_timeout_s": START_TIMEOUT_S, "hang_timeout_s": 60.0, **(settings or {})})
    delivery = Delivery(parts_of(checkpoint), 0, device=CPU, keep=chosen.keep_weights, group=None, call=client.call)
    engine = SGLangEngine(
        server, client, delivery, group=None, settings=chosen, advance=lambda: None, **limits, **options
    )
    return engine, server


def sync(engine: SGLangEngine, checkpoint: Path, version: int) -> None:
    """Gives an engine the weights of a checkpoint."""
    engine.begin_update()
    for number, part in enumerate(parts_of(checkpoint)):
        load_parameters(checkpoint, part, 0, engine.incoming(number))
        engine.arrived(number)
    engine.end_update(version)


@contextmanager
def connected(server: Server) -> Iterator[Client]:
    client = Client(CALL_TIMEOUT_S)
    client.connect(server.url, server.token)
    yield client
    client.close()


def running(server: Server) -> Server:
    """Returns the server, started if it does not run."""
    if server.ending is not None:
        server.start()
        server.wait_until_ready(START_TIMEOUT_S, lambda: None)
    return server


def processes(server: Server) -> list[int]:
    """Returns all processes of the server without its supervisor. The last forked ones come last."""
    assert server._process is not None
    own = descendants(server._process.pid)
    forked = forks_of(own[0], server.spec.python)
    return [*own, *forked, *(pid for fork in forked for pid in descendants(fork))]


def started(
    start_server: Callable[..., Server], monkeypatch: pytest.MonkeyPatch, checkpoint: Path, num_ranks: int, **spec: Any
) -> Server:
    """Returns a server without GPUs. For two ranks SGLang needs a core of each one, and must not find NCCL."""
    if num_ranks > 1:
        cores = sorted(os.sched_getaffinity(0))
        monkeypatch.setenv("SGLANG_CPU_OMP_THREADS_BIND", f"{cores[0]}|{cores[-1]}")
        monkeypatch.setenv("SGLANG_NCCL_SO_PATH", "/nonexistent")
    return start_server(checkpoint, tp=num_ranks, **spec)


def call(server: Server, path: str, body: Mapping[str, Any] | None = None) -> Any:
    """Returns the parsed answer of the server: to a GET without a body, else to a POST.

    Raises HTTPError if the server refuses.
    """
    headers = {"Authorization": f"Bearer {server.token}", "Content-Type": "application/json"}
    data = None if body is None else json.dumps(body).encode()
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(urllib.request.Request(server.url + path, data, headers), timeout=CALL_TIMEOUT_S) as answer:
        text = answer.read()
        is_json = answer.headers.get("Content-Type", "").startswith("application/json")
    return json.loads(text) if is_json else {"text": text.decode()}


def checksums(server: Server) -> list[dict[str, str]]:
    """Returns SGLang's own checksum of every served parameter, by tensor-parallel rank. FP8 parameters include their
    scales."""
    return [rank["checksums"] for rank in call(server, "/weights_checker", {"action": "checksum"})["ranks"]]


def loaded_by_sglang(server: Server, checkpoint: Path) -> list[dict[str, str]]:
    """Returns the checksums of every rank after SGLang's own load of the files."""
    body = {"model_path": str(checkpoint), "load_format": "auto", "flush_cache": False}
    call(server, "/update_weights_from_disk", body)
    return checksums(server)


def greedy(server: Server, prompt: list[int], num_tokens: int) -> tuple[list[int], list[float]]:
    """Returns (greedy tokens, their log-probs) after `prompt`."""
    sampling = {"temperature": 0, "max_new_tokens": num_tokens, "ignore_eos": True}
    body = {"input_ids": prompt, "sampling_params": sampling, "return_logprob": True}
    answer = call(server, "/generate", body)
    return answer["output_ids"], [entry[0] for entry in answer["meta_info"]["output_token_logprobs"]]


def assert_serves(server: Server, checkpoint: Path) -> None:
    """Asserts that greedy tokens and their log-probs are those of a fresh load."""
    tokens, logprobs = greedy(server, PROMPT, NUM_TOKENS)
    model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    with torch.no_grad():
        logits = model(torch.tensor([[*PROMPT, *tokens]])).logits[0, len(PROMPT) - 1 : -1]
    expected = logits.log_softmax(-1)
    assert tokens == expected.argmax(-1).tolist()
    assert logprobs == pytest.approx(expected.max(-1).values.tolist(), abs=1e-4)
