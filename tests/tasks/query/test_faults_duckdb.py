"""Bad input and faults of a whole query run, each with the real component, on DuckDB."""

import os
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from ebbflow.infra.errors import InfraError, StageFailedError, StorageFullError, TableError
from ebbflow.infra.query.results import read_checkpoint
from ebbflow.infra.storage.checksums import sealed, unsealed
from ebbflow.planners.errors import (
    PlanningError,
    SqlSyntaxError,
    UnknownColumnError,
    UnknownTableError,
    UnsupportedQueryError,
)
from ebbflow.tasks.query.request import QueryRequest
from ebbflow.tasks.query.run import PlainOrchestrator, QueryOutcome, execute
from tests.query_process import finished, killed_once_a_stage_is_done, process
from tests.tasks.driving import FOUR_TABLES, Recorder

pytestmark = pytest.mark.processes

TWO_TABLES = """
    SELECT t.k, count(*) AS n, sum(u.w) AS w FROM t JOIN u ON t.k = u.k GROUP BY t.k
"""


def run(request: QueryRequest) -> QueryOutcome:
    return execute(request, PlainOrchestrator())


@pytest.fixture(name="ask")
def _ask(tmp_path: Path) -> Callable[..., QueryRequest]:
    def ask(sql: str, tables: str, **options: Any) -> QueryRequest:
        chosen = {
            "engine": "duckdb",
            "materialize": "every-join",
            "store": str(tmp_path / "store"),
            "verify": True,
        }
        return QueryRequest(sql, tables=tables, **(chosen | options))

    return ask


Ask = Callable[..., QueryRequest]


@pytest.fixture(name="small")
def _small(tmp_path: Path) -> str:
    """Return a folder with two tables of a thousand rows."""
    folder = tmp_path / "tables"
    folder.mkdir()
    write(folder / "t.parquet", 1000)
    pq.write_table(
        pa.table({"k": [i % 100 for i in range(1000)], "w": list(range(1000))}), folder / "u.parquet"
    )
    return str(folder)


def write(path: Path, rows: int, start: int = 0) -> None:
    values = {"k": list(range(start, start + rows)), "s": [f"text {i}" for i in range(rows)]}
    schema = pa.schema([("k", pa.int64()), ("s", pa.string())])
    pq.write_table(pa.table(values, schema), path, row_group_size=100)


# --- bad input --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sql", "error", "told"),
    [
        ("SELECT * FROM orderz", UnknownTableError, "orderz"),
        ("SELECT o_nothing FROM orders", UnknownColumnError, "o_nothing"),
        ("SELECT x.o_orderkey FROM orders o", PlanningError, "x"),
        ("SELECT FROM WHERE", SqlSyntaxError, "line 1"),
        ("SELECT (1 FROM orders", SqlSyntaxError, "line 1"),
        ("SELECT 'open FROM orders", SqlSyntaxError, "read"),
        ("DROP TABLE orders", UnsupportedQueryError, "DROP"),
        ("SELECT 1; SELECT 2", UnsupportedQueryError, "exactly one"),
        ("-- nothing", UnsupportedQueryError, "exactly one"),
    ],
)
def test_a_query_that_cannot_be_planned_is_told_and_writes_nothing(
    sql: str, error: type[Exception], told: str, tpch: str, ask: Ask
) -> None:
    request = ask(sql, tpch)
    with pytest.raises(error, match=told):
        run(request)
    assert not list(Path(request.store).glob("manifests/*.json"))


def test_a_failing_expression_names_the_stage_and_the_reason(small: str, ask: Ask) -> None:
    with pytest.raises(StageFailedError, match="Conversion Error"):
        run(ask("SELECT CAST(s AS INT) AS i FROM t", small, dialect="duckdb"))


def test_a_missing_folder_and_one_without_parquet_are_told(tmp_path: Path, ask: Ask) -> None:
    with pytest.raises(TableError, match="does not exist"):
        run(ask("SELECT 1 AS x FROM t", str(tmp_path / "nowhere")))
    (tmp_path / "empty").mkdir()
    with pytest.raises(TableError, match="holds no Parquet"):
        run(ask("SELECT 1 AS x FROM t", str(tmp_path / "empty")))


def test_empty_tables_give_empty_results_and_one_row_of_aggregates(small: str, ask: Ask) -> None:
    write(Path(small) / "t.parquet", 0)
    joined = run(ask(TWO_TABLES, small)).report
    assert (joined.rows, joined.verified) == (0, True)
    counted = run(ask("SELECT count(*) AS n, max(t.k) AS k FROM t JOIN u ON t.k = u.k", small)).report
    assert (counted.rows, counted.verified) == (1, True)


