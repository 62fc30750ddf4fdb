"""The page of a cluster: whole, escaped, readable, small whatever happened."""

import hashlib
import re
from base64 import b64encode
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ebbflow.planners.model.capacity import Notice
from ebbflow.planners.model.ledger import (
    AppEntered,
    AppMoved,
    AppReport,
    AppSpec,
    Decided,
    Extended,
    Granted,
    Lease,
)
from ebbflow.tasks.drawing.axis import natural, ticks
from ebbflow.tasks.drawing.svg import STYLE, data_url
from ebbflow.tasks.drawing.wording import clock_text, label_text
from ebbflow.tasks.report.cluster import page as cluster_page
from ebbflow.tasks.report.cluster.drawing import spark_svg
from ebbflow.tasks.report.cluster.lanes import lanes
from ebbflow.tasks.report.cluster.page import PARTS, PageLimits, cluster_html, cluster_parts, digest
from ebbflow.tasks.report.cluster.picture import cluster_svg
from ebbflow.tasks.report.cluster.report import cluster_report
from ebbflow.tasks.report.cluster.spans import quiet
from ebbflow.tasks.report.cluster.values import DecisionRow, Sample
from ebbflow.tasks.report.cluster.words import decision_rows, side, verdict
from tests.cluster_day import simulated_day
from tests.cluster_events import GPU, START, Book, books, two_apps
from tests.tasks.report.test_page import Page as SmallPage

HOSTILE = "</style></script><script>alert(1)</script>\"'><img src=x onerror=alert(1)>\u202eevil\u2066 &amp; {{ 7*7 }}"
TEMPLATES = Path(cluster_page.__file__).parents[1] / "templates"


class Page(SmallPage):
    """A page whose bars hold their own tips."""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        super().handle_starttag(tag, attrs)
        if tag in ("rect", "line"):
            self.open.append(tag)
        elif tag == "input":
            assert self.open.pop() == tag


@pytest.fixture(scope="module")
def day():
    events, reports = simulated_day()
    return cluster_report(
        events, reports, cluster="gpu-eu", listed={"g5.2xlarge": 1.212, "m6i.4xlarge": 0.856}
    )


@pytest.fixture(scope="module")
def html(day) -> str:
    return cluster_html(day)


def hostile_report(name: str = HOSTILE):
    """Return a report in which every text that somebody else can choose is ``name``."""
    book = Book()
    node = replace(GPU, id=name, instance_type=name, zone=name, host=name)
    book.capacity(0, node, replace(node, id="other"), reason=name)
    for kind in ("training", "query"):
        spec = AppSpec(name + kind, kind, name, name, name, 2, 1, 2, deadline=START + 5, budget=0.001)
        book.write(1, AppEntered(spec))
    held = book.grant(2, name + "training", (name, 0), (name, 1), reason=name)
    book.write(2, AppMoved(name + "training", "running", name), AppMoved(name + "query", "running", name))
    book.capacity(3, notices=[Notice(name, START + 100)], reason=name)
    book.recall(4, held[:1], name)
    book.end(8, held[:1], name)
    book.capacity(9, left=[name], reason=name)
    inputs = {
        name: name,
        "apps": {name: {name: name, "rho": 1.0}},
        "list": [{"id": name, name: [name, {name: name}]}],
    }
    for kind in ("auction", "scaling", "replan", "guard", "recovery"):
        book.write(10, Decided(kind, name, name, 1, 0.1, inputs, {name: {name: {name: name}}, "pool": name}))
    book.write(11, AppMoved(name + "query", "failed", name))
    stages = [{"name": name, "status": name, "started": START + 3, "plan": name, "note": name}]
    said = AppReport(START + 11, message=name, work_left=9.0, job={"stages": stages, "goodput": 2.0})
    return cluster_report(
        book.events, {name + "training": said, name + "query": said}, cluster=name, pipeline=name
    )


# --- whole and self-contained -----------------------------------------------------------------------------------


def test_a_page_nests_and_needs_nothing_from_elsewhere(html):
    page = Page(html)
    assert [a for a in page.addresses if not a.startswith("#")] == []
    assert not {"img", "iframe", "link", "object", "embed"} & set(page.tags)
    assert page.tags.count("script") == 1
    outside = re.sub(r'xmlns="http://www.w3.org/2000/svg"', "", html)
    assert not re.search(r"(?i)\b(https?:)?//[a-z0-9.-]+\.[a-z]{2,}", outside)
    assert "url(" not in re.sub(r"url\(#[\w-]+\)", "", html)


