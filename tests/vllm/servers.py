"""vLLM servers for tests: starts, calls and ends them."""

import json
import os
import shutil
import signal
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import peft
import torch
import transformers

from rltrain.rollout.sample import Sample
from tests.support.jobs import REPOSITORY
from tests.support.rollout_models import ragged_requests, write_checkpoint
from tests.support.torchrun import free_port

TOKEN = "of-the-engines"
START_TIMEOUT_S = 600.0
CALL_TIMEOUT_S = 120.0
VOCAB_SIZE = 15
"""Tokens of the quickstart's tokenizer."""
CONTEXT = 256
RANK = 8
"""Rank of adapters."""
WIDE_HEADS = {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 64}
"""vLLM's attention on CPUs needs heads of 64 or more."""
ENVIRONMENT = {
    "VLLM_SERVER_DEV_MODE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
}
ARGUMENTS = ("--dtype", "float32", "--max-model-len", str(CONTEXT), "--enforce-eager", "--max-num-seqs", "16")


DEFAULTS = {"eos_token_id": 0, "do_sample": True, "temperature": 0.5, "top_k": 1, "repetition_penalty": 3.0}
"""A generation_config.json, of which requests of a job must take nothing."""


def write_models(folder: Path, family: str, **sizes: object) -> list[Path]:
    """Writes two checkpoints of one architecture, with widely spread weights and the quickstart's tokenizer."""
    paths = [folder / f"{seed}" for seed in (0, 1)]
    for seed, path in enumerate(paths):
        own = {"vocab_size": VOCAB_SIZE, "eos_token_id": 0, "pad_token_id": 1}
        write_checkpoint(path, family, seed=seed, **WIDE_HEADS, **own, **sizes)
        (path / "generation_config.json").write_text(json.dumps(DEFAULTS))
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(REPOSITORY / "tests/warmed_up" / name, path)
    return paths


def write_adapters(checkpoint: Path, folder: Path, seed: int) -> torch.nn.Module:
    """Writes PEFT's own files of random adapters of all matrices. Returns the model with them."""
    base = transformers.AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    model = peft.get_peft_model(base, peft.LoraConfig(r=RANK, lora_alpha=16, target_modules="all-linear"))
    torch.manual_seed(seed)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data.normal_(0, 0.3)
    model.save_pretrained(folder)
    return model


def requests(count: int = 6) -> list[Sample]:
    """Returns requests with prompts of 1, 3, 5, ... random tokens."""
    made = ragged_requests(count)
    return [Sample(one.id, tuple(token % VOCAB_SIZE for token in one.prompt), seed=one.seed) for one in made]


class VLLMServer:
    """A server in its own process group, at the same address for its whole life."""

    def __init__(
        self, python: str, model: Path, log: Path, *arguments: str, environment: Mapping[str, str] | None = None
    ) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._command = [
            *(python, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), "--host", "127.0.0.1"),
            *("--port", str(self.port), "--api-key", TOKEN, "--enable-scale-out", *ARGUMENTS, *arguments),
        ]
        self._log, self._environment = log, environment or {}
        self._process: subprocess.Popen[bytes] | None = None

    def ensure(self) -> None:
        """Starts the server if it does not run, and waits until it is ready."""
        if self._process is None:
            self.start()
        deadline = time.monotonic() + START_TIMEOUT_S
        while not self.is_healthy():
            assert self._process is not None
            assert self._process.poll() is None and time.monotonic() < deadline, self._log.read_text()[-6000:]
            time.sleep(0.1)

    def start(self) -> None:
        """Starts the server and returns at once."""
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                self._command,
                env=environment | ENVIRONMENT | self._environment,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def kill(self) -> None:
        """Kills the server's processes."""
        if self._process is not None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._process = None

    def signal_engine(self, number: int) -> None:
        """Sends a signal to the process of the server's engine alone."""
        assert self._process is not None
        for path in Path("/proc").glob("[0-9]*/stat"):
            with suppress(OSError):
                group = path.read_text().rpartition(")")[2].split()[2]
                if int(group) == self._process.pid and "EngineCore" in (path.parent / "cmdline").read_text():
                    os.kill(int(path.parent.name), number)

    def is_healthy(self) -> bool:
        try:
            return call(self, "/health")[0] == 200
        except OSError:
            return False


def call(
    server: VLLMServer, path: str, body: Mapping[str, Any] | None = None, accepted: threading.Event | None = None
) -> tuple[int, str]:
    """Returns the status and text of the server's answer: to a GET without a body, else to a POST.

    Sets `accepted` when the answer begins, even if it has no content yet.
    """
    headers = {"Authorization": f"Bearer {TOKEN}", "Content-Type": "application/json"}
    data = None if body is None else json.dumps(body).encode()
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(urllib.request.Request(server.url + path, data, headers), timeout=CALL_TIMEOUT_S) as answer:
            if accepted is not None:
                accepted.set()
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as refused:
        return refused.code, refused.read().decode()


def hits_of_prefix_cache(server: VLLMServer) -> float:
    """Returns the number of prompt tokens that the server has found in its prefix cache."""
    lines = call(server, "/metrics")[1].splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith("vllm:prefix_cache_hits_total"))


def events(answer: str) -> Sequence[dict[str, Any]]:
    """Returns the events of a stream, without its end."""
    lines = [line.removeprefix("data: ") for line in answer.splitlines() if line.startswith("data: ")]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]
