"""Spark workers in network namespaces: a query whose shuffle crosses the links."""

import pytest

from ebbflow.infra.local_fleet import LocalFleet, LocalPool
from ebbflow.infra.machine.network import namespaces
from ebbflow.infra.spark.cluster.state import find_cluster
from ebbflow.infra.spark.session import start_session, stop_session
from ebbflow.infra.spark.settings import settings
from tests.infra.networks import left, skip_without_rights

pytestmark = pytest.mark.spark


def sent(namespace):
    """Return the bytes that a node has sent over its first link."""

    def read():
        with open("/proc/thread-self/net/dev") as file:
            return next(int(line.split()[9]) for line in file if line.strip().startswith("eth0:"))

    return namespaces.within(namespace, read)


def test_a_query_shuffles_over_the_links_and_nothing_is_left(monkeypatch, tmp_path):
    skip_without_rights()
    monkeypatch.setenv("EBBFLOW_HOME", str(tmp_path))
    pool = LocalPool("spark", "spark", cores=1, memory=1.0, initial=2)
    with LocalFleet.start([pool], "wired", network=(1e8,), wait=240.0) as fleet:
        plan = fleet.state.network
        assert fleet.spark_master.startswith(f"spark://{plan.host}:")
        hosts = {node.id: node.host for node in fleet.state.nodes}
        assert {node.id: node.host for node in find_cluster(fleet.spark_master).nodes} == hosts
        assert find_cluster(fleet.spark_master).network == fleet.capacity().network == 12.5
        before = {id_: sent(plan.namespace(id_)) for id_ in hosts}
        chosen = settings(
            fleet.spark_master, app_name="wired", memory="600m", conf={"spark.executor.cores": "1"}
        )
        session, process = start_session(chosen | {"spark.sql.shuffle.partitions": "2"})
        try:
            rows = session.sql(
                "select count(*), sum(n) from (select a.id % 100003 k, count(*) n from range(0, 600000, 1, 4) a"
                " join range(0, 600000, 1, 4) b on a.id = b.id group by 1)"
            ).collect()
            assert tuple(rows[0]) == (100003, 600000)
        finally:
            stop_session(session, process)
        crossed = {id_: sent(plan.namespace(id_)) - before[id_] for id_ in hosts}
        assert all(count > 500_000 for count in crossed.values()), crossed
    assert left(plan.tag) == []
