"""The sections on ``python -m tests.benchmarks.sql``."""

import re
import statistics
from typing import Any

_SUITES = {"tpch": "TPC-H", "tpcds": "TPC-DS"}
# a suite, and what tells a result from another of its suite
RESULTS = (
    "tpch-tuned",
    "tpch-tuned-sf5",
    "tpch-tuned-sf20",
    "tpch",
    "tpch-sf20",
    "tpcds-tuned-sf10",
    "tpcds",
)
SCALED = ("tpch-1-worker", "tpch-4-workers")  # two results that differ in the number of workers


def section(found: dict[str, Any], name: str) -> str:
    """Return the section of the result ``name``: of the first with the method, of others with what differs."""
    suite = name.partition("-")[0]
    first = name == "tpch"
    title = "SQL against tuned Spark" if "tuned" in found["setup"] else "SQL against plain Spark"
    method = _tuned(found) if "tuned" in found["setup"] else _method(found) if first else _as_above(found)
    return f"""## {_SUITES[suite]}{_scale(found, suite)}: {title} while workers come and go

`{_command(found)}`

{method}

{_bars(found) if first else ""}

{_schedules(found)}

Wasted is task time thrown away or repeated over useful task time. Median ratio of each query, with the median seconds
of the better plain system in brackets:

{_cases(found)}

![distribution of the ratio](benchmarks/sql-{name}.svg)

{_losses(found)}
"""


def _method(found: dict[str, Any]) -> str:
    setup = found["setup"]
    return f"""\
Three systems take turns on the same warm application, cluster and files: Spark SQL with its own SQL settings and
adaptive execution (`spark`), the same with cost-based optimiser, column statistics, join reordering and graceful
decommissioning on a notice (`spark-cbo`), and Ebbflow. {setup["workers"]} one-core workers on loopback,
{setup["cap"]}; {setup["machine"]}; Spark {setup["spark"]}{_archive(setup)}. `python -m tests.benchmarks.sql --help`
says what the schedules do. A time is from the SQL text to the whole Parquet result, each answer compared with
DuckDB's; a
ratio is Ebbflow's time over that of the better plain system.

What is prepared before any time is taken: column statistics for `spark-cbo` (ANALYZE) and for Ebbflow (footers and
samples). What every run finds: its own code compiled, because each system has run each query before, and before
every disturbed run once more, undisturbed, on the workers that replace the lost ones. Ebbflow is told how often
workers are lost, and remembers what its stages took in earlier runs; it reuses no result. Undisturbed rounds come
before disturbed ones. Ebbflow was worked on meanwhile: rounds of several days are not all of one state of its code.
{setup.get("note", "")}"""


def _tuned(found: dict[str, Any]) -> str:
    setup = found["setup"]
    tuned = ", ".join(f"`{key.removeprefix('spark.sql.')}={value}`" for key, value in setup["tuned"].items())
    return f"""\
Ebbflow with `--stages {setup["stages"]}` and four plain Sparks take turns on the same warm application, cluster and
files: Spark SQL with its own settings (`spark`), with cost-based optimiser, column statistics and join reordering
(`spark-cbo`), and both with settings for this cluster ({tuned}: `spark-tuned`, `spark-tuned-cbo`). The first round of
a query has all of them; of the plain ones only the fastest there continues, and is what Ebbflow's time is divided by.
{setup["workers"]} one-core workers on loopback, {setup["cap"]}; {setup["machine"]}; Spark
{setup["spark"]}{_archive(setup)}. A time is from the SQL text to the whole Parquet result, each answer compared with
DuckDB's.
{setup.get("note", "")}"""


def _as_above(found: dict[str, Any]) -> str:
    setup = found["setup"]
    return f"""\
Measured as TPC-H at scale factor 5, above: {setup["workers"]} workers, {setup["cap"]}; {setup["machine"]}.
{setup.get("note", "")}"""


def _scale(found: dict[str, Any], suite: str) -> str:
    """Return the scale factor that the folder of the tables names, or nothing."""
    named = re.search(r"sf([\d.]+)", found["setup"]["tables"].get(suite, ""))
    return f" at scale factor {named.group(1)}" if named else ""


def _archive(setup: dict[str, Any]) -> str:
    return ", executors with a shared archive of its classes" if setup.get("class_archive") else ""


def _command(found: dict[str, Any]) -> str:
    setup, cases = found["setup"], found["cases"]
    suites = list(dict.fromkeys(c["suite"] for c in cases))
    queries = ",".join(dict.fromkeys(f"{c['suite']}:{c['query']}" for c in cases))
    schedules = ",".join(dict.fromkeys(c["schedule"] for c in cases))
    tables = ",".join(f"{suite}=~/.cache/ebbflow/{suite}/{name}" for suite, name in setup["tables"].items())
    options = {
        "suite": ",".join(suites), "tables": tables, "queries": queries, "schedules": schedules,
        "pairs": setup["pairs"], "workers": setup["workers"], "cores-per-worker": setup["cpus"],
        "memory": setup["memory"], "seed": setup["seed"],
    }  # fmt: skip
    words = [f"--{k} {v}" for k, v in options.items()] + [f"--conf {k}={v}" for k, v in setup["conf"].items()]
    words += ["--first-runs"] if setup.get("first_runs") else []
    return " ".join(["python -m tests.benchmarks.sql", *words])


