"""Benchmark data that several folders of tests share, made as ``ebbflow data`` makes it."""

from pathlib import Path

import pytest


@pytest.hookimpl(tryfirst=True)  # before -m selects
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark as ``alone`` what starts processes of its own: beside other tests it would run into its time limits."""
    for item in items:
        if any(item.get_closest_marker(name) for name in ("spark", "prefect", "processes")):
            item.add_marker("alone")


@pytest.fixture(scope="session")
def tpcds(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with TPC-DS tables of scale factor 0.01 and the 99 queries."""
    from ebbflow.infra.benchmark_data import tpcds

    folder = tmp_path_factory.mktemp("tpcds")
    return tpcds(0.01, folder / "sf0.01", folder / "tools", print)
