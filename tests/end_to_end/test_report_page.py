"""The report's page in a real browser, on a laptop and on a phone.

Needs Chromium (apt-get install chromium). RLTRAIN_BROWSER=require makes its absence a failure.
"""

import io
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console

from rltrain.cli.report import COLOURS
from tests.end_to_end.browser import Browser, find_browser
from tests.run_folders import HOSTILE, write_run
from tools.report import report

LAPTOP, PHONE = (1400, 900), (390, 844)
NUM_STEPS = 40


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    executable = find_browser()
    if executable is None:
        message = "no Chromium found: apt-get install chromium"
        if os.environ.get("RLTRAIN_BROWSER") == "require":
            pytest.fail(message)
        pytest.skip(message)
    with Browser(executable) as started:
        yield started


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    return report(write_run(folder, NUM_STEPS), folder / "report", Console(file=io.StringIO()))[0]


# The share of pixels of a canvas that differ from the first one.
INK = """(canvas => {
  const pixels = new Uint32Array(canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height).data.buffer);
  return pixels.reduce((count, pixel) => count + (pixel !== pixels[0]), 0) / pixels.length;
})(document.getElementById('spans'))"""

PAINT = "document.getElementById('spans').toDataURL()"

# Elements that stick out of the window to the right, which nothing around them clips.
STICKING_OUT = """[...document.querySelectorAll('body *')]
  .filter(e => e.getBoundingClientRect().right > innerWidth + 0.5 && !e.closest('.lanes, pre, .stack'))
  .map(e => e.tagName + '.' + e.className)"""


@pytest.mark.parametrize(("size", "dark"), [(LAPTOP, False), (PHONE, True)], ids=["light laptop", "dark phone"])
def test_the_page_shows_everything_without_a_complaint(
    browser: Browser, page: Path, tmp_path: Path, size: tuple[int, int], dark: bool
) -> None:
    browser.open(page, *size, dark=dark, touch=size == PHONE)
    browser.screenshot(tmp_path / "page.png")
    assert browser.problems == []
    assert browser.evaluate("document.documentElement.scrollWidth") == size[0] == browser.evaluate("innerWidth")
    assert browser.evaluate(STICKING_OUT) == []
    assert browser.evaluate("[...document.querySelectorAll('pre')].every(e => e.scrollWidth <= e.clientWidth)")
    assert browser.evaluate(INK) > 0.2
    drawn = browser.evaluate("[...document.querySelectorAll('figure')].map(f => f.querySelectorAll('svg path').length)")
    assert len(drawn) > 20 and min(drawn) >= 1
    lengths = browser.evaluate("[...document.querySelectorAll('svg path')].map(p => p.getTotalLength())")
    assert min(lengths) > 50
    assert browser.evaluate("document.querySelectorAll('.card').length") == 4
    background = browser.evaluate("getComputedStyle(document.body).backgroundColor.match(/\\d+/g).map(Number)")
    assert (sum(background) < 150) == dark
    assert (tmp_path / "page.png").stat().st_size > 50_000


def test_a_turned_phone_gets_everything_drawn_anew(browser: Browser, page: Path) -> None:
    browser.open(page, *PHONE, touch=True)
    browser.resize(PHONE[1], PHONE[0], touch=True)
    browser.settle()
    assert browser.evaluate("spans.width === spans.clientWidth * devicePixelRatio && spans.clientWidth > 700")
    assert browser.evaluate(INK) > 0.2
    assert browser.evaluate(
        "[...document.querySelectorAll('figure svg')].every(e => e.viewBox.baseVal.width === e.clientWidth)"
    )
    assert browser.evaluate("document.documentElement.scrollWidth === innerWidth")


def test_text_of_the_model_stays_text(browser: Browser, page: Path) -> None:
    browser.open(page, *LAPTOP)
    texts = browser.evaluate("[...document.querySelectorAll('.card pre')].map(e => e.textContent)")
    assert any(text.startswith(HOSTILE) for text in texts)
    assert browser.evaluate("window.hacked === undefined && document.querySelectorAll('img').length === 0")


def test_only_the_pages_own_script_may_run(browser: Browser, page: Path, tmp_path: Path) -> None:
    changed = tmp_path / "changed.html"
    changed.write_text(page.read_text().replace("</main>", "").replace("</body>", "<script>hacked = 1</script></body>"))
    browser.open(changed, *LAPTOP)
    assert browser.evaluate("window.hacked === undefined")
    assert any("Content Security Policy" in problem for problem in browser.problems)
    browser.problems.clear()


