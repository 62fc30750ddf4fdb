"""The page on Optimus: the figures of its evaluation that can be simulated, beside ours."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from ebbflow.tasks.drawing.charts import bars_svg, cdf_svg, lines_svg
from tests.evaluation.experiments import Found
from tests.evaluation.optimus.jobs import SPAN
from tests.evaluation.optimus.runs import JOBS, SEEDS
from tests.evaluation.optimus.world import (
    INTERVAL,
    LOSS_NOISE,
    MACHINES,
    MEMORY,
    MOST_BUNDLES,
    RESTART,
    SERVER,
    SPEED_NOISE,
    WORKER,
)
from tests.evaluation.page import Figure, Pictures, figures, grouped, orders, pictures_of, table
from tests.evaluation.runs import spread

TITLE = "Optimus: evaluation and ablations made again"

PARAMETERS = f"""
- {JOBS} jobs of nine types, synchronous or not, arrive over {SPAN:,.0f} s; {MACHINES} machines with room for
  five or six tasks each ({MEMORY:g} GB; a server takes {SERVER:g}, a worker {WORKER:g}); a decision every
  {INTERVAL:g} s; seeds {", ".join(map(str, SEEDS))}.
- A step takes what equation 2 of the paper says, with gigabit links for each task and transfers by where tasks
  are. Compute, overheads, loss curves and lengths are drawn by type.
- Schedulers see speeds with {SPEED_NOISE:.0%} noise, losses with {LOSS_NOISE:.0%}; a resized job stops for
  {RESTART:g} s. DRF and Tetris give bundles of a server and a worker, Tetris at most {MOST_BUNDLES}; Tetris
  reads the same estimates as Optimus.
- The published figures on fitted speeds and on ResNet-50's blocks are second-hand; the others are in the paper or
  in public summaries of it.
