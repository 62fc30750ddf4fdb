"""``capacity_loop`` under a Prefect server: states, events, artifacts, cancellation."""

import os
import signal
import threading
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ebbflow.infra.ledger import Ledger
from ebbflow.planners.errors import OptionError
from ebbflow.planners.model.capacity import Capacity, Node
from ebbflow.planners.model.ledger import AppEntered, AppMoved
from ebbflow.tasks.loop import LoopEvent
from ebbflow.tasks.loop.opening import Nodes
from ebbflow.tasks.loop.row import STOP, stop_request


class OneNode:
    def capacity(self) -> Capacity:
        return Capacity(1, (Node("n0", 4, 16.0, gpus=2),))


@contextmanager
def one_node(*_: Any) -> Any:
    yield Nodes(OneNode())


def test_every_kind_of_event_has_a_name_of_its_own() -> None:
    from typing import get_args

    from ebbflow.flows.capacity import EVENTS
    from ebbflow.tasks.loop.listening import LoopEventKind

    assert set(EVENTS) == set(get_args(LoopEventKind))
    assert len(set(EVENTS.values())) == len(EVENTS)


def test_events_are_related_to_the_runs_they_are_about(monkeypatch: pytest.MonkeyPatch) -> None:
    from ebbflow.flows import capacity

    emitted: list[dict[str, Any]] = []
    crashed: list[str] = []
    monkeypatch.setattr(capacity, "mark_crashed", lambda run, why, logger: crashed.append(run))
    logger = SimpleNamespace(info=lambda *_: None)
    teller = capacity.PrefectTeller("run-1", "lab", lambda **given: emitted.append(given), logger)
    teller.heard(LoopEvent("lost", "a is lost", 5.0, {"app": "a", "flow_run": "run-2"}))
    (event,) = emitted
    assert event["event"] == "ebbflow.app.lost"
    assert event["resource"]["prefect.resource.id"] == "ebbflow.cluster.lab"
    assert {one["prefect.resource.id"] for one in event["related"]} == {
        "prefect.flow-run.run-1",
        "prefect.flow-run.run-2",
    }
    assert event["payload"]["app"] == "a"
    assert crashed == ["run-2"]


def test_a_termination_ends_the_loop_in_order_and_then_prefects_handler_has_its_say() -> None:
    from ebbflow.flows.capacity import stopped_by_signal

    came: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _: came.append(number))
    try:
        for then in (True, False):
            stop = threading.Event()
            with stopped_by_signal(stop, then):
                os.kill(os.getpid(), signal.SIGTERM)
                assert stop.wait(30)
                assert len(came) == (not then)
        assert came == [signal.SIGTERM]
    finally:
        signal.signal(signal.SIGTERM, before)


def test_a_lost_app_is_started_again_by_its_deployment(tmp_path: Path) -> None:
    from ebbflow.flows.capacity_resume import resuming
    from ebbflow.tasks.apps.specs import training_spec
    from ebbflow.tasks.training_request import TrainingRequest

    (tmp_path / "fit.py").write_text("")
    request = TrainingRequest(str(tmp_path / "fit.py"), id="digits", folder=str(tmp_path / "runs"))
    request.save()
    runs: list[tuple[str, dict[str, Any]]] = []
    with Ledger.open() as ledger:
        mine = training_spec(request, deployment="train/spot")
        other = replace(training_spec(request), id="started-by-hand")
        ledger.write([AppEntered(mine), AppEntered(other)])
        ledger.write([AppMoved(one.id, "lost", "silent") for one in (mine, other)])
        with resuming(ledger, lambda name, **given: runs.append((name, given["parameters"])), 0.05):
            for _ in range(600):
                if runs:
                    break
                ledger.clock.sleep(0.1)
    assert runs == [
        ("train/spot", {"script": request.script, "id": "digits", "folder": request.folder, "resume": True})
    ]


@pytest.mark.prefect
@pytest.mark.usefixtures("prefect_server")
class TestUnderAServer:
    def test_a_loop_is_a_flow_run_until_it_is_asked_to_stop(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from ebbflow.flows.capacity import capacity_loop

        monkeypatch.setattr("ebbflow.tasks.loop.opening.opened_nodes", one_node)
        with Ledger.open() as ledger:

            def ask() -> None:
                for _ in range(1200):
                    if ledger.state().nodes:
                        break
                    ledger.clock.sleep(0.05)
                leader = ledger.leader()
                assert leader is not None
                ledger.report(STOP, stop_request(leader.token, ledger.clock.now()))

            asking = threading.Thread(target=ask)
            asking.start()
            figures = capacity_loop(cluster="local", interval=5.0)
            asking.join(60)
            assert figures["cycles"] >= 1
            leader = ledger.leader()
            assert leader is not None
            assert leader.until == 0  # it has resigned

    def test_a_parameter_with_a_password_is_refused(self) -> None:
        from ebbflow.flows.capacity import capacity_loop

        with pytest.raises(OptionError, match="ledger_secret") as caught:
            capacity_loop(ledger="postgresql://ebbflow:hidden@db/ebbflow")
        assert "hidden" not in str(caught.value)

    def test_an_address_comes_from_a_secret_or_a_variable(self) -> None:
        from prefect.blocks.system import Secret
        from prefect.variables import Variable

        from ebbflow.flows.capacity import ledger_address

        Secret(value="postgresql://ebbflow@db/one").save("ledger-block", overwrite=True)
        Variable.set("ledger_variable", "postgresql://ebbflow@db/two", overwrite=True)
        assert ledger_address("ledger-block") == "postgresql://ebbflow@db/one"
        assert ledger_address("ledger_variable") == "postgresql://ebbflow@db/two"
        with pytest.raises(OptionError, match="prefect block create secret"):
            ledger_address("neither")

    def test_a_run_whose_process_is_gone_is_marked_and_one_that_ended_is_not(self) -> None:
        import logging

        from prefect import flow
        from prefect.client.orchestration import get_client
        from prefect.states import Completed, Running

        from ebbflow.flows.capacity import mark_crashed

        @flow(name="some-app")
        def some() -> None: ...

        log = logging.getLogger(__name__)
        with get_client(sync_client=True) as client:
            runs = [client.create_flow_run(some, state=Running()) for _ in range(2)]
            client.set_flow_run_state(runs[1].id, Completed(), force=True)
            for run in runs:
                mark_crashed(str(run.id), "its process is gone", log)
            states = [client.read_flow_run(run.id).state for run in runs]
        assert [state.type.value for state in states if state] == ["CRASHED", "COMPLETED"]
        mark_crashed("no-run", "nobody waits for it", log)
