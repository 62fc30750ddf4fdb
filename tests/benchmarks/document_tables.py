"""Sections on statements and tables that are compared with DuckDB's answers."""

import statistics
from typing import Any


def generated(found: dict[str, Any]) -> str:
    """Return the section on generated statements."""
    counts = found["constructs"]
    everything = counts["all"]
    first, beyond = min(low for low, _ in found["seeds"]), max(high for _, high in found["seeds"])
    rows = "\n".join(
        f"| {name} | {of['queries']:,} | {of['planned'] / of['queries']:.0%} |"
        for name, of in sorted(counts.items())
        if name != "all"
    )
    stages = ", ".join(f"{count:,} in {number}" for number, count in sorted(found["stages"].items()))
    command = (
        f"python -m tests.benchmarks.generated_queries --first {first} --count {beyond - first} "
        f"--out docs/benchmarks/generated-queries.json"
    )
    return f"""## Generated statements

`{command}`

Statements of a grammar over joins, subqueries, windows, set operations, nulls, decimals, dates and nested types, each
run by Ebbflow on DuckDB and by DuckDB alone: the same rows, names and order of columns. Of **{found["queries"]:,}
statements {found["differences"]} differ**, {found["refused"]} are refused, and
{everything["planned"] / everything["queries"]:.1%} are planned; the others run as one stage. Statements by stages:
{stages}.

| construct | statements | planned |
|---|---|---|
{rows}
"""


def logged(found: dict[str, Any]) -> str:
    """Return the section on tables with a log."""
    groups: dict[tuple[str, str, str, float], list[dict[str, Any]]] = {}
    for run in found["runs"]:
        groups.setdefault((run["suite"], run["engine"], run["format"], run["scale"]), []).append(run)
    names = {"tpch": "TPC-H", "tpcds": "TPC-DS", "delta": "Delta Lake", "iceberg": "Iceberg"}
    queries = {"tpch": 22, "tpcds": 99}
    rows = "\n".join(
        f"| {names[suite]} | {engine} | {names[format]} | {scale:g} | {len(runs)} of {queries[suite]} "
        f"| **{sum(run['right'] for run in runs)}** | {statistics.median(run['seconds'] for run in runs):.2f} |"
        for (suite, engine, format, scale), runs in sorted(groups.items())
    )
    loads = [run["load"] for run in found["runs"]]
    return f"""## Tables of Delta Lake and Iceberg

`python -m tests.benchmarks.logged_tables --suite tpch,tpcds --engine duckdb,spark --scale 0.01`

Queries over tables that the formats' own libraries have written in two commits, some in partitions, compared with
DuckDB on plain files (multisets; floats to 1e-9 relative). What was not run is missing, not wrong. The load average
was {min(loads):.0f} to {max(loads):.0f}, so the seconds, medians of one run a query, say little.

| suite | engine | format | scale | run | right | median (s) |
|---|---|---|---|---|---|---|
{rows}
"""
