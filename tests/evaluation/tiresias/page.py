"""The page on Tiresias: every figure of its testbed and trace simulation that can be simulated, beside ours."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ebbflow.tasks.drawing.charts import bars_svg, cdf_svg, lines_svg
from tests.evaluation.experiments import Found
from tests.evaluation.page import Figure, Pictures, figures, grouped, orders, pictures_of, table
from tests.evaluation.runs import MEASURES, Run, column, jct, makespan, ratios, spread, waited
from tests.evaluation.tiresias.runs import (
    TESTBED,
    TESTBED_QUEUE,
    TESTBED_SEEDS,
    TRACE,
    TRACE_JOBS,
    TRACE_SEEDS,
    TRACE_WEEKS,
)

TITLE = "Tiresias: testbed and trace simulation made again"
PARAMETERS = f"""
- Testbed: 480 jobs on {TESTBED[0]} nodes of {TESTBED[1]} GPUs, threshold {TESTBED_QUEUE:g} GPU-s, seeds
  {", ".join(map(str, TESTBED_SEEDS))}.
- Trace: {TRACE_JOBS:,} jobs over {TRACE_WEEKS:g} weeks on {TRACE[0]} nodes of {TRACE[1]} GPUs, threshold 1
  GPU-hour, two queues, no promotion, seeds {", ".join(map(str, TRACE_SEEDS))}.
- Preemption and start are free, except where 60 s are said. Tiresias-G knows the distribution of the workload's
  own service; its indices are refreshed every 600 s.
