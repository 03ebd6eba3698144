"""Memory and speed of tools/convert_checkpoint.py on a large random checkpoint, in both directions.

    python tools/benchmarks/convert.py [--gb 3] [--processes 1 2] [--folder DIR]

Makes a random bfloat16 checkpoint with the widths of Qwen3-4B and as many layers as --gb allows, in files of at most
1 GB, and converts it to Megatron's format and back, starting the command anew for every case; then it verifies that
what came back equals the original. Memory is RssAnon + RssShmem of /proc/PID/status, of the process that has most,
sampled every 5 ms: pages of mapped files are not counted, since the kernel takes them back when it needs them.
"own_mb" is what exceeds the memory of the same program before it opened a checkpoint. "bound_mb" is the largest tensor,
and to Megatron 1.3 times the largest file that a writer makes besides. GB/s are bytes of the checkpoint per second of
the whole command, its start and waiting for the disk included. The last line is one JSON object.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from rltrain.checkpoint.hf_files import METADATA, planned_files, write_index
from rltrain.checkpoint.safetensors_file import SafetensorsFile
from rltrain.models import canonical_tensors, read_architecture
from rltrain.reshard.layout import hf_layout

COMMAND = Path(__file__).resolve().parents[1] / "convert_checkpoint.py"
SAMPLE_S = 0.005
MAX_FILE_BYTES = 10**9
RANDOM_ROWS = 1024

CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 151936,
    "hidden_size": 2560,
    "intermediate_size": 9728,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "hidden_act": "silu",
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "attention_bias": False,
    "tie_word_embeddings": True,
    "dtype": "bfloat16",
}


@dataclass(frozen=True)
class Usage:
    """What a command took: the largest process's memory of its own, and time."""

    peak_bytes: int
    seconds: float


def make_checkpoint(folder: Path, gigabytes: float) -> tuple[int, int]:
    """(all bytes, bytes of the largest tensor) of a new checkpoint of about `gigabytes`."""
    folder.mkdir()
    for num_layers in range(1, 1000):
        (folder / "config.json").write_text(json.dumps({**CONFIG, "num_hidden_layers": num_layers}, indent=2))
        sizes = canonical_tensors(read_architecture(folder)).matrix_shapes.prod(axis=1) * 2
        if sizes.sum() >= gigabytes * 10**9:
            break
    files = planned_files(hf_layout(read_architecture(folder), (0,), dtype="bfloat16"), MAX_FILE_BYTES)
    generator = torch.Generator().manual_seed(0)
    for file in files:
        with SafetensorsFile(folder / file.name, file.entries, METADATA) as opened:
            for entry in opened.entries:
                matrix = (1, *entry.shape)[-2:]
                for first in range(0, matrix[0], RANDOM_ROWS):
                    shape = (min(RANDOM_ROWS, matrix[0] - first), matrix[1])
                    bits = torch.randint(-(2**15), 2**15, shape, dtype=torch.int16, generator=generator)
                    opened.append(entry.name, bits.view(torch.bfloat16))
    write_index(folder, files)
    return int(sizes.sum()), int(sizes.max())


def run(num_processes: int, *arguments: object) -> Usage:
    """The command on `num_processes`; ends the benchmark where it fails."""
    launcher = [sys.executable]
    if num_processes > 1:
        launcher += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_processes}"]
    begin = time.monotonic()
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [*launcher, str(COMMAND), *map(str, arguments)], env=environment, stdout=subprocess.DEVNULL
    )
    peak_bytes = 0
    while process.poll() is None:
        peak_bytes = max(peak_bytes, *map(own_memory, converting(process.pid)), 0)
        time.sleep(SAMPLE_S)
    if process.returncode:
        sys.exit(f"{' '.join(map(str, arguments))} failed with status {process.returncode}")
    return Usage(peak_bytes, time.monotonic() - begin)


def converting(launched: int) -> list[int]:
    """The processes that convert: the launched one, or torchrun's children."""
    try:
        children = Path(f"/proc/{launched}/task/{launched}/children").read_text().split()
    except OSError:
        return []
    return [int(child) for child in children] or [launched]


def own_memory(pid: int) -> int:
    """Bytes that belong to no file; 0 for a process that has ended."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith(("RssAnon:", "RssShmem:")))


def measure(folder: Path, num_processes: int, total: int, largest_tensor: int, idle_bytes: int) -> list[dict[str, Any]]:
    """Both directions; what comes back must equal the original."""
    original, megatron, back = folder / "original", folder / "megatron", folder / "back"
    there = run(num_processes, "hf-to-megatron", "--input", original, "--output", megatron)
    shard = max(file.stat().st_size for file in megatron.glob("*/*.distcp"))
    back_again = run(num_processes, "megatron-to-hf", "--input", megatron, "--output", back)
    run(1, "verify", original, back)
    results = []
    for direction, usage, bound in (
        ("hf-to-megatron", there, 1.3 * shard + largest_tensor),
        ("megatron-to-hf", back_again, largest_tensor),
    ):
        own = usage.peak_bytes - idle_bytes
        results.append(
            {
                "direction": direction,
                "processes": num_processes,
                "peak_mb": round(usage.peak_bytes / 1e6),
                "own_mb": round(own / 1e6),
                "bound_mb": round(bound / 1e6),
                "within_bound": own <= bound,
                "largest_shard_mb": round(shard / 1e6),
                "seconds": round(usage.seconds, 1),
                "gb_per_s": round(total / usage.seconds / 1e9, 3),
            }
        )
        print("  ".join(f"{name} {value}" for name, value in results[-1].items()), flush=True)
    shutil.rmtree(megatron)
    shutil.rmtree(back)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gb", type=float, default=3.0, help="of the checkpoint, in 10^9 bytes (default 3)")
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--folder", type=Path, help="where to work: three times --gb are written (default: a new one)")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.folder) as name:
        folder = Path(name)
        total, largest_tensor = make_checkpoint(folder / "original", arguments.gb)
        idle = run(1, "--help")
        cases = [
            case
            for num_processes in arguments.processes
            for case in measure(folder, num_processes, total, largest_tensor, idle.peak_bytes)
        ]
    found = {"checkpoint_mb": round(total / 1e6), "largest_tensor_mb": round(largest_tensor / 1e6)}
    print(json.dumps({"benchmark": "convert", **found, "idle_mb": round(idle.peak_bytes / 1e6), "cases": cases}))


if __name__ == "__main__":
    main()
