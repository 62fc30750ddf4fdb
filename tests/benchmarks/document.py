"""Writes ``docs/benchmarks.md`` from the JSON files beside it, so that no figure is copied by hand."""

import json
import statistics
from pathlib import Path
from typing import Any

from ebbflow.infra.storage.files import write_text
from tests.benchmarks import (
    document_capacity,
    document_chaos,
    document_checkpoints,
    document_communication,
    document_damage,
    document_elastic,
    document_executors,
    document_ledger,
    document_native,
    document_plans,
    document_recovery,
    document_spot,
    document_sql,
    document_switching,
    document_system_chaos,
    document_tables,
    document_training,
)
from tests.benchmarks.planning import Figure

DOCS = Path("docs")
FOLDER = DOCS / "benchmarks"

HEAD = """# Benchmarks

Where a section says nothing else, times are medians of runs in which the things compared take turns; ratios say
more than seconds. Each section names its command; the figures are read from the JSON files in `docs/benchmarks` by
`python -m tests.benchmarks.document`. `make bench` runs all of them but `make chaos` and
`tests.benchmarks.aws_pipelines`, which take long, `tests.benchmarks.sql`, `tests.benchmarks.switching` and
`tests.benchmarks.communication.nodes`, which need root, `tests.benchmarks.undisturbed_cost`, which needs an older
checkout, and `tests.benchmarks.published_queries`, which needs checkouts of others' test suites.
"""


def main() -> None:
    """Write the page from whatever results there are."""
    parts = [HEAD]
    if (FOLDER / "planning.json").exists():
        parts.append(_planning(_read("planning")))
    if (FOLDER / "plans.json").exists():
        parts.append(document_plans.section(_read("plans")))
    for suite in ("switching", "switching_skewed"):
        for name in (suite, f"{suite}_over_links"):
            if (FOLDER / f"{name}.json").exists():
                parts.append(document_switching.section(_read(name)))
    for name in document_sql.RESULTS:
        if (FOLDER / f"sql-{name}.json").exists():
            parts.append(document_sql.section(_read(f"sql-{name}"), name))
    if all((FOLDER / f"sql-{name}.json").exists() for name in document_sql.SCALED):
        parts.append(document_sql.scaling(*(_read(f"sql-{name}") for name in document_sql.SCALED)))
    if all((FOLDER / f"sql-{name}.json").exists() for name in document_sql.FAULTS):
        parts.append(document_sql.faults(*(_read(f"sql-{name}") for name in document_sql.FAULTS)))
    for engine in ("spark", "duckdb"):
        if (FOLDER / f"tpch-{engine}.json").exists():
            parts.append(_tpch(_read(f"tpch-{engine}")))
    for name, section in (
        ("generated-queries", document_tables.generated),
        ("published-queries", document_tables.published),
        ("logged-tables", document_tables.logged),
    ):
        if (FOLDER / f"{name}.json").exists():
            parts.append(section(_read(name)))
    if (FOLDER / "auction.json").exists():
        parts.append(_auction(_read("auction")))
    for name, section in (
        ("native-stages", document_native.stages),
        ("native-stages-sf20", document_native.more_stages),
        ("query_start", document_native.start),
        ("training_simulator", document_training.simulator),
        ("pollux", document_training.pollux),
        ("policies", document_training.policies),
        ("spot_recovery", document_spot.section),
        ("training_recovery", document_recovery.section),
        ("training_pauses", document_recovery.pauses),
        ("training_chaos", document_recovery.chaos),
        ("training_chaos_cuda", document_recovery.chaos_cuda),
        ("communication-nodes", document_communication.section),
        ("training_checkpoints", document_checkpoints.checkpoints),
        ("elastic_training", document_elastic.training),
        ("elastic_executors", document_executors.executors),
        ("fleet_chaos", document_chaos.section),
        ("system_chaos", document_system_chaos.section),
        ("aws_pipelines", document_system_chaos.aws),
        ("flipped_bytes", document_damage.flips),
        ("fault_matrix", document_damage.matrix),
        ("undisturbed_cost", document_damage.cost),
        ("ledger", document_ledger.section),
        ("capacity_load", document_capacity.section),
        ("capacity_latency", document_capacity.latency),
        ("metrics_cost", document_capacity.metrics),
        ("packing", document_training.packing),
        ("training_overhead", document_training.overhead),
        ("training_overhead_cuda", document_training.overhead_cuda),
    ):
        if (FOLDER / f"{name}.json").exists():
            parts.append(section(_read(name)))
    write_text(DOCS / "benchmarks.md", "\n".join(parts))


def _read(name: str) -> Any:
    return json.loads((FOLDER / f"{name}.json").read_text())


