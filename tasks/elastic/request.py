"""What is asked of an elastic job: by the command line, and by an app of the cluster."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ebbflow.infra.storage.places import StorageLocation
from ebbflow.planners.errors import OptionError
from ebbflow.planners.model.options import option
from ebbflow.tasks.faults import Fault

if TYPE_CHECKING:
    from ebbflow.infra.elastic import Application

APPS = ("mlr", "kmeans", "lda")
_OWN = re.compile(r"(?:[A-Za-z_]\w*/)*[A-Za-z_]\w*\.py:[A-Za-z_]\w*")


@dataclass(frozen=True, slots=True)
class ElasticRequest:
    """What to run."""

    app: str
    input: str | None = None  # an .npz file; None: generated data
    classes: int = option(10, "Number of classes, clusters or topics", min=1)
    executors: int = option(16, "Number of executors; about four for each worker there may ever be", min=1)
    iterations: int = option(200, "Number of iterations over all data; of lda, epochs", min=1)
    staleness: int = option(0, "Iterations that a read of mlr may miss; 0 waits for all workers", min=0)
    workers: int = 2
    faults: Sequence[Fault] = ()
    state_dir: str | None = None
    resume: bool = False
    restart: bool = False  # with resume: from the beginning where no snapshot is whole
    partial_recovery: bool = False  # recovery of lost parameters alone
    workdir: str = option(
        "",
        "Directory of the user's application, FILE.py:CLASS; in a pipeline also a git reference",
        unless=None,
        metavar="DIR",
    )
    parameters: Mapping[str, Any] = field(
        default_factory=dict
    )  # of the user's application, beside those above

    def __post_init__(self) -> None:
        if self.app not in APPS and not _OWN.fullmatch(self.app):
            raise OptionError(
                f"app must be one of {', '.join(APPS)}, or FILE.py:CLASS of the user's own; got {self.app!r}"
            )
        for name in ("workdir", "parameters"):
            if getattr(self, name) and not self.own:
                raise OptionError(
                    f"{name} is for an application of the user's own (FILE.py:CLASS); got {self.app}"
                )
        for name in ("classes", "executors", "iterations", "workers"):
            if getattr(self, name) < 1:
                raise OptionError(f"{name} must be >= 1; got {getattr(self, name)}")
        if self.resume and self.state_dir is None:
            raise OptionError("resume needs the directory of the earlier job (--state-dir)")
        if self.restart and not self.resume:
            raise OptionError("restart goes with resume; a new job starts from the beginning anyway")
        if self.staleness < 0:
            raise OptionError(f"staleness must be >= 0; got {self.staleness}")

    @property
    def own(self) -> bool:
        """Return whether the application is the user's own."""
        return self.app not in APPS

    @property
    def script(self) -> str:
        """Return the file of the user's own application, below ``workdir``."""
        return self.app.partition(":")[0]

    def application(self, data: str, directory: Path | None = None) -> "Application":
        """Return the application on the file ``data``; one of the user's own is imported from ``directory``.

        Raises ``OptionError`` for a class that cannot be imported or made.
        """
        if self.own:
            return own_application(self, data, directory or Path(self.workdir or "."))
        from ebbflow.infra.elastic.apps.kmeans import KMeans
        from ebbflow.infra.elastic.apps.lda import Lda
        from ebbflow.infra.elastic.apps.mlr import Mlr

        if self.app == "mlr":
            return Mlr(
                data, self.classes, self.executors, self.iterations, self.staleness, exact=not self.staleness
            )
        if self.app == "kmeans":
            return KMeans(data, self.classes, self.executors, self.iterations)
        return Lda(data, self.classes, self.executors, self.iterations)


def own_application(request: ElasticRequest, data: str, directory: Path) -> "Application":
    """Return the user's application: its class is called with ``data``, and by name with all else that was given.

    It is imported after everything that is installed, so that its files take the place of nothing. Raises
    ``OptionError``.
    """
    import importlib
    import sys

    from ebbflow.infra.elastic import Application

    file, _, name = request.app.partition(":")
    path = (directory / file).resolve()
    if not path.is_file():
        raise OptionError(f"app {request.app}: there is no file {file} in {directory}")
    if str(directory.resolve()) not in sys.path:
        sys.path.append(str(directory.resolve()))
    importlib.invalidate_caches()
    given = {"executors": request.executors, "iterations": request.iterations, **request.parameters}
    try:
        module = importlib.import_module(file.removesuffix(".py").replace("/", "."))
        if Path(module.__file__ or "").resolve() != path:
            raise OptionError(
                f"app {request.app}: {module.__name__} is another module of this process, {module.__file__}; rename "
                "the file"
            )
        kind = getattr(module, name)
        if not (isinstance(kind, type) and issubclass(kind, Application)):
            raise OptionError(f"app {request.app}: {name} must be a subclass of ebbflow.Application")
        return kind(data, **given)
    except OptionError:
        raise
    except Exception as error:  # whatever the user's code raises
        raise OptionError(f"app {request.app} cannot be made: {type(error).__name__}: {error}") from error


@dataclass(frozen=True)
class ElasticAppRequest:
    """An elastic job as an app of the cluster, each of whose workers runs on one leased slot.

    Raises ``OptionError``.
    """

    job: ElasticRequest
    run_id: str
    runs_dir: str  # directory of all runs, local or s3://: input, result and lock are in RUNS_DIR/RUN_ID
    state_dir: str  # local directory of the job: snapshots, which the process that leads the job writes
    name: str = ""
    label: str = "y"  # column of a table with the class of each row, for mlr
    workers: int = 1
    max_workers: int = 1
    termination_grace: float = 30.0  # s for a snapshot and the release of preempted slots

    def __post_init__(self) -> None:
        if self.job.input is None and not self.job.own:
            raise OptionError("input must name the data of an elastic job that runs on leases; got none")
        if self.job.own and not self.job.workdir:
            raise OptionError(f"workdir must name the directory of the application {self.job.app}; got none")
        if not 1 <= self.workers <= self.max_workers:
            raise OptionError(
                f"1 <= workers <= max_workers must hold; got {self.workers} and {self.max_workers}"
            )
        if self.max_workers > self.job.executors:
            raise OptionError(
                f"max_workers must be at most executors, which are what workers hold; got {self.max_workers} "
                f"and {self.job.executors}"
            )

    @property
    def place(self) -> StorageLocation:
        """Return the run's own directory."""
        return StorageLocation(self.runs_dir).under(self.run_id)

    # as the code of a training

    @property
    def script(self) -> str:
        """Return the file of the user's own application."""
        return self.job.script

    @property
    def workdir(self) -> str:
        """Return where that is packed from."""
        return self.job.workdir

    @property
    def requirements(self) -> str:
        """Return nothing: the application runs with what is installed, since its driver runs where the job is led."""
        return ""

    @property
    def setup(self) -> str:
        """Return nothing; see ``requirements``."""
        return ""

    def restarted(self, restart: bool) -> "ElasticAppRequest":
        """Return the request; with ``restart`` it begins again where no snapshot can be used."""
        job = replace(self.job, restart=restart, resume=restart, state_dir=self.state_dir)
        return replace(self, job=job) if restart else self
