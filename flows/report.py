"""``ebbflow report``: what a cluster did and why, as a page, as JSON, or live in a browser."""

import re
import threading
import webbrowser
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape

from ebbflow.flows.capacity.options import Cluster, LedgerAt
from ebbflow.flows.runs.options import AsJson
from ebbflow.planners.errors import OptionError
from ebbflow.planners.model.numbers import MAX_SECONDS, UNSIGNED

if TYPE_CHECKING:
    from ebbflow.infra.ledger import Ledger
    from ebbflow.tasks.report.cluster.live import ClusterFollower
    from ebbflow.tasks.report.cluster.report import ClusterReport

PORT = 8470
_OUT = "ebbflow-report.html"
console = Console(stderr=True)

_HELP = """Show what a cluster did and why: apps, leases, nodes, fairness, money, and each decision with its reason.

[b]Examples[/b]

    ebbflow report                    (writes ebbflow-report.html)

    ebbflow report --serve --open     (live in the browser, until Ctrl-C)

    ebbflow report --since 2h --json | jq .fairness

    ebbflow report --pipeline nightly --output nightly.html

The page is one file that needs no network. Read-only. A TIME is a duration ago (2h, 30m, 7d), 14:30 today, or
2026-11-22T14:30, in UTC.
"""


def register(app: typer.Typer) -> None:
    """Add the command to ``app``."""
    app.command("report", help=_HELP)(report)


def report(
    port: Annotated[
        int | None,
        typer.Argument(help=f"Port of --serve. Default: {PORT}, or a free one.", metavar="PORT"),
    ] = None,
    ledger: LedgerAt = None,
    cluster: Cluster = "local",
    pipeline: Annotated[
        str | None, typer.Option(help="Run ID of a pipeline: only its apps, in its time.", metavar="ID")
    ] = None,
    since: Annotated[
        str | None, typer.Option(help="Start. Default: the first event.", metavar="TIME")
    ] = None,
    until: Annotated[str | None, typer.Option(help="End. Default: now.", metavar="TIME")] = None,
    output: Annotated[
        list[str] | None,
        typer.Option(
            "--output",
            "-o",
            help=f"File to write: .html the page, .json the data. Repeatable. Default: {_OUT}, unless --json or "
            "--serve is given.",
            metavar="FILE",
        ),
    ] = None,
    json: AsJson = False,
    prices: Annotated[
        str | None,
        typer.Option(
            "--on-demand-prices",
            help="TOML file of on-demand prices to compare with, as ebbflow fleet reads it.",
            metavar="FILE",
        ),
    ] = None,
    serve: Annotated[
        bool,
        typer.Option("--serve", help="Serve the page on this machine and keep it up to date, until Ctrl-C."),
    ] = False,
    open_: Annotated[bool, typer.Option("--open", help="Open the page in a browser.")] = False,
) -> None:
    from ebbflow.infra.clock import SystemClock
    from ebbflow.infra.ledger import Ledger
    from ebbflow.tasks.report.aggregation import aggregation_reader
    from ebbflow.tasks.report.cluster.live import ClusterFollower

    if port is not None and not serve:
        raise OptionError(f"a port is for --serve; got {port}")
    for path in output or ():
        if not path.endswith((".html", ".json")):
            raise OptionError(f"--output must end with .html (the page) or .json (the data); got {path!r}")
    clock = SystemClock()
    now = clock.now()
    begin, end = moment(since, now, "--since"), moment(until, now, "--until")
    if begin is not None and end is not None and begin >= end:
        raise OptionError(f"--since must be before --until; got {since} and {until}")
    listed = _listed(prices)
    with Ledger.open(ledger, cluster=cluster, create=False) as found:
        follower = ClusterFollower(
            found,
            clock,
            cluster=cluster,
            since=begin,
            until=end,
            pipeline=pipeline or "",
            listed=listed,
            aggregation=aggregation_reader(found.records),
        )
        made = follower.look()
        _check(found, made, pipeline)
        if json:
            typer.echo(made.to_json(), nl=False)
        for path in output or ([] if json or serve else [_OUT]):
            _write(made, path, open_ and not serve)
        if serve:
            _serve(follower, port, open_)


def moment(text: str | None, now: float, option: str) -> float | None:
    """Return the point in time, s since the Unix epoch, of an option's text. Raises ``OptionError``."""
    if text is None:
        return None
    words = text.strip()
    if ago := re.fullmatch(rf"({UNSIGNED})\s*([smhdw])", words):
        age = float(ago[1]) * {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 604800}[ago[2]]
        if age <= MAX_SECONDS:
            return now - age
    elif clock := re.fullmatch(r"([0-9]{1,2}):([0-9]{2})(?::([0-9]{2}))?", words):
        today = datetime.fromtimestamp(now, UTC)
        try:
            return today.replace(
                hour=int(clock[1]), minute=int(clock[2]), second=int(clock[3] or 0), microsecond=0
            ).timestamp()
        except ValueError:
            pass
    else:
        try:
            found = datetime.fromisoformat(words)
            return (found if found.tzinfo else found.replace(tzinfo=UTC)).timestamp()
        except (ValueError, OverflowError):
            pass
    raise OptionError(f"{option} must be like 2h, 30m or 7d (ago), 14:30, or 2026-11-22T14:30; got {text!r}")


def _listed(path: str | None) -> dict[str, float]:
    if path is None:
        return {}
    from ebbflow.infra.aws.prices.listed import ListedPrices

    return dict(ListedPrices.read(path).on_demand)


def _check(ledger: "Ledger", made: "ClusterReport", pipeline: str | None) -> None:
    """Raise ``OptionError`` where there is nothing to show."""
    if made.number == 0:
        raise OptionError(
            f"nothing has happened yet in cluster {ledger.cluster!r} of {ledger.address}: "
            "start its loop with ebbflow capacity start, or run a pipeline"
        )
    if pipeline is not None and not made.apps:
        known = sorted({app.spec.pipeline for app in ledger.state().apps.values() if app.spec.pipeline})
        named = ", ".join(known[:10]) or "none"
        raise OptionError(f"no app of pipeline {pipeline!r} was there in that time; pipelines there: {named}")


def _write(made: "ClusterReport", path: str, show: bool) -> None:
    from ebbflow.infra.storage.files import write_text
    from ebbflow.tasks.report.cluster.page import cluster_html
    from ebbflow.tasks.report.cluster.words import verdict

    if path.endswith(".json"):
        console.print(f"written: {escape(str(write_text(path, made.to_json())))}", soft_wrap=True)
        return
    written = write_text(path, cluster_html(made))
    console.print(escape(verdict(made)), highlight=False)
    console.print(f"written: {escape(str(written))}", soft_wrap=True)
    if show:
        webbrowser.open(written.absolute().as_uri())


def _serve(follower: "ClusterFollower", port: int | None, show: bool) -> None:
    from ebbflow.infra.errors import InfraError
    from ebbflow.infra.machine.page_server import PageServer

    try:
        server = PageServer(follower.answer, PORT if port is None else port)
    except InfraError:
        if port is not None:
            raise
        server = PageServer(follower.answer)
    with server:
        console.print(
            f"the report is at {server.url} (only from this machine); Ctrl-C ends it", soft_wrap=True
        )
        if show:
            webbrowser.open(server.url)
        try:
            threading.Event().wait()
        except KeyboardInterrupt:
            console.print("ended")
