"""The capacity loop as a long-running Prefect flow: ``from ebbflow.flows.capacity.flow import capacity_loop``."""

import logging
import threading
from collections.abc import Callable, Mapping
from contextvars import copy_context
from typing import Any

from prefect import flow
from prefect.events import emit_event
from prefect.logging import get_run_logger
from prefect.runtime import flow_run

from ebbflow.flows.blocks import block_name
from ebbflow.flows.capacity import restarts
from ebbflow.flows.capacity.flow_runs import RunView
from ebbflow.flows.capacity.runs import holder_in, mending
from ebbflow.flows.runs import artifacts
from ebbflow.flows.runs.attached import Attached, Attachment
from ebbflow.flows.runs.block_refs import found
from ebbflow.flows.runs.cancelling import attended
from ebbflow.flows.runs.deployed import allowed, deployment_id
from ebbflow.flows.runs.output_pipes import outlive_readers
from ebbflow.infra.errors import InfraError
from ebbflow.tasks.capacity.listeners import LoopEvent, LoopListener
from ebbflow.tasks.capacity.loop import LoopEnd
from ebbflow.tasks.capacity.node_sources import opened_loop
from ebbflow.tasks.capacity.own_policies import checked_names
from ebbflow.tasks.capacity.recovery import LostApp
from ebbflow.tasks.capacity.request import CapacityRequest

EVENTS = {
    "changed": "ebbflow.capacity.changed",
    "auction": "ebbflow.auction.completed",
    "revoked": "ebbflow.lease.revoked",
    "scaled": "ebbflow.fleet.scaled",
    "rejected": "ebbflow.admission.rejected",
    "recovered": "ebbflow.loop.recovered",
    "lost": "ebbflow.app.lost",
}
"""Prefect events by the kind of the loop's."""
RESUMED = "ebbflow.app.resumed"

log = logging.getLogger(__name__)


_Given = tuple[CapacityRequest, threading.Event, LoopListener | None]
_ATTACHED: Attached[_Given, LoopEnd] = Attached("capacity")


def run_attached(
    request: CapacityRequest, stop: threading.Event, listener: LoopListener | None = None
) -> LoopEnd:
    """Run ``request`` as a flow run of ``capacity_loop`` until ``stop`` is set (the command line)."""
    return _ATTACHED.run(
        (request, stop, listener), lambda: capacity_loop(cluster=request.cluster, source=request.source)
    )


def _run_name() -> str:
    given = flow_run.parameters
    named = block_name(given.get("ledger"), "ebbflow-cluster")  # of an address nothing is to be shown
    return f"capacity of {given.get('cluster') or named or 'local'}"


@flow(name="capacity-loop", flow_run_name=_run_name, validate_parameters=True)
def capacity_loop(
    cluster: str | None = None,
    source: str | None = None,
    *,
    ledger: str | None = None,
    ledger_secret: str | None = None,
    policy: str = "",
    options: dict[str, Any] | None = None,
    config: str | None = None,
    lease_duration: float | None = None,
    auction_interval: float | None = None,
    take_over: bool = False,
    seed: int = 0,
    prices: str | None = None,
    metrics: str = "",
    allow_policies: list[str] | None = None,
) -> dict[str, Any]:
    """Run the capacity loop of a cluster: observe nodes, hold auctions, grant and revoke leases, scale node pools.

    It runs until it is cancelled or ``ebbflow capacity stop`` asks for its end; leases stay as they are, apps hold
    what they have until another loop leads. One that is killed leaves nothing hanging: the next takes over once its
    lead, 15 s, has run out. Deploy it with a concurrency limit of one, as ``prefect.yaml`` does.

    Flow runs whose apps are lost are marked as crashed, and resumed by a new run of the same deployment
    (``ebbflow.flows.capacity.runs``). It emits the events
    ``ebbflow.capacity.changed``, ``ebbflow.auction.completed``, ``ebbflow.lease.revoked``, ``ebbflow.fleet.scaled``,
    ``ebbflow.admission.rejected``, ``ebbflow.loop.recovered``, ``ebbflow.app.lost``, ``ebbflow.app.resumed``, which
    never delay it; the ledger has them all.

    Args:
        cluster: whose ledger, ``local`` by default; one database may hold several.
        source: where nodes come from: ``local[:NAME]`` (the default), ``aws[:FILE]``, ``aws:ebbflow-aws/NAME``,
            ``spark://HOST:PORT``, ``cluster[:NAME]``.
        ledger: a file, an address without a password, or the block ``ebbflow-cluster/NAME``, which says all of this;
            by default ``$EBBFLOW_LEDGER``, else Ebbflow's own file.
        ledger_secret: the Prefect secret block, or variable, that holds the ledger's address.
        policy: a policy by name, ours or an installed package's, or ``MODULE:NAME`` of ``allow_policies``; by default
            the block's, then the file's, else ``rho-bounded``.
        options: of the policy.
        config: the configuration file (TOML); by default ``$EBBFLOW_CONFIG``.
        lease_duration: seconds that leases last.
        auction_interval: maximum seconds between auctions.
        take_over: take over from a running leader, whose fencing token becomes invalid.
        seed: of what policies draw at random.
        prices: a file of on-demand prices of one's own, for ``aws``; by default the AWS Price List.
        metrics: ``HOST:PORT`` at which ``/metrics`` for Prometheus and ``/healthz`` are served; off by default.
        allow_policies: policies that may be imported, each ``MODULE:NAME``, whether ``policy``, the block or the
            configuration file names them; in a run of a deployment, of those the ones that the deployment itself has.

    Returns:
        What it did: decisions, and how long changes took to become leases.

    Raises:
        StaleLoopError: another loop has taken over.
        LedgerUnavailableError: the ledger was away for too long.
        EbbflowError: bad input.
    """
    outlive_readers()
    attached = _ATTACHED.get()
    if attached is not None:
        return _lead(attached.given[0], attached)
    _wait_out(deployment_id())
    with found(ledger, cluster, source, ledger_secret) as place:
        request = CapacityRequest(
            place.ledger,
            place.cluster,
            place.source,
            policy or place.policy,
            options or {},
            config or place.config,
            lease_duration,
            auction_interval,
            take_over,
            seed,
            prices,
            metrics,
            checked_names(allowed("allow_policies", allow_policies)),
        )
        return _lead(request, None)


