"""A training of a whole project: packed, prepared once on a node, through kills, a resume and a pipeline."""

from pathlib import Path

import pytest
import yaml

from ebbflow.infra.training.workspace import package
from ebbflow.planners.errors import OptionError
from ebbflow.tasks.pipeline.run import PipelineRequest, run_steps
from ebbflow.tasks.training.capacity import Nodes
from ebbflow.tasks.training.code import store_code
from ebbflow.tasks.training.listening import NullTrainingListener
from ebbflow.tasks.training.report import PointReport
from ebbflow.tasks.training.request import TrainingRequest
from ebbflow.tasks.training.run import run_training
from tests.code_projects import write_project

pytestmark = pytest.mark.processes


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("EBBFLOW_HOME", str(tmp_path / "home"))
    return write_project(tmp_path)


def request_of(project: Path, *arguments: str, **options: object) -> TrainingRequest:
    given = {
        "workdir": str(project), "requirements": str(project / "requirements.txt"), "run_id": "r",
        "runs_dir": str(project.parent / "runs"), "preflight": "never", "retry_backoff": 0.1,
    }  # fmt: skip
    return TrainingRequest("train.py", arguments, **(given | options))  # type: ignore[arg-type]


class Stopping(NullTrainingListener):
    """Lets a training save and leave once it has come to a step."""

    def __init__(self, nodes: Nodes, step: int) -> None:
        self._nodes, self._step = nodes, step

    def point(self, point: PointReport) -> None:
        if point.step >= self._step:
            self._nodes.stop()


def environments(home: Path) -> list[str]:
    return sorted(path.name for path in (home / "environments").iterdir() if path.is_dir())


def printed(runs: Path) -> list[list[str]]:
    """Return what each process said of itself."""
    lines = [path.read_text().split() for path in sorted(runs.glob("logs/*/*/rank-*.out"))]
    return [line for line in lines if line]


def test_a_project_trains_through_a_kill_and_a_resume_and_each_is_prepared_once(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLOR", "s3cret-red")
    request = request_of(
        project, "15", str(tmp_path / "go"), nodes="local:1x1", fault=("300ms:kill:node-1", "300ms:add:1"),
        env=("COLOR",), setup="echo made >> made.txt", recovery="restart",
    )  # fmt: skip
    nodes = Nodes(request.placement, request.most_gpus, request.min_gpus)
    report = run_training(request, Stopping(nodes, 40), nodes=nodes)
    assert report.state == "stopped", report.reason
    assert "lost" in {generation.kind for generation in report.generations}
    (project / "lib" / "model.py").write_text("raise SystemExit('of today')\n")
    (tmp_path / "go").touch()
    report = run_training(TrainingRequest.load(str(tmp_path / "runs"), "r"), resume=True)
    assert (report.state, report.steps) == ("finished", 60), report.reason

    assert len(environments(tmp_path / "home")) == 1, "built once, for all nodes of both"
    seen = printed(tmp_path / "runs" / "r")
    assert len(seen) >= 3
    (prefix,) = {line[3] for line in seen}
    (folder,) = {line[4] for line in seen}
    assert {(line[1], line[2]) for line in seen} == {("hello", "s3cret-red")}
    assert Path(prefix).parent == tmp_path / "home" / "environments"
    assert (Path(folder) / "made.txt").read_text() == "made\n", "the setup command ran once"
    for path in (tmp_path / "runs" / "r").rglob("*"):
        if path.is_file() and "logs" not in path.parts:
            assert b"s3cret" not in path.read_bytes(), path


def test_a_run_keeps_the_code_that_it_began_with_until_it_is_packed_again(project: Path) -> None:
    request = request_of(project)
    first = store_code(request)
    assert first is not None
    (project / "train.py").write_text("print('of today')\n")
    folder = f"{request.run_directory}/code"
    assert package.get(folder).digest == first.digest
    assert package.get(folder).requirements_file == "requirements.txt"
    second = store_code(request)
    assert second is not None
    assert package.get(folder).digest == second.digest != first.digest


def test_a_broken_requirement_ends_the_run_with_the_installers_last_lines(project: Path) -> None:
    (project / "requirements.txt").write_text("./gone-1.0-py3-none-any.whl\n")
    report = run_training(request_of(project, "1", nodes="local:2x1"))
    assert report.state == "failed"
    assert (
        "cannot prepare the code: the requirements cannot be installed: pip ended with status 1"
        in report.reason
    )
    assert "gone-1.0-py3-none-any.whl" in report.reason
    assert len(report.generations) == 1, "it is not tried again"


def test_a_setup_command_that_fails_ends_the_run_with_its_last_lines(project: Path) -> None:
    report = run_training(request_of(project, "1", requirements="", setup="echo no compiler here; exit 4"))
    assert report.state == "failed"
    assert report.reason.endswith("the setup command ended with status 4:\nno compiler here")


def test_a_project_is_a_step_of_a_pipeline(project: Path, tmp_path: Path) -> None:
    step = {
        "script": "train.py", "workdir": "project", "requirements": "project/requirements.txt", "arguments": ["8"],
        "environment": {"COLOR": "blue"}, "termination_grace": "5s", "preflight": "never",
    }  # fmt: skip
    pools = {"gpu": {"kind": "gpu", "nodes": 1, "max_nodes": 2}}
    file = tmp_path / "fit.yaml"
    file.write_text(
        yaml.safe_dump({
            "name": "fit",
            "cluster": {"local": {"pools": pools, "faults": ["fit+500ms:kill:gpu"]}},
            "trainings": {"fit": step},
            "loop": {"lease_duration": "20s", "auction_interval": "2s", "termination_grace": "5s"},
        })
    )  # fmt: skip
    outcome = run_steps(PipelineRequest(str(file), run_id="one", runs_dir=str(tmp_path / "pipelines")))
    assert outcome.state == "finished", outcome
    assert outcome.step("fit").details["steps"] == 32
    seen = printed(Path(outcome.step("fit").results["directory"]))
    assert {(line[1], line[2]) for line in seen} == {("hello", "blue")}
    assert len(environments(tmp_path / "home")) == 1


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ({"env": ("1A=2",)}, "env must be KEY=VALUE or KEY"),
        ({"env": ("EBBFLOW_HOME=x",)}, "env must not set variables of Ebbflow's own"),
        ({"script": "gone.py"}, "there is none at"),
        ({"script": "../train.py"}, "relative to workdir"),
    ],
)
def test_what_is_wrong_is_told_at_once(project: Path, wrong: dict[str, object], why: str) -> None:
    with pytest.raises(OptionError, match=why):
        TrainingRequest(**({"script": "train.py", "workdir": str(project)} | wrong))  # type: ignore[arg-type]


def test_what_has_no_value_or_names_nothing_is_told_before_anything_starts(project: Path) -> None:
    with pytest.raises(OptionError, match="env NO_SUCH_VARIABLE takes its value from the environment"):
        run_training(request_of(project, "1", env=("NO_SUCH_VARIABLE",)))
    (project / "requirements.txt").write_text("# nothing\n")
    with pytest.raises(OptionError, match="requirements must name a package at least"):
        run_training(request_of(project, "1"))
