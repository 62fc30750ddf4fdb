"""``ebbflow capacity start | stop | status``: the capacity loop of a cluster."""

import json as json_module
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

from ebbflow.flows.capacity.options import LEDGER_HELP, START_HELP, Cluster, LedgerAt, options_of
from ebbflow.flows.runs.answers import confirm, fail, print_json
from ebbflow.flows.runs.exit_status import status_of
from ebbflow.flows.runs.options import AsJson, Runner, Yes, duration_option, wants_prefect
from ebbflow.flows.runs.output_pipes import outlive_readers

if TYPE_CHECKING:
    from ebbflow.infra.ledger import Ledger
    from ebbflow.tasks.capacity.loop import LoopEnd
    from ebbflow.tasks.capacity.request import CapacityRequest
    from ebbflow.tasks.capacity.status import ClusterView

_STOP = 30.0  # s to wait for a loop to stop

app = typer.Typer(
    help="The capacity loop: the controller that assigns GPUs to apps and scales node pools.\n\n"
    "Each cluster has one leader. It observes the nodes, grants and preempts leases by a policy, launches and "
    "terminates nodes, and records each decision with its reason in the ledger. Queries and trainings read their "
    "leases there. The loop may be killed at any time: apps keep their leases, and the next loop resumes.\n\n"
    "[b]On this machine[/b]\n\n"
    "    ebbflow local up --gpu 2\n\n"
    "    ebbflow capacity start                    (in a terminal of its own)\n\n"
    "    ebbflow capacity status --watch 1\n\n"
    "    ebbflow capacity stop\n\n"
    "[b]On AWS[/b], where terraform apply was run (docs/fleet.md)\n\n"
    "    ebbflow capacity start --source aws:ebbflow.json --config ebbflow.toml",
    no_args_is_help=True,
    rich_markup_mode="rich",
)
console = Console()
errors = Console(stderr=True)

_CLUSTER, _POLICY, _LOOP = "Cluster", "Policy and quotas", "Loop"  # panels of help


