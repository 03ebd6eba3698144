"""Takes back what a run wrote into its logs after the point from which it goes on."""

import json
import os
from collections.abc import Mapping
from pathlib import Path

from rltrain.errors import cannot_write

METRICS_FILE = "metrics.jsonl"
SAMPLE_LOGS = ("samples.jsonl", "sample_ids/*.jsonl")


def forget_steps(output_dir: Path, first_step: int) -> None:
    """Leave only steps before `first_step` in metrics.jsonl, whose lines may come later than what they are about.

    By one rank, before anybody writes. ConfigError where the file cannot be replaced.
    """
    path = output_dir / METRICS_FILE
    try:
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    except FileNotFoundError:
        return
    kept = [line for line in lines if line.endswith("\n") and json.loads(line)["step"] < first_step]
    beside = path.with_name(f".{path.name}.partial")
    try:
        beside.write_text("".join(kept), encoding="utf-8")
        beside.replace(path)
    except OSError as error:
        raise cannot_write(path, error) from error


def sample_logs(output_dir: Path) -> list[Path]:
    """The files that ranks append to as they go."""
    return [path for pattern in SAMPLE_LOGS for path in sorted(output_dir.glob(pattern))]


def shorten(output_dir: Path, sizes: Mapping[str, int]) -> None:
    """Cut files of the run folder, by name, to the bytes that they had. ConfigError where one cannot be written."""
    for name, size in sizes.items():
        path = output_dir / name
        try:
            if path.exists() and path.stat().st_size > size:
                os.truncate(path, size)
        except OSError as error:
            raise cannot_write(path, error) from error
