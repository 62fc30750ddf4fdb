"""``ebbflow fleet``: the nodes of a cluster on AWS, for people."""

import json as json_module
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from ebbflow.flows.fleet_options import AsJson, DryRun, Yes, confirm, fail, with_cluster
from ebbflow.planners.errors import OptionError
from ebbflow.tasks.wording import plural

if TYPE_CHECKING:
    from ebbflow.infra.clock import Clock
    from ebbflow.planners.guard import Verdict
    from ebbflow.planners.model.fleet import PoolState, Target
    from ebbflow.tasks.fleet import Observation, Opened
    from ebbflow.tasks.fleet_report import Status
    from ebbflow.tasks.fleet_request import FleetRequest

app = typer.Typer(
    help="The nodes of a cluster on AWS: what there is, what it costs, more of it, less of it.\n\n"
    "[b]Set up[/b], once (docs/fleet.md)\n\n"
    "    cd terraform/examples/minimal && terraform apply\n\n"
    "    terraform output -json > ebbflow.json\n\n"
    "[b]Look[/b]\n\n"
    "    ebbflow fleet status --watch 10\n\n"
    "    ebbflow fleet prices workers\n\n"
    "    ebbflow fleet cost\n\n"
    "[b]Change[/b]: each asks first, and --dry-run only says what it would do\n\n"
    "    ebbflow fleet grow workers 2 --dry-run\n\n"
    "    ebbflow fleet shrink workers 1\n\n"
    "Status: 0 done, 1 refused or failed, 2 wrong input.",
    no_args_is_help=True,
    rich_markup_mode="rich",
)
notices_app = typer.Typer(
    help="Notices of nodes that will leave: those that wait to be read, and those that nobody could read.\n\n"
    "[b]Examples[/b]\n\n"
    "    ebbflow fleet notices show\n\n"
    "    ebbflow fleet notices read       (where no capacity loop runs)\n\n"
    "    ebbflow fleet notices redrive",
    no_args_is_help=True,
    rich_markup_mode="rich",
)
app.add_typer(notices_app, name="notices")
console = Console()

Pool = Annotated[str, typer.Argument(help="A pool, as Terraform names it.", metavar="POOL")]
AnyPool = Annotated[str | None, typer.Argument(help="One pool only. Default: all.", metavar="[POOL]")]
Wait = Annotated[
    float,
    typer.Option(
        help="How long nodes may finish what runs on them before they are ended.", metavar="SECONDS", min=0.0
    ),
]


# --- look -------------------------------------------------------------------------------------------------


@app.command()
@with_cluster
def status(
    request: "FleetRequest",
    watch: Annotated[
        float | None,
        typer.Option(help="Look again every so often, until Ctrl-C.", metavar="SECONDS", min=1.0),
    ] = None,
    json: AsJson = False,
) -> None:
    """Show pools and nodes: planned, requested, observed, notices, prices.

    [b]Examples[/b]

        ebbflow fleet status

        ebbflow fleet status --watch 10

        ebbflow fleet status --json --config prod.json

    Planned is what should exist, requested what AWS was asked for, observed what has arrived. It only reads.
    """
    from ebbflow.tasks.fleet import opened
    from ebbflow.tasks.fleet_tables import status_view

    with opened(request) as fleet:
        if watch is None:
            found = _status(fleet)
            _print_json(found.to_json()) if json else console.print(status_view(found))
            return
        _watch(lambda: _status(fleet), watch, json, fleet.clock)


def _status(fleet: "Opened") -> "Status":
    from ebbflow.infra.errors import AwsError
    from ebbflow.tasks.fleet import observe
    from ebbflow.tasks.fleet_report import status as report

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

    from ebbflow.infra.errors import InfraError
    from ebbflow.tasks.fleet_tables import status_view

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

    from ebbflow.tasks.fleet import opened
    from ebbflow.tasks.fleet_report import offers
    from ebbflow.tasks.fleet_tables import prices_view

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
            _print_json({"offers": [asdict(row) for row in rows], "problems": problems})
        else:
            console.print(prices_view(rows, problems))


