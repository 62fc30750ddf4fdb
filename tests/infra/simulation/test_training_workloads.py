"""Files of training jobs and profiles: every format, and every way in which a row can be wrong."""

import shutil
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ebbflow.infra.errors import WorkloadError
from ebbflow.infra.simulation.jobs.adaptdl import adaptdl_jobs
from ebbflow.infra.simulation.jobs.profiles import Profiles, read_profile
from ebbflow.infra.simulation.traces.cluster import read_spot_trace
from ebbflow.infra.simulation.traces.generators import (
    SERVICE_QUANTILES,
    TESTBED_GPUS,
    philly_like,
    tiresias_testbed,
)
from ebbflow.infra.simulation.traces.workloads import (
    Job,
    Workload,
    jobs_csv,
    nearest,
    read_adaptdl,
    read_jobs,
    read_tiresias,
)
from ebbflow.planners.errors import OptionError

DATA = Path(__file__).parents[2] / "fixtures" / "training"
APPLICATIONS = ["bert", "cifar10", "deepspeech2", "imagenet", "ncf", "yolov3"]
HEADER = "name,time,application,num_replicas,batch_size"


def written(folder: Path, *lines: str) -> Path:
    path = folder / "jobs.csv"
    path.write_text("\n".join(lines) + "\n")
    return path


def test_adaptdl_workloads():
    workload = read_adaptdl(DATA / "adaptdl/workloads/workload-1.csv", APPLICATIONS)
    assert len(workload.jobs) == 160
    assert workload.jobs[0] == Job("cifar10-0", 107, 6, model="cifar10", batch=2048)
    counts = {name: sum(job.model == name for job in workload.jobs) for name in APPLICATIONS}
    assert counts == {"cifar10": 66, "ncf": 68, "deepspeech2": 12, "bert": 7, "yolov3": 3, "imagenet": 4}
    assert max(job.gpus for job in workload.jobs) == 32


def test_tiresias_jobs():
    workload = read_tiresias(DATA / "tiresias/60_job.csv")
    assert len(workload.jobs) == 60
    assert workload.jobs[1] == Job("1", 30, 8, 147, "vgg11", skewed=True)


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ("a,1,cifar10,2", "line 3: has 4 fields; the header has 5"),
        ("a,x,cifar10,2,128", "line 3: time must be a number; got 'x'"),
        ("a,-1,cifar10,2,128", "line 3: time must be >= 0; got -1"),
        ("a,nan,cifar10,2,128", "line 3: time must be finite"),
        ("a,1,cifar10,0,128", "line 3: num_replicas must be a whole number >= 1; got 0"),
        ("a,1,cifar10,1.5,128", "line 3: num_replicas must be a whole number >= 1; got 1.5"),
        (",1,cifar10,1,128", "line 3: name must not be empty"),
        ("first,1,cifar10,1,128", "line 3: job 'first' is already in line 2"),
        ("a,1,cifar100,1,128", "line 3: no profile of application 'cifar100'; the nearest is 'cifar10'"),
    ],
)
def test_malformed_rows_name_line_and_reason(tmp_path, row, reason):
    path = written(tmp_path, HEADER, "first,0,bert,1,12", row)
    with pytest.raises(WorkloadError) as caught:
        read_adaptdl(path, APPLICATIONS)
    assert reason in str(caught.value)
    assert str(path) in str(caught.value)


def test_a_batch_that_was_not_measured_names_its_line(tmp_path):
    path = written(tmp_path, HEADER, "first,0,bert,1,12", "a,1,cifar10,1,8192")
    with pytest.raises(
        WorkloadError, match="line 3: total batch 8192 of cifar10 was not measured; sizes are 12 to 4096"
    ):
        read_adaptdl(path, APPLICATIONS, batches=lambda application: (12, 4096))


def test_the_nearest_application_is_taken_only_if_asked_for(tmp_path):
    path = written(tmp_path, HEADER, "a,1,cifar100,1,128")
    assert read_adaptdl(path, APPLICATIONS, use_nearest=True).jobs[0].model == "cifar10"
    assert nearest("yolo", APPLICATIONS) == "yolov3"
    models = adaptdl_jobs(Profiles(DATA / "adaptdl/traces"))
    with pytest.raises(WorkloadError, match="nearest is 'imagenet'"):
        models(Job("a", 0, 1, model="imagenet1k"))
    with pytest.raises(WorkloadError, match="total batch 8192 of cifar10 was not measured"):
        models(Job("a", 0, 1, model="cifar10", batch=8192))


