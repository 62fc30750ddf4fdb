"""The demos, for real: nodes that come and go, right results, and nothing left behind, however they end."""

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

from tests.flows.flowcases import COMMAND, eventually
from tests.infra.networks import skip_without_rights

pytestmark = [pytest.mark.spark, pytest.mark.prefect, pytest.mark.usefixtures("prefect_home")]

_WHOLE = 240.0  # seconds that a demo may take on a busy machine
_ENDS = 150.0  # seconds that an interrupted demo may take to clean up on a busy machine


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
            [*COMMAND, "demo", *map(str, arguments)],
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


SMALL = (
    "--scale", "0.01", "--set", "engine=duckdb", "--set", "workers=0", "--set", "rows=2000", "--set", "epochs=4",
    "--set", "trials=1", "--set", "notice=1s", "--runner", "plain",
)  # fmt: skip
ONE = ("--query", "9", "--scale", "0.1")


def test_the_demo_shows_the_whole_and_leaves_no_process(home: Path) -> None:
    """On DuckDB, which starts in a second; Spark is in the benchmark, and in ``make demo``."""
    outcome, page = home / "out" / "demo.json", home / "out" / "demo.html"
    with started(home, *SMALL, "--report", outcome, "--report", page) as demo:
        demo.printed("begins (query of sales)")
        assert demo.left_behind()  # the traces do find its processes
        assert demo.process.wait(_WHOLE) == 0, demo.log.read_text()
        eventually(lambda: not demo.left_behind())
        text = demo.log.read_text()

    report = json.loads(outcome.read_text())
    assert {step["name"]: step["state"] for step in report["steps"]} == dict.fromkeys(
        ("baskets", "deliveries", "forecast", "late"), "finished"
    )
    details = {step["name"]: step["details"] for step in report["steps"]}
    assert details["baskets"]["equal to DuckDB's result"] is True
    assert details["deliveries"]["equal to DuckDB's result"] is True
    assert details["forecast"]["score"] > 0.8  # of the variance
    assert float(details["late"]["best score"]) > 0.7  # of the deliveries

    cluster = json.loads((Path(report["directory"]) / "cluster.json").read_text())
    kinds = {one["kind"] for one in cluster["decisions"]}
    assert {"auction", "scaling", "replan"} <= kinds
    assert all(one["reason"] for one in cluster["decisions"])
    assert any(change["kind"] == "notice" for change in cluster["changes"])
    assert cluster["money"]["total"]["dollars"] < cluster["money"]["total"]["list_dollars"]
    assert "<svg" in page.read_text()
    assert "scripted: notice to gpu-" in text
    assert str(page) in text
    assert not re.search(r"warning|traceback", text, re.I), text


@pytest.mark.parametrize(
    ("arguments", "number", "moment", "words"),
    [
        (SMALL, signal.SIGINT, "which deliveries are late begins", "resume with: ebbflow run --resume demo-"),
        pytest.param(
            ONE,
            signal.SIGTERM,
            "the Prefect flow run_query",
            "interrupted; the cluster is stopped",
            marks=pytest.mark.slow,
        ),
    ],
    ids=["ctrl-c while trainings run", "terminated while the query starts"],
)
def test_an_interrupted_demo_cleans_up(
    arguments: tuple[str, ...], number: signal.Signals, moment: str, words: str, home: Path
) -> None:
    with started(home, *arguments) as demo:
        demo.printed(moment)
        if number == signal.SIGINT:  # Ctrl-C reaches the whole foreground group
            os.killpg(demo.process.pid, number)
        else:
            demo.know_cluster()
            demo.process.send_signal(number)
        assert demo.process.wait(_ENDS) == 130, demo.log.read_text()
        eventually(lambda: not demo.left_behind())
        text = demo.log.read_text()
    assert words in text
    assert "Traceback" not in text
    assert not list(home.glob("clusters/*/state.json"))


@pytest.mark.slow
def test_one_query_loses_and_gains_workers_is_right_and_leaves_no_process(home: Path) -> None:
    report_path, page = home / "out" / "demo.json", home / "out" / "demo.html"
    with started(home, *ONE, "--report", report_path, "--report", page) as demo:
        demo.printed("starting a master")
        demo.know_cluster()
        assert demo.left_behind()  # the traces do find its processes
        assert demo.process.wait(_WHOLE) == 0, demo.log.read_text()
        eventually(lambda: not demo.left_behind())
        text = demo.log.read_text()

    report = json.loads(report_path.read_text())
    assert report["verified"] is True
    assert report["engine"] == "spark"
    changes = report["capacity"]
    assert changes[0]["cores"] == 3
    assert min(c["cores"] for c in changes) < 3
    assert any(c["noticed"] or c["left"] for c in changes)
    assert {d["revision"] for d in report["decisions"]} >= {c["revision"] for c in changes[:2]}
    assert "<svg" in page.read_text()

    assert "✓ verified: equal to DuckDB's result" in text
    assert "demo: notice to worker-" in text
    assert str(page) in text
    assert not re.search(r"warning|traceback", text, re.I), text
    assert not re.search(r"\b(\w+): \1:|\b(start|stay|switch|wait): ?(start|stay|switch|wait): ", text), text
    assert not re.search(r"\b1 (nodes|cores)\b", text), text
    assert not list(home.glob("clusters/*/state.json"))


@pytest.mark.slow
def test_on_limited_links_a_query_switches_its_plan_as_nodes_come(home: Path) -> None:
    skip_without_rights()
    report_path = home / "out" / "switch.json"
    with started(home, "--query", "9", "--network", "400mbit", "--report", report_path) as demo:
        assert demo.process.wait(4 * _WHOLE) == 0, demo.log.read_text()
        eventually(lambda: not demo.left_behind(), 10.0)
        text = demo.log.read_text()

    report = json.loads(report_path.read_text())
    assert report["verified"] is True
    assert report["capacity"][-1]["nodes"] == 5
    assert any(decision["action"] == "switch" for decision in report["decisions"])
    assert re.search(r"What re-planning was worth.*pair 3.*times as fast re-planned", text, re.S)
    assert not re.search(r"warning|traceback", text, re.I), text
