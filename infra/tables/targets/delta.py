"""Tables of Delta Lake that take results: data files are added, and others removed, by one commit of the log.

After "Delta Transaction Log Protocol" of the Delta Lake project; a run's id is the application of a ``txn`` action,
by which a run that has written is known, and a second commit of it is a conflict.
"""

import json
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import date, datetime, timedelta
from decimal import Decimal
from typing import Any
from urllib.parse import unquote

from ebbflow.infra.errors import TableError
from ebbflow.infra.packages import require
from ebbflow.infra.protocols import Relation
from ebbflow.infra.storage import files
from ebbflow.infra.storage.places import StorageLocation
from ebbflow.infra.tables.datatypes import arrow_schema, spark_type
from ebbflow.infra.tables.logs import delta, versions
from ebbflow.infra.tables.logs.versions import EXTRA
from ebbflow.infra.tables.targets.model import (
    MARK,
    RUNS,
    CommitConflictError,
    DataFile,
    TableChange,
    TargetState,
    discard,
    nulls,
)

_LONGEST = 32  # characters of a text in bounds
_EXACT = 15  # digits of a decimal that a JSON number keeps
_WRITER = frozenset(
    {
        "appendOnly", "invariants", "checkConstraints", "generatedColumns", "timestampNtz", "v2Checkpoint",
        "vacuumProtocolCheck", "domainMetadata", "deletionVectors", "changeDataFeed", "columnMapping",
    }
)  # fmt: skip  # known here: used ones that only the library can keep are told by ``kept_by_library``


class DeltaTarget:
    """A table of Delta Lake in a directory, which is made unless it is there."""

    keeps_keys = False
    needs_file = False

    def __init__(self, place: StorageLocation) -> None:
        require("deltalake", f"{place} is to be a table of Delta Lake, which", EXTRA)
        self.place = place
        self.name = f"the Delta Lake table {_name(place)!r}"

    def look(self, run: str) -> TargetState:
        from deltalake import DeltaTable

        target, options = delta.address(self.place)
        with delta.translated(_name(self.place), self.place, "write into"):
            if not DeltaTable.is_deltatable(target, storage_options=options):
                self._check_empty()
                return TargetState(None)
            table = DeltaTable(target, storage_options=options)
            written = table.transaction_version(application(run)) is not None
            columns, required = _columns(_name(self.place), table)
            keys = tuple(str(column) for column in table.metadata().partition_columns)
            return TargetState(columns, keys, required, written, table)

    def relation(self, state: TargetState) -> Relation:
        return delta.opened(self.place, _name(self.place), pinned=str(state.table.version())).relation

    def kinds(self, columns: Sequence[tuple[str, str]]) -> tuple[tuple[str, str], ...]:
        return tuple(columns)

    def data(self, state: TargetState, columns: Sequence[tuple[str, str]], run: str) -> StorageLocation:
        return self.place

    def ids(self, state: TargetState, columns: Sequence[tuple[str, str]]) -> tuple[tuple[str, int], ...]:
        return ()

    def kept_by_library(self, state: TargetState, mode: str) -> str:
        """Return what of a table only its library can keep while it writes the rows itself; empty for nothing.

        ``mode`` is how rows are written: an append leaves files with deletion vectors as they are.
        Raises ``TableError``.
        """
        if state.table is None:
            return ""
        known = state.table.metadata().configuration
        if any(key.startswith("delta.constraints.") for key in known):
            return "constraints"
        if (known.get("delta.columnMapping.mode") or "none").lower() != "none":
            return "a column mapping"
        for field in state.table.schema().fields:
            said = " ".join(field.metadata)
            for mark in ("delta.invariants", "delta.generationExpression", "delta.identity"):
                if mark in said:
                    return f"rules of the column {field.name!r}"
        if strange := sorted(set(state.table.protocol().writer_features or ()) - _WRITER):
            return f"the feature {strange[0]}"
        with delta.translated(_name(self.place), self.place):
            deleting = mode not in ("append", "create") and delta.has_deletion_vectors(state.table)
        return "rows deleted by deletion vectors" if deleting else ""

    def discard(self, data: StorageLocation, added: Sequence[DataFile]) -> None:
        discard(data, added)

    def commit(self, state: TargetState, change: TableChange, data: StorageLocation) -> None:
        from deltalake import CommitProperties, Schema, Transaction
        from deltalake.transaction import create_table_with_add_actions

        schema = Schema.from_arrow(arrow_schema(change.columns))
        properties = CommitProperties(
            app_transactions=[Transaction(application(change.run), 1)],
            custom_metadata={"ebbflow.run": change.run},
            max_commit_retries=0,  # whoever looks again sees whether another try of the run was quicker
        )
        added = [self._added(file, change.columns) for file in change.added]
        with self._conflicts(change.run, state):
            if state.table is None:
                target, options = delta.address(self.place)
                create_table_with_add_actions(
                    target,
                    schema,
                    added,
                    partition_by=list(change.partitions),
                    storage_options=options,
                    commit_properties=properties,
                )
                return
            state.table.create_write_transaction(
                [*added, *self._removals(state, change.removed)],
                "append",
                state.table.schema(),
                list(change.partitions),
                commit_properties=properties,
            )

    def _check_empty(self) -> None:
        """Refuse a directory that holds other files than those of tries that were lost before they made the table."""
        for item in files.listing(self.place.fs(), self.place.root, recursive=True):
            name = item.base_name
            inside = item.path.removeprefix(f"{self.place.root.rstrip('/')}/")
            # in a directory of a try whatever name an engine gives; elsewhere, as in ``_date=1``, only what is ours
            of_a_try = inside.startswith(f".{MARK}") or name.startswith(MARK)
            if item.path.endswith(f"/{RUNS}") or (item.is_file and not of_a_try and not files.hidden(name)):
                raise TableError(
                    f"{self.place} is no table of Delta Lake and not empty: it holds {name}; --into-format parquet "
                    f"writes into a directory of Parquet files"
                )

    def _added(self, file: DataFile, columns: Sequence[tuple[str, str]]) -> Any:
        from deltalake.transaction import AddAction

        return AddAction(
            file.path.removeprefix(f"{self.place.root.rstrip('/')}/"),
            file.size,
            dict(file.values),
            round(time.time() * 1000),
            True,
            statistics(file, columns),
        )

    def _removals(self, state: TargetState, removed: frozenset[str]) -> list[Any]:
        from deltalake.transaction import RemoveAction

        if not removed:
            return []
        import pyarrow as pa

        name, now = _name(self.place), round(time.time() * 1000)
        deleted = self.relation(state).log
        if deleted is not None and (both := sorted(removed & {path for path, _ in deleted.deleted})):
            raise versions.refused(
                name,
                "Delta Lake",
                f"has rows deleted by a deletion vector in {both[0]}, which is to be replaced",
                "rewrite such files first (REORG TABLE ... APPLY (PURGE))",
            )
        actions = pa.table(state.table.get_add_actions(flatten=True))
        keys = [str(column) for column in state.table.metadata().partition_columns]
        found = []
        for row in actions.to_pylist():
            if delta.path_of(self.place, name, row["path"]) in removed:
                values = {key: _text(row.get(f"partition.{key}")) for key in keys}
                found.append(
                    RemoveAction(
                        unquote(row["path"]), True, now, int(row["size_bytes"]), values if keys else None
                    )
                )
        if len(found) != len(removed):
            raise CommitConflictError("files that were to be replaced are not the table's any more")
        return found

    @contextmanager
    def _conflicts(self, run: str, state: TargetState) -> Iterator[None]:
        from deltalake.exceptions import DeltaError

        try:
            with delta.translated(_name(self.place), self.place, "write into"):
                yield
        except TableError as error:
            if isinstance(error.__cause__, DeltaError) and _version(self.look(run)) != _version(state):
                raise CommitConflictError(str(error)) from error
            raise


