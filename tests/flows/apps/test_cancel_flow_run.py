"""``ebbflow apps cancel`` of an app that is a flow run: through Prefect's API where a runner acts on it."""

import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from flowcases import eventually
from typer.testing import CliRunner

from ebbflow.flows.cli import app
from ebbflow.infra.ledger import Ledger
from ebbflow.planners.model.ledger import AppEntered, AppMoved, AppSpec
from ebbflow.tasks.apps.cancelling import cancel_id

pytestmark = pytest.mark.prefect


def cancel(id_: str, *words: str) -> Any:
    return CliRunner().invoke(app, ["apps", "cancel", id_, "--yes", *words])


@pytest.fixture
def ledger(home: Path) -> Any:
    with Ledger.open() as made:
        yield made


@pytest.fixture
def running(prefect_server: str) -> Callable[..., str]:
    """Return what makes a run of a flow that runs, of a deployment or by itself, and returns its ID."""
    from prefect import flow
    from prefect.client.orchestration import get_client
    from prefect.states import Running

    @flow(name="an-app")
    def some() -> None: ...

    def make(*, deployed: bool) -> str:
        with get_client(sync_client=True) as client:
            if not deployed:
                return str(client.create_flow_run(some, state=Running()).id)
            made = client.create_deployment(flow_id=client.create_flow(some), name="an-app")
            run = client.create_flow_run_from_deployment(made)
            client.set_flow_run_state(run.id, Running(), force=True)
            return str(run.id)

    return make


def state(run: str) -> str:
    from prefect.client.orchestration import get_client

    with get_client(sync_client=True) as client:
        found = client.read_flow_run(UUID(run)).state
    return found.type.value if found is not None else ""


def ends_once(ledger: Ledger, id_: str, told: Callable[[], bool]) -> threading.Thread:
    """Have the app stop once it is ``told``."""

    def work() -> None:
        eventually(told)
        ledger.write([AppMoved(id_, "stopped", "cancelled")])

    thread = threading.Thread(target=work)
    thread.start()
    return thread


def test_a_run_of_a_deployment_is_cancelled_by_prefect(ledger: Ledger, running: Callable[..., str]) -> None:
    run = running(deployed=True)
    ledger.write([AppEntered(AppSpec("fit", "training", flow_run=run)), AppMoved("fit", "running")])
    runner = ends_once(ledger, "fit", lambda: state(run) == "CANCELLING")
    done = cancel("fit")
    runner.join()
    assert done.exit_code == 0, done.output
    assert f"flow run {run} is Cancelling" in done.stderr
    assert "fit is stopped" in done.stderr
    assert ledger.reported_at(cancel_id("fit")) is None, "its runner ends the process, once"


def test_a_runner_that_has_not_acted_is_not_waited_for_again(
    ledger: Ledger, running: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = running(deployed=True)
    ledger.write([AppEntered(AppSpec("fit", "training", flow_run=run)), AppMoved("fit", "running")])
    late = cancel("fit", "--timeout", "1s")
    assert (late.exit_code, "Prefect's runner ends its process" in late.output) == (1, True)
    monkeypatch.setattr("ebbflow.flows.apps.flow_run.RUNNER", 0.0)
    process = ends_once(ledger, "fit", lambda: ledger.reported_at(cancel_id("fit")) is not None)
    done = cancel("fit", "--json")
    process.join()
    assert json.loads(done.stdout)["phase"] == "stopped"
    assert done.stderr == ""


@pytest.mark.parametrize("case", ["no deployment", "no API", "no answer"])
def test_where_nobody_acts_on_the_state_the_process_is_asked_by_the_ledger(
    ledger: Ledger, running: Callable[..., str], case: str
) -> None:
    from prefect.settings import PREFECT_API_URL, temporary_settings

    run = running(deployed=case != "no deployment")
    ledger.write([AppEntered(AppSpec("fit", "training", flow_run=run)), AppMoved("fit", "running")])
    process = ends_once(ledger, "fit", lambda: ledger.reported_at(cancel_id("fit")) is not None)
    url = {"no API": None, "no answer": "http://127.0.0.1:9/api"}
    with temporary_settings({PREFECT_API_URL: url[case]} if case in url else {}):
        done = cancel("fit")
    process.join()
    assert done.exit_code == 0, done.output
    assert ("Prefect's API did not answer" in done.stderr) == (case == "no answer")
    assert "fit is stopped" in done.stderr
    assert state(run) == "RUNNING"
