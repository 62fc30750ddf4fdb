"""The sections on ``python -m tests.benchmarks.sql``."""

import re
import statistics
from typing import Any

_SUITES = {"tpch": "TPC-H", "tpcds": "TPC-DS"}
# a suite, and what tells a result from another of its suite
RESULTS = ("tpch-tuned", "tpch-tuned-sf5", "tpch-tuned-sf20", "tpcds-tuned-sf10")
FAULTS = ("tpch-faults-sf20", "tpch-tuned-sf20")  # Ebbflow's own runs under faults, and those beside Spark
SCALED = ("tpch-1-worker", "tpch-4-workers")  # two results that differ in the number of workers


def section(found: dict[str, Any], name: str) -> str:
    """Return the section of the result ``name``."""
    suite = name.partition("-")[0]
    return f"""## {_SUITES[suite]}{_scale(found, suite)}: SQL against tuned Spark while workers come and go

`{_command(found)}`

{_tuned(found)}

{_schedules(found)}

Wasted is task time thrown away or repeated over useful task time. Median ratio of each query, with the median seconds
of the better plain system in brackets:

{_cases(found)}

![distribution of the ratio](benchmarks/sql-{name}.svg)

{_losses(found)}
"""


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


def _scale(found: dict[str, Any], suite: str) -> str:
    """Return the scale factor that the folder of the tables names, or nothing."""
    named = re.search(r"sf([\d.]+)", found["setup"]["tables"].get(suite, ""))
    return f" at scale factor {named.group(1)}" if named else ""


def _archive(setup: dict[str, Any]) -> str:
    return ", executors with a shared archive of its classes" if setup.get("class_archive") else ""


def _command(found: dict[str, Any]) -> str:
    setup, cases = found["setup"], found["cases"]
    cases = cases + found.get("alone", [])
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
    runs = [_seconds(found, "none") for found in (few, many)]
    both = [key for key in runs[0] if key in runs[1]]
    longest = sorted(both, key=lambda key: -runs[0][key]["ebbflow"])[:10]
    gains: dict[str, list[float]] = {"ebbflow": [], "better": []}
    lines = []
    for key in sorted(longest):
        cells = []
        for system, gained in gains.items():
            before, after = (found[key].get(system) for found in runs)
            if before and after:
                gained.append(before / after)
            cells.append(
                f"{_figure(before)} | {_figure(after)} | {_figure(before and after and before / after)}"
            )
        lines.append(f"| {key[0]} Q{key[1]} | {' | '.join(cells)} |")
    ours = _figure(statistics.median(gains["ebbflow"]))
    better = gains["better"]
    theirs = f", the better tuned Spark on them {_figure(statistics.median(better))} times" if better else ""
    sizes = [found["setup"]["workers"] for found in (few, many)]
    table = "\n".join(lines)
    return f"""## From {sizes[0]} to {sizes[1]} workers

`{_command(few)}`

The same with `--workers {sizes[1]}`, and both summaries copied to `docs/benchmarks/sql-{SCALED[0]}.json` and
`sql-{SCALED[1]}.json`. Undisturbed, {few["setup"]["cap"]}, {few["setup"]["machine"]}; median seconds of the ten
queries that take Ebbflow longest. {sizes[1]} workers are {ours} times as fast in the median (at least 2.8 must
hold){theirs}. {few["setup"].get("note", "")}

| query | Ebbflow, {sizes[0]} | {sizes[1]} | times faster | better Spark, {sizes[0]} | {sizes[1]} | times faster |
|---|---|---|---|---|---|---|
{table}
"""


def faults(found: dict[str, Any], beside: dict[str, Any]) -> str:
    """Return the section on Ebbflow's own runs under faults, beside undisturbed ones of both systems."""
    schedules = [s for s in dict.fromkeys(one["schedule"] for one in found["alone"]) if s != "none"]
    quiet, spark = _seconds(found, "none"), _seconds(beside, "none")
    times = {schedule: _seconds(found, schedule) for schedule in schedules}
    lines = []
    for key, own in quiet.items():
        cells = [f"{key[0]} Q{key[1]}", _figure(spark[key]["better"]), _figure(own["ebbflow"])]
        for schedule in schedules:
            seconds = times[schedule].get(key, {}).get("ebbflow")
            cells += [_figure(seconds), _figure(seconds and seconds / spark[key]["better"])]
        lines.append(f"| {' | '.join(cells)} |")
    heads = " | ".join(f"{schedule} | over Spark undisturbed" for schedule in schedules)
    table = "\n".join(lines)
    return f"""## Queries that lose a worker half-way{_scale(found, "tpch")}

`{_command(found)} --systems ebbflow`

{found["setup"]["workers"]} workers as in the sections above. Where Ebbflow runs alone, schedules are scaled by its
own undisturbed time: the worker is lost at half of it, not at half of plain Spark's, when Ebbflow has long been
done. Seconds, `--pairs` runs each, each answer compared with DuckDB's. Plain Spark's are those without a fault, of
the section on that scale factor: with one it takes longer. {found["setup"].get("note", "")}

| query | Spark undisturbed | undisturbed | {heads} |
|---|---|---|{"---|---|" * len(schedules)}
{table}
"""


def _seconds(found: dict[str, Any], schedule: str) -> dict[tuple[str, int], dict[str, float]]:
    """Return by query the seconds of Ebbflow, and of the better plain system where one has run."""
    seconds = {
        (one["suite"], one["query"]): {"ebbflow": float(one["seconds"])}
        for one in found.get("alone", ())
        if one["schedule"] == schedule
    }
    for case in found["cases"]:
        if case["schedule"] == schedule:
            systems = {"ebbflow": case["systems"]["ebbflow"], "better": case["systems"][case["better"]]}
            seconds[case["suite"], case["query"]] = {n: float(one["seconds"]) for n, one in systems.items()}
    return seconds
