"""A query in a process of its own, to be stopped, killed and cut off."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ebbflow.tasks.query.request import QueryRequest

_SCRIPT = """
import json, sys
from ebbflow.tasks.query.run import PlainOrchestrator, execute
from ebbflow.tasks.query.request import QueryRequest
report = execute(QueryRequest(**json.loads(sys.argv[1])), PlainOrchestrator()).report
print(json.dumps({"verified": report.verified, "rows": report.rows, "problems": list(report.problems),
                  "stages": [(s.fingerprint, s.status) for s in report.stages],
                  "told": [f"{s.name} {s.status} in {s.seconds:.1f} s: {s.note}" for s in report.stages]}))
"""


def process(request: QueryRequest, environment: Mapping[str, str] | None = None) -> "subprocess.Popen[str]":
    options = {k: v for k, v in asdict(request).items() if v is not None}
    return subprocess.Popen(
        [sys.executable, "-P", "-c", _SCRIPT, json.dumps(options)],
        env={**os.environ, **(environment or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finished(child: "subprocess.Popen[str]") -> dict[str, Any]:
    out, err = child.communicate(timeout=240)
    assert child.returncode == 0, err[-3000:]
    found: dict[str, Any] = json.loads(out.splitlines()[-1])
    return found


def until_a_stage_is_done(request: QueryRequest, child: "subprocess.Popen[str]") -> None:
    """Wait until the store, which is a local folder, has a checkpoint."""
    deadline = time.monotonic() + 120
    while not list((Path(request.store) / "manifests").glob("*.json")):
        assert child.poll() is None, child.communicate()[1][-3000:]
        assert time.monotonic() < deadline
        time.sleep(0.001)


def killed_once_a_stage_is_done(request: QueryRequest) -> None:
    """Run a query in a process, and kill that once its first stage is stored."""
    child = process(request)
    try:
        until_a_stage_is_done(request, child)
        child.send_signal(signal.SIGKILL)
    finally:
        child.kill()
        child.wait(timeout=150)
