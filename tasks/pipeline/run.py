"""One run of a pipeline, from its file to its outcome."""

import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from ebbflow.infra.clock import Clock, SystemClock
from ebbflow.infra.errors import PipelineRunError
from ebbflow.infra.storage.files import write_text
from ebbflow.infra.storage.user_files import output_problem
from ebbflow.planners.errors import EbbflowError, OptionError
from ebbflow.planners.model.options import check_metrics, check_report_paths
from ebbflow.tasks.capacity.listeners import LoopListener
from ebbflow.tasks.capacity.own_policies import check_policy
from ebbflow.tasks.pipeline.carry import Carrier
from ebbflow.tasks.pipeline.checking import ReportFinding, check_applications, check_surroundings
from ebbflow.tasks.pipeline.coordinator import (
    Background,
    Carry,
    Coordinator,
    NullPipelineListener,
    PipelineListener,
    Threads,
)
from ebbflow.tasks.pipeline.file.read import read_pipeline
from ebbflow.tasks.pipeline.file.spec import LoopSpec, Pipeline
from ebbflow.tasks.pipeline.outcome import PipelineOutcome, StepOutcome, overall
from ebbflow.tasks.pipeline.record import RunFolder, RunRecord, app_id, default_folder, new_run_id
from ebbflow.tasks.pipeline.site import Site, opened_site
from ebbflow.tasks.pipeline.view import ClusterView
from ebbflow.tasks.report.files import write_reports

PAGE, CLUSTER, OUTCOME = "report.html", "cluster.json", "outcome.json"  # in the run's directory
_SETTLE = 15.0  # s for threads of steps that have ended, and for their leases
_POLL = 0.2  # s

Steps = Callable[[], tuple[StepOutcome, ...]]


class Watcher(PipelineListener, Protocol):
    """A listener that also looks at the cluster."""

    def watch(self, view: ClusterView, steps: Steps) -> None:
        """Look there from now on."""
        ...


@dataclass(frozen=True)
class PipelineRequest:
    """One run: of a file, or one to resume. Raises ``OptionError`` for values that break their rules."""

    file: str = ""
    resume: str = ""  # ID of a run
    run_id: str = ""  # of a new run; empty: generated from the pipeline's name and the time
    parameters: Mapping[str, str] = field(default_factory=dict)
    runs_dir: str = ""  # directory of all runs; empty: pipelines/ in Ebbflow's own
    metrics: str = ""  # HOST:PORT of /metrics and /healthz while it runs; empty: not served
    report: tuple[str, ...] = ()  # files beside those of the run: .html the page, .json the outcome
    flow_run: str = ""  # of the orchestrator, where there is one
    save: float | None = (
        None  # s that trainings get to save in when the run is stopped, if not all their grace
    )
    restart: bool = False  # with resume: begin trainings again none of whose checkpoints can be used
    allow_policies: tuple[str, ...] = ()  # MODULE:NAME of policies that the file may have imported
    allow_functions: tuple[
        str, ...
    ] = ()  # of SQL, which the file's queries may call though they reach beyond tables
    allow_workdirs: tuple[str, ...] = ()  # whose elastic applications the file may have imported, absolute

    def __post_init__(self) -> None:
        if bool(self.file) == bool(self.resume):
            raise OptionError("either a pipeline file or --resume RUN_ID must be given, not both")
        if self.restart and not self.resume:
            raise OptionError("--restart needs --resume: it applies to a run that is resumed")
        check_metrics(self.metrics)
        object.__setattr__(self, "report", check_report_paths(self.report))
        for path in self.report:
            if problem := output_problem(path):
                raise OptionError(f"report: cannot write to {path!r}: {problem}")
        if self.resume and (self.run_id or self.parameters):
            raise OptionError("--resume uses the recorded run ID and parameters; remove --run-id and --set")

    def name(self) -> str:
        """Return the name of the run for logs: its ID, or the file's name."""
        return self.resume or self.run_id or Path(self.file).stem


class NullWatcher(NullPipelineListener):
    """A watcher that neither looks nor speaks."""

    def watch(self, view: ClusterView, steps: Steps) -> None: ...


@dataclass(frozen=True)
class CheckedPipeline:
    """A pipeline that nothing speaks against, and what could not be looked at, as sentences."""

    pipeline: Pipeline
    unchecked: tuple[str, ...] = ()


