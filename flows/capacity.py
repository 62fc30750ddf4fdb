"""The capacity loop as a long-running Prefect flow: ``from ebbflow.flows.capacity import capacity_loop``."""

import logging
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

from prefect import flow
from prefect.artifacts import create_table_artifact
from prefect.events import emit_event
from prefect.logging import get_run_logger
from prefect.runtime import flow_run

from ebbflow.flows.capacity_resume import resuming
from ebbflow.infra.ledger.address import parse
from ebbflow.planners.errors import OptionError
from ebbflow.tasks.loop.listening import LoopEvent, LoopListener
from ebbflow.tasks.loop.loop import LoopEnd
from ebbflow.tasks.loop.opening import opened_loop
from ebbflow.tasks.loop.request import CapacityRequest

EVENTS = {
    "changed": "ebbflow.capacity.changed",
    "settled": "ebbflow.auction.settled",
    "recalled": "ebbflow.lease.recalled",
    "scaled": "ebbflow.fleet.scaled",
    "refused": "ebbflow.guard.refused",
    "recovered": "ebbflow.loop.recovered",
    "lost": "ebbflow.app.lost",
}
"""Prefect events by what the loop tells."""

log = logging.getLogger(__name__)


@dataclass
class _Attachment:
    """Somebody in this process who runs the loop himself (the command line)."""

    request: CapacityRequest
    stop: threading.Event
    listener: LoopListener | None = None
    end: LoopEnd | None = field(default=None)


_ATTACHED: ContextVar[_Attachment | None] = ContextVar("ebbflow_capacity_attached", default=None)


def run_attached(
    request: CapacityRequest, stop: threading.Event, listener: LoopListener | None = None
) -> LoopEnd:
    """Run ``request`` as a flow run of ``capacity_loop`` until ``stop`` is set (the command line)."""
    attachment = _Attachment(request, stop, listener)
    token = _ATTACHED.set(attachment)
    try:
        capacity_loop(cluster=request.cluster, source=request.source)
    finally:
        _ATTACHED.reset(token)
    assert attachment.end is not None
    return attachment.end


def _run_name() -> str:
    return f"capacity of {flow_run.parameters.get('cluster', 'local')}"


@flow(name="capacity-loop", flow_run_name=_run_name, validate_parameters=True)
def capacity_loop(
    cluster: str = "local",
    source: str = "local",
    *,
    ledger: str | None = None,
    ledger_secret: str | None = None,
    policy: str = "",
    options: dict[str, Any] | None = None,
    limits: str | None = None,
    lease: float | None = None,
    interval: float | None = None,
    take_over: bool = False,
    seed: int = 0,
    prices: str | None = None,
) -> dict[str, Any]:
    """Lead a cluster: watch its nodes, hold auctions, grant and call back leases, rent and give back nodes.

    It runs until it is cancelled or ``ebbflow capacity stop`` asks for its end; leases stay as they are, apps hold
    what they have until another loop leads. One that is killed leaves nothing hanging: the next takes over once its
    lead, 15 s, has run out. A lost app that named a deployment is started again by it, and its run is marked as
    crashed. Serve the loop with a limit of one: ``capacity_loop.serve("capacity", limit=1)``. What happens
    is told as events ``ebbflow.capacity.changed``, ``ebbflow.auction.settled``, ``ebbflow.lease.recalled``,
    ``ebbflow.fleet.scaled``, ``ebbflow.guard.refused``, ``ebbflow.loop.recovered`` and ``ebbflow.app.lost``, which
    never delay it; the ledger has them all.

    Args:
        cluster: whose ledger; one database may hold several.
        source: where nodes come from: ``local[:NAME]``, ``aws[:CONFIG]``, ``spark://HOST:PORT``, ``cluster[:NAME]``.
        ledger: a file, or an address without a password; by default ``$EBBFLOW_LEDGER``, else Ebbflow's own file.
        ledger_secret: the Prefect secret block, or variable, that holds the ledger's address.
        policy: a policy by name, or ``module:Class``; by default the file's, else ``rho-bounded``.
        options: of the policy.
        limits: a TOML file of limits; by default ``$EBBFLOW_LIMITS``, else ``fleet.toml`` in the present folder.
        lease: seconds that leases last.
        interval: seconds between auctions when nothing happens.
        take_over: take the lead from a loop that lives.
        seed: of what policies draw at random.
        prices: a file of on-demand prices of one's own, for ``aws``; by default the AWS Price List.

    Returns:
        What it did: decisions, and how long changes took to become leases.

    Raises:
        StaleLoopError: another loop has taken over.
        LedgerUnavailableError: the ledger was away for too long.
        EbbflowError: bad input.
    """
    attached = _ATTACHED.get()
    if attached is not None:
        request, stop = attached.request, attached.stop
    else:
        if ledger and parse(ledger).url.password:
            raise OptionError(
                "the parameter ledger must have no password, since Prefect keeps and shows parameters; put the "
                "address into a secret and name it: ledger_secret"
            )
        request = CapacityRequest(
            ledger if ledger_secret is None else ledger_address(ledger_secret),
            cluster,
            source,
            policy,
            options or {},
            limits,
            lease,
            interval,
            take_over,
            seed,
            prices,
        )
        stop = threading.Event()
    own = PrefectTeller(str(flow_run.id), request.cluster)
    listener = own if attached is None or attached.listener is None else _Both(own, attached.listener)
    with (
        opened_loop(request, listener) as opened,
        stopped_by_signal(stop, attached is None),
        resuming(opened.ledger),
    ):
        get_run_logger().info("cluster %s, %s, policy %s", cluster, source, opened.settings.policy.name)
        end = opened.loop.run(stop, take_over=request.take_over)
        _publish(end)
    if attached is not None:
        attached.end = end
    return dict(end.figures)