@pytest.mark.parametrize(
    ("lines", "reason"),
    [
        (["id,arrival_s,gpus"], "line 1: the header lacks duration_s"),
        (["id,arrival_s,gpus,duration_s,colour"], "unknown columns colour"),
        (["id,arrival_s,gpus,duration_s,gpus"], "has gpus twice"),
        (["id,arrival_s,gpus,duration_s"], "has no jobs"),
        (["id,arrival_s,gpus,duration_s", "a,0,1,0"], "line 2: duration_s must be > 0; got 0"),
        (["id,arrival_s,gpus,duration_s", "a,0,1,-5"], "line 2: duration_s must be > 0; got -5"),
        (
            ["id,arrival_s,gpus,duration_s", "a,0,1,1e300"],
            "line 2: duration_s must be at most 1e+13 s; got 1e300",
        ),
        (
            ["id,arrival_s,gpus,duration_s", "a,1.7e18,1,5"],
            "line 2: arrival_s must be at most 1e+13 s; got 1.7e18",
        ),
        (["id,arrival_s,gpus,duration_s,weight", "a,0,1,5,0"], "line 2: weight must be > 0; got 0"),
        (["id,arrival_s,gpus,duration_s,min_gpus,max_gpus", "a,0,4,5,5,8"], "min_gpus <= gpus <= max_gpus"),
    ],
)
def test_malformed_files_of_our_own_format(tmp_path, lines, reason):
    with pytest.raises(WorkloadError) as caught:
        read_jobs(written(tmp_path, *lines))
    assert reason in str(caught.value)


def test_unreadable_files(tmp_path):
    with pytest.raises(WorkloadError, match="cannot be read"):
        read_jobs(tmp_path / "none.csv")
    binary = tmp_path / "binary.csv"
    binary.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(WorkloadError, match="not UTF-8"):
        read_jobs(binary)


names = st.text(st.characters(categories=["L", "N"]), min_size=1, max_size=6)
rows = st.builds(
    Job,
    id=names,
    arrival=st.floats(0, 1e7),
    gpus=st.integers(2, 64),
    duration=st.floats(1e-3, 1e7),
    model=st.sampled_from(["", "resnet50"]),
    team=st.one_of(st.just(""), names),
    weight=st.floats(0.1, 10),
    min_gpus=st.sampled_from([None, 1, 2]),
    max_gpus=st.sampled_from([None, 64, 100]),
)


@given(jobs=st.lists(rows, min_size=1, max_size=5, unique_by=lambda job: job.id))
def test_our_own_format_gives_back_what_was_written(tmp_path_factory, jobs):
    path = tmp_path_factory.mktemp("own") / "jobs.csv"
    path.write_text(jobs_csv(jobs), encoding="utf-8")
    assert read_jobs(path).jobs == tuple(jobs)


@pytest.mark.parametrize(
    ("job", "reason"),
    [
        (Job("a", 0, 1, 0.0), "duration must be > 0"),
        (Job("a", 0, 0, 1.0), "GPUs must be >= 1"),
        (Job("a", -1, 1, 1.0), "arrival must be >= 0"),
        (Job("a", 0, 1, float("nan")), "duration must be > 0"),
        (Job("a", float("nan"), 1, 1.0), "arrival must be >= 0"),
        (Job("a", 1e14, 1, 1.0), "arrival must be >= 0 s and at most"),
    ],
)
def test_jobs_made_by_hand_obey_the_same_rules(job, reason):
    with pytest.raises(WorkloadError, match=reason):
        Workload("w", (job,))


@pytest.mark.parametrize(
    ("file", "old", "new", "reason"),
    [
        ("placements.csv", "\n12,", "\n1x2,", "placement must be digits"),
        ("placements.csv", "\n12,", "\n102,", "placement must be digits"),
        ("scalability.csv", "\n6,6,", "\n6,0,", "num_replicas must be a whole number"),
        ("validation-12.csv", "7387", "99999999", "progress must grow"),
        ("validation-12.csv", "7387", "-1", "progress must be > 0"),
        ("placements.csv", "step_time", "steps", "the header lacks step_time"),
    ],
)
def test_malformed_profiles(tmp_path, file, old, new, reason):
    folder = tmp_path / "bert"
    shutil.copytree(DATA / "adaptdl/traces/bert", folder)
    content = (folder / file).read_text()
    assert old in content
    (folder / file).write_text(content.replace(old, new, 1))
    with pytest.raises(WorkloadError) as caught:
        read_profile(folder)
    assert reason in str(caught.value)
    assert f"{file}, line " in str(caught.value)


