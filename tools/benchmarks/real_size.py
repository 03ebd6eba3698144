"""Trains a random Qwen3 of real size for a few steps. Measures the seconds of a step and its parts, and memory.

    python tools/benchmarks/real_size.py [--size 0.6b] [--cases colocated,apart] [--steps 5] [key=value ...]

The checkpoint, and a tokenizer with a full vocabulary, are made at run time. Every case is a whole job without a GPU:

    colocated    one rank has all roles, with weight_sync.verify
    reference    like colocated, with a reference
    offload      like colocated, with offload of every role; without a GPU the device is the host
    apart        actor and engine on one rank each, asynchronously
    checkpoint   like apart, with a checkpoint of the whole run at every second step

Weights are bfloat16 if the processor multiplies bfloat16. Otherwise they are float32, because torch's bfloat16 products
would take some fifty times as long.

Seconds are medians over the steps after the first one. The first step counts as part of the start. Steps with and
without a checkpoint are reported separately. `must_gb` is the size of weights, gradients and optimizer of a rank's
roles. It excludes Python (0.4 GB) and a micro-batch's memory, mostly logits and the vocabulary's gradients. `peak_gb`
is the peak of the rank's process. The last line is one JSON object.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(REPOSITORY), str(REPOSITORY / "tools")]

from rltrain.checkpoint.safetensors_file import SafetensorsFile, TensorEntry  # noqa: E402
from rltrain.cli.quickstart import INIT_STD, Size, qwen3_config  # noqa: E402
from rltrain.models import canonical_tensors, read_architecture  # noqa: E402

VOCABULARY = 151_936
SIZES = {
    "tiny": Size(hidden=64, layers=2, heads=4, kv_heads=2, head_dim=16, intermediate=128),
    "0.1b": Size(hidden=512, layers=8, heads=8, kv_heads=4, head_dim=64, intermediate=1536),
    "0.6b": Size(hidden=1024, layers=28, heads=16, kv_heads=8, head_dim=128, intermediate=3072),
}
NUM_PROMPTS = 64
EOS, PAD = "<|im_end|>", "<|endoftext|>"
COMMON = [
    "algorithm=grpo",
    "data.eval=null",
    "data.max_prompt_tokens=32",
    "batch={prompts_per_step: 4, samples_per_prompt: 2, mini_batches: 1}",
    "rollout.sampling.max_response_tokens=16",
    "rollout.max_context_tokens=64",
    "rollout.max_running_requests=8",
    "actor.micro_batch_tokens=128",
    "loss.kl.coef=0",
    "checkpoint.save_hf=false",
    "checkpoint.save_every_s=0",
    "logging={progress: false, samples: 0}",
    "reward={function: 'tools.benchmarks.slow_reward:slow', options: {seconds: 0.0}, num_workers: 1}",
]
ONE_RANK = ["placement={'actor, rollout, reward': 0}", "weight_sync.verify=true"]
ROLES = ("actor", "rollout")
HAS_BFLOAT16 = torch.ops.mkldnn._is_mkldnn_bf16_supported()
APART = [
    "placement={actor: 0, 'rollout, reward': 1}",
    "schedule={mode: asynchronous, max_staleness: 1}",
]
CASES: dict[str, tuple[int, list[str]]] = {
    "colocated": (1, ONE_RANK),
    "reference": (1, ["placement={'actor, reference, rollout, reward': 0}", "loss.kl.coef=0.001"]),
    "offload": (1, [*ONE_RANK, *(f"{role}.offload=true" for role in ROLES)]),
    "apart": (2, APART),
    "checkpoint": (2, [*APART, "checkpoint.save_interval=2", "checkpoint.keep=1"]),
}


def make_model(folder: Path, size: Size, vocab_size: int) -> int:
    """Writes a checkpoint with a tokenizer of `vocab_size` words, and prompts. Returns the number of parameters."""
    folder.mkdir(parents=True)
    words = [EOS, PAD, *(f"w{number}" for number in range(vocab_size - 2))]
    tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token=PAD))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.WhitespaceSplit(), decoders.Fuse()
    tokenizer.add_special_tokens([EOS, PAD])
    tokenizer.save(str(folder / "tokenizer.json"))
    of_tokenizer = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": EOS, "pad_token": PAD}
    (folder / "tokenizer_config.json").write_text(json.dumps(of_tokenizer))
    config = qwen3_config(size, vocab_size, 0, 1) | {"tie_word_embeddings": True, "dtype": "bfloat16"}
    (folder / "config.json").write_text(json.dumps(config))
    tensors = canonical_tensors(read_architecture(folder))
    shapes = dict(zip(tensors.names, tensors.shapes, strict=True))
    entries = [TensorEntry(name, torch.bfloat16, shape) for name, shape in shapes.items()]
    generator = torch.Generator().manual_seed(0)
    with SafetensorsFile(folder / "model.safetensors", entries, {"format": "pt"}) as file:
        for entry in file.entries:
            values = torch.ones(entry.shape, dtype=entry.dtype)
            file.append(
                entry.name, values.normal_(0, INIT_STD, generator=generator) if len(entry.shape) > 1 else values
            )
    rows = (
        {"prompt": " ".join(f"w{(7 * row + 31 * i) % 1000}" for i in range(16)), "label": ""}
        for row in range(NUM_PROMPTS)
    )
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return sum(entry.bytes // 2 for entry in entries)


class Memory(threading.Thread):
    """Watches the child processes until `done`. `peak_bytes` has the peak of each rank."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.done = threading.Event()
        self.peak_bytes: dict[int, int] = {}

    def run(self) -> None:
        while not self.done.wait(0.2):
            for rank, most in _ranks_below(os.getpid()):
                self.peak_bytes[rank] = max(self.peak_bytes.get(rank, 0), most)


