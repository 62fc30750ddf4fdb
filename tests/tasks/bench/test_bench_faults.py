"""A schedule carried out on a cluster that only remembers what was done to it."""

import threading
from collections.abc import Collection
from itertools import count
from types import SimpleNamespace
from typing import Any

from ebbflow.infra.clock import SystemClock
from ebbflow.infra.errors import ClusterError
from tests.benchmarks.sql.faults import Faults
from tests.benchmarks.sql.schedules import Change


class Cluster:
    """Three workers; ``broken``: none can be added."""

    def __init__(self, *, broken: bool = False) -> None:
        self.nodes, self.noticed, self.broken, self._numbers = ["w-1", "w-2", "w-3"], [], broken, count(4)

    def status(self) -> Any:
        return SimpleNamespace(nodes=[SimpleNamespace(id=node, state="alive") for node in self.nodes])

    def notice(self, node: str, seconds: float) -> None:
        self.noticed.append((node, seconds))

    def kill(self, node: str) -> None:
        self.nodes.remove(node)

    def add(self) -> str:
        if self.broken:
            raise ClusterError("no worker starts")
        self.nodes.append(f"w-{next(self._numbers)}")
        return self.nodes[-1]


def done(cluster: Any, changes: list[Change], *, notices: bool = True, late: int = 0) -> Faults:
    """Carry out all ``changes``; workers that have come can work at the look after ``late`` others."""
    clock, looks, over = SystemClock(), count(), threading.Event()

    def serving(nodes: Collection[str]) -> bool:
        return next(looks) >= late

    def planned() -> Any:
        yield from changes
        over.set()

    faults = Faults(cluster, planned(), clock, serving=serving, seed="one", notices=notices)
    faults.begin(clock.now())
    faults._schedule.wait()
    faults.end()
    assert over.is_set() or faults.problem
    return faults


def test_workers_leave_with_notice_and_others_come() -> None:
    cluster = Cluster()
    faults = done(cluster, [Change(0.2, 1, 0.1), Change(0.1, 3)], late=1)
    assert [(h.what, h.workers) for h in faults.happenings][:4] == [
        ("notice", 1), ("notice", 1), ("kill", 1), ("kill", 1)
    ]  # fmt: skip
    assert sorted(h.what for h in faults.happenings[4:-1]) == ["add", "add", "up", "up"]
    assert (faults.happenings[-1].what, faults.happenings[-1].workers) == ("serving", 3)
    assert {node for node, _ in cluster.noticed} == {h.node for h in faults.happenings if h.what == "kill"}
    assert all(0.0 <= seconds < 0.101 for _, seconds in cluster.noticed)
    kills = [h.at for h in faults.happenings if h.what == "kill"]
    assert min(kills) >= 0.2
    assert faults.happenings[4].at > max(kills) + 0.098  # from when the change before had been carried out
    assert cluster.nodes[1:] == ["w-4", "w-5"]


def test_without_notices_who_has_one_vanishes_at_its_end() -> None:
    cluster = Cluster()
    assert [h.what for h in done(cluster, [Change(0.02, 2, 0.01)], notices=False).happenings] == ["kill"]
    assert cluster.noticed == []


def test_what_cannot_be_done_ends_the_schedule_and_is_told() -> None:
    faults = done(Cluster(broken=True), [Change(0.0, 2), Change(0.0, 3), Change(0.0, 1)])
    assert faults.problem == "no worker starts"
    assert [h.what for h in faults.happenings] == ["kill", "add"]


def test_what_has_not_happened_by_the_end_does_not_happen() -> None:
    cluster: Any = Cluster()
    clock = SystemClock()
    faults = Faults(
        cluster, iter([Change(3600.0, 1)]), clock, serving=lambda _: True, seed="one", notices=True
    )
    faults.begin(clock.now())
    faults.end()
    assert (faults.happenings, faults.problem, cluster.nodes) == ([], "", ["w-1", "w-2", "w-3"])
