"""What a server is started from, and the environment that it runs in."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

SERVER_FOLDER = Path(__file__).parent / "server"
"""Modules that SGLang's Python imports."""

FOR_THE_RANK = ("LOCAL_", "GROUP_", "ROLE_", "MASTER_", "TORCHELASTIC_", "PYTHON")
"""What torchrun, training and the rank's own Python read; a server that saw it would take itself for a rank."""
FOR_THE_RANK_EXACTLY = {"RANK", "WORLD_SIZE", "CUDA_DEVICE_MAX_CONNECTIONS", "TORCH_GLOO_LAZY_INIT", "VIRTUAL_ENV"}


@dataclass(frozen=True)
class AdapterSpec:
    """Low-rank adapters that a server has beside the weights, one set for all requests: alpha / rank x B A."""

    rank: int
    alpha: float
    targets: tuple[str, ...]
    """The matrices that have one, as PEFT calls them."""


@dataclass(frozen=True)
class ServerSpec:
    """One engine's server, or one node's part of it."""

    python: str
    """Interpreter of an environment that has SGLang."""
    model_path: str
    device: Literal["cpu", "cuda"]
    dtype: str
    tp: int
    """Ranks of the engine, over all its nodes."""
    gpus: tuple[str, ...]
    """CUDA_VISIBLE_DEVICES of the server; () on CPU."""
    host: str
    """Address that the server listens on."""
    log_path: Path
    """Appended to, with a header per start."""
    max_running_requests: int
    max_context_tokens: int
    needs_tokenizer: bool
    """Whether stop strings are looked for."""
    memory_saver: bool
    """Whether it can give its memory back and take it again."""
    fp8: bool
    """Whether the layers' matrices are in FP8, with a scale per block of 128 x 128."""
    draws_during_syncs: bool
    """Whether weights may come while it has responses under way."""
    args: Mapping[str, Any]
    """More arguments by name: <role>.sglang.args."""
    role: str = "rollout"
    """The config section that it is described in, and what messages call it by."""
    wide_head: bool = False
    """Whether logits are made in fp32."""
    node_rank: int = 0
    num_nodes: int = 1
    returns_routing: bool = False
    """Whether it tells which experts tokens have visited."""
    adapter: AdapterSpec | None = None
    """None: it has weights alone."""
    rendezvous: str | None = None
    """HOST:PORT at which the nodes of an engine meet; None where it has one node."""

    @property
    def config_key(self) -> str:
        return f"{self.role}.sglang"


def clean_environment() -> dict[str, str]:
    """This process's environment without what is there for the rank, and with the modules of `server/`."""
    kept = {name: value for name, value in os.environ.items() if not _for_the_rank(name)}
    return kept | {
        "PYTHONPATH": str(SERVER_FOLDER),
        "PYTHONUNBUFFERED": "1",  # a wait for the server looks at its log
    }


def server_environment(spec: ServerSpec) -> dict[str, str]:
    """The environment of a server, but for its token."""
    environment = clean_environment()
    if spec.device == "cuda":
        environment.pop("OMP_NUM_THREADS", None)  # torchrun's, for ranks; on the CPU engines share the cores with them
    if spec.memory_saver:
        # Without it CUDA graphs stay where they are when their memory is released, which SGLang does not mention.
        environment.setdefault("SGLANG_MEMORY_SAVER_CUDA_GRAPH", "1")
    not_proxied = [environment[name] for name in ("NO_PROXY", "no_proxy") if name in environment]
    return environment | {
        "CUDA_VISIBLE_DEVICES": ",".join(spec.gpus),
        "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1",  # the context has some slack, which the model need not have
        "SGLANG_RETURN_ORIGINAL_LOGPROB": "0",  # log-probs are of the tempered distribution
        "SGLANG_SANITIZE_NAN_LOGITS": "0",  # a policy that has diverged must not look like one that guesses
        "SGLANG_CUDA_COREDUMP_BEFORE_CRASH": "0",  # they hold up a server that is to be replaced
        "SGLANG_PYSPY_DUMP_BEFORE_CRASH": "0",
        "NO_PROXY": ",".join([*not_proxied, spec.host]),  # at the end of its start it calls itself
    }


def _for_the_rank(name: str) -> bool:
    allocator = name.startswith("PYTORCH_") and name.endswith("ALLOC_CONF")
    return allocator or name in FOR_THE_RANK_EXACTLY or name.startswith(FOR_THE_RANK)