@app.command()
@with_cluster
def cost(
    request: "FleetRequest",
    hours: Annotated[float, typer.Option(help="How far to look ahead.", min=0.0)] = 24.0,
    json: AsJson = False,
) -> None:
    """Show what the nodes have cost and will, by pool, against on-demand.

    [b]Examples[/b]

        ebbflow fleet cost

        ebbflow fleet cost --hours 168 --json

    Counted are the nodes that were seen by this or any other command with the same --state: EC2 forgets an ended node
    within about an hour. The forecast keeps today's nodes; its range is that of past prices.
    """
    from ebbflow.tasks.fleet import opened
    from ebbflow.tasks.fleet_report import cost as report
    from ebbflow.tasks.fleet_tables import cost_view

    with opened(request) as fleet:
        found = report(
            fleet.settings.cluster, fleet.stays.look(), fleet.prices, fleet.clock.now(), hours * 3600.0
        )
        _print_json(found.to_json()) if json else console.print(cost_view(found))


@app.command()
@with_cluster
def plan(
    request: "FleetRequest",
    pool: AnyPool = None,
    nodes: Annotated[
        int | None, typer.Option(help="Plan for so many nodes instead of those that are planned.", min=0)
    ] = None,
    query: Annotated[
        str | None,
        typer.Option(help="Plan for the fewest nodes on which this query ends in time.", metavar="SQL|FILE"),
    ] = None,
    tables: Annotated[
        str | None, typer.Option(help="Of the query: a folder of Parquet tables.", metavar="DIR")
    ] = None,
    within: Annotated[
        float | None,
        typer.Option(help="Of the query: in which time, new nodes' start included.", metavar="SECONDS"),
    ] = None,
    json: AsJson = False,
) -> None:
    """Show what would be done now, and why. Nothing is done.

    [b]Examples[/b]

        ebbflow fleet plan

        ebbflow fleet plan workers --nodes 8

        ebbflow fleet plan workers --query report.sql --tables s3://lake/sales --within 900

    Each pool: the size that is wanted, on-demand nodes where spot is dry, which machines the market would choose,
    what the guard says to it, and which calls would be made.
    """
    from ebbflow.tasks.fleet import observe, opened, wish
    from ebbflow.tasks.fleet_plan import plan as make
    from ebbflow.tasks.fleet_tables import plan_view

    if pool is None and (nodes is not None or query is not None):
        raise OptionError("--nodes and --query are of one pool; name it: ebbflow fleet plan POOL ...")
    if (query is None) != (within is None) or (query is not None and nodes is not None):
        raise OptionError("give --query with --tables and --within, or --nodes, or none of them")
    with opened(request) as fleet:
        seen = observe(fleet.control, fleet.prices)
        book = fleet.stays.look()

        def wanted(state: "PoolState") -> "Target":
            if query is not None and within is not None:
                from ebbflow.tasks.fleet_wishes import for_query
                from ebbflow.tasks.request import QueryRequest

                asked = QueryRequest.of(query, tables=tables)
                return for_query(seen, state.name, asked, within, clock=fleet.clock)
            if nodes is not None:
                return wish(seen, state.name, nodes, f"{nodes} are asked for")
            return wish(seen, state.name, state.planned, "as planned: nothing asks for another size")

        plans = [
            make(fleet.control, seen, wanted(state), fleet.rules, book)
            for state in (seen.fleet.pools if pool is None else [seen.pool(pool)])
            if state.name in fleet.settings.pools  # a gang has the size it was asked for with
        ]
        if json:
            _print_json({"pools": [one.to_json() for one in plans], "problems": list(seen.problems)})
        else:
            console.print(plan_view(plans, seen.problems))


# --- change -----------------------------------------------------------------------------------------------


