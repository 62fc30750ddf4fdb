"""Searches over trials that train nothing: who runs where, who is stopped, what a search goes on with."""

import json
import os
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ebbflow.infra.errors import RunLockedError, StorageFullError, TrainingError
from ebbflow.infra.storage.locks import RunLock
from ebbflow.planners.errors import OptionError
from ebbflow.tasks.training.capacity import Nodes
from ebbflow.tasks.training.listening import TrainingListener
from ebbflow.tasks.training.report import (
    FailureReport,
    GenerationReport,
    MetricReport,
    NodeShare,
    PointReport,
    TrainingReport,
    record,
    recorded,
)
from ebbflow.tasks.training.request import TrainingRequest
from ebbflow.tasks.tuning import loop
from ebbflow.tasks.tuning.report import TrialReport, TuningReport
from ebbflow.tasks.tuning.request import Parameter, TuningRequest, read_space
from ebbflow.tasks.tuning.run import run_tuning
from ebbflow.tasks.tuning.trial import TuningStatus, lineage_of

EPOCHS = 9
SPACE = (Parameter("lr", "log", 0.001, 1.0),)
Curve = Callable[[float, int], float]


def rising(lr: float, epoch: int) -> float:
    """Return an accuracy that ends higher for larger rates."""
    return (0.3 + 0.6 * lr) * (1 - 1 / (epoch + 1))


class Trainings:
    """Trains by formula, in the search's threads, and keeps what happened."""

    def __init__(self, curve: Curve = rising, fail: str = "", epochs: int = EPOCHS) -> None:
        self.curve, self.fail, self.epochs = curve, fail, epochs
        self.lock = threading.Lock()
        self.busy = self.most = 0
        self.runs: list[tuple[str, bool]] = []
        self.nodes: list[dict[str, int]] = []

    def __call__(
        self, request: TrainingRequest, listener: TrainingListener, nodes: Nodes, resume: bool
    ) -> TrainingReport:
        request.save()
        with self.lock:
            self.busy += nodes.slots
            self.most = max(self.most, self.busy)
            self.runs.append((request.run_id, resume))
            self.nodes.append(nodes.there())
            held = nodes.slots
        done = 0
        try:
            lr = float(request.arguments[request.arguments.index("--lr") + 1])
            while done < self.epochs and not nodes.stopped and not self.fail:
                done += 1
                listener.metrics(done * 10, done - 1, {"accuracy": self.curve(lr, done)})
                # as a real epoch would, so that a stop comes in time; the second trial is slow
                threading.Event().wait(0.2 if request.run_id == "trial-001" else 0.03)
            state = "failed" if self.fail else "stopped" if nodes.stopped else "finished"
            return self._report(request, state, done)
        finally:
            with self.lock:
                self.busy -= held

    def _report(self, request: TrainingRequest, state: Any, epochs: int) -> TrainingReport:
        failure = FailureReport("syntax-error", "user", "abc", self.fail) if self.fail else None
        generation = GenerationReport(1, (NodeShare("a", 1),), 0.0, 1.0, state, "", failure=failure)
        return TrainingReport(
            request.run_id, request.script, request.run_directory, 0.0, 1.0, state, self.fail, steps=epochs * 10,
            gpu_seconds=float(epochs), generations=(generation,),
        )  # fmt: skip


@pytest.fixture
def request_of(tmp_path: Path) -> Callable[..., TuningRequest]:
    script = tmp_path / "train.py"
    script.write_text("")

    def make(**options: Any) -> TuningRequest:
        chosen = {"nodes": "local:2x1", "trials": 8, "epochs": EPOCHS, "run_id": "s", **options}
        return TuningRequest(str(script), SPACE, "accuracy", runs_dir=str(tmp_path / "runs"), **chosen)

    return make


