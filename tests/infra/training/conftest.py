"""What tests of trainings share."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.infra.training.launches import Launch, Log
from tests.infra.training.rank_server import RankServer, rank_server


@pytest.fixture(scope="module")
def no_sync() -> Iterator[None]:
    """Leave out waiting for the disk, which says nothing about what is written."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: None)
        yield


@pytest.fixture(scope="session")
def warm_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankServer]:
    """Return what starts processes of a training by forks."""
    with rank_server(tmp_path_factory.mktemp("ranks")) as found:
        yield found


@pytest.fixture
def server(warm_server: RankServer) -> Iterator[RankServer]:
    """Return the same; what a test leaves running ends with it."""
    yield warm_server
    warm_server.end()


@pytest.fixture
def launch(server: RankServer, tmp_path: Path) -> Iterator[Launch]:
    one = Launch(server, tmp_path)
    yield one
    one.speakers.close()


@pytest.fixture(scope="session")
def static(warm_server: RankServer, tmp_path_factory: pytest.TempPathFactory) -> Log:
    """Return what the undisturbed run of one process wrote."""
    one = Launch(warm_server, tmp_path_factory.mktemp("static"))
    assert one.run(1) == [0]
    return one.log()
