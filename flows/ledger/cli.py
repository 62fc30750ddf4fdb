"""``ebbflow ledger``: what the ledger holds, whether it is whole, and how it is kept small."""

import json as json_module
import re
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ebbflow.flows.runs.answers import confirm, print_json
from ebbflow.flows.runs.options import AsJson, DryRun, Yes
from ebbflow.planners.errors import OptionError
from ebbflow.planners.model.numbers import parse_duration

if TYPE_CHECKING:
    from ebbflow.infra.ledger import Ledger
    from ebbflow.infra.ledger.retention import PruneResult
    from ebbflow.planners.model.ledger import Event

app = typer.Typer(
    help="The ledger: the durable event log of apps, nodes, leases and decisions.\n\n"
    "[b]Look[/b]\n\n"
    "    ebbflow ledger status\n\n"
    "    ebbflow ledger events --app digits\n\n"
    "    ebbflow ledger events --kind decided --follow\n\n"
    "[b]Keep[/b]\n\n"
    "    ebbflow ledger verify\n\n"
    "    ebbflow ledger prune --before 30d --dry-run\n\n"
    "[b]Where it is[/b]: --ledger, else $EBBFLOW_LEDGER, else the file ledger.db in ~/.cache/ebbflow. SQLite serves "
    "one machine; for more take PostgreSQL: postgresql://user@host/database, with the password in ~/.pgpass "
    "(docs/operations.md)\n\n"
    "Exit status: 0 done, 1 damaged or rejected, 2 usage error, 4 the ledger does not respond.",
    no_args_is_help=True,
    rich_markup_mode="rich",
)
console = Console()

_FOLLOW = 0.5  # s between looks

Url = Annotated[
    str | None,
    typer.Option(
        "--ledger",
        help="Address of the ledger: a file, or postgresql://user@host/database; a password goes into "
        "$EBBFLOW_LEDGER or ~/.pgpass, not here. Default: $EBBFLOW_LEDGER, else ledger.db in ~/.cache/ebbflow.",
        metavar="URL",
    ),
]
Cluster = Annotated[str, typer.Option(help="Name of the cluster; a ledger may hold several.", metavar="NAME")]


@app.command()
def status(url: Url = None, cluster: Cluster = "local", json: AsJson = False) -> None:
    """Show the location of the ledger, the leader of the cluster, and the size of the ledger.

    [b]Examples[/b]

        ebbflow ledger status

        ebbflow ledger status --ledger postgresql://ebb@db/ebbflow --json

    Read-only. The leader renews its leader lease every few seconds. A loop whose leader lease has expired is dead
    or partitioned, and another loop may take over.
    """
    from dataclasses import asdict

    with _opened(url, cluster) as ledger:
        found, state, now = ledger.overview(), ledger.state(), ledger.clock.now()
        alive = found.lead is not None and found.lead.alive(now)
        counts = {
            "nodes": len(state.nodes),
            "gpus": sum(node.gpus for node in state.nodes.values()),
            "leases": len(state.leases),
            "apps": found.apps,
            "apps_active": len(state.active()),
            "revision": state.revision,
        }
        if json:
            print_json({**asdict(found), "lead_alive": alive, **counts})
            return
        console.print(_status_table(found, counts, alive, now))


def _status_table(found: Any, counts: dict[str, int], alive: bool, now: float) -> Table:
    from ebbflow.tasks.drawing.wording import bytes_text, plural, printable, seconds_text

    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")

    def row(name: str, text: str) -> None:
        table.add_row(name, escape(printable(text)))

    row("ledger", f"{found.address} (schema version {found.form}, {bytes_text(found.bytes)})")
    others = [name for name in found.clusters if name != found.cluster]
    row("cluster", found.cluster + (f"; also here: {', '.join(others)}" if others else ""))
    lead = found.lead
    if lead is None:
        row("loop", "none yet: ebbflow capacity start")
    elif alive:
        row(
            "loop",
            f"{lead.holder} is the leader (fencing token {lead.token}), for another {seconds_text(lead.until - now)}",
        )
    elif not lead.until:
        row("loop", f"no leader: {lead.holder} has resigned (fencing token {lead.token})")
    else:
        row(
            "loop",
            f"no leader: the leader lease of {lead.holder} (fencing token {lead.token}) expired"
            f" {_ago(now - lead.until)}",
        )
    if found.last:
        row("events", f"{found.events:,}, up to number {found.last:,}, the last {_ago(now - found.at)}")
    else:
        row("events", "none yet")
    if found.pruned:
        row("pruned", f"up to number {found.pruned:,}")
    row("snapshots", ", ".join(f"{n:,}" for n in found.snapshots) or "none yet")
    row("nodes", f"{counts['nodes']:,} with {plural(counts['gpus'], 'GPU')}, revision {counts['revision']}")
    row("leases", f"{counts['leases']:,}")
    row("apps", f"{counts['apps']:,}, {counts['apps_active']:,} active")
    return table


