"""Measures tokens per second of engines side by side on one model, and the difference of their log-probs.

    OMP_NUM_THREADS=1 python tools/benchmarks/rollout.py [--engines embedded,generate] [--model DIR] [--repeats 9]
        [--threads 1] [--cases TEXT] [--device cpu] [--sglang-python PYTHON] [--vllm-python PYTHON]

Engines are `embedded`, `generate` (of transformers), `sglang` and `vllm`. The last two are servers of the given
interpreters. This program starts and ends them, and asks them over loopback as `engine: http` does. All get the same
prompts and sample at temperature 1 without truncation. All except `generate` also return every token's log-prob. The
largest difference to the log-probs of transformers' model is reported, which is the model that `backend: fsdp` trains.

Each repeat times the engines in turn, so other load on the machine affects all alike. A run before the timed one warms
the engine up. Medians are reported, and the ratio of the first engine to each other one. Tokens after a sequence's end
are not counted. The last line is one JSON object.

Without --model a Qwen3 of the quickstart's size with random weights is made. Each of its tokens ends the sequence with
a probability near 1/15. So lengths have a long tail in the cases with stop tokens. Its heads are 64 wide if vLLM takes
part, which has no attention for narrower ones on CPUs, and 16 otherwise.
"""

import argparse
import json
import os
import secrets
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import httpx
import torch
import transformers
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import Tensor

from rltrain.checkpoint.hf_reader import load_parameters
from rltrain.config.rollout import Http
from rltrain.models import Architecture, read_architecture
from rltrain.reshard.copy_table import allocate_parameters
from rltrain.rollout.embedded import EmbeddedEngine
from rltrain.rollout.engine import Engine, SamplingParams
from rltrain.rollout.layout import engine_layout
from rltrain.rollout.sample import Sample
from rltrain.rollout.servers.calls import Access
from rltrain.rollout.servers.fleet import Fleet
from rltrain.rollout.servers.http_engine import CheckpointWeights, HttpEngine
from rltrain.rollout.servers.sglang_process import SERVER_FOLDER, Server, ServerSpec, clean_environment
from rltrain.runtime.grid import Grid

DEFAULT_EOS = 0
PROMPT_TOKENS = 8
MAX_RUNNING = 256
START_TIMEOUT_S = 600.0


@dataclass(frozen=True)
class Case:
    """A case. `samples_per_prompt` neighbours share a prompt. With `stops` sequences end at end-of-sequence tokens."""

    name: str
    num_sequences: int
    max_response_tokens: int
    samples_per_prompt: int = 1
    stops: bool = False


CASES = (
    Case("64 sequences of 26 tokens", 64, 26),
    Case("256 sequences of 26 tokens", 256, 26),
    Case("256 sequences of 26 tokens, 16 per prompt", 256, 26, samples_per_prompt=16),
    Case("256 sequences of long-tailed length", 256, 96, stops=True),
    Case("1024 sequences of long-tailed length", 1024, 96, stops=True),
)
MAX_CONTEXT_TOKENS = PROMPT_TOKENS + max(case.max_response_tokens for case in CASES)


def write_default_model(folder: Path, *, wide_heads: bool) -> Path:
    config = transformers.Qwen3Config(
        vocab_size=15,
        hidden_size=64,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=2 if wide_heads else 4,
        num_key_value_heads=1 if wide_heads else 2,
        head_dim=64 if wide_heads else 16,
        max_position_embeddings=2048,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=DEFAULT_EOS,
        pad_token_id=DEFAULT_EOS,
    )
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    words = {f"t{token}": token for token in range(config.vocab_size)}
    tokenizer = Tokenizer(WordLevel(words, unk_token="t1"))
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="t0").save_pretrained(folder)
    return folder


# What is compared.


@dataclass(frozen=True)
class Setting:
    """What all engines have in common."""

    path: Path
    architecture: Architecture
    device: torch.device
    dtype: torch.dtype
    threads: int
    logs: Path


class Contestant(Protocol):
    """An engine on the checkpoint of a setting."""

    def run(self, case: Case, prompts: Tensor, seed: int) -> tuple[int, Sequence[Sample]]:
        """Returns the number of generated tokens, and the samples if they have log-probs."""
        ...


