"""The command `rltrain doctor`: what is installed here, what is missing, and what to do about it."""

import argparse
import importlib.metadata
import importlib.util
import os
import platform
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

NEEDED = ("torch", "megatron-core", "transformers", "safetensors", "pydantic", "pyarrow", "math-verify")
OPTIONAL = {
    "transformer-engine": "faster layers on NVIDIA GPUs",
    "wandb": "logging.wandb",
    "tensorboard": "logging.tensorboard",
    "gymnasium": "env.function: gymnasium:ID",
    "websockets": "env.function: ws://...",
    "torch-memory-saver": "residency.allocator: torch_memory_saver",
}
FINE, LACKING, FAULT = "ok", "-", "MISSING"


@dataclass(frozen=True)
class Finding:
    what: str
    state: str
    detail: str


def main(argv: Sequence[str]) -> int:
    """Exit status: 0 a job could run here, 1 something that every job needs is missing."""
    parser = argparse.ArgumentParser(prog="rltrain doctor", description=__doc__)
    parser.add_argument("--sglang-python", type=Path, help="rollout.sglang.python, to ask whether it has SGLang")
    arguments = parser.parse_args(argv)
    found = [*findings(arguments.sglang_python)]
    width = max(len(finding.what) for finding in found)
    for finding in found:
        print(f"{finding.state:8}{finding.what:{width}}  {finding.detail}".rstrip())
    return int(any(finding.state == FAULT for finding in found))


def findings(sglang_python: Path | None = None) -> Iterator[Finding]:
    yield Finding("python", FINE, f"{platform.python_version()}, {os.cpu_count()} cores, {platform.machine()}")
    for name in NEEDED:
        version = installed(name)
        yield Finding(name, FAULT if version is None else FINE, version or f"pip install {name}")
    yield _devices()
    yield from _native()
    for name, purpose in OPTIONAL.items():
        version = installed(name)
        yield Finding(name, LACKING if version is None else FINE, f"{version or 'not installed'} ({purpose})")
    yield _sandbox()
    if sglang_python is not None:
        yield _sglang(sglang_python)


def installed(name: str) -> str | None:
    """The version of a package; None where it is not there."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _devices() -> Finding:
    if importlib.util.find_spec("torch") is None:
        return Finding("GPUs", LACKING, "unknown without torch")
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not count:
        return Finding("GPUs", LACKING, f"none that torch {torch.__version__} sees: jobs run on CPUs, over gloo")
    names = sorted({torch.cuda.get_device_name(number) for number in range(count)})
    return Finding("GPUs", FINE, f"{count} of {', '.join(names)}, CUDA {torch.version.cuda}")


def _native() -> Iterator[Finding]:
    kernels = Path(__file__).resolve().parents[1] / "reshard" / "kernels"
    for device in ("cpu", "cuda"):
        library = kernels / f"_reshard_{device}.so"
        told = (
            "built" if library.exists() else "not built: torch operations replace it; pip install -e . with a compiler"
        )
        yield Finding(f"native copies, {device}", FINE if library.exists() else LACKING, told)


def _sandbox() -> Finding:
    found = shutil.which("bwrap")
    return Finding("bubblewrap", FINE if found else LACKING, found or "not installed; env.agent and tools have others")


def _sglang(python: Path) -> Finding:
    program = "import importlib.metadata; print(importlib.metadata.version('sglang'))"
    try:
        done = subprocess.run([str(python), "-c", program], capture_output=True, text=True, timeout=60, check=False)
    except OSError as error:
        return Finding("sglang", FAULT, f"{python}: {error.strerror}")
    if done.returncode:
        return Finding("sglang", FAULT, f"{python} has none: pip install -r launch/constraints-sglang.txt")
    return Finding("sglang", FINE, done.stdout.strip())
