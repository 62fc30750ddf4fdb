"""Workers on leases that come and go, without a process: what an app makes of those that have not joined."""

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from ebbflow.infra.elastic.apps import arrays
from ebbflow.infra.elastic.apps.kmeans import KMeans
from ebbflow.infra.elastic.wire.heartbeats import LivenessTracker
from ebbflow.infra.errors import ElasticError, MicroTaskError
from ebbflow.infra.storage.places import StorageLocation
from ebbflow.planners.errors import OptionError
from ebbflow.tasks.elastic.app import _App
from ebbflow.tasks.elastic.data import check_data, stored_input
from ebbflow.tasks.elastic.leased import LeasedWorkers, PoolRecord
from ebbflow.tasks.elastic.request import ElasticRequest
from ebbflow.tasks.pipeline.carry import Carrier
from ebbflow.tasks.training.leased.nodes import NodeBackoff
from tests.tasks.apps.lease_cases import Hands, book_of, lease

ADDRESS = "s3://bucket/run/input.npz"


class NoNodes:
    """A pool that starts nothing, and where nothing ends by itself."""

    host, uid = "127.0.0.1", "pool"

    def start(self, *_: object) -> None: ...
    def end(self, name: str) -> None: ...
    def close(self) -> None: ...

    def lost(self, name: str) -> str:
        return ""

    def quiet(self, name: str) -> bool:
        return True

    def log(self, name: str) -> str:
        return f"{name} said so"


def test_a_worker_that_only_starts_leaves_nobody_stranded(tmp_path: Path) -> None:
    book, clock = book_of(lease(1, "a"), lease(2, "b"))
    agent: Any = SimpleNamespace(
        lease_table=book,
        left=book.leave,
        is_pool_reported=lambda uid: True,
        poke=lambda: None,
        spec=SimpleNamespace(id="app"),
    )
    enforcer: Any = SimpleNamespace(watch=lambda pool: None)
    pool: Any = NoNodes
    record = PoolRecord(str(tmp_path))
    workers = LeasedWorkers(agent, enforcer, pool, "m:C", 4, record, NodeBackoff(book, clock), clock)

    def changes(*members: str) -> tuple[int, tuple[str, ...]]:
        clock.time += 1.0
        return workers.changes(members, 1)

    try:
        assert changes() == (2, ())
        workers.start("n1")
        workers.start("n2")
        book.learn([lease(2, "b")], 1e9)
        assert changes("n1", "n2") == (0, ("n1",))
        assert not workers.stranded
        workers.liveness.expect("n2")
        book.learn([lease(3, "c")], 1e9)
        assert changes("n1", "n2") == (1, ("n1",))
        assert workers.stranded  # n2 has to leave, and nobody else has joined
        workers.start("n3")
        workers.liveness.expect("n3")
        assert changes("n2", "n3") == (0, ("n2",))
        assert not workers.stranded
        workers._workers["n1"].launch.result(150)  # type: ignore[union-attr]
        workers.end("n1")
        assert workers.log("n1") == "a said so"
    finally:
        workers.transport.close()
        workers.close()


def test_a_worker_whose_process_is_silent_has_ended_long_before_it_is_late(tmp_path: Path) -> None:
    book, clock = book_of(*(lease(n, node, until=1e9) for n, node in enumerate("abcd", 1)))

    class Nodes(NoNodes):
        def start(self, name: str, slots: int, entry: Any, admit: Callable[[str], None]) -> None:
            if name != "d":  # Systems Manager does not know that one yet
                admit(f"key of {name}")

    agent: Any = SimpleNamespace(
        lease_table=book,
        left=book.leave,
        is_pool_reported=lambda uid: True,
        poke=lambda: None,
        spec=SimpleNamespace(id="app"),
    )
    enforcer: Any = SimpleNamespace(watch=lambda pool: None)
    pool: Any = Nodes
    avoided = NodeBackoff(book, clock)
    workers = LeasedWorkers(agent, enforcer, pool, "m:C", 4, PoolRecord(str(tmp_path)), avoided, clock)
    names = ("n1", "n2", "n3", "n4")

    def pass_time(seconds: float) -> list[str]:
        for _ in range(int(seconds)):
            clock.time += 1.0
            workers.liveness.record("n3")
        return [workers.ended(name) for name in names]

    try:
        workers.changes((), 1)
        for name in names:
            workers.start(name)
        for name in names:
            workers._workers[name].launch.result(150)  # type: ignore[union-attr]
        workers.liveness.record("n2")
        assert pass_time(29) == ["", "", "", ""]
        found = pass_time(2)
        assert "missed heartbeats for 30 s" in found[1]
        assert [found[0], *found[2:]] == ["", "", ""]
        assert pass_time(98) == [found[0], found[1], "", ""]
        found = pass_time(2)
        assert "no heartbeat within 130 s of its start" in found[0]
        assert found[2:] == ["", ""], "one beats, and the other was not started yet"
        assert {one.node for one in avoided.without(book.allowed())} == {"b", "c", "d"}, (
            "a is left alone for a while"
        )
    finally:
        workers.transport.close()
        workers.close()


