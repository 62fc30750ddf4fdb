"""Apps that are over for long leave the state; nothing that counts is lost with them."""

import pytest
from sqlalchemy import text

from ebbflow.infra.ledger import Ledger, audit
from ebbflow.planners.errors import OptionError
from ebbflow.planners.model.ledger import (
    REMEMBERED,
    RESUMABLE,
    SWEEP,
    AppEntered,
    AppMoved,
    AppReport,
    AppSpec,
    Ended,
    Event,
    Saved,
)
from ebbflow.planners.model.ledger_state import State, fold
from tests.infra.ledger.conftest import Place
from tests.infra.ledger.ledger_values import SetClock, app, decision, grant, lease, nodes


def begun(place: Place) -> Ledger:
    """Return a ledger in which ``a`` has had a GPU for 30 s, and is finished; ``b`` goes on."""
    ledger = place.open(clock=SetClock())
    ledger.write([app("a", team="red", pipeline="p"), app("b", team="red", pipeline="p")])
    loop = ledger.lead("loop")
    loop.write([nodes("n1"), grant(lease(1))])
    ledger.clock.time += 30  # type: ignore[attr-defined]
    loop.write([Ended((1,))])
    ledger.write([Saved("a", "s3://b/1", 1), AppMoved("a", "finished", "done")])
    return ledger


def later(ledger: Ledger, seconds: float = REMEMBERED + 1.0) -> None:
    """Let time pass, and so many events that what is old is forgotten."""
    ledger.clock.time += seconds  # type: ignore[attr-defined]
    ledger.write([decision() for _ in range(SWEEP)])


def replayed(ledger: Ledger) -> State:
    state = ledger.origin()
    for event in ledger.events(limit=10_000):
        fold(state, event)
    return state


def test_an_app_that_is_over_is_forgotten_after_a_while_and_can_still_be_looked_up(place: Place) -> None:
    ledger = begun(place)
    before = ledger.state().apps["a"]
    later(ledger, REMEMBERED - 1.0)
    assert set(ledger.state().apps) == {"a", "b"}
    later(ledger, 2.0)
    assert set(ledger.state().apps) == {"b"}
    again = place.open(clock=ledger.clock)
    for one in (ledger, again):
        assert one.app("a") == before
        assert one.app("b") == one.state().apps["b"]
        assert one.app("nobody") is None
        assert one.ended(5) == [before]
        assert one.overview().apps == 2
        assert one.verify() == []
    assert replayed(ledger) == ledger.state() == again.state()


def test_who_comes_back_has_the_account_that_it_had(place: Place) -> None:
    ledger = begun(place)
    before = ledger.state().apps["a"]
    later(ledger)
    assert ledger.state().teams == {"red": before.dollars}
    assert ledger.state().pipelines == {"p": before.dollars}
    (event,) = ledger.write([app("a", team="blue", pipeline="p")])
    assert isinstance(event.change, AppEntered)
    state = ledger.state()
    found = state.apps["a"]
    assert (found.phase, found.ended, found.spec.team) == ("waiting", None, "blue")
    for name in ("entered", "number", "service", "dollars", "first_lease", "checkpoint"):
        assert getattr(found, name) == getattr(before, name), name
    assert state.teams == {"red": 0.0}
    assert state.pipelines == {"p": 0.0}
    assert ledger.verify() == []
    assert replayed(ledger) == state


def test_a_pipeline_that_comes_back_knows_what_it_has_cost(place: Place) -> None:
    ledger = begun(place)
    cost = ledger.state().apps["a"].dollars
    assert cost > 0
    ledger.write([AppMoved("b", "finished")])
    later(ledger)
    assert ledger.state().apps == {}
    assert ledger.state().pipelines == {}  # of pipelines of which nothing is known nothing is kept
    assert ledger.state().teams == {"red": cost}
    ledger.write([app("c", pipeline="p")])
    assert ledger.state().pipelines == {"p": pytest.approx(cost)}
    assert ledger.verify() == []
    ledger.write([app("a", team="red", pipeline="p")])  # whose cost is its own again
    assert ledger.state().pipelines == {"p": 0.0}
    assert ledger.state().teams == {"red": 0.0}
    assert ledger.state().apps["a"].dollars == pytest.approx(cost)
    assert ledger.verify() == []


def test_a_pipeline_that_comes_back_knows_what_each_of_its_apps_has_cost(place: Place) -> None:
    ledger = begun(place)
    loop = ledger.lead("loop", take_over=True)
    loop.write([grant(lease(2, "b", since=ledger.clock.now()))])
    ledger.clock.time += 10  # type: ignore[attr-defined]
    loop.write([Ended((2,))])
    ledger.write([AppMoved("b", "finished")])
    costs = {id_: record.dollars for id_, record in ledger.state().apps.items()}
    later(ledger)
    assert ledger.state().apps == {}
    ledger.write([app("a", team="red", pipeline="p")])  # it has cost more than the other
    assert ledger.state().apps["a"].dollars == pytest.approx(costs["a"])
    assert ledger.state().pipelines == {"p": pytest.approx(costs["b"])}
    assert ledger.verify() == []