class OfEngine:
    """An engine of rltrain, in this process or on a server."""

    def __init__(self, setting: Setting, engine: Engine) -> None:
        self._eos, self._engine = setting.architecture.eos_token_ids, engine

    def run(self, case: Case, prompts: Tensor, seed: int) -> tuple[int, Sequence[Sample]]:
        requests = [Sample(i, tuple(row), seed=(seed << 32) + i) for i, row in enumerate(prompts.tolist())]
        sampling = SamplingParams(1.0, 1.0, 0, case.max_response_tokens, self._eos if case.stops else ())
        done = self._engine.generate(requests, sampling)
        return sum(len(sample.tokens) for sample in done), done


def embedded(setting: Setting) -> Contestant:
    """Returns the embedded engine."""
    layout = engine_layout(setting.architecture, Grid((0,)))
    parameters = allocate_parameters(layout, 0, device=setting.device)
    load_parameters(setting.path, layout, 0, parameters)
    engine = EmbeddedEngine(
        setting.architecture,
        parameters,
        tp_group=None,
        max_running_requests=MAX_RUNNING,
        max_context_tokens=MAX_CONTEXT_TOKENS,
        dtype=setting.dtype,
        device=setting.device,
    )
    return OfEngine(setting, engine)


class Generate:
    """transformers' `generate`, with at most as many parallel sequences as the engines."""

    def __init__(self, setting: Setting) -> None:
        self._eos, self._device = setting.architecture.eos_token_ids, setting.device
        self._model: Any = transformers_model(setting)
        self._model.generation_config.eos_token_id = None  # each case says what ends a sequence

    def run(self, case: Case, prompts: Tensor, seed: int) -> tuple[int, Sequence[Sample]]:
        torch.manual_seed(seed)
        return sum(self._generate(case, batch.to(self._device)) for batch in prompts.split(MAX_RUNNING)), ()

    def _generate(self, case: Case, prompts: Tensor) -> int:
        sequences = self._model.generate(
            prompts,
            attention_mask=torch.ones_like(prompts),
            max_new_tokens=case.max_response_tokens,
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            eos_token_id=list(self._eos) if case.stops else None,
            pad_token_id=self._eos[0] if self._eos else 0,
        )
        responses = sequences[:, prompts.shape[1] :]
        if not case.stops:
            return responses.numel()
        ended = torch.isin(responses, torch.tensor(self._eos, device=responses.device)).cumsum(-1)
        return int((ended.cumsum(-1) <= 1).sum())


def transformers_model(setting: Setting) -> Any:
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(setting.path, dtype=setting.dtype)
    return model.to(setting.device).eval()


# Servers, asked as those at the URLs of a config.


class OneAddress:
    """The list of servers of `Fleet`: one that never changes."""

    problem = None

    def __init__(self, url: str) -> None:
        self._url = url

    def mine(self) -> tuple[str, ...]:
        return (self._url,)


def on_server(setting: Setting, url: str, token: str, ended: ExitStack) -> Contestant:
    """Returns the engine on the server at `url`, which keeps its weights."""
    weights, http = CheckpointWeights(START_TIMEOUT_S), Http(start_timeout_s=START_TIMEOUT_S)
    fleet = Fleet(
        OneAddress(url),  # type: ignore[arg-type]
        Access(token),
        weights,
        http,
        protocol="auto",
        role="rollout",
        max_running_requests=MAX_RUNNING,
        max_context_tokens=MAX_CONTEXT_TOKENS,
        needs_weights=False,
    )
    engine = HttpEngine(
        fleet,
        weights,
        max_running_requests=MAX_RUNNING,
        max_context_tokens=MAX_CONTEXT_TOKENS,
        advance=lambda: None,
    )
    ended.callback(engine.close)
    engine.start()
    engine.begin_update()
    engine.end_update(0)
    return OfEngine(setting, engine)


