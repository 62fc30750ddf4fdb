"""Optuna behind a tuning run: the next trial, and which trials are stopped. Its journal is in the run's directory."""

import logging
from collections.abc import Sequence
from contextlib import suppress
from math import inf
from pathlib import Path
from typing import Any

from ebbflow.infra.errors import EngineUnavailableError
from ebbflow.infra.storage import private
from ebbflow.infra.storage.filesystems import translated
from ebbflow.planners.errors import OptionError
from ebbflow.planners.tuning.early_stopping import Curves
from ebbflow.tasks.tuning.request import Parameter, TuningRequest

_JOURNAL = "optuna.journal"
_START_UP = 5  # trials drawn at random before TPE says more

log = logging.getLogger(__name__)


class Study:
    """One tuning run's trials, kept in a journal file; used by one thread."""

    def __init__(self, request: TuningRequest) -> None:
        """Open the journal, or begin one.

        Raises ``EngineUnavailableError`` without Optuna, ``OptionError`` for a directory on S3. Methods that write
        to the journal raises ``StorageError`` where that cannot be (``StorageFullError`` without space); what is in
        it stays.
        """
        try:
            import optuna
        except ImportError as error:
            raise EngineUnavailableError(
                "a tuning run needs Optuna: pip install 'prefect-ebbflow[tune]'"
            ) from error
        from optuna.storages import JournalStorage

        if "://" in request.runs_dir:
            raise OptionError(
                f"a tuning run needs a local directory for its journal; got {request.runs_dir!r}"
            )
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self._optuna, self._request = optuna, request
        folder = Path(request.place.root)
        with translated(f"make {folder}"):
            private.make_folder(folder)
        self._study = optuna.create_study(
            study_name=request.run_id,
            storage=JournalStorage(_journal(folder / _JOURNAL)),
            sampler=self._sampler(),
            pruner=optuna.pruners.NopPruner() if request.pruner != "halving" else self._halving(),
            direction="maximize" if request.maximize else "minimize",
            load_if_exists=True,
        )
        self._curves = Curves(request.epochs, request.maximize) if request.epochs else None

    def _sampler(self) -> Any:
        seed = self._request.seed
        samplers = self._optuna.samplers
        if self._request.sampler == "random":
            return samplers.RandomSampler(seed=seed)
        return samplers.TPESampler(seed=seed, n_startup_trials=_START_UP, constant_liar=True)

    def _halving(self) -> Any:
        return self._optuna.pruners.SuccessiveHalvingPruner(
            min_resource=self._request.min_epochs, reduction_factor=self._request.reduction_factor
        )

    # --- trials -------------------------------------------------------------------------------------------

    def unfinished(self) -> list[Any]:
        """Return the trials that an earlier search has left running."""
        running = self._study.get_trials(states=(self._optuna.trial.TrialState.RUNNING,))
        return [self._optuna.trial.Trial(self._study, trial._trial_id) for trial in running]

    def begun(self) -> int:
        """Return how many trials there are, ended or not."""
        return len(self._study.get_trials(deepcopy=False))

    def ask(self) -> Any:
        """Return a new trial."""
        return self._study.ask()

    def arguments(self, trial: Any) -> dict[str, Any]:
        """Return the trial's parameters, drawing those that it has not got yet."""
        return {parameter.name: _suggested(trial, parameter) for parameter in self._request.space}

    def report(self, trial: Any, epoch: int, value: float) -> bool:
        """Take in the metric after ``epoch`` and return whether the trial is to be stopped."""
        trial.report(value, epoch)
        if epoch < self._request.min_epochs or epoch >= (self._request.epochs or inf):
            return False  # too early to tell, or too late to save anything
        if self._request.pruner == "curve" and self._curves is not None:
            return self._curves.hopeless(self.values(trial), self.best_value())
        return bool(trial.should_prune())

    def values(self, trial: Any) -> list[tuple[int, float]]:
        """Return the trial's metric by epoch."""
        return sorted(self._frozen(trial).intermediate_values.items())

    def tell(self, trial: Any, value: float | None, state: str) -> None:
        """Write down how a trial ended: ``complete``, ``pruned`` or ``failed``."""
        states = self._optuna.trial.TrialState
        known = {"complete": states.COMPLETE, "pruned": states.PRUNED, "failed": states.FAIL}
        self._study.tell(trial, value if state == "complete" else None, state=known[state])

    def best_value(self) -> float | None:
        """Return the best value of all complete trials."""
        best = self.best()
        return None if best is None else best.value

    def best(self) -> Any | None:
        """Return the best complete trial."""
        try:
            return self._study.best_trial
        except ValueError:
            return None

    def trials(self) -> Sequence[Any]:
        """Return all trials as Optuna keeps them."""
        found: Sequence[Any] = self._study.get_trials()
        return found

    def _frozen(self, trial: Any) -> Any:
        return self._study.get_trials(deepcopy=False)[trial.number]


def _journal(path: Path) -> Any:
    """Return Optuna's journal at ``path``, of which a write that was cut short leaves nothing.

    Optuna takes what a full disk or SIGKILL left of a line for the beginning of the next one, and could never read
    such a journal again. One process writes to it: the tuning run's directory is locked.
    """
    from optuna.storages.journal import JournalFileBackend

    class Journal(JournalFileBackend):
        def append_logs(self, logs: list[dict[str, Any]]) -> None:
            with translated(f"write {path}"):
                try:
                    super().append_logs(logs)
                except OSError:
                    _cut(path)
                    raise

    with translated(f"open {path}"):
        private.reserve(path)
        _cut(path)
        return Journal(str(path))


def _cut(path: Path) -> None:
    """Take away what follows a file's last whole line."""
    with suppress(FileNotFoundError), path.open("r+b") as file:
        content = file.read()
        if (whole := content.rfind(b"\n") + 1) < len(content):
            file.truncate(whole)


def _suggested(trial: Any, parameter: Parameter) -> Any:
    match parameter.kind:
        case "choice":
            return trial.suggest_categorical(parameter.name, list(parameter.choices))
        case "int":
            return trial.suggest_int(parameter.name, int(parameter.low), int(parameter.high))
        case _:
            return trial.suggest_float(
                parameter.name, parameter.low, parameter.high, log=parameter.kind == "log"
            )


def as_arguments(values: dict[str, Any]) -> tuple[str, ...]:
    """Return parameters as a script's options."""
    found: list[str] = []
    for name, value in values.items():
        found += [f"--{name}", repr(value) if isinstance(value, float) else str(value)]
    return tuple(found)
