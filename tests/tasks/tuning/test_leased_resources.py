"""How leases are dealt to trials, which nodes are left alone, and what a pool starts."""

from pathlib import Path
from typing import Any

import pytest

from ebbflow.infra.errors import ClusterError, LeaseError
from ebbflow.infra.training.channel.wire import Entry
from ebbflow.planners.model.scheduling import App
from ebbflow.tasks.apps.lease_table import LeaseTable
from ebbflow.tasks.training.leased.nodes import FencedPool, LeasedNodes, NodeBackoff
from ebbflow.tasks.tuning.leased_resources import LeasedTrialResources
from ebbflow.tasks.tuning.request import Parameter, TuningRequest
from ebbflow.tasks.tuning.trial import Trial
from tests.tasks.apps.lease_cases import Hands, book_of, lease
from tests.tasks.apps.toy_trainings import Machines


def trial(run: str) -> Trial:
    return Trial(None, App(run), run, {}, False)


@pytest.fixture
def room_of(tmp_path: Path) -> Any:
    script = tmp_path / "train.py"
    script.write_text("")
    request = TuningRequest(
        str(script), (Parameter("lr", "log", 0.001, 1.0),), "accuracy", runs_dir=str(tmp_path), nodes="local:4x1",
        max_gpus=3,
    )  # fmt: skip
    return lambda book, clock: LeasedTrialResources(request, book, clock)


def sizes(resources: LeasedTrialResources) -> dict[str, int]:
    return {node.id: node.gpus for node in resources.nodes()}


def test_a_lease_is_dealt_once(room_of: Any) -> None:
    book, clock = book_of(lease(1), lease(2, slot=1), lease(3, "b"))
    resources, one, two = room_of(book, clock), trial("one"), trial("two")
    assert sizes(resources) == {"a": 2, "b": 1}
    resources.give(one, (("a", 1),))
    resources.give(two, (("a", 1), ("b", 1)))
    assert (resources.assigned("one"), resources.assigned("two")) == ({1}, {2, 3})
    assert resources.held(two) == (("a", 1), ("b", 1))
    assert sizes(resources) == {"a": 2, "b": 1}, "those that trials have are counted"
    assert one.nodes is not None
    assert one.nodes.there() == {"a": 1}
    resources.take_back(one)
    assert resources.held(one) == ()
    resources.give(two, (("a", 2), ("b", 1)))
    assert resources.assigned("two") == {1, 2, 3}


def test_what_a_trial_still_uses_is_dealt_to_nobody_else(room_of: Any) -> None:
    book, clock = book_of(lease(1), lease(2, slot=1))
    resources, one, two = room_of(book, clock), trial("one"), trial("two")
    resources.give(one, (("a", 2),))
    book.enter("u", "a", 2, resources.assigned("one"))
    resources.give(one, (("a", 1),))
    assert resources.assigned("one") == {1}
    assert sizes(resources) == {"a": 1}, "the other is on its way"
    assert not resources.settled()
    resources.give(two, (("a", 1),))
    assert resources.assigned("two") == frozenset()
    book.leave("u")
    assert resources.settled()
    assert sizes(resources) == {"a": 2}
    resources.give(two, (("a", 1),))
    assert resources.assigned("two") == {2}


def test_a_lease_called_back_stays_a_trials_until_it_has_left(room_of: Any) -> None:
    book, clock = book_of(lease(1), lease(2, "b"))
    resources, one = room_of(book, clock), trial("one")
    resources.give(one, (("a", 1), ("b", 1)))
    book.enter("u", "a", 1, resources.assigned("one"))
    assert resources.deadline(one) is None
    called = lease(1)
    book.learn([type(called)(**{**_fields(called), "recalled": 1020.0}), lease(2, "b")], 1e9)
    assert resources.held(one) == (("b", 1),)
    assert resources.deadline(one) == 1017.0
    resources.give(one, (("b", 1),))
    assert resources.assigned("one") == {1, 2}, "its deadline is still the trial's"
    clock.time = 1019.5
    assert resources.deadline(one) == 1020.5, "a moment to save in, however late"
    book.leave("u")
    resources.give(one, (("b", 1),))
    assert resources.assigned("one") == {2}


def _fields(one: Any) -> dict[str, Any]:
    return {name: getattr(one, name) for name in one.__dataclass_fields__}


