"""Prepares a machine without a network for tools/gpu_check.py, and runs commands within limits."""

import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[1]
START = "RLTRAIN_GPU_START"
"""Environment variable for the folder with the jobs' initial models (tests/gpu/jobs.py)."""
ARCHITECTURES = "RLTRAIN_CUDA_ARCHITECTURES"

INSTALL_S = 20.0
"""Limit of installing the wheels."""
GRACE_S = 5.0
"""Time between asking a process to end and killing it, within its limit."""
WHEELS = (
    *("megatron-core", "pydantic", "pydantic_core", "annotated-types", "typing-inspection", "math-verify"),
    *("latex2sympy2_extended", "antlr4-python3-runtime", "starlette", "uvicorn", "websockets"),
)
"""Packages that a machine with torch, transformers and pytest usually lacks."""
PLATFORMS = ("manylinux_2_28_x86_64", "manylinux_2_27_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64")
KERNELS = "rltrain/reshard"
MANIFEST = "prepared.json"
MOST_BYTES = 60_000_000
STARTS: dict[str, tuple[str, ...]] = {
    "additions": ("tools/make_quickstart.py", "--seed", "0"),
    "experts": ("tools/make_quickstart.py", "--seed", "0", "--experts", "8"),
    "game": ("tools/make_text_game.py", "--seed", "0"),
}
"""Commands that make the jobs' initial models and rows, by their folders."""


def python_path(*before: Path) -> str:
    """Returns a PYTHONPATH that begins with the project and `before`."""
    paths = (REPOSITORY, *before, os.environ.get("PYTHONPATH"))
    return os.pathsep.join(str(path) for path in paths if path)


def prepare(folder: Path, python: str, most_bytes: int = MOST_BYTES) -> int:
    """Fills `folder` for a machine without a network and with Python version `python`. Returns the exit status."""
    if folder.exists() and any(folder.iterdir()):
        return refuse(f"--prepare: {folder} is not empty; name a new folder")
    wheels = folder / "wheels"
    wheels.mkdir(parents=True)
    versions = pinned(WHEELS, python)
    target = [*("--python-version", python), *("--implementation", "cp"), "--only-binary=:all:"]
    target += [word for name in PLATFORMS for word in ("--platform", name)]
    pip = [sys.executable, "-m", "pip", "-q", "--disable-pip-version-check"]
    for name in versions:
        done = subprocess.run([*pip, "download", "--no-deps", *target, "-d", str(wheels), name], check=False)
        if done.returncode:  # published only as sources, in pure Python
            subprocess.run([*pip, "wheel", "--no-deps", "-w", str(wheels), name], check=True)
    foreign = [path.name for path in wheels.iterdir() if not fits(path.name, python)]
    if foreign:
        return refuse(f"--prepare: {', '.join(foreign)} cannot be installed into Python {python}")
    environment = {ARCHITECTURES: "90a", **os.environ, "RLTRAIN_NATIVE": "require", "PYTHONPATH": python_path()}
    built = ["setup.py", "-q", "build_ext", "--build-lib", str(folder / "lib"), "--build-temp", str(folder / "temp")]
    subprocess.run([sys.executable, *built], cwd=REPOSITORY, env=environment, check=True)
    shutil.rmtree(folder / "temp", ignore_errors=True)
    if not list(folder.glob(f"lib/{KERNELS}/*cuda*.so")):
        return refuse("--prepare: the CUDA library was not built; put nvcc on PATH, or set CUDA_HOME")
    for name, command in STARTS.items():
        made = [sys.executable, *command, "--output", str(folder / "start" / name)]
        subprocess.run(made, cwd=REPOSITORY, env=environment, stdout=subprocess.DEVNULL, check=True)
    manifest = {"python": python, "architectures": environment[ARCHITECTURES], "wheels": versions}
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n")
    num_bytes = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    if num_bytes > most_bytes:
        return refuse(f"--prepare: {folder} has {num_bytes / 1e6:.1f} MB; expected at most {most_bytes / 1e6:.0f} MB")
    print(f"{folder}: {len(versions)} wheels for Python {python}, kernels for {environment[ARCHITECTURES]}, models of "
          f"{', '.join(STARTS)}; {num_bytes / 1e6:.1f} MB")  # fmt: skip
    return 0


def pinned(names: Sequence[str], python: str) -> list[str]:
    """Returns NAME==VERSION for each name, from launch/constraints-cpu.txt for a Python version."""
    from packaging.requirements import Requirement  # not needed, and often missing, with --prepared
    from packaging.utils import canonicalize_name

    lines = (line.partition("#")[0].strip() for line in (REPOSITORY / "launch/constraints-cpu.txt").open())
    known = {
        canonicalize_name(pin.name): f"{pin.name}{pin.specifier}"
        for pin in (Requirement(line) for line in lines if line)
        if pin.marker is None or pin.marker.evaluate({"python_version": python})
    }
    return [known[canonicalize_name(name)] for name in names]


def fits(wheel: str, python: str) -> bool:
    """Returns whether a wheel's file name fits `python` on Linux."""
    tags, number = wheel.removesuffix(".whl").split("-")[-3:], python.replace(".", "")
    of_python = any(tag in (f"cp{number}", "py3", "abi3") for tag in tags[0].split(".") + tags[1].split("."))
    return wheel.endswith(".whl") and of_python and (tags[2] == "any" or "x86_64" in tags[2])


def take_prepared(prepared: Path, site: Path, architecture: str) -> dict[str, str] | str:
    """Installs the wheels of --prepare into `site`. Returns environment variables for the steps, or the reason for a
    failure."""
    manifest = json.loads((prepared / MANIFEST).read_text())
    ours = ".".join(platform.python_version_tuple()[:2])
    if manifest["python"] != ours:
        return f"{prepared} is for Python {manifest['python']}, and {sys.executable} is {ours}"
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-index", "--no-deps", "--no-compile", "--target"]
    command = [*pip, str(site), *sorted(map(str, (prepared / "wheels").glob("*.whl")))]
    with tempfile.TemporaryFile("w+") as output:
        if run_within(command, INSTALL_S, output, os.environ) != 0:
            output.seek(0)
            return f"the wheels of {prepared} were not installed within {INSTALL_S:.0f} s: {output.read()[-2000:]}"
    variables = {"PYTHONPATH": python_path(site), START: str((prepared / "start").resolve())}
    if architecture not in manifest["architectures"].split(";"):
        return variables  # its kernels are built here
    for library in (prepared / "lib" / KERNELS).glob("*.so"):
        shutil.copy(library, REPOSITORY / KERNELS)
    return variables | {ARCHITECTURES: manifest["architectures"]}


def run_within(
    command: Sequence[str], limit_s: float, output: Any, environment: Mapping[str, str], grace_s: float = GRACE_S
) -> int | None:
    """Returns the exit status of a command. Returns None if the limit ended it with all its processes."""
    process = subprocess.Popen(
        command, cwd=REPOSITORY, env=environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
    )
    try:
        return process.wait(limit_s - grace_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGTERM)  # torchrun ends its ranks first
    try:
        process.wait(grace_s)
    except subprocess.TimeoutExpired:
        pass
    finally:
        if _lives(process.pid):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    return None


def _lives(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


def refuse(reason: str) -> int:
    print(f"gpu_check: {reason}", file=sys.stderr)
    return 2
