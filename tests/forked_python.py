"""What tests start as ``python -P -m ebbflow...``, ``-m tests...`` or ``-c ...``: forks of one interpreter that has
imported what most of it needs.

To import PyTorch takes seconds of a processor, and tests start some hundred nodes of trainings. A fork has the
arguments, the environment (also as others see it), the directory, the files and the session that it would have, and
is a child of the process that asks for it. One that starts nodes itself has such an interpreter of its own. What a
fork cannot have, such as another ``LD_PRELOAD``, is started anew.
"""

import ctypes
import inspect
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import threading
import types
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

IMPORTED = (
    "torch._dynamo",  # takes a second, and the first optimizer of a process imports it
    "torch.distributed.fsdp",
    "torch.nn.parallel",
    "scipy.optimize",
    "ebbflow.infra.training.run",
    "ebbflow.infra.training.launcher.agent",
    "ebbflow.tasks.pipeline.run",
    "ebbflow.tasks.query.run",
)
STARTED = (  # what they import is imported, too
    "ebbflow.flows.cli",
    "ebbflow.infra.aggregation.process",
    "ebbflow.infra.communication.searching",
    "ebbflow.infra.elastic.worker.node",
    "ebbflow.infra.elastic.worker.remote",
    "ebbflow.infra.local_fleet.provider.machine",
    "ebbflow.infra.local_fleet.provider.supervisor",
    "ebbflow.infra.logs.shipping",
    "ebbflow.infra.machine.guardian",
    "ebbflow.infra.training.launcher.node",
)
_PYTHON = sys.executable  # tests may say that it is another
_FORMS = ([_PYTHON, "-P", "-m"], [_PYTHON, "-P", "-c"])
_AT_START = (
    "PYTHON",
    "LD_",
    "OMP_",
    "MKL_",
    "OPENBLAS_",
    "FAKETIME",
    "TZ",
    "LANG",
    "LC_",
)  # variables read when a process begins
_ROOM = 1 << 16  # bytes of an environment, and of arguments
_SUBREAPER, _DEATH_SIGNAL = 36, 1  # of prctl
_FORKS = 900  # number of the file behind which a fork has an interpreter of its own
_TIMEOUT = 120.0  # s


def _reap(yes: bool) -> None:
    """Be the parent of processes below whose parents end."""
    ctypes.CDLL(None).prctl(_SUBREAPER, int(yes), 0, 0, 0)


def _place() -> tuple[str, ...]:
    """Return where this thread starts processes."""
    spaces = (os.readlink(f"/proc/thread-self/ns/{name}") for name in ("net", "mnt"))
    return *spaces, Path("/proc/self/cgroup").read_text()


def _early(environment: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if name.startswith(_AT_START)}


def _fixed(early: Mapping[str, str]) -> dict[str, str]:
    """Return those that a fork cannot have others of."""
    return {n: text for n, text in early.items() if n != "PYTHONPATH" and not n.endswith("_NUM_THREADS")}


