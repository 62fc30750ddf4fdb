"""The sections of ``docs/benchmarks.md`` on damage: flipped bytes, slow cells of the fault matrix, and the cost."""

from collections import defaultdict
from typing import Any


def flips(found: dict[str, Any]) -> str:
    """Return the section on flipped bytes."""
    kinds = list(dict.fromkeys(row["kind"] for row in found["made"]))
    counts: dict[tuple[str, bool], dict[str, int]] = defaultdict(dict)
    for row in found["made"]:
        counts[row["thing"], row["read"]][row["kind"]] = row["flips"]
    lines = "\n".join(
        f"| {thing} | {'yes' if read else 'no'} | "
        + " | ".join(f"{row.get(kind, 0):,}" for kind in kinds)
        + " |"
        for (thing, read), row in sorted(counts.items())
    )
    wrong = len(found["wrong"])
    verdict = (
        "**No answer was wrong, and all damage was found and repaired.**"
        if not wrong
        else f"**{wrong} wrong.**"
    )
    return f"""## Flipped bytes

`python -m tests.benchmarks.flipped_bytes --flips {found["flips"]} --seed {found["seed"]} --out docs/benchmarks`

One byte of one file of a store is changed, size and times kept, and the query runs as a new process does, on DuckDB.
Half of the files are read by the answer: these must be found, said and computed again; the others must be found as
soon as anybody asks for them, and cost nothing before. {found["flips"]:,} flips in {found["seconds"]:.0f} s.
{verdict}

| what | read by the answer | {" | ".join(kinds)} |
|---|---|{"---|" * len(kinds)}
{lines}

Of samples and statistics, and of entries of the index of slices, the manifest is what carries the checksum.
"""


def matrix(found: dict[str, Any]) -> str:
    """Return the section on the slow cells of the fault matrix."""
    rows = "\n".join(f"| `{row['test']}` | {row['seconds']:.0f} | {row['end']} |" for row in found["cells"])
    return f"""## Slow cells of the fault matrix

`python -m tests.benchmarks.fault_matrix --out docs/benchmarks`

Those cells of the [fault matrix](reliability.md#fault-matrix) that the tests do not run each time;
{found["machine"]}.

| test | s | end |
|---|---|---|
{rows}
"""


def cost(found: dict[str, Any]) -> str:
    """Return the section on what it costs where nothing is damaged."""
    rows = "\n".join(
        f"| {row['work']} | {row['pairs']} | {row['before_s']:.3f} | {row['after_s']:.3f} | {row['ratio']:.4f} | "
        f"{row['low']:.4f} to {row['high']:.4f} | {row['cpu_ratio']:.4f} | "
        f"{'yes' if row['ratio'] <= found['bound'] else 'no'} |"
        for row in found["rows"]
    )
    return f"""## What guarding against damage costs

`python -m tests.benchmarks.undisturbed_cost --before CHECKOUT --out docs/benchmarks`

The present code against revision {found["before"]} of it, in turns, nothing damaged: a query over TPC-H of scale
factor {found["scale"]} on DuckDB whose stages are stored (`query`), the same from its stored result (`again`), a full
checkpoint of 12 million parameters (`save`), 100 events in a ledger in SQLite (`ledger`). Medians; the interval is of
the median of the ratios of pairs, by bootstrap, 95 %. {found["machine"]}, load average {found["load"]:.1f} at the
end. Must be at most {found["bound"]:g}.

| work | pairs | before (s) | now (s) | ratio | interval | ratio of processor time | holds |
|---|---|---|---|---|---|---|---|
{rows}
"""
