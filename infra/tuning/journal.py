"""Optuna's journal file: the study of a tuning run that one process runs."""

from contextlib import suppress
from pathlib import Path
from typing import Any

from ebbflow.infra.storage import private
from ebbflow.infra.storage.filesystems import translated


def open_journal(path: Path) -> Any:
    """Return Optuna's storage in the file ``path``, of which a write that was cut short leaves nothing.

    Optuna takes what a full disk or SIGKILL left of a line for the beginning of the next one, and could never read
    such a journal again. One process writes to it: the tuning run's directory is locked. Its directory is made.
    Raises ``StorageError``, as do all methods that write.
    """
    from optuna.storages import JournalStorage
    from optuna.storages.journal import JournalFileBackend

    class Journal(JournalFileBackend):  # type: ignore[misc]
        def append_logs(self, logs: list[dict[str, Any]]) -> None:
            with translated(f"write {path}"):
                try:
                    super().append_logs(logs)
                except OSError:
                    _cut(path)
                    raise

    with translated(f"make {path.parent}"):
        private.make_folder(path.parent)
    with translated(f"open {path}"):
        private.reserve(path)
        _cut(path)
        return JournalStorage(Journal(str(path)))


def _cut(path: Path) -> None:
    """Take away what follows a file's last whole line."""
    with suppress(FileNotFoundError), path.open("r+b") as file:
        content = file.read()
        if (whole := content.rfind(b"\n") + 1) < len(content):
            file.truncate(whole)
