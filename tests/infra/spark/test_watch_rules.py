"""What the executor watch makes of recorded answers; no Spark."""

import threading
from dataclasses import replace
from typing import Any

import httpx
import pytest

from ebbflow.infra.errors import EngineLostError, EngineUnavailableError
from ebbflow.infra.spark import watch as watch_module
from ebbflow.infra.spark.cluster.state import ClusterState, NodeRecord
from ebbflow.infra.spark.master_api import parse_executors, parse_workers, states_by_host
from ebbflow.infra.spark.settings import ExecutorShape
from ebbflow.infra.spark.watch import ExecutorWatch
from ebbflow.planners.model import Resources, Share
from ebbflow.planners.model.capacity import WARM
from tests.infra.spark_payloads import driver, executor, master, worker

MASTER = "spark://127.0.0.1:23660"
ONE, TWO = "127.0.0.2", "127.0.0.3"


class FakeClock:
    def __init__(self) -> None:
        self.time = 1000.0

    def now(self) -> float:
        return self.time

    def sleep(self, seconds: float) -> None:
        self.time += seconds

    def wait(self, event: threading.Event, timeout: float) -> bool:
        self.time += timeout
        return event.is_set()


class World:
    """A driver, a master and a state file that answer what a test sets; ``None`` means no answer."""

    def __init__(self) -> None:
        self.executors: list[dict[str, Any]] | None = [driver()]
        self.master: dict[str, Any] | None = None
        self.state: ClusterState | None = None
        self.clock = FakeClock()
        self.asked: list[str] = []
        self.starting = 0  # answers that are a page saying so

    def answer(self, request: httpx.Request) -> httpx.Response:
        self.asked.append(str(request.url))
        if self.starting:
            self.starting -= 1
            return httpx.Response(200, text="Spark is starting up.")
        content = self.master if request.url.path == "/json/" else self.executors
        if content is None:
            raise httpx.ReadTimeout("timed out", request=request)
        return httpx.Response(200, json=content)

    def watch(self, **options: Any) -> ExecutorWatch:
        options = {"master_url": MASTER, "hazard": lambda losses, seconds: losses + seconds / 1e6} | options
        return ExecutorWatch(
            "http://driver:4040/",
            "app-1",
            clock=self.clock,
            client=httpx.Client(transport=httpx.MockTransport(self.answer)),
            **options,
        )

    def cluster(self, *nodes: NodeRecord) -> None:
        self.state = ClusterState(
            name="a", uid="u", directory="/d", host="127.0.0.1", port=23660, ui_port=29918, cores=1,
            memory=2048, owner=0, nodes=nodes, secret="s",
        )  # fmt: skip


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    world = World()
    monkeypatch.setattr(watch_module, "find_cluster", lambda url: world.state if url == MASTER else None)
    return world


def ids(capacity: Any) -> list[str]:
    return [node.id for node in capacity.nodes]


def test_executors_are_read_with_host_cores_and_memory() -> None:
    (one, boss) = parse_executors([executor("1", ONE, totalCores=4), driver()])
    assert (one.host, one.cores, one.max_memory, one.driver) == (ONE, 4, 434031820, False)
    assert boss.driver


@pytest.mark.parametrize("wrong", [{}, [{"id": "1"}], ["1"], None])
def test_answers_of_something_else_are_refused(wrong: Any) -> None:
    with pytest.raises(ValueError, match=r"executor"):
        parse_executors(wrong)
    with pytest.raises(ValueError, match=r"worker"):
        parse_workers(wrong if not isinstance(wrong, list) else {"workers": [{}]})


def test_a_dead_worker_does_not_hide_its_successor_on_the_same_host() -> None:
    workers = parse_workers(master(worker(ONE), worker(ONE, "DEAD"), worker(TWO, "DECOMMISSIONED")))
    assert states_by_host(workers) == {ONE: "ALIVE", TWO: "DECOMMISSIONED"}


def test_whoever_wants_to_know_hears_of_all_executors_at_each_look(world: World) -> None:
    world.executors, heard = [driver(), executor("1", ONE)], list[list[str]]()
    watch = world.watch(present=lambda found: heard.append([one.id for one in found]))
    watch.capacity()
    world.executors.append(executor("2", TWO))
    watch.capacity()
    assert heard == [["driver", "1"], ["driver", "1", "2"]]


