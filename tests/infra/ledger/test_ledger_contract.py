"""What every ledger promises, in SQLite and in PostgreSQL alike."""

import math
import threading
from dataclasses import replace

import pytest

from ebbflow.infra.errors import DoubleBookingError, LedgerBusyError, LedgerError, StaleLoopError
from ebbflow.infra.ledger import Ledger, UnreadableReport, audit
from ebbflow.planners.errors import OptionError
from ebbflow.planners.model.capacity import Notice
from ebbflow.planners.model.ledger import (
    AppEntered,
    AppMoved,
    AppReport,
    AppSpec,
    CapacityChanged,
    Decided,
    Ended,
    Extended,
    Granted,
    LoopBegan,
    Recalled,
    Saved,
    Slot,
)
from ebbflow.planners.model.ledger_state import State, fold
from tests.infra.ledger.conftest import Place
from tests.infra.ledger.ledger_values import SetClock, app, decision, grant, lease, node, nodes

SPEC = AppSpec(
    "a", "tuning", team="blue", title="μ ⋈ 'quoted'", pipeline="p1", gpus=4, min_gpus=1, max_gpus=8, weight=2.5,
    deadline=1_000_500.5, budget=12.0, flow_run="f", resume={"args": ["x", 1, 2.5, None, True], "deep": {"k": []}},
)  # fmt: skip


def filled(place: Place) -> Ledger:
    """Return a ledger through whose events every kind of change has gone."""
    ledger = place.open(clock=SetClock())
    ledger.write([AppEntered(SPEC), app("b"), app("q")])
    loop = ledger.lead("loop-1")
    loop.write([CapacityChanged(1, (node("n1"), node("n2", 1)), hazard=0.25, reason="first look")])
    loop.write(
        [grant(lease(1), lease(2, slot=1), lease(3, "b", "n2")), decision(app="a", revision=1, seconds=0.2)]
    )
    ledger.clock.time += 30  # type: ignore[attr-defined]
    loop.write([Extended((1, 2), 1_000_200.0, "goes on"), Recalled((3,), 1_000_050.0, "n2 leaves")])
    notice = Notice("n2", 1_000_120.0)
    loop.write([CapacityChanged(2, (node("n3", 4),), notices=(notice,), hazard=0.5), Ended((3,), "released")])
    ledger.write([Saved("a", "s3://b/ckpt-7", 7), AppMoved("b", "finished", "target reached")])
    loop.write([CapacityChanged(3, left=("n2",)), grant(lease(4, "a", "n3", 3))])
    return ledger


def test_a_write_may_depend_on_the_state_that_it_meets(place: Place) -> None:
    ledger, other = place.open(clock=SetClock()), place.open(clock=SetClock())
    ledger.write([AppEntered(SPEC), AppMoved("a", "lost")])
    seen: list[str] = []

    def lost(state: State) -> bool:
        seen.append(state.apps["a"].phase)
        return seen[-1] == "lost"

    ledger.state()
    other.write([AppEntered(SPEC)])  # after the state was read here
    assert ledger.write([AppMoved("a", "failed")], when=lost) == ()
    assert ledger.state().apps["a"].phase == seen[-1] == "waiting"
    other.write([AppMoved("a", "lost")])
    (event,) = ledger.write([AppMoved("a", "failed")], when=lost)
    assert (event.number, event.change) == (5, AppMoved("a", "failed"))
    assert other.state().apps["a"].phase == "failed"
    with pytest.raises(OptionError, match="for the leader"):
        ledger.write([grant(lease(1))], when=lost)
    assert not ledger.verify()


