"""``ebbflow memory``: daemons that lend this machine's memory to other nodes, and a gateway to it for Spark."""

import threading
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.console import Console
from rich.table import Table

from ebbflow.flows.runs.answers import print_json
from ebbflow.flows.runs.option_checks import CheckedGroup
from ebbflow.flows.runs.options import AsJson, duration_option
from ebbflow.planners.errors import OptionError

if TYPE_CHECKING:
    from ebbflow.tasks.memory.lending import LenderStatus, MemoryStatus

app = typer.Typer(
    cls=CheckedGroup,
    help="Memory that nodes lend each other as a tier before a store: start, show and stop their "
    "daemons, and let Spark read and write such a store.\n\n"
    "[b]Examples[/b]\n\n"
    "    ebbflow memory lend --limit 4GiB\n\n"
    "    ebbflow query report.sql --tables data/ --store memory+/mnt/shared/store\n\n"
    "    ebbflow memory status\n\n"
    "Daemons and their clients find each other in the directory that EBBFLOW_MEMORY_DIR names, else in memory/ of "
    "EBBFLOW_HOME. docs/memory.md explains.",
    no_args_is_help=True,
    rich_markup_mode="rich",
)
console = Console()
messages = Console(stderr=True)

Within = Annotated[
    float, duration_option(help="Time that clients have to leave a daemon before it ends.", shown=20.0)
]


@app.command()
def lend(
    node: Annotated[
        str | None,
        typer.Argument(help="Name of the node. Default: the name of this machine.", metavar="[NODE]"),
    ] = None,
    limit: Annotated[
        str,
        typer.Option(
            help="Maximum memory to lend. Less is lent while this machine's own work needs more than the rest.",
            metavar="SIZE",
        ),
    ] = "1GiB",
    host: Annotated[
        str, typer.Option(help="Address to listen on; other nodes must reach it.", metavar="HOST")
    ] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(help="Port to listen on; 0: any free one.", min=0, max=65535, metavar="PORT")
    ] = 0,
    headroom: Annotated[
        float,
        typer.Option(
            help="Fraction of the memory, of this machine or its control group, that is always left free.",
            min=0,
            max=0.95,
            metavar="FRACTION",
        ),
    ] = 0.125,
    within: Within = 20.0,
    foreground: Annotated[
        bool, typer.Option("--foreground", help="Run in this terminal until an interrupt or SIGTERM.")
    ] = False,
) -> None:
    """Lend memory of this machine to clients on other nodes: a daemon runs until it is stopped.

    It releases memory as soon as this machine's own work needs it. At its end, or at SIGTERM, all clients leave it
    first; the store behind has what they wrote.

    [b]Examples[/b]

        ebbflow memory lend --limit 4GiB

        ebbflow memory lend node-1 --host 10.0.0.4 --foreground
    """
    from ebbflow.infra.memory.lending.process import run
    from ebbflow.infra.memory.registry import MemoryRegistry
    from ebbflow.planners.model.numbers import parse_gib
    from ebbflow.tasks.memory import lending

    try:
        size = int(parse_gib(limit) * (1 << 30))
    except OptionError as error:
        raise OptionError(f"--limit {error}") from error
    registry = MemoryRegistry()
    settings = lending.settings_of(
        registry, node or lending.own_name(), host=host, port=port, max_bytes=size, headroom=headroom
    )
    if foreground:
        run(settings, registry, within)
        return
    address = lending.lend(registry, settings, within)
    _say(f"{address.name} lends up to {limit} at {address.host}:{address.port}")
    _say(f"to stop: ebbflow memory stop {address.name}")


@app.command()
def status(json: AsJson = False) -> None:
    """Show the nodes that lend memory and the processes that use it.

    Of reads, the table shows the fraction that nodes have answered. A fallback is a read that a node should have
    answered and the store behind did; an eviction is a slab that a node took back for its own work.

    [b]Example[/b]

        ebbflow memory status
    """
    from ebbflow.infra.memory.registry import MemoryRegistry
    from ebbflow.tasks.memory import lending

    found = lending.status(MemoryRegistry())
    if json:
        print_json(found.to_dict())
    else:
        _print(found)


