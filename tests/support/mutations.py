"""Damaged copies of bytes and JSON, for tests of parsers."""

import json
import random
from collections.abc import Iterator
from typing import Any

ODD_VALUES: tuple[Any, ...] = (
    None,
    True,
    -1,
    0,
    2**31,
    2**63,
    -(2**70),
    10**400,
    0.5,
    1e308,
    float("nan"),
    float("-inf"),
    "",
    "a" * 5000,
    "\ud800",
    "../../x",
    "\x00",
    [],
    {},
    [[]],
    {"": {}},
)
ODD_BYTES = (
    b"",
    b"\x00",
    b"\xff" * 8,
    b"[" * 20000,
    b'{"a":' * 5000,
    b"\xed\xa0\x80",
    b"&a [*a, *a]",
    b"!!python/name:os.x ",
)


def mutated_bytes(original: bytes, count: int, seed: int = 0, first: int | None = None) -> Iterator[bytes]:
    """Yields `count` copies with bytes changed, removed, inserted or cut off, beginning within the `first` bytes if
    given."""
    rng = random.Random(seed)
    for _ in range(count):
        copy = bytearray(original)
        for _ in range(rng.choice((1, 1, 2, 5))):
            near = rng.randrange(min(len(copy), first or len(copy)) + 1)
            match rng.randrange(6):
                case 0:
                    copy[near : near + 1] = bytes([rng.randrange(256)])
                case 1:
                    copy[near : near + 1] = bytes([copy[near] ^ 1 << rng.randrange(8)]) if near < len(copy) else b""
                case 2:
                    del copy[near : near + rng.choice((1, 8, 100))]
                case 3:
                    copy[near:near] = rng.choice(ODD_BYTES)
                case 4:
                    copy[near:near] = copy[near : near + rng.choice((1, 30))]
                case 5:
                    del copy[near:]
        yield bytes(copy)


def mutated_json(original: Any, count: int, seed: int = 0) -> Iterator[bytes]:
    """Yields `count` texts. Some have an odd value or lack a key, some have damaged bytes."""
    rng = random.Random(seed)
    as_bytes = mutated_bytes(json.dumps(original).encode(), count, seed)
    for number, damaged in enumerate(as_bytes):
        if number % 3 == 0:
            yield damaged
            continue
        copy = json.loads(json.dumps(original))
        for _ in range(rng.choice((1, 1, 2))):
            holder, key = rng.choice([*_places(copy)])
            if rng.random() < 0.2:
                del holder[key]
                break
            holder[key] = rng.choice(ODD_VALUES)
        yield json.dumps(copy).encode()


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    for key, inner in [*(value.items() if isinstance(value, dict) else enumerate(value))]:
        yield value, key
        if isinstance(inner, (dict, list)):
            yield from _places(inner)
