"""Writes ``docs/coverage.md`` from the runs of ``tests.benchmarks.coverage``."""

from collections.abc import Sequence
from typing import Any

from ebbflow.tasks.drawing.wording import plural

Runs = Sequence[dict[str, Any]]

HEAD = """# Coverage

Which queries run, give the oracle's result, and how much of each is planned. Every query goes the way of
`ebbflow query`; its result is compared with that of plain DuckDB on the same files (multisets; floats to 1e-9
relative). TPC-DS queries are DuckDB's texts (`ebbflow data tpcds`), read with `--dialect duckdb` on both engines.
Nothing here is a published TPC result.

    python -m tests.benchmarks.coverage --suite tpch,tpcds --engine duckdb,spark --scale 1

writes this page and [its figures](benchmarks/coverage.json); it goes on where it was stopped.

An inner-join **block** is the tables and views that inner or cross joins connect in one SELECT, wherever it stands,
after views are merged into their readers and outer joins whose added rows are dropped anyway are made inner ones. It
is planned when Ebbflow orders its joins and chooses their methods. Outer, semi and anti joins are no part of a block:
they stay in their place.
"""


def page(runs: Runs) -> str:
    """Return the page."""
    parts = [HEAD, "## Results\n", _results(runs)]
    own = {(r["engine"], r["scale"], *r["conf"]) for r in runs if r.get("conf")}
    parts += [
        f"On {engine} at scale {scale:g} with {', '.join(f'`{c}`' for c in conf)}.\n"
        for engine, scale, *conf in own
    ]
    wrong = [r for r in runs if not r["right"]]
    if wrong:
        parts += ["Not right:\n", "\n".join(f"- {_named(r)}: {_plain(r['verdict'])}" for r in wrong), ""]
    for suite, title in (("tpch", "TPC-H"), ("tpcds", "TPC-DS")):
        own = [r for r in runs if r["suite"] == suite]
        if own:
            parts += [f"## {title}\n", _totals(own), _table(own)]
    return "\n".join(parts)


def _named(run: dict[str, Any]) -> str:
    suite = {"tpch": "TPC-H", "tpcds": "TPC-DS"}[run["suite"]]
    return f"{suite} Q{run['query']} on {run['engine']}, scale {run['scale']:g}, cuts {run['cuts']}"


def _plain(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")[:300]


def _results(runs: Runs) -> str:
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for run in runs:
        key = run["suite"], run["engine"], run["scale"], run["policy"], run["cuts"]
        groups.setdefault(key, []).append(run)
    lines = [
        "| suite | engine | scale | policy | cuts | queries | right | stages |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for (suite, engine, scale, policy, cuts), found in sorted(
        groups.items(), key=lambda g: (g[0][0] != "tpch", g[0])
    ):
        right, stages = sum(r["right"] for r in found), sum(r["stages"] for r in found)
        name = {"tpch": "TPC-H", "tpcds": "TPC-DS"}[suite]
        lines.append(
            f"| {name} | {engine} | {scale:g} | {policy} | {cuts} | {len(found)} | **{right}** | {stages} |"
        )
    return "\n".join(lines) + "\n"


def _per_query(runs: Runs) -> list[dict[str, Any]]:
    """Return for each query the run that tells most of its planning: a right one, at the largest scale."""
    best: dict[int, dict[str, Any]] = {}
    for run in runs:
        rank = (run["right"], run["cuts"] == "cost", run["scale"], run["engine"] == "spark")
        known = best.get(run["query"])
        if known is None or rank > known["rank"]:
            best[run["query"]] = {**run, "rank": rank}
    return [best[number] for number in sorted(best)]


def _totals(runs: Runs) -> str:
    rows = _per_query(runs)
    blocks = [b for r in rows for b in r["blocks"]]
    large = [b for b in blocks if b["relations"] >= 3]
    whole = [b for b in large if b["planned"] == b["relations"]]
    part = [b for b in large if 0 < b["planned"] < b["relations"]]
    read = sum(len(r.get("read_again", {})) for r in rows)
    shared = sum(len(r.get("shared", [])) for r in rows)
    worst = max(rows, key=lambda r: r.get("planning_seconds", 0.0))
    again = plural(read, "view") + (" is" if read == 1 else " are")
    once = "it is" if read == shared == 1 else f"{shared} of them are"
    return (
        f"{len(blocks)} blocks. Of the {len(large)} of three or more relations **{len(whole)} are planned whole**, "
        f"{len(part)} in part, {len(large) - len(whole) - len(part)} stay as written. {again} read several times; "
        f"{once} computed once, as a stage of its own, where that is cheaper on two small nodes. Planning takes at "
        f"most {worst.get('planning_seconds', 0.0):.2f} processor seconds (Q{worst['query']}).\n"
    )


def _table(runs: Runs) -> str:
    lines = [
        "| query | right | blocks planned (relations) | joins left as written, and why | views read again | "
        "stages | planning |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in _per_query(runs):
        own = [r for r in runs if r["query"] == row["query"]]
        right = f"{sum(r['right'] for r in own)} of {len(own)}"
        planned = [b["planned"] for b in row["blocks"] if b["planned"]]
        left = [
            f"{b['view']}: {b['relations'] - b['planned']} of {b['relations']}, {_plain(b['reason'])}"
            for b in row["blocks"]
            if b["planned"] < b["relations"]
        ]
        shared = set(row.get("shared", []))
        again = [
            f"{view} ×{times}{' (one stage)' if view in shared else ''}"
            for view, times in row.get("read_again", {}).items()
        ]
        stages = "/".join(sorted({str(r["stages"]) for r in own if r["right"]}, key=int)) or "–"
        cells = [
            f"Q{row['query']}",
            right,
            f"{len(planned)} of {len(row['blocks'])}"
            + (f" ({', '.join(map(str, planned))})" if planned else ""),
            "; ".join(left),
            ", ".join(again),
            stages,
            f"{row.get('planning_seconds', 0.0):.2f} s",
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"