def test_a_file_whose_footer_is_damaged_is_named(small: str, ask: Ask) -> None:
    path = Path(small) / "u.parquet"
    data = path.read_bytes()
    for content in (data[:-20], b"", b"PAR1" + os.urandom(500) + b"PAR1"):
        path.write_bytes(content)
        with pytest.raises(TableError, match=r"u\.parquet"):
            run(ask(TWO_TABLES, small))


def test_a_file_whose_pages_are_damaged_is_an_error_and_never_a_wrong_result(small: str, ask: Ask) -> None:
    path = Path(small) / "u.parquet"
    data = bytearray(path.read_bytes())
    data[4:400] = b"\xff" * 396
    path.write_bytes(bytes(data))
    with pytest.raises(InfraError, match="u"):
        run(ask(TWO_TABLES, small))
    assert not (Path(small).parent / "result.parquet").exists()


def test_a_table_that_vanishes_before_it_is_read_is_told(small: str, ask: Ask) -> None:
    def vanish(stage: object) -> None:
        for path in Path(small).glob("*.parquet"):
            path.unlink()

    with pytest.raises(StageFailedError, match=r"No files found|No such file"):
        execute(ask(TWO_TABLES, small), PlainOrchestrator(Recorder(on_start=vanish)))


# --- what is never the same twice ---------------------------------------------------------------------------


def test_a_random_result_is_never_reused(small: str, ask: Ask) -> None:
    request = ask("SELECT t.k, rand() AS r FROM t JOIN u ON t.k = u.k", small, verify=False)
    first, second = run(request), run(request)
    assert "reused" not in {s.status for s in second.report.stages if s.name == "Result"}
    a, b = (read_checkpoint(o.result)["r"].to_pylist() for o in (first, second))
    assert a != b
    assert any("rand" in p.lower() for p in first.report.problems)


def test_the_clock_is_read_once_for_the_whole_query(small: str, ask: Ask) -> None:
    sql = (
        "SELECT a.k, a.at AS one, b.at AS two, c.at AS three "
        "FROM (SELECT k, current_timestamp() AS at FROM t) a "
        "JOIN (SELECT k, current_timestamp() AS at FROM u) b ON a.k = b.k "
        "JOIN (SELECT k, now() AS at FROM u) c ON c.k = b.k"
    )
    table = read_checkpoint(run(ask(sql, small)).result)
    times = {t for name in ("one", "two", "three") for t in table[name].to_pylist()}
    assert len(times) == 1
    again = read_checkpoint(run(ask(sql, small)).result)
    assert set(again["one"].to_pylist()) != times


# --- checkpoints that are not what they seem ----------------------------------------------------------------


def checkpoints(request: QueryRequest) -> list[dict[str, Any]]:
    return [unsealed(p.read_bytes()) for p in sorted((Path(request.store) / "manifests").glob("*.json"))]


def folder(request: QueryRequest, manifest: dict[str, Any]) -> Path:
    return Path(request.store) / manifest["data"]


def test_a_checkpoint_without_manifest_does_not_exist(tpch: str, ask: Ask) -> None:
    request = ask(FOUR_TABLES, tpch)
    run(request)
    for path in (Path(request.store) / "manifests").glob("*.json"):
        path.unlink()
    report = run(request).report
    assert {s.status for s in report.stages} == {"completed"}
    assert report.verified


@pytest.mark.parametrize("damage", ["truncated", "missing", "torn manifest"])
def test_a_damaged_checkpoint_is_not_used_and_the_report_says_so(damage: str, tpch: str, ask: Ask) -> None:
    request = ask(FOUR_TABLES, tpch)
    run(request)
    damaged = 0
    for manifest in checkpoints(request):
        for part in manifest["files"]:
            path = folder(request, manifest) / part["name"]
            if damage == "truncated":
                path.write_bytes(path.read_bytes()[:-7])
            elif damage == "missing":
                path.unlink()
            damaged += 1
        if damage == "torn manifest":
            path = Path(request.store) / "manifests" / f"{manifest['fingerprint']}.json"
            path.write_text(path.read_text()[:-9])
    listener = Recorder()
    report = execute(request, PlainOrchestrator(listener)).report
    assert {s.status for s in report.stages} == {"completed"}
    assert report.verified
    told = [p for p in report.problems if "it is not used" in p]
    assert damaged > 2
    assert 0 < len(told) <= damaged  # of those that the candidates of this run ask for
    assert set(told) <= set(listener.notes)
    assert {s.status for s in run(request).report.stages} == {"reused"}  # and it is healed


