"""Tables of Iceberg that take results: data files are added, and others removed, by one snapshot of the catalogue's.

After the "Iceberg Table Spec" of Apache Iceberg; a run's id is in the summary of its snapshot.
"""

from collections.abc import Sequence
from datetime import date
from typing import Any

from ebbflow.infra.errors import TableError
from ebbflow.infra.packages import require
from ebbflow.infra.protocols import Relation
from ebbflow.infra.storage.places import StorageLocation
from ebbflow.infra.tables.datatypes import arrow_schema
from ebbflow.infra.tables.filefooters import opened
from ebbflow.infra.tables.logs import iceberg
from ebbflow.infra.tables.logs.catalogues import IcebergCatalogue
from ebbflow.infra.tables.logs.versions import EXTRA, refused
from ebbflow.infra.tables.targets.model import (
    CommitConflictError,
    DataFile,
    TableChange,
    TargetState,
    discard,
)

RUN = "ebbflow.run"  # of a snapshot's summary
_KIND = "Iceberg"
_EPOCH = date(1970, 1, 1).toordinal()


class IcebergTarget:
    """A table of a catalogue of Iceberg, which is made unless it is there; its namespace must be.

    Args:
        catalogue: the namespace.
        table: the table's name in it.
    """

    keeps_keys = True
    needs_file = False

    def __init__(self, catalogue: IcebergCatalogue, table: str) -> None:
        self._catalogue, self._table = catalogue, table
        require("pyiceberg", f"{catalogue}/{table} is to be a table of Iceberg, which", EXTRA)
        self.name = f"the Iceberg table {table!r}"
        self._location: str | None = None  # of a table that is to be made, once its catalogue has said it

    def look(self, run: str) -> TargetState:
        found = self._catalogue.ask(self._loaded)
        if found is None:
            return TargetState(None)
        metadata = found.metadata
        schema = metadata.schema()
        required = frozenset(str(field.name) for field in schema.fields if field.required)
        columns = iceberg.columns_of(self._table, schema)
        return TargetState(columns, self._partitions(metadata), required, _has(found, run), found)

    def relation(self, state: TargetState) -> Relation:
        return iceberg.opened(StorageLocation(state.table.metadata_location), self._table).relation

    def data(self, state: TargetState, columns: Sequence[tuple[str, str]], run: str) -> StorageLocation:
        if state.table is not None:
            location = state.table.metadata.location
        else:
            location = self._location = self._catalogue.ask(
                lambda known: str(self._making(known, columns, ()).table_metadata.location), "make a table"
            )
        return StorageLocation(f"{location.rstrip('/')}/data")

    def kinds(self, columns: Sequence[tuple[str, str]]) -> tuple[tuple[str, str], ...]:
        nested = [name for name, kind in columns if kind.startswith(("array", "map", "struct"))]
        if nested:
            raise refused(
                self._table,
                _KIND,
                f"is to take the nested column {nested[0]!r}",
                "write its fields as columns of their own, or into a table of Delta Lake",
            )
        return tuple((name, "int" if kind in ("tinyint", "smallint") else kind) for name, kind in columns)

    def ids(self, state: TargetState, columns: Sequence[tuple[str, str]]) -> tuple[tuple[str, int], ...]:
        if state.table is None:  # as the library counts them
            return tuple((name, number) for number, (name, _) in enumerate(columns, 1))
        return tuple((str(field.name), int(field.field_id)) for field in state.table.schema().fields)

    def discard(self, data: StorageLocation, added: Sequence[DataFile]) -> None:
        discard(data, added)

    def commit(self, state: TargetState, change: TableChange, data: StorageLocation) -> None:
        from pyiceberg.exceptions import CommitFailedException, TableAlreadyExistsError

        # what takes long for many files is done before the catalogue is asked, whose answer has a time limit
        metadata = self._metadata(state, change)
        try:
            with iceberg.library_errors(self._table, StorageLocation(str(metadata.location))):
                entries = [_data_file(metadata, file, self._uri(metadata, file)) for file in change.added]
                gone = _of_paths(state.table, change.removed) if change.removed else []
        except TableError as error:
            if self._has_changed(self._catalogue.ask(self._loaded), state):  # which may have removed files
                raise CommitConflictError(f"{self.name} was changed by another: {error}") from error
            raise

        def made(known: Any) -> None:
            table = self._loaded(known)
            if self._has_changed(table, state):
                raise CommitConflictError(f"{self.name} was changed by another")
            try:
                self._commit(known, table, change, metadata, entries, gone)
            except (CommitFailedException, TableAlreadyExistsError) as error:
                raise CommitConflictError(f"{self.name} was changed by another: {error}") from error
            except Exception:
                if table is None and (now := self._loaded(known)) is not None and not _has(now, change.run):
                    raise CommitConflictError(f"{self.name} was made by another") from None
                raise

        self._catalogue.ask(made, f"commit to {self.name}")

    def _has_changed(self, now: Any, state: TargetState) -> bool:
        if now is None or state.table is None:
            return (now is None) != (state.table is None)
        return bool(now.metadata_location != state.table.metadata_location)

    def _metadata(self, state: TargetState, change: TableChange) -> Any:
        """Return the metadata of the table that files are added to, or those that it is to be made with."""
        if state.table is not None:
            return state.table.metadata
        return self._catalogue.ask(
            lambda known: self._making(known, change.columns, change.partitions).table_metadata,
            "make a table",
        )

    def _commit(
        self,
        known: Any,
        table: Any,
        change: TableChange,
        metadata: Any,
        entries: Sequence[Any],
        gone: Sequence[Any],
    ) -> None:
        if table is None:
            transaction = self._making(known, change.columns, change.partitions)
            self._check_same(transaction.table_metadata, metadata)
        else:
            table.metadata.properties["commit.retry.num-retries"] = "0"  # in memory: see ``commit``
            transaction = table.transaction()
        producer = transaction.update_snapshot(snapshot_properties={RUN: change.run})
        with producer.overwrite() if gone else producer.fast_append() as snapshot:
            for entry in entries:
                snapshot.append_data_file(entry)
            for entry in gone:
                snapshot.delete_data_file(entry)
        transaction.commit_transaction()

    def _check_same(self, said: Any, metadata: Any) -> None:
        """Refuse a catalogue that would make the table of other columns, or elsewhere, than it has said before."""
        if said.schema() != metadata.schema() or said.spec() != metadata.spec():
            raise TableError(f"{self.name} is to have other columns than its catalogue has said before")
        if said.location.rstrip("/") != metadata.location.rstrip("/"):
            raise TableError(
                f"{self.name} is to be at {said.location}, and its files were written for {metadata.location}"
            )

    def _uri(self, metadata: Any, file: DataFile) -> str:
        """Return the address of a file as the table's own location is written."""
        location = str(metadata.location).rstrip("/")
        root = iceberg.plain_path(location)
        if not file.path.startswith(
            f"{root}/"
        ):  # a catalogue that gives each try to make a table another place
            raise TableError(
                f"{self.name} is to be at {location}, and {file.path} was written for another place"
            )
        return f"{location}/{file.path.removeprefix(root).lstrip('/')}"

    def _loaded(self, known: Any) -> Any:
        from pyiceberg.exceptions import NoSuchTableError

        try:
            return known.load_table((*self._catalogue.namespace, self._table))
        except NoSuchTableError:
            return None

    def _making(self, known: Any, columns: Sequence[tuple[str, str]], partitions: Sequence[str]) -> Any:
        from pyiceberg.partitioning import PartitionField, PartitionSpec
        from pyiceberg.transforms import IdentityTransform

        numbers = {name: number for number, (name, _) in enumerate(columns, 1)}
        spec = PartitionSpec(
            *(
                PartitionField(numbers[name], 1000 + place, IdentityTransform(), name)
                for place, name in enumerate(partitions)
            )
        )
        return known.create_table_transaction(
            (*self._catalogue.namespace, self._table),
            _schema(columns),
            location=self._location,
            partition_spec=spec,
        )

    def _partitions(self, metadata: Any) -> tuple[str, ...]:
        from pyiceberg.transforms import IdentityTransform

        names = []
        for part in metadata.spec().fields:
            if not isinstance(part.transform, IdentityTransform):
                raise refused(
                    self._table,
                    _KIND,
                    f"is partitioned by {part.transform}({metadata.schema().find_field(part.source_id).name})",
                    "results are written into tables partitioned by columns' own values",
                )
            names.append(str(metadata.schema().find_field(part.source_id).name))
        return tuple(names)


