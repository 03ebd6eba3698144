"""Records vLLM's answers for the stand-in of tests/support/http_servers.py.

    python -m tests.vllm.answers PYTHON FOLDER

starts a server of the Python with vLLM on a model in FOLDER and writes tests/support/vllm_answers.json. A test compares
that file with the answers of the installed version.
"""

import json
import signal
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rltrain.rollout.servers.protocols import (
    LOAD_ADAPTER,
    MODELS,
    UNLOAD_ADAPTER,
    VLLM_CONFIG,
    VLLM_GENERATE,
    VLLM_REQUEST,
)
from tests.support.http_servers import VLLM_ANSWERS
from tests.vllm.servers import CALL_TIMEOUT_S, VLLMServer, call, events, write_adapters, write_models

ABORT = "/inference/v1/abort_requests"
LONG = 240
CONFIG = {
    "model_config": ("logprobs_mode",),
    "parallel_config": ("data_parallel_size", "is_moe_model"),
    "device_config": ("device",),
}
"""The settings of vLLM that the protocol reads, and two sections that may be null."""
SECTIONS = ("weight_transfer_config", "lora_config")
LORA = ("max_lora_rank", "target_modules")
"""The settings of lora_config that the protocol reads."""
WITH_ADAPTERS = ("--enable-lora", "--max-lora-rank", "8")
ALLOWS_LOADS = {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"}


def recorded(server: VLLMServer, model: Path) -> dict[str, Any]:
    """Returns the answers by name, each with the status and the parsed content. Has the server load `model`."""
    load = {"method": "reload_weights", "kwargs": {"weights_path": str(model)}}
    answers = {
        "models": call(server, "/v1/models"),
        "label": call(server, "/update_weight_version", {"new_version": "run.0"}),
        "weight_info": call(server, "/weight_info"),
        "tokens": call(server, VLLM_GENERATE, body("tokens", max_tokens=2)),
        "stopped": call(server, VLLM_GENERATE, body("stopped", max_tokens=2, stop_token_ids=[*range(15)])),
        "without_fields": call(server, VLLM_GENERATE, {}),
        "other_model": call(server, VLLM_GENERATE, body("other", max_tokens=2) | {"model": "other"}),
        "without_method": call(server, "/collective_rpc", {}),
        "pause": call(server, "/pause?mode=abort&clear_cache=true", {}),
        "load": call(server, "/collective_rpc", load),
        "resume": call(server, "/resume", {}),
    }
    long = body("long.", max_tokens=LONG, stream_interval=LONG)
    names = {"request_ids": [VLLM_REQUEST + "long."]}
    answers["abort"], (status, text) = _interrupted(server, long, lambda: call(server, ABORT, names))
    found = {name: {"status": status, "content": parsed(text)} for name, (status, text) in answers.items()}
    return found | {"aborted": {"status": status, "content": parsed(text)[-1:]}, "config": _config(server)}


def recorded_with_adapters(server: VLLMServer, adapters: Path) -> dict[str, Any]:
    """Returns the answers of a server that was started WITH_ADAPTERS. `adapters` has PEFT's files."""
    load = {"lora_name": "rltrain-run.0", "lora_path": str(adapters)}
    answers = {
        "load_adapter": call(server, LOAD_ADAPTER, load),
        "load_adapter_again": call(server, LOAD_ADAPTER, load),
        "models_with_adapters": call(server, MODELS),
        "unload_adapter": call(server, UNLOAD_ADAPTER, {"lora_name": load["lora_name"]}),
        "unload_adapter_again": call(server, UNLOAD_ADAPTER, {"lora_name": load["lora_name"]}),
        "load_no_adapter": call(server, LOAD_ADAPTER, {"lora_name": "none", "lora_path": "/no/such/folder"}),
        "load_adapter_without_fields": call(server, LOAD_ADAPTER, {}),
    }
    found = {name: {"status": status, "content": parsed(text)} for name, (status, text) in answers.items()}
    found["models_with_adapters"]["content"] = found["models_with_adapters"]["content"]["data"][1]
    lora = json.loads(call(server, VLLM_CONFIG)[1])["vllm_config"]["lora_config"]
    return found | {"lora_config": {"status": 200, "content": {key: lora[key] for key in LORA}}}


def broken(server: VLLMServer) -> dict[str, Any]:
    """Returns the answer to a request whose engine is killed. The server ends by that."""
    server.signal_engine(signal.SIGSTOP)  # it could be done before the kill
    request = body("broken", max_tokens=LONG)
    _, (status, text) = _interrupted(server, request, lambda: server.signal_engine(signal.SIGKILL))
    return {"status": status, "content": parsed(text)[-1:]}


def body(name: str, **sampling: object) -> dict[str, Any]:
    """Returns a request for tokens."""
    chosen = {"temperature": 0.0, "logprobs": 0, "ignore_eos": True, "detokenize": False, **sampling}
    return {"request_id": name, "token_ids": [3, 5], "stream": True, "sampling_params": chosen}


def fits(value: Any, form: Any) -> bool:
    """Returns whether a value has the keys and types of a recorded one. Each entry of a list fits a recorded entry.

    A reader that is late gets several events as one, so a list may lack recorded kinds of entries.
    """
    if isinstance(form, Mapping):
        return (
            isinstance(value, Mapping) and {*value} == {*form} and all(fits(value[name], form[name]) for name in form)
        )
    if isinstance(form, list):
        return isinstance(value, list) and all(any(fits(one, kind) for kind in form) for one in value)
    return type(value) is type(form)


def _config(server: VLLMServer) -> dict[str, Any]:
    status, text = call(server, VLLM_CONFIG)
    told = json.loads(text)["vllm_config"]
    used: dict[str, Any] = {name: {key: told[name][key] for key in keys} for name, keys in CONFIG.items()}
    config = used | {name: told[name] for name in SECTIONS}
    return {"status": status, "content": {"vllm_config": config}}


def _interrupted(server: VLLMServer, body: Mapping[str, Any], interrupt: Any) -> tuple[Any, tuple[int, str]]:
    """Returns what `interrupt` returns once the server has accepted a request, and the request's answer."""
    answer: list[tuple[int, str]] = []
    accepted = threading.Event()
    thread = threading.Thread(target=lambda: answer.append(call(server, VLLM_GENERATE, body, accepted)))
    thread.start()
    assert accepted.wait(CALL_TIMEOUT_S)
    done = interrupt()
    thread.join()
    return done, answer[0]


def parsed(text: str) -> Any:
    """Returns the events of a stream, or the value of another answer, which is None if it has no text."""
    if text.startswith("data: "):
        return events(text)
    try:
        return json.loads(text) if text else None
    except ValueError:
        return text


if __name__ == "__main__":
    python, folder = sys.argv[1:]
    models = write_models(Path(folder), "qwen3")
    server = VLLMServer(python, models[0], Path(folder) / "server.log")
    try:
        server.ensure()
        found = {**recorded(server, models[0]), "broken": broken(server)}
    finally:
        server.kill()
    write_adapters(models[0], Path(folder) / "adapters", 0)
    server = VLLMServer(python, models[0], Path(folder) / "adapting.log", *WITH_ADAPTERS, environment=ALLOWS_LOADS)
    try:
        server.ensure()
        found |= recorded_with_adapters(server, Path(folder) / "adapters")
    finally:
        server.kill()
    [long] = found["aborted"]["content"][0]["choices"]
    del long["token_ids"][2:], long["logprobs"]["content"][2:]
    text = json.dumps(found, indent=1).replace(str(models[0]), "tiny")
    VLLM_ANSWERS.write_text(text + "\n")
