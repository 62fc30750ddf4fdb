"""Rewrites: which there are, in what order, and that each can be left out without changing a query's rows."""

import random
from collections.abc import Collection, Iterator
from dataclasses import replace

import duckdb
import pytest

from ebbflow.planners.errors import OptionError
from ebbflow.planners.model import Catalogue, Work
from ebbflow.planners.query.costs.cost import SPARK, CostModel
from ebbflow.planners.query.plan.analysis import Analysis
from ebbflow.planners.query.planner import REWRITE_NAMES, PlannerOptions, QueryPlanner
from ebbflow.planners.query.sql.parse import parse_query
from ebbflow.planners.query.subqueries.known import AnalyzedChain
from ebbflow.planners.query.subqueries.rewrites import rewritten
from ebbflow.planners.query.views.views import view_chain
from tests.planners.query.random_queries import fill, random_query, random_repeats
from tests.planners.query.statements import NOW, catalogue_of, random_choice, reference, run
from tests.planners.query.test_planner import KNOWN, SHARE, TPCH

EAGER = tuple(  # conditions cost nothing, copies cost nothing: all that is possible pays
    replace(SPARK, rates=rates, latency=0.0)
    for rates in (Work(aggregated_rows=1.0), Work(built_rows=1.0, sorted_rows=1.0, tasks=1.0))
)
DOES: dict[str, int | str] = {  # what each of them changes: a query of TPC-H, or another of its tables
    "conditions": 2,
    "outer-joins": "SELECT c_name FROM customer LEFT JOIN orders ON c_custkey = o_custkey WHERE o_totalprice > 9",
    "merging": 7,
    "restriction": "WITH v AS (SELECT o_custkey, o_orderstatus AS s, sum(o_totalprice) AS t FROM orders GROUP BY 1, 2"
    ") SELECT p.t, q.t FROM v p, v q WHERE p.o_custkey = q.o_custkey AND p.s = 'F' AND q.s = 'O'",
    "shared-joins": "",  # below, where everything pays
    "factoring": 21,
    "reduction": 17,
    "hints": 18,
}


def plans(query: int | str, *without: str) -> list[str]:
    text = query if isinstance(query, str) else (TPCH / f"q{query}.sql").read_text()
    options = PlannerOptions(without=frozenset(without))
    found = QueryPlanner(text, KNOWN, SPARK, now=NOW, salt="run", options=options)
    found.sample({})
    return [stage.statement.spark for plan in found.candidates(SHARE) for stage in plan.stages]


def test_they_are_listed_in_order() -> None:
    assert tuple(DOES) == REWRITE_NAMES


def test_a_name_that_there_is_not_is_refused() -> None:
    for name in ("lifting", "hoisting"):
        with pytest.raises(
            OptionError, match=f"no rewrite is called '{name}'; they are conditions, outer-joins"
        ):
            PlannerOptions(without=frozenset({"merging", name}))


@pytest.mark.parametrize(("name", "query"), [(name, query) for name, query in DOES.items() if query])
def test_without_it_the_plans_are_others(name: str, query: int | str) -> None:
    assert plans(query, name) != plans(query)


@pytest.fixture(scope="module")
def filled() -> Iterator[tuple[duckdb.DuckDBPyConnection, Catalogue]]:
    connection = duckdb.connect()
    fill(connection, random.Random(7))
    connection.execute(
        "SET disabled_optimizers = 'common_subplan'"
    )  # DuckDB 2.0.0 mixes up columns of such joins
    yield connection, catalogue_of(connection)
    connection.close()


def analysed(text: str, known: Catalogue, eager: CostModel, without: Collection[str] = ()) -> Analysis:
    chain = view_chain(parse_query(text, known, now=NOW), known, without)
    return rewritten(AnalyzedChain(Analysis.of(chain, known, "run"), known, eager, {}), "run", without)


@pytest.mark.parametrize("name", [*REWRITE_NAMES, "all"])
def test_without_it_the_rows_are_the_same(filled: tuple, name: str) -> None:
    connection, known = filled
    without = set(REWRITE_NAMES) if name == "all" else {name}
    for seed in range(4):
        text = (random_query, random_repeats)[seed % 2](random.Random(seed))
        found = analysed(text, known, EAGER[seed % 2], without)
        assert run(connection, found, random_choice(found, random.Random(seed))).rows == reference(
            connection, text
        )


def test_without_it_nothing_is_shared(filled: tuple) -> None:
    _, known = filled
    texts = [random_repeats(random.Random(seed)) for seed in range(12)]
    whole, without = (
        {v.name for text in texts for v in analysed(text, known, EAGER[1], left_out).chain.views}
        for left_out in ((), {"shared-joins"})
    )
    assert "_b1" in whole - without
