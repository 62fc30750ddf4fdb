"""Plan families, and TPC-DS's statistics at other scales."""

import json

import numpy as np
import pytest

from ebbflow.planners.errors import OptionError
from ebbflow.planners.model import Catalogue, ColumnStatistics, Table, TableStatistics
from ebbflow.planners.query.running.packing import simulate
from tests.evaluation.qoop.tpcds import FACTS, ROWS, at_scale, growth
from tests.evaluation.qoop.workloads import (
    Family,
    Testbed,
    Variety,
    calibrated,
    decode,
    encode,
    synthetic,
    varied,
)

BED = Testbed()


@pytest.fixture(scope="module")
def families() -> tuple[Family, ...]:
    return synthetic(np.random.default_rng(8), 2, relations=(4, 5))


def test_what_is_stored_is_read_back(families: tuple[Family, ...]) -> None:
    read = decode(json.loads(json.dumps(encode(families))))
    assert [f.name for f in read] == [f.name for f in families]
    for one, other in zip(families, read, strict=True):
        assert (one.joins, one.alternatives) == (other.joins, other.alternatives)
        for a, b in zip(one.plans, other.plans, strict=True):
            assert simulate(b, BED.share(200)).seconds == pytest.approx(
                simulate(a, BED.share(200)).seconds, rel=1e-3
            )
            # stages that plans share are still shared
            assert [s.tasks for s in a.stages] == [s.tasks for s in b.stages]
        keys = [{s.physical_key for s in p.stages} for p in one.plans]
        again = [{s.physical_key for s in p.stages} for p in other.plans]
        assert [[len(a & b) for b in keys] for a in keys] == [[len(a & b) for b in again] for a in again]


def test_damaged_families_are_refused() -> None:
    with pytest.raises(OptionError, match="encode"):
        decode({"families": [{"name": "q"}]})


def test_calibration_keeps_proportions_and_reaches_the_mean(families: tuple[Family, ...]) -> None:
    share = BED.share(300)
    made = calibrated(families, 500.0, share)
    times = [f.best_seconds(share) for f in made]
    before = [f.best_seconds(share) for f in families]
    assert sum(times) / len(times) == pytest.approx(500)
    assert times[0] / times[1] == pytest.approx(before[0] / before[1])


def test_degrees_of_parallelism_share_outputs_but_no_tasks(families: tuple[Family, ...]) -> None:
    one = families[0]
    plain = varied(one, BED, Variety(grains=(1.0,)))
    assert {s.physical_key for p in plain.plans for s in p.stages} <= {
        s.physical_key for p in one.plans for s in p.stages
    }
    cut = varied(plain, BED, Variety(grains=(1.0, 4.0), grain_work=1.5, keep=16))
    by_key = {s.physical_key: s for p in cut.plans for s in p.stages}
    base = {s.physical_key: s for p in plain.plans for s in p.stages}
    finer = [s for k, s in by_key.items() if k not in base]
    assert finer
    for stage in finer:
        coarse = base[stage.physical_key.rpartition("x")[0]]
        assert stage.output_fp == coarse.output_fp
        assert stage.tasks == 4 * coarse.tasks
        assert stage.tasks * stage.duration == pytest.approx(1.5 * coarse.tasks * coarse.duration)


def test_shares_of_the_testbed() -> None:
    whole, little = BED.share(600), BED.share(8)
    assert (whole.total.cores, whole.total.memory, whole.nodes) == (600, 2400, 20)
    assert (whole.largest.cores, whole.largest.memory) == (30, 120)
    assert (little.total.cores, little.largest.cores, little.nodes) == (8, 8, 1)


@pytest.mark.parametrize("scale", [1.0, 100.0, 300.0, 500.0, 1000.0])
def test_tables_grow_as_the_specification_says(scale: float) -> None:
    assert all(growth(name, scale) == scale for name in FACTS)
    assert growth("date_dim", scale) == growth("customer_demographics", scale) == 1
    for name, rows in ROWS.items():
        known = dict(zip((1.0, 100.0, 300.0, 1000.0), rows, strict=True))
        grown = rows[0] * growth(name, scale)
        if scale in known:
            assert grown == pytest.approx(known[scale])
        else:
            assert known[300.0] < grown < known[1000.0]


def test_keys_follow_the_table_they_identify() -> None:
    columns = {
        "ss_customer_sk": ColumnStatistics(90_000.0, 0.0, 1, 100_000),
        "ss_sold_date_sk": ColumnStatistics(1_800.0, 0.0, 2_450_816, 2_452_642),
        "ss_ticket_number": ColumnStatistics(240_000.0, 0.0, 1, 240_000),
        "ss_quantity": ColumnStatistics(100.0, 0.0, 1, 100),
    }
    tables = {"store_sales": Table("store_sales", (), "1", TableStatistics(2.88e6, 1.4e8, columns))}
    known = at_scale(Catalogue(tables), 100.0).tables["store_sales"].statistics
    assert known is not None
    assert (known.rows, known.bytes) == (2.88e8, 1.4e10)
    distinct = {name: column.distinct for name, column in known.columns.items()}
    assert distinct == {
        "ss_customer_sk": pytest.approx(1_800_000),
        "ss_sold_date_sk": 1_800,
        "ss_ticket_number": pytest.approx(2.4e7),
        "ss_quantity": 100,
    }
    with pytest.raises(OptionError, match="scale"):
        growth("store", 0.5)
