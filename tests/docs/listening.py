"""What processes listen on, and what the table of sockets in docs/security.md says of it."""

import contextlib
import ipaddress
import os
import stat
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import psutil

PAGE = Path(__file__).parents[2] / "docs" / "security.md"
MARK = "EBBFLOW_TEST_OF_SOCKETS"
_LISTENING = 0x10000  # __SO_ACCEPTON, in /proc/net/unix


@dataclass(frozen=True)
class Row:
    """One row of the table."""

    mode: str
    process: str
    socket: str
    interface: str

    @property
    def optional(self) -> bool:
        return "(optional)" in self.socket


@dataclass(frozen=True)
class Listening:
    """A socket that listens."""

    pid: int
    process: str
    address: str  # an IP address, or the path of a Unix socket
    port: int = 0

    def fits(self, interface: str) -> bool:
        """Tell whether it is on an interface as the table writes them."""
        if self.address.startswith(("/", "@")):
            return interface == "unix 0700" and private(self.address)
        if interface.startswith("unix") or self.address.startswith("/"):
            return False
        with contextlib.suppress(ValueError):
            return ipaddress.ip_address(self.address) in ipaddress.ip_network(interface)
        return False


def private(path: str) -> bool:
    """Tell whether only this user may enter the folder of a Unix socket; an abstract one has none."""
    with contextlib.suppress(OSError):
        found = os.stat(os.path.dirname(path))
        return found.st_uid == os.geteuid() and stat.S_IMODE(found.st_mode) == 0o700
    return False


def table() -> list[Row]:
    """Return the rows of the page's table of sockets."""
    section = PAGE.read_text().split("\n## Sockets\n")[1].split("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("|")]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert cells[0] == [
        "mode", "process", "socket", "interface", "who may speak", "what a peer could do"
    ]  # fmt: skip
    for row in cells[2:]:
        assert len(row) == 6, row
        assert all(row), row
        assert row[3].startswith("`"), row
    return [Row(row[0].replace("`", ""), row[1], row[2], row[3].strip("`")) for row in cells[2:]]


def rows(mode: str) -> list[Row]:
    """Return the rows of a mode that open something."""
    found = [row for row in table() if row.mode == mode]
    assert found, f"the table has no mode {mode!r}"
    return [row for row in found if row.interface != "none"]


@dataclass
class Scene:
    """The processes of a mode: all that have inherited its mark."""

    kinds: Mapping[str, str]
    """What of a command line makes a process which of the table's; the first that fits."""
    mark: str = field(default_factory=lambda: uuid.uuid4().hex)

    def environment(self, home: Path) -> dict[str, str]:
        """Return the environment of the commands of this mode, whose home is ``home``."""
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("EBBFLOW_", "PREFECT_", "SPARK_"))}
        return kept | {
            MARK: self.mark,
            "EBBFLOW_HOME": str(home / "ebbflow"),
            "PREFECT_HOME": str(home / "prefect"),
            "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
            "PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS": "240",
            "DO_NOT_TRACK": "1",
        }

    def processes(self) -> Iterator[tuple[psutil.Process, str]]:
        """Return the live processes of this mode and what they are in the table."""
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, OSError):
                if process.pid != os.getpid() and process.environ().get(MARK) == self.mark:
                    line = " ".join(process.cmdline())
                    yield process, next((kind for words, kind in self.kinds.items() if words in line), line)

    def listening(self) -> list[Listening]:
        """Return what they listen on now: TCP and Unix sockets; UDP sockets that are bound, too."""
        found, unix = [], _unix_sockets()
        for process, kind in self.processes():
            with contextlib.suppress(psutil.Error, OSError):
                for socket in process.net_connections("inet"):
                    bound = socket.status == psutil.CONN_LISTEN or (
                        socket.status == psutil.CONN_NONE and socket.laddr and not socket.raddr
                    )
                    if bound:
                        address = socket.laddr.ip.removeprefix("::ffff:")
                        found.append(Listening(process.pid, kind, address, socket.laddr.port))
                for path in _open_inodes(process.pid) & unix.keys():
                    found.append(Listening(process.pid, kind, unix[path]))
        return _owned_once(found)

    def end(self) -> None:
        """Kill what is left."""
        for process, _ in self.processes():
            with contextlib.suppress(psutil.Error):
                process.kill()


def _unix_sockets() -> dict[int, str]:
    """Return the addresses of Unix sockets that listen, by inode."""
    found = {}
    for line in Path("/proc/net/unix").read_text().splitlines()[1:]:
        parts = line.split(maxsplit=7)
        if int(parts[3], 16) & _LISTENING and len(parts) == 8:
            found[int(parts[6])] = parts[7]
    return found


def _open_inodes(pid: int) -> set[int]:
    found = set()
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            target = os.readlink(entry)
            if target.startswith("socket:["):
                found.add(int(target[8:-1]))
    return found


def _owned_once(found: list[Listening]) -> list[Listening]:
    """Leave out what a child has only inherited: a socket counts for the oldest process that has it."""
    first: dict[tuple[str, int], Listening] = {}
    for socket in sorted(found, key=lambda s: s.pid):
        first.setdefault((socket.address, socket.port), socket)
    return list(first.values())


def compare(found: list[Listening], wanted: list[Row]) -> tuple[list[str], list[str]]:
    """Return what listens and is not in the table, and what of the table does not listen.

    Of every process there may be several, and each has at most one socket for each of its rows, but for gloo's, of
    which each process group opens its own.
    """
    extra: list[str] = []
    present: set[Row] = set()
    for pid in sorted({socket.pid for socket in found}):
        mine = [socket for socket in found if socket.pid == pid]
        free = [row for row in wanted if mine[0].process in row.process.split(", ")]
        free.sort(key=lambda row: row.optional)
        for socket in sorted(mine, key=lambda s: (s.address, s.port)):
            row = next((row for row in free if socket.fits(row.interface)), None)
            if row is None:
                extra.append(f"{socket.process} listens on {socket.address}:{socket.port}")
            else:
                present.add(row)
                # one row for all sockets of a folder, and for those of all process groups
                if row.interface != "unix 0700" and "gloo" not in row.socket:
                    free.remove(row)
    missing = [f"{row.process}: {row.socket}" for row in wanted if row not in present and not row.optional]
    return extra, missing


def settle(scene: Scene, wanted: list[Row], going: Callable[[], bool], patience: float = 240.0) -> None:
    """Watch a mode until all of the table's sockets of it are there; nothing else may ever be.

    ``going`` tells whether it still runs.
    """
    end = time.monotonic() + patience
    missing = ["everything"]
    while missing:
        alive = going()
        extra, missing = compare(scene.listening(), wanted)
        assert not extra, f"not in the table of docs/security.md: {extra}"
        assert not missing or (alive and time.monotonic() < end), (
            f"in the table of docs/security.md, but nothing listens: {missing}"
        )
        time.sleep(0.1)
