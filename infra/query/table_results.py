"""Results of queries as rows of tables: data files that the engine writes, and one commit.

A commit carries the id of the query's run, so that a run that was lost and is run again writes once. Where another
writer was quicker, the operation is done again on the table as it is then: files that were only added stay, those
that replace others are written again.
"""

import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from ebbflow.infra.clock import Clock, SystemClock
from ebbflow.infra.errors import StageFailedError, StorageError, TableError
from ebbflow.infra.protocols import Arm, Checkpoint, FileLayout, Relation, SqlEngine, StageJob
from ebbflow.infra.query import table_rows
from ebbflow.infra.query.table_rows import IntoMode
from ebbflow.infra.query.table_streams import stream_into
from ebbflow.infra.storage.filesystems import translated
from ebbflow.infra.storage.places import StorageLocation
from ebbflow.infra.tables.logs.catalogues import SCHEME, IcebergCatalogue
from ebbflow.infra.tables.targets.delta import DeltaTarget
from ebbflow.infra.tables.targets.folder import FolderTarget
from ebbflow.infra.tables.targets.iceberg import IcebergTarget
from ebbflow.infra.tables.targets.model import (
    CommitConflictError,
    DataFile,
    TableChange,
    TableTarget,
    TargetState,
    discard,
    discard_others,
    folder_name,
    nulls,
    settled,
)
from ebbflow.planners.errors import OptionError

IntoFormat = Literal["delta", "parquet"]
_COMMITS = 15  # of an operation that others were quicker than
_REWRITES = 5  # of files that replace others
_TRIES = 3  # of a stage that writes


@dataclass(frozen=True)
class Into:
    """Where a result is written, and how."""

    place: StorageLocation | IcebergCatalogue
    table: str = ""  # of a catalogue
    format: IntoFormat = "delta"
    mode: IntoMode = "append"
    keys: tuple[str, ...] = ()  # columns that rows are merged by
    partitions: tuple[str, ...] = ()  # of a table that is made

    @classmethod
    def of(
        cls, address: str, format: IntoFormat, mode: IntoMode, keys: Sequence[str], partitions: Sequence[str]
    ) -> "Into":
        """Return what options name. Raises ``OptionError``."""
        if mode == "merge" and not keys:
            raise OptionError(
                "into_mode merge (--into-mode) needs into_key (--into-key), the columns to merge by"
            )
        if keys and mode != "merge":
            raise OptionError(f"into_key (--into-key) needs into_mode merge (--into-mode); got {mode}")
        for said, names in (
            ("into_key (--into-key)", keys),
            ("into_partition (--into-partition)", partitions),
        ):
            if len({name.lower() for name in names}) < len(names):
                raise OptionError(f"{said} names a column twice; got {', '.join(names)}")
        rest = (mode, tuple(keys), tuple(partitions))
        if not address.startswith(SCHEME):
            return cls(StorageLocation(address), "", format, *rest)
        namespace, _, table = address.rstrip("/").rpartition("/")
        try:
            return cls(IcebergCatalogue.of(namespace), table, "delta", *rest)
        except OptionError as error:
            raise OptionError(
                f"into (--into) of Iceberg is iceberg://CATALOG/NAMESPACE/TABLE; got {address!r:.120}"
            ) from error

    def target(self) -> TableTarget:
        """Return the table. Raises ``TableError``, and ``EngineUnavailableError`` without its library."""
        if isinstance(self.place, IcebergCatalogue):
            return IcebergTarget(self.place, self.table)
        return FolderTarget(self.place) if self.format == "parquet" else DeltaTarget(self.place)


def write_into(
    checkpoint: Checkpoint,
    into: Into,
    run: str,
    engine: SqlEngine,
    note: Callable[[str], object] = lambda text: None,
    clock: Clock | None = None,
) -> bool:
    """Write all rows of a result into a table by stages of ``engine`` and one commit; tell whether this call did.

    Args:
        checkpoint: the result.
        into: the table, and what becomes of the rows that it has.
        run: id of the query's run: one that was committed before, by a try that was lost, is not again.
        engine: writes the data files; it must be open.
        note: hears what a user should know.
        clock: for waits between tries.

    Raises:
        TableError: the table cannot take the rows, or others were quicker too often.
        StorageError: files cannot be written.
        EngineError: a stage failed.
    """
    target = into.target()
    writer = _Writer(checkpoint, into, run, engine, target, clock or SystemClock())
    for number in range(_COMMITS):
        state = target.look(run)
        if state.written:  # perhaps by this try, whose commit was done and not answered: its files stay
            return False
        if isinstance(target, DeltaTarget) and (kept := target.kept_by_library(state, into.mode)):
            if into.mode not in ("append", "overwrite"):
                raise TableError(
                    f"{target.name} has {kept}, which only its library keeps: --into-mode append or overwrite"
                )
            note(f"{target.name} has {kept}: rows stream through its library in this process")
            writer.forget()
            assert isinstance(into.place, StorageLocation)
            return stream_into(checkpoint, into.place, into.mode, run)
        try:
            writer.write(state)
            return True
        except CommitConflictError as conflict:
            said = str(conflict)
            writer.clock.sleep(min(0.05 * 2**number, 2.0))
        except (TableError, StorageError, StageFailedError):
            if not target.look(run).written:  # else another try has deleted what this one had written
                raise
            return False
    if target.look(run).written:
        return False
    writer.forget()
    raise TableError(
        f"{target.name} was changed by others {_COMMITS} times while it was written into: {said}"
    )


