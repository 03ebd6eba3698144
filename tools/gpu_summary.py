"""Puts together what the steps of gpu_check.sh found.

    python tools/gpu_summary.py FOLDER NAME:STATUS:SECONDS ...

Of every step FOLDER/NAME.log is its output; where that ends with a JSON object, the object is the step's result and is
also written to FOLDER/NAME.json. FOLDER/summary.json gets the date, the versions and all steps.
"""

import json
import platform
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy
import torch

OUTCOMES = {0: "passed", 124: "took too long", 137: "took too long"}


def result_of(log: Path) -> dict[str, Any] | None:
    """The JSON object that is the last line of `log`, if it is one."""
    lines = log.read_text(errors="replace").rstrip().splitlines() if log.exists() else []
    try:
        found = json.loads(lines[-1]) if lines else None
    except json.JSONDecodeError:
        return None
    return found if isinstance(found, dict) else None


def describe_step(folder: Path, text: str) -> dict[str, Any]:
    name, status, seconds = text.split(":")
    step = {"name": name, "outcome": OUTCOMES.get(int(status), f"failed with status {status}"), "seconds": int(seconds)}
    result = result_of(folder / f"{name}.log")
    if result is not None:
        (folder / f"{name}.json").write_text(json.dumps(result, indent=1) + "\n")
        step["result"] = result
    return step


def output_of(*command: str) -> str | None:
    """The first line that a command prints; None where it cannot be run or fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip().partition("\n")[0]


def describe_machine() -> dict[str, Any]:
    cuda = torch.cuda.is_available()
    return {
        "gpu": torch.cuda.get_device_name() if cuda else None,
        "num_gpus": torch.cuda.device_count(),
        "driver": output_of("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
        "cuda": torch.version.cuda,
        "nvcc": output_of("bash", "-c", "PATH=$PATH:/usr/local/cuda/bin nvcc --version | grep release"),
        "torch": torch.__version__,
        "numpy": numpy.__version__,
        "python": platform.python_version(),
    }


def main() -> None:
    folder, texts = Path(sys.argv[1]), sys.argv[2:]
    summary = {
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "commit": output_of("git", "rev-parse", "HEAD"),
        **describe_machine(),
        "steps": [describe_step(folder, text) for text in texts],
    }
    (folder / "summary.json").write_text(json.dumps(summary, indent=1) + "\n")


if __name__ == "__main__":
    main()
