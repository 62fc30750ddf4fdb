"""Spot traces of both formats, and what they make of a cluster."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ebbflow.infra.errors import WorkloadError
from ebbflow.infra.simulation.traces.cluster import Cluster, gpu_node, read_spot_trace
from ebbflow.infra.simulation.traces.node_traces import (
    AvailabilityInterval,
    NodeEvent,
    cluster_of,
    presences,
    read_node_trace,
    with_trace,
)
from ebbflow.planners.errors import OptionError

OOBLECK = Path(__file__).parents[2] / "fixtures/training/oobleck"
SPOT = gpu_node("spot", 4, market="spot", price=1.0)


def trace(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "nodes.csv"
    path.write_text(text, encoding="utf-8")
    return path


@pytest.mark.parametrize("name", ["6h", "1h", "10m", "g4dn-trace"])
def test_oobleck_traces_give_the_cluster_that_the_plain_reader_gives(name: str) -> None:
    path = OOBLECK / f"{name}.csv"
    mine = with_trace(Cluster(()), read_node_trace(path), gpu_node("x", 4, market="spot"))
    theirs = read_spot_trace(path, 4)
    assert presences(mine) == presences(cluster_of(presences(theirs)))
    assert mine.most_ahead()[0] == theirs.most_ahead()[0]


def test_our_format_has_notices_and_sizes(tmp_path: Path) -> None:
    path = trace(
        tmp_path,
        "time_s,event,node,deadline_s,gpus\n0,add,a,,8\n10,add,b,,\n60,notice,a,180,\n180,remove,a,,\n200,add,a,,\n",
    )
    cluster = with_trace(Cluster.grid(1, 2), read_node_trace(path), SPOT)
    assert [(node.id, node.gpus, node.market) for node in cluster.nodes] == [
        ("node-0", 2, "on-demand"),
        ("a", 8, "spot"),
    ]
    assert [change.at for change in cluster.changes] == [10, 60, 180, 200]
    (notice,) = cluster.changes[1].notices
    assert (notice.node_id, notice.deadline) == ("a", 180)
    assert cluster.changes[2].remove == ("a",)
    assert cluster.changes[3].add[0].gpus == 4  # as the template, unless its row says


def test_the_clusters_own_nodes_can_leave_and_removals_can_be_announced() -> None:
    events = [NodeEvent(100, "remove", "node-0"), NodeEvent(300, "add", "node-0")]
    cluster = with_trace(Cluster.grid(2, 4), events, SPOT, notice=30)
    assert [change.at for change in cluster.changes] == [70, 100, 300]
    assert cluster.changes[0].notices[0].deadline == 100


@pytest.mark.parametrize(
    ("text", "line", "reason"),
    [
        ("time_s,event,node\n0,add,a\n-1,remove,a\n", 3, "must be >= 0"),
        ("time_s,event,node\n5,add,a\n1,add,b\n", 3, "time goes back"),
        ("time_s,event,node\n5,lose,a\n", 2, "must be add, remove or notice"),
        ("time_s,event,node,deadline_s\n5,add,a,9\n", 2, "nothing else, needs deadline_s"),
        ("time_s,event,node,deadline_s\n0,add,a,\n5,notice,a,\n", 3, "needs deadline_s"),
        ("time_s,event,node,deadline_s\n0,add,a,\n5,notice,a,4\n", 3, "before the notice"),
        ("time_s,event,node,deadline_s\n0,add,a,\n5,notice,a,9\n", 3, "never removed"),
        ("time_s,event,node,gpus\n0,add,a,0\n", 2, "whole number >= 1"),
        ("time_s,event,node,gpus\n0,add,a,2\n1,remove,a,2\n", 3, "only an added node"),
        ("0,add,a\n5,lose,a\n", 2, "time_ms,add"),
    ],
)
def test_malformed_rows_name_line_and_reason(text: str, line: int, reason: str, tmp_path: Path) -> None:
    with pytest.raises(WorkloadError, match=f"nodes.csv, line {line}: .*{reason}"):
        read_node_trace(trace(tmp_path, text))


def test_what_contradicts_the_cluster_is_refused(tmp_path: Path) -> None:
    one = Cluster.grid(1, 4)
    with pytest.raises(WorkloadError, match="node-0 is added while present at 5 s"):
        with_trace(one, [NodeEvent(5, "add", "node-0")], SPOT)
    with pytest.raises(WorkloadError, match="x is removed while absent"):
        with_trace(one, [NodeEvent(5, "remove", "x")], SPOT)
    with pytest.raises(OptionError, match="notice must be >= 0"):
        with_trace(one, [], SPOT, notice=-1)
    with pytest.raises(WorkloadError, match="has no events"):
        read_node_trace(trace(tmp_path, "time_s,event,node\n"))
    with pytest.raises(WorkloadError, match="cannot be read"):
        read_node_trace(tmp_path / "missing.csv")


@given(st.lists(st.tuples(st.integers(0, 10_000), st.integers(1, 10_000), st.integers(1, 500)), max_size=8))
def test_presences_survive_the_way_through_a_cluster(spans: list[tuple[int, int, int]]) -> None:
    found = [
        AvailabilityInterval(
            gpu_node(f"n{i}", 4), start, start + length, start + length - min(told, length), start + length
        )
        for i, (start, length, told) in enumerate(spans)
    ]
    back = presences(cluster_of(found))
    assert sorted(back, key=lambda one: one.node.id) == sorted(found, key=lambda one: one.node.id)
