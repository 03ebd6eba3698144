"""Checks the installed packages and the limits of this machine.

With a config it also asks the servers at its URLs what they are, and says what they lack for a job of this config.
Under torchrun it checks all nodes of the job and the links between them, and prints one report. It needs only the
standard library, so it can also report missing packages.
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
from typing import TYPE_CHECKING

from rltrain.cli.train import begin_as_rank
from rltrain.errors import UserError
from rltrain.runtime.machine import SHARED_MEMORY, free_bytes

if TYPE_CHECKING:
    from rltrain.config.schema import Config

# Lines of the report.

FINE, LACKING, MISSING, WRONG = "ok", "-", "MISSING", "WRONG"
FAULTS = (MISSING, WRONG)
"""States that prevent a job or slow it down."""


@dataclass(frozen=True)
class Finding:
    """A line of the report."""

    what: str
    state: str
    detail: str
    compared: bool = False
    """True if the finding has to be the same on all nodes of a job."""


def lines_of(findings: Sequence[Finding]) -> Iterator[str]:
    """Yields the lines of the report."""
    width = max(len(finding.what) for finding in findings)
    for finding in findings:
        yield f"{finding.state:8}{finding.what:{width}}  {finding.detail}".rstrip()


def has_fault(findings: Sequence[Finding]) -> bool:
    """Returns whether a finding is a fault."""
    return any(finding.state in FAULTS for finding in findings)


# Installed and missing packages.

NEEDED = (
    *("torch", "megatron-core", "einops", "transformers", "safetensors", "huggingface-hub", "numpy", "isal"),
    *("pydantic", "pyyaml", "pyarrow", "math-verify", "rich", "httpx", "starlette", "uvicorn", "pillow"),
)
"""The dependencies of pyproject.toml. An installed package does not include that file."""
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
    """Yields findings about Python, packages and devices. `sglang_python` is the interpreter to check for SGLang."""
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
    """Returns the version of a package, or None if it is not installed."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def missing_packages() -> list[str]:
    """Returns the required packages missing in this Python."""
    return [name for name in NEEDED if installed(name) is None]


