"""The rows of a source by its index: parsed when they are asked for, and not held."""

from bisect import bisect_right
from functools import lru_cache
from itertools import accumulate

import pyarrow

from rltrain.data.computed_sequence import ComputedSequence
from rltrain.data.prompt_rows import PromptRow, RowParser
from rltrain.data.row_access import RowAccess, open_rows
from rltrain.data.row_index import RowIndex
from rltrain.data.rows import BadRow, Keys, Row
from rltrain.errors import DataError

KEPT_ROWS = 1024
OPEN_FILES = 64


class IndexedRows(ComputedSequence[PromptRow]):
    """For several threads."""

    def __init__(self, index: RowIndex, parser: RowParser) -> None:
        self.row_index, self.parser = index, parser
        self._firsts = [0, *accumulate(file.num_rows for file in index.summary.files)]
        self._row = lru_cache(maxsize=KEPT_ROWS)(self._parse)
        self._file = lru_cache(maxsize=OPEN_FILES)(self._open)

    def __len__(self) -> int:
        return len(self.row_index.records)

    def item(self, index: int) -> PromptRow:
        """DataError where the file is not what it was when its rows were checked."""
        return self._row(index)

    def values(self, index: int, keys: Keys) -> tuple[str, Row]:
        """(origin, what stands in the file under the columns that have `keys`, or under others too). As item."""
        prefix, number, values = self._read(index, keys)
        if isinstance(values, BadRow):
            raise DataError(f"{prefix}{number}: the row {values}, and was usable when it was checked")
        return f"{prefix}{number}", values

    def _parse(self, index: int) -> PromptRow:
        prefix, number, values = self._read(index, self.parser.keys)
        try:
            return self.parser.parse(values, prefix, number)
        except BadRow as problem:
            raise DataError(f"{prefix}{number}: the row {problem}, and was usable when it was checked") from None

    def _read(self, index: int, keys: Keys) -> tuple[str, int, Row | BadRow]:
        of_file = bisect_right(self._firsts, index) - 1
        file, record = self.row_index.summary.files[of_file], self.row_index.records[index]
        place, number = int(record["place"]), int(record["number"])
        try:
            return file.prefix, number, self._file(of_file).at(place, keys)
        except (DataError, OSError, pyarrow.ArrowException) as error:
            raise DataError(f"{file.prefix}{number}: {error}") from error

    def _open(self, number: int) -> RowAccess:
        return open_rows(self.row_index.summary.files[number], self.row_index.path.parent)