def test_a_lost_node_is_left_alone_for_longer_each_time_unless_it_has_new_leases() -> None:
    book, clock = book_of(lease(1, until=9000.0), lease(2, "b", until=9000.0))
    nodes = LeasedNodes(book, 4, 1, clock)
    waits = []
    for _ in range(3):
        lost = clock.time
        nodes.remove(["a"])
        nodes.remove(["a"])  # told twice
        assert nodes.there() == {"b": 1}
        while "a" not in nodes.there():
            clock.time += 1.0
            book.learn(book.leases, 1e9)
        waits.append(clock.time - lost)
    assert waits == [15.0, 30.0, 60.0]
    nodes.remove(["a"])
    book.learn([*book.leases, lease(3, slot=1, until=9000.0)], 1e9)
    assert nodes.there() == {"a": 2, "b": 1}


def test_blamed_nodes_are_left_out_while_the_others_are_enough() -> None:
    book, clock = book_of(lease(1), lease(2, "b"))
    nodes = LeasedNodes(book, 4, 1, clock)
    nodes.replace_nodes(["a"])
    assert nodes.there() == {"b": 1}
    nodes.remove(["b"])
    assert nodes.there() == {"a": 1}, "rather than none"
    nodes.adopt({"z": 1})
    nodes.become({"z": 1})
    assert nodes.add(1) == []
    assert nodes.slots == 1, "only leases bring nodes"
    assert LeasedNodes(book, 4, 2, clock, avoided=NodeBackoff(book, clock)).newest(1) == ["b"]


def fenced(book: LeaseTable, clock: Hands, machines: Machines) -> FencedPool:
    return FencedPool(machines.pool(), book, book.leave, clock)


def test_nothing_starts_before_the_ledger_knows_whose_it_is() -> None:
    """Whoever ends by force what an app left on a machine elsewhere finds it by what the app had said of it."""
    book, clock = book_of(lease(1), lease(2, "b"))
    machines, known = Machines(), set[str]()

    def sleep(seconds: float) -> None:
        clock.time += seconds

    clock.sleep = sleep  # type: ignore[method-assign]
    pool = FencedPool(machines.pool(), book, book.leave, clock, is_reported=known.__contains__)
    begun = clock.time
    with pytest.raises(
        LeaseError, match="nothing is started on a: the ledger has received no heartbeat of its processes"
    ):
        pool.start("a", 1, entry("a"))
    assert 9.0 < clock.time - begun < 12.0
    assert book.used() == frozenset()
    known.add(pool.uid)
    book.learn(book.leases, 1e9)
    pool.start("b", 1, entry("b"))
    assert book.used() == {2}


def entry(name: str) -> Entry:
    return Entry("", "00" * 32, "t", name, f"{name}-1", "", "")


def test_a_pool_starts_only_what_there_are_leases_for_and_says_which_gpus() -> None:
    book, clock = book_of(lease(1, slot=1))
    machines = Machines()
    pool = fenced(book, clock, machines)
    with pytest.raises(LeaseError, match="needs 2 GPUs of a"):
        pool.start("a", 2, entry("a"))
    with pytest.raises(LeaseError):
        pool.start("z", 1, entry("z"))
    pool.start("a", 1, entry("a"))
    assert machines.busy == {("a", 1)}
    assert book.used() == {1}
    pool.end("a")
    assert not book.used()
    pool.close()
    assert pool.closed


def test_a_node_that_cannot_be_started_keeps_no_lease() -> None:
    book, clock = book_of(lease(1))
    machines = Machines()
    machines.dead.add("a")
    pool = fenced(book, clock, machines)
    with pytest.raises(ClusterError, match="a is gone"):
        pool.start("a", 1, entry("a"))
    assert not book.used()


def test_a_killed_node_keeps_its_lease_until_its_processes_are_gone() -> None:
    book, clock = book_of(lease(1))
    machines = Machines()
    pool = fenced(book, clock, machines)
    pool.start("a", 1, entry("a"))
    assert pool.node_of(next(iter(book.users([1])))) == "a"
    machines.kill("a")
    assert pool.lost("a") == "killed"
    assert not book.used()


def test_a_node_is_not_started_again_while_what_ran_there_lives() -> None:
    book, clock = book_of(lease(1), lease(2, slot=1))
    machines = Machines(linger=1e9)

    def sleep(seconds: float) -> None:
        clock.time += seconds
        book.learn(book.leases, 1e9)

    clock.sleep = sleep  # type: ignore[method-assign]
    pool = fenced(book, clock, machines)
    pool.start("a", 1, entry("a"))
    pool.end("a")
    with pytest.raises(LeaseError, match="its previous processes have not ended for 20 s"):
        pool.start("a", 1, entry("b"))
    assert book.used() == {1}
    machines.linger = 0.0
    pool.settle()
    assert not book.used()
