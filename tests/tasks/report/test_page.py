"""Pages are whole, self-contained, and show hostile text as text."""

from html.parser import HTMLParser

import pytest

from ebbflow.tasks.query.report import PlanReport
from ebbflow.tasks.report.query import explain_html, report_html
from tests.tasks.sample import (
    QUERY,
    bare_report,
    hostile_report,
    sample_plans,
    sample_report,
    single_stage_report,
)

VOID = {"meta", "br", "rect", "line", "polyline", "polygon", "path", "link"}


class Page(HTMLParser):
    """Collects tags and text, and checks that tags nest."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.text = ""
        self.addresses: list[str] = []
        self.feed(html)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.addresses += [v or "" for k, v in attrs if k in ("src", "href", "xlink:href", "data")]
        assert not any(k.startswith("on") for k, _ in attrs)
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


@pytest.mark.parametrize("make", [sample_report, hostile_report, bare_report, single_stage_report])
def test_a_report_page_nests_and_needs_nothing_from_elsewhere(make):
    page = Page(report_html(make()))
    assert page.addresses == []
    assert not {"script", "img", "iframe", "link", "b>x"} & set(page.tags)


def test_a_report_page_says_what_happened_and_why():
    text = Page(report_html(sample_report())).text
    for fact in (
        "44.8 s", "57 % slower than the 28.6 s expected", "qoop", "✓ verified", "saving 17.0 s", "never",
        "less than the 10 % a switch must gain", "left: worker-3, worker-4", "12 (3 failed)",
        "p1 → p2", QUERY, "current_date is fixed at 2026-09-21", "/data/results/q5.parquet",
    ):  # fmt: skip
        assert fact in text


def test_hostile_text_is_shown_as_text():
    html = report_html(hostile_report())
    assert "</script>" not in html
    assert "<img" not in html
    assert "<b>x" not in html
    assert "</script><b>x</b>&\"'<img src=x onerror=alert(1)>" in Page(html).text


def test_an_explain_page_compares_the_candidates():
    page = Page(explain_html(sample_plans(), query=QUERY, title="Q5", capacity="4 cores on 4 nodes"))
    for fact in (
        "3 candidate plans for 4 cores on 4 nodes",
        "p1 ✓ chosen",
        "does not fit",
        "121 core-s",
        "12 GiB",
    ):
        assert fact in page.text
    assert page.tags.count("svg") == 3


def test_an_explain_page_escapes_plans_and_query():
    plans = hostile_report().plans
    html = explain_html(plans, query="</pre></script><b>", title="<b>", capacity="<b>", problems=("<b>",))
    page = Page(html)
    assert "</pre></script><b>" in page.text
    assert "</script>" not in html


def test_an_explain_page_without_estimates_or_plans_is_whole():
    Page(explain_html(()))
    Page(explain_html((PlanReport("p", ()),)))