def remedy() -> str:
    """Returns a sentence with the commands to install missing packages."""
    return (
        f"To install them run `{sys.executable} -m pip install -e .` in the checkout, or `bash launch/quickstart.sh` "
        "for a .venv with all packages"
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
        yield Finding("GPUs", LACKING, f"torch {torch.__version__} finds none; jobs run on CPUs over gloo", True)
        return
    count = torch.cuda.device_count()
    names = sorted({torch.cuda.get_device_name(number) for number in range(count)})
    yield Finding("GPUs", FINE, f"{count} of {', '.join(names)}", True)
    yield Finding("CUDA", FINE, str(torch.version.cuda), True)
    yield Finding("NCCL", FINE, ".".join(map(str, torch.cuda.nccl.version())), True)
    yield Finding("driver", FINE, nvidia_driver() or f"unknown, not in {NVIDIA_DRIVER}", True)


def nvidia_driver() -> str | None:
    """Returns the version of the loaded kernel module, or None without one."""
    try:
        words = NVIDIA_DRIVER.read_text().splitlines()[0].split()
    except (OSError, IndexError):
        return None
    return next((word for word in words if word[0].isdigit() and "." in word), None)


def _apex() -> Finding:
    """Looks for NVIDIA's apex by its parts. The package of that name on PyPI is another project."""
    found = importlib.util.find_spec("apex") is not None and importlib.util.find_spec("apex.optimizers") is not None
    return Finding("apex", FINE if found else LACKING, "NVIDIA's" if found else "not installed (not needed)", True)


def _sandbox() -> Finding:
    found = shutil.which("bwrap")
    return Finding("bubblewrap", FINE if found else LACKING, found or "not installed; other sandboxes are used")


def _sglang(python: Path | None) -> Finding:
    if python is None:
        version = installed("sglang")
        told = version or "not in this Python; for rollout.engine: sglang check another one with --sglang-python"
        return Finding("sglang", FINE if version else LACKING, told, True)
    program = "import importlib.metadata; print(importlib.metadata.version('sglang'))"
    try:
        done = subprocess.run([str(python), "-c", program], capture_output=True, text=True, timeout=60, check=False)
    except OSError as error:
        return Finding("sglang", MISSING, f"{python}: {error.strerror}")
    if done.returncode:
        return Finding("sglang", MISSING, f"not installed for {python}: pip install -r launch/constraints-sglang.txt")
    return Finding("sglang", FINE, done.stdout.strip(), True)


# Limits of the system: open files, locked memory, shared memory and disk.

FEWEST_FILES = 4096
"""Open files for a rank: a connection to every other rank of its groups, checkpoint files and pipes of workers."""
LEAST_SHARED_GB = 1.0
"""Shared memory for buffers of NCCL and SGLang's processes. Containers have 0.06 GB by default."""
LEAST_DISK_GB = 1.0


def what_is_allowed(folders: list[Path]) -> Iterator[Finding]:
    """Yields findings about limits. `folders` and the folder of temporary files are checked for free space."""
    yield open_files(*resource.getrlimit(resource.RLIMIT_NOFILE))
    yield locked_memory(resource.getrlimit(resource.RLIMIT_MEMLOCK)[0])
    yield room("shared memory", SHARED_MEMORY, LEAST_SHARED_GB, "; in a container: --ipc host or --shm-size")
    for folder in dict.fromkeys([*folders, Path(tempfile.gettempdir())]):
        yield room("disk", folder, LEAST_DISK_GB)


def open_files(soft: int, hard: int) -> Finding:
    """Checks the limit of open files. `soft` is the present limit, and `hard` the largest one allowed."""
    if 0 <= soft < FEWEST_FILES:
        told = f"{soft} per process; expected {FEWEST_FILES} or more: ulimit -n (up to {hard} without further rights)"
        return Finding("open files", WRONG, told)
    return Finding("open files", FINE, "any number" if soft == resource.RLIM_INFINITY else f"{soft} per process")


def locked_memory(soft: int) -> Finding:
    """Checks the limit of locked memory. Only network cards with direct memory access need it."""
    if soft == resource.RLIM_INFINITY:
        return Finding("locked memory", FINE, "any amount")
    told = f"{gigabytes(soft)} per process; InfiniBand and RoCE need ulimit -l unlimited"
    return Finding("locked memory", LACKING, told)


def room(what: str, folder: Path, least_gb: float, remedy: str = "") -> Finding:
    """Checks the space left in `folder`."""
    what = f"{what}, {folder}"
    if not os.access(folder, os.W_OK):
        return Finding(what, WRONG, f"missing, or not writable for this user{remedy}")
    free = free_bytes(folder)
    if free < least_gb * 1e9:
        return Finding(what, WRONG, f"{gigabytes(free)} free; expected {least_gb:g} GB or more{remedy}")
    return Finding(what, FINE, f"{gigabytes(free)} free")


def gigabytes(num_bytes: float) -> str:
    return f"{num_bytes / 1e9:.3g} GB"


# The whole report, of the machine and of the servers of a config.


def of_this_node(config: "Config | None", sglang_python: Path | None, folders: list[Path]) -> Iterator[Finding]:
    """Yields all findings about this machine, and about the servers of `config` as seen from it."""
    if config is not None and sglang_python is None:
        sglang_python = _sglang_python_of(config)
    installed = [*what_is_installed(sglang_python)]
    works = not any(finding.state in FAULTS for finding in installed if finding.what != "sglang")
    yield from installed
    if works:
        from rltrain.cli.doctor_job import paths_taken

        yield from paths_taken()
    yield from what_is_allowed(folders)
    if works and config is not None:
        from rltrain.cli.doctor_servers import of_servers

        yield from of_servers(config)


def _config_of(options: argparse.Namespace) -> "Config | None":
    """Returns the config, or None without one or without the packages to read it."""
    if options.config is None or missing_packages():
        return None
    from rltrain.config.loader import load_config

    return load_config(options.config, options.overrides)


def _sglang_python_of(config: "Config") -> Path | None:
    """Returns the interpreter of the first engine that SGLang serves, or None."""
    from rltrain.tasks.roles import served_roles

    served = [config.served(role) for role in served_roles() if role in config.placed_roles]
    named = (one.sglang.python or sys.executable for one in served if one.engine == "sglang")
    return next(map(Path, named), None)


def run(options: argparse.Namespace) -> int:
    """Runs the command. Returns the exit status: 0 if jobs can run here, 1 if something is missing or wrong."""
    begin_as_rank()
    if options.overrides and options.config is None:
        raise UserError(f"got {' '.join(options.overrides)} without --config; expected config keys only beside one")
    config = _config_of(options)
    if "RANK" in os.environ:
        from rltrain.cli.doctor_job import examine_job

        return examine_job(config, options.sglang_python, options.shared or [Path.cwd()], options.mb << 20)
    findings = [*of_this_node(config, options.sglang_python, options.shared or [Path.cwd()])]
    print("\n".join(lines_of(findings)))
    if missing_packages():
        print(f"\n{remedy()}")
    return int(has_fault(findings))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the description and the arguments of the command to the parser."""
    parser.description = __doc__
    parser.add_argument("--config", type=Path, help="YAML file of a job: asks the servers at its URLs")
    parser.add_argument("--sglang-python", type=Path, help="interpreter to check for SGLang (rollout.sglang.python)")
    parser.add_argument(
        "--shared",
        type=Path,
        action="append",
        metavar="DIR",
        help="folder shared by all nodes, such as checkpoint.dir; repeatable (default: this folder)",
    )
    parser.add_argument("--mb", type=int, default=64, help="megabytes to send over links and to write (default 64)")
