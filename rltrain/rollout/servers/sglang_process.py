"""An SGLang server as a child process: its arguments, environment, start and end."""

import base64
import contextlib
import functools
import http.client
import json
import os
import re
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from rltrain.errors import ConfigError, EngineError, cannot_write, nearest
from rltrain.models import Architecture, canonical_tensors, quantizable_tensors
from rltrain.models.registry import FAMILIES, FIRST_DENSE, FULL_ATTENTION_INTERVAL, PARTIAL_ROTARY, TOWERS
from rltrain.models.table import TOWER_PREFIX
from rltrain.reshard.native import BLOCK
from rltrain.runtime.messages import family_of

# The description of a server, and its environment.

SERVER_FOLDER = Path(__file__).parent / "in_sglang"
"""Folder of the modules that SGLang's Python imports."""

FOR_THE_RANK = ("LOCAL_", "GROUP_", "ROLE_", "MASTER_", "TORCHELASTIC_", "PYTHON")
"""Prefixes of variables for torchrun, training and the rank's own Python. With them a server would act as a rank."""
FOR_THE_RANK_EXACTLY = {"RANK", "WORLD_SIZE", "CUDA_DEVICE_MAX_CONNECTIONS", "TORCH_GLOO_LAZY_INIT", "VIRTUAL_ENV"}


@dataclass(frozen=True)
class AdapterSpec:
    """Low-rank adapters in a server beside its weights. One set serves all requests: alpha / rank x B A."""

    rank: int
    alpha: float
    targets: tuple[str, ...]
    """PEFT's names of the matrices with an adapter."""


@dataclass(frozen=True)
class ServerSpec:
    """The server of one engine, or one node's part of it."""

    python: str
    """Python interpreter of an environment with SGLang."""
    model_path: str
    device: Literal["cpu", "cuda"]
    dtype: str
    tp: int
    """Number of the engine's ranks, over all its nodes."""
    gpus: tuple[str, ...]
    """CUDA_VISIBLE_DEVICES of the server. Empty on CPU."""
    host: str
    """Address on which the server listens."""
    log_path: Path
    """Log file. Each start appends a header."""
    max_running_requests: int
    max_context_tokens: int
    needs_tokenizer: bool
    """Whether stop strings or images are used."""
    memory_saver: bool
    """Whether the server can release its memory and take it back."""
    fp8: bool
    """Whether the layers' matrices are in FP8, with one scale per block of 128 x 128."""
    draws_during_syncs: bool
    """Whether weights may arrive while responses are running."""
    args: Mapping[str, Any]
    """Further arguments by name, from <role>.sglang.args."""
    role: str = "rollout"
    """The server's config section, also its name in messages."""
    wide_head: bool = False
    """Whether logits are computed in fp32."""
    node_rank: int = 0
    num_nodes: int = 1
    returns_routing: bool = False
    """Whether responses include the experts of each token."""
    adapter: AdapterSpec | None = None
    """Adapters beside the weights, or None."""
    whole_tower: bool = False
    """Whether every rank has the whole vision tower. SGLang itself would split it over the ranks."""
    kept_modules: tuple[str, ...] = ()
    """Beside FP8, the modules whose matrices stay in `dtype`: the ends of their names."""
    model_config: Mapping[str, Any] = field(default_factory=dict)
    """Keys of config.json that the server reads, if the checkpoint's file may lack them."""
    rendezvous: str | None = None
    """HOST:PORT for the nodes of an engine to meet. None for one node."""

    @property
    def config_key(self) -> str:
        return f"{self.role}.sglang"


def clean_environment() -> dict[str, str]:
    """Returns this process's environment without the rank's variables, with the modules of in_sglang/ on PYTHONPATH."""
    kept = {name: value for name, value in os.environ.items() if not _for_the_rank(name)}
    return kept | {
        "PYTHONPATH": str(SERVER_FOLDER),
        "PYTHONUNBUFFERED": "1",  # `wait_until_ready` watches the log
    }


