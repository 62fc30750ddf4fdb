"""``ebbflow explain``: the candidate plans as a table, a page or one JSON document."""

from collections.abc import Collection
from dataclasses import dataclass

from rich.console import Console
from rich.text import Text

from ebbflow.flows.query.summary import print_candidates
from ebbflow.planners.model import Share
from ebbflow.tasks.drawing.codec import to_text
from ebbflow.tasks.query.report import PlanReport
from ebbflow.tasks.query.request import QueryRequest
from ebbflow.tasks.query.run import explain
from ebbflow.tasks.report.files import write_reports
from ebbflow.tasks.report.query import explain_html

FORMAT = 1  # of the document; grows when a key changes its meaning


@dataclass(frozen=True, slots=True)
class CandidatePlans:
    """The candidate plans of a query as one document: stages, costs and notes."""

    query: str  # its SQL
    name: str  # display name, may be empty
    capacity: str  # planned for, as the user wrote it
    plans: tuple[PlanReport, ...]
    notes: tuple[str, ...]  # blocks left as written and why, frozen functions, rewrites


def explain_on_terminal(
    request: QueryRequest,
    share: Share,
    capacity: str,
    without: Collection[str] = (),
    *,
    as_json: bool = False,
    sql_text: bool = False,
) -> None:
    """Plan a query and print its candidates on standard output, notes on standard error.

    Args:
        request: the query; its ``report`` names the files for the page and the data.
        share: capacity to plan for.
        capacity: the same as the user wrote it, for the page.
        without: rewrites that the planner leaves out; see ``planners.query.planner.REWRITE_NAMES``.
        as_json: print one JSON document instead of the table.
        sql_text: print the SQL of the chosen plan's stages after the table.

    Raises:
        OptionError: an unknown rewrite.
        EbbflowError: the query cannot be planned, or a file not be written.
    """
    plans, notes = explain(request, share, without=without)
    messages = Console(stderr=True)
    document = to_text(CandidatePlans(request.sql, request.name, capacity, plans, notes), FORMAT)
    if as_json:
        print(document, end="")
    else:
        _print_plans(plans, sql_text)
        for note in notes:
            messages.print(Text(f"note: {note}"), soft_wrap=True)

    def page() -> str:
        return explain_html(plans, query=request.sql, title=request.name, capacity=capacity, problems=notes)

    write_reports(request.report, html=page, json=lambda: document)
    for path in request.report:
        messages.print(Text(f"report: {path}"), soft_wrap=True)


def _print_plans(plans: tuple[PlanReport, ...], sql_text: bool) -> None:
    console = Console()
    print_candidates(plans, console)
    if not sql_text:
        return
    chosen = next(plan for plan in plans if plan.chosen)
    for stage in chosen.stages:
        console.print(f"\n-- {stage.name} → ckpt_{stage.fingerprint}", style="bold", highlight=False)
        console.print(stage.sql, highlight=False, markup=False, soft_wrap=True)
