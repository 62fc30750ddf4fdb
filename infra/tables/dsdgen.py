"""Generates TPC-DS with DuckDB's ``tpcds`` extension: a program of its own, ``dsdgen.py SCALE FOLDER``.

It runs under another interpreter than Ebbflow's (see ``benchmark_data``), because the extension is built for
an older DuckDB, so it imports nothing of Ebbflow. It prints one line per table.
"""

import importlib
import sys
from pathlib import Path
from typing import Any


def main(scale: float, folder: Path) -> None:
    """Write ``TABLE.parquet`` for each table and ``queries/qN.sql`` for each query into ``folder``."""
    duckdb: Any = importlib.import_module("duckdb")
    importlib.import_module("duckdb_extensions").import_extension("tpcds")
    database = folder / ".dsdgen.duckdb"
    with duckdb.connect(str(database)) as connection:
        connection.execute("LOAD tpcds")
        print("generating rows", flush=True)
        connection.execute(f"CALL dsdgen(sf={scale!r})")
        names = "SELECT table_name FROM information_schema.tables WHERE table_schema = 'main' ORDER BY 1"
        for (name,) in connection.execute(names).fetchall():
            target = str(folder / f"{name}.parquet").replace("'", "''")
            connection.execute(f"COPY {name} TO '{target}' (FORMAT parquet)")
            (rows,) = connection.execute(f"SELECT count(*) FROM {name}").fetchone()
            print(f"{name}: {rows:,} rows", flush=True)
        queries = folder / "queries"
        queries.mkdir()
        for number, text in connection.execute("SELECT query_nr, query FROM tpcds_queries()").fetchall():
            (queries / f"q{number}.sql").write_text(text, encoding="utf-8")
    for left in folder.glob(".dsdgen.duckdb*"):
        left.unlink()


if __name__ == "__main__":
    main(float(sys.argv[1]), Path(sys.argv[2]))
