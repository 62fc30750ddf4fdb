"""How fast a loop is, in memory that does not grow; and what a cluster tells Prometheus."""

import contextlib
import resource
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ebbflow.infra.aggregation.registry import ServiceRegistry, ServiceView, plain_name, savings
from ebbflow.infra.errors import LedgerError
from ebbflow.infra.ledger import Ledger
from ebbflow.infra.machine.metrics_server import UnavailableError, metric, serving
from ebbflow.infra.machine.page_server import PageServer
from ebbflow.tasks.capacity.status import ClusterView, look

if TYPE_CHECKING:
    from prometheus_client.core import Metric

_KEPT = 4096  # newest latencies
_SILENT = 15.0  # s without a report after which a loop does not count as healthy


def percentile(values: Sequence[float], share: float) -> float | None:
    """Return the nearest-rank percentile of ``values``; ``None`` of none. ``share`` is from 0 to 1."""
    if not values:
        return None
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, max(0, -(-int(share * 1e6) * len(ordered) // 1_000_000) - 1))]


@dataclass
class LoopMetrics:
    """Counts since the loop began, and times of the newest changes and cycles."""

    cycles: int = 0
    written: int = 0  # cycles that changed something
    changes: int = 0  # that were seen
    dropped: int = 0  # decisions for capacity that had moved on
    rested: int = 0  # cycles put off because the last took longer than the interval
    outages: int = 0  # of the ledger
    away: float = 0.0  # s in them
    answered: int = -1  # revision of the source that the last decision rests on
    latencies: deque[float] = field(default_factory=lambda: deque(maxlen=_KEPT))  # s, change seen -> written
    deciding: deque[float] = field(default_factory=lambda: deque(maxlen=_KEPT))  # s of ``decide``

    def saw(self, stamps: Sequence[float], now: float) -> None:
        """Note that what was seen at ``stamps`` has been answered ``now``."""
        self.changes += len(stamps)
        self.latencies.extend(max(0.0, now - stamp) for stamp in stamps)

    def to_dict(self) -> Mapping[str, Any]:
        """Return plain JSON; seconds are rounded to tenths of a millisecond."""
        latencies, deciding = list(self.latencies), list(self.deciding)
        return {
            "cycles": self.cycles,
            "written": self.written,
            "changes": self.changes,
            "dropped": self.dropped,
            "rested": self.rested,
            "outages": self.outages,
            "away_s": round(self.away, 1),
            "latency_s": _summary(latencies),
            "deciding_s": _summary(deciding),
            "memory_mib": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, 1),
        }


def _summary(values: Sequence[float]) -> Mapping[str, float | None]:
    return {
        name: None if (found := percentile(values, share)) is None else round(found, 4)
        for name, share in (("p50", 0.5), ("p95", 0.95), ("p99", 0.99), ("worst", 1.0))
    }


# --- for Prometheus -----------------------------------------------------------------------------------------------


def metrics_of(view: ClusterView, service: ServiceView | None = None) -> Iterator["Metric"]:
    """Yield a cluster's metrics; each has the label ``cluster``.

    Args:
        view: of the cluster.
        service: its shared aggregation service, where it may have one.
    """
    yield from (*_loop_metrics(view), *_node_metrics(view), *_app_metrics(view))
    if service is not None and service.aggregators():
        yield from _aggregation_metrics(view.cluster, service)


def health(view: ClusterView) -> str:
    """Return why a cluster's loop is not healthy; empty where it is."""
    if not view.leads:
        return "no capacity loop is the leader"
    if view.loop_silent is None or view.loop_silent > _SILENT:
        return f"the loop has not reported for {view.loop_silent or 0:.0f} s"
    return ""


class ClusterMetrics:
    """Reads a cluster's metrics from its ledger, which ``opened`` opens at the first look and the end closes."""

    def __init__(self, opened: Callable[[], contextlib.AbstractContextManager[Ledger]]) -> None:
        self._opened = opened
        self._lock = threading.Lock()  # a scrape at a time
        self._stack = contextlib.ExitStack()
        self._ledger: Ledger | None = None

    def __enter__(self) -> "ClusterMetrics":
        return self

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._stack.close()

    def look(self) -> tuple[Iterator["Metric"], str]:
        """Return the metrics, and why the cluster's loop is not healthy; empty where it is.

        Raises ``UnavailableError`` while the ledger does not respond.
        """
        try:
            with self._lock:
                if self._ledger is None:
                    self._ledger = self._stack.enter_context(self._opened())
                view = look(self._ledger, decisions=0, over=0)
                service = ServiceRegistry(self._ledger.records).read()
        except LedgerError as error:
            raise UnavailableError(f"the ledger does not respond: {error}") from error
        return metrics_of(view, service), health(view)


@contextlib.contextmanager
def serving_metrics(address: str, opened: Callable[[], Ledger]) -> Iterator[PageServer | None]:
    """Serve ``/metrics`` and ``/healthz`` of a cluster meanwhile; nothing where no address is given.

    Args:
        address: see ``address_of``; "": none.
        opened: opens the cluster's ledger, at the first request.

    Raises ``OptionError`` for an address that is none, and ``InfraError`` for a port that is taken.
    """
    with ClusterMetrics(opened) as metrics, serving(address, metrics.look) as server:
        yield server


def _loop_metrics(view: ClusterView) -> Iterator["Metric"]:
    loop, own = view.loop, (view.cluster,)
    yield metric(
        "loop_leads",
        "1 while a capacity loop is the leader of the cluster.",
        ["cluster"],
        {own: float(view.leads)},
    )
    silent = {own: view.loop_silent}
    yield metric("loop_report_age_seconds", "Time since the loop's last report.", ["cluster"], silent)
    if loop is None:
        return
    said = loop.metrics
    info = {(view.cluster, loop.holder, loop.policy): 1.0}
    yield metric("loop_info", "The loop that is the leader.", ["cluster", "holder", "policy"], info)
    for name, text in (
        ("cycles", "Cycles of the loop."),
        ("changes", "Changes of capacity that the loop has answered."),
        ("dropped", "Decisions dropped because capacity had moved on."),
        ("outages", "Outages of the ledger."),
    ):
        yield metric(f"loop_{name}", text, ["cluster"], {own: said.get(name)}, "counter")
    away = {own: said.get("away_s")}
    yield metric("loop_ledger_away_seconds", "Time without a ledger.", ["cluster"], away, "counter")
    for name, text in (
        ("latency", "From a change of capacity until its leases are written, of the newest 4096."),
        ("deciding", "Of a decision, of the newest 4096."),
    ):
        quantiles = said.get(f"{name}_s") or {}
        rows = {
            (view.cluster, share): quantiles.get(key)
            for key, share in (("p50", "0.5"), ("p95", "0.95"), ("p99", "0.99"), ("worst", "1"))
        }
        yield metric(f"loop_{name}_seconds", text, ["cluster", "quantile"], rows)
    memory = said.get("memory_mib")
    rows = {own: None if memory is None else memory * 2**20}
    yield metric("loop_memory_bytes", "Largest resident memory of the loop.", ["cluster"], rows)
    yield metric("loop_capacity_age_seconds", "Age of what is seen.", ["cluster"], {own: loop.capacity_age})
    yield metric("loop_problems", "Problems that the status shows.", ["cluster"], {own: len(view.problems)})


def _aggregation_metrics(cluster: str, service: ServiceView) -> Iterator["Metric"]:
    there, saved = (
        {plain_name(name): one for name, one in service.aggregators().items()},
        savings(service),
    )
    for name, text, value in (
        ("aggregators", "Aggregators of the shared service.", len(there)),
        ("aggregators_used", "Aggregators that have tensors.", saved["used"]),
        ("aggregation_private_servers", "Private servers that its trainings would have.", saved["private"]),
        ("aggregation_trainings", "Trainings that the service serves.", len(service.trainings())),
    ):
        yield metric(name, text, ["cluster"], {(cluster,): float(value)})
    labels = ["cluster", "aggregator"]
    for name, text, rows in (
        ("aggregator_updates", "Updates of tensors.", {key: one.updates for key, one in there.items()}),
        ("aggregator_moves", "Tensors given to others.", {key: one.moved for key, one in there.items()}),
    ):
        yield metric(name, text, labels, {(cluster, key): float(one) for key, one in rows.items()}, "counter")
    held = {
        (cluster, key): float(sum(tensor.bytes for own in one.held.values() for tensor in own.values()))
        for key, one in there.items()
    }
    yield metric("aggregator_bytes", "Bytes of parameters and moments held.", labels, held)


def _node_metrics(view: ClusterView) -> Iterator["Metric"]:
    labels = ["cluster", "market", "zone"]
    sums: dict[str, Counter[tuple[str, ...]]] = {
        name: Counter() for name in ("nodes", "cores", "gpus", "gpus_leased", "dollars_per_hour")
    }
    for node in view.nodes:
        key = (view.cluster, node.market, node.zone)
        sums["nodes"][key] += 1
        sums["cores"][key] += node.cores
        sums["gpus"][key] += node.gpus
        sums["gpus_leased"][key] += node.leased if node.gpus else 0
        sums["dollars_per_hour"][key] += node.price  # type: ignore[assignment]
    texts = {
        "nodes": "Nodes of the cluster.",
        "cores": "Processor cores of its nodes.",
        "gpus": "GPUs of its nodes.",
        "gpus_leased": "GPUs that apps hold.",
        "dollars_per_hour": "Price of its nodes.",
    }
    for name, rows in sums.items():
        yield metric(name, texts[name], labels, rows)
    notices = Counter((view.cluster, node.notice) for node in view.nodes if node.notice)
    yield metric("nodes_with_notice", "Nodes that are about to leave.", ["cluster", "kind"], notices)


def _app_metrics(view: ClusterView) -> Iterator["Metric"]:
    phases = Counter((view.cluster, app.kind, app.phase) for app in view.apps)
    yield metric("apps", "Apps that are not over.", ["cluster", "kind", "phase"], phases)
    labels = ["cluster", "app", "kind", "team"]
    for name, text, value in (
        ("gpus", "GPUs that an app holds.", lambda app: app.gpus),
        ("gpus_wanted", "GPUs that it has asked for.", lambda app: app.wanted),
        (
            "rho",
            "Finish-time fairness: expected time here over the time alone on an even share.",
            lambda app: app.rho,
        ),
        ("progress_ratio", "Share of its work that is done.", lambda app: app.progress),
        ("seconds_left", "Seconds that it expects to need.", lambda app: app.seconds_left),
        ("report_age_seconds", "Time since its last report.", lambda app: app.silent),
    ):
        rows = {(view.cluster, app.id, app.kind, app.team): value(app) for app in view.apps}
        yield metric(f"app_{name}", text, labels, rows)
    rows = {(view.cluster, app.id, app.kind, app.team): app.dollars for app in view.apps}
    yield metric("app_dollars", "What its leases have cost.", labels, rows, "counter")