def _planning(found: dict[str, Any]) -> str:
    figures = found["figures"]

    def median(key: str, low: int, high: int) -> str:
        values = [f[key] for f in figures if low <= f["relations"] <= high]
        return f"{statistics.median(values):.1f} (worst {max(values):.1f})"

    rows = [
        f"| {low}–{high} | {median('plan_ms', low, high)} | {median('again_ms', low, high)} "
        f"| {median('decide_ms', low, high)} |"
        for low, high in ((0, 4), (5, 8), (9, 12))
    ]
    table = "\n".join(rows)
    over = [one["query"] for one in figures if not Figure(**one).kept]
    missed = f"Not kept by {', '.join(over)}." if over else ""
    return f"""## Planning

`python -m tests.benchmarks.planning --out docs/benchmarks`

From SQL text to the chosen plan with statistics cached, candidates made anew on another share, and the decision among
them: processor milliseconds, median over chains, stars, cliques and the TPC-H queries of that many joined relations.

| relations | plan | candidates anew | decision |
|---|---|---|---|
{table}

Peak memory that planning adds: {found["memory_mib"]:.0f} MiB. Must hold: each query's medians of both
under 100 ms up to 8 relations and under 1 s for 12, a decision under 50 ms, memory under 300 MiB. {missed}

![planning time by relations and shape](benchmarks/planning.svg)
"""


def _tpch(found: dict[str, Any]) -> str:
    policies = [p for p in found["geometric_mean_ratio"] if p != "single"]
    wrong = [f"Q{r['query']} {p}" for r in found["queries"] for p, ok in r["right"].items() if not ok]
    verdict = "wrong: " + ", ".join(wrong) if wrong else "all right"
    rows = [
        f"| Q{r['query']} | {r['seconds']['single']:.2f} | "
        + " | ".join(f"{r['ratio'][p]:.2f} ({r['stages'][p]})" for p in policies)
        + " |"
        for r in found["queries"]
    ]
    means = " | ".join(f"**{found['geometric_mean_ratio'][p]:.2f}**" for p in policies)
    engine, table = found["engine"], "\n".join(rows)
    master = f" --master '{found['master']}'" if engine == "spark" else ""
    return f"""## TPC-H on {engine}: right answers under every policy

`python -m tests.benchmarks.tpch --tables {found["tables"]} --engine {engine}{master} --rounds {found["rounds"]}`

All 22 queries under {", ".join(found["geometric_mean_ratio"])}, each answer compared with DuckDB's on the same files
as a multiset, floats to 1e-9 relative: **{verdict}**. Data {found["tables"]}; {found["machine"]}; load
average {found["load"]:.1f} at the end. Nothing is taken away: this shows what planning and staging cost or gain
when nothing happens. Policies run in the order of the columns within each query{_caveat(found)} Seconds of
`single`, ratio to it for the others, stages in brackets.

| query | single (s) | {" | ".join(policies)} |
|---|---|{"---|" * len(policies)}
{table}
| geometric mean | | {means} |

![TPC-H ratios](benchmarks/tpch-{engine}.svg)
"""


def _auction(found: dict[str, Any]) -> str:
    def bound(case: dict[str, Any]) -> str:
        return f"{case['seconds']:g} s, {case['gap']:.0%}" if case["seconds"] else "–"

    rows = [
        f"| {f['case']['name']} | {f['rows']:,} | {f['tables_s']:.3f} | {f['auction_s']:.3f} | {f['payments_s']:.3f} "
        f"| {f['gap']:.2%} ({f['worst_gap']:.2%}) | {bound(f['case'])} | {f['kept']:.2f} | {f['forfeited']:.0%} |"
        for f in found["figures"]
    ]
    table = "\n".join(rows)
    return f"""## GPU auctions at scale

`python -m tests.benchmarks.auction --out docs/benchmarks`

One partial allocation auction (Themis) on free GPUs of 8-GPU machines, processor seconds on one core, medians over
{found["seeds"]} seeds. The auction includes the relaxation, the search, the proof of the gap and every winner's
hidden payment, estimated from market prices (an exact one would need another optimum for each winner); bid tables are
made before. The gap is proven: by how much the geometric mean of rho may exceed the best possible, worst seed in
brackets; "must be" is for the medians. "Few" means one or two free GPUs on most machines; 16 machines a rack where
nothing else is said; gangs are half the apps; "mixed" gives every app its own slowdowns. Kept is the mean fraction of
a win before rounding, forfeited the share of the offer that is paid after it (a gang keeps at least what it can run
on).

| GPUs / bidders | bid rows | tables (s) | auction (s) | its payments (s) | gap | must be | kept | forfeited |
|---|---|---|---|---|---|---|---|---|
{table}

![processor seconds by size](benchmarks/auction.svg)
"""


def _caveat(found: dict[str, Any]) -> str:
    if found["engine"] == "spark" and found["rounds"] == 1:
        return ", once: later ones find a warmer JVM, so the ratios flatter them, and only the answers are a claim."
    return "."


if __name__ == "__main__":
    main()
