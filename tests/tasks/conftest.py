"""TPC-H tables to run real queries on."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.tpch_tables import tpch_tables


@pytest.fixture(scope="session")
def tpch() -> str:
    """Return a folder with TPC-H tables of scale factor 0.01: every query takes a moment."""
    return str(tpch_tables(0.01))


@pytest.fixture(scope="session")
def tpch_medium() -> str:
    """Return a folder with TPC-H tables of scale factor 0.1: on Spark a stage takes a second or more."""
    return str(tpch_tables(0.1))


@pytest.fixture(scope="session")
def tpch_large() -> str:
    """Return a folder with TPC-H tables of scale factor 0.3, for faults in the middle of DuckDB's queries."""
    return str(tpch_tables(0.3))


@pytest.fixture(scope="session")
def tpch_partitioned(tpch: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return a folder with the tables of ``tpch``, three of them in partition directories."""
    import duckdb

    folder = tmp_path_factory.mktemp("tpch-partitioned")
    keys = {"lineitem": "l_shipmode, l_returnflag", "orders": "o_orderpriority", "customer": "c_nationkey"}
    with duckdb.connect() as connection:
        for file in sorted(Path(tpch).glob("*.parquet")):
            how = f", PARTITION_BY ({keys[file.stem]})" if file.stem in keys else ""
            target = folder / file.stem if how else folder / file.name
            connection.execute(f"COPY (FROM '{file}') TO '{target}' (FORMAT parquet{how})")
    return str(folder)


@pytest.fixture(scope="module", autouse=True)
def _home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("EBBFLOW_HOME", str(tmp_path_factory.mktemp("home")))
        yield
