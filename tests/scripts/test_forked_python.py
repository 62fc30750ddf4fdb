"""A fork of the tests' interpreter is what a process that begins anew would be."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests import forked_python

pytestmark = pytest.mark.processes

SHOWS = """
import json, os, sys
from pathlib import Path

print(json.dumps({
    "words": sys.argv[1:], "name": __name__, "variables": dict(os.environ), "parent": os.getppid(),
    "folder": os.getcwd(), "umask": os.umask(0), "leads": os.getsid(0) == os.getpid(), "path": sys.path,
    "seen": sorted(filter(None, Path("/proc/self/environ").read_text().split("\\0"))),
    "shown": Path("/proc/self/cmdline").read_text().rstrip("\\0"), "read": sys.stdin.read(),
    "files": sorted(os.listdir("/proc/self/fd"))[:3],
    "preloaded": "torch" in sys.modules,
}))
sys.exit(7)
"""


@pytest.mark.parametrize("form", [("-m", "shows"), ("-c", SHOWS)], ids=["module", "code"])
def test_a_fork_is_what_a_new_process_would_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: tuple[str, str]
) -> None:
    (tmp_path / "shows.py").write_text(SHOWS)
    given = {**os.environ, "PYTHONPATH": str(tmp_path), "OMP_NUM_THREADS": "1", "EMPTY": "", "NAME": "ü"}
    command = [sys.executable, "-P", *form, "a b", "c"]

    def run() -> tuple[int, dict[str, object]]:
        done = subprocess.run(
            command, env=given, cwd=tmp_path, input="asked", text=True, start_new_session=True, timeout=100,
            stdout=subprocess.PIPE, check=False,
        )  # fmt: skip
        return done.returncode, json.loads(done.stdout)

    with monkeypatch.context() as patch:
        patch.setattr(forked_python, "_FORMS", ())
        new = run()
    monkeypatch.setattr(forked_python, "STARTED", ("shows",))
    fork = run()
    assert (new[1].pop("preloaded"), fork[1].pop("preloaded")) == (False, True)
    assert fork == new
    assert fork[0] == 7
    given["LD_DEBUG"] = ""
    assert not run()[1]["preloaded"], "what is read at the start of a process cannot be given to a fork"


def test_an_interpreter_that_does_not_answer_in_time_is_not_asked_again() -> None:
    forks = forked_python.Forks()
    forks._socket, other = socket.socketpair()
    forks._socket.settimeout(0.05)
    names = ("p2cread", "c2pwrite", "errwrite")
    given = {"args": ["python", "-P", "-m", "shows"], "env": {}, "cwd": None, "start_new_session": False}
    with other, pytest.raises(TimeoutError):
        forks.start({**given, **dict.fromkeys(names, -1)})
    assert forks._socket is None, "its late answer would be taken for the next one's"


def test_a_fork_holds_no_socket_whose_file_is_another_ones_by_then() -> None:
    """At its end such an object closed a file of gloo's, whose thread then ended the process by SIGABRT."""
    shows = (
        "import socket, sys\n"
        "frame, held = sys._getframe(), []\n"
        "while frame is not None:\n"
        "    held += [*frame.f_locals.values(), *frame.f_globals.values()]\n"
        "    frame = frame.f_back\n"
        "print('torch' in sys.modules, [one.fileno() for one in held if isinstance(one, socket.socket)])\n"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", shows], env={**os.environ, "OMP_NUM_THREADS": "1"}, timeout=100,
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.stdout.startswith("True ["), done.stderr
    assert set(json.loads(done.stdout.removeprefix("True "))) <= {-1}