def check_pipeline(request: PipelineRequest) -> CheckedPipeline:
    """Return the pipeline of ``request``, with all checked that can be without starting or importing anything.

    Raises ``PipelineFileError`` that names all findings, another ``EbbflowError`` for a run that cannot begin.
    """
    return _read(request)[2]


def _read(request: PipelineRequest) -> tuple[RunFolder, RunRecord | None, CheckedPipeline]:
    """Return the run's directory, which is not made yet, its record where it is resumed, and its pipeline."""
    unchecked: list[str] = []

    def look(pipeline: Pipeline, say: ReportFinding, done: Collection[str] = ()) -> None:
        unchecked.extend(check_surroundings(pipeline, say, done, request.allow_functions))
        check_applications(pipeline, say, done, request.allow_workdirs)
        try:
            check_policy(pipeline.loop.policy, pipeline.loop.options, allowed=request.allow_policies)
        except OptionError as error:
            say("loop" if pipeline.loop != LoopSpec() else "", "policy", str(error))

    parent = Path(request.runs_dir) if request.runs_dir else default_folder()
    if problem := output_problem(parent, directory=True):
        raise OptionError(f"runs_dir: cannot write to {str(parent)!r}: {problem}")
    if request.resume:
        folder = RunFolder(parent, request.resume)
        record, pipeline = folder.load(look)
        return folder, record, CheckedPipeline(pipeline, tuple(unchecked))
    pipeline = read_pipeline(request.file, request.parameters, look)
    folder = RunFolder(parent, request.run_id or new_run_id(pipeline.name))
    folder.require_new()
    return folder, None, CheckedPipeline(pipeline, tuple(unchecked))


def run_steps(
    request: PipelineRequest,
    listener: Watcher | None = None,
    *,
    background: Background | None = None,
    loop_listener: LoopListener | None = None,
    clock: Clock | None = None,
    stop: threading.Event | None = None,
    carrier: "MakeCarry | None" = None,
) -> PipelineOutcome:
    """Run a pipeline to its end and return what became of it.

    An interrupt (Ctrl-C) lets all steps save and leave; a second one ends them at once. Whatever ends the process,
    ``PipelineRequest(resume=ID)`` continues: finished steps are not repeated, queries take their finished stages,
    trainings their checkpoints.

    Args:
        request: what to run.
        listener: hears and shows what happens.
        background: where steps run; threads by default.
        loop_listener: of the capacity loop, where this process runs it.
        clock: the time.
        stop: set by others to let all steps save and leave; the run can be resumed.
        carrier: carries steps out; for tests.

    Raises:
        EbbflowError: the pipeline cannot begin; how its steps ended, the outcome says.
    """
    clock = clock or SystemClock()
    listener = listener or NullWatcher()
    folder, record, checked = _read(request)
    pipeline = checked.pipeline
    with folder.held(clock):
        if record is not None:
            record = folder.load()[0]  # whoever held it may have written more
        record = record or folder.begin(pipeline, request.parameters, clock.now())
        listener.note(f"run {folder.id} in {folder.path}")
        run = _Run(request, pipeline, record, folder, listener, clock, stop or threading.Event())
        return run.run(background or Threads(), loop_listener, carrier or _carrier(request, listener, clock))


MakeCarry = Callable[[Site, Pipeline, RunFolder], Carry]


def _carrier(request: PipelineRequest, listener: Watcher, clock: Clock) -> MakeCarry:
    def make(site: Site, pipeline: Pipeline, folder: RunFolder) -> Carry:
        said = (request.flow_run, listener.note, request.save, request.restart, request.allow_functions)
        return Carrier(site, pipeline, folder, clock, *said)

    return make


