"""Prefect servers for the session, and small Parquet tables."""

from collections.abc import Iterator
from pathlib import Path
from tempfile import mkdtemp
from typing import TYPE_CHECKING

import pytest

from tests.prefect_database import with_database

if TYPE_CHECKING:
    from prefect_home import Home


@pytest.fixture(scope="session")
def tables(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return a folder with three tables: 600 orders of 60 customers in 6 nations."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    folder = tmp_path_factory.mktemp("tables")
    columns: dict[str, dict[str, list[object]]] = {
        "nation": {"id": list(range(6)), "name": [f"nation {i}" for i in range(6)]},
        "customer": {"id": list(range(60)), "nation": [i % 6 for i in range(60)]},
        "orders": {
            "id": list(range(600)),
            "customer": [i % 60 for i in range(600)],
            "price": [float(i) for i in range(600)],
        },
    }
    for name, data in columns.items():
        pq.write_table(pa.table(data), folder / f"{name}.parquet")
    return str(folder)


@pytest.fixture(scope="session")
def prefect_home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Keep Prefect away from the user's settings and from the network, for the whole session."""
    home = tmp_path_factory.mktemp("prefect")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PREFECT_HOME", str(with_database(home)))
        patch.setenv("PREFECT_SERVER_ANALYTICS_ENABLED", "false")
        patch.setenv("PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS", "120")
        patch.setenv("DO_NOT_TRACK", "1")
        patch.delenv("PREFECT_API_URL", raising=False)
        yield home


@pytest.fixture(scope="session")
def prefect_server(prefect_home: Path) -> Iterator[str]:
    """Start a temporary Prefect server and return its API's address."""
    from prefect.settings import PREFECT_API_URL, PREFECT_FLOWS_HEARTBEAT_FREQUENCY, temporary_settings
    from prefect.testing import utilities

    def database() -> str:  # where the harness would have an empty folder
        return str(with_database(Path(mkdtemp()), "prefect-test.db"))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(utilities, "mkdtemp", database)
        # each sync flow run would wait a second for its heartbeat thread to end
        with (
            temporary_settings({PREFECT_FLOWS_HEARTBEAT_FREQUENCY: None}),
            utilities.prefect_test_harness(server_startup_timeout=120),
        ):
            yield PREFECT_API_URL.value()


@pytest.fixture(scope="session")
def prefect(tmp_path_factory: pytest.TempPathFactory) -> "Iterator[Home]":
    """Start a server of its own with our deployments and a worker, whose flow runs are processes of their own."""
    from prefect_home import deployed_home

    with deployed_home(tmp_path_factory.mktemp("home")) as running:
        yield running


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Keep checkpoints, clusters and demo data of each test in a folder of its own."""
    folder = tmp_path / "home"
    monkeypatch.setenv("EBBFLOW_HOME", str(folder))
    monkeypatch.setenv("COLUMNS", "100")
    return folder
