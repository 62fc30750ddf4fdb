"""Comparisons: what runs, what is cached, and that totals in equal totals out."""

import json
from math import inf, nan
from pathlib import Path

import numpy as np
import pytest

from ebbflow.infra.errors import WorkloadError
from ebbflow.infra.simulation.engine import simulate
from ebbflow.infra.simulation.faults import Failures, Stragglers, with_failures
from ebbflow.infra.simulation.jobs.plain import LinearSpeed
from ebbflow.infra.simulation.protocols import Saves
from ebbflow.infra.simulation.traces.cluster import Cluster
from ebbflow.planners.communication.dag import CommOp, ComputeOp, Dependency, TrainingDag
from ebbflow.planners.communication.recorded import RecordedTraining
from ebbflow.planners.errors import OptionError
from ebbflow.planners.model.scheduling import App
from ebbflow.planners.scheduling.catalogue import ENTRIES
from ebbflow.planners.scheduling.gangs.ordered import srtf
from ebbflow.planners.scheduling.locality import Level, Slowdown
from ebbflow.tasks.simulation import runs as runs_module
from ebbflow.tasks.simulation.informed import ReportedSpeed
from ebbflow.tasks.simulation.inputs import Inputs
from ebbflow.tasks.simulation.records import METRICS, details, public
from ebbflow.tasks.simulation.request import SimulationRequest
from ebbflow.tasks.simulation.runs import planned, run_all
from ebbflow.tasks.simulation.sources import sources

FIXTURES = Path(__file__).parents[2] / "fixtures" / "training"
JOBS = """id,arrival_s,gpus,duration_s,min_gpus,max_gpus
a,0,4,3600,,
b,10,2,1800,1,4
c,20,1,600,,
d,30,8,900,,
e,40,1,7200,,
"""


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "home"
    monkeypatch.setenv("EBBFLOW_HOME", str(folder))
    return folder


@pytest.fixture
def jobs(tmp_path: Path) -> str:
    path = tmp_path / "jobs.csv"
    path.write_text(JOBS, encoding="utf-8")
    return str(path)


def compare(
    workload: str, policies: str, seeds: int = 1, *, fresh: bool = False, processes: int = 1, **options
):
    given = {"cluster": "2x4", "workload": workload, "policy": policies, "seeds": seeds, **options}
    inputs = Inputs(SimulationRequest(**given))
    return run_all(inputs, planned(inputs), fresh=fresh, processes=processes)


def finishes(record) -> dict[str, float]:
    return {job["name"]: job["finish"] for job in record["jobs"]}


def test_every_policy_for_durations_finishes_every_job(jobs: str) -> None:
    names = ",".join(entry.name for entry in ENTRIES if "durations" in entry.kinds)
    for record in compare(jobs, names):
        assert set(finishes(record)) == set("abcde"), record["policy"]
        assert record["figures"]["gpu_hours"] >= 33_000 / 3600
        assert 0 < record["utilisation"] <= 1


def test_a_result_has_the_promised_keys_and_finite_figures(jobs: str) -> None:
    (record,) = compare(jobs, "srtf")
    result = public(record)
    assert set(result) == {"workload", "policy", "seed", "jobs", "rejected", *METRICS}
    assert set(result["jobs"][0]) == {"name", "arrival", "start", "finish", "restarts", "rho"}
    assert (result["workload"], result["policy"], result["seed"]) == ("jobs", "srtf", 0)
    assert all(isinstance(result[name], float) for name in METRICS)
    json.dumps([result, details(record)], allow_nan=False)


def test_jobs_larger_than_the_cluster_are_rejected_with_a_reason_and_counted(tmp_path: Path) -> None:
    path = tmp_path / "jobs.csv"
    path.write_text(JOBS + "big,50,9,100,,\n", encoding="utf-8")
    for record in compare(str(path), "tiresias,themis,max-min,drf"):
        (rejected,) = record["rejected"]
        assert rejected["name"] == "big"
        assert "needs 9 GPUs at once; the cluster never has more than 8" in rejected["reason"]
        assert len(record["jobs"]) + 1 == record["submitted"] == 6


