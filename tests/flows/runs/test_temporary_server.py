"""Prefect's temporary server; Prefect's own class is replaced, so that none starts."""

import signal
from collections.abc import Callable

import httpx
import pytest
from prefect.settings import PREFECT_API_URL, PREFECT_SERVER_ALLOW_EPHEMERAL_MODE, temporary_settings

from ebbflow.flows.runs.command import start_temporary_server

pytestmark = pytest.mark.usefixtures("prefect_home")

Servers = Callable[[list[Exception | None]], list[str]]


@pytest.fixture(name="servers")
def _servers(monkeypatch: pytest.MonkeyPatch) -> Servers:
    def made(outcomes: list[Exception | None]) -> list[str]:
        said: list[str] = []

        class Server:
            def start(self, timeout: int | None = None) -> None:
                deaf = signal.pthread_sigmask(signal.SIG_BLOCK, [])
                said.append("deaf" if signal.SIGINT in deaf else "hears")
                if (outcome := outcomes.pop(0)) is not None:
                    raise outcome

            def stop(self) -> None:
                said.append("stopped")

        monkeypatch.setattr("prefect.server.api.server.SubprocessASGIServer", Server)
        with temporary_settings(
            {PREFECT_SERVER_ALLOW_EPHEMERAL_MODE: True}, restore_defaults={PREFECT_API_URL}
        ):
            start_temporary_server()
        return said

    return made


def test_a_server_that_answers_too_late_is_replaced_by_one_that_is_deaf_to_ctrl_c_too(
    servers: Servers,
) -> None:
    assert servers([httpx.ReadTimeout("5 s"), None]) == ["deaf", "stopped", "deaf"]
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, [])


def test_servers_that_never_answer_are_left_to_the_flow_run(servers: Servers) -> None:
    assert servers([httpx.ReadTimeout("5 s")] * 3) == ["deaf", "stopped"] * 3
    assert servers([RuntimeError("Timed out"), None]) == ["deaf", "stopped", "deaf"]
