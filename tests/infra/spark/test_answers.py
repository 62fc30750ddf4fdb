"""Do both engines answer alike what they are both told of?"""

import math
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import duckdb
import pytest

from ebbflow.infra.spark.engine import SparkEngine
from ebbflow.planners.model import Catalogue, Table
from ebbflow.planners.query.sql.dialect import duckdb_sql, spark_sql
from ebbflow.planners.query.sql.parse import parse_query
from tests.planners.query.sql.answers import ALIKE, ALIKE_OF_ALL, COLUMNS, ROWS

KNOWN = Catalogue({"t": Table("t", COLUMNS, "")})


@pytest.mark.spark
@pytest.mark.parametrize("dialect", ALIKE)
def test_both_engines_answer_alike_what_they_are_told(dialect: str, tmp_path: Path) -> None:
    file = tmp_path / "t.parquet"
    with SparkEngine.start("local[1]", memory="1g") as engine, duckdb.connect() as connection:
        connection.execute(f"COPY ({ROWS}) TO '{file}' (FORMAT parquet)")
        connection.execute(f"CREATE VIEW t AS SELECT * FROM '{file}'")
        session: Any = engine._session.newSession()
        session.conf.set("spark.sql.codegen.wholeStage", "false")
        session.conf.set("spark.sql.codegen.factoryMode", "NO_CODEGEN")
        session.read.parquet(str(file)).createOrReplaceTempView("t")
        for calls, order in ((ALIKE[dialect], " ORDER BY i"), (ALIKE_OF_ALL[dialect], "")):
            items = ", ".join(f"{call} AS c{place}" for place, call in enumerate(calls))
            query = parse_query(
                f"SELECT {items} FROM t{order}",
                KNOWN,
                now=datetime(2026, 11, 26, tzinfo=UTC),
                dialect=dialect,
            ).expression
            theirs = connection.sql(duckdb_sql(query)).fetchall()
            ours = session.sql(spark_sql(query)).collect()
            told = zip(calls, zip(*theirs, strict=True), zip(*ours, strict=True), strict=True)
            different = [(call, a, b) for call, a, b in told if plain(a) != plain(b)]
            assert different == []


def plain(value: Any) -> Any:
    """Return a value as it compares: numbers by what they are, times without a zone, lists of lists."""
    if isinstance(value, list | tuple):
        return [plain(one) for one in value]
    if isinstance(value, Decimal | float):
        return None if math.isnan(value) else round(float(value), 9)
    return value.replace(tzinfo=None) if isinstance(value, datetime) else value
