"""Runs one elastic training: launcher, supervisor, account, faults on request."""

import time
import uuid
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path

from ebbflow.infra.clock import Clock, SystemClock
from ebbflow.infra.storage.locks import RunLock
from ebbflow.planners.errors import OptionError
from ebbflow.tasks.drawing.wording import plural
from ebbflow.tasks.training.capacity import Nodes
from ebbflow.tasks.training.code import has_code, job_of, store_code, variables_of
from ebbflow.tasks.training.driver import Driver
from ebbflow.tasks.training.faults import schedule_of
from ebbflow.tasks.training.listening import NullTrainingListener, TrainingListener
from ebbflow.tasks.training.recorder import RunRecorder
from ebbflow.tasks.training.report import TrainingReport, record
from ebbflow.tasks.training.request import TrainingRequest
from ebbflow.tasks.training.sites import Site, open_site
from ebbflow.tasks.training.supervisor import Supervisor


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
        nodes = own or nodes or Nodes(request.placement, request.most_gpus, request.min_gpus)
        variables_of(request)  # before anything is written
        if has_code(request) and (request.repack or not resume):
            store_code(request)
        plan = request.plan(nodes.there(), resumes=resume, seed=seed)
        request.save()
        recorder = RunRecorder(request, clock, listener)
        supervisor = Supervisor(plan, nodes, recorder, clock)
        with closing(here.trainer(request, supervisor, recorder.record_report)) as trainer:
            placement, settings = supervisor.begin()
            if resume:
                trainer.resume(request.run_directory, placement, settings)
            else:
                trainer.launch(job_of(request, settings=settings), placement)
            recorder.capacity(nodes.slots, sum(placement.values()))
            notify = partial(recorder.notify, "scripted")

            def add(count: int) -> None:
                names = ", ".join(nodes.add(count))
                recorder.notify("added", f"added: {names}; {plural(len(nodes.there()), 'node')} now")

            with schedule_of(request.faults, here.nodes, add, nodes.shrink, notify, clock) as faults:
                status = Driver(trainer, nodes, supervisor, recorder).drive(faults)
        report = recorder.report(status)
        if problem := record(report, request):
            recorder.notify("failure", problem)
    return report


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
