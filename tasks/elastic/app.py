"""An elastic job as an app of the cluster: its workers come and go with its leases, one on each leased slot."""

import io
import threading
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import numpy as np

from ebbflow.infra.clock import Clock
from ebbflow.infra.elastic import Application, ElasticJob, Event, Result, Settings
from ebbflow.infra.elastic.apps import arrays
from ebbflow.infra.elastic.job import class_name
from ebbflow.infra.ledger import Ledger
from ebbflow.infra.storage import private, records
from ebbflow.infra.storage.files import home
from ebbflow.infra.storage.filesystems import translated
from ebbflow.infra.storage.locks import RunLock
from ebbflow.infra.training.workspace import package
from ebbflow.infra.training.workspace.preparing import prepare
from ebbflow.planners.errors import OptionError
from ebbflow.planners.model.ledger import AppSpec
from ebbflow.tasks.apps.agent import AgentIntervals, AppAgent
from ebbflow.tasks.apps.lease_table import Rules
from ebbflow.tasks.drawing.wording import plural
from ebbflow.tasks.elastic.data import stored_input
from ebbflow.tasks.elastic.leased import LeasedWorkers, PoolRecord
from ebbflow.tasks.elastic.request import ElasticAppRequest
from ebbflow.tasks.elastic.results import history_of, objective_of, result_arrays
from ebbflow.tasks.training.code import store_code
from ebbflow.tasks.training.leased.enforcer import LeaseEnforcer
from ebbflow.tasks.training.leased.nodes import NodeBackoff
from ebbflow.tasks.training.leased.site import MakePool, await_end_of_pools

PARAMETERS = "parameters.npz"  # in the run's directory: what the job has found
_REPORT = "report.json"
_FORMAT = 1
_SETTINGS = Settings(snapshot_every=5.0, max_losses=1000)
_POLL = 0.2  # s
_LEAVING = 3.0  # s before a deadline by which the job has to be saved
_LEAST = 1.0  # s to save in, however late it is
_SENTENCES = frozenset(
    {
        "joined",
        "left",
        "lost",
        "not started",
        "restored",
        "snapshot failed",
        "snapshot-damaged",
        "finished",
    }
)


@dataclass(frozen=True)
class ElasticReport:
    """What became of a job."""

    id: str
    app: str
    directory: str
    state: Literal["finished", "stopped"]
    reason: str = ""
    objective: float | None = None  # of the result; lower is better, but for lda, whose log-likelihood it is
    iterations: int = 0
    seconds: float = 0.0  # with the waits
    slot_seconds: float = 0.0  # that workers had
    workers: int = 0  # that have joined, over all attempts
    losses: int = 0  # of workers
    history: tuple[float, ...] = field(default=())


def run_elastic_app(
    request: ElasticAppRequest,
    spec: AppSpec,
    ledger: Ledger,
    pool: MakePool,
    notify: Callable[[str], None] = lambda _: None,
    *,
    clock: Clock | None = None,
    stop: threading.Event | None = None,
    save: float | None = None,
    rules: Rules | None = None,
    pace: AgentIntervals | None = None,
    variables: Mapping[str, str] | None = None,
) -> ElasticReport:
    """Run an elastic job as the app of ``spec`` to its end and return what became of it.

    Workers start on the slots of new leases while it runs. Before the deadline of a revoked one its worker hands its
    executors and shards over and ends; where no other is there the job is saved, and resumes once there are leases.
    A job that has run before under this id resumes from its newest whole snapshot.

    Args:
        request: what to run.
        spec: what the app asks for; see ``elastic_spec``.
        ledger, pool, clock, rules, pace: see ``run_training_app``.
        notify: called with sentences for the reader.
        stop: set by others to let it save and leave; its state is then ``stopped``.
        save: seconds that it then gets at most, where that is less than the request's grace.
        variables: of the workers' environment, on top of their nodes'.

    Raises:
        RunLockedError: another process runs this app.
        ElasticError: the job has failed.
        EbbflowError: it could not begin.
    """
    clock = clock or ledger.clock
    record = PoolRecord(request.state_dir)

    def settle() -> None:
        whose = (request.termination_grace, f"an earlier process of the elastic job {request.run_id}")
        await_end_of_pools(dict.fromkeys(record.earlier(), whose), pool, clock)

    agent = AppAgent(
        ledger,
        spec,
        clock,
        rules=rules,
        pace=pace,
        notify=notify,
        lock=RunLock(request.place.under("app"), spec.id, clock=clock),
        settle=settle,
    )
    with agent, LeaseEnforcer(agent, clock) as enforcer:
        if (done := _finished(request)) is not None:
            agent.moved("finished", "it was finished already")
            return done
        try:
            app = _App(
                request, agent, enforcer, pool, record, clock, notify, stop or threading.Event(), variables
            )
            report = app.run(save)
        finally:
            arrays.forget()
        agent.update_metrics(seconds_left=None if report.state == "stopped" else 0.0)
        agent.moved(report.state, report.reason)
    return report