def test_one_that_was_forgotten_and_has_more_to_say_comes_back_first(place: Place) -> None:
    ledger = begun(place)
    ledger.write([AppMoved("b", "lost", "silent")])
    later(ledger)
    assert ledger.state().apps == {}
    assert [type(e.change) for e in ledger.write([AppMoved("b", "running", "it was suspended")])] == [
        AppEntered,
        AppMoved,
    ]
    assert ledger.state().apps["b"].phase == "running"
    ledger.write([Saved("a", "s3://b/2", 2)])  # a late word does not make it run again
    assert (ledger.state().apps["a"].phase, ledger.state().apps["a"].reason) == ("finished", "done")
    assert ledger.state().apps["a"].checkpoint == "s3://b/2"
    assert ledger.verify() == []
    with pytest.raises(OptionError, match="no app 'nobody'"):
        ledger.write([AppMoved("nobody", "running")])


@pytest.mark.parametrize("phase", ["lost", "stopped"])
def test_what_others_can_start_again_is_remembered_for_longer(place: Place, phase: str) -> None:
    ledger = place.open(clock=SetClock())
    named = AppSpec("named", "training", resume={"kind": "training"})
    run = AppSpec("run", "training", flow_run="f")
    ledger.write([AppEntered(named), AppEntered(run), app("plain"), app("over", flow_run="g")])
    ledger.write([AppMoved(name, phase) for name in ("named", "run", "plain")])  # type: ignore[arg-type]
    ledger.write([AppMoved("over", "finished")])
    later(ledger)
    assert set(ledger.state().apps) == {"named", "run"}
    later(ledger, RESUMABLE)
    assert ledger.state().apps == {}
    assert ledger.verify() == []


def test_one_that_holds_a_lease_is_not_forgotten(place: Place) -> None:
    ledger = begun(place)
    loop = ledger.lead("loop", take_over=True)
    loop.write([grant(lease(2, "b", since=ledger.clock.now()))])
    ledger.write([AppMoved("b", "failed")])
    later(ledger)
    assert set(ledger.state().apps) == {"b"}
    short = SWEEP - 1 - ledger.state().number % SWEEP
    ledger.write([decision() for _ in range(short)])
    loop.write([Ended((2,), "its processes were ended")])  # the event in which it is forgotten
    assert ledger.state().apps == {}
    found = ledger.app("b")
    assert found is not None
    assert found.service > REMEMBERED
    assert ledger.verify() == []


def test_a_clock_that_jumps_forgets_early_and_harms_nothing(place: Place) -> None:
    ledger = begun(place)
    later(ledger, -1e6)
    assert set(ledger.state().apps) == {"b"}
    ledger.write([app("a")])
    assert ledger.state().apps["a"].service == pytest.approx(30.0)
    later(ledger, 1e6)
    assert set(ledger.state().apps) == {"a", "b"}
    assert ledger.verify() == []


def test_what_is_forgotten_and_pruned_verifies_and_comes_back(place: Place) -> None:
    ledger = begun(place)
    ledger.report("a", AppReport(ledger.clock.now(), phase="finished"))
    ledger.report("b", AppReport(ledger.clock.now()))
    later(ledger)
    done = ledger.prune(ledger.clock.now() + 1.0)
    assert done.reports == 1
    assert set(ledger.reports()) == {"b"}
    assert done.up_to == ledger.state().number - 1
    assert ledger.verify() == []
    assert audit(ledger.events(), ledger.origin()) == []
    again = place.open(clock=ledger.clock)
    again.write([app("a", team="red", pipeline="p")])
    assert again.state().apps["a"].service == pytest.approx(30.0)
    assert again.verify() == []
    assert replayed(again) == again.state() == ledger.state()


def test_verify_finds_what_was_made_up_of_the_forgotten(place: Place) -> None:
    ledger = begun(place)
    later(ledger)
    for column, value, said in (
        ("phase", "'failed'", "apps: 'a' is AppRecord"),
        ("dollars", "7.0", "team 'red': apps that are over have cost $7"),
        ("service", "7.0", "its ended leases add up to 30"),
    ):
        with ledger._database._engine.begin() as connection:
            mine = f"WHERE cluster = '{place.cluster}' AND app = 'a'"
            (old,) = connection.execute(text(f"SELECT {column} FROM ledger_apps {mine}")).one()
            connection.execute(text(f"UPDATE ledger_apps SET {column} = {value} {mine}"))
        assert any(said in one for one in ledger.verify()), (column, ledger.verify())
        with ledger._database._engine.begin() as connection:
            connection.execute(text(f"UPDATE ledger_apps SET {column} = :old {mine}"), {"old": old})
    assert ledger.verify() == []
    with ledger._database._engine.begin() as connection:
        connection.execute(text(f"DELETE FROM ledger_apps {mine}"))
    assert "apps: 'a' is missing in the tables" in ledger.verify()


def test_the_state_stays_small_however_many_apps_come_and_go() -> None:
    state, at, largest = State(), 0.0, 0
    for number in range(5000):
        at += 1.0
        for change in (
            AppEntered(AppSpec(f"a{number}", "training", team=f"t{number % 3}", pipeline=f"p{number}")),
            AppMoved(f"a{number}", ("finished", "failed", "stopped", "lost")[number % 4]),
        ):
            fold(state, Event(state.number + 1, at, change))
        largest = max(largest, len(state.apps))
    assert largest <= REMEMBERED + SWEEP + 1
    assert len(state.pipelines) <= len(state.apps)
    assert len(state.teams) <= 3