def test_cores_are_cold_until_their_executors_have_run_tasks_for_a_while(world: World) -> None:
    world.cluster(NodeRecord("worker-1", ONE), NodeRecord("worker-2", TWO))
    world.master = master(worker(ONE), worker(TWO))
    half = 1000 * WARM / 2
    world.executors = [driver(), executor("0", ONE, totalDuration=0), executor("1", TWO, totalDuration=half)]
    watch = world.watch()
    first = watch.capacity()
    assert (first.cores, first.cold) == (2, 1.5)
    world.executors = [driver(), executor("0", ONE, totalDuration=9e4), executor("1", TWO, totalDuration=9e4)]
    later = watch.capacity()
    assert later.cold == 0.0
    assert later.revision == first.revision  # no change of capacity
    shaped = world.watch(shape=ExecutorShape(1, "1400m"))
    world.master |= {"activeapps": []}
    world.executors = [driver(), executor("0", ONE, totalDuration=9e4)]
    counted = shaped.capacity()
    assert (counted.cold, counted.held) == (1.0, 1.0)  # a worker has no executor of ours
    assert (Share.of(counted).absent, Share.of(counted, 0.5).absent, Share.of(later).absent) == (
        1.0,
        0.0,
        0.0,
    )


def test_only_executors_count_not_the_driver_nor_workers_without_one(world: World) -> None:
    world.cluster(NodeRecord("worker-1", ONE), NodeRecord("worker-2", TWO))
    world.master = master(worker(ONE), worker(TWO))
    world.executors = [driver(), executor("0", ONE)]
    capacity = world.watch().capacity()
    assert ids(capacity) == ["worker-1"]
    assert (capacity.revision, capacity.cores) == (1, 1)
    assert capacity.memory == pytest.approx(434031820 / 2**30, abs=1e-6)


@pytest.mark.parametrize("change", [{"isActive": False}, {"isExcluded": True}, {"maxMemory": 0}])
def test_executors_that_cannot_take_tasks_do_not_count(world: World, change: dict[str, Any]) -> None:
    world.executors = [driver(), executor("0", ONE), executor("1", TWO, **change)]
    assert ids(world.watch().capacity()) == [ONE]


def test_executors_of_one_host_are_one_node(world: World) -> None:
    world.executors = [executor("0", ONE, totalCores=2), executor("1", ONE), executor("2", TWO)]
    capacity = world.watch(memory=1.5).capacity()
    assert [(n.id, n.cores, n.memory) for n in capacity.nodes] == [(ONE, 3, 3.0), (TWO, 1, 1.5)]


def test_the_revision_grows_at_changes_only(world: World) -> None:
    watch = world.watch()
    revisions = []
    for present in ([], [], ["0"], ["0"], ["0", "1"], ["1"], ["1"]):
        world.executors = [driver(), *(executor(i, (ONE, TWO)[int(i)]) for i in present)]
        world.clock.sleep(1)
        revisions.append(watch.capacity().revision)
    assert revisions == [1, 1, 2, 2, 3, 4, 4]


def test_a_death_that_only_the_master_knows_of_is_believed(world: World) -> None:
    world.cluster()
    world.executors = [driver(), executor("0", ONE), executor("1", TWO)]
    world.master = master(worker(ONE), worker(TWO, "DEAD"))
    assert ids(world.watch().capacity()) == [ONE]


def test_a_killed_node_is_gone_before_master_and_driver_notice(world: World) -> None:
    world.cluster(NodeRecord("worker-1", ONE, phase="killed"), NodeRecord("worker-2", TWO, phase="up"))
    world.executors = [driver(), executor("0", ONE), executor("1", TWO)]
    world.master = master(worker(ONE), worker(TWO))
    assert ids(world.watch().capacity()) == ["worker-2"]


def test_a_notice_of_the_state_file_brings_its_deadline(world: World) -> None:
    world.cluster(NodeRecord("worker-1", ONE, phase="up", deadline=1100.0))
    world.executors = [executor("0", ONE)]
    capacity = world.watch().capacity()
    assert [(n.node_id, n.deadline, n.kind) for n in capacity.notices] == [
        ("worker-1", 1100.0, "interruption")
    ]
    assert capacity.usable == ()


def test_a_decommissioned_worker_is_noticed_with_a_deadline_that_stays(world: World) -> None:
    world.executors = [executor("0", ONE)]
    world.master = master(worker(ONE, "DECOMMISSIONED"))
    watch = world.watch(master_ui="http://127.0.0.1:8080")
    first = watch.capacity()
    world.clock.sleep(10)
    second = watch.capacity()
    assert first.notices == second.notices
    assert [(n.node_id, n.deadline) for n in first.notices] == [(ONE, 1120.0)]
    assert second.revision == 1


