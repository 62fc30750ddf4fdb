"""Queries over tables of Delta Lake and Iceberg: one version from the first stage of the first run to the last."""

import shutil
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable, write_deltalake
from pyiceberg.catalog.sql import SqlCatalog
from pyiceberg.table import Table
from pyiceberg.types import DateType
from pyiceberg.utils.config import Config

from ebbflow.infra.clock import SystemClock
from ebbflow.infra.errors import TableError
from ebbflow.infra.protocols import Checkpoint
from ebbflow.infra.query import table_streams
from ebbflow.infra.query.comparison import same_rows
from ebbflow.infra.query.pins import LONGEST, Pins
from ebbflow.infra.query.table_streams import stream_into
from ebbflow.infra.storage.jsonstore import JsonStore
from ebbflow.infra.storage.places import StorageLocation
from ebbflow.planners.errors import OptionError
from ebbflow.planners.model import Share
from ebbflow.planners.query.plan.qep import Stage
from ebbflow.tasks.query.listening import NullQueryListener
from ebbflow.tasks.query.report import StageReport
from ebbflow.tasks.query.request import QueryRequest
from ebbflow.tasks.query.run import PlainOrchestrator, execute, explain
from ebbflow.tasks.report import delivery
from tests.query_process import finished, killed_once_a_stage_is_done, process
from tests.tasks.driving import FOUR_TABLES

ORDERS = pa.table({"k": [1, 2, 3, 4], "day": ["mo", "tu", "mo", None], "v": [1.0, 2.0, 3.0, 4.0]})
NAMES = pa.table({"k": [1, 2, 3, 5], "name": ["a", "b", "c", "d"]})
JOINED = "SELECT name, sum(v) AS v, count(*) AS n FROM orders JOIN names ON orders.k = names.k GROUP BY name"
Ask = Callable[..., QueryRequest]


@pytest.fixture(name="tables")
def _tables(tmp_path: Path) -> Path:
    """Return a directory with the table ``orders`` of Delta Lake, in partitions, and ``names`` of Iceberg."""
    folder = tmp_path / "tables"
    write_deltalake(folder / "orders", ORDERS, partition_by=["day"])
    iceberg(tmp_path).append(NAMES)
    (folder / "names").symlink_to(tmp_path / "warehouse/n/names")
    return folder


def iceberg(tmp_path: Path) -> Table:
    catalog = SqlCatalog(
        "tests", uri=f"sqlite:///{tmp_path}/catalog.db", warehouse=f"file://{tmp_path}/warehouse"
    )
    catalog.create_namespace_if_not_exists("n")
    return catalog.create_table_if_not_exists("n.names", NAMES.schema)


@pytest.fixture(name="ask")
def _ask(tables: Path, tmp_path: Path) -> Ask:
    def ask(sql: str = JOINED, **options: Any) -> QueryRequest:
        chosen = {
            "engine": "duckdb",
            "materialize": "every-join",
            "store": str(tmp_path / "store"),
            "verify": True,
        }
        return QueryRequest(sql, tables=str(tables), **(chosen | options))

    return ask


class Notes(NullQueryListener):
    def __init__(self) -> None:
        self.said: list[str] = []

    def note(self, text: str) -> None:
        self.said.append(text)


def run(request: QueryRequest, notes: Notes | None = None, app: str = "") -> list[dict[str, Any]]:
    outcome = execute(request, PlainOrchestrator(notes), app=app)
    assert outcome.report.verified is not False, outcome.report.verification
    rows: list[dict[str, Any]] = outcome.to_arrow().to_pylist()
    return sorted(rows, key=repr)


def append(tables: Path, tmp_path: Path) -> None:
    write_deltalake(tables / "orders", ORDERS, mode="append")
    iceberg(tmp_path).append(NAMES.slice(0, 1))


BEFORE = [{"name": name, "v": v, "n": 1} for name, v in (("a", 1.0), ("b", 2.0), ("c", 3.0))]


