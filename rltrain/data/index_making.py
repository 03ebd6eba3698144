"""The index of a source, made once by all processes of a job that need it, or found as an earlier one left it."""

import hashlib
import json
import logging
import time
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from pathlib import Path

import numpy as np

from rltrain.config import schema
from rltrain.data.index_parts import Part, index_part, parts_of
from rltrain.data.prompt_rows import RowParser
from rltrain.data.row_checks import RowChecker, refuse_unusable_source
from rltrain.data.row_files import FileSlice
from rltrain.data.row_index import (
    FORMAT,
    DamagedIndexError,
    IndexWriter,
    RowIndex,
    Summary,
    open_index,
    written_whole,
)
from rltrain.data.shared_work import SharedWork
from rltrain.errors import DataError, cannot_write

logger = logging.getLogger(__name__)

BLOCK_ROWS = 2**20
APPEARS_WITHIN_S, LOOK_S = 60.0, 0.5
"""A file that another node has written, on a file system between nodes."""


@dataclass(frozen=True)
class IndexFolder:
    """Where indexes are kept, by whom they are made."""

    path: Path
    work: SharedWork


def shared_index(
    folder: IndexFolder, parser: RowParser, data: schema.Data, key: str, slices: Sequence[FileSlice]
) -> RowIndex:
    """The index of the source that stands in the config as `key`, whose files are `slices`.

    Processes that come while it is made check parts of it; all return once it is there. DataError as of RowChecker,
    and where no row is usable; ConfigError where the folder cannot be written.
    """
    name = fingerprint(parser, data, slices)
    path, work = folder.path / f"{name}.index", folder.work
    if work.claim(f"{name}/looked") == 0:
        work.tell(f"{name}/is_there", "yes" if _is_there(path) else "no")
    if work.hear(f"{name}/is_there", f"the index of {key}") == "no":
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            _make(path, parser, data, key, slices, work)
        except OSError as error:
            raise cannot_write(path, error) from error
        work.hear(f"{name}/made", f"the index of {key}, whose rows are checked for it")
    return _opened(path)


def fingerprint(parser: RowParser, data: schema.Data, slices: Sequence[FileSlice]) -> str:
    """Of all that decides which rows are usable and where they stand."""
    decisive = {
        "format": FORMAT,
        "files": [(str(file.path.absolute()), file.num_bytes, file.mtime_ns) for one in slices for file in one.files],
        "source": parser.source.model_dump(mode="json", exclude={"weight", "name"}),
        "needs": parser.needs,
        "difficulty": parser.difficulty_key,
        "lengths": (data.min_prompt_tokens, data.max_prompt_tokens, data.on_bad_row),
        "samples": (data.max_response_tokens, data.on_long_row, *astuple(parser.model)),
        "encoder": parser.encoder.fingerprint(),
    }
    return hashlib.sha256(json.dumps(decisive).encode()).hexdigest()[:24]


def _is_there(path: Path) -> bool:
    try:
        open_index(path)
    except FileNotFoundError:
        return False
    except DamagedIndexError as problem:
        logger.warning("%s is damaged (%s), so the rows are checked once more", path, problem)
        return False
    return True


def _opened(path: Path) -> RowIndex:
    deadline = time.monotonic() + APPEARS_WITHIN_S
    while True:
        try:
            return open_index(path)
        except (FileNotFoundError, DamagedIndexError) as error:
            if time.monotonic() > deadline:
                raise DataError(
                    f"{path} was written by another rank, and this one does not see it as it is ({error}); expected "
                    "output_dir to be a folder that all nodes see"
                ) from error
        time.sleep(LOOK_S)


def _make(
    path: Path, parser: RowParser, data: schema.Data, key: str, slices: Sequence[FileSlice], work: SharedWork
) -> None:
    """Check parts until there are none left; whoever finishes the last one puts them together."""
    name, parts = path.stem, parts_of(parser.source, slices)
    files = [path.with_name(f"{name}.part{number}") for number in range(len(parts))]
    began = time.monotonic()
    while (number := work.claim(f"{name}/part")) < len(parts):
        index_part(parts[number], RowChecker(parser, data, key), files[number], work.advance)
        if work.claim(f"{name}/checked") == len(parts) - 1:
            summary = _join(parts, files, path, RowChecker(parser, data, key), work)
            seconds = time.monotonic() - began
            logger.warning("%s: %s rows are indexed in %s (%.0f s)", key, f"{summary.num_rows:,}", path, seconds)
            work.tell(f"{name}/made", "yes")


def _join(parts: Sequence[Part], files: Sequence[Path], path: Path, checker: RowChecker, work: SharedWork) -> Summary:
    """Write the index whose parts are in `files`, and remove these."""
    whole = Summary()
    found = [open_index(file).summary for file in files]
    for summary in found:
        whole.dropped.add(summary.dropped)
        whole.has_tools = whole.has_tools or summary.has_tools
    whole.columns = sorted({column for summary in found for column in summary.columns})
    num_usable = sum(summary.num_rows for summary in found)
    refuse_unusable_source(checker, num_usable=num_usable, has_tools=whole.has_tools, dropped=whole.dropped)
    with written_whole(path) as file:
        writer, num_lines = IndexWriter(file, with_difficulties=checker.parser.difficulty_key is not None), 0
        for part, of_part, summary in zip(parts, files, found, strict=True):
            num_lines = num_lines if part.begin else 0
            _append(writer, of_part, num_lines)
            num_lines += summary.num_lines
            whole.add_files(summary.files)
            work.advance()
        writer.finish(whole)
    for of_part in files:
        of_part.unlink()
    return whole


def _append(writer: IndexWriter, path: Path, num_lines: int) -> None:
    """The records of a part that so many lines of its file come before."""
    records = open_index(path).records
    for first in range(0, len(records), BLOCK_ROWS):
        block = np.array(records[first : first + BLOCK_ROWS])
        block["number"] += num_lines
        writer.extend(block)
