"""The sections of ``docs/benchmarks.md`` on training: simulator, policies, recovery."""

import statistics
from collections.abc import Sequence
from typing import Any


def simulator(found: dict[str, Any]) -> str:
    """Return the section on the processor time of simulations."""

    def cells(seconds: Sequence[float]) -> str:
        return " | ".join(f"{s:.2f}" for s in seconds)

    public = "\n".join(f"| {policy} | {cells(seconds)} |" for policy, seconds in found["public"].items())
    traces = "\n".join(
        f"| {t['jobs']:,} | {t['gpus']:,} | {t['weeks']:g} | {t['load']:.2f} | {t['cpu_s']:.1f} "
        f"| {t['policy_cpu_s']:.1f} | {t['peak_mb']:.0f} |"
        for t in [*found["by_jobs"], *found["by_gpus"], *found["busy"]]
    )
    return f"""## Simulating GPU schedulers

`python -m tests.benchmarks.training_simulator --out docs/benchmarks`

Processor seconds of whole runs on one core, files read before. The four public workloads of 160 jobs on 16 x 4 GPUs,
every completion time equal to the published one (medians of three):

| policy | 1 | 2 | 3 | 4 |
|---|---|---|---|---|
{public}

Tiresias on traces with the published distribution of GPU time; load is GPU time asked for over GPU time there was:

| jobs | GPUs | weeks | load | CPU s | policy's | peak MB |
|---|---|---|---|---|---|---|
{traces}

![processor time by jobs](benchmarks/training_simulator.svg)
"""


def pollux(found: dict[str, Any]) -> str:
    """Return the section on Pollux beside its authors' results."""
    rows = []
    for workload in dict.fromkeys(f["workload"] for f in found["figures"]):
        mine = [f for f in found["figures"] if f["workload"] == workload]
        average = statistics.mean(f["avg_jct_s"] for f in mine)
        published, gap = mine[0]["published_s"], statistics.mean(f["gap_mean"] for f in mine)
        cpu = statistics.median(f["cpu_s"] for f in mine)
        rows.append(
            f"| {workload} | {published:.0f} | {average:.0f} | {average / published:.3f} | {gap:.2%} | {cpu:.1f} |"
        )
    ratio = found["mean_s"] / found["published_s"]
    table = "\n".join(rows)
    return f"""## Pollux on its authors' workloads

`python -m tests.benchmarks.pollux --out docs/benchmarks`

Average completion time of 160 jobs on 16 x 4 GPUs, mean over {len(found["seed_means_s"])} seeds; the gap is how far
the search stays from a bound on its objective, mean over all decisions; processor seconds are those of a whole run.

| workload | published (s) | ours (s) | ratio | gap | CPU s |
|---|---|---|---|---|---|
{table}
| mean | {found["published_s"]:.0f} | {found["mean_s"]:.0f} | {ratio:.3f} | | |

![average completion time by workload](benchmarks/pollux.svg)
"""


def recovery(found: Sequence[dict[str, Any]]) -> str:
    """Return the section on recovery from spot losses."""
    ways = list(dict.fromkeys(row["recovery"] for row in found))
    cells = {(row["model"], row["trace"], row["recovery"]): row for row in found}
    rows = [
        f"| {model} | {trace} | "
        + " | ".join(f"{cells[model, trace, way]['share']:.3f}" for way in ways)
        + " |"
        for model, trace in dict.fromkeys((row["model"], row["trace"]) for row in found)
    ]
    table = "\n".join(rows)
    return f"""## Recovering from lost spot nodes

`python -m tests.benchmarks.spot_recovery --out docs/benchmarks`

Share of effective training in the total of training, checkpoints, restarts, lost work and idling, simulated on
public traces of up to 30 nodes. `checkpoint-restart` and `in-place` are the public simulator's models of Varuna
and Oobleck, reproduced to the digit; `hazard-aware` is ours, with the costs of the first and no notice: it saves
at Daly's interval for the hazard it has seen, makes one restart of removals at the same instant, and takes in
nodes that have become ready. The public engine lets steps go on while a restart is prepared; `strict` does not,
and is the honest figure of ours, though not comparable with the two others. A lost step counts once in ours, but
again at each further removal before the next checkpoint in theirs.

| model | trace | {" | ".join(ways)} |
|---|---|{"---|" * len(ways)}
{table}

![share of effective training](benchmarks/spot_recovery.svg)
"""


def policies(found: dict[str, Any]) -> str:
    """Return the section on average completion time against worst finish-time fairness."""
    parts = []
    for workload in dict.fromkeys(f["workload"] for f in found["figures"]):
        rows = "\n".join(
            f"| {f['policy']} | {f['avg_jct_s']:,.0f} | {f['worst_rho']:.2f} | {f['unfair_pct']:.1f} "
            f"| {f['makespan_s']:,.0f} |"
            for f in found["figures"]
            if f["workload"] == workload
        )
        parts.append(f"""### {workload}

| policy | average (s) | worst ρ | unfair (%) | makespan (s) |
|---|---|---|---|---|
{rows}

![worst ρ by average completion time](benchmarks/policies-{workload}.svg)
""")
    above = ", ".join(f"{policy} on {workload}" for workload, policy in found["better"]) or "none"
    return f"""## Average completion time and fairness at once

`python -m tests.benchmarks.policies --out docs/benchmarks`

Shockwave's 120 jobs on 32 GPUs, Gavel's 96 on three GPU types, Pollux' four workloads on 16 x 4 GPUs. ρ is the
completion time over that on a fair share (time alone times jobs per GPU), unfair the jobs above 1.05. `rho-bounded`
is ours; it knows what apps report: what they have left at their present batch size. On gangs `srtf` and `srsf`, which
know the same, come near it on average, but not in makespan.
Better than it in both measures: {above}.

{"".join(part + chr(10) for part in parts)}"""
