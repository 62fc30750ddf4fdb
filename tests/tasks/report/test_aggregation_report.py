"""The report of shared aggregators: shares of trainings, migrations, what mirrors cost and how old they are."""

import re
from dataclasses import asdict

import pytest

from ebbflow.infra.aggregation.registry import (
    ACCOUNTS,
    AGGREGATOR,
    DEMAND,
    DRAIN,
    MANAGER,
    PROFILE,
    TRAINING,
    AggregatorRecord,
    ServiceView,
    TrainingRecord,
)
from ebbflow.infra.aggregation.timing import HeldTensor
from ebbflow.infra.ledger import Ledger
from ebbflow.infra.ledger.records import RecordKey, ServiceRecord
from ebbflow.planners.aggregation.accounts import SharedAccounts
from ebbflow.tasks.apps.aggregators import (
    AggregatedTraining,
    AggregationReport,
    TrainingShare,
    aggregation_report,
)
from ebbflow.tasks.report.aggregation import aggregation_reader
from ebbflow.tasks.report.cluster.page import cluster_html, cluster_parts
from ebbflow.tasks.report.cluster.report import cluster_report
from ebbflow.tasks.report.cluster.values import ClusterReport
from tests.cluster_events import two_apps
from tests.tasks.report.cluster.test_cluster_page import Page

A, B = "fit-0a/generation-1", "<b>tune</b>-1b/generation-2"
MIB = 1 << 20


def bodies(**of_b: int) -> dict[RecordKey, dict]:
    """Two aggregators of which the second mirrors the first training's tensor; ``of_b``: of that mirror."""
    first = AggregatorRecord(
        "h:1", "k", "p", node="agg-1", updates=70, moved=3, waited=0.0125,
        held={A: {"w": HeldTensor(4 * MIB, round=40)}, B: {"w": HeldTensor(12 * MIB, round=9)}},
    )  # fmt: skip
    mirror = HeldTensor(4 * MIB, mirror=True, **of_b)
    second = AggregatorRecord("h:2", "k", "p", held={A: {"w": mirror}})
    profile = {"iteration_us": 250_000, "tensors": {"w": [5_000, MIB]}, "servers": 2}
    return {
        RecordKey(AGGREGATOR, "a1@77"): asdict(first),
        RecordKey(AGGREGATOR, "a2@78"): asdict(second),
        RecordKey(TRAINING, A): asdict(TrainingRecord(2)),
        RecordKey(TRAINING, B): asdict(TrainingRecord(1)),
        RecordKey(PROFILE, A): profile,
        RecordKey(DEMAND, "fit-0a"): {"app": "fit", "servers": 2},
        RecordKey(DRAIN, "a2@78"): {"deadline": 5.0},
        MANAGER: {"holder": "a1@77", "term": 3},
        ACCOUNTS: SharedAccounts(dollars={"fit": 1.25, "": 0.5}, forgotten=2.0).values,
    }


def view(found: dict[RecordKey, dict]) -> ServiceView:
    records = {key: ServiceRecord(100.0, body) for key, body in found.items()}
    return ServiceView(records, 100.0, dict.fromkeys(records, 0.0))


def test_shares_migrations_and_the_cost_of_mirrors_are_told() -> None:
    found = aggregation_report(view(bodies(spare=True, round=33, mirrored=9 * MIB)))
    assert found is not None
    one, other = found.aggregators
    assert (one.name, one.node, one.state, one.bytes, one.updates, one.moved) == (
        "a1", "agg-1", "serving", 16 * MIB, 70, 3,
    )  # fmt: skip
    assert set(one.shares) == {
        TrainingShare(A, 1, 4 * MIB, 0, 0.25),
        TrainingShare(B, 1, 12 * MIB, 0, 0.75),
    }
    assert (other.state, other.shares) == ("draining", (TrainingShare(A, 1, 4 * MIB, 4 * MIB, 1.0),))
    mine = next(one for one in found.trainings if one.training == A)
    assert mine == AggregatedTraining(
        A, ("a1",), 2, 1, 4 * MIB, 4 * MIB, 9 * MIB, mirror_age=7, iteration_s=0.25, update_s=0.005, dollars=1.25
    )  # fmt: skip
    assert (found.private_servers, found.used, found.manager) == (3, 2, "a1")
    assert (found.unused_dollars, found.finished_dollars) == (0.5, 2.0)


def test_shares_are_of_measured_time_once_all_was_measured() -> None:
    held = {A: {"w": HeldTensor(MIB, 100, 1000)}, B: {"w": HeldTensor(MIB, 300, 1000)}}
    found = aggregation_report(
        view({RecordKey(AGGREGATOR, "a"): asdict(AggregatorRecord("h:1", "k", "p", held))})
    )
    assert found is not None
    fractions = {share.training: share.fraction for share in found.aggregators[0].shares}
    assert fractions == pytest.approx({A: 0.25, B: 0.75})


@pytest.mark.parametrize(
    ("of_mirror", "age"), [({"round": 38}, 0), ({"spare": True, "round": 38}, 2), ({"spare": True, "round": 41}, 0)]
)  # fmt: skip
def test_only_a_mirror_that_is_renewed_at_times_is_behind(of_mirror: dict[str, int], age: int) -> None:
    found = aggregation_report(view(bodies(**of_mirror)))
    assert found is not None
    assert {one.training: one.mirror_age for one in found.trainings} == {A: age, B: None}


def test_the_page_has_the_tables_escaped_and_none_of_it_without_aggregators() -> None:
    book = two_apps()
    bare = cluster_report(book.events)
    assert cluster_parts(bare)["aggregation"].strip() == ""
    found = aggregation_report(view(bodies(spare=True, round=33, mirrored=9 * MIB)))
    report = cluster_report(book.events, aggregation=found)
    part = str(cluster_parts(report)["aggregation"])
    Page(cluster_html(report))  # nests
    text = re.sub(r"\s+", " ", re.sub(r"<[^>]*>", " ", part))
    assert "2 aggregators instead of 3 private servers (33% saved)" in text
    assert "25%, 4.0 MiB" in text
    assert "(4.0 MiB of mirrors)" in text
    assert "7 rounds" in text
    assert "12.5 ms" in text
    assert "9.0 MiB" in text
    assert "$1.25" in text
    assert "<b>tune</b>" not in part
    assert "&lt;b&gt;tune&lt;/b&gt;" in part
    assert ClusterReport.from_json(report.to_json()).aggregation == found
    past = cluster_report(book.events, aggregation=found, now=1e12, until=report.until)
    assert past.aggregation is None, "what is now was not then"


def test_the_reader_follows_a_ledger_and_passes_over_what_another_version_has_written(tmp_path) -> None:
    with Ledger.open(str(tmp_path / "ledger.db")) as ledger:
        read = aggregation_reader(ledger.records)
        assert read() is None
        for key, body in bodies().items():
            ledger.records.put(key, body)
        assert isinstance(read(), AggregationReport)
        ledger.records.put(RecordKey(TRAINING, A), {"unheard": 1})
        assert read() is None
