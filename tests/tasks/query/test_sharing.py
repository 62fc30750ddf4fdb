"""Shares of a cluster: pushed on every arrival, departure and change of nodes; nothing idle that someone can use."""

import math
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ebbflow.infra.clock import SystemClock
from ebbflow.infra.errors import StorageError
from ebbflow.infra.protocols import Claim
from ebbflow.infra.query.duckdb import DuckDbEngine
from ebbflow.infra.query.local import LocalCapacity
from ebbflow.infra.query.shares import FileShareRegistry
from ebbflow.infra.storage.places import StorageLocation
from ebbflow.planners.model import Capacity, CapacityDiff, Node, Resources, Share
from ebbflow.planners.query.plan.qep import Stage
from ebbflow.tasks.query.feedback import Feedback, FeedbackIntervals
from ebbflow.tasks.query.listening import StageOutcome
from ebbflow.tasks.query.opening import OpenedEngine, opened_engine
from ebbflow.tasks.query.report import QueryReport
from ebbflow.tasks.query.request import QueryRequest
from ebbflow.tasks.query.run import PlainOrchestrator, execute
from ebbflow.tasks.query.sharing import TURN, SharedCapacity, divide


class Clock:
    def __init__(self) -> None:
        self.time = 1000 * TURN

    def now(self) -> float:
        return self.time

    def sleep(self, seconds: float) -> None:
        self.time += seconds

    def wait(self, event: threading.Event, timeout: float) -> bool:
        self.time += timeout
        return event.is_set()


class Handle:
    def __init__(self, registry: "Registry", claim: Claim) -> None:
        self.claim = claim
        self.registry = registry

    def limit(self, cores: float) -> None:
        self.claim = replace(self.claim, limit=cores)

    def leave(self) -> None:
        self.registry.handles = [h for h in self.registry.handles if h is not self]


class Registry:
    """A ``ShareRegistry`` in memory."""

    def __init__(self) -> None:
        self.handles: list[Handle] = []
        self.silent = False

    def join(self, weight: float, *, limit: float = math.inf, application: str = "") -> Handle:
        handle = Handle(self, Claim(f"q{len(self.handles)}", weight, limit, application))
        self.handles.append(handle)
        return handle

    def claims(self) -> Sequence[Claim]:
        if self.silent:
            raise StorageError("the store does not answer")
        return [h.claim for h in self.handles]


class Nodes:
    def __init__(self, *cores: int) -> None:
        self.revision = 0
        self.set(*cores)

    def set(self, *cores: int) -> None:
        self.revision += 1
        self.nodes = tuple(Node(f"n{i}", n, 2.0 * n, host=f"n{i}") for i, n in enumerate(cores))

    def capacity(self) -> Capacity:
        return Capacity(self.revision, self.nodes, slot=Resources(1.0, 2.0))


class Cluster:
    """A cluster on which queries come and go, each with what it was told and what it holds."""

    def __init__(self, *cores: int) -> None:
        self.clock, self.nodes, self.registry = Clock(), Nodes(*cores), Registry()
        self.held: dict[str, float | None] = {}

    def arrive(self, name: str, weight: float = 1.0, fraction: float = 1.0, unit: int = 1) -> SharedCapacity:
        return SharedCapacity(
            self.nodes,
            self.registry,
            self.clock,
            weight=weight,
            fraction=fraction,
            unit=unit,
            application=name,
            hold=lambda cores: self.held.update({name: cores}),
        )


def told(source: SharedCapacity) -> tuple[float, int]:
    """Return the cores that a query may count on, and among how many queries."""
    capacity = source.capacity()
    queries = capacity.portion.queries if capacity.portion else 1
    return Share.of(capacity).total.cores, queries


def test_a_query_alone_has_everything_and_is_held_to_nothing() -> None:
    cluster = Cluster(1, 1, 1)
    alone = cluster.arrive("a").capacity()
    assert (alone.portion, cluster.held) == (None, {"a": None})
    assert Share.of(alone).total == Resources(3.0, 6.0)


