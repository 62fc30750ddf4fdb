"""Runs whose standard output and standard error nobody reads any more continue."""

import json
import logging
import os
import subprocess
import sys
from collections.abc import Sequence
from io import StringIO, TextIOWrapper
from pathlib import Path

import pytest
from flowcases import COMMAND, TIMEOUT, eventually
from rich.console import Console

from ebbflow.flows.runs.output_pipes import LastingStream

SCRIPT = Path(__file__).parents[1] / "digits.py"

_WRITES = """
import logging, sys
import typer
from prefect.logging import get_logger
from rich.console import Console
from ebbflow.flows.runs.output_pipes import outlive_readers

logging.basicConfig(stream=sys.stderr, force=True)
logger = get_logger("ebbflow")
if sys.argv[2] == "guarded":
    outlive_readers()
logger.warning("read")
sys.stdin.readline()
for _ in range(3):
    logger.warning("not read")
    logging.warning("not read")
    print("not read", flush=True)
    typer.echo("not read", err=True)
    Console().print("not read")
    Console(stderr=True).print("not read")
open(sys.argv[1], "w").write("to the end")
"""


def _without_reader(child: "subprocess.Popen[bytes]") -> None:
    """Read the first that a process says, then close the pipes that it writes to."""
    for pipe in (child.stderr, child.stdout):
        assert pipe is not None
        if pipe is child.stderr:
            pipe.read(1)
        pipe.close()


@pytest.mark.processes
@pytest.mark.parametrize("guarded", [True, False])
def test_whatever_writes_outlives_its_reader(tmp_path: Path, guarded: bool) -> None:
    done = tmp_path / "done"
    child = subprocess.Popen(
        [sys.executable, "-c", _WRITES, str(done), "guarded" if guarded else "as it was"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    _without_reader(child)
    assert child.stdin is not None
    child.stdin.write(b"\n")
    child.stdin.close()
    assert (child.wait(TIMEOUT) == 0) is guarded
    assert done.exists() is guarded


def _outlives_its_reader(words: Sequence[str], folder: Path, **variables: str) -> None:
    child = subprocess.Popen(
        words, env={**os.environ, **variables}, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    events = folder / "unread" / "events.jsonl"
    try:
        eventually(
            lambda: (events.exists() and '"started"' in events.read_text()) or child.poll() is not None
        )
        _without_reader(child)
        assert child.wait(TIMEOUT) == 0
    finally:
        child.kill()
    report = json.loads((folder / "unread" / "report.json").read_text())
    assert (report["state"], report["steps"], len(report["generations"])) == ("finished", 64, 1)


@pytest.mark.processes
def test_a_training_outlives_those_who_read_its_output(tmp_path: Path) -> None:
    words = ["train", str(SCRIPT), "--nodes", "local:1x1", "--no-preflight", "--run-id", "unread",
             "--runs-dir", str(tmp_path), "--runner", "plain", "--", "--epochs", "4"]  # fmt: skip
    _outlives_its_reader([*COMMAND, *words], tmp_path)


@pytest.mark.prefect
def test_a_flow_run_outlives_the_worker_that_reads_its_output(tmp_path: Path, prefect_server: str) -> None:
    given = {"arguments": ["--epochs", "4"], "nodes": "local:1x1", "preflight": "never"}
    where = {"run_id": "unread", "runs_dir": str(tmp_path)}
    code = (
        "from ebbflow.flows.training.flow import train\n"
        f"assert train({str(SCRIPT)!r}, **{given | where}).state == 'finished'"
    )
    _outlives_its_reader([sys.executable, "-P", "-c", code], tmp_path, PREFECT_API_URL=prefect_server)


def test_a_stream_that_is_read_is_written_to_and_other_faults_are_raised(tmp_path: Path) -> None:
    with (tmp_path / "file").open("w") as file:
        lasting = LastingStream(file)
        assert lasting.write("said") == 4
        lasting.flush()
        assert lasting.name == file.name
    assert (tmp_path / "file").read_text() == "said"
    if Path("/dev/full").exists():
        with Path("/dev/full").open("wb", buffering=0) as file:
            full = LastingStream(TextIOWrapper(file, write_through=True))
            with pytest.raises(OSError, match="No space"):
                full.write("said")


def test_what_is_no_pipe_stays_as_it_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from ebbflow.flows.runs.output_pipes import outlive_readers

    text, handler = StringIO(), logging.StreamHandler(StringIO())
    monkeypatch.setattr(sys, "stdout", text)
    with (tmp_path / "file").open("w") as file:
        monkeypatch.setattr(sys, "stderr", file)
        outlive_readers()
        assert (sys.stdout, sys.stderr) == (text, file)
        Console(stderr=True).print("said")
    assert isinstance(handler.stream, StringIO)
    assert (tmp_path / "file").read_text() == "said\n"
