"""Population-based training over trials that train by formula and save real checkpoints: copies, turns, resumes."""

import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from ebbflow.infra.clock import SystemClock
from ebbflow.infra.training.checkpoints.folder import CheckpointFolder, VerifiedCheckpoint
from ebbflow.planners.errors import OptionError
from ebbflow.planners.model.capacity import Node
from ebbflow.planners.model.scheduling import App, Placement
from ebbflow.tasks.training.capacity import Nodes
from ebbflow.tasks.training.listening import TrainingListener
from ebbflow.tasks.training.report import TrainingReport
from ebbflow.tasks.training.request import TrainingRequest
from ebbflow.tasks.tuning.population import Copy, Population
from ebbflow.tasks.tuning.recorder import TuningRecorder
from ebbflow.tasks.tuning.report import TuningReport
from ebbflow.tasks.tuning.request import Parameter, TuningRequest
from ebbflow.tasks.tuning.resources import OwnTrialResources
from ebbflow.tasks.tuning.run import run_tuning
from ebbflow.tasks.tuning.study import Study
from ebbflow.tasks.tuning.trial import Trial, TuningStatus

EPOCHS, MEMBERS = 6, 5
SPACE = (Parameter("lr", "log", 0.001, 1.0),)


class Trainings:
    """Adds its learning rate to a weight each epoch, which checkpoints keep and which is the score."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.known: dict[str, int] = {}  # run -> epochs that the tuning run has taken in
        self.begun: list[tuple[str, int, float]] = []  # run, epochs done, weight
        self.epochs: list[tuple[str, int]] = []
        self.requests: list[TrainingRequest] = []
        self.deaf = False  # whether it trains to its end whatever it is told

    def __call__(
        self, request: TrainingRequest, listener: TrainingListener, nodes: Nodes, resume: bool
    ) -> TrainingReport:
        request.save()
        folder = CheckpointFolder(request.place.under("checkpoints"), request.keep_checkpoints)
        found = folder.latest()
        done, weight = 0, 0.0
        if found is not None:
            done, weight = found.step, float(folder.load(found)["model"]["weight"])
        with self.lock:
            self.begun.append((request.run_id, done, weight))
            self.requests.append(request)
        rate = float(request.arguments[request.arguments.index("--lr") + 1])
        trained = 0
        while done < EPOCHS and (self.deaf or not nodes.stopped):
            done, weight, trained = done + 1, weight + rate, trained + 1
            folder.save({"model": {"weight": torch.tensor(weight, dtype=torch.float64)}}, done)
            with self.lock:
                self.epochs.append((request.run_id, done))
            listener.metrics(done, done - 1, {"score": weight})
            while not nodes.stopped and self.known.get(request.run_id, 0) < done:
                threading.Event().wait(0.005)  # as if epochs were long: a stop comes before the next
        state: Any = "finished" if done == EPOCHS and (self.deaf or not nodes.stopped) else "stopped"
        return TrainingReport(
            request.run_id, request.script, request.run_directory, 0.0, 1.0, state, "", steps=done,
            gpu_seconds=float(trained),
        )  # fmt: skip

    def watch(self, status: TuningStatus) -> None:
        self.known |= {one.run: one.epochs for one in status.trials}


@pytest.fixture
def request_of(tmp_path: Path) -> Callable[..., TuningRequest]:
    (tmp_path / "fit.py").write_text("")

    def make(**options: Any) -> TuningRequest:
        given = {
            "pruner": "pbt", "population_interval": 2, "epochs": EPOCHS, "trials": MEMBERS, "sampler": "random",
            "seed": 3, "nodes": f"local:1x{MEMBERS}", "run_id": "p", "runs_dir": str(tmp_path / "runs"),
        }  # fmt: skip
        return TuningRequest(str(tmp_path / "fit.py"), SPACE, "score", **(given | options))

    return make


def check(report: TuningReport, trainings: Trainings) -> None:
    """Assert that members ended whole, and that copies began where their peers were."""
    assert report.state == "finished"
    assert [(one.state, one.epochs) for one in report.trials] == [("complete", EPOCHS)] * MEMBERS
    copies = [one for one in report.trials if one.reason]
    assert copies, "the worst copied"
    for one in copies:
        assert one.reason.startswith("copied trial-")
        assert one.run.partition(".")[2] == str(one.reason.count("copied"))
    best = max(report.trials, key=lambda one: one.value or 0.0)
    assert report.best == best
    first = {run: (done, weight) for run, done, weight in reversed(trainings.begun)}
    for one in copies:
        done, weight = first[one.run]
        assert done > 0, "it begins with a peer's checkpoint"
        assert weight > 0
    assert all(request.script_hyperparameters for request in trainings.requests)
    assert {request.keep_checkpoints for request in trainings.requests} == {2}


def test_the_worst_continue_from_the_best_with_other_hyperparameters(request_of: Any) -> None:
    trainings = Trainings()
    said: list[str] = []
    report = run_tuning(request_of(), said.append, train=trainings, watch=trainings.watch)
    check(report, trainings)
    assert not any("makes room" in text for text in said), "all run at once"
    for one in report.trials:
        rate = [float(request.arguments[-1]) for request in trainings.requests if request.run_id == one.run]
        assert one.parameters["lr"] == rate[-1]


def test_members_that_share_a_gpu_take_turns(request_of: Any) -> None:
    trainings = Trainings()
    report = run_tuning(request_of(nodes="local:1x1"), train=trainings, watch=trainings.watch)
    check(report, trainings)
    at = dict.fromkeys(range(MEMBERS), 0)
    for run, epoch in trainings.epochs:
        at[int(run[6:9])] = epoch
        assert max(at.values()) - min(at.values()) <= 2 * 2, (
            "they stay together, but for an epoch until a stop"
        )
    assert sum(one.gpu_seconds for one in report.trials) >= MEMBERS * EPOCHS - MEMBERS


def test_a_population_that_was_stopped_continues_with_what_it_had_copied(request_of: Any) -> None:
    trainings, stop = Trainings(), threading.Event()

    def notify(text: str) -> None:
        if "copied" in text:
            stop.set()

    first = run_tuning(request_of(), notify, train=trainings, stop=stop, watch=trainings.watch)
    assert first.state == "stopped"
    report = run_tuning(request_of(), train=trainings, resume=True, watch=trainings.watch)
    check(report, trainings)


def test_a_copy_that_was_due_when_the_process_left_is_trained_by_the_next(request_of: Any) -> None:
    trainings, stop = Trainings(), threading.Event()

    def notify(text: str) -> None:
        if "copied" in text:
            trainings.deaf = True  # it is at its end before it hears that it is to leave
            stop.set()

    first = run_tuning(request_of(), notify, train=trainings, stop=stop, watch=trainings.watch)
    assert first.state == "stopped"
    trainings.deaf = False
    report = run_tuning(request_of(), train=trainings, resume=True, watch=trainings.watch)
    copies = {one.run for one in report.trials if one.reason}
    assert copies
    assert copies <= {run for run, _, _ in trainings.begun}


class Shrinking(OwnTrialResources):
    """Five GPUs, and one once all members have trained; the member with the largest rate keeps it."""

    def __init__(self, request: TuningRequest, trainings: Trainings) -> None:
        super().__init__(request)
        self._trainings = trainings
        self.kept = ""
        self._lose: set[str] = set()

    def nodes(self) -> tuple[Node, ...]:
        runs = {request.run_id: float(request.arguments[-1]) for request in self._trainings.requests}
        if not self.kept and len({run for run, _ in self._trainings.epochs}) == MEMBERS:
            self.kept = max(runs, key=lambda run: runs[run])
            self._lose = set(runs) - {self.kept}
            (node,) = self._nodes
            self._nodes = (replace(node, cores=1, gpus=1),)
        return self._nodes

    def held(self, one: Trial) -> Placement:
        lost = one.run in self._lose
        self._lose.discard(one.run)
        return () if lost else super().held(one)


def test_members_that_lost_their_gpus_are_waited_for(request_of: Any) -> None:
    trainings, request = Trainings(), request_of()
    resources = Shrinking(request, trainings)
    report = run_tuning(request, train=trainings, watch=trainings.watch, resources=resources)
    assert [(one.state, one.epochs) for one in report.trials] == [("complete", EPOCHS)] * MEMBERS
    last = trainings.epochs.index((resources.kept, EPOCHS))
    done = dict.fromkeys(range(MEMBERS), 0)
    for run, epoch in trainings.epochs[:last]:
        done[int(run[6:9])] = epoch
    assert min(done.values()) >= 4, "the last interval of the best began when all were as far"


@pytest.fixture
def pair(request_of: Any) -> Iterator[tuple[TuningRequest, Study, Trial]]:
    """Yield a study of two, of which the second has copied the first after four epochs of six."""
    request = request_of(trials=2)
    with closing(Study(request)) as study:
        taken = [study.take(), study.take()]
        peer, own = (one[0] for one in taken if one is not None)
        for trial in (peer, own):
            study.arguments(trial)
        for epoch in range(1, EPOCHS + 1):
            study.report(peer, epoch, 0.1 * epoch)
            if epoch <= 4:
                study.report(own, epoch, 0.01 * epoch)
        study.remember(own, "ebbflow.copies", [asdict(Copy(4, "trial-000", {"lr": 0.5}))])
        app = App("trial-001.1", 1, 0.0, 1, 1, 1)
        yield (
            request,
            study,
            Trial(own, app, "trial-001.1", {"lr": 0.5}, True, copied=("trial-000",), epochs=4, value=0.04),
        )


def test_a_member_with_the_end_of_its_peer_has_its_figures_in_every_process(
    pair: tuple[TuningRequest, Study, Trial],
) -> None:
    request, study, one = pair
    Population(request, study).inherit(one)
    assert (one.epochs, one.value) == (EPOCHS, pytest.approx(0.6))
    assert study.tell(one.trial, one.value, "complete")
    (told,) = TuningRecorder(request, study, SystemClock()).report("finished", "").trials
    assert (told.run, told.epochs, told.value) == (one.run, one.epochs, one.value)


def test_a_member_that_has_trained_since_it_copied_keeps_its_own_figures(
    pair: tuple[TuningRequest, Study, Trial],
) -> None:
    request, study, one = pair
    for epoch in (5, EPOCHS):
        study.report(one.trial, epoch, 0.7)
        one.epochs, one.value = epoch, 0.7
        Population(request, study).inherit(one)
        assert (one.epochs, one.value) == (epoch, 0.7)


def test_a_checkpoint_that_its_run_deletes_while_it_is_copied_gives_way_to_a_newer_one(
    pair: tuple[TuningRequest, Study, Trial], monkeypatch: pytest.MonkeyPatch
) -> None:
    request, study, one = pair

    def folder(run: str) -> CheckpointFolder:
        return CheckpointFolder(request.trial(run, ()).place.under("checkpoints"), 1)

    peer, copy, steps = folder("trial-000"), CheckpointFolder.take_over, iter((2, 3))
    peer.save({"model": {"weight": torch.ones(1)}}, 1)

    def take_over(own: CheckpointFolder, other: CheckpointFolder, found: VerifiedCheckpoint) -> Any:
        if (step := next(steps, None)) is not None:
            peer.save({"model": {"weight": torch.ones(1)}}, step)  # and delete what was found
        return copy(own, other, found)

    monkeypatch.setattr(CheckpointFolder, "take_over", take_over)
    assert Population(request, study).seed(request.trial(one.run, ()), one.copied) == "trial-000"
    found = folder(one.run).latest()
    assert found is not None
    assert found.step == 3


def test_a_population_needs_its_length(request_of: Any) -> None:
    with pytest.raises(OptionError, match="pruner pbt needs to know the epochs"):
        request_of(epochs=None)
    with pytest.raises(OptionError, match="pruner hyperband needs to know the epochs"):
        request_of(pruner="hyperband", epochs=None)