def test_halving_stops_trials_and_gives_their_gpus_to_others(request_of: Any) -> None:
    trainings = Trainings()
    report = run_tuning(request_of(), train=trainings)
    assert report.state == "finished"
    assert len(report.trials) == 8
    states = {trial.state for trial in report.trials}
    assert states == {"complete", "pruned"}
    assert trainings.most == 2
    best = max(float(trial.parameters["lr"]) for trial in report.trials if trial.state == "complete")
    assert report.best is not None
    assert report.best.parameters["lr"] == best
    pruned = [trial for trial in report.trials if trial.state == "pruned"]
    assert all(trial.epochs < EPOCHS for trial in pruned)
    assert all(trial.epochs == EPOCHS for trial in report.trials if trial.state == "complete")
    assert report.remaining_work
    assert all(one["work"] >= 0 for one in report.remaining_work)


def test_hyperband_stops_trials_of_some_brackets_and_says_what_is_left(request_of: Any) -> None:
    report = run_tuning(request_of(pruner="hyperband", trials=10), train=Trainings())
    states = [trial.state for trial in report.trials]
    assert set(states) == {"complete", "pruned"}
    assert report.remaining_work[-1]["work"] >= 0


def test_no_pruner_no_pruning(request_of: Any) -> None:
    report = run_tuning(request_of(pruner="none", trials=4), train=Trainings())
    assert [trial.state for trial in report.trials] == ["complete"] * 4


def test_curves_stop_what_cannot_win(request_of: Any) -> None:
    def by_order(lr: float, epoch: int) -> float:
        level = 0.9 if lr > 0.03 else 0.3
        return level - 1 / (2.0 * epoch + 1.5)

    request = request_of(pruner="curve", trials=6, nodes="local:1x1", epochs=12, sampler="random")
    report = run_tuning(request, train=Trainings(by_order, epochs=12))
    good = [trial for trial in report.trials if trial.parameters["lr"] > 0.03]
    poor = [trial for trial in report.trials if trial.parameters["lr"] <= 0.03]
    assert good
    assert poor
    assert all(trial.state == "complete" for trial in good)
    first = min(trial.number for trial in good)
    late = [trial for trial in poor if trial.number > first]
    assert late
    assert all(trial.state == "pruned" and trial.epochs < 12 for trial in late)


def test_a_trial_takes_what_others_leave(request_of: Any) -> None:
    trainings = Trainings()
    run_tuning(
        request_of(trials=1, nodes="local:2x2", gpus_per_trial=1, max_gpus=3, pruner="none"), train=trainings
    )
    assert sum(trainings.nodes[0].values()) == 3


class Resized(Trainings):
    """Trainings that say what they train on, and whose epochs wait until the better trial has the GPUs."""

    def __init__(self) -> None:
        super().__init__()
        self.worse, self.better = threading.Event(), threading.Event()

    def __call__(
        self, request: TrainingRequest, listener: TrainingListener, nodes: Nodes, resume: bool
    ) -> TrainingReport:
        request.save()
        good = request.run_id == "trial-000"
        assert self.worse.wait(150 if good else 0) or not good  # halving continues with whoever comes first
        for epoch in range(1, self.epochs + 1):
            listener.point(PointReport(0.0, epoch, gpus=nodes.slots))
            if epoch == 3:  # both have been compared after one epoch
                for _ in range(7500):
                    if self.better.wait(0.02):
                        break
                    listener.point(PointReport(0.0, epoch, gpus=nodes.slots))
                    if good and nodes.slots == 3:
                        with self.lock:
                            self.nodes.append(nodes.there())
                        self.better.set()
            listener.metrics(epoch, epoch - 1, {"accuracy": 0.9 if good else 0.2})
            self.worse.set()
        return self._report(request, "finished", self.epochs)