def test_every_arrival_and_departure_is_a_change_of_capacity_with_a_revision_of_its_own() -> None:
    cluster = Cluster(2, 2, 2)
    a = cluster.arrive("a")
    first = a.capacity()
    b = cluster.arrive("b", weight=2.0)
    second = a.capacity()
    assert not second.same_nodes(first)
    assert second.revision == first.revision + 1
    assert str(CapacityDiff.between(first, second)) == "2 queries share the cluster: 6 -> 2 cores"
    assert told(b) == (4.0, 2)
    c = cluster.arrive("c", weight=3.0)
    assert [told(q) for q in (a, b, c)] == [(1.0, 3), (2.0, 3), (3.0, 3)]
    assert cluster.held == {"a": 1.0, "b": 2.0, "c": 3.0}
    assert a.capacity().revision == a.capacity().revision
    c.leave()
    assert [told(q) for q in (a, b)] == [(2.0, 2), (4.0, 2)]
    before = a.capacity()
    b.leave()
    after = a.capacity()
    assert str(CapacityDiff.between(before, after)) == "alone on the cluster: 2 -> 6 cores"
    assert (after.portion, cluster.held["a"]) == (None, None)


def test_a_share_follows_the_nodes() -> None:
    cluster = Cluster(1, 1, 1, 1)
    a, b = cluster.arrive("a"), cluster.arrive("b")
    assert [told(q) for q in (a, b)] == [(2.0, 2), (2.0, 2)]
    before = a.capacity()
    cluster.nodes.set(1, 1)
    after = a.capacity()
    assert [told(q) for q in (a, b)] == [(1.0, 2), (1.0, 2)]
    assert after.revision > before.revision
    assert str(CapacityDiff.between(before, after)) == (
        "left: n2, n3; 2 queries share the cluster: 2 -> 1 cores"
    )
    cluster.nodes.set()
    assert told(a) == (0.0, 2)


def test_a_share_counts_on_no_more_nodes_than_cores_and_on_the_memory_of_one_executor() -> None:
    cluster = Cluster(4, 4, 4)
    a = cluster.arrive("a")
    assert Share.of(a.capacity()).nodes == 3
    for i in range(5):
        cluster.arrive(str(i))
    share = Share.of(a.capacity())
    assert (share.total, share.nodes) == (Resources(2.0, 4.0), 2)
    assert share.largest == Resources(1.0, 2.0)


def test_cores_that_do_not_divide_go_round() -> None:
    cluster = Cluster(1, 1, 1)
    a, b = cluster.arrive("a"), cluster.arrive("b")
    seen = []
    for _ in range(4):
        seen.append((told(a)[0], told(b)[0]))
        cluster.clock.time += TURN
    assert sorted(seen) == [(1.0, 2.0), (1.0, 2.0), (2.0, 1.0), (2.0, 1.0)]
    portion = a.capacity().portion
    assert portion is not None
    assert portion.entitled == 1.5


def test_of_more_queries_than_cores_the_first_to_come_have_one_and_the_others_wait() -> None:
    cluster = Cluster(1, 1)
    a, b, c = (cluster.arrive(name, weight) for name, weight in (("a", 1.0), ("b", 1.0), ("c", 9.0)))
    for _ in range(3):
        assert [told(q)[0] for q in (a, b, c)] == [1.0, 1.0, 0.0]
        cluster.clock.time += TURN
    assert cluster.held == {"a": 1.0, "b": 1.0, "c": 0.0}
    a.leave()
    assert [told(q)[0] for q in (b, c)] == [1.0, 1.0]


def test_what_a_query_cannot_use_is_held_by_the_others_but_stays_its_own() -> None:
    cluster = Cluster(1, 1, 1, 1)
    a, b = cluster.arrive("a"), cluster.arrive("b")
    a.want(1.0)
    assert told(a) == (2.0, 2)
    assert told(b) == (3.0, 2)
    assert cluster.held == {"a": 1.0, "b": 3.0}
    a.want(50.0)
    assert [told(q) for q in (a, b)] == [(2.0, 2), (2.0, 2)]
    assert cluster.held == {"a": 2.0, "b": 2.0}


