"""What shared aggregators save on a trace, by every rule of scaling, and the case study of scaling."""

import numpy as np
import pytest

from ebbflow.infra.simulation.traces.generators import philly_like
from ebbflow.planners.aggregation.model import AggregatorPool
from ebbflow.planners.aggregation.simulator import (
    IdealPacking,
    OnDemand,
    Periodic,
    PrivateServers,
    ServerPolicy,
    ServerUsage,
    simulate,
)
from ebbflow.planners.aggregation.workload import (
    MODELS,
    REDUCTION_RATE,
    TraceJob,
    WorkloadOptions,
    model_profile,
    with_profiles,
)
from ebbflow.planners.errors import OptionError
from tests.planners.aggregation.pools import profile

SPAN = 43_200.0  # s
PUBLISHED = 0.527  # of the server time is saved on the trace of the source
BAND = (0.45, 0.9)  # of ours, over execution times from the calibrated ones to four times as long


def _trace(slower: float) -> list[TraceJob]:
    rng = np.random.default_rng(1)
    work = philly_like(rng, 100, span=SPAN, longest=2 * SPAN)
    rows = [(one.id, one.arrival, one.gpus, one.duration) for one in work.jobs]
    return with_profiles(rows, rng, WorkloadOptions(reduction_rate=REDUCTION_RATE / slower))


@pytest.fixture(scope="module", params=[1.0, 4.0])
def usages(request: pytest.FixtureRequest) -> dict[str, ServerUsage]:
    trace = _trace(request.param)
    policies: dict[str, ServerPolicy] = {
        "private": PrivateServers(),
        "on-demand": OnDemand(),
        "periodic": Periodic(threshold=None),
        "hybrid": Periodic(),
        "ideal": IdealPacking(),
    }
    return {name: simulate(trace, policy, end_s=SPAN) for name, policy in policies.items()}


def test_sharing_saves_server_time(usages: dict[str, ServerUsage]) -> None:
    """The direction that is published; the number depends on how busy private servers are, which is not."""
    assert BAND[0] < PUBLISHED < BAND[1]
    for name in ("on-demand", "periodic", "hybrid"):
        assert BAND[0] < usages[name].saving < BAND[1], name
        filled = [
            one for one in usages[name].samples if one[0] > 3600
        ]  # the first trainings have a server each
        assert sum(allocated < requested for _, requested, allocated in filled) > 0.99 * len(filled), name
    assert usages["private"].saving == 0
    assert usages["on-demand"].saving < usages["ideal"].saving


def test_what_each_rule_of_scaling_costs(usages: dict[str, ServerUsage]) -> None:
    assert usages["on-demand"].worst_ratio <= 1
    assert usages["on-demand"].over_limit_s == 0
    assert usages["hybrid"].over_limit_s <= usages["periodic"].over_limit_s
    assert usages["periodic"].over_limit_s > 0
    assert usages["hybrid"].moves > 0


def test_execution_times_are_calibrated() -> None:
    """One server of VGG19 with two workers is busy for 16 % of the iteration, as the source measured."""
    tasks = sum(size * 2 / REDUCTION_RATE for size in MODELS["vgg19"].sizes())
    assert tasks / MODELS["vgg19"].iteration_s == pytest.approx(0.16)
    assert {name: (len(one.sizes()), sum(one.sizes())) for name, one in MODELS.items()} == {
        "alexnet": (17, 236_000_000),
        "vgg19": (39, 548_000_000),
        "awd-lm": (14, 396_000_000),
        "bert": (393, 1_278_000_000),
    }


def test_an_iteration_is_as_long_as_its_busiest_server() -> None:
    made = model_profile("a", "vgg19", workers=40, iteration_s=1.0)
    assert made.iteration_us > 2_000_000
    assert made.requested_servers == 40
    with pytest.raises(OptionError, match="model must be one of alexnet, vgg19, awd-lm, bert, not 'gpt'"):
        model_profile("a", "gpt", 1, 1.0)


def _case() -> list[TraceJob]:
    vgg = profile("vgg", 1_200_000, [600_000, 300_000, 200_000, 200_000], servers=2)
    alex = profile("alex", 160_000, [12_000, 8_000, 8_000], servers=2)
    return [TraceJob(0.0, 60.0, vgg), TraceJob(11.0, 31.0, alex)]


def test_the_case_study_of_scaling() -> None:
    """Two aggregators; three from 27 s, 100 iterations after the second training came; two after it ended at 42 s."""

    def measure(pool: AggregatorPool, job_id: str) -> float:
        shares = any(len(pool.aggregators[one].tasks) > 1 for _, one in pool.placed(job_id))
        return 0.22 if job_id == "alex" and shares else 0.0

    usage = simulate(_case(), OnDemand(measure=measure), sample_s=1.0)
    counts = {at: allocated for at, _, allocated in usage.samples}
    assert [counts[at] for at in (5, 12, 26, 28, 41, 43, 59)] == [2, 2, 2, 3, 3, 2, 2]
    assert usage.moves == 3


def test_usage_is_the_integral_over_time() -> None:
    usage = simulate(_case(), OnDemand(), sample_s=1.0)
    assert usage.requested_s == pytest.approx(60 * 2 + 31 * 2)
    assert usage.allocated_s == pytest.approx(60 * 2)
    assert usage.saving == pytest.approx(31 * 2 / 182)
    assert simulate([], OnDemand()).samples == ()
    with pytest.raises(OptionError, match="sample_s must be positive and window at least 1, not 0 and 100"):
        simulate([], OnDemand(), sample_s=0)
    with pytest.raises(OptionError, match="period_s must be positive, not 0"):
        Periodic(0)
    with pytest.raises(OptionError, match="gpus_per_worker must be at least 1, not 0"):
        WorkloadOptions(gpus_per_worker=0)