- Gandiva's turns take 60 s (testbed) and 600 s (trace).
"""

NAMES = {
    "yarn-cs": "YARN-CS", "best-effort": "Best-effort", "srtf": "SRTF", "srsf": "SRSF", "smallest-first": "SF",
    "time-sharing": "Gandiva", "tiresias-g": "Tiresias-G", "tiresias-l": "Tiresias-L",
}  # fmt: skip

TABLE_3_6 = {
    "yarn-cs": (2.41, 30.85, 1.25), "best-effort": (1.50, 9.03, 1.08), "srtf": (1.00, 1.00, 0.84),
    "time-sharing": (2.00, 2.59, 2.08), "tiresias-g": (0.97, 1.00, 0.85),
}  # fmt: skip
TABLE_3_1 = {"smallest-first": (1.52, 1.20, 3.45), "srtf": (1.03, 1.01, 1.55)}
TABLE_3_5 = {
    "yarn-cs": (8146, 7464, 15327), "srtf": (593, 32, 3133), "tiresias-g": (1005, 39, 7933),
    "tiresias-l": (963, 13, 7755),
}  # fmt: skip
MAKESPANS = {"tiresias-l": 27_400, "tiresias-g": 27_510, "srtf": 28_070, "yarn-cs": 33_270}  # s
PREEMPTIONS = {"tiresias-l": (221, 13_724), "tiresias-g": (297, 17_425), "srtf": (316, 18_057)}  # count, s
BANDS: tuple[tuple[str, str, tuple[str, str, str], float, float], ...] = (
    (
        "average, YARN-CS over Tiresias-L, at least 3",
        "average",
        ("testbed", "yarn-cs", "tiresias-l"),
        3.0,
        np.inf,
    ),
    (
        "median, YARN-CS over Tiresias-L, at least 10",
        "median",
        ("testbed", "yarn-cs", "tiresias-l"),
        10.0,
        np.inf,
    ),
    ("average, Tiresias-G over -L, 0.9 to 1.1", "average", ("testbed", "tiresias-g", "tiresias-l"), 0.9, 1.1),
    ("average, SRTF over Tiresias-L, at most 1", "average", ("testbed", "srtf", "tiresias-l"), 0.0, 1.0),
)

_DURATIONS = "durations"
_TRACE = "trace"
_TAIL = "trace, long jobs"
_WAITING = "waiting, durations"
_WORDS = """Why figures differ, in short: *durations*: the authors' are not published; ours fit what is said of them.
*Trace*: theirs is the log itself, ours follows the quantiles of GPU time that they published, at a load of our
choice. *Long jobs*: by these quantiles a hundredth of the jobs asks for most of the GPU time, so that a few long jobs
make the average. *Waiting*: all time without GPUs is counted, also after preemptions; what theirs counts is not said.
"""


def page(found: Found, folder: str) -> tuple[str, Pictures]:
    """Return the page without its head, as Markdown, and its pictures by name."""
    drawn = _drawn(found)
    parts = [_testbed(found), _bins(found), _queueing(found), _preemptions(found), _placement(found)]
    parts += [_trace(found), _table_3_1(found), _sensitivity(found), _bands(found), _orders(found)]
    return "\n".join([_WORDS, *parts, "## Pictures\n", pictures_of(folder, drawn), _LIMITS]), drawn


def _over(found: Found, kind: str, over: str, under: str) -> dict[str, list[float]]:
    return ratios(grouped(found, f"{kind}-{over}"), grouped(found, f"{kind}-{under}"), MEASURES)


def _figure(
    label: str, published: float | None, values: Sequence[float], why: str = "", form: str = "{:,.2f}"
) -> Figure:
    mean, low, high = spread(values)
    return Figure(label, published, mean, low, high, why, form)


def _of(found: Found, prefix: str, of: Callable[[Run], float]) -> list[float]:
    return [float(of(run)) for run in grouped(found, prefix)]


def _testbed(found: Found) -> str:
    yarn = _over(found, "testbed", "yarn-cs", "tiresias-l")
    gittins = _over(found, "testbed", "tiresias-g", "tiresias-l")
    costly = ratios(
        grouped(found, "testbed-60-tiresias-g"), grouped(found, "testbed-60-tiresias-l"), MEASURES
    )
    rows = [
        _figure("average, YARN-CS over Tiresias-L", 5.5, yarn["average"], _DURATIONS),
        _figure("median, YARN-CS over Tiresias-L", 27, yarn["median"], _DURATIONS),
        _figure(
            "average, Tiresias-G over -L", 1.06, gittins["average"], "theirs pay for preemptions; next line"
        ),
        _figure("the same, 60 s a preemption", 1.06, costly["average"], _DURATIONS),
        _figure("median, Tiresias-G over -L", 1.05, gittins["median"], "as above"),
    ]
    for policy, published in MAKESPANS.items():
        values = _of(found, f"testbed-{policy}", makespan)
        rows.append(_figure(f"makespan, {NAMES[policy]}, s", published, values, _DURATIONS, "{:,.0f}"))
    longer = _longer(found)
    rows.append(_figure("makespan, YARN-CS over Tiresias-L", 1.21, longer, _DURATIONS))
    for policy in ("yarn-cs", "srtf", "tiresias-g", "tiresias-l"):
        values = _of(found, f"testbed-{policy}", lambda run: run["utilisation"])
        why = "theirs: similar across schedulers; the last job decides how long GPUs stand idle"
        rows.append(_figure(f"GPU utilisation, {NAMES[policy]}", None, values, why, "{:.0%}"))
    head = (
        "## Testbed: 480 jobs on 60 GPUs (Figs. 3.10 and 3.11)\n\nMeans over seeds of the workload, in brackets "
        "least and largest. Preemption is free unless it is said otherwise, as in the authors' simulator.\n\n"
    )
    return head + figures(rows)


def _longer(found: Found) -> list[float]:
    """Return the makespan of YARN-CS over that of Tiresias-L, by seed."""
    pairs = zip(grouped(found, "testbed-yarn-cs"), grouped(found, "testbed-tiresias-l"), strict=True)
    return [makespan(a) / makespan(b) for a, b in pairs]


def _bin(run: Run, small: bool, short: bool) -> float:
    """Return the average completion time of a bin; short means under 800 s of training."""
    inside = ((column(run, "gpus") <= 4) == small) & ((column(run, "run") < 800) == short)
    return float(jct(run)[inside].mean()) if inside.any() else float("nan")


def _bins(found: Found) -> str:
    rows = []
    shares = {}
    for label, small, short in (
        ("SS", True, True),
        ("SL", True, False),
        ("LS", False, True),
        ("LL", False, False),
    ):
        shares[label] = [
            float(np.mean(((column(r, "gpus") <= 4) == small) & ((column(r, "run") < 800) == short)))
            for r in grouped(found, "testbed-tiresias-l")
        ]
    for label, published in (("SS", 0.635), ("SL", 0.125), ("LS", 0.165), ("LL", 0.075)):
        rows.append(_figure(f"jobs in {label}", published, shares[label], _DURATIONS, "{:.1%}"))
    for policy, published in (("tiresias-l", 300), ("tiresias-g", 330)):
        values = _of(found, f"testbed-{policy}", lambda run: _bin(run, True, True))
        rows.append(_figure(f"SS, {NAMES[policy]}: average, s", published, values, _DURATIONS, "{:,.0f}"))
    for label, small, published in (("SS", True, 27.6), ("LL", False, 1.0)):
        pairs = zip(grouped(found, "testbed-yarn-cs"), grouped(found, "testbed-tiresias-l"), strict=True)
        values = [_bin(a, small, small) / _bin(b, small, small) for a, b in pairs]
        why = "waiting under YARN-CS is the same for all jobs, so the longer a job runs the less it matters"
        rows.append(_figure(f"{label}: average, YARN-CS over Tiresias-L", published, values, why))
    head = "## Bins: small up to 4 GPUs, short under 800 s (section 3.5.2.1)\n\n"
    return head + figures(rows)


def _queueing(found: Found) -> str:
    rows = []
    for policy, published in TABLE_3_5.items():
        runs = grouped(found, f"testbed-{policy}")
        delays = [waited(run)[column(run, "gpus") >= 2] for run in runs]
        for label, theirs, of in zip(MEASURES, published, MEASURES.values(), strict=True):
            values = [float(of(delay)) for delay in delays]
            rows.append(_figure(f"{NAMES[policy]}: {label}, s", theirs, values, _WAITING, "{:,.0f}"))
    return "## Queueing delay of jobs with two GPUs or more (Table 3.5)\n\n" + figures(rows)


def _preemptions(found: Found) -> str:
    rows = []
    for policy, (count, seconds) in PREEMPTIONS.items():
        for prefix, words in (("testbed", "free"), ("testbed-60", "60 s each")):
            values = _of(found, f"{prefix}-{policy}", lambda run: column(run, "restarts").sum())
            rows.append(
                _figure(f"{NAMES[policy]}, {words}: preemptions", count, values, _DURATIONS, "{:,.0f}")
            )
        spent = _of(found, f"testbed-60-{policy}", lambda run: 60.0 * column(run, "restarts").sum())
        rows.append(_figure(f"{NAMES[policy]}: s spent", seconds, spent, _DURATIONS, "{:,.0f}"))
    return "## Preemptions (section 3.5.2.4)\n\n" + figures(rows)


def _placement(found: Found) -> str:
    gains = []
    for skew, random in zip(grouped(found, "placed-skew"), grouped(found, "placed-random"), strict=True):
        several = column(skew, "gpus") >= 2
        gains.append((column(random, "run") / column(skew, "run"))[several])
    rows = [
        _figure("largest speed-up of training over random placement", 1.67, [float(g.max()) for g in gains],
                "1.67 is put in for skewed models that one node could hold and that are spread"),
        _figure("jobs that lose", 0.30, [float((g < 1 - 1e-9).mean()) for g in gains],
                "theirs: under 30% lose a little; ours: what is not skewed loses nothing by assumption", "{:.0%}"),
        _figure("jobs that gain", None, [float((g > 1 + 1e-9).mean()) for g in gains],
                "of jobs with two GPUs or more", "{:.0%}"),
        _figure("average completion time, random over by skew", None,
                ratios(grouped(found, "placed-random"), grouped(found, "placed-skew"), MEASURES)["average"]),
    ]  # fmt: skip
    head = (
        "## Placement by skew (Fig. 3.12)\n\nThe slowdown of a spread model can't be simulated, so it is given; what "
        "is measured is which jobs the rule saves from it.\n\n"
    )
    return head + figures(rows)


def _trace(found: Found) -> str:
    rows = []
    for policy, published in TABLE_3_6.items():
        mine = _over(found, "trace", policy, "tiresias-l")
        for label, theirs in zip(MEASURES, published, strict=True):
            why = _TRACE if label == "median" else _TAIL
            rows.append(_figure(f"{NAMES[policy]}: {label}", theirs, mine[label], why))
    loads = grouped(found, "load")
    head = (
        "## Trace simulation: completion times over Tiresias-L's (Table 3.6)\n\n"
        f"Offered load while jobs arrive: {np.mean(loads):.2f} ({min(loads):.2f} to {max(loads):.2f} by seed).\n\n"
    )
    return head + figures(rows)


def _table_3_1(found: Found) -> str:
    rows = []
    for policy, published in TABLE_3_1.items():
        for kind, words, why in (
            ("trace", "trace", _TAIL),
            ("testbed", "testbed's workload", "another workload"),
        ):
            mine = _over(found, kind, policy, "srsf")
            for label, theirs in zip(MEASURES, published, strict=True):
                rows.append(_figure(f"{NAMES[policy]}, {words}: {label}", theirs, mine[label], why))
    return "## Both dimensions matter: completion times over SRSF's (Table 3.1)\n\n" + figures(rows)


def _sensitivity(found: Found) -> str:
    rows = []
    for policy in ("tiresias-l", "tiresias-g"):
        base = grouped(found, f"trace-{policy}-threshold-1")
        for threshold in ("0.5", "2", "4"):
            runs = grouped(found, f"trace-{policy}-threshold-{threshold}")
            stated = "slightly worse" if policy == "tiresias-l" and threshold == "0.5" else "flat"
            mean, low, high = spread(ratios(runs, base, MEASURES)["average"])
            label = f"{NAMES[policy]}: average, threshold {threshold} h over 1 h"
            rows.append(Figure(label, None, mean, low, high, _TAIL, "{:.3f}", stated))
    base = grouped(found, "trace-tiresias-l")
    for queues in (3, 4):
        runs = grouped(found, f"trace-tiresias-l-queues-{queues}")
        values = ratios(runs, base, MEASURES)["average"]
        rows.append(_figure(f"Tiresias-L: average, {queues} queues over 2", 0.99, values, _TAIL, "{:.3f}"))
    for policy in ("tiresias-l", "tiresias-g"):
        base = grouped(found, f"trace-{policy}")
        for knob in (1, 2, 4, 8):
            runs = grouped(found, f"trace-{policy}-knob-{knob}")
            for label, of in (
                ("average", np.mean),
                ("95th percentile", MEASURES["95th percentile"]),
                ("largest", np.max),
            ):
                mean, low, high = spread(
                    [float(of(jct(a)) / of(jct(b))) for a, b in zip(runs, base, strict=True)]
                )
                stated = {"average": "flat", "95th percentile": "barely moves", "largest": "cut"}[label]
                stated = stated if policy == "tiresias-g" or label != "largest" else "–"
                words = f"{NAMES[policy]}: {label}, PROMOTEKNOB {knob} over none"
                rows.append(Figure(words, None, mean, low, high, "", "{:.3f}", stated))
    return (
        "## Sensitivity (Figs. 3.14 and 3.15)\n\nGPU-hours; theirs are curves without numbers.\n\n"
        + figures(rows)
    )


def _bands(found: Found) -> str:
    rows: list[tuple[Any, ...]] = []
    for claim, measure, (kind, over, under), low, high in BANDS:
        values = _over(found, kind, over, under)[measure]
        rows.append(
            (claim, f"{np.mean(values):.2f}", f"{sum(low <= v <= high for v in values)} of {len(values)}")
        )
    longer = _longer(found)
    rows.append(("makespan, YARN-CS over Tiresias-L, 1.02 to 1.3", f"{np.mean(longer):.2f}",
                 f"{sum(1.02 <= v <= 1.3 for v in longer)} of {len(longer)}"))  # fmt: skip
    head = "## Bands that a plain implementation should meet\n\nOn the testbed's workload; preemption is free.\n\n"
    return head + table(("band", "mean", "seeds within"), rows)


def _orders(found: Found) -> str:
    rows: list[tuple[str, Sequence[bool]]] = []
    for kind, words in (("testbed", "testbed's workload"), ("trace", "trace")):
        for label in ("average", "95th percentile"):
            of = MEASURES[label]
            by = {
                policy: [float(of(jct(run))) for run in grouped(found, f"{kind}-{policy}")]
                for policy in ("srsf", "srtf", "smallest-first")
            }
            claim = f"{words}, {label}: SRSF ≤ SRTF ≤ SF"
            rows.append(
                (claim, [a <= b * 1.001 and b <= c * 1.001 for a, b, c in zip(*by.values(), strict=True)])
            )
        for policy in ("yarn-cs", "best-effort", "time-sharing"):
            mine = _over(found, kind, policy, "tiresias-l")
            for label in ("average", "median"):
                rows.append((f"{words}, {label}: Tiresias-L < {NAMES[policy]}", [v > 1 for v in mine[label]]))
    flat = []
    for threshold in ("2", "4"):
        runs, base = (
            grouped(found, f"trace-tiresias-l-threshold-{threshold}"),
            grouped(found, "trace-tiresias-l"),
        )
        flat += [abs(value - 1) < 0.05 for value in ratios(runs, base, MEASURES)["average"]]
    rows.append(("trace: thresholds from 1 GPU-hour on within 5%", flat))
    base = grouped(found, "trace-tiresias-l")
    more = [ratios(grouped(found, f"trace-tiresias-l-queues-{k}"), base, MEASURES)["average"] for k in (3, 4)]
    rows.append(
        ("trace: 3 or 4 queues gain less than 5%", [value > 0.95 for values in more for value in values])
    )
    head = "## Orders\n\nWhat the dissertation says, seed by seed; equal within 0.1% counts as equal.\n\n"
    return head + orders(rows)


def _drawn(found: Found) -> Pictures:
    shown = ("yarn-cs", "best-effort", "time-sharing", "srtf", "tiresias-g", "tiresias-l")
    times = {
        kind: {
            NAMES[policy]: np.concatenate([jct(run) for run in grouped(found, f"{kind}-{policy}")]).tolist()
            for policy in shown
        }
        for kind in ("testbed", "trace")
    }
    delays = {
        NAMES[policy]: [
            1.0 + delay
            for run in grouped(found, f"testbed-{policy}")
            for delay in waited(run)[column(run, "gpus") >= 2].tolist()
        ]
        for policy in TABLE_3_5
    }
    policies = list(TABLE_3_6)
    medians = {policy: _over(found, "trace", policy, "tiresias-l")["median"] for policy in policies}
    bars: dict[str, list[float | None]] = {
        "published": [TABLE_3_6[policy][1] for policy in policies],
        "ours": [float(np.mean(values)) for values in medians.values()],
    }
    names = [NAMES[policy] for policy in policies]
    lines = {
        NAMES[policy]: [(hours, _hours(found, policy, hours)) for hours in (0.5, 1.0, 2.0, 4.0)]
        for policy in ("tiresias-l", "tiresias-g")
    }
    return {
        "tiresias-testbed": cdf_svg(
            "Completion times, testbed's workload", times["testbed"], label="completion time", log=True
        ),
        "tiresias-queueing": cdf_svg(
            "Queueing delay, testbed, two GPUs or more", delays, label="1 s + delay", log=True
        ),
        "tiresias-trace": cdf_svg(
            "Completion times, trace", times["trace"], label="completion time", log=True
        ),
        "tiresias-median": bars_svg("Trace: median completion time over Tiresias-L's", names, bars, unit="×"),
        "tiresias-threshold": lines_svg(
            "Trace: average completion time by threshold", lines, label="GPU-hours", unit="h"
        ),
    }


def _hours(found: Found, policy: str, threshold: float) -> float:
    """Return the average completion time with a threshold, h."""
    runs = grouped(found, f"trace-{policy}-threshold-{threshold:g}")
    return float(np.mean([jct(run).mean() for run in runs])) / 3600


_LIMITS = """## What is not here

- Fidelity of the simulator to the testbed, measured losses and pause times: there is no testbed.
- Growth of the cluster, model sizes and arrival gaps of the production trace (sections 3.1 and 3.2): observations.
"""
