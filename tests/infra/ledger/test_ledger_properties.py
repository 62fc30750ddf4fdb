"""Whatever is tried in whatever order, the ledger is what its events add up to."""

import shutil
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from ebbflow.infra.errors import DoubleBookingError, LedgerBusyError, StaleLoopError
from ebbflow.infra.ledger import Leadership, Ledger, audit, history
from ebbflow.infra.ledger import history as snapshots
from ebbflow.planners.errors import OptionError
from ebbflow.planners.model import ledger as ledger_model
from ebbflow.planners.model.capacity import Node, Notice
from ebbflow.planners.model.ledger import (
    FENCED,
    AppEntered,
    AppMoved,
    AppRecord,
    AppReport,
    AppSpec,
    CapacityChanged,
    Change,
    Decided,
    Ended,
    Event,
    Extended,
    Granted,
    Lease,
    LoopBegan,
    Past,
    Recalled,
    Saved,
    Slot,
)
from ebbflow.planners.model.ledger_state import State, fold
from tests.infra.ledger.ledger_values import SetClock

APPS, NODES = ["a", "b", "c"], ["n1", "n2", "n3"]
MEMORY = "/dev/shm" if Path("/dev/shm").is_dir() else None

lease_numbers = st.lists(st.integers(0, 12), min_size=1, max_size=2).map(tuple)
some_leases = st.builds(
    Lease, st.integers(1, 5), st.sampled_from(APPS), st.sampled_from(NODES), st.integers(0, 2),
    st.floats(0, 1e6), st.floats(0, 2e6), st.integers(0, 5), st.floats(0, 9), st.none() | st.floats(0, 1e6),
)  # fmt: skip
some_nodes = st.builds(
    Node, st.sampled_from(NODES), st.just(4), st.just(8.0), gpus=st.integers(0, 3), price=st.floats(0, 9)
)
some_notices = st.builds(
    Notice, st.sampled_from(NODES), st.floats(0, 2e6), st.sampled_from(["interruption", "rebalance"])
)
free = st.one_of(
    st.builds(
        AppEntered,
        st.builds(
            AppSpec,
            st.sampled_from(APPS),
            st.just("training"),
            st.sampled_from(["", "t"]),
            gpus=st.integers(0, 4),
            pipeline=st.sampled_from(["", "p"]),
            flow_run=st.sampled_from(["", "", "f"]),
        ),
    ),
    st.builds(
        AppMoved, st.sampled_from(APPS), st.sampled_from(["running", "finished", "lost"]), st.text(max_size=3)
    ),
    st.builds(Saved, st.sampled_from(APPS), st.text(max_size=5), st.integers(0, 99)),
    st.builds(
        Decided, st.just("auction"), st.just("why"), st.sampled_from(["", *APPS]), inputs=st.just({"x": 1.5})
    ),
)
fenced = st.one_of(
    st.builds(
        CapacityChanged, st.integers(0, 9), st.lists(some_nodes, max_size=3, unique_by=lambda n: n.id).map(tuple),
        st.lists(st.sampled_from(NODES), max_size=2).map(tuple), st.lists(some_notices, max_size=2).map(tuple),
        st.floats(0, 1),
    ),
    st.builds(Granted, st.lists(some_leases, min_size=1, max_size=3).map(tuple)),
    st.builds(Extended, lease_numbers, st.floats(0, 2e6)),
    st.builds(Recalled, lease_numbers, st.floats(0, 2e6)),
    st.builds(Ended, lease_numbers),
)  # fmt: skip
masks = st.integers(0, 2**9 - 1)
batches = st.lists(free | fenced, min_size=1, max_size=4)


Expected = tuple[State, list[Event], dict[str, AppRecord]]


def _completed(state: State, gone: Mapping[str, AppRecord], change: Change) -> Iterator[Change]:
    """Return ``change`` with what ``state`` has forgotten, by what is known to be ``gone``."""
    if isinstance(change, AppMoved | Saved) and change.app in gone:
        known = gone[change.app]
        yield from _completed(state, gone, AppEntered(known.spec))
        if isinstance(change, Saved):
            yield AppMoved(change.app, known.phase, known.reason)
    if isinstance(change, AppEntered):
        id_, pipeline = change.spec.id, change.spec.pipeline
        if id_ in gone:
            was = gone[id_]
            past = Past(
                was.entered,
                was.number,
                was.service,
                was.dollars,
                was.first_lease,
                was.checkpoint,
                was.spec.team,
                was.spec.pipeline,
            )
            change = replace(change, past=past)
        if pipeline and all(one.spec.pipeline != pipeline for one in state.apps.values()):
            cost = sum(r.dollars for r in gone.values() if r.spec.pipeline == pipeline and r.spec.id != id_)
            change = replace(change, pipeline_dollars=cost)
    yield change