def test_a_cluster_too_small_for_everyone_gives_no_figures_and_all_reasons(jobs: str) -> None:
    (record,) = compare("tiresias-testbed:1", "yarn-cs", cluster="1x1")
    assert len(record["rejected"]) == 240
    assert len(record["jobs"]) == 240


def test_profiles_run_as_in_adaptdls_simulator() -> None:
    tiresias, optimus = compare("pollux-3", "tiresias,optimus", cluster="16x4")
    assert tiresias["figures"]["avg_jct_s"] == pytest.approx(3876.25625, abs=1e-9)
    assert optimus["figures"]["avg_jct_s"] == pytest.approx(3944.00625, abs=1e-9)
    assert tiresias["figures"]["makespan_s"] == 54750


def test_a_job_that_asks_for_more_gpus_than_its_application_gains_from_is_run_as_asked(
    tmp_path: Path,
) -> None:
    path = tmp_path / "two.csv"
    path.write_text("name,time,application,num_replicas,batch_size\nncf-0,10,ncf,2,32768\n", encoding="utf-8")
    tiresias, fifo = compare(str(path), "tiresias,fifo-perf")
    assert finishes(fifo) == finishes(tiresias)


def test_rounds_run_as_in_gavels_simulator(tmp_path: Path) -> None:
    cluster = tmp_path / "gavel.yaml"
    cluster.write_text(
        "nodes:\n  - {count: 8, gpus: 1, type: v100, price: 2.48}\n  - {count: 16, gpus: 1, type: p100}\n"
        "  - {count: 24, gpus: 1, type: k80}\n",
        encoding="utf-8",
    )
    table = FIXTURES / "gavel" / "simulation_throughputs.json"
    (record,) = compare(
        str(FIXTURES / "gavel/jobs-96.trace"), "fifo-perf", cluster=str(cluster), throughputs=table
    )
    assert record["figures"]["makespan_s"] == pytest.approx(72319.858, abs=5e-4)
    assert record["figures"]["avg_jct_s"] == pytest.approx(19526.854, abs=5e-4)
    assert record["figures"]["dollars"] == pytest.approx(8 * 2.48 * 72319.858 / 3600, rel=1e-6)


