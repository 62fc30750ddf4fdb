"""A PostgreSQL server of the tests' own: temporary, on a Unix socket, without syncs."""

import glob
import os
import pwd
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

PASSWORD = "sw0rd/fish@home"
_OPTIONS = {
    "listen_addresses": "",
    "fsync": "off",
    "full_page_writes": "off",
    "synchronous_commit": "off",
    "autovacuum": "off",
    "max_connections": "80",
    "shared_buffers": "16MB",
    "log_min_messages": "fatal",
    "min_wal_size": "16MB",
    "max_wal_size": "64MB",
}
_DURABLE = {
    "fsync": "on",
    "full_page_writes": "on",
    "synchronous_commit": "on",
    "shared_buffers": "128MB",
    "max_wal_size": "1GB",
}


def binaries() -> Path | None:
    """Return the folder of PostgreSQL's server programs, if there are any."""
    found = shutil.which("initdb")
    if found and (Path(found).resolve().parent / "pg_ctl").exists():
        return Path(found).resolve().parent
    folders = [Path(p).parent for p in sorted(glob.glob("/usr/lib/postgresql/*/bin/initdb"), reverse=True)]
    return folders[0] if folders else None


@dataclass
class Server:
    """A running server. ``url`` names the database ``ledger`` of user ``tester``, who needs no password."""

    folder: Path
    programs: Path
    user: str | None
    durable: bool = False  # syncs, as in production

    @property
    def url(self) -> str:
        return self.named("ledger")

    def named(self, database: str, user: str = "tester") -> str:
        return f"postgresql://{user}@/{database}?host={self.folder}"

    @property
    def data(self) -> Path:
        return self.folder / "data"

    def run(self, *command: str) -> None:
        done = subprocess.run(
            [*_as(self.user), str(self.programs / command[0]), *command[1:]],
            cwd=self.folder, capture_output=True, text=True, timeout=120, check=False,
        )  # fmt: skip
        if done.returncode:
            log = self.folder / "log"
            said = log.read_text(errors="replace") if log.exists() else ""
            raise RuntimeError(
                f"{command[0]} failed: {done.stdout[-500:]} {done.stderr[-500:]} {said[-500:]}"
            )

    def start(self) -> None:
        chosen = {**_OPTIONS, **(_DURABLE if self.durable else {})}
        options = " ".join(f"-c {name}={value or chr(39) * 2}" for name, value in chosen.items())
        options += f" -c unix_socket_directories={self.folder}"
        self.run("pg_ctl", "-D", str(self.data), "-l", str(self.folder / "log"), "-o", options, "-w", "start")

    def stop(self, mode: str = "immediate") -> None:
        self.run("pg_ctl", "-D", str(self.data), "-m", mode, "-w", "stop")

    def create(self, database: str) -> str:
        """Make a database and return its address."""
        self.run("createdb", "-h", str(self.folder), "-U", "tester", database)
        return self.named(database)

    def sql(self, statement: str, database: str = "postgres") -> None:
        self.run("psql", "-X", "-q", "-v", "ON_ERROR_STOP=1", "-h", str(self.folder), "-U", "tester", "-d", database, "-c", statement)  # fmt: skip  # noqa: E501

    @property
    def pid(self) -> int:
        return int((self.data / "postmaster.pid").read_text().split()[0])

    @contextmanager
    def silent(self) -> Iterator[None]:
        """Stop all of the server's processes without ending them."""
        import psutil

        stopped = [psutil.Process(self.pid)]
        try:
            stopped[0].suspend()  # from now on it has no new children
            for process in stopped[0].children(recursive=True):
                with suppress(psutil.NoSuchProcess):  # a connection may just have ended
                    process.suspend()
                    stopped.append(process)
            yield
        finally:
            for process in reversed(stopped):
                with suppress(psutil.NoSuchProcess):
                    process.resume()


@contextmanager
def server(*, durable: bool = False, within: Path | None = None) -> Iterator[Server]:
    """Run a server for as long as the block lasts, in a new folder (``within`` one that is given)."""
    programs = binaries()
    assert programs is not None
    memory = Path("/dev/shm")
    roomy = not durable and memory.is_dir() and shutil.disk_usage(memory).free > 2**30
    # a socket's path must be short
    folder = Path(
        tempfile.mkdtemp(prefix="ebbpg", dir=within or (memory if roomy else tempfile.gettempdir()))
    )
    user = _owner()
    if user is not None:
        entry = pwd.getpwnam(user)
        os.chown(folder, entry.pw_uid, entry.pw_gid)
    found = Server(folder, programs, user, durable)
    try:
        found.run(
            "initdb",
            "-D",
            str(found.data),
            "-U",
            "tester",
            "-A",
            "trust",
            "-E",
            "UTF8",
            "--no-locale",
            "-N",
            "--wal-segsize=1",
        )
        hba = found.data / "pg_hba.conf"
        hba.write_text("local all secretive scram-sha-256\n" + hba.read_text())
        found.start()
        try:
            found.create("ledger")
            found.sql(f"CREATE ROLE secretive LOGIN PASSWORD '{PASSWORD}'")
            yield found
        finally:
            found.stop()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _owner() -> str | None:
    """Return as whom to run: PostgreSQL refuses root."""
    if os.geteuid() != 0:
        return None
    for name in ("postgres", "nobody"):
        try:
            pwd.getpwnam(name)
        except KeyError:
            continue
        return name
    raise RuntimeError("PostgreSQL refuses to run as root, and there is no user postgres or nobody")


def _as(user: str | None) -> list[str]:
    if user is None:
        return []
    if found := shutil.which("setpriv"):
        entry = pwd.getpwnam(user)
        return [found, f"--reuid={entry.pw_uid}", f"--regid={entry.pw_gid}", "--clear-groups"]
    if found := shutil.which("runuser"):
        return [found, "-u", user, "--"]
    raise RuntimeError("neither setpriv nor runuser is here to leave root with")
