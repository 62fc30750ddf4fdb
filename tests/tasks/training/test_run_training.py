"""Runs on a launcher without processes: what follows each end, and what the report says of it."""

import io
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from ebbflow.flows.training.terminal import print_training
from ebbflow.infra.errors import EngineUnavailableError, ReportError, TrainingError
from ebbflow.infra.protocols import TrainingEvent, TrainingStatus
from ebbflow.infra.training.process.channel import Report
from ebbflow.planners.errors import OptionError
from ebbflow.planners.training.speed.batch_size import BatchLimits, Split
from ebbflow.planners.training.speed.goodput import GradientStatistics
from ebbflow.planners.training.speed.job_report import JobReport
from ebbflow.planners.training.speed.throughput import ThroughputParameters
from ebbflow.tasks.report.training import deliver, training_html
from ebbflow.tasks.training.capacity import Nodes
from ebbflow.tasks.training.listening import Silent
from ebbflow.tasks.training.recorder import RunRecorder
from ebbflow.tasks.training.report import BestBatch, EventReport, TrainingReport, recorded
from ebbflow.tasks.training.request import TrainingRequest
from ebbflow.tasks.training.run import run_training
from tests.training_fakes import Act, FakeSite, ScriptedClock, failed

pytestmark = pytest.mark.processes

OOM = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."
ECC = "RuntimeError: CUDA error: uncorrectable ECC error encountered"


@pytest.fixture
def script(tmp_path: Path) -> str:
    path = tmp_path / "train.py"
    path.write_text("print('never run here')\n")
    return str(path)


def run(script: str, *acts: Act, there: Nodes | None = None, resume: bool = False, **options: Any) -> Any:
    """Return the report and the trainer."""
    options = {"canary": "never", "nodes": "local:3x2", "id": "r", **options}
    request = TrainingRequest(script, folder=str(Path(script).parent / "runs"), **options)
    site = FakeSite(*acts)
    report = run_training(request, site=site, clock=site.clock, nodes=there, resume=resume)
    assert site.made.closed
    return report, site


def test_a_run_that_goes_well(script: str) -> None:
    report, site = run(script, Act(metrics={"accuracy": 0.9}), price=3.6)
    assert (report.state, report.steps, report.lost_steps, report.checkpoints) == ("finished", 10, 0, 1)
    assert report.final_metrics == {"accuracy": 0.9}
    assert site.made.launches[0][0] == {"node-1": 2, "node-2": 2, "node-3": 2}
    assert report.gpu_seconds == pytest.approx(12.0)
    assert report.dollars == pytest.approx(12 / 3600 * 3.6)
    assert report.mean("goodput") == 80.0
    assert len(report.generations) == 1
    kept = TrainingReport.from_json((Path(report.folder) / "report.json").read_text())
    assert kept == report


def test_a_lost_node_costs_the_steps_since_the_checkpoint(script: str) -> None:
    report, site = run(script, Act("lost", steps=10, saves=7, gone=("node-2",)), Act())
    assert [launch[0] for launch in site.made.launches] == [
        {"node-1": 2, "node-2": 2, "node-3": 2},
        {"node-1": 2, "node-3": 2},
    ]
    first, second = report.generations
    assert (first.lost_steps, report.lost_steps, second.lost_steps) == (3, 3, 0)
    assert first.failure is not None
    assert (first.failure.reason, first.failure.failure_class) == ("node-lost", "scheduler")
    assert second.gap_seconds is not None
    assert report.steps == 17
    assert [point.lost_steps for point in report.series] == [0] * 10 + [3] * 10, "known as soon as it goes on"


def test_what_the_nodes_cost_is_known_while_they_are_used(script: str) -> None:
    report, _ = run(script, Act(seconds=10.0), price=3.6)
    assert [point.dollars for point in report.series] == pytest.approx([n * 6e-3 for n in range(1, 11)])


def test_a_notice_is_no_failure_of_the_node(script: str) -> None:
    report, _ = run(script, Act("stopped", gone=("node-2",), noticed=("node-2",)), Act())
    failure = report.generations[0].failure
    assert failure is not None
    assert failure.reason == "spot-revocation"
    assert report.lost_steps == 0


def test_losses_never_count(script: str) -> None:
    acts = [Act("lost", gone=(f"node-{n}",)) for n in range(1, 12)]
    report, site = run(script, *acts, Act(), nodes="local:12x1")
    assert report.state == "finished"
    assert len(site.made.launches) == 12
    assert set(site.made.delays) == {0.0}


