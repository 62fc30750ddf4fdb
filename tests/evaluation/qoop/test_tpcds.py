"""All 99 TPC-DS queries: planned whole, in time, and right however they are cut."""

import random
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import duckdb
import pytest

from ebbflow.planners.model import Catalogue, Share
from ebbflow.planners.query.costs.cost import SPARK
from ebbflow.planners.query.coverage import coverage
from ebbflow.planners.query.plan.analysis import Analysis
from ebbflow.planners.query.planner import QueryPlanner
from ebbflow.planners.query.sql.parse import parse_query
from ebbflow.planners.query.views.views import view_chain
from tests.planners.query.statements import catalogue_of, random_choice, reference, run
from tests.sweeps import spread

NOW = datetime(2026, 3, 4, tzinfo=UTC)
NUMBERS = range(1, 100)
_SECONDS = 3.0  # of a processor that planning may take on a busy machine; half of it or less on an idle one


@pytest.fixture(scope="module")
def data(tpcds: Path) -> Iterator[tuple[duckdb.DuckDBPyConnection, Catalogue, Path]]:
    connection = duckdb.connect()
    for file in sorted(tpcds.glob("*.parquet")):
        connection.execute(f"CREATE VIEW {file.stem} AS FROM '{file}'")
    yield connection, catalogue_of(connection), tpcds / "queries"
    connection.close()


def analysed(text: str, known: Catalogue) -> Analysis:
    return Analysis.of(view_chain(parse_query(text, known, now=NOW, dialect="duckdb"), known), known, "run")


# the others are as TPC-H's and the hard queries of ``tests/planners/query/plan/test_staging.py`` are
SOME = spread(NUMBERS, 9, 3)


@pytest.mark.parametrize("number", SOME)
def test_a_tpcds_query_is_planned_whole_and_gives_its_own_rows(data, number):
    connection, known, queries = data
    text = (queries / f"q{number}.sql").read_text()
    analysis = analysed(text, known)
    assert not [b for b in coverage(analysis) if b.planned < b.relations]
    choice = random_choice(analysis, random.Random(number))
    assert run(connection, analysis, choice).rows == reference(connection, text, "duckdb")


def test_the_suite_has_the_blocks_that_it_is_known_for(data):
    _, known, queries = data
    found = {
        n: coverage(analysed((queries / f"q{n}.sql").read_text(), known)) for n in (40, 49, 64, 72, 80, 93)
    }
    sizes = {n: sorted(b.planned for b in blocks)[-1] for n, blocks in found.items()}
    assert sizes == {40: 4, 49: 3, 64: 18, 72: 9, 80: 5, 93: 3}


@pytest.mark.parametrize("number", spread((14, 4, 64, 72), 2))
def test_the_largest_queries_are_planned_in_bounded_time(data, number):
    _, known, queries = data
    text = (queries / f"q{number}.sql").read_text()
    before = time.process_time()
    planner = QueryPlanner(text, known, SPARK, now=NOW, salt="run", dialect="duckdb")
    assert planner.candidates(Share.uniform(4.0, 8.0, 4))
    assert time.process_time() - before < _SECONDS
