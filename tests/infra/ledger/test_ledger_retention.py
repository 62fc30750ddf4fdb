"""Snapshots, and old events let go on demand."""

import itertools

import pytest
from sqlalchemy import select, text

from ebbflow.infra.errors import LedgerError
from ebbflow.infra.ledger import Ledger, audit, retention
from ebbflow.infra.ledger import history as snapshots
from ebbflow.infra.ledger.rows import seals
from ebbflow.planners.model.ledger import AppMoved, Decided, Ended
from tests.infra.ledger.conftest import Place
from tests.infra.ledger.ledger_values import SetClock, app, decision, grant, lease, nodes


def run_on(ledger: Ledger, rounds: int, seconds: float = 10.0, first: int = 1) -> None:
    """Grant and end a lease so many times, with a decision each; two events at one moment, then time passes."""
    lead = ledger.lead("loop", take_over=True)
    for n in range(first, first + rounds):
        lead.write([decision(app="a"), grant(lease(n, since=ledger.clock.now()))])
        ledger.clock.time += seconds  # type: ignore[attr-defined]
        lead.write([Ended((n,))])


def begun(place: Place) -> Ledger:
    ledger = place.open(clock=SetClock())
    ledger.write([app("a"), app("b")])
    ledger.lead("loop").write([nodes("n1")])
    return ledger


def snapshot_numbers(ledger: Ledger) -> list[int]:
    return list(ledger.overview().snapshots)