def server_environment(spec: ServerSpec) -> dict[str, str]:
    """Returns the environment of a server, without its token."""
    environment = clean_environment()
    if spec.device == "cuda":
        environment.pop("OMP_NUM_THREADS", None)  # set by torchrun for ranks; a server on a GPU need not heed it
    if spec.memory_saver:
        # Without it SGLang keeps CUDA graphs in place when it releases their memory, though its documentation does not
        # say so.
        environment.setdefault("SGLANG_MEMORY_SAVER_CUDA_GRAPH", "1")
    not_proxied = [environment[name] for name in ("NO_PROXY", "no_proxy") if name in environment]
    return environment | {
        "CUDA_VISIBLE_DEVICES": ",".join(spec.gpus),
        "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1",  # for CONTEXT_SLACK_TOKENS
        "SGLANG_RETURN_ORIGINAL_LOGPROB": "0",  # log-probs are after temperature
        "SGLANG_SANITIZE_NAN_LOGITS": "0",  # a diverged policy must be noticed
        "SGLANG_CUDA_COREDUMP_BEFORE_CRASH": "0",  # dumps would delay the restart
        "SGLANG_PYSPY_DUMP_BEFORE_CRASH": "0",
        "NO_PROXY": ",".join([*not_proxied, spec.host]),  # a starting server calls itself
    }


def _for_the_rank(name: str) -> bool:
    allocator = name.startswith("PYTORCH_") and name.endswith("ALLOC_CONF")
    return allocator or name in FOR_THE_RANK_EXACTLY or name.startswith(FOR_THE_RANK)


# The arguments of a server: fixed by rltrain, rltrain's defaults, and the config's.

MIN_VERSION = "0.5.23"
"""Oldest supported version. Earlier ones lack update sessions, or report weight versions per response and not per
token."""

CHECK_TIMEOUT_S = 600.0
CONTEXT_SLACK_TOKENS = 8
"""SGLang ends responses a few tokens before its context length."""
MAX_CPU_CACHE_TOKENS = 2**17
MODEL_OVERRIDES = "json_model_override_args"
FP8_CHECKPOINT = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": [BLOCK, BLOCK],
}
"""The quantization_config of DeepSeek-V3 and of Qwen3's FP8 checkpoints."""