def test_gpus_move_to_the_trial_that_ranks_higher(request_of: Any) -> None:
    trainings, said = Resized(), list[str]()
    request = request_of(
        trials=2, nodes="local:1x4", max_gpus=3, parallel=2, reduction_factor=16, min_epochs=1, epochs=4
    )
    trainings.epochs = 4
    assert request.by_promise
    assert not request_of(max_gpus=2, allocate="equal").by_promise
    assert not request_of(max_gpus=2, pruner="none").by_promise
    assert not request_of().by_promise, "no trial may have more than it needs"
    with pytest.raises(OptionError, match="ranks"):
        request_of(trials=2, pruner="curve", allocate="promising")
    report = run_tuning(request, said.append, train=trainings)
    assert report.state == "finished"
    moved = [one for one in report.resizes if one.after == 3]
    assert moved
    assert moved[0].run == "trial-000"
    assert "scale-up" in moved[0].reason
    assert "ranked 1 of 2" in moved[0].reason
    assert f"trial-000: {moved[0].reason}" in said
    first = trainings.nodes[0]
    assert sum(first.values()) == 3
    assert len(first) > 1, "what it had kept its name, so that its processes train on"


def test_no_more_trials_at_once_than_asked_for(request_of: Any) -> None:
    trainings = Trainings()
    run_tuning(request_of(trials=3, nodes="local:1x4", parallel=1, pruner="none"), train=trainings)
    assert trainings.most == 1


def test_an_interrupt_loses_no_epoch_that_was_reported(request_of: Any) -> None:
    go, ended = threading.Event(), threading.Event()

    def train(
        request: TrainingRequest, listener: TrainingListener, nodes: Nodes, resume: bool
    ) -> TrainingReport:
        request.save()
        listener.metrics(1, 0, {"accuracy": 0.1})
        assert go.wait(150)
        for epoch in (1, 2):
            listener.metrics(epoch + 1, epoch, {"accuracy": 0.1 + epoch / 8})
        ended.set()
        return Trainings()._report(request, "finished", 3)

    def interrupt(status: TuningStatus) -> None:
        if any(one.epochs == 1 for one in status.trials):
            go.set()
            assert ended.wait(150)
            raise KeyboardInterrupt

    request = request_of(trials=1, pruner="none", epochs=3)
    report = run_tuning(request, train=train, watch=interrupt)
    assert report.state == "stopped"
    assert [(one.state, one.epochs, one.value) for one in report.trials] == [("complete", 3, 0.35)]
    again = run_tuning(TuningRequest.load(request.runs_dir, "s"), train=train, resume=True)
    assert [(one.epochs, one.value) for one in again.trials] == [(3, 0.35)]


def test_each_trial_is_a_run_of_the_trackers_and_says_whose_it_is(request_of: Any) -> None:
    request = request_of(track=("mlflow:tracking#rates", "wandb:fits"))
    assert request.track[0] == f"mlflow:sqlite:///{Path.cwd() / 'tracking' / 'mlflow.db'}#rates"
    trial = request.trial("trial-003", ())
    assert (trial.track, trial.name) == (request.track, "s/trial-003")
    assert lineage_of(trial) == {"tuning": "s", "tuning.trial": "trial-003"}
    assert lineage_of(request_of().trial("trial-003", ())) == {}
    with pytest.raises(OptionError, match="track"):
        request_of(track=("nothing:x",))


def test_gangs_run_whole(request_of: Any) -> None:
    trainings = Trainings()
    run_tuning(request_of(trials=4, nodes="local:2x2", gpus_per_trial=2, pruner="none"), train=trainings)
    assert {sum(nodes.values()) for nodes in trainings.nodes} == {2}
    assert trainings.most <= 4


def test_three_trials_that_fail_alike_end_the_search(request_of: Any) -> None:
    report = run_tuning(request_of(nodes="local:1x1"), train=Trainings(fail="SyntaxError: no"))
    assert report.state == "failed"
    assert "SyntaxError: no" in report.reason
    assert len([trial for trial in report.trials if trial.state == "failed"]) == 3


def test_a_metric_that_is_never_reported(request_of: Any) -> None:
    report = run_tuning(request_of(nodes="local:1x1"), train=Trainings(epochs=0))
    assert report.state == "failed"
    assert "never reported accuracy" in report.reason