class Forks:
    """The interpreter, which starts when it is first needed and ends with this process; with ``connection`` the one
    behind it."""

    def __init__(self, connection: socket.socket | None = None) -> None:
        self._owner, self._lock = os.getpid(), threading.Lock()
        self._socket, self._starts = connection, connection is None
        if connection is not None:
            self._note(connection)

    def takes(self, given: Mapping[str, Any]) -> bool:
        """Tell whether what ``subprocess`` is to start can be a fork."""
        args = given["args"]
        if not isinstance(args, list) or list(map(str, args[:3])) not in _FORMS:
            return False
        early = _early(given["env"] if given["env"] is not None else os.environ)
        return (
            (args[2] == "-c" or args[3] in STARTED or str(args[3]).startswith("tests."))
            and os.getpid() == self._owner
            and given["close_fds"]
            and not any(given[name] for name in ("pass_fds", "preexec_fn", "executable"))
            and all(text == "1" for name, text in early.items() if name.endswith("_NUM_THREADS"))
            and (self._starts if self._socket is None else _place() == self._placed and self._open())
            and _fixed(early) == (_fixed(_early(os.environ)) if self._socket is None else self._begun)
        )

    def _note(self, connection: socket.socket) -> None:
        self._placed, self._inode = _place(), os.fstat(connection.fileno()).st_ino
        self._begun = _fixed(_early(os.environ))

    def _open(self) -> bool:
        """Tell whether the connection is still there: a program may close all files that it does not know."""
        try:
            return self._socket is not None and os.fstat(self._socket.fileno()).st_ino == self._inode
        except OSError:
            return False

    def start(self, given: Mapping[str, Any]) -> int:
        """Start one and return its process ID."""
        environment = dict(given["env"] if given["env"] is not None else os.environ)
        status = Path("/proc/self/status").read_text()
        order = {
            "form": given["args"][2],
            "runs": given["args"][3],
            "arguments": [*map(str, given["args"][4:])],
            "environment": {os.fsdecode(name): os.fsdecode(text) for name, text in environment.items()},
            "folder": os.fsdecode(given["cwd"] or Path.cwd()),
            "session": bool(given["start_new_session"]),
            "umask": int(status.partition("\nUmask:")[2].split()[0], 8),
        }
        files = [given["p2cread"], given["c2pwrite"], given["errwrite"]]
        with self._lock:
            if self._socket is None:
                self._begin()
            assert self._socket is not None
            _reap(True)
            try:
                text = json.dumps(order).encode()
                held = [number if one == -1 else one for number, one in enumerate(files)]
                socket.send_fds(self._socket, [len(text).to_bytes(4)], held)
                self._socket.sendall(text)
                return int.from_bytes(_exactly(self._socket, 4))
            except (OSError, EOFError):  # a later answer would be taken for that to the next order
                self._socket.close()
                self._socket = None
                raise
            finally:
                _reap(False)

    def _begin(self) -> None:
        self._socket, theirs = socket.socketpair()
        self._socket.settimeout(_TIMEOUT)
        self._note(self._socket)
        with theirs:
            subprocess.Popen(
                [sys.executable, "-P", __file__, str(theirs.fileno()), "-" * _ROOM],
                env={**os.environ, "OMP_NUM_THREADS": "1", "EBBFLOW_ROOM": "-" * _ROOM},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # Ctrl-C is for the tests
            ).returncode = 0  # it ends when this process is gone


@contextmanager
def forked_python() -> Iterator[None]:
    """Let ``subprocess`` start forks where it can."""
    execute = subprocess.Popen._execute_child  # type: ignore[attr-defined]
    _let_fork(Forks())
    try:
        yield
    finally:
        subprocess.Popen._execute_child = execute  # type: ignore[attr-defined]


def _let_fork(forks: Forks) -> None:
    execute = subprocess.Popen._execute_child  # type: ignore[attr-defined]
    signature = inspect.signature(execute)

    def fork_or_execute(process: "subprocess.Popen[bytes]", *arguments: Any) -> None:
        given = signature.bind(process, *arguments).arguments
        if not forks.takes(given):
            execute(process, *arguments)
            return
        process.pid = forks.start(given)
        process._child_created = True  # type: ignore[attr-defined]
        names = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
        process._close_pipe_fds(*(given[name] for name in names))  # type: ignore[attr-defined]

    subprocess.Popen._execute_child = fork_or_execute  # type: ignore[attr-defined]


# --- the interpreter's side ---------------------------------------------------------------------------------


def _exactly(connection: socket.socket, count: int) -> bytes:
    found = b""
    while len(found) < count:
        piece = connection.recv(count - len(found))
        if not piece:
            raise EOFError("the interpreter that forks has ended")
        found += piece
    return found


