"""``ebbflow local``: Spark workers and GPU nodes of this machine."""

from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from ebbflow.flows.runs.answers import confirm, print_json
from ebbflow.flows.runs.options import AsJson, Yes, duration_option
from ebbflow.planners.errors import OptionError

if TYPE_CHECKING:
    from ebbflow.infra.local_fleet import LocalFleet

app = typer.Typer(
    help="Spark workers and GPU nodes of this machine, with fault injection.\n\n"
    "Queries run on the Spark workers, trainings on the GPU nodes. Nodes have simulated prices, get "
    "interruption notices, are killed and are replaced by their pool.\n\n"
    "[b]Examples[/b]\n\n"
    "    ebbflow local up --spark 3 --gpu 2 --slots 2\n\n"
    "    ebbflow query report.sql --tables data/ --master local-fleet\n\n"
    "    ebbflow local notice spark-1 --lead-time 20s      (an interruption notice)\n\n"
    "    ebbflow local kill gpu-2                          (without notice)\n\n"
    "    ebbflow local add gpu\n\n"
    "    ebbflow local inject 20s:notice:gpu:10s 40s:kill:spark\n\n"
    "    ebbflow local down",
    no_args_is_help=True,
    rich_markup_mode="rich",
)
console = Console()
messages = Console(stderr=True)

DEFAULT = "local"
Name = Annotated[str, typer.Option(help="Name of the local fleet.", metavar="NAME")]
NodeId = Annotated[str, typer.Argument(help="Node ID, as ebbflow local status shows it.", metavar="NODE")]
PoolName = Annotated[str, typer.Argument(help="Pool name: spark or gpu.", metavar="POOL")]
_SPARK, _GPU, _AGGREGATORS, _BOTH = "Spark workers", "GPU nodes", "Aggregators", "All nodes"
_UP_S = 120.0  # for the first nodes, beside their provision time


def _fleet(name: str) -> "LocalFleet":
    from ebbflow.infra.local_fleet import LocalFleet
    from ebbflow.planners.hazard import hazard

    return LocalFleet.attach(name, hazard=hazard)


def _option(name: str) -> str:
    return "" if name == DEFAULT else f" --name {name}"


def _say(text: str) -> None:
    messages.print(text, highlight=False, soft_wrap=True)


