"""SGLang's HTTP server in this process, with the arguments that one JSON object gives by name:

    RLTRAIN_SGLANG_TOKEN=... python rltrain_serve.py '{"defaults": {...}, "args": {...}, "own": {...}}'

Later ones win. Imports only the standard library and SGLang.
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
    """The server's API key, out of the environment, so that no child of this process gets to see it there."""
    return os.environ.pop(TOKEN_VARIABLE)


def keep_out_of_the_log(token: str) -> None:
    """SGLang logs its arguments, of which the token is one."""
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
    """torch, for a module that would have memory registered with CUDA."""

    def __init__(self, torch: Any) -> None:
        self._torch = torch

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._torch, name)
        return functools.partial(_without_pinning, found) if name in ("tensor", "zeros") else found


def run_scheduler(server_args: Any, *args: Any) -> None:
    """SGLang's scheduler process, changed where it has to be."""
    from sglang.srt.managers.scheduler import run_scheduler_process

    if server_args.device == "cpu":
        _go_without_gpu()
    if server_args.enable_lora:
        _have_models_know_their_adapters()
        if server_args.device == "cpu":
            _add_adapters_without_gpu()
    run_scheduler_process(server_args, *args)


def _go_without_gpu() -> None:
    """Where there is no GPU and no build of SGLang for CPUs.

    The module of rotary embeddings takes whatever is neither a GPU nor SGLang's CPU build for a device that has vLLM's
    kernels, and imports them, although it then calls its own operations in torch. Told that it is on a CPU it does not.
    What keeps the experts that tokens visit registers its memory with CUDA wherever it knows no other way.
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
    """The weight loader is given the model alone."""
    from sglang.srt.lora.lora_manager import LoRAManager

    make_places = LoRAManager.init_memory_pool

    def init_memory_pool(manager: Any) -> None:
        make_places(manager)
        manager.base_model.rltrain_adapters = manager

    LoRAManager.init_memory_pool = init_memory_pool


def fork_on_cpu() -> None:
    """Forked processes have imported what they need, which takes each of SGLang's three 10 s otherwise.

    It spawns them since CUDA does not outlive a fork, and chooses that just before it starts them.
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
    gc.disable()  # what is imported stays: to look through it again and again takes a fifth of the time
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
