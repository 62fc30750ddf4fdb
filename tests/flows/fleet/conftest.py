"""``ebbflow fleet`` against an emulated AWS over HTTP, with groups as Terraform makes them."""

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from ebbflow.flows import cli
from ebbflow.flows.fleet import cli as fleet_cli
from ebbflow.flows.fleet import notices as fleet_notices
from tests.flows.fleet.cases import Done, Fleet, changes, made

if TYPE_CHECKING:
    from tests.aws.emulator import AccountAt, Cluster, Emulator
    from tests.infra.aws.systems_manager import SystemsManager

PRICES = """
source = "made up for a test"
region = "us-east-1"
[on_demand]
"m5.large" = 0.096
"m5a.large" = 0.086
"m6i.large" = 0.096
"m6a.large" = 0.0864
"g5.xlarge" = 1.006
"""

_CLIENTS: dict[str, Any] = {}


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the present folder, with on-demand prices: the emulator has no price list."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("EBBFLOW_TERRAFORM_OUTPUT", "ebbflow.json")
    monkeypatch.delenv("EBBFLOW_CONFIG", raising=False)
    (tmp_path / "agreed.toml").write_text(PRICES)
    return tmp_path


@pytest.fixture
def limited(files: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Return what writes a file of limits, which the environment names from then on."""

    def write(text: str) -> None:
        (files / "fleet.toml").write_text(text)
        monkeypatch.setenv("EBBFLOW_CONFIG", "fleet.toml")

    return write


@pytest.fixture
def cluster(aws_account: "AccountAt", files: Path) -> "Cluster":
    """Return a cluster of the test's own; the present folder has its configuration."""
    found = made(aws_account)
    found.write(files / "ebbflow.json")
    return found


@pytest.fixture(scope="module")
def lab(aws_emulator: "Emulator") -> "Cluster":
    """Return a cluster that several tests look at."""
    return made(aws_emulator.account())


@pytest.fixture
def quiet(lab: "Cluster", files: Path, monkeypatch: pytest.MonkeyPatch) -> "Iterator[Cluster]":
    """Return a cluster that the test must leave as it is."""
    from tests.aws.emulator import ENVIRONMENT

    for name in ENVIRONMENT:
        monkeypatch.delenv(name, raising=False)
    for name, value in lab.account.environment.items():
        monkeypatch.setenv(name, value)
    lab.write(files / "ebbflow.json")
    yield lab
    assert changes(lab) == []


@pytest.fixture
def fleet(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Fleet:
    """Run ``ebbflow fleet ...`` in this process, as the console script does."""
    from ebbflow.infra.aws.clients import Clients
    from ebbflow.tasks.fleet import steps as module

    monkeypatch.setenv("COLUMNS", "160")
    # a console keeps the width that it was made with
    for command in (fleet_cli, fleet_notices):
        monkeypatch.setattr(command.console, "width", 160)

    def clients(*arguments: object, **more: object) -> Clients:
        """Return the clients of an earlier command: reading AWS's models anew takes longer than a command."""
        variables = [
            os.environ.get(n) for n in ("AWS_ACCESS_KEY_ID", "AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_SSM")
        ]
        given = repr((arguments, more, variables))
        if given not in _CLIENTS:
            _CLIENTS[given] = Clients(*arguments, **more)  # type: ignore[arg-type]
            _CLIENTS[given].close = lambda: None  # type: ignore[method-assign]
        return _CLIENTS[given]

    monkeypatch.setattr(module, "Clients", clients)

    def run(*arguments: str) -> Done:
        if Path("agreed.toml").exists() and "--on-demand-prices" not in arguments:
            arguments = (*arguments, "--on-demand-prices", "agreed.toml")
        monkeypatch.setattr(sys, "argv", ["ebbflow", "fleet", *arguments])
        code = 0
        try:
            cli.main()
        except SystemExit as end:
            code = int(end.code or 0)
        said = capsys.readouterr()
        return Done(code, said.out, said.err)

    return run


@pytest.fixture
def ssm(monkeypatch: pytest.MonkeyPatch) -> "Iterator[SystemsManager]":
    """Stand in for Systems Manager, which the emulator lacks."""
    from tests.infra.aws.systems_manager import SystemsManager

    service = SystemsManager()
    service.script = lambda node, parameters: (0, "idle\n")
    monkeypatch.setenv("AWS_ENDPOINT_URL_SSM", service.url)
    monkeypatch.setattr("ebbflow.tasks.fleet.draining.LOOK", 0.1)
    yield service
    service.close()
    assert service.problems == []