@pytest.mark.parametrize(
    ("text", "reason"), [("TypeError: no", "semantic-error"), ("FileNotFoundError: x", "incorrect-inputs")]
)
def test_errors_of_program_and_data_run_once(script: str, text: str, reason: str) -> None:
    report, site = run(script, failed(text))
    assert report.state == "failed"
    assert report.failure is not None
    assert report.failure.reason == reason
    assert text in report.reason
    assert len(site.made.launches) == 1


def test_out_of_memory_goes_on_with_half_the_examples_a_pass(script: str) -> None:
    report, site = run(script, failed(OOM, batch=96), Act())
    assert report.state == "finished"
    assert [launch[1].max_local for launch in site.made.launches] == [None, 8]  # 96 over six GPUs, halved


def test_out_of_memory_twice_is_the_end(script: str) -> None:
    report, site = run(script, failed(OOM, saves=0), failed(OOM, saves=0))
    assert report.state == "failed"
    assert len(site.made.launches) == 2


def test_a_broken_gpu_is_replaced_after_a_while(script: str) -> None:
    report, site = run(script, failed(ECC, node="node-2", saves=0), Act(), back_off=10.0)
    assert report.state == "finished"
    assert site.made.launches[1][0] == {"node-1": 2, "node-3": 2, "node-4": 2}
    assert 8 <= site.made.delays[0] <= 12
    assert "not on node-2" in report.generations[0].decision


def test_a_crash_is_tried_once_on_other_nodes(script: str) -> None:
    crash = failed("", code=-11, saves=0)
    report, site = run(script, crash, crash, nodes="local:2x1")
    assert report.state == "failed"
    assert [set(launch[0]) for launch in site.made.launches] == [{"node-1", "node-2"}, {"node-3", "node-4"}]


def test_survivors_hide_no_cause(script: str) -> None:
    cause = failed("KeyError: 'label'", node="node-2", rank=1).failures[0]
    survivor = failed("", node="node-1", code=75).failures[0]
    report, _ = run(script, Act("failed", failures=(survivor, cause)))
    assert report.failure is not None
    assert (report.failure.reason, report.failure.node) == ("traceback", "node-2")


def test_blind_retries(script: str) -> None:
    report, site = run(script, *[failed("SyntaxError: no", saves=0)] * 4, retries="blind")
    assert report.state == "failed"
    assert len(site.made.launches) == 4


def test_a_hang_is_blamed_on_who_stood_still(script: str) -> None:
    hang = Act("hung", suspects=("node-3",), saves=0)
    report, site = run(script, hang, Act(), back_off=0.0)
    assert report.state == "finished"
    assert site.made.launches[1][0] == {"node-1": 2, "node-2": 2}  # at once with what is ready,
    assert site.made.then == [{"node-1": 2, "node-2": 2, "node-4": 2}]  # and with all when the new one is
    assert report.generations[0].failure.reason == "collective-timeout"


def test_a_node_that_stood_still_is_a_lost_one(script: str) -> None:
    report, site = run(script, Act("hung", suspects=("node-3",), gone=("node-3",), saves=0), Act())
    assert report.generations[0].failure.reason == "node-lost"
    assert site.made.delays == [0.0]


def test_the_hazard_is_learnt_unless_stated(script: str) -> None:
    lost = Act("lost", gone=("node-2",), seconds=1200.0)
    _, site = run(script, lost, Act())
    first, second = (launch[1].hazard for launch in site.made.launches)
    assert first == 0.05
    assert second == pytest.approx(1.05 / 2)  # after an hour of one node in twenty minutes of three
    _, site = run(script, lost, Act(), hazard=3.0, id="stated")
    assert [launch[1].hazard for launch in site.made.launches] == [3.0, 3.0]


def test_a_script_without_elastic_run(script: str) -> None:
    report, _ = run(script, Act("silent", steps=0, saves=0))
    assert report.state == "failed"
    assert "with ElasticRun.start() as run" in report.reason


def test_too_few_nodes_wait_and_a_new_one_ends_the_wait(script: str) -> None:
    lost = Act("lost", gone=("node-1",))
    report, site = run(script, lost, Act(), nodes="local:1x2", min_gpus=2, at=("0s:add:1",))
    assert report.state == "finished"
    # node-2 came while the first generation ran or while the run waited, whichever the fault's thread met
    assert site.made.launches[-1][0] == {"node-2": 2}


