"""Average completion time against worst finish-time fairness, of all policies on the public workloads.

Run from the repository root: ``python -m tests.benchmarks.policies --out DIR``. Writes ``policies.json`` and
``policies-NAME.svg`` for each workload, prints a table as it goes, and exits with 1 when a policy is better than
``rho-bounded`` in both on one of the workloads, or a goal on the 120 jobs is missed.
"""

import os

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # threads would spin over vectors of a dozen elements

import argparse
import json
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from ebbflow.infra.simulation.engine import simulate
from ebbflow.infra.simulation.jobs.adaptdl import adaptdl_jobs
from ebbflow.infra.simulation.jobs.profiles import Profiles
from ebbflow.infra.simulation.rounds.scenario import RoundsScenario
from ebbflow.infra.simulation.rounds.setting import GAVEL, SHOCKWAVE, Rules
from ebbflow.infra.simulation.rounds.trace import read_throughputs, read_trace
from ebbflow.infra.simulation.traces.cluster import Cluster
from ebbflow.infra.simulation.traces.workloads import read_adaptdl
from ebbflow.infra.storage.files import write_text
from ebbflow.planners.scheduling.catalogue import Setting, policy_entry
from ebbflow.tasks.drawing.svg import document, tag, text, ticks, titled
from ebbflow.tasks.drawing.wording import number_text
from ebbflow.tasks.simulation.informed import NO_SLOWDOWN, PolicyWithReports
from ebbflow.tasks.simulation.scenarios import goodput_agent

DATA = Path(__file__).parent.parent / "fixtures" / "training"
OURS = "rho-bounded"
BY_TYPE = [
    "gandiva-fair", "isolated", "fifo-perf", "max-min", "max-min-perf", "finish-time", "finish-time-perf", "max-sum",
    "min-makespan", "min-makespan-perf", "allox",
]  # fmt: skip
GANGS = ["themis", "tiresias", "las", "srtf", "srsf", "smallest-first", "best-effort", "yarn-cs"]
PROFILED = [
    "pollux", "tiresias", "optimus", "srtf", "srsf", "las", "leased-srtf", "throughput-first", "best-effort",
]  # fmt: skip
SHOCKWAVE_PUBLISHED = (9958.486, 1.78379)  # average completion time, s, and worst ρ (NSDI 2023)
GOALS = {"worst_rho": 1.8, "unfair_pct": 5.0, "makespan_s": 24_500.0, "avg_jct_s": 9_900.0}


@dataclass(frozen=True)
class Figure:
    """One policy on one workload."""

    workload: str
    policy: str
    avg_jct_s: float
    worst_rho: float
    unfair_pct: float
    makespan_s: float
    restarts_mean: float
    cpu_s: float


def in_rounds(
    name: str, trace: Path, table: Path, gpus: Mapping[str, int], rules: Rules, policies: Sequence[str]
) -> Iterator[Figure]:
    """Yield how each policy does on a trace that is simulated in rounds."""
    jobs, throughputs = read_trace(trace), read_throughputs(table)
    for policy in policies:
        entry = policy_entry(policy)
        made = entry.make(Setting("rounds", (), tuple(gpus), rules.round_s, rules.reset_s))
        if "rounds" in entry.reports:
            made = PolicyWithReports(made, within_request=False, slowdown=NO_SLOWDOWN)
        began = time.process_time()
        outcome = RoundsScenario(jobs, throughputs, gpus, rules).run(made)
        yield figure(name, policy, outcome.summary(), time.process_time() - began)


def with_profiles(number: int, profiles: Profiles, policies: Sequence[str]) -> Iterator[Figure]:
    """Yield how each policy does on one of Pollux' workloads."""
    workload = read_adaptdl(DATA / "adaptdl" / "workloads" / f"workload-{number}.csv", profiles)
    for policy in policies:
        entry = policy_entry(policy)
        made = entry.make(Setting("profiles"))
        if "profiles" in entry.reports:
            made = PolicyWithReports(made, within_request=True)
        models = adaptdl_jobs(profiles, agent=goodput_agent if entry.agents else None)
        began = time.process_time()
        result = simulate(workload, Cluster.grid(16, 4), made, models=models, tick=60.0, restart_delay=30.0)
        yield figure(f"pollux-{number}", policy, result.summary(), time.process_time() - began)


def figure(workload: str, policy: str, found: Mapping[str, float], cpu: float) -> Figure:
    names = ("avg_jct_s", "worst_rho", "unfair_pct", "makespan_s", "restarts_mean")
    return Figure(workload, policy, *(found[name] for name in names), cpu)


