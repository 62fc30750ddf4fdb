"""What an engine is told of a query in the other one's dialect."""

from datetime import UTC, datetime

import duckdb
import pytest

from ebbflow.planners.errors import UnsupportedQueryError
from ebbflow.planners.model import Catalogue, Table
from ebbflow.planners.query.sql.dialect import duckdb_sql, spark_sql
from ebbflow.planners.query.sql.parse import ParsedQuery, parse, parse_query
from ebbflow.planners.query.sql.translation.whole import check_said, duckdb_lacks, spark_lacks
from tests.planners.query.sql.answers import ALIKE, ALIKE_OF_ALL, COLUMNS, NOT_TOLD, ROWS

OTHER = {"duckdb": "spark", "spark": "duckdb"}
KNOWN = Catalogue({"t": Table("t", COLUMNS, "")})


def parsed(item: str, dialect: str) -> ParsedQuery:
    return parse_query(
        f"SELECT {item} AS r FROM t", KNOWN, now=datetime(2026, 11, 26, tzinfo=UTC), dialect=dialect
    )


@pytest.mark.parametrize(
    ("dialect", "call", "reason"),
    [(d, call, why) for d, calls in NOT_TOLD.items() for call, why in calls.items()],
)
def test_a_call_that_the_other_engine_answers_otherwise_is_not_passed_to_it(
    dialect: str, call: str, reason: str
) -> None:
    tree = parsed(call, dialect).expression
    with pytest.raises(UnsupportedQueryError, match=reason):
        check_said(tree, dialect, OTHER[dialect])
    check_said(tree, dialect, dialect)


@pytest.mark.parametrize("dialect", ALIKE)
def test_calls_that_both_engines_answer_alike_are_passed_to_both(dialect: str) -> None:
    for call in (*ALIKE[dialect], *ALIKE_OF_ALL[dialect]):
        check_said(parsed(call, dialect).expression, dialect, OTHER[dialect])


def test_what_is_rewritten_for_spark_is_answered_as_it_was_on_duckdb() -> None:
    with duckdb.connect() as connection:
        connection.execute(f"CREATE TABLE t AS {ROWS}")
        for call in (*ALIKE["duckdb"], *ALIKE_OF_ALL["duckdb"]):
            asked = connection.sql(f"SELECT {call} AS r FROM t")
            told = connection.sql(duckdb_sql(parsed(call, "duckdb").expression))
            assert repr(told.fetchall()) == repr(asked.fetchall()), call
            assert told.types == asked.types, call


def test_joins_whose_word_spark_takes_for_an_alias_are_not_passed_to_it() -> None:
    for join in ("ASOF JOIN u ON t.k >= u.k", "POSITIONAL JOIN u"):
        assert "alias" in spark_lacks(parse(f"SELECT * FROM t {join}", "duckdb"), "duckdb")


def test_a_query_in_a_third_dialect_is_passed_on_as_far_as_there_are_words_for_it() -> None:
    tree = parse("SELECT hash(x) AS h FROM t", "postgres")
    assert not spark_lacks(tree, "postgres")
    assert not duckdb_lacks(tree, "postgres")


def test_a_list_is_looked_into_at_the_place_that_each_engine_has_for_it() -> None:
    tree = parsed("l[i]", "duckdb").expression
    assert "TRY_ELEMENT_AT(t.l, t.i)" in spark_sql(tree)
    assert "t.l[t.i]" in duckdb_sql(tree)
