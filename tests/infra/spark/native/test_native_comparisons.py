"""Doubles: NaN is above all others and equal to itself, as in Spark, whatever a file's footer says."""

import math
import operator
from pathlib import Path

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from ebbflow.infra.spark.native.catalyst import Attribute
from ebbflow.infra.spark.native.expressions import reading

ROWS = {
    "all kinds": (1.0, 10.0, math.nan, None, -math.inf, 20.0, -0.0, 0.0),
    "within bounds": (1.0, 10.0, math.nan),  # of which the footer says that all are between 1 and 10
    "one value": (1.0, 1.0, math.nan),  # of which it says that all are 1
}
SIGNS = {
    "<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge, "=": operator.eq, "<>": operator.ne,
}  # fmt: skip


def _place(value: float) -> tuple[bool, float]:
    return (True, 0.0) if math.isnan(value) else (False, value)


@pytest.fixture(name="column")
def _column(values: tuple[float | None, ...], tmp_path: Path) -> str:
    pq.write_table(pa.table({"x": values}), tmp_path / "t.parquet")
    column = reading(Attribute(1, "x", "double"))
    return f"(SELECT {column} AS c1, file_row_number AS n FROM read_parquet('{tmp_path / 't.parquet'}'))"


@pytest.mark.parametrize("values", ROWS.values(), ids=ROWS)
@pytest.mark.parametrize("sign", SIGNS)
def test_rows_that_compare(sign: str, column: str, values: tuple[float | None, ...]) -> None:
    for limit in (1.0, 0.0, 5.0, 20.0):
        for test, turned in (
            (f"c1 {sign} CAST('{limit}' AS DOUBLE)", 1),
            (f"CAST('{limit}' AS DOUBLE) {sign} c1", -1),
        ):
            expected = [
                n
                for n, value in enumerate(values)
                if value is not None and SIGNS[sign](*[_place(value), _place(limit)][::turned])
            ]
            assert [
                n for (n,) in duckdb.sql(f"SELECT n FROM {column} WHERE {test}").fetchall()
            ] == expected, test
            assert duckdb.sql(f"SELECT count(*) FROM {column} WHERE {test}").fetchall() == [
                (len(expected),)
            ], test


@pytest.mark.parametrize("values", ROWS.values(), ids=ROWS)
def test_extremes_joins_groups_and_first_rows(column: str, values: tuple[float | None, ...]) -> None:
    told = sorted({_place(value) for value in values if value is not None})
    (extremes,) = duckdb.sql(f"SELECT min(c1), max(c1) FROM {column}").fetchall()
    assert [_place(one) for one in extremes] == [told[0], told[-1]]
    assert duckdb.sql(f"SELECT max(c1) FROM {column}").fetchall()[0][0] != told[-2][1]
    groups = duckdb.sql(f"SELECT c1, count(*) FROM {column} WHERE c1 IS NOT NULL GROUP BY c1").fetchall()
    assert sorted(_place(one) for one, _ in groups) == told
    (first,) = duckdb.sql(f"SELECT c1 FROM {column} ORDER BY c1 DESC NULLS LAST LIMIT 1").fetchall()
    assert math.isnan(first[0])
    (pairs,) = duckdb.sql(f"SELECT count(*) FROM {column} a JOIN {column} b ON a.c1 = b.c1").fetchall()
    assert pairs == (sum(_place(a) == _place(b) for a in values for b in values if None not in (a, b)),)
    (listed,) = duckdb.sql(f"SELECT count(*) FROM {column} WHERE c1 IN (1.0, 7.0)").fetchall()
    assert listed == (sum(value == 1.0 for value in values),)
