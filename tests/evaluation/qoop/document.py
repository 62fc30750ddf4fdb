"""The evaluation as a document: every figure of QOOP's section 8 beside ours, made of the parts' JSON files."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tests.evaluation.qoop.prose import DETAIL, DIFFERENCES, HEAD, SOURCE, SWEEPS, WORKLOAD

Parts = Mapping[str, Mapping[str, Any]]

_KINDS = ("low", "medium", "high")
_LOADS = {"tpcds": "TPC-DS", "synthetic": "random queries"}
_PROFILES = {"spot": "spot", "cluster": "shared cluster"}


def text_of(found: Parts, folder: str, drawn: Sequence[str]) -> str:
    """Return the document, as Markdown, of the parts that are there; pictures are in ``folder``."""
    parts = [HEAD]
    if "motivation" in found:
        parts.append(_motivation(found["motivation"]))
    if "competitive" in found:
        parts.append(_competitive(found["competitive"]))
    if "micro" in found:
        settings = found["micro"]["settings"]
        parts += [_parameters(settings), _micro(found["micro"]["records"], folder, drawn)]
    if "sweeps" in found:
        parts.append(_sweeps(found["sweeps"], folder, drawn))
    if "macro" in found:
        parts.append(_macro(found["macro"]))
    parts.append(DIFFERENCES)
    return "\n".join(p.rstrip() + "\n" for p in parts)


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return a Markdown table."""
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return "\n".join([*lines, *("| " + " | ".join(str(c) for c in row) + " |" for row in rows)]) + "\n"


def _parameters(settings: Mapping[str, Any]) -> str:
    bed = settings["testbed"]
    return WORKLOAD.format(
        **{k: v for k, v in settings.items() if k not in ("grains", "testbed")},
        **bed,
        containers="24, 60, 200 and 600",
        grains=", ".join(f"{g:g}" for g in settings["grains"]),
        keep=8,
    )


def _motivation(part: Mapping[str, Any]) -> str:
    spot, cluster, example = part["spot"], part["cluster"], part["example"]
    theirs = {"10%": 60, "15%": 53, "20%": 40}
    rows = [
        *((f"spot: events of {x} (fig. 2.3c)", theirs[x], spot["events"][x]) for x in theirs),
        ("spot: machines, least to most", "2 to 20", f"{spot['least']:g} to {spot['most']:g}"),
        ("cluster: jobs with at least 1 event of 10% (fig. 2.3b)", "78%", f"{cluster['at_least_1']:.0%}"),
        ("cluster: jobs with at least 4", "20%", f"{cluster['at_least_4']:.0%}"),
        *(
            (f"example, {name} (fig. 2.4)", want, f"{example['seconds'][name]:g}")
            for name, want in (("volcano", 9), ("clarinet", 7), ("qoop", 6))
        ),
    ]
    regions = "; ".join(
        f"{_PROFILES[name]}: " + ", ".join(f"{n} {kind}" for kind, n in kinds.items())
        for name, kinds in part["regions"].items()
    )
    recent, busy = part["spot_2020"], part["regions"]["cluster"]
    high = busy.get("high", 0) / sum(busy.values())
    return (
        "## How capacity changes\n\n"
        + table(("figure", "theirs", "ours"), rows)
        + f"""
The source's price trace is not published. Ours is made by a price model whose seed was chosen to match these counts
(`tests/evaluation/qoop/profiles.py`); a bidder with 5 $/h buys two instances a minute and loses those that are
outbid.
Real prices have since become calm: in {recent["windows"]} stretches of five hours of AWS's prices of 2019 and 2020
(p2.xlarge, us-west-2a), the same bidder sees {recent["events"]["10%"]:.2f} events of 10% on average after its first
hour. The profile of a shared cluster is what one of {600 / cluster["mean_share"]:.0f} jobs gets of 600 containers,
with Poisson arrivals every 20 s and TPC-DS's job times scaled to a mean of 500 s.

Regions of ten minutes by class: {regions}. In {high:.0%} of those of a busy cluster the share changes by more than
20%, so that its low class rests on few regions.

How much the choice of a plan matters when the capacity is another than it was made for, TPC-DS: the best plan on 60
containers, run on 600, over the best one there; and the other way round.

"""
        + table(
            ("plans", "60 to 600, median", "mean", "600 to 60, median", "mean"),
            (
                (name, *(f"{r[k]:.2f}×" for k in ("up_median", "up_mean", "down_median", "down_mean")))
                for name, r in part["regret"].items()
            ),
        )
    )


