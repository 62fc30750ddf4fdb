"""What engines are told of a query is what its author wrote."""

import json

import duckdb
import pytest

from ebbflow.planners.query.sql.dialect import duckdb_sql, spark_sql
from ebbflow.planners.query.sql.parse import parse

ODD = {
    "user.name": "x",
    "user": {"name": "y"},
    "a[0]": "z",
    "a": ["w"],
    "it's": "v",
    "b c": "u",
    "$.d": "t",
    "/e": "s",
    "*": "r",
}


@pytest.mark.parametrize(
    "path",
    ["user.name", "$.user.name", '$."user.name"', "/user/name", "a[0]", "$.a[0]", "it''s", "b c", "$.d", "/e", "*"]
    + ["$.*", "$..name", "0", "user", "$", "a[#-1]", "$.a[#-1]"],
)  # fmt: skip
def test_a_text_is_a_key_of_json_unless_it_begins_as_a_path(path: str) -> None:
    calls = [f"j->'{path}'", f"j->>'{path}'"]
    calls += [f"{name}(j, '{path}')" for name in ("json_extract", "json_extract_string", "json_extract_path")]
    document = json.dumps(ODD).replace("'", "''")
    for call in calls:
        text = f"SELECT {call} AS found FROM (SELECT CAST('{document}' AS JSON) AS j) AS t"
        written = duckdb_sql(parse(text, "duckdb"))
        assert duckdb.sql(written).fetchall() == duckdb.sql(text).fetchall(), written


def test_spark_is_told_of_a_key_with_a_dot_as_of_one() -> None:
    assert "$['user.name']" in spark_sql(parse("SELECT j->>'user.name' FROM t", "duckdb"))
    assert "'$.user.name'" in spark_sql(parse("SELECT j->>'$.user.name' FROM t", "duckdb"))
