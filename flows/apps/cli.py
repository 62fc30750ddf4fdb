"""``ebbflow apps list | show | logs | cancel``: the queries, trainings and tuning runs of a cluster."""

from collections.abc import Iterator
from contextlib import contextmanager
from math import inf
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer
from rich.console import Console
from rich.markup import escape

from ebbflow.flows.capacity.options import Cluster, LedgerAt
from ebbflow.flows.runs.answers import confirm, fail, print_json
from ebbflow.flows.runs.exit_status import status_of
from ebbflow.flows.runs.options import AsJson, Yes, duration_option

if TYPE_CHECKING:
    from ebbflow.infra.ledger import Ledger
    from ebbflow.planners.model.ledger import AppRecord
    from ebbflow.tasks.capacity.status import AppView

app = typer.Typer(
    help="The apps of a cluster: queries, trainings and tuning runs that hold or request resources.\n\n"
    "[b]Examples[/b]\n\n"
    "    ebbflow apps list\n\n"
    "    ebbflow apps show digits\n\n"
    "    ebbflow apps logs digits --follow\n\n"
    "    ebbflow apps cancel digits\n\n"
    "Exit status: 0 done, 1 failed or rejected, 2 usage error, 4 the ledger does not respond.",
    no_args_is_help=True,
    rich_markup_mode="rich",
)
console = Console()
errors = Console(stderr=True)

_ENDED = 1000  # apps that are over, of which list --all tells
_DECISIONS = 20  # that show tells
_TAIL = 200  # lines of each log
_POLL = 0.5  # s between looks
_WAIT = 60.0  # s for an app to end

AppId = Annotated[str, typer.Argument(help="ID of the app, as ebbflow apps list shows it.", metavar="ID")]


@app.command("list")
def list_apps(
    cluster: Cluster = "local",
    ledger: LedgerAt = None,
    everything: Annotated[bool, typer.Option("--all", help="Show apps that are over, too.")] = False,
    json: AsJson = False,
) -> None:
    """List the apps of a cluster: kind, team, state, GPUs, rho, and since when they are registered.

    [b]Examples[/b]

        ebbflow apps list

        ebbflow apps list --all --json | jq '.[] | select(.phase == "failed")'

    rho is finish-time fairness: expected time here over the time alone on an even share; 1 or less is fair.
    """
    from dataclasses import asdict

    from ebbflow.flows.apps.terminal import apps_view
    from ebbflow.tasks.capacity.status import look

    with _opened(ledger, cluster) as found:
        view = look(found, over=_ENDED if everything else 0)
    if json:
        print_json([asdict(one) for one in view.apps])
    else:
        console.print(apps_view(view.apps, view.at))


@app.command()
def show(id: AppId, cluster: Cluster = "local", ledger: LedgerAt = None, json: AsJson = False) -> None:
    """Show an app: its state, leases, decisions with their reasons, and run directory.

    [b]Examples[/b]

        ebbflow apps show digits

        ebbflow apps show digits --json | jq '.decisions[].reason'
    """
    from dataclasses import asdict

    from ebbflow.flows.apps.terminal import app_view
    from ebbflow.planners.model.ledger import Decided
    from ebbflow.tasks.apps.run_logs import run_logs

    with _opened(ledger, cluster) as found:
        record = _record(found, id)
        view = _view_of(found, record)
        state = found.state()
        leases = state.held(id) if id in state.apps else []
        events = found.events(limit=_DECISIONS, kinds=[Decided], app=id, newest=True)
        now = found.clock.now()
    logs = run_logs(record.spec)
    decisions = [
        {"number": e.number, "at": e.at, "kind": e.change.kind, "reason": e.change.reason}
        for e in events
        if isinstance(e.change, Decided)
    ]
    content: dict[str, Any] = {
        **asdict(view),
        "name": record.spec.title,
        "pipeline": record.spec.pipeline,
        "flow_run": record.spec.flow_run,
        "checkpoint": record.checkpoint,
        "run_directory": logs.directory,
        "leases": [asdict(lease) for lease in leases],
        "decisions": decisions,
    }
    if json:
        print_json(content)
    else:
        console.print(app_view(content, now))


@app.command()
def logs(
    id: AppId,
    cluster: Cluster = "local",
    ledger: LedgerAt = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Print new lines until Ctrl-C.")] = False,
    json: AsJson = False,
) -> None:
    """Print the last lines of an app's logs, which are in its run directory.

    [b]Examples[/b]

        ebbflow apps logs digits

        ebbflow apps logs digits --follow

    Read are files of this machine. Of a run elsewhere the command names the directory and where to look.
    With --json it prints the paths of the files.
    """
    from ebbflow.infra.clock import SystemClock
    from ebbflow.tasks.apps.run_logs import run_logs

    with _opened(ledger, cluster) as found:
        record = _record(found, id)
    known = run_logs(record.spec)
    if json:
        files = [str(path) for path in known.files]
        print_json({"app": id, "directory": known.directory, "files": files, "problem": known.problem})
        return
    if not known.files:
        fail(known.problem)
    clock, read = SystemClock(), {}
    try:
        for path in known.files:
            with path.open("rb") as file:
                text = file.read().decode(errors="replace")
                read[path] = file.tell()
            _print_lines(path.name, text.splitlines()[-_TAIL:], several=len(known.files) > 1)
        while follow:
            clock.sleep(_POLL)
            for path in run_logs(record.spec).files:
                with path.open("rb") as file:
                    file.seek(read.get(path, 0))
                    text = file.read().decode(errors="replace")
                    read[path] = file.tell()
                _print_lines(path.name, text.splitlines(), several=len(read) > 1)
    except OSError as error:
        fail(f"the log cannot be read: {error}")
    except KeyboardInterrupt:
        return