class _Run:
    """What is left of a run, on a site of its own."""

    def __init__(
        self,
        request: PipelineRequest,
        pipeline: Pipeline,
        record: RunRecord,
        folder: RunFolder,
        listener: Watcher,
        clock: Clock,
        stop: threading.Event,
    ) -> None:
        self._request, self._pipeline, self._record = request, pipeline, record
        self._folder, self._listener, self._clock, self._stop = folder, listener, clock, stop

    def run(
        self, background: Background, loop_listener: LoopListener | None, make: MakeCarry
    ) -> PipelineOutcome:
        pipeline, folder, clock = self._pipeline, self._folder, self._clock
        began = clock.now()
        apps = {name: app_id(folder.id, name) for name in pipeline.steps}
        with opened_site(
            pipeline,
            folder.id,
            folder.path,
            lambda step: apps[step],
            self._listener.note,
            clock,
            loop_listener,
            allowed=self._request.allow_policies,
        ) as site:
            self._listener.note(
                f"live page: ebbflow report --serve --ledger {site.ledger.address} --cluster {site.cluster} "
                f"--pipeline {folder.id}"
            )
            view = ClusterView(site.ledger, clock, site.cluster, folder.id, site.listed)
            coordinator = Coordinator(
                pipeline,
                self._record,
                folder,
                make(site, pipeline, folder),
                background=background,
                listener=_LoopWatchdog(self._listener, site),
                clock=clock,
                asked=self._stop,
            )
            self._listener.watch(view, coordinator.outcomes)
            try:
                with self._served(coordinator.outcomes, site):
                    coordinator.run()
                    background.settle(_SETTLE)
            except BaseException:
                with suppress(EbbflowError):
                    self._conclude(coordinator, view, site, clock.now() - began)
                raise
            _settle(view, set(apps.values()), clock)
            return self._conclude(coordinator, view, site, clock.now() - began)

    @contextmanager
    def _served(self, steps: Steps, site: Site) -> Iterator[None]:
        """Serve the run's metrics meanwhile where it asks for that; one that does not imports nothing for them."""
        if not self._request.metrics:
            yield
            return
        from ebbflow.tasks.pipeline.metrics import serving_pipeline

        with serving_pipeline(self._request.metrics, self._folder.id, steps, site.ledger, self._clock):
            yield

    def _conclude(
        self, coordinator: Coordinator, view: ClusterView, site: Site, seconds: float
    ) -> PipelineOutcome:
        """Write down how the run stands, and return it."""
        from ebbflow.tasks.report.cluster.page import cluster_html

        found = view.look(now=True)
        steps = coordinator.outcomes()
        state, reason = overall(steps)
        pipeline, folder = self._pipeline, self._folder
        outcome = PipelineOutcome(
            folder.id,
            pipeline.name,
            pipeline.display_name or pipeline.name,
            str(folder.path),
            state,
            reason,
            self._record.began,
            seconds,
            steps,
            str(site.ledger.address),
            site.cluster,
            str(self._page(folder).absolute()),
        )
        write_text(folder.path / OUTCOME, outcome.to_json(), kept=True)
        reports = [path for path in self._request.report if found is not None or not _is_page(path)]
        page = "" if found is None else cluster_html(found)
        write_reports(reports, html=lambda: page, json=outcome.to_json)
        if found is not None:
            write_text(folder.path / CLUSTER, found.to_json(), kept=True)
            write_text(folder.path / PAGE, page, kept=True)
        return outcome

    def _page(self, folder: RunFolder) -> Path:
        """Return the report's page: the first that was requested, or that of the run's directory."""
        return Path(next((path for path in self._request.report if _is_page(path)), folder.path / PAGE))


class _LoopWatchdog(NullPipelineListener):
    """Passes everything on, and ends the run when the loop of this process is over: apps would wait for ever."""

    def __init__(self, listener: Watcher, site: Site) -> None:
        self._listener, self._site = listener, site

    def began(self, outcome: StepOutcome) -> None:
        self._listener.began(outcome)

    def ended(self, outcome: StepOutcome) -> None:
        self._listener.ended(outcome)

    def note(self, text: str) -> None:
        self._listener.note(text)

    def tick(self) -> None:
        self._listener.tick()
        if self._site.ended.is_set() and self._site.problem:
            raise PipelineRunError(self._site.problem)


def _is_page(path: str) -> bool:
    return path.lower().endswith(".html")


def _settle(view: ClusterView, apps: set[str], clock: Clock) -> None:
    """Wait, bounded, until the loop has ended the leases of the apps, so that the report says so."""
    end = clock.now() + _SETTLE
    while clock.now() < end:
        view.look(now=True)
        if not any(lease.app in apps for lease in view.history.state.leases.values()):
            return
        clock.sleep(_POLL)