@app.command(help=START_HELP)
def start(
    source: Annotated[
        str,
        typer.Option(
            help="Source of the nodes: local[:NAME] (ebbflow local up), aws[:FILE] (terraform output -json), "
            "or spark://HOST:PORT.",
            metavar="SOURCE",
            rich_help_panel=_CLUSTER,
        ),
    ] = "local",
    cluster: Annotated[
        str,
        typer.Option(help="Name of the cluster in the ledger.", metavar="NAME", rich_help_panel=_CLUSTER),
    ] = "local",
    ledger: Annotated[
        str | None, typer.Option(help=LEDGER_HELP, metavar="URL", rich_help_panel=_CLUSTER)
    ] = None,
    prices: Annotated[
        str | None,
        typer.Option(
            "--on-demand-prices",
            help="TOML file of on-demand prices, for aws. Default: the AWS Price List.",
            metavar="FILE",
            rich_help_panel=_CLUSTER,
        ),
    ] = None,
    policy: Annotated[
        str,
        typer.Option(
            help="Scheduling policy: a name (ebbflow simulate training --help lists them), the name of an installed "
            "package's, or your own as MODULE:NAME. Default: the configuration file's, else rho-bounded.",
            metavar="POLICY",
            rich_help_panel=_POLICY,
        ),
    ] = "",
    policy_option: Annotated[
        list[str] | None,
        typer.Option(
            help="Option of the policy, such as rho=1.5. Repeatable.",
            metavar="NAME=VALUE",
            rich_help_panel=_POLICY,
        ),
    ] = None,
    config: Annotated[
        str | None,
        typer.Option(
            help="Configuration file (ebbflow.toml): quotas, teams, scaling, policy, intervals. "
            "Default: $EBBFLOW_CONFIG; without either, no quotas.",
            metavar="FILE",
            rich_help_panel=_POLICY,
        ),
    ] = None,
    allow_policy: Annotated[
        list[str] | None,
        typer.Option(
            help="Policy that the configuration file names and that may be imported. Repeatable.",
            metavar="MODULE:NAME",
            rich_help_panel=_POLICY,
        ),
    ] = None,
    seed: Annotated[
        int, typer.Option(help="Seed of the policies' random numbers.", rich_help_panel=_POLICY)
    ] = 0,
    lease_duration: Annotated[
        float | None,
        duration_option(
            help="Duration of leases. Default: the configuration file's, else 5m.",
            min=1.0,
            rich_help_panel=_LOOP,
        ),
    ] = None,
    auction_interval: Annotated[
        float | None,
        duration_option(
            help="Maximum time between auctions. Default: the configuration file's, else 1m.",
            min=0.1,
            rich_help_panel=_LOOP,
        ),
    ] = None,
    take_over: Annotated[
        bool,
        typer.Option(
            "--take-over",
            help="Take over from a running leader; its fencing token becomes invalid.",
            rich_help_panel=_LOOP,
        ),
    ] = False,
    metrics: Annotated[
        str,
        typer.Option(
            help="Serve /metrics for Prometheus and /healthz at HOST:PORT, such as 127.0.0.1:9464. Default: not "
            "served.",
            metavar="HOST:PORT",
            rich_help_panel=_LOOP,
        ),
    ] = "",
    quiet: Annotated[
        bool, typer.Option("--quiet", "-q", help="Print no events.", rich_help_panel=_LOOP)
    ] = False,
    runner: Annotated[
        Runner,
        typer.Option(
            help="Recording of the loop as a flow run with events: prefect, plain (none), or auto, if a server is "
            "configured.",
            metavar="HOW",
            rich_help_panel=_LOOP,
        ),
    ] = Runner.auto,
) -> None:
    from ebbflow.infra.errors import InfraError
    from ebbflow.tasks.capacity.own_policies import checked_names
    from ebbflow.tasks.capacity.request import CapacityRequest

    request = CapacityRequest(
        ledger,
        cluster,
        source,
        policy,
        options_of(policy_option or []),
        config,
        lease_duration,
        auction_interval,
        take_over,
        seed,
        prices,
        metrics,
        # what is typed here may be imported; what a file names only with the option
        checked_names([*(allow_policy or []), *([policy] if ":" in policy else [])]),
    )
    prefect = wants_prefect(runner)
    stop = threading.Event()
    try:
        end = _until(stop, lambda: _lead(request, stop, quiet, prefect))
    except InfraError as error:
        fail(str(error), status_of(error), type(error).__name__)
    if not quiet:
        from ebbflow.flows.capacity.terminal import loop_latency

        errors.print(f"the loop ended: {escape(end.reason)}{loop_latency(end)}", highlight=False)


def _until(stop: threading.Event, work: "Callable[[], LoopEnd]") -> "LoopEnd":
    """Do ``work`` in the main thread; an interrupt lets it end in order, a second one ends it at once."""
    import signal

    def handler(number: int, frame: object) -> None:
        if stop.is_set():
            raise KeyboardInterrupt
        stop.set()

    before = {number: signal.signal(number, handler) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        return work()
    finally:
        for number, former in before.items():
            signal.signal(number, former)


def _lead(request: "CapacityRequest", stop: threading.Event, quiet: bool, prefect: bool) -> "LoopEnd":
    outlive_readers()
    from ebbflow.flows.capacity.terminal import ConsoleLoopListener

    listener = None if quiet else ConsoleLoopListener(errors)
    if prefect:
        from ebbflow.flows.capacity.flow import run_attached
        from ebbflow.flows.runs.command import quiet_prefect, start_temporary_server

        quiet_prefect()
        start_temporary_server()
        return run_attached(request, stop, listener)
    from ebbflow.tasks.capacity.node_sources import opened_loop

    with opened_loop(request, listener) as opened:
        if not quiet:
            errors.print(
                f"cluster {escape(request.cluster)}, nodes from {escape(request.source)}, "
                f"{escape(opened.settings.policy.name)}, ledger {escape(str(opened.ledger.address))}; "
                "Ctrl-C stops it",
                highlight=False,
                soft_wrap=True,
            )
        return opened.loop.run(stop, take_over=request.take_over)


_STATUS_HELP = """Show a cluster: the capacity loop, nodes, apps, leases and last decisions. Read-only.

[b]Examples[/b]

    ebbflow capacity status

    ebbflow capacity status --watch 1

    ebbflow capacity status --json | jq '.apps[] | {id, phase, rho, gpus}'

rho is finish-time fairness: expected time here over the time alone on an even share; 1 or less is fair.
Exit status: 0 a leader is elected, 1 no leader, 4 the ledger does not respond.
"""


@app.command(help=_STATUS_HELP)
def status(
    cluster: Cluster = "local",
    ledger: LedgerAt = None,
    watch: Annotated[
        float | None,
        duration_option(help="Interval between refreshes, until Ctrl-C. Default: show once.", min=0.2),
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="Show all rows of long tables.")] = False,
    json: AsJson = False,
) -> None:
    from ebbflow.infra.errors import LedgerError
    from ebbflow.tasks.capacity.status import look

    try:
        with _opened(ledger, cluster) as found:
            if watch is not None:
                _watch(lambda: look(found), watch, json, everything, found.clock.sleep)
                return
            view = look(found)
    except LedgerError as error:
        fail(str(error), status_of(error), type(error).__name__)
    _show(view, json, everything)
    if not view.leads:
        raise typer.Exit(1)