@app.command()
@with_cluster
def grow(
    request: "FleetRequest",
    pool: Pool,
    count: Annotated[int, typer.Argument(help="How many nodes more.", metavar="N", min=1)],
    on_demand: Annotated[bool, typer.Option("--on-demand", help="On-demand nodes, not spot.")] = False,
    dry_run: DryRun = False,
    yes: Yes = False,
) -> None:
    """Ask for N more nodes.

    [b]Examples[/b]

        ebbflow fleet grow workers 2 --dry-run

        ebbflow fleet grow workers 2

        ebbflow fleet grow workers 1 --on-demand --yes

    It costs money: the guard checks budgets and limits first, and what it lets through is shown before anything is
    asked for. Nodes arrive later, or never; ebbflow fleet status tells.
    """
    from ebbflow.tasks.fleet import opened, wish

    with opened(request) as fleet:
        _of_group(fleet, pool)

        def wanted(seen: "Observation") -> "Target":
            state = seen.pool(pool)
            kind = "on-demand " if on_demand else ""
            return wish(
                seen,
                pool,
                state.planned + count,
                f"{plural(count, f'{kind}node')} more than {state.planned}: asked for",
                on_demand=state.on_demand + count if on_demand else None,
            )

        def refused(seen: "Observation", target: "Target") -> bool:
            state = seen.pool(pool)
            # spot nodes are not what was asked for
            return target.nodes <= state.planned or (on_demand and target.on_demand <= state.on_demand)

        _change(fleet, wanted, f"Grow {pool}?", dry_run, yes, refused=refused)
        if not dry_run:
            console.print("requested; ebbflow fleet status --watch 10 shows them arrive", highlight=False)


@app.command()
@with_cluster
def shrink(
    request: "FleetRequest",
    pool: Pool,
    count: Annotated[int | None, typer.Argument(help="How many nodes fewer.", metavar="[N]", min=1)] = None,
    nodes: Annotated[
        list[str] | None,
        typer.Option(help="These nodes, by commas or repeated, instead of a number.", metavar="ID"),
    ] = None,
    wait: Wait = 300.0,
    dry_run: DryRun = False,
    yes: Yes = False,
) -> None:
    """Drain N nodes, or those named, and end them. They are not replaced.

    [b]Examples[/b]

        ebbflow fleet shrink workers 1 --dry-run

        ebbflow fleet shrink workers 2 --wait 600

        ebbflow fleet shrink workers --nodes i-0123456789abcdef0,i-0fedcba9876543210

    Without --nodes those go first that leave anyway, then the most expensive. Nodes that have not arrived yet are
    given up before any other. Each node is told to finish; after --wait seconds it is ended even if it is still
    busy, and its work starts again elsewhere.
    """
    from ebbflow.tasks.fleet import opened, size_without, wish

    ids = _ids(nodes)
    if (count is None) == (not ids):
        raise OptionError("name a number of nodes or --nodes ID, one of both: ebbflow fleet shrink POOL 1")
    with opened(request) as fleet:
        _of_group(fleet, pool)

        def wanted(seen: "Observation") -> "Target":
            state = seen.pool(pool)
            for name in ids:
                if seen.pool_of(name).name != pool:
                    raise OptionError(f"{name} is a node of pool {seen.pool_of(name).name}, not of {pool}")
            if (count or 0) > state.planned:
                raise OptionError(
                    f"{pool} has only {plural(state.planned, 'node')} planned; got {count} fewer"
                )
            size = size_without(state, ids) if ids else state.planned - (count or 0)
            why = (
                f"{', '.join(ids)} to go"
                if ids
                else f"{plural(count or 0, 'node')} fewer than {state.planned}"
            )
            return wish(seen, pool, size, f"{why}: asked for", drain=ids)

        found = _change(
            fleet,
            wanted,
            f"Shrink {pool}?",
            dry_run,
            yes,
            refused=lambda s, t: t.nodes >= s.pool(pool).planned and not t.drain,
        )
        if found is not None:
            _leave(fleet, *found, wait, end=True)


