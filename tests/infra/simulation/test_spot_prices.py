"""Spot price history: reading it, what clusters cost by it, and that schedulers see it."""

import gzip
from pathlib import Path

import pytest

from ebbflow.infra.errors import WorkloadError
from ebbflow.infra.simulation.engine import simulate
from ebbflow.infra.simulation.traces.cluster import Cluster, gpu_node
from ebbflow.infra.simulation.traces.node_traces import NodeEvent, with_trace
from ebbflow.infra.simulation.traces.prices import cost, first_moment, moment, read_prices, with_prices
from ebbflow.infra.simulation.traces.workloads import Job, Workload
from ebbflow.planners.model.capacity import Node
from ebbflow.planners.scheduling.gangs.ordered import best_effort

HEADER = "timestamp,availability_zone,instance_type,product,spot_price_usd_per_hour\n"
ROWS = """2020-01-01T00:00:00Z,z1,p3,Linux/UNIX,1.0
2020-01-01T00:30:00Z,z2,p3,Linux/UNIX,5.0
2020-01-01T01:00:00Z,z1,p3,Windows,9.0
2020-01-01T01:00:00Z,z1,p3,Linux/UNIX,3.0
2020-01-01T05:00:00Z,z1,p3,Linux/UNIX,2.0
"""
BEGIN = moment("2020-01-01T00:00:00Z")


def spot(id_: str, zone: str = "z1") -> Node:
    return Node(id_, 0, 0.0, gpus=2, instance_type="p3", zone=zone, market="spot", price=4.0)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "prices.csv"
    path.write_text(HEADER + ROWS, encoding="utf-8")
    return path


def test_a_price_holds_until_the_next_of_its_zone_and_type(path: Path) -> None:
    history = read_prices(path)
    series = history.of(spot("a"))
    assert [series.at(BEGIN + hours * 3600) for hours in (0, 0.9, 1, 4.9, 5, 9)] == [1, 1, 3, 3, 2, 2]
    assert history.end - history.start == 5 * 3600
    assert first_moment(Cluster((spot("a"), spot("b", "z2"))), history) == BEGIN + 1800


def test_a_run_costs_what_its_spot_nodes_cost_at_the_time_and_policies_see_it(path: Path) -> None:
    listed = Cluster((spot("a"), gpu_node("base", 2, price=4.0)))
    seen: dict[float, float] = {}

    class Watching:
        name = "watching"

        def decide(self, view, memory, rng):
            seen[view.now] = view.capacity.nodes[0].price
            return best_effort().decide(view, memory, rng)

    jobs = Workload("w", (Job("one", 0.0, 2, 7200.0), Job("two", 5400.0, 2, 1800.0)))
    run = simulate(jobs, with_prices(listed, read_prices(path), BEGIN), Watching(), restart_delay=0.0)
    assert run.dollars == pytest.approx(1 * 1.0 + 1 * 3.0 + 2 * 4.0)
    assert cost(listed, 0.0, 7200.0, lambda node: node.price) == pytest.approx(2 * 2 * 4.0)
    assert seen[0.0] == 1.0
    assert seen[5400.0] == 3.0


def test_a_new_price_alone_asks_no_policy(path: Path) -> None:
    jobs = Workload("w", (Job("one", 0.0, 2, 7200.0),))
    listed = Cluster((spot("a"),))
    plain = simulate(jobs, listed, best_effort(), restart_delay=0.0)
    priced = simulate(jobs, with_prices(listed, read_prices(path), BEGIN), best_effort(), restart_delay=0.0)
    assert priced.decisions == plain.decisions
    assert priced.jobs == plain.jobs


def test_nodes_of_a_trace_pay_from_when_they_come(path: Path) -> None:
    events = [NodeEvent(3600, "add", "s"), NodeEvent(7200, "remove", "s")]
    trace = with_trace(Cluster((gpu_node("base", 2),)), events, spot("spot"))
    jobs = Workload("w", (Job("one", 0.0, 2, 3 * 3600.0),))
    run = simulate(jobs, with_prices(trace, read_prices(path), BEGIN), best_effort(), restart_delay=0.0)
    assert run.dollars == pytest.approx(3.0)
    assert cost(trace, 0.0, 3 * 3600.0, lambda node: node.price) == pytest.approx(4.0)


def test_unknown_zones_and_times_before_the_first_price_are_refused(path: Path) -> None:
    history = read_prices(path)
    with pytest.raises(WorkloadError, match="no prices of zone/type z3/p3; the nearest is z"):
        with_prices(Cluster((spot("a", "z3"),)), history, BEGIN)
    with pytest.raises(WorkloadError, match="begin at 2020-01-01T00:30:00Z, 1800 s after"):
        with_prices(Cluster((spot("a", "z2"),)), history, BEGIN)


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ("yesterday,z,p,Linux/UNIX,1", "timestamp must be an ISO 8601 time"),
        ("2020-01-01T00:00:00Z,z,p,Linux/UNIX,-1", "spot_price_usd_per_hour must be > 0"),
        ("2020-01-01T00:00:00Z,,p,Linux/UNIX,1", "availability_zone must not be empty"),
        ("2020-01-01T00:00:00Z,z,p,1", "has 4 fields"),
    ],
)
def test_malformed_rows_name_line_and_reason(row: str, reason: str, tmp_path: Path) -> None:
    path = tmp_path / "prices.csv"
    path.write_text(f"{HEADER}{row}\n", encoding="utf-8")
    with pytest.raises(WorkloadError, match=f"prices.csv, line 2: {reason}"):
        read_prices(path)


def test_time_must_not_go_back_and_the_product_must_occur(path: Path) -> None:
    with pytest.raises(WorkloadError, match="no prices of SUSE"):
        read_prices(path, product="SUSE")
    lines = ROWS.splitlines(keepends=True)
    path.write_text(HEADER + lines[4] + lines[0], encoding="utf-8")
    with pytest.raises(WorkloadError, match="line 3: time goes back"):
        read_prices(path)


def test_a_compressed_history_is_read_like_a_plain_one(path: Path, tmp_path: Path) -> None:
    packed = tmp_path / "prices.csv.gz"
    packed.write_bytes(gzip.compress(path.read_bytes()))
    assert read_prices(packed).series == read_prices(path).series
    packed.write_bytes(packed.read_bytes()[:-20])
    with pytest.raises(WorkloadError, match="whole gzip file"):
        read_prices(packed)
    packed.write_text("plain")
    with pytest.raises(WorkloadError, match="cannot be read"):
        read_prices(packed)
