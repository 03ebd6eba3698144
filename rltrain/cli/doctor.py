"""The command `rltrain doctor`: what is installed and allowed on this machine, and how the nodes of a job reach each
other. Under torchrun it examines all of them and prints one report.

Needs nothing but the standard library, so that it can say what else is missing.
"""

import argparse
import importlib.metadata
import importlib.util
import os
import platform
import resource
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from rltrain.cli.train import begin_as_rank
from rltrain.runtime.machine import SHARED_MEMORY, free_bytes

# The lines of the doctor's report.

FINE, LACKING, MISSING, WRONG = "ok", "-", "MISSING", "WRONG"
FAULTS = (MISSING, WRONG)
"""What a job cannot run with, or not well."""


@dataclass(frozen=True)
class Finding:
    what: str
    state: str
    detail: str
    compared: bool = False
    """Whether it has to be the same on all nodes of a job."""


def lines_of(findings: Sequence[Finding]) -> Iterator[str]:
    width = max(len(finding.what) for finding in findings)
    for finding in findings:
        yield f"{finding.state:8}{finding.what:{width}}  {finding.detail}".rstrip()


def has_fault(findings: Sequence[Finding]) -> bool:
    return any(finding.state in FAULTS for finding in findings)


# What is installed here, what is missing, and what to do about it.

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


# What the system lets a job use: open files, locked memory, shared memory, disk.

FEWEST_FILES = 4096
"""A rank has a connection to every other rank of its groups, a file per checkpoint share, pipes of its workers."""
LEAST_SHARED_GB = 1.0
"""NCCL and SGLang's processes keep buffers there; containers have 0.06 by default."""
LEAST_DISK_GB = 1.0


def what_is_allowed(folders: list[Path]) -> Iterator[Finding]:
    """`folders` and the one for temporary files are asked how much they can take."""
    yield open_files(*resource.getrlimit(resource.RLIMIT_NOFILE))
    yield locked_memory(resource.getrlimit(resource.RLIMIT_MEMLOCK)[0])
    yield room("shared memory", SHARED_MEMORY, LEAST_SHARED_GB, "; in a container: --ipc host or --shm-size")
    for folder in dict.fromkeys([*folders, Path(tempfile.gettempdir())]):
        yield room("disk", folder, LEAST_DISK_GB)


def open_files(soft: int, hard: int) -> Finding:
    if 0 <= soft < FEWEST_FILES:
        told = f"{soft} per process; expected {FEWEST_FILES} or more: ulimit -n (up to {hard} without more rights)"
        return Finding("open files", WRONG, told)
    return Finding("open files", FINE, "any number" if soft == resource.RLIM_INFINITY else f"{soft} per process")


def locked_memory(soft: int) -> Finding:
    """A network card reads and writes memory that is locked; without one nothing is."""
    if soft == resource.RLIM_INFINITY:
        return Finding("locked memory", FINE, "any amount")
    told = f"{gigabytes(soft)} per process; InfiniBand and RoCE need ulimit -l unlimited"
    return Finding("locked memory", LACKING, told)


def room(what: str, folder: Path, least_gb: float, remedy: str = "") -> Finding:
    """How much can be written to `folder`."""
    what = f"{what}, {folder}"
    if not os.access(folder, os.W_OK):
        return Finding(what, WRONG, f"read-only for this user, or not there{remedy}")
    free = free_bytes(folder)
    if free < least_gb * 1e9:
        return Finding(what, WRONG, f"{gigabytes(free)} free; expected {least_gb:g} GB or more{remedy}")
    return Finding(what, FINE, f"{gigabytes(free)} free")


def gigabytes(num_bytes: float) -> str:
    return f"{num_bytes / 1e9:.3g} GB"


def run(options: argparse.Namespace) -> int:
    """Exit status: 0 a job could run here, 1 something that jobs need is missing or wrong."""
    begin_as_rank()
    if "RANK" in os.environ:
        from rltrain.cli.doctor_job import examine_job

        return examine_job(options.sglang_python, options.shared or [Path.cwd()], options.mb << 20)
    findings = [*what_is_installed(options.sglang_python)]
    if not has_fault(findings):
        from rltrain.cli.doctor_job import paths_taken

        findings += paths_taken()
    findings += what_is_allowed(options.shared or [Path.cwd()])
    print("\n".join(lines_of(findings)))
    if missing_packages():
        print(f"\n{remedy()}")
    return int(has_fault(findings))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Gives the parser the description and the arguments of the command."""
    parser.description = __doc__
    parser.add_argument("--sglang-python", type=Path, help="rollout.sglang.python, to ask whether it has SGLang")
    parser.add_argument(
        "--shared",
        type=Path,
        action="append",
        metavar="DIR",
        help="a folder that all nodes are to share, such as checkpoint.dir; may be repeated (default: this folder)",
    )
    parser.add_argument("--mb", type=int, default=64, help="how much is sent over links and written (default 64)")