class _Writer:
    """Writes one result's data files and commits them."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        into: Into,
        run: str,
        engine: SqlEngine,
        target: TableTarget,
        clock: Clock,
    ) -> None:
        self._checkpoint, self._into, self._run = checkpoint, into, run
        self._engine, self._target = engine, target
        self.clock = clock
        self._unique = False  # whether the keys that rows are merged by are known to be
        self._rewrites = 0
        # files that are written and not committed, where they are, and what table they are for
        self._written: tuple[object, StorageLocation, tuple[DataFile, ...]] | None = None

    def write(self, state: TargetState) -> None:
        """Write into the table as it was looked at. Raises ``CommitConflictError`` where it has changed."""
        into, target = self._into, self._target
        if into.mode == "create" and state.columns is not None:
            raise TableError(
                f"{target.name} is there already; --into-mode append or overwrite writes into it"
            )
        rows = self._checkpoint.relation
        columns = table_rows.fitted(target, state, rows.columns)
        keys = table_rows.partitions_of(target.name, state, columns, into.partitions)
        shape = table_rows.Shape(columns, keys, target.ids(state, columns), target.keeps_keys)
        merge = None
        if into.mode == "merge":
            if self._rewrites == _REWRITES:
                raise TableError(
                    f"{target.name} was changed by others {_REWRITES} times while rows were merged"
                )
            self._rewrites += 1
            merge = table_rows.merge(target, state, rows, into.keys, shape)
        known = (state.columns is None, shape)
        if self._written is None or merge is not None or self._written[0] != known:
            self.forget()
            data = target.data(state, columns, self._run)
            if merge is not None:
                self._check_unique(data, merge)
            self._written = (known, data, self._files(data, shape, merge, new=state.columns is None))
        _, data, added = self._written
        self._check(state, added, merge)
        gone = merge.replaced if merge else table_rows.removed(target, state, into.mode, keys, added)
        change = TableChange(self._run, columns, keys, added, gone)
        target.commit(state, change, data)
        discard_others(data, self._run, added)
        self._written = None

    def forget(self) -> None:
        """Delete data files that were written and not committed."""
        if self._written is not None:
            _, data, added = self._written
            self._target.discard(data, added)
            self._written = None

    def _files(
        self, data: StorageLocation, shape: table_rows.Shape, merge: table_rows.Merge | None, *, new: bool
    ) -> tuple[DataFile, ...]:
        rows = self._checkpoint.relation
        sql = table_rows.statement(self._engine.name, shape, rows, merge)
        arms = table_rows.arms("duckdb", shape, rows, merge)
        relations = (rows,) if merge is None else (rows, merge.relation)
        staged, count = self._staged(data, "rows", sql, arms, relations, shape.layout)
        try:
            made = settled(staged, data, shape.partitions, folders=not shape.keeps_keys)
        except TableError:
            staged.remove_folder("")
            raise
        if (
            there := sum(file.rows for file in made)
        ) != count:  # a try of a task that was late has written, too
            discard(data, made)
            raise StageFailedError(f"{there} rows of {count} are in files for {self._target.name}")
        kept = tuple(file for file in made if file.rows)
        if not kept and self._target.needs_file and (new or self._into.mode == "overwrite"):
            kept = made[:1]
        discard(data, [file for file in made if not file.rows and file not in kept])
        return kept

    def _check(self, state: TargetState, added: Sequence[DataFile], merge: table_rows.Merge | None) -> None:
        """Refuse files that lack rows, or have NULL where the table has none."""
        found = sum(file.rows for file in added)
        if merge is None and found != self._checkpoint.rows:
            self.forget()
            raise StageFailedError(
                f"{found} rows of {self._checkpoint.rows} were written for {self._target.name}; nothing was committed"
            )
        for name in sorted(state.required):
            if any(nulls(file, name) != 0 for file in added if name not in dict(file.values)):
                self.forget()
                raise TableError(
                    f"{self._target.name} has a column {name!r} without NULL, and the rows have some"
                )

    def _check_unique(self, data: StorageLocation, merge: table_rows.Merge) -> None:
        """Refuse a source in which two rows have one key, or one has none."""
        if self._unique:
            return
        rows = self._checkpoint.relation
        sql, same = (table_rows.twice(name, rows, merge.keys) for name in (self._engine.name, "duckdb"))
        staged, _ = self._staged(data, "keys", sql, (Arm(same),), (rows,), None)
        try:
            found = table_rows.first_row(staged)
        finally:
            staged.remove_folder("")
        if found is not None:
            worded = ", ".join(f"{name} = {found[name]!r}" for name in merge.keys)
            why = (
                "NULL"
                if any(found[name] is None for name in merge.keys)
                else f"in {found[table_rows.COUNTED]} rows"
            )
            raise TableError(f"rows cannot be merged into {self._target.name} by {worded}, which is {why}")
        self._unique = True

    def _staged(
        self,
        data: StorageLocation,
        what: str,
        sql: str,
        arms: tuple[Arm, ...],
        relations: tuple[Relation, ...],
        layout: FileLayout | None,
    ) -> tuple[StorageLocation, int]:
        """Run a stage into a new directory below ``data``; return that, and how many rows it has written."""
        for tried in range(1, _TRIES + 1):
            staged = data.under(folder_name(self._run))
            with translated(f"write to {self._target.name}"):
                staged.fs().create_dir(staged.root, recursive=True)
            job = StageJob(
                f"into-{uuid.uuid4().hex[:12]}",
                f"{what} of {self._target.name}",
                sql,
                relations,
                staged,
                layout=layout,
                arms=arms,
            )
            try:
                return staged, self._engine.run(job).rows
            except BaseException as error:
                staged.remove_folder("")
                again = isinstance(error, StageFailedError) and self._engine.name == "spark"
                if not again or tried == _TRIES:
                    raise
        raise AssertionError("unreachable")
