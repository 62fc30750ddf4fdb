"""``ebbflow fleet``: the nodes of a cluster on AWS, for people."""

import json as json_module
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from ebbflow.flows.fleet import change as fleet_change
from ebbflow.flows.fleet import gangs as fleet_gangs
from ebbflow.flows.fleet import notices as fleet_notices
from ebbflow.flows.fleet.options import with_cluster
from ebbflow.flows.runs.answers import print_json
from ebbflow.flows.runs.options import AsJson, duration_option
from ebbflow.planners.errors import OptionError
from ebbflow.tasks.drawing.wording import plural

if TYPE_CHECKING:
    from ebbflow.infra.clock import Clock
    from ebbflow.planners.model.fleet import PoolState, Target
    from ebbflow.tasks.fleet.report import Status
    from ebbflow.tasks.fleet.request import FleetRequest
    from ebbflow.tasks.fleet.steps import OpenedFleet

app = typer.Typer(
    help="Node pools of a cluster on AWS: status, cost, scale-out and scale-in.\n\n"
    "[b]Set up[/b], once (docs/fleet.md)\n\n"
    "    cd terraform/examples/minimal && terraform apply\n\n"
    "    terraform output -json > ebbflow.json\n\n"
    "    export EBBFLOW_TERRAFORM_OUTPUT=$PWD/ebbflow.json\n\n"
    "[b]Look[/b]\n\n"
    "    ebbflow fleet status --watch 10\n\n"
    "    ebbflow fleet prices workers\n\n"
    "    ebbflow fleet cost\n\n"
    "[b]Change[/b]: each asks first, and --dry-run only says what it would do\n\n"
    "    ebbflow fleet grow workers 2 --dry-run\n\n"
    "    ebbflow fleet shrink workers 1\n\n"
    "    ebbflow fleet gang run-1 --pool trainers --size 8    (all or nothing)\n\n"
    "Exit status: 0 done, 1 rejected or failed, 2 usage error.",
    no_args_is_help=True,
    rich_markup_mode="rich",
)
app.add_typer(fleet_notices.app, name="notices")
console = Console()

_DAY = 86_400.0  # s
AnyPool = Annotated[
    str | None, typer.Argument(help="Name of the pool to show. Default: all pools.", metavar="POOL")
]


@app.command()
@with_cluster
def status(
    request: "FleetRequest",
    watch: Annotated[
        float | None,
        duration_option(help="Interval between refreshes, until Ctrl-C. Default: show once.", min=1.0),
    ] = None,
    json: AsJson = False,
) -> None:
    """Show pools and nodes: planned, requested, observed, notices, prices.

    [b]Examples[/b]

        ebbflow fleet status

        ebbflow fleet status --watch 10

        ebbflow fleet status --json --terraform-output prod.json

    Planned is what should exist, requested what AWS was asked for, observed what has arrived. It only reads.
    """
    from ebbflow.flows.fleet.terminal import status_view
    from ebbflow.tasks.fleet.steps import opened

    with opened(request) as fleet:
        if watch is None:
            found = _status(fleet)
            print_json(found.to_json()) if json else console.print(status_view(found))
            return
        _watch(lambda: _status(fleet), watch, json, fleet.clock)


def _status(fleet: "OpenedFleet") -> "Status":
    from ebbflow.infra.errors import AwsError
    from ebbflow.tasks.fleet.report import status as report
    from ebbflow.tasks.fleet.steps import observe

    problems = []
    seen = observe(fleet.control, fleet.prices)
    fleet.stays.look()
    try:
        waiting, dead = fleet.waiting(), fleet.dead_letters().count()
        if waiting and not fleet.read_here():
            problems.append(
                f"{plural(waiting, 'message')} waiting, and nothing on this machine reads them: start the capacity "
                "loop, or ebbflow fleet notices read"
            )
        if dead:
            problems.append(f"{plural(dead, 'notice')} could not be handled: ebbflow fleet notices show")
    except AwsError as error:
        problems.append(str(error))
    return report(
        seen, fleet.settings.cluster, fleet.settings.region, fleet.rules.limits.dollars_per_hour, problems
    )


def _watch(look: "Callable[[], Status]", seconds: float, json: bool, clock: "Clock") -> None:
    from rich.live import Live
    from rich.text import Text

    from ebbflow.flows.fleet.terminal import status_view
    from ebbflow.infra.errors import InfraError

    def shown() -> Any:
        try:
            return look()
        except InfraError as error:  # an outage does not end a watch
            return str(error)

    try:
        if json or not console.is_terminal:
            while True:
                found = shown()
                if json:
                    content = {"error": found} if isinstance(found, str) else found.to_json()
                    typer.echo(json_module.dumps(content))
                else:
                    console.print(Text(found) if isinstance(found, str) else status_view(found))
                clock.sleep(seconds)
        with Live(console=console, auto_refresh=False) as live:
            while True:
                found = shown()
                live.update(Text(found) if isinstance(found, str) else status_view(found), refresh=True)
                clock.sleep(seconds)
    except KeyboardInterrupt:
        return


