"""Runs SGLang's HTTP server in this process, with arguments by name in one JSON object:

    RLTRAIN_SGLANG_TOKEN=... python rltrain_serve.py '{"defaults": {...}, "args": {...}, "own": {...}}'

Later groups win. Imports only the standard library and SGLang.
"""

import functools
import gc
import json
import logging
import multiprocessing
import os
import sys
from collections.abc import Callable
from typing import Any

import rltrain_arguments

TOKEN_VARIABLE = "RLTRAIN_SGLANG_TOKEN"


def take_token() -> str:
    """Returns the server's API key and removes it from the environment, so that child processes do not see it."""
    return os.environ.pop(TOKEN_VARIABLE)


def keep_out_of_the_log(token: str) -> None:
    """Hides the token in log records. SGLang logs its arguments, including the token."""
    make_record = logging.getLogRecordFactory()

    def without_token(*args: Any, **kwargs: Any) -> logging.LogRecord:
        record = make_record(*args, **kwargs)
        if token in (text := record.getMessage()):
            record.msg, record.args = text.replace(token, "***"), None
        return record

    logging.setLogRecordFactory(without_token)


def _without_pinning(allocate: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return allocate(*args, **kwargs | {"pin_memory": False})


def _itself(tensor: Any, device: Any = None) -> Any:
    return tensor


class _WithoutPinning:
    """The torch module for code that would pin memory, without pinning."""

    def __init__(self, torch: Any) -> None:
        self._torch = torch

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._torch, name)
        return functools.partial(_without_pinning, found) if name in ("tensor", "zeros") else found


def run_scheduler(server_args: Any, *args: Any) -> None:
    """Runs SGLang's scheduler process, with changes for adapters and for CPUs."""
    from sglang.srt.managers.scheduler import run_scheduler_process

    if server_args.device == "cpu":
        _go_without_gpu()
    if server_args.enable_lora:
        _have_models_know_their_adapters()
        if server_args.device == "cpu":
            _add_adapters_without_gpu()
    run_scheduler_process(server_args, *args)


def _go_without_gpu() -> None:
    """Adapts SGLang to machines without a GPU and without SGLang's CPU build.

    The module of rotary embeddings treats every device except a GPU and SGLang's CPU build as one with vLLM's kernels.
    It imports them, but then uses its own torch operations. `_is_cpu` avoids the import. The record of visited experts
    pins its memory with CUDA unless another way is registered.
    """
    from sglang.srt.layers.rotary_embedding import base
    from sglang.srt.mem_cache.pool_host.common import ALLOC_MEMORY_FUNCS, alloc_with_pin_memory

    base._is_cpu = True
    ALLOC_MEMORY_FUNCS["cpu"] = functools.partial(_without_pinning, alloc_with_pin_memory)


def _add_adapters_without_gpu() -> None:
    import torch
    from sglang.srt.lora import layers
    from sglang.srt.lora.backend import torch_backend

    for module in (layers, torch_backend):
        module.torch = _WithoutPinning(torch)
    torch.Tensor.pin_memory = _itself  # type: ignore[method-assign, assignment]


def _have_models_know_their_adapters() -> None:
    """Stores the adapter manager on the model, because the weight loader gets only the model."""
    from sglang.srt.lora.lora_manager import LoRAManager

    make_places = LoRAManager.init_memory_pool

    def init_memory_pool(manager: Any) -> None:
        make_places(manager)
        manager.base_model.rltrain_adapters = manager

    LoRAManager.init_memory_pool = init_memory_pool


def fork_on_cpu() -> None:
    """Makes SGLang fork its processes. Forked ones have all imports, which saves 10 s for each of three processes.

    SGLang spawns them because CUDA does not survive a fork. It sets that right before it starts them.
    """
    from sglang.srt.entrypoints import engine

    prepare = engine._set_envs_and_config

    def prepare_to_fork(*args: Any, **kwargs: Any) -> None:
        prepare(*args, **kwargs)
        multiprocessing.set_start_method("fork", force=True)

    engine._set_envs_and_config = prepare_to_fork


def main() -> None:
    token = take_token()
    keep_out_of_the_log(token)
    gc.disable()  # collections during the imports take a fifth of their time
    from sglang.srt.entrypoints.http_server import launch_server
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import prepare_server_args

    gc.freeze()
    gc.enable()
    load_plugins()
    given = json.loads(sys.argv[1])
    parser = rltrain_arguments.make_parser()
    layers = [given[name] for name in ("defaults", "args", "own")]
    server_args = prepare_server_args(rltrain_arguments.command_line(parser, *layers))
    server_args.api_key = server_args.admin_api_key = token
    if given["own"]["device"] == "cpu":
        fork_on_cpu()
    launch_server(server_args, run_scheduler_process_func=run_scheduler)


if __name__ == "__main__":
    main()