def _bars(found: dict[str, Any]) -> str:
    verdicts = {True: "yes", False: "no", None: "not measured"}
    rows = [
        f"| {b['name']} | {_figure(b['value'])} | {'≥' if b['at_least'] else '≤'} {b['bar']:.2f} "
        f"| {verdicts[b['holds']]} |"
        for b in found["bars"]
    ]
    return "\n".join(
        ["| over TPC-H's multi-join queries | measured | must be | holds |", "|---|---|---|---|", *rows]
    )


def _schedules(found: dict[str, Any]) -> str:
    systems = list(dict.fromkeys(s for row in found["schedules"] for s in row["wasted_share"]))
    head = "| suite | schedule | rounds | measured | geometric mean | median | worst | 90th percentile of gain | "
    lines = [
        head + " | ".join(f"wasted: {s}" for s in systems) + " | failed |",
        "|---|---|---|---|---|---|---|---|" + "---|" * (len(systems) + 1),
    ]
    for row in found["schedules"]:
        wasted = " | ".join(_figure(row["wasted_share"].get(s)) for s in systems)
        failed = ", ".join(f"{s} {n}" for s, n in row["failed"].items() if n) or "none"
        lines.append(
            f"| {row['suite']} | {row['schedule']} | {_rounds(found, row)} | {_days(row)} "
            f"| {_figure(row['geometric_mean'])} | {_figure(row['median'])} "
            f"| {_figure(row['worst'])} ({row['worst_case']}) | {_figure(row['gain_90'])} | {wasted} | {failed} |"
        )
    return "\n".join(lines)


def _rounds(found: dict[str, Any], row: dict[str, Any]) -> str:
    """Return how many rounds there are, of how many if some are still missing."""
    cases = sum((c["suite"], c["schedule"]) == (row["suite"], row["schedule"]) for c in found["cases"])
    wanted = cases * found["setup"]["pairs"]
    return f"{row['pairs']}" if row["pairs"] == wanted else f"{row['pairs']} of {wanted} so far"


def _days(row: dict[str, Any]) -> str:
    first, last = row["days"]
    return first if first == last else f"{first} to {last}"


def _cases(found: dict[str, Any]) -> str:
    schedules = list(dict.fromkeys(c["schedule"] for c in found["cases"]))
    cells = {(c["suite"], c["query"], c["schedule"]): c for c in found["cases"]}
    lines = ["| query | " + " | ".join(schedules) + " |", "|---|" + "---|" * len(schedules)]
    for suite, query in dict.fromkeys((c["suite"], c["query"]) for c in found["cases"]):
        row = [cells.get((suite, query, s)) for s in schedules]
        shown = " | ".join(
            "–" if c is None else f"{_figure(c['ratio'])} ({_figure(c['systems'][c['better']]['seconds'])})"
            for c in row
        )
        lines.append(f"| {suite} Q{query} | {shown} |")
    return "\n".join(lines)


def _losses(found: dict[str, Any]) -> str:
    losses = [c for c in found["cases"] if c["loss"]]
    if not losses:
        return "No case is a loss."
    rows = [
        f"- {c['suite']} Q{c['query']}, {c['schedule']} ({_figure(c['ratio'])}, better: {c['better']}): {c['loss']}"
        for c in losses
    ]
    head = "Where the time of the losses goes, by differences of medians from Spark's own metrics:\n"
    return "\n".join([head, *rows])


def _figure(value: float | str | None) -> str:
    if value is None:
        return "–"
    return "∞" if value == "inf" else f"{float(value):.2f}"


def scaling(few: dict[str, Any], many: dict[str, Any]) -> str:
    """Return the section on how much faster undisturbed queries are with more workers: of the ten that take Ebbflow
    longest with few."""
    runs = [
        {(c["suite"], c["query"]): c for c in found["cases"] if c["schedule"] == "none"}
        for found in (few, many)
    ]
    both = [key for key in runs[0] if key in runs[1]]
    longest = sorted(both, key=lambda key: -_median(runs[0][key], "ebbflow"))[:10]
    gains: dict[str, list[float]] = {"ebbflow": [], "better": []}
    lines = []
    for key in sorted(longest):
        cells = []
        for system, gained in gains.items():
            before, after = (_median(found[key], system) for found in runs)
            gained.append(before / after)
            cells.append(f"{_figure(before)} | {_figure(after)} | {_figure(gained[-1])}")
        lines.append(f"| {key[0]} Q{key[1]} | {' | '.join(cells)} |")
    ours, theirs = (statistics.median(gained) for gained in gains.values())
    sizes = [found["setup"]["workers"] for found in (few, many)]
    table = "\n".join(lines)
    return f"""## From {sizes[0]} to {sizes[1]} workers

`{_command(few)}`

The same with `--workers {sizes[1]}`, and both summaries copied to `docs/benchmarks/sql-{SCALED[0]}.json` and
`sql-{SCALED[1]}.json`. Undisturbed, {few["setup"]["cap"]}, {few["setup"]["machine"]}; median seconds of the ten
queries that take Ebbflow longest. {sizes[1]} workers are {ours:.2f} times as fast in the median (at least 2.8 must
hold), the better tuned Spark on them {theirs:.2f} times.

| query | Ebbflow, {sizes[0]} | {sizes[1]} | times faster | better Spark, {sizes[0]} | {sizes[1]} | times faster |
|---|---|---|---|---|---|---|
{table}
"""


def _median(case: dict[str, Any], system: str) -> float:
    return float(case["systems"][case["better"] if system == "better" else system]["seconds"])