def test_the_timeline_zooms_moves_and_tells_what_is_under_the_pointer(browser: Browser, page: Path) -> None:
    browser.open(page, *LAPTOP)
    window = "document.getElementById('window').textContent"

    def press(action: str) -> str:
        before = browser.evaluate(PAINT)
        browser.evaluate(f"document.querySelector('[data-do={action}]').click()")
        browser.settle()
        assert browser.evaluate(PAINT) != before, action
        return browser.evaluate(window)

    whole = press("whole")
    assert whole.split(" of ")[0] == whole.split(" of ")[1]
    closer = press("in")
    assert closer != whole and press("right") == closer and press("left") == closer
    assert press("out") == whole

    browser.evaluate(f"document.getElementById('step').value = {NUM_STEPS // 2}")
    browser.evaluate("document.getElementById('step').dispatchEvent(new Event('input'))")
    browser.settle()
    x, y = browser.evaluate("(b => [b.left + b.width * 0.3, b.top + 27])(spans.getBoundingClientRect())")
    browser.mouse("mouseMoved", x, y)
    browser.settle()
    tip = browser.evaluate("tip.hidden ? '' : tip.textContent")
    assert tip.startswith("generate") and f"step {NUM_STEPS // 2}" in tip and "rank 0" in tip

    before = browser.evaluate(PAINT)
    browser.mouse("mousePressed", x, y, button="left", clickCount=1)
    browser.mouse("mouseMoved", x - 200, y, button="left")
    browser.mouse("mouseReleased", x - 200, y, button="left")
    browser.settle()
    assert browser.evaluate(PAINT) != before
    assert "generate" in browser.evaluate("document.getElementById('picked').textContent")
    assert browser.problems == []


# Of the generate of a step in the middle of the run, on the rank that waits for the other: where its work and where its
# wait is on the page, from left, and the colours in both places near the top of its lane and at its bottom.
SHADED = """(() => {
  const [, from, to] = data.timeline.steps.find((step) => step[0] === STEP), length = to - from;
  const box = spans.getBoundingClientRect(), pen = spans.getContext("2d");
  const pixel = (...place) => [...pen.getImageData(...place.map((at) => at * devicePixelRatio), 1, 1).data].join();
  const generate = data.timeline.names.indexOf("generate");
  const found = data.timeline.rows.slice(0, 2).map(({ lanes: [tasks, waits] }) => {
    let i = 0, j = 0;
    while (tasks.spans[i] < from || tasks.spans[i + 2] !== generate) i += 5;
    while (waits.spans[j] < tasks.spans[i]) j += 5;
    return { y: tasks.y, start: tasks.spans[i], wait: waits.spans[j], length: waits.spans[j + 1] };
  });
  const { y, start, wait, length: waited } = found.reduce((a, b) => (a.length > b.length ? a : b));
  return [start + (wait - start) * 0.8, wait + waited * 0.8].map((time) => {
    const x = ((time - from + 0.03 * length) / (1.06 * length)) * box.width;
    return [box.left + x, box.top + y + 9, pixel(x, y + 2), pixel(x, y + 17)];
  });
})()""".replace("STEP", str(NUM_STEPS // 2))


def test_a_wait_within_a_task_is_shaded_and_tells_what_it_waits_for(browser: Browser, page: Path) -> None:
    browser.open(page, *LAPTOP)
    browser.evaluate(f"document.getElementById('step').value = {NUM_STEPS // 2}")
    browser.evaluate("document.getElementById('step').dispatchEvent(new Event('input'))")
    browser.settle()
    task, wait = browser.evaluate(
        f"{[COLOURS['generate'], COLOURS['wait']]}"
        ".map(c => cssColour(c).match(/[0-9a-f]{2}/g).map(h => parseInt(h, 16)).join() + ',255')"
    )
    for (x, y, *colours), told, expected in zip(
        browser.evaluate(SHADED), ("generate", "the last groups"), ([task, task], [wait, task]), strict=True
    ):
        assert colours == expected, told
        browser.mouse("mouseMoved", x, y)
        browser.settle()
        assert browser.evaluate("tip.textContent").startswith(told)


def test_a_curve_tells_its_values(browser: Browser, page: Path) -> None:
    browser.open(page, *LAPTOP)
    browser.evaluate("document.querySelector('figure').scrollIntoView()")
    x, y = browser.evaluate(
        "(b => [b.left + b.width / 2, b.top + 60])(document.querySelector('figure svg').getBoundingClientRect())"
    )
    browser.mouse("mouseMoved", x, y)
    browser.settle()
    first, *values = browser.evaluate("tip.textContent").split("\n")
    assert first.startswith("step ") and values and values[0].startswith("training 0.")


def test_samples_can_be_chosen_by_step_and_ordered_by_reward(browser: Browser, page: Path) -> None:
    browser.open(page, *LAPTOP)
    rewards = "[...document.querySelectorAll('.reward')].map(e => Number(e.textContent.split(' ')[1]))"
    choose = "(e => { e.value = '%s'; e.dispatchEvent(new Event('change')); })(document.getElementById('%s'))"
    browser.evaluate(choose % ("", "sample_step"))
    browser.evaluate(choose % ("worst", "sample_order"))
    assert browser.evaluate(rewards) == [0.0] * 12
    browser.evaluate(choose % ("best", "sample_order"))
    assert browser.evaluate(rewards) == [1.0] * 12
    browser.evaluate("document.getElementById('more').click()")
    assert len(browser.evaluate(rewards)) == 24
