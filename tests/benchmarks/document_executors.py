"""The section of ``docs/benchmarks.md`` on elastic executors."""

from typing import Any


def executors(found: dict[str, Any]) -> str:
    """Return the section on over-decomposed executors."""
    parts = [
        "## Elastic executors",
        "`python -m tests.benchmarks.elastic_executors --out docs/benchmarks`",
        f"Worker processes on one machine ({found['machine']}); times are medians of three runs, but for scale-out, "
        "which ran once.",
    ]
    writers = (
        ("transparency", _transparency),
        ("scale_out", _scale_out),
        ("scale_in", _scale_in),
        ("decomposition", _decomposition),
        ("staleness", _staleness),
        ("gibbs", _gibbs),
        ("recovery", _recovery),
    )
    parts += [writer(found[name]) for name, writer in writers if name in found]
    return "\n\n".join(parts) + "\n"


def _table(head: str, rows: list[str]) -> str:
    return "\n".join([head, "|" + "---|" * (head.count("|") - 1), *rows])


def _load(found: dict[str, Any]) -> str:
    return f"Load average {found['load']:.1f} at the end."


def _transparency(found: dict[str, Any]) -> str:
    def cell(row: dict[str, Any], name: str, suffix: str) -> str:
        bits = ", same bits" if row[f"identical{suffix}"] else ""
        return f"{row[name]:.6g} ({row[f'difference{suffix}']:.2%}{bits})"

    rows = [
        f"| {r['app']} | {r['static']:.6g} | {cell(r, 'elastic', '')} | {cell(r, 'killed', '_killed')} |"
        for r in found["rows"]
    ]
    text = (
        "Final objective of a static run on 2 workers, of one that goes from 2 to 4 and back to 2 while running, "
        "and of one a worker of which gets a SIGKILL half-way; in brackets the difference from the static one. Must "
        "hold: within 1 %, the same bits for exact arithmetic under BSP. "
    )
    for row in found["rows"]:
        if row["seeds"] > 1:
            text += (
                f"Chains of random draws ({row['app']}) are compared by means over {row['seeds']} seeds; ends of "
                f"static ones lie {row['spread_static']:.2%} apart. "
            )
    table = _table("| application | static | 2 → 4 → 2 workers | one worker killed |", rows)
    if "note" in found:
        text += found["note"] + " "
    return text + _load(found) + "\n\n" + table


def _scale_out(found: dict[str, Any]) -> str:
    return (
        f"Scale-out: 32 executors whose tasks sleep 0.1 s, 40 iterations: {found['static_4']:.1f} s on 4 workers, "
        f"{found['static_8']:.1f} s on 8. With 4 more asked for after {found['trigger']:.1f} s: "
        f"{found['actual']:.1f} s, where an instant and free change would give {found['ideal']:.1f} s: a ratio of "
        f"{found['ratio']:.3f} (must be ≤ {found['must']}). {_load(found)}\n\n"
        "![iterations over time](benchmarks/elastic_executors.svg)"
    )


def _scale_in(found: dict[str, Any]) -> str:
    rows = [f"| {r['mib']} | {r['seconds']:.2f} |" for r in found["rows"]]
    return (
        "Scale-in: 4 → 2 workers, from the request to the end of the last process, by the state of those that leave "
        f"({found['mib_per_second']:.0f} MiB/s by the slope; without state it must be under "
        f"{found['must_stateless']:.0f} s). {_load(found)}\n\n"
        + _table("| state moved (MiB) | latency (s) |", rows)
    )


def _decomposition(found: dict[str, Any]) -> str:
    rows = [f"| {r['executors']} | {r['seconds'] * 1000:.1f} | {r['ratio']:.2f} |" for r in found["rows"]]
    return (
        "Over-decomposition: one iteration of MLR (60,000 samples, 100 features) on 2 workers. Must hold: at most "
        f"{found['must']['4']} with 4 executors a worker, {found['must']['16']} with 16. {_load(found)}\n\n"
        + _table("| executors a worker | iteration (ms) | to 1 |", rows)
    )


def _staleness(found: dict[str, Any]) -> str:
    rows = [f"| {r['staleness']} | {r['loss']:.5f} | {r['straggling_seconds']:.2f} |" for r in found["rows"]]
    return (
        f"Bounded staleness: MLR on scikit-learn's digits after 300 iterations (the losses differ by "
        f"{found['spread']:.2%}, must be ≤ {found['must']:.0%}), and seconds of 60 iterations in which one executor, "
        f"by turns, takes ten times as long. {_load(found)}\n\n"
        + _table("| staleness | loss | with a straggler (s) |", rows)
    )


def _gibbs(found: dict[str, Any]) -> str:
    serial, rotation = (", ".join(f"{v:,.0f}" for v in found[name]) for name in ("serial", "rotation"))
    return (
        "LDA: 300 documents of 60 tokens, 600 words, 20 topics, 60 epochs; log-likelihood of serial Gibbs sampling "
        f"over three seeds {serial}, of block rotation with 8 executors {rotation}: means differ by "
        f"{found['difference']:.2%} (must be ≤ {found['must']:.0%}); all counts add up. {_load(found)}"
    )


def _recovery(found: dict[str, Any]) -> str:
    rows = [
        f"| {r['recovery']} | {r['noticed_s']:.2f} | {r['restored_s']:.2f} | {r['objective']:.5f} |"
        for r in found["rows"]
    ]
    return (
        f"Recovery of MLR (60,000 samples) from a SIGKILL; the objective of a run without is {found['static']:.5f}. "
        f"{_load(found)}\n\n"
        + _table(
            "| recovery | noticed after (s) | tasks run again after another (s) | final objective |", rows
        )
    )
