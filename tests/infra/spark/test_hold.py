"""How an application is held to its part of a cluster; no Spark."""

import threading
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ebbflow.infra.errors import StageCancelledError
from ebbflow.infra.spark import masters
from ebbflow.infra.spark.master_api import Executor, parse_master
from ebbflow.infra.spark.masters import Master, executors_for, find_master
from ebbflow.infra.spark.scheduler.hold import ExecutorHold, executors, surplus
from ebbflow.infra.spark.settings import ExecutorShape, executor_memory, executor_shape, mebibytes, settings
from ebbflow.planners.errors import OptionError
from tests.infra.conftest import ManualClock
from tests.infra.spark_payloads import driver, executor, master, worker


class World:
    """An application's scheduler and status API: executors, their tasks, and the limit at the master."""

    def __init__(self, **tasks: int) -> None:
        self.tasks = {name.removeprefix("e"): n for name, n in tasks.items()}
        self.leaving: list[str] = []
        self.limits: list[int] = []
        self.asked = 0

    def limit(self, executors: int) -> None:
        self.limits.append(executors)

    def active(self, name: str) -> bool:
        return name not in self.leaving

    def decommission(self, executors: list[str]) -> None:
        self.leaving += executors

    def get(self, paths: list[str]) -> list[Any]:
        assert paths == ["executors"]
        self.asked += 1
        return [[driver(), *(executor(n, "10.0.0.1", activeTasks=t) for n, t in self.tasks.items())]]


def hold_on(world: World, unit: int = 1) -> ExecutorHold:
    return ExecutorHold(world, world, unit)  # type: ignore[arg-type]


def test_a_query_alone_is_never_limited_and_nobody_is_asked() -> None:
    world = World(e0=1, e1=1)
    hold_on(world).hold("q", None)
    assert (world.limits, world.leaving, world.asked) == ([], [], 0)


def test_the_limit_comes_before_the_idle_executors_are_asked_to_leave() -> None:
    world = World(e0=1, e1=0, e2=1)
    order: list[str] = []
    world.limit = lambda n: order.append(f"limit {n}")  # type: ignore[method-assign]
    world.decommission = lambda names: order.append(f"leave {names}")  # type: ignore[method-assign]
    hold_on(world).hold("q", 2.0)
    assert order == ["limit 2", "leave ['1']"]


def test_holding_again_asks_only_those_that_came_since() -> None:
    world = World(e0=1, e1=1)
    hold = hold_on(world)
    hold.hold("q", 1.0)
    hold.hold("q", 1.0)
    assert (world.limits, len(world.leaving)) == ([1], 1)
    world.tasks["7"] = 0  # the master had started it before it heard of the limit
    hold.hold("q", 1.0)
    assert world.leaving[1:] == ["7"]


def test_growth_is_a_higher_limit_and_being_alone_none() -> None:
    world = World(e0=1)
    hold = hold_on(world, unit=2)
    for cores in (2.0, 6.0, None):
        hold.hold("q", cores)
    assert world.limits[:2] == [1, 3]
    assert world.limits[2] > 1000
    assert world.leaving == []


def test_queries_of_one_application_have_the_sum_of_their_shares() -> None:
    world = World(e0=1, e1=1, e2=1, e3=1)
    hold = hold_on(world)
    hold.hold("a", 1.0)
    hold.hold("b", 2.0)
    assert world.limits == [1, 3]
    assert not hold.forget("a")
    assert world.limits[-1] == 2
    assert hold.forget("b")


def test_a_driver_that_is_gone_is_no_error() -> None:
    world = World(e0=1)

    def broken(n: int) -> None:
        raise RuntimeError("the JVM has ended")

    world.limit = broken  # type: ignore[method-assign]
    hold_on(world).hold("q", 1.0)


@pytest.mark.parametrize(
    ("wanted", "unit", "expected"), [([3.0], 1, 3), ([3.0], 2, 1), ([1.0, 1.0], 2, 1), ([0.0], 1, 0)]
)
def test_a_share_is_rounded_down_to_whole_executors(wanted: list[float], unit: int, expected: int) -> None:
    assert executors(list(wanted), unit) == expected


_there = st.lists(
    st.builds(Executor, st.integers(0, 99).map(str), st.just("h"), st.just(True), st.just(1), st.just(1),
              st.integers(0, 3), st.integers(0, 9)),
    unique_by=lambda e: e.id, max_size=8,
)  # fmt: skip


@given(_there, st.integers(0, 8))
def test_those_that_leave_are_never_busier_than_those_that_stay(there: list[Executor], limit: int) -> None:
    leaving = set(surplus(there, limit))
    assert len(leaving) == max(0, len(there) - limit)
    stay = [(e.tasks, e.shuffled) for e in there if e.id not in leaving]
    assert all((e.tasks, e.shuffled) <= kept for e in there if e.id in leaving for kept in stay)