def test_only_the_page_s_own_script_may_run(html):
    script = re.search(r"<script>(.*?)</script>", html, re.S)[1]
    known = b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = re.search(r'http-equiv="Content-Security-Policy" content="([^"]*)"', html)[1]
    assert f"script-src 'sha256-{known}'" in policy
    assert policy.startswith("default-src 'none'")
    assert "connect-src" not in policy
    assert "connect-src 'self'" in cluster_html(cluster_report([]), live=True)


@pytest.mark.parametrize(
    "name", [HOSTILE, "x" * 5000, "\u202e" + "אבג" * 30, "a\x00b\x1b[31m\ud800", "%s {0} {{x}} {% raw %}"]
)
def test_hostile_names_are_shown_as_text(name):
    report = hostile_report(name)
    html = cluster_html(report)
    page = Page(html)
    assert page.tags.count("script") == 1
    assert not {"img", "iframe"} & set(page.tags)
    assert label_text(name, 40)[:12] in page.text
    assert not re.search("[\u202a-\u202e\u2066-\u2069\x00\x1b]", html)
    assert len(html) < 200_000
    ElementTree.fromstring(cluster_svg(report))


def test_each_hostile_text_is_also_safe_in_attributes():
    Page(
        cluster_html(hostile_report('" onmouseover="alert(1)" x="'))
    )  # refuses attributes that begin with on


@given(books())
@settings(max_examples=12)
def test_any_history_renders(made):
    book, reports = made
    report = cluster_report(book.events, reports)
    page = Page(cluster_html(report))
    assert page.tags.count("script") == 1
    ElementTree.fromstring(cluster_svg(report))


@given(st.text(max_size=40))
@settings(max_examples=10)
def test_any_name_is_escaped(name):
    page = Page(cluster_html(hostile_report("<b>" + name)))
    assert "b" not in set(page.tags) - {"b"} or page.tags.count("script") == 1
    assert (
        label_text("<b>" + name, 80) in page.text
        or " ".join(label_text("<b>" + name, 80).split()) in page.text
    )


# --- what it says -------------------------------------------------------------------------------------------------


def test_a_page_says_what_matters_first(day, html):
    text = Page(html).text
    for fact in (
        "Cluster gpu-eu", verdict(day), "of GPU time leased", "deadlines met or on course", "on-demand",
        "rho-bounded", "went silent", "the budget of $12/h allows 2 more nodes, not 4",
    ):  # fmt: skip
        assert fact in text
    for app in day.apps:
        assert app.title in text


def test_the_verdict_of_two_apps():
    said = verdict(cluster_report(two_apps().events))
    assert said == "2 apps: 2 finished. 1 app would have been sooner alone on a fair share."
    assert verdict(cluster_report([])) == "No app has used the cluster in this time."


def test_what_somebody_should_look_at_comes_first():
    text = Page(cluster_html(hostile_report("Q"))).text
    for fact in (
        "Needs attention",
        "Q has failed: Q",
        "Q missed its deadline by 6.00 s",
        "of a budget of $0.0010",
    ):
        assert fact in text


def test_a_cluster_without_anything_is_a_page_too():
    text = Page(cluster_html(cluster_report([]))).text
    assert "No app has entered yet." in text


def test_tables_have_headers_and_names_and_sections_landmarks(html):
    assert html.count("<table") == html.count("<thead")
    assert all('scope="' in head for head in re.findall(r"<th [^>]*>", html))
    assert "<th>" not in html
    ids = re.findall(r'\sid="([^"]+)"', html)
    assert len(ids) == len(set(ids))
    for label in re.findall(r'aria-labelledby="([^"]+)"', html):
        assert label in ids
    for svg in re.findall(r"<svg [^>]*>", html):
        assert "aria-label" in svg or "aria-hidden" in svg or ' x="' in svg  # the last: a label within a bar
    assert '<html lang="en">' in html


def test_equal_decisions_in_a_row_are_one_row():
    rows = [
        DecisionRow(i, START + i, "auction", "", 1, "no allocation changes", outcome={"placements": {}})
        for i in range(5)
    ]
    rows.append(DecisionRow(9, START + 9, "guard", "x", 1, "no"))
    shown, left_out = decision_rows(rows, 100)
    assert [(row["kind"], row["count"], row["quiet"]) for row in shown] == [
        ("guard", 1, False),
        ("auction", 5, True),
    ]
    assert left_out == []


def test_of_many_decisions_those_without_effect_go_first_then_the_oldest():
    rows = [
        DecisionRow(
            i, START + i, "auction", "", 1, f"number {i}", outcome={"placements": {"x": 1} if i % 2 else {}}
        )
        for i in range(100)
    ]
    shown, left_out = decision_rows(rows, 10)
    assert [row["number"] for row in shown] == list(range(99, 80, -2))
    assert left_out == ["90 decisions, first those without effect, then the oldest"]