@app.command()
@with_cluster
def drain(
    request: "FleetRequest",
    nodes: Annotated[list[str], typer.Argument(help="Nodes, as status names them.", metavar="ID...")],
    wait: Wait = 300.0,
    end: Annotated[bool, typer.Option("--end", help="Then end them; their pool replaces them.")] = False,
    dry_run: DryRun = False,
    yes: Yes = False,
) -> None:
    """Let nodes finish what runs on them and take nothing new.

    [b]Examples[/b]

        ebbflow fleet drain i-0123456789abcdef0

        ebbflow fleet drain i-0123456789abcdef0 --end      (exchange a node that misbehaves)

    The size of the pool stays. A node that is drained and not ended goes on costing: end it by --end, which has it
    replaced, or by ebbflow fleet shrink POOL --nodes ID, which has not.
    """
    from ebbflow.tasks.fleet import opened, wish

    ids = _ids(nodes)
    with opened(request) as fleet:

        def wanted(seen: "Observation") -> "Target":
            pools = sorted({seen.pool_of(name).name for name in ids})
            if len(pools) > 1:
                raise OptionError(f"drain nodes of one pool at a time; these are of {', '.join(pools)}")
            _of_group(fleet, pools[0])
            state = seen.pool(pools[0])
            return wish(
                seen, state.name, state.planned, f"{', '.join(ids)} to be drained: asked for", drain=ids
            )

        question = f"Drain {'and end ' if end else ''}{', '.join(ids)}?"
        found = _change(fleet, wanted, question, dry_run, yes, refused=lambda s, t: not t.drain)
        if found is not None:
            _leave(fleet, *found, wait, end=end)


def _change(
    fleet: "Opened",
    wanted: "Callable[[Observation], Target]",
    question: str,
    dry_run: bool,
    yes: bool,
    *,
    refused: "Callable[[Observation, Target], bool]",
) -> "tuple[Observation, Target] | None":
    """Show what a wish comes to, ask, and apply it; ``None`` after a dry run. ``refused``: nothing is left of it."""
    from ebbflow.tasks.fleet import act, decide, guard, observe, same_choice
    from ebbflow.tasks.fleet_plan import plan as make
    from ebbflow.tasks.fleet_tables import applied_lines, plan_view, verdict_lines

    def judged() -> "tuple[Observation, Verdict]":
        seen = observe(fleet.control, fleet.prices)
        return seen, guard(seen, decide(seen, wanted(seen), fleet.rules), fleet.rules)

    seen, verdict = judged()
    shown = make(fleet.control, seen, wanted(seen), fleet.rules, fleet.stays.look())
    console.print(plan_view([shown], seen.problems))
    if verdict.target is None or refused(seen, verdict.target):
        fail(f"nothing was done: {'; '.join(verdict_lines(verdict))}")
    if dry_run:
        console.print("dry run: nothing was done")
        return None
    confirm(question, yes)
    seen, again = judged()  # a notice may have come while somebody thought
    if not same_choice(verdict, again) or again.target is None:
        fail("nothing was done: the fleet has changed meanwhile; look at it and ask again")
    applied = act(fleet.control, again)
    if applied.asked or applied.refused:
        for line in applied_lines(applied):
            console.print(line, highlight=False, markup=False, soft_wrap=True)
    if applied.epoch != again.target.epoch:
        fail("nothing was done: the fleet has changed meanwhile; look at it and ask again")
    return seen, again.target


