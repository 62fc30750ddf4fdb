"""What a user requests of a tuning run: hyperparameters, trials, nodes; checked before anything starts."""

import math
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from ebbflow.infra.errors import StorageError, TrainingError
from ebbflow.infra.storage import records, user_yaml
from ebbflow.infra.storage.places import StorageLocation
from ebbflow.planners.errors import OptionError
from ebbflow.planners.model import names, options
from ebbflow.planners.model.options import option, option_like
from ebbflow.tasks.training.request import TrainingRequest, default_runs_dir, slots_of

Pruner = Literal["halving", "curve", "none"]

_FILE = "tuning.json"
_FORMAT = 2
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_-]*")
_FORM = "a parameter is {float: [low, high]}, {log: [low, high]}, {int: [low, high]} or {choice: [a, b]}"


@dataclass(frozen=True, slots=True)
class Parameter:
    """One hyperparameter; the script gets it as ``--NAME VALUE``."""

    name: str
    kind: Literal["float", "log", "int", "choice"]
    low: float = 0.0
    high: float = 0.0
    choices: tuple[str | int | float | bool, ...] = ()

    @classmethod
    def parse(cls, name: str, data: Any) -> "Parameter":
        """Return what one entry of the file says. Raises ``OptionError``."""
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise OptionError(
                f"a parameter's name begins with a letter and holds A-Z a-z 0-9 _ -; got {name!r}"
            )
        if not isinstance(data, Mapping) or len(data) != 1:
            raise OptionError(f"{name}: {_FORM}; got {data!r:.80}")
        kind, values = next(iter(data.items()))
        if not isinstance(values, list):
            raise OptionError(f"{name}: {_FORM}; got {data!r:.80}")
        if kind == "choice":
            plain = all(isinstance(v, str | int | float | bool) for v in values)
            if not values or not plain or len(set(map(repr, values))) != len(values):
                raise OptionError(f"{name}: choices are different texts or numbers; got {values!r:.80}")
            return cls(name, "choice", choices=tuple(values))
        if kind not in ("float", "log", "int"):
            raise OptionError(f"{name}: {_FORM}; got {data!r:.80}")
        whole = int if kind == "int" else (int, float)
        right = len(values) == 2 and all(isinstance(v, whole) and not isinstance(v, bool) for v in values)
        if not right or not values[0] < values[1] or not all(map(math.isfinite, values)):
            raise OptionError(f"{name}: {kind} takes two numbers, the smaller first; got {values!r:.80}")
        if kind == "log" and not values[0] > 0:
            raise OptionError(f"{name}: log takes numbers > 0; got {values!r:.80}")
        return cls(name, kind, float(values[0]), float(values[1]))


def read_space(path: Path | str) -> tuple[Parameter, ...]:
    """Return the parameters that a YAML file names. Raises ``OptionError``."""
    data = user_yaml.read_yaml(path, error=lambda said: OptionError(f"the space: {said}"))
    if not isinstance(data, Mapping) or not data:
        raise OptionError(f"{path} must name parameters, such as `lr: {{log: [0.001, 1]}}`; got {data!r:.60}")
    try:
        return tuple(Parameter.parse(name, entry) for name, entry in data.items())
    except OptionError as error:
        raise OptionError(f"{path}: {error}") from error


