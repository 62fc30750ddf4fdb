"""A cluster's report: figures checked by hand, and what must hold of any events."""

import json
from dataclasses import replace
from math import inf
from types import SimpleNamespace
from unittest.mock import patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ebbflow.infra.errors import ReportError
from ebbflow.planners.errors import OptionError
from ebbflow.planners.model.capacity import Notice
from ebbflow.planners.model.ledger import (
    AppEntered,
    AppMoved,
    AppReport,
    AppSpec,
    Decided,
    Event,
    Extended,
    Past,
    Saved,
)
from ebbflow.planners.model.ledger_state import State, fold
from ebbflow.tasks.query.app import StageTimes
from ebbflow.tasks.query.report import StageReport
from ebbflow.tasks.report.cluster import history as cluster_history
from ebbflow.tasks.report.cluster.history import History
from ebbflow.tasks.report.cluster.report import ClusterReport, cluster_report
from ebbflow.tasks.report.cluster.spans import KeptInputs, Shown
from ebbflow.tasks.report.cluster.words import decision_rows
from tests.cluster_day import simulated_day
from tests.cluster_events import CORES, START, A, B, Book, books, training, two_apps


def report_of(book: Book, reports=None, **options) -> ClusterReport:
    return cluster_report(book.events, reports, **options)


# --- apps ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("deadline", "ended", "left", "state", "margin"),
    [
        (4000.0, True, None, "met", 390.0),
        (3000.0, True, None, "missed", -610.0),
        (9000.0, False, 1000.0, "on course", 9000 - 3611 - 1000.0),
        (4000.0, False, 1000.0, "late", 4000 - 3611 - 1000.0),
        (3600.0, False, 1000.0, "missed", -11.0),
        (9000.0, False, None, "open", None),
        (None, True, None, "", None),
    ],
)
def test_deadlines(deadline, ended, left, state, margin):
    book = Book()
    book.capacity(0, A)
    book.write(0, training("x", deadline=None if deadline is None else START + deadline))
    book.write(3610, AppMoved("x", "finished" if ended else "running"))
    if not ended:
        book.write(3611, Saved("x", "s3://x"))
    x = report_of(book, {"x": AppReport(START + 3610, seconds_left=left)}).apps[0]
    assert x.deadline_state == state
    assert x.margin == (None if margin is None else pytest.approx(margin))


def test_waiting_is_time_without_a_lease_and_restarts_are_other_placements():
    book = Book()
    book.capacity(0, A, B)
    book.write(0, training("x"))
    first = book.grant(100, "x", ("a", 0))  # waited 100 s
    book.write(100, AppMoved("x", "running"))
    more = book.grant(200.2, "x", ("a", 1))  # larger: a restart
    book.recall(300, first + more)
    moved = book.grant(300.5, "x", ("b", 0), ("b", 1))  # of one move: a restart
    book.end(330, first + more)
    book.end(400, moved)  # paused
    again = book.grant(450, "x", ("b", 0), ("b", 1))  # the same place, after a pause of 50 s
    renewed = [again[0]]
    book.end(500, renewed)
    book.grant(500, "x", ("b", 0))  # the same GPUs without a pause
    book.write(600, AppMoved("x", "finished"))
    x = report_of(book).apps[0]
    assert x.first_wait == 100
    assert x.waited == pytest.approx(150)
    assert x.restarts == 3


def test_an_app_that_comes_back_keeps_its_number_and_its_time_away_does_not_count():
    book = two_apps()
    book.write(4000, AppEntered(book.state.apps["x"].spec))
    numbers = book.grant(4100, "x", ("a", 0))
    book.end(4200, numbers)
    book.write(4200, AppMoved("x", "finished"))
    x = report_of(book).app("x")
    assert (x.number, x.returns) == (1, 1)
    assert x.rho.value == pytest.approx((1840 + 200) / ((3660 + 100) / min(x.rho.share, 2)))


def test_a_pipeline_is_its_apps_and_their_time():
    book = Book()
    book.capacity(0, A, B)
    book.write(0, training("other"))
    book.write(100, training("mine", pipeline="nightly"))
    mine = book.grant(110, "mine", ("a", 0))
    other = book.grant(110, "other", ("b", 0))
    book.end(410, mine)
    book.write(400, Decided("auction", "everyone"), Decided("guard", "not for mine", "other"))
    book.write(410, AppMoved("mine", "finished"))
    book.end(900, other)
    report = report_of(book, pipeline="nightly")
    assert (report.since, report.until) == (START + 100, START + 410)
    assert [app.id for app in report.apps] == ["mine"]
    assert [d.reason for d in report.decisions] == ["everyone"]
    assert report.money.total.leased_hours == pytest.approx(600 / 3600)  # of the whole cluster
    assert report.money.leased_dollars == pytest.approx(300 / 3600)


