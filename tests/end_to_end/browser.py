"""A page in a real browser: Chromium without a window, driven by its debugging protocol over two pipes."""

import base64
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self

NAMES = ("chromium", "google-chrome", "google-chrome-stable", "chromium-browser", "chrome")


def find_browser() -> str | None:
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Browser:
    """One page. `problems` collects what the console, the network and the page's scripts complain of."""

    def __init__(self, executable: str, timeout_s: float = 60.0) -> None:
        self.timeout_s = timeout_s
        self.problems: list[str] = []
        self.profile = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        commands, self._send = os.pipe()
        self._receive, answers = os.pipe()
        # The browser reads file descriptor 3 and writes file descriptor 4.
        arguments = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars"]
        arguments += [
            f"--user-data-dir={self.profile.name}",
            "--remote-debugging-pipe",
            "--no-first-run",
            "about:blank",
        ]
        self.process = subprocess.Popen(
            ["bash", "-c", f'exec "$@" 3<&{commands} 4>&{answers}', "bash", executable, *arguments],
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
        os.close(self._send)  # the browser ends when its pipe does
        try:
            self.process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        os.close(self._receive)
        self.profile.cleanup()

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """The browser's answer to one command."""
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
        """Show `page` in a window of that many CSS pixels, and let it draw."""
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
        """Two frames: observers have run and what they asked for is drawn."""
        self.evaluate("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(() => done(true))))")

    def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression, awaited where it is a promise."""
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