def _schema(columns: Sequence[tuple[str, str]]) -> Any:
    from pyiceberg.io.pyarrow import pyarrow_to_schema
    from pyiceberg.table.name_mapping import MappedField, NameMapping

    mapping = NameMapping(
        [MappedField(field_id=number, names=[name]) for number, (name, _) in enumerate(columns, 1)]
    )
    return pyarrow_to_schema(arrow_schema(columns), name_mapping=mapping)


def _has(table: Any, run: str) -> bool:
    return any(one.summary is not None and one.summary.additional_properties.get(RUN) == run
               for one in table.metadata.snapshots)  # fmt: skip


def _of_paths(table: Any, removed: frozenset[str]) -> list[Any]:
    """Return the manifests' entries of the files at these paths, all of which the table must have."""
    place = StorageLocation(table.metadata_location)
    root = iceberg.plain_path(table.metadata.location)
    found = [
        task.file for task in table.scan().plan_files() if iceberg.path_of(place, root, task.file) in removed
    ]
    if len(found) != len(removed):
        raise CommitConflictError("files that were to be replaced are not the table's any more")
    return found


def _data_file(metadata: Any, file: DataFile, uri: str) -> Any:
    """Return a manifest's entry of a file, with the bounds that its footer tells."""
    from pyiceberg.io.pyarrow import (
        compute_statistics_plan,
        data_file_statistics_from_parquet_metadata,
        parquet_path_to_id_mapping,
    )
    from pyiceberg.manifest import DataFile as Entry
    from pyiceberg.manifest import DataFileContent, FileFormat
    from pyiceberg.typedef import Record

    schema = metadata.schema()
    (footer,) = opened(file.scheme, [file.entry])
    told = data_file_statistics_from_parquet_metadata(
        parquet_metadata=footer,
        stats_columns=compute_statistics_plan(schema, metadata.properties),
        parquet_column_mapping=parquet_path_to_id_mapping(schema),
    )
    kinds = {str(field.name): str(field.field_type) for field in schema.fields}
    return Entry.from_args(
        content=DataFileContent.DATA,
        file_path=uri,
        file_format=FileFormat.PARQUET,
        partition=Record(*(_typed(value, kinds[name]) for name, value in file.values)),
        file_size_in_bytes=file.size,
        sort_order_id=None,
        spec_id=metadata.default_spec_id,
        equality_ids=None,
        key_metadata=None,
        **told.to_serialized_dict(),
    )


def _typed(value: str | None, kind: str) -> Any:
    """Return a partition's value as manifests have it: dates as days since 1970."""
    if value is None or kind == "string":
        return value
    if kind == "date":
        return date.fromisoformat(value).toordinal() - _EPOCH
    return value == "true" if kind == "boolean" else int(value)