def _version(state: TargetState) -> int:
    return -1 if state.table is None else int(state.table.version())


def application(run: str) -> str:
    """Return the id of the application that a run is to a table."""
    return f"ebbflow-{run}"


def statistics(file: DataFile, columns: Sequence[tuple[str, str]]) -> str:
    """Return the statistics of a file as the log has them: rows, and of columns that are not nested the rows
    without a value and bounds, which may be wider than the values."""
    low: dict[str, Any] = {}
    high: dict[str, Any] = {}
    without: dict[str, int] = {}
    kinds = dict(columns)
    for name, groups in file.footer.bounds.items():
        count = nulls(file, name)
        if count is None or kinds.get(name, "struct").startswith(("array", "map", "struct", "binary")):
            continue
        without[name] = count
        valued = [one for one, rows in zip(groups, file.footer.rows, strict=True) if one.nulls != rows]
        if not valued or any(one.low is None or one.high is None for one in valued):
            continue
        least = _bound(min(one.low for one in valued), kinds[name], up=False)
        most = _bound(max(one.high for one in valued), kinds[name], up=True)
        if least is not None and most is not None:
            low[name], high[name] = least, most
    return json.dumps(
        {"numRecords": file.rows, "minValues": low, "maxValues": high, "nullCount": without},
        ensure_ascii=False,
    )


def _bound(value: Any, kind: str, *, up: bool) -> Any:
    """Return a bound as JSON has it, widened where that cannot hold it.

    ``None`` where it cannot be told, and for fractions: footers leave NaN out, which is greater than all numbers.
    """
    if isinstance(value, datetime):
        value = value.replace(tzinfo=None)
        whole = value.replace(microsecond=value.microsecond // 1000 * 1000)
        if up and whole < value:
            whole += timedelta(milliseconds=1)
        return whole.isoformat(timespec="milliseconds") + ("Z" if kind == "timestamp" else "")
    if isinstance(value, date):
        return value.isoformat()
    if isinstance(value, Decimal):
        return float(value) if len(value.as_tuple().digits) <= _EXACT else None
    if isinstance(value, str):
        if len(value) <= _LONGEST:
            return value
        return None if up else value[:_LONGEST]
    return value if isinstance(value, bool | int) else None


def _columns(name: str, table: Any) -> tuple[tuple[tuple[str, str], ...], frozenset[str]]:
    import pyarrow as pa

    columns = []
    for field in pa.schema(table.schema().to_arrow()):
        kind = spark_type(field.type)
        if kind is None:
            raise TableError(
                f"column {field.name!r} of the Delta Lake table {name!r} has the type {field.type}, which Spark SQL "
                f"lacks"
            )
        columns.append((str(field.name), kind))
    return tuple(columns), frozenset(str(f.name) for f in table.schema().fields if not f.nullable)


def _text(value: Any) -> str | None:
    if value is None:
        return None
    return str(value).lower() if isinstance(value, bool) else str(value)


def _name(place: StorageLocation) -> str:
    return place.root.rstrip("/").rpartition("/")[2]