def test_others_may_change_the_nodes(script: str) -> None:
    nodes = Nodes({"a": 1}, 8)

    class Growing(Silent):
        def event(self, event: EventReport) -> None:
            if event.kind == "generation" and event.at == 0:
                nodes.become({"a": 1, "b": 1})

    request = TrainingRequest(script, folder=str(Path(script).parent), id="g", canary="never")
    site = FakeSite(Act("stopped", wait=True), Act())
    report = run_training(request, Growing(), site=site, clock=site.clock, nodes=nodes)
    assert report.state == "finished"
    assert site.made.resizes == [{"a": 1, "b": 1}]
    assert [g.gpus for g in report.generations] == [1, 2]
    assert report.generations[0].kind == "stopped"


def test_the_report_says_what_more_gpus_would_give(script: str) -> None:
    said = JobReport(
        BatchLimits(64, 1024), GradientStatistics(1.0, 9.0), ThroughputParameters(0.01, 1e-3, 0.05, 0, 0.02, 0, 1.5),
        3, 6, Split(20, 0), 8,
    )  # fmt: skip
    report, _ = run(script, Act(job=said.to_dict()))
    assert report.outlook is not None
    assert report.outlook.noise_scale == 64 * 9
    assert [(b.gpus, b.nodes) for b in report.outlook.best] == [(n, -(-n // 2)) for n in range(1, 9)]
    assert said.model is not None
    best, split = said.model.best_split(2, 4)
    assert report.outlook.best[3] == BestBatch(4, 2, split.total(4), split.accumulation + 1, best)
    assert TrainingReport.from_json(report.to_json()) == report
    assert "Goodput by GPUs, as predicted" in training_html(report)
    assert run(script, Act(job=replace(said, speed=None).to_dict()), id="early")[0].outlook is None


def test_others_may_end_it(script: str) -> None:
    nodes = Nodes({"a": 1}, 8)
    nodes.stop()
    report, _ = run(script, Act("stopped", wait=True), there=nodes)
    assert report.state == "stopped"


def test_an_interrupt_saves_and_leaves(script: str) -> None:
    class Hasty(FakeSite):
        def trainer(self, *arguments: Any) -> Any:
            made = super().trainer(*arguments)
            wait, self.waits = made.wait, 0

            def interrupted(timeout: float) -> Any:
                self.waits += 1
                if self.waits == 1:
                    raise KeyboardInterrupt
                return wait(timeout)

            made.wait = interrupted  # type: ignore[method-assign]
            return made

    site = Hasty(Act("stopped", wait=True))
    request = TrainingRequest(script, folder=str(Path(script).parent), id="i", canary="never")
    report = run_training(request, site=site, clock=site.clock)
    assert report.state == "stopped"
    assert report.steps == 10


# --- the canary -------------------------------------------------------------------------------------------


def test_a_trial_on_two_nodes_then_the_whole_gang(script: str) -> None:
    report, site = run(script, Act(steps=20), Act(), canary="auto")
    assert site.made.launches[0][0] == {"node-1": 1, "node-2": 1}
    assert [launch[1].canary_steps for launch in site.made.launches] == [20, 0]
    assert sum(site.made.launches[1][0].values()) == 6
    assert report.generations[0].kind == "canary"
    assert report.generations[0].trial
    assert report.lost_steps == 0


def test_an_error_of_the_program_never_meets_the_gang(script: str) -> None:
    report, site = run(script, failed("ImportError: no", steps=0), canary="always")
    assert report.state == "failed"
    assert report.reason.startswith("canary: import-error")
    assert len(site.made.launches) == 1


def test_a_trial_that_meets_a_broken_node_is_repeated_and_then_let_through(script: str) -> None:
    broken = failed(ECC, node="node-1", steps=0)
    report, site = run(script, broken, broken, Act(), canary="always")
    assert report.state == "finished"
    assert [sum(launch[0].values()) for launch in site.made.launches] == [2, 2, 6]
    assert set(site.made.launches[0][0]).isdisjoint(site.made.launches[1][0])


def test_too_little_memory_in_the_trial_shrinks_the_pass_of_the_gang(script: str) -> None:
    report, site = run(script, failed(OOM, steps=0, saves=0), Act(steps=20), Act(), canary="always")
    assert report.state == "finished"
    assert [launch[1].canary_steps for launch in site.made.launches] == [20, 20, 0]
    assert [launch[1].max_local for launch in site.made.launches] == [None, 16, 16]  # 64 on two GPUs, halved


def test_memory_that_runs_out_before_the_first_step(script: str) -> None:
    report, site = run(script, failed(OOM, steps=0, saves=0, batch=60), Act())
    assert report.state == "finished"
    assert site.made.launches[1][1].max_local == 5


def test_a_node_lost_during_the_trial(script: str) -> None:
    lost = Act("lost", gone=("node-1",), steps=3)
    report, site = run(script, lost, Act(steps=20), Act(), canary="always")
    assert report.state == "finished"
    assert site.made.launches[1][0] == {"node-2": 1, "node-3": 1}
    assert site.made.launches[1][1].canary_steps == 20


def test_a_trial_over_its_limit_ends_and_the_gang_trains_as_it_was_asked_to(script: str) -> None:
    report, site = run(script, Act("stopped", wait=True, steps=3), Act(), canary="always")
    assert report.state == "finished"
    assert [sum(launch[0].values()) for launch in site.made.launches] == [2, 6]
    assert [launch[1].canary_steps for launch in site.made.launches] == [20, 0]
    assert report.generations[0].ended > 300
    assert "slow, but 3 steps were done" in report.generations[0].decision
    assert site.made.ended_early == [1]
    assert site.made.resizes == []


def test_no_trial_where_it_would_be_the_whole_run_or_one_resumes(script: str) -> None:
    _, site = run(script, Act(), canary="auto", nodes="local:1x1")
    assert site.made.launches[0][1].canary_steps == 0
    _, site = run(script, Act(), canary="auto", resume=True)
    assert site.made.launches[0][1].canary_steps == 0


# --- ids, requests, reports -------------------------------------------------------------------------------


def test_an_id_is_used_once(script: str) -> None:
    run(script, Act())
    with pytest.raises(OptionError, match="--resume r"):
        run(script, Act())


def test_without_pytorch_nothing_is_begun(script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ebbflow.infra.packages.find_spec", lambda name: None)
    request = TrainingRequest(script, folder=str(Path(script).parent), id="n")
    with pytest.raises(
        EngineUnavailableError, match=r"a training needs torch: pip install 'prefect-ebbflow\[train\]'"
    ):
        run_training(request)
    assert not request.recorded


def test_a_recorded_request_comes_back(script: str) -> None:
    run(script, Act(), arguments=("--lr", "0.1"), min_gpus=2, at=("1s:add:1",))
    folder = str(Path(script).parent / "runs")
    found = TrainingRequest.load(folder, "r", {"price": 2.0})
    assert (found.arguments, found.min_gpus, found.price, found.at) == (("--lr", "0.1"), 2, 2.0, ())
    with pytest.raises(TrainingError, match="no run 'other'"):
        TrainingRequest.load(folder, "other")
    file = Path(folder) / "r" / "request.json"
    for bad in ("{", file.read_text().replace('"0.1"', '"0.9"')):
        file.write_text(bad)
        with pytest.raises(TrainingError, match="not what was written"):
            TrainingRequest.load(folder, "r")


def test_what_happened_to_an_earlier_launcher_is_no_news(script: str) -> None:
    report, site = run(script, Act("lost", gone=("node-2",)), Act(), resume=True, at=("30s:add:1",))
    assert [set(launch[0]) for launch in site.made.launches] == [
        {"node-1", "node-2", "node-3"},
        {"node-1", "node-3"},
    ]
    assert site.made.resizes == []
    assert not any("notice" in event.text for event in report.events)
    assert sum(event.text.startswith("training ") for event in report.events) == 2


def test_what_is_asked_for_reaches_the_processes_also_of_a_resumed_run(script: str) -> None:
    asked = {
        "running_every": 64,
        "running_fraction": 0.25,
        "checkpoint_every": 7.0,
        "keep": 3,
        "adaptive": False,
    }
    for resume in (False, True):
        _, site = run(script, Act(), resume=resume, **asked)
        settings = site.made.launches[0][1]
        assert {name: getattr(settings, name) for name in asked} == asked


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"nodes": "local:0"}, "local:NODESxSLOTS"),
        ({"nodes": "spark://x"}, "local:NODESxSLOTS"),
        ({"min_gpus": 0}, "min_gpus"),
        ({"min_gpus": 4}, "have 1 GPUs"),
        ({"min_gpus": 1, "max_gpus": 0}, "max_gpus"),
        ({"id": "../x"}, "letters"),
        ({"price": -1.0}, "price"),
        ({"grace": 0.0}, "grace"),
        ({"keep": 0}, "keep"),
        ({"running_every": -1}, "running_every"),
        ({"running_fraction": 0.0}, "running_fraction must be > 0 and <= 1"),
        ({"at": ("20s:burn:node-1",)}, "20s:kill:node-2"),
        ({"canary": "maybe"}, "canary"),
        ({"retries": "never"}, "retries"),
        ({"folder": " "}, "folder"),
    ],
)
def test_bad_requests(script: str, options: Mapping[str, Any], words: str) -> None:
    with pytest.raises(OptionError, match=words):
        TrainingRequest(script, **options)


