"""``ebbflow nodes``: elastic nodes of this machine, for queries and trainings at once."""

import time
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from ebbflow.infra.local_fleet import LocalFleet, LocalPool, list_fleets
from ebbflow.infra.local_fleet.view import NodeView
from ebbflow.infra.machine import devices
from ebbflow.planners.errors import OptionError
from ebbflow.planners.hazard import hazard

app = typer.Typer(
    help="Simulated node pools on this machine: Spark workers for queries, GPU nodes for "
    "trainings.\n\n"
    "[b]Examples[/b]\n\n"
    "    ebbflow nodes up --spark 2 --gpu 2 --slots 2\n\n"
    "    ebbflow capacity start --source local               (shares the GPUs out among apps)\n\n"
    "    ebbflow nodes notice gpu-1 --seconds 20           (a spot notice)\n\n"
    "    ebbflow nodes kill spark-2                        (without notice; its pool starts another)\n\n"
    "    ebbflow nodes add gpu\n\n"
    "    ebbflow nodes play 20s:notice:gpu:10s 40s:kill:spark\n\n"
    "    ebbflow nodes down",
    no_args_is_help=True,
    rich_markup_mode="rich",
)
console = Console()

Name = Annotated[str, typer.Option(help="Name of the local fleet.")]
NodeId = Annotated[str, typer.Argument(help="Node ID, as ebbflow nodes status shows it.", metavar="ID")]
PoolName = Annotated[str, typer.Argument(help="Pool name, as ebbflow nodes status shows it.", metavar="POOL")]


@app.command()
def up(
    spark: Annotated[int, typer.Option(help="Initial number of Spark workers; 0: no Spark cluster.")] = 0,
    gpu: Annotated[int, typer.Option(help="Initial number of GPU nodes.")] = 0,
    slots: Annotated[
        int,
        typer.Option(help="Slots of each GPU node: one GPU each where the machine has any, else CPU cores."),
    ] = 2,
    cores: Annotated[int, typer.Option(help="Cores of each Spark worker.")] = 1,
    memory: Annotated[str, typer.Option(help="Memory of each Spark worker, such as 2g.")] = "2g",
    most: Annotated[int, typer.Option(help="Maximum number of nodes of each pool.")] = 8,
    price: Annotated[float, typer.Option(help="Simulated price of each node in $/h.")] = 0.0,
    boot: Annotated[float, typer.Option(help="Simulated boot delay of each node in seconds.")] = 0.0,
    cpus: Annotated[
        float | None, typer.Option(help="CPU cores that back a slot or core (needs cgroups). Default: any.")
    ] = None,
    name: Name = "local",
) -> None:
    """Start nodes; they run, and lost ones are replaced, until nodes down.

    [b]Example[/b]

        ebbflow nodes up --spark 2 --gpu 2 --slots 2
    """
    from ebbflow.infra.spark.cluster.options import parse_memory

    if spark < 0 or gpu < 0 or spark + gpu == 0:
        raise OptionError(f"at least one of --spark and --gpu must be above 0; got {spark} and {gpu}")
    pools = []
    if spark:
        gib = parse_memory(memory) / 1024
        pools.append(
            LocalPool(
                "spark",
                "spark",
                cores,
                gib,
                initial=spark,
                most=max(most, spark),
                price=price,
                boot=boot,
                cpus=cpus,
            )
        )
    if gpu:
        pools.append(
            LocalPool(
                "gpu",
                "gpu",
                cores=slots,
                slots=slots,
                initial=gpu,
                most=max(most, gpu),
                price=price,
                boot=boot,
                cpus=cpus,
            )
        )
    with console.status("starting nodes"):
        LocalFleet.start(pools, name, stay=True, hazard=hazard, wait=120.0 + boot)
    status(name)
    option = "" if name == "local" else f" --name {name}"
    if spark:
        console.print(f"\nquery them: ebbflow query SQL --tables DIR --master cluster:{name}")
    console.print(f"stop them: ebbflow nodes down{option}")


@app.command()
def status(name: Name = "local") -> None:
    """Show pools and nodes, and which apps run on them.

    [b]Example[/b]

        ebbflow nodes status
    """
    fleet = LocalFleet.attach(name, hazard=hazard)
    seen, book, nodes = fleet.observe(), fleet.book, fleet.view()
    master = f", Spark master {book.spark.master_url}" if book.spark is not None else ""
    console.print(f"fleet {book.name}, epoch {seen.epoch}{master}", soft_wrap=True)
    if any(pool.kind == "gpu" for pool in book.pools):
        console.print(f"slots are GPUs {', '.join(book.gpus)}" if book.gpus else _processors())
    console.print(f"${fleet.dollars():.4f} so far, at simulated prices")
    table = Table("pool", "planned", "there", "at most", "price", "", box=None, header_style="bold")
    for pool in seen.pools:
        price = next(one.price for one in fleet.offers(pool.name))
        table.add_row(
            pool.name,
            str(pool.planned),
            str(len(pool.nodes)),
            str(pool.max_nodes),
            f"${price:g}/h",
            pool.short_why,
        )
    console.print(table)
    table = Table("node", "state", "cores", "slots", "terminates in", "runs", box=None, header_style="bold")
    now = time.time()
    for node in nodes:
        left = "" if node.deadline is None else f"{max(node.deadline - now, 0):.0f} s"
        table.add_row(node.id, node.state, str(node.cores), str(node.slots or ""), left, _running(node))
    console.print(table)