def test_only_workers_that_have_joined_count_as_work() -> None:
    clock, said = Hands(), list[tuple[str, str]]()
    tracker = LivenessTracker(clock)
    app: Any = _App.__new__(_App)
    app._clock, app._spent, app._looked = clock, 0.0, clock.now()
    app._request = SimpleNamespace(job=ElasticRequest("kmeans", iterations=10))
    app._agent = SimpleNamespace(
        moved=lambda phase, reason: said.append((phase, reason)), update_metrics=lambda **_: None
    )
    job, workers = SimpleNamespace(driver=None), SimpleNamespace(present=2, liveness=tracker)
    clock.time += 600.0
    app._look(job, workers)
    assert app._spent == 0
    tracker.expect("n1")
    clock.time += 10.0
    app._look(job, workers)
    assert app._spent == 10
    assert said == [("waiting", "waits for its workers to start"), ("running", "on 1 worker")]


def test_an_error_of_the_job_costs_an_attempt_and_one_of_the_application_the_step() -> None:
    nothing: Any = SimpleNamespace(id="one", app="one.groups", step=SimpleNamespace(kind="elastic"))
    carrier: Any = Carrier(nothing, nothing, nothing, Hands())

    def raises(error: Exception) -> Callable[[Any], Any]:
        def carry(_: Any) -> Any:
            raise error

        return carry

    carrier._elastic = raises(ElasticError("the input could not be read"))
    assert carrier(nothing).state == "lost"
    carrier._elastic = raises(MicroTaskError("division by zero"))
    with pytest.raises(MicroTaskError):
        carrier(nothing)


@pytest.fixture
def stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """Have reads of object storage answered from a list: bytes, or an error; ends with how often it was asked."""
    answers: list[Any] = []

    def read(place: StorageLocation, name: str) -> bytes:
        found = answers.pop(0)
        if isinstance(found, Exception):
            raise found
        return bytes(found)

    monkeypatch.setattr(StorageLocation, "read", read)
    monkeypatch.setattr(arrays, "_AGAIN", 0.0)
    arrays.forget()
    yield answers
    arrays.forget()


def packed(folder: Path) -> bytes:
    x = np.arange(24.0).reshape(12, 2)
    np.savez(folder / "x.npz", x=x, start=x[:3])
    return (folder / "x.npz").read_bytes()


def test_all_executors_of_a_process_share_one_reading_that_is_tried_again(
    stored: list[Any], tmp_path: Path
) -> None:
    stored += [OSError("503 Slow Down"), OSError("timed out"), packed(tmp_path)]
    app = KMeans(ADDRESS, 3, executors=4)
    assert len(app.parameters()) == 3
    rows = []
    for index in range(4):
        executor = app.executor(index)
        executor.load_input()
        rows.append(len(executor.input_state()))
    assert rows == [3, 3, 3, 3]
    arrays.forget()
    stored += [FileNotFoundError(ADDRESS)]
    with pytest.raises(FileNotFoundError):
        app.parameters()
    stored += [OSError("503 Slow Down")] * 4
    with pytest.raises(OSError, match="503"):
        app.parameters()
    assert stored == []


def test_a_file_that_is_cut_short_is_named(stored: list[Any], tmp_path: Path) -> None:
    stored.append(packed(tmp_path)[:-200])
    with pytest.raises(OptionError, match=f"{ADDRESS} cannot serve kmeans: it is no .npz file"):
        check_data(ADDRESS, "kmeans", 3)
    place = StorageLocation(tmp_path / "run")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "input.npz").write_bytes(packed(tmp_path)[:-200])
    with pytest.raises(OptionError, match=r"input\.npz cannot serve kmeans: it is no .npz file"):
        stored_input("points.parquet", "kmeans", 3, "y", place)
