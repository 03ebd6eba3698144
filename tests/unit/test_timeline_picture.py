"""A stretch of a timeline as a picture: what is in it lies where it should, and what is not does not."""

import re
from xml.etree import ElementTree

import pytest

from rltrain.cli.report import LABEL, WIDTH, picture
from rltrain.cli.report_run import MAIN_THREAD, RankTrace, TimelineSpan

SVG = "{http://www.w3.org/2000/svg}"
SECOND = 1e6


def task(name: str, step: int, start_s: float, end_s: float) -> TimelineSpan:
    return TimelineSpan(name, "task", start_s * SECOND, end_s * SECOND, MAIN_THREAD, 0, {"step": step, "chunk": 0})


@pytest.fixture
def traces() -> list[RankTrace]:
    """Steps of 2 s: one draws <&>, one waits for it and trains."""
    drawn = [task("generate", step, 2 * step, 2 * step + 1) for step in range(3)]
    trained = [task("update", step, 2 * step + 1, 2 * step + 2) for step in range(3)]
    waits = [
        TimelineSpan("<samples>", "wait", 2 * step * SECOND, (2 * step + 1) * SECOND, MAIN_THREAD, 0, {})
        for step in range(3)
    ]
    spans = sorted([*trained, *waits], key=lambda span: span.start_us)
    return [RankTrace(0, ("actor",), spans), RankTrace(1, ("rollout",), drawn)]


def bars(drawn: str) -> dict[str, tuple[float, float]]:
    """(begin, end) of every titled bar, as shares of the time shown."""
    found = {}
    for rect in ElementTree.fromstring(drawn).iter(f"{SVG}rect"):
        title = rect.find(f"{SVG}title")
        if title is not None and title.text:
            begin = (float(rect.attrib["x"]) - LABEL) / (WIDTH - LABEL)
            found[title.text] = (begin, begin + float(rect.attrib["width"]) / (WIDTH - LABEL))
    return found


def test_a_step_lasts_from_the_update_before_it_to_its_own(traces: list[RankTrace]) -> None:
    found = bars(picture(traces, 1, 1))
    assert found.keys() == {"<samples>: 1000 ms", "generate: 1000 ms", "update: 1000 ms"}
    assert found["generate: 1000 ms"] == pytest.approx((0, 0.5), abs=1e-3)
    assert found["<samples>: 1000 ms"] == pytest.approx((0, 0.5), abs=1e-3)
    assert found["update: 1000 ms"] == pytest.approx((0.5, 1), abs=1e-3)


def test_ranks_their_roles_and_the_kinds_of_work_are_named(traces: list[RankTrace]) -> None:
    texts = [text.text for text in ElementTree.fromstring(picture(traces, 0, 2)).iter(f"{SVG}text")]
    assert {"rank 0", "actor", "rank 1", "rollout", "generate", "update", "wait", "0 s", "6 s"} <= {*texts}


def test_a_picture_loads_nothing(traces: list[RankTrace]) -> None:
    drawn = picture(traces, 0, 2)
    assert not re.search(r"href|url\(|@import|<script", drawn)


def test_steps_that_were_not_traced_are_an_error(traces: list[RankTrace]) -> None:
    with pytest.raises(ValueError, match="no steps 2 to 3"):
        picture(traces, 2, 3)
