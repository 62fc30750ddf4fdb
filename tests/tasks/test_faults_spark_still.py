"""A real Spark cluster of which parts stand still, are killed, or cannot be reached, in mid-query."""

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from driving import FOUR_TABLES

from ebbflow.infra.errors import EngineLostError
from ebbflow.infra.spark import masters, watch
from ebbflow.infra.spark.cluster import authentication
from ebbflow.infra.spark.cluster.cluster import LocalSparkCluster
from tests.chaos.proxy import Proxy
from tests.tasks.query.test_faults_spark import run

pytestmark = [pytest.mark.spark, pytest.mark.slow, pytest.mark.timeout(280)]


@pytest.fixture(scope="module")
def cluster(_home: None) -> Iterator[LocalSparkCluster]:
    with LocalSparkCluster.start("still", workers=2, memory="1400m") as cluster:
        yield cluster


def test_a_worker_and_then_the_master_that_stand_still_for_a_while_cost_no_answer(
    cluster: LocalSparkCluster, tpch_medium: str, tmp_path: Path
) -> None:
    worker = cluster.state.nodes[0].pid

    def fault() -> None:
        for group in (worker, cluster.state.master_pid):
            os.killpg(group, signal.SIGSTOP)
            threading.Event().wait(2.0)  # the fault itself
            os.killpg(group, signal.SIGCONT)

    report, _ = run(cluster, tpch_medium, tmp_path / "store", fault, sql=FOUR_TABLES)
    assert not [stage for stage in report.stages if stage.status == "failed"]


@pytest.fixture
def network(cluster: LocalSparkCluster, monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    """The connection between drivers and the master; what is known of the cluster is known at its address, too."""
    host, _, port = cluster.master_url.removeprefix("spark://").rpartition(":")
    assert host.startswith("127.")
    with Proxy(int(port), host) as network:
        state = cluster.state
        there = {address(network): state, cluster.master_url: state}
        for module in (authentication, masters, watch):
            monkeypatch.setattr(module, "find_cluster", there.get)
        yield network


def address(network: Proxy) -> str:
    return f"spark://127.0.0.1:{network.port}"


def test_a_network_between_driver_and_master_that_is_silent_for_a_while_costs_no_answer(
    cluster: LocalSparkCluster, network: Proxy, tpch_medium: str, tmp_path: Path
) -> None:
    def fault() -> None:
        network.set("silent")
        threading.Event().wait(2.0)  # the fault itself
        network.set("open")

    report, _ = run(cluster, tpch_medium, tmp_path / "store", fault, sql=FOUR_TABLES, master=address(network))
    assert not [stage for stage in report.stages if stage.status == "failed"]


def test_a_network_between_driver_and_master_that_is_reset_ends_the_query_which_goes_on_when_run_again(
    cluster: LocalSparkCluster, network: Proxy, tpch_medium: str, tmp_path: Path
) -> None:
    def fault() -> None:
        network.set("cut")

    with pytest.raises(EngineLostError, match="dropped the application"):
        run(cluster, tpch_medium, tmp_path / "store", fault, sql=FOUR_TABLES, master=address(network))
    network.set("open")
    run(cluster, tpch_medium, tmp_path / "store", lambda: None, sql=FOUR_TABLES, at_start=True)


def test_a_master_that_is_killed_ends_no_query_that_has_its_executors(
    cluster: LocalSparkCluster, tpch_medium: str, tmp_path: Path
) -> None:
    def fault() -> None:
        os.kill(cluster.state.master_pid, signal.SIGKILL)

    report, _ = run(cluster, tpch_medium, tmp_path / "store", fault, sql=FOUR_TABLES)
    assert not [stage for stage in report.stages if stage.status == "failed"]
