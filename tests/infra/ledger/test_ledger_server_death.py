"""A PostgreSQL server that is killed, or whose disk is full: what was said to be written is there afterwards."""

import contextlib
import os
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from ebbflow.infra.errors import LedgerError, LedgerUnavailableError
from ebbflow.infra.ledger import Ledger
from tests.infra.ledger.ledger_values import app, until
from tests.infra.ledger.postgres import Server, server

pytestmark = pytest.mark.processes


@pytest.fixture(name="disk")
def _disk() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="pgdisk"))  # a socket's path must be short
    options = ["-t", "tmpfs", "-o", "size=96m,mode=755", "tmpfs", str(folder)]
    try:
        if (
            os.geteuid() != 0
            or subprocess.run(["mount", *options], capture_output=True, check=False).returncode
        ):
            pytest.skip("a disk can be mounted by root only")
        yield folder
        subprocess.run(["umount", "-l", str(folder)], check=True, timeout=30)
    finally:
        folder.rmdir()


def _writes(ledger: Ledger, after: int = 0) -> bool:
    try:
        ledger.write([app(f"probe-{after}-{ledger.state().number}")])
    except LedgerUnavailableError:
        return False
    return True


def test_a_server_that_is_killed_loses_nothing_that_was_said_to_be_written() -> None:
    with server(durable=True) as own, Ledger.open(own.url) as ledger:
        lead = ledger.lead("loop")
        ledger.write([app("a")])
        family = [psutil.Process(own.pid), *psutil.Process(own.pid).children(recursive=True)]
        for process in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGKILL)
        psutil.wait_procs(family, timeout=60)
        with pytest.raises(LedgerUnavailableError):
            ledger.write([app("b")])
        own.start()
        assert set(ledger.state().apps) == {"a"}
        lead.renew()
        ledger.write([app("b")])
        assert ledger.verify() == []


def test_a_server_whose_disk_is_full_refuses_and_loses_nothing(disk: Path) -> None:
    with server(durable=True, within=disk) as own, Ledger.open(own.url) as ledger:
        ledger.write([app("first")])
        ballast = disk / "ballast"
        with contextlib.suppress(OSError), ballast.open("wb", buffering=0) as file:
            while file.write(b"x" * 4096):
                pass
        written = ["first"]

        def write_on() -> None:
            for number in range(3000):
                ledger.write([app(f"a{number}", team="x" * 4000)])
                written.append(f"a{number}")

        with pytest.raises(LedgerError, match=r"disk|space|server|connection"):
            write_on()
        ballast.unlink()
        _revive(own)
        until(lambda: _writes(ledger), 120.0)
        assert set(written) <= set(ledger.state().apps)
        assert ledger.verify() == []


def _revive(own: Server) -> None:
    """Start the server where it has ended itself, as whoever runs it does."""
    try:
        own.sql("SELECT 1")
    except RuntimeError:
        with contextlib.suppress(RuntimeError):
            own.stop("immediate")
        own.start()
