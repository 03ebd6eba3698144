"""The logs in a run's folder: whose they are, and how what came after a checkpoint is taken back."""

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
"""The config of the run and the size of its world: what is needed to foretell its seconds."""
WANDB_ID_FILE = "wandb_id"
TENSORBOARD_FOLDER = "tensorboard"
ID_FILE = "run_id"
"""Names the history that the logs tell; checkpoints have it too."""
SAMPLE_LOGS = ("samples.jsonl", "sample_ids", "dropped_sample_ids", "evaluation_samples")
REWOUND = (METRICS_FILE, *SAMPLE_LOGS)
EXPORTS = ("hf", "hf_adapter", "hf_steps", "hf_best", "hf_candidate")
LOGS = (*REWOUND, *EXPORTS, "trace", "stalls", "engines", "report", TENSORBOARD_FOLDER, WANDB_ID_FILE, JOB_FILE)
"""What a run leaves in its folder beside checkpoints."""


def read_id(path: Path) -> str | None:
    """What a file of one line holds; None where there is none."""
    try:
        return path.read_text(encoding="utf-8").strip() or None
    except (OSError, UnicodeDecodeError):
        return None


def append_to(path: Path, text: str) -> None:
    """Appends to a log, which is made with its folder; on disk when this returns. ConfigError."""
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a", encoding="utf-8") as file:
            file.write(text)


def begin_logs(output_dir: Path) -> None:
    """From here on the logs tell another history. ConfigError."""
    path = output_dir / ID_FILE
    with writing(path):
        path.write_text(f"{uuid.uuid4().hex}\n", encoding="utf-8")


def write_job(config: Config, world_size: int, ranks_per_node: int) -> None:
    """By one rank, as it begins to write metrics. ConfigError."""
    path = Path(config.output_dir, JOB_FILE)
    job = {"config": config.model_dump(mode="json"), "world_size": world_size, "ranks_per_node": ranks_per_node}
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(job, indent=1) + "\n", encoding="utf-8")


def logs_in(output_dir: Path, names: Sequence[str]) -> list[Path]:
    """Which files and folders called `names` a run has left there; none where all are empty."""
    found = [path for name in names if os.path.lexists(path := output_dir / name)]
    files = [file for path in found for file in (path.rglob("*") if path.is_dir() else [path])]
    return found if any(file.is_file() and file.stat().st_size for file in files) else []


def forget_steps(output_dir: Path, first_step: int) -> None:
    """Leave only steps before `first_step` in metrics.jsonl, whose lines may come later than what they are about.

    By one rank, before anybody writes. ConfigError where the file cannot be replaced.
    """
    path = output_dir / METRICS_FILE
    if not path.exists():
        return
    with writing(path), path.open(encoding="utf-8", errors="replace") as lines, written_whole(path) as kept:
        kept.writelines(line.encode() for line in lines if _is_before(first_step, line))


def sample_log_sizes(output_dir: Path) -> dict[str, int]:
    """Bytes of every log of samples, by its name in the run's folder, whichever rank of whichever job wrote it."""
    files = [path for name in SAMPLE_LOGS for path in (output_dir / name, *(output_dir / name).glob("*.jsonl"))]
    return {path.relative_to(output_dir).as_posix(): path.stat().st_size for path in files if path.is_file()}


def shorten(output_dir: Path, sizes: Mapping[str, int]) -> None:
    """Cut files of the run folder, by name, to the bytes that they had. ConfigError where one cannot be written."""
    for name, size in sizes.items():
        path = output_dir / name
        with writing(path):
            if path.exists() and path.stat().st_size > size:
                os.truncate(path, size)


def _is_before(step: int, line: str) -> bool:
    """Of a line that was written in full."""
    try:
        return line.endswith("\n") and json.loads(line)["step"] < step
    except (ValueError, KeyError, TypeError):
        return False