def sglang(setting: Setting, python: str, ended: ExitStack) -> Contestant:
    """Starts an SGLang server."""
    on_gpu = setting.device.type == "cuda"
    spec = ServerSpec(
        python=python,
        model_path=str(setting.path),
        device="cuda" if on_gpu else "cpu",
        dtype=str(setting.dtype).removeprefix("torch."),
        tp=1,
        gpus=(str(setting.device.index or 0),) if on_gpu else (),
        host="127.0.0.1",
        log_path=setting.logs / "sglang.log",
        max_running_requests=MAX_RUNNING,
        max_context_tokens=MAX_CONTEXT_TOKENS,
        needs_tokenizer=False,
        memory_saver=False,
        fp8=False,
        draws_during_syncs=False,
        args={"load_format": "auto"},
    )
    server = Server(spec)
    ended.callback(server.kill)
    server.start()
    server.wait_until_ready(START_TIMEOUT_S, lambda: None)
    return on_server(setting, server.url, server.token, ended)


OF_VLLM = {
    "VLLM_SERVER_DEV_MODE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}


def vllm(setting: Setting, python: str, ended: ExitStack) -> Contestant:
    """Starts a vLLM server. It ends with this program, and with all its processes."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    token, log = secrets.token_urlsafe(16), setting.logs / "vllm.log"
    options = {
        "model": setting.path,
        "host": "127.0.0.1",
        "port": port,
        "dtype": str(setting.dtype).removeprefix("torch."),
        "max-model-len": MAX_CONTEXT_TOKENS,
        "max-num-seqs": MAX_RUNNING,
        "logprobs-mode": "processed_logprobs",
    }
    command = [python, "-m", "vllm.entrypoints.openai.api_server", *(f"--{name}={of}" for name, of in options.items())]
    command += ["--enable-scale-out", *(["--enforce-eager"] if setting.device.type == "cpu" else [])]
    supervise = [sys.executable, str(SERVER_FOLDER / "rltrain_supervise.py"), str(os.getpid())]
    environment = {name: value for name, value in clean_environment().items() if name != "PYTHONPATH"}
    own = {**OF_VLLM, "VLLM_API_KEY": token, "OMP_NUM_THREADS": str(setting.threads)}
    with log.open("wb") as output:
        server = subprocess.Popen(
            [*supervise, *command], env={**environment, **own}, stdout=output, stderr=output, start_new_session=True
        )
    ended.callback(server.wait)
    ended.callback(server.terminate)
    url = f"http://127.0.0.1:{port}"
    _wait_for(url, server, log)
    return on_server(setting, url, token, ended)


def _wait_for(url: str, server: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while True:
        try:
            if httpx.get(f"{url}/health", trust_env=False).status_code == httpx.codes.OK:
                return
        except httpx.HTTPError:
            time.sleep(0.2)
        if server.poll() is not None or time.monotonic() > deadline:
            sys.exit(f"vLLM has not started; the end of its log:\n{log.read_text()[-4000:]}")


# The measurement.


def draw_prompts(case: Case, architecture: Architecture) -> Tensor:
    """Returns prompts without end-of-sequence tokens, [sequences, PROMPT_TOKENS]."""
    generator = torch.Generator().manual_seed(0)
    eos = architecture.eos_token_ids
    allowed = torch.tensor([token for token in range(architecture.vocab_size) if token not in eos])
    shape = (case.num_sequences // case.samples_per_prompt, PROMPT_TOKENS)
    distinct = allowed[torch.randint(len(allowed), shape, generator=generator)]
    return distinct.repeat_interleave(case.samples_per_prompt, dim=0)


def largest_difference(model: Any, samples: Sequence[Sample]) -> float:
    """Returns the largest difference between the samples' log-probs and the model's."""
    largest = 0.0
    for start in range(0, len(samples), MAX_RUNNING):
        batch = samples[start : start + MAX_RUNNING]
        rows = [torch.tensor([*sample.prompt, *sample.tokens]) for sample in batch]
        ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True).to(model.device)
        logprobs = model(ids).logits.float().log_softmax(-1)
        expected = logprobs[:, :-1].gather(-1, ids[:, 1:, None])[..., 0].cpu()
        for row, sample in zip(expected, batch, strict=True):
            own = row[len(sample.prompt) - 1 :][: len(sample.tokens)]
            largest = max(largest, (own - torch.tensor([*sample.logprobs])).abs().max().item())
    return largest


def measure(
    contestants: Mapping[str, Contestant], model: Any, case: Case, prompts: Tensor, repeats: int
) -> dict[str, str | float]:
    speeds: dict[str, list[float]] = {name: [] for name in contestants}
    drawn: dict[str, Sequence[Sample]] = {}
    for seed in range(repeats):
        for name, contestant in contestants.items():
            contestant.run(case, prompts, seed)  # the others' runs have left the processor's caches without its data
            start = time.perf_counter()
            count, drawn[name] = contestant.run(case, prompts, repeats + seed)
            speeds[name].append(count / (time.perf_counter() - start))
    medians = {name: statistics.median(of_name) for name, of_name in speeds.items()}
    first, *others = medians
    return {
        "case": case.name,
        **{f"{name}_tokens_per_s": round(speed) for name, speed in medians.items()},
        **{f"{first}_over_{name}": round(medians[first] / medians[name], 2) for name in others},
        **{
            f"{name}_logprob_difference": float(f"{largest_difference(model, samples):.2g}")
            for name, samples in drawn.items()
            if samples
        },
    }


IN_PROCESS: dict[str, Callable[[Setting], Contestant]] = {"embedded": embedded, "generate": Generate}
ON_SERVERS = {"sglang": sglang, "vllm": vllm}


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", default="embedded,generate", help="engines to compare, the first with each other")
    parser.add_argument("--model", type=Path, help="folder of a Hugging Face checkpoint")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--cases", default="", help="run only cases with this text in their name")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    for name in ON_SERVERS:
        variable = f"RLTRAIN_{name.upper()}_PYTHON"
        parser.add_argument(f"--{name}-python", default=os.environ.get(variable), help=f"default: {variable}")
    arguments = parser.parse_args()
    arguments.engines = arguments.engines.split(",")
    if arguments.repeats < 1:
        parser.error("--repeats must be at least 1")
    if not any(arguments.cases in case.name for case in CASES):
        parser.error(f"--cases {arguments.cases!r} fits none of {[case.name for case in CASES]}")
    if unknown := [name for name in arguments.engines if name not in (*IN_PROCESS, *ON_SERVERS)]:
        parser.error(f"--engines has {unknown[0]!r}; expected some of {', '.join((*IN_PROCESS, *ON_SERVERS))}")
    if lacking := [name for name in arguments.engines if name in ON_SERVERS and not _python(arguments, name)]:
        parser.error(f"--engines has {lacking[0]}, which needs --{lacking[0]}-python")
    if arguments.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda needs a GPU")
    return arguments


def _python(arguments: argparse.Namespace, name: str) -> str | None:
    python: str | None = getattr(arguments, f"{name}_python")
    return python


@torch.inference_mode()
def main() -> None:
    arguments = parse_arguments()
    torch.set_num_threads(arguments.threads)
    transformers.logging.set_verbosity_error()
    results = []
    with tempfile.TemporaryDirectory() as folder, ExitStack() as ended:
        wide_heads = "vllm" in arguments.engines
        model = arguments.model or write_default_model(Path(folder, "model"), wide_heads=wide_heads)
        device, dtype = torch.device(arguments.device), getattr(torch, arguments.dtype)
        setting = Setting(model, read_architecture(model), device, dtype, arguments.threads, Path(folder))
        contestants = {
            name: IN_PROCESS[name](setting)
            if name in IN_PROCESS
            else ON_SERVERS[name](setting, str(_python(arguments, name)), ended)
            for name in arguments.engines
        }
        reference = transformers_model(setting)
        for case in (case for case in CASES if arguments.cases in case.name):
            prompts = draw_prompts(case, setting.architecture)
            results.append(measure(contestants, reference, case, prompts, arguments.repeats))
            print("   ".join(f"{name} {value}" for name, value in results[-1].items()), flush=True)
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    print(json.dumps({"threads": arguments.threads, "repeats": arguments.repeats, **versions, "cases": results}))


if __name__ == "__main__":
    main()
