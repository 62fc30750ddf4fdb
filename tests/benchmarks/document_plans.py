"""The section on plans and capacities of the page of benchmarks."""

from typing import Any


def section(found: dict[str, Any]) -> str:
    """Return it as Markdown."""
    rows = "\n".join(
        f"| Q{p['query']} | {p['scale']} | {len(set(p['best']))} | {p['regret']['median']:.2f} "
        f"| {100 * p['regret']['share above 1.15']:.0f} % | {p['regret']['worst']:.2f} "
        f"({p['regret']['worst from']} → {p['regret']['worst at']}) | {p['regret']['cannot run']} |"
        for p in found["predicted"]
    )
    above = [p["regret"]["share above 1.15"] for p in found["predicted"]]
    return f"""## Plans and capacities

`python -m tests.benchmarks.plans --tables ~/.cache/ebbflow/tpch/sf1 --out docs/benchmarks`

Does the best plan depend on capacity? Four candidates of each query on 1, 2, 4 and 6 nodes of a third of a core,
with 2500 and 1250 MiB each, without limits on links and with 100 Mbit/s: seconds as the cost model of Spark SQL has
them, at scale factor 1 and with statistics multiplied. Regret is the time of the plan that is the best at one
capacity over the best one's time at another. Where it is 1, planning anew for a change of capacity gains nothing by
the choice of a plan; a switch needs 15 %, which {100 * sum(above) / len(above):.0f} % of all pairs of capacities
give.

| query | scale | plans that are the best somewhere | median regret | pairs above 1.15 | worst | cannot run |
|---|---|---|---|---|---|---|
{rows}
{_measured(found)}
![regret of plans](benchmarks/plans.svg)
"""


def _measured(found: dict[str, Any]) -> str:
    if not found["measured"]:
        return ""
    rows = "\n".join(
        f"| Q{r['query']} | {r['setting']} | `{r['shape']}` | {r['seconds']:.1f} | {_seconds(r['predicted'])} "
        f"| {r['load']:.1f} |"
        for r in found["measured"]
    )
    errors = found["q_error"]
    return f"""
Measured on local nodes ({found["machine"]}): wall seconds, median; `load` is the machine's.

| query | capacity | plan | measured | predicted | load |
|---|---|---|---|---|---|
{rows}

Predicted against measured, as a q-error: median {errors["median"]:.2f}, worst {errors["worst"]:.2f}.
"""


def _seconds(value: float | None) -> str:
    return "does not fit" if value is None else f"{value:.1f}"