def _wait_out(deployment: str) -> None:
    """Let failures of the deployment's runs before this one be followed by a pause."""
    if not deployment:
        return
    logger = get_run_logger()
    try:
        seconds = restarts.pause(restarts.ends_of(deployment))
    except InfraError as error:
        logger.warning("the results of earlier runs are not known: %s", error)
        return
    if seconds:
        logger.warning("the last runs of this deployment failed; this run waits %.0f s (backoff)", seconds)
        stop = threading.Event()
        attended(lambda: stop.wait(seconds), stop.set)


def _lead(request: CapacityRequest, attached: Attachment[_Given, LoopEnd] | None) -> dict[str, Any]:
    """Lead until the end; ``attached`` has handlers of its own."""
    _, stop, also = attached.given if attached is not None else (request, threading.Event(), None)
    own = PrefectLoopListener(str(flow_run.id), request.cluster)
    listener = own if also is None else _Both(own, also)
    with opened_loop(request, listener, holder=holder_in(str(flow_run.id))) as opened:
        get_run_logger().info(
            "cluster %s, %s, policy %s", request.cluster, request.source, opened.settings.policy.name
        )

        def work() -> LoopEnd:
            return opened.loop.run(stop, take_over=request.take_over)

        with mending(opened.ledger, lambda: opened.loop.leads, own.resumed):
            end = work() if attached is not None else attended(work, stop.set)
        _publish(end)
    if attached is not None:
        attached.outcome = end
    return dict(end.metrics)


class PrefectLoopListener:
    """Tells Prefect what a loop does: an event each, related to the flow run. A ``LoopListener``."""

    def __init__(
        self, run: str, cluster: str, emit: Callable[..., object] = emit_event, logger: Any = None
    ) -> None:
        self._run, self._cluster, self._send = run, cluster, emit
        self._logger = logger or get_run_logger()
        self._context = (
            copy_context()
        )  # of the flow run: Prefect adds its deployment and tags to what it emits

    def _emit(self, **event: Any) -> None:
        self._context.copy().run(self._send, **event)

    def on_event(self, event: LoopEvent) -> None:
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

    def resumed(self, app: LostApp, run: RunView) -> None:
        """Emit that a lost app continues in another flow run."""
        text = f"{app.spec.id} resumed in {run.name}: {app.reason}"
        self._logger.info(text)
        roles = {"flow-run": self._run, "app": run.id, "lost": app.spec.flow_run}
        self._emit(
            event=RESUMED,
            resource={"prefect.resource.id": f"ebbflow.cluster.{self._cluster}"},
            related=[
                {"prefect.resource.id": f"prefect.flow-run.{id_}", "prefect.resource.role": role}
                for role, id_ in roles.items()
                if id_
            ],
            payload={
                "text": text,
                "app": app.spec.id,
                "losses": app.losses,
                "try": app.tries + 1,
                "flow_run": run.id,
                "lost_flow_run": app.spec.flow_run,
                "reason": app.reason,
            },
        )


class _Both:
    """Two listeners, one after the other."""

    def __init__(self, first: LoopListener, second: LoopListener) -> None:
        self._two = first, second

    def on_event(self, event: LoopEvent) -> None:
        for one in self._two:
            one.on_event(event)


def _publish(end: LoopEnd) -> None:
    metrics: Mapping[str, Any] = end.metrics
    if not metrics:
        return
    latency = metrics.get("latency_s", {})
    row = {
        "end": end.reason,
        "decisions": metrics.get("cycles"),
        "changes": metrics.get("changes"),
        "dropped": metrics.get("dropped"),
        "change to lease, p50 (s)": latency.get("p50"),
        "p95 (s)": latency.get("p95"),
        "p99 (s)": latency.get("p99"),
        "ledger outages": metrics.get("outages"),
    }
    artifacts.table("ebbflow-capacity", [row], "Summary of the capacity loop")