# --- what happened --------------------------------------------------------------------------------------------------


def test_changes_of_capacity_say_what_became_of_each_node():
    book = Book()
    book.capacity(0, A, B, replace(A, id="c"), replace(A, id="d"))
    book.write(0, training("x"))
    held = book.grant(1, "x", ("a", 0), ("c", 0))
    book.capacity(10, notices=[Notice("d", START + 500, "rebalance")])
    book.capacity(20, notices=[Notice("a", START + 140), Notice("d", START + 500, "rebalance")])
    book.recall(21, held[:1])
    book.end(60, held[:1])
    book.capacity(140, left=["a"])
    book.capacity(150, left=["c"])
    book.capacity(160, left=["b", "d"])
    report = report_of(book)
    found = [(c.kind, c.nodes, c.leases) for c in report.changes]
    assert found == [
        ("came", ("a", "b", "c", "d"), 0),
        ("advice", ("d",), 0),
        ("notice", ("a",), 1),
        ("reclaimed", ("a",), 0),
        ("lost", ("c",), 1),
        ("left", ("b", "d"), 0),
    ]
    assert [step.gpus for step in report.capacity] == [8, 8, 8, 6, 4, 0]
    assert [step.leaving for step in report.capacity] == [0, 0, 1, 0, 0, 0]
    latency = {row.name: row for row in report.latency}
    assert latency["a notice to the revocation of the node's leases"].median == pytest.approx(1.0)
    assert latency["a revocation to the release of the GPU"].most == pytest.approx(39.0)
    assert latency["an app's arrival to its first lease"].count == 1


def test_scaling_targets_say_what_came_of_them():
    book = Book()
    book.capacity(0, A)
    book.write(10, Decided("scaling", "two more", outcome={"pool": "gpu", "nodes": 3}))
    book.capacity(100, B, replace(A, id="c"))
    book.write(200, Decided("scaling", "one less", outcome={"pool": "gpu", "nodes": 2}))
    book.write(300, Decided("scaling", "of another pool", outcome={"pool": "cores", "nodes": 2}))
    book.capacity(400, left=["c"])
    became = [row.became for row in report_of(book).decisions]
    assert became[0] == "2 nodes came after 90.0 s to 90.0 s"
    assert became[1] == "1 node left"
    book.capacity(450, replace(A, id="cores-1"))
    assert report_of(book).decisions[2].became == "1 node came after 150 s"  # not the one that left


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["auction", "scaling", "guard", "replan"]),
            st.sampled_from(["", "x", "y"]),
            st.sampled_from(["why", "because"]),
            st.sampled_from([{}, {"placements": {}}, {"pool": "gpu", "nodes": 2}, {"kind": "switch"}]),
            st.booleans(),
        ),
        max_size=60,
    ),
    st.sampled_from(["", "mine"]),
    st.sampled_from([None, 30.0]),
)
def test_a_page_that_follows_a_ledger_shows_the_same_and_forgets_what_it_does_not_show(made, pipeline, until):
    most, book = 4, Book()
    book.capacity(0, A)
    book.write(0, training("x", pipeline="mine"), training("y"))
    for number, (kind, app, reason, outcome, grown) in enumerate(made):
        book.write(number, Decided(kind, reason, app, inputs={"n": number, "pool": "gpu"}, outcome=outcome))
        if grown:
            book.capacity(number + 0.5, replace(A, id=f"gpu-{number}"))
    end = inf if until is None else START + until
    with patch.object(cluster_history, "DECISIONS", most):
        kept = History(shown=Shown(until=end, pipeline=pipeline))
    for event in book.events:
        kept.add(event)
    asked = {"pipeline": pipeline, "until": None if until is None else end}
    shown, whole = cluster_report(kept, **asked), report_of(book, **asked)
    assert decision_rows(shown.decisions, most) == decision_rows(whole.decisions, most)
    assert [row.number for row in shown.decisions] == [row.number for row in whole.decisions]
    scaled = sum(decided.kind == "scaling" for _, decided in kept.decisions)
    held = sum("n" in decided.inputs for _, decided in kept.decisions)
    assert held <= 2 * most + scaled
    assert held == sum("n" in event.change.inputs for event, _ in kept.decisions)


def test_equal_scalings_do_not_pile_up():
    rows, gone = [Decided("scaling", "more", inputs={"n": n}) for n in range(40)], list[int]()
    kept = KeptInputs(4, gone.append)
    for place, decided in enumerate(rows):
        kept.add(place, decided)
    assert gone == list(range(36))


