"""A cluster's report: what it costs, and how fair it is; figures checked by hand."""

from dataclasses import replace
from itertools import pairwise

import pytest

from ebbflow.planners.model.capacity import Notice
from ebbflow.planners.model.ledger import AppEntered, AppMoved, AppReport, AppSpec, Decided, Saved
from ebbflow.tasks.report.cluster.report import ClusterReport, cluster_report
from tests.cluster_events import CORES, GPU, START, A, B, Book, training, two_apps


def report_of(book: Book, reports=None, **options) -> ClusterReport:
    return cluster_report(book.events, reports, **options)


# --- money ------------------------------------------------------------------------------------------------------


def test_service_and_dollars_of_apps_are_those_of_their_leases():
    x, y = report_of(two_apps()).apps
    assert (x.service, y.service) == (2 * 1830, 3600)
    assert x.dollars == pytest.approx(2 * 1830 / 3600 * 1.0)
    assert y.dollars == pytest.approx(2.0)
    assert (x.leases, y.leases) == (2, 1)


def test_nodes_cost_their_price_against_on_demand_and_what_was_idle():
    money = report_of(two_apps(), listed={GPU.instance_type: 5.0}).money
    assert money.total.dollars == pytest.approx(3610 / 3600 * 6)
    assert money.total.list_dollars == pytest.approx(3610 / 3600 * (5 + 4))
    assert money.total.saved == pytest.approx(1 / 3)
    assert money.total.gpu_hours == pytest.approx(4 * 3610 / 3600)
    assert money.total.idle == pytest.approx(1 - 7260 / 14440)
    assert money.leased_dollars == pytest.approx(3.0166667)
    assert money.leased_dollars + money.idle_dollars == pytest.approx(3610 / 3600 * 6)
    assert [(team.team, team.apps, team.gpu_hours) for team in money.teams] == [
        ("blue", 1, 1.0),
        ("red", 1, 3660 / 3600),
    ]


def test_the_price_of_on_demand_nodes_is_what_spot_nodes_of_their_type_are_compared_with():
    money = report_of(two_apps()).money
    spot = next(row for row in money.rows if row.market == "spot")
    assert spot.list_dollars == pytest.approx(3610 / 3600 * 4)
    assert spot.saved == pytest.approx(0.5)


def test_an_unknown_list_price_makes_the_comparison_unknown():
    book = Book()
    book.capacity(0, replace(CORES, id="w", price=0.3))
    book.capacity(3600, left=["w"])
    money = report_of(book).money
    assert money.total.dollars == pytest.approx(0.3)
    assert money.total.list_dollars is None
    assert money.total.idle is None


def test_a_spot_node_taken_back_within_its_first_hour_costs_nothing():
    book = Book()
    book.capacity(0, A, replace(A, id="a2"))
    book.capacity(1000, notices=[Notice("a", START + 1120)])
    book.capacity(1120, left=["a"])
    book.capacity(1121, left=["a2"])  # ended by its owner: billed
    money = report_of(book).money
    assert money.total.dollars == pytest.approx(1121 / 3600 * 2)
    assert money.total.free_hours == pytest.approx(1120 / 3600)
    assert [node.ending for node in report_of(book).nodes] == ["reclaimed", "left"]


def test_prices_that_change_count_from_then_on():
    book = Book()
    book.capacity(0, A)
    book.capacity(1800, replace(A, price=6.0))
    book.capacity(3600, left=["a"])
    report = report_of(book)
    assert report.money.total.dollars == pytest.approx(1.0 + 3.0)
    assert report.money.idle_dollars == pytest.approx(4.0)
    assert len(report.nodes) == 1


def test_nodes_without_a_price_are_free_and_said_to_be():
    book = Book()
    book.capacity(0, replace(A, price=0.0), B)
    book.capacity(3600, left=["a", "b"])
    money = report_of(book).money
    assert (money.unpriced, money.total.dollars) == (1, pytest.approx(4.0))


def test_a_part_of_the_time_counts_the_part_inside():
    book = two_apps()
    report = report_of(book, since=START + 1000, until=START + 2000)
    assert report.seconds == 1000
    x, y = report.apps
    assert (x.service, y.service) == (2 * 840, 1000)
    assert report.money.total.dollars == pytest.approx(1000 / 3600 * 6)
    assert y.phase == "running"
    assert x.phase == "finished"
    assert report.capacity[0].at == START + 1000


def test_parts_of_the_time_add_up():
    book = two_apps()
    whole = report_of(book)
    cuts = [START, START + 700, START + 1815, START + 3610]
    parts = [report_of(book, since=a, until=b) for a, b in pairwise(cuts)]
    for name in ("x", "y"):
        assert sum(p.app(name).service for p in parts if p.app(name)) == pytest.approx(
            whole.app(name).service
        )
    assert sum(p.money.total.dollars for p in parts) == pytest.approx(whole.money.total.dollars)


# --- fairness -----------------------------------------------------------------------------------------------------


