"""AdaptDL's simulator, reproduced: probes of speed and progress, and every job's completion time."""

import csv
from pathlib import Path
from statistics import median
from time import process_time

import pytest

from ebbflow.infra.simulation.engine import Result, simulate
from ebbflow.infra.simulation.jobs.adaptdl import adaptdl_jobs
from ebbflow.infra.simulation.jobs.profiles import Profiles
from ebbflow.infra.simulation.traces.cluster import Cluster
from ebbflow.infra.simulation.traces.workloads import Workload, read_adaptdl
from ebbflow.planners.model.scheduling import Policy
from ebbflow.planners.scheduling.gangs.optimus import Optimus
from ebbflow.planners.scheduling.gangs.tiresias import Tiresias
from ebbflow.planners.scheduling.placement import most_free_first

DATA = Path(__file__).parents[2] / "fixtures" / "training" / "adaptdl"


@pytest.fixture(scope="module")
def profiles() -> Profiles:
    return Profiles(DATA / "traces")


def workload(number: int, profiles: Profiles) -> Workload:
    return read_adaptdl(DATA / "workloads" / f"workload-{number}.csv", profiles)


def tiresias(*thresholds: float) -> Tiresias:
    return Tiresias(thresholds, order="insertion", placer=most_free_first)


def policies() -> dict[str, Policy]:
    return {"tiresias": tiresias(57_600), "optimus": Optimus()}


def run(
    jobs: Workload, profiles: Profiles, policy: Policy, nodes: int = 16, delay: float = 30, **options
) -> Result:
    return simulate(
        jobs,
        Cluster.grid(nodes, 4),
        policy,
        models=adaptdl_jobs(profiles, **options),
        tick=60,
        restart_delay=delay,
    )


def published(policy: str, number: int) -> list[float]:
    with (DATA / "published.csv").open() as file:
        rows = [
            row for row in csv.DictReader(file) if (row["policy"], row["workload"]) == (policy, str(number))
        ]
    assert len(rows) == 1
    return [float(jct) for jct in rows[0]["jcts_s"].split()]


@pytest.mark.parametrize(
    ("application", "counts", "local", "step", "sync"),
    [
        ("cifar10", (4, 2), 342, 0.26877741386305615, 0.020076066023898574),
        ("cifar10", (4, 4, 3, 1), 100, 0.1589060576338517, 0.07623973232068512),
        ("cifar10", (4, 1, 3, 4), 100, 0.1724947772527996, 0.09219408577366879),
        ("cifar10", (4, 4, 4, 4, 4), 100, 0.17808348567862262, 0.09370466953076814),
        ("cifar10", (2, 1, 2, 1, 1), 64, 0.1434588623046875, 0.08493463954925538),
        ("bert", (4, 4, 4, 4, 2), 5, 1.852747067809105, 1.3902279586791992),
        ("imagenet", (4,) * 8, 200, 1.0932517528533936, 0.0950473083496094),
        ("deepspeech2", (4, 4, 4, 3, 2, 1), 30, 1.3705705975729323, 0.46116900684417245),
        ("ncf", (1,), 20000, 0.01631164394956927, 0.0003369780357396403),
        ("yolov3", (4, 3, 4, 3, 4, 2), 5, 1.2134696543216705, 0.8159183807373046),
    ],
)
def test_true_speed(profiles, application, counts, local, step, sync):
    assert profiles[application].speed(counts, local) == pytest.approx((step, sync), rel=1e-14)


@pytest.mark.parametrize(
    ("application", "total", "epoch", "sqr", "var"),
    [
        ("cifar10", 2052, 0, 10.740173318740531, 5.498315492126223),
        ("cifar10", 300, 57, 0.03606904855579027, 3.048471510006439),
        ("deepspeech2", 324, 10, 0.019066233230502404, 0.9797553996471084),
        ("yolov3", 100, 49, 11.92557068050898, 16189.48744052745),
    ],
)
def test_gradient_statistics(profiles, application, total, epoch, sqr, var):
    assert profiles[application].gradient(total, epoch) == pytest.approx((sqr, var), rel=1e-14)


