"""Runs whole jobs with the user's command, in forked processes."""

import json
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.forked.popen import FORKED_ENVIRONMENT, Popen
from tests.forked.popen import REPOSITORY as REPOSITORY
from tests.forked.popen import run as run

QUICKSTART = REPOSITORY / "configs/quickstart.yaml"
SHORT = ("data.eval=null", "data.train.max_rows=1024", "checkpoint.save_hf=false")
"""Overrides for jobs that need not learn: few rows, no evaluation, no export."""


def torchrun(num_ranks: int) -> list[str]:
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_ranks}"]


def succeed(command: list[str], timeout_s: float) -> subprocess.CompletedProcess[str]:
    """Runs a command and asserts success."""
    done = run(command, timeout_s)
    assert done.returncode == 0, f"{done.stdout[-4000:]}\n{done.stderr[-8000:]}"
    return done


def train(config: str | Path, *overrides: str, num_ranks: int = 4, timeout_s: float = 600) -> list[dict[str, Any]]:
    """Runs torchrun launch/train.py, asserts success, and returns the records of its metrics.jsonl."""
    done = try_to_train(config, *overrides, num_ranks=num_ranks, timeout_s=timeout_s)
    assert done.returncode == 0, f"{done.stdout[-4000:]}\n{done.stderr[-8000:]}"
    output_dir = next(o.removeprefix("output_dir=") for o in overrides if o.startswith("output_dir="))
    return read_records(Path(output_dir))


def train_in_turn(
    config: str | Path, jobs: Mapping[str, Sequence[str]], folder: Path, num_ranks: int, timeout_s: float = 300
) -> str:
    """Runs jobs, given by their overrides, one after the other in the same processes, and returns their stderr.

    The output of a job goes to a folder of its name unless an override gives another one. All jobs must succeed.
    """
    overrides = [[f"output_dir={folder / name}", *of_job] for name, of_job in jobs.items()]
    (folder / "jobs.json").write_text(json.dumps(overrides))
    script = ["tests/support/consecutive_jobs.py", str(config), str(folder / "jobs.json")]
    return succeed([*torchrun(num_ranks), *script], timeout_s).stderr


def train_each(
    config: str | Path, jobs: Mapping[str, Sequence[str]], folder: Path, num_ranks: int, timeout_s: float = 300
) -> dict[str, list[dict[str, Any]]]:
    """Returns the metrics of each job of `train_in_turn`."""
    train_in_turn(config, jobs, folder, num_ranks, timeout_s)
    return {name: read_records(folder / name) for name in jobs}


def read_records(output: Path) -> list[dict[str, Any]]:
    """Returns the records of metrics.jsonl."""
    return read_lines(output / "metrics.jsonl")


def read_lines(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def of_kinds(record: Mapping[str, Any], *kinds: str) -> dict[str, Any]:
    """Returns the metrics whose first part of the name is one of `kinds`."""
    return {name: value for name, value in record.items() if name.split("/")[0] in kinds}


def learnt(records: list[dict[str, Any]], *kinds: str) -> list[dict[str, Any]]:
    """Returns each step's metrics of training and generation, or of other `kinds`, without times and memory."""
    return [found for record in records if (found := of_kinds(record, *(kinds or ("train", "critic", "rollout"))))]


def try_to_train(
    config: str | Path,
    *overrides: str,
    num_ranks: int = 4,
    timeout_s: float = 240,
    restarts: int = 0,
    environment: dict[str, str] | None = None,
) -> subprocess.CompletedProcess[str]:
    """Runs torchrun launch/train.py and returns its result. `environment` is added to the variables of this process."""
    program = [f"--max-restarts={restarts}", "launch/train.py", "--config", str(config), *overrides]
    command = [*torchrun(num_ranks), *program]
    return run(command, timeout_s, environment=environment)


def start_on_servers(urls: Path, token: str, *overrides: str, num_ranks: int, script: str = "launch/train.py") -> Popen:
    """Starts a job of the quickstart's config whose engines are the servers in the file `urls`. Returns at once."""
    engines = ("rollout.engine=http", f"rollout.urls={urls}", "rollout.http.token_env=ENGINES_TOKEN")
    return Popen(
        [*torchrun(num_ranks), script, "--config", str(QUICKSTART), *engines, "checkpoint.save_hf=false", *overrides],
        cwd=REPOSITORY,
        env={**FORKED_ENVIRONMENT, "PATH": "/bin", "ENGINES_TOKEN": token},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def wait_until(met: Callable[[], bool], job: Popen, limit_s: float) -> None:
    """Waits during a started job until `met` returns True. Fails if the job ends before."""
    deadline = time.monotonic() + limit_s
    while not met():
        assert job.poll() is None, job.communicate()[1][-6000:]
        assert time.monotonic() < deadline
        time.sleep(0.05)


def dry_run(config: str | Path, *overrides: str, world_size: int) -> subprocess.CompletedProcess[str]:
    arguments = ["launch/train.py", "--config", str(config), "--dry-run", "--world-size", str(world_size)]
    return run([sys.executable, *arguments, *overrides], timeout_s=60)


def column(records: list[dict[str, Any]], name: str) -> list[float]:
    return [record[name] for record in records if name in record]


Run = tuple[dict[int, dict[str, float]], dict[int, list[int]]]
"""Metrics, and ids of the trained samples, by step."""


def reported(output: Path) -> Run:
    """Returns the metrics of a job by step, without times and memory, and its sample ids."""
    values: dict[int, dict[str, float]] = {}
    for record in read_records(output):
        of_step = values.setdefault(record["step"], {})
        found = of_kinds(record, "train", "rollout", "critic", "eval", "curriculum")
        assert not of_step.keys() & found.keys(), "a step is reported once"
        of_step |= found
    return {step: metrics for step, metrics in values.items() if metrics}, sample_ids(output)


def sample_ids(output: Path, folder: str = "sample_ids") -> dict[int, list[int]]:
    """Returns the ids of the samples of each step, by default of the trained ones."""
    ids: dict[int, list[int]] = {}
    for path in sorted((output / folder).glob("rank*.jsonl")):
        for record in read_lines(path):
            ids.setdefault(record["step"], []).extend(record["sample_ids"])
    return ids