def test_profiles_that_are_not_complete(tmp_path):
    with pytest.raises(WorkloadError, match="not a directory"):
        Profiles(tmp_path / "none")
    with pytest.raises(WorkloadError, match="no application"):
        Profiles(tmp_path)
    folder = tmp_path / "bert"
    shutil.copytree(DATA / "adaptdl/traces/bert", folder)
    path = folder / "validation-12.csv"
    path.write_text("\n".join(path.read_text().splitlines()[:2]) + "\n")
    with pytest.raises(WorkloadError, match="differ in their number of epochs"):
        Profiles(tmp_path)["bert"]


def test_speeds_outside_what_was_measured_are_refused():
    cifar10 = Profiles(DATA / "adaptdl/traces")["cifar10"]
    with pytest.raises(WorkloadError, match="31 examples per GPU"):
        cifar10.speed((1,), 31)
    with pytest.raises(WorkloadError, match="lie outside what was measured"):
        cifar10.speed((4,) * 6, 5000)
    with pytest.raises(WorkloadError, match="nodes of 1 to 4 GPUs"):
        cifar10.speed((6,), 342)
    with pytest.raises(WorkloadError, match="total batch 100"):
        cifar10.gradient(100, 0)


def test_spot_traces():
    cluster = read_spot_trace(DATA / "oobleck/10m.csv", 4, notice=120)
    adds = [node for change in cluster.changes for node in change.add]
    removals = [id_ for change in cluster.changes for id_ in change.remove]
    notices = [(notice, change.at) for change in cluster.changes for notice in change.notices]
    assert (len(adds), len(removals), len(notices)) == (30, 15, 15)
    assert cluster.changes[-1].at == 9018
    assert all(at == pytest.approx(notice.deadline - 120) for notice, at in notices)
    assert cluster.most_ahead()[0] == 120


@pytest.mark.parametrize(
    ("lines", "reason"),
    [
        (["0,add,a", "5,drop,a"], "line 2: must be time_ms,add|remove,node"),
        (["0,add,a", "5,add,a"], "line 2: node a is added while present"),
        (["0,remove,a"], "line 1: node a is removed while absent"),
        (["5,add,a", "0,add,b"], "line 2: time goes back"),
        ([], "has no events"),
    ],
)
def test_malformed_spot_traces(tmp_path, lines, reason):
    with pytest.raises(WorkloadError) as caught:
        read_spot_trace(written(tmp_path, *lines), 1)
    assert reason in str(caught.value)


@pytest.mark.parametrize("seed", range(3))
def test_the_testbed_workload_has_the_papers_shape(seed):
    jobs = tiresias_testbed(np.random.default_rng(seed)).jobs
    assert {gpus: sum(job.gpus == gpus for job in jobs) for gpus in TESTBED_GPUS} == dict(TESTBED_GPUS)
    assert {sum(job.model == model for job in jobs) for model in {job.model for job in jobs}} == {48}
    assert all(120 <= job.duration <= 7200 for job in jobs)
    shares = [
        sum((job.gpus > 4) == large and (job.duration >= 800) == long for job in jobs) / 480
        for large in (False, True)
        for long in (False, True)
    ]
    assert shares == pytest.approx([0.635, 0.125, 0.165, 0.075], abs=0.04)  # SS, SL, LS, LL
    assert 21_000 * 0.9 <= sum(job.gpus * job.duration for job in jobs) / 60 <= 28_000 * 1.1
    assert jobs == tiresias_testbed(np.random.default_rng(seed)).jobs
    assert 3 * 3600 < jobs[-1].arrival < 5 * 3600


def test_philly_like_jobs_follow_the_published_quantiles():
    jobs = philly_like(np.random.default_rng(1), 20_000).jobs
    service = [job.gpus * job.duration for job in jobs]
    for share, expected in SERVICE_QUANTILES[1:-1]:
        below = sum(value <= expected for value in service) / len(service)
        assert below == pytest.approx(share, abs=0.012)
    assert sum(value < 3600 for value in service) / len(service) == pytest.approx(0.625, abs=0.012)
    assert min(job.duration for job in jobs) >= 60
    assert max(job.duration for job in jobs) <= 14 * 86_400
    assert jobs[-1].arrival <= 70 * 86_400
    with pytest.raises(OptionError):
        philly_like(np.random.default_rng(1), 0)
