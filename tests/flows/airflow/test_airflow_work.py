"""What the Airflow operators do, without Airflow; with it: make airflow."""

import json
import threading
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ebbflow.flows.airflow import work
from ebbflow.flows.airflow.provider import get_provider_info
from ebbflow.flows.airflow.stopping import StoppableOrchestrator
from ebbflow.flows.runs.cancelling import Attended
from ebbflow.flows.runs.stopping import StopTraining
from ebbflow.infra.errors import StageCancelledError
from ebbflow.planners.errors import OptionError
from ebbflow.tasks.query.request import QueryRequest
from ebbflow.tasks.query.run import execute
from ebbflow.tasks.training.request import TrainingRequest
from tests.docs.sources import imports, modules_of, reachable, texts

ROOT = Path(__file__).parents[3]
JOIN = "SELECT c.nation, count(*) AS n FROM orders o JOIN customer c ON o.customer = c.id GROUP BY c.nation"
HEAVY = "SELECT count(*) AS n FROM orders a, orders b, orders c, orders d WHERE a.price + b.price < c.price + d.price"


def _options(tables: str, tmp_path: Path, **more: object) -> dict[str, object]:
    return {"tables": tables, "engine": "duckdb", "store": str(tmp_path / "store"), **more}


def test_a_query_gives_plain_values_that_json_can_hold(tables: str, tmp_path: Path) -> None:
    request = work.query_request(
        JOIN, _options(tables, tmp_path, output=str(tmp_path / "out.parquet"), name=None)
    )
    found = work.query_values(work.query(request, StoppableOrchestrator()), request.output, 2)
    assert json.loads(json.dumps(found)) == found
    assert (found["rows"], found["result"], len(found["first"])) == (6, str(tmp_path / "out.parquet"), 2)
    assert Path(found["result"]).is_file()
    assert set(found["first"][0]) == {"nation", "n"}


def test_values_that_json_lacks_are_given_as_text(tables: str, tmp_path: Path) -> None:
    sql = "SELECT DATE '2026-01-02' AS day, CAST(1.50 AS DECIMAL(9, 2)) AS money, CAST('NaN' AS DOUBLE) AS x, NULL y"
    outcome = execute(work.query_request(sql, _options(tables, tmp_path)), StoppableOrchestrator())
    assert work.query_values(outcome, None, 9)["first"] == [
        {"day": "2026-01-02", "money": "1.50", "x": None, "y": None}
    ]


def test_a_query_that_is_stopped_ends_at_once_and_cancels_its_stages(tables: str, tmp_path: Path) -> None:
    orchestrator = StoppableOrchestrator()
    started = threading.Event()
    orchestrator.listener.stage_started = lambda stage: started.set()  # type: ignore[method-assign]
    request = QueryRequest(HEAVY, **_options(tables, tmp_path))  # type: ignore[arg-type]
    attended = Attended(lambda: execute(request, orchestrator), orchestrator.stop)

    def stop() -> None:
        assert started.wait(150)
        attended.stop()

    stopper = threading.Thread(target=stop)
    stopper.start()
    with pytest.raises(StageCancelledError, match="finished stages are kept"):
        attended.wait()
    stopper.join()
    assert orchestrator.asked.is_set()
    assert not [t for t in threading.enumerate() if t.name.startswith("ebbflow-stage") and t.is_alive()]


def test_a_query_that_is_stopped_before_it_began_does_not_begin(tables: str, tmp_path: Path) -> None:
    orchestrator = StoppableOrchestrator()
    orchestrator.stop()
    request = QueryRequest(HEAVY, **_options(tables, tmp_path))  # type: ignore[arg-type]
    with pytest.raises(StageCancelledError):
        execute(request, orchestrator)


def test_a_training_is_interrupted_once_as_by_ctrl_c() -> None:
    stopper = StopTraining()
    stopper.tick()
    stopper.stop()
    assert stopper.asked.is_set()
    with pytest.raises(KeyboardInterrupt):
        stopper.tick()
    stopper.tick()  # a second Ctrl-C would end it without saving


