"""A database of Prefect's with all its tables: a server that starts on it need not make them, most of its CPU."""

import os
import shutil
import sqlite3
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

_CACHE = Path(__file__).parents[1] / ".cache"
_LIMIT = 240.0  # seconds to make it in


def with_database(folder: Path, name: str = "prefect.db") -> Path:
    """Make ``folder``, a ``PREFECT_HOME``, with a database that has no flow runs yet, and return it."""
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(_template(), folder / name)
    return folder


def _template() -> Path:
    made = _CACHE / f"prefect-{version('prefect')}.db"
    if not made.exists():
        _CACHE.mkdir(exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="prefect-", dir=_CACHE) as folder:
            subprocess.run(
                [sys.executable, "-m", "prefect", "server", "database", "upgrade", "--yes"],
                env={**os.environ, "PREFECT_HOME": folder, "PREFECT_API_URL": "", "DO_NOT_TRACK": "1"},
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=_LIMIT,
                check=True,
            )
            with sqlite3.connect(f"{folder}/prefect.db") as database:
                database.execute("PRAGMA wal_checkpoint(TRUNCATE)")
            database.close()
            (Path(folder) / "prefect.db").replace(made)  # another process may be making it, too
    return made
