"""The arguments of an SGLang server: what rltrain sets, what it only proposes, and what the config adds."""

import functools
import json
import re
import subprocess
from collections.abc import Mapping
from typing import Any

from rltrain.errors import ConfigError, nearest
from rltrain.reshard.slices import BLOCK
from rltrain.rollout.sglang.spec import SERVER_FOLDER, AdapterSpec, ServerSpec, clean_environment

MIN_VERSION = "0.5.23"
"""Older ones lack update sessions or report one weight version per response instead of one per token."""

CHECK_TIMEOUT_S = 600.0
CONTEXT_SLACK_TOKENS = 8
"""SGLang cuts responses a few tokens before what it takes for the longest context."""
MAX_CPU_CACHE_TOKENS = 2**17
MODEL_OVERRIDES = "json_model_override_args"
FP8_CHECKPOINT = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": [BLOCK, BLOCK],
}
"""As in the config.json of DeepSeek-V3 and of Qwen3's FP8 checkpoints."""

NOT_FOR_CONFIGS = {
    "model_path": "it is {path}",
    "tokenizer_path": "it is {path}",
    "device": "it is the device that the run was started on",
    "dtype": "it follows from model.dtype",
    "enable_fp32_lm_head": "it follows from model.head_dtype, which the trainer heeds too",
    "tp_size": "it is {role}.parallel.tp",
    "pp_size": "an engine has no pipeline stages; more engines come from more ranks in placement",
    "dp_size": "an engine is one replica; more engines come from more ranks in placement",
    "nnodes": "it follows from the placement",
    "node_rank": "it follows from the placement",
    "dist_init_addr": "it follows from the placement",
    "base_gpu_id": "an engine sees the GPUs of its ranks only",
    "gpu_id_step": "an engine sees the GPUs of its ranks only",
    "host": "the server is for its own ranks only",
    "port": "a free one is taken at every start",
    "nccl_port": "a free one is taken at every start",
    "api_key": "a random one is made at every start",
    "admin_api_key": "a random one is made at every start",
    "ssl_keyfile": "the server is for its own ranks only, which speak plain HTTP to it",
    "ssl_certfile": "the server is for its own ranks only, which speak plain HTTP to it",
    "tokenizer_worker_num": "with more than one SGLang checks no API key",
    "max_running_requests": "it is {role}.max_running_requests",
    "context_length": "it follows from {role}.max_context_tokens",
    "skip_tokenizer_init": "it follows from {role}.sampling.stop",
    "custom_weight_loader": "rltrain brings the weights",
    "weight_version": "rltrain brings the weights",
    "enable_memory_saver": "it follows from the placement",
    "skip_server_warmup": "there are no weights to warm up with when it starts",
    "incremental_streaming_output": "responses come as what is new of them",
    "config": "arguments are given one by one, so that each can be checked",
    **dict.fromkeys(
        ("enable_eplb", "init_expert_location", "ep_num_redundant_experts"),
        "experts would lie elsewhere than weight syncs write them",
    ),
    **dict.fromkeys(
        ("enable_lora", "max_lora_rank", "lora_target_modules", "max_loras_per_batch"),
        "it follows from model.lora and weight_sync.adapters",
    ),
    "lora_paths": "adapters would be added to the weights that are trained",
    **dict.fromkeys(
        ("cpu_offload_gb", "offload_group_size", "offload_num_in_group", "offload_prefetch_step", "offload_mode"),
        "weight syncs write to the device",
    ),
    "enable_return_routed_experts": "it follows from model.router_replay",
    "weight_cache_mode": "the weights would be shared with engines of other runs",
}
"""Fields of SGLang's ServerArgs that the config may not give, and why: {role} and {path} stand for config
keys."""

NOT_WITH_ROUTING = {
    **dict.fromkeys(
        ("enable_hierarchical_cache", "enable_lmcache"),
        "keys and values come back to its device without the experts that their tokens visited",
    ),
    "speculative_algorithm": "its record has no room for all tokens that are drafted",
}
"""Fields with which an SGLang 0.5.23 that is to return experts returns wrong ones, or ends."""


def check_arguments(spec: ServerSpec) -> None:
    """Ask the interpreter of the spec whether it has SGLang and what the installed version says to `spec.args`.

    Takes some seconds, once per interpreter and arguments. Raises ConfigError.
    """
    key = spec.config_key
    for name in spec.args:
        _refuse_ours(spec, name, name)
    reply = _ask(spec.python, json.dumps(dict(spec.args)), key)
    if "missing" in reply:
        raise ConfigError(
            f"{key}.python: {spec.python} has no SGLang that can be imported ({reply['missing']}); expected SGLang "
            f"{MIN_VERSION} or newer in it: name the interpreter of an environment that has it"
        )
    if _numbers(reply["version"]) < _numbers(MIN_VERSION):
        raise ConfigError(
            f"{key}.python: {spec.python} has SGLang {reply['version']}; expected {MIN_VERSION} or newer: "
            "install that or name another interpreter"
        )
    for name in spec.args:
        if name not in reply["fields"]:
            near = nearest(name, reply["names"])
            hint = f"the nearest that it has is {near}" if near else "its own list: python -m sglang.launch_server -h"
            raise ConfigError(f"{key}.args.{name}: SGLang {reply['version']} has no argument of this name; {hint}")
        _refuse_ours(spec, name, reply["fields"][name])
        _refuse_without_routing(spec, name, reply["fields"][name])
    if reply["problem"] is not None:
        raise ConfigError(f"{key}.args: SGLang {reply['version']} does not accept what is given: {reply['problem']}")