@dataclass(frozen=True)
class TuningRequest:
    """One tuning run. Raises ``OptionError`` for a value that breaks its rule."""

    script: str
    space: tuple[Parameter, ...]
    metric: str = option("accuracy", "Metric that the script reports")  # run.report(METRIC=...)
    arguments: tuple[str, ...] = ()  # of the script, the same for all trials
    maximize: bool = option(
        True,
        "Whether a larger or a smaller value of the metric is better",
        unless="--maximize",
        in_file="Whether a larger value of the metric is better",
        flags="--maximize/--minimize",
    )
    trials: int = option(20, "Number of trials", min=1, max=100_000)
    nodes: str = option(
        "local:1x1", "Nodes with their GPUs, shared by all trials: local:NODESxGPUS", metavar="NODES"
    )
    gpus_per_trial: int = option(1, "GPUs of each trial", min=1)
    max_gpus: int | None = option(
        None, "Maximum number of GPUs of a trial while some are free", unless="those of --gpus-per-trial"
    )
    epochs: int | None = option(
        None,
        "Epochs of a complete trial; --pruner curve and estimates of the remaining work need it",
        unless="unknown",
        in_file="Epochs of a complete trial; pruner curve and estimates of the remaining work need it",
        min=1,
        max=1e9,
    )
    pruner: Pruner = option(
        "halving",
        "Early stopping: halving (asynchronous successive halving), curve (learning curves) or none",
        unless="halving",
        metavar="PRUNER",
    )
    reduction_factor: int = option(
        3, "Reduction factor of successive halving: one trial in so many continues", min=2, max=1000
    )
    min_epochs: int = option(1, "Epochs before a trial may be stopped", min=1, max=1e9, command=False)
    sampler: Literal["tpe", "random"] = option(
        "tpe", "Sampler of hyperparameters: tpe or random", unless="tpe", metavar="SAMPLER"
    )
    seed: int = option(0, "Seed of the sampler", unless="0", min=0, max=2**32 - 1)
    run_id: str = option("", "ID of the tuning run", unless="generated")
    runs_dir: str = option(
        default_runs_dir,
        "Local directory of all runs",
        unless="runs/ in ~/.cache/ebbflow",
        metavar="DIR",
    )
    checkpoint_interval: float | None = option_like(TrainingRequest, "checkpoint_interval")
    adaptive: bool = option_like(TrainingRequest, "adaptive")
    termination_grace: float = option_like(TrainingRequest, "termination_grace")
    final_save_timeout: float = option_like(TrainingRequest, "final_save_timeout")
    spill_dir: str = option_like(TrainingRequest, "spill_dir")
    restart: bool = option(  # holds for one launch
        False,
        "With --resume: restart trials none of whose checkpoints is usable. Default: such trials fail",
        flags="--restart",
    )
    report: tuple[str, ...] = option_like(TrainingRequest, "report", command=True)

    def __post_init__(self) -> None:
        """Check everything that can be checked without starting anything."""
        if self.run_id:
            names.RUN.check(self.run_id)
        if not self.space:
            raise OptionError("space must name at least one hyperparameter; got none")
        if not _NAME.fullmatch(self.metric):
            raise OptionError(f"metric must be a name that the script reports; got {self.metric!r}")
        options.check(self)
        object.__setattr__(self, "report", options.check_report_paths(self.report))
        if self.pruner == "curve" and self.epochs is None:
            raise OptionError("pruner curve needs to know the epochs of a complete trial (--epochs)")
        if self.most_gpus < self.gpus_per_trial:
            raise OptionError(
                f"max_gpus must be >= gpus_per_trial ({self.gpus_per_trial}); got {self.max_gpus}"
            )
        there = sum(slots_of(self.nodes).values())
        if there < self.gpus_per_trial:
            raise OptionError(f"nodes {self.nodes} have {there} GPUs; a trial needs {self.gpus_per_trial}")
        self.trial("probe", self.arguments)  # which checks the rest

    @property
    def most_gpus(self) -> int:
        """Return the most GPUs of one trial."""
        return self.gpus_per_trial if self.max_gpus is None else self.max_gpus

    @property
    def run_directory(self) -> str:
        """Return the tuning run's own directory as its user names it; its trials' runs are in it."""
        return f"{self.runs_dir.rstrip('/')}/{self.run_id}"

    @cached_property
    def place(self) -> StorageLocation:
        """Return the tuning run's own directory."""
        return StorageLocation(self.runs_dir).under(self.run_id)

    @property
    def recorded(self) -> bool:
        """Return whether a tuning run of this ID is recorded."""
        return self.place.local and self.place.is_file(_FILE)

    @property
    def placement(self) -> dict[str, int]:
        """Return the slots of each node."""
        return slots_of(self.nodes)

    def trial(self, run: str, arguments: tuple[str, ...]) -> TrainingRequest:
        """Return the training of one trial."""
        return TrainingRequest(
            self.script,
            arguments,
            run_id=run,
            runs_dir=self.run_directory,
            nodes=self.nodes,
            min_gpus=self.gpus_per_trial,
            max_gpus=self.most_gpus,
            adaptive=self.adaptive,
            checkpoint_interval=self.checkpoint_interval,
            keep_checkpoints=1,
            termination_grace=self.termination_grace,
            final_save_timeout=self.final_save_timeout,
            spill_dir=self.spill_dir,
            restart=self.restart,
            preflight="never",
        )

    def save(self) -> None:
        """Write the request into the tuning run's directory, for ``--resume``. Raises ``StorageError``."""
        records.save(self.place.under(_FILE), {**asdict(self), "restart": False}, _FORMAT)

    @classmethod
    def load(cls, runs_dir: str, id: str, changes: Mapping[str, Any] | None = None) -> "TuningRequest":
        """Return the recorded request of tuning run ``id``, with ``changes``. Raises ``TrainingError``."""
        names.RUN.check(id)
        where = StorageLocation(runs_dir).under(f"{id}/{_FILE}")
        try:
            data = records.load(where, _FORMAT)
            space = tuple(Parameter(**{**p, "choices": tuple(p["choices"])}) for p in data["space"])
            values = {f.name: data[f.name] for f in fields(cls) if f.name in data}
            values |= {"space": space, "arguments": tuple(data["arguments"]), "runs_dir": runs_dir}
            values |= {"report": tuple(data["report"])}
        except StorageError as error:
            raise TrainingError(f"there is no tuning run {id!r} in {runs_dir} to resume: {error}") from error
        except records.OtherVersionError:
            raise TrainingError(
                f"tuning run {id} was started by another version of Ebbflow; resume it with that version"
            ) from None
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise TrainingError(
                f"{where} is damaged ({error}); restore it from a backup, or start a new tuning run"
            ) from error
        return cls(**(values | dict(changes or {})))
