"""What keeping stages' outputs takes, by tier, and that plans are cut finer where it takes less."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from replanning_cases import stage
from statements import NOW

from ebbflow.planners.memory.tiers import Tier
from ebbflow.planners.model import Catalogue, ColumnStatistics, Share, Table, TableStatistics
from ebbflow.planners.query.costs.cost import SPARK
from ebbflow.planners.query.costs.output_tiers import output_seconds, tier_changed, tier_note
from ebbflow.planners.query.planner import QueryPlanner

TPCH = Path(__file__).parents[3] / "fixtures" / "tpch"
SHARE = Share.uniform(8, 32, nodes=4, hazard=2.0)
PEER = Tier("peer memory", 1e-4, 1e9)
STORE = Tier("object store", 20e-3, 50e6)
FAR = Tier("far store", 0.1, 5e6)
TIERS = st.builds(Tier, st.just("t"), st.floats(0, 1), st.floats(1e5, 1e10))


def _tpch(scale: int) -> Catalogue:
    tables = {}
    for name, known in json.loads((TPCH / "statistics.json").read_text()).items():
        rows, size = known["rows"], known["bytes"]
        columns = {
            c: ColumnStatistics(float(d) * (scale if d > rows / 100 else 1), 0.0, low, high)
            for c, _, d, low, high in known["columns"]
        }
        kinds = tuple((c, kind) for c, kind, *_ in known["columns"])
        tables[name] = Table(name, kinds, "1", TableStatistics(rows * scale, size * scale, columns))
    return Catalogue(tables)


def _planner(number: int, tier: Tier | None) -> QueryPlanner:
    """Return the planner of a query of TPC-H at 100 GB."""
    text = (TPCH / f"q{number}.sql").read_text()
    return QueryPlanner(text, _tpch(100), SPARK, now=NOW, salt="run", tier=tier)


def test_all_nodes_write_at_once() -> None:
    assert output_seconds(200e6, STORE, SHARE) == pytest.approx(0.02 + 1.0)
    assert output_seconds(200e6, None, SHARE) == 0.0


@given(st.floats(1, 1e12), TIERS, st.integers(1, 50))
def test_what_an_output_takes_grows_with_its_size_and_falls_with_nodes(
    size: float, tier: Tier, nodes: int
) -> None:
    few, more = (Share.uniform(8, 32, nodes=n) for n in (nodes, nodes + 1))
    assert output_seconds(size, tier, more) <= output_seconds(size, tier, few)
    assert tier.latency_s < output_seconds(size, tier, few) < output_seconds(2 * size, tier, few)


def test_stages_wait_for_writing_their_output_and_reading_others() -> None:
    planner = _planner(9, None)
    before = {plan.id: plan for plan in planner.candidates(SHARE)}
    planner.tier = STORE
    compared = 0
    for plan in planner.candidates(SHARE, also=before):
        if plan.id not in before:
            continue
        for new, old in zip(plan.stages, before[plan.id].stages, strict=True):
            if new.slicing is None and old.slicing is None:
                sizes = [new.bytes, *(plan.by_fp[fp].bytes for fp in new.inputs)]
                waits = sum(output_seconds(size, STORE, SHARE) for size in sizes) * SHARE.total.cores
                assert new.waiting - old.waiting == pytest.approx(waits)
                assert new.work == old.work
                compared += len(new.inputs)
    assert compared > 1


def test_a_faster_tier_cuts_finer() -> None:
    """On four nodes of which each is lost twice an hour; the first candidate has the least expected time."""
    cuts = {
        tier.name: [len(_planner(number, tier).candidates(SHARE)[0].stages) - 1 for number in (3, 9, 10, 21)]
        for tier in (PEER, STORE, FAR)
    }
    assert cuts == {"peer memory": [1, 1, 1, 1], "object store": [0, 1, 0, 1], "far store": [0, 0, 0, 1]}


def test_a_plan_says_where_its_outputs_are_kept() -> None:
    (first, *_) = _planner(9, PEER).candidates(SHARE)
    assert first.notes[-1].startswith(
        "1 stage output is kept in peer memory (0.1 ms to the first byte, 1,000 MB/s a node): "
    )
    assert first.notes[-1].endswith(" s to write and read")
    assert all("is kept in" not in note for note in _planner(9, None).candidates(SHARE)[0].notes)


def test_the_note_counts_each_reader() -> None:
    made, read, again = stage("a"), stage("b", ("a",)), stage("c", ("a", "b"))
    stages = [replace(one, bytes=400e6) for one in (made, read, again)]
    assert tier_note(stages, STORE, SHARE).endswith(": 10 s to write and read"), "5 times 2.02 s"
    assert tier_note(stages[:1], STORE, SHARE) == (
        "no stage output is kept in object store (20 ms to the first byte, 50 MB/s a node)"
    )


def test_a_tier_changes_with_its_name_or_a_multiple_of_its_time() -> None:
    half, third = (Tier(PEER.name, PEER.latency_s, PEER.bytes_per_second / n) for n in (1.3, 2))
    changed = [
        (None, None),
        (PEER, half),
        (PEER, third),
        (third, PEER),
        (PEER, None),
        (None, PEER),
        (PEER, STORE),
    ]
    assert [tier_changed(*pair) for pair in changed] == [False, False, True, True, True, True, True]
