"""Relations read as stages and statistics read them."""

from typing import Any

import duckdb
import pyarrow as pa

from ebbflow.infra.protocols import Relation
from ebbflow.infra.query.duckdb_statements import register_view
from ebbflow.infra.query.duckdbtypes import quoted
from ebbflow.infra.tables.confinement import AllowedAccess, configuration, lock
from ebbflow.infra.tables.sampling import draw


def read(relation: Relation) -> Any:
    """Return all rows as a stage on DuckDB sees them: held to the files of the relation."""
    with duckdb.connect(config={**configuration(), "TimeZone": "UTC"}) as connection:
        lock(connection, AllowedAccess.of([relation], []))
        register_view(connection, relation)
        return pa.table(connection.sql(f"SELECT * FROM {quoted(relation.name)}").to_arrow_table())


def sampled(relation: Relation) -> Any:
    """Return the sample of a small table, which is all of it."""
    return draw(relation, 20_000).table
