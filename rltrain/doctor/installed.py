"""What is installed here, what is missing, and what to do about it."""

import importlib.metadata
import importlib.util
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from rltrain.doctor.finding import FINE, LACKING, MISSING, WRONG, Finding

NEEDED = (
    *("torch", "megatron-core", "einops", "transformers", "safetensors", "huggingface-hub", "numpy", "pydantic"),
    *("pyyaml", "pyarrow", "math-verify", "rich", "httpx", "starlette", "uvicorn"),
)
"""The dependencies in pyproject.toml, which is not there in an installation."""
OPTIONAL = {
    "transformer-engine": "faster layers on NVIDIA GPUs",
    "wandb": "logging.wandb",
    "tensorboard": "logging.tensorboard",
    "gymnasium": "env.function: gymnasium:ID",
    "websockets": "env.function: ws://...",
    "torch-memory-saver": "residency.allocator: torch_memory_saver",
}
NVIDIA_DRIVER = Path("/proc/driver/nvidia/version")


def what_is_installed(sglang_python: Path | None = None) -> Iterator[Finding]:
    """`sglang_python`: rollout.sglang.python, which is asked whether it has SGLang."""
    yield Finding("python", FINE, f"{platform.python_version()}, {os.cpu_count()} cores, {platform.machine()}", True)
    for name in NEEDED:
        version = installed(name)
        yield Finding(name, MISSING if version is None else FINE, version or "not installed", True)
    yield from _devices()
    for name, purpose in OPTIONAL.items():
        version = installed(name)
        yield Finding(name, LACKING if version is None else FINE, f"{version or 'not installed'} ({purpose})", True)
    yield _apex()
    yield _sandbox()
    yield _sglang(sglang_python)


def installed(name: str) -> str | None:
    """The version of a package; None where it is not there."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def missing_packages() -> list[str]:
    """The packages that jobs need and this Python lacks."""
    return [name for name in NEEDED if installed(name) is None]


def remedy() -> str:
    """A sentence with the commands that bring what is missing."""
    return (
        f"In the checkout, `{sys.executable} -m pip install -e .` installs what is missing here, and "
        "`bash launch/quickstart.sh` makes .venv with all of it"
    )


def _devices() -> Iterator[Finding]:
    if importlib.util.find_spec("torch") is None:
        yield Finding("GPUs", LACKING, "unknown without torch")
        return
    try:
        import torch
    except (ImportError, OSError) as error:
        yield Finding("GPUs", WRONG, f"unknown: torch is installed, but cannot be imported: {error}")
        return
    if not torch.cuda.is_available():
        yield Finding("GPUs", LACKING, f"none that torch {torch.__version__} sees: jobs run on CPUs, over gloo", True)
        return
    count = torch.cuda.device_count()
    names = sorted({torch.cuda.get_device_name(number) for number in range(count)})
    yield Finding("GPUs", FINE, f"{count} of {', '.join(names)}", True)
    yield Finding("CUDA", FINE, str(torch.version.cuda), True)
    yield Finding("NCCL", FINE, ".".join(map(str, torch.cuda.nccl.version())), True)
    yield Finding("driver", FINE, nvidia_driver() or f"not told by {NVIDIA_DRIVER}", True)


def nvidia_driver() -> str | None:
    """The version of the loaded kernel module; None where there is none."""
    try:
        words = NVIDIA_DRIVER.read_text().splitlines()[0].split()
    except (OSError, IndexError):
        return None
    return next((word for word in words if word[0].isdigit() and "." in word), None)


def _apex() -> Finding:
    """The package of that name on the index is another project's, so its parts are looked for."""
    found = importlib.util.find_spec("apex") is not None and importlib.util.find_spec("apex.optimizers") is not None
    return Finding("apex", FINE if found else LACKING, "NVIDIA's" if found else "not installed (not needed)", True)


def _sandbox() -> Finding:
    found = shutil.which("bwrap")
    return Finding("bubblewrap", FINE if found else LACKING, found or "not installed; env.agent and tools have others")


def _sglang(python: Path | None) -> Finding:
    if python is None:
        version = installed("sglang")
        told = version or "not beside rltrain; --sglang-python asks another interpreter (rollout.engine: sglang)"
        return Finding("sglang", FINE if version else LACKING, told, True)
    program = "import importlib.metadata; print(importlib.metadata.version('sglang'))"
    try:
        done = subprocess.run([str(python), "-c", program], capture_output=True, text=True, timeout=60, check=False)
    except OSError as error:
        return Finding("sglang", MISSING, f"{python}: {error.strerror}")
    if done.returncode:
        return Finding("sglang", MISSING, f"{python} has none: pip install -r launch/constraints-sglang.txt")
    return Finding("sglang", FINE, done.stdout.strip(), True)