def _refuse_ours(spec: ServerSpec, name: str, field: str) -> None:
    if field in NOT_FOR_CONFIGS:
        path = "model.path" if spec.role == "rollout" else f"{spec.role}.path"
        reason = NOT_FOR_CONFIGS[field].format(role=spec.role, path=path)
        raise ConfigError(
            f"{spec.config_key}.args.{name}: cannot be chosen in a run of rltrain: {reason}; remove the key"
        )


def _refuse_without_routing(spec: ServerSpec, name: str, field: str) -> None:
    if spec.returns_routing and spec.args[name] and field in NOT_WITH_ROUTING:
        raise ConfigError(
            f"{spec.config_key}.args.{name}: got {json.dumps(spec.args[name])} with model.router_replay rollout, but "
            f"{NOT_WITH_ROUTING[field]}; remove the key, or set model.router_replay to recompute or off"
        )


def server_arguments(spec: ServerSpec, port: int, rendezvous_port: int) -> dict[str, dict[str, Any]]:
    """What rltrain_serve.py takes: arguments by name under "defaults", "args" and "own", of which later ones win."""
    return {
        "defaults": _proposed(spec),
        "args": dict(spec.args),
        "own": {
            "model_path": spec.model_path,
            "device": spec.device,
            "dtype": spec.dtype,
            "tp_size": spec.tp,
            "host": spec.host,
            "port": port,
            "nccl_port": rendezvous_port,
            "max_running_requests": spec.max_running_requests,
            "context_length": spec.max_context_tokens + CONTEXT_SLACK_TOKENS,
            "skip_tokenizer_init": not spec.needs_tokenizer,
            "custom_weight_loader": ["rltrain_weight_loader.load"],
            "enable_memory_saver": spec.memory_saver,
            "skip_server_warmup": True,
            "incremental_streaming_output": True,
            "nnodes": spec.num_nodes,
            "node_rank": spec.node_rank,
            "dist_init_addr": spec.rendezvous,
            **({"enable_fp32_lm_head": True} if spec.wide_head else {}),
            **({"enable_return_routed_experts": True} if spec.returns_routing else {}),
            **(_fp8(spec) if spec.fp8 else {}),
            **(_adapters(spec.adapter) if spec.adapter else {}),
        },
    }


def _fp8(spec: ServerSpec) -> dict[str, Any]:
    """What a checkpoint in FP8 says of itself: its folder is not one, but its weights come as of one."""
    overrides = json.loads(spec.args.get(MODEL_OVERRIDES, "{}"))
    return {MODEL_OVERRIDES: json.dumps({**overrides, "quantization_config": FP8_CHECKPOINT})}


def _adapters(adapter: AdapterSpec) -> dict[str, Any]:
    return {
        "enable_lora": True,
        "max_lora_rank": adapter.rank,
        "lora_target_modules": [*adapter.targets],
        "max_loras_per_batch": 2,  # the base counts as one: with room for both neither makes place for the other
    }


def _proposed(spec: ServerSpec) -> dict[str, Any]:
    common: dict[str, Any] = {
        "load_format": "dummy",
        "log_level_http": "warning",
        # With it a pause leaves a batch half done: its tokens would be counted to the weights that come next.
        "disable_overlap_schedule": spec.draws_during_syncs or spec.device == "cpu",
    }
    if spec.device == "cuda":
        return common
    # SGLang takes most of the host's memory for keys and values where it finds no GPU, and a core while it is idle.
    longest = spec.max_context_tokens + CONTEXT_SLACK_TOKENS
    return common | {
        "attention_backend": "torch_native",
        "lora_backend": "torch_native",
        "sampling_backend": "pytorch",
        "cuda_graph_backend_decode": "disabled",
        "cuda_graph_backend_prefill": "disabled",
        "max_total_tokens": max(longest, min(spec.max_running_requests * longest, MAX_CPU_CACHE_TOKENS)),
        "mem_fraction_static": 0.3,
        "sleep_on_idle": True,
    }


@functools.lru_cache(maxsize=8)
def _ask(python: str, args: str, key: str) -> Mapping[str, Any]:
    command = [python, str(SERVER_FOLDER / "rltrain_arguments.py"), args]
    try:
        done = subprocess.run(
            command, env=clean_environment(), capture_output=True, text=True, timeout=CHECK_TIMEOUT_S, check=False
        )
    except OSError as error:
        raise ConfigError(
            f"{key}.python: cannot run {python}: {error.strerror}; expected the interpreter of an environment with "
            "SGLang"
        ) from error
    except subprocess.TimeoutExpired as error:
        raise ConfigError(
            f"{key}.python: {python} has not imported SGLang within {CHECK_TIMEOUT_S:.0f} s; expected an interpreter "
            "of an environment with SGLang, on a file system that answers"
        ) from error
    if done.returncode:
        last = "\n".join(f"  {line}" for line in done.stderr.splitlines()[-5:])
        raise ConfigError(
            f"{key}.python: {python} cannot tell which arguments its SGLang takes (exit status {done.returncode}); "
            f"expected the interpreter of an environment with SGLang {MIN_VERSION} or newer. It said:\n{last}"
        )
    reply: Mapping[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return reply


def _numbers(version: str) -> tuple[int, ...]:
    """(0, 5, 23) of "0.5.23.post1"."""
    return tuple(map(int, re.findall(r"\d+", version)[:3]))
