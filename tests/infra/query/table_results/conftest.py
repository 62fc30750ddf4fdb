"""What tests of results in tables share: an engine, tables, and results."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from pyiceberg.catalog import load_catalog
from pyiceberg.utils.config import Config

from ebbflow.infra.query.duckdb import DuckDbEngine
from tests.infra.query.table_results.lake import Lake, Make, results_in


@pytest.fixture(name="embedded")
def _embedded() -> Iterator[DuckDbEngine]:
    with DuckDbEngine.start(threads=2, memory_gb=1) as engine:
        yield engine


@pytest.fixture(name="lake")
def _lake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Lake]:
    place = {"uri": f"sqlite:///{tmp_path}/catalog.db", "warehouse": f"file://{tmp_path}/warehouse"}
    for name, value in place.items():
        monkeypatch.setenv(f"PYICEBERG_CATALOG__TESTS__{name.upper()}", value)
    monkeypatch.setattr("pyiceberg.catalog._ENV_CONFIG", Config())
    catalog = load_catalog("tests")
    catalog.create_namespace("n")
    yield Lake(tmp_path, catalog)
    catalog.close()


@pytest.fixture(name="result")
def _result(tmp_path: Path) -> Make:
    return results_in(tmp_path)
