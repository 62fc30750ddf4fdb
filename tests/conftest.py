"""Benchmark data that several folders of tests share, made as ``ebbflow data`` makes it."""

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def tpcds(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with TPC-DS tables of scale factor 0.01 and the 99 queries."""
    from ebbflow.infra.benchmark_data import tpcds

    folder = tmp_path_factory.mktemp("tpcds")
    return tpcds(0.01, folder / "sf0.01", folder / "tools", print)