def test_the_leader_keeps_snapshots_from_which_a_ledger_opens(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(snapshots, "EVERY", 20)
    ledger = begun(place)
    run_on(ledger, 40)
    kept = snapshot_numbers(ledger)
    assert len(kept) == snapshots.KEPT
    assert ledger.state().number - 20 <= kept[-1] <= ledger.state().number
    assert all(20 <= b - a <= 23 for a, b in itertools.pairwise(kept))
    with ledger._database._engine.begin() as connection:  # were older events read, this would be noticed
        broken = text("UPDATE ledger_events SET body = '{' WHERE cluster = :c AND number <= :n")
        connection.execute(broken, {"c": place.cluster, "n": kept[-1]})
    again = place.open()
    assert again.state() == ledger.state()
    again.write([AppMoved("a", "running")])
    assert ledger.state() == again.state()


def test_a_damaged_snapshot_costs_replay_and_no_more(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshots, "EVERY", 20)
    ledger = begun(place)
    run_on(ledger, 30)
    for broken in ("{", '{"number":1}'):
        with ledger._database._engine.begin() as connection:
            connection.execute(
                text("UPDATE ledger_snapshots SET body = :b WHERE cluster = :c"),
                {"b": broken, "c": place.cluster},
            )
        assert place.open().state() == ledger.state()
        assert all("the snapshot at event" in one for one in ledger.verify())
        assert len(ledger.verify()) == snapshots.KEPT


def test_a_snapshot_that_is_not_what_the_events_say_is_found(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(snapshots, "EVERY", 20)
    ledger = begun(place)
    run_on(ledger, 10)
    mine = {"c": place.cluster}
    with ledger._database._engine.begin() as connection:
        wanted = text("SELECT number, body FROM ledger_snapshots WHERE cluster = :c")
        ((number, body),) = connection.execute(wanted, mine).all()
        wrong = seals.unseal(body, number).replace('"last_lease":', '"last_lease":1')  # and its checksum fits
        changed = text("UPDATE ledger_snapshots SET body = :b WHERE cluster = :c")
        connection.execute(changed, mine | {"b": seals.seal(wrong, number)})
    (said,) = ledger.verify()
    assert "last_lease is 1" in said


def test_old_events_go_and_the_state_stays(place: Place) -> None:
    ledger = begun(place)
    run_on(ledger, 20)
    every = ledger.events(limit=1000)
    before = ledger.clock.now() - 55.0
    wanted = [e.number for e in every if e.at < before]
    foretold = ledger.prune(before, dry_run=True)
    assert ledger.events(limit=1000) == every
    done = ledger.prune(before)
    assert done == foretold
    assert (done.events, done.up_to) == (len(wanted), wanted[-1])
    kept = ledger.events(limit=1000)
    assert kept == every[len(wanted) :]
    assert ledger.origin().number == done.up_to
    assert audit(kept, ledger.origin()) == []
    for one in (ledger, place.open(clock=ledger.clock)):
        assert one.state().number == every[-1].number
        assert one.verify() == []
    again = place.open(clock=ledger.clock)
    assert again.state() == ledger.state()
    assert again.state().apps["a"].service == pytest.approx(200.0)
    again.write([AppMoved("a", "finished")])
    run_on(again, 2, first=100)
    assert ledger.state() == again.state()
    assert again.verify() == []
    assert again.prune(before) == retention.PruneResult(
        0, 0, done.up_to
    )  # a second time there is nothing to do
    assert snapshot_numbers(ledger) == [done.up_to]


def test_old_decisions_lose_what_they_were_based_on_and_keep_their_reason(place: Place) -> None:
    ledger = begun(place)
    run_on(ledger, 10)
    state = ledger.state()
    before = ledger.clock.now() - 45.0
    done = ledger.prune(before, keep_events=True)
    assert (done.events, done.up_to) == (0, 0)
    events = ledger.events(limit=1000, kinds=[Decided])
    assert len(events) == 10
    bare = [e for e in events if isinstance(e.change, Decided) and not e.change.inputs]
    assert len(bare) == done.payloads > 0
    assert {e.number for e in bare} == {e.number for e in events if e.at < before}
    assert all(isinstance(e.change, Decided) and e.change.reason == "the fairest" for e in events)
    assert place.open().state() == state
    assert ledger.verify() == []


def test_a_slow_reader_catches_up_past_what_was_pruned(place: Place) -> None:
    ledger = begun(place)
    slow = place.open()
    assert slow.state().number == 4
    run_on(ledger, 20)
    ledger.prune(ledger.clock.now() - 25.0)
    assert slow.state() == ledger.state()
    slower = place.open()
    slower.state()
    run_on(ledger, 5, first=50)
    ledger.prune(ledger.clock.now() + 1.0)
    assert [e.number for e in ledger.events()] == [ledger.state().number]
    slower.write([AppMoved("a", "stopped")])  # catches up within its transaction
    assert slower.state() == ledger.state()
    assert ledger.verify() == []


def test_pruning_that_was_cut_short_is_finished_by_the_next(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retention, "_BATCH", 7)
    ledger = begun(place)
    run_on(ledger, 20)
    before = ledger.clock.now() + 1.0
    real, calls = retention._drop_batch, []

    def dies(*arguments: object) -> int:
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return real(*arguments)  # type: ignore[arg-type]

    with monkeypatch.context() as patch:
        patch.setattr(retention, "_drop_batch", dies)
        with pytest.raises(KeyboardInterrupt):
            ledger.prune(before)
    state = ledger.state()
    assert [e.number for e in ledger.events(limit=1000)] == [state.number]
    assert ledger.overview().events == state.number - 14
    again = place.open()
    assert again.state() == state
    assert again.verify() == []
    again.write([app("c")])
    assert again.prune(before).events == state.number - 14
    assert [e.number for e in again.events()] == [state.number + 1]
    assert again.verify() == []


def test_without_its_snapshot_a_pruned_ledger_says_so(place: Place) -> None:
    ledger = begun(place)
    run_on(ledger, 3)
    ledger.prune(ledger.clock.now() + 1.0)
    with ledger._database._engine.begin() as connection:
        connection.execute(text("DELETE FROM ledger_snapshots WHERE cluster = :c"), {"c": place.cluster})
    with pytest.raises(LedgerError, match="restore a backup"):
        place.open().state()
    assert "restore a backup" in ledger.verify()[0]


def test_mentions_of_events_that_are_gone_go_too(place: Place) -> None:
    from ebbflow.infra.ledger.database.schema import mentions

    ledger = begun(place)
    run_on(ledger, 10)
    done = ledger.prune(ledger.clock.now() - 25.0)
    with ledger._database._engine.connect() as connection:
        numbers = (
            connection.execute(select(mentions.c.number).where(mentions.c.cluster == place.cluster))
            .scalars()
            .all()
        )
    assert min(numbers) > done.up_to