class _App:
    """One app: attempts on leases, and waits between them."""

    def __init__(
        self,
        request: ElasticAppRequest,
        agent: AppAgent,
        enforcer: LeaseEnforcer,
        pool: MakePool,
        record: PoolRecord,
        clock: Clock,
        notify: Callable[[str], None],
        stop: threading.Event,
        variables: Mapping[str, str] | None,
    ) -> None:
        self._request, self._agent, self._enforcer, self._pool = request, agent, enforcer, pool
        self._record, self._clock, self._notify, self._stop = record, clock, notify, stop
        self._variables = variables
        self._avoided = NodeBackoff(agent.lease_table, clock)
        self._begun = clock.now()
        self._spent = 0.0  # slot-seconds
        self._looked = clock.now()
        self._saved = False  # by the last stop
        self._joined = self._losses = 0
        self._code = ""
        self._application = self._prepared()

    def run(self, save: float | None) -> ElasticReport:
        """Run the job to its end, or until somebody wants it to save and leave."""
        grace = min(self._request.termination_grace, save if save is not None else float("inf"))
        why = "no lease yet"
        while self._await_leases(why):
            result = self._attempt(grace)
            if result is not None:
                return self._deliver(result)
            why = "all its leases were revoked"
        if self._saved:
            return self._report("stopped", "saved and stopped on request")
        return self._report(
            "stopped", "stopped on request; it resumes from its last snapshot, if there is one"
        )

    # --- attempts -----------------------------------------------------------------------------------------

    def _await_leases(self, why: str) -> bool:
        """Wait for a lease; return whether there is one. False: somebody wants the job to end."""
        said = False
        while not self._stop.is_set():
            allowed = self._avoided.without(self._agent.lease_table.allowed())
            if allowed and self._agent.away is None:
                return True
            if not said:
                said = True
                self._agent.moved("waiting", f"waits for a slot: {why}")
                self._notify(f"waits for a slot: {why}")
            self._agent.update_metrics(message=f"waits for a slot: {why}", seconds_left=None)
            self._agent.wait(_POLL)
        return False

    def _attempt(self, grace: float) -> Result | None:
        """Run the job on the leases that there are; ``None`` where it was saved and all are released."""
        request, job_request = self._request, self._request.job
        workers = LeasedWorkers(
            self._agent,
            self._enforcer,
            self._pool,
            class_name(self._application),
            request.max_workers,
            self._record,
            self._avoided,
            self._clock,
            self._variables,
            code=self._code,
        )
        try:
            job = ElasticJob(
                self._application,
                1,
                directory=request.state_dir,
                settings=_SETTINGS,
                resume=True,
                restart=job_request.restart,
                clock=self._clock,
                pool=workers,
            )
        except BaseException:
            workers.transport.close()
            workers.close()
            raise
        heard = 0
        self._looked = self._clock.now()  # waits for leases are no work
        with job:
            while not job.ended:
                heard = self._hear(job.events(), heard)
                self._look(job, workers)
                if self._stop.is_set():
                    if workers.liveness.watched():  # else the newest snapshot is all there is
                        self._saved = job.save(grace)
                    break
                if workers.stranded:
                    due = min(self._agent.lease_table.due().values(), default=self._clock.now() + grace)
                    job.save(max(due - self._clock.now() - _LEAVING, _LEAST))
                    if workers.stranded:  # else others have come meanwhile
                        break
                self._clock.sleep(_POLL)
            self._hear(job.events(), heard)
            # a save may have come after the end
            return job.result(1.0) if job.ended else None

    def _hear(self, events: list[Event], heard: int) -> int:
        for event in events[heard:]:
            self._joined += event.kind == "joined"
            if event.kind == "snapshot":
                self._agent.saved(self._request.state_dir, int(event.details["number"]))
                self._agent.update_metrics(saved_at=event.time)
            if event.kind == "lost":
                self._losses += 1
                self._agent.decided(
                    "recovery",
                    f"{event.details['reason']}; the job continues from its last snapshot",
                    inputs={"worker": event.details["node"]},
                    outcome={"lost": event.details["node"]},
                )
            if event.kind in _SENTENCES:
                words = ", ".join(f"{name} {value}" for name, value in event.details.items())
                self._notify(f"{event.kind}: {words}" if words else event.kind)
        return len(events)

    def _look(self, job: ElasticJob, workers: LeasedWorkers) -> None:
        """Report how far the job is."""
        now = self._clock.now()
        working = len(workers.liveness.watched())
        self._spent += working * (now - self._looked)
        self._looked = now
        if working:
            self._agent.moved("running", f"on {plural(working, 'worker')}")
        elif workers.present:
            self._agent.moved("waiting", "waits for its workers to start")
        else:
            self._agent.moved("waiting", "waits for a slot")
        done = len(getattr(job.driver, "history", ()))
        progress = min(done / self._request.job.iterations, 1.0)
        fields: dict[str, Any] = {"step": done, "progress": progress, "message": ""}
        if progress > 0 and self._spent > 0:
            total = self._spent / progress
            fields |= {"work_total": total, "work_left": total - self._spent}
            fields["seconds_left"] = (total - self._spent) / working if working else None
        self._agent.update_metrics(**fields)

    # --- input and result ---------------------------------------------------------------------------------

    def _prepared(self) -> Application:
        request, job = self._request, self._request.job
        private.make_folder(request.state_dir)
        if job.own:
            return self._own()
        assert job.input is not None
        data = stored_input(job.input, job.app, job.classes, request.label, request.place)
        try:
            return job.application(data)
        except (OSError, KeyError, ValueError) as error:
            raise OptionError(f"{data} cannot serve {job.app}: {error}") from error

    def _own(self) -> Application:
        """Return the user's application, from its code in the run's directory, where it is packed once."""
        request, job = self._request, self._request.job
        source = job.input or ""
        if source and "://" not in source and not request.place.local:
            raise OptionError(
                f"input of {job.app} must be an address that all nodes reach, such as s3://...; got {source}"
            )
        with translated(f"look for the code in {request.place.uri}"):
            stored = request.place.is_file(f"{package.FOLDER}/{package.RECORD}")
        if not stored:
            store_code(request)
        self._code = str(request.place.under(package.FOLDER))
        made = prepare(self._code, request.run_id, home(), self._clock)
        assert made.directory is not None
        return job.application(source, made.directory)

    def _deliver(self, result: Result) -> ElasticReport:
        """Write the result, then the report, by which the job counts as finished."""
        app = self._application
        history = history_of(result)
        packed = io.BytesIO()
        np.savez(packed, **result_arrays(app, result))
        place = self._request.place
        with translated(f"write {PARAMETERS} to {place.uri}"):
            place.write(PARAMETERS, packed.getvalue())
        with translated(f"read {self._request.job.input}"):
            objective = objective_of(app, result)
        report = self._report("finished", "", objective, tuple(history))
        records.save(place.under(_REPORT), asdict(report), _FORMAT)
        return report

    def _report(
        self,
        state: Literal["finished", "stopped"],
        reason: str,
        objective: float | None = None,
        history: tuple[float, ...] = (),
    ) -> ElasticReport:
        return ElasticReport(
            self._request.run_id,
            self._request.job.app,
            self._request.place.uri if not self._request.place.local else self._request.place.root,
            state,
            reason,
            objective,
            len(history),
            self._clock.now() - self._begun,
            self._spent,
            self._joined,
            self._losses,
            history,
        )


def _finished(request: ElasticAppRequest) -> ElasticReport | None:
    """Return the report of a job of this id that has finished, but whose app did not live to say so."""
    place = request.place.under(_REPORT)
    with translated(f"look for {place.uri}"):
        if not place.is_file():
            return None
    try:
        said = records.load(place, _FORMAT)
        return ElasticReport(**{**said, "history": tuple(said["history"])})
    except (ValueError, KeyError, TypeError, records.OtherVersionError):
        return None  # damaged: the job resumes from its last snapshot, and writes it anew
