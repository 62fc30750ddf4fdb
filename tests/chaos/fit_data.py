"""What can be known of the answers beforehand: by DuckDB, and by training without any fault."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.chaos.samples import account, read

SAMPLES, BATCH, SEED = 256, 32, 5  # as in ``fit``
LONG = 300.0  # s


def answer(sql: str, tables: Path) -> Any:
    """Return what DuckDB makes of a query on Parquet tables, as a ``pyarrow.Table``."""
    import duckdb
    import sqlglot

    with duckdb.connect() as database:
        for path in sorted(tables.glob("*.parquet")):
            database.execute(f"CREATE VIEW {path.stem} AS SELECT * FROM read_parquet('{path}')")
        return database.sql(sqlglot.transpile(sql, read="spark", write="duckdb")[0]).to_arrow_table()


def undisturbed(script: Path, sql: str, tables: Path, x: str, y: str, epochs: int, folder: Path) -> str:
    """Return the weights of a training on the answer of ``sql`` that nothing disturbs; kept in ``folder``."""
    import pyarrow.parquet as pq

    kept = folder / f"{x}-{y}-{epochs}.weights"
    if not kept.exists():
        here = folder / f"{x}-{y}-{epochs}"
        (here / "table").mkdir(parents=True, exist_ok=True)
        pq.write_table(answer(sql, tables), here / "table" / "answer.parquet")
        subprocess.run(
            [
                sys.executable, str(script), "--data", str(here / "table"), "--x", x, "--y", y,
                "--log", str(here / "log"), "--epochs", str(epochs),
            ],
            env={**os.environ, "OMP_NUM_THREADS": "1"}, check=True, timeout=LONG, cwd=here,
        )  # fmt: skip
        ((_, weights),) = account(read(here / "log" / "alone")).ends
        kept.write_text(weights)
    return kept.read_text()
