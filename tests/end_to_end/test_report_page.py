"""The report's page in Chromium (apt-get install chromium); RLTRAIN_BROWSER=require makes its absence a failure."""

import base64
import io
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import pytest
from PIL import Image
from rich.console import Console

from rltrain.cli.report import COLOURS
from rltrain.data.images import source_of, thumbnail
from tests.support.run_folders import HOSTILE, write_run
from tools.report import report

NAMES = ("chromium", "google-chrome", "google-chrome-stable", "chromium-browser", "chrome")


def find_browser() -> str | None:
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Browser:
    """One page in a browser. `problems` collects complaints of the console, the network and the page's scripts."""

    def __init__(self, executable: str, timeout_s: float = 60.0) -> None:
        self.timeout_s = timeout_s
        self.problems: list[str] = []
        self.profile = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        commands, self._send = os.pipe()
        self._receive, answers = os.pipe()
        # The browser reads file descriptor 3 and writes file descriptor 4.
        arguments = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars"]
        arguments += [f"--user-data-dir={self.profile.name}", "--remote-debugging-pipe", "--no-first-run"]
        self.process = subprocess.Popen(
            ["bash", "-c", f'exec "$@" 3<&{commands} 4>&{answers}', "bash", executable, *arguments, "about:blank"],
            pass_fds=(commands, answers),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(commands)
        os.close(answers)
        self._buffer = b""
        self._num_calls = 0
        self._session: str | None = None
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        os.close(self._send)  # the browser ends with its pipe
        try:
            self.process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        os.close(self._receive)
        self.profile.cleanup()

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Returns the browser's answer to one command."""
        self._num_calls += 1
        message: dict[str, Any] = {"id": self._num_calls, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._send, json.dumps(message).encode() + b"\0")
        while (answer := self._next_message(method)).get("id") != self._num_calls:
            self._note(answer)
        assert "error" not in answer, f"{method}: {answer['error']}"
        return answer["result"]

    def open(self, page: Path, width: int, height: int, *, dark: bool = False, touch: bool = False) -> None:
        """Shows `page` in a window of that many CSS pixels, and waits until it is drawn."""
        self.resize(width, height, touch=touch)
        self.call("Emulation.setTouchEmulationEnabled", enabled=touch)
        feature = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[feature])
        self.call("Page.navigate", url=page.resolve().as_uri())
        self.wait_for("document.readyState === 'complete' && location.protocol === 'file:'")
        self.settle()

    def resize(self, width: int, height: int, *, touch: bool = False) -> None:
        scale = 2 if touch else 1
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=scale, mobile=touch
        )

    def settle(self) -> None:
        """Waits two frames: observers have run and their changes are drawn."""
        self.evaluate("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(() => done(true))))")

    def evaluate(self, expression: str) -> Any:
        """Returns the value of a JavaScript expression. Awaits it if it is a promise."""
        found = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, f"{expression}: {found['exceptionDetails']}"
        return found["result"].get("value")

    def wait_for(self, condition: str) -> None:
        deadline = time.monotonic() + self.timeout_s
        while not self.evaluate(condition):
            assert time.monotonic() < deadline, f"the page never had {condition}"
            time.sleep(0.05)

    def mouse(self, kind: str, x: float, y: float, **parameters: Any) -> None:
        self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, **parameters)

    def tip_at(self, x: float, y: float) -> str:
        """Moves the pointer to a point and returns the page's description of it."""
        self.mouse("mouseMoved", x, y)
        self.settle()
        return self.evaluate("tip.hidden ? '' : tip.textContent")

    def go_to_step(self, step: int) -> None:
        self.evaluate(f"document.getElementById('step').value = {step}")
        self.evaluate("document.getElementById('step').dispatchEvent(new Event('input'))")
        self.settle()

    def screenshot(self, path: Path, *, whole_page: bool = True) -> None:
        shot = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole_page)
        path.write_bytes(base64.b64decode(shot["data"]))

    def _next_message(self, method: str) -> dict[str, Any]:
        deadline = time.monotonic() + self.timeout_s
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._receive], [], [], max(deadline - time.monotonic(), 0))
            assert ready, f"the browser has not answered {method} in {self.timeout_s} s"
            received = os.read(self._receive, 1 << 20)
            assert received, f"the browser ended during {method}"
            self._buffer += received
        text, _, self._buffer = self._buffer.partition(b"\0")
        return json.loads(text)

    def _note(self, event: dict[str, Any]) -> None:
        method, parameters = event.get("method"), event.get("params", {})
        if method == "Runtime.exceptionThrown":
            self.problems.append(json.dumps(parameters["exceptionDetails"]))
        elif method == "Runtime.consoleAPICalled" and parameters["type"] in ("error", "warning", "assert"):
            self.problems.append(json.dumps(parameters["args"]))
        elif method == "Log.entryAdded" and parameters["entry"]["level"] in ("error", "warning"):
            self.problems.append(parameters["entry"]["text"])
        elif method == "Network.requestWillBeSent" and not parameters["request"]["url"].startswith(("file:", "data:")):
            self.problems.append(f"request to {parameters['request']['url']}")


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