def _ago(seconds: float) -> str:
    from ebbflow.tasks.drawing.wording import seconds_text

    return f"{seconds_text(seconds)} ago" if seconds >= 0 else f"{seconds_text(-seconds)} ahead of this clock"


@app.command()
def events(
    url: Url = None,
    cluster: Cluster = "local",
    kind: Annotated[
        list[str] | None,
        typer.Option(
            help="Kind of events to show, such as lease-granted or decided. Repeatable.", metavar="KIND"
        ),
    ] = None,
    of_app: Annotated[
        str | None,
        typer.Option(
            "--app", help="ID of the app whose events are shown, its leases included.", metavar="ID"
        ),
    ] = None,
    after: Annotated[
        int | None,
        typer.Option(
            help="Event number after which to start (default: the newest events).", metavar="NUMBER", min=0
        ),
    ] = None,
    limit: Annotated[int, typer.Option(help="Maximum number of entries to show.", min=1)] = 30,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Follow new events until Ctrl-C.")] = False,
    json: AsJson = False,
) -> None:
    """Show the events of the ledger, the newest last.

    [b]Examples[/b]

        ebbflow ledger events

        ebbflow ledger events --app digits --limit 100

        ebbflow ledger events --kind lease-granted --kind lease-ended --follow

        ebbflow ledger events --after 0 --limit 1000000 --json > history.jsonl

    With --json each event is one line, with everything a decision was based on.
    """
    with _opened(url, cluster) as ledger:
        found = ledger.events(after or 0, limit, kind or None, of_app, newest=after is None)
        _show_events(found, json, heading=True)
        last = found[-1].number if found else max(after or 0, ledger.state().number if after is None else 0)
        try:
            while follow:
                ledger.clock.sleep(_FOLLOW)
                more = ledger.events(last, 1000, kind or None, of_app)
                _show_events(more, json, heading=False)
                last = more[-1].number if more else last
        except KeyboardInterrupt:
            return


def _show_events(found: "list[Event]", json: bool, *, heading: bool) -> None:
    from datetime import datetime

    from ebbflow.flows.ledger.terminal import reason, sentence
    from ebbflow.infra.ledger.rows import codec
    from ebbflow.tasks.drawing.wording import printable

    if json:
        for event in found:
            kind = codec.kind_of(type(event.change))
            line = {
                "number": event.number,
                "at": event.at,
                "kind": kind,
                "change": codec.encode(event.change),
            }
            typer.echo(json_module.dumps(line))
        return
    if not found and not heading:
        return
    table = Table(box=None, show_header=heading, pad_edge=False)
    table.add_column("number", justify="right", no_wrap=True, min_width=6)
    table.add_column("time", no_wrap=True, style="dim")
    table.add_column("what", overflow="fold", ratio=3)
    table.add_column("why", overflow="fold", ratio=3)
    for event in found:
        when = datetime.fromtimestamp(event.at).isoformat(" ", "seconds")
        what, why = sentence(event.change), reason(event.change)
        table.add_row(f"{event.number:,}", when, escape(printable(what)), escape(printable(why)))
    console.print(table)


@app.command()
def verify(url: Url = None, cluster: Cluster = "local", json: AsJson = False) -> None:
    """Replay all events, compare them with snapshots and tables, and check that no GPU was granted twice.

    [b]Examples[/b]

        ebbflow ledger verify

        ebbflow ledger verify --json && echo whole

    Read-only; may run beside a loop. Exit status: 0 the ledger is consistent, 1 it is damaged.
    """
    from ebbflow.infra.ledger import audit
    from ebbflow.tasks.drawing.wording import plural, printable

    with _opened(url, cluster) as ledger:
        problems = ledger.verify()
        origin = ledger.origin() if not problems else None
        count, said = 0, []
        if origin is not None:
            every = list(_all_events(ledger, origin.number))
            count, said = len(every), audit(every, origin)
    if json:
        print_json({"cluster": cluster, "events": count, "differences": problems, "violations": said})
    else:
        for problem in [*problems, *said]:
            console.print(
                f"[bold red]wrong:[/] {escape(printable(problem))}", soft_wrap=True, highlight=False
            )
        if not problems and not said:
            console.print(
                f"{plural(count, 'event')} replayed: tables and snapshots agree, no GPU was granted twice"
            )
    if problems or said:
        raise typer.Exit(1)


