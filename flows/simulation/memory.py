"""``ebbflow simulate memory``: machines that lend memory to each other."""

from dataclasses import asdict
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from ebbflow.flows.runs.answers import print_json
from ebbflow.flows.runs.options import AsJson, duration_option
from ebbflow.flows.simulation.terminal import show_progress

console = Console()
errors = Console(stderr=True)

HELP = """Simulate machines that lend free memory to each other, and compare policies.

The load is that of Infiniswap's cluster experiment: containers of six applications on machines of 64 GB, each with \
all, three quarters or half of the memory that it needs; slabs of 1 GB, 8 GB of each machine kept free. What does \
not fit goes to slabs of other machines, or to disk. Shown are medians over the \
seeds: memory in use and its balance, slabs without a host, the run time of containers with three quarters and half \
of their memory over that with all of it, slabs evicted and their activity over the mean of their machine.

[b]Policies[/b] (--policy)

    no-sharing         what does not fit goes to disk

    random-placement   a slab goes to a machine drawn at random

    two-choices        to the one of two with more free slabs; batch eviction

    least-loaded       to the machine with most free slabs; batch eviction

    random-eviction    two choices; slabs to be evicted are drawn at random

    exact-eviction     two choices; the least active of all are evicted

[b]Examples[/b]

    ebbflow simulate memory --seeds 20

    ebbflow simulate memory --policy two-choices --fault 4m:kill:3 --json

Progress goes to standard error, the comparison to standard output.

Exit status: 0 done, 2 usage error.
"""


def memory(
    policy: Annotated[
        str | None,
        typer.Option(help="Policies to compare, separated by commas. Default: all.", metavar="NAME,..."),
    ] = None,
    machines: Annotated[int, typer.Option(help="Number of machines.")] = 32,
    containers: Annotated[int, typer.Option(help="Number of containers on them.")] = 90,
    occupancy: Annotated[
        float, typer.Option(help="Bytes of slabs that are touched for a byte that does not fit in memory.")
    ] = 2.1,
    seeds: Annotated[
        int, typer.Option(help="Number of simulations of each policy, with seeds 0, 1, ...")
    ] = 10,
    until: Annotated[float, duration_option(help="Simulated time.", shown=600.0)] = 600.0,
    start_spread: Annotated[
        float, duration_option(help="Time over which containers start.", shown=0.0)
    ] = 0.0,
    fault: Annotated[
        list[str] | None,
        typer.Option(
            help="Fault of a machine's daemon, which loses its slabs: TIME:kill:NUMBER. Repeatable.",
            metavar="FAULT",
        ),
    ] = None,
    json: AsJson = False,
) -> None:
    from ebbflow.planners.memory.simulation.policies import POLICIES
    from ebbflow.tasks.simulation.memory import MemorySimulation

    names = [name.strip() for name in policy.split(",")] if policy is not None else list(POLICIES)
    asked = MemorySimulation(
        names, machines, containers, occupancy, seeds, until, start_spread, tuple(fault or ())
    )
    with show_progress(errors) as show:
        found = asked.run(show)
    if json:
        print_json({"asked": asdict(asked), "policies": found})
        return
    title = f"{containers} containers on {machines} machines, {seeds} seeds"
    table = Table(title=title, title_justify="left", box=None, padding=(0, 1, 0, 0))
    table.add_column("policy", no_wrap=True)
    columns = ["in use", "max/med", "max/min", "no host", "75 %", "50 %", "evicted", "active"]
    columns += ["lost", "slower"] if asked.faults else []
    for heading in columns:
        table.add_column(heading, justify="right")
    for one in found:
        row = one["median"]
        cells = [
            f"{row['utilization']:.1%}", f"{row['max_over_median']:.2f}", f"{row['max_over_min']:.1f}",
            f"{row['unplaced']:.1%}", _times(row["slowdown_75"]), _times(row["slowdown_50"]),
            f"{row['evicted']:.0f}", _times(row["evicted_activity"]),
        ]  # fmt: skip
        cells += [f"{row['lost']:.0f}", f"{row['fault_loss'] or 0:.1%}"] if asked.faults else []
        table.add_row(one["policy"], *cells)
    console.print(table)


def _times(ratio: float | None) -> str:
    return "-" if ratio is None else f"{ratio:.2f}x"
