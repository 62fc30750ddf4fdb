"""Stages that are to start and wait, since others have ended while plans were made."""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import Mock

from ebbflow.infra.errors import DamagedInputError
from ebbflow.planners.model import Share
from ebbflow.planners.query.plan.qep import QueryExecutionPlan, Stage
from ebbflow.planners.query.plan.state import StageOutput
from ebbflow.tasks.query.driver import Driver
from ebbflow.tasks.query.listening import CapacityChanged, Inbox, StageOutcome
from tests.planners.query.replanning_cases import plan, stage
from tests.planners.query.running.test_session import Drawn, seen, session


class Hands(Drawn):
    """A driver whose stages are started only; its planner is this one, and while that makes plans, all of
    ``meanwhile`` happens."""

    def __init__(self, *stages: Stage) -> None:
        super().__init__(plan("q", *stages))
        self.inbox: Inbox = Inbox()
        self.begun: list[Stage] = []
        self.now = 0.0
        self.meanwhile: list[object] = []
        work = SimpleNamespace(
            inbox=self.inbox,
            engine=SimpleNamespace(name="duckdb"),
            problems=list,
            resize=lambda given: None,
            measured=lambda run, outcome, cold: None,
            lost=self.lost,
            stop=lambda run: None,
        )
        background = SimpleNamespace(submit=lambda one, work: self.begun.append(one))
        clock = SimpleNamespace(now=lambda: self.now)
        self.session = session(self, cores=4)
        self.driver = Driver(self.session, *cast(Any, (work, Mock(), background, clock)))
        self.driver._act(self.session.begin({}, self.now))

    def candidates(
        self,
        share: Share,
        actuals: Mapping[str, StageOutput] | None = None,
        also: Iterable[str] = (),
        contrasts: bool = True,
    ) -> tuple[QueryExecutionPlan, ...]:
        for event in self.meanwhile:
            self.inbox.put(event)
        self.meanwhile = []
        return super().candidates(share, actuals, also, contrasts)

    @property
    def names(self) -> list[str]:
        return [one.output_fp for one in self.begun]

    def lost(self, run: Any, error: Exception, *, anew: bool = False) -> list[Any]:
        assert isinstance(error, DamagedInputError)
        return [c for c in run.inputs if c.fingerprint in error.fingerprints]

    def ended(self, fp: str, rows: int = 1, error: Exception | None = None) -> StageOutcome:
        """Return that the run of a stage that was begun last has ended."""
        run = self.driver._runs[self.driver._current[fp]]
        made = cast(Any, SimpleNamespace(fingerprint=fp, rows=rows, bytes=rows))
        return StageOutcome(run.stage, run.job_id, None if error else made, error=error)

    def tell(self, *events: object) -> None:
        for event in events:
            self.driver._handle(event)

    def hear(self, count: int) -> None:
        """Let the driver handle what it has taken from its inbox."""
        for _ in range(count):
            self.driver._handle(self.driver._next())


def test_a_stage_that_waits_while_its_input_is_lost_starts_once_that_is_there_again() -> None:
    hands = Hands(
        *(stage(fp) for fp in ("X", "E", "O")),
        stage("XS", ("X",)),
        stage("XE", ("X", "E")),
        stage("XSEO", ("XS", "XE", "O")),
    )
    hands.tell(hands.ended("X"))
    assert hands.names == ["X", "E", "O", "XS"]
    hands.meanwhile = [hands.ended("XS", error=DamagedInputError("X", ["X"])), hands.ended("O")]
    hands.tell(hands.ended("E", rows=1000))  # so that plans are made
    assert hands.names[4:] == [], "XE waits"
    hands.hear(2)
    assert hands.names[4:] == ["X"]
    hands.tell(hands.ended("X"))
    assert sorted(hands.names[5:]) == ["XE", "XS"]
    hands.tell(hands.ended("XE"), hands.ended("XS"))
    hands.tell(hands.ended("XSEO"))
    assert hands.driver.result is not None
    assert hands.names[7:] == ["XSEO"]


def waiting(narrow: Stage) -> Hands:
    """Return a query of which ``narrow`` waits, on capacity that changes next and on the output of another stage."""
    hands = Hands(stage("E"), stage("O"), narrow, stage("FO", ("F", "O")))
    hands.meanwhile = [hands.ended("O")]
    hands.tell(hands.ended("E", rows=1000))
    assert hands.names == ["E", "O"]
    return hands


def test_a_stage_that_has_waited_starts_in_the_form_that_is_planned_by_then() -> None:
    narrow = replace(stage("F", ("E",)), tables=("T",))
    hands = waiting(narrow)
    wide = replace(narrow, tasks=8, duration=0.5, physical_key="wide")
    hands.plans = (plan("q", *(wide if one is narrow else one for one in hands.session.plan.stages)),)
    hands.tell(CapacityChanged(seen(8), "arrived"))
    assert hands.names == ["E", "O"]
    hands.hear(1)
    assert hands.begun[2:] == [wide]


def test_a_stage_that_has_waited_starts_only_once_there_are_cores() -> None:
    hands = waiting(replace(stage("F", ("E",)), tables=("T",)))
    hands.tell(CapacityChanged(seen(0), "left"))
    hands.hear(1)
    hands.tell(CapacityChanged(seen(0, 2), "none"))
    assert hands.names == ["E", "O"]
    hands.tell(CapacityChanged(seen(2, 3), "arrived"))
    assert hands.names == ["E", "O", "F"]
    assert all(run.cores == 2 for run in hands.driver._runs.values())
    hands.tell(hands.ended("F"))
    hands.tell(hands.ended("FO"))
    assert hands.driver.result is not None


def test_a_stage_that_waits_has_not_worked_when_capacity_changes() -> None:
    hands = waiting(replace(stage("F", ("E",), duration=9.0), tables=("T",)))
    hands.now = 5.0
    hands.tell(CapacityChanged(seen(8), "arrived"))
    running = hands.session.execution.state(5.0).running["F"]
    assert (running.started, running.task_seconds_spent) == (5.0, 0.0)
    assert hands.session.execution.expected(5.0).estimate.seconds == 10.0