def test_a_pause_between_two_waves_of_tasks_gives_nothing_away() -> None:
    cluster = Cluster(1, 1, 1, 1)
    a, b = cluster.arrive("a"), cluster.arrive("b")
    a.want(8.0)
    assert told(b) == (2.0, 2)
    cluster.clock.time += 1
    a.want(1.0)
    cluster.clock.time += 6
    a.capacity()
    assert told(b) == (2.0, 2)
    a.want(8.0)
    cluster.clock.time += 6
    a.capacity()
    assert told(b) == (2.0, 2)
    a.want(1.0)
    cluster.clock.time += 11
    a.capacity()
    assert told(b) == (3.0, 2)


def test_a_fraction_is_the_most_that_a_query_takes() -> None:
    cluster = Cluster(1, 1, 1, 1)
    a = cluster.arrive("a", fraction=0.25)
    assert told(a) == (1.0, 1)
    b = cluster.arrive("b")
    a.capacity()
    assert [told(q) for q in (a, b)] == [(1.0, 2), (3.0, 2)]


def test_whole_executors_are_shared() -> None:
    cluster = Cluster(4, 4)
    a, b, c = (cluster.arrive(name, unit=2) for name in "abc")
    cores = [told(q)[0] for q in (a, b, c)]
    assert sorted(cores) == [2.0, 2.0, 4.0]


def test_a_registry_that_does_not_answer_leaves_the_queries_last_seen() -> None:
    cluster = Cluster(1, 1)
    a, _ = cluster.arrive("a"), cluster.arrive("b")
    before = a.capacity()
    cluster.registry.silent = True
    assert a.capacity() == before


def test_an_engine_that_stays_open_keeps_its_cores_only_if_nobody_else_is_there() -> None:
    cluster = Cluster(1, 1)
    a, b = cluster.arrive("a"), cluster.arrive("b")
    a.capacity(), b.capacity()
    a.leave()
    assert cluster.held["a"] == 0.0
    b.capacity()
    b.leave()
    assert cluster.held["b"] is None


_claims = st.lists(
    st.tuples(st.floats(0.1, 10), st.one_of(st.just(math.inf), st.floats(0, 20))), min_size=1, max_size=6
)


@given(_claims, st.integers(0, 24), st.integers(1, 3), st.booleans(), st.integers(0, 9))
def test_holders_who_agree_on_the_queries_never_hold_more_than_there_is_and_waste_nothing(
    given_claims: list[tuple[float, float]], units: int, unit: int, whole: bool, turn: int
) -> None:
    claims = [Claim(f"q{i}", weight, limit) for i, (weight, limit) in enumerate(given_claims)]
    cores = units * unit
    parts = [divide(claims, c, cores, unit=unit, whole=whole, turn=turn) for c in claims]
    held = sum(h for _, h in parts)
    usable = sum(math.ceil(c.limit / unit) * unit if c.limit < math.inf else math.inf for c in claims)
    assert held == pytest.approx(min(cores, usable))
    for portion, holding in parts:
        assert holding <= portion.cores + 1e-9
        assert portion.queries == len(claims)
        if whole:
            assert portion.cores % unit == 0
            assert abs(portion.cores - portion.entitled) < unit * max(len(claims), 1)


def test_an_arrival_is_published_within_a_second() -> None:
    cluster = Cluster(1, 1)
    a = cluster.arrive("a")
    published: list[tuple[float, str]] = []
    stop = threading.Event()

    class Ticking(Clock):
        def wait(self, event: threading.Event, timeout: float) -> bool:
            self.time += timeout
            if self.time >= arrived and len(cluster.registry.handles) == 1:
                cluster.arrive("b")
            return self.time > arrived + 5 or event.is_set()

    clock = Ticking()
    arrived = clock.time + 3
    feedback = Feedback(
        a, clock, lambda _, change: published.append((clock.now(), change)), FeedbackIntervals()
    )
    feedback.run(stop)
    ((at, change),) = published
    assert change == "2 queries share the cluster: 2 -> 1 cores"
    assert at - arrived <= 1.0


# --- real queries on DuckDB, in threads of this process ---------------------------------------------------

SQL = """
    SELECT a.l_shipmode AS mode, count(*) AS n FROM lineitem AS a JOIN lineitem AS b ON a.l_partkey = b.l_partkey
    WHERE concat(a.l_comment, b.l_comment) LIKE '%{}%e%r%' GROUP BY a.l_shipmode
"""


