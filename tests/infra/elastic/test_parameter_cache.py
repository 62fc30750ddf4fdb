"""Cached parameters and their tags; the update log."""

from typing import Any

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from ebbflow.infra.elastic.wire.cache import ParameterCache, UpdateLog


def add(_: Any, first: Any, second: Any) -> Any:
    return first + second


def test_tag_five_serves_four_and_five() -> None:
    cache = ParameterCache()
    cache.store("k", 1.0, 5)
    assert cache.missing(["k"], 4) == []
    assert cache.missing(["k"], 5) == []
    assert cache.missing(["k"], 6) == ["k"]
    cache.store("k", 2.0, 6)
    assert (cache.value("k"), cache.tag("k")) == (2.0, 6)


class Replies(RuleBasedStateMachine):
    """A server applies increments, answers in order, and its answers arrive in any order.

    Of a key the n-th increment makes the value n: what a reader sees says how many it has missed.
    """

    def __init__(self) -> None:
        super().__init__()
        self.cache = ParameterCache()
        self.applied = 0  # increments at the server, all of tasks that are complete
        self.version = 0
        self.known_at: dict[int, int] = {0: 0}  # by version: increments that a task of it may rely on
        self.tag = -1

    replies = Bundle("replies")

    @rule()
    def complete(self) -> None:
        """One more task has finished: its increment is applied, the driver is told, tasks get a new version."""
        self.applied += 1
        self.version += 1
        self.known_at[self.version] = self.applied

    @rule(target=replies, back=st.integers(0, 5))
    def ask(self, back: int) -> tuple[int, int]:
        return self.applied, max(0, self.version - back)

    @rule(reply=consumes(replies))
    def arrive(self, reply: tuple[int, int]) -> None:
        self.cache.store("k", np.array([reply[0]]), reply[1])

    @rule(back=st.integers(0, 5))
    def read(self, back: int) -> None:
        version = max(0, self.version - back)
        if not self.cache.missing(["k"], version):
            assert self.cache.value("k")[0] >= self.known_at[version]

    @invariant()
    def tags_never_decrease(self) -> None:
        tag = self.cache.tag("k")
        if tag is not None:
            assert tag >= self.tag
            self.tag = tag


TestReplies = Replies.TestCase


def test_cached_arrays_cannot_be_changed_by_mistake() -> None:
    cache = ParameterCache()
    cache.store("k", np.zeros(2), 0)
    with pytest.raises(ValueError, match="read-only"):
        cache.value("k")[0] = 1


def test_own_updates_stay_visible_once_sent() -> None:
    cache, log = ParameterCache(), UpdateLog(add, isolated=False)
    cache.store("k", np.ones(2), 3)
    log.add("k", np.ones(2), 7)
    log.add("k", np.ones(2), 8)
    log.add("other", 5, 8)
    increments = log.take()
    assert not log
    assert sorted(increments, key=str) == [("k", 0), ("other", 0)]
    cache.fold(increments, add)
    assert cache.value("k").tolist() == [3, 3]
    assert cache.tag("k") == 3


def test_isolated_updates_keep_their_version() -> None:
    log = UpdateLog(add, isolated=True)
    for version in (1, 1, 2):
        log.add("k", 1, version)
    assert log.take() == {("k", 1): 2, ("k", 2): 1}
