"""The logs in a run's folder: their history, and how entries after a checkpoint are removed."""

import json
import os
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path

from rltrain.config.schema import Config
from rltrain.errors import writing
from rltrain.runtime.whole_files import written_whole

METRICS_FILE = "metrics.jsonl"
JOB_FILE = "job.json"
"""The config and world size of the run. They are needed to estimate its seconds."""
WANDB_ID_FILE = "wandb_id"
TENSORBOARD_FOLDER = "tensorboard"
ID_FILE = "run_id"
"""Identifies the history in the logs. Checkpoints have it too."""
SAMPLE_LOGS = ("samples.jsonl", "sample_ids", "dropped_sample_ids", "evaluation_samples")
REWOUND = (METRICS_FILE, *SAMPLE_LOGS)
EXPORTS = ("hf", "hf_adapter", "hf_steps", "hf_best", "hf_candidate")
LOGS = (*REWOUND, *EXPORTS, "trace", "stalls", "engines", "report", TENSORBOARD_FOLDER, WANDB_ID_FILE, JOB_FILE)
"""Files and folders of a run in its output_dir, apart from checkpoints."""


def read_id(path: Path) -> str | None:
    """Returns the content of a file of one line, or None if there is none."""
    try:
        return path.read_text(encoding="utf-8").strip() or None
    except (OSError, UnicodeDecodeError):
        return None


def append_to(path: Path, text: str) -> None:
    """Appends to a log, and creates it with its folder first. The text is in the file when this returns.

    Raises ConfigError if the file cannot be written.
    """
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a", encoding="utf-8") as file:
            file.write(text)


def begin_logs(output_dir: Path) -> None:
    """Starts a new history of the logs. Raises ConfigError if the file cannot be written."""
    path = output_dir / ID_FILE
    with writing(path):
        path.write_text(f"{uuid.uuid4().hex}\n", encoding="utf-8")


def write_job(config: Config, world_size: int, ranks_per_node: int) -> None:
    """Writes job.json. Called on one rank before it writes metrics. Raises ConfigError if the file
    cannot be written."""
    path = Path(config.output_dir, JOB_FILE)
    job = {"config": config.model_dump(mode="json"), "world_size": world_size, "ranks_per_node": ranks_per_node}
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(job, indent=1) + "\n", encoding="utf-8")


def logs_in(output_dir: Path, names: Sequence[str]) -> list[Path]:
    """Returns the files and folders of these names in the run's folder, or [] if all are empty."""
    found = [path for name in names if os.path.lexists(path := output_dir / name)]
    files = [file for path in found for file in (path.rglob("*") if path.is_dir() else [path])]
    return found if any(file.is_file() and file.stat().st_size for file in files) else []


def forget_steps(output_dir: Path, first_step: int) -> None:
    """Removes `first_step` and later steps from metrics.jsonl. Its lines may be out of order.

    Called on one rank, before any rank writes. Raises ConfigError if the file cannot be replaced.
    """
    path = output_dir / METRICS_FILE
    if not path.exists():
        return
    with writing(path), path.open(encoding="utf-8", errors="replace") as lines, written_whole(path) as kept:
        kept.writelines(line.encode() for line in lines if _is_before(first_step, line))


def sample_log_sizes(output_dir: Path) -> dict[str, int]:
    """Returns the bytes of every sample log by name in the run's folder, including logs of ranks of earlier jobs."""
    files = [path for name in SAMPLE_LOGS for path in (output_dir / name, *(output_dir / name).glob("*.jsonl"))]
    return {path.relative_to(output_dir).as_posix(): path.stat().st_size for path in files if path.is_file()}


def shorten(output_dir: Path, sizes: Mapping[str, int]) -> None:
    """Cuts files of the run's folder to these sizes in bytes. Raises ConfigError if a file cannot be written."""
    for name, size in sizes.items():
        path = output_dir / name
        with writing(path):
            if path.exists() and path.stat().st_size > size:
                os.truncate(path, size)


def _is_before(step: int, line: str) -> bool:
    """Returns whether a line is complete and belongs to an earlier step."""
    try:
        return line.endswith("\n") and json.loads(line)["step"] < step
    except (ValueError, KeyError, TypeError):
        return False
