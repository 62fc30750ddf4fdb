"""The section on planned communication of the page of benchmarks."""

import statistics
from typing import Any

PAPER = {"LIFO": 1.44, "HO": 1.21, "S-Exec": 1.19, "S-Sched": 1.12}  # model A2, section 4.6.5, Figure 4.13
WHAT = {
    "dlrm": "a recommendation model, two channels with links of their own",
    "dense": "a perceptron, one channel",
}


def section(found: dict[str, Any]) -> str:
    """Return it as Markdown."""
    names = list(found["cases"][0]["rows"][0]["gain"])
    lines = []
    for case in found["cases"]:
        for row in case["rows"]:
            cells = " | ".join(f"{row['gain'][name]:.2f}" for name in names)
            ours = 1e3 * row["median_s"]["Syndicate"]
            lines.append(
                f"| {case['model']} | {row['ratio']:g} | {row['mbit']:.0f} | {ours:.0f} | {cells} "
                f"| {row['prediction_error']:.1%} |"
            )
        means = " | ".join(f"**{case['gains'][name]:.2f}**" for name in names)
        lines.append(f"| {case['model']} | geometric mean of 0.5, 1, 2 | | | {means} | |")
    paper = " | ".join(f"{PAPER[name]:.2f}" if name in PAPER else "–" for name in names)
    lines.append(f"| A2 of the thesis, 128 GPUs | | | | {paper} | |")
    rows = [row for case in found["cases"] for row in case["rows"]]
    loads = [row["load"] for row in rows]
    errors = [row["prediction_error"] for row in rows]
    means = "; ".join(f"{c['model']}: {WHAT[c['model']]}, {c['compute_s']:.2f} s" for c in found["cases"])
    table = "\n".join(lines)
    return f"""## Planned communication on nodes with limited links

`python -m tests.benchmarks.communication.nodes --out docs/benchmarks` (as root)

{found["ranks"]} processes in network namespaces whose links carry what is written, real gradients and
embeddings. Two cores cannot compute for four nodes beside what the links cost them, so most of each layer's
time is a device's: the process waits for it, and may send meanwhile. Compute of an iteration ({means}) was
measured first; the rate of the links is what makes sending take so many times as long. All plans run in the
same executor, blocks of iterations in turns; DDP is the best of bucket sizes of 1, 5, 25 and 100 MB. Median
time of an iteration over that of Syndicate's plan, and how far the predicted times of all plans are from the
measured ones (median; overall {statistics.median(errors):.1%}). Load {min(loads):.0f} to {max(loads):.0f}.

| model | sending over compute | Mbit/s | Syndicate (ms) | {" | ".join(names)} | prediction off by |
|---|---|---|---|{"---|" * (len(names) + 1)}
{table}

![iteration times](benchmarks/communication-nodes.svg)
"""
