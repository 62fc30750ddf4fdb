"""One elastic job from the command line: the application, its data, and workers that come and go at given times."""

import os
import re
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ebbflow.infra.clock import Clock, SystemClock
from ebbflow.infra.elastic import Application, ElasticJob, Event, Result, Settings
from ebbflow.infra.elastic.apps.kmeans import KMeans
from ebbflow.infra.elastic.apps.lda import Lda
from ebbflow.infra.elastic.apps.mlr import Mlr
from ebbflow.planners.errors import OptionError
from ebbflow.planners.model.numbers import UNSIGNED, parse_duration
from ebbflow.tasks.elastic.data import check_data

APPS = ("mlr", "kmeans", "lda")
DEMO = "demo"
_AT = re.compile(rf"({UNSIGNED}s):(?:([0-9]{{1,4}})|(kill|leave):(n[0-9]{{1,9}}))")
_LOOK = 0.05  # seconds between looks at the job


@dataclass(frozen=True, slots=True)
class Change:
    """Something to do to the workers ``at`` seconds after the start."""

    at: float
    workers: int | None = None  # scale to
    kill: str | None = None
    leave: str | None = None


def parse_change(text: str) -> Change:
    """Return the change that ``10s:4``, ``20s:kill:n1`` or ``20s:leave:n1`` describes. Raises ``OptionError``."""
    found = _AT.fullmatch(text)
    if not found:
        raise OptionError(f"a change looks like 10s:4, 20s:kill:n1 or 30s:leave:n2; got {text!r}")
    at, workers, what, name = found.groups()
    after = parse_duration(at)
    return Change(after, workers=int(workers)) if workers else Change(after, **{what: name})


@dataclass(frozen=True, slots=True)
class ElasticRequest:
    """What to run."""

    app: str
    data: str = DEMO
    groups: int = 10  # classes, clusters or topics
    executors: int = 16
    iterations: int = 200
    staleness: int = 0  # of mlr
    workers: int = 2
    changes: Sequence[Change] = ()
    folder: str | None = None
    resume: bool = False
    restart: bool = False  # with resume: from the beginning where no snapshot is whole
    partial: bool = False  # recovery of lost parameters alone

    def __post_init__(self) -> None:
        if self.app not in APPS:
            raise OptionError(f"applications are {', '.join(APPS)}; got {self.app!r}")
        for name in ("groups", "executors", "iterations", "workers"):
            if getattr(self, name) < 1:
                raise OptionError(f"{name} must be >= 1; got {getattr(self, name)}")
        if self.resume and self.folder is None:
            raise OptionError("resume needs the folder of the earlier job (--folder)")
        if self.restart and not self.resume:
            raise OptionError("restart goes with resume; a new job begins at the beginning anyway")
        if self.staleness < 0:
            raise OptionError(f"staleness must be >= 0; got {self.staleness}")
        for change in self.changes:
            if change.workers is not None and change.workers < 1:
                raise OptionError("at least one worker must stay; got 0")

    def application(self, data: str) -> Application:
        """Return the application on the file ``data``."""
        if self.app == "mlr":
            return Mlr(
                data, self.groups, self.executors, self.iterations, self.staleness, exact=not self.staleness
            )
        if self.app == "kmeans":
            return KMeans(data, self.groups, self.executors, self.iterations)
        return Lda(data, self.groups, self.executors, self.iterations)


def demo_data(app: str, groups: int, path: Path) -> None:
    """Write made-up data that ``groups`` explain, for a first try."""
    rng = np.random.default_rng(0)
    if app == "lda":
        topics = rng.dirichlet(np.full(400, 0.05), groups)
        mixtures = rng.dirichlet(np.full(groups, 0.1), 200)
        words = [rng.choice(400, p=topics[k]) for m in mixtures for k in rng.choice(groups, size=50, p=m)]
        np.savez(path, document=np.repeat(np.arange(200), 50), word=np.array(words))
        return
    centres = rng.normal(size=(groups, 50))
    y = rng.integers(groups, size=20_000)
    x = centres[y] + rng.normal(size=(len(y), 50))
    np.savez(path, x=x, y=y, start=x[:groups])


def run_elastic(
    request: ElasticRequest, place: Path, say: Callable[[str], None], clock: Clock | None = None
) -> dict[str, Any]:
    """Run it and return the report; ``say`` hears of every event. ``place`` is a folder for made-up data.

    Raises ``ElasticError`` when the job fails, ``OptionError`` for data that cannot be read.
    """
    clock = clock or SystemClock()
    data = request.data
    if data == DEMO:
        data = str(place / f"{request.app}.npz")
        demo_data(request.app, request.groups, Path(data))
    else:
        check_data(data, request.app, request.groups)
    try:
        application = request.application(data)
        application.parameters()
    except (OSError, KeyError, ValueError) as error:
        raise OptionError(f"{data} cannot serve {request.app}: {error}") from error
    settings = Settings(snapshot_every=5.0, recovery="partial" if request.partial else "global")
    told = 0
    with ElasticJob(
        application,
        request.workers,
        folder=request.folder,
        settings=settings,
        resume=request.resume,
        restart=request.restart,
    ) as job:
        start, changes = clock.now(), sorted(request.changes, key=lambda change: change.at)
        while not job.ended:
            while changes and clock.now() - start >= changes[0].at:
                _apply(job, changes.pop(0))
            told = _tell(job.events(), told, start, say)
            clock.sleep(_LOOK)
        result = job.result(1.0)
        _tell(job.events(), told, start, say)
    return _report(request, application, result, start)


def _apply(job: ElasticJob, change: Change) -> None:
    if change.workers is not None:
        job.scale_to(change.workers)
    elif change.leave:
        job.leave(change.leave)
    elif change.kill and (pid := job.workers().get(change.kill)):
        os.kill(pid, signal.SIGKILL)


def _tell(events: Sequence[Event], told: int, start: float, say: Callable[[str], None]) -> int:
    for event in events[told:]:
        details = ", ".join(
            f"{k} {v:.3g}" if isinstance(v, float) else f"{k} {v}" for k, v in event.details.items()
        )
        say(f"{event.time - start:7.2f} s  {event.kind}  {details}")
    return len(events)


def _report(
    request: ElasticRequest, application: Application, result: Result, start: float
) -> dict[str, Any]:
    history: list[float] = [float(value) for value in result.driver.history]  # type: ignore[attr-defined]
    objective = (
        application.objective(result.parameters) if isinstance(application, Mlr | KMeans) else history[-1]
    )
    return {
        "app": request.app,
        "objective": objective,
        "history": history,
        "seconds": result.seconds,
        "events": [{"at": e.time - start, "kind": e.kind, **e.details} for e in result.events],
    }
