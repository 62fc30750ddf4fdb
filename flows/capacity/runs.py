"""Flow runs whose process is gone: found by their apps in the ledger, marked, and resumed.

Where the machine of a flow run dies, or is taken away, Prefect's own runner dies with it, and the run stays Running
for ever. The ledger knows better: the run's apps have fallen silent, and the loop has taken them for lost.
"""

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from prefect import task
from prefect.cache_policies import NO_CACHE
from prefect.logging import get_run_logger

from ebbflow.flows.capacity.flow_runs import FlowRuns, PrefectRuns, RunView
from ebbflow.infra.errors import InfraError, LedgerError
from ebbflow.infra.ledger import Ledger
from ebbflow.planners.errors import EbbflowError
from ebbflow.planners.model.ledger import OVER, AppEntered, AppMoved, AppPhase, AppRecord, AppSpec, LoopBegan
from ebbflow.planners.model.ledger_state import State
from ebbflow.tasks.capacity.leadership import holder_name
from ebbflow.tasks.capacity.recovery import LostApp, RestartPolicy, lost_apps, request_of, resume_lost
from ebbflow.tasks.query.request import QueryRequest

LOOK = 5.0  # s between looks
RECENT = 3600.0  # s after its end for which a run that was terminated is still resumed
_REST = 300.0  # s at most between two questions about an app that nobody can begin
_READ = 1000  # events at a time
_BY_HAND = "aborted by an interrupt signal"  # what Prefect says of Ctrl-C
_ENDING = 60.0  # s after its last app's end for which a run is looked at

NotifyRestart = Callable[[LostApp, RunView], None]
_AppOfRun = tuple[str, str]  # ids

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _AppStatus:
    """What the ledger says of a flow run's apps."""

    apps: tuple[AppRecord, ...]  # that it was the last to enter

    @property
    def lost(self) -> tuple[AppRecord, ...]:
        return tuple(app for app in self.apps if app.phase == "lost")

    @property
    def live(self) -> bool:
        return any(app.phase not in OVER and app.phase != "lost" for app in self.apps)