def _four_cores(request: QueryRequest) -> OpenedEngine:
    """Return DuckDB on what claims to be four cores, so that shares are the same on every machine."""
    from ebbflow.infra.query.duckdb import DuckDbEngine

    source = LocalCapacity(cores=4, memory=4.0)
    return OpenedEngine(DuckDbEngine.start(4, 4.0), source, cluster="four cores")


@dataclass
class Party:
    """Two queries; each one's stage waits until both are there and the engine has been held to its share."""

    folder: Path
    tables: str
    expected: dict[str, float]
    engines: dict[str, OpenedEngine] = field(default_factory=dict)
    reports: dict[str, QueryReport] = field(default_factory=dict)
    begun: dict[str, threading.Event] = field(default_factory=dict)
    here: set[str] = field(default_factory=set)
    met: threading.Event = field(default_factory=threading.Event)  # a plan that is switched to begins later

    def threads_of(self, name: str) -> int:
        connection = self.engines[name].engine._database().cursor()  # type: ignore[attr-defined]
        return int(connection.execute("SELECT current_setting('threads')").fetchone()[0])

    def run(self, name: str, weight: float) -> None:
        request = QueryRequest(
            SQL.format(name),
            tables=self.tables,
            engine="duckdb",
            store=str(self.folder / "store"),
            weight=weight,
            materialize="none",
            verify=True,
        )
        self.reports[name] = execute(request, _Held(self, name), opened=self.engines[name]).report


class _Held(PlainOrchestrator):
    def __init__(self, party: Party, name: str) -> None:
        super().__init__()
        self.party = party
        self.name = name

    def submit(self, stage: Stage, work: Callable[[], StageOutcome]) -> None:
        party = self.party

        def later() -> StageOutcome:
            party.begun[self.name].set()
            clock, end = SystemClock(), SystemClock().now() + 120
            while not party.met.is_set() and party.threads_of(self.name) != party.expected[self.name]:
                assert clock.now() < end, f"{self.name} was never held to its share"
                clock.sleep(0.02)
            party.here.add(self.name)
            if len(party.here) == 2:
                party.met.set()
            assert party.met.wait(150)
            return work()

        super().submit(stage, later)


def test_queries_on_one_machine_have_the_threads_of_their_shares(tpch: str, tmp_path: Path) -> None:
    party = Party(tmp_path, tpch, {"a": 3.0, "b": 1.0})
    threads = []
    for name, weight in (("a", 3.0), ("b", 1.0)):
        source = LocalCapacity(cores=4, memory=4.0)  # whatever this machine has
        party.engines[name] = OpenedEngine(DuckDbEngine.start(4, 4.0), source, cluster="four cores")
        party.begun[name] = threading.Event()
        thread = threading.Thread(target=party.run, args=(name, weight))
        thread.start()
        threads.append(thread)
        assert party.begun[name].wait(150)
    for thread in threads:
        thread.join(250)
    for opened in party.engines.values():
        opened.engine.close()
    a, b = party.reports["a"], party.reports["b"]
    assert (a.verified, b.verified) == (True, True)
    assert [(c.cores, c.change) for c in a.capacity[:2]] == [
        (4.0, "at start"),
        (3.0, "2 queries share the cluster: 4 -> 3 cores"),
    ]
    assert any(d.trigger == "2 queries share the cluster: 4 -> 3 cores" for d in a.decisions)
    assert b.capacity[0].change == "at start, 2 queries share the cluster"
    assert b.capacity[0].cores == 1.0


def test_a_query_alone_has_all_threads(tpch: str, tmp_path: Path) -> None:
    request = QueryRequest(
        "SELECT count(*) AS n FROM orders", tables=tpch, engine="duckdb", store=str(tmp_path / "store")
    )
    with opened_engine(request) as opened:
        report = execute(request, PlainOrchestrator(), opened=opened).report
    assert [c.change for c in report.capacity] == ["at start"]
    assert report.capacity[0].cores == LocalCapacity().capacity().cores
    claims = FileShareRegistry(
        StorageLocation(f"file://{tmp_path}/store/cache/shares"), opened.cluster
    ).claims()
    assert list(claims) == []
