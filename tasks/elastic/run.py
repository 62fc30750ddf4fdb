"""One elastic job from the command line: the application, its data, and workers that come and go at given times."""

import json
import os
import re
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ebbflow.infra.clock import Clock, SystemClock
from ebbflow.infra.elastic import Application, ElasticJob, Event, Result, Settings
from ebbflow.planners.errors import OptionError
from ebbflow.tasks.elastic.data import check_data
from ebbflow.tasks.elastic.request import ElasticRequest
from ebbflow.tasks.elastic.results import history_of, objective_of
from ebbflow.tasks.faults import Fault, Grammar

FAULTS = Grammar("an elastic job", ("resize", "kill", "leave"), example="3s:resize:4", max_count=9999)
_WORKER = re.compile(r"n[0-9]{1,9}")
_POLL = 0.05  # seconds between polls of the job


def parse_fault(text: str) -> Fault:
    """Return the fault of ``10s:resize:4``, ``20s:kill:n1`` or ``20s:leave:n1``. Raises ``OptionError``."""
    fault = FAULTS.parse(text)
    if fault.target and not _WORKER.fullmatch(fault.target):
        raise OptionError(f"workers are called n1, n2, ...; got {fault.target!r:.60} in {text!r:.120}")
    return fault


def generate_data(app: str, classes: int, path: Path) -> None:
    """Write generated data of this many ``classes``, clusters or topics, for a first try."""
    rng = np.random.default_rng(0)
    if app == "lda":
        topics = rng.dirichlet(np.full(400, 0.05), classes)
        mixtures = rng.dirichlet(np.full(classes, 0.1), 200)
        words = [rng.choice(400, p=topics[k]) for m in mixtures for k in rng.choice(classes, size=50, p=m)]
        np.savez(path, document=np.repeat(np.arange(200), 50), word=np.array(words))
        return
    centres = rng.normal(size=(classes, 50))
    y = rng.integers(classes, size=20_000)
    x = centres[y] + rng.normal(size=(len(y), 50))
    np.savez(path, x=x, y=y, start=x[:classes])


def run_elastic(
    request: ElasticRequest, place: Path, notify: Callable[[str], None], clock: Clock | None = None
) -> dict[str, Any]:
    """Run the job and return its report; ``notify`` is called with every event. Generated data goes into ``place``.

    Raises ``ElasticError`` when the job fails, ``OptionError`` for data that cannot be read.
    """
    clock = clock or SystemClock()
    if request.own:
        data = request.input or ""
    elif request.input is None:
        data = str(place / f"{request.app}.npz")
        generate_data(request.app, request.classes, Path(data))
    else:
        data = request.input
        check_data(data, request.app, request.classes)
    try:
        application = request.application(data)
        application.parameters()
    except (OSError, KeyError, ValueError) as error:
        raise OptionError(f"{data} cannot serve {request.app}: {error}") from error
    settings = Settings(snapshot_every=5.0, recovery="partial" if request.partial_recovery else "global")
    reported = 0
    with ElasticJob(
        application,
        request.workers,
        directory=request.state_dir,
        settings=settings,
        resume=request.resume,
        restart=request.restart,
    ) as job:
        start, faults = clock.now(), sorted(request.faults, key=lambda fault: fault.after)
        while not job.ended:
            while faults and clock.now() - start >= faults[0].after:
                _inject(job, faults.pop(0))
            reported = _report_events(job.events(), reported, start, notify)
            clock.sleep(_POLL)
        result = job.result(1.0)
        _report_events(job.events(), reported, start, notify)
    return _report(request, application, result, start)


def report_text(report: dict[str, Any]) -> str:
    """Return a report as the text of a JSON file."""
    return json.dumps(report, indent=1) + "\n"


def _inject(job: ElasticJob, fault: Fault) -> None:
    if fault.verb == "resize":
        job.scale_to(fault.count)
    elif fault.verb == "leave":
        job.leave(fault.target)
    elif pid := job.workers().get(fault.target):
        os.kill(pid, signal.SIGKILL)


def _report_events(
    events: Sequence[Event], reported: int, start: float, notify: Callable[[str], None]
) -> int:
    for event in events[reported:]:
        details = ", ".join(
            f"{k} {v:.3g}" if isinstance(v, float) else f"{k} {v}" for k, v in event.details.items()
        )
        notify(f"{event.time - start:7.2f} s  {event.kind}  {details}")
    return len(events)


def _report(
    request: ElasticRequest, application: Application, result: Result, start: float
) -> dict[str, Any]:
    return {
        "app": request.app,
        "objective": objective_of(application, result),
        "history": history_of(result),
        "seconds": result.seconds,
        "events": [{"at": e.time - start, "kind": e.kind, **e.details} for e in result.events],
    }