def _competitive(part: Mapping[str, Any]) -> str:
    ratios = table(
        ("plans", "allocations", "instances", "mean", "99th percentile", "largest", "bound", "kept"),
        (
            (
                "separated" if r["separated"] else "any", r["allocator"], f"{r['count']:,}", f"{r['mean']:.3f}",
                f"{r['p99']:.3f}", f"{r['largest']:.3f}", f"{r['bound']:g}", "yes" if r["kept"] else "**no**",
            )
            for r in part["ratios"]
        ),
    )  # fmt: skip
    adversary = table(
        ("plans", "copies that the optimum fits", "limit 2 − 2^−(m−1)", "steps"),
        (
            (r["plans"], f"{r['copies']:.4f}", f"{r['limit']:.4f}", f"{r['steps']:,}")
            for r in part["adversary"]
        ),
    )
    settings = part["settings"]
    return f"""## The competitive algorithm

Theorem 2.2: an offline optimum that knows all allocations fits at most 2 copies of its best plan into the time in
which the online planner finishes one, when every plan has at most half the work of the one before; at most 4 for
any plans. Measured on {part["instances"]:,} instances of up to {settings["most_plans"]} plans and {settings["steps"]}
steps in the fluid model; "starving" allocations see the planner's choices and take away what a nearly complete plan
needs. An instance that outlasts its steps counts with what fitted so far.

{ratios}
Theorem 2.1: no online planner beats 2. The adversary of its proof against our planner:

{adversary}"""


def _micro(records: Sequence[Mapping[str, Any]], folder: str, drawn: Sequence[str]) -> str:
    lines = ["## One query alone: QOOP against Clarinet\n"]
    rows = []
    for r in records:
        median, faster = SOURCE[r["profile"], r["class"]]
        rows.append(
            (
                _LOADS[r["workload"]], _PROFILES[r["profile"]], r["class"], f"{median}×", f"{r['median']:.2f}×",
                f"{r['mean']:.2f}×", f"{r['p90']:.2f}×", f"{r['largest']:.2f}×", f"{faster:.0%}",
                f"{r['improved']:.0%}", f"{r['worse']:.0%}",
            )
        )  # fmt: skip
    head = (
        "workload", "profile", "class", "median, theirs", "median", "mean", "90th percentile", "largest",
        "faster, theirs", "faster", "slower",
    )  # fmt: skip
    lines.append(
        'Figures 2.6a and 2.6b; "faster" and "slower" are queries whose mean time differs by 0.1% or more.\n'
    )
    lines.append(table(head, rows))
    lines += [f"![{name}]({folder}{name}.svg)\n" for name in drawn if name.startswith("fig-2-6")]
    lines.append("### What goes with gains (figures 2.7 to 2.9)\n")
    lines.append(
        "Mean improvement of the queries in the lower and the upper half by Clarinet's time and by joins, and of "
        "single runs by their number of switches.\n"
    )
    lines.append(
        table(
            ("workload", "profile", "class", "shorter", "longer", "fewer joins", "more joins", "by switches (runs)"),
            (
                (
                    _LOADS[r["workload"]], _PROFILES[r["profile"]], r["class"],
                    *_halves(r["queries"], "clarinet"), *_halves(r["queries"], "joins"), _by_switches(r["queries"]),
                )
                for r in records
            ),
        )
    )  # fmt: skip
    lines.append("Theirs: gains grow with duration, joins and switches; at most 3 switches a job.\n")
    lines.append("### Throughput, overhead and backtracking (figures 2.10 to 2.12)\n")
    lines.append(
        table(
            (
                "workload", "profile", "class", "busy containers", "tasks/s", "bushy stages", "overhead",
                "runs that switch", "depth 0", "depth 1", "depth ≥ 2",
            ),
            (_detail(r) for r in records),
        )
    )  # fmt: skip
    lines.append(DETAIL)
    return "\n".join(lines)


def _halves(rows: Sequence[Mapping[str, Any]], key: str) -> tuple[str, str]:
    ordered = sorted(rows, key=lambda r: (r[key], r["query"]))
    middle = len(ordered) // 2
    return _average(ordered[:middle]), _average(ordered[middle:])


def _average(rows: Sequence[Mapping[str, Any]]) -> str:
    return f"{sum(r['improvement'] for r in rows) / len(rows):.2f}×" if rows else "–"


