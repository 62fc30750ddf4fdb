"""Sections on statements and tables that are compared with DuckDB's answers."""

import statistics
from typing import Any

from tests.benchmarks.published.comparing import DIFFERENCES

_SUITES = {"duckdb": "DuckDB", "spark": "Spark", "sqlglot": "sqlglot"}
_OUT = "docs/benchmarks/published-queries.json"
_NOT_COMPARED = ("undetermined", "large", "unsuited", "timed out", "crashed")


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


def published(found: dict[str, Any]) -> str:
    """Return the section on statements of published test suites."""
    suites = found["suites"]
    totals, reasons = [], []
    for name, of in sorted(suites.items()):
        kinds, everything = of["outcomes"], of["constructs"]["all"]
        left_out = {kind: kinds[kind] for kind in _NOT_COMPARED if kinds.get(kind)}
        totals.append(
            f"| {_SUITES[name]} | {of['revision'] or '-'} | {of['scripts']:,} of {of['scripts_all']:,} "
            f"| {everything['statements']:,} | {everything['answered']:,} | {kinds.get('error', 0):,} "
            f"| {everything['refused']:,} | {everything['planned'] / everything['answered']:.1%} "
            f"| **{everything['different']}** | {sum(left_out.values()):,} |"
        )
        reasons.append(
            f"{_SUITES[name]}{_directories(of)}: refused: {_listed(of['refused'])}. "
            f"Run as one stage: {_listed(of['unplanned'])}. "
            f"Differences: {_listed({kind: kinds[kind] for kind in DIFFERENCES if kinds.get(kind)})}. "
            f"Not compared: {_listed(left_out)}. Statements by stages: {_listed(of['stages'])}."
        )
    names = sorted({name for of in suites.values() for name in of["constructs"]} - {"all"})
    rows = []
    for name in names:
        cells = []
        for suite in sorted(suites):
            of = suites[suite]["constructs"].get(name)
            share = f"{of['planned'] / of['answered']:.0%}" if of and of["answered"] else "-"
            cells.append(
                f"{of['statements']:,} / {share} / {of['refused']} / {of['different']}" if of else "-"
            )
        rows.append(f"| {name} | {' | '.join(cells)} |")
    heads = [_SUITES[name] for name in sorted(suites)]
    lines = "\n\n".join(reasons)
    return f"""## Statements of published test suites

`python -m tests.benchmarks.published_queries --suite duckdb --from DIR --log FILE --out {_OUT}`

Queries of test suites that others publish, read from a checkout of them (nothing of them is part of this project),
each run by Ebbflow on DuckDB and by DuckDB alone over the same Parquet files, which each script's own statements
make, in types that Spark has: the same rows, names and order of columns, the same order of rows under an ORDER BY,
the same class of error (before anything runs; while it runs). Spark's are run on DuckDB as far as sqlglot can write
them in its dialect; sqlglot's read tables made of the columns they name. Scripts are a sample of each suite, drawn
by their names; of DuckDB's, from directories about queries (`--under`; named below). Refused: by Ebbflow alone, with
a reason. Not compared: DuckDB's own answer changes with the order in which rows are stored or from run to run, no
Parquet file can hold it, it has more than 20,000 rows, or it took longer than the limit.

| suite | commit | scripts | compared | answered | refused by both | by Ebbflow | planned | different | not compared |
|---|---|---|---|---|---|---|---|---|---|
{chr(10).join(totals)}

{lines}

By construct: statements / planned of those answered / refused by Ebbflow / different.

| construct | {" | ".join(heads)} |
|---|{"---|" * len(heads)}
{chr(10).join(rows)}
"""


def _directories(of: dict[str, Any]) -> str:
    under = [name.rstrip("/") for name in of.get("under", "").split(",") if name]
    return f" ({', '.join(under)})" if under else ""


def _listed(counts: dict[str, int]) -> str:
    return "; ".join(f"{name} {count:,}" for name, count in counts.items()) or "none"


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
