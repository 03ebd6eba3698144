"""Ranks of a group exchange bytes and JSON of any size."""

from rltrain.runtime.group_messages import FIRST_BYTES, broadcast_bytes, broadcast_json, gather_bytes
from tests.support.worlds import run_case

SIZES = [0, 1, FIRST_BYTES, FIRST_BYTES + 1, 5 * FIRST_BYTES]
VALUES = [None, 0.1 + 0.2, {"text": "é" * FIRST_BYTES, "positions": [1, 2**60]}]


def test_every_rank_gets_what_one_tells_and_what_all_give() -> None:
    source = 2
    told = {
        "bytes": [[source] * size for size in SIZES],
        "values": VALUES,
        "gathered": [[], [1], [2, 2]],
        "rows": [[], [[1, 1]], [[2, 2], [2, 2]]],
        "nothing": [[], [], []],
    }
    assert run_case("cases_group_messages:tell", 3, sizes=SIZES, values=VALUES, source=source) == [told] * 3


def test_a_rank_without_a_group_keeps_what_it_has() -> None:
    assert broadcast_bytes(b"abc", None) == b"abc"
    assert broadcast_json({"a": 1}, None) == {"a": 1}
    assert gather_bytes(b"abc", None) == [b"abc"]