def test_the_versions_are_told_and_the_newest_is_read(ask: Ask, tables: Path, tmp_path: Path) -> None:
    notes = Notes()
    assert run(ask(), notes) == BEFORE
    assert any(note.startswith("names: Iceberg, version ") for note in notes.said)
    assert "orders: Delta Lake, version 0" in notes.said
    append(tables, tmp_path)
    assert run(ask(), notes) == [
        {"name": "a", "v": 4.0, "n": 4}, {"name": "b", "v": 4.0, "n": 2}, {"name": "c", "v": 6.0, "n": 2},
    ]  # fmt: skip
    assert "orders: Delta Lake, version 1" in notes.said


class Cut(NullQueryListener):
    """Ends the query once a stage is in the store."""

    def __init__(self) -> None:
        self.done: list[str] = []

    def stage_ended(self, stage: Stage, report: StageReport) -> None:
        if report.status == "completed":
            self.done.append(report.fingerprint)
            raise InterruptedError("cut off")


def test_a_query_that_was_cut_off_goes_on_with_the_versions_that_it_began_with(
    ask: Ask, tables: Path, tmp_path: Path
) -> None:
    cut, notes = Cut(), Notes()
    with pytest.raises(InterruptedError):
        execute(ask(), PlainOrchestrator(cut))
    append(tables, tmp_path)
    outcome = execute(ask(), PlainOrchestrator(notes))
    assert sorted(outcome.to_arrow().to_pylist(), key=repr) == BEFORE
    assert {s.fingerprint for s in outcome.report.stages if s.status == "reused"} & set(cut.done)
    assert any(
        note.startswith(
            "orders: Delta Lake, version 0; the newest is 1. An earlier run of this query began with it"
        )
        for note in notes.said
    )
    assert sum(row["n"] for row in run(ask())) == 8, "the query has ended: the next begins with the newest"


def test_a_query_begins_anew_on_request_and_where_its_version_is_gone(
    ask: Ask, tables: Path, tmp_path: Path
) -> None:
    for begin_anew in (lambda request: replace(request, reuse=False), _vacuumed(tables)):
        with pytest.raises(InterruptedError):
            execute(ask(), PlainOrchestrator(Cut()))
        write_deltalake(tables / "orders", ORDERS.slice(0, 2), mode="overwrite")
        assert sum(row["n"] for row in run(begin_anew(ask()))) == 2
        write_deltalake(tables / "orders", ORDERS, mode="overwrite")


def _vacuumed(tables: Path) -> Callable[[QueryRequest], QueryRequest]:
    def vacuumed(request: QueryRequest) -> QueryRequest:
        table = DeltaTable(tables / "orders")
        table.vacuum(retention_hours=0, enforce_retention_duration=False, dry_run=False)
        return request

    return vacuumed


def test_what_one_app_began_with_is_nothing_to_another(ask: Ask, tables: Path, tmp_path: Path) -> None:
    with pytest.raises(InterruptedError):
        execute(ask(), PlainOrchestrator(Cut()), app="one")
    append(tables, tmp_path)
    assert sum(row["n"] for row in run(ask(), app="two")) == 8
    assert run(ask(), app="one") == BEFORE


def test_versions_are_kept_for_a_day(tmp_path: Path) -> None:
    class Later(SystemClock):
        late = 0.0

        def now(self) -> float:
            return super().now() + self.late

    clock = Later()
    pins = Pins(JsonStore(StorageLocation(tmp_path)), "q", clock)
    pins.keep({"t": "3"})
    clock.late = LONGEST - 60
    assert pins.known() == {"t": "3"}
    pins.keep({"t": "3"})  # by a run that continues with it
    clock.late = LONGEST + 60
    assert pins.known() == {}
    pins.keep({"t": "4"})
    assert pins.known() == {"t": "4"}
    pins.forget()
    pins.forget()
    assert pins.known() == {}


