"""Results of queries as rows of tables of Delta Lake that only their library can keep: it writes the rows itself."""

from typing import Literal

from ebbflow.infra.packages import require
from ebbflow.infra.protocols import Checkpoint
from ebbflow.infra.query.results import read_batches
from ebbflow.infra.storage.places import StorageLocation
from ebbflow.infra.tables.logs import delta
from ebbflow.infra.tables.logs.versions import EXTRA
from ebbflow.infra.tables.targets.delta import application

_RETRIES = 15  # of a commit that others were quicker than


def stream_into(
    checkpoint: Checkpoint, place: StorageLocation, mode: Literal["append", "overwrite"], run: str
) -> bool:
    """Write all rows into the table of Delta Lake in ``place``, in one commit; tell whether this call did.

    Rows stream through. A table that is missing is made. The commit carries ``run``, the id of the query's run: one
    that was made before, by a try that was lost afterwards, is not made again. Constraints, partitions and the schema
    of the table are its library's to keep.

    Raises ``TableError`` where the table cannot take the rows, ``StorageError``, and ``EngineUnavailableError``
    without the library.
    """
    import pyarrow as pa

    require("deltalake", f"{place} is to be a table of Delta Lake, which", EXTRA)
    from deltalake import CommitProperties, DeltaTable, Transaction, write_deltalake
    from deltalake.exceptions import DeltaError

    name, key = place.root.rstrip("/").rpartition("/")[2], application(run)
    target, options = delta.address(place)

    def there() -> DeltaTable | None:
        found = DeltaTable.is_deltatable(target, storage_options=options)
        return DeltaTable(target, storage_options=options) if found else None

    with delta.translated(name, place, "write into"):
        table = there()
        if table is not None and table.transaction_version(key) is not None:
            return False
        schema, batches = read_batches(checkpoint)
        try:
            write_deltalake(
                target
                if table is None
                else table,  # as it was looked at: later commits of this run are conflicts
                pa.RecordBatchReader.from_batches(schema, batches),
                mode="error" if table is None else mode,
                storage_options=options,
                commit_properties=CommitProperties(
                    app_transactions=[Transaction(key, 1)], max_commit_retries=_RETRIES
                ),
            )
            return True
        except DeltaError:
            now = there()
            if now is not None and now.transaction_version(key) is not None:  # by another try, meanwhile
                return False
            if table is not None or now is None:
                raise
    return stream_into(checkpoint, place, mode, run)  # the table was missing, and has been made meanwhile
