"""Runs on a launcher without processes: their course, who may change and end them, their ids and requests."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from ebbflow.infra.errors import EngineUnavailableError, TrainingError
from ebbflow.planners.errors import OptionError
from ebbflow.tasks.training.capacity import Nodes
from ebbflow.tasks.training.listening import NullTrainingListener
from ebbflow.tasks.training.report import EventReport, TrainingReport
from ebbflow.tasks.training.request import TrainingRequest
from ebbflow.tasks.training.run import run_training
from tests.training_fakes import Act, FakeSite, ScriptedClock, run

pytestmark = pytest.mark.processes


def test_a_run_that_goes_well(script: str) -> None:
    report, site = run(script, Act(metrics={"accuracy": 0.9}), price=3.6)
    assert (report.state, report.steps, report.lost_steps, report.checkpoints) == ("finished", 10, 0, 1)
    assert report.final_metrics == {"accuracy": 0.9}
    assert site.made.launches[0][0] == {"node-1": 2, "node-2": 2, "node-3": 2}
    assert report.gpu_seconds == pytest.approx(12.0)
    assert report.dollars == pytest.approx(12 / 3600 * 3.6)
    assert report.mean("goodput") == 80.0
    assert len(report.generations) == 1
    kept = TrainingReport.from_json((Path(report.directory) / "report.json").read_text())
    assert kept == report


def test_what_the_nodes_cost_is_known_while_they_are_used(script: str) -> None:
    report, _ = run(script, Act(seconds=10.0), price=3.6)
    assert [point.dollars for point in report.series] == pytest.approx([n * 6e-3 for n in range(1, 11)])


def test_others_may_change_the_nodes(script: str) -> None:
    nodes = Nodes({"a": 1}, 8)

    class Growing(NullTrainingListener):
        def event(self, event: EventReport) -> None:
            if event.kind == "generation" and event.at == 0:
                nodes.become({"a": 1, "b": 1})

    request = TrainingRequest(script, runs_dir=str(Path(script).parent), run_id="g", preflight="never")
    site = FakeSite(Act("stopped", wait=True), Act())
    report = run_training(request, Growing(), site=site, clock=site.clock, nodes=nodes)
    assert report.state == "finished"
    assert site.made.resizes == [{"a": 1, "b": 1}]
    assert [g.gpus for g in report.generations] == [1, 2]
    assert report.generations[0].kind == "stopped"


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
    request = TrainingRequest(script, runs_dir=str(Path(script).parent), run_id="i", preflight="never")
    report = run_training(request, site=site, clock=site.clock)
    assert report.state == "stopped"
    assert report.steps == 10


def test_an_id_is_used_once(script: str) -> None:
    run(script, Act())
    with pytest.raises(OptionError, match="--resume r"):
        run(script, Act())


def test_without_pytorch_nothing_is_begun(script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ebbflow.infra.packages.find_spec", lambda name: None)
    request = TrainingRequest(script, runs_dir=str(Path(script).parent), run_id="n")
    with pytest.raises(
        EngineUnavailableError, match=r"a training needs torch: pip install 'prefect-ebbflow\[train\]'"
    ):
        run_training(request)
    assert not request.recorded


def test_a_recorded_request_comes_back(script: str) -> None:
    run(script, Act(), arguments=("--lr", "0.1"), min_gpus=2, fault=("1s:add:1",))
    folder = str(Path(script).parent / "runs")
    found = TrainingRequest.load(folder, "r", {"price": 2.0})
    assert (found.arguments, found.min_gpus, found.price, found.fault) == (("--lr", "0.1"), 2, 2.0, ())
    with pytest.raises(TrainingError, match="no run 'other'"):
        TrainingRequest.load(folder, "other")
    file = Path(folder) / "r" / "request.json"
    for bad in ("{", file.read_text().replace('"0.1"', '"0.9"')):
        file.write_text(bad)
        with pytest.raises(TrainingError, match="is damaged"):
            TrainingRequest.load(folder, "r")


def test_what_happened_to_an_earlier_launcher_is_no_news(script: str) -> None:
    report, site = run(script, Act("lost", gone=("node-2",)), Act(), resume=True, fault=("30s:add:1",))
    assert [set(launch[0]) for launch in site.made.launches] == [
        {"node-1", "node-2", "node-3"},
        {"node-1", "node-3"},
    ]
    assert site.made.resizes == []
    assert not any("notice" in event.text for event in report.events)
    assert sum(event.text.startswith("training ") for event in report.events) == 2


def test_what_is_asked_for_reaches_the_processes_also_of_a_resumed_run(script: str) -> None:
    asked = {
        "partial_checkpoint_interval": 64,
        "partial_checkpoint_fraction": 0.25,
        "partial_checkpoint_memory": True,
        "checkpoint_interval": 7.0,
        "keep_checkpoints": 3,
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
        ({"run_id": "../x"}, "letters"),
        ({"price": -1.0}, "price"),
        ({"termination_grace": 0.0}, "termination_grace"),
        ({"keep_checkpoints": 0}, "keep_checkpoints"),
        ({"partial_checkpoint_interval": -1}, "partial_checkpoint_interval"),
        ({"partial_checkpoint_fraction": 0.0}, "partial_checkpoint_fraction must be > 0 and <= 1"),
        ({"partial_checkpoint_memory": True}, "must come with partial_checkpoint_interval above 0; got 0"),
        ({"fault": ("20s:burn:node-1",)}, "20s:kill:node-2"),
        ({"preflight": "maybe"}, "preflight"),
        ({"retry_policy": "never"}, "retry_policy"),
        ({"runs_dir": " "}, "runs_dir"),
    ],
)
def test_bad_requests(script: str, options: Mapping[str, Any], words: str) -> None:
    with pytest.raises(OptionError, match=words):
        TrainingRequest(script, **options)


def test_no_script() -> None:
    with pytest.raises(OptionError, match=r"there is none at 'gone\.py'"):
        TrainingRequest("gone.py")


def test_the_clock_of_these_tests_stands_still() -> None:
    clock = ScriptedClock()
    assert clock.now() == clock.now()


def test_the_word_to_begin_again_holds_for_one_launch_of_a_run_that_is_resumed(script: str) -> None:
    _, site = run(script, Act(), resume=True, restart=True)
    assert site.made.launches[0][1].restart
    assert not TrainingRequest.load(str(Path(script).parent / "runs"), "r").restart
    _, site = run(script, Act(), restart=True, run_id="new")
    assert not site.made.launches[0][1].restart
