"""One aggregation service for several trainings: packed, moved, drained, and planned by whoever is in charge."""

import threading
import time
from collections.abc import Callable, Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

from ebbflow.infra.aggregation.aggregator import Aggregator
from ebbflow.infra.aggregation.manager import ServiceManager
from ebbflow.infra.aggregation.registry import (
    MANAGER,
    TIMEOUT,
    ServiceRegistry,
    ServiceView,
    TrainingRecord,
    incarnation,
    savings,
)
from ebbflow.infra.aggregation.shared import SharedAggregator
from ebbflow.infra.errors import AggregationError, LedgerError, LedgerUnavailableError
from ebbflow.infra.ledger import Ledger
from ebbflow.infra.ledger.address import VARIABLE
from ebbflow.infra.ledger.records import ServiceRecords
from ebbflow.infra.machine.encrypted_router import CurveKeys
from ebbflow.infra.training.service import joining
from ebbflow.infra.training.service.aggregator_sets import aggregators_of
from ebbflow.infra.training.service.shared_aggregators import SharedAggregators
from ebbflow.planners.aggregation.assignment import HeuristicOptions
from ebbflow.planners.model.trainings import RunSettings
from ebbflow.tasks import aggregation as service
from tests.infra.aggregation.services import PATIENCE
from tests.infra.training.service.fake_run import SIZES, FakeRun

pytestmark = pytest.mark.timeout(240)

OPTIONS = HeuristicOptions(Fraction(9, 10))  # iterations differ by chance; what is placed is not to


class RunningAggregator:
    """A shared aggregator whose loop runs in a thread."""

    def __init__(self, name: str, ledger: Ledger) -> None:
        self.name = name
        self.shared = SharedAggregator(Aggregator(name), ServiceRegistry(ledger.records), OPTIONS)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self.shared.serve, args=(self._stop,))
        self._thread.start()

    def stop(self) -> None:
        """End the loop at once and tell nobody, as a kill does."""
        self._stop.set()
        self._thread.join(PATIENCE)

    @property
    def ended(self) -> bool:
        return not self._thread.is_alive()

    def close(self) -> None:
        self.stop()
        self.shared.close()