class Machine(RuleBasedStateMachine):
    """Two processes' ledgers, of which either may lead, against a plain list of events."""

    url: str | None = None  # None: a SQLite file of its own
    written: ClassVar[Counter[str]] = Counter()

    @initialize()
    def begin(self) -> None:
        self.folder = tempfile.mkdtemp(prefix="ledger", dir=MEMORY)
        self.cluster = Path(self.folder).name
        self.clock = SetClock()
        self.model = State()
        self.gone: dict[str, AppRecord] = {}  # what the model has forgotten
        self.events: list[Event] = []
        self.pruned = 0
        self.ledgers = [self._open(), self._open()]
        self.leads: list[Leadership | None] = [None, None]
        self.lead(0, "x", False)
        start = [AppEntered(AppSpec(name, "training")) for name in APPS[:2]]
        self.write_as_loop(
            0, [*start, CapacityChanged(1, (Node("n1", 4, 8.0, gpus=3), Node("n2", 4, 8.0, gpus=3)))]
        )

    def _open(self) -> Ledger:
        return Ledger.open(self.url or f"{self.folder}/ledger.db", cluster=self.cluster, clock=self.clock)

    def teardown(self) -> None:
        if hasattr(self, "ledgers"):
            try:
                self.check()
            finally:
                for ledger in self.ledgers:
                    ledger.close()
                shutil.rmtree(self.folder, ignore_errors=True)

    def _near(self, changes: list[Change]) -> list[Change]:
        """Return ``changes`` with numbers of leases near those in use, so that many of them can follow."""
        held, last = sorted(self.model.leases), self.model.last_lease
        found: list[Change] = []
        for change in changes:
            if isinstance(change, Granted):
                leases = [replace(lease, number=last + lease.number - 2) for lease in change.leases]
                change = Granted(tuple(leases))  # noqa: PLW2901
            elif isinstance(change, Extended | Recalled | Ended):
                numbers = tuple([*held, 10_000][n % (len(held) + 1)] for n in change.leases)
                change = replace(change, leases=numbers)  # noqa: PLW2901
            found.append(change)
        return found

    def _expect(self, changes: Sequence[Change]) -> Expected | None:
        trial, gone, written = history.copied(self.model), dict(self.gone), []
        try:
            for given in changes:
                for change in _completed(trial, gone, given):
                    event = Event(trial.number + 1, self.clock.time, change)
                    fold(trial, event, gone)
                    if isinstance(change, AppEntered):
                        gone.pop(change.spec.id, None)
                    written.append(event)
        except OptionError:
            return None
        return trial, written, gone

    def _accept(self, found: Expected, written: Sequence[Event]) -> None:
        self.model, self.gone = found[0], found[2]
        assert [e.change for e in written] == [e.change for e in found[1]]
        assert list(written) == found[1]
        self.events += written
        self.written.update(type(event.change).__name__ for event in written)

    @rule(who=st.integers(0, 1), changes=batches)
    def write(self, who: int, changes: list[Change]) -> None:
        expected = self._expect(changes)
        if expected is None or any(isinstance(c, FENCED) for c in changes):
            with pytest.raises(OptionError):
                self.ledgers[who].write(changes)
            return
        self._accept(expected, self.ledgers[who].write(changes))

    @rule(who=st.integers(0, 1), changes=batches)
    def write_as_loop(self, who: int, changes: list[Change]) -> None:
        self._as_loop(who, self._near(changes))

    def _as_loop(self, who: int, changes: list[Change]) -> None:
        lead = self.leads[who]
        if lead is None:
            return
        expected = self._expect(changes)
        if lead.token != self.model.token or lead._resigned:
            with pytest.raises(StaleLoopError):
                lead.write(changes)
        elif expected is None:
            with pytest.raises((OptionError, DoubleBookingError)):
                lead.write(changes)
        else:
            self._accept(expected, lead.write(changes))

    @rule(grant=masks, end=masks, extend=masks, recall=masks, name=st.sampled_from(APPS), good=st.booleans())
    def loop_works(self, grant: int, end: int, extend: int, recall: int, name: str, good: bool) -> None:
        """The one that leads does what loops do; if not ``good`` it forgets that a GPU is taken."""
        who = next((n for n, lead in enumerate(self.leads) if lead and lead.token == self.model.token), 0)
        held = sorted(self.model.leases)
        ended = tuple(_masked(held, end))
        taken = {slot for slot, n in self.model.booked.items() if n not in ended} if good else set()
        free = [
            slot
            for node in self.model.nodes.values()
            for slot in (Slot(node.id, n) for n in range(node.gpus))
            if slot not in taken
        ]
        leases = [
            Lease(
                self.model.last_lease + n,
                name,
                slot.node,
                slot.number,
                self.clock.time,
                self.clock.time + 60,
                1,
                0.5,
            )
            for n, slot in enumerate(_masked(free, grant), 1)
        ]
        changes: list[Change] = [Decided("auction", "why", name, inputs={"x": 1.5})]
        changes += [Extended(tuple(_masked(held, extend)), self.clock.time + 99)] if held else []
        changes += [Recalled(tuple(_masked(held, recall)), self.clock.time + 9)] if held else []
        changes += [Ended(ended)] if ended else []
        changes += [Granted(tuple(leases))] if leases else []
        self._as_loop(who, changes)

    @rule(who=st.integers(0, 1), name=st.sampled_from(["x", "y"]), take_over=st.booleans())
    def lead(self, who: int, name: str, take_over: bool) -> None:
        before = self.ledgers[who].leader()
        busy = (
            before is not None and before.alive(self.clock.time) and before.holder != name and not take_over
        )
        if busy:
            with pytest.raises(LedgerBusyError):
                self.ledgers[who].lead(name, 10.0)
            return
        self.leads[who] = lead = self.ledgers[who].lead(name, 10.0, take_over=take_over)
        expected = self._expect([LoopBegan(self.model.token + 1, name)])
        assert expected is not None
        self._accept(expected, self.ledgers[who].events(self.model.number))
        assert lead.token == self.model.token

    @rule(who=st.integers(0, 1), renew=st.booleans())
    def renew_or_resign(self, who: int, renew: bool) -> None:
        lead = self.leads[who]
        if lead is None:
            return
        if not renew:
            lead.resign()
        elif lead.token != self.model.token or lead._resigned:
            with pytest.raises(StaleLoopError):
                lead.renew()
        else:
            lead.renew()

    @rule(seconds=st.sampled_from([-1e6, -7.0, 0.5, 7.0, 15.0, 1e6]))
    def time_passes(self, seconds: float) -> None:
        self.clock.time += seconds

    @rule(who=st.integers(0, 1))
    def poll(self, who: int) -> None:
        assert self.ledgers[who].state() == self.model

    @rule(who=st.integers(0, 1), app=st.sampled_from(APPS), step=st.integers(0, 9))
    def report(self, who: int, app: str, step: int) -> None:
        self.ledgers[who].report(app, AppReport(self.clock.time, step=step))
        assert self.ledgers[1 - who].reports()[app].step == step

    @rule(who=st.integers(0, 1), name=st.sampled_from(APPS))
    def look_up(self, who: int, name: str) -> None:
        assert self.ledgers[who].app(name) == self.model.apps.get(name, self.gone.get(name))

    @rule(who=st.integers(0, 1))
    def reopen(self, who: int) -> None:
        self.ledgers[who].close()
        self.ledgers[who], self.leads[who] = self._open(), None
        assert self.ledgers[who].state() == self.model

    @rule(who=st.integers(0, 1), ago=st.sampled_from([-1.0, 0.0, 7.0, 1e6]), keep=st.booleans())
    def prune(self, who: int, ago: float, keep: bool) -> None:
        before = self.clock.time - ago
        foretold = self.ledgers[who].prune(before, keep_events=keep, dry_run=True)
        done = self.ledgers[who].prune(before, keep_events=keep)
        assert (done.up_to, done.events) == (foretold.up_to, foretold.events)
        kept = [e for e in self.events if e.number > self.pruned]
        new = [e.at >= before for e in kept]
        first_new = kept[new.index(True)].number if True in new else self.model.number  # the last one stays
        self.pruned = self.pruned if keep else max(self.pruned, first_new - 1)
        assert done.up_to == self.pruned
        for n, event in enumerate(self.events):
            if isinstance(event.change, Decided) and event.at < before:
                self.events[n] = Event(event.number, event.at, Decided("auction", "why", event.change.app))

    @invariant()
    def numbered(self) -> None:
        if hasattr(self, "model"):
            assert self.model.number == len(self.events)

    def check(self) -> None:
        for ledger in (*self.ledgers, self._open()):
            assert ledger.verify() == []
            assert ledger.state() == self.model
            found = ledger.events(limit=10_000)
            assert found == self.events[self.pruned :]
            said = audit(found, ledger.origin())
            assert all("firm notice" in one for one in said), said  # ``fold`` leaves those to the loop
        ledger.close()


def _masked(values: Sequence[Any], mask: int) -> list[Any]:
    return [value for n, value in enumerate(values) if mask >> (n % 9) & 1]


def examples(usual: int, wide: int) -> settings:
    """Return settings of the profile in use, with as many examples as the ledger's pace allows."""
    return settings(max_examples=usual if settings().derandomize else wide, stateful_step_count=30)


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make snapshots, and forget, often."""
    monkeypatch.setattr(snapshots, "EVERY", 5)
    monkeypatch.setattr(ledger_model, "SWEEP", 3)
    monkeypatch.setattr(ledger_model, "REMEMBERED", 10.0)


def test_whatever_is_tried_sqlite_is_what_its_events_add_up_to() -> None:
    run_state_machine_as_test(Machine, settings=examples(12, 300))
    assert {"LoopBegan", "AppEntered"} <= set(Machine.written)


def test_whatever_is_tried_postgresql_is_what_its_events_add_up_to(postgres: Any) -> None:
    class OnServer(Machine):
        url = postgres.url
        written: ClassVar[Counter[str]] = Counter()

    run_state_machine_as_test(OnServer, settings=examples(4, 60))
    assert {"LoopBegan", "AppEntered"} <= set(OnServer.written)
