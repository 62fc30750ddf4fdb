"""Jobs with deadlines on simulated fleets: what ways to rent do, and the page about them."""

from pathlib import Path

import pytest

from ebbflow.planners.errors import OptionError
from ebbflow.planners.model.prices import Series
from tests.evaluation.renting import plan
from tests.evaluation.renting.driver import RESTART, Outcome, World, run
from tests.evaluation.renting.jobs import COUNTS, MACHINES, MODELS, Job, job_of
from tests.evaluation.renting.run import evaluate
from tests.evaluation.renting.spot_supply import PresenceTrace, Stay, Supply
from tests.evaluation.renting.strategies import Once, Planned

BEGIN = 1_578_000_000.0
HOUR = 3600.0
WEST = ("us-west-2a", "us-west-2b")


def world(
    spot: dict[tuple[str, str], Supply] | None = None, *, limits: dict[tuple[str, str], float] | None = None
) -> World:
    """Return two zones with p2.xlarge at 0.60 $/h and p3.2xlarge at 1 $/h, changed by ``spot``."""
    supplies = {
        (zone, kind): Supply(Series.constant(price)) for zone in WEST for kind, price in PRICES.items()
    }
    return World({**supplies, **(spot or {})}, BEGIN, limits or {}, 0)


PRICES = {"p2.xlarge": 0.60, "p3.2xlarge": 1.00}


def steps(*changes: tuple[float, float]) -> Series:
    return Series(tuple(BEGIN + hours * HOUR for hours, _ in changes), tuple(price for _, price in changes))


def test_a_job_without_trouble_takes_its_time_and_costs_its_price() -> None:
    job = job_of("A3C", 2.0, 2.0)
    found = run(job, Once("plain", "spot"), world())
    seconds = 120.0 + RESTART + 2 * HOUR
    assert found.seconds == pytest.approx(seconds)
    assert found.dollars == pytest.approx(seconds / HOUR * 1.0)
    assert (found.finished, found.in_time, found.interruptions, found.restarts) == (True, True, 0, 1)
    assert found.trained == pytest.approx(2 * HOUR)


def test_on_demand_pays_the_list_price() -> None:
    found = run(job_of("A3C", 2.0, 2.0), Once("firm", "on-demand", reserve=1.0), world())
    assert found.dollars == pytest.approx((210.0 / HOUR + 2.0) * 3.06)
    assert found.on_demand_dollars == pytest.approx(found.dollars)


def test_the_cheapest_machine_by_the_hour_may_be_too_slow() -> None:
    job = job_of("A3C", 2.0, 1.2)  # twice as fast on a V100
    by_hour = run(job, Once("hour", "spot", by="hour"), world())
    assert (by_hour.finished, by_hour.in_time) == (True, False)
    assert run(job, Once("work", "spot"), world()).in_time


def test_as_many_nodes_as_the_deadline_needs() -> None:
    job = job_of("ResNet-50", 2.0, 0.6)
    found = run(job, Once("plain", "spot"), world())
    assert found.in_time
    assert job.speed("p3.2xlarge", 8) / job.speed("p3.2xlarge", 1) > 1 / 0.6
    assert found.dollars > 1.2 * 1.0


def test_when_its_place_dries_up_the_planned_way_moves_and_the_plain_one_waits() -> None:
    gone = Supply(Series.constant(1.0), PresenceTrace((Stay(0.0, HOUR),), 100 * HOUR), BEGIN)
    there = world({("us-west-2a", "p3.2xlarge"): gone})
    job = job_of("A3C", 4.0, 1.5)
    planned = run(job, Planned(), there)
    assert planned.in_time
    assert planned.interruptions == 1
    assert planned.on_demand_dollars == 0.0
    assert planned.dollars < 4.0 * 1.2
    plain = run(job, Once("plain", "spot"), there)
    assert not plain.in_time


def test_when_spot_is_dry_everywhere_the_planned_way_is_in_time_on_demand() -> None:
    stays = PresenceTrace((Stay(0.0, HOUR),), 1000 * HOUR)
    dry = {
        (zone, kind): Supply(Series.constant(price), stays, BEGIN)
        for zone in WEST
        for kind, price in PRICES.items()
    }
    job = job_of("A3C", 4.0, 1.3)
    planned = run(job, Planned(), world(dry))
    assert planned.in_time
    assert planned.on_demand_dollars > 0.0
    firm = run(job, Once("firm", "on-demand", reserve=1.0), world(dry))
    assert planned.dollars < firm.dollars
    plain = run(job, Once("plain", "spot"), world(dry))
    assert not plain.finished
    assert plain.seconds == pytest.approx(4 * job.allowed)


def test_it_follows_the_cheaper_zone_but_not_for_a_difference_within_the_margin() -> None:
    job = job_of("A3C", 10.0, 2.0)
    dearer = world({("us-west-2a", "p3.2xlarge"): Supply(steps((0, 1.0), (2, 2.5)))})
    way = Planned()
    moved = run(job, way, dearer)
    assert way.reason.startswith("p3.2xlarge: keep 1: the work completes in")
    stayed = run(job, Once("plain", "spot"), dearer)
    assert moved.restarts == 2
    assert moved.dollars < stayed.dollars
    slightly = world(
        {("us-west-2a", "p3.2xlarge"): Supply(steps((0, 0.99), (2, 1.05), (4, 0.99), (6, 1.05)))}
    )
    assert run(job, Planned(), slightly).restarts == 1


