"""Optuna behind a tuning run: the next trial, and which trials are stopped. Its study is a file, or in a database."""

import logging
import socket
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from functools import partial
from math import inf
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from ebbflow.infra.clock import Clock, SystemClock
from ebbflow.infra.errors import EngineUnavailableError, LedgerError, LedgerUnavailableError, TrainingError
from ebbflow.infra.ledger.address import Address
from ebbflow.infra.tuning.database import open_storage, study_errors
from ebbflow.infra.tuning.journal import open_journal
from ebbflow.infra.tuning.leases import SETUP, DatabaseLeases, SoleLeases, TrialLeases
from ebbflow.planners.errors import OptionError
from ebbflow.planners.tuning.early_stopping import Curves
from ebbflow.tasks.tuning.code import TuningCode
from ebbflow.tasks.tuning.request import TuningRequest
from ebbflow.tasks.tuning.trial import suggested

REQUEST = "ebbflow"  # attribute of a study in a database: what was asked for
ENDED = "ebbflow"  # attribute of a trial: what its training has come to
PATIENCE = 300.0  # s without an answer of the database after which the tuning run ends, saved
_PAUSE = 1.0  # s between two questions
_BEGINNING = 5.0  # s in which a process that has made a study writes down what was asked for
_LOOK = 1.0  # s between two looks for trials that others leave
_JOURNAL = "optuna.journal"
_START_UP = 5  # trials drawn at random before TPE says more

T = TypeVar("T")

log = logging.getLogger(__name__)


