"""``capacity_loop`` under a Prefect server: states, events, artifacts, cancellation."""

import threading
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from ebbflow.infra.ledger import Ledger
from ebbflow.planners.errors import OptionError
from ebbflow.planners.model.capacity import Capacity, Node
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