@pytest.mark.parametrize(
    ("kind", "outcome", "silent"),
    [
        ("auction", {"placements": {}, "gpus": {"x": 1}}, True),
        ("auction", {"placements": {"x": {}}, "gpus": {}}, False),
        ("replan", {"kind": "stay"}, True),
        ("replan", {"kind": "switch"}, False),
        ("guard", {}, False),
        ("scaling", {}, True),
    ],
)
def test_a_decision_is_quiet_when_everything_stays(kind, outcome, silent):
    assert quiet(DecisionRow(1, 0.0, kind, "", 1, "", outcome=outcome)) is silent


def test_inputs_become_facts_and_tables():
    found = side({"policy": "themis", "apps": {"x": {"rho": 1.5, "held": 2}, "y": {"rho": None}}, "free_gpus": 3,
                  "estimates": [{"id": "p1", "seconds": 3.25}], "nested": {"a": 1, "b": [1, 2]}})  # fmt: skip
    assert found.facts == (("policy", "themis"), ("free gpus", "3"), ("nested", "a 1, b 1, 2"))
    assert [(grid.name, grid.columns) for grid in found.tables] == [
        ("apps", ("rho", "held")),
        ("estimates", ("seconds",)),
    ]
    assert found.tables[0].rows[1] == {"name": "y", "cells": ["–", ""]}
    assert side({"apps": {"x": {"rho": 1}}}, {"x": "1 first"}).tables[0].rows[0]["name"] == "1 first"
    many = side({f"k{i}": i for i in range(60)} | {"t": {f"r{i}": {"c": 1} for i in range(20)}})
    assert (len(many.facts), many.more) == (24, 36 + 8)


# --- time ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("span", [0.01, 3, 47, 361, 4000, 86_400, 864_000, 4e8])
def test_ticks_are_few_at_first_and_never_twice(span):
    levels = ticks(START + 11.7, START + 11.7 + span)
    assert 1 <= len(levels[0]) <= 6 or span < 1
    places = [round(x, 6) for level in levels for x, _ in level]
    assert len(places) == len(set(places))
    assert all(0 <= x <= 100 for x in places)
    assert all(label for level in levels for _, label in level)


@pytest.mark.parametrize(
    ("at", "step", "text"),
    [
        (START, 1.0, "14:13:20"),
        (START, 60.0, "14:13"),
        (START, 86400.0, "Sep 21"),
        (START + 0.25, 0.01, "14:13:20.250"),
        (START + 35_200, 3600.0, "Sep 22"),
        (START + 35_200, 1.0, "00:00:00"),
        (float("inf"), 1.0, "∞ s"),
    ],
)
def test_clock_texts(at, step, text):
    assert clock_text(at, step) == text


def test_names_sort_by_their_numbers():
    assert sorted(["node-10", "node-2", "a", "node-2-b", "²"], key=natural)[:3] == ["a", "node-2", "node-2-b"]


def test_lines_keep_their_extremes():
    samples = [Sample(START + i, 5.0) for i in range(5000)]
    samples[2345] = Sample(START + 2345, 99.0)
    svg = spark_svg(samples, START, START + 5000, "goodput")
    assert len(svg) < 8000
    assert ",2.0 " in svg  # the highest reaches the top
    assert 'x2="6"' in spark_svg(samples[:1], START, START + 10, "one")  # a dash


def test_a_gpu_that_passes_from_one_lease_to_the_next_is_drawn_once():
    book = two_apps()
    numbers = book.grant(4000, "x", ("a", 0))
    book.end(4100.3, numbers)
    at = book.start + 4100.0  # decided on before the end of the lease before it was written
    book.write(4100.3, Granted((Lease(numbers[0] + 1, "x", "a", 0, at, at + 600, 1),)))
    report = cluster_report(book.events, now=START + 4200)
    drawn = [
        bar for lane in lanes(report).apps if lane.name.startswith("1 ") for bar in lane.bars if bar.label
    ]
    assert {bar.label for bar in drawn} == {"1", "2"}
    assert max(bar.value for bar in lanes(report).capacity[0].bars if bar.style == "used") == 0.75


# --- size ------------------------------------------------------------------------------------------


