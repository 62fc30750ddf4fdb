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
from ebbflow.tasks.drawing.wording import printable

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
    from ebbflow.tasks.apps.run_logs import directory_of

    with _opened(ledger, cluster) as found:
        record = _record(found, id)
        view = _view_of(found, record)
        state = found.state()
        leases = state.held(id) if id in state.apps else []
        events = found.events(limit=_DECISIONS, kinds=[Decided], app=id, newest=True)
        now = found.clock.now()
    directory, _ = directory_of(record.spec)
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
        "run_directory": directory,
        "leases": [asdict(lease) for lease in leases],
        "decisions": decisions,
    }
    if json:
        print_json(content)
    else:
        console.print(app_view(content, now))


@app.command()
def logs(
    id: Annotated[
        str,
        typer.Argument(
            help="ID of an app, as ebbflow apps list shows it, or of a training run of this machine.",
            metavar="ID",
        ),
    ],
    cluster: Cluster = "local",
    ledger: LedgerAt = None,
    runs_dir: Annotated[
        str | None,
        typer.Option(
            help="Directory of all runs, DIR or s3://bucket/prefix, of a training that is no app of a cluster. "
            "Default: runs/ in ~/.cache/ebbflow.",
            metavar="DIR",
        ),
    ] = None,
    rank: Annotated[
        int | None, typer.Option(help="Rank whose logs are printed. Default: all.", min=0)
    ] = None,
    generation: Annotated[
        int | None, typer.Option(help="Generation whose logs are printed. Default: the newest.", min=1)
    ] = None,
    lines: Annotated[int, typer.Option(help="Number of lines of each log at the start.", min=0)] = _TAIL,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Print new lines until Ctrl-C.")] = False,
    json: AsJson = False,
) -> None:
    """Print the last lines of a run's logs: of an app, or of a training by its run ID.

    [b]Examples[/b]

        ebbflow apps logs digits

        ebbflow apps logs script-1121-101500-a1b2 --rank 0 --follow

        ebbflow apps logs fit-1121-101500-a1b2 --runs-dir s3://bucket/runs

    Logs are in the run directory. One in object storage has them a second after they are written, and keeps them
    when their node is gone.
    With --json it prints the addresses of the logs.
    """
    from itertools import chain

    from ebbflow.infra.clock import SystemClock
    from ebbflow.infra.errors import StorageError
    from ebbflow.tasks.apps.run_logs import Following, logs_in

    directory, why = _directory(id, runs_dir, cluster, ledger)
    known = logs_in(directory, why)
    if json:
        addresses = [one.uri for one in known.of(generation=generation, rank=rank)]
        print_json({"id": id, "directory": known.directory, "files": addresses, "problem": known.problem})
        return
    if not known.files and not (follow and known.directory):
        fail(known.problem)
    reader = Following(directory, generation, rank, lines)
    chosen = known.of(generation=generation, rank=rank)
    if not chosen and not follow:
        found = sorted({(one.generation, one.rank) for one in known.files if one.rank is not None})
        fail(
            f"no log of {id} is of generation {generation or 'any'} and rank {'any' if rank is None else rank}; "
            f"there are (generation, rank): {', '.join(map(str, found)) or 'none'}"
        )
    several = len(chosen) > 1
    try:
        for log, line in chain(reader.lines(), reader.follow(SystemClock()) if follow else ()):
            text = printable(line)
            typer.echo(f"{log.name}: {text}" if several or log not in chosen else text)
    except StorageError as error:
        fail(f"the log cannot be read: {error}")
    except KeyboardInterrupt:
        return


def _directory(id: str, runs_dir: str | None, cluster: str, ledger: str | None) -> tuple[str, str]:
    """Return the directory of a run: of a training of this machine, else of an app; empty with the reason."""
    from ebbflow.infra.storage.filesystems import translated
    from ebbflow.infra.storage.places import StorageLocation
    from ebbflow.planners.model import names
    from ebbflow.tasks.apps.run_logs import directory_of
    from ebbflow.tasks.training.request import default_runs_dir

    place = StorageLocation(runs_dir or default_runs_dir())
    if runs_dir is not None or (ledger is None and names.RUN.allows(id)):
        names.RUN.check(id)
        run = place.under(id)
        with translated(f"read {run}"):
            if run.is_file("request.json"):
                return str(run), ""
        if runs_dir is not None:
            return "", f"there is no run {id!r} in {runs_dir}"
    with _opened(ledger, cluster) as found:
        return directory_of(_record(found, id).spec)


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