def _all_events(ledger: "Ledger", after: int) -> "list[Event]":
    found: list[Event] = []
    while page := ledger.events(found[-1].number if found else after, 5000):
        found += page
    return found


@app.command()
def migrate(url: Url = None, json: AsJson = False) -> None:
    """Migrate the schema of a ledger that an older Ebbflow has written to the current version.

    [b]Example[/b]

        ebbflow ledger migrate

    Each command that opens the ledger migrates it as well; this command does so at a chosen time. Make a backup
    first: there is no downgrade, and an older Ebbflow rejects a migrated ledger.
    """
    from ebbflow.infra.ledger import migrate_ledger

    before, now = migrate_ledger(url)
    if json:
        print_json({"before": before, "now": now})
    elif before == now:
        console.print(f"the ledger has schema version {now}, the newest: nothing to migrate")
    else:
        console.print(f"the ledger was migrated from schema version {before} to {now}")


@app.command()
def prune(
    before: Annotated[
        str,
        typer.Option(
            help="Minimum age of what is removed, as a duration such as 30d, or a date such as 2026-03-31.",
            metavar="TIME",
        ),
    ],
    url: Url = None,
    cluster: Cluster = "local",
    keep_events: Annotated[
        bool,
        typer.Option(
            "--keep-events",
            help="Keep all events; remove only the inputs of old decisions, not their reasons.",
        ),
    ] = False,
    dry_run: DryRun = False,
    yes: Yes = False,
    json: AsJson = False,
) -> None:
    """Compact old events into a snapshot. Events are removed only by this command.

    [b]Examples[/b]

        ebbflow ledger prune --before 30d --dry-run

        ebbflow ledger prune --before 2026-03-31 --keep-events --yes

    The state stays the same, and so do the lists of leases, decisions and checkpoints. It may run beside a loop. A
    SQLite file does not shrink: new events reuse the free space.
    """
    from dataclasses import asdict

    with _opened(url, cluster) as ledger:
        moment = _time(before, ledger.clock.now())
        would = ledger.prune(moment, keep_events=keep_events, dry_run=True)
        if not dry_run and _what(would):
            confirm(f"drop {_what(would)}?", yes)
            would = ledger.prune(moment, keep_events=keep_events)
    if json:
        print_json({**asdict(would), "dry_run": dry_run})
    elif not _what(would):
        console.print("no event is that old")
    else:
        console.print(f"{'would drop' if dry_run else 'dropped'} {_what(would)}")


def _what(pruned: "PruneResult") -> str:
    """Return what pruning lets go, for people; empty: nothing."""
    from ebbflow.tasks.drawing.wording import plural

    if not (pruned.events or pruned.payloads or pruned.reports):
        return ""
    said = f"{plural(pruned.events, 'event')} and what {plural(pruned.payloads, 'decision')} were based on"
    return f"{said}, and the last reports of {plural(pruned.reports, 'app')}" if pruned.reports else said


def _time(text: str, now: float) -> float:
    """Return seconds since the Unix epoch of a duration ago, such as ``30d``, or of a date in local time."""
    from datetime import datetime

    if re.fullmatch(r"[0-9.]+\s*(ms|s|min|m|h|d).*", text.strip()):
        try:
            return now - parse_duration(text)
        except OptionError as error:
            raise OptionError(f"--before {error}") from error
    try:
        return datetime.fromisoformat(text).timestamp()
    except (ValueError, OverflowError, OSError):  # no date, or one of which this machine's zone knows nothing
        raise OptionError(
            f"--before must be an age such as 30d or 12h, or a date such as 2026-03-31; got {text!r}"
        ) from None


def _opened(url: str | None, cluster: str) -> "Ledger":
    from ebbflow.infra.ledger import Ledger

    return Ledger.open(url, cluster=cluster, create=False)


def register(top: typer.Typer) -> None:
    """Add the group to the command line."""
    top.add_typer(app, name="ledger")
