"""A query of four tables whose driver's engine may be made to wait or to fail."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from ebbflow.tasks.query.request import QueryRequest
from tests.tasks.driving import (
    FOUR_TABLES,
    Ride,
    Scripted,
)


@pytest.fixture(name="ride")
def _ride(tpch: str, tmp_path: Path) -> Ride:
    return Ride(
        QueryRequest(
            FOUR_TABLES, tables=tpch, engine="duckdb", materialize="every-join", store=str(tmp_path / "store")
        )
    )


@pytest.fixture(name="engine")
def _engine() -> Iterator[Scripted]:
    engine = Scripted()
    yield engine
    engine.close()