def _ranks_below(parent: int) -> Iterator[tuple[int, int]]:
    """Yields (rank, peak resident bytes) for torchrun's ranks below `parent`."""
    for children in Path(f"/proc/{parent}/task").glob("*/children"):
        for child in _read(children).split():
            variables = dict(entry.partition("=")[::2] for entry in _read(Path(f"/proc/{child}/environ")).split("\0"))
            status = dict(line.partition(":")[::2] for line in _read(Path(f"/proc/{child}/status")).splitlines())
            if "RANK" in variables and "VmHWM" in status:
                yield int(variables["RANK"]), int(status["VmHWM"].split()[0]) * 1024
            yield from _ranks_below(int(child))


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:  # it has ended meanwhile
        return ""


def settings_of(case: str, model: Path, folder: Path, overrides: list[str]) -> list[str]:
    """Returns the overrides of an empty config."""
    paths = [f"model.path={model}", f"data.train.path={model}/prompts.jsonl", f"output_dir={folder}"]
    return [*paths, *COMMON, *CASES[case][1], *overrides]


def run(case: str, model: Path, folder: Path, overrides: list[str]) -> dict[str, Any]:
    num_ranks, _ = CASES[case]
    (folder.parent / "empty.yaml").write_text("{}")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_ranks}"]
    command += ["launch/train.py", "--config", str(folder.parent / "empty.yaml")]
    command += settings_of(case, model, folder, overrides)
    memory, begin = Memory(), time.perf_counter()
    memory.start()
    done = subprocess.run(command, cwd=REPOSITORY, stdout=sys.stderr, check=False)  # stdout is for results
    seconds = time.perf_counter() - begin
    memory.done.set()
    memory.join()
    if done.returncode:
        sys.exit(f"{case}: the job ended with status {done.returncode}; its output is above")
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {
        "start_and_first_step_s": round(seconds - sum(record["perf/step_time_s"] for record in records[1:]), 1),
        **measured(records),
        "peak_gb": {rank: round(most / 1e9, 2) for rank, most in sorted(memory.peak_bytes.items())},
    }


def keep_logs(run_folder: Path, logs: Path) -> None:
    logs.mkdir(parents=True, exist_ok=True)
    shutil.copy(run_folder / "metrics.jsonl", logs)
    if (run_folder / "trace").exists():
        shutil.copytree(run_folder / "trace", logs / "trace", dirs_exist_ok=True)


def measured(records: list[dict[str, float]]) -> dict[str, float]:
    """Returns seconds and bytes of the steps after the first one."""
    later = records[1:]
    saved = [record for record in later if "perf/checkpoint_copy_s" in record]
    others = [record for record in later if record not in saved]
    result = {"step_s": median(others, "perf/step_time_s")}
    result |= {f"{task}_s": median(others, f"perf/{task}_s") for task in ("generate", "update", "weight_sync")}
    result["verify_s"] = median(others, "perf/weight_sync_verify_s")
    result["moves_s"] = median(others, "memory/offload_s") + median(others, "memory/onload_s")
    if saved:
        result["step_with_checkpoint_s"] = median(saved, "perf/step_time_s")
        for name in ("wait_s", "copy_s", "late_copy_s", "write_s", "bytes"):
            result[f"checkpoint_{name}"] = median(later, f"perf/checkpoint_{name}")
    return {name: round(value, 3) for name, value in result.items()}


def median(records: list[dict[str, float]], name: str) -> float:
    return statistics.median([record[name] for record in records if name in record] or [0.0])


def must_be_there(case: str, num_parameters: int, dtype: str) -> dict[int, float]:
    """Returns GB by rank. Per parameter an actor has 4 bytes of gradient and 8 of moments, and 4 of master weight if
    its dtype differs from the weight's. All roles have the weight."""
    weights = {"bfloat16": 2, "float32": 4}[dtype] * num_parameters / 1e9
    actor = weights + {"bfloat16": 16, "float32": 12}[dtype] * num_parameters / 1e9
    others = {"colocated": weights, "offload": weights, "reference": 2 * weights}
    must = {0: actor + others[case]} if case in others else {0: actor, 1: weights}
    return {rank: round(gb, 2) for rank, gb in must.items()}


def parse_arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="0.6b")
    parser.add_argument("--vocabulary", type=int, default=VOCABULARY)
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16" if HAS_BFLOAT16 else "float32")
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--folder", help="folder for large temporary checkpoints; default: the system's")
    parser.add_argument("--logs", type=Path, help="folder for every case's metrics and, with logging.trace, its trace")
    parser.add_argument("overrides", nargs="*")
    return parser.parse_args(given)


def job_settings(arguments: argparse.Namespace) -> list[str]:
    """Returns the overrides from the command line."""
    return [f"steps={arguments.steps}", f"model.dtype={arguments.dtype}", *arguments.overrides]


def main() -> None:
    arguments = parse_arguments()
    with tempfile.TemporaryDirectory(dir=arguments.folder) as name:
        folder = Path(name)
        num_parameters = make_model(folder / "model", SIZES[arguments.size], arguments.vocabulary)
        results = {}
        for case in arguments.cases.split(","):
            found = run(case, folder / "model", folder / case, job_settings(arguments))
            if arguments.logs:
                keep_logs(folder / case, arguments.logs / case)
            results[case] = found | {"must_gb": must_be_there(case, num_parameters, arguments.dtype)}
            print(case, json.dumps(results[case]), flush=True)
    print(
        json.dumps(
            {"size": arguments.size, "dtype": arguments.dtype, "num_parameters": num_parameters, "cases": results}
        )
    )


if __name__ == "__main__":
    main()
