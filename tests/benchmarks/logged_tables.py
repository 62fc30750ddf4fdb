"""Is every query of TPC-H and TPC-DS answered from tables of Delta Lake and Iceberg as from plain files?

    python -m tests.benchmarks.logged_tables --suite tpch,tpcds --engine duckdb,spark --scale 0.01

The tables are written by the formats' own libraries in two commits, some in partitions. Every query goes the way of
``ebbflow query``; its result is compared with that of DuckDB on the plain Parquet files in one statement (multisets;
floats to 1e-9 relative). Writes ``logged-tables.json`` after each query; what it has is not run again.
"""

import argparse
import json
import os
import tempfile
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from deltalake import write_deltalake
from pyiceberg.catalog.sql import SqlCatalog

from ebbflow.infra.clock import SystemClock
from ebbflow.infra.query.comparison import same_rows
from ebbflow.infra.storage.files import home, write_text
from ebbflow.planners.errors import EbbflowError
from ebbflow.tasks.query.opening import OpenedEngine, opened_engine
from ebbflow.tasks.query.request import QueryRequest
from ebbflow.tasks.query.run import PlainOrchestrator, execute
from tests.benchmarks.coverage import Query, queries

PARTITIONS = {
    "orders": "o_orderpriority",
    "customer": "c_nationkey",
    "part": "p_mfgr",
    "store": "s_state",
    "item": "i_category",
    "date_dim": "d_year",
}


def main() -> None:
    """Run what the file lacks, and write it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--suite", default="tpch,tpcds")
    parser.add_argument("--engine", default="duckdb,spark")
    parser.add_argument("--format", default="delta,iceberg")
    parser.add_argument("--scale", type=float, default=0.01)
    parser.add_argument("--queries", default="", help="numbers, such as 1,5,72; all when empty")
    parser.add_argument("--out", type=Path, default=Path("docs/benchmarks"))
    given = parser.parse_args()
    file = given.out / "logged-tables.json"
    rows: list[dict[str, Any]] = json.loads(file.read_text())["runs"] if file.exists() else []
    done = {tuple(row[key] for key in ("suite", "engine", "format", "query", "scale")) for row in rows}
    wanted = {int(n) for n in given.queries.split(",") if n}
    for engine in given.engine.split(","):
        base = QueryRequest(
            "SELECT 1", tables=".", engine=engine, master="local[2]" if engine == "spark" else ""
        )
        plain = QueryRequest("SELECT 1", tables=".", engine="duckdb")
        with (
            tempfile.TemporaryDirectory(prefix="ebbflow-logged-") as store,
            opened_engine(base, SystemClock()) as opened,
            opened_engine(plain, SystemClock()) as oracle,
        ):
            for suite in given.suite.split(","):
                for query in queries(suite, given.scale):
                    if wanted and query.number not in wanted:
                        continue
                    for format in given.format.split(","):
                        if (suite, engine, format, query.number, given.scale) in done:
                            continue
                        folder = logged(Path(query.tables), format)
                        row = {"suite": suite, "engine": engine, "format": format}
                        row |= {"query": query.number, "scale": given.scale}
                        row |= _one(query, str(folder), engine, store, opened, oracle)
                        rows.append(row)
                        write_text(
                            file, json.dumps({"benchmark": "logged_tables", "runs": rows}, indent=1) + "\n"
                        )
                        if not row["right"]:
                            print(suite, engine, format, query.number, row["verdict"], flush=True)
    wrong = [row for row in rows if not row["right"]]
    print(f"{len(rows)} runs, {len(wrong)} not right")
    raise SystemExit(bool(wrong))


def _one(
    query: Query, folder: str, engine: str, store: str, opened: OpenedEngine, oracle: OpenedEngine
) -> dict[str, Any]:
    clock = SystemClock()
    request = QueryRequest(
        query.text,
        tables=folder,
        engine=engine,
        master="local[2]" if engine == "spark" else "",
        dialect=query.dialect,
        store=store,
        reuse=False,
        store_budget=0.0,
    )
    plain = QueryRequest(
        query.text,
        tables=query.tables,
        engine="duckdb",
        planner="single",
        dialect=query.dialect,
        store=f"{store}/plain",
        reuse=False,
        store_budget=0.0,
    )
    began, verdict = clock.now(), ""
    try:
        found = execute(request, PlainOrchestrator(), clock, opened)
        took = clock.now() - began
        expected = execute(plain, PlainOrchestrator(), clock, oracle)
        verdict = str(same_rows(found.to_arrow(), _named_as(expected.to_arrow(), found.to_arrow())) or "")
    except EbbflowError as error:
        verdict, took = f"{type(error).__name__}: {error}", clock.now() - began
    return {
        "right": not verdict,
        "verdict": verdict,
        "seconds": round(took, 2),
        "load": round(os.getloadavg()[0], 1),
    }


def _named_as(expected: pa.Table, found: pa.Table) -> pa.Table:
    """Return ``expected`` with the names of ``found`` for expressions, which each engine names in its own way."""
    if expected.num_columns != found.num_columns:
        return expected
    pairs = zip(expected.column_names, found.column_names, strict=True)
    return expected.rename_columns([theirs if theirs.isidentifier() else mine for theirs, mine in pairs])


def logged(plain: Path, format: str) -> Path:
    """Return the directory with the tables of ``plain`` in a format, which is made unless it is there."""
    folder = home() / "logged" / plain.parent.name / plain.name / format
    if (folder / "made").exists():
        return folder / "tables"
    (folder / "tables").mkdir(parents=True, exist_ok=True)
    catalog = SqlCatalog("made", uri=f"sqlite:///{folder}/catalog.db", warehouse=f"file://{folder}/warehouse")
    catalog.create_namespace_if_not_exists("n")
    for path in sorted(plain.glob("*.parquet")):
        rows = pq.read_table(path)
        rows = rows.cast(
            pa.schema(
                [pa.field(f.name, pa.string() if f.type == pa.string_view() else f.type) for f in rows.schema]
            )
        )
        half, key = rows.num_rows // 2, PARTITIONS.get(path.stem)
        if key not in rows.column_names or (rows[key].type == pa.string() and "" in rows[key].to_pylist()):
            key = None  # of the other suite's table of that name, or with a text that no directory tells
        there = folder / "tables" / path.stem
        if format == "delta":
            for part in (rows.slice(0, half), rows.slice(half)):
                write_deltalake(there, part, mode="append", partition_by=[key] if key else None)
            continue
        table = catalog.create_table(f"n.{path.stem}", rows.schema)
        if key:
            with table.update_spec() as update:
                update.add_identity(key)
        for part in (rows.slice(0, half), rows.slice(half)):
            table.append(part)
        there.symlink_to(folder / "warehouse/n" / path.stem)
    catalog.close()
    (folder / "made").touch()
    return folder / "tables"


if __name__ == "__main__":
    main()
