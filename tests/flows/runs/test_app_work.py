"""Work of a flow run that may be an app of a cluster."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from prefect import flow
from prefect.runtime import task_run

from ebbflow.flows.runs.work import AppWork

pytestmark = [pytest.mark.prefect, pytest.mark.usefixtures("prefect_server")]


class Cluster:
    """Tells what it is opened for."""

    @contextmanager
    def opened(self) -> Iterator[str]:
        yield "ledger"

    @contextmanager
    def nodes(self, app: str, grace: float) -> Iterator[tuple[str, str]]:
        yield f"nodes of {app} for {grace:g} s", "launcher"


def done(cluster: Any, **options: Any) -> tuple[Any, ...]:
    def as_app() -> Callable[..., tuple[Any, ...]]:
        return lambda ledger, pool, *, make: (task_run.task_name, task_run.name, ledger, pool, make)

    def alone() -> tuple[Any, ...]:
        return task_run.task_name, task_run.name

    @flow
    def begun() -> Any:
        return AppWork("fit", 5.0, cluster, alone, as_app, lambda: None).run("run-fit", **options)

    found: tuple[Any, ...] = begun()
    return found


@pytest.mark.parametrize("attend", [True, False])
def test_without_a_cluster_it_is_done_alone_in_one_task_run(attend: bool) -> None:
    assert done(None, attend=attend) == ("run-fit", "fit")


def test_in_a_cluster_it_is_done_on_leases_in_one_task_run() -> None:
    assert done(Cluster()) == ("run-fit", "fit", "ledger", "nodes of fit for 5 s", "launcher")