def test_what_was_written_is_what_a_new_process_reads(place: Place) -> None:
    ledger = filled(place)
    again = place.open()
    assert again.state() == ledger.state()
    events = again.events()
    assert [e.number for e in events] == list(range(1, len(events) + 1))
    replayed = State()
    for event in events:
        fold(replayed, event)
    assert replayed == again.state()
    assert again.verify() == []
    assert audit(events) == []
    state = again.state()
    assert state.apps["a"].spec == SPEC
    assert state.apps["a"].checkpoint == "s3://b/ckpt-7"
    assert state.apps["b"].service == pytest.approx(30.0)
    assert state.apps["b"].dollars == pytest.approx(30 / 3600 * 0.6)
    assert (state.apps["b"].phase, state.apps["b"].ended) == ("finished", 1_000_030.0)
    assert set(state.leases) == {1, 2, 4}
    assert state.booked == {Slot("n1", 0): 1, Slot("n1", 1): 2, Slot("n3", 3): 4}
    assert state.leases[1].until == 1_000_200.0
    assert set(state.nodes) == {"n1", "n3"}
    assert state.notices == {}
    assert (state.token, state.holder, state.revision) == (1, "loop-1", 3)


def test_a_state_that_was_returned_never_changes(place: Place) -> None:
    ledger = filled(place)
    before = ledger.state()
    kept = replace(before, apps=dict(before.apps), leases=dict(before.leases))
    ledger.write([AppMoved("a", "stopped")])
    assert before == kept
    assert ledger.state().apps["a"].phase == "stopped"
    mine = ledger.state(copy=True)
    mine.apps.clear()
    assert "a" in ledger.state().apps


def test_a_state_is_followed_across_ledgers(place: Place) -> None:
    one, two = place.open(), place.open()
    assert two.state().number == 0
    for n in range(5):
        one.write([app(f"a{n}")])
        assert set(two.state().apps) == {f"a{k}" for k in range(n + 1)}
    assert two.state() is two.state()


def test_events_can_be_asked_for_by_number_kind_and_app(place: Place) -> None:
    ledger = filled(place)
    every = ledger.events()
    assert ledger.events(after=5, limit=3) == every[5:8]
    assert ledger.events(after=5, limit=3, newest=True) == every[-3:]
    leases = ledger.events(kinds=[Granted, "Ended", "lease-revoked"])
    assert [type(e.change) for e in leases] == [Granted, Recalled, Ended, Granted]
    assert [type(e.change) for e in ledger.events(app="b")] == [
        AppEntered,
        Granted,
        Recalled,
        Ended,
        AppMoved,
    ]
    assert [type(e.change) for e in ledger.events(app="a", kinds=[Decided])] == [Decided]
    assert ledger.events(app="nobody") == []
    with pytest.raises(OptionError, match="no kind of change 'Gone'"):
        ledger.events(kinds=["Gone"])


def test_a_write_is_all_or_nothing(place: Place) -> None:
    ledger = place.open()
    loop = ledger.lead("loop")
    before = ledger.state()
    with pytest.raises(OptionError, match="no app 'ghost'"):
        ledger.write([app("a"), AppMoved("ghost", "running")])
    with pytest.raises(OptionError, match="not there"):
        loop.write([app("a"), nodes("n1"), grant(lease(1)), grant(lease(2, slot=7))])
    assert ledger.state() == before
    assert place.open().state() == before
    assert ledger.verify() == []


def test_nobody_but_the_leader_writes_what_is_fenced(place: Place) -> None:
    ledger = place.open()
    for change in (
        LoopBegan(9, "x"),
        nodes("n"),
        grant(lease(1)),
        Extended((1,), 2.0),
        Recalled((1,), 2.0),
        Ended((1,)),
    ):
        with pytest.raises(OptionError, match="for the leader"):
            ledger.write([app("a"), change])
    assert ledger.state().number == 0
    with pytest.raises(OptionError, match=r"written by ledger\.lead alone"):
        ledger.lead("loop").write([LoopBegan(9, "x")])


