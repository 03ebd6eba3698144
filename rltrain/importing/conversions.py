"""Values that several trainers have in other forms."""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rltrain.importing.translation import UntranslatableError

VOCABULARY = 100_000
"""Of a top_k this large nothing is cut off: it stands for none."""
ESTIMATORS = {"k1": "k1", "kl": "k1", "k2": "k2", "mse": "k2", "k3": "k3", "low_var_kl": "k3", "k3+": "k3", "k1+": "k1"}
NOTHING = (None, "", "null", "None", "none")


def number(value: Any) -> Any:
    """An int where it is one, else a float."""
    if isinstance(value, bool) or value in NOTHING:
        raise UntranslatableError("a number was expected")
    try:
        real = float(value)
    except (TypeError, ValueError):
        raise UntranslatableError("it is no number that can be told without running the source") from None
    return int(real) if real.is_integer() and abs(real) < 2**53 and "e-" not in str(value) else real


def count(value: Any) -> int:
    found = number(value)
    if not isinstance(found, int):
        raise UntranslatableError("a whole number was expected")
    return found


def real(value: Any) -> float:
    return float(number(value))


def truth(value: Any) -> bool:
    if isinstance(value, bool):
        return value
    if value in NOTHING:
        return False
    if str(value).lower() in ("true", "1", "yes", "on"):
        return True
    if str(value).lower() in ("false", "0", "no", "off"):
        return False
    raise UntranslatableError("true or false was expected")


def negated(value: Any) -> bool:
    return not truth(value)


def text(value: Any) -> str:
    return str(value)


def top_k(value: Any) -> int:
    found = count(value)
    return 0 if found <= 0 or found >= VOCABULARY else found


def interval(value: Any) -> int:
    """Steps between; -1 and null are never."""
    return 0 if value in NOTHING else max(count(value), 0)


def one_of(names: Mapping[str, Any], what: str) -> Callable[[Any], Any]:
    """A converter of names."""

    def convert(value: Any) -> Any:
        if str(value) not in names:
            raise UntranslatableError(f"{what} here are those of {', '.join(names)}")
        return names[str(value)]

    return convert


estimator = one_of(ESTIMATORS, "estimators of the KL")


def pair(value: Any) -> tuple[float, float]:
    """Two numbers, as a list or as its text."""
    given = re.findall(r"[^][(), ]+", value) if isinstance(value, str) else value
    if not isinstance(given, Sequence) or len(given) != 2:
        raise UntranslatableError("two numbers were expected")
    return real(given[0]), real(given[1])


def paths(value: Any) -> Any:
    """A file, or a list of several."""
    if isinstance(value, str):
        parts = [part.strip() for part in value.split(",") if part.strip()]
        return parts[0] if len(parts) == 1 else parts
    if isinstance(value, Sequence) and all(isinstance(one, str) for one in value) and value:
        return value[0] if len(value) == 1 else [*value]
    raise UntranslatableError("a file or a list of files was expected")


def ranks(first: int, number_of: int) -> str:
    """So many ranks from `first` on."""
    if number_of < 1:
        raise UntranslatableError("no rank is left for it")
    return str(first) if number_of == 1 else f"{first}-{first + number_of - 1}"
