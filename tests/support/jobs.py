"""Whole jobs by the command that a user starts, in forked processes."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.forked.popen import REPOSITORY as REPOSITORY
from tests.forked.popen import run as run


def train(config: str | Path, *overrides: str, num_ranks: int = 4, timeout_s: float = 600) -> list[dict[str, Any]]:
    """torchrun launch/train.py, which must succeed; the records of its metrics.jsonl."""
    done = try_to_train(config, *overrides, num_ranks=num_ranks, timeout_s=timeout_s)
    assert done.returncode == 0, f"{done.stdout[-4000:]}\n{done.stderr[-8000:]}"
    output_dir = next(o.removeprefix("output_dir=") for o in overrides if o.startswith("output_dir="))
    return read_records(Path(output_dir))


def train_in_turn(
    config: str | Path, jobs: list[list[str]], folder: Path, num_ranks: int, timeout_s: float = 300
) -> None:
    """Jobs by their overrides, one after the other in the same processes, which must all succeed."""
    (folder / "jobs.json").write_text(json.dumps(jobs))
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_ranks}"]
    script = ["tests/support/consecutive_jobs.py", str(config), str(folder / "jobs.json")]
    done = run([*torchrun, *script], timeout_s)
    assert done.returncode == 0, f"{done.stdout[-4000:]}\n{done.stderr[-8000:]}"


def read_records(output: Path) -> list[dict[str, Any]]:
    """Of metrics.jsonl."""
    return [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]


def try_to_train(
    config: str | Path,
    *overrides: str,
    num_ranks: int = 4,
    timeout_s: float = 240,
    restarts: int = 0,
    environment: dict[str, str] | None = None,
) -> subprocess.CompletedProcess[str]:
    """torchrun launch/train.py, whatever comes of it; `environment` is added to this process's."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_ranks}"]
    torchrun.append(f"--max-restarts={restarts}")
    command = [*torchrun, "launch/train.py", "--config", str(config), *overrides]
    return run(command, timeout_s, environment=environment)


def dry_run(config: str | Path, *overrides: str, world_size: int) -> subprocess.CompletedProcess[str]:
    arguments = ["launch/train.py", "--config", str(config), "--dry-run", "--world-size", str(world_size)]
    return run([sys.executable, *arguments, *overrides], timeout_s=60)


def column(records: list[dict[str, Any]], name: str) -> list[float]:
    return [record[name] for record in records if name in record]


def sample_ids(output: Path) -> dict[int, list[int]]:
    """The ids of the samples that each step trained on."""
    ids: dict[int, list[int]] = {}
    for path in sorted((output / "sample_ids").glob("rank*.jsonl")):
        for line in path.read_text().splitlines():
            record = json.loads(line)
            ids.setdefault(record["step"], []).extend(record["sample_ids"])
    return ids
