"""What a loop works on, opened from what was asked for."""

import re
from pathlib import Path

import pytest
from loopcases import FakeSource, node

from ebbflow.infra.errors import AwsError
from ebbflow.infra.ledger import Ledger
from ebbflow.planners.errors import OptionError
from ebbflow.planners.model.ledger import AppEntered, AppReport, AppSpec
from ebbflow.tasks.capacity.node_sources import (
    NODE_SOURCES,
    SOURCES,
    FirstLook,
    RateLimited,
    opened_loop,
    opened_nodes,
    services_of,
)
from ebbflow.tasks.capacity.request import CapacityRequest
from ebbflow.tasks.fleet.request import FleetRules
from tests.evaluation.renting.virtual_clock import VirtualClock


def test_a_source_begins_with_the_first_look_and_not_before() -> None:
    """Whoever waits for the lead must not read the queue of notices that the leading loop reads."""
    begun: list[int] = []
    source = FirstLook(FakeSource(node("n0")), lambda: begun.append(1))
    assert not begun
    assert [source.capacity().nodes[0].id for _ in range(2)] == ["n0", "n0"]
    assert len(begun) == 1


def test_a_beginning_that_fails_is_tried_again() -> None:
    left = [AwsError("another process reads the notices")]

    def begin() -> None:
        if left:
            raise left.pop()

    source = FirstLook(FakeSource(node("n0")), begin)
    with pytest.raises(AwsError):
        source.capacity()
    assert source.capacity().nodes


def test_what_is_done_seldom_may_fail() -> None:
    clock, done = VirtualClock(100.0), []

    def work() -> None:
        done.append(clock.now())
        raise AwsError("no answer")

    seldom = RateLimited(work, 60.0, clock)
    for _ in range(13):
        seldom()
        clock.sleep(10.0)
    assert done == [100.0, 160.0, 220.0]


def test_services_are_the_pools_that_an_app_says_it_has(tmp_path: Path) -> None:
    with Ledger.open(str(tmp_path / "ledger.db")) as ledger:
        ledger.write([AppEntered(AppSpec("a", "training"))])
        assert services_of(ledger, "a") == ()
        ledger.report("a", AppReport(1.0, pools=("b7c1", "d2")))
        ledger.report("b", AppReport(1.0, pools=("e3",)))
        assert services_of(ledger, "a") == ("b7c1", "d2")


@pytest.mark.parametrize("source", ["moon", "", "s3://bucket"])
def test_a_source_that_there_is_not_is_refused(source: str, tmp_path: Path) -> None:
    with Ledger.open(str(tmp_path / "ledger.db")) as ledger:
        opened = opened_nodes(CapacityRequest(source=source), ledger, ledger.clock)
        with pytest.raises(OptionError, match="source must be one of local"):
            opened.__enter__()


def test_wrong_limits_are_told_before_anything_is_opened(tmp_path: Path) -> None:
    limits = tmp_path / "limits.toml"
    limits.write_text("[loop]\nlease_duration = -1\n")
    opened = opened_loop(CapacityRequest(str(tmp_path / "ledger.db"), config=str(limits)))
    with pytest.raises(OptionError, match="lease_duration"):
        opened.__enter__()
    assert not (tmp_path / "ledger.db").exists()


def test_one_file_of_limits_serves_fleet_commands_and_the_loop() -> None:
    content = {
        "quotas": {"nodes": 3},
        "loop": {"lease_duration": 5},
        "teams": {"a": {"weight": 2}},
        "policy": {},
    }
    assert FleetRules.parse(content, "fleet.toml").limits.nodes == 3
    with pytest.raises(OptionError, match="lopp"):
        FleetRules.parse({"lopp": {}}, "fleet.toml")


def test_people_are_told_of_every_source() -> None:
    assert [re.split(r"[:\[]", written)[0] for written in SOURCES.split(", ")] == list(NODE_SOURCES)