"""

_WORLD = "their jobs' coefficients are not published; ours have the sizes of the few that are"
_LABELS = {
    "drf": "DRF, spread, MXNet's blocks",
    "tetris": "Tetris, packed, MXNet's blocks",
    "allocation": "allocation alone",
    "placement": "placement alone",
    "allocation-placement": "allocation and placement",
    "optimus": "all three: Optimus",
    "oracle": "Optimus with true remaining time and speed",
}


def _jct(world: dict[str, Any]) -> float:
    return float(np.mean(np.array(world["finish"]) - np.array(world["arrival"])))


def _makespan(world: dict[str, Any]) -> float:
    return float(max(world["finish"]) - min(world["arrival"]))


def _jcts(found: Found, prefix: str) -> list[float]:
    return [_jct(world) for world in grouped(found, prefix)]


def _ratio(over: Sequence[float], under: Sequence[float]) -> list[float]:
    return [a / b for a, b in zip(over, under, strict=True)]


def _figure(
    label: str,
    published: float | None,
    values: Sequence[float],
    why: str = "",
    form: str = "{:,.2f}",
    stated: str = "",
) -> Figure:
    mean, low, high = spread(values)
    return Figure(label, published, mean, low, high, why, form, stated)


def page(found: Found, folder: str) -> tuple[str, Pictures]:
    """Return the page without its head, as Markdown, and its pictures by name."""
    drawn = _drawn(found)
    parts = [_against(found), _ablation(found), _errors(found), _estimators(found), _balancing(found)]
    parts += [_stragglers(found), _loads(found), _scale(found), _orders(found)]
    return "\n".join([*parts, "## Pictures\n", pictures_of(folder, drawn), _LIMITS]), drawn


def _against(found: Found) -> str:
    mine = _jcts(found, "optimus")
    spans = {name: [_makespan(w) for w in grouped(found, name)] for name in ("drf", "tetris", "optimus")}
    overhead = [world["overhead"] for world in grouped(found, "optimus")]
    tasks = {name: [world["tasks"] for world in grouped(found, name)] for name in ("drf", "optimus")}
    rows = [
        _figure("average completion time, DRF over Optimus", 2.39, _ratio(_jcts(found, "drf"), mine), _WORLD),
        _figure("makespan, DRF over Optimus", 1.63, _ratio(spans["drf"], spans["optimus"]), _WORLD),
        _figure("average completion time, Tetris over Optimus", None, _ratio(_jcts(found, "tetris"), mine),
                "theirs: above 1 under all workloads tried"),
        _figure("makespan, Tetris over Optimus", None, _ratio(spans["tetris"], spans["optimus"]),
                "as above"),
        _figure("share of time spent in resizing", 0.0254, overhead,
                "25 s a restart is our assumption; theirs is a share of makespan", "{:.2%}"),
        _figure("running tasks, Optimus over DRF", None, _ratio(tasks["optimus"], tasks["drf"]),
                "theirs: fewer; ours takes what still helps a little, so that memory is nearly full under both"),
    ]  # fmt: skip
    head = (
        "## Against fairness and packing (sections 6.2 and 6.3)\n\nMeans over seeds of the workload, in brackets "
        "least and largest.\n\n"
    )
    return head + figures(rows)


def _ablation(found: Found) -> str:
    base, full = _jcts(found, "drf"), _jcts(found, "optimus")
    rows = [
        (label, f"{np.mean(_jcts(found, name)):,.0f}", f"{np.mean(_ratio(base, _jcts(found, name))):.2f}×")
        for name, label in _LABELS.items()
    ]
    gains = [a - b for a, b in zip(base, full, strict=True)]
    step = _jcts(found, "allocation-placement")
    shares = {
        "balancing, taken away": [(s - f) / g for s, f, g in zip(step, full, gains, strict=True)],
        "allocation, taken away": [
            (p - s) / g for p, s, g in zip(_jcts(found, "placement"), step, gains, strict=True)
        ],
        "placement, taken away": [
            (a - s) / g for a, s, g in zip(_jcts(found, "allocation"), step, gains, strict=True)
        ],
        "allocation, alone": [
            (b - a) / g for b, a, g in zip(base, _jcts(found, "allocation"), gains, strict=True)
        ],
        "placement, alone": [
            (b - p) / g for b, p, g in zip(base, _jcts(found, "placement"), gains, strict=True)
        ],
    }
    published = {"allocation": 0.62, "placement": 0.17, "balancing": 0.20}
    why = "shares depend on the order, and on how much transfers weigh"
    figs = [
        _figure(f"share of the gain: {name}", published[name.split(",")[0]], values, why, "{:.0%}")
        for name, values in sorted(shares.items())
    ]
    head = "## What each part contributes (ablation)\n\n"
    intro = (
        "\nThe parts' shares of the gain in average completion time from DRF to Optimus. Taken away: what is "
    )
    intro += "lost from Optimus (allocation, placement: without balancing) if a part is DRF's.\n\n"
    return (
        head + table(("scheduler", "average completion time, s", "DRF over it"), rows) + intro + figures(figs)
    )


def _errors(found: Found) -> str:
    exact, mine = _jcts(found, "oracle"), _jcts(found, "optimus")
    gain = [1 - a / b for a, b in zip(exact, mine, strict=True)]
    rows = [
        _figure(
            "gain left from perfect estimates", 0.15, gain, "theirs is an upper end", "{:.0%}", "at most 15%"
        )
    ]
    for error in (10, 20, 30, 40):
        values = _ratio(_jcts(found, f"error-{error / 100:g}"), exact)
        rows.append(
            _figure(f"estimates {error}% too high or too low: average, over exact ones", None, values)
        )
    head = "## Errors of estimates\n\nRemaining epochs wrong by job, speeds by job and configuration.\n\n"
    return head + figures(rows)


def _estimators(found: Found) -> str:
    fits = [float(np.mean(errors)) for errors in grouped(found, "speed-fit")]
    rows = [
        _figure("relative error of the fitted speed, 8 samples, up to 8 × 8 tasks", 0.10, fits,
                "noise of 5%; transfers inside a machine are free, which the model has no term for",
                "{:.1%}", "under 10%"),
    ]  # fmt: skip
    worlds = grouped(found, "convergence")
    for share in sorted({key for world in worlds for key in world}, key=float):
        values = [float(np.mean(world[share])) for world in worlds if share in world]
        label = f"relative error of the predicted epoch of convergence, {float(share):.0%} of the way"
        rows.append(_figure(label, None, values, "10% noise on losses", "{:.1%}"))
    return "## Estimators (sections 3.1 and 3.2)\n\n" + figures(rows)


def _balancing(found: Found) -> str:
    worlds = grouped(found, "balancing")
    published = {"optimus": (0.1, 1, 157), "mxnet": (3.6, 43, 247)}
    names = {"optimus": "Optimus", "mxnet": "MXNet"}
    rows = []
    for name, (size, gap, requests) in published.items():
        why = "161 tensors of the original ResNet-50 against their 157"
        why += "; small blocks go by a hash there, by a draw here" if name == "mxnet" else ""
        of = {key: [world[name][key] for world in worlds] for key in worlds[0][name]}
        rows.append(_figure(f"{names[name]}: gap in size, millions of parameters", size,
                            [value / 1e6 for value in of["size_gap"]], why))  # fmt: skip
        rows.append(_figure(f"{names[name]}: gap in requests", gap, of["request_gap"], why, "{:.0f}"))
        rows.append(_figure(f"{names[name]}: requests a step", requests, of["requests"], why, "{:.0f}"))
    return "## ResNet-50's blocks on ten servers (section 5.3)\n\n" + figures(rows)


def _stragglers(found: Found) -> str:
    calm, kept, replaced = (_jcts(found, n) for n in ("optimus", "stragglers-kept", "stragglers-replaced"))
    count = [world["replaced"] for world in grouped(found, "stragglers-replaced")]
    rows = [
        _figure("average, stragglers kept, over none", None, _ratio(kept, calm)),
        _figure("average, stragglers replaced, over none", None, _ratio(replaced, calm)),
        _figure("replacements", None, count, form="{:.0f}"),
    ]
    head = (
        "## Stragglers (section 5.2)\n\nA worker becomes slow, three times as long in computing, 0.2 times an hour. "
        "Two windows of 20 steps in a row show it; it costs a restart to replace it. No figure is published.\n\n"
    )
    return head + figures(rows)


def _loads(found: Found) -> str:
    rows = []
    counts = sorted({int(name.split("-")[1]) for name in found if name.startswith("load-")})
    for count in counts:
        mine = _jcts(found, f"load-{count}-optimus")
        for name in ("drf", "tetris"):
            values = _ratio(_jcts(found, f"load-{count}-{name}"), mine)
            label = f"{count} jobs: average, {name.upper() if name == 'drf' else 'Tetris'} over Optimus"
            rows.append(_figure(label, None, values, "theirs: above 1 under all workloads tried"))
    return "## Load\n\nJobs that arrive in the same 12,000 s.\n\n" + figures(rows)


def _scale(found: Found) -> str:
    rows = []
    for name in sorted((n for n in found if n.startswith("scale-")), key=lambda n: int(n.split("-")[1])):
        jobs, one = int(name.split("-")[1]), found[name]
        rows.append(
            (
                f"{jobs:,}",
                f"{4 * jobs:,}",
                f"{one['tasks']:,}",
                f"{one['allocate_s']:.2f}",
                f"{one['place_s']:.2f}",
            )
        )
    head = (
        "## Cost of a decision\n\nTheirs: 4,000 jobs (or 100,000 tasks) on 16,000 nodes within 5 s. Ours, in CPU "
        "seconds of one core, all jobs anew:\n\n"
    )
    return head + table(("jobs", "machines", "tasks", "allocation, s", "placement, s"), rows)


def _orders(found: Found) -> str:
    base, step1, step2, full = (
        _jcts(found, name) for name in ("drf", "allocation", "allocation-placement", "optimus")
    )
    rows: list[tuple[str, Sequence[bool]]] = [
        ("Optimus < DRF", [a < b for a, b in zip(full, base, strict=True)]),
        ("Optimus < Tetris", [a < b for a, b in zip(full, _jcts(found, "tetris"), strict=True)]),
        ("allocation ≤ DRF", [a <= b for a, b in zip(step1, base, strict=True)]),
        ("with placement ≤ without", [a <= b for a, b in zip(step2, step1, strict=True)]),
        ("with balancing ≤ without", [a <= b for a, b in zip(full, step2, strict=True)]),
        ("exact estimates ≤ fitted ones", [a <= b for a, b in zip(_jcts(found, "oracle"), full, strict=True)]),
        ("perfect estimates gain less than 30%",
         [1 - a / b < 0.3 for a, b in zip(_jcts(found, "oracle"), full, strict=True)]),
        ("stragglers replaced ≤ kept",
         [a <= b for a, b in zip(_jcts(found, "stragglers-replaced"), _jcts(found, "stragglers-kept"), strict=True)]),
    ]  # fmt: skip
    return "## Orders\n\nBy average completion time, seed by seed.\n\n" + orders(rows)


def _drawn(found: Found) -> Pictures:
    times = {
        _LABELS[name]: [
            end - start
            for world in grouped(found, name)
            for start, end in zip(world["arrival"], world["finish"], strict=True)
        ]
        for name in ("drf", "tetris", "optimus", "oracle")
    }
    groups = [label for name, label in _LABELS.items() if name != "tetris"]
    bars = {"ours": [float(np.mean(_jcts(found, name))) for name in _LABELS if name != "tetris"]}
    exact = float(np.mean(_jcts(found, "oracle")))
    errors = [(0.0, 1.0)] + [
        (float(e), float(np.mean(_jcts(found, f"error-{e / 100:g}"))) / exact) for e in (10, 20, 30, 40)
    ]
    return {
        "optimus-jct": cdf_svg("Completion times", times, label="completion time"),
        "optimus-ablation": bars_svg("Average completion time by part", groups, bars),
        "optimus-errors": lines_svg(
            "Average completion time over that with exact estimates",
            {"ours": errors},
            label="error, %",
            unit="×",
        ),
    }


_LIMITS = """## What is not here

- CPU use of servers and workers on the testbed, and the cost of the pre-run: there is no testbed.
- Arrivals from a Google trace: it is not part of the material.
"""