def test_rho_is_time_here_over_time_alone_on_the_share():
    report = report_of(two_apps())
    x, y = report.apps
    assert x.rho.share == pytest.approx(2.0)
    assert x.rho.value == pytest.approx(1840 / 1830)
    # x was there for 1840 s of y's 3610 s; y can use no more than two GPUs of its share
    weights = (2 * 1840 + 1 * 1770) / 3610
    assert y.rho.share == pytest.approx(4 / weights)
    assert y.rho.value == pytest.approx(3610 / (3600 / 2))
    assert not x.rho.bound
    assert "held" in y.rho.how
    assert report.fairness.worst_app == "y"
    values = [x.rho.value, y.rho.value]
    assert report.fairness.jain == pytest.approx(sum(values) ** 2 / (2 * sum(v * v for v in values)))
    assert report.fairness.above == 1


def test_what_an_app_says_of_all_its_work_tells_what_is_left_and_no_more():
    reports = {"y": AppReport(START + 3610, work_total=1800.0, progress=1.0)}
    assert report_of(two_apps(), reports).app("y").rho.value == pytest.approx(3610 / (3600 / 2))
    book = Book()
    book.capacity(0, A, B)
    book.write(0, training("x"))
    book.grant(0, "x", ("a", 0))
    book.write(1000, AppMoved("x", "running"))
    said = {"x": AppReport(START + 1000, work_total=4000.0, progress=0.25)}
    assert report_of(book, said).app("x").rho.value == pytest.approx((1000 + 3000) / ((1000 + 3000) / 2))


def test_weights_are_shares():
    book = Book()
    book.capacity(0, A, B)
    book.write(0, training("x", weight=3.0), training("y", weight=1.0))
    book.write(100, AppMoved("x", "running"))
    shares = [app.rho.share for app in report_of(book).apps]
    assert shares == [pytest.approx(3.0), pytest.approx(1.0)]


def test_rho_of_a_running_app_is_with_what_it_holds():
    book = Book()
    book.capacity(0, A, B)
    book.write(0, training("x"))
    book.grant(0, "x", ("a", 0))
    book.write(0, AppMoved("x", "running"))
    book.write(1000, Saved("x", "s3://x/1"))
    reports = {
        "x": AppReport(START + 1000, seconds_left=3000.0, work_left=3000.0, work_total=4000.0, progress=0.25)
    }
    x = report_of(book, reports).apps[0]
    assert x.rho.value == pytest.approx((1000 + 3000) / (4000 / 2))
    assert (x.held, x.progress, x.saves, x.seconds_left) == (1, 0.25, 1, 3000.0)


def test_rho_of_an_app_that_waits_is_bounded_from_below():
    book = Book()
    book.capacity(0, A, B)
    book.write(0, training("x"))
    book.write(500, Saved("x", "s3://x/1"))
    x = report_of(book, {"x": AppReport(START + 500, work_left=2000.0, work_total=2000.0)}).apps[0]
    assert x.rho.bound
    assert x.rho.value == pytest.approx((500 + 2000 / 2) / (2000 / 2))
    assert report_of(book).apps[0].rho.value is None
    assert report_of(book).fairness.worst is None


@pytest.mark.parametrize("phase", ["failed", "stopped"])
def test_rho_of_what_never_ended_is_not_known(phase):
    book = two_apps()
    book.write(3611, AppEntered(book.state.apps["x"].spec))
    book.write(3612, AppMoved("x", phase))
    assert report_of(book).app("x").rho.value is None


def test_a_query_has_no_rho_and_a_cluster_without_gpus_gives_none():
    book = Book()
    book.capacity(0, replace(CORES, id="w"))
    book.write(0, AppEntered(AppSpec("q", "query")), training("x"))
    book.write(100, AppMoved("q", "running"))
    q, x = report_of(book).apps
    assert "by weight" in q.rho.how
    assert "no GPUs" in x.rho.how
    assert q.waited == 100


def test_apps_of_a_team_share_its_weight_as_the_loop_has_it():
    book = Book()
    book.capacity(0, A, B)
    for name, team, weight in (("a", "red", 3.0), ("b", "red", 6.0), ("c", "blue", 1.0), ("d", "", 3.0)):
        book.write(0, training(name, team=team, weight=weight))
    book.write(0, Decided("auction", "bids", inputs={"teams": {"red": 3.0, "blue": 1.0}}))
    book.write(1000, AppMoved("c", "finished"))
    book.write(2000, AppMoved("d", "finished"))

    def shares(until: float) -> list[float]:
        return [app.rho.share for app in report_of(book, until=START + until).apps]

    # red has 3 of 4 for two of three apps: 3 * 3/9 * 1.5 for a, twice that for b; d counts by its own
    assert shares(1000.0) == pytest.approx([4 * 1.5 / 9, 4 * 3 / 9, 4 * 1.5 / 9, 4 * 3 / 9])
    # then 3 * 3/9 * 2 for a
    assert shares(2000.0)[0] == pytest.approx(4 * (1.5 + 2) / (9 + 9))
    book.write(2000, Decided("auction", "bids", inputs={}))  # a loop without teams
    book.write(4000, AppMoved("a", "running"))
    assert shares(4000.0)[0] == pytest.approx(4 * (1.5 + 2 + 2 * 3) / (9 + 9 + 2 * 9))
