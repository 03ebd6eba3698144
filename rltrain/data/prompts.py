"""The rows of data.train or data.eval, checked when they are read and tokenised when they are used."""

import logging
from array import array
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from rltrain.config import schema
from rltrain.data.prompt_rows import (
    NO_LIMIT,
    DroppedRows,
    Encoded,
    RowChecker,
    RowParser,
    SampleLimit,
    encoded,
    refuse_unusable_source,
    responses_of,
)
from rltrain.data.prompt_rows import Needs as Needs
from rltrain.data.prompt_rows import PromptRow as PromptRow
from rltrain.data.row_index import Chained, IndexedRows, IndexFolder, shared_index
from rltrain.data.rows import rows_of, slices_of
from rltrain.data.tokenizer import UNKNOWN_MODEL, ModelLimits, PromptEncoder, prompt_text
from rltrain.errors import DataError

logger = logging.getLogger(__name__)

COMPARED_ROWS = 64
SHOWN_CHARACTERS = 400
INDEXED_BYTES = 8 * 2**20
"""Rows of smaller files are held: some ten thousands, which are checked in less time than a process takes to start."""


Difficulties = npt.NDArray[np.float64]
NONE: Difficulties = np.empty(0)


@dataclass(frozen=True)
class SourceRows:
    """Where the rows of one source stand in a dataset."""

    title: str
    first: int
    num_rows: int
    weight: float | None
    dropped: DroppedRows
    difficulties: Difficulties = field(default_factory=lambda: NONE)
    """Of its rows, where a curriculum sorts by them."""


class PromptDataset:
    """Usable rows of one or several sources, one source after the other, each in its order. A row's index is its
    prompt id."""

    def __init__(
        self,
        rows_of_sources: Sequence[Sequence[PromptRow]],
        encoder: PromptEncoder,
        max_prompt_tokens: int,
        sources: Sequence[SourceRows],
        limit: SampleLimit = NO_LIMIT,
    ) -> None:
        self.rows_of_sources = rows_of_sources
        self.rows = rows_of_sources[0] if len(rows_of_sources) == 1 else Chained(rows_of_sources)
        self.encoder = encoder
        self.max_prompt_tokens = max_prompt_tokens
        self.sources = sources
        self.limit = limit
        self._firsts = [source.first for source in sources]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> PromptRow:
        return self.rows[index]

    @property
    def dropped(self) -> DroppedRows:
        """Of all sources."""
        dropped = DroppedRows()
        for source in self.sources:
            dropped.add(source.dropped)
        return dropped

    def source_of(self, index: int) -> str:
        """The title of the source that the row is from."""
        return self.sources[bisect_right(self._firsts, index) - 1].title

    def prompt_tokens(self, index: int) -> tuple[int, ...]:
        """Token ids of the row's prompt, at most data.max_prompt_tokens."""
        row = self.rows[index]
        tokens = self.encoder.encode(row.prompt, row.tools)
        if not 0 < len(tokens) <= self.max_prompt_tokens:
            raise DataError(
                f"{row.origin}: the prompt has {len(tokens)} tokens; expected 1 to {self.max_prompt_tokens} "
                "(data.max_prompt_tokens)"
            )
        return tokens

    def samples(self, index: int) -> list[Encoded]:
        """The row's sample, or of a pair both, whole: `limit` says how much of them is kept."""
        row = self.rows[index]
        return [encoded(row, response, self.encoder) for response in responses_of(row)]

    def prompt_text(self, index: int) -> str:
        """The row's prompt as reward functions see it."""
        return prompt_text(self.rows[index].prompt)


def report_dropped(config_key: str, dataset: PromptDataset) -> None:
    """Logs which rows of the files are not used and why, and whether the model is shown the same for different rows."""
    for source in dataset.sources:
        if source.dropped:
            of_source = f" ({source.title})" if len(dataset.sources) > 1 else ""
            logger.warning("%s%s: %s", config_key, of_source, source.dropped)
    if (same := same_tokens(dataset.rows, dataset.encoder)) is not None:
        logger.warning("%s: %s", config_key, same)


def same_tokens(rows: Sequence[PromptRow], encoder: PromptEncoder) -> str | None:
    """Returns what to say where the first rows have two different prompts of the same tokens; None where none have."""
    seen: dict[tuple[int, ...], PromptRow] = {}
    for index in range(min(len(rows), COMPARED_ROWS)):
        row = rows[index]
        tokens = encoder.encode(row.prompt, row.tools)
        other = seen.setdefault(tokens, row)
        if (other.prompt, other.tools) != (row.prompt, row.tools):
            text = encoder.tokenizer.decode([*tokens])[:SHOWN_CHARACTERS]
            return (
                f"the prompts of {other.origin} and {row.origin} differ, but the model is shown the same "
                f"{len(tokens)} tokens for both: {text!r}. Expected a chat template that writes the messages "
                "(data.chat_template: never sends texts as they are)"
            )
    return None


