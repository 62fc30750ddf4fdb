"""``ebbflow memory`` on real daemons: they lend, tell who uses them, and leave nothing behind."""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from ebbflow.flows import cli
from ebbflow.flows.memory import app
from ebbflow.infra.errors import MemoryTierError
from ebbflow.infra.machine import processes
from ebbflow.infra.memory.blocks import BlockSettings
from ebbflow.infra.memory.registry import DIRECTORY, MemoryRegistry
from ebbflow.infra.memory.session import MemorySession
from ebbflow.planners.errors import OptionError
from tests.infra.memory.lenders import FileBehind, until

SLAB, BLOCK = 16 << 20, 64 << 10
A, B = f"a{os.getpid()}", f"b{os.getpid()}"  # as no other run of the tests on this machine calls its daemons


def _call(*arguments: str) -> str:
    """Return what a command writes, to both streams; its errors are raised."""
    done = CliRunner().invoke(app, list(arguments), env={"COLUMNS": "160"}, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.output


def _status() -> dict[str, Any]:
    found = json.loads(CliRunner().invoke(app, ["status", "--json"], catch_exceptions=False).stdout)
    assert isinstance(found, dict)
    return found


@pytest.fixture(name="registry")
def _registry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[MemoryRegistry]:
    monkeypatch.setenv(DIRECTORY, str(tmp_path / "memory"))
    yield MemoryRegistry()
    for name in (A, B):
        for pid in processes.members(f"memory-{name}"):
            os.kill(pid, 9)


@pytest.mark.processes
def test_daemons_lend_tell_who_uses_them_and_stop(registry: MemoryRegistry, tmp_path: Path) -> None:
    assert "no node lends memory" in _call("status")
    assert f"{A} lends up to 64MiB at 127.0.0.1:" in _call("lend", A, "--limit", "64MiB", "--headroom", "0")
    _call("lend", B, "--limit", "64MiB", "--headroom", "0")
    with pytest.raises(MemoryTierError, match=rf"{A} lends memory already, at 127\.0\.0\.1:"):
        _call("lend", A)

    behind = FileBehind(tmp_path / "behind", SLAB, BLOCK)
    session = MemorySession(registry, behind, BlockSettings(4, SLAB, BLOCK), client="reader", period=0.1)
    try:
        assert [session.blocks.slabs.map(slab) for slab in range(2)] == [True, True]
        for slab in range(2):
            session.blocks.write(slab * SLAB, b"x" * BLOCK)
            until(lambda written=slab + 1: session.blocks.metrics.remote_writes == written)  # type: ignore[misc]
            assert session.blocks.read(slab * SLAB, BLOCK) == b"x" * BLOCK

        def read() -> list[dict[str, Any]]:
            return [one for one in _status()["clients"] if one["peer_reads"] == 2]

        until(lambda: bool(read()))
        (client,) = read()
        assert (client["client"], client["connected"], client["hit_rate"]) == ("reader", True, 1.0)
        lenders = {one["name"]: one for one in _status()["lenders"]}
        assert sorted(lenders) == [A, B]
        for one in lenders.values():
            assert (one["state"], one["lent_bytes"], one["max_bytes"]) == ("lends", SLAB, 64 << 20)
            assert (one["reads"], one["writes"]) == (1, 1)
            assert one["clients"] >= 1, "those of earlier questions may not have ended"

        assert _call("stop", A).strip() == f"{A} lends no more"
        assert session.blocks.slabs.table.hosts.keys() == {B}, "it was drained, not cut off"
        assert session.blocks.metrics.evictions == 1
        assert session.blocks.read(0, BLOCK) + session.blocks.read(SLAB, BLOCK) == b"x" * 2 * BLOCK
        until(lambda: bool([one for one in _status()["clients"] if one["evictions"] == 1]))
    finally:
        session.close()
        behind.close()
    until(lambda: not _status()["clients"][0]["connected"])
    assert "100.0%" not in _call("status"), "one of its reads came from the store"

    (pid,) = processes.members(f"memory-{B}")
    os.kill(pid, 9)
    until(lambda: not processes.members(f"memory-{B}"))
    assert "does not answer" in _call("status")
    assert f"{B} was gone: " in _call("stop", "--all")
    assert _status()["lenders"] == []
    until(lambda: not processes.members(f"memory-{A}"))


@pytest.mark.processes
def test_a_daemon_that_cannot_listen_is_told_of(registry: MemoryRegistry) -> None:
    with pytest.raises(MemoryTierError, match=r"cannot listen on 192\.0\.2\.1:0"):
        _call("lend", A, "--host", "192.0.2.1")
    assert _status()["lenders"] == []


@pytest.mark.processes
def test_doctor_says_whether_the_tier_would_be_on(registry: MemoryRegistry, tmp_path: Path) -> None:
    def tier() -> dict[str, Any]:
        done = CliRunner().invoke(cli.app, ["doctor", "--store", f"{tmp_path}/store", "--json"])
        (found,) = [one for one in json.loads(done.stdout)["checks"] if one["name"] == "memory tier"]
        return dict(found)

    nobody = tier()
    assert (nobody["ok"], nobody["remedy"]) == (False, "to lend memory: ebbflow memory lend")
    assert f"off for {tmp_path}/store: no node lends memory" in nobody["found"]
    _call("lend", A, "--limit", "64MiB", "--headroom", "0")
    measured = tier()
    assert measured["ok"]
    assert "a request of 1 MiB takes" in measured["found"]
    assert "times as fast" in measured["found"]
    _call("stop", "--all")


@pytest.mark.parametrize(
    ("arguments", "error", "rule"),
    [
        (("lend", "a", "--limit", "1MiB"), OptionError, "at least one slab, 16 MiB; got 1 MiB"),
        (("lend", "a", "--limit", "much"), OptionError, "--limit must be a positive size .*; got 'much'"),
        (("lend", "a", "--host", "0.0.0.0"), OptionError, r"must be one address.*; got 0\.0\.0\.0"),
        (("lend", "a/b"), MemoryTierError, "letters, digits, dots, hyphens or underscores; got 'a/b'"),
        (("stop",), OptionError, "either nodes or --all must be given; got neither"),
        (("stop", "a", "--all"), OptionError, "either nodes or --all must be given; got a"),
        (("stop", "a"), OptionError, "must lend memory to be stopped .there are: none.; got 'a'"),
    ],
)
@pytest.mark.usefixtures("registry")
def test_what_breaks_a_rule_is_refused(arguments: tuple[str, ...], error: type[Exception], rule: str) -> None:
    with pytest.raises(error, match=rule):
        _call(*arguments)