def _leave(fleet: "Opened", seen: "Observation", target: "Target", wait: float, *, end: bool) -> None:
    """Drain the nodes of ``target`` with progress, and end them."""
    from ebbflow.tasks.fleet_leaving import drain as let_finish
    from ebbflow.tasks.fleet_tables import applied_lines

    nodes = [node for node in seen.pool(target.pool).nodes if node.id in target.drain]
    if not nodes:
        return

    def say(text: str) -> None:
        console.print(text, highlight=False, markup=False, soft_wrap=True)

    names = ",".join(node.id for node in nodes)
    try:
        drained = let_finish(fleet.runner(min(wait, 60.0)), nodes, wait, fleet.clock, say)
    except KeyboardInterrupt:
        say(
            f"interrupted; what was told to finish goes on finishing. Go on: ebbflow fleet shrink {target.pool} "
            f"--nodes {names}"
        )
        raise
    if not end:
        say(f"not ended; they cost until then: ebbflow fleet shrink {target.pool} --nodes {names}")
        if drained.untold:
            fail(f"{len(drained.untold)} of {plural(len(nodes), 'node')} could not be told")
        return
    if drained.busy:
        say(f"{plural(len(drained.busy), 'node')} not known to be idle: the group's hook waits once more")
    ended = fleet.control.terminate([node.id for node in nodes])
    for line in applied_lines(ended):
        say(line)
    if ended.refused:
        fail(f"{len(ended.refused)} of {plural(len(nodes), 'node')} not ended")


# --- notices ----------------------------------------------------------------------------------------------


@notices_app.command()
@with_cluster
def show(
    request: "FleetRequest",
    limit: Annotated[int, typer.Option(help="At most so many.", min=1)] = 100,
    json: AsJson = False,
) -> None:
    """Show notices that could not be handled, and why. They stay where they are.

    [b]Example[/b]

        ebbflow fleet notices show --limit 10
    """
    from dataclasses import asdict

    from ebbflow.tasks.fleet import opened
    from ebbflow.tasks.fleet_tables import letters_view

    with opened(request) as fleet:
        letters = fleet.dead_letters().show(limit)
        if json:
            _print_json({"dead_letters": [asdict(letter) for letter in letters]})
        elif letters:
            console.print(letters_view(letters, 60))
        else:
            console.print("no dead letters")


@notices_app.command()
@with_cluster
def redrive(request: "FleetRequest", dry_run: DryRun = False) -> None:
    """Try notices again that could not be handled; what can be read today is taken in and deleted.

    [b]Examples[/b]

        ebbflow fleet notices redrive --dry-run

        ebbflow fleet notices redrive

    Run it where the capacity loop runs, while it is stopped: one process at a time keeps the notices.
    """
    from ebbflow.tasks.fleet import opened, take_notices

    with opened(request) as fleet:
        letters = fleet.dead_letters()
        if dry_run:
            good = [letter for letter in letters.show(1000) if not letter.problem]
            console.print(f"dry run: {plural(len(good), 'notice')} would be taken in")
            return
        with take_notices(fleet) as feed:
            taken, left = letters.redrive(feed.take)
        console.print(f"{taken} taken in, {left} left")
        if left:
            fail("what is left cannot be read: ebbflow fleet notices show tells why")


@notices_app.command()
@with_cluster
def read(request: "FleetRequest") -> None:
    """Take in the notices that wait, where no capacity loop does.

    [b]Example[/b]

        ebbflow fleet notices read && ebbflow fleet status

    A loop elsewhere would not hear of what is read here: use it only while none runs.
    """
    from ebbflow.tasks.fleet import opened, take_notices

    with opened(request) as fleet, take_notices(fleet) as feed:
        total = 0
        while came := feed.poll():
            total += came
        told = plural(len(feed.notices()), "node")
        console.print(f"{plural(total, 'message')} taken in; {told} told to leave")


# --- parts ------------------------------------------------------------------------------------------------


def _ids(given: Sequence[str] | None) -> tuple[str, ...]:
    names = [name.strip() for text in given or () for name in text.split(",")]
    return tuple(dict.fromkeys(name for name in names if name))


def _of_group(fleet: "Opened", pool: str) -> None:
    if pool not in fleet.settings.pools:
        known = ", ".join(sorted(fleet.settings.pools)) or "none"
        hint = "; a gang has the size it was asked for with" if "/" in pool else ""
        raise OptionError(f"POOL must be one of the cluster's ({known}); got {pool!r}{hint}")


def _print_json(content: Any) -> None:
    typer.echo(json_module.dumps(content, indent=1))
