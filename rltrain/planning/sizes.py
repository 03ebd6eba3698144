"""Numbers, units and tables as text."""

from collections.abc import Collection, Mapping, Sequence
from textwrap import wrap

from rltrain.runtime.placement import format_ranks

# Numbers with units.

WIDTH = 110
"""Length of a wrapped line, in characters."""
UNITS = (("GB", 1e9), ("MB", 1e6), ("kB", 1e3))


def size(num_bytes: float) -> str:
    """Returns bytes with three digits, in the largest unit with a value of at least one."""
    for unit, of_unit in UNITS:
        if num_bytes >= of_unit:
            return f"{digits(num_bytes / of_unit)} {unit}"
    return f"{num_bytes:.0f} B"


def sizes(bytes_of: Mapping[str, float]) -> str:
    """Returns the names and sizes, largest first, equal ones by name. Zeros are left out."""
    held = [item for item in bytes_of.items() if item[1]]
    ordered = sorted(held, key=lambda item: (-item[1], item[0]))
    return ", ".join(f"{name} {size(num_bytes)}" for name, num_bytes in ordered)


def seconds(value: float) -> str:
    return f"{digits(value)} s" if value >= 1 else f"{value * 1e3:.0f} ms" if value >= 1e-3 else "0 s"


def digits(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def numbered(unit: str, numbers: Collection[int]) -> str:
    """Returns text such as "ranks 0-3"."""
    return f"{unit}{'s' * (len(numbers) > 1)} {format_ranks(numbers)}"


# Text in lines and columns.


def wrapped(line: str) -> list[str]:
    """Returns the lines of a long text. Further lines are indented."""
    return wrap(line, WIDTH, subsequent_indent="    ", break_on_hyphens=False)


def table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Returns one line per row. Every column is as wide as its widest cell."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