@app.command("list")
def list_() -> None:
    """Show the fleets of this machine that are up.

    [b]Example[/b]

        ebbflow nodes list
    """
    found = list_fleets()
    for book in found:
        there = ", ".join(f"{len(book.seen(pool))} {pool.name}" for pool in book.pools)
        console.print(f"{book.name}: {there}{'' if book.owner is None else f', of process {book.owner.pid}'}")
    if not found:
        console.print("none; start one: ebbflow nodes up --gpu 2")


@app.command()
def add(
    pool: PoolName,
    count: Annotated[int, typer.Option(help="Number of nodes to add.", min=1)] = 1,
    name: Name = "local",
) -> None:
    """Plan more nodes in a pool, up to its most; they come up by themselves.

    [b]Example[/b]

        ebbflow nodes add gpu
    """
    planned = LocalFleet.attach(name).add(pool, count)
    console.print(f"{planned} nodes are planned in {pool}; see: ebbflow nodes status")


@app.command()
def notice(
    node: NodeId,
    seconds: Annotated[
        float, typer.Option(help="Seconds from the notice to termination; EC2 gives 120.")
    ] = 120.0,
    advice: Annotated[
        bool, typer.Option("--advice", help="Send only a rebalance recommendation; the node stays.")
    ] = False,
    name: Name = "local",
) -> None:
    """Give a node notice, as a spot market does: what runs there is told, and it is gone at the deadline.

    [b]Example[/b]

        ebbflow nodes notice gpu-1 --seconds 20
    """
    LocalFleet.attach(name).notice(node, seconds, "rebalance" if advice else "interruption")
    console.print(f"{node} {'may terminate' if advice else 'terminates'} in {seconds:g} s")


@app.command()
def kill(node: NodeId, name: Name = "local") -> None:
    """Take a node away without notice: SIGKILL to every process of every app on it.

    [b]Example[/b]

        ebbflow nodes kill gpu-2
    """
    LocalFleet.attach(name).kill(node)
    console.print(f"{node} is terminated")


@app.command()
def freeze(node: NodeId, name: Name = "local") -> None:
    """Pause all processes of a node (SIGSTOP), as when its machine hangs.

    [b]Example[/b]

        ebbflow nodes freeze gpu-1
    """
    LocalFleet.attach(name).freeze(node)
    console.print(f"{node} is paused (SIGSTOP); to resume: ebbflow nodes thaw {node}")


@app.command()
def thaw(node: NodeId, name: Name = "local") -> None:
    """Resume a paused node (SIGCONT).

    [b]Example[/b]

        ebbflow nodes thaw gpu-1
    """
    LocalFleet.attach(name).thaw(node)
    console.print(f"{node} resumed (SIGCONT)")


@app.command()
def evict(
    app_id: Annotated[str, typer.Argument(help="App ID, as ebbflow nodes status shows it.", metavar="APP")],
    node: NodeId,
    name: Name = "local",
) -> None:
    """Kill the processes of one app on one node; the node and other apps keep running.

    [b]Example[/b]

        ebbflow nodes evict digits gpu-1
    """
    fleet = LocalFleet.attach(name)
    before = [one for one in fleet.occupants(node) if one.app == app_id]
    fleet.evict(app_id, node)
    processes = sum(len(one.pids) for one in before)
    console.print(
        f"{processes} processes of {app_id} on {node} were terminated" if before else "no processes ran there"
    )


@app.command()
def play(
    faults: Annotated[
        list[str],
        typer.Argument(
            help="Scripted faults, such as 20s:notice:gpu-2:5s, 30s:kill:spark-1, 40s:freeze:gpu,"
            " 50s:thaw:gpu, 60s:add:gpu:2 or "
            "70s:shut:gpu:30s (a simulated capacity outage of that duration); a pool name"
            " means the oldest node of the pool.",
            metavar="FAULT",
        ),
    ],
    name: Name = "local",
) -> None:
    """Let things happen to the nodes at set times from now on.

    [b]Example[/b]

        ebbflow nodes play 20s:notice:gpu:10s 40s:kill:spark
    """
    from ebbflow.infra.clock import SystemClock
    from ebbflow.tasks.nodes import FAULTS, schedule_of

    script = [FAULTS.parse(text) for text in faults]
    schedule = schedule_of(script, LocalFleet.attach(name), console.print, SystemClock())
    schedule.begin()
    try:
        schedule.wait()
    finally:
        schedule.end()


@app.command()
def down(name: Name = "local") -> None:
    """End all nodes and everything that runs on them.

    [b]Example[/b]

        ebbflow nodes down
    """
    LocalFleet.attach(name).down()
    console.print(f"the fleet {name} is down")


def _processors() -> str:
    there = len(devices.visible())
    return "slots are CPU cores" + (f": this machine's {there} GPUs are too few for them" if there else "")


def _running(node: NodeView) -> str:
    return ", ".join(
        f"{one.app} on {', '.join(map(str, one.slots))}" if one.slots else one.app for one in node.occupants
    )
