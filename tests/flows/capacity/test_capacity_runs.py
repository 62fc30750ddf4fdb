"""Flow runs whose process is gone: which are marked, and which are gone on with, and never twice."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ebbflow.flows.capacity.flow_runs import RunView
from ebbflow.flows.capacity.runs import LOOK, FlowRunRecovery, holder_in, resumed, tag_of
from ebbflow.infra.clock import SystemClock
from ebbflow.infra.errors import InfraError
from ebbflow.infra.ledger import Ledger
from ebbflow.planners.model.ledger import REMEMBERED, SWEEP, AppEntered, AppMoved, AppSpec, Decided
from ebbflow.tasks.apps.specs import Resume
from ebbflow.tasks.capacity.recovery import LostApp, RestartPolicy

NOW = RestartPolicy(first=0.0, start=0.0)
LATER = RestartPolicy(first=0.0, start=3600.0)


class Runs:
    """A Prefect that remembers."""

    def __init__(self, *views: RunView) -> None:
        self.known = {view.id: view for view in views}
        self.begun: dict[str, tuple[str, Mapping[str, Any], Sequence[str]]] = {}  # by key
        self.away = False
        self.asked = 0

    def view(self, run: str) -> RunView | None:
        self._answer()
        return self.known.get(run)

    def crashed(self, run: str, why: str) -> None:
        self._answer()
        view = self.known[run]
        if not view.over:
            state = "CANCELLED" if view.state == "CANCELLING" else "CRASHED"
            self.known[run] = replace(view, state=state, message=why)

    def waiting(self, tag: str) -> Sequence[str]:
        self._answer()
        return [view.name for view in self.known.values() if tag in view.tags and not view.over]

    def begin(
        self,
        deployment: str,
        parameters: Mapping[str, Any],
        key: str,
        tags: Sequence[str],
        job_variables: Mapping[str, Any],
        name: str,
    ) -> RunView:
        self._answer()
        if key not in self.begun:
            self.begun[key] = (deployment, parameters, tags)
            made = RunView(f"new-{len(self.begun)}", name or "new", "train", "SCHEDULED", tags=tuple(tags))
            self.known[made.id] = made
        return self.known[f"new-{list(self.begun).index(key) + 1}"]

    def state(self, run: str) -> str:
        return self.known[run].state

    def _answer(self) -> None:
        self.asked += 1
        if self.away:
            raise InfraError("no answer")


class Clock(SystemClock):
    ahead = 0.0

    def now(self) -> float:
        return super().now() + self.ahead


def view(run: str, state: str = "RUNNING", **fields: Any) -> RunView:
    return RunView(run, f"name of {run}", "train", state, **{"deployment": "d-1", **fields})


def spec(app: str, run: str = "run-1", **fields: Any) -> AppSpec:
    resume = Resume("training", "/runs", app, fields.pop("named", "")).to_dict()
    return AppSpec(app, "training", gpus=1, flow_run=run, resume=resume, **fields)


@pytest.fixture
def ledger(tmp_path: Path) -> Iterator[Ledger]:
    with Ledger.open(str(tmp_path / "ledger.db"), cluster="lab") as opened:
        yield opened


def enter(ledger: Ledger, *specs: AppSpec, phase: Any = "running") -> None:
    ledger.write([AppEntered(one) for one in specs])
    ledger.write([AppMoved(one.id, phase, "said so") for one in specs])


def test_a_run_whose_app_is_lost_has_crashed_and_goes_on_once(ledger: Ledger) -> None:
    runs = Runs(view("run-1", parameters={"script": "fit.py", "nodes": "local:2x1"}, tags=("mine",)))
    told: list[tuple[str, str]] = []
    mender = FlowRunRecovery(
        ledger, runs, notify=lambda app, run: told.append((app.spec.id, run.id)), policy=LATER
    )
    enter(ledger, spec("fit"))
    mender.look()
    assert runs.state("run-1") == "RUNNING"
    ledger.write([AppMoved("fit", "lost", "silent")])
    for _ in range(3):
        mender.look()
    assert runs.state("run-1") == "CRASHED"
    assert "silent" in runs.known["run-1"].message
    ((deployment, parameters, tags),) = runs.begun.values()
    assert deployment == "d-1"
    assert parameters == {"script": "fit.py", "nodes": "local:2x1", "run_id": "fit", "resume": True}
    assert list(tags) == ["ebbflow-resumes:lab:fit", "mine"]
    assert told == [("fit", "new-1")]


def test_two_loops_and_one_that_is_restarted_begin_one_run(ledger: Ledger) -> None:
    runs = Runs(view("run-1"))
    enter(ledger, spec("fit"), phase="lost")
    for _ in range(3):  # none remembers anything of the others; each is impatient
        mender = FlowRunRecovery(ledger, runs, policy=NOW)
        mender.look()
        mender.look()
    assert len(runs.begun) == 1


def test_two_loops_at_the_same_moment_begin_one_run(ledger: Ledger) -> None:
    runs = Runs(view("run-1"))
    enter(ledger, spec("fit"), phase="lost")
    other = FlowRunRecovery(ledger, runs, policy=NOW)
    other._view("run-1")
    inner = [other]

    class Racing(Runs):
        def begin(self, *given: Any) -> RunView:
            if inner:
                inner.pop()._start(app)  # the other one gets in between
            return runs.begin(*given)

        view = staticmethod(runs.view)  # type: ignore[assignment]
        waiting = staticmethod(runs.waiting)  # type: ignore[assignment]
        crashed = staticmethod(runs.crashed)  # type: ignore[assignment]

    from ebbflow.tasks.capacity.recovery import lost_apps

    (app,) = lost_apps(ledger, ledger.clock.now(), NOW)
    FlowRunRecovery(ledger, Racing(), policy=NOW).look()
    assert not inner
    assert len(runs.begun) == 1


def test_a_loop_that_does_not_lead_does_nothing(ledger: Ledger) -> None:
    runs = Runs(view("run-1"))
    enter(ledger, spec("fit"), phase="lost")
    FlowRunRecovery(ledger, runs, leads=lambda: False, policy=NOW).look()
    assert runs.asked == 0
    assert not runs.begun


@pytest.mark.parametrize(("state", "then"), [("CANCELLING", "CANCELLED"), ("CANCELLED", "CANCELLED")])
def test_a_cancelled_run_is_not_gone_on_with(ledger: Ledger, state: str, then: str) -> None:
    runs = Runs(view("run-1", state))
    enter(ledger, spec("fit", named="train/spot"), phase="lost")
    FlowRunRecovery(ledger, runs, policy=NOW).look()
    assert runs.state("run-1") == then
    assert not runs.begun
    record = ledger.state().apps["fit"]
    assert (record.phase, record.reason) == ("stopped", "its flow run was cancelled")


def test_a_run_that_was_terminated_goes_on_though_its_app_said_that_it_stopped(ledger: Ledger) -> None:
    runs = Runs(view("run-1", "CRASHED", message="aborted by a termination signal"))
    mender = FlowRunRecovery(ledger, runs, policy=NOW)
    enter(ledger, spec("fit"), phase="stopped")
    mender.look()
    assert ledger.state().apps["fit"].phase == "lost"
    assert "termination" in ledger.state().apps["fit"].reason
    assert len(runs.begun) == 1


@pytest.mark.parametrize(
    "fields", [{"deployment": ""}, {"message": "Execution was aborted by an interrupt signal."}]
)
def test_a_run_that_was_ended_by_hand_or_has_no_deployment_stays_stopped(
    ledger: Ledger, fields: dict[str, str]
) -> None:
    runs = Runs(view("run-1", "CRASHED", **{"message": "terminated", **fields}))
    enter(ledger, spec("fit"), phase="stopped")
    FlowRunRecovery(ledger, runs, policy=NOW).look()
    assert ledger.state().apps["fit"].phase == "stopped"
    assert not runs.begun


def test_a_run_that_somebody_has_begun_again_is_left_alone(ledger: Ledger) -> None:
    """As with the button *Retry*: the run is the same, and has yet to enter its app."""
    enter(ledger, spec("fit"), phase="lost")
    before, after = ledger.clock.now() - 60.0, ledger.clock.now() + 1.0
    runs = Runs(view("run-1", since=after))
    FlowRunRecovery(ledger, runs, policy=NOW).look()
    assert runs.state("run-1") == "RUNNING"
    assert not runs.begun
    runs.known["run-1"] = view("run-1", since=before)
    FlowRunRecovery(ledger, runs, policy=NOW).look()
    assert runs.state("run-1") == "CRASHED"


@pytest.mark.parametrize("phase", ["finished", "stopped", "failed"])
def test_runs_whose_apps_are_over_end_by_themselves(ledger: Ledger, phase: str) -> None:
    runs = Runs(view("run-1"))
    mender = FlowRunRecovery(ledger, runs, policy=NOW)
    enter(ledger, spec("fit"), phase=phase)
    mender.look()
    runs.known["run-1"] = replace(runs.known["run-1"], state="COMPLETED")
    mender.look()
    asked = runs.asked
    mender.look()
    assert runs.asked == asked  # it is not looked at any more
    assert runs.state("run-1") == "COMPLETED"
    assert not runs.begun
    assert ledger.state().apps["fit"].phase == phase


def test_a_run_is_left_alone_while_one_of_its_apps_lives(ledger: Ledger) -> None:
    runs = Runs(view("run-1", parameters={"resume": None}))
    enter(ledger, spec("a", pipeline="p"), spec("b", pipeline="p"))
    ledger.write([AppMoved("a", "lost", "silent")])
    mender = FlowRunRecovery(ledger, runs, policy=NOW)
    mender.look()
    assert runs.state("run-1") == "RUNNING"
    assert not runs.begun
    ledger.write([AppMoved("b", "lost", "silent")])
    mender.look()
    assert runs.state("run-1") == "CRASHED"
    assert len(runs.begun) == 1


def test_a_run_whose_apps_have_gone_on_elsewhere_has_crashed(ledger: Ledger) -> None:
    runs = Runs(view("run-1"), view("run-2"))
    enter(ledger, spec("fit"), phase="lost")
    enter(ledger, spec("fit", "run-2"))
    FlowRunRecovery(ledger, runs, policy=NOW).look()
    assert (runs.state("run-1"), runs.state("run-2")) == ("CRASHED", "RUNNING")
    assert not runs.begun


def test_a_run_whose_apps_the_ledger_has_forgotten_is_left_alone(tmp_path: Path) -> None:
    clock = Clock()
    runs = Runs(view("run-1"))
    with Ledger.open(str(tmp_path / "long.db"), cluster="lab", clock=clock) as ledger:
        enter(ledger, spec("fit"), phase="finished")
        clock.ahead = REMEMBERED + 60.0
        ledger.write([Decided("guard", "no") for _ in range(2 * SWEEP)])
        assert "fit" not in ledger.state().apps
        mender = FlowRunRecovery(ledger, runs, policy=NOW)  # of a loop that began just now
        for _ in range(2):
            mender.look()
    assert runs.state("run-1") == "RUNNING"
    assert not runs.begun


def test_the_flow_that_a_run_was_part_of_has_crashed_with_it(ledger: Ledger) -> None:
    runs = Runs(view("run-1", deployment="", parent="outer"), view("outer"))
    enter(ledger, spec("fit"), phase="lost")
    FlowRunRecovery(ledger, runs, policy=NOW).look()
    assert (runs.state("run-1"), runs.state("outer")) == ("CRASHED", "CRASHED")
    assert not runs.begun  # nobody knows what else that flow does


def test_the_runs_of_loops_that_were_followed_by_another_have_crashed(tmp_path: Path) -> None:
    clock = Clock()
    runs = Runs(view("loop-1"), view("loop-2"), view("loop-3"))
    with Ledger.open(str(tmp_path / "loops.db"), cluster="lab", clock=clock) as ledger:
        for number in (1, 2, 3):
            ledger.lead(holder_in(f"loop-{number}"), take_over=True)
        mender = FlowRunRecovery(ledger, runs)
        mender.look()
        assert {run.state for run in runs.known.values()} == {"RUNNING"}  # a loop takes a moment to leave
        clock.ahead = 120.0
        mender.look()
    assert [runs.state(f"loop-{number}") for number in (1, 2, 3)] == ["CRASHED", "CRASHED", "RUNNING"]


def test_all_apps_of_a_pipeline_go_on_in_one_run(ledger: Ledger) -> None:
    given = {"file": "p.yaml", "parameters": {"a": "1"}, "folder": "/runs"}  # of a run: no defaults
    runs = Runs(view("run-1", parameters=given))
    enter(ledger, spec("p-1.a", pipeline="p-1"), spec("p-1.b", pipeline="p-1"), phase="lost")
    mender = FlowRunRecovery(ledger, runs, policy=NOW)
    for _ in range(3):
        mender.look()
    ((_, parameters, _),) = runs.begun.values()
    nothing = {"file": None, "id": None, "parameters": None}
    assert parameters == nothing | {"resume": "p-1", "folder": "/runs"}


def test_starts_that_lead_nowhere_come_to_an_end(ledger: Ledger) -> None:
    runs = Runs(view("run-1"))
    enter(ledger, spec("fit"), phase="lost")
    mender = FlowRunRecovery(ledger, runs, policy=replace(NOW, tries=3))
    for _ in range(6):
        mender.look()
        for name in [name for name in runs.known if name.startswith("new")]:
            runs.known[name] = replace(runs.known[name], state="CRASHED")  # before it has entered
    assert len(runs.begun) == 3
    record = ledger.state().apps["fit"]
    assert record.phase == "failed"
    assert "3 failed start attempts" in record.reason


def test_an_app_that_nobody_can_begin_is_asked_about_less_and_less(tmp_path: Path) -> None:
    clock = Clock()
    with Ledger.open(str(tmp_path / "ledger.db"), cluster="lab", clock=clock) as ledger:
        runs = Runs(view("run-1", deployment=""))
        mender = FlowRunRecovery(ledger, runs, policy=NOW)
        enter(ledger, spec("fit"), spec("by-hand", ""), phase="lost")
        mender.look()
        assert runs.state("run-1") == "CRASHED"
        before = runs.asked
        for _ in range(180):  # a quarter of an hour
            clock.ahead += LOOK
            mender.look()
        assert runs.asked - before <= 2 * (7 + 900 / 300)
        assert not runs.begun
        # it comes back by a deployment and is lost again
        runs.known["run-2"] = view("run-2", deployment="d-2")
        enter(ledger, spec("fit", "run-2"), phase="lost")
        mender.look()
        mender.look()
        assert [deployment for deployment, _, _ in runs.begun.values()] == ["d-2"]
        assert runs.state("run-2") == "CRASHED"


def test_while_prefect_is_away_nothing_is_written_and_nothing_forgotten(ledger: Ledger) -> None:
    runs = Runs(view("run-1"))
    enter(ledger, spec("fit"), phase="lost")
    mender = FlowRunRecovery(ledger, runs, policy=LATER)
    runs.away = True
    before = ledger.state().number
    with pytest.raises(InfraError):
        mender.look()
    assert ledger.state().number == before
    runs.away = False
    mender.look()
    assert runs.state("run-1") == "CRASHED"
    assert len(runs.begun) == 1


def test_a_run_that_prefect_has_forgotten_goes_on_by_the_deployment_that_the_app_named(
    ledger: Ledger, tmp_path: Path
) -> None:
    from ebbflow.tasks.training.leased.spec import training_spec
    from ebbflow.tasks.training.request import TrainingRequest

    (tmp_path / "fit.py").write_text("")
    request = TrainingRequest(str(tmp_path / "fit.py"), run_id="digits", runs_dir=str(tmp_path / "runs"))
    request.save()
    mine = training_spec(request, deployment="train/spot", flow_run="forgotten")
    other = replace(training_spec(request), id="started-by-hand")
    enter(ledger, mine, other, phase="lost")
    runs = Runs()
    FlowRunRecovery(ledger, runs, policy=NOW).look()
    ((deployment, parameters, _),) = runs.begun.values()
    assert deployment == "train/spot"
    assert parameters == {
        "script": request.script,
        "run_id": "digits",
        "runs_dir": request.runs_dir,
        "resume": True,
        "cluster": "lab",  # refused where no ledger is named
    }
    assert ledger.state().apps["started-by-hand"].phase == "lost"


def test_a_query_goes_on_under_its_own_id() -> None:
    lost = LostApp(AppSpec("q-1", "query"), None, 0.0, 1, 0.0, "")
    assert resumed(lost, view("r", parameters={"sql": "x", "app": ""})) == {"sql": "x", "app": "q-1"}
    assert tag_of(lost, "lab") == "ebbflow-resumes:lab:q-1"
    with pytest.raises(InfraError, match="has no resume command"):
        resumed(lost, None)


def test_a_query_whose_run_prefect_has_forgotten_goes_on_as_it_was_asked(tmp_path: Path) -> None:
    from ebbflow.tasks.query.app_requests import AppFolder, query_spec
    from ebbflow.tasks.query.request import QueryRequest

    store, out = str(tmp_path / "store"), str(tmp_path / "rows.parquet")
    request = QueryRequest(
        "SELECT 1", tables="shop", engine="duckdb", store=store, output=out, planner="volcano"
    )
    AppFolder(request.store_place, "q-1").keep(request)
    spec = query_spec(request, "q-1")
    given = resumed(LostApp(spec, Resume.of(spec), 0.0, 1, 0.0, ""), None, "lab")
    asked = {"sql": "SELECT 1", "tables": "shop", "engine": "duckdb", "store": store, "output": out}
    assert given.items() >= (asked | {"planner": "volcano", "app": "q-1", "cluster": "lab"}).items()
