"""TPC-H tables to run real queries on."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest


def _generate(folder: Path, scale: str) -> str:
    command = [str(Path(sys.executable).with_name("tpchgen-cli")), "parquet", "-s", scale]
    subprocess.run([*command, "--output-dir", str(folder)], check=True, capture_output=True, timeout=120)
    return str(folder)


@pytest.fixture(scope="session")
def tpch(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return a folder with TPC-H tables of scale factor 0.01: every query takes a moment."""
    return _generate(tmp_path_factory.mktemp("tpch"), "0.01")


@pytest.fixture(scope="session")
def tpch_medium(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return a folder with TPC-H tables of scale factor 0.1: on Spark a stage takes a second or more."""
    return _generate(tmp_path_factory.mktemp("tpch-medium"), "0.1")


@pytest.fixture(scope="session")
def tpch_large(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return a folder with TPC-H tables of scale factor 0.3, for faults in the middle of DuckDB's queries."""
    return _generate(tmp_path_factory.mktemp("tpch-large"), "0.3")


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