@app.command()
@with_cluster
def prices(request: "FleetRequest", pool: AnyPool = None, json: AsJson = False) -> None:
    """Show what a pool's machines cost: spot now, a week's mean and high, on-demand.

    [b]Examples[/b]

        ebbflow fleet prices

        ebbflow fleet prices workers --on-demand-prices agreed.toml

    "Useful" is the price of an hour that interruptions leave, as seen here so far; the cheapest by that is marked.
    """
    from dataclasses import asdict

    from ebbflow.flows.fleet.terminal import prices_view
    from ebbflow.tasks.fleet.money import offers
    from ebbflow.tasks.fleet.steps import opened

    with opened(request) as fleet:
        rows, problems = [], []
        book = fleet.stays.look()
        for name in [pool] if pool is not None else sorted(fleet.settings.pools):
            found, missing = offers(
                name,
                fleet.prices.offers(name),
                fleet.prices,
                book,
                fleet.rules.interruption,
                fleet.clock.now(),
            )
            rows += found
            problems += missing
        problems += fleet.prices.problems()
        if json:
            print_json({"offers": [asdict(row) for row in rows], "problems": problems})
        else:
            console.print(prices_view(rows, problems))


@app.command()
@with_cluster
def cost(
    request: "FleetRequest",
    horizon: Annotated[float, duration_option(help="Horizon of the forecast.", shown=_DAY)] = _DAY,
    json: AsJson = False,
) -> None:
    """Show what the nodes have cost and will, by pool, against on-demand.

    [b]Examples[/b]

        ebbflow fleet cost

        ebbflow fleet cost --horizon 7d --json

    Counted are the nodes that were seen by this or any other command with the same --state-dir: EC2 forgets a
    terminated node within about an hour. The forecast keeps today's nodes; its range is that of past prices.
    """
    from ebbflow.flows.fleet.terminal import cost_view
    from ebbflow.tasks.fleet.money import cost as report
    from ebbflow.tasks.fleet.steps import opened

    with opened(request) as fleet:
        found = report(fleet.settings.cluster, fleet.stays.look(), fleet.prices, fleet.clock.now(), horizon)
        print_json(found.to_json()) if json else console.print(cost_view(found))


@app.command()
@with_cluster
def plan(
    request: "FleetRequest",
    pool: AnyPool = None,
    nodes: Annotated[
        int | None, typer.Option(help="Number of nodes to plan for (default: the planned size).", min=0)
    ] = None,
    query: Annotated[
        str | None,
        typer.Option(
            help="SQL query; the plan has the fewest nodes on which it completes within --within.",
            metavar="SQL|FILE",
        ),
    ] = None,
    tables: Annotated[
        str | None, typer.Option(help="Directory of the Parquet tables of the query.", metavar="DIR")
    ] = None,
    within: Annotated[
        float | None,
        duration_option(help="Deadline of the query, launch of new nodes included."),
    ] = None,
    json: AsJson = False,
) -> None:
    """Show what would be done now, and why. Nothing is done.

    [b]Examples[/b]

        ebbflow fleet plan

        ebbflow fleet plan workers --nodes 8

        ebbflow fleet plan workers --query report.sql \\
            --tables s3://lake/sales --within 15m

    Each pool: the desired size, on-demand nodes where Spot capacity is insufficient, the machines that the market
    planner would choose,
    what the guard says to it, and which calls would be made.
    """
    from ebbflow.flows.fleet.terminal import plan_view
    from ebbflow.infra.tables.parquet import discover
    from ebbflow.tasks.fleet.plan import plan as make
    from ebbflow.tasks.fleet.steps import observe, opened, wish
    from ebbflow.tasks.query.request import QueryRequest

    if pool is None and (nodes is not None or query is not None):
        raise OptionError("--nodes and --query are of one pool; name it: ebbflow fleet plan POOL ...")
    if (query is None) != (within is None) or (query is not None and nodes is not None):
        raise OptionError("give --query with --tables and --within, or --nodes, or none of them")
    if query is None and tables is not None:
        raise OptionError(f"--tables are those of --query; got {tables!r} without it")
    asked = None
    if query is not None:
        asked = QueryRequest.of(query, tables=tables, engine="spark")
        if asked.tables_place:
            discover(asked.tables_place)  # before AWS is asked
    with opened(request) as fleet:
        seen = observe(fleet.control, fleet.prices)
        book = fleet.stays.look()

        def wanted(state: "PoolState") -> "Target":
            if asked is not None and within is not None:
                from ebbflow.tasks.fleet.targets import for_query

                return for_query(seen, state.name, asked, within, clock=fleet.clock)
            if nodes is not None:
                return wish(seen, state.name, nodes, f"{nodes} are requested")
            return wish(seen, state.name, state.planned, "as planned: no other size is requested")

        plans = [
            make(fleet.control, seen, wanted(state), fleet.rules, book)
            for state in (seen.fleet.pools if pool is None else [seen.pool(pool)])
            if state.name in fleet.settings.pools  # a gang has the size it was asked for with
        ]
        if json:
            print_json({"pools": [one.to_json() for one in plans], "problems": list(seen.problems)})
        else:
            console.print(plan_view(plans, seen.problems))


fleet_change.register(app)
fleet_gangs.register(app)


def register(top: typer.Typer) -> None:
    """Add the group to the command line."""
    top.add_typer(app, name="fleet")
