"""Work of a flow run that may be an app of a cluster: a training, a search."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, TypeVar

from prefect import task
from prefect.cache_policies import NO_CACHE

from ebbflow.flows.runs.cancelling import attended
from ebbflow.tasks.training.leased.place import ClusterPlace

Report = TypeVar("Report")


@dataclass(frozen=True)
class AppWork(Generic[Report]):
    """What is done, in one task run. ``leave`` is called from another thread when the flow run is cancelled."""

    name: str  # of the task run, and of the app
    grace: float  # s to save and leave in
    cluster: ClusterPlace | None  # that it is an app of, if it is
    alone: Callable[[], Report]
    as_app: Callable[
        [], Callable[..., Report]
    ]  # returns what works by a ledger, what makes pools, and ``make``
    leave: Callable[[], None]

    def run(self, task_name: str, *, attend: bool = True) -> Report:
        """Do the work and return what came of it.

        ``attend`` lets it leave in order when this thread is interrupted, for callers that do not see to it.
        """
        run = partial(_run.with_options(name=task_name), self.name, self._do)
        return attended(run, self.leave) if attend else run()

    def _do(self) -> Report:
        if self.cluster is None:
            return self.alone()
        app = self.as_app()
        with self.cluster.opened() as ledger, self.cluster.nodes(self.name, self.grace) as (pool, make):
            return app(ledger, pool, make=make)


@task(task_run_name="{name}", cache_policy=NO_CACHE, persist_result=False)
def _run(name: str, work: Callable[[], Any]) -> Any:
    """Own the work from its start to its end."""
    return work()