class FlowRunRecovery:
    """Looks after the flow runs of a cluster's apps.

    A run none of whose apps is alive, and one of which is lost, is marked: Crashed, or Cancelled where somebody has
    asked for that. A run that was terminated, rather than cancelled, has lost its apps too, though they could say
    their last words. Lost apps are resumed by a new run of the same deployment; not those of cancelled runs.

    A run of a loop that another has followed, and that has not ended a minute later, is marked, too.

    Nothing is done twice: what is done stands in the ledger first, a new run's key names the loss and the attempt,
    and there is no second one while the first has not ended. A loop that does not lead does nothing.

    Args:
        ledger: the cluster's.
        runs: the orchestrator's.
        leads: whether the loop of this process leads.
        notify: called with each run that was begun.
        policy: how often a lost app is begun again.
    """

    def __init__(
        self,
        ledger: Ledger,
        runs: FlowRuns,
        leads: Callable[[], bool] = lambda: True,
        notify: NotifyRestart = lambda app, run: None,
        policy: RestartPolicy | None = None,
    ) -> None:
        self._ledger, self._runs, self._leads = ledger, runs, leads
        self._notify, self._policy = notify, policy
        self.say: Callable[[str], None] = log.warning  # what people should know
        self._read = 0  # number of the last event
        self._open: dict[str, set[str]] = {}  # flow runs not seen to end, in order -> apps they entered last
        self._runs_of: dict[str, str] = {}  # by app, of open runs
        self._loop = ""  # the flow run of the loop that leads
        self._former: dict[str, float] = {}  # those of loops before it -> when it took over
        self._marked: set[str] = set()
        self._views: dict[str, RunView | None] = {}  # of this look
        self._resting: dict[_AppOfRun, tuple[float, float]] = {}  # lost ones -> until when, for how many s

    def look(self) -> None:
        """Look once. Raises ``LedgerError``, and ``InfraError`` when the orchestrator does not answer."""
        if not self._leads():
            return
        self._read_events()
        self._views = {}
        records = list(self._ledger.state().apps.values())
        for record in records:  # those whose entry was pruned from the ledger, too
            if record.phase not in OVER and record.spec.flow_run:
                self._opened(record.spec.flow_run, record.spec.id)
        now = self._ledger.clock.now()
        for run, since in list(self._former.items()):
            if _ENDING < now - since <= RECENT:
                self._runs.crashed(run, "the process of this run exited: another loop is the leader")
            if now - since > _ENDING:
                del self._former[run]
        gone = {_of(record.spec) for record in records if record.phase == "lost"}
        self._resting = {app: rest for app, rest in self._resting.items() if app in gone}
        for run in list(self._open):
            standing = _AppStatus(tuple(a for a in records if a.spec.flow_run == run))
            if not standing.lost or any(not self._rests(app.spec, now) for app in standing.lost):
                self._mend(run, standing, now)
        lost = [a for a in self._ledger.state().apps.values() if a.phase == "lost"]
        for record in lost:
            if not self._rests(record.spec, now):
                self._view(record.spec.flow_run)
        if lost:
            resume_lost(self._ledger, self._start, policy=self._policy, mine=self._mine)

    # --- runs ------------------------------------------------------------------------------------------------

    def _read_events(self) -> None:
        while events := self._ledger.events(self._read, _READ, (AppEntered, LoopBegan)):
            for event in events:
                if isinstance(event.change, LoopBegan):
                    if self._loop:
                        self._former[self._loop] = event.at
                    self._loop = _run_of(event.change.holder)
                    self._former.pop(self._loop, None)
                elif isinstance(event.change, AppEntered) and (run := event.change.spec.flow_run):
                    self._opened(run, event.change.spec.id)
                    self._marked.discard(run)
            self._read = events[-1].number

    def _opened(self, run: str, app: str) -> None:
        """Note that ``run`` was the last to enter ``app``."""
        before = self._runs_of.get(app)
        if before is not None and before != run:
            self._open[before].discard(app)
        self._runs_of[app] = run
        self._open.setdefault(run, set()).add(app)

    def _close(self, run: str) -> None:
        for app in self._open.pop(run):
            del self._runs_of[app]
        self._marked.discard(run)

    def _mend(self, run: str, standing: _AppStatus, now: float) -> None:
        if standing.live:
            return
        if standing.lost or not self._open[run]:  # without any, all its apps continue in other runs
            self._mark(run, standing)
        elif not standing.apps:  # they were over for so long that the state has forgotten them
            self._close(run)
        else:
            self._ended(run, standing, now)

    def _mark(self, run: str, standing: _AppStatus) -> None:
        view = self._view(run)
        if view is None:
            self._close(run)
            return
        lost = standing.lost
        if view.state in ("CANCELLED", "CANCELLING"):
            self._runs.crashed(run, "its process exited before it could report")
            self._move(lost, "stopped", "its flow run was cancelled")
        elif view.state == "COMPLETED":
            self._move(lost, "stopped", "its flow run has completed")
        elif run not in self._marked and not self._begun_again(view, lost):
            self._marked.add(run)
            why = (
                f"{lost[0].spec.id} marked lost: {lost[0].reason}"
                if lost
                else "its apps resumed in another run"
            )
            self._crash(view, f"the process of this run exited: {why}")
        if not standing.apps:
            self._close(run)

    def _begun_again(self, view: RunView, lost: Sequence[AppRecord]) -> bool:
        """Tell whether somebody has begun this very run again since its apps were lost; it has yet to enter them."""
        if view.over or view.since is None or not lost:
            return False
        ids = {app.spec.id for app in lost}
        known = lost_apps(self._ledger, self._ledger.clock.now(), self._policy)
        return all(app.since < view.since for app in known if app.spec.id in ids)

    def _crash(self, view: RunView, why: str) -> None:
        """Mark a run and those in whose process it ran."""
        seen = {view.id}
        while True:
            if not view.over:
                self.say(f"flow run {view.name}: {why}")
                self._runs.crashed(view.id, why)
                self._views[view.id] = replace(view, state="CRASHED")
            above = self._view(view.parent) if view.parent and view.parent not in seen else None
            if above is None:
                return
            seen.add(above.id)
            view = above

    def _ended(self, run: str, standing: _AppStatus, now: float) -> None:
        """Take note of a run whose apps are all over; it may have been terminated."""
        last = max(app.ended or 0.0 for app in standing.apps)
        if now - last > RECENT:
            self._close(run)
            return
        view = self._view(run)
        if view is not None and view.state == "CRASHED" and view.deployment and _BY_HAND not in view.message:
            stopped = [app for app in standing.apps if app.phase == "stopped"]
            self._move(stopped, "lost", f"its flow run was terminated: {view.message}"[:500])
            self._marked.add(run)
            if stopped:
                return
        if view is not None and view.state == "CANCELLING" and now - last > _ENDING:
            self._runs.crashed(run, "its process exited before it could report")
        if view is None or view.over or now - last > _ENDING:
            self._close(run)

    def _move(self, apps: Sequence[AppRecord], phase: AppPhase, why: str) -> None:
        for app in apps:
            self._ledger.write([AppMoved(app.spec.id, phase, why)], when=partial(_unchanged, app))

    def _view(self, run: str) -> RunView | None:
        if run not in self._views:
            self._views[run] = self._runs.view(run) if run else None
        return self._views[run]

    # --- resuming ------------------------------------------------------------------------------------------

    def _mine(self, app: LostApp) -> bool:
        """Tell whether a lost app can be begun again by a deployment, and no run of it waits to do so already."""
        now = self._ledger.clock.now()
        if self._rests(app.spec, now):
            return False
        view = self._views.get(app.spec.flow_run)
        named = app.resume is not None and app.resume.deployment
        if view is not None and (not view.over or view.state == "CANCELLED"):
            return False  # while it runs, with other apps that live, it sees to this one itself
        if not named and (view is None or not view.deployment):
            _, before = self._resting.get(_of(app.spec), (now, LOOK / 2.0))
            wait = min(2.0 * before, _REST)
            self._resting[_of(app.spec)] = (now + wait, wait)
            return False
        return not self._runs.waiting(tag_of(app, self._ledger.cluster))

    def _rests(self, app: AppSpec, now: float) -> bool:
        """Tell whether nobody could begin a lost app when that was looked at, not long ago."""
        until, _ = self._resting.get(_of(app), (now, 0.0))
        return 0.0 < until - now <= _REST

    def _start(self, app: LostApp) -> str:
        """Create a flow run that resumes the app, and say which. Raises ``EbbflowError``."""
        view = self._views.get(app.spec.flow_run)
        given = resumed(app, view, self._ledger.cluster)
        deployment = view.deployment if view is not None else ""
        if not deployment and app.resume is not None:
            deployment = app.resume.deployment
        tag = tag_of(app, self._ledger.cluster)
        tags = [tag, *(one for one in (view.tags if view else ()) if not one.startswith(_TAG))]
        made = self._runs.begin(
            deployment,
            given,
            f"{tag}:{app.since:.3f}:{app.tries}",
            tags,
            view.job_variables if view is not None else {},
            view.name if view is not None else "",
        )
        self._notify(app, made)
        return f"flow run {made.name}"