@pytest.mark.parametrize(
    ("application", "epochs", "first", "last"),
    [
        ("bert", 2, 7387, 14774),
        ("cifar10", 100, 390.71438596642224, 39062.90816659533),
        ("deepspeech2", 80, 356.7273653697997, 28536),
        ("imagenet", 90, 6405.92717521726, 576525.594895604),
        ("ncf", 10, 19417.594235104003, 194174),
        ("yolov3", 50, 2068.9729098930034, 103443.97796253164),
    ],
)
def test_epoch_boundaries(profiles, application, epochs, first, last):
    profile = profiles[application]
    assert (profile.epochs, profile.boundaries[0], profile.boundaries[-1]) == (epochs, first, last)


@pytest.mark.parametrize(
    ("application", "constants"),
    [
        ("bert", (12, 384, 4, 12)),
        ("cifar10", (128, 4096, 32, 1024)),
        ("deepspeech2", (20, 640, 10, 80)),
        ("imagenet", (200, 12800, 20, 200)),
        ("ncf", (256, 32768, 32, 32768)),
        ("yolov3", (8, 512, 4, 8)),
    ],
)
def test_constants_of_applications(profiles, application, constants):
    profile = profiles[application]
    assert (profile.first_batch, profile.last_batch, profile.local_min, profile.local_max) == constants


@pytest.mark.parametrize(
    ("application", "total", "gpus", "split"),
    [
        ("cifar10", 2048, 6, (342, 0)),
        ("cifar10", 2048, 1, (1024, 1)),
        ("ncf", 32768, 1, (16384, 1)),
        ("deepspeech2", 320, 6, (54, 0)),
        ("imagenet", 6400, 32, (200, 0)),
    ],
)
def test_batch_splits(profiles, application, total, gpus, split):
    assert profiles[application].split(total, gpus) == split


# AdaptDL's results: average, p50, p90, p99, max, makespan, mean restarts, GPU-hours, intervals
TABLE = {
    ("tiresias", 1): (2473.65, 705.5, 3770.2, 47840.80, 56121, 83644, 0.1875, 1264.47, 1396),
    ("tiresias", 2): (5144.9625, 1469.5, 10179.6, 58422.54, 69234, 85127, 0.1875, 1153.93, 1428),
    ("tiresias", 3): (3876.25625, 1475.0, 9017.9, 22420.72, 29219, 54750, 0.1375, 540.43, 926),
    ("tiresias", 4): (3280.2625, 743.5, 3889.1, 65577.12, 79517, 98626, 0.19375, 1310.30, 1649),
    ("optimus", 1): (4087.0625, 2069.0, 10291.5, 46411.72, 55377, 72315, 5.66875, 1272.73, 1208),
    ("optimus", 2): (6913.875, 3007.0, 21919.5, 52703.74, 61888, 63726, 5.34375, 1105.23, 1071),
    ("optimus", 3): (3944.00625, 904.0, 12741.9, 20014.49, 21489, 44508, 2.51875, 513.60, 755),
    ("optimus", 4): (5967.75, 2310.0, 20253.8, 58399.88, 65754, 68227, 3.61875, 1193.25, 1142),
}


def figures(result: Result) -> tuple[float, ...]:
    measured = result.summary()
    names = ("avg_jct_s", "p50_jct_s", "p90_jct_s", "p99_jct_s", "max_jct_s", "makespan_s", "restarts_mean")
    return (*(measured[name] for name in names), measured["gpu_hours"], result.intervals)


@pytest.mark.parametrize(("policy", "number"), TABLE)
def test_every_completion_time_is_the_published_one(profiles, policy, number):
    result = run(workload(number, profiles), profiles, policies()[policy])
    assert [job.jct for job in result.jobs] == published(policy, number)
    expected = TABLE[policy, number]
    assert figures(result) == pytest.approx(expected, abs=0.0051)
    assert result.intervals == expected[-1]


