"""A study in a database that several processes use: who may write into it, who may join, and outages."""

import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from inspect import signature
from pathlib import Path
from typing import Any

import optuna
import pytest
from sqlalchemy import text

from ebbflow.infra.clock import SystemClock
from ebbflow.infra.errors import LedgerUnavailableError, TrainingError
from ebbflow.planners.errors import OptionError
from ebbflow.tasks.tuning import study
from ebbflow.tasks.tuning.joining import join_tuning
from ebbflow.tasks.tuning.request import Parameter, TuningRequest
from ebbflow.tasks.tuning.study import REQUEST, Study

SPACE = (Parameter("lr", "log", 0.001, 1.0),)


class QuickClock(SystemClock):
    """Waits pass at once."""

    def __init__(self) -> None:
        super().__init__()
        self.time = 0.0

    def now(self) -> float:
        return self.time

    def wait(self, event: threading.Event, timeout: float) -> bool:
        self.time += timeout
        return event.is_set()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a directory with a script; its database is made once."""
    found = tmp_path_factory.mktemp("shared")
    (found / "fit.py").write_text("")
    return found


@pytest.fixture
def request_(folder: Path, request: pytest.FixtureRequest) -> TuningRequest:
    name = f"s{abs(hash(request.node.nodeid)):x}"
    return TuningRequest(
        str(folder / "fit.py"), SPACE, "score", run_id=name, runs_dir=str(folder / "runs"), trials=3, epochs=9,
        study=str(folder / "study.db"), heartbeat_timeout=60.0, sampler="random",
    )  # fmt: skip


@pytest.fixture
def studies(request_: TuningRequest) -> Iterator[Callable[..., Study]]:
    """Return a function that opens the study as one more process does."""
    made: list[Study] = []

    def make(**options: Any) -> Study:
        made.append(Study(request_, **options))
        return made[-1]

    yield make
    for one in made:
        one.close()


def give(trial: int, to: Study) -> None:
    """Make a lease another process's, as if its holder had stood still."""
    leases: Any = to._leases
    leases._database.transact(
        "move a lease",
        lambda c: c.execute(
            text("UPDATE tuning_leases SET holder = :holder WHERE study = :study AND trial = :trial"),
            leases._own(trial),
        ),
    )


@pytest.mark.parametrize("leased", [False, True])
def test_what_another_process_has_ended_is_neither_reported_on_nor_ended_again(
    studies: Callable[..., Study], request_: TuningRequest, leased: bool
) -> None:
    still, other = studies(begins=True), studies()
    taken = still.take()
    assert taken is not None
    trial = taken[0]
    assert still.arguments(trial) is not None
    assert not still.report(trial, 1, 0.1)
    if not leased:
        give(trial.number, other)
    optuna.load_study(study_name=request_.run_id, storage=request_.study).tell(trial.number, 0.5)
    assert not still.report(trial, 2, 0.2)
    assert not still.tell(trial, 0.2, "complete")
    found = other.trials()[0]
    assert (found.value, found.intermediate_values) == (0.5, {1: 0.1})


def test_nothing_is_written_into_a_trial_that_another_process_runs(studies: Callable[..., Study]) -> None:
    still, other = studies(begins=True), studies()
    taken = still.take()
    assert taken is not None
    still.arguments(taken[0])
    give(0, other)
    assert not still.report(taken[0], 7, 0.2)
    assert other.trials()[0].intermediate_values == {}


def test_a_trial_that_ends_elsewhere_before_it_has_parameters_is_not_begun(
    studies: Callable[..., Study], request_: TuningRequest
) -> None:
    taken = (still := studies(begins=True)).take()
    assert taken is not None
    optuna.load_study(study_name=request_.run_id, storage=request_.study).tell(0, 0.5)
    assert still.arguments(taken[0]) is None


@pytest.mark.parametrize(
    "changes",
    [
        {"maximize": False}, {"trials": 9}, {"pruner": "none"}, {"epochs": 8}, {"reduction_factor": 4},
        {"arguments": ("--x",)}, {"heartbeat_timeout": 5.0},
    ],
)  # fmt: skip
def test_what_is_the_same_for_all_is_not_changed_by_one(
    studies: Callable[..., Study], request_: TuningRequest, changes: dict[str, Any]
) -> None:
    studies(begins=True)
    (name,) = changes
    rule = f"{name} is the same in all processes of tuning run"
    with pytest.raises(OptionError, match=rule):
        join_tuning(request_.study, request_.run_id, changes)
    with pytest.raises(OptionError, match=rule):
        Study(replace(request_, **changes))
    joined = join_tuning(request_.study, request_.run_id, {"nodes": "local:2x2", "max_gpus": 2, "trials": 3})
    with closing(Study(joined)):
        pass


