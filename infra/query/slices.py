"""Slices of stages: parts of a stage's output that are checkpoints of their own.

Every slice is an ordinary checkpoint under its own fingerprint; an index beside the store, a directory for each
stage, says which slices of it exist. The index is a hint: what it names is looked up in the store, what it
forgets is computed again. A stage whose slices cover all cells has its checkpoint in them, without a copy.
"""

from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

from ebbflow.infra.errors import StorageError, TableError
from ebbflow.infra.protocols import Checkpoint, CheckpointStore, Relation
from ebbflow.infra.storage import files
from ebbflow.infra.storage.files import FileEntry
from ebbflow.infra.storage.jsonstore import JsonStore
from ebbflow.infra.storage.manifest import FINGERPRINT
from ebbflow.infra.tables import partitions
from ebbflow.infra.tables.clustering import outside
from ebbflow.infra.tables.filefooters import footer
from ebbflow.infra.tables.footers import comparable

Cells = tuple[int, int]  # first cell and the first one beyond


class SliceIndex:
    """Which slices of which stages exist. Every slice has an entry of its own, so threads and processes that
    add slices of one stage at the same moment do not overwrite each other's."""

    def __init__(self, store: CheckpointStore, index: JsonStore) -> None:
        self._store = store
        self._index = index

    def begun(self, output_fps: Collection[str]) -> dict[str, str]:
        """Return, of these stages, those of which slices may exist, each with the name of a division of it."""
        there = sorted(self._index.folders() & frozenset(output_fps))
        return {fp: names[0] for fp in there if (names := self.divisions(fp))}

    def divisions(self, output_fp: str) -> tuple[str, ...]:
        """Return the names of the divisions of which slices of the stage may exist."""
        return tuple(sorted({key.partition("|")[0] for key, *_ in self._read(output_fp)}))

    def find(
        self, output_fp: str, key: str, sources: Mapping[str, str], *, verified: bool = True
    ) -> dict[Cells, Checkpoint]:
        """Return the whole slices of the stage ``output_fp`` under the division ``key`` (its name, a bar
        and its borders); none overlap. ``verified`` is as in ``CheckpointStore.find``."""
        found: dict[Cells, Checkpoint] = {}
        covered: set[int] = set()
        for _, first, last, fingerprint in sorted(e for e in self._read(output_fp) if e[0] == key):
            cells = set(range(first, last))
            if cells & covered:
                continue
            checkpoint = self._store.find(fingerprint, sources, verified=verified)
            if checkpoint is not None:
                found[first, last] = checkpoint
                covered |= cells
        return found

    def add(self, output_fp: str, key: str, cells: Cells, fingerprint: str) -> None:
        """Note a slice that is in the store."""
        first, last = cells
        with suppress(StorageError):  # a hint only
            self._index.under(output_fp).put(f"{key}|{first}-{last}", [key, first, last, fingerprint])

    def _read(self, output_fp: str) -> list[tuple[str, int, int, str]]:
        entries = self._index.under(output_fp).values()
        return [(e[0], e[1], e[2], e[3]) for e in entries if _sound(e)]


def _sound(entry: Any) -> bool:
    """Tell whether an entry is [key, first, last, fingerprint]."""
    return (
        isinstance(entry, list)
        and len(entry) == 4
        and isinstance(entry[0], str)
        and type(entry[1]) is int
        and type(entry[2]) is int
        and 0 <= entry[1] < entry[2] <= 4096
        and isinstance(entry[3], str)
        and FINGERPRINT.fullmatch(entry[3]) is not None
    )


def covers(slices: Mapping[Cells, Checkpoint], cells: int) -> bool:
    """Tell whether slices that do not overlap make up all ``cells``."""
    return sum(last - first for first, last in slices) == cells


def together(output_fp: str, slices: Mapping[Cells, Checkpoint]) -> Checkpoint:
    """Return the checkpoint that the slices of a stage make up."""
    parts = [slices[cells] for cells in sorted(slices)]
    first = parts[0].relation
    relation = replace(
        first, name=f"ckpt_{output_fp}", files=tuple(file for p in parts for file in p.relation.files)
    )
    return Checkpoint(
        output_fp,
        parts[0].uri,
        relation,
        sum(p.rows for p in parts),
        sum(p.bytes for p in parts),
        sum(p.seconds for p in parts),
        max(p.created for p in parts),
        parts[0].sources,
    )


class FilePruning:
    """Leaves out files of a table that a range cannot touch, by their footers, which are read once."""

    def __init__(self) -> None:
        self._footers: dict[FileEntry, Any] = {}

    def narrowed(self, relation: Relation, column: str, low: float | None, high: float | None) -> Relation:
        """Return ``relation`` with the files that may hold values of ``column`` in [low, high), or without a value
        when ``low`` is ``None``; at least one file stays. A table that cannot be read stays as it is."""
        if relation.external or len(relation.files) < 2:
            return relation
        name, dtype = next((c for c in relation.columns if c[0].lower() == column.lower()), (column, ""))
        if name in relation.partitions:
            kept = tuple(
                f
                for f in relation.files
                if _within(partitions.values(relation, f.path)[name], dtype, low, high)
            )
            return replace(relation, files=kept or relation.files[:1])
        if relation.log is not None and relation.log.ids:  # the files have no common name for it
            return relation
        there = relation.stored(name)
        try:
            missing = [f for f in relation.files if f not in self._footers]
            metadata = files.in_parallel(lambda file: footer(relation.scheme, file), missing)
            self._footers.update(zip(missing, metadata, strict=True))
        except (TableError, StorageError):
            return relation
        kept = tuple(f for f in relation.files if not outside(self._footers[f], there, dtype, low, high))
        return replace(relation, files=kept or relation.files[:1])


def _within(value: partitions.PartitionValue, dtype: str, low: float | None, high: float | None) -> bool:
    """Tell whether a partition's value is in [low, high), or missing when ``low`` is ``None``."""
    place = comparable(value, dtype)
    if place is None or isinstance(place, str):
        return low is None or isinstance(place, str)
    return (low is None or place >= low) and (high is None or place < high)
