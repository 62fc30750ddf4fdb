"""A headless Chromium, driven by its DevTools protocol: what a page does, as a reader's browser does it."""

import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

_START = 60.0  # s
_ANSWER = 150.0
_OPTIONS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--disable-quic", "--disable-dev-shm-usage", "--hide-scrollbars",
    "--remote-debugging-port=0", "--force-prefers-reduced-motion",
)  # fmt: skip


def chromium() -> str | None:
    """Return where Chromium is: ``$CHROMIUM``, or what is installed."""
    named = os.environ.get("CHROMIUM")
    return named or next(
        filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
    )


class Tab:
    """One page."""

    def __init__(self, connection: Any) -> None:
        self._connection = connection
        self._number = 0
        self.requests: list[str] = []
        self.problems: list[str] = []  # what the page wrote to its console as an error
        for name in ("Page.enable", "Runtime.enable", "Log.enable", "Network.enable"):
            self.call(name)

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Ask the browser for something and return its answer."""
        self._number += 1
        self._connection.send(json.dumps({"id": self._number, "method": method, "params": parameters}))
        while True:
            said = json.loads(self._connection.recv(timeout=_ANSWER))
            if said.get("id") == self._number:
                assert "error" not in said, said
                return said["result"]
            self._heard(said)

    def _heard(self, said: dict[str, Any]) -> None:
        method, content = said.get("method"), said.get("params", {})
        if method == "Runtime.exceptionThrown":
            self.problems.append(str(content["exceptionDetails"]))
        elif method == "Log.entryAdded" and content["entry"]["level"] == "error":
            self.problems.append(content["entry"]["text"])
        elif method == "Runtime.consoleAPICalled" and content["type"] in ("error", "assert"):
            self.problems.append(str(content["args"]))
        elif method == "Network.requestWillBeSent":
            self.requests.append(content["request"]["url"])

    def open(self, url: str, width: int, height: int = 900, *, dark: bool = False) -> None:
        """Show ``url`` at ``width`` CSS pixels, and wait until it is there."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=width < 700,
        )
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.call("Emulation.setEmulatedMedia", features=scheme)
        self.problems.clear()
        self.requests.clear()
        self.call("Page.navigate", url=url)
        self.until("document.readyState === 'complete' && location.href !== 'about:blank'")

    def ask(self, expression: str) -> Any:
        """Return the value of an expression in the page."""
        found = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def until(self, expression: str) -> None:
        """Wait until an expression in the page is true."""
        deadline = time.monotonic() + _ANSWER
        while not self.ask(expression):
            assert time.monotonic() < deadline, f"never became true: {expression}"
            time.sleep(0.05)

    def press(self, expression: str) -> None:
        """Press the mouse on an element that an expression in the page gives, once it is there."""
        self.until(
            f"(() => {{ const e = {expression}; return !!e && e.getBoundingClientRect().width > 0; }})()"
        )
        where = f"""(() => {{ const e = {expression}; e.scrollIntoView({{block: 'center'}});
            const b = e.getBoundingClientRect(); return [b.left + b.width / 2, b.top + b.height / 2]; }})()"""
        deadline = time.monotonic() + _ANSWER
        x, y = self.ask(where)
        time.sleep(0.2)
        while (now := self.ask(where)) != [x, y] and time.monotonic() < deadline:  # the page moves it still
            x, y = now
            time.sleep(0.2)
        for kind in ("mouseMoved", "mousePressed", "mouseReleased"):
            button = {} if kind == "mouseMoved" else {"button": "left", "clickCount": 1}
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, **button)

    def colours(self, expression: str) -> int:
        """Return how many colours are seen on the element that an expression in the page gives."""
        box = self.ask(f"(b => [b.x, b.y, b.width, b.height])(({expression}).getBoundingClientRect())")
        clip = {**dict(zip(("x", "y", "width", "height"), box, strict=True)), "scale": 1}
        shot = self.call("Page.captureScreenshot", format="png", clip=clip)["data"]
        return int(
            self.ask(
                f"""(async () => {{ const image = new Image(); image.src = 'data:image/png;base64,{shot}';
                await image.decode(); const canvas = document.createElement('canvas');
                canvas.width = image.width; canvas.height = image.height;
                const drawing = canvas.getContext('2d'); drawing.drawImage(image, 0, 0);
                const data = new Uint32Array(drawing.getImageData(0, 0, image.width, image.height).data.buffer);
                return new Set(data).size; }})()"""
            )
        )

    def picture(self, path: Path, *, whole: bool = False) -> None:
        """Write what is seen to ``path`` as PNG."""
        import base64

        shot = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(shot["data"]))


@contextmanager
def browser(folder: Path) -> Iterator[Tab]:
    """Run a browser with its profile in ``folder`` and give its one page; it is gone afterwards."""
    from websockets.sync.client import connect

    program = chromium()
    assert program is not None, "there is no Chromium: scripts/tools.sh chromium, or name one in $CHROMIUM"
    profile = folder / "profile"
    with (folder / "chromium.log").open("wb") as log:
        process = subprocess.Popen(
            [program, *_OPTIONS, f"--user-data-dir={profile}", "about:blank"],
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
        try:
            port = _port(profile / "DevToolsActivePort", process)
            import httpx

            with httpx.Client(trust_env=False, timeout=_ANSWER) as client:
                pages = client.get(f"http://127.0.0.1:{port}/json").json()
            address = next(page["webSocketDebuggerUrl"] for page in pages if page["type"] == "page")
            # no pings of the library's own: a page that works hard answers late, and ``_ANSWER`` bounds that
            with connect(
                address, max_size=None, open_timeout=_START, ping_interval=None, proxy=None
            ) as connection:
                yield Tab(connection)
        finally:
            process.terminate()
            try:
                process.wait(150)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, 9)
                process.wait(150)


def _port(file: Path, process: subprocess.Popen[bytes]) -> int:
    deadline = time.monotonic() + _START
    while time.monotonic() < deadline:
        assert process.poll() is None, "the browser ended at once"
        if file.exists() and (lines := file.read_text().split()):
            return int(lines[0])
        time.sleep(0.05)
    raise AssertionError("the browser did not start in time")
