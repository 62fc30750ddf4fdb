"""The sections of ``docs/benchmarks.md`` on the capacity loop: under load, and how soon it answers on real nodes."""

from typing import Any


def section(found: dict[str, Any]) -> str:
    """Return the section."""
    parts = [_head(found)]
    if real := found.get("real"):
        parts.append(_real(found, real))
    if virtual := found.get("virtual"):
        parts.append(_virtual(virtual))
    verdicts = "\n".join(
        f"| {name} | {'yes' if held else '**no**'} |" for name, held in found["holds"].items()
    )
    parts.append(f"| must hold | holds |\n|---|---|\n{verdicts}\n")
    if found.get("real"):
        parts.append("![changes that wait](benchmarks/capacity_load.svg)\n")
    return "\n".join(parts)


def _head(found: dict[str, Any]) -> str:
    return f"""## The capacity loop under load

`python -m tests.benchmarks.capacity_load --out docs/benchmarks`

The real loop, the policy {found["policy"]} and a real ledger against simulated nodes and apps: {found["nodes"]} nodes
of 1 to 8 GPUs that come, die, get a notice of 10 s and leave by it, {found["apps"]} apps of 1 to 32 GPUs that report
each second, let go of leases some while after they are called back, finish, or die without a word. All apps are in
one process beside the loop's, which reads the ledger once for all of them. {found["machine"]}; load average
{found["load"]:g} before it began.
"""


def _real(found: dict[str, Any], real: dict[str, Any]) -> str:
    latency, loop, backlog = real["latency_s"], real["loop"], real["backlog_mean"]
    rows = [
        ("a change of the nodes", "the decision on it is written", latency["p50"], latency["p99"]),
        *(
            (what, then, real[name]["p50"], real[name]["p99"])
            for name, what, then in (
                ("arrival_s", "an app enters", "its first lease, waiting for free GPUs included"),
                ("notice_s", "a notice is written", "leases on the node are called back"),
                ("death_s", "a loss is written", "leases on the node have ended"),
            )
            if real[name]["count"]
        ),
    ]
    table = "\n".join(f"| {what} | {then} | {p50:.2f} | {p99:.2f} |" for what, then, p50, p99 in rows)
    deciding = loop["deciding_s"]
    return f"""{real["changes"]:,} changes in {found["seconds"]:g} s ({real["changes_s"]:g} a second) on
{real["ledger"]}: {real["granted"]:,} leases granted, {real["apps"]["entered"]:,} apps entered,
{real["events"]:,} events.

| from | to | median (s) | p99 (s) |
|---|---|---|---|
{table}

Changes that waited: {backlog["first_third"]:g} on average in the first third of the time,
{backlog["last_third"]:g} in the last. A decision took {deciding["p50"]:.3f} s (p99 {deciding["p99"]:.3f} s);
{loop["cycles"]:,} were made, {loop["dropped"]} of them dropped because nodes had left meanwhile. The loop's process
used {real["loop_cpu"]:.0%} of a core.
"""


def _virtual(virtual: dict[str, Any]) -> str:
    return f"""{virtual["minutes"]:g} minutes on a virtual clock, in {virtual["wall_s"]:.0f} s of real time, with
{virtual["changes_s"]:g} changes a second and {virtual["cycles"]:,} decisions: {virtual["first_mib"]:g} MiB in the
second quarter, {virtual["last_mib"]:g} MiB in the last.
"""


def latency(found: dict[str, Any]) -> str:
    """Return the section on real nodes."""
    rows = "\n".join(
        f"| {one['what'].replace(' -> ', ' | ')} | {one['count']} | {one['p50']:.2f} | {one['p95']:.2f} "
        f"| {one['worst']:.2f} | {_bar(one)} |"
        for one in found["figures"].values()
    )
    return f"""## How soon a cluster answers

`python -m tests.benchmarks.capacity_latency --out docs/benchmarks`

A local fleet of two GPU nodes and two Spark workers, all of them processes of this machine, the capacity loop in a
process of its own with its usual pace, apps that speak through their agents, and a query of {found["rows"]:,} rows a
side that runs over and over on the workers. Killed is the process that stands for a machine, with SIGKILL, and nobody
is told. {found["machine"]}; load average {found["load"]:g} before it began. Times are seconds.

| from | to | times | median | 95 % | worst | 95 % must be |
|---|---|---|---|---|---|---|
{rows}

![seconds from what happens to the answer](benchmarks/capacity_latency.svg)
"""


def _bar(one: dict[str, Any]) -> str:
    if one["bar_s"] is None:
        return "–"
    held = "holds" if one["p95"] < one["bar_s"] else "**does not hold**"
    return f"under {one['bar_s']:g}: {held}"


def metrics(found: dict[str, Any]) -> str:
    """Return the section on what ``--metrics`` costs."""
    ms = found["milliseconds"]
    return f"""## Metrics beside a capacity decision

`python -m tests.benchmarks.metrics_cost --out docs/benchmarks`

A cycle of the loop (observe, decide, act, record) over {found["nodes"]} nodes and {found["apps"]} apps that change,
on SQLite; processor time, means of {found["cycles"]} cycles with the server and about as many without, by a draw.
{found["machine"]}; load average {found["load"]:g} before it began.

| | ms of a processor |
|---|---|
| a cycle without metrics | {ms["off"]:g} |
| a cycle beside the server | {ms["idle"]:g} |
| a scrape | {ms["scrape"]:g} |

A scrape that meets a cycle holds it up by its own time at most. Where cycles begin each second and Prometheus scrapes
every {found["scraped_every_s"]:g} s, it meets {found["cycles_met"]:.2%} of them: the idle server adds
{found["idle_server_adds"]:+.2%} to a cycle, scrapes add {found["scrapes_add"]:+.2%}.
"""
