"""What a user requests of a tuning run: hyperparameters, trials, nodes; checked before anything starts."""

import json
import math
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from ebbflow.infra.errors import StorageError, TrainingError
from ebbflow.infra.storage import checksums, records, user_yaml
from ebbflow.infra.storage.filesystems import translated
from ebbflow.infra.storage.places import StorageLocation
from ebbflow.planners.errors import OptionError
from ebbflow.planners.model import names, options
from ebbflow.planners.model.options import option, option_like
from ebbflow.tasks.training import checks
from ebbflow.tasks.training.node_names import slots_of
from ebbflow.tasks.training.request import TrainingRequest, default_runs_dir

if TYPE_CHECKING:
    from ebbflow.infra.ledger.address import Address

LEDGER = "ledger"  # in place of a study's database: that of the ledger
SHARED = (
    "space", "metric", "arguments", "maximize", "trials", "epochs", "pruner", "reduction_factor", "min_epochs",
    "population_interval",
    "sampler", "seed", "run_id", "heartbeat_timeout",
)  # fmt: skip
"""Options that are the same in all processes of a tuning run whose study is in a database."""
CODE = ("workdir", "requirements", "setup")
"""Options that say what is packed, once, for all trials."""
Pruner = Literal["halving", "hyperband", "curve", "pbt", "none"]
RANKING = ("halving", "hyperband", "pbt")  # they compare trials after the same epochs

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
    workdir: str = option_like(TrainingRequest, "workdir", command=True)
    requirements: str = option_like(TrainingRequest, "requirements", command=True)
    setup: str = option_like(TrainingRequest, "setup", command=True)
    env: tuple[str, ...] = option_like(TrainingRequest, "env", command=True)
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
    parallel: int | None = option(
        None,
        "Maximum number of trials at once; with fewer than there are GPUs for, trials get up to --max-gpus",
        unless="as many as there are GPUs for",
        in_file="Maximum number of trials at once",
        min=1,
        max=100_000,
    )
    allocate: Literal["promising", "equal"] | None = option(
        None,
        "Which trials get more GPUs than the fewest of a trial: promising (those that rank higher, as far as their "
        "goodput grows) or equal (the one with the least GPU time; none is moved while its trial runs)",
        unless="promising for pruners that rank trials (halving, hyperband, pbt), else equal",
        metavar="RULE",
    )
    epochs: int | None = option(
        None,
        "Epochs of a complete trial; pruners but halving and none, and estimates of the remaining work, need it",
        unless="unknown",
        min=1,
        max=1e9,
    )
    pruner: Pruner = option(
        "halving",
        "Early stopping: halving (asynchronous successive halving), hyperband (several of those, which begin to stop "
        "trials at different epochs), curve (learning curves), pbt (population-based training: the worst copy the "
        "best instead of being stopped) or none",
        unless="halving",
        metavar="PRUNER",
    )
    reduction_factor: int = option(
        3, "Reduction factor of successive halving: one trial in so many continues", min=2, max=1000
    )
    population_interval: int = option(
        1,
        "With --pruner pbt: epochs between two comparisons of a trial with the others",
        in_file="With pruner pbt: epochs between two comparisons of a trial with the others",
        min=1,
        max=1e9,
    )
    min_epochs: int = option(1, "Epochs before a trial may be stopped", min=1, max=1e9, command=False)
    sampler: Literal["tpe", "random"] = option(
        "tpe", "Sampler of hyperparameters: tpe or random", unless="tpe", metavar="SAMPLER"
    )
    seed: int = option(0, "Seed of the sampler", unless="0", min=0, max=2**32 - 1)
    run_id: str = option("", "ID of the tuning run", unless="generated")
    runs_dir: str = option(
        default_runs_dir,
        "Directory of all runs; on S3 with --study only",
        unless="runs/ in ~/.cache/ebbflow",
        in_file="Directory of all runs",
        metavar="DIR",
    )
    study: str = option(
        "",
        "Database of the study, whose trials all processes share that join (--join): postgresql://HOST/NAME, "
        "sqlite:////PATH, or ledger for that of EBBFLOW_LEDGER",
        unless="a file of one process, in the run's directory",
        in_file="Database of the study: postgresql://HOST/NAME, sqlite:////PATH, or ledger for that of the ledger",
        metavar="DATABASE",
    )
    heartbeat_timeout: float = option(
        30.0,
        "With --study: time without a sign of life of a process after which others run its trials",
        in_file="With study: time without a sign of life of a process after which others run its trials",
        unit="s",
        min=1,
    )
    track: tuple[str, ...] = option_like(TrainingRequest, "track", command=True)
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
        object.__setattr__(self, "track", checks.checked_trackers(self.track))
        if self.study and self.study != LEDGER:
            from ebbflow.infra.ledger.address import recorded_study

            object.__setattr__(self, "study", recorded_study(self.study))
        if "://" in self.runs_dir and not self.study:
            raise OptionError(
                "runs_dir of a tuning run must be local, since its study is a file beside its trials, or name a "
                f"database for the study (--study); got {self.runs_dir}"
            )
        if self.pruner in ("curve", "hyperband", "pbt") and self.epochs is None:
            raise OptionError(f"pruner {self.pruner} needs to know the epochs of a complete trial (--epochs)")
        if self.allocate == "promising" and self.pruner not in RANKING:
            raise OptionError(
                f"allocate promising needs a pruner that ranks trials ({', '.join(RANKING)}); got {self.pruner}"
            )
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
    def by_promise(self) -> bool:
        """Return whether GPUs move to the trials that rank higher."""
        more = self.most_gpus > self.gpus_per_trial  # than a trial needs
        return more and self.allocate != "equal" and self.pruner in RANKING

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
        """Return whether a tuning run of this ID is recorded in its directory. Raises ``StorageError``."""
        with translated(f"read {self.place}"):
            return self.place.is_file(_FILE)

    def study_address(self, ledger: "Address | None" = None) -> "Address | None":
        """Return the database of the study; ``None``: it is a file. ``ledger`` is that of the ledger.

        Raises ``OptionError`` or ``LedgerError``.
        """
        if not self.study:
            return None
        if self.study == LEDGER and ledger is not None:
            return ledger
        from ebbflow.infra.ledger.address import parse

        return parse(None if self.study == LEDGER else self.study)

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
            keep_checkpoints=2
            if self.pruner == "pbt"
            else 1,  # others copy the newest while the next is written
            script_hyperparameters=self.pruner == "pbt",
            termination_grace=self.termination_grace,
            final_save_timeout=self.final_save_timeout,
            spill_dir=self.spill_dir,
            restart=self.restart,
            preflight="never",
            track=self.track,
            workdir=self.workdir,
            requirements=self.requirements,
            setup=self.setup,
            env=self.env,
            name=f"{self.run_id}/{run}" if self.track else "",
        )

    def save(self) -> None:
        """Write the request into the tuning run's directory, for ``--resume``. Raises ``StorageError``."""
        records.save(self.place.under(_FILE), self._content, _FORMAT)

    @property
    def _content(self) -> dict[str, Any]:
        return {**asdict(self), "restart": False}

    @property
    def shared(self) -> dict[str, Any]:
        """Return what is kept in the study for those that join; the digest of a script without workdir is in it."""
        content = {**self._content, "format": _FORMAT}
        if self.requirements:
            content["requirements"] = str(Path(self.requirements).expanduser().absolute())
        if self.workdir:  # whose digest ``TuningCode`` knows
            return content | {"workdir": checks.absolute_source(self.workdir), "script_xxh64": ""}
        content["script"] = str(Path(self.script).absolute())
        return content | {"script_xxh64": checksums.of_place(StorageLocation(self.script))}

    def check_shared(self, content: Mapping[str, Any]) -> None:
        """Raise ``OptionError`` where this differs from ``shared`` of the process that began the study."""
        own = json.loads(json.dumps(self.shared))
        for name in (*SHARED, *(("script",) if self.workdir else ())):
            if own[name] != content.get(name):
                raise OptionError(
                    f"{name} is the same in all processes of tuning run {self.run_id}: {content.get(name)!r}; got "
                    f"{own[name]!r}"
                )
        if own["script_xxh64"] != content.get("script_xxh64"):
            raise OptionError(
                f"{self.script} is another script than the one of {self.run_id} (xxh64 {own['script_xxh64']}, there "
                f"{content.get('script_xxh64')}): join with the same"
            )

    @classmethod
    def joined(cls, content: Mapping[str, Any], study: str, changes: Mapping[str, Any]) -> "TuningRequest":
        """Return the request of a process that joins the tuning run whose ``shared`` content this is.

        Where runs are kept is its own affair, unless that is on S3, or is there. Raises ``OptionError`` for a script
        or an option of ``SHARED`` that differs, ``TrainingError`` for a tuning run of another version of Ebbflow.
        """
        try:
            if content["format"] != _FORMAT:
                raise TrainingError(
                    f"tuning run {content['run_id']} was begun by another version of Ebbflow; join with that"
                )
            values = _values(cls, content)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise TrainingError(
                f"the request in the study is damaged ({error}); begin a new study"
            ) from error
        there = "://" in values["runs_dir"] or Path(values["runs_dir"], values["run_id"], _FILE).is_file()
        values |= {} if there else {"runs_dir": default_runs_dir()}
        request = cls(**(values | {"study": study, "report": ()} | dict(changes)))
        request.check_shared(content)
        return request

    @classmethod
    def load(cls, runs_dir: str, id: str, changes: Mapping[str, Any] | None = None) -> "TuningRequest":
        """Return the recorded request of tuning run ``id``, with ``changes``.

        Raises ``TrainingError``, and ``OptionError`` for a change of its code.
        """
        names.RUN.check(id)
        if wrong := [name for name in CODE if name in (changes or {})]:
            raise OptionError(
                f"{wrong[0]} is that of the recorded tuning run, whose trials all have the same code; leave it out"
            )
        where = StorageLocation(runs_dir).under(f"{id}/{_FILE}")
        try:
            data = records.load(where, _FORMAT)
            values = _values(cls, data) | {"runs_dir": runs_dir}
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


def _values(request: type, data: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a request that was written down."""
    values = {f.name: data[f.name] for f in fields(request) if f.name in data}
    space = tuple(Parameter(**{**p, "choices": tuple(p["choices"])}) for p in data["space"])
    tuples = {name: tuple(data.get(name, ())) for name in ("arguments", "report", "track", "env")}
    return values | {"space": space} | tuples
