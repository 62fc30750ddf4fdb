"""A tuning run over hyperparameters: trainings of one goal share nodes; those without prospects are stopped."""

import threading
import uuid
from contextlib import closing, nullcontext
from dataclasses import replace

from ebbflow.infra.clock import Clock, SystemClock
from ebbflow.infra.errors import TrainingError
from ebbflow.infra.ledger.address import Address
from ebbflow.infra.logs.json_lines import log_ids
from ebbflow.infra.packages import require
from ebbflow.infra.storage.files import write_text
from ebbflow.infra.storage.filesystems import translated
from ebbflow.infra.storage.locks import RunLock
from ebbflow.tasks.training.capacity import Nodes
from ebbflow.tasks.training.listening import TrainingListener
from ebbflow.tasks.training.report import TrainingReport
from ebbflow.tasks.training.request import TrainingRequest
from ebbflow.tasks.training.run import run_training
from ebbflow.tasks.tuning.code import FOR_TRIALS, TuningCode
from ebbflow.tasks.tuning.loop import RunTrial, Say, TuningLoop, Watch
from ebbflow.tasks.tuning.report import TuningReport
from ebbflow.tasks.tuning.request import TuningRequest
from ebbflow.tasks.tuning.resources import OwnTrialResources, TrialResources
from ebbflow.tasks.tuning.study import Study
from ebbflow.tasks.tuning.trial import lineage_of


def run_trial(
    request: TrainingRequest, listener: TrainingListener, nodes: Nodes, resume: bool
) -> TrainingReport:
    """Train one trial to its end, on nodes that come and go."""
    return run_training(
        request,
        listener,
        resume=resume and request.launched,  # its process may have died before
        known=resume,
        nodes=nodes,
        lineage=lineage_of(request),
        code=FOR_TRIALS,
    )


def new_tuning_id() -> str:
    """Return an id for a tuning run."""
    return f"tune-{uuid.uuid4().hex[:8]}"


def run_tuning(
    request: TuningRequest,
    notify: Say = lambda _: None,
    *,
    resume: bool = False,
    train: RunTrial = run_trial,
    clock: Clock | None = None,
    resources: TrialResources | None = None,
    stop: threading.Event | None = None,
    watch: Watch | None = None,
    ledger: Address | None = None,
    cluster: str = "",
) -> TuningReport:
    """Run a tuning run to its end and return what it found. An interrupt saves the trials that run and leaves.

    Where its study is in a database, others may run it at the same time: each trial is run by one of them, and the
    trials of one that died by the others. It ends when all trials have ended.

    Args:
        request: what to search for.
        notify: called with sentences for the reader.
        resume: continue with the tuning run of this id, or join it.
        train: trains one trial.
        clock: the time.
        resources: the GPUs of its trials, which may come and go: a trial that loses too many is paused; it resumes
            from its checkpoint when there are enough again. Those of the request's nodes by default.
        stop: set by others, it acts as an interrupt does.
        watch: called several times a second with where the tuning run stands.
        ledger: database of the ledger, where the study is in that; ``$EBBFLOW_LEDGER`` by default.
        cluster: name of the cluster whose app it is; a study in a database that is not this cluster's is refused.

    Raises ``EbbflowError`` when it cannot begin, ``RunLockedError`` when another process runs it, ``TrainingError``
    for an id that is taken, ``OptionError`` for options other than the study's, ``StorageFullError`` on a full disk,
    ``LedgerUnavailableError`` for a database that is away for too long: the tuning run can be resumed.
    """
    request = request if request.run_id else replace(request, run_id=new_tuning_id())
    if not resume and request.recorded:
        raise TrainingError(
            f"there is a tuning run {request.run_id!r} in {request.runs_dir} already: resume it (ebbflow tune "
            f"--resume {request.run_id}), or choose another run ID"
        )
    if train is run_trial:
        require("torch", "a training", "train")
    clock, stop = clock or SystemClock(), stop or threading.Event()
    code = TuningCode(request, fresh=not request.recorded)  # not what an attempt left that never began
    alone = nullcontext() if request.study else RunLock(request.place, request.run_id, clock=clock)
    with (
        log_ids(run=request.run_id),
        alone,
        closing(
            Study(request, clock, begins=not resume, ledger=ledger, cluster=cluster, stop=stop, code=code)
        ) as study,
    ):
        code.store()
        if not (request.study and request.recorded):  # by another process, with nodes of its own
            request.save()
        resources = resources or OwnTrialResources(request)
        report = TuningLoop(request, study, notify, train, clock, resources, stop, watch).run()
        if request.place.local:
            write_text(request.place.path("report.json"), report.to_json(), kept=True)
        else:
            with translated(f"write {request.place}"):
                request.place.write("report.json", report.to_json().encode())
    return report