@pytest.mark.processes
def test_a_query_whose_process_is_killed_sees_one_version_though_its_tables_grow(
    tpch_large: str, tmp_path: Path
) -> None:
    tables = tmp_path / "tables"
    for name in ("customer", "orders", "lineitem", "nation"):
        write_deltalake(tables / name, pq.read_table(Path(tpch_large) / f"{name}.parquet"))
    request = QueryRequest(
        FOUR_TABLES,
        tables=str(tables),
        engine="duckdb",
        materialize="every-join",
        store=str(tmp_path / "store"),
    )
    plain = execute(replace(request, store=str(tmp_path / "other"))).to_arrow()
    killed_once_a_stage_is_done(request)
    then = datetime.now(UTC).isoformat()
    for name in ("customer", "lineitem"):
        write_deltalake(tables / name, DeltaTable(tables / name).to_pyarrow_table(), mode="append")
    report = finished(process(replace(request, verify=True)))
    assert report["verified"]
    assert "reused" in {status for _, status in report["stages"]}
    assert report["rows"] == plain.num_rows
    again = execute(replace(request, at=then)).to_arrow()  # what the resumed run left is of then
    assert _sorted(again) == _sorted(plain)


def _sorted(table: Any) -> list[str]:
    return sorted(map(repr, table.to_pylist()))


def test_filters_on_partitions_leave_files_out_and_explain_says_so(
    ask: Ask, tables: Path, tmp_path: Path
) -> None:
    _, notes = explain(ask("SELECT v FROM orders WHERE day = 'mo'"), Share.uniform(1.0, 1.0, 1))
    assert [note for note in notes if note.startswith("orders: 1 of 3 files are read, ")]
    table = iceberg(tmp_path)
    with table.update_spec() as update:
        update.add_identity("k")
    table.overwrite(NAMES)
    sql = "SELECT name FROM names WHERE k IN (2, 3) AND name > 'b'"
    _, notes = explain(ask(sql), Share.uniform(1.0, 1.0, 1))
    assert [note for note in notes if note.startswith("names: 2 of 4 files are read, ")]
    assert run(ask(sql)) == [{"name": "c"}]
    assert run(ask("SELECT count(*) AS n FROM names WHERE k = 9")) == [{"n": 0}]


def test_a_version_or_a_time_may_be_asked_for(ask: Ask, tables: Path, tmp_path: Path) -> None:
    then = datetime.now(UTC).isoformat()
    append(tables, tmp_path)
    assert run(ask(at=then)) == BEFORE
    assert run(ask("SELECT count(*) AS n FROM orders", at="0")) == [{"n": 4}]
    with pytest.raises(OptionError, match=r"is a version of one table, and the query names names and orders"):
        run(ask(at="0"))
    with pytest.raises(TableError, match="'orders' has no version 5; its newest is 1"):
        run(ask("SELECT count(*) AS n FROM orders", at="5"))
    pq.write_table(NAMES, tables / "plain.parquet")
    with pytest.raises(TableError, match="'plain' has no versions, as it is plain Parquet"):
        run(ask("SELECT * FROM plain", at=then))
    for wrong in ("yesterday", "-1", "1.5", "v3"):
        with pytest.raises(OptionError, match=r"at \(--at\) must be a version"):
            ask(at=wrong)
    with pytest.raises(OptionError, match=r"at \(--at\) needs tables=DIR"):
        QueryRequest("SELECT 1", catalog=True, at="1")


def test_tables_of_all_kinds_are_read_together(ask: Ask, tables: Path, tmp_path: Path) -> None:
    pq.write_table(pa.table({"k": [1, 2], "w": [10, 20]}), tables / "plain.parquet")
    sql = "SELECT name, day, w FROM orders JOIN names USING (k) JOIN plain USING (k)"
    assert run(ask(sql)) == [{"name": "a", "day": "mo", "w": 10}, {"name": "b", "day": "tu", "w": 20}]
    assert run(replace(ask(sql), engine="auto")) == run(ask(sql))


