"""Where a training runs: its nodes, and the launcher on them."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from ebbflow.infra.clock import Clock
from ebbflow.infra.packages import require
from ebbflow.infra.protocols import Decide, Trainer
from ebbflow.infra.training.process.channel import Report
from ebbflow.tasks.training.capacity import Nodes
from ebbflow.tasks.training.code import variables_of
from ebbflow.tasks.training.faults import FaultTarget
from ebbflow.tasks.training.request import TrainingRequest


class Site(Protocol):
    """Where a run takes place: its nodes, and the launcher on them."""

    @property
    def nodes(self) -> FaultTarget:
        """Return what scripted faults happen to."""
        ...

    def trainer(
        self, request: TrainingRequest, decide: Decide, record_report: Callable[[Report], None]
    ) -> Trainer:
        """Return a launcher that has launched nothing yet."""
        ...


class LocalSite:
    """Nodes on this machine, each a group of processes of its own."""

    def __init__(self, request: TrainingRequest) -> None:
        from ebbflow.infra.training.local_nodes import LocalNodes

        self._pool = LocalNodes(
            cpus=request.cpus_per_slot, grace=request.termination_grace, environment=variables_of(request)
        )

    @property
    def nodes(self) -> FaultTarget:
        return self._pool

    def trainer(
        self, request: TrainingRequest, decide: Decide, record_report: Callable[[Report], None]
    ) -> Trainer:
        from ebbflow.infra.training.launcher.trainer import TorchTrainer

        logs = request_logs(request)
        return TorchTrainer(
            self._pool,
            logs=logs,
            decide=decide,
            node_timeout=max(request.node_timeout, 1e-3),
            variables=variables_of(request),
            on_report=record_report,
            replica=request.replica_gpus,
        )


@contextmanager
def open_site(
    request: TrainingRequest, clock: Clock, given: Site | None = None
) -> Iterator[tuple[Site, Nodes | None]]:
    """Open where ``request`` runs: this machine, or the pool of a fleet, which states what nodes the run begins with.

    A site that is ``given`` is open and stays so.

    Raises ``EbbflowError``: packages that are missing, a pool that there is not or that has too few free instances.
    """
    if given is not None:
        yield given, None
        return
    if not request.pool:
        require("torch", "a training", "train")
        yield LocalSite(request), None
        return
    from ebbflow.tasks.fleet.request import FleetRequest
    from ebbflow.tasks.fleet.steps import opened
    from ebbflow.tasks.training.aws import AwsSite

    with opened(FleetRequest(), clock) as cluster, AwsSite(request, cluster, clock) as site:
        yield site, site.take(request.node_timeout)


def request_logs(request: TrainingRequest) -> Path | None:
    """Return where the processes' logs go; ``None``: into the run's directory, which is local."""
    from ebbflow.infra.storage.files import home

    return home() / "run-logs" / request.run_id if "://" in request.runs_dir else None
