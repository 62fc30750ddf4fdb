"""Spark workers as nodes of a local fleet."""

import pytest

from ebbflow.infra.local_fleet import LocalFleet, LocalPool
from ebbflow.infra.spark.cluster.cluster import LocalSparkCluster, find_cluster
from ebbflow.infra.spark.cluster.state import StateFile

pytestmark = pytest.mark.spark


def test_workers_come_are_lost_and_get_notice_and_nothing_is_left(monkeypatch, tmp_path):
    monkeypatch.setenv("EBBFLOW_HOME", str(tmp_path))
    pools = [
        LocalPool("sql", "spark", cores=1, memory=0.5, initial=1, max_nodes=3),
        LocalPool("gpu", "gpu", slots=2, initial=1),
    ]
    with LocalFleet.start(pools, "mixed", gpus=(), wait=240.0) as fleet:
        first = fleet.capacity()
        assert [(n.id, n.cores, n.gpus) for n in first.nodes] == [("gpu-1", 1, 2), ("sql-1", 1, 0)]
        state = find_cluster(fleet.spark_master)
        assert state is not None
        assert [(n.id, n.host) for n in state.nodes] == [("sql-1", first.nodes[1].host)]
        cluster = LocalSparkCluster.attach("mixed")

        fleet.kill("sql-1")
        assert next(n.state for n in cluster.status().nodes) == "dead"
        assert [n.id for n in fleet.capacity().nodes] == ["gpu-1"]

        fleet.wait(lambda state: "sql-2" in {n.id for n in state.nodes if n.visible}, 240)
        given = cluster.notice("sql-2", 600.0)  # by somebody who knows of the cluster only
        fleet.wait(lambda state: state.node("sql-2").deadline is not None, 150)
        (notice,) = fleet.capacity().notices
        assert (notice.node_id, notice.deadline) == ("sql-2", pytest.approx(given, abs=1.0))

        deadline = fleet.notice("sql-2", 1.0)
        assert cluster.state.node("sql-2").deadline == pytest.approx(deadline, abs=1.0)
        state = fleet.wait(lambda state: state.node("sql-2") is None, 150)
        assert state.ended("sql-2") == "its notice period expired"
    assert StateFile.of("mixed").read() is None
