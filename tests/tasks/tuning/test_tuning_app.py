"""Searches that follow their leases: trials begin, pause and go on as GPUs come and go."""

import threading
from collections.abc import Iterator
from concurrent.futures import Future
from itertools import pairwise
from pathlib import Path
from typing import Any

import optuna
import pytest

from ebbflow.infra.ledger import Ledger
from ebbflow.planners.errors import OptionError
from ebbflow.tasks.apps.agent import AgentIntervals
from ebbflow.tasks.apps.lease_table import Rules
from ebbflow.tasks.tuning.app import run_tuning_app
from ebbflow.tasks.tuning.app_spec import tuning_spec
from ebbflow.tasks.tuning.report import TuningReport
from ebbflow.tasks.tuning.request import Parameter, TuningRequest
from tests.tasks.apps.app_loops import ScriptedLoop, begin, until
from tests.tasks.apps.toy_trainings import Machines, Script

PACE = AgentIntervals(look=0.02, report=0.1, entry=150.0, parting=150.0)
RULES = Rules(grace=30.0, leave=2.0, fence=60.0)
SPACE = (Parameter("lr", "log", 0.001, 1.0),)


class Search:
    def __init__(self, folder: Path, script: Script, **options: Any) -> None:
        (folder / "train.py").write_text("")
        options = {
            "trials": 2,
            "epochs": 100,
            "pruner": "none",
            "run_id": "s",
            "termination_grace": 5.0,
            **options,
        }
        self.request = TuningRequest(
            str(folder / "train.py"),
            SPACE,
            "accuracy",
            runs_dir=str(folder / "runs"),
            nodes="local:2x1",
            **options,
        )
        self.loop = ScriptedLoop(folder / "ledger.db", {"a": 1, "b": 2})
        self.ledger = Ledger.open(str(folder / "ledger.db"))
        self.machines, self.script = Machines(), script
        self.stop = threading.Event()
        self.said: list[str] = []
        self.run: Future[TuningReport] = self.begin()

    def begin(self) -> "Future[TuningReport]":
        return begin(
            run_tuning_app,
            self.request,
            tuning_spec(self.request),
            self.ledger,
            self.machines.pool,
            self.said.append,
            stop=self.stop,
            rules=RULES,
            pace=PACE,
            make=self.script.trainer,
        )

    def close(self) -> None:
        self.stop.set()
        self.run.exception(150)
        self.ledger.close()
        self.loop.close()
        assert not self.machines.busy
        for gpu in {use[:2] for use in self.machines.used}:
            uses = sorted(use[2:] for use in self.machines.used if use[:2] == gpu)
            assert all(a[1] <= b[0] for a, b in pairwise(uses)), "two trials met on a GPU"

    def trials(self) -> dict[str, dict[str, Any]]:
        return {one["id"]: dict(one) for one in self.loop.report("s").trials}


@pytest.fixture
def searches(tmp_path: Path) -> Iterator[Any]:
    made: list[Search] = []

    def make(script: Script, **options: Any) -> Search:
        search = Search(tmp_path, script, **options)
        made.append(search)
        until(lambda: search.run.done() or search.loop.phase("s"), "entry")
        return search

    yield make
    for search in made:
        search.close()


def test_trials_share_leases_and_each_says_what_it_has_left(searches: Any) -> None:
    search = searches(Script(metric="accuracy"))
    assert search.loop.phase("s") == "waiting"
    first, second = search.loop.grant("s", ("a", 0), ("b", 1))
    until(lambda: len(search.machines.busy) == 2, "two trials")
    until(lambda: search.loop.phase("s") == "running", "phase")
    trials = until(
        lambda: (t := search.trials()) and all(o.get("work_left") for o in t.values()) and len(t) == 2 and t,
        "work",
    )
    assert trials.keys() == {"trial-000", "trial-001"}
    assert {one["gpus_held"] for one in trials.values()} == {1}
    assert all(0 < one["epochs_left"] <= 100 for one in trials.values())
    report = search.loop.report("s")
    assert report.work_left == pytest.approx(sum(one["work_left"] for one in report.trials))
    assert report.work_total > report.work_left
    search.loop.recall(first)
    until(lambda: search.loop.ended(first), "end of the lease")
    until(lambda: search.machines.busy == {("b", 1)}, "one trial")
    until(lambda: [o["gpus_held"] for o in search.trials().values()].count(0) == 1, "the other waits")
    until(lambda: any("paus" in text for text in search.said), "word of it")
    paused = next(run for run, one in search.trials().items() if not one["gpus_held"])
    done = search.trials()[paused]["epochs"]
    search.loop.grant("s", ("b", 0))
    until(lambda: search.machines.busy == {("b", 0), ("b", 1)}, "both again")
    until(lambda: search.trials()[paused]["epochs"] > done, "it has gone on from where it was")
    search.loop.recall(second)
    until(lambda: search.loop.ended(second), "end of the lease")


