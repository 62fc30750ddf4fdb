"""``ebbflow cluster``: the local cluster to play with."""

import time
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from ebbflow.planners.errors import OptionError

app = typer.Typer(
    help="A local Spark cluster for fault injection (kill or interrupt workers).\n\n"
    "[b]Examples[/b]\n\n"
    "    ebbflow cluster up --workers 3\n\n"
    "    ebbflow query report.sql --tables data/ --master cluster\n\n"
    "    ebbflow cluster notice worker-1 --seconds 20    (a spot notice)\n\n"
    "    ebbflow cluster kill worker-2                   (without notice)\n\n"
    "    ebbflow cluster add\n\n"
    "    ebbflow cluster down",
    no_args_is_help=True,
    rich_markup_mode="rich",
)
console = Console()

Name = Annotated[str, typer.Option(help="Name of the local cluster.")]
NodeId = Annotated[str, typer.Argument(help="Worker ID, as ebbflow cluster status shows it.", metavar="ID")]


def resolve_master(master: str) -> str:
    """Return the Spark master that ``cluster`` or ``cluster:NAME`` stands for; other values as they are."""
    word, _, name = master.partition(":")
    if word != "cluster":
        return master
    from ebbflow.infra.spark.cluster.cluster import LocalSparkCluster

    return LocalSparkCluster.attach(name or "default").master_url


@app.command()
def up(
    workers: Annotated[
        int, typer.Option(help="Number of workers; each is a process that simulates a Spot node.")
    ] = 3,
    cores: Annotated[int, typer.Option(help="Cores of each worker.")] = 1,
    memory: Annotated[str, typer.Option(help="Memory of each worker, such as 2g.")] = "2g",
    cpu_limit: Annotated[
        bool | None,
        typer.Option(help="Hold each worker to a fixed CPU share (needs cgroups). Default: where possible."),
    ] = None,
    name: Name = "default",
) -> None:
    """Start a master and workers on loopback; they run until cluster down.

    [b]Example[/b]

        ebbflow cluster up --workers 4 --cores 1 --memory 2g
    """
    from ebbflow.infra.spark.cluster.cluster import LocalSparkCluster

    with console.status("starting master and workers"):
        LocalSparkCluster.start(
            name, workers=workers, cores=cores, memory=memory, cpu_limit=cpu_limit, detached=True
        )
    status(name)
    console.print(
        "\nuse it: ebbflow query SQL --tables DIR --master cluster     stop it: ebbflow cluster down"
    )


@app.command()
def status(name: Name = "default") -> None:
    """Show the workers: alive, with a notice, or dead.

    [b]Example[/b]

        ebbflow cluster status
    """
    from ebbflow.infra.spark.cluster.cluster import LocalSparkCluster

    cluster = LocalSparkCluster.attach(name)
    seen = cluster.status()
    console.print(
        f"cluster {seen.name}: {seen.master_url}, page {seen.master_ui}, logs {seen.directory}",
        soft_wrap=True,
    )
    console.print(f"CPU: {seen.cap}")
    console.print(f"other applications: spark-submit --properties-file {cluster.properties}", soft_wrap=True)
    table = Table(
        "node", "host", "cores", "in use", "memory", "state", "terminates in", box=None, header_style="bold"
    )
    for node in seen.nodes:
        left = "" if node.deadline is None else f"{max(node.deadline - time.time(), 0):.0f} s"
        table.add_row(
            node.id,
            node.host,
            str(node.cores),
            str(node.cores_used),
            f"{node.memory:.1f} GiB",
            node.state,
            left,
        )
    console.print(table)


@app.command()
def add(name: Name = "default") -> None:
    """Start one more worker.

    [b]Example[/b]

        ebbflow cluster add
    """
    from ebbflow.infra.spark.cluster.cluster import LocalSparkCluster

    with console.status("starting a worker"):
        node = LocalSparkCluster.attach(name).add()
    console.print(f"{node} has joined")


@app.command()
def notice(
    node: NodeId,
    seconds: Annotated[
        float, typer.Option(help="Seconds from the notice to termination; EC2 gives 120.")
    ] = 120.0,
    name: Name = "default",
) -> None:
    """Give a worker notice, as a spot market does: it drains, and is killed at the deadline.

    [b]Example[/b]

        ebbflow cluster notice worker-1 --seconds 20
    """
    from ebbflow.infra.spark.cluster.cluster import LocalSparkCluster

    if seconds < 0:
        raise OptionError(f"seconds must be >= 0; got {seconds}")
    LocalSparkCluster.attach(name).notice(node, seconds)
    console.print(f"{node} terminates in {seconds:g} s")


@app.command()
def kill(node: NodeId, name: Name = "default") -> None:
    """Kill a worker without notice: SIGKILL to it and its executors.

    [b]Example[/b]

        ebbflow cluster kill worker-2
    """
    from ebbflow.infra.spark.cluster.cluster import LocalSparkCluster

    gone = LocalSparkCluster.attach(name).kill(node)
    console.print(f"{node} is terminated" if gone else f"{node} was terminated already")


@app.command()
def down(name: Name = "default") -> None:
    """Stop the cluster; no process is left.

    [b]Example[/b]

        ebbflow cluster down
    """
    from ebbflow.infra.spark.cluster.cluster import LocalSparkCluster

    LocalSparkCluster.attach(name).stop()
    console.print(f"cluster {name} is down")
