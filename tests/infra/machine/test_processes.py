"""What processes of a cluster have of the environment of the one that starts them."""

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
