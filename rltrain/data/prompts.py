"""The rows of data.train or data.eval. They are checked when they are read, and tokenised when they are used."""

import logging
from array import array
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from rltrain.config import schema
from rltrain.data.images import Context, ImageSource
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
from rltrain.models.vision import PlacedImage

logger = logging.getLogger(__name__)

COMPARED_ROWS = 64
SHOWN_CHARACTERS = 400
INDEXED_BYTES = 8 * 2**20
"""Rows of smaller files are held in memory: some ten thousand. Checking them takes less time than
starting a process."""


Difficulties = npt.NDArray[np.float64]
NONE: Difficulties = np.empty(0)


@dataclass(frozen=True)
class SourceRows:
    """The place of one source's rows in a dataset."""

    title: str
    first: int
    num_rows: int
    weight: float | None
    dropped: DroppedRows
    difficulties: Difficulties = field(default_factory=lambda: NONE)
    """Difficulty of each row of the source, if a curriculum sorts by it."""


class PromptDataset:
    """The usable rows of one or several sources, one source after another, each in its order. A row's index is its
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
        """Counts of the dropped rows of all sources."""
        dropped = DroppedRows()
        for source in self.sources:
            dropped.add(source.dropped)
        return dropped

    def source_of(self, index: int) -> str:
        """Returns the title of the row's source."""
        return self.sources[bisect_right(self._firsts, index) - 1].title

    def context(self, index: int) -> Context:
        """Returns the row's prompt as ids with its images. Raises DataError if there are more than
        data.max_prompt_tokens, or none, or if an image cannot be used any more."""
        row = self.rows[index]
        try:
            context = self.encoder.encode(row.prompt, row.tools)
        except DataError as error:
            raise DataError(f"{row.origin}: {error}") from error
        if not 0 < len(context.ids) <= self.max_prompt_tokens:
            raise DataError(
                f"{row.origin}: the prompt has {len(context.ids)} tokens; expected 1 to {self.max_prompt_tokens} "
                "(data.max_prompt_tokens)"
            )
        return context

    def prompt_tokens(self, index: int) -> tuple[int, ...]:
        """Returns the ids of `context`."""
        return self.context(index).ids

    def image_sources(self, index: int) -> tuple[ImageSource, ...]:
        """Returns all images of the row: those of the prompt, then those of given responses. Without model.vision there
        are none."""
        return self.rows[index].images if self.encoder.images is not None else ()

    def samples(self, index: int) -> list[Encoded]:
        """Returns the row's sample as ids, or both samples of a pair. They are complete. `limit` has the number of
        tokens to keep."""
        row = self.rows[index]
        return [encoded(row, response, self.encoder) for response in responses_of(row)]

    def prompt_text(self, index: int) -> str:
        """Returns the row's prompt for reward functions."""
        return prompt_text(self.rows[index].prompt)


def report_dropped(config_key: str, dataset: PromptDataset) -> None:
    """Logs the unused rows of each file with the reasons. Warns if the model gets the same tokens
    for different rows."""
    for source in dataset.sources:
        if source.dropped:
            of_source = f" ({source.title})" if len(dataset.sources) > 1 else ""
            logger.warning("%s%s: %s", config_key, of_source, source.dropped)
    if (same := same_tokens(dataset.rows, dataset.encoder)) is not None:
        logger.warning("%s: %s", config_key, same)


def same_tokens(rows: Sequence[PromptRow], encoder: PromptEncoder) -> str | None:
    """Returns a warning if two different prompts of the first rows have the same tokens, else None."""
    seen: dict[tuple[tuple[int, ...], tuple[PlacedImage, ...]], PromptRow] = {}
    for index in range(min(len(rows), COMPARED_ROWS)):
        row = rows[index]
        shown = encoder.encode(row.prompt, row.tools)
        other = seen.setdefault((shown.ids, shown.images), row)
        if (other.prompt, other.tools) != (row.prompt, row.tools) and not shown.images:
            text = encoder.tokenizer.decode([*shown.ids])[:SHOWN_CHARACTERS]
            return (
                f"the prompts of {other.origin} and {row.origin} differ, but the model is shown the same "
                f"{len(shown.ids)} tokens for both: {text!r}. Expected a chat template that writes the messages "
                "(data.chat_template: never sends texts as they are)"
            )
    return None


