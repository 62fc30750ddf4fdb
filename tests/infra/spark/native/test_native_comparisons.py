"""Comparing doubles: NaN is above all others and equal to itself, as in Spark, whatever a file's footer says."""

import math
import operator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from ebbflow.infra.spark.native.comparisons import _comparison
from ebbflow.infra.spark.native.expressions import Typed

VALUES = (1.0, 10.0, math.nan, None, -math.inf, 20.0)
FEWER = (1.0, 10.0, math.nan)  # of which the footer says that all are between 1 and 10
SIGNS = {"<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge}


def _sql(sign: str, left: str, right: str) -> str:
    sides = [Typed(left, "double"), Typed(right, "double")]
    writer: Any = SimpleNamespace(all=lambda node: sides)
    node: Any = None
    return _comparison(sign)(writer, node).sql


def _place(value: float) -> tuple[bool, float]:
    return (True, 0.0) if math.isnan(value) else (False, value)


def _expected(sign: str, a: float | None, b: float | None) -> bool | None:
    return None if a is None or b is None else SIGNS[sign](_place(a), _place(b))


@pytest.mark.parametrize("values", [VALUES, FEWER], ids=["all kinds", "within bounds"])
@pytest.mark.parametrize("sign", SIGNS)
def test_of_files_whose_bounds_leave_nan_out(
    sign: str, values: tuple[float | None, ...], tmp_path: Path
) -> None:
    path = tmp_path / "t.parquet"
    rows = [(a, b) for a in values for b in values]
    pq.write_table(pa.table({"a": [a for a, _ in rows], "b": [b for _, b in rows]}), path)
    fixed = {"CAST('20' AS DOUBLE)": 20.0, "CAST('0' AS DOUBLE)": 0.0}
    with duckdb.connect() as connection:
        for left, right in [("a", "b"), *(("a", one) for one in fixed), *((one, "a") for one in fixed)]:
            sql = _sql(sign, left, right)
            pairs = [tuple({"a": a, "b": b, **fixed}[side] for side in (left, right)) for a, b in rows]
            high = 1 if sign[0] == "<" else 0
            found = connection.sql(f"SELECT {sql} FROM read_parquet('{path}')").fetchall()
            for pair, (said,) in zip(pairs, found, strict=True):
                # where the greater side is NaN, Spark, too, reads what the footer promises
                if pair[high] is None or not math.isnan(pair[high]):
                    assert said == _expected(sign, *pair), (pair, sql)
            kept = connection.sql(f"SELECT a FROM read_parquet('{path}') WHERE {sql}").fetchall()
            if left == "a" and right in fixed and high:
                assert len(kept) == sum(bool(_expected(sign, *pair)) for pair in pairs)


def test_a_number_is_not_nan() -> None:
    assert _sql("<", "CAST('1.5E3' AS DOUBLE)", "b") == "(CAST('1.5E3' AS DOUBLE) < b)"
