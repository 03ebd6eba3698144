"""Steps of a run, from epochs and rows where the source counts these."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rltrain.data.rows import read_rows
from rltrain.errors import ConfigError, UserError
from rltrain.importing.conversions import NOTHING, count
from rltrain.importing.translation import Translation


@dataclass(frozen=True)
class Rows:
    """What the caller says: of rows in all files of data.train, or of steps."""

    rows: int | None = None
    steps: int | None = None


def set_steps(
    out: Translation, given: Rows, steps: Any, epochs: Any, named: tuple[str, str], name: str | None = None
) -> None:
    """steps, or epochs * floor(rows / prompts per step). ConfigError where the rows cannot be counted."""
    most = None if steps in NOTHING or count(steps) < 1 else count(steps)
    if given.steps is not None:
        out.set("steps", given.steps, "--steps")
    elif most is not None and (name is not None or epochs in NOTHING):
        out.set("steps", most, named[0])
    else:
        rows = given.rows if given.rows is not None else rows_of(out.data.get("data", {}).get("train", {}))
        if rows is None and most is not None:
            out.set("steps", most, f"{named[0]}; {named[1]} may end the run earlier")
            return
        if rows is None:
            raise ConfigError(
                f"steps: the source counts epochs ({named[1]} {epochs}), and the rows of data.train.path "
                f"{out.get('data.train.path')} cannot be counted; expected --rows N, how many there are, or --steps N"
            )
        prompts = out.get("batch.prompts_per_step")
        if epochs in NOTHING:
            raise ConfigError(f"steps: the source gives neither {named[0]} nor {named[1]}; expected --steps N")
        each = max(rows // prompts, 1)
        found = min(count(epochs) * each, most or count(epochs) * each)
        out.set("steps", found, f"{named[1]} {epochs} x ({rows} rows // {prompts} prompts)")


def rows_of(train: dict[str, Any]) -> int | None:
    """Rows of files that are there; None where they are not, or cannot be read."""
    given = train.get("path") or ()
    paths = (given,) if isinstance(given, str) else tuple(given)
    if not paths or not all(Path(path).exists() for path in paths):
        return None
    try:
        return sum(1 for _ in read_rows(paths, frozenset(), "data.train"))
    except UserError:
        return None
