"""The section of ``docs/benchmarks.md`` on the ledger's databases."""

from typing import Any


def section(found: dict[str, Any]) -> str:
    """Return the section."""
    rows = "\n".join(_row(name, one) for name, one in found["databases"].items())
    lives = "\n".join(_life(name, one["long"]) for name, one in found["databases"].items())
    seconds = next(iter(found["databases"].values()))["load"]["commits"]
    return f"""## The ledger

`python -m tests.benchmarks.ledger --out docs/benchmarks`

A loop's small decisions (its reason with what it was based on, a lease ended, one granted, 16 extended) on a cluster
of {found["nodes"]} nodes, {found["apps"]} apps and {found["leases"]} leases; every commit is synced to disk. Alone:
one after the other. Under load: 50 a second are due while {found["apps"]} apps in two other processes each report and
look at the state once a second ({seconds["commits"]:,} commits). PostgreSQL is a server on a Unix socket; all of it
shares {found["machine"]}. Times are milliseconds: the median, and below which 99 % lie.

| database | alone, a second | each | under load, a second | each (worst) | a report | a look | after a commit |
|---|---|---|---|---|---|---|---|
{rows}

A ledger after a long life: a process that opens it and knows the state, with snapshots and by replaying all; the same
with everything verified; peak memory of those processes, of which imports are most.

| database | events | on disk | opened | by replay | verified | memory: opened, replayed, verified |
|---|---|---|---|---|---|---|
{lives}

![milliseconds of commits, reports and looks](benchmarks/ledger.svg)
"""


def _row(name: str, one: dict[str, Any]) -> str:
    alone, load, polls = one["alone"], one["load"], one["polls"]
    busy, reports = load["commits"], load["reports"]
    return (
        f"| {name} | {alone['per_s']:.0f} | {alone['median_ms']:.1f} ({alone['share_99_ms']:.1f}) "
        f"| {busy['per_s']:.0f} | {busy['median_ms']:.1f} ({busy['share_99_ms']:.1f}, {busy['worst_ms']:.0f}) "
        f"| {reports['median_ms']:.1f} ({reports['share_99_ms']:.1f}) | {polls['idle_us'] / 1e3:.2f} "
        f"| {polls['after_commit_us'] / 1e3:.2f} |"
    )


def _life(name: str, one: dict[str, Any]) -> str:
    return (
        f"| {name} | {one['events']:,} | {one['bytes'] / 2**20:.0f} MiB | {one['open_s']:.2f} s "
        f"| {one['replay_s']:.1f} s | {one['verify_s']:.1f} s "
        f"| {one['open_memory_mib']:.0f}, {one['replay_memory_mib']:.0f}, {one['verify_memory_mib']:.0f} MiB |"
    )