def test_a_checkpoint_of_another_version_of_a_table_is_not_used(small: str, ask: Ask) -> None:
    request = ask(TWO_TABLES, small)
    before = run(request)
    write(Path(small) / "t.parquet", 500, start=50)
    after = run(request)
    assert {s.status for s in after.report.stages} == {"completed"}
    assert after.report.verified
    assert after.report.rows != before.report.rows


def test_a_checkpoint_that_names_another_version_of_its_table_is_not_used_and_said(
    small: str, ask: Ask
) -> None:
    request = ask(TWO_TABLES, small)
    run(request)
    for manifest in checkpoints(request):
        path = Path(request.store) / "manifests" / f"{manifest['fingerprint']}.json"
        path.write_bytes(sealed(manifest | {"sources": manifest["sources"] | {"t": "0" * 32}}))
    report = run(request).report
    assert {s.status for s in report.stages} == {"completed"}
    assert any("was computed from other versions of t" in p for p in report.problems)


# --- several processes, full disks, crashes -----------------------------------------------------------------


def test_two_queries_at_once_over_one_store_are_both_right(tpch_large: str, ask: Ask) -> None:
    request = ask(FOUR_TABLES, tpch_large)
    children = [process(request) for _ in range(2)]
    reports = [finished(child) for child in children]
    assert [r["verified"] for r in reports] == [True, True]
    assert not any(r["problems"] for r in reports)
    manifests = {m["fingerprint"] for m in checkpoints(request)}
    assert manifests >= {fp for r in reports for fp, _ in r["stages"]}
    for manifest in checkpoints(request):  # the second to finish a stage has dropped its own files
        assert len(list(folder(request, manifest).parent.iterdir())) == 1


def test_a_query_whose_process_is_killed_goes_on_from_its_checkpoints(tpch_large: str, ask: Ask) -> None:
    request = ask(FOUR_TABLES, tpch_large, verify=True)
    killed_once_a_stage_is_done(request)
    survived = {m["fingerprint"] for m in checkpoints(request)}
    report = finished(process(request))
    reused = {fp for fp, status in report["stages"] if status == "reused"}
    assert survived
    assert reused
    assert reused <= survived
    assert not any(status == "completed" and fp in survived for fp, status in report["stages"])
    assert report["verified"]


@contextmanager
def tiny_disk(path: Path, mebibytes: int) -> Iterator[None]:
    path.mkdir()
    options = ["-t", "tmpfs", "-o", f"size={mebibytes}m", "tmpfs", str(path)]
    try:
        subprocess.run(["mount", *options], check=True, capture_output=True, timeout=30)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("a small file system can be mounted by root only")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(path)], check=True, timeout=30)


def test_a_full_disk_is_told_keeps_what_is_done_and_is_no_obstacle_once_it_has_room(
    tpch: str, tmp_path: Path, ask: Ask
) -> None:
    disk = tmp_path / "disk"
    sql = """
        SELECT l_orderkey, l_partkey, l_comment, o_comment, c_comment, c_name, n_name
        FROM customer JOIN nation ON c_nationkey = n_nationkey
        JOIN orders ON c_custkey = o_custkey JOIN lineitem ON l_orderkey = o_orderkey
    """
    with tiny_disk(disk, 4):
        request = ask(sql, tpch, store=str(disk / "store"))
        ballast = disk / "ballast"
        ballast.write_bytes(b"x" * (1 << 20))
        with pytest.raises(StorageFullError, match=r"[Nn]o space left|free some space"):
            run(request)
        kept = {m["fingerprint"] for m in checkpoints(request)}
        ballast.unlink()
        subprocess.run(["mount", "-o", "remount,size=64m", str(disk)], check=True, timeout=30)
        report = run(request).report
        assert report.verified
        assert kept
        assert {s.fingerprint for s in report.stages if s.status == "reused"} <= kept
        assert not {s.fingerprint for s in report.stages if s.status == "completed"} & kept
        abandoned = [p for m in checkpoints(request) for p in folder(request, m).parent.iterdir()]
        assert len(abandoned) == len(checkpoints(request))  # nothing is left of the attempt that failed


def test_a_store_that_cannot_be_written_is_told(tpch: str, tmp_path: Path, ask: Ask) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(InfraError, match="file"):
        run(ask(FOUR_TABLES, tpch, store=str(tmp_path / "file" / "store")))


def test_what_is_remembered_of_earlier_runs_may_be_damaged(tpch: str, ask: Ask) -> None:
    request = ask(FOUR_TABLES, tpch)
    run(request)
    damaged = list((Path(request.store) / "cache").rglob("*.json"))
    assert damaged
    for path in damaged:
        path.write_bytes(b'{"key": 1')
    report = run(replace(request, reuse=False)).report
    assert report.verified