def ledger_address(name: str) -> str:
    """Return the address that the secret block or variable ``name`` holds. Raises ``OptionError``."""
    from prefect.blocks.system import Secret
    from prefect.variables import Variable

    try:
        return str(Secret.load(name).get())  # type: ignore[union-attr]
    except ValueError:
        found = Variable.get(name)
    if not isinstance(found, str) or not found:
        raise OptionError(
            f"there is no Prefect secret or variable {name!r} that holds the ledger's address; make one: "
            "prefect block create secret"
        )
    return found


@contextmanager
def stopped_by_signal(stop: threading.Event, then: bool = True) -> Iterator[None]:
    """Let SIGTERM, by which Prefect cancels a run, end the block in order; Prefect's own handler follows if ``then``.

    Only in a main thread; elsewhere ``stop`` must be set by others.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before: Any = signal.getsignal(signal.SIGTERM)
    came: list[int] = []

    def handler(number: int, frame: FrameType | None) -> None:
        came.append(number)
        stop.set()

    signal.signal(signal.SIGTERM, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
    if came and then and callable(before):
        before(signal.SIGTERM, None)  # Prefect's raises, and the run becomes what it was asked to be


class PrefectTeller:
    """Tells Prefect what a loop does: an event each, related to the flow run. A ``LoopListener``."""

    def __init__(
        self, run: str, cluster: str, emit: Callable[..., object] = emit_event, logger: Any = None
    ) -> None:
        self._run, self._cluster, self._emit = run, cluster, emit
        self._logger = logger or get_run_logger()

    def heard(self, event: LoopEvent) -> None:
        """Emit ``event``; called in the announcer's thread, which the loop never waits for."""
        self._logger.info(event.text)
        related = [
            {"prefect.resource.id": f"prefect.flow-run.{self._run}", "prefect.resource.role": "flow-run"}
        ]
        app_run = str(event.payload.get("flow_run") or "")
        if app_run:
            related.append(
                {"prefect.resource.id": f"prefect.flow-run.{app_run}", "prefect.resource.role": "app"}
            )
        self._emit(
            event=EVENTS[event.kind],
            resource={"prefect.resource.id": f"ebbflow.cluster.{self._cluster}"},
            related=related,
            payload={"at": event.at, "text": event.text, **event.payload},
        )
        if event.kind == "lost" and app_run:
            mark_crashed(app_run, event.text, self._logger)


class _Both:
    """Two listeners, one after the other."""

    def __init__(self, first: LoopListener, second: LoopListener) -> None:
        self._two = first, second

    def heard(self, event: LoopEvent) -> None:
        for one in self._two:
            one.heard(event)


def mark_crashed(run: str, why: str, logger: Any) -> None:
    """Mark a flow run that Prefect still believes running as crashed: its process is gone.

    Where the runner has died with it, Prefect alone leaves it running for ever.
    """
    from uuid import UUID

    from prefect.client.orchestration import get_client
    from prefect.states import Crashed

    try:
        with get_client(sync_client=True) as client:
            found = client.read_flow_run(UUID(run))
            if found.state is not None and found.state.is_running():
                client.set_flow_run_state(found.id, Crashed(message=why), force=True)
    except Exception as error:  # the server is away, or knows no such run: nobody waits for it here
        logger.warning("the flow run %s could not be marked as crashed: %r", run, error)


def _publish(end: LoopEnd) -> None:
    figures: Mapping[str, Any] = end.figures
    if not figures:
        return
    latency = figures.get("latency_s", {})
    row = {
        "end": end.reason,
        "decisions": figures.get("cycles"),
        "changes": figures.get("changes"),
        "dropped": figures.get("dropped"),
        "change to lease, p50 (s)": latency.get("p50"),
        "p95 (s)": latency.get("p95"),
        "p99 (s)": latency.get("p99"),
        "outages of the ledger": figures.get("outages"),
    }
    create_table_artifact(key="ebbflow-capacity", table=[row], description="What the loop did")
