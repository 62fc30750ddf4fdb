"""``/metrics`` in Prometheus' text format and ``/healthz``, served by a process that was asked to.

https://prometheus.io/docs/instrumenting/exposition_formats/
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from ebbflow.infra.machine.page_server import PageResponse, PageServer
from ebbflow.planners.model.options import address_of

if TYPE_CHECKING:
    from prometheus_client.core import Metric

_PLAIN = "text/plain; charset=utf-8"
_FORMAT = "text/plain; version=0.0.4; charset=utf-8"


class UnavailableError(Exception):
    """What is to be told cannot be known now; the text says why."""


def metric(
    name: str,
    text: str,
    labels: Sequence[str],
    rows: Mapping[tuple[str, ...], float | None],
    kind: str = "gauge",
) -> "Metric":
    """Return the metric ``ebbflow_NAME`` with a sample for each row of labels; rows without a value are left out."""
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

    made = CounterMetricFamily if kind == "counter" else GaugeMetricFamily
    found = made(f"ebbflow_{name}", text, labels=labels)
    for key, value in rows.items():
        if value is not None:
            found.add_metric(list(key), float(value))
    return found


def exposition(metrics: Iterable["Metric"]) -> str:
    """Return metrics in Prometheus' text format."""
    from prometheus_client import CollectorRegistry, generate_latest

    found = list(metrics)

    class Collector:
        def collect(self) -> Iterator["Metric"]:
            return iter(found)

    registry = CollectorRegistry(auto_describe=False)
    registry.register(Collector())
    return generate_latest(registry).decode()


@contextlib.contextmanager
def serving(address: str, look: Callable[[], tuple[Iterable["Metric"], str]]) -> Iterator[PageServer | None]:
    """Serve ``/metrics`` and ``/healthz`` meanwhile; nothing where no address is given.

    Args:
        address: see ``address_of``; "": none.
        look: returns the metrics, and why the process is not healthy ("": it is); called in any thread. It raises
            ``UnavailableError`` where that cannot be known.

    Raises ``OptionError`` for an address that is none, and ``InfraError`` for a port that is taken.
    """
    if not address:
        yield None
        return

    def answer(path: str, query: Mapping[str, str]) -> PageResponse | None:
        if path not in ("/metrics", "/healthz"):
            return None
        try:
            metrics, why = look()
        except UnavailableError as error:
            return PageResponse(f"{error}\n", _PLAIN, 503)
        if path == "/metrics":
            return PageResponse(exposition(metrics), _FORMAT)
        return PageResponse(f"{why or 'ok'}\n", _PLAIN, 503 if why else 200)

    host, port = address_of(address)
    with PageServer(answer, port, host) as server:
        yield server
