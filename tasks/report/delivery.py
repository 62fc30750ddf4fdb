"""A query run to its end, with its rows and its reports where the request wants them."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from ebbflow.infra.query.results import write_result
from ebbflow.tasks.report.files import write_reports

if TYPE_CHECKING:
    from ebbflow.infra.clock import Clock
    from ebbflow.planners.query.running.execution import Execution
    from ebbflow.tasks.query.opening import OpenedEngine
    from ebbflow.tasks.query.request import QueryRequest
    from ebbflow.tasks.query.run import Listener, Orchestrator, QueryOutcome


def execute(
    request: "QueryRequest",
    orchestrator: "Orchestrator | None" = None,
    clock: "Clock | None" = None,
    opened: "OpenedEngine | None" = None,
    follow: "Callable[[Execution], Listener] | None" = None,
) -> "QueryOutcome":
    """Run ``request`` to its end, write what it asks for, and return the outcome; see ``tasks.query.run.execute``."""
    from ebbflow.tasks.query import run

    orchestrator = orchestrator or run.PlainOrchestrator()
    with served(request, orchestrator, clock):
        outcome = run.execute(request, orchestrator, clock, opened, follow)
    return deliver(outcome, request)


@contextmanager
def served(
    request: "QueryRequest", orchestrator: "Orchestrator", clock: "Clock | None" = None
) -> Iterator[None]:
    """Serve the metrics of a query meanwhile where it asks for that; one that does not imports nothing for them."""
    if not request.metrics:
        yield
        return
    from ebbflow.tasks.report.query_metrics import serving_query

    with serving_query(request, orchestrator, clock):
        yield


def deliver(outcome: "QueryOutcome", request: "QueryRequest") -> "QueryOutcome":
    """Write the rows of a finished query and its reports to the files that ``request`` names; return the outcome.

    Raises ``StorageError`` for what cannot be written; what comes after it is not written then.
    """
    if request.output_place:
        write_result(outcome.result, request.output_place)
    if request.into and outcome.pins is not None:  # a run again is another one only now
        outcome.pins.forget()
    report = outcome.report

    def page() -> str:
        from ebbflow.tasks.report.query import report_html  # most queries write no page

        return report_html(report)

    write_reports(request.report, html=page, json=report.to_json)
    return outcome
