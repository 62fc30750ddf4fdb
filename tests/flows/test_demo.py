"""The demo, for real: a Spark cluster that loses workers, a Prefect flow, and nothing left behind."""

import json
import os
import re
import signal
import subprocess
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
from flowcases import COMMAND, eventually

pytestmark = [pytest.mark.spark, pytest.mark.prefect, pytest.mark.usefixtures("prefect_home")]

_WHOLE = 240.0  # seconds that a demo may take on a busy machine
_ENDS = 60.0  # seconds that an interrupted demo may take to clean up on a busy machine


@dataclass
class Demo:
    """A running demo and the traces by which its processes are known."""

    process: subprocess.Popen[bytes]
    log: Path
    home: Path
    mark: str
    cluster: str = ""  # uid

    def printed(self, words: str) -> str:
        """Wait until ``words`` are printed and return all output; fail when the demo ends before."""

        def look() -> str:
            text = self.log.read_text()
            assert words in text or self.process.poll() is None, text
            return text if words in text else ""

        return eventually(look, _WHOLE)

    def know_cluster(self) -> None:
        found = eventually(lambda: list(self.home.glob("clusters/*/state.json")))
        newest = max(found, key=lambda path: path.stat().st_ctime)
        self.cluster = json.loads(newest.read_text())["uid"]

    def left_behind(self) -> list[str]:
        """Return the command lines of living processes that come from this demo."""
        return [" ".join(p.cmdline()) for p in psutil.process_iter() if self._is_ours(p)]

    def _is_ours(self, process: psutil.Process) -> bool:
        with suppress(psutil.Error, OSError):
            environment = process.environ()
            node = environment.get("EBBFLOW_NODE", "").split("/")[0]
            marked = environment.get("EBBFLOW_TEST_MARK") == self.mark or (node and node == self.cluster)
            return bool(marked) or any(str(self.home) in word for word in process.cmdline())
        return False


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Share data and the engine's measured speed among the tests: both take a while to come by."""
    folder = tmp_path_factory.mktemp("demo")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("EBBFLOW_HOME", str(folder))
        yield folder


@contextmanager
def started(home: Path, *arguments: str | Path) -> Iterator[Demo]:
    """Start the demo in a session of its own, as a shell does; whatever is left is killed at the end."""
    mark, log = uuid.uuid4().hex, home / "output.txt"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*COMMAND, "demo", "--scale", "0.1", *map(str, arguments)],
            env={**os.environ, "EBBFLOW_TEST_MARK": mark},
            cwd=home,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    demo = Demo(process, log, home, mark)
    try:
        yield demo
    finally:
        for other in psutil.process_iter():
            if demo._is_ours(other):
                with suppress(psutil.Error):
                    other.kill()
        process.wait(_ENDS)


def test_the_demo_loses_and_gains_workers_is_right_and_leaves_no_process(home: Path) -> None:
    report_path, page = home / "out" / "demo.json", home / "out" / "demo.html"
    with started(home, "--json", report_path, "--report", page) as demo:
        demo.printed("starting a master")
        demo.know_cluster()
        assert demo.left_behind()  # the traces do find its processes
        assert demo.process.wait(_WHOLE) == 0, demo.log.read_text()
        eventually(lambda: not demo.left_behind(), 10.0)
        text = demo.log.read_text()

    report = json.loads(report_path.read_text())
    assert report["verified"] is True
    assert report["engine"] == "spark"
    changes = report["capacity"]
    assert changes[0]["cores"] == 3
    assert min(c["cores"] for c in changes) < 3
    assert any(c["noticed"] or c["left"] for c in changes)
    assert {d["epoch"] for d in report["decisions"]} >= {c["epoch"] for c in changes[:2]}
    assert "<svg" in page.read_text()

    assert "✓ verified: equal to DuckDB's result" in text
    assert "demo: notice to worker-" in text
    assert str(page) in text
    assert not re.search(r"warning|traceback", text, re.I), text
    assert not re.search(r"\b(\w+): \1:|\b(start|stay|switch|wait): ?(start|stay|switch|wait): ", text), text
    assert not re.search(r"\b1 (nodes|cores)\b", text), text
    assert not list(home.glob("clusters/*/state.json"))


@pytest.mark.parametrize(
    ("number", "moment"),
    [
        (signal.SIGINT, "▸ "),
        (signal.SIGTERM, "the Prefect flow run_query"),
        (signal.SIGHUP, "starting a master"),
    ],
    ids=["ctrl-c while a stage runs", "terminated while it starts", "terminal closed at the beginning"],
)
def test_an_interrupted_demo_cleans_up(number: signal.Signals, moment: str, home: Path) -> None:
    with started(home) as demo:
        demo.printed(moment)
        demo.know_cluster()
        if number == signal.SIGINT:  # Ctrl-C reaches the whole foreground group
            os.killpg(demo.process.pid, number)
        else:
            demo.process.send_signal(number)
        assert demo.process.wait(_ENDS) == 130
        eventually(lambda: not demo.left_behind(), 10.0)
        text = demo.log.read_text()
    assert text.rstrip().endswith("interrupted; the cluster is stopped"), text
    assert "Traceback" not in text
    assert not list(home.glob("clusters/*/state.json"))