def _import() -> None:
    import gc
    from importlib import import_module

    gc.disable()
    for name in (*IMPORTED, *STARTED):
        import_module(name)
    for name in STARTED:  # they are run, not imported
        del sys.modules[name]
    gc.freeze()  # else forks that end look through, and so copy, all of it
    gc.enable()
    runpy.run_path(str(Path(__file__).with_name("large_pages.py")))["use_large_pages"]()


def _serve(connection: socket.socket) -> dict[str, Any]:
    """Fork for each order; return one in its fork."""
    filters = warnings.filters[:]  # type: ignore[index]
    warnings.simplefilter("ignore", DeprecationWarning)  # of forks beside threads; none is Python's
    while True:
        length, files, _, _ = socket.recv_fds(connection, 4, 3)
        if not length:
            os._exit(0)
        order: dict[str, Any] = json.loads(_exactly(connection, int.from_bytes(length)))
        told, tell = os.pipe()
        begin, go = os.pipe()
        between = os.fork()
        if between == 0:
            child = os.fork()
            if child:
                os.write(tell, child.to_bytes(4))
                os._exit(0)
            os.close(go)
            # its file is closed with all others: the object would close whatever has its number at the fork's end
            connection.detach()
            os.read(begin, 1)  # until its first parent is gone, and who asked for it has taken its place
            warnings.filters[:] = filters  # type: ignore[index]
            return {**order, "files": files}
        os.waitpid(between, 0)
        made = os.read(told, 4)
        try:
            connection.sendall(made)
        except OSError:  # who asked has given up
            os.kill(int.from_bytes(made), signal.SIGKILL)
            os._exit(1)
        for one in (told, tell, begin, go, *files):
            os.close(one)


def _become(order: dict[str, Any]) -> None:
    form, runs = order["form"], order["runs"]
    ours = None
    if form == "-c" or runs.startswith(("ebbflow.flows.", "tests.")):  # they start nodes themselves
        ours, theirs = socket.socketpair()
        if os.fork() == 0:
            ctypes.CDLL(None).prctl(_DEATH_SIGNAL, signal.SIGKILL)
            ours.detach()
            os.closerange(3, theirs.fileno())
            os.closerange(theirs.fileno() + 1, 1 << 16)
            _become(_serve(theirs))
            return
        theirs.close()
        os.dup2(ours.detach(), _FORKS, inheritable=False)
    if order["session"]:
        os.setsid()
    for number, file in enumerate(order["files"]):
        os.dup2(file, number)
    os.closerange(3, _FORKS)
    os.closerange(_FORKS + (ours is not None), 1 << 16)
    os.umask(order["umask"])
    os.chdir(order["folder"])
    os.environ.clear()
    os.environ.update(order["environment"])
    if ours is not None:
        _let_fork(Forks(socket.socket(fileno=_FORKS)))
    _show([sys.executable, "-P", form, runs, *order["arguments"]])
    sys.argv = [form, *order["arguments"]]
    sys.path[:0] = filter(None, order["environment"].get("PYTHONPATH", "").split(os.pathsep))
    if form == "-m":
        runpy._run_module_as_main(runs)  # type: ignore[attr-defined]
    else:
        main = sys.modules["__main__"] = types.ModuleType("__main__")
        exec(compile(runs, "<string>", "exec"), main.__dict__)


def _show(words: list[str]) -> None:
    """Have /proc show arguments and the environment as those of a process that began with them."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    begin, end, begin_environment, end_environment = map(int, fields[45:49])
    variables = [os.fsencode(f"{name}={text}") for name, text in os.environ.items()]
    for at, until, texts in (
        (begin, end, [os.fsencode(word) for word in words]),
        (begin_environment, end_environment, variables),
    ):
        shown = b"".join(text + b"\0" for text in texts)
        assert len(shown) < until - at, "there is not enough room"
        ctypes.memmove(at, shown.ljust(until - at, b"\0"), until - at)


if __name__ == "__main__":
    begun = socket.socket(fileno=int(sys.argv[1]))
    _import()
    _become(_serve(begun))
