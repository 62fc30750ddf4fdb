"""Which apps are lost, what starts them again, and when that is worth a try."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from ebbflow.infra.clock import SystemClock
from ebbflow.infra.errors import TrainingError
from ebbflow.infra.ledger import Ledger
from ebbflow.planners.errors import OptionError
from ebbflow.planners.model.ledger import AppEntered, AppMoved, AppSpec, Decided
from ebbflow.tasks.apps.specs import Resume
from ebbflow.tasks.capacity.recovery import LostApp, RestartPolicy, lost_apps, request_of, resume_lost
from ebbflow.tasks.training.leased.spec import training_spec
from ebbflow.tasks.training.request import TrainingRequest

PATIENCE = RestartPolicy(first=10.0, start=100.0, losses=3)


class Hands(SystemClock):
    """A clock that a test moves."""

    def __init__(self) -> None:
        super().__init__()
        self.ahead = 0.0

    def now(self) -> float:
        return super().now() + self.ahead


@pytest.fixture
def clock() -> Hands:
    return Hands()


@pytest.fixture
def ledger(tmp_path: Path, clock: Hands) -> Iterator[Ledger]:
    with Ledger.open(str(tmp_path / "ledger.db"), clock=clock) as ledger:
        yield ledger


def lose(ledger: Ledger, spec: AppSpec, why: str = "silent") -> None:
    ledger.write([AppEntered(spec), AppMoved(spec.id, "running"), AppMoved(spec.id, "lost", why)])


def spec_of(tmp_path: Path) -> AppSpec:
    (tmp_path / "t.py").write_text("")
    request = TrainingRequest(str(tmp_path / "t.py"), run_id="t", runs_dir=str(tmp_path))
    request.save()
    return training_spec(request, deployment="train/gpu")


def test_a_lost_app_is_started_once_it_is_due_and_again_if_it_does_not_enter(
    ledger: Ledger, clock: Hands, tmp_path: Path
) -> None:
    ledger.write([AppEntered(AppSpec("fine", "query"))])
    lose(ledger, spec_of(tmp_path))
    started: list[LostApp] = []

    def start(app: LostApp) -> str:
        started.append(app)
        return "a deployment"

    (found,) = lost_apps(ledger, clock.now(), PATIENCE)
    assert (found.spec.id, found.losses, found.reason) == ("t", 1, "silent")
    assert found.resume == Resume("training", str(tmp_path), "t", "train/gpu")
    assert not resume_lost(ledger, start, clock, PATIENCE), "not yet"
    clock.ahead += 11.0
    assert not resume_lost(ledger, start, clock, PATIENCE, mine=lambda app: False)
    assert [app.spec.id for app in resume_lost(ledger, start, clock, PATIENCE)] == ["t"]
    assert not resume_lost(ledger, start, clock, PATIENCE), "it is on its way"
    (said,) = [e.change for e in ledger.events(app="t", kinds=[Decided])]
    assert isinstance(said, Decided)
    assert (said.kind, said.reason) == ("recovery", "restarting t: silent")
    clock.ahead += 101.0
    assert resume_lost(ledger, start, clock, PATIENCE), "it never entered"
    assert len(started) == 2


def test_an_app_that_is_lost_again_and_again_has_failed(ledger: Ledger, clock: Hands, tmp_path: Path) -> None:
    spec = spec_of(tmp_path)
    waits = []
    for _ in range(3):
        lose(ledger, spec, "its node is gone")
        (found,) = lost_apps(ledger, clock.now(), PATIENCE)
        waits.append(round(found.due - found.since))
    assert waits == [10, 20, 40]
    assert not resume_lost(ledger, lambda app: "never", clock, PATIENCE)
    record = ledger.state().apps["t"]
    assert (record.phase, record.reason) == (
        "failed", "lost 3 times within 3600 s; last reason: its node is gone",
    )  # fmt: skip
    assert not lost_apps(ledger, clock.now(), PATIENCE)


@pytest.mark.parametrize("losses", [1, 3])
def test_an_app_that_enters_while_it_is_looked_at_is_left_alone(
    ledger: Ledger, clock: Hands, tmp_path: Path, losses: int
) -> None:
    spec = spec_of(tmp_path)
    for _ in range(losses):
        lose(ledger, spec)
    clock.ahead += 50.0

    def mine(app: LostApp) -> bool:
        ledger.write([AppEntered(spec)])
        return True

    assert not resume_lost(ledger, lambda app: "never", clock, PATIENCE, mine)
    assert ledger.state().apps["t"].phase == "waiting"
    assert not ledger.events(app="t", kinds=[Decided])


def test_losses_of_long_ago_do_not_count(ledger: Ledger, clock: Hands, tmp_path: Path) -> None:
    spec = spec_of(tmp_path)
    for _ in range(2):
        lose(ledger, spec)
        clock.ahead += 4000.0
    lose(ledger, spec)
    (found,) = lost_apps(ledger, clock.now(), PATIENCE)
    assert (found.losses, found.hopeless) == (1, "")


def test_an_app_that_cannot_be_started_is_told(ledger: Ledger, clock: Hands, tmp_path: Path) -> None:
    lose(ledger, spec_of(tmp_path))
    clock.ahead += 20.0

    def start(app: LostApp) -> str:
        raise TrainingError("no such deployment")

    assert resume_lost(ledger, start, clock, PATIENCE)
    last = ledger.events(app="t", kinds=[Decided])[-1].change
    assert isinstance(last, Decided)
    assert "could not be restarted: no such deployment" in last.reason
    lose(ledger, AppSpec("odd", "training", resume={"kind": "ship", "folder": "/x", "id": "odd"}))
    resume_lost(ledger, start, clock, PATIENCE)
    assert ledger.state().apps["odd"].phase == "failed"
    assert "resume must name a kind" in ledger.state().apps["odd"].reason


def test_what_is_recorded_is_found(tmp_path: Path) -> None:
    spec = spec_of(tmp_path)
    resume = Resume.of(spec)
    assert resume is not None
    found = request_of(resume)
    assert isinstance(found, TrainingRequest)
    assert found.run_id == "t"
    assert Resume.of(AppSpec("x", "query")) is None
    with pytest.raises(TrainingError, match="no run 'other'"):
        request_of(resume._replace(id="other"))
    with pytest.raises(OptionError):
        Resume.of(AppSpec("x", "query", resume={"kind": "query", "folder": 3, "id": "x"}))


@pytest.mark.parametrize("options", [{"first": -1.0}, {"losses": 0}, {"window": float("inf")}])
def test_patience_is_checked(options: dict[str, float]) -> None:
    with pytest.raises(OptionError, match="must be >="):
        RestartPolicy(**options)  # type: ignore[arg-type]
