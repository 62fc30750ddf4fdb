"""What is said of a cluster: figures that only some decisions tell of, and reports that cannot be read."""

import io
from pathlib import Path

import pytest
from rich.console import Console

from ebbflow.flows.capacity.terminal import cluster_view
from ebbflow.infra.ledger import Ledger, UnreadableReport
from ebbflow.planners.model.capacity import Node
from ebbflow.planners.model.ledger import AppEntered, AppSpec, CapacityChanged, Decided, Granted, Lease
from ebbflow.tasks.apps.loop_report import problems
from ebbflow.tasks.capacity.status import app_views, look


def auction(rho: dict[str, float | None], others: int | None = None) -> Decided:
    bids = {app: {} if one is None else {"rho": one} for app, one in rho.items()}
    more = {} if others is None else {"others": others}
    return Decided("auction", "for a test", inputs={"apps": bids, **more})


def shown(ledger: Ledger) -> dict[str, float | None]:
    return {app.id: app.rho for app in look(ledger).apps}


@pytest.mark.parametrize("between", [0, 60])
def test_each_apps_rho_is_of_the_newest_auction_that_tells_of_it(between: int, tmp_path: Path) -> None:
    with Ledger.open(str(tmp_path / "ledger.db")) as ledger:
        ledger.write([AppEntered(AppSpec(id_, "training", gpus=1)) for id_ in "abcd"])
        ledger.write([auction({"a": 9.0, "d": 9.0})])
        ledger.write([auction({"a": 1.0, "b": 2.0, "c": 3.0})])  # of all that took part, so d has none
        ledger.write([Decided("replan", "for a test")] * between)
        ledger.write([auction({"b": 2.5}, others=2), auction({"c": None}, others=2)])
        assert shown(ledger) == {"a": 1.0, "b": 2.5, "c": None, "d": None}


def test_without_an_auction_that_tells_of_all_the_others_are_told_of(tmp_path: Path) -> None:
    with Ledger.open(str(tmp_path / "ledger.db")) as ledger:
        ledger.write([AppEntered(AppSpec(id_, "training", gpus=1)) for id_ in "ab"])
        assert shown(ledger) == {"a": None, "b": None}
        ledger.write([auction({"b": 2.5}, others=1)])
        assert shown(ledger) == {"a": None, "b": 2.5}


def test_decisions_in_a_row_that_say_the_same_are_one_line(tmp_path: Path) -> None:
    held = Decided("scaling", "demand fits")
    with Ledger.open(str(tmp_path / "ledger.db")) as ledger:
        ledger.write(
            [Decided("scaling", "one more"), *[held] * 30, Decided("replan", "demand fits"), *[held] * 2]
        )
        found = look(ledger).decisions
        screen = io.StringIO()
        Console(width=100, file=screen).print(cluster_view(look(ledger)))
    assert [(one.kind, one.reason, one.times) for one in found] == [
        ("scaling", "demand fits", 2),
        ("replan", "demand fits", 1),
        ("scaling", "demand fits", 30),
        ("scaling", "one more", 1),
    ]
    assert all(one.since <= one.at for one in found)
    assert "demand fits (30 times since" in " ".join(screen.getvalue().split())


def test_an_app_costs_what_its_leases_have_cost_until_now_running_ones_too(tmp_path: Path) -> None:
    with Ledger.open(str(tmp_path / "ledger.db")) as ledger:
        now = ledger.clock.now()
        leases = tuple(Lease(n + 1, "a", "gpu-1", n, now - 1800, now + 300, 1, price=0.75) for n in range(2))
        ledger.lead("loop", 60.0).write(
            [
                CapacityChanged(1, (Node("gpu-1", 8, 32.0, gpus=2, price=1.5),), (), (), 0.0, "one"),
                AppEntered(AppSpec("a", "training", gpus=2)),
                Granted(leases),
            ]
        )
        record = ledger.state().apps["a"]
        assert record.dollars == 0
        assert [app.dollars for app in look(ledger).apps] == [pytest.approx(0.75, abs=0.05)]
        assert [app.dollars for app in app_views(ledger, [record])] == [pytest.approx(0.75, abs=0.05)]


def test_of_many_reports_that_cannot_be_read_some_are_named() -> None:
    assert problems({}) == ()
    said = problems({f"a{n}": UnreadableReport(1.0, "a newer Ebbflow " + "x" * 500) for n in range(9)})
    assert [one[:40] for one in said[:3]] == [f"the report of a{n} is ignored: a newer Ebb" for n in range(3)]
    assert said[3:] == ("the reports of 6 more apps are ignored too",)
    assert max(map(len, said)) < 400
