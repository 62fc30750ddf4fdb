"""The pictures of the evaluation."""

from collections.abc import Mapping
from typing import Any

from ebbflow.tasks.drawing.charts import bars_svg, cdf_svg


def pictures(found: Mapping[str, Any]) -> dict[str, str]:
    """Return SVG pictures by name, of the parts that are there."""
    out: dict[str, str] = {}
    if "micro" in found:
        out |= _micro(found["micro"]["records"])
    if "sweeps" in found:
        out |= _sweeps(found["sweeps"])
    if "competitive" in found:
        ratios = found["competitive"]["ratios"]
        groups = [f"{r['allocator']}, bound {r['bound']:g}" for r in ratios]
        series = {"largest ratio": [r["largest"] for r in ratios], "mean": [r["mean"] for r in ratios]}
        out["competitive"] = bars_svg("Competitive ratios", groups, series, unit="")
    return out


def _micro(records: list[dict[str, Any]]) -> dict[str, str]:
    out = {}
    for figure, profile in (("fig-2-6a-spot", "spot"), ("fig-2-6b-cluster", "cluster")):
        for load in ("tpcds", "synthetic"):
            chosen = [r for r in records if r["profile"] == profile and r["workload"] == load]
            if not chosen:
                continue
            series = {f"{r['class']} volatility": [q["improvement"] for q in r["queries"]] for r in chosen}
            title = f"Clarinet's time over QOOP's, {load}, {profile} profile"
            out[f"{figure}-{load}"] = cdf_svg(title, series, label="improvement", unit="×")
    return out


def _sweeps(sweeps: Mapping[str, Any]) -> dict[str, str]:
    out = {}
    loads = ("tpcds", "synthetic")
    names = {
        "hysteresis": ("fig-2-15-hysteresis", "Mean improvement by hysteresis, high volatility"),
        "length": ("job-length", "Mean improvement by mean job time, spot, high volatility"),
    }
    for key, (name, title) in names.items():
        records = sweeps.get(key, [])
        groups = list(dict.fromkeys(r["variant"].split(", ")[1] for r in records))
        series: dict[str, list[float | None]] = {}
        for load in loads:
            for profile in ("spot", "cluster"):
                found = {
                    r["variant"].split(", ")[1]: r["mean"]
                    for r in records
                    if r["workload"] == load and r["profile"] == profile
                }
                if found:
                    series[f"{load}, {profile}"] = [found.get(g) for g in groups]
        if series:
            out[name] = bars_svg(title, groups, series, unit="×")
    return out