def figures() -> Iterator[Figure]:
    """Yield all, workload by workload."""
    folder = DATA / "shockwave"
    yield from in_rounds(
        "shockwave", folder / "jobs-120.trace", folder / "tacc_throughputs.json", {"v100": 32}, SHOCKWAVE,
        [OURS, *GANGS, *(p for p in BY_TYPE if not p.endswith("-perf") or p == "fifo-perf")],
    )  # fmt: skip
    folder = DATA / "gavel"
    yield from in_rounds(
        "gavel", folder / "jobs-96.trace", folder / "simulation_throughputs.json",
        {"v100": 8, "p100": 16, "k80": 24}, GAVEL, [OURS, *BY_TYPE],
    )  # fmt: skip
    profiles = Profiles(DATA / "adaptdl" / "traces")
    for number in (1, 2, 3, 4):
        yield from with_profiles(number, profiles, [OURS, *PROFILED])


def better(found: Sequence[Figure]) -> list[Figure]:
    """Return who is better than ours in both measures."""
    ours = {f.workload: f for f in found if f.policy == OURS}
    return [
        f
        for f in found
        if f.avg_jct_s < ours[f.workload].avg_jct_s and f.worst_rho < ours[f.workload].worst_rho
    ]


def missed(found: Sequence[Figure]) -> list[str]:
    """Return the goals on the 120 jobs that ours misses."""
    ours = asdict(next(f for f in found if (f.workload, f.policy) == ("shockwave", OURS)))
    return [
        f"{name} {ours[name]:.6g}, goal {goal:g}" for name, goal in GOALS.items() if not ours[name] < goal
    ]


def picture(workload: str, found: Sequence[Figure]) -> str:
    """Draw a numbered point for each policy; both measures are better towards the corner. ρ is cut at 8."""
    points = [(f.policy, f.avg_jct_s, min(f.worst_rho, 8.0)) for f in found]
    if workload == "shockwave":
        points.append(("Shockwave (published)", *SHOCKWAVE_PUBLISHED))
    width, height, left, top = 720.0, 400.0, 46.0, 34.0
    right, bottom = width - 180.0, height - 46.0
    most_x, most_y = max(p[1] for p in points) * 1.04, max(p[2] for p in points) * 1.04

    def place(x: float, y: float) -> tuple[float, float]:
        return left + x / most_x * (right - left), bottom - y / most_y * (bottom - top)

    parts = [
        text(10, 20, f"{workload}: worst ρ by average completion time", class_="bold", style="font-size:14px")
    ]
    for value in ticks(most_y, 4):
        at = place(0, value)[1]
        parts.append(tag("line", x1=left, x2=right, y1=at, y2=at, class_="grid"))
        parts.append(text(left - 6, at + 4, number_text(value), text_anchor="end", class_="soft small"))
    for value in ticks(most_x, 5):
        parts.append(
            text(
                place(value, 0)[0], bottom + 17, number_text(value), text_anchor="middle", class_="soft small"
            )
        )
    parts.append(text((left + right) / 2, bottom + 36, "s", text_anchor="middle", class_="soft small"))
    for number, (name, x, y) in enumerate(sorted(points, key=lambda p: (p[1], p[2])), start=1):
        across, down = place(x, y)
        ours = name == OURS
        dot = tag("circle", cx=across, cy=down, r=6 if ours else 4, fill=f"var(--s{0 if ours else 1})")
        parts.append(titled(f"{name}: {x:.0f} s, ρ {y:.2f}", dot))
        words = "bold small" if ours else "soft small"
        parts.append(text(across + 7, down - 3, str(number), class_=words))
        parts.append(text(right + 20, top + 4 + 15 * number, f"{number}  {name}", class_=words))
    spoken = "; ".join(f"{name} {x:.0f} s, {y:.2f}" for name, x, y in points)
    return document(width, height, f"{workload}: worst ρ by average completion time", spoken, parts)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args(arguments)
    given.out.mkdir(parents=True, exist_ok=True)
    found = []
    print(
        f"{'workload':10} {'policy':18} {'avg JCT s':>9} {'worst ρ':>8} {'unfair':>7} {'makespan':>9} {'CPU s':>6}"
    )
    for one in figures():
        found.append(one)
        print(
            f"{one.workload:10} {one.policy:18} {one.avg_jct_s:9.0f} {one.worst_rho:8.3f} {one.unfair_pct:6.1f}% "
            f"{one.makespan_s:9.0f} {one.cpu_s:6.1f}",
            flush=True,
        )
    above, failed = better(found), missed(found)
    for other in above:
        print(f"better in both on {other.workload}: {other.policy}")
    for goal in failed:
        print(f"missed on the 120 jobs: {goal}")
    whole = {
        "figures": [asdict(f) for f in found],
        "better": [[f.workload, f.policy] for f in above],
        "missed": failed,
    }
    write_text(given.out / "policies.json", json.dumps(whole, indent=1) + "\n")
    for workload in dict.fromkeys(f.workload for f in found):
        drawn = picture(workload, [f for f in found if f.workload == workload])
        write_text(given.out / f"policies-{workload}.svg", drawn)
    return 1 if above or failed else 0


if __name__ == "__main__":
    sys.exit(main())