@app.command()
def stop(
    nodes: Annotated[
        list[str] | None,
        typer.Argument(help="Names of nodes, as ebbflow memory status shows them.", metavar="[NODE]..."),
    ] = None,
    all_: Annotated[bool, typer.Option("--all", help="Stop all that lend memory.")] = False,
    within: Within = 20.0,
) -> None:
    """Drain daemons: their clients leave them, and they end. The store behind has what clients wrote.

    [b]Example[/b]

        ebbflow memory stop node-1
    """
    from ebbflow.infra.memory.registry import MemoryRegistry
    from ebbflow.tasks.memory import lending

    if bool(nodes) == all_:
        raise OptionError(f"either nodes or --all must be given; got {' '.join(nodes or ()) or 'neither'}")
    for one in lending.stop(MemoryRegistry(), nodes or (), within):
        _say(f"{one.name} was gone: {one.problem}" if one.problem else f"{one.name} lends no more")


@app.command()
def gateway(
    store: Annotated[
        str,
        typer.Option(
            help="Directory to serve, DIR or s3://bucket/prefix; memory+ before it: with memory of nodes.",
            metavar="STORE",
        ),
    ],
    host: Annotated[
        str,
        typer.Option(
            help="Address to listen on; Spark's driver and executors must reach it.", metavar="HOST"
        ),
    ] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(help="Port to listen on; 0: any free one.", min=0, max=65535, metavar="PORT")
    ] = 0,
    memory_tier: Annotated[
        Literal["auto", "always"],
        typer.Option(
            help="Use of nodes' memory before a memory+ store: auto, where it is measured to be faster, or always.",
            metavar="WHEN",
        ),
    ] = "auto",
) -> None:
    """Let stock Spark read and write a store, with nodes' memory before it, until an interrupt or SIGTERM.

    It speaks WebHDFS, which Spark knows without any jar. Clients need its key: the settings are in a file that it
    names. What is written is in the store, and in memory where nodes lend some; what was written through it is read
    from there. docs/memory.md explains.

    [b]Examples[/b]

        ebbflow memory gateway --store memory+/mnt/shared/tables

        ebbflow memory gateway --store s3://bucket/tables --host 10.0.0.4
    """
    from ebbflow.tasks.memory import gateway as gateways

    with gateways.gateway(store, host=host, port=port, use=memory_tier, notify=_say) as found:
        _say(f"{store} is served at {found.url}")
        _say(f"Spark's settings, with the key: {found.settings}")
        _say(f"    spark-submit --load-spark-defaults --properties-file {found.settings} job.py")
        _say("    (Spark 3 has no --load-spark-defaults: add its lines to your own file)")
        _say("in Spark:")
        console.print(f'    spark.read.parquet("{found.url}TABLE")', highlight=False, soft_wrap=True)
        console.print(f'    frame.write.parquet("{found.url}TABLE")', highlight=False, soft_wrap=True)
        _say("to stop: Ctrl-C")
        gateways.wait(threading.Event())
        summary = found.tier.summary() if found.tier is not None else ""
    _say(summary or "the gateway has ended")


def _say(text: str) -> None:
    messages.print(text, highlight=False, soft_wrap=True)


def _print(found: "MemoryStatus") -> None:
    from ebbflow.tasks.drawing.wording import bytes_text

    if not found.lenders:
        _say(f"no node lends memory ({found.folder}); start a daemon: ebbflow memory lend")
        return
    table = Table(
        "node", "address", "state", "lent", "ready", "limit", "clients", "reads", "writes", "evictions", "samples",
        "samples found", box=None, header_style="bold",
    )  # fmt: skip
    for one in found.lenders:
        counts = (one.clients, one.reads, one.writes, one.evictions, one.entries)
        sizes = (one.lent_bytes, one.free_bytes, one.max_bytes)
        found_ = f"{one.get_hits / one.gets:.1%}" if one.gets else ""
        shown = [*map(bytes_text, sizes), *map(str, counts), found_] if not one.problem else []
        table.add_row(one.name, f"{one.host}:{one.port}", one.state, *shown)
    console.print(table)
    for one in found.lenders:
        if one.problem:
            _say(_forget(one))
    if not found.clients:
        return
    table = Table(
        "client", "connected", "reads", "by nodes", "fallbacks", "evictions", "nodes lost",
        box=None, header_style="bold",
    )  # fmt: skip
    for client in found.clients:
        rate = "" if client.hit_rate is None else f"{client.hit_rate:.1%}"
        reads = client.peer_reads + client.store_reads
        troubles = (client.fallbacks, client.evictions, client.lost_peers)
        table.add_row(
            client.client, "yes" if client.connected else "no", str(reads), rate, *map(str, troubles)
        )
    console.print()
    console.print(table)


def _forget(one: "LenderStatus") -> str:
    return f"{one.problem}; if it is gone: ebbflow memory stop {one.name}"


def register(app_: typer.Typer) -> None:
    """Add the commands to the command line."""
    app_.add_typer(app, name="memory")
