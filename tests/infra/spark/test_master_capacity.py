"""The workers of a standalone master as nodes, by what its page answers."""

from types import SimpleNamespace

import httpx
import pytest

from ebbflow.infra.errors import EngineUnavailableError
from ebbflow.infra.spark import master_capacity
from ebbflow.infra.spark.master_api import MasterView, Worker
from ebbflow.infra.spark.master_capacity import MasterCapacity
from tests.evaluation.renting.virtual_clock import VirtualClock


def worker(host, state="ALIVE", cores=2, memory=2048):
    return Worker(f"worker-{host}", host, state, cores, 0, memory, "")


class Master:
    """Answers with ``workers``, or not at all."""

    def __init__(self, *workers):
        self.workers, self.away = workers, False

    def view(self, *_):
        if self.away:
            raise httpx.ConnectError("away")
        return MasterView("spark://m:7077", tuple(self.workers), ())


@pytest.fixture
def master(monkeypatch):
    made = Master(worker("h1"), worker("h2"))
    monkeypatch.setattr(master_capacity, "get_master", made.view)
    monkeypatch.setattr(master_capacity, "find_cluster", lambda url: None)
    monkeypatch.setattr(
        master_capacity, "find_master", lambda url: SimpleNamespace(url="spark://m:7077", ui="http://m:8080")
    )
    return made


@pytest.fixture
def source(master):
    return MasterCapacity("spark://m:7077", hazard=lambda n, s: n / max(s, 1.0), clock=VirtualClock(100.0))


def test_workers_of_one_host_are_one_node(master, source):
    master.workers = (worker("h2"), worker("h1"), worker("h1", cores=1, memory=1024), worker("h3", "DEAD"))
    found = source.capacity()
    assert [(n.id, n.cores, n.memory) for n in found.nodes] == [("h1", 3, 3.0), ("h2", 2, 2.0)]


def test_the_revision_grows_with_each_change_only(master, source):
    assert [source.capacity().revision for _ in range(3)] == [1, 1, 1]
    master.workers = (worker("h1"),)
    assert (source.capacity().revision, source.capacity().revision) == (2, 2)


def test_a_decommissioned_worker_has_a_notice_whose_deadline_stands(master, source):
    source.capacity()
    master.workers = (worker("h1"), worker("h2", "DECOMMISSIONED"))
    first = source.capacity()
    assert [(n.node_id, n.kind) for n in first.notices] == [("h2", "interruption")]
    source._clock.sleep(30.0)
    assert source.capacity().notices == first.notices
    assert [node.id for node in first.usable] == ["h1"]


def test_losses_raise_the_hazard(master, source):
    assert source.capacity().hazard == 0.0
    source._clock.sleep(50.0)
    master.workers = (worker("h1"),)
    assert source.capacity().hazard == pytest.approx(1 / 100.0)


def test_a_master_that_is_away_leaves_what_was_seen_with_its_time(master, source):
    seen = source.capacity()
    master.away = True
    source._clock.sleep(60.0)
    assert source.capacity() == seen
    assert source.capacity().at == 100.0


def test_a_master_that_never_answered_is_an_error(master, monkeypatch):
    source = MasterCapacity("spark://m:7077", hazard=lambda *_: 0.0)
    master.away = True
    with pytest.raises(EngineUnavailableError, match="does not answer"):
        source.capacity()
    monkeypatch.setattr(master_capacity, "find_master", lambda url: None)
    with pytest.raises(EngineUnavailableError, match="no Spark master answers at spark://m:7077"):
        MasterCapacity("spark://m:7077", hazard=lambda *_: 0.0)


def test_the_links_of_a_local_cluster_are_seen(master, source, monkeypatch):
    state = SimpleNamespace(nodes=(), network=25.0)
    monkeypatch.setattr(master_capacity, "find_cluster", lambda url: state)
    assert source.capacity().network == 25.0
    state.network = 12.5
    found = source.capacity()
    assert (found.network, found.revision) == (12.5, 2)
