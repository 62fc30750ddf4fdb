"""Apps whose process is gone: which they are, what would start each again, and when that is worth a try.

Whoever can start apps calls ``resume_lost`` now and then, as the flow of a capacity loop does.
Several may: an app's own lock lets only one of two that were started for it begin.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from ebbflow.infra.clock import Clock
from ebbflow.infra.ledger import Ledger
from ebbflow.infra.storage.places import StorageLocation
from ebbflow.planners.errors import EbbflowError, OptionError
from ebbflow.planners.model.ledger import AppEntered, AppMoved, AppRecord, AppSpec, Decided, Event
from ebbflow.planners.model.ledger_state import State
from ebbflow.tasks.apps.specs import Resume
from ebbflow.tasks.query.app_requests import AppFolder
from ebbflow.tasks.query.request import QueryRequest
from ebbflow.tasks.training.request import TrainingRequest
from ebbflow.tasks.tuning.request import TuningRequest

_READ = 5000  # events of one app that are looked at, the newest

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RestartPolicy:
    """How often a lost app is started again. Raises ``OptionError``."""

    first: float = 2.0  # s after its loss until the first start, doubled for each loss before
    most: float = 300.0  # s
    start: float = 120.0  # s that a start may take until it has entered
    losses: int = 5  # within ``window``, after which it has failed
    window: float = 3600.0  # s
    tries: int = 5  # starts after one loss that it does not enter by, after which it has failed

    def __post_init__(self) -> None:
        for name in ("first", "most", "start", "window"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise OptionError(f"{name} must be >= 0 s and finite; got {getattr(self, name)}")
        for name in ("losses", "tries"):
            if getattr(self, name) < 1:
                raise OptionError(f"{name} must be >= 1; got {getattr(self, name)}")


@dataclass(frozen=True, slots=True)
class LostApp:
    """An app that the ledger has down as lost."""

    spec: AppSpec
    resume: Resume | None  # what starts it again; None: it did not say
    since: float  # s since the Unix epoch
    losses: int  # of late, this one included
    due: float  # s since the Unix epoch, before which it is left alone
    reason: str
    hopeless: str = ""  # why it is not to be started again; empty: it may be
    tries: int = 0  # to start it since it was lost

    def is_due(self, now: float) -> bool:
        """Tell whether it is to be started now."""
        return not self.hopeless and now >= self.due


def lost_apps(ledger: Ledger, now: float, policy: RestartPolicy | None = None) -> tuple[LostApp, ...]:
    """Return the apps that are lost, in the order of their arrival. Raises ``LedgerError``."""
    policy = policy or RestartPolicy()
    return tuple(
        _lost(ledger, record, now, policy) for record in ledger.state().active() if record.phase == "lost"
    )


def resume_lost(
    ledger: Ledger,
    start: Callable[[LostApp], str],
    clock: Clock | None = None,
    policy: RestartPolicy | None = None,
    mine: Callable[[LostApp], bool] = lambda _: True,
) -> tuple[LostApp, ...]:
    """Start lost apps again that are due, and return them. What is done stands in the ledger before it is done.

    Args:
        ledger: the cluster's.
        start: starts an app and returns at once, with a sentence on how; it raises ``EbbflowError`` where it cannot.
        clock: the ledger's unless given.
        policy: how often.
        mine: chooses among the lost apps those that this caller can start.

    An app that was lost too often, or cannot be started by what it has said itself, is moved to "failed". Raises
    ``LedgerError``.
    """
    now = (clock or ledger.clock).now()
    started = []
    for app in lost_apps(ledger, now, policy):
        if not mine(app):
            continue
        if app.hopeless:
            ledger.write(
                [AppMoved(app.spec.id, "failed", app.hopeless)], when=partial(_still_lost, app.spec.id)
            )
        elif app.is_due(now) and _start(ledger, app, start):
            started.append(app)
    return tuple(started)


def _still_lost(id_: str, state: State) -> bool:
    """Tell whether an app is lost in the state that a change meets: it may have entered since it was looked at."""
    record = state.apps.get(id_)
    return record is not None and record.phase == "lost"


def request_of(resume: Resume) -> TrainingRequest | TuningRequest | QueryRequest:
    """Return the recorded request of an app. Raises ``OptionError``, ``StorageError`` or ``TrainingError``."""
    if resume.kind == "training":
        return TrainingRequest.load(resume.folder, resume.id)
    if resume.kind == "tuning":
        return TuningRequest.load(resume.folder, resume.id)
    return AppFolder(StorageLocation(resume.folder), resume.id).load()


def _start(ledger: Ledger, app: LostApp, start: Callable[[LostApp], str]) -> bool:
    """Start an app unless it has entered by now; tell whether that was tried."""
    id_ = app.spec.id
    times = "" if app.losses == 1 else f", for the {app.losses}th time"
    decided = Decided(
        "recovery",
        f"restarting {id_}{times}: {app.reason}",
        id_,
        inputs={"losses": app.losses, "since": app.since},
        outcome={"resumed": True},
    )
    if not ledger.write([decided], when=partial(_still_lost, id_)):
        return False
    try:
        how = start(app)
    except EbbflowError as error:
        log.warning("%s cannot be restarted: %s", id_, error)
        failed = f"{id_} could not be restarted: {error}"
        ledger.write([Decided("recovery", failed, id_, outcome={"resumed": False})])
    else:
        log.info("restarting %s: %s", id_, how)
    return True


def _lost(ledger: Ledger, record: AppRecord, now: float, policy: RestartPolicy) -> LostApp:
    events = _events(ledger, record.spec.id)
    losses = [e.at for e in events if isinstance(e.change, AppMoved) and e.change.phase == "lost"]
    since = losses[-1] if losses else record.entered
    late = max(sum(at > now - policy.window for at in losses), 1)
    due = since + min(policy.first * 2.0 ** (late - 1), policy.most)
    tries = [e.at for e in events if _starts(e) and e.at >= since]
    if tries:
        due = max(due, tries[-1] + policy.start)
    hopeless, resume = "", None
    try:
        resume = Resume.of(record.spec)
    except OptionError as error:
        hopeless = f"it cannot be restarted: {error}"
    if late >= policy.losses:
        hopeless = f"lost {late} times within {policy.window:.0f} s; last reason: {record.reason}"
    if len(tries) >= policy.tries and now >= due:
        hopeless = hopeless or f"{len(tries)} failed start attempts since it was lost: {record.reason}"
    return LostApp(record.spec, resume, since, late, due, record.reason, hopeless, len(tries))


def _starts(event: Event) -> bool:
    change = event.change
    return isinstance(change, Decided) and change.outcome.get("resumed") is True


def _events(ledger: Ledger, app: str) -> list[Event]:
    """Return the newest events that say how an app's process has fared."""
    return ledger.events(0, _READ, (AppEntered, AppMoved, Decided), app, newest=True)