# Unclipped elements that extend beyond the window on the right.
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


def test_images_are_shown_below_the_texts_that_have_them(browser: Browser, tmp_path: Path) -> None:
    copies = [thumbnail(source_of(Image.new("RGB", (60 + side, 30), "red"))) for side in range(3)]
    said = {"message": {"role": "assistant", "content": "left"}, "reward": 0.0}
    seen = {"role": "user", "content": "<image><image>", "images": [*copies[1:], "https://example.org/a.png"]}
    turns = [{**said, "replies": [seen]}, {**said, "replies": []}]
    sample = {"step": 0, "prompt": "<image>Go!", "response": "leftleft", "images": copies[:1], "turns": turns}
    (tmp_path / "samples.jsonl").write_text(json.dumps(sample))
    browser.open(report(tmp_path, tmp_path / "report", Console(file=io.StringIO()))[0], *LAPTOP)
    browser.wait_for("[...document.images].every(e => e.complete)")
    above = "e.parentElement.previousElementSibling.textContent"
    shown = browser.evaluate(f"[...document.querySelectorAll('.card img')].map(e => [e.alt, {above}, e.naturalWidth])")
    environment = ["image of the environment", "<image><image>"]
    assert shown == [["image of the prompt", "<image>Go!", 60], [*environment, 61], [*environment, 62]]
    assert browser.problems == []


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

    browser.go_to_step(NUM_STEPS // 2)
    x, y = browser.evaluate("(b => [b.left + b.width * 0.3, b.top + 27])(spans.getBoundingClientRect())")
    tip = browser.tip_at(x, y)
    assert tip.startswith("generate") and f"step {NUM_STEPS // 2}" in tip and "rank 0" in tip

    before = browser.evaluate(PAINT)
    browser.mouse("mousePressed", x, y, button="left", clickCount=1)
    browser.mouse("mouseMoved", x - 200, y, button="left")
    browser.mouse("mouseReleased", x - 200, y, button="left")
    browser.settle()
    assert browser.evaluate(PAINT) != before
    assert "generate" in browser.evaluate("document.getElementById('picked').textContent")
    assert browser.problems == []


# Finds the generate task of a step in the middle of the run, on the waiting rank. Returns the places of its work and of
# its wait on the page, from the left, with two colours each: near the top of the lane and at its bottom.
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
    browser.go_to_step(NUM_STEPS // 2)
    task, wait = browser.evaluate(
        f"{[COLOURS['generate'], COLOURS['wait']]}"
        ".map(c => cssColour(c).match(/[0-9a-f]{2}/g).map(h => parseInt(h, 16)).join() + ',255')"
    )
    for (x, y, *colours), told, expected in zip(
        browser.evaluate(SHADED), ("generate", "the last groups"), ([task, task], [wait, task]), strict=True
    ):
        assert colours == expected, told
        assert browser.tip_at(x, y).startswith(told)


def test_a_curve_tells_its_values(browser: Browser, page: Path) -> None:
    browser.open(page, *LAPTOP)
    browser.evaluate("document.querySelector('figure').scrollIntoView()")
    x, y = browser.evaluate(
        "(b => [b.left + b.width / 2, b.top + 60])(document.querySelector('figure svg').getBoundingClientRect())"
    )
    first, *values = browser.tip_at(x, y).split("\n")
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