def _by_switches(rows: Sequence[Mapping[str, Any]]) -> str:
    groups: dict[int, list[float]] = {}
    for row in rows:
        for gain, switches in zip(row["runs"], row["switches"], strict=True):
            groups.setdefault(min(switches, 4), []).append(gain)
    shown = []
    for n, gains in sorted(groups.items()):
        name = "4+" if n == 4 else str(n)
        shown.append(f"{name}: {sum(gains) / len(gains):.2f}× ({len(gains)})")
    return ", ".join(shown)


def _detail(r: Mapping[str, Any]) -> tuple[object, ...]:
    def ratio(key: str) -> str:
        values = [q[key][1] / q[key][0] for q in r["queries"] if q[key][0] > 0]
        return f"{sum(values) / len(values) - 1:+.1%}" if values else "–"

    bushy = [q["bushy"][1] - q["bushy"][0] for q in r["queries"]]
    pairs = [(s, d) for q in r["queries"] for s, d in zip(q["switches"], q["depths"], strict=True)]
    depths = [d for s, d in pairs if s]

    def part(least: int, most: int) -> str:
        return f"{sum(least <= d <= most for d in depths) / len(depths):.1%}" if depths else "–"

    return (
        _LOADS[r["workload"]], _PROFILES[r["profile"]], r["class"], ratio("occupied"), ratio("throughput"),
        f"{100 * sum(bushy) / max(len(bushy), 1):+.1f}", f"{r['overhead']:.4%}",
        f"{len(depths) / len(pairs):.1%}", part(0, 0), part(1, 1), part(2, 99),
    )  # fmt: skip


def _sweeps(part: Mapping[str, Any], folder: str, drawn: Sequence[str]) -> str:
    settings = part["settings"]
    lines = [
        "## Sweeps\n",
        f"As above, with the {settings['queries']} queries of each workload that have the most plans and "
        f"{settings['runs']} runs of each.\n",
    ]
    for key, (title, words) in SWEEPS.items():
        if key not in part:
            continue
        lines += [f"### {title}\n", words + "\n"]
        lines.append(
            table(
                ("variant", "profile", "class", "median", "mean", "90th percentile", "faster", "slower", "overhead"),
                (
                    (
                        r["variant"], _PROFILES[r["profile"]], r["class"], f"{r['median']:.2f}×", f"{r['mean']:.3f}×",
                        f"{r['p90']:.2f}×", f"{r['improved']:.0%}", f"{r['worse']:.0%}", f"{r['overhead']:.4%}",
                    )
                    for r in part[key]
                ),
            )
        )  # fmt: skip
    lines += [f"![{n}]({folder}{n}.svg)\n" for n in drawn if n.startswith(("fig-2-15", "job-length"))]
    return "\n".join(lines)


def _macro(part: Mapping[str, Any]) -> str:
    given = part["parameters"]
    loads = part["offered_load"]
    lines = [
        "## Many queries on one cluster (figure 2.16)\n",
        f"{given['jobs']} queries drawn from {given['families']} families arrive every {given['mean_gap']:g} s on "
        f"average at {given['containers']} containers; means over {len(given['seeds'])} seeds, all systems on the "
        "same arrivals. "
        f"Times are multiplied by {given['time_factor']:.3g} so that the least work of the queries is "
        f"{_share(given['load'])} of the cluster's (offered: {min(loads):.0%} to {max(loads):.0%} by seed).\n",
        table(
            (
                "system", "mean time", "over QOOP's", "median", "90th percentile", "Jain's index", "makespan",
                "utilisation", "switches",
            ),
            (
                (
                    s["name"], f"{s['mean_seconds']:.0f} s", f"{s['times_qoop']:.2f}×", f"{s['p50_seconds']:.0f} s",
                    f"{s['p90_seconds']:.0f} s", f"{s['jain']:.3f}", f"{s['makespan_seconds']:.0f} s",
                    f"{s['utilisation']:.0%}", f"{s['switches']:.0f}",
                )
                for s in part["systems"]
            ),
        ),
        "The source gives orderings only:\n",
        table(
            ("theirs", "holds for the means", "seeds in which it holds"),
            (
                (o["claim"], "yes" if o["holds_on_means"] else "**no**", f"{o['seeds_that_hold']} of {o['seeds']}")
                for o in part["orderings"]
            ),
        ),
    ]  # fmt: skip
    return "\n".join(lines)


def _share(load: float | None) -> str:
    return "what it is" if load is None else f"{load:.0%}"
