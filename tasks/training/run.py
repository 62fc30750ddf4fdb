"""Runs one elastic training: launcher, supervisor, account, faults on request."""

import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ebbflow.infra.clock import Clock, SystemClock
from ebbflow.infra.logs.json_lines import log_ids
from ebbflow.infra.protocols import TrainingStatus
from ebbflow.infra.storage.locks import RunLock
from ebbflow.infra.training.workspace.package import FOLDER
from ebbflow.planners.errors import OptionError
from ebbflow.tasks.drawing.wording import plural
from ebbflow.tasks.training.capacity import Nodes
from ebbflow.tasks.training.code import has_code, job_of, store_code, variables_of
from ebbflow.tasks.training.driver import Driver
from ebbflow.tasks.training.faults import schedule_of
from ebbflow.tasks.training.listening import CompositeTrainingListener, NullTrainingListener, TrainingListener
from ebbflow.tasks.training.recorder import RunRecorder
from ebbflow.tasks.training.report import TrainingReport, record
from ebbflow.tasks.training.request import TrainingRequest
from ebbflow.tasks.training.sites import Site, open_site
from ebbflow.tasks.training.supervisor import Supervisor

if TYPE_CHECKING:
    from ebbflow.tasks.training.tracking.following import Tracking
    from ebbflow.tasks.training.tracking.prometheus import RunMetrics


def new_id(request: TrainingRequest) -> str:
    """Return an id for a run: the script's name, the time, and a few letters."""
    stem = "".join(c if c.isalnum() or c in "-_" else "-" for c in Path(request.script).stem).strip("-_")
    return f"{stem or 'run'}-{time.strftime('%m%d-%H%M%S')}-{uuid.uuid4().hex[:4]}"


def run_training(
    request: TrainingRequest,
    listener: TrainingListener | None = None,
    *,
    resume: bool = False,
    site: Site | None = None,
    nodes: Nodes | None = None,
    clock: Clock | None = None,
    seed: int = 0,
    known: bool = False,
    lineage: Mapping[str, Any] | None = None,
    fairness: Callable[[], float | None] | None = None,
    code: str = "",
) -> TrainingReport:
    """Run ``request`` to its end and return what happened.

    An interrupt (Ctrl-C) lets the run save and leave; a second one ends it at once. The report then says ``stopped``.
    It is kept in the run's directory; the files that the request names are written by the caller
    (``tasks.report.training.deliver``).

    Args:
        request: what to run; one without an id gets one.
        listener: hears what happens.
        resume: resume from the newest checkpoint of a run of this id.
        site: where it runs; by default this machine, or the pool of a fleet that the request names.
        nodes: that it has, which others change, and by which they end it; those of the request by default.
        clock: the time.
        seed: of the jitter of delays.
        known: whether a run that has this id and was never launched may be begun.
        fairness: returns what an auction takes its finish-time fairness (ρ) to be, for trackers.
        lineage: where its data come from, for trackers: texts, or values of JSON, by name.
        code: directory with its packed code, relative to its own; by default the code is packed into its own.

    Raises:
        RunLockedError: a run to continue with lives; the message says where.
        EbbflowError: something that cannot be mended before the run began; how a run ended, the report says.
    """
    if resume:
        check_not_running(request)
    clock, listener = clock or SystemClock(), listener or NullTrainingListener()
    with open_site(request, clock, site) as (here, own):
        request = request if request.run_id else replace(request, run_id=new_id(request))
        if not (resume or known):
            check_new(request)
        nodes = (
            own
            or nodes
            or Nodes(request.placement, request.most_gpus, request.min_gpus, replica=request.replica_gpus)
        )
        variables_of(request)  # before anything is written
        _check_trackers(request)
        if has_code(request) and not code and (request.repack or not resume):
            store_code(request)
        plan = request.plan(nodes.there(), resumes=resume, seed=seed)
        request.save()
        with (
            log_ids(run=request.run_id),
            _tracked(request, clock, lineage) as tracking,
            _served(request, clock) as served,
        ):
            if tracking is not None:
                listener = CompositeTrainingListener(listener, tracking)
            if served is not None:
                listener = CompositeTrainingListener(listener, served)
            recorder = RunRecorder(request, clock, listener)
            supervisor = Supervisor(plan, nodes, recorder, clock)
            if tracking is not None:
                tracking.attach(recorder, supervisor, fairness)
            environment = tracking.variables() if tracking is not None and not resume else {}
            status = _driven(
                request, here, nodes, recorder, supervisor, clock, resume, environment, code or FOLDER
            )
            report = recorder.report(status)
            problem = record(report, request)  # whatever becomes of the trackers
            if tracking is not None:
                tracking.finish(report)
                if (events := recorder.report(status).events) != report.events:
                    report = replace(report, events=events)
                    problem = record(report, request)
        if problem:
            recorder.notify("failure", problem)
    return report


def _check_trackers(request: TrainingRequest) -> None:
    """Raise ``EngineUnavailableError`` or ``OptionError`` where a tracker of the request cannot be used."""
    if request.track:
        from ebbflow.tasks.training.tracking.following import check_trackers

        check_trackers(request)


def _tracked(
    request: TrainingRequest, clock: Clock, lineage: Mapping[str, Any] | None
) -> "AbstractContextManager[Tracking | None]":
    """Follow a run for the trackers that it names; one that names none imports nothing for them."""
    if not request.track:
        return nullcontext()
    check_not_running(request)  # its launcher alone writes the record
    from ebbflow.tasks.training.tracking.following import tracked

    return tracked(request, clock, lineage or {})


@contextmanager
def _served(request: TrainingRequest, clock: Clock) -> Iterator["RunMetrics | None"]:
    """Serve the metrics of a run where it asks for that; one that does not imports nothing for them."""
    if not request.metrics:
        yield None
        return
    from ebbflow.tasks.training.tracking.prometheus import RunMetrics, serving_run

    metrics = RunMetrics(request, clock)
    with serving_run(metrics, request.metrics):
        yield metrics


def _driven(
    request: TrainingRequest,
    site: Site,
    nodes: Nodes,
    recorder: RunRecorder,
    supervisor: Supervisor,
    clock: Clock,
    resume: bool,
    environment: Mapping[str, str],
    code: str,
) -> TrainingStatus:
    """Launch the run, follow it to its end, and return where it stands then."""
    with closing(site.trainer(request, supervisor, recorder.record_report)) as trainer:
        placement, settings = supervisor.begin()
        if resume:
            trainer.resume(request.run_directory, placement, settings)
        else:
            job = job_of(request, code, settings=settings, environment=environment)
            trainer.launch(job, placement)
        recorder.capacity(nodes.slots, sum(placement.values()))
        notify = partial(recorder.notify, "scripted")

        def add(count: int) -> None:
            names = ", ".join(nodes.add(count))
            recorder.notify("added", f"added: {names}; {plural(len(nodes.there()), 'node')} now")

        with schedule_of(request.faults, site.nodes, add, nodes.shrink, notify, clock) as faults:
            return Driver(trainer, nodes, supervisor, recorder).drive(faults)


def check_not_running(request: TrainingRequest) -> None:
    """Raise ``RunLockedError`` where a process runs this run now, which says who and since when."""
    RunLock(request.place, request.run_id).look()


def check_new(request: TrainingRequest) -> None:
    """Raise ``OptionError`` where there is a run with this ID already."""
    if not request.recorded:
        return
    raise OptionError(
        f"there is a run {request.run_id!r} in {request.runs_dir} already: resume it (ebbflow train --resume "
        f"{request.run_id}), or choose another run ID"
    )
