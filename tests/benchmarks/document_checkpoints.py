"""The section of ``docs/benchmarks.md`` on checkpoints of a training."""

import statistics
from typing import Any


def checkpoints(found: dict[str, Any]) -> str:
    """Return the section on what saving costs, recovery takes and a killed process repeats."""
    full = found["full"]
    write = statistics.median(f["write_s"] for f in full["figures"])
    size = statistics.median(f["bytes"] for f in full["figures"]) / 2**20
    stall = statistics.median(f["stall_s"] for f in full["figures"])
    partial = "\n".join(
        f"| {p['fraction']:g} | {p['blocks']:,} | {p['stall_s'] * 1000:.1f} | {p['epoch_share']:.3%} "
        f"| {p['epoch_share_with_writing']:.2%} |"
        for p in found["partial"]
    )
    recovery = "\n".join(f"| {what} | {seconds:.2f} |" for what, seconds in found["recovery_s"].items())
    runs = found["killed"]
    scar, traditional = ([run[way] for run in runs] for way in ("scar", "traditional"))
    holds = "holds" if full["worst_share"] <= found["bar"] else "does not hold"
    return f"""## Checkpoints of a training

`python -m tests.benchmarks.training_checkpoints --out docs/benchmarks`

A multilayer perceptron of {full["parameters"] / 1e6:.1f} million parameters, Adam, one core, local disk;
{found["machine"]}, load average {found["load"]:.1f} at the start. Full checkpoints in the background, {size:.0f} MiB
each: the call takes {stall * 1000:.0f} ms (a copy), writing takes {write:.2f} s, {full["cpu_s"]:.2f} s of processor
time for one. At one a minute training loses {full["share"]:.2%} of the time, {full["worst_share"]:.2%} in the worst
case, of which {full["stall_share"]:.3%} is waiting and the rest is steps that are slower while the file is written.
Must be at most {found["bar"]:.0%}: {holds}.

Running checkpoints (SCAR), priority, one save per epoch of 60,000 samples; the critical path is measuring distances,
choosing and copying:

| fraction | blocks | critical path (ms) | share of an epoch | with slower steps while writing |
|---|---|---|---|---|
{partial}

| recovery | s |
|---|---|
{recovery}

One of four gloo processes, which own the rows of a logistic regression on digits, is killed with SIGKILL after epoch
7 (SCAR's section 5.5.5). Saving 1/8 of the rows each epoch and reading back the lost rows alone repeats
{statistics.mean(scar):.2f} epochs (worst of {len(runs)} seeds {max(scar):.2f}); saving all each 8 epochs and reading
all back repeats {statistics.mean(traditional):.2f}. Published: under 1, and 7.

![epochs repeated after a kill](benchmarks/training_checkpoints.svg)
"""
