"""Options of the serve command that say how requests are drawn which say nothing themselves."""

import pytest

from rltrain.errors import ConfigError
from rltrain.serving.command import parser, sampling_of


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--temperature", "1e400"], "--temperature: got inf; expected 0, or a number from 0.001 to 1000"),
        (["--temperature", "nan"], "--temperature: got nan; expected 0, or a number from 0.001 to 1000"),
        (["--temperature", "1e-5"], "--temperature: got 1e-05; expected 0, or a number from 0.001 to 1000"),
        (["--top-p", "0"], "--top-p: got 0.0; expected a number, at least 0.000001 and at most 1"),
        (["--top-k", "-5"], "--top-k: got -5; expected a whole number, at least -1"),
    ],
)
def test_numbers_that_no_engine_can_draw_with_are_refused(options: list[str], expected: str) -> None:
    with pytest.raises(ConfigError) as error:
        sampling_of(parser().parse_args(["--checkpoint", "x", *options]))
    assert str(error.value) == expected


def test_others_are_taken() -> None:
    given = ["--checkpoint", "x", "--temperature", "0", "--top-p", "0.5", "--top-k", "-1"]
    sampling = sampling_of(parser().parse_args(given))
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0, 0.5, 0)