def test_a_gpu_is_booked_once(place: Place) -> None:
    ledger = place.open()
    ledger.write([app("a"), app("b")])
    loop = ledger.lead("loop")
    loop.write([nodes("n1"), grant(lease(1))])
    with pytest.raises(DoubleBookingError, match="GPU 0 of node 'n1' is allocated to lease 1; lease 2"):
        loop.write([grant(lease(2, "b"))])
    with pytest.raises(DoubleBookingError, match="lease 3"):
        loop.write([grant(lease(2, "b", slot=1), lease(3, "b", slot=1))])
    loop.write([Recalled((1,), 5.0)])
    with pytest.raises(DoubleBookingError):  # it is called back, not ended
        loop.write([grant(lease(2, "b"))])
    loop.write([Ended((1,)), grant(lease(2, "b"))])
    assert ledger.state().booked == {Slot("n1", 0): 2}


def test_the_database_itself_refuses_a_second_lease_of_a_gpu(place: Place) -> None:
    """Were ``fold`` to forget a lease, the unique index would still be there."""
    ledger = place.open()
    ledger.write([app("a")])
    loop = ledger.lead("loop")
    loop.write([nodes("n1"), grant(lease(1))])
    assert ledger._journal._latest is not None
    forgetful = ledger._journal._latest.state
    forgetful.leases.clear()
    forgetful.booked.clear()
    with pytest.raises(DoubleBookingError, match="allocated already"):
        loop.write([grant(lease(2))])
    assert set(place.open().state().leases) == {1}


def test_one_leads_at_a_time(place: Place) -> None:
    clock = SetClock()
    one, two = place.open(clock=clock), place.open(clock=clock)
    first = one.lead("one", 10.0)
    with pytest.raises(LedgerBusyError, match="'one' is the leader") as told:
        two.lead("two")
    assert (told.value.holder, told.value.until) == ("one", clock.time + 10)
    clock.time += 9
    first.renew()
    clock.time += 9
    with pytest.raises(LedgerBusyError):
        two.lead("two")
    clock.time += 2
    second = two.lead("two")
    assert second.token == first.token + 1
    for attempt in (lambda: first.write([nodes("n1")]), first.renew):
        with pytest.raises(StaleLoopError, match="another has taken over"):
            attempt()
    second.write([nodes("n1")])
    assert one.state().holder == "two"
    assert [e.change for e in one.events(kinds=[LoopBegan])] == [LoopBegan(1, "one"), LoopBegan(2, "two")]


def test_a_lead_that_ran_out_still_writes_until_another_takes_over(place: Place) -> None:
    clock = SetClock()
    ledger = place.open(clock=clock)
    loop = ledger.lead("one", 10.0)
    clock.time += 1000
    loop.write([nodes("n1")])
    loop.renew()
    assert ledger.leader().alive(clock.time)  # type: ignore[union-attr]


def test_who_resigns_makes_room_at_once_and_writes_no_more(place: Place) -> None:
    ledger = place.open()
    with ledger.lead("one") as loop:
        loop.write([nodes("n1")])
    with pytest.raises(StaleLoopError, match="has resigned"):
        loop.write([nodes("n2", revision=2)])
    with pytest.raises(StaleLoopError, match="has resigned"):
        loop.renew()
    other = place.open().lead("two")
    loop.resign()  # again, and too late: it takes nothing from the new one
    other.renew()
    other.write([nodes("n2", revision=2)])


def test_a_loop_takes_over_from_itself_and_from_others_when_told(place: Place) -> None:
    one, two = place.open(), place.open()
    first = one.lead("same")
    second = two.lead("same")
    third = two.lead("other", take_over=True)
    assert [first.token, second.token, third.token] == [1, 2, 3]
    with pytest.raises(StaleLoopError):
        second.write([nodes("n1")])
    third.write([nodes("n1")])


@pytest.mark.parametrize("jump", [-1e9, -3600.0, 3600.0, 1e9])
def test_a_clock_that_jumps_breaks_neither_numbers_nor_leads(place: Place, jump: float) -> None:
    clock = SetClock()
    ledger = place.open(clock=clock)
    ledger.write([app("a")])
    loop = ledger.lead("one", 10.0)
    loop.write([nodes("n1"), grant(lease(1))])
    clock.time += jump
    loop.write([Ended((1,)), grant(lease(2))])
    loop.renew()
    ledger.write([AppMoved("a", "running")])
    clock.time -= jump
    other = place.open(clock=clock)
    taken = other.lead("two")  # the lead it renewed then is over, or would end at a time that cannot be
    with pytest.raises(StaleLoopError):
        loop.write([Ended((2,))])
    taken.write([Ended((2,))])
    assert [e.number for e in other.events()] == list(range(1, 10))
    assert other.verify() == []
    assert audit(other.events()) == []


