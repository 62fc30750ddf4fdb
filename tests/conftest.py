"""Benchmark data that several folders of tests share, made as ``ebbflow data`` makes it."""

from pathlib import Path

import pytest
from hypothesis import settings

settings.register_profile("ebbflow", deadline=None)  # how long an example takes depends on what else runs
settings.load_profile("ebbflow")

PROCESSES = ("infra/training", "infra/elastic")  # folders whose tests nearly all start some


@pytest.hookimpl(tryfirst=True)  # before -m selects
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark as ``alone`` what starts processes of its own: beside other tests it would run into its time limits."""
    for item in items:
        marked = any(item.get_closest_marker(name) for name in ("spark", "prefect", "processes"))
        if marked or any(f"tests/{folder}/" in item.path.as_posix() for folder in PROCESSES):
            item.add_marker("alone")


@pytest.fixture(scope="session")
def tpcds(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with TPC-DS tables of scale factor 0.01 and the 99 queries."""
    from ebbflow.infra.benchmark_data import tpcds

    folder = tmp_path_factory.mktemp("tpcds")
    return tpcds(0.01, folder / "sf0.01", folder / "tools", print)
