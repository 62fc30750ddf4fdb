"""The page on Themis: every table and curve of its evaluation, ours beside the published figures."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from scipy.stats import t as student

from ebbflow.tasks.drawing.charts import bars_svg, cdf_svg, lines_svg
from tests.evaluation.experiments import Found
from tests.evaluation.page import Figure, Pictures, figures, orders, pictures_of, table
from tests.evaluation.themis.cases import POLICIES, Record
from tests.evaluation.themis.prose import (
    CONTENTION,
    ERRORS,
    GPU_TIME,
    HEADLINE,
    KNOB,
    LEASE,
    LIMITS,
    LYING,
    NETWORK,
    PLACEMENT,
    RULES,
    SETTING,
    SIZES,
    TIMES,
    WHY,
)
from tests.evaluation.themis.runs import MAIN

TITLE = "Themis: its evaluation made again"
PARAMETERS = (
    "60 apps drawn from the published distributions, 64 GPUs on the testbed and 256 to 64 in the simulator, "
    "f = 0.8, leases of 10 minutes."
)

MAX_RHO = {"gandiva": 2.2, "las": 2.25, "srtf": 1.75, "slaq": 3.25}  # over Themis', testbed
ALL_NETWORK = {"gandiva": 1.24, "las": 1.72, "srtf": 1.77, "slaq": 2.04}  # likewise, 100% network-intensive
GPU_MORE = {"w1": {}, "w2": {"gandiva": 0.048, "slaq": 2.5}}  # GPU time over Themis', less 1
SIZE_RHO = {  # ρ of an app of so many GPU-minutes
    580: {"themis": 1.0, "las": 0.9},
    83: {"themis": 1.2, "las": 1.9},
}
MILLISECONDS = {
    "bid, median": 29.0, "bid, 95th percentile": 334.0,
    "round, median": 354.0, "round, 95th percentile": 1398.0,
}  # fmt: skip

By = dict[Any, list[Record]]


def page(found: Found, folder: str) -> tuple[str, Pictures]:
    """Return the page without its head, as Markdown, and its pictures by name."""
    drawn = _drawn(found)
    parts = [SETTING, _headline(found), _spread(found), _gpu_time(found), _placement(found), _sizes(found)]
    parts += [_contention(found), _network(found), _knob(found), _lease(found), _errors(found), _lying(found)]
    parts += [_rules(found), _times(found), _orders(found)]
    return "\n".join([*parts, "## Pictures\n", pictures_of(folder, drawn), LIMITS]), drawn


# What was measured


def by(found: Found, name: str, key: str, cases: Mapping[str, Any] | None = None) -> By:
    """Return the records of an experiment by one parameter of their cases, by seed."""
    grouped: By = {}
    for record in found[name]:
        if all(record["case"].get(k) == v for k, v in (cases or {}).items()):
            grouped.setdefault(record["case"].get(key), []).append(record)
    return grouped


def worst(records: Sequence[Record]) -> list[float]:
    """Return the largest ρ of each run."""
    return [max(record["rho"]) for record in records]


def gpu_hours(records: Sequence[Record]) -> list[float]:
    """Return the GPU time of each run, h."""
    return [record["gpu_hours"] for record in records]


def over(above: Sequence[float], below: Sequence[float]) -> list[float]:
    """Return the ratio in each pair of runs."""
    return [a / b for a, b in zip(above, below, strict=True)]


def interval(values: Sequence[float]) -> tuple[float, float, float]:
    """Return the mean and its 95% interval (Student's t over seeds); of one or two values the least and largest."""
    mean = float(np.mean(values))
    if len(values) < 3:
        return mean, float(min(values)), float(max(values))
    half = float(student.ppf(0.975, len(values) - 1) * np.std(values, ddof=1) / len(values) ** 0.5)
    return mean, mean - half, mean + half


def shown(values: Sequence[float], form: str = "{:.2f}") -> str:
    """Return mean and half the width of its interval."""
    mean, low, high = interval(values)
    return form.format(mean) + (f" ± {form.format((high - low) / 2)}" if high > low else "")


def _figure(
    claim: str,
    published: float | None,
    values: Sequence[float],
    why: str = "",
    form: str = "{:,.2f}",
    stated: str = "",
) -> Figure:
    return Figure(claim, published, *interval(values), why, form, stated)


def _testbed(found: Found, workload: str) -> dict[str, list[Record]]:
    """Return the runs on the testbed by policy."""
    names = [policy for policy in POLICIES if f"testbed-{workload}-{policy}" in found]
    return {policy: found[f"testbed-{workload}-{policy}"] for policy in names}


# Sections


def _headline(found: Found) -> str:
    rows = []
    for workload in ("w2", "w1"):
        runs = _testbed(found, workload)
        rows.append(_figure(f"{workload.upper()}: largest ρ, Themis", None, worst(runs["themis"])))
        everyone = found[f"testbed-{workload}-all-bid"]
        ratios = over(worst(everyone), worst(runs["themis"]))
        rows.append(_figure(f"{workload.upper()}: without the filter (f = 0), over Themis", None, ratios,
                            "all apps bid every time", stated="worse"))  # fmt: skip
        for policy, records in runs.items():
            if policy != "themis":
                ratios = over(worst(records), worst(runs["themis"]))
                claim = f"{workload.upper()}: {POLICIES[policy]} over Themis"
                rows.append(_figure(claim, MAX_RHO.get(policy), ratios, WHY.get(policy, "")))
                ratios = over(worst(records), worst(everyone))
                rows.append(
                    _figure(f"{workload.upper()}: {POLICIES[policy]} over Themis with f = 0", None, ratios)
                )
    return HEADLINE + figures(rows)


def _spread(found: Found) -> str:
    rows = []
    for workload in ("w1", "w2"):
        for policy, records in _testbed(found, workload).items():
            rhos = [np.array(record["rho"]) for record in records]
            rows.append((
                workload.upper(), POLICIES[policy],
                *(shown([float(np.percentile(r, q)) for r in rhos]) for q in (50, 90, 100)),
                shown([float(r.std()) for r in rhos]),
                shown([float(r.sum() ** 2 / len(r) / (r**2).sum()) for r in rhos]),
                shown([float((r <= 1).mean()) for r in rhos], "{:.0%}"),
            ))  # fmt: skip
    head = (
        "workload",
        "policy",
        "median ρ",
        "90th percentile",
        "largest",
        "standard deviation",
        "Jain's index",
        "ρ ≤ 1",
    )
    return (
        "## Distribution of ρ\n\nPublished: the narrowest for Themis, a picture without numbers.\n\n"
        + table(head, rows)
    )


def _gpu_time(found: Found) -> str:
    rows = []
    for workload in ("w1", "w2"):
        runs = _testbed(found, workload)
        base = gpu_hours(runs["themis"])
        rows.append(_figure(f"{workload.upper()}: Themis, GPU-hours", None, base, form="{:,.0f}"))
        for policy, records in runs.items():
            if policy == "themis":
                continue
            more = [ratio - 1 for ratio in over(gpu_hours(records), base)]
            published = GPU_MORE[workload].get(policy)
            stated = "about equal" if workload == "w1" else ""
            claim = f"{workload.upper()}: {POLICIES[policy]} over Themis, less 1"
            rows.append(_figure(claim, published, more, form="{:+.1%}", stated=stated))
    return GPU_TIME + figures(rows)


def _placement(found: Found) -> str:
    rows = []
    for workload in ("w1", "w2"):
        for policy, records in _testbed(found, workload).items():
            scores = [float(np.mean(record["score"])) for record in records]
            low = [float(np.percentile(record["score"], 10)) for record in records]
            weighted = [record["mean_score"] for record in records]
            rows.append((workload.upper(), POLICIES[policy], shown(scores, "{:.3f}"), shown(low, "{:.3f}"),
                         shown(weighted, "{:.3f}")))  # fmt: skip
    return PLACEMENT + table(
        ("workload", "policy", "mean of apps", "10th percentile", "weighted by GPU time"), rows
    )


def _sizes(found: Found) -> str:
    runs = _testbed(found, "w1")
    rows = []
    for size, published in SIZE_RHO.items():
        chosen = [
            [abs(np.log(minutes / size)) < np.log(1.5) for minutes in record["gpu_min"]]
            for record in runs["themis"]
        ]
        for policy, value in published.items():
            rhos = [
                rho
                for record, picks in zip(runs[policy], chosen, strict=True)
                for rho, pick in zip(record["rho"], picks, strict=True)
                if pick
            ]
            if rhos:
                claim = f"about {size} GPU-minutes, {POLICIES[policy]}: ρ of {len(rhos)} apps"
                rows.append(_figure(claim, value, rhos, WHY["sizes"]))
    return SIZES + figures(rows)


def _sweep(found: Found, name: str, key: str) -> dict[str, By]:
    """Return a sweep's records by policy and value."""
    return {policy: by(found, f"{name}-{policy}", key) for policy in MAIN}


def _contention(found: Found) -> str:
    runs = _sweep(found, "contention", "cluster")
    clusters = list(runs["themis"])
    rows = []
    for policy, grouped in runs.items():
        cells = [shown(worst(grouped[c])) for c in clusters]
        fair = [
            shown([float((np.array(r["rho"]) <= 1).mean()) for r in grouped[c]], "{:.0%}") for c in clusters
        ]
        rows.append((POLICIES[policy], *cells, *fair))
    labels = [name.removeprefix("sim-") + " GPUs" for name in clusters]
    return CONTENTION + table(("policy", *labels, *(f"ρ ≤ 1, {name}" for name in labels)), rows)


def _network(found: Found) -> str:
    runs = _sweep(found, "network", "network")
    shares = list(runs["themis"])
    rows = [(POLICIES[p], *(shown(worst(grouped[s])) for s in shares)) for p, grouped in runs.items()]
    text = NETWORK + table(("largest ρ", *(f"{share:.0%}" for share in shares)), rows)
    rows = [
        (POLICIES[p], *(shown(gpu_hours(grouped[s]), "{:,.0f}") for s in shares))
        for p, grouped in runs.items()
    ]
    text += "\n" + table(("GPU-hours", *(f"{share:.0%}" for share in shares)), rows) + "\n"
    full = []
    for policy in MAIN[1:]:
        ratios = over(worst(runs[policy][1.0]), worst(runs["themis"][1.0]))
        full.append(
            _figure(f"100%: largest ρ, {POLICIES[policy]} over Themis", ALL_NETWORK.get(policy), ratios)
        )
    for share, published in ((0.0, 0.0), (1.0, 0.081)):
        more = over(gpu_hours(runs["gandiva"][share]), gpu_hours(runs["themis"][share]))
        claim = f"{share:.0%}: GPU time, Gandiva over Themis, less 1"
        full.append(_figure(claim, published, [m - 1 for m in more], WHY["gandiva-time"], "{:+.1%}"))
    return text + figures(full)


def _curve(grouped: By, label: str, form: str) -> str:
    rows = [
        (form.format(key), shown(worst(records)), shown([float(np.median(r["rho"])) for r in records]),
         shown(gpu_hours(records), "{:,.0f}"), shown([r["notes"].get("bidders", 0.0) for r in records], "{:.1f}"))
        for key, records in grouped.items()
    ]  # fmt: skip
    return table((label, "largest ρ", "median ρ", "GPU-hours", "bidders a round"), rows)


def _knob(found: Found) -> str:
    grouped = by(found, "knob", "knob")
    text = KNOB + _curve(grouped, "f", "{:g}") + "\n"
    if 0.8 in grouped:
        rows = [
            _figure("largest ρ, f = 1 over f = 0.8", 1.5, over(worst(grouped[1.0]), worst(grouped[0.8]))),
            _figure(
                "largest ρ, f = 0 over f = 0.8",
                None,
                over(worst(grouped[0.0]), worst(grouped[0.8])),
                stated="above 1",
            ),
        ]
        text += figures(rows)
    return text


def _lease(found: Found) -> str:
    grouped = {key / 60: records for key, records in by(found, "lease", "lease_s").items()}
    return LEASE + _curve(grouped, "lease, min", "{:g}")


def _errors(found: Found) -> str:
    grouped = by(found, "error", "error")
    text = ERRORS + _curve(grouped, "error", "±{:.0%}") + "\n"
    rows = []
    for error, records in grouped.items():
        if error:
            changes = [ratio - 1 for ratio in over(worst(records), worst(grouped[0.0]))]
            published = 0.1076 if error == 0.2 else None
            rows.append(
                _figure(f"±{error:.0%}: change of the largest ρ", published, changes, WHY["error"], "{:+.1%}")
            )
    return text + figures(rows)


def _lying(found: Found) -> str:
    base = by(found, "lying", "lie")[0.0]
    rows = []
    for about, words in (("spread", "staggered S inflated"), ("dense", "dense S deflated")):
        for lie, records in by(found, "lying", "lie", {"lie_about": about}).items():
            liar = [r["rho"][0] / b["rho"][0] - 1 for r, b in zip(records, base, strict=True)]
            honest = [
                np.mean(r["rho"][1:]) / np.mean(b["rho"][1:]) - 1 for r, b in zip(records, base, strict=True)
            ]
            rows.append((words, f"{lie:.0%}", shown(liar, "{:+.1%}").replace("± +", "± "),
                         shown(honest, "{:+.1%}").replace("± +", "± ")))  # fmt: skip
    return LYING + table(("lie", "by", "liar's ρ", "honest apps' mean ρ"), rows)


def _rules(found: Found) -> str:
    seeds = {record["case"]["seed"] for record in found["rules"]}
    base = [r for r in by(found, "error", "error")[0.0] if r["case"]["seed"] in seeds]
    rows = [("as published: each left-over GPU at random", *_rule(base))]
    for record_case, records in _cases(found["rules"]).items():
        rows.append((record_case, *_rule(records)))
    for pool, records in by(found, "pool", "pool").items():
        rows.append((f"leases pooled over {pool:.0%} of their length, {len(records)} seeds", *_rule(records)))
    return RULES + table(("rule", "largest ρ", "GPU-hours", "placement score", "left over"), rows)


def _cases(records: Sequence[Record]) -> dict[str, list[Record]]:
    named: dict[str, list[Record]] = {}
    for record in records:
        case = record["case"]
        words = {
            "machine": "all that is left on a machine to one app",
            "affine": "left-over GPUs to who had them",
        }
        name = words[case["leftovers"]] + ("" if case.get("payments", True) else "; no hidden payments")
        named.setdefault(name, []).append(record)
    return named


def _rule(records: Sequence[Record]) -> tuple[str, ...]:
    return (
        shown(worst(records)), shown(gpu_hours(records), "{:,.0f}"),
        shown([r["mean_score"] for r in records], "{:.3f}"),
        shown([r["notes"]["leftover_share"] for r in records], "{:.0%}"),
    )  # fmt: skip


def _times(found: Found) -> str:
    rounds = 1e3 * np.array([s for record in found["times"] for s in record["rounds_s"]])
    bids = 1e3 * np.array([s for record in found["times"] for s in record["bids_s"]])
    rows = []
    for label, published in MILLISECONDS.items():
        values = bids if label.startswith("bid") else rounds
        ours = float(np.percentile(values, 50 if "median" in label else 95))
        rows.append(Figure(f"{label}, ms", published, ours, why=WHY["times"], form="{:,.1f}"))
    return TIMES + figures(rows)


def _orders(found: Found) -> str:
    rows: list[tuple[str, Sequence[bool]]] = []
    for workload in ("w1", "w2"):
        runs = _testbed(found, workload)
        mine = worst(runs["themis"])
        for policy in runs:
            if policy != "themis":
                holds = [a <= b * 1.001 for a, b in zip(mine, worst(runs[policy]), strict=True)]
                rows.append((f"{workload.upper()}: largest ρ, Themis ≤ {POLICIES[policy]}", holds))
    runs = _testbed(found, "w1")
    for policy in runs:
        near = [abs(r - 1) <= 0.03 for r in over(gpu_hours(runs[policy]), gpu_hours(runs["themis"]))]
        if policy != "themis":
            rows.append((f"W1: GPU time of {POLICIES[policy]} within 3% of Themis", near))
    runs = _testbed(found, "w2")
    for policy in ("gandiva", "slaq"):
        holds = [r >= 1 for r in over(gpu_hours(runs[policy]), gpu_hours(runs["themis"]))]
        rows.append((f"W2: GPU time, Themis ≤ {POLICIES[policy]}", holds))
    leases = by(found, "lease", "lease_s")
    short, long = min(leases), max(leases)
    for claim, first, second, measure in (
        ("the shortest lease: lower largest ρ than the longest", short, long, worst),
        ("the shortest lease: more GPU time than the longest", long, short, gpu_hours),
    ):
        pairs = zip(measure(leases[first]), measure(leases[second]), strict=True)
        rows.append((claim, [a < b for a, b in pairs]))
    knobs = by(found, "knob", "knob")
    best = min((key for key in knobs if key < 1), key=lambda k: np.mean(worst(knobs[k])))
    rows.append((f"largest ρ is worse at f = 1 than at the best f ({best:g})",
                 [a > b for a, b in zip(worst(knobs[1.0]), worst(knobs[best]), strict=True)]))  # fmt: skip
    return "## Orders\n\nWhat the sources say, seed by seed; equal within 0.1% counts as equal.\n\n" + orders(
        rows
    )


# Pictures


def _drawn(found: Found) -> Pictures:
    made: Pictures = {}
    for workload in ("w1", "w2"):
        runs = {POLICIES[p]: r for p, r in _testbed(found, workload).items() if p in MAIN}
        name = workload.upper()
        made[f"themis-rho-{workload}"] = cdf_svg(
            f"{name}: finish-time fairness",
            {n: [x for r in records for x in r["rho"]] for n, records in runs.items()},
            label="ρ",
            unit="",
            mark=1.0,
            log=True,
        )
        made[f"themis-score-{workload}"] = cdf_svg(
            f"{name}: placement score of apps",
            {n: [x for r in records for x in r["score"]] for n, records in runs.items()}, label="1/S", unit="",
        )  # fmt: skip
    totals = {
        f"{workload.upper()}": [float(np.mean(gpu_hours(_testbed(found, workload)[p]))) for p in MAIN]
        for workload in ("w1", "w2")
    }
    made["themis-gpu-time"] = bars_svg(
        "GPU time for the same work", [POLICIES[p] for p in MAIN], totals, unit="h"
    )
    sizes = {"sim-256": 1.0, "sim-128": 2.0, "sim-64": 4.0}
    made["themis-contention"] = lines_svg(
        "Largest ρ by contention", {POLICIES[p]: [(sizes[c], float(np.mean(worst(r)))) for c, r in grouped.items()]
                                    for p, grouped in _sweep(found, "contention", "cluster").items()},
        label="times the contention", unit="ρ",
    )  # fmt: skip
    network = _sweep(found, "network", "network")
    made["themis-network-rho"] = lines_svg(
        "Largest ρ by share of network-intensive apps",
        {POLICIES[p]: [(100 * s, float(np.mean(worst(r)))) for s, r in g.items()] for p, g in network.items()},
        label="%", unit="ρ",
    )  # fmt: skip
    sweeps = (("knob", "knob", 1.0, "f"), ("lease", "lease_s", 60.0, "min"), ("error", "error", 0.01, "%"))
    for name, key, scale, label in sweeps:
        grouped = by(found, name, key)
        made[f"themis-{name}"] = lines_svg(
            f"Largest ρ by {'fairness knob' if name == 'knob' else name}",
            {"largest ρ": [(k / scale, float(np.mean(worst(r)))) for k, r in grouped.items()],
             "median ρ": [(k / scale, float(np.mean([np.median(x["rho"]) for x in r]))) for k, r in grouped.items()]},
            label=label, unit="ρ",
        )  # fmt: skip
    base = by(found, "lying", "lie")[0.0]
    lies = {}
    for about, words in (("spread", "staggered inflated"), ("dense", "dense deflated")):
        for who, pick in (("liar", slice(0, 1)), ("honest", slice(1, None))):
            points = [(0.0, 1.0)]
            for lie, records in by(found, "lying", "lie", {"lie_about": about}).items():
                change = [
                    np.mean(r["rho"][pick]) / np.mean(b["rho"][pick])
                    for r, b in zip(records, base, strict=True)
                ]
                points.append((100 * lie, float(np.mean(change))))
            lies[f"{who}, {words}"] = points
    made["themis-lying"] = lines_svg("ρ over that without a lie", lies, label="% of the lie", unit="times")
    return made
