"""Events for tests of cluster reports: a book that numbers and checks them, two apps, any life."""

from collections.abc import Sequence
from dataclasses import replace
from math import inf

import numpy as np
from hypothesis import strategies as st

from ebbflow.planners.model.capacity import Node, Notice
from ebbflow.planners.model.ledger import (
    AppEntered,
    AppMoved,
    AppReport,
    AppSpec,
    CapacityChanged,
    Change,
    Decided,
    Ended,
    Event,
    Granted,
    Lease,
    LoopBegan,
    Recalled,
)
from ebbflow.planners.model.ledger_state import State, fold

START = 1_790_000_000.0  # 2026-09-21 14:13:20 UTC


class Book:
    """Writes events in order, as a ledger would, and keeps their state."""

    def __init__(self, start: float = START) -> None:
        self.start = start
        self.events: list[Event] = []
        self.state = State()

    def write(self, after: float, *changes: Change) -> None:
        """Write ``changes`` at ``after`` seconds from the start."""
        for change in changes:
            event = Event(len(self.events) + 1, self.start + after, change)
            fold(self.state, event)
            self.events.append(event)

    def capacity(
        self,
        after: float,
        *nodes: Node,
        left: Sequence[str] = (),
        notices: Sequence[Notice] | None = None,
        reason: str = "",
    ) -> None:
        """Write a change of capacity; notices stand until their nodes leave."""
        standing = tuple(n for i, n in sorted(self.state.notices.items()) if i not in left)
        held = standing if notices is None else tuple(notices)
        self.write(after, CapacityChanged(self.state.revision + 1, nodes, tuple(left), held, reason=reason))

    def grant(
        self, after: float, app: str, *slots: tuple[str, int], reason: str = "", seconds: float = 600.0
    ) -> list[int]:
        """Grant a GPU of each (node, slot) to ``app`` and return the leases' numbers."""
        numbers = [self.state.last_lease + 1 + i for i in range(len(slots))]
        at = self.start + after
        leases = tuple(
            Lease(
                number,
                app,
                node,
                slot,
                at,
                at + seconds,
                self.state.revision,
                self.state.nodes[node].price / self.state.nodes[node].gpus,
                None,
                reason,
            )
            for number, (node, slot) in zip(numbers, slots, strict=True)
        )
        self.write(after, Granted(leases))
        return numbers

    def recall(self, after: float, numbers: Sequence[int], reason: str = "", grace: float = 30.0) -> None:
        self.write(after, Recalled(tuple(numbers), self.start + after + grace, reason))

    def end(self, after: float, numbers: Sequence[int], reason: str = "") -> None:
        self.write(after, Ended(tuple(numbers), reason))

    def free(self) -> list[tuple[str, int]]:
        """Return the GPUs that are not booked, on nodes that no notice says will leave."""
        leaving = {n.node_id for n in self.state.notices.values() if n.kind == "interruption"}
        return [
            (node.id, slot)
            for node in sorted(self.state.nodes.values(), key=lambda n: n.id)
            if node.id not in leaving
            for slot in range(node.gpus)
            if (node.id, slot) not in self.state.booked
        ]


GPU = Node("", 8, 32.0, instance_type="g5.2xlarge", market="spot", zone="eu-west-1a", gpus=2, price=0.72)
SURE = replace(GPU, market="on-demand", price=1.212)
CORES = Node("", 16, 64.0, instance_type="m6i.4xlarge", market="spot", zone="eu-west-1b", price=0.31)


A = replace(GPU, id="a", price=2.0)
B = replace(SURE, id="b", price=4.0)


def training(id_: str, **values: object) -> AppEntered:
    return AppEntered(replace(AppSpec(id_, "training", gpus=2, min_gpus=1, max_gpus=2), **values))


def two_apps() -> Book:
    """x has two GPUs for 1830 s, y one for 3600 s, of four on two nodes that are there for 3610 s."""
    book = Book()
    book.write(0, LoopBegan(1, "loop"))
    book.capacity(0, A, B)
    book.write(0, training("x", team="red"), training("y", team="blue"))
    x = book.grant(10, "x", ("a", 0), ("a", 1))
    book.write(10, AppMoved("x", "running"))
    y = book.grant(10, "y", ("b", 0))
    book.write(10, AppMoved("y", "running"))
    book.recall(1810, x, "others are further behind")
    book.end(1840, x)
    book.write(1840, AppMoved("x", "finished"))
    book.end(3610, y)
    book.write(3610, AppMoved("y", "finished"))
    return book


@st.composite
def books(draw: st.DrawFn) -> tuple[Book, dict[str, AppReport]]:
    """Return any life of a small cluster: each step is something that may follow."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    names = draw(st.lists(st.text(max_size=12), min_size=1, max_size=4, unique=True))
    book = Book()
    at = 0.0
    for kind in draw(st.lists(st.integers(0, 9), max_size=40)):
        at += float(rng.choice([0.0, 0.3, 5.0, 700.0]))
        apps, nodes, leases = sorted(book.state.apps), sorted(book.state.nodes), sorted(book.state.leases)
        name = str(rng.choice(names))
        if kind == 0:
            node = replace(
                (GPU, SURE, CORES)[rng.integers(3)], id=name, price=float(rng.choice([0.0, 0.5, 3.0]))
            )
            held = [lease.slot for lease in book.state.leases.values() if lease.node == name]
            if not held or max(held) < node.gpus:
                book.capacity(at, node)
        elif kind == 1 and nodes:
            book.capacity(at, left=[str(rng.choice(nodes))], reason=name)
        elif kind == 2 and nodes:
            notice = Notice(
                str(rng.choice(nodes)), START + at + 120, ("interruption", "rebalance")[rng.integers(2)]
            )
            book.capacity(at, notices=[notice])
        elif kind == 3:
            app = AppSpec(name, ("query", "training", "tuning")[rng.integers(3)], name, name, name, 2, 1, 4,
                          float(rng.choice([0.5, 1, 2])), START + float(rng.choice([10, 1e4])), 0.01)  # fmt: skip
            book.write(at, AppEntered(app))
        elif kind == 4 and apps:
            phases = ("waiting", "running", "finished", "stopped", "failed", "lost")
            book.write(at, AppMoved(str(rng.choice(apps)), phases[rng.integers(6)], name))
        elif kind in (5, 6) and apps and (free := book.free()):
            book.grant(at, str(rng.choice(apps)), *free[: int(rng.integers(1, 4))], reason=name)
        elif kind == 7 and leases:
            book.recall(at, [int(rng.choice(leases))], name)
        elif kind == 8 and leases:
            book.end(at, [int(rng.choice(leases))], name)
        elif kind == 9:
            inputs = {"apps": {name: {"rho": float(rng.choice([0.5, inf])), name: name}}, name: [name]}
            kinds = ("auction", "scaling", "replan", "guard", "recovery")
            book.write(
                at, Decided(kinds[rng.integers(5)], name, name, 1, 0.1, inputs, {name: {name: [1, name]}})
            )
    now = START + at
    reports = {
        name: AppReport(now, progress=0.5, seconds_left=10.0, work_left=5.0, work_total=9.0, message=name,
                        job={"goodput": 3.0, "stages": [{"name": name, "status": name, "started": START + 1}]})
        for name in names
    }  # fmt: skip
    return book, reports