def test_a_metric_that_is_not_a_number_ends_its_trial(request_of: Any) -> None:
    report = run_tuning(request_of(trials=2), train=Trainings(lambda lr, epoch: float("nan")))
    assert [trial.state for trial in report.trials] == ["pruned", "pruned"]
    assert report.best is None


def test_a_report_is_json_whatever_the_metric_was() -> None:
    trial = TrialReport(0, "trial-000", {"lr": 0.1}, "failed", float("nan"))
    report = TuningReport("s", "/runs", "loss", False, "failed", "nan", 0.0, 1.0, (trial,))

    def refuse(text: str) -> None:
        raise AssertionError(f"{text} is no JSON")

    assert json.loads(report.to_json(), parse_constant=refuse)["trials"][0]["value"] is None


def test_an_interrupted_search_goes_on(request_of: Any) -> None:
    request, first = request_of(trials=3, pruner="none"), Trainings()
    interrupts = iter([KeyboardInterrupt])

    def interrupt(text: str) -> None:
        if "after 9 epochs" in text and (error := next(interrupts, None)):
            raise error

    report = run_tuning(request, interrupt, train=first)
    assert report.state == "stopped"
    assert {trial.state for trial in report.trials} >= {"complete"}
    ended = {trial.run for trial in report.trials if trial.state == "complete"}
    second = Trainings()
    loaded = TuningRequest.load(request.runs_dir, "s", {"trials": 4})
    report = run_tuning(loaded, train=second, resume=True)
    assert report.state == "finished"
    assert [trial.state for trial in report.trials] == ["complete"] * 4
    assert not ended & {run for run, _ in second.runs}
    assert any(resumed for _, resumed in second.runs)


class FullFor(Trainings):
    """Trainings on a disk that is full for the first few of them."""

    def __init__(self, times: int, at_the_end: bool = False) -> None:
        super().__init__()
        self.times, self.at_the_end = times, at_the_end

    def __call__(
        self, request: TrainingRequest, listener: TrainingListener, nodes: Nodes, resume: bool
    ) -> TrainingReport:
        with self.lock:
            self.times -= 1
            full = self.times >= 0
        if full and self.at_the_end:  # it trained, and its last checkpoint found no space
            report = self._report(request, "failed", EPOCHS)
            failure = FailureReport("no-space", "resource", "abc", "StorageFullError: no space left")
            return replace(
                report,
                reason="no space left",
                generations=(replace(report.generations[0], failure=failure),),
            )
        if full:
            raise StorageFullError("cannot write the run: no space left")
        return super().__call__(request, listener, nodes, resume)


@pytest.mark.parametrize("at_the_end", [False, True])
@pytest.mark.parametrize("nodes", ["local:1x1", "local:2x1"])
def test_a_full_disk_is_no_trials_failure(request_of: Any, nodes: str, at_the_end: bool) -> None:
    request, trainings = request_of(trials=3, pruner="none", nodes=nodes), FullFor(1, at_the_end)
    with pytest.raises(StorageFullError, match="no space left"):
        run_tuning(request, train=trainings)
    trainings.times = 0  # there is room again
    report = run_tuning(request, train=trainings, resume=True)
    assert report.state == "finished"
    assert [trial.state for trial in report.trials] == ["complete"] * 3


def test_an_id_is_used_once(request_of: Any) -> None:
    run_tuning(request_of(trials=1), train=Trainings())
    with pytest.raises(TrainingError, match="--resume s"):
        run_tuning(request_of(trials=1), train=Trainings())
    with pytest.raises(TrainingError, match="no tuning run 'other'"):
        TuningRequest.load(request_of().runs_dir, "other")


def test_a_search_that_lives_is_not_gone_on_with(request_of: Any) -> None:
    request = request_of(run_id="one")
    with (
        RunLock(request.place, "one"),
        pytest.raises(RunLockedError, match=f"run by process {os.getpid()} of"),
    ):
        run_tuning(request, resume=True)
    assert not (Path(request.run_directory) / "optuna.journal").exists()


