"""What is asked of an elastic job: by the command line, and by an app of the cluster."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ebbflow.infra.storage.places import StorageLocation
from ebbflow.planners.errors import OptionError
from ebbflow.planners.model.options import option
from ebbflow.tasks.faults import Fault

if TYPE_CHECKING:
    from ebbflow.infra.elastic import Application

APPS = ("mlr", "kmeans", "lda")


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

    def __post_init__(self) -> None:
        if self.app not in APPS:
            raise OptionError(f"applications are {', '.join(APPS)}; got {self.app!r}")
        for name in ("classes", "executors", "iterations", "workers"):
            if getattr(self, name) < 1:
                raise OptionError(f"{name} must be >= 1; got {getattr(self, name)}")
        if self.resume and self.state_dir is None:
            raise OptionError("resume needs the directory of the earlier job (--state-dir)")
        if self.restart and not self.resume:
            raise OptionError("restart goes with resume; a new job starts from the beginning anyway")
        if self.staleness < 0:
            raise OptionError(f"staleness must be >= 0; got {self.staleness}")

    def application(self, data: str) -> "Application":
        """Return the application on the file ``data``."""
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
        if self.job.input is None:
            raise OptionError("input must name the data of an elastic job that runs on leases; got none")
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

    def restarted(self, restart: bool) -> "ElasticAppRequest":
        """Return the request; with ``restart`` it begins again where no snapshot can be used."""
        job = replace(self.job, restart=restart, resume=restart, state_dir=self.state_dir)
        return replace(self, job=job) if restart else self