def shown_prompt(row: PromptRow, encoder: PromptEncoder) -> str:
    """Returns a row's prompt as the model is shown it, in words for a user."""
    tokens = encoder.encode(row.prompt, row.tools)
    text = encoder.tokenizer.decode([*tokens])
    cut = f", cut after {SHOWN_CHARACTERS} characters" if len(text) > SHOWN_CHARACTERS else ""
    return f"{row.origin} as the model is shown it ({len(tokens)} tokens{cut}): {text[:SHOWN_CHARACTERS]!r}"


def repeated_within_a_step(num_rows: int, prompts_per_step: int) -> str | None:
    """What to say where a step takes more prompts than there are; None where it does not."""
    if num_rows >= prompts_per_step:
        return None
    return (
        f"data.train: {num_rows:,} usable rows, and a step takes batch.prompts_per_step = {prompts_per_step:,}, so "
        "some are in it several times, as groups of their own; expected as many rows or more"
    )


def load_prompts(
    file: schema.PromptFile,
    data: schema.Data,
    encoder: PromptEncoder,
    *,
    needs: Needs,
    config_key: str,
    indexes: IndexFolder | None = None,
    model: ModelLimits = UNKNOWN_MODEL,
) -> PromptDataset:
    """Read the sources of `file`, which stands in the config as `config_key` ("data.train", "data.eval").

    `needs` says which column beside the prompt must be there, a label only where label_key names it; a plain label is
    no list and no object. A bad row raises DataError with its place, or is skipped and counted, as data.on_bad_row
    says. Prompts of more than data.max_prompt_tokens are dropped and counted.
    Rows with longer responses than data.max_response_tokens, or than `model` has positions for, are dropped, cut or
    refused, as data.on_long_row says. A row with an id that `model` does not have is a bad one.
    max_rows counts usable rows. Raises DataError where none is left of a source. With `indexes` rows of large files
    are not held: an index of them is made or found there.
    """
    parts: list[Sequence[PromptRow]] = []
    sources: list[SourceRows] = []
    for key, source in keyed_sources(file, config_key):
        parser = RowParser(source, encoder, needs, difficulty_key(data, file), model)
        rows, found = load_source(parser, data, key, first=sum(map(len, parts)), indexes=indexes)
        parts.append(rows)
        sources.append(found)
    return PromptDataset(parts, encoder, data.max_prompt_tokens, sources, SampleLimit.of(data, model))


def load_sampled(
    config: schema.Config,
    files: Mapping[str, schema.PromptFile | None],
    needs: Needs,
    encoder: PromptEncoder,
    indexes: IndexFolder | None,
    model: ModelLimits,
) -> dict[str, PromptDataset]:
    """Returns the rows of `files` that have responses, by config key. A template without a place for one is refused."""
    datasets = {
        key: load_prompts(file, config.data, encoder, needs=needs, config_key=key, indexes=indexes, model=model)
        for key, file in files.items()
        if file is not None
    }
    for dataset in datasets.values():
        for source in dataset.sources:
            dataset.samples(source.first)
    return datasets


def difficulty_key(data: schema.Data, file: schema.PromptFile) -> str | None:
    """Returns the column that a curriculum sorts the rows of `file` by; None where none does."""
    return data.curriculum.key if data.curriculum is not None and file is data.train else None


def keyed_sources(file: schema.PromptFile, config_key: str) -> list[tuple[str, schema.PromptSource]]:
    """Each source of `file` with where it stands in the config."""
    parts = enumerate(file.parts())
    return [(f"{config_key}.sources.{number}" if file.sources else config_key, source) for number, source in parts]


def load_source(
    parser: RowParser, data: schema.Data, key: str, *, first: int, indexes: IndexFolder | None = None
) -> tuple[Sequence[PromptRow], SourceRows]:
    """The usable rows of one source, which stands in the config as `key`, behind `first` of others. As load_prompts."""
    source = parser.source
    slices = slices_of(source, f"{key}.path")
    if indexes is not None and sum(one.num_bytes for one in slices) >= INDEXED_BYTES:
        index = shared_index(indexes, parser, data, key, slices)
        of_all: Difficulties = index.records["difficulty"] if parser.difficulty_key is not None else NONE
        found = SourceRows(source.title, first, len(index.records), source.weight, index.summary.dropped, of_all)
        return IndexedRows(index, parser), found
    checker, difficulties = RowChecker(parser, data, key), array("d")
    rows: list[PromptRow] = []
    for _, _, row, difficulty, _ in checker.usable(rows_of(slices, parser.keys, f"{key}.path")):
        rows.append(row)
        if parser.difficulty_key is not None:
            difficulties.append(difficulty)
    refuse_unusable_source(checker, num_usable=len(rows), has_tools=checker.has_tools, dropped=checker.dropped)
    return rows, SourceRows(
        source.title,
        first,
        len(rows),
        source.weight,
        checker.dropped,
        np.frombuffer(difficulties) if difficulties else NONE,
    )
