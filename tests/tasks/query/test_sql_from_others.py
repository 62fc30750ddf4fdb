"""SQL that somebody else wrote, by every way that runs a query, and files that change between two runs."""

import dataclasses
import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from ebbflow.infra.errors import StageFailedError
from ebbflow.infra.query.duckdb import DuckDbEngine
from ebbflow.infra.storage import checksums
from ebbflow.planners.errors import ForbiddenSqlError, OptionError
from ebbflow.planners.model import Share
from ebbflow.planners.query.sql import forbidden, parse
from ebbflow.tasks.pipeline.run import PipelineRequest, check_pipeline
from ebbflow.tasks.query import planning
from ebbflow.tasks.query import run as queries
from ebbflow.tasks.query.app_requests import AppFolder
from ebbflow.tasks.query.request import QueryRequest
from ebbflow.tasks.query.run import PlainOrchestrator, execute, explain
from tests.tasks.driving import SHARED_SPARK

LIST = "SELECT x.a AS a, x.b AS b FROM read_csv('{file}') AS x ORDER BY a"
PIPELINE = """
name: others
cluster: {{local: {{pools: {{sql: {{kind: spark, nodes: 1}}}}}}}}
queries:
  theirs:
    sql: "{sql}"
    engine: duckdb
    dialect: duckdb
    tables: {tables}
{more}
"""


@pytest.fixture(name="tables")
def _tables(tmp_path: Path) -> str:
    folder = tmp_path / "tables"
    folder.mkdir()
    pq.write_table(pa.table({"k": [1, 2, 3], "s": ["a", "b", "c"]}), folder / "t.parquet")
    return str(folder)


def ask(sql: str, tables: str, tmp_path: Path, **more: object) -> QueryRequest:
    given = {"engine": "duckdb", "dialect": "duckdb", "store": str(tmp_path / "store"), **more}
    return QueryRequest(sql, tables=tables, **given)  # type: ignore[arg-type]


def rows(request: QueryRequest) -> tuple[list[dict[str, object]], list[str]]:
    outcome = execute(request, PlainOrchestrator())
    (file,) = outcome.result.relation.files
    return pq.read_table(file.path).to_pylist(), [s.status for s in outcome.report.stages]


@pytest.mark.parametrize("engine", ["duckdb", pytest.param("spark", marks=pytest.mark.spark(shared=True))])
@pytest.mark.parametrize("policy", ["qoop", "single"])
def test_a_query_that_reads_files_never_begins(engine: str, policy: str, tables: str, tmp_path: Path) -> None:
    wrong = (
        "SELECT * FROM read_text('/etc/passwd'), t"
        if engine == "duckdb"
        else "SELECT * FROM text.`/etc/passwd`"
    )
    chosen = SHARED_SPARK if engine == "spark" else {}
    request = ask(wrong, tables, tmp_path, dialect=engine, planner=policy, **chosen)
    with pytest.raises(ForbiddenSqlError):
        execute(request, PlainOrchestrator())
    with pytest.raises(ForbiddenSqlError):
        explain(request, Share.uniform(1.0, 1.0, 1))


def test_a_file_that_changed_gives_new_rows(tables: str, tmp_path: Path) -> None:
    file = tmp_path / "x.csv"
    file.write_text("a,b\n1,one\n")
    sql = f"SELECT t.s, x.b FROM t JOIN read_csv('{file}') AS x ON t.k = x.a"
    request = ask(sql, tables, tmp_path, allow_functions=("read_csv",))
    assert rows(request)[0] == [{"s": "a", "b": "one"}]
    file.write_text("a,b\n2,two\n")
    found, states = rows(request)
    assert found == [{"s": "b", "b": "two"}]
    assert "reused" not in states


def test_a_stage_beside_one_that_reads_files_is_still_reused(tables: str, tmp_path: Path) -> None:
    request = ask("SELECT count(*) AS n FROM t", tables, tmp_path)
    assert rows(request)[1] == ["completed"]
    assert rows(request)[1] == ["reused"]


@pytest.mark.parametrize(
    "sql",
    [
        "SELECT k FROM t WHERE current_date > DATE '2000-01-01' OR k = random()",
        "SELECT k, age(TIMESTAMP '2020-01-01') AS a FROM t",
        "SELECT k, ago(INTERVAL 1 DAY) AS a FROM t",
        "SELECT k, version() AS v FROM t",
        "SELECT k, txid_current() AS v FROM t",
    ],
)
def test_what_may_differ_in_the_next_run_is_computed_in_the_next_run(
    sql: str, tables: str, tmp_path: Path
) -> None:
    request = ask(sql, tables, tmp_path)
    assert "reused" not in rows(request)[1]
    assert "reused" not in rows(request)[1]


