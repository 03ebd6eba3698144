"""What a line of a file of rows says is what the standard reader of JSON makes of it."""

import json

from hypothesis import example, given
from hypothesis import strategies as st

from rltrain.data.rows import BadRow, parse_line

OBJECTS = st.dictionaries(st.text(max_size=3), st.integers() | st.text(max_size=5) | st.none(), max_size=3)
AROUND = st.sampled_from([b"", b" ", b"\t", b"\r\n", b"\xef\xbb\xbf", b"{}", b"x", b"\x00", b"\xe9"])


@given(
    st.tuples(AROUND, AROUND, OBJECTS.map(lambda row: json.dumps(row, ensure_ascii=False)) | st.text(), AROUND, AROUND)
)
@example((b"\xef\xbb\xbf", b"  ", '{"a": 1}', b" ", b"\r\n"))
@example((b"", b"", '{"a": 1} {}', b"", b""))
def test_a_line_is_read_as_the_standard_reader_does(parts: tuple[bytes, bytes, str, bytes, bytes]) -> None:
    before, space, text, after, end = parts
    line = before + space + text.encode(errors="replace") + after + end
    try:
        expected = json.loads(line.rstrip().decode("utf-8-sig"))
    except ValueError as error:
        found = parse_line(line)
        assert isinstance(found, BadRow)
        if isinstance(error, json.JSONDecodeError) and "BOM" not in error.msg:  # of a second one
            assert str(found) == f"is not JSON: {error.msg} at column {error.colno}"
        return
    found = parse_line(line)
    assert found == expected if isinstance(expected, dict) else isinstance(found, BadRow)