def test_what_was_run_before_comes_from_the_cache(
    jobs: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    first = compare(jobs, "srtf,random", 2)
    again = compare(jobs, "srtf,random", 2)
    assert [record["cached"] for record in first] == [False] * 4
    assert [record["cached"] for record in again] == [True] * 4
    assert [{**record, "cached": False} for record in again] == first
    copy = tmp_path / "copy.csv"
    copy.write_text(JOBS, encoding="utf-8")
    (same,) = compare(str(copy), "srtf")
    assert (same["cached"], same["workload"]) == (True, "copy")  # content counts, not the name
    copy.write_text(JOBS.replace("7200", "7300"), encoding="utf-8")
    assert [record["cached"] for record in compare(str(copy), "srtf")] == [False]
    assert [record["cached"] for record in compare(jobs, "srtf", cluster="3x4")] == [False]
    assert [record["cached"] for record in compare(jobs, "srtf", restart_delay=1.0)] == [False]
    assert [record["cached"] for record in compare(jobs, "srtf", fresh=True)] == [False]
    monkeypatch.setattr(runs_module, "_code", lambda: "another version")
    assert [record["cached"] for record in compare(jobs, "srtf")] == [False]


def test_what_was_finished_before_a_failure_is_kept(jobs: str, monkeypatch: pytest.MonkeyPatch) -> None:
    run_one = runs_module.run_one

    def dies(inputs, run, ended=None):
        if run.policy == "srsf":
            raise KeyboardInterrupt
        return run_one(inputs, run, ended)

    monkeypatch.setattr(runs_module, "run_one", dies)
    with pytest.raises(KeyboardInterrupt):
        compare(jobs, "srtf,srsf,las")
    monkeypatch.setattr(runs_module, "run_one", run_one)
    assert [record["cached"] for record in compare(jobs, "srtf,srsf,las")] == [True, False, False]


def test_searches_run_under_the_policies_that_divide_gpus(tmp_path: Path) -> None:
    names = [entry.name for entry in ENTRIES if "searches" in entry.kinds and entry.name != "themis"]
    assert {"optimus", "drf", "gandiva", "equal-share"} <= set(names)
    for record in compare("themis-w1:1", ",".join(names), cluster="16x4"):
        assert len(record["jobs"]) == 50
        assert record["figures"]["worst_rho"] > 0.5
        assert 600 < record["figures"]["gpu_hours"] < 800  # 640 of work, and pauses
    with pytest.raises(OptionError, match=r"policy tiresias needs .*; themis-w1:1 has none"):
        compare("themis-w1:1", "tiresias")


def test_searches_lose_work_with_their_nodes_and_slow_ones_are_slow(tmp_path: Path) -> None:
    options = {"cluster": "16x4", "restart_delay": 0.0}
    (plain,) = compare("themis-w2:1", "drf", **options)
    (slow,) = compare("themis-w2:1", "drf", stragglers=Stragglers(1.0, 2.0), **options)
    (lossy,) = compare("themis-w2:1", "drf", failures=Failures(0.05, 600), **options)
    assert slow["figures"]["avg_jct_s"] > 1.8 * plain["figures"]["avg_jct_s"]
    assert lossy["lost_gpu_hours"] > 0
    assert len(lossy["jobs"]) == 50


def test_two_processes_give_what_one_gives(jobs: str) -> None:
    alone = compare(jobs, "srtf,themis", 2, fresh=True)
    pair = compare(jobs, "srtf,themis", 2, fresh=True, processes=2)
    for one, other in zip(alone, pair, strict=True):
        assert (one["policy"], one["seed"], one["jobs"]) == (other["policy"], other["seed"], other["jobs"])


def test_progress_counts_every_job_once(jobs: str) -> None:
    inputs = Inputs(SimulationRequest(cluster="2x4", workload=jobs, policy="srtf,srsf", seeds=2))
    seen = []
    run_all(inputs, planned(inputs), progress=lambda what, done, total: seen.append((done, total)))
    assert seen[0] == (0, 20)
    assert seen[-1] == (20, 20)
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)


def test_failures_go_on_until_the_last_job_is_done(tmp_path: Path) -> None:
    path = tmp_path / "long.csv"
    path.write_text("id,arrival_s,gpus,duration_s\na,0,4,400000\n", encoding="utf-8")
    failures = Failures(0.1, 600)
    (record,) = compare(str(path), "srtf", cluster="1x4", failures=failures, checkpoint_interval=3600.0)
    (job,) = record["jobs"]
    truth = simulate(
        Inputs(SimulationRequest()).load(sources(str(path))[0], 0).workload,
        with_failures(Cluster.grid(1, 4), failures, 0, 1e7),
        srtf(),
        start_delay=0.0,
        saves=Saves(every=3600.0),
    )
    assert job["finish"] == truth.jobs[0].finish > 400_000
    assert job["restarts"] == truth.jobs[0].restarts > 2
    assert record["lost_gpu_hours"] > 0


def test_stragglers_and_failures_cost_time(jobs: str) -> None:
    (plain,) = compare(jobs, "srtf")
    (slow,) = compare(jobs, "srtf", stragglers=Stragglers(1.0, 3.0))
    assert finishes(slow)["c"] - 20 == pytest.approx(3 * (finishes(plain)["c"] - 20))
    assert slow["figures"]["makespan_s"] > 2 * plain["figures"]["makespan_s"]


def test_a_spot_trace_makes_the_cluster_elastic_and_its_end_is_told(jobs: str, tmp_path: Path) -> None:
    trace = tmp_path / "nodes.csv"
    trace.write_text("0,add,s1\n600000,add,s2\n1800000,remove,s1\n", encoding="utf-8")
    (record,) = compare(jobs, "srtf", cluster="1x4", spot_trace=trace, notice=60.0)
    times, gpus = record["usage"]["capacity"]
    assert (times, gpus) == ([0.0, 600.0, 1800.0], [8.0, 12.0, 8.0])
    (note,) = record["notes"]
    assert note.startswith("the spot trace ends at 1,800 s; the nodes of that moment stay until the end at ")
    assert set(finishes(record)) == set("abcde")
    (alone,) = compare(jobs, "srtf", cluster="0x4", spot_trace=trace)
    assert {job["name"] for job in alone["jobs"]} | {job["name"] for job in alone["rejected"]} == set("abcde")