@pytest.mark.parametrize(
    "sql",
    [
        "SELECT content FROM read_text('/etc/passwd')",
        "SELECT * FROM '{other}'",
        "SELECT k FROM t WHERE s IN (SELECT content FROM read_text('/etc/passwd'))",
    ],
)
def test_what_gets_past_the_check_is_held_by_the_engine(
    sql: str, tables: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parse, "check_reach", lambda *_: None)
    monkeypatch.setattr(parse, "check_tables", lambda *_: None)
    monkeypatch.setattr(planning, "_check_accepted", lambda *_: None)
    other = tmp_path / "other.parquet"
    pq.write_table(pa.table({"k": [1]}), other)
    request = ask(sql.format(other=other), tables, tmp_path, planner="single")
    with pytest.raises(StageFailedError, match="reaches beyond its tables and the store"):
        execute(request, PlainOrchestrator())


def test_one_database_serves_a_whole_query(
    tables: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    moves = []
    move = DuckDbEngine._move
    monkeypatch.setattr(
        DuckDbEngine, "_move", lambda engine, reach: (moves.append(reach), move(engine, reach))[1]
    )
    pq.write_table(pa.table({"k": [1, 2]}), Path(tables) / "u.parquet")
    pq.write_table(pa.table({"k": [1, 2]}), Path(tables) / "unused.parquet")
    execute(
        ask("SELECT t.s FROM t JOIN u ON t.k = u.k", tables, tmp_path, materialize="every-join"),
        PlainOrchestrator(),
    )
    (reach,) = moves
    assert {Path(f).name for f in reach.files} == {"t.parquet", "u.parquet"}
    assert reach.folders == {str(tmp_path / "store")}


def test_a_result_of_allowed_functions_can_be_verified(tables: str, tmp_path: Path) -> None:
    file = tmp_path / "x.csv"
    file.write_text("a,b\n1,one\n")
    request = ask(LIST.format(file=file), tables, tmp_path, allow_functions=["READ_CSV"], verify=True)
    assert request.allow_functions == ("read_csv",)
    assert execute(request, PlainOrchestrator()).report.verified is True


def test_an_engine_that_is_kept_is_closed_again_after_a_query_that_was_let_out(
    tables: str, tmp_path: Path
) -> None:
    file = tmp_path / "x.csv"
    file.write_text("a,b\n1,one\n")
    let_out = ask(LIST.format(file=file), tables, tmp_path, allow_functions=("read_csv",))
    with queries.opened_engine(let_out) as opened:
        execute(let_out, PlainOrchestrator(), opened=opened)
        execute(ask("SELECT count(*) AS n FROM t", tables, tmp_path), PlainOrchestrator(), opened=opened)
        with pytest.raises(Exception, match="disabled by configuration"):
            opened.engine._database().execute(f"SELECT * FROM read_csv('{file}')")  # type: ignore[attr-defined]


# --- who may allow ------------------------------------------------------------------------------------------


def test_what_a_store_holds_of_a_query_allows_nothing(tables: str, tmp_path: Path) -> None:
    request = ask(LIST.format(file="x.csv"), tables, tmp_path, allow_functions=("read_csv",))
    folder = AppFolder(request.store_place, "theirs")
    folder.keep(request)
    with pytest.raises(OptionError, match=r"functions that its user allowed \(read_csv\).*allow them"):
        folder.load()
    path = Path(folder.file.root)
    said = checksums.unsealed(path.read_bytes())
    assert "allow_functions" not in said
    del said["functions"]
    path.write_bytes(checksums.sealed({**said, "allow_functions": ["read_csv"]}))  # somebody else's file
    assert folder.load().allow_functions == ()
    with pytest.raises(ForbiddenSqlError):
        execute(folder.load(), PlainOrchestrator())


def pipeline(tmp_path: Path, tables: str, sql: str, more: str = "") -> str:
    file = tmp_path / "pipeline.yaml"
    file.write_text(PIPELINE.format(sql=sql, tables=tables, more=more))
    return str(file)


def test_a_pipeline_s_file_allows_itself_nothing(tables: str, tmp_path: Path) -> None:
    sql = "SELECT * FROM read_csv('/etc/passwd')"
    with pytest.raises(OptionError, match=r"queries\.theirs\.sql: READ_CSV.*--allow-functions read_csv"):
        check_pipeline(PipelineRequest(pipeline(tmp_path, tables, sql)))
    with pytest.raises(OptionError, match="allow_functions"):
        check_pipeline(PipelineRequest(pipeline(tmp_path, tables, sql, "    allow_functions: [read_csv]")))
    check_pipeline(PipelineRequest(pipeline(tmp_path, tables, sql), allow_functions=("read_csv",)))


def test_a_check_of_a_pipeline_tells_sql_that_is_none(tables: str, tmp_path: Path) -> None:
    for sql in ("SELECT FROM WHERE", "SELECT " + "(" * 3000 + "1" + ")" * 3000, "DROP TABLE t"):
        with pytest.raises(OptionError, match=r"queries\.theirs\.sql: "):
            check_pipeline(PipelineRequest(pipeline(tmp_path, tables, sql)))


def test_every_way_to_a_query_passes_the_same_check() -> None:
    """Whoever makes a request says what it allows by a field of it, and the check is where SQL is parsed."""
    fields = {f.name for f in dataclasses.fields(QueryRequest)}
    assert "allow_functions" in fields
    assert parse.check_reach is forbidden.check_reach
    assert json.dumps(QueryRequest("SELECT 1", tables="t").allow_functions) == "[]"