def test_a_search_without_leases_waits_and_then_ends(searches: Any) -> None:
    search = searches(Script(steps=60, metric="accuracy"), trials=3)
    (lease,) = search.loop.grant("s", ("a", 0))
    until(lambda: search.machines.busy, "a trial")
    search.loop.recall(lease)
    until(lambda: search.loop.phase("s") == "waiting", "the wait")
    until(lambda: search.loop.ended(lease), "end of the lease")
    assert not search.machines.busy
    search.loop.grant("s", ("b", 0), ("b", 1))
    report = search.run.result(150)
    assert (report.state, [one.state for one in report.trials]) == ("finished", ["complete"] * 3)
    assert all(one.epochs == 6 for one in report.trials)
    assert report.gpu_seconds > 0
    until(lambda: not search.ledger.state().leases, "end of all leases")
    assert search.loop.phase("s") == "finished"


def test_a_trial_whose_node_is_killed_goes_on_elsewhere(searches: Any) -> None:
    search = searches(Script(steps=150, metric="accuracy"), trials=1)
    search.loop.grant("s", ("a", 0))
    until(lambda: search.machines.busy, "the trial")
    search.machines.kill("a")
    until(lambda: not search.machines.busy, "its loss")
    search.loop.lose("a")
    search.loop.grant("s", ("b", 0))
    report = search.run.result(150)
    assert [one.state for one in report.trials] == ["complete"]


def test_a_stopped_search_goes_on_with_its_trials(searches: Any) -> None:
    search = searches(Script(steps=300, metric="accuracy"))
    search.loop.grant("s", ("a", 0), ("b", 0))
    until(lambda: len(search.machines.busy) == 2, "two trials")
    until(lambda: all(o["epochs"] for o in search.trials().values()), "epochs")
    search.stop.set()
    assert search.run.result(150).state == "stopped"
    assert search.loop.phase("s") == "stopped"
    until(lambda: not search.ledger.state().leases, "end of all leases")
    search.stop.clear()
    search.run = search.begin()
    until(lambda: search.loop.phase("s") == "waiting", "entry")
    search.loop.grant("s", ("b", 0), ("b", 1))
    report = search.run.result(150)
    assert [one.state for one in report.trials] == ["complete"] * 2
    assert len({trainer._job.id for trainer in search.script.made}) == 2, "no trial beyond the two"


def test_a_trial_grows_into_what_is_left(searches: Any) -> None:
    search = searches(Script(metric="accuracy"), trials=1, max_gpus=3)
    search.loop.grant("s", ("a", 0))
    until(lambda: search.machines.busy == {("a", 0)}, "one GPU")
    search.loop.grant("s", ("b", 0), ("b", 1))
    until(lambda: search.machines.busy == {("a", 0), ("b", 0), ("b", 1)}, "three GPUs")
    (trainer,) = search.script.made
    assert trainer.resizes, "in place, by a move"


def test_a_search_whose_study_could_not_be_kept_is_refused(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("")
    with pytest.raises(OptionError, match="runs_dir of a tuning run must be local"):
        TuningRequest(
            str(tmp_path / "train.py"),
            SPACE,
            "accuracy",
            run_id="s",
            runs_dir="s3://bucket/runs",
            nodes="local:1x1",
        )
    assert not Path("s3:").exists()


def test_a_search_keeps_its_study_in_the_ledger_s_database(searches: Any, tmp_path: Path) -> None:
    search = searches(Script(steps=60, metric="accuracy"), study="ledger")
    search.loop.grant("s", ("a", 0), ("b", 1))
    report = search.run.result(150)
    assert (report.state, [one.state for one in report.trials]) == ("finished", ["complete"] * 2)
    study = optuna.load_study(study_name="s", storage=f"sqlite:///{tmp_path / 'ledger.db'}")
    assert [one.state.name for one in study.trials] == ["COMPLETE"] * 2
    assert not (tmp_path / "runs" / "s" / "optuna.journal").exists()
