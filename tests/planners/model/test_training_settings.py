"""When processes of a training may come and go while the others train on, as far as settings tell."""

import pytest

from ebbflow.planners.model.trainings import RunSettings


def test_processes_come_and_go_where_nothing_stands_against_it() -> None:
    assert RunSettings() == RunSettings(recovery="auto")
    assert RunSettings(recovery="auto").in_place
    assert RunSettings(recovery="in-place").in_place
    assert RunSettings(recovery="auto").restarts == ""
    assert not RunSettings(recovery="auto", sync="service").in_place  # it has a way of its own


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        (RunSettings(recovery="restart"), "asked for"),
        (RunSettings(recovery="auto", own_checkpoints=True), "checkpoints of its own"),
        (RunSettings(recovery="auto", preflight_steps=3), "preflight"),
        (RunSettings(recovery="auto", communication="planned"), "communication is planned"),
        (RunSettings(recovery="in-place", partial_checkpoint_interval=8), "running checkpoints"),
    ],
)
def test_else_a_change_of_nodes_is_a_new_generation(settings: RunSettings, reason: str) -> None:
    assert reason in settings.restarts
    assert not settings.in_place
