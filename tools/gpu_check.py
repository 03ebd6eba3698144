"""Runs the checks that need a GPU.

It builds the native libraries, runs the GPU tests, and runs small jobs on the GPU and the CPU. A training step and a
colocated run of real dimensions follow, a profile of an update and of decode steps, and the kernels' benchmarks.

    bash tools/gpu_check.sh [FOLDER]                          default: docs/benchmarks/<name of the GPU>
    bash tools/gpu_check.sh --list                            the steps, with their limits
    bash tools/gpu_check.sh --prepare PREPARED --python 3.12  on a machine with a network and nvcc
    bash tools/gpu_check.sh --prepared PREPARED [FOLDER]      on a machine without a network

RLTRAIN_PYTHON (default python3) is a Python with a CUDA build of torch. --prepare downloads the wheels that such a
Python usually lacks. It also builds the kernels for RLTRAIN_CUDA_ARCHITECTURES (default 90a) and makes the models for
the jobs. --prepared uses these files and needs no network. With RLTRAIN_SGLANG_PYTHON, a Python with SGLang, the tests
of SGLang run last and take up to seven minutes more. The same holds for vLLM with RLTRAIN_VLLM_PYTHON.

Steps without measurements run side by side, the others alone. Every step prints its result when it ends. A step at its
limit is ended, and its output so far is shown. A probe reports and never fails. After a step that crashed or reached
its limit, a small matrix product checks the GPU. If it fails, no further step runs.

FOLDER/summary.json has the date, the versions and the result of every step. FOLDER/NAME.log has a step's output, and
FOLDER.tar.gz all files. Exit status: 0 every step passed, 1 a step failed, 2 no GPU or no usable Python.
"""

import argparse
import importlib.util
import json
import os
import platform
import re
import subprocess
import sys
import tarfile
import tempfile
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parents[1]), str(Path(__file__).resolve().parent)]

from gpu_prepared import (  # noqa: E402
    ARCHITECTURES,
    GRACE_S,
    INSTALL_S,
    REPOSITORY,
    prepare,
    python_path,
    refuse,
    run_within,
    take_prepared,
)

BESIDE_S, SUMMARY_S = 120.0, 10.0
ENGINES = {"sglang": ("SGLang", 420.0), "vllm": ("vLLM", 420.0)}
"""Engines in a Python of their own, by the name of their GPU tests: their names, and limits in seconds."""
"""Limits of all parallel steps together, of the summary, and of SGLang's tests."""
BUILD_S = 150.0
ANSWER_S = 20.0
"""Time for the GPU to answer after a crash. It is taken from the later steps."""
CORES_PER_STEP = 2
SHOWN_LINES, SHOWN_CHARACTERS = 20, 300
CRASH = re.compile(r"CUDA error|INTERNAL ASSERT|illegal memory access")

ALONE = ("offload", "two_ranks")
"""GPU tests that measure the device's memory, or are slow beside others."""
SPLIT = "one_gpu"
"""GPU tests with one step per job."""
TRAIN_STEP = (
    *("--tp", "1", "--hidden", "1024", "--layers", "28", "--heads", "16", "--kv-heads", "8", "--ffn", "3072"),
    *("--vocab", "151936", "--sequences", "32", "--min-tokens", "128", "--max-tokens", "1024"),
    *("--micro-batch-tokens", "8192", "--repeats", "5", "--dtype", "bfloat16"),
)
"""Arguments of tools/benchmarks/train_step.py."""
GRPO = (
    *("--size", "0.6b", "--cases", "colocated", "--steps", "3", "--dtype", "bfloat16"),
    *("logging.trace=true", "rollout.sampling.max_response_tokens=1024", "rollout.max_context_tokens=1088"),
    *("rollout.max_running_requests=64", "actor.micro_batch_tokens=8192"),
    "batch={prompts_per_step: 8, samples_per_prompt: 8, mini_batches: 1}",
)
"""Arguments of tools/benchmarks/real_size.py."""


@dataclass(frozen=True)
class Step:
    """A command for this Python, ended after `limit_s`."""

    name: str
    limit_s: float
    arguments: tuple[str, ...]
    beside: bool = False
    """Whether it runs in parallel with others."""
    is_probe: bool = False
    """Whether a failure is a result too."""