def _print_lines(name: str, lines: list[str], *, several: bool) -> None:
    from ebbflow.tasks.drawing.wording import printable

    for line in lines:
        typer.echo(f"{name}: {printable(line)}" if several else printable(line))


@app.command()
def cancel(
    id: AppId,
    cluster: Cluster = "local",
    ledger: LedgerAt = None,
    timeout: Annotated[
        float, duration_option(help="Time to wait until the app has ended.", shown=_WAIT)
    ] = _WAIT,
    yes: Yes = False,
    json: AsJson = False,
) -> None:
    """Cancel an app: its process saves its work, releases its GPUs and ends. It can be resumed.

    [b]Examples[/b]

        ebbflow apps cancel digits

        ebbflow apps cancel digits --yes --timeout 5m

    An app of a pipeline shares its process with the others of the run, which end with it. A run of a Prefect
    deployment is set to Cancelling through Prefect's API, if that answers. A lost app has no process: it is marked as
    stopped, and no one restarts it.
    """
    from ebbflow.planners.model.ledger import OVER, AppMoved
    from ebbflow.tasks.apps.cancelling import cancel_id, cancel_request

    with _opened(ledger, cluster) as found:
        record = _record(found, id)
        if record.phase in OVER:
            fail(f"{id} is over: {record.phase}")
        whole = f" It ends the pipeline run {record.spec.pipeline} with it." if record.spec.pipeline else ""
        confirm(f"Cancel {record.spec.kind} {id}?{whole}", yes)
        if record.phase == "lost":
            found.write(
                [AppMoved(id, "stopped", "cancelled by the operator")],
                when=lambda state: id in state.apps and state.apps[id].phase == "lost",
            )
        start, asks_at = found.clock.now(), 0.0  # when its process is asked by the ledger
        if record.phase == "lost":
            asks_at = inf
        elif told := _told_by_prefect(record.spec.flow_run, start, quiet=json):
            asks_at = start + told
        end = start + timeout
        while (record := _record(found, id)).phase not in OVER and (now := found.clock.now()) < end:
            if now >= asks_at:
                found.report(cancel_id(id), cancel_request(now))
                asks_at = inf
            found.clock.sleep(_POLL)
    if record.phase not in OVER:
        how = (
            "its process ends when it polls the ledger"
            if asks_at == inf
            else "Prefect's runner ends its process"
        )
        fail(f"{id} has not ended within {timeout:g} s; {how}. Check it: ebbflow apps show {id}")
    if json:
        print_json({"app": id, "phase": record.phase, "reason": record.reason})
    else:
        said = f": {record.reason}" if record.reason else ""
        errors.print(f"{escape(id)} is {record.phase}{escape(said)}", highlight=False)


def _told_by_prefect(flow_run: str, now: float, *, quiet: bool) -> float:
    """Have Prefect cancel a flow run; return for how many seconds that is waited for, 0 where nobody there acts."""
    if not flow_run:
        return 0.0
    from ebbflow.flows.apps.flow_run import RUNNER, cancelled_by_prefect
    from ebbflow.infra.errors import InfraError

    messages = Console(stderr=True, quiet=quiet)
    try:
        run = cancelled_by_prefect(flow_run, now)
    except InfraError as error:
        messages.print(f"[yellow]note:[/] {escape(str(error))}", highlight=False, soft_wrap=True)
        return 0.0
    if run:
        messages.print(f"flow run {run} is Cancelling", highlight=False, soft_wrap=True)
    return RUNNER if run else 0.0


def _record(ledger: "Ledger", id_: str) -> "AppRecord":
    record = ledger.app(id_)
    return record if record is not None else _unknown(ledger, id_)


def _unknown(ledger: "Ledger", id_: str) -> NoReturn:
    from difflib import get_close_matches

    from ebbflow.planners.errors import OptionError

    known = sorted({*ledger.state().apps, *(one.spec.id for one in ledger.ended(_ENDED))})
    close = get_close_matches(id_, known, 1)
    hint = f"; did you mean {close[0]!r}?" if close else ""
    raise OptionError(
        f"there is no app {id_!r} in cluster {ledger.cluster!r}{hint}; ebbflow apps list --all shows its apps"
    )


def _view_of(ledger: "Ledger", record: "AppRecord") -> "AppView":
    from ebbflow.tasks.capacity.status import app_views

    return app_views(ledger, [record])[0]


@contextmanager
def _opened(url: str | None, cluster: str) -> "Iterator[Ledger]":
    from ebbflow.infra.errors import LedgerError
    from ebbflow.infra.ledger import Ledger

    try:
        with Ledger.open(url, cluster=cluster, create=False) as found:
            yield found
    except LedgerError as error:
        fail(str(error), status_of(error), type(error).__name__)


def register(top: typer.Typer) -> None:
    """Add the group to the command line."""
    top.add_typer(app, name="apps")
