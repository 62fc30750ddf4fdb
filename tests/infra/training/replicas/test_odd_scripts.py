"""Real trainings whose scripts do something by themselves: all restart where processes that come and go break it."""

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ebbflow.planners.model.trainings import RunSettings
from tests.infra.training.elastic_runs import Run

pytestmark = [pytest.mark.processes, pytest.mark.slow, pytest.mark.timeout(400)]

SCRIPT = Path(__file__).with_name("odd_script.py")


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Run]]:
    begun: list[Run] = []

    def make(kind: str, **settings: Any) -> Run:
        asked = RunSettings(adaptive=False, **settings)
        begun.append(
            Run(tmp_path, 2, asked, script=SCRIPT, arguments=(kind,), replace=False, stragglers=False)
        )
        begun[-1].until(lambda: begun[-1].step > 8, "steps")
        return begun[-1]

    yield make
    for one in begun:
        one.close()


def through(run: Run, rank: int, generation: int = 1) -> int:
    """Kill a process, add a node once the run has got to a generation, and return that which it has got to then."""
    os.kill(run.pid(rank), signal.SIGKILL)
    run.until(lambda: max(one["generation"] for one in run.steps) == generation, "generation")
    run.advance(4)
    placement = {"node-0": 1, "node-1": 1, "node-2": 1}
    run.trainer.resize(placement)
    run.until(lambda: run.trainer.status().placement == placement, "node that was added")
    run.until(lambda: len({one["pid"] for one in run.steps[-9:]}) == 3, "three that train")
    run.advance(4)
    generation = run.trainer.status().generation
    run.check_data(run.stop().step)
    return generation


@pytest.mark.parametrize("kind", ["plain", "compiled-before", "compiled-after"])
def test_others_train_on_where_nothing_stands_against_it(
    start: Callable[..., Run], kind: str, tmp_path: Path
) -> None:
    run = start(kind)
    assert through(run, 0) == 1, run.trainer.events()
    assert len(list(tmp_path.glob("first-*"))) == 1, "none of those that joined took itself for the first"
    assert run.kinds("members") == [{**run.kinds("members")[0], "fixed": "", "first": ""}]


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("before", "exchanges values among its processes before it prepares"),
        ("between", "exchanges values among its processes by itself"),
        ("group", "process groups of its own"),
        ("scheduler", "a scheduler of learning rates"),
    ],
)
def test_all_restart_where_a_script_would_not_bear_it(
    start: Callable[..., Run], kind: str, reason: str
) -> None:
    run = start(kind)
    assert through(run, 1, 2) == 3
    said = [*run.kinds("started"), *run.kinds("members")]
    assert any(reason in str(one["fixed"]) for one in said), said


@pytest.mark.parametrize(("rank", "generations"), [(0, 2), (1, 1)])
def test_a_first_process_that_knows_that_it_is_the_first_is_not_replaced_by_another(
    start: Callable[..., Run], rank: int, generations: int
) -> None:
    assert through(start("first"), rank, generations) == generations


def test_who_asks_for_it_gets_other_processes_whatever_the_script_does(start: Callable[..., Run]) -> None:
    assert through(start("first", recovery="in-place"), 0) == 1
