"""Checks a result against DuckDB on the same files: an engine and an optimiser of its own for what Spark has answered
and for what was divided into stages; what DuckDB has run as written it runs again.
"""

import tempfile
from pathlib import Path

from ebbflow.infra.errors import EngineError
from ebbflow.infra.protocols import Checkpoint, StageJob
from ebbflow.infra.query.duckdb import DuckDbEngine
from ebbflow.infra.query.results import read_checkpoint, same_rows
from ebbflow.infra.storage.places import StorageLocation
from ebbflow.planners.errors import UnsupportedQueryError
from ebbflow.planners.query.sql.translation.whole import alike, whole_duckdb_sql
from ebbflow.tasks.query.planning import Gathered


def oracle(gathered: Gathered) -> object:
    """Return the query's result as a ``pyarrow.Table``, computed by DuckDB as its author wrote it.

    Raises ``UnsupportedQueryError`` for what DuckDB has no words for, ``EngineError``.
    """
    import pyarrow.parquet as pq

    parsed = gathered.parsed
    own = parsed.as_written and parsed.dialect.lower() != "duckdb"
    tree = alike(parsed.expression.copy(), parsed.dialect) if own else parsed.expression
    query = whole_duckdb_sql(tree, parsed.dialect)
    relations = gathered.read()
    engine = DuckDbEngine.start()
    try:
        with tempfile.TemporaryDirectory(prefix="ebbflow-oracle-") as folder:
            place = StorageLocation(folder)
            engine.confine(relations, [place], gathered.everything)
            job = StageJob("oracle", "oracle", query, relations, place)
            engine.run(job)
            files = sorted(str(p) for p in Path(folder).glob("*.parquet"))
            return pq.ParquetDataset(files).read()
    finally:
        engine.close()


def verify(gathered: Gathered, result: Checkpoint) -> tuple[bool | None, str]:
    """Compare ``result`` with the oracle's as multisets; return whether they agree, and a sentence.

    ``None`` stands for a query that DuckDB cannot run: it says nothing of a result that is there.
    """
    if any(relation.external for relation in gathered.relations.values()):
        return None, "not compared: DuckDB cannot read the tables of the session's catalogue"
    try:
        expected = oracle(gathered)
    except (EngineError, UnsupportedQueryError) as error:
        return None, f"not compared: DuckDB cannot run the query ({error})"
    difference = same_rows(read_checkpoint(result), expected)
    if difference is None:
        return True, f"equal to DuckDB's result on the same files ({result.rows:,} rows)"
    return False, f"differs from DuckDB's result: {difference}"
