"""DuckDB databases whose statements reach named places only: of the engine's own rules the second line of defense.

What SQL may call is decided where it is parsed; this holds whatever gets past that. DuckDB calls none of it a
sandbox: the process keeps the rights of its user.
"""

import os
import threading
from collections.abc import Iterable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from ebbflow.infra.protocols import Relation
from ebbflow.infra.storage.places import StorageLocation

# What the engine itself changes after the lock; none of it opens a place.
_CHANGEABLE = (
    "threads", "memory_limit", "enable_progress_bar", "enable_progress_bar_print", "progress_bar_time",
    "enable_profiling",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class AllowedAccess:
    """What the statements of a database may touch, besides its spill directory."""

    files: frozenset[str] = frozenset()  # to read
    folders: frozenset[str] = frozenset()  # to read and write
    everything: bool = False  # all that the process may: the user has allowed functions that read files

    @classmethod
    def of(
        cls, relations: Iterable[Relation], places: Iterable[StorageLocation], everything: bool = False
    ) -> "AllowedAccess":
        """Return the reach of ``relations`` and the directories ``places``, as far as they are of this machine.

        What lies elsewhere is read and written by Arrow, and no statement reaches it.
        """
        real: dict[
            str, str
        ] = {}  # of directories, which many files share: DuckDB compares what links point at

        def resolved(path: str) -> str:
            folder, _, name = path.rpartition("/")
            if folder not in real:
                real[folder] = os.path.realpath(folder or "/").rstrip("/")
            return f"{real[folder]}/{name}"

        files = (f.path for r in relations if r.scheme == "file" and not r.external for f in r.files)
        folders = (place.root.rstrip("/") for place in places if place.local)
        return cls(frozenset(map(resolved, files)), frozenset(map(os.path.realpath, folders)), everything)

    def covers(self, other: "AllowedAccess") -> bool:
        """Tell whether ``other`` is within this one."""
        if self.everything:
            return True
        within = tuple(f"{folder}/" for folder in self.folders)
        return (
            not other.everything
            and all(f"{folder}/".startswith(within) for folder in other.folders)
            and all(path in self.files or path.startswith(within) for path in other.files)
        )

    def joined(self, other: "AllowedAccess") -> "AllowedAccess":
        """Return what this one and ``other`` reach together."""
        return AllowedAccess(
            self.files | other.files, self.folders | other.folders, self.everything or other.everything
        )


NOTHING = AllowedAccess()


def configuration() -> dict[str, Any]:
    """Return what every database begins with: nothing is installed, no secret of the user's is read, no variable of
    Python is a table."""
    return {
        "autoinstall_known_extensions": "false",  # nothing is fetched from the network
        "allow_community_extensions": "false",
        "allow_persistent_secrets": "false",
        "python_enable_replacements": "false",
        "allowed_configs": list(_CHANGEABLE),
    }


def lock(connection: Any, reach: AllowedAccess) -> None:
    """Hold all statements of the connection's database to ``reach``, for good.

    The order matters: places can be named only as long as the rest is open, and the lock comes last. A closed
    database without named places could not read its own tables, which views name by their paths.
    """
    if reach.everything:
        said = ["allow_persistent_secrets = true"]
    else:
        said = [
            f"allowed_paths = {_listed(reach.files)}",
            f"allowed_directories = {_listed(reach.folders)}",
            "enable_external_access = false",
            "autoload_known_extensions = false",
        ]
    for setting in (*said, "lock_configuration = true"):
        connection.execute(f"SET {setting}")


class Ahead:
    """A database of one thread, opened before it is needed: that takes longer than a small statement does.

    Nobody has it before it is taken; who takes it sets what it lacks, and locks it. Safe for several threads.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._opening: tuple[int, Future[Any]] | None = None  # by which process

    def begin(self) -> None:
        """Open the next one in a thread, unless it is there or on its way. Raises nothing."""
        with self._lock:
            if self._opening is not None and self._opening[0] == os.getpid():
                return
            found: Future[Any] = Future()
            # no daemon: Python ends those in the middle of DuckDB's C++, which then aborts the process
            opener = threading.Thread(target=self._open, args=(found,), name="ebbflow-database", daemon=False)
            try:
                opener.start()
            except RuntimeError:  # there may be no more threads: whoever takes it opens it
                return
            self._opening = os.getpid(), found

    def take(self, **settings: str) -> Any:
        """Return a connection to an empty database with these settings, which nothing else has. Raises
        ``duckdb.Error``."""
        with self._lock:
            opening, self._opening = self._opening, None
        connection = None
        if opening is not None and opening[0] == os.getpid():  # a child cannot use its parent's
            with suppress(Exception):  # what was in the way then may not be now
                connection = opening[1].result()
        if connection is None:
            connection = self._opened()
        for name, value in settings.items():
            connection.execute(f"SET {name} = {_text(value)}")
        return connection

    def close(self) -> None:
        """Close what nobody has taken, once it is open; does not wait for that."""
        with self._lock:
            opening, self._opening = self._opening, None
        if opening is not None and opening[0] == os.getpid():
            opening[1].add_done_callback(lambda one: one.exception() or one.result().close())

    def _open(self, found: "Future[Any]") -> None:
        try:
            found.set_result(self._opened())
        except BaseException as error:  # whoever takes it tries again
            found.set_exception(error)

    @staticmethod
    def _opened() -> Any:
        import duckdb

        return duckdb.connect(config={**configuration(), "threads": "1", "TimeZone": "UTC"})


def opened_on(name: str, rows: Any) -> Any:
    """Return a connection to a new database that holds the ``pyarrow.Table`` ``rows`` as the table ``name`` and
    reaches nothing else: for predicates, which are the user's text."""
    import duckdb

    connection = duckdb.connect(":memory:", config={**configuration(), "threads": 1, "TimeZone": "UTC"})
    connection.register("ebbflow_rows", rows)
    quoted = '"' + name.replace('"', '""') + '"'
    connection.execute(f"CREATE TABLE {quoted} AS SELECT * FROM ebbflow_rows")
    connection.unregister("ebbflow_rows")
    lock(connection, NOTHING)
    return connection


def _listed(texts: Iterable[str]) -> str:
    return "[" + ", ".join(map(_text, sorted(texts))) + "]"


def _text(value: str) -> str:
    return "'" + value.replace("'", "''") + "'"
