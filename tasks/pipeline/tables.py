"""Where a query finds its tables when they are in several folders, or are results of other queries."""

import os
from contextlib import suppress
from pathlib import Path

from ebbflow.infra.errors import StorageError
from ebbflow.infra.storage import private
from ebbflow.infra.storage.filesystems import split
from ebbflow.infra.tables.parquet import discover
from ebbflow.planners.errors import OptionError
from ebbflow.tasks.pipeline.file.requests import Fill, resolved
from ebbflow.tasks.pipeline.file.spec import Pipeline, StepSpec


def tables_of(step: StepSpec, pipeline: Pipeline, folder: Path, fill: Fill) -> str | None:
    """Return the one folder that holds all tables of a query step; ``None`` for a catalogue's.

    Several folders of this machine are put together by links in the run's folder. Raises ``OptionError``,
    ``TableError``, ``StorageError``.
    """
    named = [resolved(fill(text), pipeline) for text in step.options.get("tables", ())]
    if len(named) <= 1:
        return named[0] if named else None
    if remote := [one for one in named if split(one)[0] != "file"]:
        raise OptionError(f"tables of several folders must be on this machine; got {remote[0]}")
    place = folder / "tables" / step.name
    seen: dict[str, str] = {}
    try:
        private.make_folder(place)
        for one in named:
            discover(one)  # says what is wrong with a folder that has no tables
            entries = [Path(one)] if Path(one).is_file() else sorted(Path(one).iterdir())
            for entry in entries:
                if entry.name.startswith((".", "_")):
                    continue
                key = entry.name.lower()
                if key in seen and seen[key] != str(entry):
                    raise OptionError(
                        f"tables must have different names; {entry.name} is in {seen[key]} and {entry}"
                    )
                seen[key] = str(entry)
                link(place / entry.name, entry)
    except OSError as error:
        raise StorageError(f"cannot put the tables together in {place}: {error.strerror or error}") from error
    return str(place)


def link(name: Path, target: Path) -> None:
    """Make ``name`` a link to ``target``, in place of an older one."""
    with suppress(FileNotFoundError):
        if os.readlink(name) == str(target):
            return
        name.unlink()
    name.symlink_to(target)