def test_a_host_that_comes_back_is_noticed_with_a_deadline_of_its_own(world: World) -> None:
    world.executors = [executor("0", ONE)]
    watch = world.watch(master_ui="http://127.0.0.1:8080")
    deadlines = []
    for state in ("DECOMMISSIONED", "ALIVE", "DECOMMISSIONED"):
        world.master = master(worker(ONE, state))
        deadlines.append([n.deadline for n in watch.capacity().notices])
        world.clock.sleep(600)
    assert deadlines == [[1120.0], [], [2320.0]]


def test_a_silent_driver_leaves_the_last_known_capacity(world: World) -> None:
    world.executors = [executor("0", ONE)]
    watch = world.watch()
    before = watch.capacity()
    world.executors = None
    assert watch.capacity() is before


def test_a_silent_master_leaves_its_last_word(world: World) -> None:
    world.cluster()
    world.executors = [executor("0", ONE), executor("1", TWO)]
    world.master = master(worker(ONE), worker(TWO, "DEAD"))
    watch = world.watch()
    before = watch.capacity()
    world.master = None
    assert watch.capacity().same_nodes(before)


def test_an_application_that_the_master_has_dropped_is_an_error_once_its_executors_are_gone(
    world: World,
) -> None:
    world.cluster()
    world.executors = [driver(), executor("0", ONE)]
    ours = {"id": "app-1", "name": "ebbflow", "cores": 1, "duration": 1_000}
    world.master = master(worker(ONE)) | {"activeapps": []}
    watch = world.watch()
    watch.capacity()  # it is about to register
    world.executors = [driver()]
    world.clock.sleep(60.0)
    watch.capacity()
    world.master = master(worker(ONE)) | {"activeapps": [ours]}
    watch.capacity()
    world.master = master(worker(ONE)) | {"activeapps": []}
    world.executors = [driver(), executor("0", ONE)]
    watch.capacity()
    world.clock.sleep(60.0)
    watch.capacity()  # a master that was started again does not know it; its executors work all the same
    world.executors = [driver()]
    watch.capacity()
    world.clock.sleep(5.0)
    watch.capacity()
    world.clock.sleep(6.0)
    with pytest.raises(EngineLostError, match=r"dropped the application app-1.*finished stages are kept"):
        watch.capacity()


def test_a_driver_that_never_answered_is_an_error_that_says_where(world: World) -> None:
    world.executors = None
    with pytest.raises(EngineUnavailableError, match="app-1 does not answer at http://driver:4040/"):
        world.watch().capacity()


def test_a_driver_whose_rest_service_is_not_up_yet_is_asked_again(world: World) -> None:
    world.starting = 3
    began = world.clock.now()
    assert ids(world.watch(master_url="local[2]").capacity()) == ["local"]
    assert len(world.asked) == 4
    assert world.clock.now() - began < 5
    world.starting = 10**6
    with pytest.raises(EngineUnavailableError, match="no JSON, but 'Spark is starting up"):
        world.watch().capacity()
    assert 55 < world.clock.now() - began < 70


@pytest.mark.parametrize("master_url", ["local[2]", "local", "local[*]"])
def test_in_local_mode_the_driver_is_the_node(world: World, master_url: str) -> None:
    world.executors = [driver(cores=2)]
    capacity = world.watch(master_url=master_url).capacity()
    assert [(n.id, n.cores, n.market) for n in capacity.nodes] == [("local", 2, "on-demand")]
    assert all("/json/" not in url for url in world.asked)


def test_losses_and_node_seconds_feed_the_hazard(world: World) -> None:
    world.cluster(NodeRecord("worker-1", ONE, phase="up"), NodeRecord("worker-2", TWO, phase="up"))
    world.executors = [executor("0", ONE), executor("1", TWO)]
    world.master = master(worker(ONE), worker(TWO))
    watch = world.watch(hazard=lambda losses, seconds: 3600 * losses / max(seconds, 1))
    assert watch.capacity().hazard == 0
    world.clock.sleep(10)
    assert world.state is not None
    world.state = world.state.with_node("worker-1", deadline=1130.0)
    noticed = watch.capacity()
    assert (watch.losses, watch.node_seconds) == (1, 20.0)
    assert noticed.hazard == pytest.approx(180)
    world.clock.sleep(10)
    world.executors = [executor("1", TWO)]
    watch.capacity()
    assert (watch.losses, watch.node_seconds) == (1, 30.0)  # a noticed node is lost once, and not usable


