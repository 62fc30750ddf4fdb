"""What a node does before it becomes another program, in this process."""

import os
import signal
import sys
from pathlib import Path

import pytest

from ebbflow.infra.machine.processes import ONE_THREAD
from ebbflow.infra.training.channel import keys
from ebbflow.infra.training.channel.wire import ENTRY, Entry, to_json
from ebbflow.infra.training.launcher import node

PROGRAM = """
import os
FOUND = dict(os.environ)
CALLS = []
def serve(*arguments, fetch=None):
    assert fetch is None
    CALLS.append(arguments)
"""


def test_a_program_is_imported_for_one_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "plain_program.py").write_text(PROGRAM)
    monkeypatch.syspath_prepend(tmp_path)
    entry = Entry("h:1", "public", "run", "n", "key", "10.0.0.1", str(tmp_path / "node"), program="plain_program",
                  arguments=("a", "b"))  # fmt: skip
    given = {ENTRY: to_json(entry), "OMP_NUM_THREADS": "3"}
    monkeypatch.setattr(os, "environ", given)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.setattr(keys, "own", lambda _: "pair")
    node.main()
    program = sys.modules.pop("plain_program")
    assert {name: program.FOUND[name] for name in ONE_THREAD} == dict.fromkeys(ONE_THREAD, "1") | {
        "OMP_NUM_THREADS": "3"  # what the machine's own environment says is its owner's choice
    }
    assert program.CALLS == [("h:1", "public", "pair", "10.0.0.1", "a", "b")]