class Study:
    """One tuning run's trials; used by one thread. ``close`` gives back those that this process runs.

    Trials have numbers from 0 on; each is run by one process at a time, which has its lease (``infra/tuning``). The
    parameters of a trial are drawn from the seed and its number, so that with random sampling they are the same
    whoever draws them, and however often a process died.

    While a database does not answer, ``meanwhile`` is called about once a second.
    """

    def __init__(
        self,
        request: TuningRequest,
        clock: Clock | None = None,
        *,
        begins: bool = False,
        ledger: Address | None = None,
        cluster: str = "",
        stop: threading.Event | None = None,
        code: TuningCode | None = None,
    ) -> None:
        """Open the study, or begin one; ``begins``: one that is in the database already is refused.

        Raises ``EngineUnavailableError`` without Optuna, ``TrainingError`` for one that is refused, ``OptionError``
        for one in a database that has other options, or is another ``cluster``'s, ``LedgerError`` for a database that
        cannot be used; ``ledger`` is that of the ledger. ``code``, where trials have more than a script, is to be
        that of the study. Methods that write to a file raise ``StorageError`` where
        that cannot be (``StorageFullError`` without space); what is in it stays. Those that use a database raise
        ``LedgerUnavailableError`` after ``PATIENCE`` seconds, or once ``stop`` is set.
        """
        try:
            import optuna
        except ImportError as error:
            raise EngineUnavailableError(
                "a tuning run needs Optuna: pip install 'prefect-ebbflow[tune]'"
            ) from error
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self._optuna, self._request, self._clock = optuna, request, clock or SystemClock()
        self._address = address = request.study_address(ledger)
        self._stop, self._patience = stop or threading.Event(), PATIENCE
        self.meanwhile: Callable[[], None] = lambda: None
        self._look_at = 0.0
        self._not_before: dict[int, float] = {}  # trials that are left to others until then
        self._curves = Curves(request.epochs, request.maximize) if request.epochs else None
        self._leases: TrialLeases = SoleLeases()
        if address is None:
            self._close_storage: Callable[[], None] = lambda: None
            self._open(open_journal(Path(request.place.root) / _JOURNAL), begins=False)
            return
        storage = open_storage(address, self._clock)
        self._close_storage = storage.engine.dispose
        try:
            self._open(storage, begins)
            self._agree(begins, cluster, code)
            self._leases = DatabaseLeases(address, request.run_id, request.heartbeat_timeout, self._clock)
        except BaseException:
            self._close_storage()
            raise

    def _open(self, storage: Any, begins: bool) -> None:
        """Open the study, or make it."""
        request, optuna = self._request, self._optuna
        make = partial(
            optuna.create_study,
            study_name=request.run_id,
            storage=storage,
            sampler=self._sampler(0, 0),
            pruner=self._pruner(),
            direction="maximize" if request.maximize else "minimize",
        )
        with study_errors("open the study", self._address):
            try:
                self._study = make(load_if_exists=not begins)
            except optuna.exceptions.DuplicatedStudyError:
                self._study = make(load_if_exists=True)
                end = self._clock.now() + _BEGINNING
                while REQUEST not in self._study.user_attrs and self._clock.now() < end:
                    self._clock.sleep(_PAUSE)
            self._storage = self._study._storage

    def _agree(self, begins: bool, cluster: str, code: TuningCode | None) -> None:
        """Write down what was asked for where nobody has, else see that this process was asked for the same."""
        name = self._request.run_id
        with study_errors("read the study", self._address):
            there = self._study.user_attrs.get(REQUEST)
            foreign = there is None and self._study.get_trials(deepcopy=False)
            if foreign or not isinstance(there, Mapping | None):
                raise TrainingError(
                    f"study {name!r} in {self._address} is none of Ebbflow's: choose another run ID"
                )
            if there is None:  # it was made just now, or by a process that died right after
                shared = {**self._request.shared, "cluster": cluster, "code": code.digests if code else {}}
                self._study.set_user_attr(REQUEST, shared)
                return
        if begins:
            raise TrainingError(
                f"there is a study {name!r} in {self._address} already: join it (ebbflow tune --join {name}), or "
                "choose another run ID"
            )
        self._request.check_shared(there)
        if code is not None:
            code.check(there.get("code", {}))
        if cluster and there.get("cluster", cluster) != cluster:
            raise OptionError(
                f"study {name!r} in {self._address} is not of cluster {cluster!r}, but of "
                f"{there['cluster'] or 'no cluster'}: choose another run ID"
            )

    def close(self) -> None:
        """Give back the trials that this process runs, and all connections. May be called twice."""
        self._leases.close()
        self._close_storage()

    def hurry(self) -> None:
        """Wait no more for a database that does not answer: the tuning run leaves."""
        self._patience = 0.0

    def _sampler(self, trial: int, parameter: int) -> Any:
        """Return the sampler of one parameter of one trial."""
        seed = int(np.random.SeedSequence((self._request.seed, trial, parameter)).generate_state(1)[0])
        samplers = self._optuna.samplers
        if self._request.sampler == "random":
            return samplers.RandomSampler(seed=seed)
        return samplers.TPESampler(seed=seed, n_startup_trials=_START_UP, constant_liar=True)

    def _pruner(self) -> Any:
        request, pruners = self._request, self._optuna.pruners
        given = {"min_resource": request.min_epochs, "reduction_factor": request.reduction_factor}
        match request.pruner:
            case "halving":
                return pruners.SuccessiveHalvingPruner(**given)
            case "hyperband":
                return pruners.HyperbandPruner(max_resource=request.epochs, **given)
            case _:
                return pruners.NopPruner()

    # --- who runs which trial -------------------------------------------------------------------------------

    def take(self, exclude: Collection[int] = ()) -> tuple[Any, bool] | None:
        """Return a trial that no process runs, and whether one has begun it; ``None``: there is none now.

        Those that a process has left come first. Beyond the trials that were asked for there are none; those of the
        numbers in ``exclude`` are left out.
        """
        if self._clock.now() < self._look_at:
            return None
        states = self._optuna.trial.TrialState
        while self._request.pruner == "pbt" and self._added():  # a population is whole from the beginning
            pass
        while True:
            trials = self._do("read the trials", lambda: self._study.get_trials(deepcopy=False))
            now = self._clock.now()
            left = [
                one
                for one in trials[: self._request.trials]
                if not (one.state.is_finished() or one.number in exclude)
                and self._not_before.get(one.number, now) <= now
            ]
            if self._request.pruner == "pbt":  # a population stays together
                left.sort(key=lambda one: (one.last_step or 0, one.number))
            else:
                left.sort(key=lambda one: (one.state != states.RUNNING, one.number))
            taken = self._do("read the leases", self._leases.taken) if left else frozenset()
            for one in left:
                if one.number in taken or not self._claims(one.number):
                    continue
                found = None
                try:
                    found = self._claimed(one)
                finally:
                    if found is None:
                        self._give_back(one.number)
                if found is not None:
                    return found
            if not self._added():
                self._look_at = self._clock.now() + _LOOK
                return None

    def _claims(self, number: int) -> bool:
        return self._do("claim a trial", lambda: self._leases.claim(number))

    def _claimed(self, frozen: Any) -> tuple[Any, bool] | None:
        """Begin a trial whose lease this process has; ``None`` for one that is over by now."""
        states = self._optuna.trial.TrialState

        def begin() -> tuple[Any, bool] | None:
            known = self._storage.get_trial(frozen._trial_id)
            if known.state.is_finished():
                return None
            if known.state == states.WAITING:
                try:
                    self._storage.set_trial_state_values(frozen._trial_id, states.RUNNING)
                except self._optuna.exceptions.UpdateFinishedTrialError:
                    return None
            begun = known.state == states.RUNNING
            return self._optuna.trial.Trial(self._study, frozen._trial_id), begun

        return self._do("begin a trial", begin)

    def _added(self) -> bool:
        """Add a trial that waits, where there are fewer than were asked for and nobody else adds one."""
        if self._count() >= self._request.trials or not self._claims(SETUP):
            return False
        try:
            if self._count() >= self._request.trials:
                return False
            waiting = self._optuna.trial.create_trial(state=self._optuna.trial.TrialState.WAITING)
            with study_errors("add a trial", self._address):
                self._study.add_trial(waiting)
            return True
        except LedgerUnavailableError as error:  # it may be there nevertheless: the next look counts again
            log.warning("%s", error)
            return False
        finally:
            self._give_back(SETUP)

    def waits(self, running: Collection[int], idle: Collection[int], epoch: int) -> bool:
        """Return whether one of ``idle``, or that nobody runs or added yet, has done fewer than ``epoch`` epochs."""
        found = self._all()
        if len(found) < self._request.trials:
            return True
        behind = {one.number for one in found if not one.state.is_finished() and (one.last_step or 0) < epoch}
        return bool(behind - ({*running, *self._do("read the leases", self._leases.taken)} - set(idle)))

    def remember(self, trial: Any, name: str, value: Any) -> bool:
        """Keep plain JSON with a trial; return whether it was this process's to say."""
        if not self._do("renew a lease", lambda: self._leases.confirm(trial.number)):
            return False
        try:
            self._do("write an attribute", lambda: trial.set_user_attr(name, value))
        except self._optuna.exceptions.UpdateFinishedTrialError:
            return False
        return True

    def lost(self) -> frozenset[int]:
        """Return the numbers of trials that other processes have claimed since, as this one seemed dead."""
        return self._leases.lost()

    def release(self, trial: Any, pause: float = 0.0) -> None:
        """Leave a trial that is not over to whoever takes it next; this process does not for ``pause`` seconds."""
        self._not_before[trial.number] = self._clock.now() + pause
        self._give_back(trial.number)

    def _give_back(self, number: int) -> None:
        with suppress(LedgerError):  # it is renewed no more, and so abandoned by itself
            self._leases.release(number)

    # --- trials -------------------------------------------------------------------------------------------

    def begun(self) -> int:
        """Return how many trials were begun, by any process."""
        waiting = self._optuna.trial.TrialState.WAITING
        return sum(one.state != waiting for one in self._all())

    def ended(self) -> int:
        """Return how many trials are over."""
        return sum(one.state.is_finished() for one in self._all())

    def _count(self) -> int:
        return len(self._do("count the trials", lambda: self._study.get_trials(deepcopy=False)))

    def _all(self) -> Sequence[Any]:
        """Return the trials that were asked for, as far as there are any."""
        found = self._do("read the trials", lambda: self._study.get_trials(deepcopy=False))
        return found[: self._request.trials]

    def arguments(self, trial: Any) -> dict[str, Any] | None:
        """Return the trial's parameters, drawing those that it has not got yet; ``None``: another has ended it."""
        drawn = {}
        for at, parameter in enumerate(self._request.space):
            self._study.sampler = self._sampler(trial.number, at)
            try:
                drawn[parameter.name] = self._do(
                    "draw a parameter", lambda one=parameter: suggested(trial, one)
                )
            except self._optuna.exceptions.UpdateFinishedTrialError:
                return None
        return drawn

    def report(self, trial: Any, epoch: int, value: float) -> bool:
        """Take in the metric after ``epoch`` and return whether the trial is to be stopped.

        Nothing is written into a trial that another process has claimed: ``lost`` will tell of it.
        """
        if not self._do("renew a lease", lambda: self._leases.confirm(trial.number)):
            return False
        try:
            self._do("write a metric", lambda: trial.report(value, epoch))
        except self._optuna.exceptions.UpdateFinishedTrialError:
            return False
        if epoch < self._request.min_epochs or epoch >= (self._request.epochs or inf):
            return False  # too early to tell, or too late to save anything
        if self._request.pruner == "curve" and self._curves is not None:
            return self._curves.hopeless(self.values(trial), self.best_value())
        return bool(self._do("compare trials", trial.should_prune))

    def values(self, trial: Any) -> list[tuple[int, float]]:
        """Return the trial's metric by epoch."""
        return sorted(self._all()[trial.number].intermediate_values.items())

    def tell(
        self, trial: Any, value: float | None, state: str, details: Mapping[str, Any] | None = None
    ) -> bool:
        """Write down how a trial ended: ``complete``, ``pruned`` or ``failed``, and what its training came to.

        Return whether it was this process's to say: another may have claimed the trial.
        """
        states = self._optuna.trial.TrialState
        known = {"complete": states.COMPLETE, "pruned": states.PRUNED, "failed": states.FAIL}
        if not self._do("renew a lease", lambda: self._leases.confirm(trial.number)):
            return False

        begun = False

        def write() -> bool:
            nonlocal begun
            if self._storage.get_trial(trial._trial_id).state.is_finished():
                return begun  # written before its connection was lost, else by another process
            begun = True
            try:
                trial.set_user_attr(ENDED, {"host": socket.gethostname(), **(details or {})})
                self._study.tell(trial, value if state == "complete" else None, state=known[state])
            except self._optuna.exceptions.UpdateFinishedTrialError:
                return False
            return True

        mine = self._do("write how a trial ended", write)
        self._give_back(trial.number)
        return mine

    def best_value(self) -> float | None:
        """Return the best value of all complete trials."""
        best = self.best()
        return None if best is None else best.value

    def best(self) -> Any | None:
        """Return the best complete trial."""
        try:
            return self._do("read the best trial", lambda: self._study.best_trial)
        except ValueError:
            return None

    def trials(self) -> Sequence[Any]:
        """Return all trials as Optuna keeps them."""
        return self._all()

    def _do(self, action: str, work: Callable[[], T]) -> T:
        """Return what ``work`` returns, which may be called again while the database does not answer."""
        begun = self._clock.now()
        while True:
            try:
                with study_errors(action, self._address):
                    return work()
            except LedgerUnavailableError as error:
                if self._clock.now() - begun >= self._patience or self._stop.is_set():
                    raise
                log.warning("%s", error)
                self.meanwhile()
                self._clock.wait(self._stop, _PAUSE)