def test_an_executor_that_ends_on_a_living_worker_is_no_lost_node(world: World) -> None:
    world.cluster()
    world.executors = [executor("0", ONE), executor("1", TWO)]
    world.master = master(worker(ONE), worker(TWO))
    watch = world.watch()
    watch.capacity()
    world.executors = [executor("0", ONE)]
    assert (watch.capacity().revision, watch.losses) == (2, 0)
    world.master = master(worker(ONE, "DEAD"), worker(TWO))
    assert (ids(watch.capacity()), watch.losses) == ([], 1)


def test_records_follow_the_state_file(world: World) -> None:
    world.cluster(NodeRecord("worker-1", ONE, phase="up"))
    world.executors = [executor("0", ONE)]
    watch = world.watch()
    watch.capacity()
    assert world.state is not None
    world.state = replace(world.state, nodes=(NodeRecord("worker-1", ONE, phase="killed"),))
    assert ids(watch.capacity()) == []


# --- the whole cluster, for queries that share it -----------------------------------------------------------

SHAPE = ExecutorShape(1, "600m")


def app(name: str = "somebody", cores: int = 1, **changes: Any) -> dict[str, Any]:
    return {"id": "app-9", "name": name, "cores": cores, "duration": 60_000} | changes


def test_capacity_is_the_clusters_and_not_what_the_application_happens_to_hold(world: World) -> None:
    world.cluster(NodeRecord("worker-1", ONE, phase="up"), NodeRecord("worker-2", TWO, phase="up"))
    world.master = master(worker(ONE), worker(TWO)) | {"activeapps": []}
    world.executors = [driver(), executor("0", ONE)]
    watch = world.watch(shape=SHAPE)
    both = watch.capacity()
    assert (ids(both), both.cores, watch.held) == (["worker-1", "worker-2"], 2, 1)
    assert both.slot == Resources(1.0, SHAPE.usable_memory)
    world.executors = [driver()]
    assert watch.capacity().same_nodes(both)
    assert (watch.held, watch.losses) == (0, 0)


def test_a_worker_counts_with_the_executors_that_fit_it(world: World) -> None:
    world.cluster()
    big = {"cores": 4, "coresused": 0, "memory": 2048}
    world.master = master(worker(ONE, **big), worker(TWO, memory=512)) | {"activeapps": []}
    capacity = world.watch(shape=SHAPE).capacity()
    assert [(n.host, n.cores) for n in capacity.nodes] == [(ONE, 3)]
    assert capacity.memory == pytest.approx(3 * SHAPE.usable_memory, abs=1e-5)


def test_dead_and_killed_workers_are_gone_and_warned_ones_noticed(world: World) -> None:
    three = "127.0.0.4"
    world.cluster(NodeRecord("worker-1", ONE, phase="killed"))
    workers = worker(ONE), worker(TWO, "DEAD"), worker(three, "DECOMMISSIONED")
    world.master = master(*workers) | {"activeapps": []}
    capacity = world.watch(shape=SHAPE).capacity()
    assert (ids(capacity), [n.node_id for n in capacity.notices]) == ([three], [three])
    assert capacity.usable == ()


@pytest.mark.parametrize(
    ("application", "cores"),
    [
        (app(), 1),
        (app("ebbflow"), 1),  # ours, but without a claim on this cluster's shares
        (app("ebbflow", duration=2_000), 2),  # about to make its claim
        (app(id="app-1"), 2),  # this one
        (app(id="app-2"), 2),  # shares by agreement
        (app(cores=5), 0),
    ],
)
def test_what_strangers_hold_is_not_there_to_be_shared(
    world: World, application: dict[str, Any], cores: int
) -> None:
    world.cluster()
    world.master = master(worker(ONE), worker(TWO)) | {"activeapps": [application]}
    watch = world.watch(shape=SHAPE)
    watch.ally(frozenset({"app-2"}))
    assert (watch.capacity().cores, watch.losses) == (cores, 0)


def test_without_a_master_that_answers_the_own_executors_count(world: World) -> None:
    world.executors = [driver(), executor("0", ONE)]
    assert ids(world.watch(shape=SHAPE).capacity()) == [ONE]