def shown_prompt(row: PromptRow, encoder: PromptEncoder) -> str:
    """Returns a row's prompt as text of its tokens, for the user."""
    shown = encoder.encode(row.prompt, row.tools)
    merge = 1 if encoder.images is None else encoder.images.merge
    text = encoder.tokenizer.decode(shown.shortened(merge))
    cut = f", cut after {SHOWN_CHARACTERS} characters" if len(text) > SHOWN_CHARACTERS else ""
    images = f", images: {len(shown.images)}" if shown.images else ""
    return f"{row.origin} as the model is shown it ({len(shown.ids)} tokens{images}{cut}): {text[:SHOWN_CHARACTERS]!r}"


def repeated_within_a_step(num_rows: int, prompts_per_step: int) -> str | None:
    """Returns a warning if a step takes more prompts than there are rows, else None."""
    if num_rows >= prompts_per_step:
        return None
    return (
        f"data.train: {num_rows:,} usable rows, and a step takes batch.prompts_per_step = {prompts_per_step:,}, so "
        "some rows are in a step several times, each time as another group; expected at least as many rows"
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
    """Reads the sources of `file`. `config_key` is its key, "data.train" or "data.eval".

    `needs` is a further column that rows must have. A label is needed only if label_key is set. A plain label is
    neither a list nor an object. A bad row raises DataError with its place, or is skipped and counted, according to
    data.on_bad_row. Prompts of more than data.max_prompt_tokens are dropped and counted.

    A response is too long above data.max_response_tokens, or if the sample has more tokens than `model` has positions.
    Such rows are dropped, cut or refused, according to data.on_long_row. A row with a token id unknown to `model` is a
    bad one.

    max_rows counts usable rows. Raises DataError if a source has no usable row. With `indexes` the rows of large files
    are not held in memory. Their index is found there or made.
    """
    parts: list[Sequence[PromptRow]] = []
    sources: list[SourceRows] = []
    for key, source in keyed_sources(file, config_key):
        parser = RowParser(source, encoder, needs, difficulty_key(data, file), model)
        rows, found = load_source(parser, data, key, first=sum(map(len, parts)), indexes=indexes)
        parts.append(rows)
        sources.append(found)
    limit = SampleLimit.of(data, model, encoder.images)
    return PromptDataset(parts, encoder, data.max_prompt_tokens, sources, limit)


def load_sampled(
    config: schema.Config,
    files: Mapping[str, schema.PromptFile | None],
    needs: Needs,
    encoder: PromptEncoder,
    indexes: IndexFolder | None,
    model: ModelLimits,
) -> dict[str, PromptDataset]:
    """Returns the rows of `files` with responses, by config key. Refuses a chat template without a place for the
    responses."""
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
    """Returns the column that a curriculum sorts the rows of `file` by, or None without a curriculum."""
    return data.curriculum.key if data.curriculum is not None and file is data.train else None


def keyed_sources(file: schema.PromptFile, config_key: str) -> list[tuple[str, schema.PromptSource]]:
    """Returns each source of `file` with its config key."""
    parts = enumerate(file.parts())
    return [(f"{config_key}.sources.{number}" if file.sources else config_key, source) for number, source in parts]


def load_source(
    parser: RowParser, data: schema.Data, key: str, *, first: int, indexes: IndexFolder | None = None
) -> tuple[Sequence[PromptRow], SourceRows]:
    """Returns the usable rows of one source, like load_prompts. `key` is its config key, `first` the number of rows
    before it."""
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
