"""The commit of a plan among real processes: the coordinator dies in each phase, messages are lost or late."""

import pytest

from tests.infra.communication.commit_faults import SCHEDULES
from tests.infra.training.worlds import run_module

pytestmark = pytest.mark.processes

LIVE = ("coordinator cut off at: set decision/1", "lost: a vote", "late: the decision on one rank")
KILLED = "coordinator killed at: get vote/1"
REST = [name for name in SCHEDULES if name not in (*LIVE, KILLED)]


def run(*names: str) -> None:
    assert run_module("tests.infra.communication.commit_faults", *names, timeout=300.0) == "done\n"


def test_lost_and_late_messages_of_a_commit_leave_all_ranks_on_one_version() -> None:
    assert len(SCHEDULES) == 20
    run(*LIVE)


def test_ranks_that_lose_the_coordinator_begin_again_without_a_plan() -> None:
    run(KILLED)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, len(REST), 3))
def test_all_other_faults_of_a_commit_do_so_too(first: int) -> None:
    run(*REST[first : first + 3])
