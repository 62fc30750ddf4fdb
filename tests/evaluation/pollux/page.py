"""The page on Pollux: every simulated figure of its evaluation beside ours."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ebbflow.tasks.drawing.charts import bars_svg, cdf_svg, lines_svg
from tests.evaluation.experiments import Found
from tests.evaluation.page import Figure, Pictures, figures, grouped, orders, pictures_of, table
from tests.evaluation.pollux.runs import NODES, PER_NODE, SEEDS, WORKLOADS
from tests.evaluation.pollux.trials import BEST, LOCAL_BATCHES
from tests.evaluation.runs import Run, column, jct, makespan

TITLE = "Pollux: the simulated evaluation made again"
PARAMETERS = f"""
- Workloads {WORKLOADS[0]} to {WORKLOADS[-1]} of the authors' simulator, 160 jobs each, on {NODES} nodes of
  {PER_NODE} GPUs; a decision every 60 s, 30 s a restart.
- Pollux at load 1 with seeds {", ".join(map(str, SEEDS))}; everything else with seed {SEEDS[0]}.
- Tiresias and Optimus as that simulator has them: two queues with 16 GPU-hours, and an oracle.
"""

NAMES = {"pollux": "Pollux", "tiresias": "Tiresias", "optimus": "Optimus, oracle"}

AVERAGES = {
    "pollux": 2580.30,
    "tiresias": 3693.78,
    "optimus": 5228.17,
}  # s, yardsticks of the authors' simulator
TESTBED = {"pollux": (0.76, 11, 16), "tiresias": (1.2, 15, 24), "optimus": (1.5, 15, 20)}  # h, Table 3.2
TESTBED_P = {"1": (0.83, 10, 16), "-10": (0.84, 12, 18)}
REDUCTIONS = {"optimus": 0.48, "tiresias": 0.32}
BY_INTERVAL = {30: 2559.55, 60: 2580.30, 120: 2626.85, 240: 2791.69, 480: 3149.72}
BESIDE = {"0": 2592.99, "0.25": 2944.96, "0.5": 3604.40}
BY_LOAD = {
    "0.5": {"pollux": 1534, "optimus": 2395, "tiresias": 2092},
    "1.0": {"pollux": 2751, "optimus": 5682, "tiresias": 4038},
    "1.5": {"pollux": 3685, "optimus": 7235, "tiresias": 6182},
    "2.0": {"pollux": 5289, "optimus": 9721, "tiresias": 10040},
}
"""s, means of eight workloads behind Fig. 3.13a."""

TICK, START = 60.0, 30.0  # s: between decisions, of a first start

_SEARCH = "the search is random; ours is another one on the same objective"
_RULES = "none: the same rules on the same files"
_TESTBED = "testbed against simulation: real restarts take 15 to 120 s, ours 30 s; other jobs, drawn alike"


def _base(found: Found, policy: str) -> list[list[Run]]:
    """Return the runs of every workload, each a list over seeds."""
    names = sorted({name.rsplit("-seed-", 1)[0] for name in found if name.startswith(f"{policy}-")})
    return [grouped(found, f"{name}-seed") for name in names]


def _rho(run: Run) -> Any:
    """Return ρ, with what nobody is spared in the time alone too: the wait for a decision, and the start."""
    times, arrivals = jct(run), column(run, "arrival")
    waits = np.ceil(arrivals / TICK) * TICK - arrivals
    return times / (times / column(run, "rho") + waits + START)


def _first(found: Found, policy: str) -> list[Run]:
    return [runs[0] for runs in _base(found, policy)]


def _mean(runs: Sequence[Run], of: Callable[[Any], Any] = np.mean) -> float:
    return float(np.mean([of(jct(run)) for run in runs]))


def _over_seeds(found: Found, policy: str) -> list[float]:
    """Return the mean over workloads of average completion times, for each seed."""
    by_workload = [[jct(run).mean() for run in runs] for runs in _base(found, policy)]
    return [float(np.mean(values)) for values in zip(*by_workload, strict=True)]


def _p99(values: Any) -> float:
    return float(np.percentile(values, 99))


def _max_rho(runs: Sequence[Run]) -> float:
    return float(np.mean([_rho(run).max() for run in runs]))


def page(found: Found, folder: str) -> tuple[str, Pictures]:
    """Return the page without its head, as Markdown, and its pictures by name."""
    drawn = _drawn(found)
    parts = [_load_one(found), _intervals(found), _interference(found), _exponents(found), _fairness(found)]
    parts += [_loads(found), _scaling(found), _seeded(found), _trials(found)]
    parts.append(_claims(found))
    return "\n".join([*parts, "## Pictures\n", pictures_of(folder, drawn), _LIMITS]), drawn


def _load_one(found: Found) -> str:
    rows = []
    for policy, name in NAMES.items():
        seeds = _over_seeds(found, policy)
        why = _SEARCH if policy == "pollux" else _RULES
        label, ours = f"{name}: average completion time, s", float(np.mean(seeds))
        rows.append(Figure(label, AVERAGES[policy], ours, min(seeds), max(seeds), why))
    for policy, published in REDUCTIONS.items():
        gain = 1 - _mean(_first(found, "pollux")) / _mean(_first(found, policy))
        why = "theirs: eight workloads, of which the four with published files are ours"
        rows.append(Figure(f"less than {NAMES[policy]}'s", published, gain, why=why, form="{:.0%}"))
    for policy, published in TESTBED.items():
        runs = _first(found, policy)
        ours = (
            _mean(runs) / 3600,
            _mean(runs, _p99) / 3600,
            float(np.mean([makespan(r) for r in runs])) / 3600,
        )
        for label, theirs, value in zip(
            ("average", "99th percentile", "makespan"), published, ours, strict=True
        ):
            rows.append(Figure(f"testbed, {NAMES[policy]}: {label}, h", theirs, value, why=_TESTBED))
    pollux = _first(found, "pollux")
    restarts = sum(column(run, "restarts").sum() for run in pollux)
    held = sum(column(run, "run").sum() for run in pollux)
    rows.append(
        Figure(
            "testbed: minutes of a job between re-allocations",
            7,
            held / restarts / 60,
            why="the penalty of a restart is the same; in simulation no restart takes longer than 30 s",
        )
    )
    share = 30 * (restarts + sum(len(run["jobs"]["name"]) for run in pollux)) / held
    rows.append(
        Figure(
            "testbed: share of run time spent in restarts",
            0.08,
            share,
            form="{:.1%}",
            why="as above; first starts count here",
        )
    )
    cost = sum(run["policy_s"] for run in pollux) / sum(run["decisions"] for run in pollux)
    rows.append(
        Figure(
            "CPU seconds of a scheduling round",
            1.0,
            cost,
            form="{:.3f}",
            why="local search with an exact bound instead of a genetic search",
        )
    )
    head = "## Load 1: 160 jobs on 64 GPUs\n\nMeans over the workloads; in brackets least and largest over seeds.\n"
    return head + "\n" + figures(rows)


def _intervals(found: Found) -> str:
    rows = []
    for seconds, published in BY_INTERVAL.items():
        runs = _first(found, "pollux") if seconds == 60 else grouped(found, f"interval-{seconds}")
        rows.append(Figure(f"every {seconds} s: average, s", published, _mean(runs), why=_SEARCH))
    return "## Interval between decisions (Fig. 3.13b)\n\n" + figures(rows)


def _interference(found: Found) -> str:
    rows = []
    for slowdown, published in BESIDE.items():
        why = "how often jobs meet on a node depends on the search, and ours is another one"
        value = _mean(grouped(found, f"beside-{slowdown}"))
        rows.append(
            Figure(f"not avoided, {float(slowdown):.0%} slower: average, s", published, value, why=why)
        )
    base = _mean(_first(found, "pollux"))
    for slowdown, published in (("0", 1.0), ("0.5", 1.4)):
        value = _mean(grouped(found, f"beside-{slowdown}")) / base
        why = "thesis, eight workloads; by the yardstick's means "
        why += f"{BESIDE[slowdown] / AVERAGES['pollux']:.2f}"
        rows.append(
            Figure(f"not avoided over avoided, {float(slowdown):.0%} slower", published, value, why=why)
        )
    kept = grouped(found, "avoiding-0.5")
    same = _mean(kept) / _mean(_first(found, "pollux")[:1])
    rows.append(
        Figure(
            "avoided, 50% slower, over avoided without slowdown (first workload)",
            1.0,
            same,
            why="no two spread jobs ever share a node, so nothing is slowed",
            form="{:.4f}",
        )
    )
    head = "## Interference between spread jobs that share a node (Fig. 3.13c)\n\n"
    return head + figures(rows)


def _exponents(found: Found) -> str:
    base = _first(found, "pollux")
    rows = []
    for p, published in TESTBED_P.items():
        runs = grouped(found, f"p-{p}")
        labels = ("average", "99th percentile", "makespan")
        of = (_mean(runs) / _mean(base), _mean(runs, _p99) / _mean(base, _p99),
              sum(map(makespan, runs)) / sum(map(makespan, base)))  # fmt: skip
        for label, theirs, reference, value in zip(labels, published, TESTBED["pollux"], of, strict=True):
            why = "theirs: one testbed run each, rounded"
            rows.append(Figure(f"p = {p} over p = -1: {label}", theirs / reference, value, why=why))
    return "## Fairness exponent p (Table 3.2)\n\n" + figures(rows)


def _fairness_sets(found: Found) -> dict[str, list[Run]]:
    return {
        "Pollux, p = -1": _first(found, "pollux"),
        "Pollux, p = 1": grouped(found, "p-1"),
        "Pollux, p = -10": grouped(found, "p--10"),
        "Tiresias": _first(found, "tiresias"),
        "Optimus, oracle": _first(found, "optimus"),
    }


def _fairness(found: Found) -> str:
    sets = _fairness_sets(found)
    rows = []
    for name, runs in sets.items():
        rho = np.concatenate([_rho(run) for run in runs])
        rows.append((name, f"{np.mean(rho < 1):.1%}", f"{np.mean(rho < 2):.1%}", f"{np.mean(rho > 4):.1%}",
                     f"{np.median(rho):.2f}", f"{rho.max():.2f}"))  # fmt: skip
    base = _max_rho(sets["Pollux, p = -1"])
    ratios = [Figure("jobs with ρ < 2, p = -1", 0.99, float(np.mean(np.concatenate(
        [_rho(run) for run in sets["Pollux, p = -1"]]) < 2)), form="{:.0%}", why=_RHO)]  # fmt: skip
    for name, theirs in (("Tiresias", 5.4), ("Optimus, oracle", 1.5)):
        ratios.append(
            Figure(
                f"largest ρ, {name} over Pollux",
                theirs,
                _max_rho(sets[name]) / base,
                why="the thesis names 1.5 and 5.4 without saying which is whose; " + _RHO,
            )
        )
    head = "## Finish-time fairness (Fig. 3.12)\n\n"
    words = (
        "ρ: completion time over that of the job alone on round(64 / mean number of active jobs in its life) GPUs, "
        "at least one, packed, never moved, trained in the way of its policy (Pollux: batch by goodput), with the "
        "same wait for the next decision and the same 30 s to start.\n\n"
    )
    return (
        head
        + words
        + table(("policy", "ρ < 1", "ρ < 2", "ρ > 4", "median", "largest"), rows)
        + "\n"
        + figures(ratios)
    )


_RHO = "the thesis does not say what the fair share of a job is"


def _at_load(found: Found, load: str, policy: str) -> list[Run]:
    return _first(found, policy) if load == "1.0" else grouped(found, f"load-{load}-{policy}")


def _loads(found: Found) -> str:
    rows = []
    for load, published in BY_LOAD.items():
        for policy, name in NAMES.items():
            runs = _at_load(found, load, policy)
            why = "theirs: eight workloads, of which four are published, all at load 1"
            rows.append(Figure(f"load {load}, {name}: average, s", published[policy], _mean(runs), why=why))
    head = (
        "## Load (Fig. 3.13a)\n\nLoad 0.5 takes every second job of a workload, 2.0 two workloads together, 1.5 one "
        "and every second job of the next, so that over all runs every job counts alike.\n\n"
    )
    return head + figures(rows)


def _scaling(found: Found) -> str:
    rows = []
    for explore in ("2", "16"):
        ours, other = found[f"scaling-goodput-{explore}"], found[f"scaling-throughput-{explore}"]
        limit = "at most doubling" if explore == "2" else "without that limit"
        why = "the thesis does not say how nodes are discovered, nor its largest cluster; ours has 16 nodes"
        cost, time = ours["gpu_hours"] / other["gpu_hours"], float(jct(ours)[0] / jct(other)[0])
        rows.append(Figure(f"cost over scaling by throughput, {limit}", 0.75, cost, why=why))
        rows.append(Figure(f"time over scaling by throughput, {limit}", 1.06, time, why=why))
    grows = []
    for rule in ("goodput", "throughput"):
        nodes = _nodes_at(found[f"scaling-{rule}-2"], 3600.0)
        grows.append(Figure(f"nodes of scaling by {rule}, after an hour", None, nodes, form="{:.0f}"))
    head = (
        "## One large job on rented nodes (Fig. 3.14)\n\nOne job on nodes of 4 GPUs grows when its goodput per GPU, "
        "over that of one GPU, is above 2/3, to where it is nearest to 1/2; by throughput every example counts alike "
        "in decisions. Cost is node time. A published saving of 25% is 0.75.\n\n"
    )
    return head + figures(rows + grows)


def _nodes_at(run: Run, time: float) -> float:
    return next((value for at, value in reversed(run["nodes"]) if at <= time), 0.0)


def _seeded(found: Found) -> str:
    base, known = _first(found, "pollux"), grouped(found, "seeded")
    ratios = []
    for models, theirs in ((("cifar10", "ncf"), 0.965), (("imagenet", "yolov3"), 1.0)):
        pairs = [(jct(k)[np.isin(column(k, "model"), models)], jct(b)[np.isin(column(b, "model"), models)])
                 for k, b in zip(known, base, strict=True)]  # fmt: skip
        mine = np.concatenate([k for k, _ in pairs]).sum(), np.concatenate([b for _, b in pairs]).sum()
        label = "short jobs (cifar10, ncf)" if models[0] == "cifar10" else "long jobs (imagenet, yolov3)"
        stated = "0.95 to 0.98" if models[0] == "cifar10" else "1.00"
        if mine[1] > 0:
            why = "unknown speeds are taken to scale perfectly, which gives new jobs GPUs early; known ones are not"
            why = why if models[0] == "cifar10" else _by_seed(found, models)
            words, ours = f"{label}: average with known speeds over without", float(mine[0] / mine[1])
            ratios.append(Figure(words, theirs, ours, why=why, form="{:.3f}", stated=stated))
    return "## Models of speed known from earlier jobs\n\n" + figures(ratios)


def _by_seed(found: Found, models: Sequence[str]) -> str:
    """Say what the seed of the search alone changes in the completion times of these models."""
    runs = [runs for runs in _base(found, "pollux") if len(runs) > 1]
    first, second = (
        sum(jct(pair[i])[np.isin(column(pair[i], "model"), models)].sum() for pair in runs) for i in (0, 1)
    )
    return f"another seed of the search alone gives {second / first:.3f}" if first else ""


def _trials(found: Found) -> str:
    runs = {"Pollux": grouped(found, "trials-pollux")}
    runs |= {f"fixed, {n} on each GPU": grouped(found, f"trials-fixed-{n}") for n in LOCAL_BATCHES}
    minutes = {name: [float(np.mean(run["jct"])) / 60 for run in some] for name, some in runs.items()}
    hours = {name: [makespan(run) / 3600 for run in some] for name, some in runs.items()}
    gpus = "theirs: 16 A100 of two machines; ours: 16 T4 of four, as they were measured"
    rows = []
    for name in runs:
        mine, whole = minutes[name], hours[name]
        why = gpus if name == "Pollux" else f"{gpus}; the thesis does not say how many examples are on a GPU"
        published = (25, 10) if name == "Pollux" else (34, 14)
        rows += [
            Figure(
                f"{name}: average of a trial, min",
                published[0],
                float(np.mean(mine)),
                min(mine),
                max(mine),
                why,
            ),
            Figure(
                f"{name}: all trials, h", published[1], float(np.mean(whole)), min(whole), max(whole), why
            ),
        ]
    for name in [name for name in runs if name != "Pollux"]:
        ratio = float(np.mean(minutes["Pollux"]) / np.mean(minutes[name]))
        rows.append(Figure(f"average of a trial, Pollux over {name}", 25 / 34, ratio))
    promising = grouped(found, "trials-promising")
    pairs = {
        "Pollux": runs["Pollux"],
        "by promise": promising,
        "fixed, 128 on each GPU": runs["fixed, 128 on each GPU"],
    }
    why = "ours alone: the thesis has no such division; batches as under Pollux"
    mine = [float(np.mean(run["jct"])) / 60 for run in promising]
    rows.append(
        Figure("by promise: average of a trial, min", None, float(np.mean(mine)), min(mine), max(mine), why)
    )
    whole = [makespan(run) / 3600 for run in promising]
    rows.append(Figure("by promise: all trials, h", None, float(np.mean(whole)), min(whole), max(whole), why))
    for name, some in pairs.items():
        best = [_of_the_best(run) / 60 for run in some]
        label = f"{name}: average of the best {BEST:.0%} of the trials, min"
        rows.append(Figure(label, None, float(np.mean(best)), min(best), max(best)))
    count = len(runs["Pollux"][0]["jct"])
    head = (
        f"## A hyper-parameter search (Table 3.3)\n\n{count} trials of ResNet18 on CIFAR-10, four at once on 16 "
        "GPUs, a new one when one has ended; trials differ in width, so that an example takes half to twice the "
        "measured time. Beside Pollux each has four GPUs of one node and a fixed batch. What Pollux gains is what "
        "that batch leaves: with 128 examples on each GPU nothing is left on these GPUs, and the way up from one "
        "GPU, with six restarts a trial, is not won back. How good the models are is not simulated: published are "
        "95.4 % with Pollux and 95.5 % without. By promise (`planners/tuning/promise.py`) each trial has one GPU at "
        "least and those that rank higher get the others, as far as their goodput grows; ranks are drawn, and known "
        "from 1 of 81 epochs on; no trial is stopped.\n\n"
    )
    return head + figures(rows)


def _of_the_best(run: Run) -> float:
    times, quality = np.array(run["jct"]), np.array(run["quality"])
    return float(times[quality > np.quantile(quality, 1 - BEST)].mean())


def _claims(found: Found) -> str:
    base = _first(found, "pollux")
    averages = {policy: [jct(run).mean() for run in _first(found, policy)] for policy in NAMES}
    beside = {key: [jct(run).mean() for run in grouped(found, f"beside-{key}")] for key in BESIDE}
    worst = {p: [_rho(run).max() for run in grouped(found, f"p-{p}")] for p in TESTBED_P}
    mine = [_rho(run).max() for run in base]
    slow = [jct(run).mean() for run in grouped(found, "interval-480")]
    rows: list[tuple[str, Sequence[bool]]] = [
        ("average: Pollux < Tiresias",
         [a < b for a, b in zip(averages["pollux"], averages["tiresias"], strict=True)]),
        ("average: Pollux < Optimus",
         [a < b for a, b in zip(averages["pollux"], averages["optimus"], strict=True)]),
        ("every 8 min is worse than every minute", [a < b for a, b in zip(averages["pollux"], slow, strict=True)]),
        ("not avoided: 0% < 25% < 50%", [a < b < c for a, b, c in zip(*beside.values(), strict=True)]),
        ("largest ρ: p = -1 below p = 1", [a < b for a, b in zip(mine, worst["1"], strict=True)]),
        ("largest ρ: p = -1 below p = -10", [a < b for a, b in zip(mine, worst["-10"], strict=True)]),
        ("largest ρ: Pollux below Tiresias",
         [a < _rho(run).max() for a, run in zip(mine, _first(found, "tiresias"), strict=True)]),
        ("renting by goodput is cheaper and slower",
         [found[f"scaling-goodput-{e}"]["gpu_hours"] < found[f"scaling-throughput-{e}"]["gpu_hours"]
          and jct(found[f"scaling-goodput-{e}"])[0] > jct(found[f"scaling-throughput-{e}"])[0] for e in (2, 16)]),
    ]  # fmt: skip
    for load in BY_LOAD:
        if load != "1.0":
            runs = {p: [jct(run).mean() for run in grouped(found, f"load-{load}-{p}")] for p in NAMES}
            rows.append((f"load {load}: Pollux below both others",
                         [a < min(b, c) for a, b, c in zip(*runs.values(), strict=True)]))  # fmt: skip
    return "## Orders\n\nWhat the thesis says in words, run by run.\n\n" + orders(rows)


def _drawn(found: Found) -> Pictures:
    minutes = [seconds / 60 for seconds in BY_INTERVAL]
    ours = [
        _mean(_first(found, "pollux") if s == 60 else grouped(found, f"interval-{s}")) for s in BY_INTERVAL
    ]
    slow = [100 * float(key) for key in BESIDE]
    loads = {
        name: [(float(load), _mean(_at_load(found, load, policy))) for load in BY_LOAD]
        for policy, name in NAMES.items()
    }
    rho = {
        name: np.concatenate([_rho(run) for run in runs]).tolist()
        for name, runs in _fairness_sets(found).items()
    }
    times = {
        name: np.concatenate([jct(run) for run in _first(found, policy)]).tolist()
        for policy, name in NAMES.items()
    }
    nodes = {name: _stairs(found[f"scaling-{key}-2"]["nodes"]) for key, name in (
        ("goodput", "by goodput"), ("throughput", "by throughput"))}  # fmt: skip
    groups = [f"load {load}" for load in BY_LOAD]
    bars = {name: [value for _, value in line] for name, line in loads.items()}
    published = list(BY_INTERVAL.values())
    return {
        "pollux-jct": cdf_svg("Completion times, load 1", times, label="completion time", log=True),
        "pollux-load": bars_svg("Average completion time by load", groups, bars),
        "pollux-interval": lines_svg(
            "Average completion time by interval",
            {"published": list(zip(minutes, published, strict=True)), "ours": list(zip(minutes, ours, strict=True))},
            label="interval, min", unit="s"),
        "pollux-interference": lines_svg(
            "Average completion time without avoidance",
            {"published": list(zip(slow, BESIDE.values(), strict=True)),
             "ours": [(100 * float(key), _mean(grouped(found, f"beside-{key}"))) for key in BESIDE]},
            label="slowdown, %", unit="s"),
        "pollux-fairness": cdf_svg("Finish-time fairness", rho, label="ρ", unit="", mark=1.0, log=True),
        "pollux-scaling": lines_svg("Nodes rented for one job", nodes, label="h", unit="nodes"),
    }  # fmt: skip


def _stairs(steps: Sequence[Sequence[float]]) -> list[tuple[float, float]]:
    points: list[tuple[float, float]] = []
    for time, value in steps:
        if points:
            points.append((time / 3600, points[-1][1]))
        points.append((time / 3600, value))
    return points


_LIMITS = """## What is not here

- "Realistic" jobs, whose users ask for too much or too little: the published workloads hold the tuned requests only.
- Hyper-parameter tuning on real GPUs, the accuracy of its models (Table 3.3), and measured restart delays.
"""
