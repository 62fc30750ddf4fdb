"""Queries whose store has nodes' memory before it: right answers whatever is killed, and what earlier runs left."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Literal

import pytest

from ebbflow.infra.memory.registry import DIRECTORY, MemoryRegistry
from ebbflow.planners.errors import OptionError
from ebbflow.planners.query.plan.qep import Stage
from ebbflow.tasks.memory import tier
from ebbflow.tasks.query.listening import NullQueryListener
from ebbflow.tasks.query.report import StageReport
from ebbflow.tasks.query.request import QueryRequest
from ebbflow.tasks.query.run import PlainOrchestrator, execute
from tests.infra.memory.lenders import Lender, until
from tests.query_process import process, until_a_stage_is_done
from tests.tasks.driving import FOUR_TABLES

pytestmark = [pytest.mark.processes, pytest.mark.timeout(300)]


class _Follower(NullQueryListener):
    """Keeps notes, and does something once at the end of the first stage."""

    def __init__(self, once: Callable[[], None] = lambda: None) -> None:
        self.notes: list[str] = []
        self._once: Callable[[], None] | None = once

    def note(self, text: str) -> None:
        self.notes.append(text)

    def stage_ended(self, stage: Stage, report: StageReport) -> None:
        once, self._once = self._once, None
        if once is not None:
            once()

    def of_tier(self) -> list[str]:
        return [note for note in self.notes if note.startswith("memory tier")]


@pytest.fixture(name="lenders")
def _lenders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Lender]]:
    monkeypatch.setenv(DIRECTORY, str(tmp_path / "memory"))
    registry = MemoryRegistry()
    made = [Lender(registry, f"node-{n}") for n in range(2)]
    yield made
    for one in made:
        one.close()


def _request(tpch: str, tmp_path: Path, durable: Literal["before-commit", "behind"]) -> QueryRequest:
    return QueryRequest(
        FOUR_TABLES,
        tables=tpch,
        engine="duckdb",
        materialize="every-join",
        store=f"memory+{tmp_path}/store",
        durable=durable,
        memory_tier="always",
        verify=True,
    )


@pytest.mark.parametrize("durable", ["before-commit", "behind"])
def test_a_daemon_that_is_killed_in_the_middle_costs_no_answer(
    durable: Literal["before-commit", "behind"], tpch: str, tmp_path: Path, lenders: list[Lender]
) -> None:
    def kill() -> None:
        (opened,) = tier._open.values()
        assert opened.session is not None
        for one in lenders:
            one.kill()
        until(lambda: not opened.session.peers)

    follower = _Follower(kill)
    outcome = execute(_request(tpch, tmp_path, durable), PlainOrchestrator(follower))
    assert outcome.report.verified is True, outcome.report.verification
    assert "on: asked for, with 2 peers" in follower.of_tier()[0]
    assert "2 peers lost" in follower.of_tier()[1]
    assert set(follower.of_tier()) <= set(outcome.report.problems), "the page has them"
    plan = outcome.report.first_plan
    assert plan is not None
    assert "kept in peers' memory (" in " ".join(plan.notes), "it was planned for what was measured"
    after = [one for one in outcome.report.decisions if one.trigger == "stage outputs are kept in the store"]
    assert len(after) == 1
    assert after[0].estimates, "plans were weighed for the store"
    again = execute(_request(tpch, tmp_path, durable), PlainOrchestrator(follower))
    assert {stage.status for stage in again.report.stages} == {"reused"}, "the store behind has everything"
    assert "off: " in follower.of_tier()[2]


@pytest.mark.parametrize("durable", ["before-commit", "behind"])
def test_a_run_resumes_after_its_driver_was_killed(
    durable: Literal["before-commit", "behind"], tpch: str, tmp_path: Path, lenders: list[Lender]
) -> None:
    request = _request(tpch, tmp_path, durable)
    child = process(request)
    until_a_stage_is_done(replace(request, store=f"{tmp_path}/store"), child)
    child.kill()
    child.communicate(timeout=150)
    follower = _Follower()
    report = execute(request, PlainOrchestrator(follower)).report
    assert report.verified is True, report.verification
    if durable == "before-commit":
        assert "reused" in {stage.status for stage in report.stages}


def test_where_peers_are_not_faster_the_store_is_used_alone(
    tpch: str, tmp_path: Path, lenders: list[Lender]
) -> None:
    follower = _Follower()
    request = replace(_request(tpch, tmp_path, "before-commit"), memory_tier="auto")
    assert execute(request, PlainOrchestrator(follower)).report.verified is True
    said = follower.of_tier()[0]
    assert "a request of 1 MiB takes" in said, "measured, whatever came out"


def test_spark_is_told_to_use_the_store_behind(tmp_path: Path) -> None:
    with pytest.raises(
        OptionError, match="needs engine duckdb, as Spark's executors do not read nodes' memory"
    ):
        QueryRequest(
            "SELECT 1 AS x FROM t", tables=str(tmp_path), engine="spark", store=f"memory+{tmp_path}/s"
        )
