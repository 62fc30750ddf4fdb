"""``capacity_loop`` under a Prefect server: states, events, artifacts, cancellation."""

import threading
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from uuid import uuid4

import pytest

from ebbflow.infra.ledger import Ledger
from ebbflow.planners.errors import OptionError
from ebbflow.planners.model.capacity import Capacity, Node
from ebbflow.planners.model.ledger import AppSpec
from ebbflow.tasks.apps.loop_report import STOP, stop_request
from ebbflow.tasks.capacity.listeners import LoopEvent
from ebbflow.tasks.capacity.node_sources import Nodes
from ebbflow.tasks.capacity.recovery import LostApp


class OneNode:
    def capacity(self) -> Capacity:
        return Capacity(1, (Node("n0", 4, 16.0, gpus=2),))


@contextmanager
def one_node(*_: Any) -> Any:
    yield Nodes(OneNode())


def test_every_kind_of_event_has_a_name_of_its_own() -> None:
    from typing import get_args

    from ebbflow.flows.capacity.flow import EVENTS
    from ebbflow.tasks.capacity.listeners import LoopEventKind

    assert set(EVENTS) == set(get_args(LoopEventKind))
    assert len(set(EVENTS.values())) == len(EVENTS)


def test_events_are_related_to_the_runs_they_are_about() -> None:
    from ebbflow.flows.capacity.flow import PrefectLoopListener

    emitted: list[dict[str, Any]] = []
    logger = SimpleNamespace(info=lambda *_: None)
    teller = PrefectLoopListener("run-1", "lab", lambda **given: emitted.append(given), logger)
    teller.on_event(LoopEvent("lost", "a is lost", 5.0, {"app": "a", "flow_run": "run-2"}))
    (event,) = emitted
    assert event["event"] == "ebbflow.app.lost"
    assert event["resource"]["prefect.resource.id"] == "ebbflow.cluster.lab"
    assert {one["prefect.resource.id"] for one in event["related"]} == {
        "prefect.flow-run.run-1",
        "prefect.flow-run.run-2",
    }
    assert event["payload"]["app"] == "a"


def test_a_resumed_app_is_an_event_related_to_the_runs_before_and_after() -> None:
    from ebbflow.flows.capacity.flow import PrefectLoopListener
    from ebbflow.flows.capacity.flow_runs import RunView

    emitted: list[dict[str, Any]] = []
    logger = SimpleNamespace(info=lambda *_: None)
    teller = PrefectLoopListener("loop", "lab", lambda **given: emitted.append(given), logger)
    spec = AppSpec("a", "training", flow_run="before")
    teller.resumed(
        LostApp(spec, None, 0.0, 2, 0.0, "silent", "", 1), RunView("after", "new", "train", "SCHEDULED")
    )
    (event,) = emitted
    assert event["event"] == "ebbflow.app.resumed"
    roles = {one["prefect.resource.role"]: one["prefect.resource.id"] for one in event["related"]}
    assert roles == {
        "flow-run": "prefect.flow-run.loop",
        "app": "prefect.flow-run.after",
        "lost": "prefect.flow-run.before",
    }
    assert event["payload"]["losses"] == 2
    assert event["payload"]["try"] == 2


