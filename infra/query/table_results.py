"""Results of queries as rows of tables of Delta Lake."""

from typing import Literal

from ebbflow.infra.packages import require
from ebbflow.infra.protocols import Checkpoint
from ebbflow.infra.query.results import read_batches
from ebbflow.infra.storage.places import StorageLocation
from ebbflow.infra.tables.logs import delta
from ebbflow.infra.tables.logs.versions import EXTRA

IntoMode = Literal["append", "overwrite"]
_RETRIES = 15  # of a commit that others were quicker than


def write_into(checkpoint: Checkpoint, place: StorageLocation, mode: IntoMode, run: str) -> bool:
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

    name, key = place.root.rstrip("/").rpartition("/")[2], f"ebbflow-{run}"
    target, options = delta.address(place)

    def written() -> bool:
        there = DeltaTable.is_deltatable(target, storage_options=options)
        return there and DeltaTable(target, storage_options=options).transaction_version(key) is not None

    with delta.translated(name, place, "write into"):
        if written():
            return False
        schema, batches = read_batches(checkpoint)
        try:
            write_deltalake(
                target,
                pa.RecordBatchReader.from_batches(schema, batches),
                mode=mode,
                storage_options=options,
                commit_properties=CommitProperties(
                    app_transactions=[Transaction(key, 1)], max_commit_retries=_RETRIES
                ),
            )
        except DeltaError:
            if written():  # by another try, meanwhile
                return False
            raise
    return True