@app.command()
def up(
    spark: Annotated[
        int,
        typer.Option(
            help="Initial number of Spark workers; 0: no Spark master.",
            min=0,
            rich_help_panel=_SPARK,
            metavar="N",
        ),
    ] = 0,
    cores: Annotated[
        int, typer.Option(help="CPU cores of each Spark worker.", min=1, rich_help_panel=_SPARK, metavar="N")
    ] = 1,
    memory: Annotated[
        str, typer.Option(help="Memory of each Spark worker.", rich_help_panel=_SPARK, metavar="SIZE")
    ] = "2g",
    gpu: Annotated[
        int, typer.Option(help="Initial number of GPU nodes.", min=0, rich_help_panel=_GPU, metavar="N")
    ] = 0,
    slots: Annotated[
        int,
        typer.Option(
            help="Slots of each GPU node: one GPU each where the machine has enough, else one CPU core each.",
            min=1,
            rich_help_panel=_GPU,
            metavar="N",
        ),
    ] = 2,
    aggregators: Annotated[
        int,
        typer.Option(
            help="Initial number of shared aggregators.", rich_help_panel=_AGGREGATORS, min=0, metavar="N"
        ),
    ] = 0,
    aggregation_cluster: Annotated[
        str,
        typer.Option(
            help="Cluster of aggregators. Default: no aggregators.",
            rich_help_panel=_AGGREGATORS,
            metavar="NAME",
        ),
    ] = "",
    max_nodes: Annotated[
        int,
        typer.Option(help="Maximum number of nodes of each pool.", min=1, rich_help_panel=_BOTH, metavar="N"),
    ] = 8,
    price: Annotated[
        float,
        typer.Option(
            help="Simulated price of each node in $/h.", min=0, rich_help_panel=_BOTH, metavar="PRICE"
        ),
    ] = 0.0,
    provision_time: Annotated[
        float,
        duration_option(
            help="Simulated time from the request of a node to its start.", shown=0.0, rich_help_panel=_BOTH
        ),
    ] = 0.0,
    cpus_per_slot: Annotated[
        float | None,
        typer.Option(
            help="CPU cores of this machine that back each core of a Spark worker and each slot of a GPU node "
            "(needs control groups). Default: an equal share for Spark workers where control groups are "
            "available, no limit for slots.",
            rich_help_panel=_BOTH,
            metavar="CPUS",
        ),
    ] = None,
    network: Annotated[
        str | None,
        typer.Option(
            help="Bandwidth of each node's link, such as 200mbit: nodes are then in network namespaces on a bridge "
            "(needs root and the extra local-network). Two rates, such as 200mbit,50mbit, are two links. Default: "
            "loopback, without limit.",
            rich_help_panel=_BOTH,
            metavar="RATES",
        ),
    ] = None,
    node_memory: Annotated[
        str | None,
        typer.Option(
            help="Maximum memory of all processes of each node together, such as 2500m; beyond it the kernel kills "
            "one of them (needs control groups). Default: no limit.",
            rich_help_panel=_BOTH,
            metavar="SIZE",
        ),
    ] = None,
    memory_lend: Annotated[
        str | None,
        typer.Option(
            help="Maximum memory that each node lends to other nodes (docs/memory.md). Default: none.",
            rich_help_panel=_BOTH,
            metavar="SIZE",
        ),
    ] = None,
    name: Name = DEFAULT,
) -> None:
    """Start Spark workers and GPU nodes of this machine. They run until local down; lost ones are replaced.

    [b]Examples[/b]

        ebbflow local up --spark 3 --memory 2g

        ebbflow local up --spark 2 --gpu 2 --slots 2 --price 0.5

        ebbflow local up --spark 3 --network 200mbit --node-memory 2500m

        ebbflow local up --spark 3 --memory-lend 512MiB
    """
    from ebbflow.flows.nodes.pools import pools_of
    from ebbflow.flows.nodes.status import print_status, status_of_fleet
    from ebbflow.infra.local_fleet import LocalFleet
    from ebbflow.infra.machine.network.plan import parse_rates
    from ebbflow.planners.hazard import hazard

    rates = parse_rates(network) if network is not None else ()
    if spark + gpu == 0 and not aggregation_cluster:
        raise OptionError("at least one of --spark and --gpu must be above 0; got 0 and 0")
    if aggregators and not aggregation_cluster:
        raise OptionError(f"--aggregators must come with --aggregation-cluster; got {aggregators}")
    pools = pools_of(
        spark,
        gpu,
        aggregators,
        cores=cores,
        memory=memory,
        slots=slots,
        max_nodes=max_nodes,
        price=price,
        provision_time=provision_time,
        cpus_per_slot=cpus_per_slot,
        aggregation_cluster=aggregation_cluster,
        memory_lend=memory_lend,
        node_memory=node_memory,
    )
    with messages.status("starting nodes"):
        fleet = LocalFleet.start(
            pools, name, stay=True, network=rates, hazard=hazard, wait=_UP_S + provision_time
        )
    print_status(status_of_fleet(fleet), console)
    if spark:
        master = "local-fleet" if name == DEFAULT else f"local-fleet:{name}"
        _say(f"to query: ebbflow query SQL --tables DIR --master {master}")
    _say(f"to stop: ebbflow local down{_option(name)}")


@app.command()
def status(name: Name = DEFAULT, as_json: AsJson = False) -> None:
    """Show pools and nodes of a local fleet, and the apps that run on them.

    [b]Example[/b]

        ebbflow local status
    """
    from ebbflow.flows.nodes.status import print_status, status_of_fleet

    seen = status_of_fleet(_fleet(name))
    if as_json:
        print_json(seen.to_dict())
    else:
        print_status(seen, console)


@app.command("list")
def list_(as_json: AsJson = False) -> None:
    """Show the local fleets that are up.

    [b]Example[/b]

        ebbflow local list
    """
    from ebbflow.infra.local_fleet import list_fleets

    found = [
        {
            "name": state.name,
            "nodes": {pool.name: len(state.seen(pool)) for pool in state.pools},
            "owner_pid": None if state.owner is None else state.owner.pid,
        }
        for state in list_fleets()
    ]
    if as_json:
        print_json(found)
        return
    table = Table("fleet", "nodes", "ends with process", box=None, header_style="bold")
    for fleet in found:
        nodes = ", ".join(f"{count} {pool}" for pool, count in fleet["nodes"].items())
        table.add_row(fleet["name"], nodes, str(fleet["owner_pid"] or ""))
    console.print(table)