@pytest.mark.prefect
@pytest.mark.usefixtures("prefect_server")
class TestUnderAServer:
    def test_a_loop_is_a_flow_run_until_it_is_asked_to_stop(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from ebbflow.flows.capacity.flow import capacity_loop

        monkeypatch.setattr("ebbflow.tasks.capacity.node_sources.opened_nodes", one_node)
        monkeypatch.setattr("ebbflow.tasks.capacity.node_sources.check_source", lambda *_: None)
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
            figures = capacity_loop(cluster="local", auction_interval=5.0)
            asking.join(150)
            assert figures["cycles"] >= 1
            leader = ledger.leader()
            assert leader is not None
            assert leader.until == 0  # it has resigned

    def test_a_parameter_with_a_password_is_refused(self) -> None:
        from prefect.client.orchestration import get_client

        from ebbflow.flows.capacity.flow import capacity_loop

        with pytest.raises(OptionError, match="ledger_secret") as caught:
            capacity_loop(ledger="postgresql://ebbflow:hidden@db/ebbflow")
        assert "hidden" not in str(caught.value)
        with get_client(sync_client=True) as client:
            assert not [run.name for run in client.read_flow_runs() if "hidden" in run.name]

    def test_code_that_a_parameter_or_a_block_names_is_not_imported(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        from ebbflow.flows.blocks import EbbflowCluster
        from ebbflow.flows.capacity.flow import capacity_loop

        called: list[object] = []
        monkeypatch.setattr("os.system", lambda *given, **named: called.append(given))
        EbbflowCluster(policy="os:system").save("theirs", overwrite=True)
        for given in ({"policy": "os:system"}, {"ledger": "ebbflow-cluster/theirs"}):
            with pytest.raises(
                OptionError, match=r"policy os:system is code .* allow_policies in a deployment"
            ):
                capacity_loop(**given, options={"command": "id"})
        with pytest.raises(OptionError, match="os:system is no policy and was not called"):
            capacity_loop(policy="os:system", options={"command": "id"}, allow_policies=["os:system"])
        assert not called

    def test_what_a_deployment_allows_is_read_from_the_deployment(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        from prefect.client.orchestration import get_client

        from ebbflow.flows.capacity.flow import capacity_loop
        from ebbflow.flows.runs import deployed

        with get_client(sync_client=True) as client:
            flow = client.create_flow(capacity_loop)
            own = {"allow_policies": ["mine:Policy"]}
            made = client.create_deployment(flow_id=flow, name="allowing", parameters=own)
        monkeypatch.setattr(deployed, "deployment_id", lambda: str(made))
        assert deployed.allowed("allow_policies", ["os:system", "mine:Policy"]) == ("mine:Policy",)

    def test_an_address_comes_from_a_secret_or_a_variable(self) -> None:
        from prefect.blocks.system import Secret
        from prefect.variables import Variable

        from ebbflow.flows.runs.block_refs import secret_address

        Secret(value="postgresql://ebbflow@db/one").save("ledger-block", overwrite=True)
        Variable.set("ledger_variable", "postgresql://ebbflow@db/two", overwrite=True)
        assert secret_address("ledger-block") == "postgresql://ebbflow@db/one"
        assert secret_address("ledger_variable") == "postgresql://ebbflow@db/two"
        with pytest.raises(OptionError, match="prefect block create secret"):
            secret_address("neither")

    def test_a_run_whose_process_is_gone_is_marked_and_one_that_ended_is_not(self) -> None:
        from prefect import flow
        from prefect.client.orchestration import get_client
        from prefect.states import Cancelling, Completed, Running

        from ebbflow.flows.capacity.flow_runs import PrefectRuns

        @flow(name="some-app")
        def some() -> None: ...

        given = PrefectRuns()
        with get_client(sync_client=True) as client:
            runs = [client.create_flow_run(some, state=Running(), tags=["of-one"]) for _ in range(3)]
            client.set_flow_run_state(runs[1].id, Completed(), force=True)
            client.set_flow_run_state(runs[2].id, Cancelling(), force=True)
        assert len(given.waiting("of-one")) == 2
        for run in runs:
            given.crashed(str(run.id), "its process is gone")
        views = [given.view(str(run.id)) for run in runs]
        assert [view.state for view in views if view] == ["CRASHED", "COMPLETED", "CANCELLED"]
        assert views[0] is not None
        assert (views[0].message, views[0].flow, views[0].over) == ("its process is gone", "some-app", True)
        assert not given.waiting("of-one")
        assert given.view("no-run") is None
        assert given.view(str(uuid4())) is None
        given.crashed(str(uuid4()), "nobody waits for it")

    def test_a_run_of_a_deployment_begins_once_for_a_key(self) -> None:
        from ebbflow.flows.capacity.flow_runs import PrefectRuns
        from ebbflow.flows.query.flow import run_query
        from ebbflow.infra.errors import InfraError

        name = f"once-{uuid4().hex[:6]}"
        run_query.to_deployment(name=name, parameters={"engine": "duckdb"}).apply()
        runs = PrefectRuns()
        made = [
            runs.begin(f"run-query/{name}", {"sql": "x"}, "key-1", ["t"], {}, "tidy-otter") for _ in range(2)
        ]
        assert made[0].id == made[1].id
        assert made[0].name == "tidy-otter"
        assert made[0].parameters["engine"] == "duckdb"
        assert made[0].parameters["sql"] == "x"
        other = runs.begin(made[0].deployment, {"sql": "x"}, "key-2", ["t"], {}, "")
        assert other.id != made[0].id
        assert runs.waiting("t")
        with pytest.raises(InfraError, match="no deployment 'train/none'"):
            runs.begin("train/none", {}, "key-3", [], {}, "")
