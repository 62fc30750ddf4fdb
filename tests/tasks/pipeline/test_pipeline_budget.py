"""A pipeline's budget: each of its apps says it, and the loop's guard holds all of them together to it."""

import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pipelines import content, read

from ebbflow.infra.clock import SystemClock
from ebbflow.infra.errors import RunLockedError
from ebbflow.planners.model.ledger import Decided
from ebbflow.tasks.pipeline.carry import Carrier
from ebbflow.tasks.pipeline.coordinator import Attempt
from ebbflow.tasks.pipeline.record import RunFolder
from ebbflow.tasks.pipeline.site import Site
from tests.tasks.capacity.loopcases import World, node, settings

BUDGET = 2.0


@pytest.mark.parametrize(
    ("save", "graces"), [(15.0, [(30.0, 15.0), (15.0, None)]), (None, [(30.0, None)] * 2)]
)
def test_what_a_cancelled_run_has_to_save_in_holds_for_its_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, save: float | None, graces: list[Any]
) -> None:
    pipeline = read(content(tmp_path), tmp_path)
    begun: list[Any] = []

    def begin(request: Any, *_: Any, **given: Any) -> None:
        begun.append((request.termination_grace, given.get("save")))
        raise RunLockedError("another runs it")

    monkeypatch.setattr("ebbflow.tasks.training.leased.app.run_training_app", begin)
    monkeypatch.setattr("ebbflow.tasks.tuning.app.run_tuning_app", begin)
    site = Site(None, "local", pools=lambda *_: None)  # type: ignore[arg-type,return-value]
    carrier = Carrier(site, pipeline, RunFolder(tmp_path, "one"), SystemClock(), save=save)
    for name in ("fit", "tune"):
        attempt = Attempt(pipeline.steps[name], f"one.{name}", 1, lambda text: text, None, threading.Event())
        assert carrier(attempt).state == "lost"
    assert begun == graces


def test_all_apps_of_a_pipeline_together_spend_no_more_than_its_budget(tmp_path: Path) -> None:
    plain = content(tmp_path) | {"budget": BUDGET}
    plain["trainings"]["other"] = {"team": "sales", "script": "fit.py"}
    pipeline = read(plain, tmp_path)
    there = [replace(node(f"n{number}", 1), price=120.0) for number in range(2)]
    with World(tmp_path, there) as world:  # $2 a minute for a GPU
        carrier = Carrier(
            Site(world.ledger, "local"), pipeline, RunFolder(tmp_path / "runs", "one"), world.clock
        )
        world.begin(settings=settings(lease_s=20.0, termination_grace_s=5.0))
        for name in ("fit", "other"):
            attempt = Attempt(pipeline.steps[name], f"one.{name}", 1, str, None, threading.Event())
            fields = carrier._fields(attempt)
            assert (fields["pipeline"], fields["pipeline_budget"]) == ("one", BUDGET)
            world.app(attempt.app, 1, more=fields)
        world.app("stranger", 1)
        world.steps(80)
        state = world.ledger.state()
        spent = sum(state.apps[f"one.{name}"].dollars for name in ("fit", "other"))
        assert 0.7 * BUDGET < spent <= BUDGET
        assert {lease.app for lease in state.leases.values()} == {"stranger"}, "who has money goes on"
        refused = [
            event.change
            for event in world.ledger.events(kinds=[Decided])
            if isinstance(event.change, Decided) and event.change.kind == "guard"
        ]
        assert {one.app for one in refused} == {"one.fit", "one.other"}
        assert all("the pipeline one's budget of $2.00 is exhausted" in one.reason for one in refused)
        assert world.double_bookings() == []
