"""Ledgers to test: in SQLite, and in a real PostgreSQL server."""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from ebbflow.infra.ledger import Ledger
from tests.infra.ledger.postgres import Server, binaries, server

_numbers = itertools.count()


@pytest.fixture(scope="session")
def postgres() -> Iterator[Server]:
    """Run a PostgreSQL server for the session."""
    assert binaries() is not None, "PostgreSQL's server programs are not installed: scripts/tools.sh postgres"
    with server() as found:
        yield found


@dataclass
class Place:
    """Where a test's ledger is."""

    url: str
    cluster: str
    opened: list[Ledger] = field(default_factory=list)

    def open(self, **options: Any) -> Ledger:
        """Open the ledger once more."""
        ledger = Ledger.open(self.url, **{"cluster": self.cluster, **options})
        self.opened.append(ledger)
        return ledger

    @property
    def sqlite(self) -> bool:
        return "://" not in self.url


@pytest.fixture(params=["sqlite", "postgresql"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Place]:
    """Return a place for a ledger of the test's own, once in each kind of database."""
    url = (
        str(tmp_path / "ledger.db") if request.param == "sqlite" else request.getfixturevalue("postgres").url
    )
    found = Place(url, f"cluster-{next(_numbers)}")
    yield found
    for ledger in found.opened:
        ledger.close()


@pytest.fixture
def fresh_database(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[str], str]:
    """Return a function that makes an empty database of the kind named and returns its address."""

    def make(kind: str) -> str:
        name = f"fresh{next(_numbers)}"
        if kind == "sqlite":
            return str(tmp_path / f"{name}.db")
        return str(request.getfixturevalue("postgres").create(name))

    return make