SMALL = {
    "tiresias": (
        "953 4182 122 2545 2976 78 86 115 709 124 1544 30747 1569 2274 4584 4700 589 1660 477 282",
        (3015.8, 1248.5, 4595.6, 25798.07, 30747, 32244, 0.15, 279.93, 540),
    ),
    "optimus": (
        "1693 6587 122 7232 2276 78 86 115 4675 124 4185 29861 4445 4329 4232 4135 109 3725 117 102",
        (3911.4, 3000.5, 6651.5, 25561.49, 29861, 31358, 7.1, 278.23, 525),
    ),
}


@pytest.mark.parametrize("policy", SMALL)
def test_small_case_on_eight_nodes(profiles, policy):
    result = run(workload(1, profiles).first(20), profiles, policies()[policy], nodes=8)
    jcts, expected = SMALL[policy]
    assert [job.jct for job in result.jobs] == [float(jct) for jct in jcts.split()]
    assert figures(result) == pytest.approx(expected, abs=0.0051)


@pytest.mark.parametrize(
    ("slip", "policy", "average"),
    [
        ("no delay", "tiresias", 2411.39),
        ("no delay", "optimus", 3641.16),
        ("no rounding", "tiresias", 2470.55),
        ("no rounding", "optimus", 4080.79),
        ("no demotion", "tiresias", 4772.48),
    ],
)
def test_options_move_the_average_as_the_rule_they_drop(profiles, slip, policy, average):
    chosen = tiresias() if slip == "no demotion" else policies()[policy]
    result = run(
        workload(1, profiles),
        profiles,
        chosen,
        delay=0 if slip == "no delay" else 30,
        whole_seconds=slip != "no rounding",
    )
    assert result.summary()["avg_jct_s"] == pytest.approx(average, abs=0.0051)


class Recorded:
    """A policy, and what it granted whom first."""

    def __init__(self, policy: Policy) -> None:
        self.policy, self.name = policy, policy.name
        self.elastic = getattr(policy, "elastic", False)
        self.first: dict[str, tuple[float, list[tuple[int, int]]]] = {}

    def decide(self, view, memory, rng):
        decision = self.policy.decide(view, memory, rng)
        number = {node.id: at for at, node in enumerate(view.capacity.nodes)}
        for name, grant in decision.grants.items():
            if grant.placement:
                placed = [(number[node], gpus) for node, gpus in grant.placement]
                self.first.setdefault(name, (view.now, placed))
        return decision


@pytest.mark.parametrize(
    ("policy", "placed"),
    [
        (
            "tiresias",
            {
                "cifar10-0": (120, [(0, 4), (1, 2)]),
                "deepspeech2-1": (120, [(2, 4), (3, 2)]),
                "ncf-2": (180, [(4, 1)]),
                "deepspeech2-3": (300, [(4, 4), (5, 4), (6, 4)]),
                "cifar10-4": (360, [(7, 4), (8, 4), (9, 4), (10, 4)]),
            },
        ),
        (
            "optimus",
            {
                "cifar10-0": (120, [(0, 4), (1, 4)]),
                "deepspeech2-1": (120, [(2, 4), (3, 4), (4, 2)]),
                "deepspeech2-3": (300, [(5, 4), (6, 4), (7, 4)]),
                "cifar10-4": (360, [(8, 4), (9, 4), (10, 3)]),
            },
        ),
    ],
)
def test_first_placements(profiles, policy, placed):
    recorded = Recorded(policies()[policy])
    run(workload(1, profiles).first(5), profiles, recorded)
    assert {name: recorded.first[name] for name in placed} == placed


@pytest.mark.parametrize(("policy", "limit"), [("tiresias", 0.5), ("optimus", 1.0)])
def test_processor_time_of_a_run(profiles, policy, limit):
    """Median of three; files are read and placements triangulated before, as in the first of several policies."""
    jobs = workload(1, profiles)
    run(jobs, profiles, policies()[policy])
    seconds = []
    for _ in range(3):
        began = process_time()
        run(jobs, profiles, policies()[policy])
        seconds.append(process_time() - began)
    assert median(seconds) < limit