def _show(view: "ClusterView", json: bool, everything: bool) -> None:
    from ebbflow.flows.capacity.terminal import cluster_view

    if json:
        typer.echo(json_module.dumps(view.to_json()))
    else:
        console.print(cluster_view(view, everything=everything))


def _watch(
    look: "Callable[[], ClusterView]",
    seconds: float,
    json: bool,
    everything: bool,
    sleep: Callable[[float], None],
) -> None:
    from rich.live import Live
    from rich.text import Text

    from ebbflow.flows.capacity.terminal import cluster_view
    from ebbflow.infra.errors import LedgerError

    def shown() -> Any:
        try:
            return cluster_view(look(), everything=everything)
        except LedgerError as error:  # an outage does not end a watch
            return Text(str(error))

    try:
        if json or not console.is_terminal:
            while True:
                try:
                    _show(look(), json, everything)
                except LedgerError as error:
                    typer.echo(json_module.dumps({"error": str(error)}) if json else str(error))
                sleep(seconds)
        with Live(console=console, auto_refresh=False, screen=True) as live:
            while True:
                live.update(shown(), refresh=True)
                sleep(seconds)
    except KeyboardInterrupt:
        return


_STOP_HELP = """Request the capacity loop of a cluster to stop, wherever it runs. Apps keep their leases.

[b]Example[/b]

    ebbflow capacity stop --cluster local

    ebbflow capacity stop --yes                (in a script)

Exit status: 0 the loop stopped or there was no leader, 1 it did not stop within the timeout, 4 no ledger.
"""


@app.command(help=_STOP_HELP)
def stop(
    cluster: Cluster = "local",
    ledger: LedgerAt = None,
    timeout: Annotated[
        float, duration_option(help="Time to wait until the loop has stopped.", shown=_STOP)
    ] = _STOP,
    yes: Yes = False,
    json: AsJson = False,
) -> None:
    from ebbflow.infra.errors import LedgerError
    from ebbflow.tasks.apps.loop_report import STOP, stop_request
    from ebbflow.tasks.capacity.leadership import leads
    from ebbflow.tasks.capacity.status import wait_for_end

    try:
        with _opened(ledger, cluster) as found:
            leader = found.leader()
            if leader is None or not leads(found, found.clock):
                if json:
                    print_json({"cluster": cluster, "stopped": None})
                else:
                    errors.print(f"no leader in cluster {escape(cluster)}", highlight=False)
                return
            confirm(f"Stop the capacity loop {leader.holder} of cluster {cluster}?", yes)
            found.report(STOP, stop_request(leader.token, found.clock.now()))
            if not wait_for_end(found, leader.token, timeout):
                fail(
                    f"{leader.holder} has not ended within {timeout:g} s, though it polls the ledger several times a "
                    "second: check that its process is alive; its leader lease expires by itself"
                )
            if json:
                print_json({"cluster": cluster, "stopped": leader.holder})
            else:
                errors.print(f"{escape(leader.holder)} stopped and is no longer the leader", highlight=False)
    except LedgerError as error:
        fail(str(error), status_of(error), type(error).__name__)


def _opened(url: str | None, cluster: str) -> "Ledger":
    from ebbflow.infra.ledger import Ledger

    return Ledger.open(url, cluster=cluster, create=False)


def register(top: typer.Typer) -> None:
    """Add the group to the command line."""
    top.add_typer(app, name="capacity")