def test_figures_of_auctions_become_lines_over_time():
    book = two_apps()
    for at, rho in ((3700, 1.5), (3800, 1.25)):
        bids = {
            "x": {"rho": rho, "goodput": 100 * rho, "held": 1},
            "unknown": {"rho": 1.0},
            "y": {"rho": None},
        }
        book.write(at, Decided("auction", "bids", inputs={"apps": bids}))
    x, y = report_of(book).apps
    assert [sample.value for sample in x.rhos] == [1.5, 1.25]
    assert [sample.value for sample in x.goodput] == [150.0, 125.0]
    assert y.rhos == ()


def test_stages_are_what_a_query_reports_and_odd_ones_are_left_out():
    book = Book()
    book.capacity(0, replace(CORES, id="w"))
    book.write(0, AppEntered(AppSpec("q", "query")), AppMoved("q", "running"))
    book.write(50, Decided("replan", "p2 is sooner", "q", outcome={"kind": "switch"}))
    book.write(60, Decided("replan", "p2 it stays", "q", outcome={"kind": "stay"}))
    book.write(100, AppMoved("q", "finished"))
    stages = [
        {
            "name": "one",
            "status": "completed",
            "started": START + 5,
            "ended": START + 20,
            "rows": 7,
            "plan": "p1",
        },
        {"name": "two", "status": "running", "started": START + 20, "ended": None},
        {"name": "later", "started": START + 5000},
        {"name": "odd", "started": "never"},
        "nonsense",
    ]
    report = report_of(book, {"q": AppReport(START + 100, job={"stages": stages})})
    assert [(s.name, s.since - START, s.until - START, s.rows) for s in report.stages] == [
        ("one", 5, 20, 7), ("two", 20, 100, 0),
    ]  # fmt: skip
    assert report.apps[0].replans == 1


def test_what_the_loop_says_of_its_pace_is_told_first():
    book = two_apps()
    metrics = {"changes": 9, "latency_s": {"p50": 0.01, "p95": 0.1, "p99": 0.2, "worst": 0.3}}
    row = report_of(book, {"_loop": AppReport(START + 3610, job={"metrics": metrics})}).latency[0]
    assert (row.count, row.median, row.p99, row.most) == (9, 0.01, 0.2, 0.3)
    assert report_of(book, {"_loop": AppReport(START, job={"metrics": {"latency_s": {"p50": None}}})}).app(
        "x"
    )


def test_time_goes_on_to_now():
    book = two_apps()
    assert report_of(book).until == START + 3610
    assert report_of(book, now=START + 4000).until == START + 4000
    assert report_of(book, now=START).until == START + 3610


def test_nothing_at_all_is_a_report_too():
    report = cluster_report([])
    assert (report.number, report.seconds, report.apps) == (0, 0, ())


def test_clocks_that_differ_do_not_turn_time_back():
    book = two_apps()
    later = replace(
        book.events[-1], number=len(book.events) + 1, at=START - 500, change=Decided("guard", "late")
    )
    report = cluster_report([*book.events, later])
    assert (report.since, report.until) == (START, START + 3610)
    assert report.decisions[-1].reason == "late"
    odd = [
        replace(event, at=START + (event.at - START) * (1 if event.number % 2 else 0.5))
        for event in book.events
    ]
    assert all(app.service >= 0 and app.waited >= 0 for app in cluster_report(odd).apps)


def test_an_event_that_cannot_follow_is_refused_and_changes_nothing():
    book = two_apps()
    history = History.of(book.events)
    with pytest.raises(OptionError, match="cannot follow"):
        history.add(book.events[3])
    assert cluster_report(history) == report_of(book)


def test_a_ledger_whose_beginning_is_gone_begins_with_what_was_there():
    book = two_apps()
    cut = 8  # the leases are there, nobody has ended
    origin = State()
    for event in book.events[:cut]:
        fold(origin, event)
    history = History(origin)
    for event in book.events[cut:]:
        history.add(event)
    report, whole = cluster_report(history), report_of(book)
    assert report.since == START + 10
    for name in ("x", "y"):
        assert report.app(name).service == pytest.approx(whole.app(name).service)
        assert report.app(name).rho.value == pytest.approx(whole.app(name).rho.value, rel=0.01)
    assert [step.gpus for step in report.capacity] == [4]


