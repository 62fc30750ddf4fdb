"""The section of ``docs/benchmarks.md`` on training that is resized, killed and given back."""

import statistics
from typing import Any


def training(found: dict[str, Any]) -> str:
    """Return the section; parts that were not measured are left out."""
    lines = [
        "## Elastic training on real tasks",
        "",
        "`python -m tests.benchmarks.elastic_training --out docs/benchmarks`",
    ]
    if "faults" in found:
        lines += ["", *_faults(found["faults"])]
    if "adaptation" in found:
        lines += ["", *_adaptation(found["adaptation"])]
    return "\n".join([*lines, ""])


def _faults(runs: list[dict[str, Any]]) -> list[str]:
    rows = []
    for task in dict.fromkeys(run["task"] for run in runs):
        mine = [run for run in runs if run["task"] == task]
        kills = [kill for run in mine for kill in run["kills"]]
        seconds = [kill["seconds"] for kill in kills]
        again = [max(0, kill["step"] - kill["restored"]) for kill in kills]
        rows.append(
            f"| {task} | {len(mine)} | {_spread([run['undisturbed'] for run in mine])} "
            f"| {_spread([run['metric'] for run in mine])} | {statistics.median(seconds):.1f} ({max(seconds):.1f}) "
            f"| {statistics.median(again):.0f} ({max(again)}) |"
        )
    return [
        f"Each task and seed is trained without disturbance, and under {runs[0]['resizes']} resizes and "
        f"{len(runs[0]['kills'])} kills (SIGKILL to a node's processes or to one of them), with the batch fixed. "
        "Metrics are means over seeds with their standard deviation. Recovery is from the kill to the next complete "
        "step; medians, worst in brackets.",
        "",
        "| task | seeds | undisturbed metric | disturbed | recovery (s) | steps done again |",
        "|---|---|---|---|---|---|",
        *rows,
    ]


def _adaptation(found: dict[str, Any]) -> list[str]:
    rows = []
    for task in dict.fromkeys(run["task"] for run in found["runs"]):
        seconds = {
            batch: statistics.median(
                r["seconds"] for r in found["runs"] if (r["task"], r["batch"]) == (task, batch)
            )
            for batch in ("fixed", "adaptive")
        }
        rows.append(
            f"| {task} | {found['targets'][task]:g} | {seconds['fixed']:.1f} | {seconds['adaptive']:.1f} "
            f"| {seconds['adaptive'] / seconds['fixed']:.2f} |"
        )
    schedule = ", then ".join(f"{workers} from {at:.0f} s on" for at, workers in found["schedule"])
    share = f"workers of {found['cpus']:g} processors" if found["cpus"] else "workers without a cap"
    return [
        f"Time to a target metric on {schedule}; {share}; with the batch fixed and with it following goodput.",
        "",
        "| task | target | fixed (s) | adaptive (s) | ratio |",
        "|---|---|---|---|---|",
        *rows,
        "",
        "![time to the target](benchmarks/elastic_training.svg)",
    ]


def _spread(values: list[float]) -> str:
    return f"{statistics.mean(values):.4f} ± {statistics.pstdev(values):.4f}"
