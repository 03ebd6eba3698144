"""The rows of data.train or data.eval, checked when they are read and tokenised when they are used."""

import logging
from array import array
from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from rltrain.config import schema
from rltrain.data.files import read_source
from rltrain.data.prompt_rows import Needs as Needs
from rltrain.data.prompt_rows import PromptRow as PromptRow
from rltrain.data.prompt_rows import RowParser
from rltrain.data.rows import BadRow
from rltrain.data.tokenizer import PromptEncoder, prompt_text
from rltrain.errors import DataError

logger = logging.getLogger(__name__)

MAX_KEPT_PROBLEMS = 5


@dataclass
class DroppedRows:
    """Rows of the files that are not part of the dataset."""

    bad: Counter[str] = field(default_factory=Counter)
    """Skipped under data.on_bad_row: skip, by reason."""
    num_too_long: int = 0
    """Prompts of more than data.max_prompt_tokens, whatever data.on_bad_row says."""
    num_too_short: int = 0
    """Prompts of fewer than data.min_prompt_tokens, likewise."""
    problems: list[str] = field(default_factory=list)
    """What was wrong with the first few bad ones."""

    @property
    def num_bad(self) -> int:
        return self.bad.total()

    def __bool__(self) -> bool:
        return self.num_bad + self.num_too_long + self.num_too_short > 0

    def __str__(self) -> str:
        return "".join((self.counts, *(f"\n  {problem}" for problem in self.problems)))

    @property
    def counts(self) -> str:
        """Numbers by reason."""
        reasons = ", ".join(f"{reason}: {number}" for reason, number in self.bad.most_common())
        bad = f"{self.num_bad} bad rows skipped{f' ({reasons})' if reasons else ''}"
        short = f", {self.num_too_short} prompts too short" if self.num_too_short else ""
        return f"{bad}, {self.num_too_long} prompts too long{short}"

    def note_bad(self, problem: str, reason: str) -> None:
        self.bad[reason] += 1
        if len(self.problems) < MAX_KEPT_PROBLEMS:
            self.problems.append(problem)


@dataclass(frozen=True)
class SourceRows:
    """Where the rows of one source stand in a dataset."""

    title: str
    first: int
    num_rows: int
    weight: float | None
    dropped: DroppedRows
    difficulties: Sequence[float] = ()
    """Of its rows, where a curriculum sorts by them."""


class PromptDataset:
    """Usable rows of one or several sources, one source after the other, each in its order. A row's index is its
    prompt id."""

    def __init__(
        self,
        rows: Sequence[PromptRow],
        encoder: PromptEncoder,
        max_prompt_tokens: int,
        sources: Sequence[SourceRows],
    ) -> None:
        self.rows = rows
        self.encoder = encoder
        self.max_prompt_tokens = max_prompt_tokens
        self.sources = sources
        self._firsts = [source.first for source in sources]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> PromptRow:
        return self.rows[index]

    @property
    def dropped(self) -> DroppedRows:
        """Of all sources."""
        of_sources = [source.dropped for source in self.sources]
        return DroppedRows(
            sum((dropped.bad for dropped in of_sources), Counter()),
            sum(dropped.num_too_long for dropped in of_sources),
            sum(dropped.num_too_short for dropped in of_sources),
            [problem for dropped in of_sources for problem in dropped.problems][:MAX_KEPT_PROBLEMS],
        )

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

    def prompt_text(self, index: int) -> str:
        """The row's prompt as reward functions see it."""
        return prompt_text(self.rows[index].prompt)


def report_dropped(config_key: str, dataset: PromptDataset) -> None:
    """Say which rows of the files are not used, and why."""
    for source in dataset.sources:
        if source.dropped:
            of_source = f" ({source.title})" if len(dataset.sources) > 1 else ""
            logger.warning("%s%s: %s", config_key, of_source, source.dropped)


def repeated_within_a_step(num_rows: int, prompts_per_step: int) -> str | None:
    """What to say where a step takes more prompts than there are; None where it does not."""
    if num_rows >= prompts_per_step:
        return None
    return (
        f"data.train: {num_rows:,} usable rows, and a step takes batch.prompts_per_step = {prompts_per_step:,}, so "
        "some are in it several times, as groups of their own; expected as many rows or more"
    )