class Outage:
    """A ledger that can be out of reach for all that use it in this process."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.on = threading.Event()
        for name in ("read", "put", "write"):
            monkeypatch.setattr(ServiceRecords, name, self._guarded(getattr(ServiceRecords, name)))

    def _guarded(self, act: Callable[..., Any]) -> Callable[..., Any]:
        def guarded(*arguments: Any) -> Any:
            if self.on.is_set():
                raise LedgerUnavailableError("the ledger does not answer")
            return act(*arguments)

        return guarded


@pytest.fixture(name="ledger")
def _ledger(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Ledger]:
    monkeypatch.setenv(VARIABLE, str(tmp_path / "ledger.db"))
    with Ledger.open() as made:
        yield made


@pytest.fixture(name="outage")
def _outage(monkeypatch: pytest.MonkeyPatch) -> Iterator[Outage]:
    made = Outage(monkeypatch)
    yield made
    made.on.clear()


@pytest.fixture(name="serving")
def _serving(ledger: Ledger) -> Iterator[dict[str, RunningAggregator]]:
    made: dict[str, RunningAggregator] = {}
    try:
        for name in ("a1", "a2", "a3"):
            made[name] = RunningAggregator(name, ledger)
        yield made
    finally:
        for one in made.values():
            one.close()


def _until(ledger: Ledger, holds: Callable[[ServiceView], bool], what: str) -> ServiceView:
    registry, end = ServiceRegistry(ledger.records), time.monotonic() + PATIENCE
    while True:
        view = registry.read()
        if holds(view):
            return view
        assert time.monotonic() < end, (what, view)
        time.sleep(0.05)


def _settled(view: ServiceView, trainings: int) -> bool:
    placed = view.kind(MANAGER.kind).get(MANAGER.name, {}).get("placed", [])
    return len(placed) == trainings and view.hosts() == view.intended() and len(view.hosts()) == 2 * trainings


def test_two_trainings_are_packed_on_one_aggregator_which_is_drained_while_they_run(
    ledger: Ledger, serving: dict[str, RunningAggregator]
) -> None:
    _until(ledger, lambda view: len(view.aggregators()) == 3, "three serve")
    runs = [FakeRun("nightly", servers=2) for _ in range(2)]  # of two users
    view = _until(ledger, lambda view: _settled(view, 2), "both are placed")
    assert set(view.hosts()) == {(one.job, name) for one in runs for name in SIZES}
    used = set(view.hosts().values())
    assert len(used) == 1  # each began on two
    packed = {"private": 4, "used": 1, "saved": 1 - 1 / 4}
    _until(ledger, lambda view: savings(view) == packed, "others have told that they hold nothing any more")

    leaving = min(used)
    ServiceRegistry(ledger.records).drain(leaving, time.time() + PATIENCE)
    _until(ledger, lambda view: leaving in view.drained(), "it has left")
    _until(ledger, lambda _: serving[leaving].ended, "its end")
    before = [one.rounds for one in runs]
    _until(
        ledger, lambda _: all(one.rounds > then + 5 for one, then in zip(runs, before, strict=True)), "rounds"
    )
    assert not any(one.aggregators.ended() for one in runs)  # nothing was lost
    for one in runs:
        one.finish()
    _until(ledger, lambda view: not view.trainings() and not view.placement(), "all is forgotten")


def test_another_is_in_charge_once_the_manager_is_gone(
    ledger: Ledger, serving: dict[str, RunningAggregator]
) -> None:
    view = _until(ledger, lambda view: MANAGER in view.records, "one is in charge")
    first = view.records[MANAGER].body
    serving[first["holder"]].stop()
    view = _until(ledger, lambda view: view.records[MANAGER].body["holder"] != first["holder"], "another one")
    assert view.records[MANAGER].body["term"] == first["term"] + 1
    _until(ledger, lambda view: first["holder"] not in view.aggregators(), "it counts as lost")
    run = FakeRun("late", servers=2)
    _until(ledger, lambda view: _settled(view, 1), "it is placed")
    run.finish()


def test_an_aggregator_that_is_lost_is_told_to_a_training_that_uses_it(
    ledger: Ledger, serving: dict[str, RunningAggregator]
) -> None:
    _until(ledger, lambda view: len(view.aggregators()) == 3, "three serve")
    aggregators = SharedAggregators("local", "run", 1)
    try:
        aggregators.start()
        (name,) = joining.addresses(aggregators.environment)
        (other, *_) = serving.keys() - {name}
        serving[other].stop()
        _until(ledger, lambda view: other not in view.aggregators(), "loss of one that it does not use")
        assert aggregators.ended() == []
        serving[name].stop()
        _until(ledger, lambda _: aggregators.ended() == [name], "the loss")
    finally:
        aggregators.close()


def test_a_training_asks_the_ledger_that_it_is_given(ledger: Ledger, tmp_path: Path) -> None:
    settings = RunSettings(sync="service", aggregation_cluster="shop")
    address = str(tmp_path / "another.db")
    with pytest.raises(LedgerError, match=r"another\.db"):  # a new one would have no aggregators
        aggregators_of(settings, "run", "127.0.0.1", address)
    assert not Path(address).exists()
    with Ledger.open(address, cluster="shop") as other:
        aggregators = aggregators_of(settings, "run", "127.0.0.1", address)
        try:
            view = _until(other, lambda view: bool(view.demands()), "its demand")
            assert [body["app"] for body in view.demands().values()] == ["run"]
            assert not ServiceRegistry(ledger.records).read().demands()
        finally:
            aggregators.close()


def test_a_service_without_enough_aggregators_is_refused(ledger: Ledger) -> None:
    aggregators = SharedAggregators("local", "run", 1, mirrors=1)
    one = RunningAggregator("a1", ledger)
    try:
        _until(ledger, lambda view: len(view.aggregators()) == 1, "one serves")
        with pytest.raises(
            AggregationError, match="cluster local must have at least 2 aggregators, and has 1"
        ):
            aggregators.start()
        again = Aggregator("a1")
        with pytest.raises(AggregationError, match="aggregator a1 serves this cluster already"):
            SharedAggregator(again, ServiceRegistry(ledger.records))
        again.close()
    finally:
        aggregators.close()
        one.close()


def test_trainings_outlast_a_ledger_that_is_away_and_nobody_waits_for_it(
    ledger: Ledger, serving: dict[str, RunningAggregator], outage: Outage
) -> None:
    _until(ledger, lambda view: len(view.aggregators()) == 3, "three serve")
    run = FakeRun("run", servers=2)
    _until(ledger, lambda _: run.rounds > 5, "rounds")
    launcher, joins = run.aggregators, {"node-1": CurveKeys.make().public}
    outage.on.set()
    before = run.rounds
    assert not launcher.admits("generation-1", joins)
    time.sleep(TIMEOUT + 1)  # a silence that would count
    assert run.rounds > before
    outage.on.clear()
    _until(ledger, lambda _: launcher.admits("generation-1", joins), "a node joins")
    before = run.rounds
    _until(ledger, lambda _: run.rounds > before + 5, "rounds")
    outage.on.set()
    run.finish()  # which asked after lost aggregators all the time, and cannot tell the ledger that it is over


def test_mirrors_of_an_aggregator_that_is_drained_are_told_to_their_training(
    ledger: Ledger, serving: dict[str, RunningAggregator]
) -> None:
    _until(ledger, lambda view: len(view.aggregators()) == 3, "three serve")
    run = FakeRun("mirrored", servers=2, mirrors=1)
    _until(ledger, lambda _: run.rounds > 5, "rounds")
    (leaving,) = {hosts[1] for hosts in run.table.values()}
    service.drain(ledger, leaving, PATIENCE)
    _until(ledger, lambda _: serving[leaving].ended, "it has left")
    serving[leaving].close()
    before = run.rounds
    _until(ledger, lambda _: run.rounds > before + 5, "rounds without a mirror")
    run.finish()


def test_an_aggregator_that_comes_again_under_its_name_is_another_one(ledger: Ledger) -> None:
    first = RunningAggregator(incarnation("a1"), ledger)
    _until(ledger, lambda view: len(view.aggregators()) == 1, "it serves")
    with pytest.raises(AggregationError, match="aggregator a1 serves this cluster already"):
        RunningAggregator(incarnation("a1"), ledger)
    run = SharedAggregators("local", "run", 1)
    run.start()
    served = [first]
    try:
        run.admit("generation-1", {"node-0": CurveKeys.make().public})
        first.stop()
        ServiceRegistry(ledger.records).drop_aggregator(first.name)
        again = RunningAggregator(incarnation("a1"), ledger)
        served.append(again)
        _until(ledger, lambda view: list(view.aggregators()) == [again.name], "it serves again")
        _until(ledger, lambda _: run.ended() == [first.name], "the loss of what the first one held")
        assert [one["name"] for one in service.service_status(ledger)["aggregators"]] == ["a1"]
        service.drain(ledger, "a1", PATIENCE)
        _until(ledger, lambda _: again.ended, "it has left")
    finally:
        run.close()
        for one in served:
            one.close()


def test_a_training_whose_workers_cannot_be_admitted_stops_nobody_else(
    ledger: Ledger, serving: dict[str, RunningAggregator]
) -> None:
    _until(ledger, lambda view: len(view.aggregators()) == 3, "three serve")
    ServiceRegistry(ledger.records).put_training("bad/generation-1", TrainingRecord(1, {"w": "no key"}, 1))
    run = FakeRun("good", servers=1)
    _until(ledger, lambda _: run.rounds > 5, "rounds")
    run.finish()


def test_who_was_in_charge_and_resigns_is_followed_at_once(ledger: Ledger) -> None:
    registry = ServiceRegistry(ledger.records)
    first, second = ServiceManager(registry, "a"), ServiceManager(registry, "b")
    assert first.act(registry.read())
    assert not second.act(registry.read())
    first.resign()
    assert second.act(registry.read())


def test_a_plan_that_fails_costs_no_tensors(
    ledger: Ledger, serving: dict[str, RunningAggregator], monkeypatch: pytest.MonkeyPatch
) -> None:
    planned = threading.Event()

    def plan(*_: object) -> None:
        planned.set()
        raise KeyError("a defect")

    monkeypatch.setattr("ebbflow.infra.aggregation.manager.plan_placement", plan)
    _until(ledger, lambda view: len(view.aggregators()) == 3, "three serve")
    run = FakeRun("run", servers=1)
    _until(ledger, lambda _: planned.is_set() and run.rounds > 5, "rounds after a plan")
    before = run.rounds
    _until(ledger, lambda _: run.rounds > before + 5, "further rounds")
    run.finish()
    assert not any(one.ended for one in serving.values())