def _unchanged(app: AppRecord, state: State) -> bool:
    """Tell whether an app is as it was looked at: it may have entered again, in another run."""
    now = state.apps.get(app.spec.id)
    return now is not None and (now.phase, now.spec.flow_run) == (app.phase, app.spec.flow_run)


def _of(app: AppSpec) -> _AppOfRun:
    return app.id, app.flow_run


_TAG = "ebbflow-resumes:"
_HELD = " in flow run "


def holder_in(run: str) -> str:
    """Return who leads, for people and for ``FlowRunRecovery``: machine, process and flow run."""
    return f"{holder_name()}{_HELD}{run}"


def _run_of(holder: str) -> str:
    return holder.partition(_HELD)[2]


def tag_of(app: LostApp, cluster: str) -> str:
    """Return the tag of runs that resume an app: all apps of one run of a pipeline are resumed together."""
    return f"{_TAG}{cluster}:{app.spec.pipeline or app.spec.id}"


def resumed(app: LostApp, view: RunView | None, cluster: str = "local") -> dict[str, Any]:
    """Return the parameters of a run that resumes ``app``: those of the lost run, and which app it is.

    Where the lost run is not known any more, they come from the app's recorded request; which ledger the ``cluster``
    is in, the deployment then has to say itself. Raises ``EbbflowError``.
    """
    id_ = app.spec.id
    if view is not None:
        if app.spec.pipeline:  # parameters that were left to their defaults are not among a run's own
            return {
                **view.parameters,
                "file": None,
                "id": None,
                "parameters": None,
                "resume": app.spec.pipeline,
            }
        if app.spec.kind == "query":
            return {**view.parameters, "app": id_}
        return {**view.parameters, "run_id": id_, "resume": True}
    if app.resume is None:
        raise InfraError(f"{id_} has no resume command")
    request = request_of(app.resume)
    where = {"cluster": cluster}  # which is refused without a ledger: it must not run beside the cluster
    if isinstance(request, QueryRequest):
        from ebbflow.flows.query.flow import parameters_of

        return {**parameters_of(request), "app": id_, **where}
    resume = app.resume
    given = {"script": request.script, "run_id": resume.id, "runs_dir": resume.folder, "resume": True}
    return given | where


# --- in the loop's flow --------------------------------------------------------------------------------------


@task(
    name="flow-run-recovery", task_run_name="flow-run-recovery", cache_policy=NO_CACHE, persist_result=False
)
def mend_runs(mender: FlowRunRecovery, stop: threading.Event, every: float = LOOK) -> int:
    """Look after flow runs every so often until ``stop`` is set; return how often it was done."""
    said = get_run_logger()  # in the user interface, too
    mender.say = said.warning
    last_logged, times = "", 0
    while not stop.wait(every):
        try:
            mender.look()
            last_logged, times = "", times + 1
        except LedgerError:
            continue  # the loop itself says that the ledger is away
        except EbbflowError as error:
            if str(error) != last_logged:  # an outage is told once
                said.warning("flow runs cannot be reconciled: %s", error)
            last_logged = str(error)
        except Exception as error:
            if str(error) != last_logged:
                said.exception("flow runs could not be reconciled")
            last_logged = str(error)
    return times


@contextmanager
def mending(
    ledger: Ledger,
    leads: Callable[[], bool],
    notify: NotifyRestart = lambda app, run: None,
    *,
    runs: FlowRuns | None = None,
    every: float = LOOK,
) -> Iterator[None]:
    """Look after the flow runs of a cluster's apps while the block runs, in a task run of its own."""
    stop = threading.Event()
    future = mend_runs.submit(FlowRunRecovery(ledger, runs or PrefectRuns(), leads, notify), stop, every)
    try:
        yield
    finally:
        stop.set()
        with suppress(Exception):  # the loop has led all the same
            future.wait(every + 5.0)
