"""The sections of ``docs/benchmarks.md`` on training: simulator, policies, overhead."""

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
    gangs = {f["policy"]: f for f in found["figures"] if f["workload"] == "shockwave"}
    average, makespan = (
        " and ".join(f"{gangs[policy][key] / gangs['rho-bounded'][key]:.2f}" for policy in ("srtf", "srsf"))
        for key in ("avg_jct_s", "makespan_s")
    )
    return f"""## Average completion time and fairness at once

`python -m tests.benchmarks.policies --out docs/benchmarks`

Shockwave's 120 jobs on 32 GPUs, Gavel's 96 on three GPU types, Pollux' four workloads on 16 x 4 GPUs. ρ is the
completion time over that on a fair share (time alone times jobs per GPU), unfair the jobs above 1.05. `rho-bounded`
is ours; it knows what apps report: what they have left at their present batch size. On gangs (shockwave) `srtf` and
`srsf`, which know the same, need {average} times its average and {makespan} times its makespan.
Better than it both on average and in worst ρ: {above}.

{"".join(part + chr(10) for part in parts)}"""


def overhead(found: dict[str, Any], name: str = "training_overhead") -> str:
    """Return the section on what measuring and tuning cost a training, and how right they are."""
    option = " --device cuda" if name.endswith("_cuda") else ""
    lines = [
        f"## Measuring and tuning while training: {found['device']}",
        "",
        f"`python -m tests.benchmarks.training_overhead --out docs/benchmarks{option}`",
    ]
    if "steps" in found:
        lines += [
            "",
            f"A step of plain {'DDP' if found['steps'][0]['processes'] > 1 else 'PyTorch'} and of `ElasticRun` with "
            f"everything on, in turns of a few steps in the same processes and from the same weights; medians over "
            f"pairs of blocks of {found['steps'][0]['block']} steps. Where a model lies in memory decides, too, so "
            "each case is launched several times, with either side made first in turn. On processors `prepare` has "
            "gradients reduced in buckets of 8 MiB; plain DDP has its 25. Must hold: under 1.05. "
            f"Load average {found['steps_load']:.1f} at the end. {found.get('steps_note', '')}".rstrip(),
            "",
            "| model, optimiser | parameters (M) | examples a process | plain (ms) | elastic (ms) | pairs | ratio "
            "| quartiles | medians of the launches | CPU ms of a process: plain, elastic |",
            "|---|---|---|---|---|---|---|---|---|---|",
            *(
                f"| {s['case']} | {s['parameters'] / 1e6:.1f} | {s['local_batch']} | {s['plain_ms']:.1f} "
                f"| {s['elastic_ms']:.1f} | {s['rounds']} | {s['ratio']:.3f} "
                f"| {s['ratio_quartiles'][0]:.3f} to {s['ratio_quartiles'][1]:.3f} "
                f"| {', '.join(f'{r:.3f}' for r in sorted(s['ratio_by_launch']))} "
                f"| {s['plain_cpu_ms']:.1f}, {s['elastic_cpu_ms']:.1f} |"
                for s in found["steps"]
            ),
            "",
            f"![milliseconds of a step](benchmarks/{name}.svg)",
        ]
    if "noise" in found:
        lines += [
            "",
            "Measured over true noise scale of gradients that are drawn with a known covariance (2,000 elements, "
            "M0 = 32, 3,000 steps); under AdamW both are pre-conditioned. Must hold: within 10 %.",
            "",
            "| gradients | samples | optimiser | true (examples) | measured | ratio |",
            "|---|---|---|---|---|---|",
            *(
                f"| {n['problem']} | {n['samples']} | {n['optimiser']} | {n['true']:.1f} | {n['measured']:.1f} "
                f"| {n['ratio']:.3f} |"
                for n in found["noise"]
            ),
        ]
    if "goodput" in found:
        goodput = found["goodput"]
        lines += [
            "",
            f"Goodput over batch sizes: scikit-learn's digits, a perceptron of width {goodput['width']}, SGD with "
            f"AdaScale, {goodput['processes']} process{'es' if goodput['processes'] > 1 else ''}, means over "
            f"{goodput['seeds']} seeds. Measured: examples at M0 that reach the loss of "
            f"{goodput['target_loss']:.3f} over the time in which this batch does. Predicted: from the noise scale "
            "that runs at M0 measured and a throughput model fitted to the batches with a *; how "
            "long steps take is measured for all batches in turns. A running average tells "
            "what was the case its own age ago (200 iterations); the prediction corrects for that, the last column "
            "does not, as when a job is under way. Must hold: within 10 %. "
            f"Load average {found['goodput_load']:.1f} at the end.",
            "",
            "| batch | steps | predicted | examples/s | predicted | goodput (1/s) | predicted | ratio "
            "| not corrected |",
            "|---|---|---|---|---|---|---|---|---|",
            *(
                f"| {r['batch']}{'*' if r['fitted'] else ''} | {r['steps']:.0f} | {r['predicted_steps']:.0f} "
                f"| {r['throughput']:,.0f} | {r['predicted_throughput']:,.0f} | {r['goodput']:,.0f} "
                f"| {r['predicted_goodput']:,.0f} | {r['predicted_goodput'] / r['goodput']:.3f} "
                f"| {r['lagging_goodput'] / r['goodput']:.3f} |"
                for r in goodput["rows"]
            ),
            "",
            f"![goodput by batch](benchmarks/{name.replace('overhead', 'goodput')}.svg)",
        ]
    return "\n".join([*lines, ""])


def overhead_cuda(found: dict[str, Any]) -> str:
    """Return the same section, measured on a GPU."""
    return overhead(found, "training_overhead_cuda")


def packing(found: dict[str, Any]) -> str:
    """Return the section on documents packed into rows."""
    rows = "\n".join(
        f"| {one['row']:,} | {one['alone']:.1%} | {one['longest']:.1%} | {one['packed']:.2%} | {one['rows']:,} | "
        f"{one['seconds']:.2f} |"
        for one in found["figures"]
    )
    return f"""## Padding of documents, packed and not

`python -m tests.benchmarks.packing --out docs/benchmarks`

{found["documents"]:,} functions of Python {found["python"]}'s standard library, a byte a token: {found["tokens"]:,}
tokens, {found["median"]:,} in the median, {found["longest"]:,} in the longest, which is cut into pieces.
Share of a batch's tokens that is padding.

| tokens of a row | a document a row | padded to the longest of 16 | packed | rows packed | seconds |
|---|---|---|---|---|---|
{rows}
"""
