"""Spark workers as nodes of a local fleet."""

import pytest

from ebbflow.infra.local_fleet import LocalFleet, LocalPool
from ebbflow.infra.spark.cluster import LocalSparkCluster, find_cluster
from ebbflow.infra.spark.state import StateFile

pytestmark = pytest.mark.spark


def test_workers_come_get_notice_are_lost_and_leave_nothing(monkeypatch, tmp_path):
    monkeypatch.setenv("EBBFLOW_HOME", str(tmp_path))
    pools = [
        LocalPool("sql", "spark", cores=1, memory=0.5, initial=2, most=3),
        LocalPool("gpu", "gpu", slots=2, initial=1),
    ]
    with LocalFleet.start(pools, "mixed", gpus=(), wait=240.0) as fleet:
        first = fleet.capacity()
        assert [(n.id, n.cores, n.gpus) for n in first.nodes] == [
            ("gpu-1", 1, 2),
            ("sql-1", 1, 0),
            ("sql-2", 1, 0),
        ]
        state = find_cluster(fleet.spark_master)
        assert state is not None
        assert {n.id: n.host for n in state.nodes} == {n.id: n.host for n in first.nodes if not n.gpus}
        cluster = LocalSparkCluster.attach("mixed")

        fleet.kill("sql-1")
        assert {n.id: n.state for n in cluster.status().nodes}["sql-1"] == "dead"
        assert [n.id for n in fleet.capacity().nodes] == ["gpu-1", "sql-2"]

        deadline = fleet.notice("sql-2", 4.0)
        assert cluster.state.node("sql-2").deadline == pytest.approx(deadline, abs=1.0)
        book = fleet.wait(lambda book: "sql-2" not in {n.id for n in book.nodes}, 60)
        assert book.ended("sql-2") == "its notice has run out"
        book = fleet.wait(lambda book: {"sql-3", "sql-4"} <= {n.id for n in book.nodes if n.visible}, 240)

        cluster.notice("sql-3", 60.0)  # by whoever knows of the cluster only
        fleet.wait(lambda book: book.node("sql-3").deadline is not None, 60)
        assert [notice.node_id for notice in fleet.capacity().notices] == ["sql-3"]
    assert StateFile.of("mixed").read() is None