def test_no_script() -> None:
    with pytest.raises(OptionError, match=r"there is none at 'gone\.py'"):
        TrainingRequest("gone.py")


def test_reports_of_other_formats_are_refused(script: str) -> None:
    report, _ = run(script, Act())
    data = json.loads(report.to_json())
    assert data["format"] == 1
    assert data["mean_goodput"] == 80.0
    with pytest.raises(ReportError, match="format 1"):
        TrainingReport.from_json(json.dumps(data | {"format": 2}))
    with pytest.raises(ReportError, match="damaged"):
        TrainingReport.from_json(json.dumps(data | {"steps": "many"}))
    with pytest.raises(ReportError, match="not a report"):
        TrainingReport.from_json("<html>")


def test_the_page_shows_everything_and_escapes_it(script: str) -> None:
    report, _ = run(
        script,
        Act("lost", gone=("node-2",)),
        failed("ValueError: <b>bad</b>"),
        price=1.0,
        title="<i>mine</i>",
    )
    page = training_html(report)
    assert "<b>bad</b>" not in page
    assert "&lt;b&gt;bad&lt;/b&gt;" in page
    assert "&lt;i&gt;mine&lt;/i&gt;" in page
    for words in ("node-lost", "Generations", "goodput", "$0.00", "Why it failed"):
        assert words in page
    assert "<script" not in page