def test_prices_above_the_limit_interrupt_and_are_counted() -> None:
    waves = Supply(steps((0, 1.0), (1, 1.2), (2, 1.0)))
    there = world({("us-west-2a", "p3.2xlarge"): waves}, limits={("us-west-2a", "p3.2xlarge"): 1.1})
    plain = run(job_of("A3C", 3.0, 3.0), Once("plain", "spot"), there)
    assert (plain.interruptions, plain.restarts) == (1, 2)
    # off from an hour and two minutes on until two hours; both starts cost a boot and a restart
    assert plain.seconds == pytest.approx(3 * HOUR + 210.0 + (HOUR - 120.0) + 210.0)


@pytest.mark.parametrize("name", list(plan.WORLDS))
def test_equal_worlds_give_equal_outcomes_and_sane_ones(name: str) -> None:
    there = plan.world_of(name, 1)
    job = job_of("LM", 2.0, 1.2)
    for make in plan.STRATEGIES.values():
        found = run(job, make(), there)
        assert found == run(job, make(), there)
        assert isinstance(found, Outcome)
        assert 0 <= found.trained <= found.seconds
        assert 0 <= found.on_demand_dollars <= found.dollars * (1 + 1e-9)
        if found.finished:
            assert (
                found.trained >= job.steps / max(job.speed(kind, job.most(kind)) for kind in job.types) - 1e-6
            )


def test_no_real_price_is_above_the_list_price() -> None:
    for (zone, kind), series in plan.history().series.items():
        listed = MACHINES[kind].on_demand if kind in MACHINES else None
        if zone.startswith("us-") and listed is not None:
            assert max(series.prices) <= listed + 1e-9


def test_the_shipped_trace_is_the_one_that_recovery_is_measured_on() -> None:
    fixtures = Path(__file__).parents[2] / "fixtures" / "training" / "oobleck"
    assert (plan.DATA / "presence" / "g4dn.csv").read_bytes() == (fixtures / "g4dn-trace.csv").read_bytes()


def test_speeds_are_those_that_were_measured() -> None:
    import json

    path = Path(__file__).parents[2] / "fixtures" / "training" / "gavel" / "simulation_throughputs.json"
    measured = json.loads(path.read_text(encoding="utf-8"))
    sizes = {"ResNet-50": 32, "ResNet-18": 64, "Transformer": 128, "LM": 80, "Recommendation": 2048}
    columns = {"p2.xlarge": "k80_unconsolidated", "p3.2xlarge": "v100_unconsolidated"}
    whole = {"p2.8xlarge": ("k80", 8), "p3.8xlarge": ("v100", 4), "p3.16xlarge": ("v100", 8)}
    for model, speeds in MODELS.items():
        name = f"{model} (batch size {sizes[model]})" if model in sizes else model
        for kind, found in speeds.items():
            keys = [(columns[kind], gpus) for gpus in COUNTS] if kind in columns else [whole[kind]]
            for value, (column, gpus) in zip(found, keys, strict=False):
                assert value == pytest.approx(measured[column][f"('{name}', {gpus})"]["null"], abs=6e-4)


def test_a_job_leaves_nodes_out_that_do_not_help() -> None:
    job = job_of("Transformer", 1.0, 1.0)
    assert job.speed("p3.2xlarge", 2) == job.speed("p3.2xlarge", 1) == 5.446
    assert job.speed("p3.2xlarge", 6) == pytest.approx((7.784 + 13.030) / 2)
    assert job.speed("p3.2xlarge", 0) == job.speed("g4dn.xlarge", 4) == 0.0
    with pytest.raises(OptionError, match="model must be one of"):
        Job("BERT", 1.0, 1.0)
    with pytest.raises(OptionError, match="> 0"):
        Job("LM", 0.0, 1.0)


def test_the_page_is_made_from_a_quick_run_and_nothing_is_run_twice(tmp_path: Path) -> None:
    seen: list[str] = []
    written = evaluate(tmp_path / "out", tmp_path, quick=True, progress=lambda what, *_: seen.append(what))
    text = written.read_text(encoding="utf-8")
    assert written.name == "fleet-evaluation.md"
    for words in (
        "not a measurement",
        "## Claims",
        "## World: presence",
        "$ per finished job",
        "cheapest-hour",
    ):
        assert words in text
    assert (tmp_path / "evaluation" / "fleet-dollars.svg").exists()
    files = sorted((tmp_path / "out" / "fleet").iterdir())
    stamps = [file.stat().st_mtime_ns for file in files]
    assert evaluate(tmp_path / "out", tmp_path, quick=True).read_text(encoding="utf-8") == text
    assert [file.stat().st_mtime_ns for file in files] == stamps