def test_an_app_that_was_forgotten_before_the_first_event_comes_back_with_its_account():
    past = Past(START - 500.0, 3, service=120.0, first_lease=START - 400.0, checkpoint="s3://b/1")
    history = History(State(number=10, at=START))
    history.add(Event(11, START + 1, AppEntered(AppSpec("z", "training", gpus=1), past)))
    app = history.apps["z"]
    assert (app.entered, app.before, app.first_lease) == (START - 500.0, 120.0, START - 400.0)
    assert (app.checkpoint, app.returns) == ("s3://b/1", [START + 1])
    assert cluster_report(history).app("z").phase == "waiting"


# --- JSON -----------------------------------------------------------------------------------------------------------


def test_json_comes_back_as_it_was():
    events, reports = simulated_day(hours=6)
    report = cluster_report(events, reports, listed={"g5.2xlarge": 1.212})
    assert ClusterReport.from_json(report.to_json()) == report
    older = json.dumps({**json.loads(report.to_json()), "format": 1}).replace('"revision":', '"epoch":')
    assert '"epoch":' in older
    assert ClusterReport.from_json(older) == report


@pytest.mark.parametrize(
    ("text", "said"),
    [("{", "not a report"), ("[]", "format 2"), ('{"format": 3}', "got 3"), ('{"format": 1}', "damaged")],
)
def test_what_is_no_report_is_refused(text, said):
    with pytest.raises(ReportError, match=said):
        ClusterReport.from_json(text)


# --- whatever happens -----------------------------------------------------------------------------------------


@given(books(), st.floats(0, 1), st.floats(0, 1))
@settings(max_examples=30)
def test_totals_add_up_whatever_happens(made, first, second):
    book, reports = made
    report = cluster_report(book.events, reports)
    now = report.until
    for id_, record in book.state.apps.items():
        row = report.app(id_)
        running = [lease for lease in book.state.leases.values() if lease.app == id_]
        service = record.service + sum(now - lease.since for lease in running)
        dollars = record.dollars + sum((now - lease.since) / 3600 * lease.price for lease in running)
        mine = [lease for lease in report.leases if lease.app == id_]
        assert row.service == pytest.approx(service)
        assert row.service == pytest.approx(sum(lease.seconds for lease in mine))
        assert row.dollars == pytest.approx(dollars)
        assert row.held == len(running)
        assert 0 <= row.waited <= report.seconds + 1e-6
        assert row.rho.value is None or row.rho.value > 0 or row.entered == now
    for node in report.nodes:
        assert 0 <= node.leased <= node.gpu_seconds + 1e-6
    assert report.money.total.dollars >= -1e-9
    cut = report.since + first * report.seconds
    parts = [report_of(book, until=cut), report_of(book, since=cut)]
    for app in report.apps:
        inside = sum(part.app(app.id).service for part in parts if part.app(app.id))
        assert inside == pytest.approx(app.service)
    assert sum(p.money.total.dollars for p in parts) == pytest.approx(report.money.total.dollars)
    assert ClusterReport.from_json(report.to_json()).to_json() == report.to_json()


def test_extending_a_lease_changes_nothing_that_is_counted():
    book = two_apps()
    before = report_of(book)
    other = Book()
    for event in book.events:
        other.write(event.at - START, event.change)
        if 0 < event.at - START < 1800 and other.state.leases:
            other.write(event.at - START, Extended(tuple(other.state.leases), START + 9000))
    assert [app.service for app in report_of(other).apps] == [app.service for app in before.apps]


def test_a_query_s_stages_come_from_what_ran_and_when():
    times = StageTimes()
    first, second = (
        SimpleNamespace(output_fp="f1", name="one"),
        SimpleNamespace(output_fp="f2", name="two" * 200),
    )
    times.started(first, START + 1)
    times.started(second, START + 2)
    times.ended(first, StageReport("one", "f1", "completed", "p1", rows=7), START + 9)
    times.ended(
        SimpleNamespace(output_fp="f3", name="old"), StageReport("old", "f3", "reused", "p1"), START + 10
    )
    book = Book()
    book.write(0, AppEntered(AppSpec("q", "query")))
    book.write(20, AppMoved("q", "running"))
    stages = report_of(book, {"q": AppReport(START + 20, job=times.metrics())}).stages
    assert [(s.name[:3], s.status, s.since - START, s.until - START, s.rows) for s in stages] == [
        ("one", "completed", 1, 9, 7),
        ("old", "reused", 10, 10, 0),
        ("two", "running", 2, 20, 0),
    ]
    for number in range(500):
        times.ended(first, StageReport("one", "f1", "completed", "p1", rows=number), START + 9)
    assert len(times.metrics()["stages"]) == 201
    assert len(times.metrics()["stages"][-1]["name"]) == 200
