"""What is made of a training's own words: how far it is, what is left, on one GPU and on those that it has."""

from typing import Any

import pytest

from ebbflow.infra.training.process.channel import Report
from ebbflow.planners.communication.dag import CommOp, ComputeOp, TrainingDag
from ebbflow.planners.communication.placement import CommunicationProfile
from ebbflow.planners.communication.recorded import RecordedTraining
from ebbflow.planners.training.speed.batch_size import BatchLimits, BatchSplit
from ebbflow.planners.training.speed.goodput import GradientStatistics
from ebbflow.planners.training.speed.job_report import JobReport
from ebbflow.planners.training.speed.throughput import ThroughputParameters
from ebbflow.tasks.training.leased.metrics import TrainingMetrics

SPEED = ThroughputParameters(0.01, 1e-3, 0.05, 0.0, 0.02, 0.0, 1.5)


def step(at: float, left: float, gpus: int = 1, pace: str = "goodput", **content: Any) -> Report:
    said = {"gpus": gpus, "nodes": 1, "throughput": 200.0, "goodput": 100.0}
    outlook = {"examples_left": left, "examples_total": 1000.0, "pace": pace}
    return Report("step", 0, at, int(at), {**said, **outlook, **content})


def job(gpus: int) -> JobReport:
    return JobReport(BatchLimits(64, 256), GradientStatistics(1.0, 9.0), SPEED, 1, gpus, BatchSplit(64, 0), 8)


def test_nothing_is_said_of_what_is_not_known() -> None:
    figures = TrainingMetrics()
    figures.record_report(Report("step", 0, 1.0, 7, {"gpus": 1, "nodes": 1}))
    assert figures.fields() == {"step": 7, "saved_at": None, "job": {}, "seconds_left": None}


def test_what_is_left_follows_from_what_was_done() -> None:
    figures = TrainingMetrics()
    figures.record_report(step(0.0, 900.0))
    assert figures.fields()["seconds_left"] == pytest.approx(9.0), "as the training has it, at first"
    for second in range(1, 5):
        figures.record_report(step(float(second), 900.0 - 10.0 * second))
    said = figures.fields()
    assert said["seconds_left"] == pytest.approx(86.0), "ten a second, whatever its steps take"
    assert said["progress"] == pytest.approx(0.14)
    assert (said["work_left"], said["work_total"]) == (pytest.approx(86.0), pytest.approx(100.0))
    assert figures.fields(holding=False)["seconds_left"] is None
    assert figures.fields(holding=False)["work_left"] == pytest.approx(86.0)


def test_the_communication_that_a_training_recorded_is_a_part_of_its_job() -> None:
    dag = TrainingDag((ComputeOp("all", 0.1),), (CommOp("bucket/0", "all-reduce", 1e6, 2),), ())
    said = CommunicationProfile(RecordedTraining(dag, 2, 0.1, 10)).to_dict()
    figures = TrainingMetrics()
    figures.record_report(Report("communication", 0, 1.0, 20, {"state": "profiled", "profile": said}))
    assert figures.fields()["job"] == {"communication": said}
    for wrong in ({"state": "profiled"}, {"state": "profiled", "profile": {"nodes": 2}}, {"state": "plan"}):
        figures.record_report(Report("communication", 0, 2.0, 21, wrong))
    assert figures.fields()["job"] == {"communication": said}, "what is none is not taken for one"
    figures.record_report(step(3.0, 900.0, gpus=2, job=job(2).to_dict()))
    assert figures.fields()["job"] == {**job(2).to_dict(), "communication": said}
    assert figures.fields(holding=False)["job"]["communication"] == said, "also while it waits for GPUs"