def test_a_study_of_another_cluster_script_or_program_is_refused(
    studies: Callable[..., Study], request_: TuningRequest, tmp_path: Path
) -> None:
    studies(cluster="east")
    studies(cluster="east")
    studies()  # who joins from outside
    with pytest.raises(OptionError, match="is not of cluster 'west', but of east: choose another run ID"):
        studies(cluster="west")
    other = tmp_path / "other.py"
    other.write_text("pass")
    with pytest.raises(OptionError, match=r"other\.py is another script"):
        Study(replace(request_, script=str(other)))
    foreign = optuna.create_study(study_name=f"{request_.run_id}-foreign", storage=request_.study)
    foreign.tell(foreign.ask(), 0.5)
    with pytest.raises(TrainingError, match="is none of Ebbflow's: choose another run ID"):
        Study(replace(request_, run_id=foreign.study_name))
    assert REQUEST not in foreign.user_attrs


def test_a_study_whose_process_died_as_it_made_it_can_be_begun(
    studies: Callable[..., Study], request_: TuningRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(study, "_BEGINNING", 0.0)
    made = optuna.create_study(study_name=request_.run_id, storage=request_.study, direction="maximize")
    studies(begins=True)
    assert made.user_attrs[REQUEST]["trials"] == 3
    assert join_tuning(request_.study, request_.run_id).trials == 3
    with pytest.raises(TrainingError, match="already: join it"):
        studies(begins=True)


def test_a_trial_that_cannot_be_begun_goes_back(
    studies: Callable[..., Study], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = studies(begins=True), studies()

    def away(_: Any) -> None:
        raise LedgerUnavailableError("away")

    monkeypatch.setattr(one, "_claimed", away)
    with pytest.raises(LedgerUnavailableError):
        one.take()
    taken = other.take()
    assert taken is not None
    assert taken[0].number == 0


def test_trials_are_left_out_that_run_here_or_were_left_to_others(studies: Callable[..., Study]) -> None:
    one = studies(begins=True)
    first = one.take()
    assert first is not None
    one.release(first[0])
    second = one.take({0})
    assert second is not None
    assert second[0].number == 1
    one.release(second[0], 1000.0)
    again = one.take()
    assert again is not None
    assert again[0].number == 0
    third = one.take()
    assert third is not None
    assert third[0].number == 2


def test_an_outage_is_waited_for_until_the_run_is_stopped_or_leaves(request_: TuningRequest) -> None:
    clock, stop, looks = QuickClock(), threading.Event(), []
    local = replace(request_, study="")
    one = Study(local, clock, stop=stop)

    def away() -> None:
        raise LedgerUnavailableError("away")

    def look() -> None:
        looks.append(clock.now())
        if len(looks) == 5:
            stop.set()

    one.meanwhile = look
    with pytest.raises(LedgerUnavailableError):
        one._do("ask", away)
    assert len(looks) == 5
    assert clock.now() < study.PATIENCE / 10
    stop.clear()
    one.hurry()
    with pytest.raises(LedgerUnavailableError):
        one._do("ask", away)
    assert len(looks) == 5, "it leaves"


def test_a_study_that_is_closed_has_no_connections(studies: Callable[..., Study]) -> None:
    one = studies(begins=True)
    one.begun()
    engine = one._storage._backend.engine
    assert engine.pool.checkedin()
    one.close()
    assert not engine.pool.checkedin()


def test_a_flow_that_joins_may_be_given_what_is_so_anyway(
    studies: Callable[..., Study], request_: TuningRequest
) -> None:
    from ebbflow.flows.tuning.flow import _own_options, tune

    studies(begins=True)
    given = {name: one.default for name, one in signature(tune.fn).parameters.items()}
    same = {"space": {"lr": {"log": [0.001, 1.0]}}, "trials": 3, "max_gpus": 4, "study": request_.study}
    joined = join_tuning(request_.study, request_.run_id, _own_options(given | same))
    assert joined.max_gpus == 4
    with pytest.raises(OptionError, match=r"trials is the same in all processes of tuning run .*: 3; got 9"):
        join_tuning(request_.study, request_.run_id, _own_options(given | {"trials": 9}))
