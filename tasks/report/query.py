"""Reports as single HTML files: no network, light and dark, for screen, phone and paper."""

from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from functools import cache
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from ebbflow.tasks.drawing.wording import (
    against,
    bytes_text,
    count_text,
    memory_text,
    number_text,
    plural,
    seconds_text,
)
from ebbflow.tasks.query.report import MARKS, DecisionReport, PlanReport, QueryReport
from ebbflow.tasks.report.dag import Direction, dag_svg
from ebbflow.tasks.report.timeline import timeline_svg

_DEEP = 8  # stages; a longer chain is drawn downwards
_PHONE = 380  # width of pictures on a narrow screen


def report_html(report: QueryReport) -> str:
    """Return ``report`` as one self-contained page; all text from the report is escaped."""
    reused = report.with_status("reused")
    return (
        environment()
        .get_template("report.html.j2")
        .render(
            report=report,
            against=against(report.seconds, report.expected_seconds),
            reused=reused,
            saved=sum(s.saved_seconds for s in reused),
            numbered=list(_numbered(report.decisions)),
            shown_plans=_shown_plans(report),
            timeline_wide=trusted(timeline_svg(report)),
            timeline_narrow=trusted(timeline_svg(report, _PHONE)),
        )
    )


def explain_html(
    plans: Sequence[PlanReport],
    *,
    query: str = "",
    title: str = "",
    capacity: str = "",
    problems: Sequence[str] = (),
) -> str:
    """Return the candidates of a query side by side with a table that compares them.

    ``capacity`` says in words what the estimates are for, such as "4 cores on 4 nodes".
    """
    return (
        environment()
        .get_template("explain.html.j2")
        .render(plans=plans, query=query, title=title, capacity=capacity, problems=problems)
    )


def page(template: str, pictures: Mapping[str, str], **values: object) -> str:
    """Return the page of one of our templates; ``pictures`` are SVG texts made here, everything else is escaped."""
    drawn = {name: trusted(svg) for name, svg in pictures.items()}
    return environment().get_template(template).render(pictures=drawn, **values)


def _numbered(decisions: Sequence[DecisionReport]) -> Iterator[tuple[int | None, DecisionReport]]:
    """Yield decisions with the number that the timeline gives to switches."""
    switches = 0
    for decision in decisions:
        switches += decision.kind == "switch"
        yield (switches if decision.kind == "switch" else None), decision


def _shown_plans(report: QueryReport) -> list[tuple[str, PlanReport]]:
    first, last = report.first_plan, report.last_plan
    if first and last and first.id != last.id:
        return [("First plan", first), ("Last plan", last)]
    plan = last or first
    shown = [("Plan", plan)] if plan else []
    # Back at its first plan, a run has still used others; the first switch's target tells most.
    away = next((p for s in report.switches if (p := report.plan(s.target)) and p != plan), None)
    return [*shown, ("In between", away)] if away else shown


def _picture(plan: PlanReport, direction: Direction) -> Markup:
    deep = len(plan.stages) > _DEEP  # would be wider than the page
    return trusted(dag_svg(plan, "down" if deep else direction))


def trusted(svg: str) -> Markup:
    """Return a picture of ours as it stands."""
    # Our own pictures, whose every text and attribute went through the escaping of ``svg.py``.
    return Markup(svg)  # noqa: S704


def _date(epoch_seconds: float) -> str:
    return datetime.fromtimestamp(epoch_seconds, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1000:.1f} ms" if seconds < 1 else seconds_text(seconds)


@cache
def environment() -> Environment:
    """Return where our templates are, escaping everything; its filters are the words of ``wording``."""
    made = Environment(
        loader=FileSystemLoader(Path(__file__).parent / "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters.update(
        seconds=seconds_text,
        count=count_text,
        size=bytes_text,
        memory=memory_text,
        number=number_text,
        plural=plural,
        milliseconds=_milliseconds,
        date=_date,
    )
    made.globals.update(picture=_picture, marks=MARKS)
    return made