# --- the size of executors ----------------------------------------------------------------------------------


@given(st.integers(1, 64), st.floats(1, 512))
def test_executors_use_all_cores_of_a_worker_and_fit_its_memory(cores: int, memory: float) -> None:
    shape = executor_shape(cores, memory)
    count = shape.fit(cores, int(memory * 1024))
    assert count >= 1
    assert count * shape.cores == cores
    assert count <= max(8, 1)
    assert count == 1 or count * 2.0 <= memory
    assert 0 < shape.usable_memory * 1024 < mebibytes(shape.heap)


def test_a_worker_of_one_core_has_one_executor_with_the_heap_that_it_had() -> None:
    assert executor_shape(1, 2.0) == ExecutorShape(1, executor_memory(2.0))


@pytest.mark.parametrize(("text", "mib"), [("1400m", 1400), ("2g", 2048), ("1G", 1024), ("900", 900)])
def test_sizes_are_read_as_spark_reads_them(text: str, mib: int) -> None:
    assert mebibytes(text) == mib


def test_a_size_of_another_kind_is_refused() -> None:
    with pytest.raises(OptionError, match=r"1400m or 2g; got '1\.5 apples'"):
        mebibytes("1.5 apples")


def test_the_size_reaches_sparks_settings_and_conf_wins() -> None:
    url = "spark://127.0.0.1:7077"
    chosen = settings(url, app_name="a", memory="600m", cores=2)
    assert (chosen["spark.executor.cores"], chosen["spark.executor.memory"]) == ("2", "600m")
    assert "spark.executor.cores" not in settings(url, app_name="a")
    assert (
        settings(url, app_name="a", cores=2, conf={"spark.executor.cores": "1"})["spark.executor.cores"]
        == "1"
    )


# --- the master behind a URL --------------------------------------------------------------------------------


def test_what_the_user_says_of_executors_wins() -> None:
    four = Master("spark://m:7077", "http://m:8080", 4, 8.0)
    assert executors_for(None) is None
    assert executors_for(four) == executor_shape(4, 8.0)
    assert executors_for(four, heap="900m") == ExecutorShape(1, "900m")
    assert executors_for(four, {"spark.executor.cores": "2"}) == ExecutorShape(2, executor_memory(4.0))
    with pytest.raises(OptionError, match=r"spark\.executor\.cores must be a whole number >= 1; got 'many'"):
        executors_for(four, {"spark.executor.cores": "many"})


def test_a_master_is_believed_only_if_it_names_the_url(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def answer(client: object, ui: str) -> object:
        asked.append(ui)
        return parse_master(master(worker("h", cores=4, memory=8192), worker("i", cores=2, memory=4096)))

    monkeypatch.setattr(masters, "find_cluster", lambda url: None)
    monkeypatch.setattr(masters, "get_master", answer)
    found = find_master("spark://127.0.0.1:23660", {"spark.master.ui.port": "9090"})
    assert found == Master("spark://127.0.0.1:23660", "http://127.0.0.1:9090", 2, 4.0)
    assert find_master("spark://127.0.0.1:1") is None
    assert asked == ["http://127.0.0.1:9090", "http://127.0.0.1:8080"]
    assert find_master("local[2]") is None
    assert find_master("k8s://https://h:443") is None


def set_event() -> threading.Event:
    event = threading.Event()
    event.set()
    return event


def test_a_master_without_workers_gets_time_for_the_first(
    monkeypatch: pytest.MonkeyPatch, clock: ManualClock
) -> None:
    began = clock.now()

    def answer(client: object, ui: str) -> object:
        return parse_master(master(*([worker("h", cores=4)] if clock.now() - began > 30 else [])))

    monkeypatch.setattr(masters, "find_cluster", lambda url: None)
    monkeypatch.setattr(masters, "get_master", answer)
    said: list[str] = []
    assert find_master("spark://127.0.0.1:23660", wait=20.0, clock=clock, note=said.append) is None
    assert said == [
        "waiting for the first worker of spark://127.0.0.1:23660, at most 20 s",
        "spark://127.0.0.1:23660 has had no worker for 20 s; continuing with Spark's default executors",
    ]
    with pytest.raises(StageCancelledError, match="stopped on request"):
        find_master("spark://127.0.0.1:23660", wait=20.0, stop=set_event())
    found = find_master("spark://127.0.0.1:23660", wait=60.0, clock=clock)
    assert found is not None
    assert found.cores == 4
    assert 30 < clock.now() - began < 40