@app.command()
def add(
    pool: PoolName,
    count: Annotated[int, typer.Option(help="Number of nodes to add.", min=1, metavar="N")] = 1,
    name: Name = DEFAULT,
) -> None:
    """Add nodes to a pool, up to its maximum. The command does not wait for them to start.

    [b]Example[/b]

        ebbflow local add gpu
    """
    planned = _fleet(name).add(pool, count)
    _say(f"pool {pool}: desired capacity {planned} nodes; see: ebbflow local status{_option(name)}")


@app.command()
def notice(
    node: NodeId,
    lead_time: Annotated[
        float, duration_option(help="Time from the notice to the termination; EC2 gives 2m.", shown=120.0)
    ] = 120.0,
    recommend: Annotated[
        bool,
        typer.Option("--recommend", help="Send only a rebalance recommendation; the node is not terminated."),
    ] = False,
    name: Name = DEFAULT,
) -> None:
    """Give a node an interruption notice: apps on it are notified, and the node then terminates.

    Spark decommissions a worker; a training saves and leaves. The pool starts a replacement node.

    [b]Example[/b]

        ebbflow local notice gpu-1 --lead-time 20s
    """
    _fleet(name).notice(node, lead_time, "rebalance" if recommend else "interruption")
    what = "rebalance recommended, may terminate" if recommend else "interruption pending, terminates"
    _say(f"{node}: {what} in {lead_time:g} s")


@app.command()
def kill(node: NodeId, name: Name = DEFAULT) -> None:
    """Kill a node without notice: SIGKILL to all its processes, those of apps included.

    [b]Example[/b]

        ebbflow local kill gpu-2
    """
    _fleet(name).kill(node)
    _say(f"{node} is terminated")


@app.command()
def pause(node: NodeId, name: Name = DEFAULT) -> None:
    """Pause all processes of a node (SIGSTOP), as when its machine hangs.

    [b]Example[/b]

        ebbflow local pause gpu-1
    """
    _fleet(name).pause(node)
    _say(f"{node} is paused (SIGSTOP); to resume: ebbflow local resume {node}{_option(name)}")


@app.command()
def resume(node: NodeId, name: Name = DEFAULT) -> None:
    """Resume a paused node (SIGCONT).

    [b]Example[/b]

        ebbflow local resume gpu-1
    """
    _fleet(name).resume(node)
    _say(f"{node} is resumed (SIGCONT)")


@app.command()
def evict(
    app_id: Annotated[str, typer.Argument(help="App ID, as ebbflow local status shows it.", metavar="APP")],
    node: NodeId,
    name: Name = DEFAULT,
) -> None:
    """Kill the processes of one app on one node; the node and other apps keep running.

    [b]Example[/b]

        ebbflow local evict digits gpu-1
    """
    fleet = _fleet(name)
    processes = sum(len(one.pids) for one in fleet.occupants(node) if one.app == app_id)
    fleet.evict(app_id, node)
    _say(f"{processes} processes of {app_id} on {node} were terminated")


@app.command()
def inject(
    faults: Annotated[
        list[str],
        typer.Argument(
            help="Faults, TIME:VERB:TARGET[:ARGUMENT]: 20s:notice:gpu-2:5s, 20s:recommend:gpu-1, 30s:kill:spark-1, "
            "40s:pause:gpu-1, 50s:resume:gpu-1, 60s:add:gpu:2, 60s:remove:gpu:1, 70s:outage:gpu:30s (the pool gets "
            "no node for that duration). A pool as target of a node's fault means its oldest node.",
            metavar="FAULT",
        ),
    ],
    name: Name = DEFAULT,
) -> None:
    """Inject faults at set times from now on; the command ends with the last one.

    [b]Example[/b]

        ebbflow local inject 20s:notice:gpu:10s 40s:kill:spark
    """
    from ebbflow.infra.clock import SystemClock
    from ebbflow.tasks.nodes import FAULTS, schedule_of

    script = [FAULTS.parse(text) for text in faults]
    schedule = schedule_of(script, _fleet(name), _say, SystemClock())
    schedule.begin()
    try:
        schedule.wait()
    finally:
        schedule.end()


@app.command()
def down(name: Name = DEFAULT, yes: Yes = False) -> None:
    """Stop all nodes and everything that runs on them. Asks first when apps run there.

    [b]Example[/b]

        ebbflow local down
    """
    from ebbflow.flows.nodes.status import running_apps

    fleet = _fleet(name)
    if not yes and (apps := running_apps(fleet)):
        confirm(f"{', '.join(apps)} run on the nodes of the fleet {name}; stop them?", yes)
    fleet.down()
    _say(f"the fleet {name} is down")


def register(top: typer.Typer) -> None:
    """Add the group to the command line."""
    top.add_typer(app, name="local")
