"""What the report, the page and the files of a training say, on a launcher without processes."""

import io
import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from ebbflow.flows.training.terminal import print_training
from ebbflow.infra.aggregation.timing import HeldTensor
from ebbflow.infra.errors import ReportError
from ebbflow.infra.protocols import GenerationEnd, TrainingEvent, TrainingStatus
from ebbflow.infra.training.process.channel import Report
from ebbflow.planners.training.speed.batch_size import BatchLimits, BatchSplit
from ebbflow.planners.training.speed.goodput import GradientStatistics
from ebbflow.planners.training.speed.job_report import JobReport
from ebbflow.planners.training.speed.throughput import ThroughputParameters
from ebbflow.tasks.report.training import deliver, training_html
from ebbflow.tasks.training.capacity import Nodes
from ebbflow.tasks.training.leased.app import merge_reports
from ebbflow.tasks.training.listening import NullTrainingListener
from ebbflow.tasks.training.recorder import RunRecorder
from ebbflow.tasks.training.report import BestBatch, TrainingReport, recorded
from ebbflow.tasks.training.request import TrainingRequest
from tests.training_fakes import Act, ScriptedClock, failed, run

pytestmark = pytest.mark.processes


def test_the_report_says_what_more_gpus_would_give(script: str) -> None:
    said = JobReport(
        BatchLimits(64, 1024), GradientStatistics(1.0, 9.0), ThroughputParameters(0.01, 1e-3, 0.05, 0, 0.02, 0, 1.5),
        3, 6, BatchSplit(20, 0), 8,
    )  # fmt: skip
    report, _ = run(script, Act(job=said.to_dict()))
    assert report.goodput_forecast is not None
    assert report.goodput_forecast.noise_scale == 64 * 9
    assert [(b.gpus, b.nodes) for b in report.goodput_forecast.best] == [(n, -(-n // 2)) for n in range(1, 9)]
    assert said.model is not None
    best, split = said.model.best_split(2, 4)
    assert report.goodput_forecast.best[3] == BestBatch(4, 2, split.total(4), split.accumulation + 1, best)
    assert TrainingReport.from_json(report.to_json()) == report
    assert "Goodput by GPUs, as predicted" in training_html(report)
    assert (
        run(script, Act(job=replace(said, speed=None).to_dict()), run_id="early")[0].goodput_forecast is None
    )


def test_reports_of_other_formats_are_refused(script: str) -> None:
    report, _ = run(script, Act())
    data = json.loads(report.to_json())
    assert data["format"] == 2
    assert data["mean_goodput"] == 80.0
    with pytest.raises(ReportError, match="format 2"):
        TrainingReport.from_json(json.dumps(data | {"format": 3}))
    with pytest.raises(ReportError, match="damaged"):
        TrainingReport.from_json(json.dumps(data | {"steps": "many"}))
    with pytest.raises(ReportError, match="not a report"):
        TrainingReport.from_json("<html>")


def test_a_report_of_format_1_is_read(script: str) -> None:
    report, _ = run(script, Act())
    text = json.dumps({**json.loads(report.to_json()), "format": 1})
    for new, old in (("directory", "folder"), ("goodput_forecast", "outlook"), ("preflight", "trial")):
        assert f'"{new}":' in text
        text = text.replace(f'"{new}":', f'"{old}":')
    assert TrainingReport.from_json(text) == TrainingReport.from_json(report.to_json())


def test_the_page_shows_everything_and_escapes_it(script: str) -> None:
    report, _ = run(
        script,
        Act("lost", gone=("node-2",)),
        failed("ValueError: <b>bad</b>"),
        price=1.0,
        name="<i>mine</i>",
    )
    page = training_html(report)
    assert "<b>bad</b>" not in page
    assert "&lt;b&gt;bad&lt;/b&gt;" in page
    assert "&lt;i&gt;mine&lt;/i&gt;" in page
    for words in ("node-lost", "Generations", "goodput", "$0.00", "Why it failed"):
        assert words in page
    assert "<script" not in page


def test_aggregators_of_a_trainings_own_are_on_its_page_as_shared_ones_on_the_clusters(script: str) -> None:
    request = TrainingRequest(
        script, runs_dir=str(Path(script).parent / "runs"), run_id="r", sync="service", aggregators=2
    )
    book = RunRecorder(request, ScriptedClock(), NullTrainingListener())
    held = {"w<": asdict(HeldTensor(4 << 20, 5_000, 250_000, round=40))}
    mirror = {"w<": asdict(HeldTensor(4 << 20, mirror=True, spare=True, round=33, mirrored=9 << 20))}
    told = {
        name: {
            "address": "h:1",
            "public": "k",
            "peer": "p",
            "held": {"generation-1": own},
            "updates": 70,
            "ended": False,
        }
        for name, own in (("aggregator-1", held), ("aggregator-2", mirror))
    }
    end = GenerationEnd(
        1, "finished", "done", {"node-1": 2}, {}, (), (), 0.0, 1.0, 0, 40, 40, aggregators=told
    )
    book.close(end)
    # a generation that has lost its aggregators tells nothing new
    book.ended(
        replace(end, generation=2, aggregators={"aggregator-3": {**told["aggregator-1"], "held": {}}}),
        None,
        "",
    )
    report = book.report(TrainingStatus("finished", 2, {}, 40, ""))
    assert report.aggregation is not None
    (mine,) = report.aggregation.trainings
    assert (mine.aggregators, mine.servers, mine.mirror_age, mine.iteration_s) == (
        ("aggregator-1",),
        2,
        7,
        0.25,
    )
    assert TrainingReport.from_json(report.to_json()) == report
    assert merge_reports([report, replace(report, aggregation=None)]).aggregation == report.aggregation
    page = training_html(report)
    for words in ("aggregator-2", "generation-1", "250.0 ms", "7 rounds", "9.0 MiB"):
        assert words in page
    assert "<h2>Aggregators</h2>" not in training_html(replace(report, aggregation=None))


def test_a_failed_run_says_where_its_processes_wrote(script: str) -> None:
    report, _ = run(script, failed("TypeError: no"))

    def printed() -> str:
        out = io.StringIO()
        print_training(report, Console(file=out, width=60))
        return out.getvalue()

    assert "what the processes wrote" not in printed()
    (Path(report.directory) / "logs" / "generation-1").mkdir(parents=True)
    assert f"logs of the processes: {report.directory}/logs/generation-1\n" in printed()


def test_generations_are_counted_as_they_are_numbered_those_before_a_resume_too(script: str) -> None:
    report, _ = run(script, Act("lost", gone=("node-2",)), Act(), fault=("0s:add:1",))
    assert any(event.text.startswith("added: node-4; ") for event in report.events)

    def head(first: int) -> str:
        out = io.StringIO()
        later = tuple(replace(one, number=first + n) for n, one in enumerate(report.generations))
        print_training(replace(report, generations=later), Console(file=out, width=200))
        return out.getvalue().splitlines()[0]

    assert head(1).endswith(", 2 generations")
    assert head(3).endswith(", 4 generations, 2 of them since it resumed")


def test_a_report_tells_what_is_saved_spilled_and_lost(script: str) -> None:
    def told(*said: tuple[str, int, dict[str, Any]], state: Any = "failed", step: int = 12) -> TrainingReport:
        request = TrainingRequest(script, runs_dir=str(Path(script).parent / "runs"), run_id="r")
        book = RunRecorder(request, ScriptedClock(), NullTrainingListener())
        for number, (kind, at, content) in enumerate(said, 1):
            if kind == "resumed":
                book.event(TrainingEvent(number, 0.0, kind, 1, content))
            else:
                book.record_report(Report(kind, 0, 0.0, at, content))  # type: ignore[arg-type]
        return book.report(TrainingStatus(state, 1, {}, step, "why"))

    begun = ("started", 0, {"restored": None})
    saved = ("checkpoint", 8, {"saved_step": 8})
    spilled = ("spilled", 12, {"uri": "file:///scratch/x", "host": "h", "error": "full"})
    report = told(begun, saved, spilled)
    assert (report.saved_step, report.unsaved_steps) == (8, 4)
    assert report.reason.startswith("why; step 12 is in file:///scratch/x on h")
    assert told(begun, spilled, ("checkpoint", 12, {"saved_step": 12})).spilled is None
    assert told(begun, saved, state="stopped").reason == "why; steps 9 to 12 are not saved"
    whole = told(begun, ("finished", 12, {"saved": True}), state="finished")
    assert (whole.saved_step, whole.unsaved_steps, whole.reason) == (12, 0, "why")

    names = [f"file:///c/corrupt-step-{step:012d}-1-2 its checksum differs" for step in (5, 10)]
    again = {"checkpoints": names, "restarted": True, "reached": 10}
    report = told(("damaged", 0, again), begun)
    assert (report.lost_steps, report.unusable) == (10, tuple(names)), "as far as checkpoints say"
    report = told(("resumed", 0, {"reached": 14, "saved": 10}), ("damaged", 0, again), begun)
    assert (report.lost_steps, report.saved_step) == (14, None)
    older = ("started", 5, {"restored": 5})
    assert told(("resumed", 0, {"reached": 14, "saved": 10}), older).lost_steps == 9
    out = io.StringIO()
    print_training(report, Console(file=out, width=200))
    assert all(f"unusable checkpoint: {name}" in out.getvalue() for name in names)
    assert "lost steps: 14" in out.getvalue()
    page = training_html(report)
    assert all(name in page for name in names)


def test_a_folder_that_cannot_take_the_report_does_not_hide_how_a_run_ended(script: str) -> None:
    (Path(script).parent / "runs" / "r" / "report.json").mkdir(parents=True)
    report, _ = run(script, Act())
    assert report.state == "finished"


def test_a_run_keeps_its_report_and_whoever_asked_for_files_writes_them(script: str) -> None:
    data, drawn = (Path(script).parent / name for name in ("a.json", "a.html"))
    leaving = Nodes({"a": 1}, 8)
    leaving.stop()
    for name, act, there, state in (
        ("ends", Act(), None, "finished"),
        ("fails", failed("TypeError: no"), None, "failed"),
        ("leaves", Act("stopped", wait=True), leaving, "stopped"),
    ):
        report, _ = run(script, act, there=there, run_id=name, report=(str(data), str(drawn)))
        request = TrainingRequest.load(str(Path(script).parent / "runs"), name)
        assert report.state == state
        assert recorded(request) == report
        assert not data.exists()
        deliver(report, request)
        assert TrainingReport.from_json(data.read_text()) == report
        assert name in drawn.read_text()
        data.unlink()
    data.mkdir()
    with pytest.raises(ReportError):
        deliver(report, request)


def test_a_plan_for_the_exchange_of_gradients_is_drawn_before_and_after(script: str) -> None:
    committed = {
        "state": "committed", "version": 1, "activate_at": 30, "seconds": 0.04, "plain_seconds": 0.05,
        "measured_seconds": 0.052, "choices": {"bucket/0": "ring/2@1", "bucket/1": "whole/1@0"},
        "bars": {
            "plain": [["channel 0", "bucket/0", 0.01, 0.05], ["compute", "forward <x>", 0.0, 0.02]],
            "plan": [["channel 1", "bucket/0", 0.01, 0.03], ["compute", "forward <x>", 0.0, 0.02]],
        },
    }  # fmt: skip
    profiled = {"state": "profiled", "profile": {}}
    events = [
        profiled,
        committed,
        {"state": "plan", "version": 1},
        {"state": "ddp", "reason": "rank 1: a cable"},
    ]
    request = TrainingRequest(script, runs_dir=str(Path(script).parent / "runs"), run_id="r")
    book = RunRecorder(request, ScriptedClock(), NullTrainingListener())
    for number, content in enumerate(events, 1):
        book.record_report(Report("communication", 0, 0.0, 21, content))
        book.event(TrainingEvent(number, 0.0, "communication", 1, content))
    report = book.report(TrainingStatus("finished", 1, {}, 40, ""))
    (plan,) = report.exchanges
    assert (plan.step, plan.version, plan.choices["bucket/0"]) == (21, 1, "ring/2@1")
    assert [event.text for event in report.events] == [
        "the training's communication is recorded, and its links are measured; a plan is searched",
        "communication plan 1 is accepted by all processes: 40 ms per iteration predicted, 50 ms without",
        "gradients are exchanged by communication plan 1",
        "gradients are exchanged by DDP: rank 1: a cable",
    ]
    assert TrainingReport.from_json(report.to_json()) == report
    page = training_html(report)
    assert "without the plan (predicted): 50 ms" in page
    assert "with plan 1 (predicted): 30 ms" in page
    assert "forward &lt;x&gt;" in page
    assert "ring/2@1" in page
