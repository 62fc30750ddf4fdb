"""What several folders of tests share: benchmark data as ``ebbflow data`` makes it, and an emulated AWS."""

import os
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings

if TYPE_CHECKING:
    from tests.aws.emulator import AccountAt, Emulator

# how long an example takes depends on what else runs; the same examples each time, and others in `make fuzz`
settings.register_profile("ebbflow", deadline=None, derandomize=True, max_examples=50)
settings.register_profile("search", deadline=None, max_examples=1000, print_blob=True)
settings.load_profile("ebbflow")

PROCESSES = ("infra/training", "infra/elastic")  # folders whose tests nearly all start some


@pytest.hookimpl(tryfirst=True)  # before -m selects
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark as ``alone`` what starts processes of its own: beside other tests it would run into its time limits."""
    for item in items:
        marked = any(item.get_closest_marker(name) for name in ("spark", "prefect", "processes"))
        if marked or any(f"tests/{folder}/" in item.path.as_posix() for folder in PROCESSES):
            item.add_marker("alone")


def pytest_collection_finish(session: pytest.Session) -> None:
    """Before tests start JVMs, have these start faster."""
    if not session.config.option.collectonly and any(
        item.get_closest_marker("spark") for item in session.items
    ):
        from tests.benchmarks.sql.class_archive import java_options

        # JVMs of tests live for seconds: the first compiler and the serial collector do
        quick = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
        os.environ["JDK_JAVA_OPTIONS"] = java_options(Path(__file__).parents[1] / ".cache", quick)


@pytest.fixture(scope="session")
def tpcds(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with TPC-DS tables of scale factor 0.01 and the 99 queries."""
    from ebbflow.infra.tables.benchmark_data import tpcds

    folder = tmp_path_factory.mktemp("tpcds")
    return tpcds(0.01, folder / "sf0.01", folder / "tools", print)


@pytest.fixture(scope="session")
def aws_emulator(tmp_path_factory: pytest.TempPathFactory) -> "Iterator[Emulator]":
    """Run an emulated AWS for the session; its clock is the wall's."""
    import botocore.session

    from tests.aws.emulator import Emulator

    with pytest.MonkeyPatch.context() as patch:
        # every session would read the services' models anew, a second for each test
        patch.setattr(botocore.session, "create_loader", cache(botocore.session.create_loader))
        with Emulator.start(tmp_path_factory.mktemp("aws")) as emulator:
            yield emulator


@pytest.fixture
def aws_account(aws_emulator: "Emulator", monkeypatch: pytest.MonkeyPatch) -> "AccountAt":
    """Return an AWS account that no other test uses, and point the process's AWS environment at it."""
    from tests.aws.emulator import ENVIRONMENT

    account = aws_emulator.account()
    for name in ENVIRONMENT:
        monkeypatch.delenv(name, raising=False)
    for name, value in account.environment.items():
        monkeypatch.setenv(name, value)
    return account
