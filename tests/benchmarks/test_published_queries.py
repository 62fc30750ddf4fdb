"""Statements of test suites are read from their files, set up, run both ways and counted."""

from pathlib import Path

import pytest

from ebbflow.tasks.query.opening import opened_engine
from ebbflow.tasks.query.request import QueryRequest
from tests.benchmarks.published.comparing import Outcome, compare
from tests.benchmarks.published.constructs import constructs
from tests.benchmarks.published.logictest import steps_of
from tests.benchmarks.published.suites import Script, Step, is_query, scripts, with_tables
from tests.benchmarks.published_queries import _counts

LOGIC = """# a comment
require parquet

statement ok
CREATE TABLE pets (name VARCHAR, kind VARCHAR, age INTEGER)

foreach kind cat dog

statement ok
INSERT INTO pets VALUES ('a ${kind}', '${kind}', 3)

endloop

query TI rowsort
SELECT name, age
FROM pets
----
a cat\t3
a dog\t3

skipif duckdb
query I
SELECT 7

mode skip

query I
SELECT 8

mode unskip

statement error
SELECT nothing FROM pets
----
<REGEX>:.*not found.*
"""


def test_statements_of_a_sqllogictest_file_are_read_with_its_loops() -> None:
    steps, skipped = steps_of(LOGIC)
    assert not skipped
    assert [sql for sql, _ in steps] == [
        "CREATE TABLE pets (name VARCHAR, kind VARCHAR, age INTEGER)",
        "INSERT INTO pets VALUES ('a cat', 'cat', 3)",
        "INSERT INTO pets VALUES ('a dog', 'dog', 3)",
        "SELECT name, age\nFROM pets",
        "SELECT nothing FROM pets",
    ]
    assert steps[3][1] == 15
    assert steps_of("require spatial\n\nquery I\nSELECT 1\n") == ([], "require spatial")


def test_statements_of_other_suites_become_those_of_duckdb(tmp_path: Path) -> None:
    spark = tmp_path / "sql/core/src/test/resources/sql-tests/inputs/a.sql"
    fixtures = tmp_path / "tests/fixtures/optimizer/some.sql"
    dialects = tmp_path / "tests/dialects/test_duckdb.py"
    for path in (spark, fixtures, dialects):
        path.parent.mkdir(parents=True)
    spark.write_text(
        "-- a view\nCREATE TEMPORARY VIEW v AS SELECT * FROM VALUES (1), (2) AS v(n);\nSELECT n\nFROM v;\n"
    )
    fixtures.write_text("# dialect: spark\nSELECT `a` FROM t WHERE b > 1;\nSELECT 1;\n\nn + 2;\n")
    dialects.write_text('class Some:\n  def test(self):\n    self.validate_identity("SELECT 3 // 2")\n')
    (script,) = scripts("spark", tmp_path)
    assert [step.query for step in script.steps] == [False, True]
    assert script.steps[1].line == 3
    assert [with_tables(s).steps[-1].sql for s in scripts("sqlglot", tmp_path)] == [
        'SELECT "a" FROM t WHERE b > 1', "SELECT 1", "SELECT n + 2 FROM made", "SELECT 3 // 2"
    ]  # fmt: skip
    with pytest.raises(FileNotFoundError, match="checkout"):
        next(scripts("duckdb", tmp_path))


def test_queries_are_told_from_what_sets_them_up() -> None:
    assert is_query("/* x */ -- y\n ((SELECT 1))")
    assert is_query("WITH a AS (SELECT 1) FROM a")
    assert not is_query("CREATE TABLE t AS SELECT 1")
    assert not is_query("WITH a AS (SELECT 1) INSERT INTO t FROM a")


def test_outcomes_of_a_script_are_counted_by_construct(tmp_path: Path) -> None:
    steps, _ = steps_of(LOGIC + "\nquery I\nSELECT count(*) FROM pets JOIN pets q USING (kind) LIMIT 1\n")
    steps += [("SELECT * FROM read_text('/etc/hostname')", 90), ("SELECT age FROM pets LIMIT 1", 91)]
    script = Script("pets", tuple(Step(sql, line, is_query(sql)) for sql, line in steps))
    found: dict[int, Outcome] = {}
    request = QueryRequest("SELECT 1", tables=str(tmp_path), engine="duckdb", store=str(tmp_path / "store"))
    with opened_engine(request) as opened:
        compare(script, tmp_path, opened, {7}, lambda _: None, found.__setitem__)
    assert {place: outcome.kind for place, outcome in found.items()} == {
        3: "same", 4: "error", 5: "same", 6: "refused"
    }  # fmt: skip
    assert found[5].planned
    logged = {
        "pets": [
            {"kind": one.kind, "reason": one.reason, "planned": one.planned, "stages": one.stages}
            | {"constructs": sorted(constructs(steps[place][0]))}
            for place, one in found.items()
        ]
    }
    counts = _counts([script, Script("other", (), "require spatial")], logged)
    assert counts["outcomes"] == {"error": 1, "refused": 1, "same": 2}
    assert counts["refused"] == {"reads files": 1}
    assert counts["constructs"]["using"] == {
        "statements": 1, "answered": 1, "planned": 1, "refused": 0, "different": 0
    }  # fmt: skip
    assert (counts["scripts"], counts["scripts_all"]) == (1, 2)
    assert counts["scripts_skipped"] == {"require spatial": 1}
