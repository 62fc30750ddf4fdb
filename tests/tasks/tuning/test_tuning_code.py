"""Tuning runs of whole projects: packed once, the same in all trials and in all processes."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from ebbflow.infra.clock import SystemClock
from ebbflow.infra.training.launcher.job import Options, checked_job, preparation
from ebbflow.infra.training.workspace import package
from ebbflow.infra.training.workspace.preparing import prepare
from ebbflow.planners.errors import OptionError
from ebbflow.tasks.pipeline.file.read import read_pipeline
from ebbflow.tasks.pipeline.file.requests import RunDirectories, tuning_request
from ebbflow.tasks.training.code import job_of
from ebbflow.tasks.tuning.code import FOR_TRIALS, TuningCode
from ebbflow.tasks.tuning.joining import join_tuning
from ebbflow.tasks.tuning.request import Parameter, TuningRequest
from ebbflow.tasks.tuning.run import run_tuning
from tests.code_projects import write_project
from tests.tasks.tuning.tuning_node import Trainings

SPACE = (Parameter("lr", "log", 0.01, 0.2),)


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("EBBFLOW_HOME", str(tmp_path / "home"))
    found = write_project(tmp_path)
    script = found / "train.py"  # without its package, whose installation other tests see to
    script.write_text(
        script.read_text().replace("import tinygreet", "#").replace("tinygreet.hello()", "'hello'")
    )
    return found


@pytest.fixture
def request_of(project: Path, tmp_path: Path) -> Callable[..., TuningRequest]:
    def make(**options: Any) -> TuningRequest:
        given = {
            "workdir": str(project), "run_id": "s", "runs_dir": str(tmp_path / "runs"), "pruner": "none",
            "trials": 2, "sampler": "random", "nodes": "local:1x1", "arguments": ("2",),
        }  # fmt: skip
        return TuningRequest("train.py", SPACE, "slope", **(given | options))

    return make


@pytest.mark.slow
@pytest.mark.processes
def test_trials_train_the_code_that_the_search_began_with(
    request_of: Any, project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLOR", "green")
    request = request_of(setup="echo made >> made.txt", env=("COLOR",))

    def notify(text: str) -> None:
        if text.startswith("trial-000: slope"):
            (project / "lib" / "model.py").write_text("raise SystemExit('of today')\n")

    report = run_tuning(request, notify)
    assert [trial.state for trial in report.trials] == ["complete", "complete"], report
    runs = tmp_path / "runs" / "s"
    seen = [path.read_text().split() for path in sorted(runs.glob("trial-*/logs/*/*/rank-*.out"))]
    assert {(line[1], line[2]) for line in seen} == {("hello", "green")}
    folders = {line[4] for line in seen}
    assert len(folders) == 2, "trials may write into their directories"
    assert {(Path(folder) / "made.txt").read_text() for folder in folders} == {"made\n"}
    assert not list(runs.glob("trial-*/code")), "packed once"


def test_who_joins_brings_the_same_code(request_of: Any, project: Path, tmp_path: Path) -> None:
    requirements = tmp_path / "packages.txt"
    requirements.write_text("einops\n")
    study = str(tmp_path / "study.db")
    request = request_of(study=study, requirements=str(requirements), setup="true", epochs=4)
    run_tuning(request, train=Trainings(tmp_path, "first", 10))
    first = package.get(f"{request.run_directory}/code").digest

    joined = join_tuning(study, "s")
    assert joined == replace(request, workdir=str(project))
    away = project.rename(tmp_path / "away")
    assert join_tuning(study, "s", {"script": "train.py"}) == joined, "its directory has the code"
    away.rename(project)
    assert run_tuning(joined, resume=True, train=Trainings(tmp_path, "x", 10)).state == "finished"
    elsewhere = {"runs_dir": str(tmp_path / "elsewhere")}
    run_tuning(join_tuning(study, "s", elsewhere), resume=True, train=Trainings(tmp_path, "x", 10))

    (project / "lib" / "model.py").write_text("pass\n")
    assert TuningCode(join_tuning(study, "s")).digests["digest"] == first, "its directory has it"
    rule = "the working directory of tuning run s is the same in all its processes: SHA-256 " + first[:16]
    with pytest.raises(OptionError, match=rule):
        join_tuning(study, "s", {"workdir": str(project)})
    with pytest.raises(OptionError, match=rule):
        run_tuning(join_tuning(study, "s", {"runs_dir": str(tmp_path / "third")}), resume=True)
    assert not (tmp_path / "third" / "s" / "code").exists(), "the right code can still be brought"
    requirements.write_text("einops>=0.8\n")
    with pytest.raises(OptionError, match="the requirements of tuning run s is the same"):
        join_tuning(study, "s", {"requirements": str(requirements), "workdir": _as_it_was(project)})
    with pytest.raises(OptionError, match="workdir is that of the recorded tuning run"):
        TuningRequest.load(str(tmp_path / "runs"), "s", {"workdir": str(project)})


def _as_it_was(project: Path) -> str:
    (project / "lib" / "model.py").write_text(
        "import torch\n\n\ndef make_model():\n    return torch.nn.Linear(1, 1)\n"
    )
    return str(project)


def test_code_of_an_attempt_that_never_began_is_not_trained(
    request_of: Any, project: Path, tmp_path: Path
) -> None:
    request = request_of(epochs=4)
    TuningCode(request).store()  # and then its process died
    (project / "lib" / "model.py").write_text("pass\n")
    run_tuning(request, train=Trainings(tmp_path, "x", 10))
    found = package.get(f"{request.run_directory}/code").digest
    assert found == TuningCode(request, fresh=True).digests["digest"]


def test_what_cannot_be_packed_is_told_before_anything_is_written(request_of: Any, tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="env NO_SUCH_VARIABLE takes its value from the environment"):
        run_tuning(request_of(env=("NO_SUCH_VARIABLE",)))
    request = request_of()
    script = Path(request.workdir) / "train.py"
    script.rename(script.with_name("other.py"))
    with pytest.raises(OptionError, match="script must be a Python file; there is none"):
        TuningCode(request)
    assert not (tmp_path / "runs").exists()


def test_nodes_find_the_code_beside_the_trials_and_unpack_it_for_each(
    request_of: Any, tmp_path: Path
) -> None:
    request = request_of(setup="echo made >> made.txt")
    TuningCode(request).store()
    trials = [request.trial(run, ()) for run in ("trial-000", "trial-001")]
    orders = [preparation(checked_job(job_of(trial, FOR_TRIALS)), Options()) for trial in trials]
    assert {order.code for order in orders if order is not None} == {f"{request.run_directory}/code"}
    made = [
        prepare(f"{request.run_directory}/code", trial.run_id, tmp_path / "cache", SystemClock())
        for trial in (*trials, trials[0])
    ]
    assert made[0] == made[2]
    folders = {found.directory for found in made if found.directory is not None}
    assert len(folders) == 2, "trials may write into their directories"
    assert {(folder / "made.txt").read_text() for folder in folders} == {"made\n"}
    assert all((folder / "lib" / "model.py").exists() for folder in folders)


def test_a_tuning_step_of_a_pipeline_has_code_as_a_training_has(project: Path, tmp_path: Path) -> None:
    file = tmp_path / "fit.yaml"
    step = {
        "script": "train.py", "workdir": "project", "requirements": "project/requirements.txt", "setup": "true",
        "space": {"lr": {"log": [0.01, 0.1]}},
    }  # fmt: skip
    pools = {"gpu": {"kind": "gpu", "nodes": 1}}
    file.write_text(
        yaml.safe_dump({"name": "fit", "cluster": {"local": {"pools": pools}}, "tunings": {"fit": step}})
    )
    pipeline = read_pipeline(str(file))
    places = RunDirectories(str(tmp_path / "run"), str(tmp_path / "store"))
    (found,) = pipeline.steps.values()
    request = tuning_request(found, pipeline, places, str, "fit")
    assert (request.script, request.workdir) == ("train.py", str(project))
    assert (request.requirements, request.setup) == (str(project / "requirements.txt"), "true")