@dataclass
class Result:
    name: str
    outcome: str
    seconds: float = 0.0
    failed: bool = False
    result: Any = None

    def described(self) -> dict[str, Any]:
        told: dict[str, Any] = {"name": self.name, "outcome": self.outcome, "seconds": round(self.seconds, 1)}
        return told if self.result is None else told | {"result": self.result}


@dataclass
class Runner:
    """Runs steps until `deadline` (time.monotonic) and keeps their results in `folder`."""

    folder: Path
    environment: Mapping[str, str]
    deadline: float
    answers: Callable[[float], bool]
    """Returns whether the GPU still computes, within the given seconds. Called after a crash."""
    lanes: int = max(1, (os.cpu_count() or 2) // CORES_PER_STEP)
    beside_s: float = BESIDE_S
    grace_s: float = GRACE_S
    results: list[Result] = field(default_factory=list)
    is_lost: bool = False
    """Whether the GPU has stopped answering."""
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def run(self, steps: Sequence[Step]) -> None:
        """Runs the steps in order. All parallel steps run at the place of the first of them."""
        is_next_beside = True
        for step in steps:
            if not step.beside:
                self._run(step, self.deadline)
            elif is_next_beside:
                is_next_beside = False
                self._run_beside([one for one in steps if one.beside])

    def _run_beside(self, steps: Sequence[Step]) -> None:
        end = min(self.deadline, time.monotonic() + self.beside_s)
        with ThreadPoolExecutor(self.lanes) as pool:
            for started in [pool.submit(self._run, step, end) for step in steps]:
                started.result()

    def _run(self, step: Step, end: float) -> None:
        begin = time.monotonic()
        limit = min(step.limit_s, end - begin)
        if self.is_lost or limit <= self.grace_s:
            reason = "the GPU does not answer" if self.is_lost else "no time was left"
            self._add(Result(step.name, f"not run: {reason}", failed=not step.is_probe))
            return
        log = self.folder / f"{step.name}.log"
        with log.open("wb") as output:
            status = run_within([sys.executable, *step.arguments], limit, output, self.environment, self.grace_s)
        seconds, text = time.monotonic() - begin, log.read_text(errors="replace")
        result = Result(step.name, _outcome(status, limit), seconds, status != 0 and not step.is_probe, _result(text))
        if step.is_probe and status != 0:
            result.outcome = f"reported: {result.outcome}"
        self._add(result, text if status != 0 else "")
        if status is None or (status != 0 and (status < 0 or CRASH.search(text))):
            with self._lock:
                left = self.deadline - time.monotonic()
                self.is_lost = self.is_lost or left <= self.grace_s or not self.answers(min(ANSWER_S, left))

    def _add(self, result: Result, output: str = "") -> None:
        shown = [f"{result.name}: {'FAILED, ' if result.failed else ''}{result.outcome} in {result.seconds:.0f} s"]
        if result.result is not None:
            shown[0] += f": {json.dumps(result.result)[:SHOWN_CHARACTERS]}"
        shown += [f"    {line}" for line in output.rstrip().splitlines()[-SHOWN_LINES:]]
        with self._lock:
            self.results.append(result)
            print("\n".join(shown), flush=True)


def _outcome(status: int | None, limit_s: float) -> str:
    if status is None:
        return f"cut by its limit of {limit_s:.0f} s"
    return "passed" if status == 0 else f"ended with status {status}"


def _result(text: str) -> Any:
    """Returns the last line: as JSON if it is an object, or pytest's counts. None for other output."""
    last = (text.rstrip().splitlines() or [""])[-1]
    try:
        found = json.loads(last)
    except json.JSONDecodeError:
        return last.strip("= ") if re.search(r"\d (passed|failed|skipped|error)", last) else None
    return found if isinstance(found, dict) else None


def critical_path_s(steps: Sequence[Step], *, is_prepared: bool) -> float:
    """Returns the longest time of a check: the sum of the limits of consecutive steps."""
    alone = sum(step.limit_s for step in steps if not step.beside)
    return alone + BESIDE_S + SUMMARY_S + (INSTALL_S if is_prepared else 0)


def all_steps(
    folder: Path, *, is_prepared: bool, engines: Collection[str] = (), has_timeouts: bool = True
) -> list[Step]:
    """Returns the steps in order: `build`, the parallel steps from the longest to the shortest, then the others."""
    tests = [path.stem.removeprefix("test_") for path in sorted((REPOSITORY / "tests/gpu").glob("test_*.py"))]
    pytest = ["-m", "pytest", "-m", "gpu", "-q", *([] if has_timeouts else ["-o", "addopts=--strict-markers"])]

    def of_tests(name: str, limit_s: float, *, beside: bool, selected: str = "") -> Step:
        return Step(name, limit_s, (*pytest, selected or f"tests/gpu/test_{name}.py"), beside)

    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1")
    benchmarks = "tools/benchmarks"
    build_s = 15.0 if is_prepared else BUILD_S
    beside = [name for name in tests if name not in (*ALONE, SPLIT, *ENGINES)]
    beside.sort(key=lambda name: name != "kernels")
    steps = [Step("build", build_s, ("setup.py", "build_ext", "--inplace"))]
    steps += [of_tests(name, BESIDE_S, beside=True) for name in beside]
    steps += [of_tests(f"job_{job}", 100, beside=True, selected=test) for job, test in _tests_of_jobs().items()]
    steps += [Step(name, 60, ("tools/gpu_probe.py", name), True, is_probe=True) for name in ("versions", "graphs")]
    steps += [Step("plan", 60, (f"{benchmarks}/plan.py",), beside=True)]
    steps += [of_tests(name, limit, beside=False) for name, limit in zip(ALONE, (90.0, 30.0), strict=True)]
    sync = ("--device", "cuda", "--params", "1b", "--dtype", "bfloat16", "--iterations", "3", "--warm-up", "1")
    steps += [
        Step("train_step", 40, (*torchrun, f"{benchmarks}/train_step.py", *TRAIN_STEP)),
        Step("grpo", 75, (f"{benchmarks}/real_size.py", *GRPO, "--logs", str(folder / "grpo"))),
        Step("gpu_profile", 60, (*torchrun, f"{benchmarks}/gpu_profile.py")),
        Step("reshard_kernel", 25, (f"{benchmarks}/reshard_kernel.py", "--device", "cuda")),
        Step("weight_sync", 55, (f"{benchmarks}/weight_sync.py", *sync)),
    ]
    return steps + [of_tests(name, ENGINES[name][1], beside=False) for name in engines]


def variable_of(engine: str) -> str:
    """Returns the environment variable for the engine's Python."""
    return f"RLTRAIN_{engine.upper()}_PYTHON"


def given_engines() -> list[str]:
    """Returns the engines whose Python is given."""
    return [name for name in ENGINES if os.environ.get(variable_of(name))]


def _tests_of_jobs() -> dict[str, str]:
    """Returns the test of each job in tests/gpu/jobs.py, by the job's name."""
    jobs = importlib.import_module("tests.gpu.jobs").JOBS
    return {job: f"tests/gpu/test_{SPLIT}.py::test_three_steps_agree_with_the_cpu[{job}]" for job in jobs}


@dataclass(frozen=True)
class Gpu:
    """The machine's first GPU: its name in lower case, and the architecture for its kernels."""

    name: str
    architecture: str


def find_gpu() -> Gpu | str:
    """Returns the GPU, or the reason if there is none."""
    try:
        import numpy  # noqa: F401
        import setuptools  # noqa: F401
        import torch
    except ImportError as error:
        return f"{sys.executable} has no {error.name}"
    if not torch.cuda.is_available():
        built = "with" if torch.version.cuda else "without"
        return f"torch {torch.__version__} of {sys.executable}, built {built} CUDA, finds no GPU"
    major, minor = torch.cuda.get_device_capability()
    name = re.sub("[^a-z0-9]+", "_", torch.cuda.get_device_name().lower()).strip("_")
    return Gpu(name, f"{major}{minor}{'a' if major >= 9 else ''}")


def gpu_answers(environment: Mapping[str, str], limit_s: float) -> bool:
    """Returns whether a new process can multiply on the GPU."""
    code = "import torch; x = torch.ones(64, 64, device='cuda'); assert float((x @ x).sum()) == 64 ** 3"
    with tempfile.TemporaryFile() as output:
        return run_within([sys.executable, "-c", code], limit_s, output, environment) == 0


def check(folder: Path, gpu: Gpu, variables: Mapping[str, str], is_prepared: bool, begin: float) -> int:
    """Runs all steps and writes the summary. Returns the exit status."""
    environment = {ARCHITECTURES: gpu.architecture, **os.environ, "PYTHONPATH": python_path(), **variables}
    environment |= {"RLTRAIN_NATIVE": "require", "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    engines = given_engines()
    steps = all_steps(folder, is_prepared=is_prepared, engines=engines, has_timeouts=_has("pytest_timeout"))
    total_s = critical_path_s(steps, is_prepared=is_prepared)
    print(f"{gpu.name}: {len(steps)} steps, at most {total_s:.0f} s", flush=True)
    for name, (title, _) in ENGINES.items():
        if name not in engines:
            print(f"{name}: not run; set {variable_of(name)} to a Python with {title}", flush=True)
    runner = Runner(folder, environment, begin + total_s - SUMMARY_S, lambda limit_s: gpu_answers(environment, limit_s))
    runner.run(steps)
    summarise(folder, runner.results)
    archive = folder.with_name(f"{folder.name}.tar.gz")
    with tarfile.open(archive, "w:gz") as packed:
        packed.add(folder, folder.name)
    failed = [result.name for result in runner.results if result.failed]
    verdict = f"failed: {' '.join(failed)}" if failed else "all passed"
    print(f"gpu_check: {verdict} in {time.monotonic() - begin:.0f} s; results are in {archive}")
    return 1 if failed else 0


def summarise(folder: Path, results: Sequence[Result]) -> None:
    """Writes summary.json, and NAME.json for each step with a JSON object as its result."""
    for result in results:
        if isinstance(result.result, dict):
            (folder / f"{result.name}.json").write_text(json.dumps(result.result, indent=1) + "\n")
    summary = {
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "commit": _first_line("git", "-C", str(REPOSITORY), "rev-parse", "HEAD"),
        **_machine(),
        "steps": [result.described() for result in results],
    }
    (folder / "summary.json").write_text(json.dumps(summary, indent=1) + "\n")


def _machine() -> dict[str, Any]:
    import numpy
    import torch

    cuda = torch.cuda.is_available()
    return {
        "gpu": torch.cuda.get_device_name() if cuda else None,
        "num_gpus": torch.cuda.device_count(),
        "driver": _first_line("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
        "cuda": torch.version.cuda,
        "nvcc": _first_line("bash", "-c", "PATH=$PATH:/usr/local/cuda/bin nvcc --version | grep release"),
        "torch": torch.__version__,
        "numpy": numpy.__version__,
        "python": platform.python_version(),
    }


def _first_line(*command: str) -> str | None:
    """Returns the first line of a command's output, or None if it fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SUMMARY_S / 4, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip().partition("\n")[0]


def _has(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


def _list() -> None:
    steps = all_steps(Path("FOLDER"), is_prepared=True, engines=given_engines())
    for step in steps:
        how = "beside others" if step.beside else "alone"
        print(f"{step.name} ({step.limit_s:.0f} s, {how}{', a probe' if step.is_probe else ''}): "
              f"{' '.join(step.arguments)}")  # fmt: skip
    for is_prepared in (True, False):
        steps = all_steps(Path("FOLDER"), is_prepared=is_prepared)
        print(f"at most {critical_path_s(steps, is_prepared=is_prepared):.0f} s "
              f"{'with' if is_prepared else 'without'} --prepared")  # fmt: skip


def main(given: Sequence[str] | None = None) -> int:
    begin = time.monotonic()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", type=Path, metavar="FOLDER")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--prepare", type=Path, metavar="PREPARED")
    parser.add_argument("--python", default=".".join(platform.python_version_tuple()[:2]), metavar="VERSION")
    parser.add_argument("--prepared", type=Path, metavar="PREPARED")
    arguments = parser.parse_args(given)
    if arguments.list:
        _list()
        return 0
    if arguments.prepare:
        return prepare(arguments.prepare, arguments.python)
    gpu = find_gpu()
    if isinstance(gpu, str):
        return refuse(f"{gpu}. Nothing was run: set RLTRAIN_PYTHON to a Python whose torch can use an NVIDIA GPU")
    with tempfile.TemporaryDirectory() as site:
        variables = take_prepared(arguments.prepared, Path(site), gpu.architecture) if arguments.prepared else {}
        if isinstance(variables, str):
            return refuse(variables)
        folder: Path = (arguments.folder or REPOSITORY / "docs/benchmarks" / gpu.name).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        return check(folder, gpu, variables, arguments.prepared is not None, begin)


if __name__ == "__main__":
    sys.exit(main())