def test_a_column_that_no_file_has_yet_is_null(ask: Ask, tables: Path, tmp_path: Path) -> None:
    table = iceberg(tmp_path)
    with table.update_schema() as update:
        update.add_column("since", DateType())
    sql = "SELECT name FROM names WHERE since IS NULL AND since IS DISTINCT FROM DATE '2026-01-01'"
    assert [row["name"] for row in run(ask(sql))] == ["a", "b", "c", "d"]
    schema = execute(ask("SELECT since, k FROM names")).to_arrow().schema
    assert schema.field("since").type == pa.date32()


def test_a_catalogue_of_iceberg_tells_where_its_tables_are(
    ask: Ask, tables: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYICEBERG_CATALOG__TESTS__URI", f"sqlite:///{tmp_path}/catalog.db")
    monkeypatch.setenv("PYICEBERG_CATALOG__TESTS__WAREHOUSE", f"file://{tmp_path}/warehouse")
    monkeypatch.setattr("pyiceberg.catalog._ENV_CONFIG", Config())  # which is read once in a process
    table = iceberg(tmp_path)
    shutil.copy(  # of an attempt that the catalogue does not know
        table.metadata_location.removeprefix("file://"),
        tmp_path / "warehouse/n/names/metadata/00009-x.metadata.json",
    )
    request = replace(ask("SELECT max(name) AS n FROM Names"), tables="iceberg://tests/n")
    assert run(request) == [{"n": "d"}]
    table.append(pa.table({"k": [9], "name": ["z"]}))
    assert run(request) == [{"n": "z"}]
    assert run(replace(request, at=str(table.metadata.snapshots[0].snapshot_id))) == [{"n": "d"}]
    for wrong, told in (
        ("iceberg://tests/none", "iceberg://tests/none cannot be read"),
        ("iceberg://other/n", "is it in pyiceberg's configuration"),
    ):
        with pytest.raises(TableError, match=told):
            run(replace(request, tables=wrong))
    with pytest.raises(OptionError, match="iceberg://CATALOG/NAMESPACE; got 'iceberg://tests'"):
        replace(request, tables="iceberg://tests")


def test_a_result_is_written_into_a_table_once_for_each_run(ask: Ask, tables: Path, tmp_path: Path) -> None:
    into = tmp_path / "into"
    request = ask(into=str(into))

    def counted() -> dict[str, int]:
        names = DeltaTable(into).to_pyarrow_table().column("name").to_pylist()
        return {name: names.count(name) for name in sorted(set(names))}

    lost = execute(request)  # and then its process is gone
    assert counted() == {"a": 1, "b": 1, "c": 1}
    append(tables, tmp_path)
    delivered = delivery.execute(request)
    assert delivered.run == lost.run
    assert counted() == {"a": 1, "b": 1, "c": 1}
    assert delivery.execute(request).run != lost.run
    assert counted() == {"a": 2, "b": 2, "c": 2}
    merged = replace(request, reuse=False, into_mode="merge", into_key=("name", "v"))
    assert delivery.execute(merged).report.rows == 3
    rows = DeltaTable(into).to_pyarrow_table().select(["name", "v", "n"]).to_pylist()
    assert [row for row in run(ask()) if row not in rows] == []
    assert delivery.execute(replace(request, reuse=False, into_mode="overwrite")).report.rows == 3
    assert counted() == {"a": 1, "b": 1, "c": 1}
    rows = DeltaTable(into).to_pyarrow_table().select(["name", "v", "n"]).to_pylist()
    assert sorted(rows, key=repr) == run(ask())


def test_a_run_that_begins_anew_is_another(ask: Ask, tmp_path: Path) -> None:
    request = ask(into=str(tmp_path / "into"))
    first = execute(request)
    assert execute(request).run == first.run
    assert execute(replace(request, reuse=False)).run != first.run


def test_tables_that_cannot_take_the_rows_stay_as_they_are(ask: Ask, tmp_path: Path) -> None:
    into = tmp_path / "into"
    write_deltalake(into, pa.table({"name": ["x"], "v": [0.5], "n": [1]}), partition_by=["name"])
    delivery.execute(ask(into=str(into)))
    assert DeltaTable(into).to_pyarrow_table().num_rows == 4, "partitions are the table's"
    DeltaTable(into).alter.add_constraint({"small": "v < 9"})
    large = "SELECT name, CAST(9 AS DOUBLE) AS v, CAST(1 AS BIGINT) AS n FROM names"
    for sql in (large, "SELECT 1 AS other"):
        with pytest.raises(TableError, match="cannot write into the Delta Lake table 'into'"):
            delivery.execute(ask(sql, into=str(into)))
    assert DeltaTable(into).to_pyarrow_table().num_rows == 4
    with pytest.raises(OptionError, match=r"into_key \(--into-key\) needs into \(--into\), the table"):
        ask(into_key=("k",))


@pytest.mark.parametrize("there", [True, False])
def test_a_table_with_rules_of_its_own_is_written_by_its_library_once(
    ask: Ask, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, there: bool
) -> None:
    into = tmp_path / "into"
    if there:
        write_deltalake(into, pa.table({"k": [0]}))
    outcome = execute(ask("SELECT k FROM names"))
    read = table_streams.read_batches

    def after_another(checkpoint: Checkpoint) -> Any:
        monkeypatch.setattr(table_streams, "read_batches", read)
        assert stream_into(outcome.result, StorageLocation(into), "append", "r")
        return read(checkpoint)

    monkeypatch.setattr(table_streams, "read_batches", after_another)
    assert not stream_into(outcome.result, StorageLocation(into), "append", "r")
    assert DeltaTable(into).to_pyarrow_table().num_rows == there + 4


@pytest.fixture(scope="module", name="tpch_logs")
def _tpch_logs(tpch: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return a directory with the tables of ``tpch``: of Delta Lake, in partitions too, and of Iceberg."""
    folder = tmp_path_factory.mktemp("tpch-logs")
    keys = {"lineitem": ["l_shipmode", "l_returnflag"], "customer": ["c_nationkey"]}
    identity = {"orders": "o_orderpriority", "part": "p_mfgr", "nation": "n_regionkey"}
    catalog = SqlCatalog(
        "tests", uri=f"sqlite:///{folder}/catalog.db", warehouse=f"file://{folder}/warehouse"
    )
    catalog.create_namespace("n")
    (folder / "tables").mkdir()
    for path in Path(tpch).glob("*.parquet"):
        rows = pq.read_table(path)
        plain = [pa.field(f.name, pa.string() if f.type == pa.string_view() else f.type) for f in rows.schema]
        rows = rows.cast(pa.schema(plain))
        if path.stem in identity:
            table = catalog.create_table(f"n.{path.stem}", rows.schema)
            table.append(rows.slice(0, rows.num_rows // 2))
            with table.update_spec() as update:
                update.add_identity(identity[path.stem])
            table.append(rows.slice(rows.num_rows // 2))
            (folder / "tables" / path.stem).symlink_to(folder / "warehouse/n" / path.stem)
        else:
            write_deltalake(folder / "tables" / path.stem, rows, partition_by=keys.get(path.stem))
    catalog.close()
    return str(folder / "tables")


@pytest.mark.parametrize("every", [8, pytest.param(1, marks=pytest.mark.slow)])
def test_tpch_queries_are_answered_as_from_plain_files(
    every: int, tpch: str, tpch_logs: str, tmp_path: Path
) -> None:
    wrong = {}
    for path in sorted((Path(__file__).parents[2] / "fixtures" / "tpch").glob("q*.sql"))[::every]:
        request = QueryRequest.of(
            str(path),
            tables=tpch,
            engine="duckdb",
            planner="single",
            store=str(tmp_path / "store"),
            name=path.stem,
        )
        plain = execute(request).to_arrow()
        found = execute(replace(request, tables=tpch_logs, planner="qoop")).to_arrow()
        if difference := same_rows(found, plain):
            wrong[path.stem] = str(difference)
    assert not wrong