NOT_FOR_CONFIGS = {
    "model_path": "it is {path}",
    "tokenizer_path": "it is {path}",
    "device": "it is the device that the run was started on",
    "dtype": "it follows from model.dtype",
    "enable_fp32_lm_head": "it follows from model.head_dtype, which the trainer uses too",
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
    "skip_server_warmup": "a starting server has no weights to warm up with",
    "incremental_streaming_output": "rltrain reads responses as increments",
    "config": "arguments are given one by one, so that each can be checked",
    **dict.fromkeys(
        ("enable_eplb", "init_expert_location", "ep_num_redundant_experts"),
        "experts would not be in the places that weight syncs write to",
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
    **dict.fromkeys(
        (
            *("attn_dp_size", "enable_dp_attention", "enable_dp_lm_head", "attn_cp_size", "dcp_size"),
            *("ep_size", "max_ep_size", "elastic_ep_initial_size", "moe_a2a_backend", "moe_dp_size", "dwdp_size"),
            *(
                "moe_dense_tp_size",
                "shared_experts_tp_size",
                "enable_dense_mlp_attn_tp",
                "enable_shared_experts_attn_tp",
            ),
        ),
        "weight syncs write to the places of tensor parallelism; servers that you start yourself may have others "
        "({role}.engine: http)",
    ),
    **dict.fromkeys(
        ("disaggregation_mode", "encoder_only", "language_only"),
        "an engine is one server with all parts and phases; more engines come from more ranks in placement",
    ),
    "hicache_storage_backend": "its keys and values outlive a run, and their names do not name the weights",
    "enable_return_routed_experts": "it follows from model.router_replay",
    "weight_cache_mode": "the weights would be shared with engines of other runs",
}
"""Fields of SGLang's ServerArgs that the config may not set, with the reason. {role} and {path} are replaced by config
keys."""

NOT_WITH_ROUTING = {
    **dict.fromkeys(
        ("enable_hierarchical_cache", "enable_lmcache"),
        "keys and values return to the device without the experts of their tokens",
    ),
    "speculative_algorithm": "SGLang's record of experts has no room for all drafted tokens",
}
"""Fields with which SGLang 0.5.23 returns wrong experts, or ends, if it is to return experts."""


NOT_ON_CPU = ("enable_deterministic_inference", "rl_on_policy_target")
"""Fields that need a GPU: SGLang's attention in plain torch is not deterministic."""


def check_arguments(spec: ServerSpec) -> None:
    """Asks the spec's interpreter for its SGLang version, and whether that version accepts `spec.args`.

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
    if numbers_of(reply["version"]) < numbers_of(MIN_VERSION):
        raise ConfigError(
            f"{key}.python: {spec.python} has SGLang {reply['version']}; expected {MIN_VERSION} or newer: "
            "install that or name another interpreter"
        )
    for name in spec.args:
        if name not in reply["fields"]:
            near = nearest(name, reply["names"])
            hint = f"the nearest that it has is {near}" if near else "list them by python -m sglang.launch_server -h"
            raise ConfigError(f"{key}.args.{name}: SGLang {reply['version']} has no argument of this name; {hint}")
        _refuse_ours(spec, name, reply["fields"][name])
        _refuse_without_routing(spec, name, reply["fields"][name])
        _refuse_on_cpu(spec, name, reply["fields"][name])
    if reply["problem"] is not None:
        raise ConfigError(f"{key}.args: SGLang {reply['version']} does not accept these: {reply['problem']}")


def _refuse_ours(spec: ServerSpec, name: str, field: str) -> None:
    if field in NOT_FOR_CONFIGS:
        path = "model.path" if spec.role == "rollout" else f"{spec.role}.path"
        reason = NOT_FOR_CONFIGS[field].format(role=spec.role, path=path)
        raise ConfigError(
            f"{spec.config_key}.args.{name}: cannot be chosen in a run of rltrain: {reason}; remove the key"
        )


def _refuse_on_cpu(spec: ServerSpec, name: str, field: str) -> None:
    if spec.device == "cpu" and spec.args[name] and field in NOT_ON_CPU:
        raise ConfigError(
            f"{spec.config_key}.args.{name}: got {json.dumps(spec.args[name])}, but this run has no GPU, and SGLang's "
            "attention on CPUs is not deterministic; remove the key, or use GPUs"
        )


def _refuse_without_routing(spec: ServerSpec, name: str, field: str) -> None:
    if spec.returns_routing and spec.args[name] and field in NOT_WITH_ROUTING:
        raise ConfigError(
            f"{spec.config_key}.args.{name}: got {json.dumps(spec.args[name])} with model.router_replay rollout, but "
            f"{NOT_WITH_ROUTING[field]}; remove the key, or set model.router_replay to recompute or off"
        )


def server_arguments(spec: ServerSpec, port: int, rendezvous_port: int) -> dict[str, dict[str, Any]]:
    """Returns the arguments for rltrain_serve.py by name, under "defaults", "args" and "own". Later groups win."""
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
            **({"mm_enable_dp_encoder": True} if spec.whole_tower else {}),
            **_overrides(spec),
            **(_adapters(spec.adapter) if spec.adapter else {}),
        },
    }


def model_config_of(architecture: Architecture) -> Mapping[str, Any]:
    """Returns the keys of config.json that SGLang needs beside those of transformers."""
    family = FAMILIES[architecture.family]
    keys = dict(family.sglang.config) if family.sglang else {}
    if FIRST_DENSE in keys:
        keys[FIRST_DENSE] = architecture.sparse_layers.index(True)
    if PARTIAL_ROTARY in keys:
        keys[PARTIAL_ROTARY] = (architecture.rotary_dim or architecture.head_dim) / architecture.head_dim
    if FULL_ATTENTION_INTERVAL in keys:
        keys[FULL_ATTENTION_INTERVAL] = [kind.delta for kind in architecture.layer_kinds].index(False) + 1
    if not keys or family.nested is None:
        return keys
    return {family.nested: keys, "vision_config": {"deepstack_visual_indexes": []}}  # Qwen3.5's towers


def kept_modules_of(architecture: Architecture) -> tuple[str, ...]:
    """Returns the modules whose matrices are not in FP8: of layers without their numbers, and the vision tower."""
    tensors = canonical_tensors(architecture)
    of_text = {
        name.rpartition(".layers.")[2].partition(".")[2].removesuffix(".weight")
        for name, shape, is_quantizable in zip(
            tensors.names, tensors.shapes, quantizable_tensors(architecture), strict=True
        )
        if len(shape) > 1 and not is_quantizable and ".layers." in name
    }
    return (*sorted(of_text), *([TOWER_PREFIX.removesuffix(".")] if architecture.family in TOWERS else []))


def _overrides(spec: ServerSpec) -> dict[str, Any]:
    """Returns the override of config.json. For FP8 it declares FP8 weights, which the checkpoint itself has not."""
    in_fp8 = {"quantization_config": {**FP8_CHECKPOINT, "modules_to_not_convert": [*spec.kept_modules]}}
    own = {**spec.model_config, **(in_fp8 if spec.fp8 else {})}
    given = json.loads(spec.args.get(MODEL_OVERRIDES, "{}"))
    merged = {
        key: {**given[key], **value} if isinstance(value, Mapping) and isinstance(given.get(key), dict) else value
        for key, value in own.items()
    }
    return {MODEL_OVERRIDES: json.dumps({**given, **merged})} if own else {}


def _adapters(adapter: AdapterSpec) -> dict[str, Any]:
    return {
        "enable_lora": True,
        "max_lora_rank": adapter.rank,
        "lora_target_modules": [*adapter.targets],
        "max_loras_per_batch": 2,  # the base counts as one, so neither evicts the other
    }


def _proposed(spec: ServerSpec) -> dict[str, Any]:
    common: dict[str, Any] = {
        "load_format": "dummy",
        "log_level_http": "warning",
        # With the overlap schedule a pause leaves a batch half done, and its tokens would be counted to the next
        # weights.
        "disable_overlap_schedule": spec.draws_during_syncs or spec.device == "cpu",
    }
    if spec.device == "cuda":
        return common
    # Without a GPU SGLang takes most of the host's memory for keys and values, and one core while it is idle.
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
            "of an environment with SGLang, on a file system in working order"
        ) from error
    if done.returncode:
        last = "\n".join(f"  {line}" for line in done.stderr.splitlines()[-5:])
        raise ConfigError(
            f"{key}.python: {python} cannot list the arguments of its SGLang (exit status {done.returncode}); "
            f"expected the interpreter of an environment with SGLang {MIN_VERSION} or newer. Its last output:\n{last}"
        )
    reply: Mapping[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return reply


def numbers_of(version: str) -> tuple[int, ...]:
    """Returns (0, 5, 23) for "0.5.23.post1"."""
    return tuple(map(int, re.findall(r"\d+", version)[:3]))


# Low-rank adapters in a server: one set under one name, used by every request.
#
# SGLang loads them once, as zeros. Weight syncs then write them in place, as they write weights. So running responses
# continue with new ones. A newly loaded set would apply only from the next request.

ADAPTER = "rltrain"
"""Name of the adapters in requests."""

NO_TENSORS = base64.b64encode(b"\x80\x03}.").decode()
"""A pickled empty dict as a rank's tensors: an adapter of zeros."""


def first_load(adapter: AdapterSpec, num_ranks: int) -> tuple[str, dict[str, Any]]:
    """Returns the call that loads the adapters into a server with `num_ranks` ranks, after its start."""
    config = {
        "peft_type": "LORA",
        "r": adapter.rank,
        "lora_alpha": adapter.alpha,
        "target_modules": [*adapter.targets],
    }
    body = {
        "lora_name": ADAPTER,
        "config_dict": config,
        "serialized_named_tensors": [NO_TENSORS] * num_ranks,
        "pinned": True,
    }
    return "/load_lora_adapter_from_tensors", body


# The child process. It never outlives its rank.

TOKEN_VARIABLE = "RLTRAIN_SGLANG_TOKEN"
POLL_S = 0.1
ANSWER_TIMEOUT_S = 5.0
KILL_TIMEOUT_S = 30.0
LOG_TAIL_LINES, LOG_LINE_CHARS = 20, 300


class Server:
    """One server, restarted as often as needed. Every start has its own port and token."""

    def __init__(self, spec: ServerSpec) -> None:
        self.spec = spec
        self.url = ""
        self.token = ""
        self.num_starts = 0
        self._process: subprocess.Popen[bytes] | None = None
        self._killed = False
        self._log_start_bytes = 0
        self._reserved: list[socket.socket] = []

    def start(self) -> None:
        """Starts the server and returns at once. Must be called in the main thread, because the kernel ends the server
        with the thread that started it.

        Raises ValueError while the server runs, and ConfigError if the log cannot be written.
        """
        if threading.current_thread() is not threading.main_thread():
            raise ValueError("start() outside of the main thread; the server would be killed when that thread ends")
        if self._process is not None and self._process.poll() is None:
            raise ValueError("start() of a running server")
        self._release_ports()
        self._reserved = [_reserve_port(self.spec.host), _reserve_port("")]
        port, rendezvous_port = (reserved.getsockname()[1] for reserved in self._reserved)
        host = f"[{self.spec.host}]" if ":" in self.spec.host else self.spec.host
        self.url, self.token = f"http://{host}:{port}", secrets.token_urlsafe(32)
        self.num_starts += 1
        self._killed = False
        arguments = json.dumps(server_arguments(self.spec, port, rendezvous_port))
        serve = [self.spec.python, str(SERVER_FOLDER / "rltrain_serve.py"), arguments]
        supervise = [sys.executable, str(SERVER_FOLDER / "rltrain_supervise.py"), str(os.getpid())]
        environment = server_environment(self.spec) | {TOKEN_VARIABLE: self.token}
        try:
            self.spec.log_path.parent.mkdir(parents=True, exist_ok=True)
            with self.spec.log_path.open("ab") as log:
                now = time.strftime("%Y-%m-%d %H:%M:%S")
                log.write(f"===== {now}: start {self.num_starts}, {self.url}: {arguments}\n".encode())
                log.flush()
                self._log_start_bytes = log.tell()
                # In its own session the supervisor survives a kill of the rank's process group, and can then kill the
                # rest of its tree.
                self._process = subprocess.Popen(
                    [*supervise, *serve],
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                )
        except OSError as error:
            raise cannot_write(self.spec.log_path, error) from error

    def wait_until_ready(self, timeout_s: float, advance: Callable[[], None]) -> None:
        """Waits until the server takes requests. On further nodes of an engine only checks that it runs.

        `advance` is called whenever the log has grown. `timeout_s` is the limit for a log that does not grow. If the
        server ends or the time is up, ends the server and raises EngineError with the end of the log.
        """
        size_bytes, since_s = -1, time.monotonic()
        while True:
            ending = self.ending
            if ending is not None:
                self.kill()
                raise EngineError(f"{self._failed(f'{ending} before it took requests')}{self._log_tail()}")
            if self.spec.node_rank > 0 or self._answers():
                self._release_ports()
                return
            now_bytes = self.spec.log_path.stat().st_size
            if now_bytes != size_bytes:
                size_bytes, since_s = now_bytes, time.monotonic()
                advance()
            elif time.monotonic() - since_s > timeout_s:
                self.kill()
                raise EngineError(
                    f"{self._failed(f'is not ready and has added nothing to its log for {timeout_s:g} s')} "
                    f"({self.spec.config_key}.start_timeout_s: raise it for a larger model or a slower disk)"
                    f"{self._log_tail()}"
                )
            time.sleep(POLL_S)

    @property
    def ending(self) -> str | None:
        """None while the server runs, else a text on its end, such as "ended with exit status 1"."""
        if self._process is None:
            return "has not been started"
        status = self._process.poll()
        if status is None:
            return None
        if self._killed:
            return "was ended by its rank"
        if status < 0:
            return f"lost its supervisor to {_signal_name(-status)}"
        return f"was killed by {_signal_name(status - 128)}" if status > 128 else f"ended with exit status {status}"

    def kill(self) -> None:
        """Ends the server and all processes that it started, and waits for their end. May be repeated.

        Raises EngineError if the kernel cannot end them.
        """
        self._release_ports()
        if self._process is None or self._process.poll() is not None:
            return
        self._killed = True
        self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(KILL_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._kill_group(self._process)

    def _kill_group(self, supervisor: subprocess.Popen[bytes]) -> None:
        """Kills the whole process group, for a supervisor that hangs or waits for an unkillable process."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(supervisor.pid, signal.SIGKILL)
        try:
            supervisor.wait(KILL_TIMEOUT_S)
        except subprocess.TimeoutExpired as error:
            raise EngineError(
                f"{self._failed(f'is still there {2 * KILL_TIMEOUT_S:g} s after it was killed')} as process "
                f"{supervisor.pid}; its device hangs: look at the machine's kernel log"
            ) from error

    def _answers(self) -> bool:
        request = urllib.request.Request(f"{self.url}/model_info", headers={"Authorization": f"Bearer {self.token}"})
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            with opener.open(request, timeout=ANSWER_TIMEOUT_S) as answer:
                return answer.status == 200
        except (OSError, http.client.HTTPException):  # URLError, HTTPError and timeouts are OSErrors
            return False

    def _failed(self, what: str) -> str:
        return f"{self.spec.config_key}: the server of {self.spec.model_path} (start {self.num_starts}) {what}"

    def _log_tail(self) -> str:
        with self.spec.log_path.open("rb") as log:
            log.seek(self._log_start_bytes)
            lines = log.read().decode(errors="replace").splitlines()[-LOG_TAIL_LINES:]
        shown = "\n".join(f"  {line[:LOG_LINE_CHARS]}" for line in lines) if lines else "  (nothing)"
        return f"; its arguments are in {self.spec.config_key}.args. The end of its log, {self.spec.log_path}:\n{shown}"

    def _release_ports(self) -> None:
        for reserved in self._reserved:
            reserved.close()
        self._reserved = []


def _reserve_port(host: str) -> socket.socket:
    """Returns a socket bound to a free port, so that no other process gets the port. "" means every address.

    The server can still bind the port: both set SO_REUSEADDR, and this socket never listens.
    """
    family = family_of(host)
    reserved = socket.socket(family)
    reserved.bind((host, 0))
    reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    return reserved


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
