"""Runs one case in this process, where nothing can be started and no address reached, and says what is wrong."""

import contextlib
import functools
import io
import re
import signal
import sys
import traceback
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import typer

from ebbflow.flows import cli
from tests.bad_input.cases import ENDLESS, Case
from tests.bad_input.workplace import Workplace

STATUSES = (0, 1, 2, 3, 4, 5, 130)  # docs/getting-started.md, "Exit status"
MAX_SECONDS = 60.0  # of a case; none is near it on a machine that is busy
MAX_LINES = 40

STARTS = (
    "subprocess.Popen.__init__",
    "multiprocessing.process.BaseProcess.start",
    "socket.socket.connect",
    "socket.socket.connect_ex",
    "socket.getaddrinfo",
    "os.fork",
    "os.posix_spawn",
    "ebbflow.tasks.training.run.run_training",
    "ebbflow.tasks.tuning.run.run_tuning",
    "ebbflow.tasks.elastic.run.ElasticJob",
    "ebbflow.tasks.pipeline.run.opened_site",
    "ebbflow.tasks.capacity.loop.CapacityLoop.run",
    "tests.evaluation.qoop.run.run_part",
    "tests.evaluation.qoop.families.plan",
    "tests.evaluation.renting.run.evaluate",
    "tests.evaluation.scar.run.evaluate",
    "tests.evaluation.systems.evaluate",
    "ebbflow.tasks.simulation.runs.run_all",
    "tests.benchmarks.sql.runner.Bench.run",
    "ebbflow.infra.tables.benchmark_data.tpch",
    "ebbflow.infra.tables.benchmark_data.tpcds",
    "ebbflow.infra.tables.benchmark_data.skewed",
    "ebbflow.infra.local_fleet.LocalFleet.start",
    "ebbflow.infra.spark.cluster.cluster.LocalSparkCluster.start",
    "ebbflow.infra.query.calibration.calibrate",
    "ebbflow.infra.machine.page_server.PageServer.__init__",
    "ebbflow.infra.aggregation.aggregator.Aggregator.__init__",
    "ebbflow.infra.memory.gateway.server.GatewayServer.__init__",
    "webbrowser.open",
)
"""Where commands begin what takes time, processes or a network, once their input has been checked."""


class StartedError(BaseException):
    """Something would have been started."""


class HangError(BaseException):
    """A case has taken too long."""


@dataclass
class Finding:
    """What a case has shown to be wrong."""

    case: Case
    problems: list[str] = field(default_factory=list)
    output: str = ""

    def __str__(self) -> str:
        return f"{self.case}\n    " + "\n    ".join(self.problems) + f"\n    output: {self.output[-1500:]!r}"


@contextlib.contextmanager
def nothing_starts() -> Iterator[None]:
    """Put ``StartedError`` in the place of everything that starts something."""
    import importlib

    with pytest.MonkeyPatch.context() as patch:
        # the tree of commands is made anew for each call, which takes longer than most cases
        patch.setattr(typer.main, "get_command", functools.cache(typer.main.get_command))
        for target in STARTS:
            parts = target.split(".")
            for cut in range(len(parts) - 1, 0, -1):
                try:
                    owner: Any = importlib.import_module(".".join(parts[:cut]))
                except ModuleNotFoundError:
                    continue
                break
            for name in parts[cut:-1]:
                owner = getattr(owner, name)
            getattr(owner, parts[-1])  # the tests are to notice when it is called something else

            def start(*_: Any, _target: str = target, **__: Any) -> Any:
                raise StartedError(_target)

            patch.setattr(owner, parts[-1], start)
        yield


@contextlib.contextmanager
def _alarm(seconds: float) -> Iterator[None]:
    def ring(number: int, frame: FrameType | None) -> None:
        raise HangError(f"after {seconds:g} s in " + "".join(traceback.format_stack(frame, 12)))

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def run_case(case: Case, workplace: Workplace, patch: pytest.MonkeyPatch) -> Finding | None:
    """Run ``case`` and return what is wrong with how it ends; ``None``: nothing."""
    bad = workplace.work / case.bad if case.place is not None else None
    if bad is not None and case.place is not None:
        case.place(bad)
    before = workplace.listing()
    patch.setattr(sys, "argv", ["ebbflow", *case.words])
    output, status, started, problems = io.StringIO(), 0, "", []
    try:
        with (
            contextlib.redirect_stdout(output),
            contextlib.redirect_stderr(output),
            _alarm(2.0 if case.option.lstrip("-") in ENDLESS else MAX_SECONDS),
        ):
            cli.main()
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else 1
    except StartedError as error:
        started = str(error)
    except HangError as error:
        if case.option.lstrip("-") not in ENDLESS or case.surely:
            problems.append(f"hangs: {error}")
        started = "until interrupted"
    except BaseException:
        problems.append("uncaught: " + traceback.format_exc()[-3000:])
    text = output.getvalue()
    accepted = bool(started) or status == 0
    if not problems:
        problems += _wrong_end(case, status, started, text)
    after = workplace.listing()
    left = sorted(name for name in {*before, *after} if before.get(name) != after.get(name))
    if left and not accepted:
        problems.append(f"left behind: {left[:10]}")
    if left or case.replaces:
        workplace.reset()
    elif bad is not None:
        _removed(bad)
    return Finding(case, problems, text) if problems else None


def _wrong_end(case: Case, status: int, started: str, text: str) -> list[str]:
    if started or status == 0:
        return [f"accepted ({started or 'status 0'})"] if case.surely else []
    problems = []
    if status not in STATUSES:
        problems.append(f"status {status} is not in the table")
    elif case.surely and status not in case.statuses:
        problems.append(f"status {status}; {case.statuses} stand for bad input")
    if "Traceback (most recent call last)" in text:
        problems.append("a traceback")
    if len(text.splitlines()) > MAX_LINES:
        problems.append(f"{len(text.splitlines())} lines")
    if case.surely and not names_what_is_bad(case, text):  # else another rule may have been broken first
        problems.append("names neither value, file nor option")
    if not problems and re.search(r"codec can't|Errno \d+\]|^error: *$", text):
        problems.append("a message that is not ours")
    return problems


def names_what_is_bad(case: Case, text: str) -> bool:
    """Tell whether a message names the bad value, the bad file or its option."""
    plain = re.sub(r"[\s│]+", "", text)
    options = {case.option, case.option.lstrip("-"), case.option.lstrip("-").replace("-", "_")}
    value = re.sub(r"\s+", "", case.bad)
    found = [option for option in options if option in plain]
    if case.replaces and Path(case.bad).name in plain:
        return True
    return (
        bool(found)
        or (bool(value) and (value[:20] in plain or repr(case.bad)[1:15] in plain))
        or (case.option.upper() in plain)
    )


def _removed(path: Any) -> None:
    if path.is_dir() and not path.is_symlink():
        path.rmdir()
    else:
        path.unlink(missing_ok=True)
