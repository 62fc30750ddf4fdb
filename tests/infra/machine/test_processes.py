"""What processes of a cluster have of the environment of the one that starts them."""

import os
from pathlib import Path

import pytest

from ebbflow.infra.ledger.address import VARIABLE
from ebbflow.infra.machine import processes
from ebbflow.infra.spark.cluster import daemons
from ebbflow.infra.spark.java import JavaInstall
from ebbflow.infra.training.channel.wire import Entry
from ebbflow.infra.training.local_nodes import LocalNodes

ADDRESS = "postgresql://ebb:hush@db/ledger"


def test_the_ledger_s_address_is_not_handed_down(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, ADDRESS)
    monkeypatch.setenv("OF_THE_USER", "1")
    monkeypatch.setattr(daemons, "_scala_version", lambda home: "2.13")
    with LocalNodes(tmp_path) as nodes, LocalNodes(tmp_path, environment={VARIABLE: "given"}) as asked:
        entry = Entry("127.0.0.1:1", "00" * 32, "r", "n", "k", "127.0.0.1", str(tmp_path))
        for variables in (
            processes.inherited(),
            nodes._variables(entry, ()),
            daemons.environment(JavaInstall(tmp_path / "bin" / "java", "17.0.1"), tmp_path, "127.0.0.1"),
        ):
            assert VARIABLE not in variables
            assert variables["OF_THE_USER"] == "1"
        assert asked._variables(entry, ())[VARIABLE] == "given", "what the user asks for is given"


def test_a_process_is_found_by_its_mark_until_it_ends(tmp_path: Path) -> None:
    child = processes.spawn(["sleep", "600"], dict(os.environ), "lab-7/n1", tmp_path / "log")
    try:
        assert processes.members("lab-7/n1") == processes.members("lab-7/") == [child.pid]
        assert processes.members("lab-7") == processes.members("n1") == []
    finally:
        child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert not processes.carries(child.pid, "lab-7/n1"), "a zombie"
    child.wait(150)
    assert not processes.carries(child.pid, "lab-7/n1")
    assert not processes.carries(0, "lab-7/n1")