def test_another_try_of_a_training_goes_on_with_its_run(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("")
    options = {"runs_dir": str(tmp_path / "runs"), "nodes": "local:2x1", "name": "nightly"}
    request, resume = work.training_request(str(script), ["--lr", 0.1], "dag.task.run", options)
    assert (resume, request.arguments, request.run_id) == (False, ("--lr", "0.1"), "dag.task.run")
    request.save()
    again, resume = work.training_request(str(script), ["--lr", 0.1], "dag.task.run", options)
    assert resume
    assert again == request


@pytest.mark.parametrize(
    ("kind", "options", "said"),
    [
        ("query", {"polcy": "qoop"}, "polcy"),
        ("query", {"planner": "best"}, "best"),
        ("training", {"gpus": 4}, "gpus"),
        ("training", {"run_id": "mine"}, "run_id"),
    ],
)
def test_options_that_are_none_are_named(
    kind: str, options: dict[str, object], said: str, tmp_path: Path
) -> None:
    script = tmp_path / "script.py"
    script.write_text("")
    ask = {
        "query": lambda: work.query_request("SELECT 1", {"tables": ".", **options}),
        "training": lambda: work.training_request(str(script), (), "run", options),
    }
    with pytest.raises(OptionError, match=said):
        ask[kind]()


@given(st.text(min_size=1), st.text(min_size=1), st.text(min_size=1), st.integers(-1, 99))
def test_run_ids_are_ids_of_runs_and_differ_where_their_tasks_do(
    dag: str, task: str, run: str, index: int
) -> None:
    made = work.generated_id(dag, task, run, index)
    TrainingRequest(__file__, run_id=made)
    assert made == work.generated_id(dag, task, run, index)
    assert made != work.generated_id(dag, task, run + "!", index)


@pytest.mark.parametrize(
    ("address", "refused"),
    [
        ("postgresql://ebb:secret@db/ledger", True),
        ("postgresql://ebb@db/ledger?password=secret", True),
        ("postgresql://ebb:se/secret@db/ledger", True),
        ("postgresql://ebb@db/ledger", False),
        ("/shared/ledger.db", False),
        (None, False),
    ],
)
def test_a_password_in_a_ledgers_address_is_refused_without_repeating_it(
    address: str | None, refused: bool
) -> None:
    if not refused:
        work.without_password(address)
        return
    with pytest.raises(OptionError) as caught:
        work.without_password(address)
    assert "secret" not in str(caught.value)


@dataclass
class Connection:
    """An Airflow connection, as far as it is read."""

    conn_id: str = "ebbflow_default"
    host: str | None = None
    login: str | None = None
    password: str | None = None
    port: int | None = None
    schema: str | None = None
    extra_dejson: dict[str, object] = field(default_factory=dict)


@pytest.mark.parametrize(
    ("connection", "address", "cluster"),
    [
        (Connection(), "", ""),
        (Connection(extra_dejson={"ledger": "/shared/l.db", "cluster": "lab"}), "/shared/l.db", "lab"),
        (Connection(host="db", schema="ebb"), "postgresql://db/ebb", ""),
        (
            Connection(host="db", login="a b", password="p@ss/w:rd", port=5433, schema="ebb"),
            "postgresql://a%20b:p%40ss%2Fw%3Ard@db:5433/ebb",
            "",
        ),
    ],
)
def test_a_connection_says_where_the_ledger_is(connection: Connection, address: str, cluster: str) -> None:
    assert work.address_of(connection) == (address, cluster)


def test_a_password_comes_out_of_a_connection_as_it_went_in() -> None:
    from sqlalchemy.engine import make_url

    secret = "p@ss/w:rd%?#é"
    address, _ = work.address_of(Connection(host="db", login="ebb", password=secret, schema="ebb"))
    assert make_url(address).password == secret


def test_a_connection_without_a_database_is_refused() -> None:
    with pytest.raises(OptionError, match="ebbflow_default"):
        work.address_of(Connection(host="db", password="secret"))


def test_numbers_may_come_from_templates() -> None:
    assert work.numbers(gpus="4", memory="1.5", nodes=0) == {"gpus": 4, "memory": 1.5, "nodes": 0}
    with pytest.raises(OptionError, match="gpus must be a number; got 'many'"):
        work.numbers(gpus="many")


def test_the_entry_point_leads_to_the_provider() -> None:
    import tomllib

    points = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
    assert points["apache_airflow_provider"] == {
        "provider_info": "ebbflow.flows.airflow.provider:get_provider_info"
    }
    info = get_provider_info()
    module, _, name = info["connection-types"][0]["hook-class-name"].rpartition(".")
    assert (
        f"class {name}("
        in (ROOT / module.removeprefix("ebbflow.").replace(".", "/")).with_suffix(".py").read_text()
    )


def test_airflow_is_imported_in_the_provider_only_and_the_provider_by_nobody() -> None:
    for module, text in texts(ROOT).items():
        if "airflow" not in text:
            continue
        inside = module.startswith("ebbflow.flows.airflow")
        for name in imports(ROOT, module):
            assert inside or name.partition(".")[0] != "airflow", f"{module} imports {name}"
            assert inside or not name.startswith("ebbflow.flows.airflow"), f"{module} imports {name}"


def test_nothing_that_the_provider_needs_imports_prefect() -> None:
    """Airflow and Prefect want different versions of FastAPI, so they do not live in one environment."""
    start = [m for m in modules_of(ROOT) if m.startswith("ebbflow.flows.airflow")]
    needed = reachable(ROOT, start)
    assert "ebbflow.tasks.query.run" in needed
    assert "ebbflow.tasks.training.run" in needed
    assert {m: n for m in needed for n in imports(ROOT, m) if n.partition(".")[0] == "prefect"} == {}


def test_what_only_an_app_has_is_refused_where_there_is_none() -> None:
    work.only_with("fleet", ledger=None, cluster="", team="")
    with pytest.raises(OptionError, match="ledger, team need fleet"):
        work.only_with("fleet", ledger="/shared/ledger.db", cluster="", team="vision")
