"""Tuning runs that several processes share, by a study in PostgreSQL: processes are killed, trials are not lost."""

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import optuna
import pytest

from ebbflow.infra.errors import TrainingError
from ebbflow.infra.ledger.address import parse
from ebbflow.planners.errors import OptionError
from ebbflow.tasks.tuning.joining import join_tuning
from ebbflow.tasks.tuning.run import run_tuning
from ebbflow.tasks.tuning.study import Study
from tests.infra.ledger.postgres import Server, server
from tests.tasks.tuning.tuning_node import EPOCHS, ID, TRIALS, Trainings, request_of

pytestmark = pytest.mark.processes

PATIENCE = 240.0  # s: a bound for a busy machine
ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def postgres() -> Iterator[Server]:
    with server() as found:
        yield found


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "fit.py").write_text("")
    return tmp_path


class Processes:
    """Node processes of one tuning run."""

    def __init__(self, folder: Path, study: str) -> None:
        self._folder, self._study = folder, study
        self.all: dict[str, subprocess.Popen[str]] = {}

    def begin(self, name: str, *stall: int) -> None:
        command = [
            sys.executable,
            "-P",
            "-m",
            "tests.tasks.tuning.tuning_node",
            self._study,
            str(self._folder),
            name,
        ]
        self.all[name] = subprocess.Popen(
            [*command, *map(str, stall)], cwd=ROOT, stdout=subprocess.PIPE, text=True,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )  # fmt: skip

    def said(self) -> list[tuple[str, ...]]:
        """Return who did what with which trial, in order."""
        log = self._folder / "log"
        return [tuple(line.split()) for line in log.read_text().splitlines()] if log.exists() else []

    def until(self, reached: Callable[[list[tuple[str, ...]]], Any], what: str) -> None:
        end = time.monotonic() + PATIENCE
        while not reached(self.said()):
            assert time.monotonic() < end, f"no {what}: {self.said()}"
            time.sleep(0.05)

    def kill_at_work(self, name: str) -> set[str]:
        """Kill a process while it trains, and return its trials that it has not ended."""
        self.until(lambda said: [one for one in said if one[:2] == (name, "stalls")][1:], f"stall of {name}")
        self.all[name].send_signal(signal.SIGKILL)
        self.all[name].wait(60)
        return {run for who, what, run in self.said() if (who, what) == (name, "stalls")}


@pytest.fixture
def processes(folder: Path, postgres: Server) -> Iterator[Processes]:
    found = Processes(folder, postgres.url)
    yield found
    for one in found.all.values():
        one.kill()
        one.communicate(timeout=150)


def test_a_search_of_three_processes_two_of_which_are_killed_ends_with_each_trial_once(
    processes: Processes, folder: Path, postgres: Server
) -> None:
    processes.begin("first", 4)
    processes.until(lambda said: said, "trial")
    processes.begin("second", 3)
    processes.until(lambda said: [one for one in said if one[0] == "second"], "trial of the second")
    processes.begin("third")
    killed = processes.kill_at_work("second") | processes.kill_at_work("first")  # also the one that began it
    report = json.loads(processes.all["third"].communicate(timeout=PATIENCE)[0])
    assert processes.all["third"].returncode == 0

    ended = {run for _, what, run in processes.said() if what == "finished"}
    assert ended == {f"trial-{number:03d}" for number in range(TRIALS)}, "none is lost"
    begun = Counter(run for _, what, run in processes.said() if what in ("begins", "stalls"))
    # a process that gets no core for the timeout may lose a trial once
    assert all(begun[run] in ((2, 3) if run in killed else (1, 2)) for run in ended), begun
    assert len(killed) == 4
    assert len({who for who, what, _ in processes.said() if what == "finished"}) == 3

    url = parse(postgres.url).url.render_as_string(hide_password=False)
    study = optuna.load_study(study_name=ID, storage=url)
    assert [(one.number, one.state.name) for one in study.trials] == [(n, "COMPLETE") for n in range(TRIALS)]
    assert all(len(one.intermediate_values) == EPOCHS for one in study.trials)
    assert report["state"] == "finished"
    assert [one["number"] for one in report["trials"]] == list(range(TRIALS))
    assert report["gpu_seconds"] == TRIALS, "those of trials of other processes, too"
    assert report["best"]["number"] == study.best_trial.number

    undisturbed = Study(replace(request_of(folder, ""), runs_dir=str(folder / "alone")))
    for one in study.trials:
        taken = undisturbed.take()
        assert taken is not None
        assert undisturbed.arguments(taken[0]) == one.params
    assert len({one.params["lr"] for one in study.trials}) == TRIALS

    optunas_own = str(Path(sys.executable).parent / "optuna")
    shown = subprocess.run(
        [optunas_own, "best-trial", "--study-name", ID, "--storage", url, "-f", "json"],
        capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    assert json.loads(shown.stdout)["number"] == study.best_trial.number


def test_who_joins_brings_the_same_script_and_no_parameters_of_his_own(
    folder: Path, postgres: Server
) -> None:
    study = postgres.create("joined")
    with pytest.raises(TrainingError, match="there is no tuning run 'together' in postgresql"):
        join_tuning(study, ID)
    request = request_of(folder, study, trials=2)
    run_tuning(request, train=Trainings(folder, "first", 10))
    with pytest.raises(TrainingError, match="there is a tuning run 'together'"):
        run_tuning(request)
    with pytest.raises(TrainingError, match=r"study 'together' in postgresql.* already: join it"):
        run_tuning(replace(request, runs_dir=str(folder / "elsewhere")), train=Trainings(folder, "x", 10))
    joined = join_tuning(study, ID, {"nodes": "local:3x1"})
    assert joined == replace(request, nodes="local:3x1"), "its directory of runs is there"
    report = run_tuning(joined, resume=True, train=Trainings(folder, "late", 10))
    assert (report.state, len(report.trials)) == ("finished", 2)
    assert not any(who == "late" for who in (folder / "log").read_text().split())
    with pytest.raises(
        OptionError, match="seed is the same in all processes of tuning run together: 7; got 3"
    ):
        join_tuning(study, ID, {"seed": 3})
    other = folder / "other.py"
    other.write_text("pass")
    with pytest.raises(OptionError, match=r"other\.py is another script than the one of together"):
        join_tuning(study, ID, {"script": str(other)})


def test_a_study_s_address_is_recorded_without_secrets(folder: Path) -> None:
    with pytest.raises(OptionError, match="study must have no password, since it is recorded") as error:
        request_of(folder, "postgresql://me:hunter2@db/lab")
    assert "hunter2" not in str(error.value)
    with pytest.raises(OptionError, match="a ledger lives in SQLite or PostgreSQL, not in 'mysql'"):
        request_of(folder, "mysql://db/lab")
    assert request_of(folder, "study.db").study.startswith("sqlite:////")
    with pytest.raises(OptionError, match="runs_dir of a tuning run must be local"):
        replace(request_of(folder, ""), runs_dir="s3://lake/runs")
