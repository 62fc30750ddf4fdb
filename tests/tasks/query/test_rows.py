"""The rows of a finished query, for programs and notebooks."""

import shutil
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from ebbflow.infra.errors import EngineUnavailableError, StorageError
from ebbflow.tasks.drawing.tables import table_html
from ebbflow.tasks.query.report import QueryReport
from ebbflow.tasks.query.request import QueryRequest
from ebbflow.tasks.query.run import QueryOutcome
from ebbflow.tasks.report.delivery import execute


@pytest.fixture
def tables(tmp_path: Path) -> Path:
    place = tmp_path / "tables"
    place.mkdir()
    pq.write_table(pa.table({"k": list(range(25)), "s": ["<b>&"] * 24 + [None]}), place / "things.parquet")
    return place


def run(tables: Path, sql: str = "SELECT k, s FROM things ORDER BY k", **options: str) -> QueryOutcome:
    store = str(tables.parent / "store")
    return execute(QueryRequest(sql, tables=str(tables), engine="duckdb", store=store, **options))


def test_all_rows_are_a_table_of_arrow(tables: Path) -> None:
    outcome = run(tables)
    assert outcome.to_arrow()["k"].to_pylist() == list(range(25))
    assert outcome.report.to_arrow().equals(outcome.to_arrow())
    assert outcome.to_arrow().column_names == ["k", "s"]


def test_no_rows_are_a_table_with_the_columns(tables: Path) -> None:
    outcome = run(tables, "SELECT k, s FROM things WHERE k < 0")
    assert (outcome.to_arrow().num_rows, outcome.to_arrow().column_names) == (0, ["k", "s"])
    assert "0 rows" in outcome._repr_html_()


@pytest.mark.parametrize("out", [False, True])
def test_a_report_that_was_read_from_json_finds_the_rows(out: bool, tables: Path) -> None:
    where = {"output": str(tables.parent / "r.parquet")} if out else {}
    report = run(tables, report=str(tables.parent / "r.json"), **where).report
    again = QueryReport.from_json((tables.parent / "r.json").read_text())
    assert again == report
    assert again.result is None
    assert again.to_arrow().equals(report.to_arrow())
    assert again.result_path in again._repr_html_()


def test_rows_that_are_gone_are_said_unless_they_are_elsewhere_too(tables: Path) -> None:
    kept = run(tables, output=str(tables.parent / "r.parquet")).report
    report = run(tables).report
    shutil.rmtree(tables.parent / "store" / "data")
    assert kept.to_arrow()["k"].to_pylist() == list(range(25))
    with pytest.raises(StorageError, match=r"there is no result at .* any more: run the query again"):
        report.to_arrow()
    assert "there is no result at" in report._repr_html_()


def test_rows_of_another_number_are_not_the_result(tables: Path) -> None:
    report = replace(run(tables, output=str(tables.parent / "r.parquet")).report, result=None)
    pq.write_table(pa.table({"k": [1], "s": ["x"]}), tables.parent / "r.parquet")
    with pytest.raises(StorageError, match="has 1 row, not the 25"):
        report.to_arrow()


def test_without_pandas_it_is_said_what_to_install(tables: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    outcome = run(tables)
    monkeypatch.setattr("ebbflow.infra.packages.find_spec", lambda name: None)
    with pytest.raises(EngineUnavailableError, match=r"to_pandas\(\) needs pandas: pip install pandas"):
        outcome.to_pandas()


def test_with_pandas_the_table_becomes_a_frame(tables: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Table:
        num_rows = 25

        def to_pandas(self) -> str:
            return "a frame"

    outcome = run(tables)
    monkeypatch.setattr("ebbflow.infra.packages.find_spec", lambda name: object())
    monkeypatch.setattr("ebbflow.infra.query.results.read_checkpoint", lambda place: Table())
    assert outcome.to_pandas() == "a frame"


def test_a_notebook_shows_the_first_rows_escaped(tables: Path) -> None:
    outcome = run(tables, name="<i>all</i>")
    shown = outcome._repr_html_()
    assert shown == outcome.report._repr_html_()
    assert shown.count("<tr>") == 11
    assert "<td>9</td><td>&lt;b&gt;&amp;</td>" in shown
    assert "25 rows, the first 10 shown" in shown
    assert "&lt;i&gt;all&lt;/i&gt;" in shown
    assert "<b>&<" not in shown
    assert "<i>" not in shown


def test_a_table_has_as_many_columns_as_can_be_read_and_names_may_come_twice() -> None:
    wide = pa.table([[1]] * 40, names=[f"<c{i}>" for i in range(40)])
    assert table_html(wide, 1).count("<th>") == 30
    assert "1 row; 10 more columns" in table_html(wide, 1)
    twice = pa.table([[1], [None]], names=["a", "a"])
    assert "<th>a</th><th>a</th>" in table_html(twice, 1)
    assert "<td>1</td><td>NULL</td>" in table_html(twice, 1)