def test_on_one_gpu_it_takes_as_much_longer_as_several_are_faster() -> None:
    figures = TrainingMetrics()
    figures.record_report(step(0.0, 1000.0, gpus=4))
    figures.record_report(step(10.0, 600.0, gpus=4))
    assert figures.fields()["work_left"] == pytest.approx(600 / 40 * 4), "in proportion, without a model"
    reported = job(4)
    figures.record_report(step(10.0, 600.0, gpus=4, job=reported.to_dict()))
    model = reported.model
    assert model is not None
    speedup = model.at(1, 4, reported.split) / model.best_split(1, 1)[0]
    assert 1.0 < speedup < 4.0
    assert figures.fields()["work_left"] == pytest.approx(600 / 40 * speedup)
    assert figures.fields()["job"] == reported.to_dict()


def test_other_gpus_and_a_step_back_are_measured_anew() -> None:
    figures = TrainingMetrics()
    for second in range(5):
        figures.record_report(step(float(second), 900.0 - 10.0 * second))
    figures.record_report(step(5.0, 850.0, gpus=2))
    assert figures.fields()["seconds_left"] == pytest.approx(85.0), (
        "as told, with the share of time that its steps had before"
    )
    for second in range(6, 10):
        figures.record_report(step(float(second), 850.0 - 20.0 * (second - 5), gpus=2))
    assert figures.fields()["seconds_left"] == pytest.approx((850.0 - 80.0) / 20.0)
    figures.record_report(step(10.0, 900.0, gpus=2))  # lost what was not saved
    assert figures.fields()["seconds_left"] == pytest.approx(45.0)


def test_waits_outside_of_steps_are_part_of_the_work_however_long_they_are() -> None:
    """A pass takes 30 s and an evaluation after it 120 s, in which nothing is heard of the training."""
    figures = TrainingMetrics()
    left, at = 100_000.0, 0.0
    for _ in range(6):
        for _ in range(60):
            at, left = at + 0.5, left - 50.0
            figures.record_report(step(at, left))  # 100 examples/s while it steps, 20 with all
        at += 120.0
    for _ in range(10):
        at, left = at + 0.5, left - 50.0
        figures.record_report(step(at, left))
    said = figures.fields()
    assert said["seconds_left"] == pytest.approx(left / 20.0, rel=0.25)
    assert len(figures._done) <= 300
    figures.record_report(step(at + 1.0, left - 50.0, gpus=2))
    assert figures.fields()["seconds_left"] == pytest.approx((left - 50.0) / 20.0, rel=0.25)


def test_a_single_hitch_is_forgotten() -> None:
    figures = TrainingMetrics()
    left, at = 100_000.0, 0.0
    for _ in range(10):
        at, left = at + 0.5, left - 50.0
        figures.record_report(step(at, left))
    at += 400.0
    for _ in range(3600):
        at, left = at + 0.5, left - 5.0
        figures.record_report(step(at, left))
    assert figures.fields()["seconds_left"] == pytest.approx(left / 10.0, rel=0.05)


def test_passes_over_the_data_go_by_examples_seen() -> None:
    figures = TrainingMetrics()
    figures.record_report(step(0.0, 900.0, pace="throughput", job=job(1).to_dict()))
    assert figures.fields()["seconds_left"] == pytest.approx(4.5)


def test_the_end_and_checkpoints_are_heard_and_nonsense_is_not() -> None:
    figures = TrainingMetrics()
    figures.record_report(step(0.0, 900.0, job={"limits": {}}))
    figures.record_report(
        step(0.0, 900.0, job={**job(1).to_dict(), "goodput": float("nan")}, goodput=float("nan"))
    )
    assert figures.fields()["job"] == {}
    figures.record_report(Report("checkpoint", 0, 5.0, 3, {"error": "disk full"}))
    assert figures.fields()["saved_at"] is None
    figures.record_report(Report("checkpoint", 0, 6.0, 3, {"uri": "x"}))
    figures.record_report(Report("finished", 0, 7.0, 9, {}))
    said = figures.fields()
    assert (said["saved_at"], said["progress"], said["work_left"], said["step"]) == (6.0, 1.0, 0.0, 9)
