"""TPC-DS queries the whole way: planned, run in stages, compared with plain DuckDB, reported."""

from pathlib import Path

import pytest

from ebbflow.infra.clock import SystemClock
from ebbflow.planners.query.planner import CutPolicy
from ebbflow.tasks.query.opening import OpenedEngine, opened_engine
from ebbflow.tasks.query.report import QueryReport
from ebbflow.tasks.query.request import QueryRequest
from ebbflow.tasks.query.run import PlainOrchestrator, execute
from tests.tasks.driving import SHARED_SPARK


def report_of(
    tpcds: Path, number: int, opened: OpenedEngine, store: Path, engine: str, cuts: CutPolicy
) -> QueryReport:
    request = QueryRequest(
        (tpcds / "queries" / f"q{number}.sql").read_text(),
        tables=str(tpcds),
        engine=engine,
        materialize=cuts,
        dialect="duckdb",
        store=str(store),
        verify=True,
    )
    return execute(request, PlainOrchestrator(), SystemClock(), opened).report


@pytest.mark.parametrize("numbers", [(40, 49, 95), pytest.param((14,), marks=pytest.mark.slow)])
def test_joins_unions_and_shared_views_in_many_stages_give_the_oracles_result(
    numbers: tuple[int, ...], tpcds: Path, tmp_path: Path
) -> None:
    with opened_engine(QueryRequest("SELECT 1", tables=str(tpcds), engine="duckdb")) as opened:
        for number in numbers:
            report = report_of(tpcds, number, opened, tmp_path / "store", "duckdb", "every-join")
            assert report.verified, f"Q{number}: {report.verification}"
            assert report.blocks
            assert all(b.planned == b.relations for b in report.blocks)
            assert len(report.stages) > len(report.blocks)


@pytest.mark.spark(shared=True)
def test_spark_gives_the_oracles_result(tpcds: Path, tmp_path: Path) -> None:
    with opened_engine(QueryRequest("SELECT 1", tables=str(tpcds), **SHARED_SPARK)) as opened:
        for number in (20, 41, 93):
            report = report_of(tpcds, number, opened, tmp_path / "store", "spark", "cost")
            assert report.verified, f"Q{number}: {report.verification}"