PRICES = """timestamp,availability_zone,instance_type,product,spot_price_usd_per_hour
2020-01-01T00:00:00Z,z1,p3,Linux/UNIX,1.0
2020-01-01T01:00:00Z,z1,p3,Linux/UNIX,2.0
2020-01-02T00:00:00Z,z1,p3,Linux/UNIX,2.0
"""


def priced(tmp_path: Path, start: str, market: str = "spot") -> dict[str, object]:
    cluster, prices = tmp_path / "cluster.yaml", tmp_path / "prices.csv"
    cluster.write_text(
        f"nodes: [{{count: 2, gpus: 4, type: p3, zone: z1, price: 5, market: {market}}}]\nstart: {start}\n",
        encoding="utf-8",
    )
    prices.write_text(PRICES, encoding="utf-8")
    return {"cluster": str(cluster), "prices": prices}


def test_dollars_at_spot_prices_beside_those_on_demand(jobs: str, tmp_path: Path) -> None:
    (record,) = compare(jobs, "srtf", **priced(tmp_path, "2020-01-01T00:00:00Z"))
    last = record["last_finish"] / 3600
    assert record["figures"]["dollars"] == pytest.approx(2 * (1 + 2 * (last - 1)))
    assert record["dollars_on_demand"] == pytest.approx(2 * 5 * last)


def test_a_price_history_that_ends_too_early_or_begins_too_late_is_refused(jobs: str, tmp_path: Path) -> None:
    with pytest.raises(
        WorkloadError, match=r"prices end 3600 s after the simulation begins, which lasts \d+ s"
    ):
        compare(jobs, "srtf", **priced(tmp_path, "2020-01-01T23:00:00Z"))
    with pytest.raises(WorkloadError, match="86400 s after they are needed"):
        compare(jobs, "srtf", **priced(tmp_path, "2019-12-31T00:00:00Z"))
    with pytest.raises(OptionError, match="needs nodes with market: spot"):
        compare(jobs, "srtf", **priced(tmp_path, "2020-01-01T00:00:00Z", "on-demand"))


def test_what_does_not_go_together_is_refused_before_anything_runs(jobs: str, home: Path) -> None:
    trace = str(FIXTURES / "shockwave/jobs-120.trace")
    table = FIXTURES / "shockwave" / "tacc_throughputs.json"
    with pytest.raises(OptionError, match="policy pollux needs measured profiles"):
        compare(jobs, "srtf,pollux")
    with pytest.raises(OptionError, match="leave out --interval"):
        compare(trace, "srtf", cluster="8x4", throughputs=table, interval=60.0)
    with pytest.raises(OptionError, match="leave out --failures"):
        compare(trace, "srtf", cluster="8x4", throughputs=table, failures=Failures(0.1))
    with pytest.raises(OptionError, match="--seeds must be >= 1"):
        compare(jobs, "srtf", 0)
    with pytest.raises(OptionError, match="--jobs must be >= 1"):
        compare(jobs, "srtf", processes=0)
    with pytest.raises(OptionError, match="notice needs --spot-trace"):
        SimulationRequest(notice=5.0)
    with pytest.raises(OptionError, match="checkpoint interval must be > 0"):
        SimulationRequest(checkpoint_interval=0.0)
    for name, value, rule in (
        ("notice", nan, "notice must be a finite number >= 0"),
        ("restart_delay", nan, "restart delay must be a finite number >= 0"),
        ("restart_delay", -1.0, "restart delay must be a finite number >= 0"),
        ("interval", inf, "interval must be a finite number > 0"),
        ("interval", 0.0, "interval must be a finite number > 0"),
        ("interference", 1.0, "interference must be >= 0 and < 1"),
    ):
        with pytest.raises(OptionError, match=rule):
            SimulationRequest(**{name: value})
    assert not home.exists()


