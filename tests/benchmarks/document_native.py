"""The sections on what stages cost beside DuckDB alone, and on the start of a query, of the page of benchmarks."""

import statistics
from typing import Any

_NAMES = {
    "tuned": "tuned Spark SQL",
    "spark": "our plans on Spark SQL",
    "native": "native stages on Spark",
    "duckdb": "embedded engine",
    "alone": "DuckDB alone",
}


def stages(found: dict[str, Any]) -> str:
    """Return the section on ``native-stages.json``."""
    return "## Stages beside DuckDB alone\n\n" + _scale(found)


def more_stages(found: dict[str, Any]) -> str:
    """Return the same of a copy of such a file from tables of another size."""
    return f"### At scale factor {found['tables'].removeprefix('sf')}\n\n" + _scale(found)


def _scale(found: dict[str, Any]) -> str:
    systems, rows = found["systems"], found["queries"]
    loads = [row["load"] for row in rows]
    head = " | ".join(_NAMES[system] for system in systems)
    lines = [
        f"| Q{row['query']} | "
        + " | ".join(f"{row['wall'][one]:.2f} ({row['cpu'][one]:.2f})" for one in systems)
        + " |"
        for row in rows
    ]
    wrong = [f"Q{row['query']}" for row in rows if not row["equal"]]
    table = "\n".join(lines)
    command = (
        f"python -m tests.benchmarks.native_stages --tables ~/.cache/ebbflow/tpch/{found['tables']} "
        f"--systems {','.join(systems)} --rounds {found['rounds']}"
    )
    return f"""`{command}`

TPC-H at scale factor {found["tables"].removeprefix("sf")}: systems take turns in one process, warm, and write
Parquet; DuckDB alone runs the same text over views of the same files, with the embedded engine's threads and
memory. {found["machine"]}, load {min(loads):.1f} to {max(loads):.1f}.
{f"Answers differ: {', '.join(wrong)}." if wrong else "All answers are equal."}
{_over_alone(found["over_alone"])}
Median wall seconds, and in brackets CPU seconds of the whole process tree:

| query | {head} |
|---|{"---|" * len(systems)}
{table}
"""


def _over_alone(found: dict[str, Any]) -> str:
    if not found:
        return ""
    rows = "\n".join(
        f"| {_NAMES[system]} | {_ratio(told['cpu'])} | {_ratio(told['wall_long'])} | {_more(told['more_short'])} |"
        for system, told in found.items()
    )
    return f"""
| over DuckDB alone | CPU, ratio | wall, ratio of queries over 1 s | wall of shorter ones, ms more |
|---|---|---|---|
{rows}

Ratios are geometric means. Must hold: CPU of native stages at most 1.6, none above 2.5; of the embedded engine a wall
ratio of at most 1.05, and at most 60 ms more.
"""


def _ratio(found: dict[str, Any]) -> str:
    if found["worst"] is None:
        return "–"
    return f"{found['geometric_mean']:.2f} (worst {found['worst']:.2f}, Q{found['worst_query']})"


def _more(found: dict[str, Any]) -> str:
    if found["worst"] is None:
        return "–"
    return f"{1000 * found['median']:.0f} (worst {1000 * found['worst']:.0f}, Q{found['worst_query']})"


def start(found: dict[str, Any]) -> str:
    """Return the section on ``query_start.json``."""
    ours, theirs = (statistics.median(found["seconds"][system]) for system in ("ebbflow", "spark"))
    more = found["more"]
    return f"""## Start of a query on a warm cluster

`python -m tests.benchmarks.query_start --pairs {found["pairs"]} --workers {found["workers"]}`

`ebbflow query` over 1,000 rows takes {ours:.1f} s from the start of its process to its end; a PySpark script that
opens a session on the same master and writes the result of the same statement, {theirs:.1f} s. The median of the
differences of {found["pairs"]} pairs is {more["median"]:.2f} s (worst {more["worst"]:.2f}); at most
{more["goal"]} must hold. {found["machine"]}, load {found["load"]:.1f}.
"""