def test_reports_keep_the_newest_only(place: Place) -> None:
    ledger, other = place.open(), place.open()
    assert ledger.reports() == {}
    full = AppReport(
        5.0, (1, 2), (3,), "waiting", 0.5, 7, math.inf, 2.0, 3.0, 4.0, 1.5,
        {"rho": math.inf, "x": [1, None]}, ({"id": 1, "loss": 0.25},), "hello",
    )  # fmt: skip
    ledger.report("a", AppReport(1.0))
    ledger.report("a", full)
    ledger.report("b", AppReport(9.0))
    assert other.reports() == {"a": full, "b": AppReport(9.0)}
    other.report("a", AppReport(2.0))  # its clock was put back: the newest is what was said last
    assert ledger.reports()["a"] == AppReport(2.0)
    assert ledger.state().number == 0
    ledger.write([app("b")])
    assert set(ledger.reports()) == {"a"}  # who enters again has said nothing yet


def test_a_report_of_a_newer_version_hides_no_other(place: Place) -> None:
    from sqlalchemy import text

    ledger = place.open()
    ledger.report("a", AppReport(1.0))
    ledger.report("b", AppReport(2.0))
    assert set(ledger.reports()) == {"a", "b"}
    ledger.report("a", AppReport(3.0))
    with ledger._database._engine.begin() as connection:
        newer = "UPDATE ledger_reports SET format = 99 WHERE cluster = :c AND app = 'a'"
        connection.execute(text(newer), {"c": place.cluster})
    with pytest.raises(LedgerError, match="format 99, which a newer Ebbflow wrote"):
        ledger.reports()
    unread: dict[str, UnreadableReport] = {}
    assert ledger.reports(unread=unread) == {"b": AppReport(2.0)}
    assert unread["a"].at == 3.0
    assert "upgrade this one" in unread["a"].why
    ledger.report("a", AppReport(4.0))
    unread.clear()
    assert ledger.reports(unread=unread)["a"] == AppReport(4.0)
    assert not unread


def test_clusters_share_a_database_and_nothing_else(place: Place) -> None:
    one = place.open()
    two = place.open(cluster=place.cluster + "-other")
    one.write([app("a")])
    one.lead("x").write([nodes("n1"), grant(lease(1))])
    two.write([app("a"), app("b")])
    two.lead("y").write([nodes("n1"), grant(lease(1))])
    two.report("a", AppReport(1.0))
    assert [one.state().number, two.state().number] == [4, 5]
    assert set(one.state().apps) == {"a"}
    assert one.reports() == {}
    assert one.verify() == two.verify() == []
    assert {place.cluster, place.cluster + "-other"} <= set(one.overview().clusters)


def test_an_app_that_comes_back_keeps_what_it_had(place: Place) -> None:
    ledger = filled(place)
    before = ledger.state().apps["b"]
    ledger.write([AppEntered(replace(before.spec, gpus=1))])
    after = ledger.state().apps["b"]
    assert (after.phase, after.ended, after.spec.gpus) == ("waiting", None, 1)
    assert (after.service, after.number, after.entered) == (before.service, before.number, before.entered)
    assert ledger.verify() == []


def test_threads_of_one_ledger_write_at_once(place: Place) -> None:
    ledger = place.open()
    failed: list[BaseException] = []

    def work(name: str) -> None:
        try:
            for n in range(12):
                ledger.write([app(f"{name}-{n}"), AppMoved(f"{name}-{n}", "running")])
                assert ledger.state().apps[f"{name}-{n}"].phase == "running"
                ledger.report(name, AppReport(float(n)))
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=work, args=(f"t{n}",)) for n in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert not failed
    assert ledger.state().number == 6 * 12 * 2
    assert ledger.verify() == []
    assert {a: r.at for a, r in ledger.reports().items()} == {f"t{n}": 11.0 for n in range(6)}