def test_a_failed_run_says_where_its_processes_wrote(script: str) -> None:
    report, _ = run(script, failed("TypeError: no"))

    def printed() -> str:
        out = io.StringIO()
        print_training(report, Console(file=out, width=60))
        return out.getvalue()

    assert "what the processes wrote" not in printed()
    (Path(report.folder) / "logs" / "generation-1").mkdir(parents=True)
    assert f"what the processes wrote: {report.folder}/logs/generation-1\n" in printed()


def test_the_clock_of_these_tests_stands_still() -> None:
    clock = ScriptedClock()
    assert clock.now() == clock.now()


# --- what is saved, and what is not -----------------------------------------------------------------------------


def test_a_report_tells_what_is_saved_spilled_and_lost(script: str) -> None:
    def told(*said: tuple[str, int, dict[str, Any]], state: Any = "failed", step: int = 12) -> TrainingReport:
        request = TrainingRequest(script, folder=str(Path(script).parent / "runs"), id="r")
        book = RunRecorder(request, ScriptedClock(), Silent())
        for number, (kind, at, content) in enumerate(said, 1):
            if kind == "resumed":
                book.event(TrainingEvent(number, 0.0, kind, 1, content))
            else:
                book.hear(Report(kind, 0, 0.0, at, content))  # type: ignore[arg-type]
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
    assert all(f"cannot be used: {name}" in out.getvalue() for name in names)
    assert "lost steps: 14" in out.getvalue()
    page = training_html(report)
    assert all(name in page for name in names)


def test_the_word_to_begin_again_holds_for_one_launch_of_a_run_that_is_resumed(script: str) -> None:
    _, site = run(script, Act(), resume=True, restart=True)
    assert site.made.launches[0][1].restart
    assert not TrainingRequest.load(str(Path(script).parent / "runs"), "r").restart
    _, site = run(script, Act(), restart=True, id="new")
    assert not site.made.launches[0][1].restart


def test_a_folder_that_cannot_take_the_report_does_not_hide_how_a_run_ended(script: str) -> None:
    (Path(script).parent / "runs" / "r" / "report.json").mkdir(parents=True)
    report, _ = run(script, Act())
    assert report.state == "finished"


def test_a_run_keeps_its_report_and_whoever_asked_for_files_writes_them(script: str) -> None:
    asked = {"json": str(Path(script).parent / "a.json"), "report": str(Path(script).parent / "a.html")}
    leaving = Nodes({"a": 1}, 8)
    leaving.stop()
    for name, act, there, state in (
        ("ends", Act(), None, "finished"),
        ("fails", failed("TypeError: no"), None, "failed"),
        ("leaves", Act("stopped", wait=True), leaving, "stopped"),
    ):
        report, _ = run(script, act, there=there, id=name, **asked)
        request = TrainingRequest.load(str(Path(script).parent / "runs"), name)
        assert report.state == state
        assert recorded(request) == report
        assert not Path(asked["json"]).exists()
        deliver(report, request)
        assert TrainingReport.from_json(Path(asked["json"]).read_text()) == report
        assert name in Path(asked["report"]).read_text()
        Path(asked["json"]).unlink()
    Path(asked["json"]).mkdir()
    with pytest.raises(ReportError):
        deliver(report, request)
