"""How many rows the job would use of each source, and how many it would leave out, for which reason."""

from collections.abc import Iterator
from pathlib import Path
from textwrap import wrap

from rltrain.algorithms.registry import algorithm_of
from rltrain.config.schema import Config, PromptFile, PromptSource
from rltrain.data.locations import Location
from rltrain.data.prompt_rows import Needs, RowParser
from rltrain.data.prompts import (
    SourceRows,
    keyed_sources,
    load_source,
    repeated_within_a_step,
    same_tokens,
    shown_prompt,
)
from rltrain.data.tokenizer import PromptEncoder, load_tokenizer
from rltrain.dry_run.sizes import WIDTH, size
from rltrain.errors import CheckpointError, DataError
from rltrain.rewards.registry import labels_of

MOST_BYTES = 2 * 2**30
"""Of a source's files, that are read: a dry run is to take seconds."""


def describe_rows(config: Config) -> list[str]:
    """DataError where the job would be refused with it: a bad row without data.on_bad_row: skip, or no row left."""
    named = [
        (key, source, needs)
        for file_key, file, needs in files_read(config)
        for key, source in keyed_sources(file, file_key)
    ]
    files = {key: _files(source, key) for key, source, _ in named}
    lines: list[str] = []
    encoder, num_trained_on = None, 0
    for key, source, needs in named:
        found = files[key]
        title = f"{key} ({source.title})"
        if isinstance(found, str):
            lines.append(f"{title}: rows unknown: {found}")
            continue
        if encoder is None:
            encoder = _encoder(config)
        if isinstance(encoder, str):
            lines.append(f"{title}: rows unknown: {encoder}")
        else:
            parsed, rows = load_source(RowParser(source, encoder, needs), config.data, key, first=0)
            lines += _counted(title, rows, source)
            if key.startswith("data.train") and num_trained_on == 0:
                lines.append(f"  {shown_prompt(parsed[0], encoder)}")
            if (same := same_tokens(parsed, encoder)) is not None:
                lines.append(f"  {same}")
            num_trained_on += rows.num_rows if key.startswith("data.train") else 0
    if num_trained_on and algorithm_of(config).generates:
        repeated = repeated_within_a_step(num_trained_on, config.batch.prompts_per_step)
        lines += [repeated] if repeated else []
    return [part for line in lines for part in wrap(line, WIDTH, subsequent_indent="    ", break_on_hyphens=False)]


def files_read(config: Config) -> Iterator[tuple[str, PromptFile, Needs]]:
    """Files of rows, with where they stand in the config and what is needed of their rows."""
    algorithm = algorithm_of(config)
    if algorithm.from_pairs:
        yield "data.train", config.data.train, "pair"
    elif algorithm.generates:
        yield "data.train", config.data.train, labels_of(config.reward)
    elif algorithm.trains:
        yield "data.train", config.data.train, "response"
    for plan in config.evaluations:
        held_out: Needs = "pair" if algorithm.from_pairs else "response"
        needed = held_out if config.scores_held_out else labels_of(plan.reward or config.reward)
        yield plan.config_key, plan.file, needed


def _files(source: PromptSource, key: str) -> list[Path] | str:
    """Those of a source; or why its rows are not read."""
    paths = (source.path,) if isinstance(source.path, str) else source.path
    try:
        locations = [Location.of(path, key) for path in paths]
        found = [file for one in locations for file in one.files(key, source.subset, source.split)]
    except DataError as error:
        return str(error).removeprefix(f"{key}: ")
    num_bytes = sum(file.stat().st_size for file in found)
    if num_bytes > MOST_BYTES:
        return f"{size(num_bytes)} in {len(found)} files; a dry run reads {size(MOST_BYTES)} at most"
    return found


def _encoder(config: Config) -> PromptEncoder | str:
    """By which prompts are measured; or why they cannot be."""
    try:
        return PromptEncoder(load_tokenizer(Path(config.model.path)), config.data)
    except CheckpointError as error:
        return str(error)


def _counted(title: str, found: SourceRows, source: PromptSource) -> list[str]:
    rows, dropped = f"{title}: {found.num_rows:,} rows", found.dropped
    if found.num_rows == source.max_rows:
        rows += ", no more by max_rows"
    if not dropped:
        return [f"{rows}; none left out"]
    return [f"{rows}; left out: {dropped.counts}", *(f"  {problem}" for problem in dropped.problems)]
