"""What the launcher knows of workers that all-reduce gradients, and come and go."""

from typing import Any

import pytest

from ebbflow.infra.training.launcher import service
from tests.infra.training.workforces import make_workforce, shown


def recovers(workforce: service.Workforce, name: str) -> bool:
    """Tell whether the others train on when a node's script raises an error."""
    return workforce.recovery(name, 1, 1, stopping=False, script_failed=True).in_place


def test_an_error_of_a_script_that_trained_is_not_one_of_a_process_that_joins() -> None:
    workforce = make_workforce("a", "b")
    workforce.follow("a", shown("X", 0))
    assert workforce.outside("a"), "the others repeat the step without it"
    assert not recovers(workforce, "a")
    workforce.leave("a", "it failed")
    workforce.take_in("a", "key", 1)
    assert recovers(workforce, "a"), "it has not trained since it was started again"


def test_starts_of_processes_count_anew_after_a_while_of_training(monkeypatch: pytest.MonkeyPatch) -> None:
    workforce = make_workforce("a", "b")
    assert workforce.may_start("new")
    for _ in range(2):
        workforce.leave("a", "it was killed")
        rank = workforce.take_in("a", "key", 1).start
    assert not workforce.may_start("a")
    workforce.follow("a", shown("R", rank))
    monkeypatch.setattr(service, "_SETTLED", 0.0)
    workforce.follow("a", shown("R", rank))
    assert not workforce.may_start("a"), "it has not joined yet"
    workforce.meeting.membership.enter(rank)
    workforce.meeting.membership._pass_boundary()
    workforce.follow("a", shown("R", rank))
    assert workforce.may_start("a")


class Ears:
    """A launcher's exchange by which some workers are heard and others not."""

    def __init__(self, *nodes: str) -> None:
        self.workforce = make_workforce(*nodes)
        self.exchange: Any = self.workforce.exchange
        self.hear(*range(len(nodes)))

    def hear(self, *ranks: int, after: float = 0.0) -> None:
        """Let so many seconds pass, after which these workers are heard."""
        self.exchange.listened += after
        for rank in ranks:
            self.workforce.meeting.hear(rank, self.exchange.listened)


@pytest.mark.parametrize("turn", [0.05, 1.5, 5.0])
def test_a_worker_is_silent_while_others_are_heard_however_seldom_it_is_looked_at(turn: float) -> None:
    ears = Ears("a", "b", "c")
    while not (found := ears.workforce.silent()):
        ears.hear(0, 2, after=turn)
        assert ears.exchange.listened < 20.0
    assert list(found) == ["b"]
    assert ears.exchange.listened > 10.0


def test_where_nobody_is_heard_nobody_is_ended() -> None:
    ears = Ears("a", "b", "c")
    ears.hear(1, after=0.1)
    for _ in range(600):
        ears.hear(after=0.1)
        assert not ears.workforce.silent(), "the launcher's own link may be cut"
    ears.hear(0, 2, after=0.1)
    assert list(ears.workforce.silent()) == ["b"]
