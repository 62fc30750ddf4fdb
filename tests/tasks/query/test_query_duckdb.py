"""All TPC-H queries, end to end on DuckDB, under every planner, against DuckDB's own answers."""

import threading
from pathlib import Path
from typing import Any

import pytest

from ebbflow.infra.clock import SystemClock
from ebbflow.infra.query.checkpoints import ParquetCheckpointStore
from ebbflow.infra.tables import statistics
from ebbflow.planners.model import TableStatistics
from ebbflow.tasks.query.planning import gather, prepare, read_history
from ebbflow.tasks.query.request import QueryRequest, meaning
from ebbflow.tasks.query.run import PlainOrchestrator, QueryOutcome, execute
from ebbflow.tasks.report.delivery import deliver

QUERIES = sorted(
    (Path(__file__).parents[2] / "fixtures" / "tpch").glob("q*.sql"),
    key=lambda p: int(p.stem.removeprefix("q")),
)


SOME = (
    "q2",
    "q3",
    "q9",
    "q14",
    "q15",
    "q18",
    "q20",
)  # others are alike, or run in tests of stages and partitions


@pytest.mark.parametrize("all_of_them", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("planner", ["qoop", "clarinet", "volcano", "single"])
def test_every_tpch_query_is_answered_rightly(
    planner: str, all_of_them: bool, tpch: str, tmp_path: Path
) -> None:
    """Those that do not cut plans differ from QOOP in the plan that they choose: some of the queries show it."""
    assert len(QUERIES) == 22
    wrong = {}
    names = SOME[:: 1 if planner == "qoop" else 2]
    for path in QUERIES:
        if not (all_of_them or path.stem in names):
            continue
        request = QueryRequest.of(
            str(path),
            tables=tpch,
            engine="duckdb",
            planner=planner,
            materialize="every-join" if planner == "qoop" else "cost",
            store=str(tmp_path / "store"),
            name=path.stem,
            verify=True,
        )
        report = execute(request, PlainOrchestrator()).report
        if report.verified is not True:
            wrong[path.stem] = report.verification
        assert {s.status for s in report.stages} <= {"completed", "reused", "cancelled"}
        assert report.decisions[0].kind == "start"
        assert report.planner == planner
        if planner != "qoop":
            assert len({s.plan for s in report.stages}) == 1
    assert not wrong


def test_partitioned_tables_give_the_same_answers(tpch: str, tpch_partitioned: str, tmp_path: Path) -> None:
    def run(path: Path, tables: str, verify: bool) -> QueryOutcome:
        store = str(tmp_path / "store")
        request = QueryRequest.of(str(path), tables=tables, engine="duckdb", store=store, verify=verify)
        return execute(request, PlainOrchestrator())

    wrong = {}
    for path in QUERIES:
        if path.stem not in ("q1", "q5", "q6", "q12", "q17", "q21"):
            continue  # alike as to which partitions they read
        outcome = run(path, tpch_partitioned, verify=True)
        if outcome.report.verified is not True:
            wrong[path.stem] = outcome.report.verification
        if path.stem in ("q1", "q12"):  # read by other means than the verification's
            assert outcome.to_arrow().to_pylist() == run(path, tpch, verify=False).to_arrow().to_pylist()
    assert not wrong


@pytest.mark.parametrize(("budget", "times"), [(20.0, 1), (0.0, 3)])
def test_a_store_is_not_looked_through_after_every_query(
    budget: float, times: int, tpch: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked: list[int] = []
    monkeypatch.setattr(ParquetCheckpointStore, "collect", lambda _, size, keep: looked.append(size))
    for name in ("nation", "region", "supplier"):
        sql = f"SELECT count(*) AS n FROM {name}"
        request = QueryRequest(sql, tables=tpch, engine="duckdb", store=str(tmp_path), store_budget=budget)
        execute(request, PlainOrchestrator())
    assert looked == [int(budget * 2**30)] * times


def test_every_output_that_was_asked_for_is_written(tpch: str, tmp_path: Path) -> None:
    import pyarrow.parquet as pq

    from ebbflow.tasks.query.report import QueryReport

    out, json, html = tmp_path / "out" / "r.parquet", tmp_path / "r.json", tmp_path / "r.html"
    request = QueryRequest(
        "SELECT n_name, count(*) AS n FROM customer JOIN nation ON c_nationkey = n_nationkey GROUP BY n_name",
        tables=tpch,
        engine="duckdb",
        store=str(tmp_path / "store"),
        output=str(out),
        report=(str(json), str(html)),
    )
    outcome = deliver(execute(request, PlainOrchestrator()), request)
    assert pq.read_table(out).num_rows == outcome.report.rows == 25
    assert QueryReport.from_json(json.read_text()) == outcome.report
    assert "<html" in html.read_text()
    assert outcome.report.verified is None


def test_what_an_older_version_stored_is_not_reused(
    tpch: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = QueryRequest(
        "SELECT count(*) AS n FROM region", tables=tpch, engine="duckdb", store=str(tmp_path)
    )
    with monkeypatch.context() as older:
        older.setattr("ebbflow.tasks.query.planning.meaning", lambda _: "duckdb")
        runs = [execute(request, PlainOrchestrator()) for _ in range(2)]
    runs += [execute(request, PlainOrchestrator()) for _ in range(2)]
    assert [one.report.stages[-1].status for one in runs] == ["completed", "reused"] * 2


def test_checkpoints_of_another_engine_or_meaning_are_not_reused(tpch: str) -> None:
    def of(engine: str = "spark", **settings: str) -> str:
        conf = {f"spark.sql.{key.replace('_', '.')}": value for key, value in settings.items()}
        return meaning(QueryRequest("SELECT 1", tables=tpch, engine=engine, conf=conf))  # type: ignore[arg-type]

    assert of() != of("duckdb")
    assert of() != of(session_timeZone="Asia/Tokyo") != of(session_timeZone="UTC")
    assert of(ansi_enabled="false") != of(ansi_enabled="true")
    assert of(shuffle_partitions="8", adaptive_enabled="false", optimizer_maxIterations="50") == of()
    assert of(optimizer_excludedRules="org.apache.spark.sql.catalyst.optimizer.DecimalAggregates") != of()


def test_what_stages_took_under_a_quota_tells_what_they_take_without(
    tpch: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = QueryRequest(
        "SELECT n_name, count(*) AS n FROM customer JOIN nation ON c_nationkey = n_nationkey GROUP BY n_name",
        tables=tpch,
        engine="duckdb",
        store=str(tmp_path),
        verify=True,
    )
    store = ParquetCheckpointStore(request.store_place)
    plain = prepare(request, store, SystemClock(), run_id="plain")[1].model
    with monkeypatch.context() as held:
        held.setattr("ebbflow.infra.query.local.granted_cores", lambda: 0.4)
        slow = prepare(request, store, SystemClock(), run_id="slow")[1].model
        assert slow.vector == pytest.approx([2.5 * rate for rate in plain.vector])
        report = execute(request).report
        assert report.verified is True
        assert any("0.4 cores" in note for note in report.problems)
        under = read_history(store, request)
    without = read_history(store, request)
    assert under
    for name in ("task_seconds", "wall_seconds"):
        assert [getattr(m, name) for m in under] == pytest.approx([2.5 * getattr(m, name) for m in without])


def test_statistics_of_several_tables_are_read_side_by_side(
    tpch: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = QueryRequest(
        "SELECT count(*) AS n FROM region JOIN nation ON n_regionkey = r_regionkey",
        tables=tpch,
        engine="duckdb",
        store=str(tmp_path),
    )
    both, at_once, collect = threading.Barrier(2), list[int](), statistics.collect

    def together(*args: Any, **options: Any) -> TableStatistics:
        at_once.append(options["at_once"])
        both.wait(150)
        return collect(*args, **options)

    monkeypatch.setattr(statistics, "collect", together)
    found = gather(request, ParquetCheckpointStore(request.store_place), SystemClock(), run_id="run")
    rows = {name: one.statistics.rows for name, one in found.catalogue.tables.items() if one.statistics}
    assert rows == {"nation": 25.0, "region": 5.0}
    assert at_once == [2, 2]
