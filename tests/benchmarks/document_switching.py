"""The section on changes of plan in live runs of the page of benchmarks."""

from typing import Any

_ENGINES = {"auto": "the faster of DuckDB and Spark SQL", "native": "DuckDB", "spark": "Spark SQL"}

_OVER_LINKS = {
    "none": "",
    "tables": ", with tables in object storage over the links",
    "all": ", with tables and store in object storage over the links",
}


def section(found: dict[str, Any]) -> str:
    """Return it as Markdown."""
    rows = "\n".join(
        f"| Q{r['query']} | {_words(r['schedule'])} | {r['pairs']} | {r['switches']} "
        f"| {r['frozen over re-planned']:.2f} | {r['bytes, frozen over re-planned']:.2f} |"
        for r in found["summary"]
    )
    runs = found["runs"]
    loads = [r["load"] for r in runs]
    reasons = [
        f"- Q{r['query']}, {_words(r['schedule'])}, {s['at']:.0f} s after the start: {s['reason']}"
        for r in runs
        for s in r["switches"]
    ]
    errors = found["q_error"]
    engine = _ENGINES[found.get("stages", "auto")] + _OVER_LINKS[found.get("over_links", "none")]
    skewed = found.get("suite") == "skewed"
    over = ", with object storage over the links" if found.get("over_links", "none") != "none" else ""
    data = "skewed tables (`ebbflow data skewed`)" if skewed else "TPC-H"
    return f"""## Changes of plan in live runs{", of which estimates are wrong" if skewed else ""}{over}

`python -m tests.benchmarks.switching {found["arguments"]}` (as root)

Spark on local nodes of a third of a core with links of {found["network"]}, {data} at scale factor
{found["tables"].removeprefix("sf")}, one join a stage, run by {engine}. Workers are killed and started meanwhile.
The time of the plan that the same planner picks at the start and keeps, over that with re-planning at every change
(medians; above 1: re-planning is faster), and the same of the bytes on the links. {found["machine"]},
load {min(loads):.0f} to {max(loads):.0f}, of which six nodes are most. All {len(runs)} answers were DuckDB's.

| query | nodes | pairs | switches | time, frozen over re-planned | bytes, frozen over re-planned |
|---|---|---|---|---|---|
{rows}

Expected against measured times of {errors["stages"]} stages beside which nothing changed or ran, as a q-error:
median {errors["median"]:.2f}, 95th percentile {errors["95th percentile"]:.2f}.

The switches, each with the reason in its report:

{chr(10).join(reasons) or "- none"}
{found.get("note", "")}
"""


def _words(schedule: str) -> str:
    nodes, _, faults = schedule.partition("/")
    if faults == "none":
        return f"{nodes}, always"
    return f"{nodes} at first; {', '.join(fault.replace(':spark', '') for fault in faults.split(','))}"