def crowded(events: int, apps: int = 120) -> Book:
    """Return a book of about ``events`` events: short leases of many apps on many nodes, and an auction each time."""
    book = Book()
    book.capacity(0, *(replace(GPU, id=f"node-{i:03d}") for i in range(60)))
    for i in range(apps):
        book.write(
            1,
            AppEntered(
                AppSpec(f"app-{i:03d}", "training", f"team-{i % 7}", f"a training called {i}", gpus=2)
            ),
        )
    at, held = 2.0, []
    while len(book.events) < events:
        at += 7.0
        if held:
            book.write(at, Extended(tuple(held[1:]) or tuple(held), START + at + 60))
            book.end(at, held[:1])
            held = held[1:]
        if free := book.free():
            app = f"app-{len(book.events) % apps:03d}"
            held += book.grant(at, app, *free[:2], reason=f"round {len(book.events)}")
        bids = {f"app-{i:03d}": {"rho": i / 7, "held": 1, "goodput": 12.5} for i in range(12)}
        book.write(at, Decided("auction", f"round {len(book.events)}", seconds=0.01, inputs={"apps": bids},
                               outcome={"placements": {"x": 1}}))  # fmt: skip
    return book


def test_a_page_of_many_events_stays_small_and_says_what_it_left_out():
    report = cluster_report(crowded(5_000).events)
    html = cluster_html(report)
    assert len(html.encode()) < cluster_page.MOST
    assert "Left out here" in html
    picture = lanes(report, bars=300)
    assert picture.drawn < 3000
    assert any("drawn together" in note for note in picture.left_out)
    assert len(cluster_svg(report).encode()) < 200_000
    assert lanes(report).drawn <= 9000 + 2000
    small = cluster_html(report, most=400_000)
    assert len(small.encode()) < 400_000


def test_the_picture_is_an_address_of_its_own(day):
    svg = cluster_svg(day)
    root = ElementTree.fromstring(svg)
    assert root.attrib["role"] == "img"
    assert "resnet-50 0" in svg
    assert data_url(svg).startswith("data:image/svg+xml;base64,")


# --- parts ------------------------------------------------------------------------------------------


def test_parts_change_only_when_what_they_say_does():
    book = two_apps()
    before = cluster_parts(cluster_report(book.events))
    again = cluster_parts(cluster_report(book.events))
    assert tuple(before) == PARTS
    assert {n: digest(p) for n, p in before.items()} == {n: digest(p) for n, p in again.items()}
    book.write(3610, Decided("guard", "no"))
    after = cluster_parts(cluster_report(book.events))
    changed = {name for name in PARTS if digest(after[name]) != digest(before[name])}
    assert changed == {"head", "timeline", "decisions"}


def test_a_smaller_room_is_smaller():
    assert PageLimits().smaller().decisions == 200
    assert PageLimits(4, 4, 4, 4, 4, 4, 4).smaller() == PageLimits(4, 4, 4, 4, 4, 4, 4)


# --- contrast ------------------------------------------------------------------------------------------


def colours(text: str, dark: bool) -> dict[str, str]:
    """Return the variables of a style sheet in one scheme."""
    light, *rest = text.split("@media screen and (prefers-color-scheme:dark)")
    found = dict(re.findall(r"--([\w-]+):(#[0-9a-f]{3,6})\b", light))
    return found | dict(re.findall(r"--([\w-]+):(#[0-9a-f]{3,6})\b", "".join(rest))) if dark else found


def luminance(colour: str) -> float:
    digits = colour[1:] if len(colour) == 7 else "".join(c * 2 for c in colour[1:])
    channels = [int(digits[i : i + 2], 16) / 255 for i in (0, 2, 4)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    high, low = sorted((luminance(one), luminance(other)), reverse=True)
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("dark", [False, True])
def test_text_has_the_contrast_that_wcag_asks_for(dark):
    page = colours((TEMPLATES / "style.css").read_text(), dark)
    bars = colours((TEMPLATES / "cluster.css").read_text(), dark)
    drawn = colours(STYLE, dark)
    for ink in ("ink", "soft", "accent", "good", "bad", "switch"):
        for ground in ("bg", "panel"):
            assert contrast(page[ink], page[ground]) >= 4.5, (ink, ground)
    for number in range(6):  # labels on bars, on both colours of their stripes
        for tint in ("t", "u"):
            assert contrast(drawn["ink"], bars[f"{tint}{number}"]) >= 4.5, (tint, number)
    for ink in ("ink", "soft", "fail", "expect", "reused", "switch"):
        least = 4.5 if ink in ("ink", "soft") else 3.0  # signs, which have a shape and a name too
        assert contrast(drawn[ink], drawn["bg"]) >= least, ink


def test_a_time_is_compared_with_its_expectation() -> None:
    from ebbflow.tasks.drawing.wording import against

    assert against(45.0, 30.0) == "50 % slower than the 30.0 s expected"
    assert against(15.0, 30.0) == "50 % faster than the 30.0 s expected"
    assert against(1.5, 0.03) == "50 times the 0.03 s expected"
    assert against(30.0, None) == "no expectation at start"