def profiled(folder: Path, **sizes: float) -> Path:
    """Write what a training of each model has recorded that exchanges so many bytes after 0.1 s."""
    folder.mkdir()
    for model, size in sizes.items():
        dag = TrainingDag(
            (ComputeOp("backward", 0.1), ComputeOp("update", 0.0)),
            (CommOp("bucket/0", "all-reduce", size, 2),),
            (Dependency("backward", "bucket/0"), Dependency("bucket/0", "update")),
        )
        (folder / f"{model}.json").write_text(RecordedTraining(dag, 2, 0.1, 10).to_json())
    return folder


def test_models_with_recorded_communication_bid_by_what_placements_cost_them(tmp_path: Path) -> None:
    folder = profiled(tmp_path / "recorded", cifar10=1e8, ncf=1e3)
    inputs = Inputs(SimulationRequest(communication=folder, links="64gbit,8gbit"))
    app = App("a", model="cifar10", max_gpus=16, remaining=10.0, speed=LinearSpeed(1))
    mine = ReportedSpeed(app=app, alone=1.0, slowdown=Slowdown(), cost=inputs.costs["cifar10"], per_node=4)
    gpus = np.array([2, 8])
    # two send 0.1 GB once at 1 GB/s instead of 8, beside the 0.5 s that an iteration takes on GPUs of one node
    assert mine.remaining(gpus, Level.RACK) == pytest.approx([10 * (0.5 + 0.0875), 10 * 0.125], rel=1e-3)
    assert mine.remaining(gpus, Level.MACHINE) == pytest.approx([10 * 0.5, 10 * 0.125])
    plain = ReportedSpeed(app=app, alone=1.0, slowdown=Slowdown())
    assert plain.remaining(gpus, Level.RACK) == pytest.approx([11 * 0.5, 11 * 0.125])


def test_the_recorded_communication_of_models_changes_who_gets_what(tmp_path: Path) -> None:
    rows = (FIXTURES / "adaptdl" / "workloads" / "workload-1.csv").read_text().splitlines()
    (tmp_path / "few.csv").write_text("\n".join(rows[:9]) + "\n")
    few, folder = str(tmp_path / "few.csv"), profiled(tmp_path / "recorded", cifar10=1e9, ncf=1e3)
    (fixed,) = compare(few, "themis", cluster="4x2")
    (known,) = compare(few, "themis", cluster="4x2", communication=folder, links="64gbit,1gbit")
    assert sorted(finishes(fixed)) == sorted(finishes(known))
    assert finishes(fixed) != finishes(known)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"links": "64gbit"}, "the other way round"),
        ({"communication": Path("x")}, "--communication needs --links"),
        ({"communication": Path("x"), "links": "64gbit"}, r"NODE,RACK\[,CROSS\]"),
        ({"communication": Path("x"), "links": "1gbit,2parsec"}, "--links must be a rate such as 200mbit"),
    ],
)
def test_links_and_communication_are_given_together(options: dict[str, object], said: str) -> None:
    with pytest.raises(OptionError, match=said):
        SimulationRequest(**options)


def test_recorded_communication_that_is_none_is_refused(tmp_path: Path, jobs: str) -> None:
    folder = tmp_path / "recorded"
    folder.mkdir()
    options = {"communication": folder, "links": "64gbit,1gbit"}
    with pytest.raises(OptionError, match=r"has no MODEL\.json of a recorded training"):
        compare("pollux-1", "themis", **options)
    (folder / "cifar10.json").write_text("{}")
    with pytest.raises(OptionError, match=r"cifar10\.json: not a recorded training"):
        compare("pollux-1", "themis", **options)
    with pytest.raises(OptionError, match="workloads with profiles, such as pollux-1"):
        compare(jobs, "themis", communication=profiled(tmp_path / "more", ncf=1.0), links="64gbit,1gbit")
