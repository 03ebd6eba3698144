"""Which rows of a source can be used, and how many cannot, for which reason."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from rltrain.config import schema
from rltrain.data.prompt_rows import PromptRow, RowParser
from rltrain.data.row_files import FileRow, RowFile
from rltrain.data.row_samples import SampleLimit, long_samples, refuse_unknown_ids
from rltrain.data.rows import BadRow, Row
from rltrain.data.tokenizer import PromptEncoder
from rltrain.errors import DataError

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
    num_long: int = 0
    """Rows with a response that is too long, under data.on_long_row: skip."""
    num_cut: int = 0
    """Rows that are part of the dataset, with a response that is cut under data.on_long_row: cut."""
    problems: list[str] = field(default_factory=list)
    """What was wrong with the first few bad ones."""

    @property
    def num_bad(self) -> int:
        return self.bad.total()

    def __bool__(self) -> bool:
        return self.num_left_out + self.num_cut > 0

    @property
    def num_left_out(self) -> int:
        return self.num_bad + self.num_too_long + self.num_too_short + self.num_long

    @property
    def cut(self) -> str:
        """The number of rows that stay with less."""
        return f"{self.num_cut} of them with a response that is cut"

    def __str__(self) -> str:
        return "".join((self.counts, *(f"\n  {problem}" for problem in self.problems)))

    @property
    def counts(self) -> str:
        """Numbers by reason."""
        reasons = ", ".join(f"{reason}: {number}" for reason, number in self.bad.most_common())
        bad = f"{self.num_bad} bad rows skipped{f' ({reasons})' if reasons else ''}"
        short = f", {self.num_too_short} prompts too short" if self.num_too_short else ""
        long = f", {self.num_long} responses too long" if self.num_long else ""
        cut = f"; of the rows that stay {self.num_cut} have a response that is cut" if self.num_cut else ""
        return f"{bad}, {self.num_too_long} prompts too long{short}{long}{cut}"

    def add(self, other: "DroppedRows") -> None:
        """Those of rows behind."""
        self.bad += other.bad
        self.num_too_long += other.num_too_long
        self.num_too_short += other.num_too_short
        self.num_long += other.num_long
        self.num_cut += other.num_cut
        self.problems = [*self.problems, *other.problems][:MAX_KEPT_PROBLEMS]

    def note_bad(self, problem: str, reason: str) -> None:
        self.bad[reason] += 1
        if len(self.problems) < MAX_KEPT_PROBLEMS:
            self.problems.append(problem)


UsableRow = tuple[RowFile, int, PromptRow, float, Row]
"""(file, where it stands in it, the row, its difficulty, its values)"""


class RowChecker:
    """Of the rows of one source, which stands in the config as `key`."""

    def __init__(self, parser: RowParser, data: schema.Data, key: str) -> None:
        self.parser, self.data, self.key = parser, data, key
        self.limit = SampleLimit.of(data, parser.model)
        self.dropped = DroppedRows()
        self.num_usable = 0
        self.has_tools = False

    def usable(self, rows: Iterable[FileRow], num_before: Callable[[], int] = lambda: 0) -> Iterator[UsableRow]:
        """In their order, up to max_rows; what is left out is counted. `num_before` is called for messages and added
        to the number of a row. DataError for a bad row, unless data.on_bad_row says to skip it."""
        parser = self.parser
        for file, number, place, values in rows:
            if self.num_usable == parser.source.max_rows:
                return
            try:
                row = parser.parse(values, file.prefix, number)
                difficulty = parser.difficulty(values)
                length = _length_class(row, parser.encoder, self.data)
                problem = self._check_samples(row) if length == 0 else None
            except BadRow as bad:
                self._leave_out(f"{file.prefix}{number + num_before()}", bad)
                continue
            if length > 0:
                self.dropped.num_too_long += 1
            elif length < 0:
                self.dropped.num_too_short += 1
            elif problem is None or self._keeps_long_row(f"{file.prefix}{number + num_before()}", problem):
                assert not isinstance(values, BadRow), "it was parsed"
                self.num_usable += 1
                self.has_tools = self.has_tools or bool(row.tools)
                yield file, place, row, difficulty, values

    def _check_samples(self, row: PromptRow) -> str | None:
        """Returns why a sample of the row is too long, None where none is. Raises BadRow."""
        encoder = self.parser.encoder
        try:
            refuse_unknown_ids(row, encoder, self.parser.model)
            long = next(long_samples(row, encoder, self.limit, self.data.max_prompt_tokens), None)
        except DataError as error:
            raise BadRow(f"cannot be encoded: {str(error).removeprefix(f'{row.origin}: ')}") from error
        return None if long is None else self.limit.problem(long[1])

    def _keeps_long_row(self, origin: str, problem: str) -> bool:
        """Returns whether a row with a response that is too long is used, as data.on_long_row says."""
        if self.data.on_long_row == "refuse":
            raise DataError(
                f"{origin}: in the row {problem} ({self.key}; to leave such rows out: data.on_long_row=skip; to cut "
                "their responses: data.on_long_row=cut)"
            )
        cuts = self.data.on_long_row == "cut"
        self.dropped.num_cut += cuts
        self.dropped.num_long += not cuts
        return cuts

    def _leave_out(self, origin: str, problem: BadRow) -> None:
        if self.data.on_bad_row == "refuse":
            raise DataError(
                f"{origin}: the row {problem} ({self.key}; to leave such rows out: data.on_bad_row=skip)"
            ) from None
        self.dropped.note_bad(f"{origin}: the row {problem}", problem.reason)


def refuse_unusable_source(checker: RowChecker, *, num_usable: int, has_tools: bool, dropped: DroppedRows) -> None:
    """DataError where none of the checker's source's rows is usable, or none has the tools that it is to have: what
    was found, by it or by others, of all rows."""
    source, data, key = checker.parser.source, checker.data, checker.key
    if source.tools_key is not None and num_usable and not has_tools:
        raise DataError(
            f"{key}.tools_key: no usable row has tools under {source.tools_key!r}; expected the column that has them, "
            "or null"
        )
    if not num_usable:
        limits = f"data.max_prompt_tokens: {data.max_prompt_tokens}"
        if data.min_prompt_tokens:
            limits += f", data.min_prompt_tokens: {data.min_prompt_tokens}"
        if dropped.num_long and data.max_response_tokens:
            limits += f", data.max_response_tokens: {data.max_response_tokens}"
        raise DataError(f"{key}: {source.path!r} has no usable row ({limits}): {dropped}")


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
