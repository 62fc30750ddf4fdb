"""Artifacts while Prefect does not answer: runs go on, and say so."""

import logging
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from ebbflow.flows.runs import artifacts
from ebbflow.flows.runs.artifacts import Publisher

TIMEOUT = 150.0  # s


class Prefect:
    """Takes artifacts, unless it is away, and for as long as it is told to."""

    def __init__(self) -> None:
        self.taken: list[tuple[str, Any]] = []
        self.away: Exception | None = None
        self.asked, self.answers = threading.Event(), threading.Event()
        self.answers.set()

    def table(self, key: str, table: Any, description: str) -> None:
        self.asked.set()
        assert self.answers.wait(TIMEOUT)
        if self.away is not None:
            raise self.away
        self.taken.append((key, table))


@pytest.fixture
def prefect(monkeypatch: pytest.MonkeyPatch) -> Iterator[Prefect]:
    found = Prefect()
    monkeypatch.setattr(artifacts, "create_table_artifact", found.table)
    monkeypatch.setattr(artifacts, "get_run_logger", lambda: logging.getLogger("run"))
    yield found
    found.answers.set()


@pytest.mark.parametrize(
    "away", [httpx.ConnectError("refused"), httpx.ReadTimeout("silent"), OSError("gone")]
)
def test_a_run_goes_on_while_prefect_is_away(
    prefect: Prefect, caplog: pytest.LogCaptureFixture, away: Exception
) -> None:
    prefect.away = away
    artifacts.table("figures", [{"a": 1}], "Figures")
    assert f"figures was not published: {away}" in caplog.text


def test_what_is_wrong_with_an_artifact_is_an_error(prefect: Prefect) -> None:
    prefect.away = ValueError("no such key")
    with pytest.raises(ValueError, match="no such key"):
        artifacts.table("Figures!", [], "")


def test_an_api_that_hangs_holds_nobody_up_and_the_newest_of_each_key_is_told(prefect: Prefect) -> None:
    publisher = Publisher()
    prefect.answers.clear()
    publisher.table("a", [{"n": 0}], "")
    assert prefect.asked.wait(TIMEOUT)
    for n in range(1, 5):
        publisher.table("a", [{"n": n}], "")
        publisher.table("b", [{"n": n}], "")
    prefect.answers.set()
    assert publisher.settle(TIMEOUT)
    assert prefect.taken == [("a", [{"n": 0}]), ("a", [{"n": 4}]), ("b", [{"n": 4}])]
    publisher.table("a", [{"n": 5}], "")
    assert publisher.settle(TIMEOUT)
    assert prefect.taken[-1] == ("a", [{"n": 5}])


def test_what_has_not_begun_when_a_run_ends_is_dropped(prefect: Prefect) -> None:
    publisher = Publisher()
    prefect.answers.clear()
    publisher.table("a", [], "")
    assert prefect.asked.wait(TIMEOUT)
    publisher.table("b", [], "")
    assert not publisher.settle(0.01)
    prefect.answers.set()
    assert publisher.settle(TIMEOUT)
    assert prefect.taken == [("a", [])]


def test_one_that_cannot_be_published_does_not_keep_others_back(
    prefect: Prefect, caplog: pytest.LogCaptureFixture
) -> None:
    publisher = Publisher()
    prefect.away = ValueError("no such key")
    publisher.table("a", [], "")
    assert publisher.settle(TIMEOUT)
    assert "no such key" in caplog.text
    prefect.away = None
    publisher.table("b", [], "")
    assert publisher.settle(TIMEOUT)
    assert prefect.taken == [("b", [])]