def load_prompts(
    file: schema.PromptFile, data: schema.Data, encoder: PromptEncoder, *, needs: Needs, config_key: str
) -> PromptDataset:
    """Read the sources of `file`, which stands in the config as `config_key` ("data.train", "data.eval").

    `needs` says which column beside the prompt must be there, a label only where label_key names it; a plain label is
    no list and no object. A bad row raises DataError with its place, or is skipped and counted, as data.on_bad_row
    says. Prompts of other lengths than data.min_prompt_tokens and max_prompt_tokens allow are dropped and counted.
    max_rows counts usable rows. Raises DataError where none is left of a source.
    """
    rows: list[PromptRow] = []
    sources: list[SourceRows] = []
    difficulty_key = data.curriculum.key if data.curriculum is not None and file is data.train else None
    for key, source in keyed_sources(file, config_key):
        parser = RowParser(source, encoder, needs, difficulty_key)
        of_source, found = load_source(parser, data, key, first=len(rows))
        rows += of_source
        sources.append(found)
    return PromptDataset(rows, encoder, data.max_prompt_tokens, sources)


def keyed_sources(file: schema.PromptFile, config_key: str) -> list[tuple[str, schema.PromptSource]]:
    """Each source of `file` with where it stands in the config."""
    parts = enumerate(file.parts())
    return [(f"{config_key}.sources.{number}" if file.sources else config_key, source) for number, source in parts]


def load_source(parser: RowParser, data: schema.Data, key: str, *, first: int) -> tuple[list[PromptRow], SourceRows]:
    """The usable rows of one source, which stands in the config as `key`, behind `first` of others. As load_prompts."""
    source, dropped, difficulties = parser.source, DroppedRows(), array("d")
    rows = _usable_rows(parser, data, key, dropped, difficulties)
    if not rows:
        limits = f"data.max_prompt_tokens: {data.max_prompt_tokens}"
        if data.min_prompt_tokens:
            limits += f", data.min_prompt_tokens: {data.min_prompt_tokens}"
        raise DataError(f"{key}: {source.path!r} has no usable row ({limits}): {dropped}")
    return rows, SourceRows(source.title, first, len(rows), source.weight, dropped, difficulties)


def _usable_rows(
    parser: RowParser, data: schema.Data, key: str, dropped: DroppedRows, difficulties: "array[float]"
) -> list[PromptRow]:
    """Of one source, which stands in the config as `key`; what is left out is counted in `dropped`, and `difficulties`
    are filled if a curriculum wants them."""
    rows: list[PromptRow] = []
    for origin, values in read_source(parser.source, parser.keys, f"{key}.path"):
        if len(rows) == parser.source.max_rows:
            break
        try:
            row = parser.parse(values, origin)
            difficulty = parser.difficulty(values)
            length = _length_class(row, parser.encoder, data)
        except BadRow as problem:
            if data.on_bad_row == "refuse":
                raise DataError(
                    f"{origin}: the row {problem} ({key}; to leave such rows out: data.on_bad_row=skip)"
                ) from None
            dropped.note_bad(f"{origin}: the row {problem}", problem.reason)
            continue
        if length == 0:
            rows.append(row)
            if parser.difficulty_key is not None:
                difficulties.append(difficulty)
        elif length > 0:
            dropped.num_too_long += 1
        else:
            dropped.num_too_short += 1
    if parser.source.tools_key is not None and rows and not any(row.tools for row in rows):
        raise DataError(
            f"{key}.tools_key: no usable row has tools under {parser.source.tools_key!r}; expected the column that has "
            "them, or null"
        )
    return rows


def _length_class(row: PromptRow, encoder: PromptEncoder, data: schema.Data) -> int:
    """-1: the prompt is too short, 1: too long, 0: neither. It is encoded only where that is not clear without."""
    least, most = data.min_prompt_tokens, data.max_prompt_tokens
    if least <= 1 and encoder.length_bound(row.prompt, row.tools) <= most:
        return 0
    try:
        length = len(encoder.encode(row.prompt, row.tools))
    except DataError as error:
        raise BadRow(f"cannot be encoded: {error}") from error
    return (length > most) - (length < least)