def test_strings_that_no_database_stores_are_mended(place: Place) -> None:
    ledger = place.open()
    ledger.write(
        [app("a"), AppMoved("a", "failed", "bad \x00 byte \udcff and 'quotes\"; DROP TABLE apps; --")]
    )
    reason = ledger.state().apps["a"].reason
    assert reason == "bad \ufffd byte \ufffd and 'quotes\"; DROP TABLE apps; --"
    assert place.open().state() == ledger.state()
    assert ledger.verify() == []


@pytest.mark.parametrize("later", [0, 1, 2, 5])
def test_a_ledger_that_was_replaced_is_noticed(place: Place, later: int) -> None:
    """It holds an older state, from which others have gone on by none, some, as many or more events."""
    from sqlalchemy import text

    ledger = place.open()
    ledger.write([app("a")])
    ledger.write([app("b")])
    ledger.write([app("c")])
    with ledger._database._engine.begin() as connection:
        mine = {"c": place.cluster}
        for table in ("events", "mentions"):
            connection.execute(text(f"DELETE FROM ledger_{table} WHERE cluster = :c AND number > 1"), mine)
        connection.execute(text("DELETE FROM ledger_apps WHERE cluster = :c AND app <> 'a'"), mine)
        connection.execute(text("UPDATE ledger_clusters SET number = 1 WHERE cluster = :c"), mine)
    other = place.open()
    for n in range(later):
        other.write([app(f"other-{n}")])
    for attempt in (ledger.state, lambda: ledger.write([app("d")])):
        with pytest.raises(LedgerError, match="was replaced by another or an older one"):
            attempt()
    assert set(place.open().state().apps) == {"a", *(f"other-{n}" for n in range(later))}


@pytest.mark.parametrize("broken", [
    "UPDATE ledger_leases SET until = until + 1 WHERE cluster = :c AND lease = 1",
    "UPDATE ledger_apps SET phase = 'lost' WHERE cluster = :c AND app = 'a'",
    "UPDATE ledger_apps SET dollars = 7 WHERE cluster = :c AND app = 'b'",
    "UPDATE ledger_leases SET ended = ended + 9 WHERE cluster = :c AND lease = 3",
    "DELETE FROM ledger_leases WHERE cluster = :c AND lease = 2",
    "UPDATE ledger_nodes SET left_at = NULL WHERE cluster = :c AND node = 'n2'",
    "UPDATE ledger_nodes SET price = 0 WHERE cluster = :c AND node = 'n1'",
    "DELETE FROM ledger_decisions WHERE cluster = :c",
    "UPDATE ledger_clusters SET token = 7 WHERE cluster = :c",
    "UPDATE ledger_clusters SET number = number + 1 WHERE cluster = :c",
    "UPDATE ledger_leads SET token = 7 WHERE cluster = :c",
    "DELETE FROM ledger_events WHERE cluster = :c AND number = 6",
    "UPDATE ledger_events SET body = '{' WHERE cluster = :c AND number = 6",
    "UPDATE ledger_events SET body = '{\"x\": 1}' WHERE cluster = :c AND number = 6",
    "UPDATE ledger_events SET format = 99 WHERE cluster = :c AND number = 6",
    "INSERT INTO ledger_notices VALUES (:c, 'n9', 1.0, 'interruption')",
])  # fmt: skip
def test_verify_finds_what_was_tampered_with(place: Place, broken: str) -> None:
    from sqlalchemy import text

    ledger = filled(place)
    assert ledger.verify() == []
    with ledger._database._engine.begin() as connection:
        assert connection.execute(text(broken), {"c": place.cluster}).rowcount == 1
    assert len(ledger.verify()) >= 1