def test_spaces(tmp_path: Path) -> None:
    path = tmp_path / "space.yaml"
    path.write_text(
        "lr: {log: [0.001, 1]}\nlayers: {int: [1, 4]}\nact: {choice: [relu, tanh]}\ndrop: {float: [0, 0.5]}\n"
    )
    assert read_space(path) == (
        Parameter("lr", "log", 0.001, 1.0),
        Parameter("layers", "int", 1.0, 4.0),
        Parameter("act", "choice", choices=("relu", "tanh")),
        Parameter("drop", "float", 0.0, 0.5),
    )


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "must name parameters"),
        ("lr: 3", "a parameter is"),
        ("lr: {log: [0, 1]}", "numbers > 0"),
        ("lr: {float: [1, 1]}", "smaller first"),
        ("lr: {int: [1, 2.5]}", "two numbers"),
        ("lr: {gauss: [0, 1]}", "a parameter is"),
        ("a: {choice: []}", "choices are different"),
        ("a: {choice: [1, 1]}", "choices are different"),
        ("3: {int: [1, 2]}", "name begins with a letter"),
        ("a: [", "is not YAML"),
    ],
)
def test_bad_spaces(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "space.yaml"
    path.write_text(text)
    with pytest.raises(OptionError, match=words):
        read_space(path)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"trials": 0}, "trials"),
        ({"gpus_per_trial": 3}, "a trial needs 3"),
        ({"gpus_per_trial": 2, "max_gpus": 1}, "max_gpus"),
        ({"pruner": "curve", "epochs": None}, "--epochs"),
        ({"pruner": "best"}, "one of halving, hyperband, curve, pbt, none"),
        ({"reduction_factor": 1}, "reduction_factor"),
        ({"nodes": "x"}, "local:NODESxSLOTS"),
        ({"sampler": "grid"}, "one of tpe, random"),
    ],
)
def test_bad_searches(request_of: Any, options: dict[str, Any], words: str) -> None:
    with pytest.raises(OptionError, match=words):
        request_of(**options)


def test_a_trial_whose_run_another_process_holds_is_left_and_taken_up_later(
    request_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop, "LOCKED", 0.1)
    monkeypatch.setattr(loop, "_LOCK_LOOK", 0.05)
    said: list[str] = []

    class Held(Trainings):
        def __call__(
            self, request: TrainingRequest, listener: TrainingListener, nodes: Nodes, resume: bool
        ) -> TrainingReport:
            if request.run_id == "trial-000" and not any("left to others" in text for text in said):
                raise RunLockedError("trial-000 is being run by process 1")
            return super().__call__(request, listener, nodes, resume)

    report = run_tuning(request_of(trials=2, pruner="none"), said.append, train=Held())
    assert [trial.state for trial in report.trials] == ["complete"] * 2
    assert "trial-000: left to others for now: trial-000 is being run by process 1" in said


def test_a_trial_that_finished_unheard_is_not_trained_again(request_of: Any) -> None:
    request, trainings = request_of(trials=1, pruner="none"), Trainings()

    def crash(text: str) -> None:
        if text.startswith("trial-000:") and "lr" in text:
            raise MemoryError

    with pytest.raises(MemoryError):
        run_tuning(request, crash, train=trainings)
    whole = trainings._report(request.trial("trial-000", ()), "finished", EPOCHS)
    points = tuple(MetricReport(0.0, n * 10, n, "accuracy", 0.1 * n) for n in range(EPOCHS))
    run = request.trial("trial-000", ())
    run.save()
    assert not record(replace(whole, metrics=points), run)
    file = Path(run.run_directory) / "report.json"
    written = file.read_text()
    file.write_text(written.replace('"finished"', '"finishes"'))
    assert recorded(run) is None
    file.write_text(written)
    report = run_tuning(request, train=trainings, resume=True)
    assert [(t.state, t.epochs, t.steps) for t in report.trials] == [("complete", EPOCHS, 90)]
    assert report.best is not None
    assert report.best.value == pytest.approx(0.8)
    assert not trainings.runs
